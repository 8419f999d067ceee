# SPDX-License-Identifier: Apache-2.0
"""A random call of the library from a number: the same number gives the same call everywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparge import HeadSettings, Precision, SparsePolicy, TokenGrid, TokenOrder
from sparge.order.grid import grid_order, raster_order, unmeasured_order
from tests.fuzz.data import KINDS, MEMORY, Sizes, draw_values, lay_out, poison_beyond

WAYS = (*("attention",) * 4, "mask", *("ordered",) * 2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EDGES = (1, 2, *(37, 63, 64, 65), *(127, 128, 129), *(192, 193), *(257, 320, 321, 577))
HEAD_DIMS = (1, 2, 3, 5, 8, 8, 16, 16, 24, 32, 32, 35, 40, 64, 64, 80, 96, 128)


@dataclass(frozen=True, eq=False)
class Case:
    """q, k, v lie as `layout` says; `options` are keywords of `sparge.attention`."""

    seed: int
    way: str
    data: str
    q: Tensor
    k: Tensor
    v: Tensor
    policy: SparsePolicy
    layout: str
    options: dict[str, Any] = field(default_factory=dict)

    def heads_first(self, name: str) -> Tensor:
        x: Tensor = getattr(self, name)
        return x if self.layout == "HND" else x.transpose(1, 2)

    @property
    def scale(self) -> float:
        given = self.options.get("scale")
        return self.q.shape[-1] ** -0.5 if given is None else given

    @property
    def is_causal(self) -> bool:
        return bool(self.options.get("is_causal"))

    @property
    def order(self) -> TokenOrder | None:
        return self.options.get("order")

    @property
    def head_settings(self) -> HeadSettings | None:
        return self.options.get("head_settings")


#: Queries and keys at most. Routing shows with many keys, and edges in all.
SHAPES = ((40, 900), (40, 900), (150, 500), (150, 500), (400, 200), (70, 70))


def draw_case(seed: int, device: torch.device | str = "cpu") -> Case:
    return _Draw(seed, device).case()


class _Draw:
    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.seed, self.device = seed, device
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.chance, self.choice = self.rng.random, self.rng.choice

    def case(self) -> Case:
        way = self.choice(WAYS)
        tuned = way == "ordered"
        kinds = ("clusters", "smooth") if tuned and self.chance() < 0.5 else KINDS
        data = self.choice(kinds)
        grid = self.grid() if tuned and self.chance() < 0.4 else None
        is_causal = grid is None and self.chance() < 0.3
        self.sizes = self.draw_sizes(is_causal, grid, many_keys=tuned and not is_causal)
        layout = self.choice(("HND", "NHD"))
        memory = {name: self.choice(MEMORY) for name in "qkv"}
        lengths = self.lengths(grid) if self.chance() < 0.4 else None
        values = draw_values(data, self.sizes, self.generator)
        poisoned = lengths is not None and "expanded" not in (memory["k"], memory["v"])
        dtypes = self.dtypes(data)
        tensors = []
        for name, dtype in zip("qkv", dtypes, strict=True):
            x = values[name].to(dtype)
            if poisoned and lengths is not None and name != "q":
                poison_beyond(x, lengths, self.choice((torch.nan, torch.inf, -torch.inf)))
            tensors.append(lay_out(x, layout, memory[name], self.device, self.rng))

        options: dict[str, Any] = {"is_causal": is_causal}
        if self.chance() < 0.3:
            options["scale"] = self.choice((0.01, 0.1, 0.3, 2.0**-7))
        if lengths is not None:
            options["key_lengths"] = self.tensor(lengths, torch.int32)
        options["output_dtype"] = self.choice((None, *DTYPES, torch.float32))
        if data == "huge values" and torch.float16 in (options["output_dtype"], dtypes[0]):
            options["output_dtype"] = torch.float32
        policy = self.policy(text=0.05 if tuned else 0.2)
        options["out_layout"] = self.choice((None, "HND", "NHD"))
        options["return_lse"] = self.chance() < 0.5
        if way == "mask":
            options["block_mask"] = self.mask()
        if tuned:
            order = options["order"] = None if grid is None else self.order(grid)
            scaled = not is_causal and policy.precision is not Precision.SIXTEEN_BIT
            if order is None or self.chance() < 0.8:
                order_kinds = 1 if order is None else order.order_kinds
                options["head_settings"] = self.head_settings(order_kinds, scaled)
            elif self.chance() < 0.5:
                options["block_mask"] = self.mask(order)
        q, k, v = tensors
        return Case(self.seed, way, data, q, k, v, policy, layout, options)

    def tensor(self, numbers: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def draw_sizes(self, is_causal: bool, grid: TokenGrid | None, many_keys: bool) -> Sizes:
        most_queries, most_keys = self.choice(SHAPES[2:] if is_causal else SHAPES)
        queries, keys = self.tokens(most_queries), self.tokens(most_keys)
        if many_keys and self.chance() < 0.7:  # head settings show where blocks differ
            queries, keys = self.tokens(40), self.rng.randint(400, 900)
        if is_causal:
            keys = queries = max(queries, keys)
        if grid is not None:
            keys = queries = grid.tokens
        most_heads = max(1, self.choice((10_000, 40_000, 70_000)) // (queries * keys))
        if grid is not None:  # heads of one call take different token orders
            most_heads = self.choice((1, 2, 4, 6))
        while True:
            batch, kv_heads = self.choice((1, 1, 2, 3)), self.choice((1, 1, 2, 3))
            heads = kv_heads * self.choice((1, 1, 2, 3))
            if batch * heads <= most_heads:
                return Sizes(batch, heads, kv_heads, queries, keys, self.choice(HEAD_DIMS))

    def tokens(self, most: int) -> int:
        if self.chance() < 0.25:
            return self.choice([edge for edge in EDGES if most // 4 <= edge <= most])
        return self.rng.randint(most // 3, most)

    def dtypes(self, data: str) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        allowed = (torch.bfloat16, torch.float32) if data == "huge values" else DTYPES
        one = self.choice(allowed)
        if self.chance() < 0.7:
            return one, one, one
        return one, self.choice(allowed), self.choice(allowed)

    def lengths(self, grid: TokenGrid | None) -> list[int]:
        keys = self.sizes.keys
        least = 0 if grid is None else grid.tokens - grid.suffix
        edges = (least, min(least + 1, keys), keys, keys + 7)
        drawn = range(self.sizes.batch)
        return [self.choice((*edges, self.rng.randint(least, keys))) for _ in drawn]

    def per_head(self, low: float, high: float) -> float | Tensor:
        """A number, one in a tensor, or one for each head, of some dtype and stride."""
        if self.chance() < 0.6:
            return round(self.rng.uniform(low, high), 3)
        dtype = self.choice((torch.float16, torch.float32, torch.float64))
        if self.chance() < 0.2:
            return torch.tensor(self.rng.uniform(low, high), dtype=dtype, device=self.device)
        heads = self.sizes.heads
        values = self.tensor([self.rng.uniform(low, high) for _ in range(2 * heads)], dtype)
        return values[::2] if self.chance() < 0.5 else values[:heads]

    def policy(self, text: float) -> SparsePolicy:
        given: dict[str, Any] = {
            "topk": self.per_head(0.0, 0.8),
            "cdfthreshd": self.per_head(0.05, 1.0),
        }
        if self.chance() < 0.1:
            given["topk"] = 1.0
        if self.chance() < 0.2:
            given["simthreshd1"] = self.per_head(0.0, self.choice((0.03, 0.9)))
        if self.chance() < 0.3:
            given["pvthreshd"] = self.per_head(0.0, self.choice((0.5, 3.0, 12.0)))
        some = ((1, 0), (64, 0), (70, 0), (0, 1), (0, 64), (30, 90), (10_000, 0))
        prefix, suffix = self.choice(some) if self.chance() < text else (0, 0)
        eight_bit = (Precision.INT8, Precision.INT8, Precision.INT8_FP16)
        return SparsePolicy(
            select_by=self.choice(("topk", "topk", "cdf")),
            attention_sink=self.chance() < 0.3,
            keep_diagonal=self.chance() < 0.7,
            exact_prefix=prefix,
            exact_suffix=suffix,
            smooth_k=self.chance() < 0.8,
            precision=self.choice((*eight_bit, Precision.SIXTEEN_BIT)),
            **given,
        )

    def mask(self, order: TokenOrder | None = None) -> Tensor:
        """(B, H, nq, nk) of some dtype, where any number but 0 keeps; maybe a transposed view."""
        sizes = self.sizes
        shape = (sizes.batch, sizes.heads, -(-sizes.queries // 128), -(-sizes.keys // 64))
        if order is not None:
            shape = (*shape[:2], order.query_blocks, order.key_blocks)
        kept = torch.rand(shape, generator=self.generator) < self.choice((0.1, 0.5, 0.9))
        integers = (torch.uint8, torch.int8, torch.int32, torch.int64)
        dtype = self.choice((torch.bool, *integers))
        marks = kept.to(self.device, dtype)
        if dtype != torch.bool:
            marks = marks * self.choice((1, 2, 64))
        return marks.mT.contiguous().mT if self.chance() < 0.4 else marks

    def grid(self) -> TokenGrid:
        frames, height = self.choice((1, 2, 3, 3, 4)), self.rng.randint(1, 12)
        area = frames * height
        return TokenGrid(
            frames,
            height,
            self.rng.randint(130 // area + 1, 300 // area + 1),
            prefix=self.choice((0, 0, 0, 1, 33, 70)),
            suffix=self.choice((0, 0, 0, 1, 20, 66)),
            lead_frames=self.choice((0, 0, 0, 0, 1, frames)),
        )

    def order(self, grid: TokenGrid) -> TokenOrder:
        variant = self.rng.randrange(3)
        kind = self.choice(("cubes", "all", "all", "unmeasured", "raster"))
        if kind == "raster" and grid.suffix == 0:  # key lengths may cut a suffix, which it has not
            return raster_order(grid.tokens)
        if kind == "unmeasured":
            return unmeasured_order(grid, variant)
        order = grid_order(grid, variant)
        return order.of_kind(0) if kind == "cubes" else order

    def head_settings(self, order_kinds: int, scaled: bool) -> HeadSettings:
        def drawn(*choices: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return self.tensor([self.choice(choices) for _ in range(self.sizes.heads)], dtype)

        pools = self.chance() < 0.7
        zeros = drawn(0.0)
        return HeadSettings(
            density=drawn(0.0, 0.15, 0.3, 0.3, 0.5, 0.5, 0.7, 1.0),
            pool_weight=drawn(0.0, 0.5, 1.0, 1.3) if pools else zeros,
            router=drawn(0, 1, dtype=torch.int32) if pools else zeros.int(),
            pools=pools,
            order_kind=drawn(*range(order_kinds + 1), dtype=torch.int32)
            if order_kinds > 1 and self.chance() < 0.8
            else None,
            output_scale=drawn(0.7, 1.0, 1.2) if scaled and self.chance() < 0.5 else None,
        )
