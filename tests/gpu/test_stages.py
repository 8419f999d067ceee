# SPDX-License-Identifier: Apache-2.0
"""Each kernel against the emulation of its own arithmetic, and the output against float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.inputs import draw
from benchmarks.shapes import Shape
from sparge import SparsePolicy, TokenGrid, reference
from sparge.attention import attention, attention_partials, make_plan
from sparge.blocks import KEY_BLOCK
from sparge.common.metrics import rel_l2
from sparge.kernels import Element, capabilities
from sparge.kernels.spec import HEAD_DIMS
from sparge.policy import Precision
from sparge.reference.arithmetic import E4M3_MAX
from sparge.reference.attend import OnlineSoftmax
from sparge.reference.packed import sampled_mean
from sparge.stages import key_mean
from sparge.stages.launch import means, quantize
from sparge.stages.rules import QuantizeRules
from sparge.stages.workspace import CallShape, WorkspaceLayout
from tests.gpu.cases import CASES, SOME_CASES, Case, lengths_of, make_qkv
from tests.gpu.conftest import HOPPER, HOPPER_8BIT, Kernels, assert_same_lse

pytestmark = pytest.mark.gpu

ELEMENTS = [Element.INT8_FP16, Element.INT8_E4M3, Element.BF16]
KERNELS = [*map(Kernels, ELEMENTS), *HOPPER]

#: Kernel against emulation, float32 output, relative L2. Two effects: exp2 differs in its last bits
#: and a few probabilities round the other way (to 11, 4 or 8 bits); the offset of INT8 scores
#: shifts the logits of a block by up to half a level, 1e-3 in the steepest case here.
#: An H200 reached 1.3e-5, steep 1.0e-4 (FP16 P) and 1.3e-4, steep 8.8e-4 (E4M3 P).
TIGHT = {Element.INT8_FP16: 2e-4, Element.INT8_E4M3: 2e-3, Element.BF16: 1e-3, Element.FP16: 1e-4}

POLICIES = {
    "dense": SparsePolicy(topk=1.0),
    "topk": SparsePolicy(topk=0.4),
    "cdf and filter": SparsePolicy(select_by="cdf", cdfthreshd=0.9, pvthreshd=12.0),
    "gate, sink, exact tokens": SparsePolicy(
        topk=0.2, simthreshd1=0.5, attention_sink=True, exact_prefix=3, exact_suffix=70
    ),
}


def with_element(policy: SparsePolicy, element: Element) -> SparsePolicy:
    precision = Precision.INT8 if element.name.startswith("INT8") else Precision.SIXTEEN_BIT
    return SparsePolicy(**{**vars(policy), "precision": precision})


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


def kernel_stages(q: Tensor, k: Tensor, v: Tensor, element: Element, lengths: Tensor | None):
    layout = WorkspaceLayout(CallShape.of(q, k), element, with_values=True, with_queries=True)
    workspace = quantize(q, k, v, lengths, element, QuantizeRules())
    return {name: layout.view(workspace, name) for name in layout.fields}


def means_of(fields: dict[str, Tensor], element: Element, head_dim: int) -> dict[str, Any]:
    """Means and value scales of the kernels, for `reference.quantize_qkv` and `pack_qkv`."""
    names = {"kbar": "k_mean", "vbar": "v_mean", "v_scale": "v_scale"}
    if not element.name.startswith("INT8"):
        return {}
    return {name: fields[field][..., :head_dim] for name, field in names.items()}


#: fp16 inputs take the FP16 element in 16-bit precision.
COPIED_OR_QUANTIZED = [
    pytest.param(case, element, id=f"{case.id}-{element.name}")
    for case in CASES
    for element in ELEMENTS
    if not (case.dtype == torch.float16 and element is Element.BF16)
]


@pytest.mark.parametrize(("case", "element"), COPIED_OR_QUANTIZED)
def test_quantize(case: Case, element: Element, generator: torch.Generator, poison: None) -> None:
    q, k, v = make_qkv(case, generator)
    fields = kernel_stages(q, k, v, element, lengths_of(case))
    d = case.head_dim
    int8 = element is not Element.BF16
    means = means_of(fields, element, d)
    if int8:
        own = reference.quantize_qkv(q, k, v, element=element, key_lengths=lengths_of(case))
        spread = k.float().std() + k.float().abs().mean() + 1e-6
        assert (own.kbar - means["kbar"]).abs().max() <= 1e-4 * spread
        torch.testing.assert_close(own.v_scale, means["v_scale"], rtol=1e-4, atol=1e-6)
    truth = reference.quantize_qkv(q, k, v, element=element, key_lengths=lengths_of(case), **means)

    padded = fields["k_block_mean"].shape[-1]
    block_mean = fields["k_block_mean"]
    torch.testing.assert_close(block_mean[..., :d], truth.k_block_mean, rtol=1e-4, atol=2e-5)
    assert block_mean[..., d:].abs().sum() == 0, f"channels {d}..{padded} are padding"
    torch.testing.assert_close(
        fields["q_block_mean"][..., :d], truth.q_block_mean, rtol=1e-4, atol=2e-5
    )
    for name in ("q", "k"):
        similarity = fields[f"{name}_similarity"]
        torch.testing.assert_close(
            similarity, getattr(truth, f"{name}_self_similarity"), rtol=1e-3, atol=1e-4
        )

    head_dim = CallShape.of(q, k).head_dim
    keys = key_rows(fields["k_tiles"], head_dim * (1 if int8 else 2))
    keys = keys.view(torch.int8 if int8 else torch.bfloat16).flatten(2, 3)
    assert keys[:, :, case.keys :].float().abs().sum() == 0
    assert torch.equal(keys[:, :, : case.keys, :d].float(), truth.k_levels.float())
    if int8:
        torch.testing.assert_close(fields["k_scale"], truth.k_scale, rtol=1e-5, atol=0)
    values = value_levels(fields["v_tiles"], element, head_dim)[:, :, : case.keys, :d]
    assert rel_l2(values, truth.v_levels.float()) <= 2e-3


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.id)
def test_similarity_that_no_threshold_asks_for(
    case: Case, element: Element, generator: torch.Generator, poison: None
) -> None:
    """It passes, and all else is as it is with the true one."""
    q, k, v = make_qkv(case, generator)
    layout = WorkspaceLayout(CallShape.of(q, k), element, with_values=True, with_queries=True)
    true, spared = (
        quantize(q, k, v, lengths_of(case), element, QuantizeRules(with_similarity=asked))
        for asked in (True, False)
    )
    of_levels = {"k_mean", "k_scale", "v_mean", "v_scale"}  # nobody writes those of copied keys
    for name in layout.fields.keys() - (of_levels if element is Element.BF16 else set()):
        if name.endswith("similarity"):
            assert (layout.view(spared, name) == 1).all()
        else:
            expected, value = (layout.view(x, name).view(torch.uint8) for x in (true, spared))
            assert torch.equal(value, expected), name


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("asked", [True, False], ids=["true similarity", "none asked for"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_blocks_without_a_mean_pass_no_threshold(
    value: float, asked: bool, element: Element, generator: torch.Generator, poison: None
) -> None:
    q, k, v = make_qkv(Case("three blocks", queries=300, keys=150), generator)
    q[:, :, 130, 3], k[:, :, 70, 5] = value, value
    layout = WorkspaceLayout(CallShape.of(q, k), element, with_values=True, with_queries=True)
    workspace = quantize(q, k, v, None, element, QuantizeRules(with_similarity=asked))
    for name in ("q_similarity", "k_similarity"):
        nan = layout.view(workspace, name).isnan()
        assert nan[..., 1].all(), name
        # The mean of the head is taken from each key where keys are quantized.
        spreads = name == "k_similarity" and element is not Element.BF16
        assert (nan[..., [0, 2]] == spreads).all(), name


@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.id)
def test_given_means_are_those_found(case: Case, generator: torch.Generator, poison: None) -> None:
    """Some heads of all are taken, as calibration takes them."""
    q, k, v = make_qkv(case, generator)
    lengths, element = lengths_of(case), Element.INT8_FP16
    found = means(k, v, lengths, True, element)
    group = case.heads // case.kv_heads
    first, last = slice(0, 1), slice(case.kv_heads - 1, case.kv_heads)
    for heads in (first, last):
        own = slice(heads.start * group, heads.stop * group)
        some = q[:, own], k[:, heads], v[:, heads]
        layout = WorkspaceLayout(
            CallShape.of(*some[:2]), element, with_values=True, with_queries=True
        )
        given = quantize(*some, lengths, element, QuantizeRules(), means=found[:, :, heads])
        alone = quantize(*some, lengths, element, QuantizeRules())
        assert torch.equal(layout.means(given), found[:, :, heads])
        for name in layout.fields:
            expected, value = (layout.view(x, name).view(torch.uint8) for x in (alone, given))
            assert torch.equal(value, expected), name


@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.id)
def test_mean_key_of_a_sample(
    case: Case, generator: torch.Generator, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken in a token order of many tokens; values keep the mean and scale of all."""
    _, k, v = make_qkv(case, generator)
    lengths, element, d = lengths_of(case), Element.INT8_E4M3, case.head_dim
    of_all = means(k, v, lengths, True, element, ordered=True)
    assert torch.equal(of_all, means(k, v, lengths, True, element)), "few keys"
    monkeypatch.setattr(key_mean, "LEAST_KEYS", 1)
    found = means(k, v, lengths, True, element, ordered=True)
    assert torch.equal(found[1:], of_all[1:])
    expected = sampled_mean(k, lengths, key_mean.STRIDE)
    assert (found[0, ..., :d] - expected).abs().max() <= 1e-4 * k.float().abs().max()
    assert not found[0, ..., d:].any()


