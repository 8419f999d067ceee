# SPDX-License-Identifier: Apache-2.0
"""Fills each kernel's parameter block and queues it on torch's current stream."""

from __future__ import annotations

import functools
from ctypes import Structure

import torch
from torch import Tensor

from ..blocks import block_count
from ..errors import Unsupported
from ..kernels import Element, Kernel, KernelSpec, capabilities, get_kernel
from ..kernels.device import use
from ..kernels.params import (
    AttendParams,
    MeansParams,
    Problem,
    QuantizeParams,
    RouteParams,
    TensorView,
)
from ..kernels.spec import ARCHS, HOPPER_ENTRIES, attend_entry
from ..stats import Counter
from .key_mean import mean_stride
from .quantize_grid import QuantizeGrid
from .recorded import Launch, note
from .route_shared import RouteShared
from .rules import NO_ORDER, AttendRules, OrderFacts, QuantizeRules, RouteRules
from .workspace import CallShape, WorkspaceLayout, layout_of

_DTYPE_IDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_CHUNK = 16  # bytes of a vector load


def means(
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    smooth_k: bool,
    element: Element,
    ordered: bool = False,
) -> Tensor:
    """Launch 1 alone: (3, B, Hkv, head_dim) float32, mean of K, mean and scale of V, of k and v (B,
    Hkv, N, D).

    ordered: for calls with a token order (`mean_stride`).
    """
    shape = CallShape.of(k, k)
    planes = (3, shape.batch, shape.kv_heads, shape.head_dim)
    found = torch.empty(planes, dtype=torch.float32, device=k.device)
    places = (plane.data_ptr() for plane in found)
    _launch_means(k, v, key_lengths, smooth_k, element, ordered, None, *places)
    return found


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    element: Element,
    rules: QuantizeRules,
    order: OrderFacts = NO_ORDER,
    means: Tensor | None = None,
) -> Tensor:
    """Launches 1 and 2 on q (B, H, Nq, D), k and v (B, Hkv, Nk, D); returns the workspace.

    means: those that `means` found, which saves launch 1.
    """
    shape = CallShape.of(q, k, order.slots)
    layout = layout_of(shape, element, rules.with_queries, rules.with_pools)
    workspace = torch.empty(layout.nbytes, dtype=torch.uint8, device=q.device)
    problem = _problem(shape, key_lengths, order)
    addresses = layout.addresses(workspace)
    averages = rules.with_queries and rules.with_query_means

    if means is not None:
        layout.means(workspace).copy_(means)
        if element.quantized:
            layout.view(workspace, "reach").zero_()
    elif element.quantized:
        places = (addresses[name] for name in ("reach", "k_mean", "v_mean", "v_scale"))
        ordered = order.slots is not None
        _launch_means(k, v, key_lengths, rules.smooth_k, element, ordered, *places)

    params = QuantizeParams(
        problem=problem,
        q=view_of(q),
        k=view_of(k),
        v=view_of(v),
        with_queries=averages,
        with_similarity=rules.with_similarity,
        **addresses,
    )
    grid = QuantizeGrid.of(shape, resident_blocks(q.device), with_queries=averages)
    params.key_run, params.query_run = grid.key_run, grid.query_run
    params.key_runs = grid.key_runs
    size = (grid.heads, grid.runs, 1)
    queue(find_kernel("quantize", q.device, shape.head_dim, element), size, params)
    return workspace


