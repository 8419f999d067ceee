# SPDX-License-Identifier: Apache-2.0
"""Each kernel against the emulation of its own arithmetic, and the output against float32."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.inputs import draw
from benchmarks.kept import kept_blocks
from benchmarks.metrics import rel_l2
from benchmarks.shapes import Shape
from sparge import SparsePolicy, TokenGrid, reference
from sparge.attention import attention
from sparge.blocks import KEY_BLOCK
from sparge.kernels import Element, Kernel
from sparge.kernels.params import PARAMS
from sparge.kernels.spec import HEAD_DIMS
from tests.gpu.cases import CASES, Case, lengths_of, make_qkv
from tests.gpu.conftest import (
    HOPPER,
    HOPPER_8BIT,
    Kernels,
    assert_emulated,
    assert_ties,
    every_kernel,
    fields_of,
    in_float32,
    spec_of,
    with_element,
)
from tests.oracle import E4M3_MAX, UINT8_MAX, OnlineSoftmax, attend, quantize_qkv

pytestmark = pytest.mark.gpu

POLICIES = {
    "dense": SparsePolicy(topk=1.0),
    "topk": SparsePolicy(topk=0.4),
    "cdf and filter": SparsePolicy(select_by="cdf", cdfthreshd=0.9, pvthreshd=12.0),
    "gate, sink, exact tokens": SparsePolicy(
        topk=0.2, simthreshd1=0.5, attention_sink=True, exact_prefix=3, exact_suffix=70
    ),
}
#: Every case on every path with two of the policies, and every policy with half of the cases.
CASES_AND_POLICIES = [
    pytest.param(case, policy, id=f"{case.id}-{name}")
    for number, case in enumerate(CASES)
    for place, (name, policy) in enumerate(POLICIES.items())
    if (number + number // 2 + place) % 2 == 0
]


#: Asks for all statistics of blocks.
GATED = SparsePolicy(simthreshd1=0.0)


def means_of(fields: dict[str, Tensor], element: Element, head_dim: int) -> dict[str, Any]:
    """Means, value scales and extents of the kernels, for `quantize_qkv`."""
    names = {"kbar": "k_mean", "vbar": "v_mean", "v_scale": "v_scale", "extent": "k_extent"}
    if not element.quantized:
        return {}
    return {name: fields[field][..., :head_dim] for name, field in names.items()}


@every_kernel
@pytest.mark.parametrize(("case", "policy"), CASES_AND_POLICIES)
def test_attention(case: Case, policy, kernels: Kernels, generator, poison, force) -> None:
    kernels = kernels.of_dtype(case.dtype)
    force(kernels)
    element, scale = kernels.element, case.head_dim**-0.5
    policy = with_element(policy, element)
    q, k, v = make_qkv(case, generator)
    lengths = lengths_of(case)
    options: dict[str, Any] = {
        "causal": "top-left" if case.causal else None, "key_lengths": lengths,
    }  # fmt: skip
    kept = kept_blocks(q, k, policy, **options)
    check_routing(kept, q, k, v, policy, element, case, lengths)

    options["output_dtype"] = torch.float32
    out, lse = attention(q, k, v, policy, return_lse=True, **options)
    masked = attention(q, k, v, policy, block_mask=kept, **options)
    assert torch.equal(out, masked), "a mask of the kept blocks changes nothing"

    fields = fields_of(q, k, v, element, GATED, key_lengths=lengths)
    means = means_of(fields, element, case.head_dim)
    quantized = quantize_qkv(q, k, v, element=element, key_lengths=lengths, **means)
    rules = {"is_causal": case.causal, "pvthreshd": policy.pvthreshd}
    emulated = attend(quantized, kept, scale=scale, softmax=kernels.softmax, **rules)
    exact = in_float32(q, k, v, kept, key_lengths=lengths, scale=scale, is_causal=case.causal)
    assert_emulated(kernels, out, lse, emulated.out, emulated.lse, exact)


def check_routing(kept, q, k, v, policy, element, case, lengths) -> None:
    """The kernel's choice equals the reference's, but where two scores tie to rounding."""
    quantized = quantize_qkv(q, k, v, element=element, key_lengths=lengths)
    scale = case.head_dim**-0.5
    truth = reference.route(quantized, policy, scale=scale, is_causal=case.causal)
    differs = kept != truth.kept
    if case.data in ("equal rows", "zeros"):
        # Every score is the same up to rounding: the counts must agree, the choice is arbitrary.
        assert (kept.sum(-1) - truth.kept.sum(-1)).abs().max() <= 1
    elif policy.select_by == "cdf":
        # The mass of one block may lie on either side of the target.
        assert differs.sum(-1).max() <= 1
    else:
        assert_ties(differs, reference.block_scores(quantized, scale), 1e-4)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("kernels", "data", "most"),
    [(HOPPER[0], "noise", 1.025), (HOPPER[1], "noise", 1.025), (HOPPER_8BIT, "drift", 1.0)],
    ids=["8-bit", "16-bit", "8-bit, drift"],
)
def test_hopper_errs_hardly_more_than_mma_sync(
    kernels: Kernels, data: str, most: float, head_dim: int, make_qkv, force
) -> None:
    """No error averages out in noise: emulated, fixed point and steps of two blocks add 0.6 to 0.9
    % in 8 bits, steps alone 0.3 to 1.6 % in 16. Where values drift, row sums of P as it was
    rounded gain more than fixed point loses: emulated, errors are 0.5 to 2.8 % smaller."""
    if data == "drift":  # those of the speed bars
        q, k, v = draw(Shape("drift", 4, 4096, head_dim, TokenGrid(4, 32, 32)))
    else:
        q, k, v = make_qkv(1, 4, 2048, head_dim, device="cuda")
    policy = with_element(SparsePolicy(topk=0.2), kernels.element)
    kept = kept_blocks(q, k, policy)
    exact = in_float32(q, k, v, kept, scale=head_dim**-0.5)

    def error(kernels: Kernels) -> float:
        force(kernels)
        out = attention(q, k, v, policy, block_mask=kept, output_dtype=torch.float32)
        return rel_l2(out, exact)

    assert error(kernels) <= most * error(Kernels(kernels.element))


def partials(q: Tensor, k: Tensor, v: Tensor, policy: SparsePolicy, **named: Any) -> list[Tensor]:
    """Sums before their division and row sums, which measuring asks attend for."""
    rows, launch = q.shape[:3], Kernel.launch
    out, row_max, row_sum = (torch.empty(size, device=q.device) for size in (q.shape, rows, rows))

    def with_partials(kernel: Kernel, grid: Any, pointer: int, *rest: Any) -> None:
        entry = spec_of(kernel).entry
        if entry.startswith("attend"):
            params = PARAMS[entry].from_address(ctypes.c_uint64.from_address(pointer).value)
            params.partial_out = out.data_ptr()
            params.partial_max, params.partial_sum = row_max.data_ptr(), row_sum.data_ptr()
        launch(kernel, grid, pointer, *rest)

    with mock.patch.object(Kernel, "launch", with_partials):
        attention(q, k, v, policy, **named)
    return [out, row_sum]


def one_key_a_channel(
    head_dim: int, slopes: tuple[float, float], far: float
) -> tuple[Tensor, Tensor, Tensor]:
    """256 queries and two key blocks: logits fall along the first from 0 to minus the
    row's slope, and those of the second are `far` times as low. V is 1 in a channel of each key,
    and -1 in the second block, so that its mean is 0."""
    of_rows = torch.linspace(*slopes, 256, device="cuda")
    q = of_rows[:, None].expand(256, head_dim)[None, None].bfloat16().contiguous()
    ramp = torch.cat([torch.linspace(0, 1, KEY_BLOCK), torch.full((KEY_BLOCK,), far)]).cuda()
    k = -ramp[:, None].expand(2 * KEY_BLOCK, head_dim)[None, None].bfloat16().contiguous()
    v = torch.eye(KEY_BLOCK, head_dim, device="cuda").bfloat16()
    return q, k, torch.cat([v, -v])[None, None]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_codes_of_p_on_hopper(head_dim: int, force) -> None:
    """V of one key a channel shows P of the first block, code by code, over all that E4M3 holds.

    The second block's keys are far below, and so nothing but the other sign that makes the mean of
    V zero. Scores use many levels, so that half a level, their offset's rounding, hardly ever moves
    an exponent over the border between two codes.
    """
    force(HOPPER_8BIT)
    # exp2's argument falls below -11 in each row
    q, k, v = one_key_a_channel(head_dim, slopes=(8, 16), far=8)
    policy = SparsePolicy(topk=1.0, smooth_k=False)
    found, _ = partials(q, k, v, policy, scale=1 / head_dim)

    quantized = quantize_qkv(q, k, v, element=HOPPER_8BIT.element, smooth_k=False)
    kept = kept_blocks(q, k, policy)

    def off(softmax: OnlineSoftmax) -> Tensor:
        emulated = attend(quantized, kept, scale=1 / head_dim, softmax=softmax)
        codes = (emulated.unnormalised * E4M3_MAX)[..., :KEY_BLOCK]
        return (found[..., :KEY_BLOCK] * E4M3_MAX - codes).abs() > 1e-3 * codes + 1e-4

    assert found[..., KEY_BLOCK:].abs().sum() == 0
    assert off(HOPPER_8BIT.softmax).float().mean() <= 1e-3
    assert off(replace(HOPPER_8BIT.softmax, fixed_exp2=False)).float().mean() > 1e-2


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_levels_of_integer_p(head_dim: int, force) -> None:
    """V of one key a channel shows the levels of P, all 256 of them, and row sums are of the same.

    The second block's keys are as in the test above.
    """
    kernels = Kernels(Element.INT8_INT8)
    force(kernels)
    q, k, v = one_key_a_channel(head_dim, slopes=(4, 12), far=16)
    policy = SparsePolicy(topk=1.0, smooth_k=False)
    out_sum, row_sum = partials(q, k, v, policy, scale=1 / head_dim)
    levels = out_sum[..., :KEY_BLOCK] * UINT8_MAX
    assert (levels - levels.round()).abs().max() <= 1e-3, "P is whole levels"
    torch.testing.assert_close(row_sum * UINT8_MAX, levels.sum(-1), rtol=1e-6, atol=1e-2)

    quantized = quantize_qkv(q, k, v, element=kernels.element, smooth_k=False)
    emulated = attend(quantized, kept_blocks(q, k, policy), scale=1 / head_dim)
    expected = (emulated.unnormalised[..., :KEY_BLOCK] * UINT8_MAX).round()
    assert expected.unique().numel() > 200
    # An exponential may be off by two units of its last place, and so round to the other level.
    assert (levels.round() != expected).float().mean() <= 1e-3
    assert (levels.round() - expected).abs().max() <= 1