def value_levels(tiles: Tensor, element: Element, head_dim: int) -> Tensor:
    """(B, Hkv, nk * 64, head_dim) float32 from transposed tiles."""
    if element is Element.INT8_E4M3:
        rows = unswizzle(tiles, KEY_BLOCK).view(torch.float8_e4m3fn).float()
        position = torch.arange(KEY_BLOCK, device=tiles.device)
        key = (position & ~15) + 8 * (position >> 1 & 1) + 2 * (position >> 2 & 3) + (position & 1)
        rows = rows[..., key.argsort()]
    else:
        dtype = torch.bfloat16 if element is Element.BF16 else torch.float16
        rows = unswizzle(tiles, KEY_BLOCK * 2).view(dtype).float()
    return rows.transpose(-1, -2).flatten(2, 3)


#: Every case on every path with two of the policies, and every policy with half of the cases.
CASES_AND_POLICIES = [
    pytest.param(case, policy, id=f"{case.id}-{name}")
    for number, case in enumerate(CASES)
    for place, (name, policy) in enumerate(POLICIES.items())
    if (number + number // 2 + place) % 2 == 0
]


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.id)
@pytest.mark.parametrize(("case", "policy"), CASES_AND_POLICIES)
def test_attention(
    case: Case,
    policy: SparsePolicy,
    kernels: Kernels,
    generator: torch.Generator,
    poison: None,
    force,
) -> None:
    element = kernels.element
    if case.dtype == torch.float16 and element is Element.BF16:
        element = Element.FP16
    force(replace(kernels, element=element))
    policy = with_element(policy, element)
    q, k, v = make_qkv(case, generator)
    lengths = lengths_of(case)
    options = {"causal": "top-left" if case.causal else None, "key_lengths": lengths}
    plan = make_plan(q, k, policy, **options)
    check_routing(plan, q, k, v, policy, element, case, lengths)

    out, lse = attention(q, k, v, policy, plan=plan, output_dtype=torch.float32, return_lse=True)
    routed = attention(q, k, v, policy, output_dtype=torch.float32, **options)
    assert torch.equal(out, routed), "a plan made beforehand changes nothing"
    assert torch.isfinite(out).all()

    fields = kernel_stages(q, k, v, element, lengths)
    d = case.head_dim
    means = means_of(fields, element, d)
    quantized = reference.quantize_qkv(q, k, v, element=element, key_lengths=lengths, **means)
    emulated = reference.attend(
        quantized, plan, scale=d**-0.5, pvthreshd=policy.pvthreshd, softmax=kernels.softmax
    )
    size = emulated.out.norm().clamp(min=1e-3)
    assert (out - emulated.out).norm() / size <= TIGHT[element]
    assert_same_lse(lse, emulated.lse, kernels, 1e-3)

    exact, _ = reference.exact_attention(
        *(x.bfloat16() if x.dtype == torch.float32 else x for x in (q, k, v)),
        plan=plan,
        is_causal=case.causal,
        key_lengths=lengths,
    )
    own_error = rel_l2(emulated.out, exact)
    assert rel_l2(out, exact) <= 1.2 * own_error + TIGHT[element]


