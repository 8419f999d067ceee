# SPDX-License-Identifier: Apache-2.0
"""Hooks on one transformer of a pipeline: where a pass begins and ends, which block runs, and what
the pipeline calls the pass. Outside of a pass nothing of the model is replaced, so LoRA and
offloading may replace what they like."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...compiling import is_traced_whole, untraced
from ...sdpa import AttentionMode
from ...session.torch_pass import TorchPass
from ...torch_attention import TorchCall
from .layout import blocks_of, parts_of

if TYPE_CHECKING:
    from .handle import Handle


class StandIn:
    """Stand-in for the `forward` of a part of a model during one pass.

    torch runs no hook where an interrupt (Ctrl+C) or another BaseException ends a module's call,
    nor where any error ends one that it compiled. A `forward` of ours may have `with`. Offloading
    puts functions of its own there, too, and may take ours away with them: so one is made where a
    pass begins, over whatever is there, and removed at its end.
    """

    def __init__(self, part: nn.Module, around: Callable[[], AbstractContextManager[Any]]) -> None:
        """around: gives the context of a call."""
        functools.update_wrapper(self, part.forward, updated=())  # others ask for its signature
        self._own: Callable[..., Any] = part.forward
        self._part, self._around = part, around
        self._before = vars(part).get("forward")
        self._is_removed = False
        part.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_removed or is_traced_whole():
            return self._own(*args, **kwargs)
        with self._around():
            # torch.compile runs what breaks within `with` as it is, and traces what it calls.
            torch._dynamo.graph_break()
            return self._own(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """State of the stand-in of a copy of the model, which only hands on."""
        return vars(self) | {"_is_removed": True, "_around": None}

    def remove(self) -> None:
        """Gives the part back what it had. Under another function that was put over it meanwhile
        it stays, and only hands on."""
        self._is_removed = True
        if vars(self._part).get("forward") is not self:
            return
        if self._before is None:
            del self._part.forward
        else:
            self._part.forward = self._before


class TransformerHooks:
    """Hooks on one transformer, until they are removed."""

    def __init__(self, owner: Handle, transformer: nn.Module, which: int) -> None:
        """transformer: maybe in torch.compile's wrapper. which: its number in the pipeline."""
        self.owner, self.which = owner, which
        self.model: Any = getattr(transformer, "_orig_mod", transformer)
        self.blocks = len(blocks_of(self.model)) or None
        self.pass_name: str | None = None
        """Name that the pipeline has for the running pass, such as "cond"."""
        self._signature = inspect.signature(type(self.model).forward)
        self._named: Any = getattr(self.model, "cache_context", None)
        self._is_copy = False
        self._open: TorchPass | None = None
        self._thread: threading.Thread | None = None  # which runs the open pass
        self._block: int | None = None
        # Parts, not the whole: torch.compile(fullgraph=True) does not take a mode around it.
        self._parts = parts_of(self.model)
        self._stand_ins: list[StandIn] = []
        # Of the wrapper, where there is one: what is traced is the model inside.
        self._handles = [
            transformer.register_forward_pre_hook(self._begin, with_kwargs=True),
            transformer.register_forward_hook(self._end, always_call=True),
        ]
        if self._named is not None:
            self.model.cache_context = self._cache_context

    def __getstate__(self) -> dict[str, Any]:
        """State of the hooks on a copy of the model, of whose passes nobody is told."""
        return {"_is_copy": True, "pass_name": None, "_named": self._named}

    @untraced
    def are_busy(self) -> bool:
        """Whether a pass is open that another thread runs."""
        thread = self._thread
        if self._open is None or thread is None:
            return False
        return thread is not threading.current_thread() and thread.is_alive()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._close_pass()
        self.model.__dict__.pop("cache_context", None)

    @contextmanager
    def _cache_context(self, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Context of a pass, which listens to what the pipeline calls it."""
        before, self.pass_name = self.pass_name, name
        try:
            with self._named(name, *args, **kwargs):
                yield
        finally:
            self.pass_name = before

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self._is_copy or is_traced_whole()):
            self._open_pass(args, kwargs)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (self._is_copy or is_traced_whole() or self.are_busy()):
            self._close_pass()

    @untraced
    def _open_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(self.model, *args, **kwargs).arguments
        with self.owner.lock:  # another thread may disable it
            if not self.are_busy():
                self._close_pass()  # one that was interrupted between two blocks
            begun = self.owner.begin_pass(self, given)
            if begun is None:
                return
            self._open, self._thread = begun, threading.current_thread()
            self._stand_ins += [
                StandIn(part, functools.partial(self._running, block))
                for block, part in self._parts
            ]

    @untraced
    def _close_pass(self) -> None:
        with self.owner.lock:
            for stand_in in reversed(self._stand_ins):  # a block may be in the model twice
                stand_in.remove()
            self._stand_ins.clear()
            forward, self._open = self._open, None
            if forward is not None:
                self.owner.end_pass(forward)

    @contextmanager
    def _running(self, block: int | None) -> Iterator[None]:
        """Context of a block in an open pass."""
        if self.are_busy():
            yield
            return
        self._block = block
        try:
            with AttentionMode(self._serve):
                yield
        except BaseException:
            self._close_pass()  # the hook at its end does not run for each of them
            raise

    def _serve(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Result of a call of `scaled_dot_product_attention`; None for one that stays torch's."""
        return None if is_traced_whole() else self._attend(*args, **kwargs)

    @untraced
    def _attend(self, *args: Any, **kwargs: Any) -> Tensor | None:
        with self.owner.lock:
            if self._open is None:  # disabled while the block runs
                return None
            return self._open.attend_torch(self._block, TorchCall(*args, **kwargs))
