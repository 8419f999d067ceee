# SPDX-License-Identifier: Apache-2.0
"""Times of attention that several GPUs share by Ulysses, beside one GPU.

python -m benchmarks.two_gpus [--shapes wan480 flux1k] [--topk 0.3 0.2] [--ranks 2] [--out FILE]
python -m benchmarks.two_gpus --tiny --device cpu      # the script itself, in seconds

Every rank has its share of the tokens of all heads, as a model has; an all-to-all (NCCL) gives it
its heads over all tokens, and another one brings the results back. It starts its own processes, one
a GPU. Inputs are random. Times are medians in ms, of the slowest rank:

one_ms        attention of all heads on one GPU
two_ms        all of what the ranks do: all-to-all, attention, all-to-all
attention_ms  the attention in it, and attention_ms_of_ranks of each
all_to_all_ms the all-to-alls in it, and all_to_all_share of two_ms
ratio         one_ms over two_ms
rel_l2        of the joined result to that of one GPU; same_bits where they are equal

The ways: "PyTorch", shares of the key blocks ("topk 1" is dense in 8 bits), and head settings.
"heads spread" has head settings whose densities differ tenfold and rise from head to head, so that
the last rank has most work; "heads dealt" deals them evenly first (`balanced_heads`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import sparge
from benchmarks.cases import spread
from benchmarks.inputs import draw
from benchmarks.ranks import add_options, all_ranks, check_options, median_on_ranks, run_ranks
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import add_row, commit
from benchmarks.ulysses import to_heads, to_tokens
from sparge.common.metrics import rel_l2
from sparge.integrations.parallel import (
    RankAttention,
    balanced_heads,
    dealt_places,
    heads_of_rank,
    work_of_ranks,
)
from sparge.order.grid import grid_order

TORCH = "PyTorch"
SPREAD, DEALT = "heads spread", "heads dealt"


def ways(topk: Sequence[float]) -> list[str]:
    return [TORCH, *(f"topk {each:g}" for each in (1.0, *topk)), SPREAD, DEALT]


def tiny(shape: Shape) -> Shape:
    text = 26 if shape.grid.prefix else 0
    grid = sparge.TokenGrid(2, 8, 18, prefix=text)
    return replace(shape, heads=4, tokens=grid.tokens, head_dim=32, grid=grid)


class Sharing:
    """One shape, whose tokens the ranks share."""

    def __init__(self, shape: Shape, device: torch.device, repeats: int) -> None:
        self.shape, self.device, self.repeats = shape, device, repeats
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        text = shape.grid.prefix
        self.places = dealt_places((text, shape.tokens - text), self.ranks).to(device)
        self.qkv = [x.transpose(1, 2) for x in draw(shape, device)]  # the same on every rank
        own = self.places.tensor_split(self.ranks)[self.rank]
        self.own = [x[:, own] for x in self.qkv]
        self.order = grid_order(shape.grid).on(device)

    def row(self, way: str) -> dict[str, Any]:
        """Times of one way."""
        shape, settings, policy = self.shape, None, sparge.SparsePolicy()
        heads, work = torch.arange(shape.heads), torch.ones(shape.heads)
        if way in (SPREAD, DEALT):
            settings = spread(way, shape.grid, shape.heads, 0.3, self.device).head_settings
            assert settings is not None
            work = settings.density.cpu()
            heads = balanced_heads(work, self.ranks) if way == DEALT else heads
        elif way != TORCH:
            policy = sparge.SparsePolicy(topk=float(way.removeprefix("topk ")))
        work = work_of_ranks(work[heads], self.ranks)
        dealt, back = heads.to(self.device), heads.argsort().to(self.device)

        attend = RankAttention(policy, grid=shape.grid, places=self.places, min_tokens=0)
        own_settings = None if settings is None else settings.heads_slice(dealt)
        own_heads = heads_of_rank(shape.heads, self.rank, self.ranks)

        def on_rank(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if way == TORCH:
                return _torch(q, k, v)
            return attend(q, k, v, layout="NHD", head_settings=own_settings, heads=own_heads)

        def on_one() -> Tensor:
            q, k, v = self.qkv
            if way == TORCH:
                return _torch(q, k, v)
            return sparge.attention(
                q, k, v, policy, layout="NHD", order=self.order, head_settings=settings
            )

        def sent() -> list[Tensor]:
            return [to_heads(x[:, :, dealt] if way == DEALT else x) for x in self.own]

        def joined(out: Tensor) -> Tensor:
            own = to_tokens(out)
            return own[:, :, back] if way == DEALT else own

        mine = sent()
        if self.rank == 0:
            on_one()  # compiles the kernels, which the others find in the cache
        dist.barrier()
        out = on_rank(*mine)
        one, two = on_one(), self._whole(joined(out))
        of_ranks = self._of_ranks(self._ms(lambda: on_rank(*mine)))
        one_ms = max(self._of_ranks(self._ms(on_one)))
        two_ms = max(self._of_ranks(self._ms(lambda: joined(on_rank(*sent())))))
        all_to_all = max(self._of_ranks(self._ms(lambda: (sent(), joined(out)))))
        return {
            "shape": shape.name, "heads": shape.heads, "tokens": shape.tokens,
            "head_dim": shape.head_dim, "way": way, "ranks": self.ranks, "one_ms": one_ms,
            "two_ms": two_ms, "ratio": one_ms / two_ms, "attention_ms": max(of_ranks),
            "attention_ms_of_ranks": of_ranks, "all_to_all_ms": all_to_all,
            "all_to_all_share": all_to_all / two_ms,
            "most_work_to_mean": float(work.max() / work.mean()),
            "density_of_ranks": self._of_ranks(attend.stats.density),
            "rel_l2": rel_l2(two, one), "same_bits": torch.equal(two, one),
        }  # fmt: skip

    def _ms(self, work: Callable[[], object]) -> float:
        return median_on_ranks(work, self.device, self.repeats)

    def _of_ranks(self, value: float) -> list[float]:
        return all_ranks(value, self.device)

    def _whole(self, x: Tensor) -> Tensor:
        """Tokens of all ranks as one GPU has them."""
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(found, x)
        return torch.cat(found, 1)[:, self.places.argsort()]


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own attention of (B, N, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def measure(
    device: torch.device, shapes: list[Shape], topk: list[float], options: argparse.Namespace
) -> None:
    """Work of one rank; the first one prints the rows."""
    for shape in shapes:
        sharing = Sharing(shape, device, options.repeats)
        for way in ways(topk):
            row = sharing.row(way) | {"repeats": options.repeats, "gpu": _name(device)}
            row |= {"torch": torch.__version__, "commit": options.commit or commit()}
            if dist.get_rank():
                continue
            print(_line(row))
            add_row(row, options.out)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['shape']}, {row['way']}: one {row['one_ms']:.3g} ms, {row['ranks']} ranks "
        f"{row['two_ms']:.3g} ms ({row['ratio']:.2f} times as fast), all-to-all "
        f"{row['all_to_all_share']:.0%}, most work to mean {row['most_work_to_mean']:.2f}"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        description=about[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["wan480", "flux1k"])
    add_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    check_options(args)
    shapes = [SHAPES[name] for name in args.shapes]
    shapes = [tiny(shape) for shape in shapes] if args.tiny else shapes
    run_ranks(measure, args.device, args.ranks, shapes, args.topk, args)


if __name__ == "__main__":
    main()
