# SPDX-License-Identifier: Apache-2.0
"""Tiles, means and copies of means and quantize, against their emulation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.metrics import rel_l2
from sparge import HeadSettings, SparsePolicy, TokenGrid, grid_order
from sparge.blocks import KEY_BLOCK
from sparge.kernels import Element, capabilities
from sparge.order.grid import raster_order
from sparge.stages import key_mean
from sparge.stages.measuring import Measuring
from sparge.stages.workspace import MEANS, CallShape, WorkspaceLayout
from tests.gpu.cases import CASES, Case, lengths_of, make_qkv, some_cases
from tests.gpu.conftest import ELEMENTS, every_element, fields_of
from tests.gpu.test_stages import GATED, means_of
from tests.oracle import quantize_qkv, sampled_mean

pytestmark = pytest.mark.gpu


def unswizzle(tiles: Tensor, row_bytes: int) -> Tensor:
    """(..., bytes of a tile) to (..., rows, row_bytes): undoes csrc/common/swizzle.cuh."""
    rows = tiles.unflatten(-1, (-1, row_bytes // 16, 16))
    row = torch.arange(rows.shape[-3], device=tiles.device).unsqueeze(1)
    chunk = torch.arange(row_bytes // 16, device=tiles.device)
    mixed = chunk ^ ((row // 2) % 4 if row_bytes == 64 else row % 8)
    index = mixed.unsqueeze(-1).expand(rows.shape)
    return rows.gather(-2, index).flatten(-2)


def key_rows(tiles: Tensor, row_bytes: int) -> Tensor:
    """Rows of tiles of K: undoes csrc/common/key_tile.cuh."""
    parts = 2 if row_bytes == 256 and capabilities("cuda").arch == "sm_90a" else 1
    halves = tiles.unflatten(-1, (parts, -1)).unbind(-2)
    return torch.cat([unswizzle(half, row_bytes // parts) for half in halves], -1)


def value_levels(tiles: Tensor, element: Element, head_dim: int) -> Tensor:
    """(B, Hkv, nk * 64, head_dim) float32 from transposed tiles."""
    if element.value_bytes == 1:
        dtype = torch.float8_e4m3fn if element is Element.INT8_E4M3 else torch.int8
        rows = unswizzle(tiles, KEY_BLOCK).view(dtype).float()
        position = torch.arange(KEY_BLOCK, device=tiles.device)
        key = (position & ~15) + 8 * (position >> 1 & 1) + 2 * (position >> 2 & 3) + (position & 1)
        rows = rows[..., key.argsort()]
    else:
        dtype = torch.bfloat16 if element is Element.BF16 else torch.float16
        rows = unswizzle(tiles, KEY_BLOCK * 2).view(dtype).float()
    return rows.transpose(-1, -2).flatten(2, 3)


#: fp16 inputs take the FP16 element in 16-bit precision.
COPIED_OR_QUANTIZED = [
    pytest.param(case, element, id=f"{case.id}-{element.name}")
    for case in CASES
    for element in ELEMENTS
    if not (case.dtype == torch.float16 and element is Element.BF16)
]


@pytest.mark.parametrize(("case", "element"), COPIED_OR_QUANTIZED)
def test_quantize(case: Case, element: Element, generator, poison) -> None:
    q, k, v = make_qkv(case, generator)
    fields = fields_of(q, k, v, element, GATED, key_lengths=lengths_of(case))
    d = case.head_dim
    int8 = element.quantized
    means = means_of(fields, element, d)
    if int8:
        own = quantize_qkv(q, k, v, element=element, key_lengths=lengths_of(case))
        spread = float(k.float().std() + k.float().abs().mean()) + 1e-6
        assert (own.kbar - means["kbar"]).abs().max() <= 1e-4 * spread
        torch.testing.assert_close(own.v_scale, means["v_scale"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(own.extent, means["extent"], rtol=1e-4, atol=1e-4 * spread)
    truth = quantize_qkv(q, k, v, element=element, key_lengths=lengths_of(case), **means)

    block_mean, of_queries = fields["k_block_mean"], fields["q_block_mean"][..., :d]
    torch.testing.assert_close(block_mean[..., :d], truth.k_block_mean, rtol=1e-4, atol=2e-5)
    assert block_mean[..., d:].abs().sum() == 0, f"channels from {d} on are padding"
    torch.testing.assert_close(of_queries, truth.q_block_mean, rtol=1e-4, atol=2e-5)
    for name in ("q", "k"):
        similar, true = fields[f"{name}_similarity"], getattr(truth, f"{name}_self_similarity")
        torch.testing.assert_close(similar, true, rtol=1e-3, atol=1e-4)

    head_dim = CallShape.of(q, k).head_dim
    keys = key_rows(fields["k_tiles"], head_dim * (1 if int8 else 2))
    keys = keys.view(torch.int8 if int8 else torch.bfloat16).flatten(2, 3)
    assert keys[:, :, case.keys :].float().abs().sum() == 0
    width = truth.k_levels.shape[-1]
    assert keys[..., width:].float().abs().sum() == 0
    assert torch.equal(keys[:, :, : case.keys, :width].float(), truth.k_levels.float())
    if int8:
        torch.testing.assert_close(fields["k_scale"], truth.k_scale, rtol=1e-5, atol=0)
    values = value_levels(fields["v_tiles"], element, head_dim)[:, :, : case.keys, :d]
    if element is Element.INT8_INT8:
        torch.testing.assert_close(fields["v_block_scale"], truth.v_block_scale, rtol=1e-5, atol=0)
    assert rel_l2(values, truth.v_levels.float()) <= 2e-3


#: Asks for no similarity.
UNGATED = SparsePolicy()


def assert_same_fields(
    one: dict[str, Tensor], other: dict[str, Tensor], names: Iterable[str]
) -> None:
    persistent = capabilities("cuda").arch == "sm_90a"
    for name in names:
        if name == "next_item" and not persistent:
            continue  # nobody writes it
        assert torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)), name


@every_element
@some_cases
def test_similarity_that_no_threshold_asks_for(case: Case, element: Element, generator, poison):
    """It passes, and all else is as it is with the true one."""
    q, k, v = make_qkv(case, generator)
    lengths = lengths_of(case)
    true, spared = (
        fields_of(q, k, v, element, policy, key_lengths=lengths) for policy in (GATED, UNGATED)
    )
    similarities = {"q_similarity", "k_similarity"}
    assert all((spared[name] == 1).all() for name in similarities)
    # Nobody writes the means and scales of copied keys.
    unwritten = set() if element.quantized else {*MEANS, "k_scale"}
    assert_same_fields(true, spared, true.keys() - similarities - unwritten - {"block_map"})


@every_element
@pytest.mark.parametrize("policy", [GATED, UNGATED], ids=["true similarity", "none asked for"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_blocks_without_a_mean_pass_no_threshold(value, policy, element, generator, poison) -> None:
    q, k, v = make_qkv(Case("three blocks", queries=300, keys=150), generator)
    q[:, :, 130, 3], k[:, :, 70, 5] = value, value
    fields = fields_of(q, k, v, element, policy)
    for name in ("q_similarity", "k_similarity"):
        nan = fields[name].isnan()
        assert nan[..., 1].all(), name
        # The mean of the head is taken from each key where keys are quantized.
        spreads = name == "k_similarity" and element.quantized
        assert (nan[..., [0, 2]] == spreads).all(), name


@some_cases
def test_given_means_are_those_found(case: Case, generator, poison) -> None:
    """Some heads of all are taken, as measurement takes them."""
    q, k, v = make_qkv(case, generator)
    tokens = min(case.queries, case.keys)
    q, k, v = (x[:, :, :tokens] for x in (q, k, v))
    order, scale = raster_order(tokens).on("cuda"), case.head_dim**-0.5
    found = Measuring(k, v, order, scale).means()
    group = case.heads // case.kv_heads
    settings = HeadSettings.uniform(group, 0.5, pool_weight=1.0, device="cuda")
    for head in (0, case.kv_heads - 1):
        heads = slice(head, head + 1)
        some = q[:, head * group : (head + 1) * group], k[:, heads], v[:, heads]
        measuring = Measuring(*some[1:], order, scale)
        alone = fields_of(*some, measuring.element, UNGATED, order=order, head_settings=settings)
        workspace = measuring.quantized(some[0], found[:, :, heads])
        shape = CallShape.of(*some[:2], order.slots)
        layout = WorkspaceLayout(shape, measuring.element, with_queries=False, with_pools=True)
        assert torch.equal(layout.means(workspace), found[:, :, heads])
        given = {name: layout.view(workspace, name) for name in layout.fields}
        # Nobody writes the columns behind the last block.
        of_columns = given.keys() & {"pool_columns", "pool_value_scale"}
        for name in of_columns:
            own, same = (x[name].flatten(2, 3)[:, :, : shape.key_blocks] for x in (alone, given))
            assert torch.equal(own, same), name
        assert_same_fields(alone, given, given.keys() - of_columns)


@some_cases
def test_mean_key_of_a_sample(case: Case, generator, poison, monkeypatch) -> None:
    """It is taken in a token order of many tokens; values keep the mean and scale of all."""
    _, k, v = make_qkv(case, generator)
    d, tokens = case.head_dim, k.shape[2]
    order = grid_order(TokenGrid(1, 1, 1, suffix=tokens - 1))  # lengths may cut its suffix

    def means(**options: Any) -> Tensor:
        fields = fields_of(
            k, k, v, Element.INT8_FP16, UNGATED, key_lengths=lengths_of(case), **options
        )
        return torch.stack([fields[name] for name in ("k_mean", "v_mean", "v_scale")])

    of_all = means(order=order)
    assert torch.equal(of_all, means()), "few keys"
    monkeypatch.setattr(key_mean, "LEAST_KEYS", 1)
    found = means(order=order)
    assert torch.equal(found[1:], of_all[1:])
    expected = sampled_mean(k, lengths_of(case), key_mean.STRIDE)
    assert (found[0, ..., :d] - expected).abs().max() <= 1e-4 * k.float().abs().max()
    assert not found[0, ..., d:].any()
