# SPDX-License-Identifier: Apache-2.0
"""NaN and inf are said where they are seen: while measuring, where the model gives them by itself,
and in the results of sparse calls."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS, TOKENS

pytestmark = pytest.mark.usefixtures("reference_allowed")

NAN, INF = (f"the model gave {x} here, without Sparge Attention's doing" for x in ("NaN", "inf"))
#: Of three, the last dense one and those behind it.
SIGMAS = [1.0, 0.9, 0.7, 0.6, 0.5]


#: What is spoiled: q, k or v, a place in it, and by what. A row of queries need not be among those
#: measured.
WEIGHT, KEY, QUERY = (2, (..., 5)), (1, (0, 17, 3)), (0, (0, 200, 3))


@pytest.fixture
def told(sampled, generator):
    """told(place, value, which, first, **widgets): a run whose layers of these numbers are spoiled
    from that pass on. Layers hand nothing on to each other."""
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)

    def run(place, value, which=range(BLOCKS), first=0, **widgets):
        passes = iter(range(100))

        def step(attend):
            number = next(passes)
            for layer, operands in enumerate(layers.clone()):
                if layer in which and number >= first:
                    operand, at = place
                    operands[operand][at] = value
                attend(*operands, HEADS)

        return sampled(step, SIGMAS, **{"mode": "auto quality"} | widgets)

    return run


@pytest.mark.parametrize("mode", ["auto quality", "auto budget"])
@pytest.mark.parametrize(
    ("place", "value", "why"),
    [(WEIGHT, torch.nan, NAN), (WEIGHT, torch.inf, INF), (KEY, torch.nan, NAN)],
)
def test_a_model_that_gives_none_but_those(told, place, value, why, mode):
    got = told(place, value, mode=mode)
    assert got.counts.sparse == 0
    assert got.counts.reasons == {"before start_percent 0.2": 2 * BLOCKS, why: 3 * BLOCKS}
    assert f"{why} ({3 * BLOCKS})" in got.line and got.line in got.details
    assert "nothing was skipped" in got.line and "could not be measured" not in got.line


SPARSE = "in the results of sparse calls"
LAST = BLOCKS - 1


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
@pytest.mark.parametrize(
    ("place", "value"),
    [(WEIGHT, torch.nan), (WEIGHT, torch.inf), (KEY, torch.nan), (QUERY, torch.nan)],
)
@pytest.mark.parametrize("first", [2, 4], ids=["the first sparse step", "the last step"])
def test_what_begins_in_a_sparse_step(load_pack, told, mode, place, value, first):
    """The last layer of each pass is looked at: a model hands on what its layers give. In 8 bits an
    infinity makes NaN."""
    got = told(place, value, which=[LAST], first=first, mode=mode)
    assert got.counts.sparse == 3 * BLOCKS
    assert got.last.notes[0].startswith(f"NaN {SPARSE}") and got.line.count(SPARSE) == 1
    _, second, sentence = load_pack("sparge.session").verdict(got.last)
    assert second.startswith("NaN in the result: ") and SPARSE in sentence
