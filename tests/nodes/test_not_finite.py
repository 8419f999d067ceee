# SPDX-License-Identifier: Apache-2.0
"""NaN and inf that begin in a sparse step are said."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS, TOKENS

pytestmark = pytest.mark.usefixtures("reference_allowed")

#: Of three, the last dense one and those behind it.
SIGMAS = [1.0, 0.9, 0.7, 0.6, 0.5]


#: What is spoiled: q, k or v, a place in it, and by what. A row of queries need not be among those
#: measured.
WEIGHT, KEY, QUERY = (2, (..., 5)), (1, (0, 17, 3)), (0, (0, 200, 3))


@pytest.fixture
def told(sampled, generator):
    """told(place, value, first, mode): a run whose last layer is spoiled from that pass on. Layers
    hand nothing on to each other."""
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)

    def run(place, value, first, mode):
        passes = iter(range(len(SIGMAS)))

        def step(attend):
            operands = layers.clone()
            if next(passes) >= first:
                operand, at = place
                operands[-1, operand][at] = value
            for each in operands:
                attend(*each, HEADS)

        return sampled(step, SIGMAS, mode=mode)

    return run


SPARSE = "in the results of sparse calls"


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
@pytest.mark.parametrize(
    ("place", "value"), [(WEIGHT, torch.inf), (KEY, torch.nan), (QUERY, torch.nan)]
)
@pytest.mark.parametrize("first", [2, 4], ids=["the first sparse step", "the last step"])
def test_what_begins_in_a_sparse_step(load_pack, told, mode, place, value, first):
    """The last layer of each pass is looked at: a model hands on what its layers give. In 8 bits an
    infinity makes NaN."""
    got = told(place, value, first, mode)
    assert got.counts.sparse == 3 * BLOCKS
    assert got.last.notes[0].startswith(f"NaN {SPARSE}") and got.line.count(SPARSE) == 1
    _, second, sentence = load_pack("sparge.session").verdict(got.last)
    assert second.startswith("NaN in the result: ") and SPARSE in sentence
