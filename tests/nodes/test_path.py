# SPDX-License-Identifier: Apache-2.0
"""Path of a sparse call, from the model up to the library's own door."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.nodes.conftest import PACK
from tests.nodes.parts import HEADS, TOKENS, network

HOOK, DOOR = PACK / "nodes" / "hook.py", PACK / "sparge" / "attention.py"
#: Python frames up to the door, those of torch included; `tests/test_prepared.py` counts on.
MOST_FRAMES = 32


@pytest.mark.usefixtures("reference_allowed")
@pytest.mark.parametrize("mode", ["auto budget", "manual"])
def test_a_call_passes_few_frames(sampled, generator, mode):
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)
    counted: list[int] = []

    def step(attend):
        for layer in range(2):  # the second call of a kind is as all others of its pass
            attend.options["block_index"] = layer
            frames: list[Path] = []

            def entered(frame, event, _, frames=frames):
                file = Path(frame.f_code.co_filename)
                if event == "call" and DOOR not in frames and (frames or file == HOOK):
                    frames.append(file)

            sys.setprofile(entered)
            try:
                attend(q, q, q, HEADS)
            finally:
                sys.setprofile(None)
        assert DOOR in frames or attend.options["sparge_forward"].step.why_dense
        counted.append(len(frames))

    model = network(blocks=range(20))  # most steps probe no layer that is called here
    got = sampled(step, [1.0, 0.9, 0.6, 0.5, 0.4], model, mode=mode, topk=0.5)
    assert got.counts.sparse == 2 * 3
    assert counted[-1] <= MOST_FRAMES
