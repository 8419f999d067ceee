# SPDX-License-Identifier: Apache-2.0
"""The self-test of kernels beside their emulation: right ones pass it, and no fault does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.kernels import Element
from sparge.kernels.spec import HEAD_DIMS
from sparge.reference import Quantized, attend, quantize_qkv
from sparge.reference.arithmetic import HOPPER_SOFTMAX, PORTABLE_SOFTMAX
from sparge.speed import self_test
from sparge.speed.self_test import MOST, make_inputs, masked_attention, row_errors

CPU = torch.device("cpu")
SOFTMAXES = {
    Element.INT8_E4M3: HOPPER_SOFTMAX,
    Element.INT8_INT8: PORTABLE_SOFTMAX,
    Element.INT8_FP16: PORTABLE_SOFTMAX,
    Element.BF16: PORTABLE_SOFTMAX,
}
#: Least multiple of a right kernel's error that the bound is.
MARGIN = 1.5

pytestmark = pytest.mark.usefixtures("one_thread")
at_each_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
in_eight_bits = pytest.mark.parametrize(
    "element", [Element.INT8_E4M3, Element.INT8_INT8], ids=lambda element: element.name
)


@cache
def quantized(element: Element, head_dim: int) -> Quantized:
    return quantize_qkv(*make_inputs(head_dim)[:3], element=element)


def attended(x: Quantized) -> Tensor:
    kept = make_inputs(x.head_dim)[3]
    return attend(x, kept, scale=x.head_dim**-0.5, softmax=SOFTMAXES[x.element]).out


@cache
def emulated(element: Element, head_dim: int) -> Tensor:
    return attended(quantized(element, head_dim))


@cache
def true(head_dim: int) -> Tensor:
    return masked_attention(*make_inputs(head_dim))


def errors(out: Tensor) -> Tensor:
    return row_errors(out, true(out.shape[-1]))


@at_each_head_dim
@pytest.mark.parametrize("element", SOFTMAXES, ids=lambda element: element.name)
def test_right_kernels_pass_by_a_margin(element: Element, head_dim: int) -> None:
    assert MARGIN * errors(emulated(element, head_dim)).max() <= MOST


def other_keys(x: Quantized) -> Quantized:
    return replace(x, k_levels=x.k_levels.flip(1), k_scale=x.k_scale.flip(1))


def other_values(x: Quantized) -> Quantized:
    return replace(x, v_levels=x.v_levels.flip(1), v_block_scale=x.v_block_scale.flip(1))


def neighbours(name: str, *place: int) -> Callable[[Quantized], Quantized]:
    """One scale is that of what comes before."""

    def spoil(x: Quantized) -> Quantized:
        scales = getattr(x, name).clone()
        scales[place] = scales[(*place[:-1], place[-1] - 1)]
        return replace(x, **{name: scales})

    return spoil


def keys_beyond_the_end(x: Quantized) -> Quantized:
    return replace(x, key_counts=torch.full_like(x.key_counts, KEY_BLOCK))


@in_eight_bits
@at_each_head_dim
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(other_keys, id="keys of another head"),
        pytest.param(other_values, id="values of another head"),
        pytest.param(neighbours("k_scale", 0, 1, 3), id="scale of a key block"),
        pytest.param(neighbours("v_scale", 0, 0, 21), id="scale of a channel"),
        pytest.param(neighbours("q_scale", 0, 2, 77), id="scale of a query"),
        pytest.param(keys_beyond_the_end, id="keys beyond the end"),
        pytest.param(lambda x: replace(x, vbar=0 * x.vbar), id="no mean value"),
    ],
)
def test_wrong_operands_are_found(
    spoil: Callable[[Quantized], Quantized], head_dim: int, element: Element
) -> None:
    assert errors(attended(spoil(quantized(element, head_dim)))).max() > MOST


@at_each_head_dim
def test_a_wrong_scale_of_an_integer_value_block_is_found(head_dim: int) -> None:
    spoil = neighbours("v_block_scale", 0, 1, 3)
    assert errors(attended(spoil(quantized(Element.INT8_INT8, head_dim)))).max() > MOST


@at_each_head_dim
@pytest.mark.parametrize("block", range(1, 6))
def test_a_block_too_few_or_too_many_is_found_in_each_query_block(
    block: int, head_dim: int
) -> None:
    q, k, v, kept = make_inputs(head_dim)
    kept[..., block] ^= True
    for rows in errors(masked_attention(q, k, v, kept)).split(QUERY_BLOCK, -1):
        assert (rows.amax(-1) > MOST).all()


def exchanged(first: Any, second: Any) -> Callable[[Tensor], None]:
    def spoil(out: Tensor) -> None:
        out[first], out[second] = out[second].clone(), out[first].clone()

    return spoil


def filled(place: Any, value: float) -> Callable[[Tensor], None]:
    def spoil(out: Tensor) -> None:
        out[place] = value

    return spoil


@in_eight_bits
@at_each_head_dim
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(exchanged((0, 0), (0, 1)), id="two heads"),
        pytest.param(
            exchanged((0, 3, slice(128, 256)), (0, 3, slice(0, 128))), id="two query blocks"
        ),
        pytest.param(
            exchanged((0, 2, slice(160, 168)), (0, 2, slice(168, 176))), id="rows of a fragment"
        ),
        pytest.param(
            exchanged((0, 1, slice(32, 48), 40), (0, 1, slice(32, 48), 41)),
            id="columns of a fragment",
        ),
        pytest.param(exchanged((0, 1, 200), (0, 1, 201)), id="two rows"),
        pytest.param(filled((0, 3, 329), 0.0), id="the last row is not written"),
        pytest.param(filled((0, 2, 17), 1e4), id="garbage in a row"),
        pytest.param(filled((0, 0, 300, 7), math.inf), id="an infinity"),
    ],
)
def test_wrong_results_are_found(
    spoil: Callable[[Tensor], None], head_dim: int, element: Element
) -> None:
    out = emulated(element, head_dim).clone()
    spoil(out)
    assert errors(out).max() > MOST


Results = list[Callable[[Tensor], Tensor]]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, untested: None) -> Callable[[Results], list[int]]:
    """kernels(results): what kernels give in place of the true result, call by call; the head_dims
    of the calls."""

    def of(results: Results) -> list[int]:
        called: list[int] = []

        def attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
            called.append(q.shape[-1])
            return results[len(called) - 1](true(q.shape[-1]).float())

        monkeypatch.setattr(self_test, "attention", attention)
        return called

    return of


def right(out: Tensor) -> Tensor:
    return out


def nan_in_a_row(out: Tensor) -> Tensor:
    out[0, 1, 5, 9] = math.nan
    return out


def full(out: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("full")


def test_right_kernels_are_tested_once(kernels: Callable[[Results], list[int]]) -> None:
    called = kernels([right, right])
    for _ in range(2):
        self_test.check_kernels(CPU)
    assert called == [*HEAD_DIMS]


@pytest.mark.parametrize(
    ("results", "head_dim"), [([nan_in_a_row], 64), ([right, torch.zeros_like], 128)]
)
def test_wrong_kernels_are_tested_once_and_refused_ever_after(
    kernels: Callable[[Results], list[int]], results: Results, head_dim: int
) -> None:
    called = kernels(results)
    for _ in range(2):
        with pytest.raises(self_test.WrongKernels, match=f"at head_dim {head_dim}"):
            self_test.check_kernels(CPU)
    assert len(called) == len(results)


def test_a_test_without_memory_is_made_up_for(kernels: Callable[[Results], list[int]]) -> None:
    called = kernels([full, right, right])
    with pytest.raises(torch.OutOfMemoryError):
        self_test.check_kernels(CPU)
    self_test.check_kernels(CPU)
    assert len(called) == 3


def test_the_library_passes(untested: None) -> None:
    self_test.check_kernels(CPU)


def test_inputs_are_the_same_whatever_the_caller_has_set() -> None:
    expected = make_inputs(64)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    try:
        found = make_inputs(64)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))
