# SPDX-License-Identifier: Apache-2.0
"""Stages as torch.library ops, so that torch.compile sees tensors in and tensors out.

A process may hold several copies of the library: an installed one and that of a node pack. Each has
ops of its own, because copies differ in version, and in the classes of what they raise.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ..kernels import Element
from . import launch
from . import score as launch_score
from .rules import FLAT_SCHEMA, AttendRules, OrderFacts, QuantizeRules, RouteRules
from .workspace import CallShape, layout_of

#: Namespace of the ops: "sparge" for the installed library; ComfyUI names a pack after its path,
#: which may hold anything.
NAMESPACE = "sparge"
_library_name = (__package__ or "").rpartition(".")[0]  # without "stages"
if _library_name != NAMESPACE:
    NAMESPACE += "_" + re.sub(r"\W", "_", _library_name, flags=re.ASCII)

_SCHEMAS = (
    "means(Tensor k, Tensor v, Tensor? key_lengths, bool smooth_k, int element, "
    "bool ordered=False) -> Tensor",
    "quantize(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, int element, "
    f"{FLAT_SCHEMA}, Tensor?[] order, Tensor? means=None) -> Tensor",
    "route(Tensor workspace, SymInt[] shape, int element, bool with_pools, "
    f"{FLAT_SCHEMA}, Tensor? key_lengths, Tensor? block_mask, Tensor? thresholds, "
    "Tensor?[] order, Tensor(a!)? counters, Tensor? q_block_mean=None, "
    "Tensor? q_similarity=None) -> Tensor",
    "attend(Tensor q, Tensor workspace, Tensor block_map, SymInt[] shape, int element, "
    f"{FLAT_SCHEMA}, Tensor? key_lengths, Tensor? thresholds, Tensor?[] order, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? partial_out, Tensor(d!)? partial_max, "
    "Tensor(e!)? partial_sum, Tensor(f!)? counters) -> ()",
    "score(Tensor exact_out, Tensor exact_max, Tensor exact_sum, Tensor q, Tensor workspace, "
    "SymInt[] shape, int element, Tensor kept, float scale, Tensor(a!) found) -> ()",
)


def _means(
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    smooth_k: bool,
    element: int,
    ordered: bool = False,
) -> Tensor:
    return launch.means(k, v, key_lengths, smooth_k, Element(element), ordered)


def _means_fake(k: Tensor, *_: object) -> Tensor:
    shape = CallShape.of(k, k)
    planes = (3, shape.batch, shape.kv_heads, shape.head_dim)
    return k.new_empty(planes, dtype=torch.float32)


def _quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    element: int,
    numbers: list[int],
    flags: list[bool],
    scalars: list[float],
    order: list[Tensor | None],
    means: Tensor | None = None,
) -> Tensor:
    rules = QuantizeRules.of_flat(numbers, flags, scalars)
    return launch.quantize(q, k, v, key_lengths, Element(element), rules, OrderFacts(*order), means)


def _quantize_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    element: int,
    numbers: list[int],
    flags: list[bool],
    scalars: list[float],
    order: list[Tensor | None],
    means: Tensor | None = None,
) -> Tensor:
    rules = QuantizeRules.of_flat(numbers, flags, scalars)
    shape = CallShape.of(q, k, OrderFacts(*order).slots)
    layout = layout_of(shape, Element(element), rules.with_queries, rules.with_pools)
    return q.new_empty(layout.nbytes, dtype=torch.uint8)


def _route(
    workspace: Tensor,
    shape: list[int],
    element: int,
    with_pools: bool,
    numbers: list[int],
    flags: list[bool],
    scalars: list[float],
    key_lengths: Tensor | None,
    block_mask: Tensor | None,
    thresholds: Tensor | None,
    order: list[Tensor | None],
    counters: Tensor | None,
    q_block_mean: Tensor | None = None,
    q_similarity: Tensor | None = None,
) -> Tensor:
    queries = None
    if q_block_mean is not None and q_similarity is not None:
        queries = (q_block_mean, q_similarity)
    return launch.route(
        workspace,
        CallShape(*shape),
        Element(element),
        with_pools,
        RouteRules.of_flat(numbers, flags, scalars),
        key_lengths,
        block_mask,
        thresholds,
        OrderFacts(*order),
        counters,
        queries,
    )


def _route_fake(workspace: Tensor, shape: list[int], *_: object) -> Tensor:
    return workspace.new_empty(CallShape(*shape).map_shape, dtype=torch.int32)


def _attend(
    q: Tensor,
    workspace: Tensor,
    block_map: Tensor,
    shape: list[int],
    element: int,
    numbers: list[int],
    flags: list[bool],
    scalars: list[float],
    key_lengths: Tensor | None,
    thresholds: Tensor | None,
    order: list[Tensor | None],
    out: Tensor,
    lse: Tensor | None,
    partial_out: Tensor | None,
    partial_max: Tensor | None,
    partial_sum: Tensor | None,
    counters: Tensor | None,
) -> None:
    partials = None
    if partial_out is not None and partial_max is not None and partial_sum is not None:
        partials = (partial_out, partial_max, partial_sum)
    launch.attend(
        q,
        workspace,
        block_map,
        CallShape(*shape),
        Element(element),
        AttendRules.of_flat(numbers, flags, scalars),
        key_lengths,
        thresholds,
        OrderFacts(*order),
        out,
        lse,
        partials,
        counters,
    )


def _score(
    exact_out: Tensor,
    exact_max: Tensor,
    exact_sum: Tensor,
    q: Tensor,
    workspace: Tensor,
    shape: list[int],
    element: int,
    kept: Tensor,
    scale: float,
    found: Tensor,
) -> None:
    launch_score.score(
        (exact_out, exact_max, exact_sum),
        q,
        workspace,
        CallShape(*shape),
        Element(element),
        kept,
        scale,
        found,
    )


def _returns_nothing(*_: object) -> None:
    return None


def _register() -> torch.library.Library | None:
    if hasattr(torch.ops, NAMESPACE) and hasattr(getattr(torch.ops, NAMESPACE), "score"):
        return None
    library = torch.library.Library(NAMESPACE, "DEF")
    stages = (
        ("means", _means, _means_fake),
        ("quantize", _quantize, _quantize_fake),
        ("route", _route, _route_fake),
        ("attend", _attend, _returns_nothing),
        ("score", _score, _returns_nothing),
    )
    for schema, (name, implementation, fake) in zip(_SCHEMAS, stages, strict=True):
        library.define(schema)
        library.impl(name, implementation, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library


# Ops live as long as the object that defined them.
_library = _register()
_ops = getattr(torch.ops, NAMESPACE)
means, quantize, route = _ops.means, _ops.quantize, _ops.route
attend, score = _ops.attend, _ops.score
