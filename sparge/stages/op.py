# SPDX-License-Identifier: Apache-2.0
"""Attention as one torch.library op: for torch.compile, tensors without values, modes that see
every operation, and devices without kernels, where the reference computes it.

A process may hold several copies of the library: an installed one and that of a node pack. Each has
an op of its own, because copies differ in version, and in the classes of what they raise.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ..errors import Unsupported
from ..kernels import capabilities
from . import on_reference
from .kind import CallRules, CallTensors, key_of, result_size
from .prepared import find, prepare

#: Namespace of the op: "sparge" for the installed library; ComfyUI names a pack after its path,
#: which may hold anything.
NAMESPACE = "sparge"
_library_name = (__package__ or "").rpartition(".")[0]  # without "stages"
if _library_name != NAMESPACE:
    NAMESPACE += "_" + re.sub(r"\W", "_", _library_name, flags=re.ASCII)

# read: the other `CallTensors` but for the counters. rules, exact, scale: arguments of
# `CallRules.of`; a text, because numbers in it would become symbols.
_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor?[] read, Tensor? token_slots, "
    "Tensor(a!)? counters, str rules, SymInt[] exact, float scale) -> (Tensor, Tensor)"
)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: list[Tensor | None],
    token_slots: Tensor | None,
    counters: Tensor | None,
    text: str,
    exact: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Result of q, k and v (B, H, N, D) in the layout that the rules say, and log-sum-exps (B, H,
    Nq), empty where they do not ask for them."""
    tensors = CallTensors._make((q, k, v, *read, counters))
    rules = CallRules.of(text, *exact, scale)
    if capabilities(q.device).usable:
        key = key_of(q, k, v, *read[:2], counters, text, *exact, scale)
        out, lse = (find(key) or prepare(key, tensors, rules)).run(tensors)
    else:
        result, lse = on_reference.attend(tensors, rules, token_slots)
        out = result.new_empty(result_size(rules.out_layout, q.shape), dtype=rules.out_dtype)
        (out if rules.out_layout == "HND" else out.transpose(1, 2)).copy_(result)
    return out, lse if rules.with_lse and lse is not None else out.new_empty(0, dtype=torch.float32)


def _refuse_vmap(*_: object) -> None:
    raise Unsupported(
        "torch.vmap of an attention call is not served: give its dimension to the batch or the "
        "heads of one call, or loop over it.",
        "own",
    )


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: list[Tensor | None],
    token_slots: Tensor | None,
    counters: Tensor | None,
    text: str,
    *_: object,
) -> tuple[Tensor, Tensor]:
    rules = CallRules.of(text, 0, 0, 1.0)
    lse_size = q.shape[:3] if rules.with_lse else 0
    out = q.new_empty(result_size(rules.out_layout, q.shape), dtype=rules.out_dtype)
    return out, q.new_empty(lse_size, dtype=torch.float32)


def _register() -> torch.library.Library | None:
    if hasattr(getattr(torch.ops, NAMESPACE), "attention"):
        return None
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("attention", _attention, "CompositeExplicitAutograd")
    library.impl("attention", _refuse_vmap, "FuncTorchBatched")
    torch.library.register_fake(f"{NAMESPACE}::attention", _fake, lib=library)
    return library


# The op lives as long as the object that defined it.
_library = _register()
attention = getattr(torch.ops, NAMESPACE).attention
