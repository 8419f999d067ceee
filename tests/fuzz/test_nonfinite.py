# SPDX-License-Identifier: Apache-2.0
"""NaN and inf in q, k or v are not lost: what float64 attention over all valid keys makes
non-finite is so here too, and nothing of other heads and batch entries changes by a bit.

One in K or V may make all rows of its batch entry and of the query heads that read it non-finite,
whether their blocks are kept or not. SPARGE_FUZZ_SEED runs one case, as in test_fuzz.py.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import HeadSettings, Precision, SparsePolicy, TokenGrid, grid_order

CASES = 100
BATCH, HEADS, KV_HEADS = 2, 4, 2
GRID = TokenGrid(3, 6, 9, suffix=40)


@dataclass(frozen=True, eq=False)
class Spoilt:
    """A call whose numbers are all finite but one, or one row."""

    tensors: dict[str, Tensor]
    policy: SparsePolicy
    options: dict[str, Any]
    name: str
    value: float
    entry: int
    head: int
    token: int
    channels: slice

    def spoil(self) -> dict[str, Tensor]:
        spoilt = {name: x.clone() for name, x in self.tensors.items()}
        spoilt[self.name][self.entry, self.head, self.token, self.channels] = self.value
        return spoilt

    @property
    def touched(self) -> Tensor:
        """(B, H) bool: heads that read the number."""
        touched = torch.zeros(BATCH, HEADS, dtype=torch.bool)
        group = HEADS // KV_HEADS
        first = self.head if self.name == "q" else self.head * group
        touched[self.entry, first : first + (1 if self.name == "q" else group)] = True
        return touched

    def describe(self) -> str:
        where = (self.entry, self.head, self.token)
        return f"{self.value} in {self.name} {where}: {self.policy}, {list(self.options)}"


def draw(seed: int, device: str) -> Spoilt:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ordered = rng.random() < 0.4
    causal = not ordered and rng.random() < 0.3
    queries, head_dim = rng.choice((60, 130, 190)), rng.choice((8, 40, 64, 128))
    keys = queries if causal else rng.choice((65, 200, 260))
    if ordered:
        queries = keys = GRID.tokens
    dtype = rng.choice((torch.bfloat16, torch.float16))
    shape = {"q": (HEADS, queries), "k": (KV_HEADS, keys), "v": (KV_HEADS, keys)}
    tensors = {
        name: torch.randn(BATCH, *sizes, head_dim, generator=generator).to(device, dtype)
        for name, sizes in shape.items()
    }
    options: dict[str, Any] = {"is_causal": causal}
    if rng.random() < 0.4:
        least = GRID.tokens - GRID.suffix if ordered else keys // 2
        options["key_lengths"] = torch.tensor([least, keys], dtype=torch.int32, device=device)
    precision = rng.choice(list(Precision))
    if ordered:
        options["order"] = grid_order(GRID)
        if rng.random() < 0.6:
            pool_weight = rng.choice((0.0, 1.0))
            options["head_settings"] = HeadSettings.uniform(HEADS, 0.4, pool_weight, device=device)
    name = rng.choice("qkv")
    token = rng.randrange(queries if name == "q" else keys // 2)
    channel = rng.randrange(head_dim)
    whole = rng.random() < 0.2
    return Spoilt(
        tensors,
        SparsePolicy(topk=rng.choice((0.3, 0.6, 1.0)), precision=precision),
        options,
        name,
        rng.choice((torch.nan, torch.inf, -torch.inf)),
        rng.randrange(BATCH),
        rng.randrange(HEADS if name == "q" else KV_HEADS),
        token,
        slice(None) if whole else slice(channel, channel + 1),
    )


def lost(spoilt: Spoilt, tensors: dict[str, Tensor]) -> Tensor:
    """(B, H, Nq) bool: float64 attention over all valid keys gives no finite row. Under causal only
    the keys that a row sees are valid."""
    q, k, v = (tensors[name].double() for name in "qkv")
    group, queries, keys = HEADS // KV_HEADS, q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    token = torch.arange(keys, device=q.device)
    lengths = spoilt.options.get("key_lengths")
    valid = torch.ones(BATCH, 1, queries, keys, dtype=torch.bool, device=q.device)
    if lengths is not None:
        valid = valid & (token < lengths[:, None, None, None])
    if spoilt.options["is_causal"]:
        valid = valid & (token <= torch.arange(queries, device=q.device)[:, None])
    logits = q @ k.mT * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~valid, -torch.inf).softmax(-1)
    # A weight of 0 on a value that is no number gives NaN; pairs that do not exist give nothing.
    bad_values = ~v.isfinite().all(-1).unsqueeze(2) & valid
    return ~(weights @ v.nan_to_num(0, 0, 0)).isfinite().all(-1) | bad_values.any(-1)


@pytest.mark.parametrize("part", range(4))
def test_non_finite_numbers(device: str, part: int) -> None:
    assert sparge.capabilities(device).usable is (device == "cuda")
    asked = os.environ.get("SPARGE_FUZZ_SEED")
    seeds = range(part, CASES, 4) if asked is None else [int(asked)] * (part == 0)
    faults: list[str] = []
    for seed in seeds:
        spoilt = draw(seed, device)
        for fault in faults_of(spoilt):
            faults.append(f"SPARGE_FUZZ_SEED={seed}: {fault}; {spoilt.describe()}")
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)


def faults_of(spoilt: Spoilt) -> list[str]:
    attention: Any = sparge.attention
    given = {"return_lse": True, "output_dtype": torch.float32, **spoilt.options}
    clean_out, clean_lse = attention(*spoilt.tensors.values(), spoilt.policy, **given)
    tensors = spoilt.spoil()
    out, lse = attention(*tensors.values(), spoilt.policy, **given)
    assert clean_out.isfinite().all()
    faults = []
    untouched = ~spoilt.touched.to(out.device)
    same = (out == clean_out).all(-1) & (lse == clean_lse)
    if not same[untouched].all():
        faults.append("another head or batch entry changed")
    must = lost(spoilt, tensors)
    bad = ~out.isfinite().all(-1)
    if (must & ~bad).any():
        faults.append(f"{int((must & ~bad).sum())} of {int(must.sum())} rows are finite")
    if spoilt.name == "q":
        rows = torch.arange(out.shape[2], device=out.device) != spoilt.token
        kept = same | ~rows | untouched.unsqueeze(-1)
        if not (kept | ~bad).all():
            faults.append("a NaN in Q spoils other rows")
    if spoilt.name != "v" and (must & ~lse.isnan()).any():
        faults.append(f"LSE is {lse[must & ~lse.isnan()][0]:g} and not NaN")
    if lse[spoilt.touched.to(out.device)].eq(-torch.inf).any():
        faults.append("LSE is -inf, as of a row without keys")
    return faults


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("precision", list(Precision))
def test_finite_inputs_beyond_the_length_do_not_matter(
    device: str, precision: Precision, head_dim: int
) -> None:
    """NaN in keys that do not exist is no NaN."""
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        torch.randn(1, 2, 300, head_dim, generator=generator).to(device, torch.bfloat16)
        for _ in range(3)
    )
    lengths = torch.tensor([170], dtype=torch.int32, device=device)
    policy = SparsePolicy(topk=0.5, precision=precision)
    clean = sparge.attention(q, k, v, policy, key_lengths=lengths)
    k[:, :, 170:], v[:, :, 170:] = torch.nan, torch.inf
    out = sparge.attention(q, k, v, policy, key_lengths=lengths)
    assert isinstance(clean, Tensor) and clean.isfinite().all()
    assert torch.equal(out, clean)
