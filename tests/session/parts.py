# SPDX-License-Identifier: Apache-2.0
"""Parts of tests of sessions: a small clip, and a loop over sampling steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparge.order.grid import TokenGrid, TokenOrder
from sparge.session import Aim, Session, TokenLayout
from sparge.session.heads import Heads
from sparge.session.measure import (
    POOL_WEIGHTS,
    Candidates,
    Measured,
    MeasuredCall,
    tokens_of_blocks,
)
from sparge.session.timing import Times

CPU = torch.device("cpu")
GRID = TokenGrid(4, 8, 12, prefix=8)  # 392 tokens: 7 key blocks; 3 of 4 query blocks may drop some
LAYERS, HEADS, HEAD_DIM = 2, 2, 64
LAYOUT, ONE_LAYER = (TokenLayout.of(layers, GRID) for layers in (LAYERS, 1))
BUDGET = Aim("budget", 0.5)
#: Names of what a head is given.
SETTINGS = ("density", "pool_weight", "order_kind", "output_scale", "kept", "error", "weight")
Qkv = tuple[Tensor, Tensor, Tensor]


def neighbours_alike(
    grid: TokenGrid, generator: torch.Generator, batch: int = 1, heads: int = HEADS
) -> Qkv:
    """q, k and v (batch, heads, tokens, HEAD_DIM) of a clip whose neighbours are alike."""
    axes = [torch.arange(n) for n in (grid.frames, grid.height, grid.width)]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2).float()
    waves = torch.randn(3, HEAD_DIM, generator=generator) / 3
    text = torch.randn(grid.tokens - len(place), HEAD_DIM, generator=generator)
    field = torch.cat([text, (place @ waves).sin()])

    def draw(noise: float) -> Tensor:
        drawn = torch.randn(batch, heads, grid.tokens, HEAD_DIM, generator=generator)
        return field + noise * drawn

    return draw(0.3), draw(0.3), draw(0.5)


def session_of(
    aim: Aim | None = BUDGET, steps: int | None = 6, dense_steps: int = 2, **named: Any
) -> Session:
    named = {"even_if_slower": True} | named
    return Session.of(aim, steps=steps, dense_steps=dense_steps, **named)


def sampled(
    session: Session,
    qkv: Sequence[Tensor],
    steps: int = 6,
    layers: Sequence[int] = range(LAYERS),
    prompts: Sequence[tuple[int, ...]] = ((0,),),
    clip: TokenLayout = LAYOUT,
    **named,
) -> list[Tensor]:
    """Results of the last layer in each step, of all prompts, from a pass for each of `prompts`.
    The number of a prompt is that of its entry of the batch."""
    outs = []
    for step in range(steps):
        of_step = []
        for of_pass in prompts:
            running = session.begin_step(step, clip, "cpu", prompts=of_pass)
            given = [x[list(of_pass)] for x in qkv]
            of_step.append([running.attend(layer, *given, **named) for layer in layers][-1])
            running.end()
        outs.append(torch.cat(of_step))
    return outs


def heads_of(session: Session) -> Heads:
    """The only heads that were chosen."""
    assert session.heads is not None
    (heads,) = (heads for heads in session.heads.by_shape.values() if heads.given)
    return heads


def same_settings(one: Session, other: Session) -> bool:
    """Whether all heads were given the same in each step, bit by bit."""
    pairs = zip(heads_of(one).given, heads_of(other).given, strict=True)
    return all(
        torch.equal(getattr(mine, name), getattr(others, name)) and place == where
        for (mine, place, _), (others, where, _) in pairs
        for name in SETTINGS
    )


def measured_call(qkv: Qkv, order: TokenOrder, blocks: Sequence[int]) -> MeasuredCall:
    q, k, v = qkv
    candidates = Candidates.of(order, q.device, shares_keys=q.shape[1] != k.shape[1])
    return MeasuredCall(q, k, v, q.shape[-1] ** -0.5, order.on(q.device), candidates, blocks)


def nothing_measured(call: MeasuredCall, with_truth: bool = False) -> Measured:
    """Stands for measuring: half of each output is missing where something is dropped."""
    shape = call.q.shape[1], call.candidates.orders
    one = call.q.new_ones(shape, dtype=torch.float64)
    error = one[..., None, None].repeat(1, 1, len(POOL_WEIGHTS), len(call.candidates.measured)) / 4
    error[..., -1] = 0
    slots = tokens_of_blocks(call.order, call.query_blocks)
    truth = call.q.new_zeros(*call.q.shape[:2], len(slots[0]), 32, call.q.shape[-1])
    return Measured(error, 0 * error, 0 * one, one, truth if with_truth else None)


#: Times of a GPU on which sparse calls are fast, and measuring is free.
FAST = Times(392, exact=1.0, eight_bit=1.0, sparse_fixed=0.01, sparse_pairs=0.5, measuring=0.0)


def slower(times: Times, by: float) -> Times:
    """Times of a GPU that is so many times slower in all."""
    names = "exact", "eight_bit", "sparse_fixed", "sparse_pairs", "measuring"
    return replace(times, **{name: by * getattr(times, name) for name in names})
