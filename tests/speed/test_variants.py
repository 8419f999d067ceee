# SPDX-License-Identifier: Apache-2.0
"""The fastest variant that computes right, on a pretended RTX card with stand-in times."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import KernelBuildError, SparsePolicy, reference
from sparge.kernels import Element, chosen
from sparge.kernels.chosen import Place
from sparge.kernels.spec import HEAD_DIMS
from sparge.speed import self_test, variants
from sparge.speed.self_test import MOST, error_beside_emulation
from sparge.speed.table import Chosen
from sparge.speed.variants import MARGIN, adopt, choose_fastest, fastest
from tests.test_surroundings import SURROUNDINGS

INT8, E4M3, BF16 = Element.INT8_INT8, Element.INT8_E4M3, Element.BF16
CANDIDATES = (INT8, E4M3, BF16)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({INT8: [1.0] * 5, E4M3: [0.96] * 5, BF16: [0.9] * 5}, BF16),
        ({INT8: [1.0] * 5, E4M3: [1 - MARGIN / 2] * 5}, INT8),
        ({INT8: [1.0, 2, 2, 2, 2], E4M3: [1.5] * 5}, INT8),  # others used the GPU now and then
        ({INT8: [1.0, 2, 2, 2, 2], E4M3: [0.5, 1.5, 1.5, 1.5, 1.5]}, INT8),
        ({E4M3: [2.0], BF16: [1.0]}, BF16),
        ({BF16: [9.0]}, BF16),
        ({}, INT8),
    ],
)
def test_the_fastest_is_chosen_with_a_margin_for_the_own(seconds: Any, expected: Element) -> None:
    assert fastest(seconds, INT8) is expected


class Gpu:
    """A stand-in: seconds and errors of each element, those that do not compile, and what was
    timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = {INT8: 2.0, E4M3: 1.0, BF16: 3.0}
        self.errors: dict[tuple[Element, int], float] = {}
        self.failing: dict[Element, KernelBuildError] = {}
        self.timed: list[list[Element]] = []
        monkeypatch.setattr(variants, "warm_variants", lambda _: self.failing)
        monkeypatch.setattr(variants, "error_beside_emulation", self.error)
        monkeypatch.setattr(variants, "in_turns", self.in_turns)
        monkeypatch.setattr(variants, "capabilities", lambda _: SimpleNamespace(arch="sm_120a"))
        monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
        properties = SimpleNamespace(multi_processor_count=4)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(variants, "TOKENS", 130)
        monkeypatch.setattr(chosen, "_choices", chosen.Choices())

    def error(self, element: Element, head_dim: int, device: torch.device) -> float:
        return self.errors.get((element, head_dim), MOST)

    def in_turns(self, works: Mapping[Element, Callable[[], object]]) -> dict[Element, list[float]]:
        for work in works.values():
            work()
        self.timed.append(list(works))
        return {element: [self.seconds[element]] * 5 for element in works}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_each_head_dim_has_its_own(gpu: Gpu, monkeypatch, caplog) -> None:
    used: list[tuple[int, Element]] = []

    def attention(q: Tensor, *_: Any) -> None:
        place = Place(0, "sm_120a", int(q.shape[-1]))
        used.append((place.head_dim, chosen._choices.use(place)))

    caplog.set_level(logging.INFO, logger="sparge")
    monkeypatch.setattr(variants, "attention", attention)
    found = choose_fastest(CPU, CANDIDATES)
    assert used == [(head_dim, e) for head_dim in HEAD_DIMS for e in CANDIDATES]
    assert found == Chosen({64: E4M3, 128: E4M3}, {64: (), 128: ()})
    assert "head_dim 64: values as INT8_E4M3 (INT8_INT8 2000.00 ms" in caplog.text
    assert all(chosen._choices.use(Place(0, "sm_120a", d)) is INT8 for d in HEAD_DIMS), "not yet"


