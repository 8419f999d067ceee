# SPDX-License-Identifier: Apache-2.0
"""Measures the heads of a model while it runs dense, to decide what each of them may drop.

    measurement = Measurement.begin(layers=48, heads=24, workload=Workload(order), device="cuda")
    measurement.add(layer, q, k, v)              # in dense calls; never waits
    settings = measurement.error_table().choose(mean_density=0.2)  # between steps; waits
    head_settings = settings.head_settings(layer, "cuda")

One measurement is for one conditioning and one token count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..stages.as_written import as_written
from .candidates import CandidateSet
from .error_table import ErrorTable
from .fetched_sums import FetchedSums
from .measure import Measure, Measured, MeasuredCall, reference_measure
from .scoring import squared_errors, towards_mean
from .spread import ROW_STEP, spread_places
from .workload import Workload

#: Query blocks of every head that one measurement looks at in each token order. A run with guidance
#: measures cond and uncond, so twice as many (docs/experiments.md, Query blocks of a measurement).
BLOCKS_A_CALL = 4


@dataclass(eq=False)
class Measurement:
    """Sums over the query blocks measured so far; made by `begin`."""

    workload: Workload
    candidates: CandidateSet
    query_blocks: list[int] = field(repr=False)
    """Query blocks worth a measurement."""
    blocks_a_call: int
    row_step: int
    measure: Measure
    log_pool_weights: Tensor = field(repr=False)
    """(pool weights,) float32 on the device: natural logarithms of the candidates' pool weights."""
    measured_orders: range
    """Token orders of the workload that there are sums of."""
    squared_error: Tensor
    """(layers, heads, measured orders, densities, pool weights) float32, summed over rows and
    channels: the largest tensors that are kept, of few terms."""
    towards_mean: Tensor
    """Products, of the same shape, of errors with what the exact output lacks of the mean value."""
    squared_norm: Tensor
    """(layers, 2, heads, measured orders) float64: squared norm of the exact output, and of that
    lack."""
    blocks_measured: list[int] = field(repr=False)
    """Number of query blocks measured of each layer, in each token order."""
    earlier_blocks: int = field(repr=False)
    order_kinds: list[range] = field(repr=False)
    """Token orders measured of each layer. The first alone where heads share keys, since those have
    to share an order."""
    fetched: FetchedSums = field(repr=False)
    """Copies of the sums on the host, which arrive as soon as the GPU has measured a layer."""
    one_order: bool = False
    """Whether all layers are measured in the first token order alone."""

    @classmethod
    def begin(
        cls,
        *,
        layers: int,
        heads: int,
        workload: Workload,
        candidates: CandidateSet | None = None,
        blocks_a_call: int = BLOCKS_A_CALL,
        row_step: int = ROW_STEP,
        earlier_blocks: int = 0,
        order_kinds: range | None = None,
        measure: Measure = reference_measure,
        device: torch.device | str = "cpu",
    ) -> Measurement:
        """Returns an empty measurement. Allocates all that it keeps of so many layers, so call it
        where sampling or a forward pass starts.

        blocks_a_call: query blocks of every head that one `add` measures.
        row_step: one in so many rows of them is compared, as in `spread_rows`.
        earlier_blocks: number of query blocks that an earlier measurement has measured; this one
            goes on after those.
        order_kinds: token orders of the workload that are measured and chosen from; all where None.

        Raises:
            ValueError: no query block of the workload may drop anything.
        """
        candidates = candidates or CandidateSet()
        query_blocks = workload.sparse_query_blocks()
        if not query_blocks:
            raise ValueError("Every query block holds exact tokens: leave this attention dense.")
        measured = range(workload.order.order_kinds) if order_kinds is None else order_kinds
        sums = torch.zeros(
            layers, heads, len(measured), *candidates.shape, dtype=torch.float32, device=device
        )
        squares = torch.zeros(layers, 2, heads, len(measured), dtype=torch.float64, device=device)
        blocks_measured, of_layers = [0] * layers, [measured] * layers
        return cls(
            workload,
            candidates,
            query_blocks,
            blocks_a_call,
            row_step,
            measure,
            torch.tensor(candidates.pool_weights, dtype=torch.float32, device=device).log(),
            measured,
            sums,
            torch.zeros_like(sums),
            squares,
            blocks_measured,
            earlier_blocks,
            of_layers,
            FetchedSums.of(workload, candidates, (sums, sums, squares), blocks_measured, of_layers),
        )

    def anew(self) -> Measurement:
        """Returns an empty measurement of the same kind that goes on with other query blocks.
        Allocates."""
        earlier = self.earlier_blocks + max(self.blocks_measured)
        like = Measurement.begin(
            layers=len(self.blocks_measured),
            heads=self.squared_norm.shape[2],
            workload=self.workload,
            candidates=self.candidates,
            blocks_a_call=self.blocks_a_call,
            row_step=self.row_step,
            earlier_blocks=earlier,
            order_kinds=self.measured_orders,
            measure=self.measure,
            device=self.squared_norm.device,
        )
        like.order_kinds[:] = self.order_kinds
        return like

    def measure_one_order(self) -> None:
        """Restricts measurements to the first token order. Call it before any `add`: orders
        measured in different calls do not compare."""
        assert not any(self.blocks_measured)
        self.one_order = True
        self.order_kinds[:] = [self.measured_orders[:1]] * len(self.order_kinds)

    def add(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        calls: int = 1,
    ) -> None:
        """Measures all candidates on a few query blocks of q (B, H, N, D) over k, v (B, Hkv, N, D).
        Allocates for more layers than it was begun with.

        calls: number of usual measurements whose query blocks this one covers.

        Every call and layer looks at other query blocks, evenly spread and the same in every run.
        Batch entries count as one. Errors are against the same arithmetic with nothing dropped. All
        token orders that are measured are measured in the same call, because the error of a head
        can halve from one step to the next (docs/experiments.md, Choosing an order by the keys).
        """
        if layer >= len(self.blocks_measured):
            self._grow(max(layer + 1, 2 * len(self.blocks_measured)))
        blocks = self.next_query_blocks(layer, calls)
        softmax_scale = q.shape[-1] ** -0.5 if scale is None else scale
        if k.shape[1] != q.shape[1]:
            self.order_kinds[layer] = self.measured_orders[:1]
        call = MeasuredCall(
            q,
            k,
            v,
            blocks,
            self.workload,
            self.candidates,
            softmax_scale,
            self.order_kinds[layer],
            self.row_step,
        )
        with as_written(q.device):
            self._add(layer, self.measure(call))
        self.blocks_measured[layer] += len(blocks)
        self._fetch(layer)

    def _grow(self, layers: int) -> None:
        more = layers - len(self.blocks_measured)
        own = self.squared_error, self.towards_mean, self.squared_norm
        grown = [torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in own]
        self.squared_error, self.towards_mean, self.squared_norm = grown
        self.blocks_measured += [0] * more
        self.order_kinds += [self.measured_orders[: 1 if self.one_order else None]] * more
        self.fetched = FetchedSums.of(
            self.workload, self.candidates, grown, self.blocks_measured, self.order_kinds
        )
        for layer, blocks in enumerate(self.blocks_measured):
            if blocks:
                self._fetch(layer)

    def next_query_blocks(self, layer: int, calls: int = 1) -> list[int]:
        """Query blocks that the next `add` of `layer` measures; computed on the host."""
        # Neighbouring layers look at other query blocks.
        first = self.earlier_blocks + self.blocks_measured[layer] + layer
        places = spread_places(len(self.query_blocks), first, calls * self.blocks_a_call)
        return [self.query_blocks[place] for place in places]

    def _add(self, layer: int, measured: Measured) -> None:
        empty, of_layer = ~measured.occupied, self.order_kinds[layer]
        order_kinds = slice(len(of_layer))  # all of the measured orders, or the first
        found = measured.distances
        for of_pool_weights, sums in (
            (squared_errors, self.squared_error),
            (towards_mean, self.towards_mean),
        ):
            of_rows = of_pool_weights(found, self.log_pool_weights)
            # Summed in float32 first: as float64 the rows would not fit in the memory of a
            # measurement.
            of_blocks = of_rows.masked_fill_(empty.unsqueeze(-1), 0).sum(-2)
            del of_rows
            of_heads = of_blocks.sum((2, 4), dtype=torch.float64)
            sums[layer, :, order_kinds].add_(of_heads.movedim((2, 1), (0, 1)))
        of_rows = torch.stack([found.norm, found.mean_far])
        squares = of_rows.masked_fill_(empty, 0).sum((2, 4, 5), dtype=torch.float64)
        self.squared_norm[layer, ..., order_kinds].add_(squares.movedim(1, 2))

    def _fetch(self, layer: int) -> None:
        """Begins to copy the sums of a layer to the host."""
        own = (self.squared_error, self.towards_mean, self.squared_norm)
        for copy, x in zip(self.fetched.sums, own, strict=True):
            copy[layer].copy_(x[layer], non_blocking=True)
        if x.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(x.device))
            self.fetched.copied[layer] = event

    def error_table(self) -> ErrorTable:
        """Makes the table of all heads, from what is known so far. Waits for the GPU.

        Raises:
            ValueError: no layer was measured and gave finite errors.
        """
        return self.fetched.error_table()
