# SPDX-License-Identifier: Apache-2.0
"""Functions that torch.compile does not trace, graphs of the whole model, which leave nothing of it
out (fullgraph=True), and CUDA graphs.

What a session does in a call depends on the step and on what was measured, so it is no part of a
graph: elsewhere torch.compile leaves it out. With fullgraph it may not, and ends the run instead.
There attention is traced as without a session, which makes it dense.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Level of torch.func or torch.vmap that transforms the code that asks; None without one, and where
#: this version of torch does not tell.
transform_level: Callable[[], int | None] = getattr(
    getattr(torch._C, "_functorch", None), "maybe_current_level", lambda: None
)
#: Function that compiles the frames which this thread enters; None without: then a function needs
#: no `untraced`, which takes 4 us a call. True where this version of torch does not tell.
frame_compiler: Callable[[], object] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None),
    "get_eval_frame_callback",
    lambda: True,
)
_traced: set[str] = set()


def untraced(function: _Function) -> _Function:
    """Keeps torch.compile from tracing what reads Python state, which a trace would freeze."""
    return cast("_Function", torch.compiler.disable(function))


def constant_in_graphs(function: _Function) -> _Function:
    """Marks a function: a trace runs it as it is. Does what torch.compiler.assume_constant_result
    does, without its import of torch._dynamo (0.4 s)."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def as_constant(number: float) -> float:
    """Number as it is now, where a trace has a symbol for it: other values are traced anew."""
    if not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)


def keep_to_graphs(function: Callable[..., Any]) -> None:
    """Keeps torch.compile from compiling a function by itself, as it does where a graph has broken:
    a mode that is asked about many functions would be compiled for each. Inside a graph of its
    caller it is traced as before."""
    if torch.compiler.is_compiling():
        return
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not there until something is compiled
    skip_code = getattr(dynamo, "skip_code", None)
    if skip_code is not None:
        skip_code(function.__code__)


def is_traced_whole() -> bool:
    """Whether torch.compile is tracing the code that asks, and may leave nothing of it out."""
    return torch.compiler.is_compiling() and _no_break_allowed()


def has_been_traced() -> bool:
    """Whether a model of this process was traced whole. Later runs of its graph do not ask
    `is_traced_whole`."""
    return bool(_traced)


@constant_in_graphs
def _no_break_allowed() -> bool:
    """Whether the trace allows no break; False where this version of torch does not tell: then the
    trace ends in torch's own error."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        found = bool(InstructionTranslator.current_tx().one_graph)
    except (ImportError, AttributeError):
        return False
    if found:
        _traced.add("whole")
    return found


def being_recorded(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream: what recorded calls read must stay in
    place, and nobody can read a tensor. False for other devices, and while `torch.compile` traces,
    which fetches what is kept anew in every call."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return torch.cuda.is_current_stream_capturing()
