# SPDX-License-Identifier: Apache-2.0
"""Rules of a caller's own: orders, block masks beside them, and functions of a call."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sparge
from benchmarks.rules import by_content, radial, sliding_tiles
from sparge import Precision, SparsePolicy, TokenGrid, TokenOrder, grid_order
from sparge.order.grid import EMPTY

GRID = TokenGrid(8, 12, 14, prefix=70, suffix=30)
ORDER = grid_order(GRID)
SIXTEEN_BIT = SparsePolicy(precision=Precision.SIXTEEN_BIT)
#: Rules by their name, made for a device.
RULES: dict[str, Any] = {
    "sliding tiles": lambda device: sliding_tiles(GRID, (2, 2, 2), device),
    "radial": lambda device: radial(GRID, 3, device),
    "by content": lambda device: by_content(GRID, 0.2, device),
}
attend: Any = functional.scaled_dot_product_attention


def of_elements(order: TokenOrder, kept: Tensor) -> Tensor:
    """Pairs (..., tokens, tokens) of blocks that are kept or exact, from where each token lies."""
    slot = order.token_slots[0].long()
    kept = kept | order.keys_exact | order.queries_exact.unsqueeze(-1)
    return kept[..., (slot // 128).unsqueeze(-1), slot // 64]


def assert_rounded(out: Tensor, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor) -> None:
    """The reference errs by float32, and by the bf16 of its result."""
    truth = attend(*(x.double() for x in qkv), attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out.double(), truth, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_a_rule_gives_attention_under_its_own_mask(make_qkv, name: str) -> None:
    """Whole graphs of torch.compile have it."""
    torch._dynamo.reset()
    qkv, rule = make_qkv(2, 2, GRID.tokens, kv_heads=1), RULES[name]("cpu")
    compiled = torch.compile(partial(attend, enable_gqa=True), backend="eager", fullgraph=True)
    with sparge.sdpa(lambda call: rule(call) | {"policy": SIXTEEN_BIT}, 100) as stats:
        out = attend(*qkv, enable_gqa=True)
        assert torch.equal(compiled(*qkv), out)
    mask = of_elements(ORDER, rule(sparge.TorchCall(*qkv))["block_mask"])
    text = [*range(70), *range(GRID.tokens - 30, GRID.tokens)]
    assert mask[..., text, :].all() and mask[..., text].all()
    assert_rounded(out, qkv, mask)
    assert (stats.sparse_calls, stats.dense_calls) == (2, 0)
    assert stats.density == pytest.approx(float(mask.double().mean())) and stats.density < 0.8


def test_an_order_of_a_permutation(make_qkv, generator: torch.Generator) -> None:
    tokens = torch.randperm(700, generator=generator)
    order = TokenOrder.of_permutation(tokens.int(), exact_prefix=70, exact_suffix=30)
    assert torch.equal(order.slot_token[order.slot_token != EMPTY], tokens.int())
    assert order.block_counts.tolist() == [64, 6, *[64] * 9, 24, 30]
    assert order.keys_exact.nonzero().flatten().tolist() == [0, 1, 12]
    assert order.queries_exact.nonzero().flatten().tolist() == [0, 6]
    qkv, whole = make_qkv(1, 2, 700), TokenOrder.of_permutation(tokens)
    mask = torch.rand(1, 2, 6, 11, generator=generator) < 0.4
    permuted = sparge.attention(*(x[:, :, tokens] for x in qkv), block_mask=mask)
    out = sparge.attention(*qkv, block_mask=mask, order=whole)
    torch.testing.assert_close(out[:, :, tokens], permuted)
    with pytest.raises(ValueError, match="key_lengths and an order of a permutation"):
        sparge.attention(*qkv, order=whole, key_lengths=torch.tensor([700], dtype=torch.int32))
    for bad in ([0, 1, 1], [1, 2, 3], [0.0, 1.0], [[0, 1]], [-1, 0]):
        for make in (TokenOrder.of_permutation, whole.taken_from):
            with pytest.raises(ValueError, match=r"(places|permutation) is .* give the numbers"):
                make(torch.tensor(bad))


@pytest.mark.parametrize("grid", [GRID, TokenGrid(3, 5, 7, lead_frames=1, tail=90)])
def test_where_blocks_lie(grid: TokenGrid) -> None:
    order = grid_order(grid)
    cells = torch.cartesian_prod(*map(torch.arange, (grid.frames, grid.height, grid.width)))
    for size, ranges in zip((128, 64), order.block_ranges(grid), strict=True):
        for slots, found in zip(order.slot_token.split(size), ranges, strict=True):
            tokens = slots[slots != EMPTY].long() - grid.prefix
            own = cells[tokens[(tokens >= 0) & (tokens < len(cells))]]
            expected = torch.stack([own.amin(0), own.amax(0) + 1], -1) if len(own) else 0 * found
            assert torch.equal(found, expected)


@torch.no_grad()
def test_calls_of_policies_and_rules_and_those_that_they_leave_exact(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 600)
    padding, mask = (torch.arange(600) < 500)[None, None, None], torch.rand(1, 2, 5, 10) < 0.5

    def rule(call: sparge.TorchCall) -> Any:
        return {"block_mask": mask} if call.query.shape[2] == 600 else None

    with sparge.sdpa(rule, 128) as stats:
        out = attend(q, k, v, is_causal=True)
        exact = attend(q[:, :, :300], k, v), attend(q, k, v, attn_mask=padding)
    assert torch.equal(out, sparge.attention(q, k, v, block_mask=mask, is_causal=True))
    assert torch.equal(exact[0], attend(q[:, :, :300], k, v))
    assert torch.equal(exact[1], attend(q, k, v, attn_mask=padding))
    assert [reason[:8] for reason in stats.reasons] == ["the rule", "padding,"]
    policy, outs = SparsePolicy(topk=0.3, attention_sink=True), []
    context: Any = sparge.sdpa
    for options in ({"policy": policy}, {"policy": lambda call: policy}, {"topk": 0.3}):
        with context(**options, min_tokens=128) as stats:
            outs.append(attend(q, k, v, attn_mask=padding))
        assert stats.sparse_calls == 1 and torch.equal(outs[0], outs[-1])


@pytest.mark.parametrize("bad", [0.3, {"scale": 1.0}, torch.ones(1)])
def test_a_rule_that_gives_something_else_is_told(make_qkv, bad: Any) -> None:
    words = r"The rule gave (0.3|scale|a torch.Tensor); it gives None .* policy, order, block_mask"
    with sparge.sdpa(lambda call: bad, 128), pytest.raises(ValueError, match=words):
        attend(*make_qkv(1, 2, 200))


def test_kernels_are_told_of_the_mask(make_qkv, pretended_gpu) -> None:
    q, k, v = make_qkv(2, 2, GRID.tokens)
    rule: Any = RULES["radial"]("cpu")(sparge.TorchCall(q, k, v))
    sparge.attention(q, k, v, **rule)
    route = pretended_gpu.of_entry("route").params
    assert route.select == 2 and route.block_mask == rule["block_mask"].data_ptr()
    assert [*route.mask_stride] == [0, 0, rule["order"].key_blocks, 1]