def check_routing(plan, q, k, v, policy, element, case, lengths) -> None:
    """The kernel's choice equals the reference's, but where two scores tie to rounding."""
    quantized = reference.quantize_qkv(q, k, v, element=element, key_lengths=lengths)
    truth = reference.route(quantized, policy, scale=case.head_dim**-0.5, is_causal=case.causal)
    differs = plan.kept() != truth.kept()
    assert torch.equal(plan.counts, plan.kept().sum(-1, dtype=torch.int32))
    if case.data in ("equal rows", "zeros"):
        # Every score is the same up to rounding: the counts must agree, the choice is arbitrary.
        assert (plan.counts - truth.counts).abs().max() <= 1
        return
    if policy.select_by == "cdf":
        # The mass of one block may lie on either side of the target.
        assert differs.sum(-1).max() <= 1
        return
    scores = reference.block_scores(quantized, case.head_dim**-0.5)
    for row in differs.any(-1).nonzero():
        at = tuple(row.tolist())
        tied = scores[at][differs[at]]
        assert tied.max() - tied.min() <= 1e-4 * (1 + tied.abs().max()), "not a tie"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("kernels", "data", "most"),
    [
        (HOPPER[0], "noise", 1.025),
        (HOPPER[1], "noise", 1.025),
        (HOPPER_8BIT, "drift", 1.0),
    ],
    ids=["8-bit", "16-bit", "8-bit, drift"],
)
def test_hopper_errs_hardly_more_than_mma_sync(
    kernels: Kernels, data: str, most: float, head_dim: int, generator: torch.Generator, force
) -> None:
    """No error averages out in noise: emulated, fixed point and steps of two blocks add 0.6 to 0.9
    % in 8 bits, steps alone 0.3 to 1.6 % in 16. Where values drift, row sums of P as it was
    rounded gain more than fixed point loses: emulated, errors are 0.5 to 2.8 % smaller."""
    if data == "drift":  # those of the speed bars
        q, k, v = draw(Shape("drift", 4, 4096, head_dim, TokenGrid(4, 32, 32)))
    else:
        size = (1, 4, 2048, head_dim)
        q, k, v = (torch.randn(size, generator=generator).bfloat16().cuda() for _ in range(3))
    policy = with_element(SparsePolicy(topk=0.2), kernels.element)
    plan = make_plan(q, k, policy)
    exact, _ = reference.exact_attention(q, k, v, plan=plan)

    def error(kernels: Kernels) -> float:
        force(kernels)
        return rel_l2(attention(q, k, v, policy, plan=plan, output_dtype=torch.float32), exact)

    assert error(kernels) <= most * error(Kernels(kernels.element))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_codes_of_p_on_hopper(head_dim: int, force) -> None:
    """V of one key a channel shows P of the first block, code by code, over all that E4M3 holds.

    The second block's keys are far below, and so nothing but the other sign that makes the mean of
    V zero. Scores use many levels, so that half a level, their offset's rounding, hardly ever moves
    an exponent over the border between two codes.
    """
    force(HOPPER_8BIT)
    slopes = torch.linspace(8, 16, 256, device="cuda")  # exp2's argument falls below -11 in each
    q = slopes[:, None].expand(256, head_dim)[None, None].bfloat16().contiguous()
    ramp = torch.cat([torch.linspace(0, 1, KEY_BLOCK), torch.full((KEY_BLOCK,), 8.0)]).cuda()
    k = -ramp[:, None].expand(2 * KEY_BLOCK, head_dim)[None, None].bfloat16().contiguous()
    v = torch.eye(KEY_BLOCK, head_dim, device="cuda").bfloat16()
    v = torch.cat([v, -v])[None, None]
    policy = SparsePolicy(topk=1.0, smooth_k=False)
    found = attention_partials(q, k, v, policy, scale=1 / head_dim).out_sum

    quantized = reference.quantize_qkv(q, k, v, element=HOPPER_8BIT.element, smooth_k=False)
    plan = make_plan(q, k, policy)

    def off(softmax: OnlineSoftmax) -> Tensor:
        emulated = reference.attend(quantized, plan, scale=1 / head_dim, softmax=softmax)
        codes = (emulated.unnormalised * E4M3_MAX)[..., :KEY_BLOCK]
        return (found[..., :KEY_BLOCK] * E4M3_MAX - codes).abs() > 1e-3 * codes + 1e-4

    assert found[..., KEY_BLOCK:].abs().sum() == 0
    assert off(HOPPER_8BIT.softmax).float().mean() <= 1e-3
    assert off(replace(HOPPER_8BIT.softmax, fixed_exp2=False)).float().mean() > 1e-2


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.id)
def test_zeros_with_a_small_scale(kernels: Kernels, force) -> None:
    """The scale of such scores is tiny; times the infinity of a masked key it must not be a NaN."""
    force(kernels)
    policy = with_element(POLICIES["dense"], kernels.element)
    q = torch.zeros(1, 1, 100, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.ones_like(q)
    out = attention(q, q, v, policy, scale=1e-3, is_causal=True)
    torch.testing.assert_close(out, v)
