# SPDX-License-Identifier: Apache-2.0
"""Runs of a model whose frames attend one by one, as Wan Animate 2's do."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

FRAMES, FRAME, HEADS, TEXT = 4, 8 * 8, 2, 24
CLIP = FRAMES * FRAME
STEPS = [1.0, 0.9, 0.7, 0.5]
WINDOW = "before start_percent 0.2"


class WanAnimate2Model(torch.nn.LayerNorm):
    """Model that is such a one by its name; nothing of it runs."""

    patch_size, num_heads, blocks = (1, 2, 2), HEADS, range(2)


@pytest.fixture
def run(load_pack, patcher, session, runs, generator):
    """run(**widgets): what the blocks' frames gave with the node, and without; the run; its line.
    The frames of a block attend to the clip and, but for the first, to a pose."""
    q = torch.randn(1, CLIP, HEADS * 64, generator=generator)
    kv = torch.randn(1, CLIP + FRAME, HEADS * 64, generator=generator)

    def step(attend):
        out = []
        for _ in range(2):
            for frame in range(FRAMES):
                mine = q[:, frame * FRAME : (frame + 1) * FRAME]
                keys = kv if frame else kv[:, :CLIP]
                out.append(attend(mine, keys, keys, HEADS))
            attend(q, kv[:, :TEXT], kv[:, :TEXT], HEADS)
        return torch.cat(out, 1)

    def sampled(**widgets):
        patcher.model.diffusion_model = WanAnimate2Model(8)
        node = load_pack("nodes.sparge_attention").SpargeAttention
        patched = node.execute(patcher, **({"min_tokens": CLIP} | widgets))[0]
        running = session(patched, (FRAMES, 16, 16), torch.zeros(1, TEXT, 8))
        given = running.sample(step, STEPS, ([0],))
        run, stopped = runs[-1]
        result = run.result(None, stopped)
        return given, run, load_pack("nodes.report").summary(result)

    return sampled


def test_manual_mode_serves_each_frame(run):
    given, done, line = run(topk=1.0)
    tally = done.tally
    assert tally.sparse == 2 * 2 * FRAMES and tally.cross == 4 * 2
    assert tally.reasons == {WINDOW: 2 * 2 * FRAMES}
    assert line.startswith(f"Wan, {CLIP} tokens")
    assert "the model attends frame by frame" in line and "other tokens" not in line
    assert float((given[-1] - given[0]).norm() / given[0].norm()) < 0.02
    assert torch.equal(given[0], given[1]), "both are dense"


def test_auto_modes_say_what_it_is(run):
    given, done, line = run(mode="auto quality")
    assert done.tally.sparse == 0 and done.tally.cross == 4 * 2
    why = "the model attends frame by frame, which only mode manual serves"
    assert done.tally.reasons == {why: 4 * 2 * FRAMES}
    assert "NOTHING WAS SPARSE" in line and "start_percent" not in line
    assert all(torch.equal(out, given[0]) for out in given)


def test_shorter_sequences_than_min_tokens_stay_dense(run):
    _, done, _ = run(min_tokens=CLIP + FRAME + 1)
    assert done.tally.sparse == 0
    assert set(done.tally.reasons) == {f"fewer than min_tokens ({CLIP + FRAME + 1}) tokens"}
