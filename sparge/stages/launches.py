# SPDX-License-Identifier: Apache-2.0
"""Launches of a call: kernels, grids and parameter blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from ctypes import Structure, addressof, c_void_p
from typing import Any, NamedTuple

import torch

from ..blocks import block_count
from ..errors import Unsupported
from ..kernels import Element, Kernel, KernelSpec, get_kernel, native_element
from ..kernels.params import PARAMS, Problem, TensorView
from ..kernels.spec import ARCHS, HOPPER_ENTRIES, Source, attend_entry
from ..policy import PV_FILTER_OFF, Precision, operand_dtype
from .key_mean import mean_stride
from .kind import CallKind, CallTensors
from .quantize_grid import QuantizeGrid
from .route_shared import RouteShared
from .workspace import FIELD_NAMES, WorkspaceLayout

RESULTS = ("out", "lse")
#: Tensors that only a measurement has.
_MEASURED = {
    *("partial_out", "partial_max", "partial_sum"),
    *("exact_out", "exact_max", "exact_sum", "kept", "found"),
}
#: Parameters that are addresses, null in launches without such a tensor.
_TENSORS = {*CallTensors._fields, *RESULTS, *_MEASURED, *FIELD_NAMES}

#: Channels of a 16-byte load, and elements from one token to the next that it reaches
#: (csrc/common/chunks.cuh).
_LANE_CHANNELS, _MOST_STRIDE = 8, 1 << 31

#: Numbers of `Select` in ``csrc/params.cuh``.
_SELECT = {"topk": 0, "cdf": 1}
_SELECT_MASK = 2


class Launch(NamedTuple):
    """Launch of a kernel on its device."""

    kernel: Kernel
    grid: tuple[int, int, int]
    params: Structure
    extra_shared: int = 0
    """Bytes of dynamic shared memory beyond what the kernel always has."""

    def queue(self) -> None:
        """Queues it on torch's current stream."""
        self.kernel.allow_shared(self.extra_shared)
        pointer = (c_void_p * 1)(addressof(self.params))
        stream = raw_stream(self.kernel.device_index)
        self.kernel.launch(self.grid, addressof(pointer), self.extra_shared, stream)


