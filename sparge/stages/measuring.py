# SPDX-License-Identifier: Apache-2.0
"""Launches that measure heads on a GPU: measured query blocks stand for queries, candidates for
heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..blocks import QUERY_BLOCK, block_count
from ..errors import Unsupported
from ..head_settings import SettingsFacts
from ..kernels import capabilities
from ..kernels.spec import eight_bit_element, measuring_element
from ..order.grid import OrderFacts, TokenOrder
from ..policy import PV_FILTER_OFF, PolicyFacts, Precision
from .kind import CallKind, CallRules, TensorFacts
from .launches import Launch, Launches
from .workspace import MEANS, CallShape, WorkspaceLayout

MOST_DENSITIES = 32  # a lane of a warp each; kMostDensities of csrc/score/place.cuh


class Measuring:
    """Launches of a measurement of k and v (B, Hkv, N, D) in one token order, queued one by one, on
    a GPU that has kernels."""

    def __init__(self, k: Tensor, v: Tensor, order: TokenOrder, scale: float) -> None:
        arch = capabilities(k.device).arch
        self.k, self.v, self.order, self.scale = k, v, order, scale
        self.arch, self.element = arch, measuring_element(arch)

    def means(self) -> Tensor:
        """(4, B, Hkv, head_dim) float32: the fields `MEANS` of a workspace."""
        shape = CallShape.of(self.k, self.k)
        size = (len(MEANS), shape.batch, shape.kv_heads, shape.head_dim)
        found = torch.empty(size, dtype=torch.float32, device=self.k.device)
        places = dict(zip(MEANS, found, strict=True))
        self._launches(shape, {"q": self.k} | places, ordered=True).means().queue()
        return found

    def quantized(self, q: Tensor, means: Tensor) -> Tensor:
        """Workspace of keys and values around these means, with what pooling needs, for queries
        like q (B, H, N, D)."""
        shape = CallShape.of(q, self.k, self.order.slots)
        layout = WorkspaceLayout(shape, self.element, with_queries=False, with_pools=True)
        workspace = torch.empty(layout.nbytes, dtype=torch.uint8, device=q.device)
        layout.means(workspace).copy_(means)
        layout.view(workspace, "reach").zero_()
        tensors = {"q": q, "slot_token": self.order.slot_tokens}
        tensors["slot_counts"] = self.order.block_counts
        launches = self._launches(shape, tensors, workspace, pools=True, ordered=True)
        launches.quantize().queue()
        return workspace

    def routed(
        self,
        workspace: Tensor,
        shape: CallShape,
        thresholds: Tensor,
        q_block_mean: Tensor,
        q_similarity: Tensor,
    ) -> Tensor:
        """Block map (B, H, query blocks, words) int32 of heads with these `HeadThresholds` and
        query blocks with these means (B, H, query blocks, head_dim) and similarities, float32."""
        block_map = torch.empty(shape.map_shape, dtype=torch.int32, device=workspace.device)
        tensors = {
            "q": self.k,
            "q_block_mean": q_block_mean,
            "q_similarity": q_similarity,
            "thresholds": thresholds,
            "keys_exact": self.order.keys_exact,
            "block_map": block_map,
        }
        self._launches(shape, tensors, workspace, pools=True, routes=True).route().queue()
        return block_map

    def attended(
        self, workspace: Tensor, q: Tensor, block_map: Tensor, slot_token: Tensor, keys: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of q (B, H, rows, D), where each batch entry is a KV head of the workspace, to
        the blocks of a map (B, H, query blocks, words) of so many key slots.

        slot_token: (1, query blocks x 128) int32, the row of q in each slot. Gives sums of
        exp2(s - max) v (B, H, rows, D), max and sums of exp2(s - max) (B, H, rows), float32.
        """
        batch, heads, _, channels = q.shape
        shape = CallShape(batch, heads, 1, block_map.shape[2] * QUERY_BLOCK, keys, channels)
        # Outputs that nobody asks for go where nobody reads them.
        out = q.new_empty(batch, 1, *q.shape[2:]).expand_as(q)
        sums = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        row_max, row_sum = sums.new_empty(2, *q.shape[:3])
        tensors = {"q": q, "out": out, "block_map": block_map, "slot_token": slot_token}
        tensors |= {"partial_out": sums, "partial_max": row_max, "partial_sum": row_sum}
        self._launches(shape, tensors, workspace).attend().queue()
        return sums, row_max, row_sum

    def score(
        self,
        exact: tuple[Tensor, Tensor, Tensor],
        q: Tensor,
        workspace: Tensor,
        shape: CallShape,
        kept: Tensor,
        found: Tensor,
    ) -> None:
        """Writes ``found``; shapes as in `ScoreParams` of ``csrc/params.cuh``, of ``q`` in any
        strides but a contiguous last dimension.

        exact: sums, maxima and sums of weights, as `attended` gives them. shape: of the call that
        quantized into ``workspace``. Raises Unsupported for more densities or keys than a thread
        block has room for.
        """
        exact_out, exact_max, exact_sum = exact
        batch, heads, densities, rows, channels = exact_out.shape
        if densities > MOST_DENSITIES:
            raise Unsupported(
                f"The candidates have {densities} densities; up to {MOST_DENSITIES} are measured "
                "at once: give fewer."
            )
        blocks, pooling = kept.shape[3], densities - 1
        tensors = {"q": q, "exact_out": exact_out, "exact_max": exact_max, "exact_sum": exact_sum}
        tensors |= {"kept": kept, "found": found}
        launches = self._launches(shape, tensors, workspace, pools=True)
        kernel = launches.kernel("score")
        rows_per_cta = _rows_per_cta(
            shape, pooling, rows // blocks, kernel.sizes, launches.shared_room(kernel)
        )
        field_stride, batch_stride, head_stride, _ = found.stride()
        params = launches.params(
            "score",
            field_stride=field_stride,
            batch_stride=batch_stride,
            head_stride=head_stride,
            scale=self.scale,
            heads=heads,
            kv_heads=shape.kv_heads,
            densities=densities,
            blocks=blocks,
            rows=rows,
            channels=channels,
            key_blocks=shape.key_blocks,
            room=_places(shape.key_blocks, pooling, kernel.sizes),
            rows_per_cta=rows_per_cta,
        )
        groups = block_count(rows // blocks, rows_per_cta)
        shared = shared_bytes(shape, pooling, rows_per_cta, kernel.sizes)
        Launch(kernel, (batch * heads * blocks * groups, 1, 1), params, shared).queue()

    def _launches(
        self,
        shape: CallShape,
        tensors: dict[str, Tensor],
        workspace: Tensor | None = None,
        *,
        pools: bool = False,
        routes: bool = False,
        ordered: bool = False,
    ) -> Launches:
        """Launches of a call of this shape on these tensors, by the names of parameters. pools:
        with what pooling needs. routes: by means of query blocks. ordered: in the token order."""
        order = None
        if ordered:
            order = OrderFacts(self.order.order_kinds, self.order.slots, self.order.tokens, None)
        q = tensors["q"]
        kind = CallKind(
            _rules(self.arch, self.scale, shape.heads, pools, order),
            q.device,
            shape,
            q.shape[2],
            self.k.shape[2],
            TensorFacts.of(q),
            TensorFacts.of(self.k),
            TensorFacts.of(self.v),
            TensorFacts.of(tensors.get("out", q)),
            None if routes else (0, 0, 0, 0),
            frozenset(tensors),
        )
        launches, tensors = Launches(kind, self.arch), tensors | {"k": self.k, "v": self.v}
        if workspace is not None:
            launches.addresses |= launches.layout.addresses(workspace.data_ptr())
        launches.addresses |= {name: x.data_ptr() for name, x in tensors.items()}
        return launches


def _rules(arch: str, scale: float, heads: int, pools: bool, order: OrderFacts | None) -> CallRules:
    """Rules of a measurement: of 8-bit operands, with nothing that is never dropped but what an
    order says. Densities are in the table of thresholds."""
    quantized = eight_bit_element(arch).quantized
    precision = Precision.INT8 if quantized else Precision.INT8_FP16
    policy = PolicyFacts("topk", 0.0, 1.0, 0.0, PV_FILTER_OFF, False, True, precision.value)
    settings = SettingsFacts(heads, pools, False, False)
    dtype = torch.bfloat16
    return CallRules(policy, settings, order, False, False, "HND", dtype, False, 0, 0, scale)


def shared_bytes(shape: CallShape, pooling: int, rows: int, sizes: Any) -> int:
    """Dynamic shared memory of a thread block of so many rows; ``Shared`` of csrc/score/place.cuh.

    pooling: densities that drop something. sizes: `ScoreSizes` of the kernel.
    """
    places = _places(shape.key_blocks, pooling, sizes)
    weights = min(rows, 2) * block_count(rows, 2) * (block_count(places, 16) * 16 + 8)
    pooled = 4 * pooling * rows * shape.head_dim
    return max(sizes.query_bytes, pooled) + 4 * (weights + places) + 2 * places


def _places(key_blocks: int, pooling: int, sizes: Any) -> int:
    """In the list of dropped key blocks, with what fills up the bucket of each density."""
    return key_blocks + pooling * (sizes.step - 1)


def _rows_per_cta(shape: CallShape, pooling: int, rows: int, sizes: Any, limit: int) -> int:
    """Rows of a query block that fit in shared memory, in groups of about one size."""
    for most in range(min(sizes.rows, rows), 0, -1):
        if shared_bytes(shape, pooling, most, sizes) <= limit:
            return block_count(rows, block_count(rows, most))
    raise Unsupported(
        f"{shape.keys} keys are {shape.key_blocks} key blocks, whose weights do not fit in this "
        f"GPU's shared memory ({limit} bytes): measure on a shorter sequence.",
        "large",
    )
