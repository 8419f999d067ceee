# SPDX-License-Identifier: Apache-2.0
"""NaN and inf that the model gives by itself are said where they are seen: while measuring."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

HEADS, BLOCKS = 2, 2
LATENT = (4, 16, 16)
TOKENS = 4 * 8 * 8
NAN, INF = (f"the model gave {x} here, without this node's doing" for x in ("NaN", "inf"))
LATER = "NaN or inf came into attention in sparse steps"
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


@pytest.fixture
def told(load_pack, patched_wan, session, generator, runs):
    """told(spoil, which, sigma, **widgets): tally, line and details of a run whose layers of these
    numbers are spoiled from a noise level on."""
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)
    report, hook_of = load_pack("nodes.report"), load_pack("nodes.hook").hook_of

    def run(spoil, which=range(BLOCKS), first=0, **widgets):
        passes = iter(range(100))

        def step(attend):
            number = next(passes)
            for layer, operands in enumerate(layers.clone()):
                if layer in which and number >= first:
                    spoil(*operands)
                attend(*operands, HEADS)

        patched = patched_wan(**({"mode": "auto quality", "min_tokens": TOKENS} | widgets))
        session(patched, LATENT).sample(step, SIGMAS)
        last = hook_of(patched).last
        return runs[-1][0].tally, report.summary(last), report.details(last)

    return run


@pytest.mark.parametrize("mode", ["auto quality", "auto budget"])
@pytest.mark.parametrize(
    ("spoil", "why"), [(nan_of_a_weight, NAN), (inf_of_a_weight, INF), (nan_in_one_key, NAN)]
)
def test_a_model_that_gives_none_but_those(told, spoil, why, mode):
    tally, line, details = told(spoil, mode=mode)
    assert tally.sparse == 0
    assert tally.reasons == {"before start_percent 0.2": 2 * BLOCKS, why: 3 * BLOCKS}
    assert f"{why} ({3 * BLOCKS})" in line and line in details
    assert "NOTHING WAS SPARSE" in line and "could not be measured" not in line


def test_one_layer_of_them(told):
    tally, line, _ = told(nan_of_a_weight, which=[1])
    assert tally.sparse == 3 * (BLOCKS - 1) and tally.reasons[NAN] == 3
    assert line.count(NAN) == 1


def test_a_row_that_is_not_measured(told):
    tally, line, _ = told(nan_in_one_query, which=[0])
    assert (tally.sparse, tally.reasons[NAN]) == (3 * (BLOCKS - 1), 3)
    assert line.count(NAN) == 1


def test_without_a_dense_step(told):
    tally, line, _ = told(nan_of_a_weight, start_percent=0.0)
    assert tally.reasons == {"measuring": BLOCKS, NAN: 4 * BLOCKS} and NAN in line


def test_those_that_come_later_may_be_anyones(told):
    tally, line, _ = told(nan_of_a_weight, first=2)
    assert tally.sparse == 3 * BLOCKS
    assert LATER in line and NAN not in line


def test_nothing_is_said_of_a_model_without(told):
    _, line, _ = told(lambda q, k, v: None)
    assert "NaN" not in line and " inf" not in line


def test_what_is_not_finite_in_eight_bits_alone_is_not_the_models(load_pack, told, monkeypatch):
    measured = load_pack("sparge.tune.head_table").measure_for

    def broken(device):
        def measure(sample):
            found = measured(device)(sample)
            found.distances.norm.fill_(torch.nan)
            return found

        return measure

    monkeypatch.setattr(load_pack("sparge.tune.head_table"), "measure_for", broken)
    tally, line, _ = told(lambda q, k, v: None)
    assert tally.reasons["this layer could not be measured"] == 3 * BLOCKS
    assert "NaN" not in line
