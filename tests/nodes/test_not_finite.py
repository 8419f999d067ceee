# SPDX-License-Identifier: Apache-2.0
"""NaN and inf that the model gives by itself are said where they are seen: while measuring."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS, TOKENS

pytestmark = pytest.mark.usefixtures("reference_allowed")

NAN, INF = (f"the model gave {x} here, without Sparge Attention's doing" for x in ("NaN", "inf"))
#: Of three, the last dense one and those behind it.
SIGMAS = [1.0, 0.9, 0.7, 0.6, 0.5]


def nan_of_a_weight(q, k, v):
    v[..., 5] = torch.nan


def inf_of_a_weight(q, k, v):
    v[..., 5] = torch.inf


def nan_in_one_key(q, k, v):
    k[0, 17, 3] = torch.nan


def nan_in_one_query(q, k, v):
    """A row that need not be among those measured."""
    q[0, 200, 3] = torch.nan


def nothing(q, k, v):
    """The model gives finite numbers."""


@pytest.fixture
def told(sampled, generator):
    """told(spoil, which, first, **widgets): a run whose layers of these numbers are spoiled from
    that pass on."""
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)

    def run(spoil, which=range(BLOCKS), first=0, **widgets):
        passes = iter(range(100))

        def step(attend):
            number = next(passes)
            for layer, operands in enumerate(layers.clone()):
                if layer in which and number >= first:
                    spoil(*operands)
                attend(*operands, HEADS)

        return sampled(step, SIGMAS, **{"mode": "auto quality"} | widgets)

    return run


@pytest.mark.parametrize("mode", ["auto quality", "auto budget"])
@pytest.mark.parametrize(
    ("spoil", "why"), [(nan_of_a_weight, NAN), (inf_of_a_weight, INF), (nan_in_one_key, NAN)]
)
def test_a_model_that_gives_none_but_those(told, spoil, why, mode):
    got = told(spoil, mode=mode)
    assert got.tally.sparse == 0
    assert got.tally.reasons == {"before start_percent 0.2": 2 * BLOCKS, why: 3 * BLOCKS}
    assert f"{why} ({3 * BLOCKS})" in got.line and got.line in got.details
    assert "NOTHING WAS SPARSE" in got.line and "could not be measured" not in got.line


@pytest.mark.parametrize("spoil", [nan_of_a_weight, nan_in_one_query])
def test_one_layer_of_them(told, spoil):
    got = told(spoil, which=[1])
    assert (got.tally.sparse, got.tally.reasons[NAN]) == (3 * (BLOCKS - 1), 3)
    assert got.line.count(NAN) == 1


def test_without_a_dense_step(told):
    got = told(nan_of_a_weight, start_percent=0.0)
    assert got.tally.reasons == {"measuring": BLOCKS, NAN: 4 * BLOCKS} and NAN in got.line


def test_what_is_not_finite_in_eight_bits_alone_is_not_the_models(load_pack, told, monkeypatch):
    line = told(nothing).line
    assert "NaN" not in line and " inf" not in line
    measured = load_pack("sparge.tune.head_measuring").measure_for

    def broken(device):
        def measure(sample):
            found = measured(device)(sample)
            found.distances.norm.fill_(torch.nan)
            return found

        return measure

    monkeypatch.setattr(load_pack("sparge.tune.head_measuring"), "measure_for", broken)
    got = told(nothing)
    assert got.tally.reasons["this layer could not be measured"] == 3 * BLOCKS
    assert "NaN" not in got.line
