# SPDX-License-Identifier: Apache-2.0
"""Path of a sparse call through the files of this pack, up to the library's own door."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.nodes.conftest import PACK
from tests.nodes.parts import HEADS, TOKENS, network

DOOR, MOST = "sparge/attention.py", 10
#: Python frames up to the door, those of torch included; `tests/test_prepared.py` counts on.
MOST_FRAMES = 32


@pytest.mark.usefixtures("reference_allowed")
@pytest.mark.parametrize("mode", ["auto budget", "manual"])
def test_a_call_passes_few_files_and_the_documents_name_them(sampled, generator, mode):
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)
    passed: list[list[str]] = []
    counted: list[int] = []

    def step(attend):
        for layer in range(2):  # the second call of a kind is as all others of its pass
            attend.options["block_index"] = layer
            files: dict[str, None] = {}
            frames: list[str] = []

            def entered(frame, event, _, files=files, frames=frames):
                file = Path(frame.f_code.co_filename)
                if event != "call" or DOOR in files:
                    return
                if file.is_relative_to(PACK):
                    files[file.relative_to(PACK).as_posix()] = None
                if "nodes/hook.py" in files:
                    frames.append(frame.f_code.co_name)

            sys.setprofile(entered)
            try:
                attend(q, q, q, HEADS)
            finally:
                sys.setprofile(None)
        passed.append(list(files))
        counted.append(len(frames))

    model = network(blocks=range(20))  # most steps probe no layer that is called here
    got = sampled(step, [1.0, 0.9, 0.6, 0.5, 0.4], model, mode=mode, topk=0.5)
    assert got.counts.sparse == 2 * 3
    path = [file for file in passed[-1] if file.startswith(("nodes/", "sparge/"))]
    assert path[0] == "nodes/hook.py" and path[-1] == DOOR
    assert len(path) <= MOST and counted[-1] <= MOST_FRAMES
    guide = (PACK / "docs" / "developing.md").read_text(encoding="utf-8")
    table = guide[guide.index("passes these files") : guide.index("In diffusers")]
    assert set(path) <= {*re.findall(r"`([\w/]+\.py)`", table)}