def raw_stream(device_index: int) -> int:
    """Handle of torch's current stream."""
    # What compiled code of torch asks for too: torch.cuda.current_stream takes ten times as long.
    return torch._C._cuda_getCurrentRawStream(device_index)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of them: each block of a persistent kernel has one to itself."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class Launches:
    """Launches of a kind of call by kernels for `arch`, in the order of its methods.

    addresses: of tensors and fields of the workspace by the names of parameters, or numbers that
    stand for them. Who makes them fills it in.
    """

    def __init__(self, kind: CallKind, arch: str) -> None:
        policy, settings = kind.rules.policy, kind.rules.settings
        self.kind, self.arch, self.policy = kind, arch, policy
        self.element = element_of(kind, arch)
        if settings is not None and settings.has_output_scale and not self.element.quantized:
            raise Unsupported(
                f"The head settings have an output_scale, but kernels for {arch} serve 8-bit calls "
                "by 16-bit operands, which do not know it: leave it out.",
                "own",
            )
        self.ordered = kind.rules.order is not None
        self.routes = kind.mask_strides is None
        self.pools = settings is not None and settings.pools
        keeps_all = (
            "thresholds" not in kind.given
            and policy.select_by == "topk"
            and _number(policy.topk) >= 1
        )
        #: Whether route asks what blocks are like.
        self.scores = self.routes and not keeps_all
        #: Whether all queries attend to all keys and nobody counts them: then there is no map.
        self.is_whole = (
            self.routes
            and keeps_all
            and not (self.ordered or kind.rules.causal)
            and not kind.given & {"key_lengths", "counters"}
        )
        self.layout = WorkspaceLayout(
            kind.shape, self.element, self.routes, self.pools, with_map=not self.is_whole
        )
        self.addresses: dict[str, int | None] = {}

    def __iter__(self) -> Iterator[Launch]:
        if self.element.quantized:
            yield self.means()
        yield self.quantize()
        if not self.is_whole:
            yield self.route()
        yield self.attend()

    def means(self) -> Launch:
        shape, keys = self.kind.shape, self.kind.key_tokens
        of_keys = {"heads": shape.kv_heads, "queries": keys, "keys": keys, "order_kinds": 1}
        no_order = dict.fromkeys(("slot_token", "slot_counts", "head_order_kind"))  # of a sum
        kernel = self.kernel("means")
        params = self.params(
            "means",
            problem=self._problem(**of_keys, **no_order),
            smooth_k=self.policy.smooth_k,
            k_stride=mean_stride(keys, self.ordered),
        )
        blocks = 2 * shape.batch * shape.kv_heads * kernel.sizes.slices  # of V and of K
        return Launch(kernel, (blocks, 1, 1), params)

    def quantize(self) -> Launch:
        similarity = self.policy.simthreshd1
        grid = QuantizeGrid.of(
            self.kind.shape, multiprocessors(self.kind.device), with_queries=self.scores
        )
        params = self.params(
            "quantize",
            problem=self._problem(),
            with_queries=self.scores,
            with_similarity=self.scores and (similarity is None or similarity >= 0),
            key_run=grid.key_run,
            key_runs=grid.key_runs,
            query_run=grid.query_run,
        )
        return Launch(self.kernel("quantize"), (grid.heads, grid.runs, 1), params)

    def route(self) -> Launch:
        kind, shape, rules, policy = self.kind, self.kind.shape, self.kind.rules, self.policy
        kernel = self.kernel("route")
        rows, pitch, shared = kernel.sizes.rows, 0, 0
        if self.scores:
            room = RouteShared.of(shape, self.pools, kernel.sizes, self.shared_room(kernel))
            rows, pitch, shared = room.rows, room.pitch, room.nbytes
        params = self.params(
            "route",
            problem=self._problem(slot_token=None, head_order_kind=None, order_kinds=1),
            mask_stride=kind.mask_strides or (0, 0, 0, 0),
            cdfthreshd=_number(policy.cdfthreshd),
            simthreshd1=_number(policy.simthreshd1),
            score_scale=rules.scale,
            select=_SELECT[policy.select_by] if self.routes else _SELECT_MASK,
            upstream=rules.settings is None and not self.ordered,
            topk_blocks=max(1, int(_number(policy.topk) * shape.key_blocks)),
            exact_prefix=rules.exact_prefix,
            exact_suffix=rules.exact_suffix,
            causal=rules.causal,
            attention_sink=rules.attention_sink,
            keep_diagonal=policy.keep_diagonal,
            rows_per_cta=rows,
            score_pitch=pitch,
        )
        groups = block_count(shape.query_blocks, rows)
        return Launch(kernel, (shape.batch * shape.heads * groups, 1, 1), params, shared)

    def attend(self) -> Launch:
        """On Hopper it counts work items in the workspace: two on one must not overlap in time."""
        kind, shape, pvthreshd = self.kind, self.kind.shape, self.policy.pvthreshd
        params = self.params(
            self.attend_entry,
            problem=self._problem(),
            tokens=kind.query_tokens,
            scale=kind.rules.scale,
            pvthreshd=PV_FILTER_OFF if pvthreshd is None else pvthreshd,
            causal=kind.rules.causal,
        )
        kernel = self.kernel(self.attend_entry)
        blocks = shape.batch * shape.heads * shape.query_blocks
        if self.attend_entry in HOPPER_ENTRIES:
            return Launch(kernel, (min(blocks, multiprocessors(kind.device)), 1, 1), params)
        list_bytes = shape.list_words * 4
        return Launch(kernel, (blocks * kernel.sizes.parts, 1, 1), params, list_bytes)

    def params(self, entry: str, **values: Any) -> Structure:
        """Parameter block of an entry. Parameters that are not given are tensors, by their names.

        Raises TypeError for a parameter that is neither.
        """
        return self._filled(PARAMS[entry], values)

    def _problem(self, **values: int | None) -> Structure:
        order = self.kind.rules.order
        kinds = 1 if order is None else order.order_kinds
        return self._filled(Problem, self.kind.shape._asdict() | {"order_kinds": kinds} | values)

    def _filled(self, struct: type[Structure], values: dict[str, Any]) -> Structure:
        missing = [field[:2] for field in struct._fields_ if field[0] not in values]
        if unknown := [name for name, _ in missing if name not in _TENSORS]:
            raise TypeError(f"nobody gives {', '.join(unknown)} of {struct.__name__}")
        for name, of in missing:
            address = self.addresses.get(name)
            values[name] = getattr(self.kind, name).view(address) if of is TensorView else address
        return struct(**values)

    @property
    def attend_entry(self) -> str:
        return attend_entry(self.arch, self.element)

    @property
    def specs(self) -> list[KernelSpec]:
        """Kernels of calls like this one, with or without a mask of their own."""
        return [self._spec(name) for name in ("means", "quantize", "route", self.attend_entry)]

    def _spec(self, entry: str) -> KernelSpec:
        pvthreshd = self.policy.pvthreshd
        pv_filter = pvthreshd is None or pvthreshd < PV_FILTER_OFF
        shape = self.kind.shape
        return KernelSpec(
            entry, self.arch, shape.head_dim, self.element, pv_filter, source_of(self.kind)
        )

    def kernel(self, entry: str) -> Kernel:
        """Raises as `get_kernel` does."""
        return get_kernel(self._spec(entry), self.kind.device.index or 0)

    def shared_room(self, kernel: Kernel) -> int:
        """Bytes of dynamic shared memory that a launch may ask for. It begins at a multiple of
        16."""
        return ARCHS[self.arch].shared_limit - block_count(kernel.static_shared, 16) * 16


def element_of(kind: CallKind, arch: str) -> Element:
    """Operand types of a call's precision in kernels for `arch`."""
    precision = Precision(kind.rules.policy.precision)
    if precision is Precision.INT8_FP16:
        return Element.INT8_FP16
    dtype = operand_dtype(kind.q.dtype, kind.k.dtype, kind.v.dtype)
    return native_element(arch, precision is Precision.SIXTEEN_BIT, dtype)


def source_of(kind: CallKind) -> Source:
    """Type of q, k and v where they have one, and 16-byte loads reach all of it."""
    tensors = kind.q, kind.k, kind.v
    whole = kind.shape.channels % _LANE_CHANNELS == 0 and all(
        x.vectorized and x.strides[2] < _MOST_STRIDE for x in tensors
    )
    dtypes = {x.dtype for x in tensors}
    if not whole or len(dtypes) > 1:
        return Source.ANY
    return Source.of(kind.q.dtype)


def _number(threshold: float | None) -> float:
    """Threshold of all heads; where each head has its own, kernels read those."""
    return 1.0 if threshold is None else threshold