def route(
    workspace: Tensor,
    shape: CallShape,
    element: Element,
    with_pools: bool,
    rules: RouteRules,
    key_lengths: Tensor | None,
    block_mask: Tensor | None,
    thresholds: Tensor | None,
    order: OrderFacts,
    counters: Tensor | None,
    queries: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Launch 3: block_map (B, H, nq, words) int32.

    queries: means (B, H, nq, head_dim) and similarities (B, H, nq) of query blocks, float32, which
    the workspace lacks then.
    """
    device = workspace.device
    block_map = torch.empty(shape.map_shape, dtype=torch.int32, device=device)
    with_queries = block_mask is None and queries is None
    layout = layout_of(shape, element, with_queries, with_pools)
    params = RouteParams(
        problem=_problem(shape, key_lengths, order),
        thresholds=_address(thresholds),
        keys_exact=_address(order.keys_exact),
        queries_exact=_address(order.queries_exact),
        block_map=block_map.data_ptr(),
        counters=_counters(counters),
        **vars(rules),
        **fields_of(RouteParams, layout, workspace),
    )
    if queries is not None:
        params.q_block_mean, params.q_similarity = map(_address, queries)
    kernel = find_kernel("route", device, shape.head_dim)
    if block_mask is not None:
        params.block_mask = block_mask.data_ptr()
        for axis, stride in enumerate(block_mask.stride()):
            params.mask_stride[axis] = stride
        params.rows_per_cta = kernel.sizes.rows
        shared = 0
    else:
        room = RouteShared.of(shape, with_pools, kernel.sizes, shared_room(kernel, device))
        params.rows_per_cta, params.score_pitch = room.rows, room.pitch
        shared = room.nbytes
    groups = block_count(shape.query_blocks, params.rows_per_cta)
    grid = (shape.batch * shape.heads * groups, 1, 1)
    queue(kernel, grid, params, shared)
    return block_map


def attend(
    q: Tensor,
    workspace: Tensor,
    block_map: Tensor,
    shape: CallShape,
    element: Element,
    rules: AttendRules,
    key_lengths: Tensor | None,
    thresholds: Tensor | None,
    order: OrderFacts,
    out: Tensor,
    lse: Tensor | None,
    partials: tuple[Tensor, Tensor, Tensor] | None,
    counters: Tensor | None,
) -> None:
    """Launch 4: writes ``out`` (B, H, Nq, D), and what else was asked for.

    On Hopper it counts work items in the workspace: two attends on one must not overlap in time.
    """
    layout = layout_of(shape, element, False, rules.with_pools)  # it reads none of queries
    partial_out, partial_max, partial_sum = partials or (None, None, None)
    params = AttendParams(
        problem=_problem(shape, key_lengths, order),
        q=view_of(q),
        out=view_of(out),
        block_map=block_map.data_ptr(),
        thresholds=_address(thresholds),
        lse=_address(lse),
        partial_out=_address(partial_out),
        partial_max=_address(partial_max),
        partial_sum=_address(partial_sum),
        counters=_counters(counters),
        tokens=q.shape[2],
        scale=rules.scale,
        pvthreshd=rules.pvthreshd,
        causal=rules.causal,
        **fields_of(AttendParams, layout, workspace),
    )
    blocks = shape.batch * shape.heads * shape.query_blocks
    entry = attend_entry(capabilities(q.device).arch, element)
    kernel = find_kernel(entry, q.device, shape.head_dim, element, rules.pv_filter)
    map_bytes = 0
    if entry in HOPPER_ENTRIES:
        blocks = min(blocks, resident_blocks(q.device))
    else:
        blocks *= kernel.sizes.parts
        map_bytes = shape.list_words * 4
    queue(kernel, (blocks, 1, 1), params, map_bytes)


@functools.cache
def resident_blocks(device: torch.device) -> int:
    """Number of multiprocessors: each block of a persistent kernel has one to itself."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch_means(
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    smooth_k: bool,
    element: Element,
    ordered: bool,
    reach: int | None,
    k_mean: int,
    v_mean: int,
    v_scale: int,
) -> None:
    shape = CallShape.of(k, k)
    params = MeansParams(
        problem=_problem(shape, key_lengths),  # a sum needs no order
        k=view_of(k),
        v=view_of(v),
        k_mean=k_mean,
        v_mean=v_mean,
        v_scale=v_scale,
        reach=reach,
        smooth_k=smooth_k,
        k_stride=mean_stride(shape.keys, ordered),
    )
    kernel = find_kernel("means", k.device, shape.head_dim, element)
    blocks = 2 * shape.batch * shape.kv_heads * kernel.sizes.slices  # of V and of K
    queue(kernel, (blocks, 1, 1), params)


def find_kernel(
    entry: str,
    device: torch.device,
    head_dim: int,
    element: Element = Element.INT8_FP16,
    pv_filter: bool = False,
) -> Kernel:
    """Raises Unsupported for a GPU without usable kernels, and as `get_kernel` does."""
    capability = capabilities(device)
    if not capability.usable:
        raise Unsupported(capability.reason)
    use(capability.arch, device)  # also of traced calls, whose kernels nobody asked for before
    spec = _spec(entry, capability.arch, head_dim, int(element), pv_filter)
    return get_kernel(spec, torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _spec(entry: str, arch: str, head_dim: int, element: int, pv_filter: bool) -> KernelSpec:
    """Spec by plain values, whose hashes are those of C: a call asks for three or four."""
    return KernelSpec(entry, arch, head_dim, Element(element), pv_filter)


def shared_room(kernel: Kernel, device: torch.device) -> int:
    """Bytes of dynamic shared memory that a launch may ask for. It begins at a multiple of 16."""
    return ARCHS[capabilities(device).arch].shared_limit - -(-kernel.static_shared // 16) * 16


def queue(
    kernel: Kernel, grid: tuple[int, int, int], params: Structure, extra_shared: int = 0
) -> None:
    """On torch's current stream of the kernel's device."""
    launch = Launch(kernel, grid, params, extra_shared)
    launch.queue(raw_stream(kernel.device_index))
    note(launch)


def raw_stream(device_index: int) -> int:
    """Handle of torch's current stream."""
    # What compiled code of torch asks for too: torch.cuda.current_stream takes ten times as long.
    return torch._C._cuda_getCurrentRawStream(device_index)


def fields_of(kind: type[Structure], layout: WorkspaceLayout, workspace: Tensor) -> dict[str, int]:
    """Addresses of the workspace's fields that a parameter block has, by their name in both."""
    addresses = layout.addresses(workspace)
    return {name: address for name, address in addresses.items() if hasattr(kind, name)}


def _problem(shape: CallShape, key_lengths: Tensor | None, order: OrderFacts = NO_ORDER) -> Problem:
    return Problem(
        key_lengths=_address(key_lengths),
        slot_token=_address(order.slot_tokens),
        slot_counts=_address(order.slot_counts),
        head_order_kind=_address(order.head_order_kind),
        batch=shape.batch,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        queries=shape.queries,
        keys=shape.keys,
        order_kinds=order.order_kinds,
        channels=shape.channels,
    )


def view_of(tensor: Tensor) -> TensorView:
    """View of (B, H, N, D) with any strides but a contiguous last dimension."""
    data, size = tensor.data_ptr(), tensor.element_size()
    batch, head, token, _ = tensor.stride()
    any_bit = data | batch * size | head * size | token * size  # of an address or a step
    return TensorView(
        data=data,
        batch_stride=batch,
        head_stride=head,
        token_stride=token,
        dtype=_DTYPE_IDS[tensor.dtype],
        vectorized=any_bit % _CHUNK == 0,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _counters(counters: Tensor | None) -> int | None:
    if counters is not None and (counters.dtype, counters.shape) != (torch.int64, (len(Counter),)):
        raise ValueError(
            f"counters are {counters.dtype} of shape {tuple(counters.shape)}; give those of an "
            f"AttentionStats, int64 of shape ({len(Counter)},)."
        )
    return _address(counters)
