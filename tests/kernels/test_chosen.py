# SPDX-License-Identifier: Apache-2.0
"""Operand types of 8-bit calls: the target's own, those that were chosen, and for how long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from sparge import Precision, SparsePolicy
from sparge.call import make_call
from sparge.kernels import Element, chosen
from sparge.kernels.chosen import Choices, Place

INT8, E4M3, BF16 = Element.INT8_INT8, Element.INT8_E4M3, Element.BF16
PLACE = Place(0, "sm_120a", 128)


def test_a_choice_counts_until_the_first_call_and_then_that_stays() -> None:
    choices, others = Choices(), (Place(1, "sm_120a", 128), Place(0, "sm_120a", 64))
    assert choices.choose(PLACE, BF16) is BF16 and choices.choose(PLACE, E4M3) is E4M3
    assert choices.use(PLACE) is E4M3
    assert choices.choose(PLACE, INT8) is choices.use(PLACE) is E4M3
    assert all(choices.use(place) is INT8 for place in others), "another GPU, another head_dim"
    assert choices.choose(others[0], E4M3) is choices.use(others[0]) is INT8


@pytest.mark.parametrize(
    ("arch", "element"), [("sm_86", E4M3), ("sm_90a", INT8), ("sm_120a", Element.FP16)]
)
def test_what_is_no_variant_is_refused(arch: str, element: Element) -> None:
    with pytest.raises(ValueError, match=f"{element.name} does not serve 8-bit calls of {arch}"):
        Choices().choose(Place(0, arch, 64), element)


def test_what_is_tried_is_of_one_thread_and_does_not_last() -> None:
    choices = Choices()
    with ThreadPoolExecutor(1) as other, choices.trying({128: BF16}):
        with choices.trying({128: E4M3}):
            assert choices.use(PLACE) is E4M3
        assert choices.use(PLACE) is BF16
        assert choices.choose(PLACE, E4M3) is E4M3, "nothing is in use"
        assert other.submit(choices.use, PLACE).result() is E4M3
    assert choices.use(PLACE) is E4M3


def element_of(policy: SparsePolicy, head_dim: int, dtype: torch.dtype) -> Element:
    q, k, v = torch.randn(3, 1, 2, 130, head_dim).to(dtype)
    call = make_call(q, k, v, policy, "HND", False, None, None, None, None)
    assert call.element is call.heads(0, 1).element
    return call.element


def test_calls_have_the_chosen_element_where_they_can(pretend_gpu) -> None:
    pretend_gpu("sm_120a")
    chosen.choose(0, "sm_120a", {64: BF16, 128: E4M3})
    plain, half = SparsePolicy(), torch.float16
    cases: list[tuple[SparsePolicy, int, torch.dtype, Element]] = [
        (plain, 100, half, E4M3),
        (plain, 40, torch.bfloat16, BF16),
        (plain, 40, half, Element.FP16),
        (SparsePolicy(pvthreshd=15.0), 100, half, INT8),
        (SparsePolicy(precision=Precision.SIXTEEN_BIT), 100, half, Element.FP16),
        (SparsePolicy(precision=Precision.INT8_FP16), 100, half, Element.INT8_FP16),
    ]
    for policy, head_dim, dtype, expected in cases:
        assert element_of(policy, head_dim, dtype) is expected, (policy, head_dim, dtype)


@pytest.mark.parametrize(("arch", "own"), [("sm_90a", E4M3), ("sm_80", Element.INT8_FP16)])
def test_a_target_with_one_variant_has_no_choice(arch, own, pretend_gpu, monkeypatch) -> None:
    pretend_gpu(arch)
    nothing: Any = None
    monkeypatch.setattr(chosen, "_choices", nothing)
    assert element_of(SparsePolicy(), 64, torch.bfloat16) is own


def test_whole_graphs_take_the_chosen_element() -> None:
    """Its kind is a constant of the graph; torch 2.11 traces no call of an enum."""

    def bytes_of_values(x: torch.Tensor) -> torch.Tensor:
        element = chosen.chosen_element(x.device, "sm_86", 64)
        return x * element.value_bytes * (1 if element.quantized else 10)

    traced = torch.compile(bytes_of_values, fullgraph=True, backend="eager")
    with chosen.trying({64: Element.BF16}):
        assert traced(torch.ones(1)) == 20
    torch._dynamo.reset()
    with chosen.trying({64: Element.INT8_INT8}):
        assert traced(torch.ones(1)) == 1
