# SPDX-License-Identifier: Apache-2.0
"""Heads of a layer, dealt to the ranks of an engine, and what is measured of them put together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks.argument import check_tensor, whole_number


def heads_of_rank(heads: int, rank: int, ranks: int) -> slice:
    """Heads that a rank has after the all-to-all: equally many each, in order. Where `ranks` does
    not divide them, the last one has fewer, as engines that fill up with empty heads have it."""
    share = -(-whole_number("heads", heads, 1) // whole_number("ranks", ranks, 1))
    first = share * whole_number("rank", rank, 0, ranks - 1)
    return slice(min(first, heads), min(first + share, heads))


def all_heads(group: dist.ProcessGroup | None = None) -> Callable[[Tensor, int], Tensor]:
    """Function that puts the tensors of all ranks of a group together along their dimension of
    heads, for `Measurement.gathered`. Every rank has to call it, in the same order; it waits for
    them. Ranks may have different numbers of heads."""

    def gather(values: Tensor, dim: int) -> Tensor:
        ranks = dist.get_world_size(group)
        own = torch.tensor([values.shape[dim]], device=values.device)
        counts = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(counts, own, group=group)
        sizes = [int(count) for count in counts]
        first = values.movedim(dim, 0)
        room = first.new_zeros(max(sizes), *first.shape[1:])
        room[: first.shape[0]] = first
        found = [torch.empty_like(room) for _ in range(ranks)]
        dist.all_gather(found, room, group=group)
        parts = [part[:size] for part, size in zip(found, sizes, strict=True)]
        return torch.cat(parts).movedim(0, dim).contiguous()

    return gather


def balanced_heads(work: Tensor, ranks: int) -> Tensor:
    """(heads,) int64: an order of heads in which ranks that take equally many one after the other
    have about equal work: the head with most work goes to the rank with least so far that has room.

    The engine has to permute q, k and v by it before its all-to-all (`q[:, order]`), and results
    back after it (`order.argsort()`), with head settings permuted likewise.

    work: (heads,) of each head, such as measured densities. Waits for its device.

    Raises:
        ValueError: `work` is no tensor, or `ranks` does not divide the heads.
    """
    check_tensor("work", work, "one number for each head")
    costs = work.double().tolist()
    room, left = divmod(len(costs), whole_number("ranks", ranks, 1))
    if left:
        raise ValueError(f"{len(costs)} heads are not dealt evenly to {ranks} ranks.")
    groups: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for head in sorted(range(len(costs)), key=lambda head: -costs[head]):
        rank = min((r for r in range(ranks) if len(groups[r]) < room), key=sums.__getitem__)
        groups[rank].append(head)
        sums[rank] += costs[head]
    return torch.tensor([head for group in groups for head in sorted(group)])


def work_of_ranks(work: Tensor, ranks: int) -> Tensor:
    """(ranks,) float64: sum of the work of each rank's heads; the step takes as long as the largest
    one."""
    shares = (heads_of_rank(work.numel(), rank, ranks) for rank in range(ranks))
    return torch.stack([work[heads].double().sum() for heads in shares])