@pytest.mark.parametrize("error", [math.nan, 1.01 * MOST])
def test_a_wrong_one_is_dropped_and_said(gpu: Gpu, caplog, error: float) -> None:
    gpu.errors[E4M3, 128] = error
    found = choose_fastest(CPU, CANDIDATES)
    assert found == Chosen({64: E4M3, 128: INT8}, {64: (), 128: (E4M3,)})
    assert gpu.timed == [[*CANDIDATES], [INT8, BF16]]
    (said,) = caplog.messages
    assert "INT8_E4M3 at head_dim 128 computes something else" in said and "not used" in said


def test_one_that_does_not_compile_is_dropped_and_said(gpu: Gpu, caplog) -> None:
    gpu.failing = {E4M3: KernelBuildError("Kernel attend does not compile.", "not today")}
    found = choose_fastest(CPU, CANDIDATES)
    assert found == Chosen({64: INT8, 128: INT8}, {64: (E4M3,), 128: (E4M3,)})
    assert "INT8_E4M3 does not compile and is not used" in caplog.text


def test_where_there_is_no_choice_nothing_is_measured(gpu: Gpu) -> None:
    assert choose_fastest(CPU, [E4M3]) == Chosen() and not gpu.timed
    adopt(Chosen(), CPU)


def test_what_was_chosen_comes_before_the_first_call_or_with_the_next_start(gpu, caplog) -> None:
    caplog.set_level(logging.INFO, logger="sparge")
    place = Place(0, "sm_120a", 64)
    adopt(Chosen({64: E4M3, 128: INT8}), CPU)
    assert chosen._choices.use(place) is E4M3 and not caplog.messages
    adopt(Chosen({64: BF16, 128: BF16}), CPU)
    assert chosen._choices.use(place) is E4M3
    (said,) = caplog.messages
    assert "head_dim 64 use values as INT8_E4M3 already; BF16" in said


class TestSelfTest:
    """Of stand-ins for the kernels, which compute as the emulation or otherwise."""

    @pytest.fixture
    def computing(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        """computing(element): calls compute as that element, whatever is asked for."""

        def computing(element: Element, factor: float = 1.0) -> None:
            def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
                mask = options["block_mask"]
                found, _ = reference.attention(
                    q, k, v, SparsePolicy(), block_mask=mask, element=element
                )
                return found.out * factor

            monkeypatch.setattr(self_test, "attention", attention)

        return computing

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_only_the_same_arithmetic_passes(self, head_dim: int, computing) -> None:
        for element in CANDIDATES:
            for computed in CANDIDATES:
                computing(computed)
                error = error_beside_emulation(element, head_dim, CPU)
                assert (error <= MOST / 10) if computed is element else (error > 2 * MOST)

    @pytest.mark.parametrize("around", ["default bf16", "default device"])
    def test_defaults_of_the_caller_change_nothing(self, around: str, computing) -> None:
        computing(INT8)
        with SURROUNDINGS[around]():
            assert error_beside_emulation(INT8, 64, CPU) <= MOST / 10

    @pytest.mark.parametrize("factor", [1.004, math.nan])
    def test_a_wrong_result_fails(self, factor: float, computing) -> None:
        computing(INT8, factor)
        assert not error_beside_emulation(INT8, 64, CPU) <= MOST


def test_rounds_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Element] = []

    def time_once(work: Callable[[], object]) -> tuple[float, float]:
        work()
        return float(len(order)), 0.0

    monkeypatch.setattr(variants, "time_once", time_once)
    monkeypatch.setattr(torch.cuda, "synchronize", order.clear)
    pair: Sequence[Element] = (INT8, BF16)
    found = variants.in_turns({e: lambda e=e: order.append(e) for e in pair})
    assert order == [INT8, BF16] * variants.ROUNDS
    assert found == {INT8: [1.0, 3.0, 5.0, 7.0, 9.0], BF16: [2.0, 4.0, 6.0, 8.0, 10.0]}
