# SPDX-License-Identifier: Apache-2.0
"""Hooks on one transformer of a pipeline: where a pass begins and ends, which block runs, and what
the pipeline calls the pass. Nothing of the model is replaced, so LoRA and offloading may replace
what they like."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...common.untraced import untraced
from ...common.whole_graph import is_traced_whole
from ...sdpa import AttentionMode
from .forward import Forward
from .layout import blocks_of


class PassOwner(Protocol):
    """Owner of the hooks, who is told of each pass."""

    def begin_pass(self, hooks: TransformerHooks, given: Mapping[str, Any]) -> Forward | None:
        """Begins a pass; None for one that is left as it is. given: arguments by name."""
        ...

    def end_pass(self, forward: Forward) -> None: ...


class TransformerHooks:
    """Hooks on one transformer, until they are removed."""

    def __init__(self, owner: PassOwner, transformer: nn.Module, which: int) -> None:
        """transformer: maybe in torch.compile's wrapper. which: its number in the pipeline."""
        self.owner, self.which = owner, which
        self.model: Any = getattr(transformer, "_orig_mod", transformer)
        self.blocks = blocks_of(self.model)
        self.pass_name: str | None = None
        """Name that the pipeline has for the running pass, such as "cond"."""
        self._signature = inspect.signature(type(self.model).forward)
        self._open: list[Forward] = []
        self._block = 0
        self._modes: list[AttentionMode] = []
        # Of the wrapper, where there is one: what is traced is the model inside.
        self._handles: list[RemovableHandle] = [
            transformer.register_forward_pre_hook(self._begin, with_kwargs=True),
            transformer.register_forward_hook(self._end, always_call=True),
        ]
        # Blocks, not the whole: torch.compile(fullgraph=True) does not take a mode around it.
        for number, block in enumerate(self.blocks or [transformer]):
            self._handles += [
                block.register_forward_pre_hook(partial(self._enter, number)),
                block.register_forward_hook(self._leave, always_call=True),
            ]
        self._watch_names()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.model.__dict__.pop("cache_context", None)

    def _watch_names(self) -> None:
        """Listens to what the pipeline calls its passes."""
        named: Callable[..., Any] | None = getattr(self.model, "cache_context", None)
        if named is None:
            return

        @contextmanager
        def cache_context(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
            before, self.pass_name = self.pass_name, name
            try:
                with named(name, *args, **kwargs):
                    yield
            finally:
                self.pass_name = before

        self.model.cache_context = cache_context

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_traced_whole():
            self._open_pass(args, kwargs)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_traced_whole():
            self._close_pass()

    def _enter(self, number: int, block: nn.Module, args: Any) -> None:
        if not is_traced_whole():
            self._enter_block(number)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        if not is_traced_whole():
            self._leave_block()

    @untraced
    def _open_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(self.model, *args, **kwargs).arguments
        if (forward := self.owner.begin_pass(self, given)) is not None:
            self._open.append(forward)

    @untraced
    def _close_pass(self) -> None:
        if self._open:
            self.owner.end_pass(self._open.pop())

    @untraced
    def _enter_block(self, number: int) -> None:
        if self._open:
            self._block = number
            self._modes.append(AttentionMode(self._serve))
            self._modes[-1].__enter__()

    @untraced
    def _leave_block(self) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)

    def _serve(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Result of a call of `scaled_dot_product_attention`; None for one that stays torch's."""
        return None if is_traced_whole() else self._attend(*args, **kwargs)

    @untraced
    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._open[-1].attend_torch(self._block, *args, **kwargs)
