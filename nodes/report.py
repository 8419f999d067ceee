# SPDX-License-Identifier: Apache-2.0
"""Report of a run: one line, on the node and in the log, always; and more lines."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator

from torch import Tensor

from ..sparge import OrderKind
from ..sparge.tune import MeasuredShape, mean_error
from .host import show_on_node
from .result import RunResult
from .verdict import advice, why_nothing

logger = logging.getLogger("sparge")

#: Remark where the user asked for the PV filter.
LEFT_OUT = "pvthreshd left out: this GPU is faster and truer without it"
BLOCKS_OF = {OrderKind.CUBES: "cubes", OrderKind.ROWS: "rows"}


def publish(result: RunResult, node_id: str | None) -> None:
    text = summary(result)
    level = logging.WARNING if result.tally.sparse == 0 or result.notes else logging.INFO
    logger.log(level, "[Sparge] %s", text)
    show_on_node(node_id, text)


def summary(result: RunResult) -> str:
    tally = result.tally
    tokens = tally.grid_tokens if tally.missing else tally.tokens
    parts = [f"{tally.family}, {tokens:,} tokens" if tokens else tally.family]
    if tally.sparse:
        parts.append(
            f"{tally.sparse} sparse and {tally.dense} dense self-attention calls, "
            f"density {100 * result.report.densities.overall:.1f} %{_head_range(result)}"
        )
        parts.extend(_errors(result))
        if any(shape.one_order for shape in result.report.shapes):
            parts.append("measured one token order alone: the dense steps are few or short")
    else:
        parts.append(": ".join(filter(None, ["NOTHING WAS SPARSE", why_nothing(result)])))
        if tally.dense:
            of = " of text or sound" if tally.missing else ""
            parts.append(f"{tally.dense} dense self-attention calls{of}")
    if tally.faster_dense:
        parts.append(f"{tally.faster_dense} dense calls were measured, by a faster exact kernel")
    if result.from_profile:
        parts.append(f"heads as the profile {result.profile_name} has them, not measured")
    if tally.reasons and not tally.missing:
        reasons = (f"{why.rstrip('.')} ({count})" for why, count in tally.reasons.most_common())
        parts.append("dense because: " + ", ".join(reasons))
        parts.append(advice(result))
    if tally.cross:
        faster = f", {tally.faster_cross} by a faster kernel" if tally.faster_cross else ""
        parts.append(f"{tally.cross} cross-attention calls (always dense{faster})")
    if tally.filter_left_out:
        parts.append(LEFT_OUT)
    parts.extend(note.rstrip(".") for note in result.notes)
    if result.stopped and not result.stopped_early:
        parts.append("stopped early")
    return "; ".join(filter(None, parts))


def details(result: RunResult) -> str:
    """Line of the report, and below it what was measured of each layer."""
    return "\n".join([summary(result), *_asked(result), *_steps(result), *_layers(result)])


def _steps(result: RunResult) -> Iterator[str]:
    """Lines of the steps: means over the layers that ran; 100 % where all were dense, - where none
    ran."""
    if result.by_step.numel():
        means = result.by_step.nanmean(0).tolist()
        shares = ("-" if math.isnan(share) else f"{100 * share:.0f}" for share in means)
        yield f"Density by step, %: {' '.join(shares)}."


def _asked(result: RunResult) -> Iterator[str]:
    if result.report.aim is not None:
        yield f"Asked for {result.report.aim}."
    pool_weight = result.of_heads("pool_weight")
    if heads := pool_weight.numel():
        pooled = 100 * float((pool_weight > 0).float().mean())
        yield f"{pooled:.0f} % of {heads} heads use pooled keys."
    order_kinds = sum((Counter(shape.order_kinds) for shape in result.report.shapes), Counter())
    if order_kinds:
        heads = (
            f"{BLOCKS_OF[order_kind]} in {order_kinds[order_kind]}"
            for order_kind in sorted(order_kinds)
        )
        yield f"Blocks of tokens by head: {', '.join(heads)}."


def _layers(result: RunResult) -> Iterator[str]:
    for shape in result.report.shapes:
        yield f"{shape.tokens:,} tokens: layer, density (least to most), error predicted, probed"
        for index, layer in enumerate(shape.layers.tolist()):
            density = shape.density[index]
            yield (
                f"{layer:4d}  {_percent(density.mean())} ({_percent(density.min())} to "
                f"{_percent(density.max())})  {_of_layer(shape, 'predicted', index)}  "
                f"{_of_layer(shape, 'probed', index)}"
            )


def _head_range(result: RunResult) -> str:
    heads = result.of_heads("density")
    if not heads.numel():
        return ""
    return f" (heads {_percent(heads.min())} to {_percent(heads.max())})"


def _errors(result: RunResult) -> Iterator[str]:
    for name in ("predicted", "probed"):
        if (error := result.mean_error(name)) is not None:
            yield f"{name} error {error:.3f}"


def _percent(share: Tensor) -> str:
    return f"{100 * float(share):.1f} %"


def _of_layer(shape: MeasuredShape, name: str, index: int) -> str:
    error = mean_error(getattr(shape, name)[index], shape.head_weight[index])
    return "-" if error is None else f"{error:.3f}"
