# SPDX-License-Identifier: Apache-2.0
"""Study of a data set under every mode: samples, head settings, rows of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.quality.data import DataSet
from benchmarks.quality.judge import Call, HeadError, Sample, head_errors, summary
from benchmarks.quality.measured import Measured
from benchmarks.quality.modes import BY_NAME, Mode, attend, reached_density, share_for, uniform
from benchmarks.quality.perplexity import perplexity
from benchmarks.quality.rows import Row
from benchmarks.quality.walks import by_walk, of_heads
from sparge.head_settings import HeadBudget

#: Output (heads, rows, D) of a call on a sample, and density (heads,).
Attend = Callable[[Mode, Call, HeadBudget, Sample], tuple[Tensor, Tensor]]

PREDICTED_WITHIN = 1.5  # the factor between expected and reached error that the product promises
DENSE_ERROR = 0.01  # what 8 bits may cost, which calibration does not count
DROP_NOISE = 1.1  # two samples of query blocks rank a head's candidates this well


class Study:
    """Calls of a data set with their samples, and what calibration measured."""

    def __init__(
        self, data: DataSet, modes: Iterable[Mode], blocks: int, calibration_blocks: int, seed: int
    ) -> None:
        modes = tuple(modes)
        self.data = data
        self._measured: Measured | None = None
        seen: Mapping[int, set[int]] = {}
        if any(mode.measured for mode in modes):
            self._measured = Measured.on(data.calibrated, data.layers, calibration_blocks)
            if data.calibrated is data.judged:
                seen = self._measured.seen
        self._samples = {
            cubes: [
                Sample.draw(call.packed(cubes), blocks, seed + index, seen.get(call.place, ()))
                for index, call in enumerate(data.judged)
            ]
            for cubes in {mode.cubes for mode in modes}
        }

    def budgets(self, mode: Mode, density: float) -> list[HeadBudget]:
        """Head settings for each call; measured ones share the mean density among all heads of all
        calls."""
        calls = self.data.judged
        if not mode.measured:
            first = calls[0]
            share = share_for(mode, first.packed(mode.cubes), density, first.is_causal)
            return [uniform(mode, call.heads, share) for call in calls]
        assert self._measured is not None  # the mode is one of those the study was made for
        by_place = self._measured.budgets(density)
        return [by_place[call.place] for call in calls]

    def row(self, mode: Mode, density: float, run: Attend) -> Row:
        """Row of errors on the judged blocks, which calibration has not seen."""
        errors = self._errors(mode, self.budgets(mode, density), run)
        named = {
            "data": self.data.name,
            "mode": mode.name,
            "asked_density": density,
            "layers": self.data.layers,
        }
        promises = self._promises(density, errors, run) if mode.measured else {}
        return named | summary(errors) | promises

    def _errors(self, mode: Mode, budgets: list[HeadBudget], run: Attend) -> list[HeadError]:
        errors = []
        for call, budget, judged in zip(
            self.data.judged, budgets, self._samples[mode.cubes], strict=True
        ):
            out, reached = run(mode, call, budget, judged)
            errors += head_errors(call.layer.name, out, call.truth(judged.tokens), reached)
        return errors

    def _promises(self, density: float, errors: list[HeadError], run: Attend) -> Row:
        """Shares of the heads whose error is as expected, and is no worse than plain drop's at the
        head's own density, which `run` computes too."""
        assert self._measured is not None  # asked for measured modes alone
        by_layer = self._measured.choices(density).error.tolist()
        expected = [error for call in self.data.judged for error in by_layer[call.place]]
        measured = self.budgets(BY_NAME["ours auto"], density)
        zeros = torch.zeros_like(measured[0].gain)
        plain = [HeadBudget(budget.density, zeros, zeros.int()) for budget in measured]
        dropping = self._errors(BY_NAME["ours manual"], plain, run)
        ratios = [
            max(error.rel_l2, DENSE_ERROR) / max(guess, DENSE_ERROR)
            for error, guess in zip(errors, expected, strict=True)
        ]
        near = [1 / PREDICTED_WITHIN <= ratio <= PREDICTED_WITHIN for ratio in ratios]
        no_worse = [
            e.rel_l2 <= DROP_NOISE * drop.rel_l2 for e, drop in zip(errors, dropping, strict=True)
        ]
        return {
            "as_expected": sum(near) / len(near),
            "no_worse_than_drop": sum(no_worse) / len(no_worse),
        }

    def perplexity(self, mode: Mode, density: float) -> Row:
        """Perplexity of the text, every layer in this mode; the fields to add to its row."""
        if self.data.text is None:
            raise ValueError(f"{self.data.name} is no text; perplexity is one of smollm.")
        model, tokens = self.data.text
        found, reached = perplexity(model, tokens, mode, self.budgets(mode, density))
        return {
            "perplexity": found,
            "perplexity_density": reached,
            "dense_perplexity": self.dense_perplexity,
        }

    @cached_property
    def dense_perplexity(self) -> float:
        assert self.data.text is not None  # asked for by `perplexity` alone
        model, tokens = self.data.text
        return model.perplexity(tokens)


def emulated(mode: Mode, call: Call, budget: HeadBudget, judged: Sample) -> tuple[Tensor, Tensor]:
    """Computes an `Attend` in the reference's emulation of the kernels."""
    if budget.walk is None:
        packed = call.packed(mode.cubes)
        out, choice = attend(
            mode, packed, budget, is_causal=call.is_causal, query_blocks=judged.blocks
        )
        return out[0, :, judged.slots], reached_density(choice)
    outs, densities = [], []
    for walk, own in by_walk(budget):
        packed = call.walked(walk)
        sample = Sample.holding(packed, judged.tokens)
        out, choice = attend(mode, packed, own, query_blocks=sample.blocks)
        outs.append(out[0, :, sample.slots])
        densities.append(reached_density(choice))
    return of_heads(budget, outs), of_heads(budget, densities)
