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
from sparge.session import timing as self_test
from sparge.session.timing import MOST, make_inputs, masked_attention, row_errors
from tests.oracle import HOPPER_SOFTMAX, PORTABLE_SOFTMAX, Quantized, attend, quantize_qkv
from tests.session.parts import CPU

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
    softmax = HOPPER_SOFTMAX if x.element is Element.INT8_E4M3 else PORTABLE_SOFTMAX
    kept = make_inputs(x.head_dim)[3]
    return attend(x, kept, scale=x.head_dim**-0.5, softmax=softmax).out


@cache
def emulated(element: Element, head_dim: int) -> Tensor:
    return attended(quantized(element, head_dim))


@cache
def true(head_dim: int) -> Tensor:
    return masked_attention(*make_inputs(head_dim))


def errors(out: Tensor) -> Tensor:
    return row_errors(out, true(out.shape[-1]))


@at_each_head_dim
@pytest.mark.parametrize("name", ["INT8_E4M3", "INT8_INT8", "INT8_FP16", "BF16"])
def test_right_kernels_pass_by_a_margin(name: str, head_dim: int) -> None:
    assert MARGIN * errors(emulated(Element[name], head_dim)).max() <= MOST


def other_heads(*names: str) -> Callable[[Quantized], Quantized]:
    return lambda x: replace(x, **{name: getattr(x, name).flip(1) for name in names})


def neighbours(name: str, *place: int) -> Callable[[Quantized], Quantized]:
    """One scale is that of what comes before."""

    def spoil(x: Quantized) -> Quantized:
        scales = getattr(x, name).clone()
        scales[place] = scales[(*place[:-1], place[-1] - 1)]
        return replace(x, **{name: scales})

    return spoil


WRONG: dict[str, Callable[[Quantized], Quantized]] = {
    "keys of another head": other_heads("k_levels", "k_scale"),
    "values of another head": other_heads("v_levels", "v_block_scale"),
    "scale of a key block": neighbours("k_scale", 0, 1, 3),
    "scale of a channel": neighbours("v_scale", 0, 0, 21),
    "scale of a query": neighbours("q_scale", 0, 2, 77),
    "keys beyond the end": lambda x: replace(
        x, key_counts=torch.full_like(x.key_counts, KEY_BLOCK)
    ),
    "no mean value": lambda x: replace(x, vbar=0 * x.vbar),
}
OF_INTEGERS = {"scale of a value block": neighbours("v_block_scale", 0, 1, 3)}


@at_each_head_dim
@pytest.mark.parametrize("block", range(1, 6))
def test_a_block_too_few_or_too_many_is_found_in_each_query_block(block, head_dim: int) -> None:
    q, k, v, kept = make_inputs(head_dim)
    kept[..., block] ^= True
    for rows in errors(masked_attention(q, k, v, kept)).split(QUERY_BLOCK, -1):
        assert (rows.amax(-1) > MOST).all()


#: Places of a result that are exchanged, or one that is filled with a value.
FAULTS: dict[str, tuple[Any, Any]] = {
    "two heads": ((0, 0), (0, 1)),
    "two query blocks": ((0, 3, slice(128, 256)), (0, 3, slice(0, 128))),
    "rows of a fragment": ((0, 2, slice(160, 168)), (0, 2, slice(168, 176))),
    "columns of a fragment": ((0, 1, slice(32, 48), 40), (0, 1, slice(32, 48), 41)),
    "two rows": ((0, 1, 200), (0, 1, 201)),
    "the last row is not written": ((0, 3, 329), 0.0),
    "garbage in a row": ((0, 2, 17), 1e4),
    "an infinity": ((0, 0, 300, 7), math.inf),
}


@in_eight_bits
@at_each_head_dim
def test_faults_of_operands_and_of_results_are_found(head_dim: int, element: Element) -> None:
    """Integer values alone have a scale for each block."""
    spoils = WRONG | (OF_INTEGERS if element is Element.INT8_INT8 else {})
    spoilt = {name: attended(spoil(quantized(element, head_dim))) for name, spoil in spoils.items()}
    for name, (place, other) in FAULTS.items():
        spoilt[name] = out = emulated(element, head_dim).clone()
        if isinstance(other, float):
            out[place] = other
        else:
            out[place], out[other] = out[other].clone(), out[place].clone()
    for name, out in spoilt.items():
        assert errors(out).max() > MOST, name


def test_the_library_passes_whatever_the_caller_has_set(untested: None) -> None:
    expected = make_inputs(64)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    try:
        found = make_inputs(64)
        assert not self_test.why_wrong(CPU, self_test.UNKNOWN)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))
