# SPDX-License-Identifier: Apache-2.0
"""Graphs of the whole model by torch.compile(fullgraph=True), in which a session has no place.

What a session does in a call depends on the step and on what was measured, so it is no part of a
graph: elsewhere torch.compile leaves it out. With fullgraph it may not, and ends the run instead.
There attention is traced as without a session, which makes it dense.
"""

from __future__ import annotations

import torch

_traced: set[str] = set()


def is_traced_whole() -> bool:
    """Whether torch.compile is tracing the code that asks, and may leave nothing of it out."""
    return torch.compiler.is_compiling() and _no_break_allowed()


def has_been_traced() -> bool:
    """Whether some model in this process has such a graph; who runs it again is not asked."""
    return bool(_traced)


# In a trace it runs as it is, and the trace takes the answer for a constant.
@torch.compiler.assume_constant_result
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
