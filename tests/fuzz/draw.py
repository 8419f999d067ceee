# SPDX-License-Identifier: Apache-2.0
"""A random call of the library from a number: the same number gives the same call everywhere."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from sparge import (
    HeadSettings,
    Precision,
    SparsePolicy,
    TokenGrid,
    TokenOrder,
    cube_order,
    grid_order,
)
from sparge.order.grid import raster_order, unmeasured_order
from tests.fuzz.data import KINDS, MEMORY, Sizes, draw_values, lay_out, poison_beyond

WAYS = (*("attention",) * 3, "plan", "mask", *("ordered",) * 2)
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

    def describe(self) -> str:
        """Description for whoever has to find out what went wrong."""
        tensors = ", ".join(
            f"{name} {str(x.dtype)[6:]} {tuple(self.heads_first(name).shape)} strides {x.stride()}"
            for name, x in (("q", self.q), ("k", self.k), ("v", self.v))
        )
        default = SparsePolicy()
        policy = {
            each.name: _short(getattr(self.policy, each.name))
            for each in fields(self.policy)
            if getattr(self.policy, each.name) is not getattr(default, each.name)
        }
        options = {name: _short(value) for name, value in self.options.items()}
        return f"{self.way}, {self.data}, {self.layout}: {tensors}; {policy}; {options}"


def draw_case(seed: int, device: torch.device | str = "cpu") -> Case:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    way = rng.choice(WAYS)
    budgeted = way == "ordered"
    data = (
        rng.choice(("clusters", "smooth")) if budgeted and rng.random() < 0.5 else rng.choice(KINDS)
    )
    grid = _draw_grid(rng) if budgeted and rng.random() < 0.4 else None
    is_causal = grid is None and rng.random() < 0.3
    sizes = _draw_sizes(rng, is_causal, grid, many_keys=budgeted and not is_causal)
    layout = rng.choice(("HND", "NHD"))
    memory = {name: rng.choice(MEMORY) for name in "qkv"}
    lengths = _draw_lengths(rng, sizes, grid) if rng.random() < 0.4 else None
    values = draw_values(data, sizes, generator)
    poisoned = lengths is not None and "expanded" not in (memory["k"], memory["v"])
    dtypes = _draw_dtypes(rng, data)
    tensors = []
    for name, dtype in zip("qkv", dtypes, strict=True):
        x = values[name].to(dtype)
        if poisoned and lengths is not None and name != "q":
            poison_beyond(x, lengths, rng.choice((torch.nan, torch.inf, -torch.inf)))
        tensors.append(lay_out(x, layout, memory[name], device, rng))

    options: dict[str, Any] = {"is_causal": is_causal}
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.01, 0.1, 0.3, 2.0**-7))
    if lengths is not None:
        options["key_lengths"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    options["output_dtype"] = rng.choice((None, *DTYPES, torch.float32))
    if data == "huge values" and torch.float16 in (options["output_dtype"], dtypes[0]):
        options["output_dtype"] = torch.float32
    policy = _draw_policy(rng, sizes, device, text=0.05 if budgeted else 0.2)
    options["out_layout"] = rng.choice((None, "HND", "NHD"))
    options["return_lse"] = rng.random() < 0.5
    if way == "mask":
        options["block_mask"] = _draw_mask(rng, generator, sizes, device)
    if budgeted:
        order = None if grid is None else _draw_order(rng, grid)
        with_mean = not is_causal and policy.precision is not Precision.SIXTEEN_BIT
        order_kinds = 1 if order is None else order.order_kinds
        options["order"] = order
        if order is None or rng.random() < 0.8:
            options["head_settings"] = _draw_settings(rng, sizes, device, order_kinds, with_mean)
    q, k, v = tensors
    return Case(seed, way, data, q, k, v, policy, layout, options)


#: Queries and keys at most. Routing shows with many keys, and edges in all.
SHAPES = ((40, 900), (40, 900), (150, 500), (150, 500), (400, 200), (70, 70))


def _draw_sizes(
    rng: random.Random, is_causal: bool, grid: TokenGrid | None, many_keys: bool
) -> Sizes:
    most_queries, most_keys = rng.choice(SHAPES[2:] if is_causal else SHAPES)
    queries, keys = _draw_tokens(rng, most_queries), _draw_tokens(rng, most_keys)
    if many_keys and rng.random() < 0.7:  # budgets show where blocks differ
        queries, keys = _draw_tokens(rng, 40), rng.randint(400, 900)
    if is_causal:
        keys = queries = max(queries, keys)
    if grid is not None:
        keys = queries = grid.tokens
    most_heads = max(1, rng.choice((10_000, 40_000, 70_000)) // (queries * keys))
    if grid is not None:  # heads of one call take different token orders
        most_heads = rng.choice((1, 2, 4, 6))
    while True:
        batch, kv_heads = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
        heads = kv_heads * rng.choice((1, 1, 2, 3))
        if batch * heads <= most_heads:
            return Sizes(batch, heads, kv_heads, queries, keys, rng.choice(HEAD_DIMS))


def _draw_tokens(rng: random.Random, most: int) -> int:
    if rng.random() < 0.25:
        return rng.choice([edge for edge in EDGES if most // 4 <= edge <= most])
    return rng.randint(most // 3, most)


def _draw_dtypes(rng: random.Random, data: str) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    allowed = (torch.bfloat16, torch.float32) if data == "huge values" else DTYPES
    one = rng.choice(allowed)
    if rng.random() < 0.7:
        return one, one, one
    return one, rng.choice(allowed), rng.choice(allowed)


def _draw_lengths(rng: random.Random, sizes: Sizes, grid: TokenGrid | None) -> list[int]:
    least = 0 if grid is None else grid.tokens - grid.suffix
    edges = (least, min(least + 1, sizes.keys), sizes.keys, sizes.keys + 7)
    return [rng.choice((*edges, rng.randint(least, sizes.keys))) for _ in range(sizes.batch)]


def _per_head(
    rng: random.Random, heads: int, device: torch.device | str, low: float, high: float
) -> float | Tensor:
    """A number, one in a tensor, or a tensor with one for each head, of some dtype and stride."""
    if rng.random() < 0.6:
        return round(rng.uniform(low, high), 3)
    dtype = rng.choice((torch.float16, torch.float32, torch.float64))
    if rng.random() < 0.2:
        return torch.tensor(rng.uniform(low, high), dtype=dtype, device=device)
    numbers = [rng.uniform(low, high) for _ in range(2 * heads)]
    values = torch.tensor(numbers, dtype=dtype, device=device)
    return values[::2] if rng.random() < 0.5 else values[:heads]


def _draw_policy(
    rng: random.Random, sizes: Sizes, device: torch.device | str, text: float
) -> SparsePolicy:
    def per_head(low: float, high: float) -> float | Tensor:
        return _per_head(rng, sizes.heads, device, low, high)

    numbers: dict[str, Any] = {"topk": per_head(0.0, 0.8), "cdfthreshd": per_head(0.05, 1.0)}
    if rng.random() < 0.1:
        numbers["topk"] = 1.0
    if rng.random() < 0.2:
        numbers["simthreshd1"] = per_head(0.0, rng.choice((0.03, 0.9)))
    if rng.random() < 0.3:
        numbers["pvthreshd"] = per_head(0.0, rng.choice((0.5, 3.0, 12.0)))
    some = ((1, 0), (64, 0), (70, 0), (0, 1), (0, 64), (30, 90), (10_000, 0))
    prefix, suffix = rng.choice(some) if rng.random() < text else (0, 0)
    return SparsePolicy(
        select_by=rng.choice(("topk", "topk", "cdf")),
        attention_sink=rng.random() < 0.3,
        keep_diagonal=rng.random() < 0.7,
        exact_prefix=prefix,
        exact_suffix=suffix,
        smooth_k=rng.random() < 0.8,
        precision=rng.choice(
            (Precision.INT8, Precision.INT8, Precision.INT8_FP16, Precision.SIXTEEN_BIT)
        ),
        **numbers,
    )


def _draw_mask(
    rng: random.Random, generator: torch.Generator, sizes: Sizes, device: torch.device | str
) -> Tensor:
    """(B, H, nq, nk) of some dtype, where any number but 0 keeps; maybe a transposed view."""
    blocks = (-(-sizes.queries // 128), -(-sizes.keys // 64))
    shape = (sizes.batch, sizes.heads, *blocks)
    kept = torch.rand(shape, generator=generator) < rng.choice((0.1, 0.5, 0.9))
    dtype = rng.choice(
        (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32)
    )
    marks = kept.to(device, dtype) * (1 if dtype == torch.bool else rng.choice((1, 2, 64)))
    marks = marks.to(dtype)
    return marks.mT.contiguous().mT if rng.random() < 0.4 else marks


def _draw_grid(rng: random.Random) -> TokenGrid:
    frames = rng.choice((1, 2, 3, 3, 4))
    height = rng.randint(1, 12)
    return TokenGrid(
        frames,
        height,
        rng.randint(130 // (frames * height) + 1, 300 // (frames * height) + 1),
        prefix=rng.choice((0, 0, 0, 1, 33, 70)),
        suffix=rng.choice((0, 0, 0, 1, 20, 66)),
        lead_frames=rng.choice((0, 0, 0, 0, 1, frames)),
    )


def _draw_order(rng: random.Random, grid: TokenGrid) -> TokenOrder:
    turn = rng.randrange(3)
    kind = rng.choice(("cubes", "all", "all", "unmeasured", "raster"))
    if kind == "raster" and grid.suffix == 0:  # key lengths may cut a suffix, which it has not
        return raster_order(grid.tokens)
    if kind == "unmeasured":
        return unmeasured_order(grid, turn)
    return cube_order(grid, turn) if kind == "cubes" else grid_order(grid, turn)


def _draw_settings(
    rng: random.Random,
    sizes: Sizes,
    device: torch.device | str,
    order_kinds: int,
    with_mean: bool,
) -> HeadSettings:
    def numbers(*choices: float) -> Tensor:
        return torch.tensor([float(rng.choice(choices)) for _ in range(sizes.heads)], device=device)

    def integers(*choices: int) -> Tensor:
        drawn = [rng.choice(choices) for _ in range(sizes.heads)]
        return torch.tensor(drawn, dtype=torch.int32, device=device)

    pools = rng.random() < 0.7
    zeros = numbers(0.0)
    return HeadSettings(
        density=numbers(0.0, 0.15, 0.3, 0.3, 0.5, 0.5, 0.7, 1.0),
        pool_weight=numbers(0.0, 0.5, 1.0, 1.3) if pools else zeros,
        router=integers(0, 1) if pools else zeros.int(),
        floor=rng.choice((1, 1, 1, 2, 4)),
        pools=pools,
        order_kind=integers(*range(order_kinds + 1))
        if order_kinds > 1 and rng.random() < 0.8
        else None,
        output_scale=numbers(0.7, 1.0, 1.2) if with_mean and rng.random() < 0.5 else None,
    )


def _short(value: object) -> object:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]} {value.tolist()}" if value.numel() < 12 else value.shape
    return value.segments if isinstance(value, TokenOrder) else value
