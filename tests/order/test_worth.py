# SPDX-License-Identifier: Apache-2.0
"""Estimated seconds beside measured ones; nothing is said where nothing was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from sparge import AttentionStats, SparsePolicy, TokenGrid, attention, cube_order
from sparge.speed.worth import (
    Call,
    Rates,
    density_with_exact,
    estimate,
    faster_kernel,
    proportions_for,
    rates_for,
    torch_kernel,
)

H200 = "NVIDIA H200"
CALL = Call(tokens=4608, heads=24, head_dim=128)
FOUND = rates_for(H200, 128)
assert FOUND is not None
RATES: Rates = FOUND


def test_another_kernel_is_faster_where_it_wins_by_more_than_the_margin() -> None:
    assert faster_kernel(CALL.pairs, RATES, "flash") == "cudnn"
    assert faster_kernel(CALL.pairs, RATES, "cudnn") is None
    assert faster_kernel(CALL.pairs, RATES, "math") is None, "nothing is known of it"
    dense = {name: replace(each, host=1.0) for name, each in RATES.dense.items()}
    assert faster_kernel(1, replace(RATES, dense=dense), "flash") is None, "the host takes as long"
    assert faster_kernel(CALL.pairs, replace(RATES, margin=2.0), "flash") is None


@pytest.mark.parametrize("kernel", ["", "cudnn", "flash"])
@pytest.mark.parametrize("pooled", [None, 1.0])
def test_at_the_break_even_sparse_is_faster_by_the_margin(
    kernel: str, pooled: float | None
) -> None:
    call = replace(CALL, tokens=16384, pooled=pooled)
    break_even = estimate(call, 0.5, RATES, kernel).break_even
    found = estimate(call, break_even, RATES, kernel)
    assert break_even > 0
    assert found.dense / found.sparse == pytest.approx(1 + RATES.margin)


def test_the_host_takes_a_least_time_and_batch_entries_count_as_heads() -> None:
    tokens = (64, 1024, 4096, 16384, 65536)
    found = [estimate(replace(CALL, tokens=each), 0.5, RATES) for each in tokens]
    even = [each.break_even for each in found]
    assert even[0] == 0 and even == sorted(even) and even[-1] > 0.5
    assert found[0].sparse == RATES.sparse.host
    slow = replace(RATES, sparse=replace(RATES.sparse, host=1.0))
    assert estimate(CALL, 0.1, slow).sparse == 1.0 and estimate(CALL, 0.1, slow).break_even == 0
    assert estimate(replace(CALL, pooled=0.0), 0.1, slow).break_even > 0, "another host time"
    one, two = (estimate(replace(CALL, heads=heads), 0.3, RATES).sparse for heads in (240, 480))
    launch, long = RATES.sparse.launch, replace(CALL, tokens=16384)
    parts = ({}, {"pv_filter": True}, {"pooled": 0.0}, {"pooled": 1.0})
    plain, *more = (estimate(replace(long, **part), 0.3, RATES).sparse for part in parts)
    assert min(more) > 1.01 * plain and more[2] > more[1], "each part takes its time"
    assert two - launch == pytest.approx(2 * (one - launch))


@pytest.mark.parametrize(
    ("gpu", "head_dim"),
    [("", 128), ("NVIDIA H20", 128), ("NVIDIA GeForce RTX 4090", 128), (H200, 96)],
)
def test_proportions_of_another_gpu_stand_in_where_nothing_was_measured(gpu, head_dim) -> None:
    """GPUs of one architecture differ: an H20 has a sixth of an H200's tensor cores."""
    assert rates_for(gpu, head_dim) is None
    known = gpu and head_dim == 128
    assert proportions_for(gpu, head_dim) == (RATES if known else None)


@pytest.mark.parametrize("topk", [0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("text", [0, 256])
def test_text_counts_in_the_density(generator: torch.Generator, topk: float, text: int) -> None:
    grid = TokenGrid(4, 16, 16, prefix=text)
    q, k, v = torch.randn(3, 1, 1, grid.tokens, 16, generator=generator)
    stats = AttentionStats("cpu")
    attention(q, k, v, SparsePolicy(topk=topk), order=cube_order(grid), stats=stats)
    expected = density_with_exact(topk, text / grid.tokens)
    assert stats.density == pytest.approx(expected, abs=1 / 16)  # of 16 key blocks one is cut off


@pytest.mark.parametrize(("order", "kernel"), [("FLASH_ATTENTION", "flash"), ("MATH", "")])
def test_pytorch_says_which_kernel_it_takes(order: str, kernel: str) -> None:
    q = torch.randn(1, 2, 64, 64)
    assert torch_kernel(q, q, q, [SDPBackend.__members__[order]]) == kernel
    assert torch_kernel(q, q, q) in ("flash", "")


@pytest.mark.parametrize("answer", [lambda *_: 99, lambda: 0, None])
def test_a_pytorch_that_does_not_say_so_is_no_error(answer, monkeypatch) -> None:
    if answer is None:
        monkeypatch.delattr(torch, "_fused_sdp_choice")
    else:
        monkeypatch.setattr(torch, "_fused_sdp_choice", answer)
    q = torch.randn(1, 2, 64, 64)
    assert torch_kernel(q, q, q) == torch_kernel(q, q, q, [SDPBackend.MATH]) == ""


#: Milliseconds of calls at commit 38040cd, in another run than the one that was fitted.
MEASURED = [
    (Call(4608, 24, 128), 0.4815, 0.3215, {"cudnn": 0.4971, "flash": 1.0154}),
    (Call(8192, 24, 128, True), 0.5, 0.7464, {"cudnn": 1.481, "flash": 2.9949}),
    (Call(32768, 40, 64, False, 0.5), 0.1022, 2.8811, {"cudnn": 24.17, "flash": 35.9318}),
]


@pytest.mark.parametrize(("call", "density", "ours", "dense"), MEASURED)
def test_hopper_is_as_fast_as_measured(call: Call, density: float, ours: float, dense) -> None:
    rates = rates_for(H200, call.head_dim)
    assert rates is not None
    for kernel, ms in dense.items():
        found = estimate(call, density, rates, kernel)
        assert 1000 * found.sparse == pytest.approx(ours, rel=0.12)
        assert 1000 * found.dense == pytest.approx(ms, rel=0.12)


def test_flux_at_1024() -> None:
    """512 of text are exact. The node's default, half of the blocks, is faster than either kernel;
    four fifths are faster than flash alone."""
    call = replace(CALL, pv_filter=True)
    half, most = (density_with_exact(topk, 512 / 4608) for topk in (0.5, 0.8))
    cudnn, flash = (estimate(call, half, RATES, name).break_even for name in ("cudnn", "flash"))
    assert half < cudnn < most < flash
