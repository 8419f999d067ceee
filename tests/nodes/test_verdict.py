# SPDX-License-Identifier: Apache-2.0
"""Words of a run without a sparse call, on the node and in the report.

They give the reason that is true, and nothing that sends its user the wrong way.
"""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import TOKENS, network

pytestmark = pytest.mark.usefixtures("reference_allowed")

WIDTH, GRID = 128, (4, 8, 8)
TEXT, SOUND = 24, 30
REPLACED = "self-attention did not reach this node; another node replaces it"
AUTO = "auto quality"
DEFAULT_STEPS = (1.0, 0.7, 0.6)


@pytest.fixture
def told(load_pack, sampled, monkeypatch):
    """told(step, sigmas, ...): a run. step is given attend(queries, keys) for calls over so many
    tokens. sound: tokens of what is sampled beside the clip."""
    # The process remembers a graph that another test had traced whole.
    monkeypatch.setattr(load_pack("sparge.compiling"), "_traced", set())

    def run(step, sigmas=DEFAULT_STEPS, sound=0, **given):
        def forward(attend):
            def of(queries, keys):
                q, k = (torch.ones(1, n, WIDTH) for n in (queries, keys))
                return attend(q, k, k, 2)

            of.options = attend.options
            step(of)

        if sound:
            given |= {
                "model": network("LTXAVModel", num_attention_heads=2, transformer_blocks=range(1)),
                "latent": GRID,
                "extras": {"latent_shapes": [(1, 4, *GRID), (1, 8, sound, 16)]},
            }
        given = {"context": torch.zeros(1, TEXT, 8)} | given
        got = sampled(forward, sigmas, raises=(KeyboardInterrupt,), **given)
        assert got.details.startswith(got.line)
        return got

    return run


def whole(attend):
    attend(TOKENS, TOKENS)


def text_alone(attend):
    attend(TOKENS, TEXT)
    attend(TEXT, TEXT)


def sound_and_text(attend):
    attend(TOKENS, TEXT)
    attend(SOUND, SOUND)
    attend(SOUND, TEXT)
    attend(TOKENS, SOUND)
    attend(SOUND, TOKENS)


def text_of_a_numbered_block(attend):
    """Models that publish blocks do so for the text in them, too."""
    attend.options |= {"block_index": 0, "total_blocks": 2}
    attend(TEXT, TEXT)


@pytest.mark.parametrize("mode", ["manual", AUTO])
@pytest.mark.parametrize("min_tokens", [0, TOKENS])
@pytest.mark.parametrize(
    ("step", "sound"),
    [
        (text_alone, 0),
        (sound_and_text, SOUND),
        (text_of_a_numbered_block, 0),
    ],
)
def test_another_node_replaces_the_clips_self_attention(told, mode, min_tokens, step, sound):
    got = told(step, sound=sound, mode=mode, min_tokens=min_tokens)
    assert "; NOTHING WAS SPARSE: the clip's " + REPLACED in got.line
    assert ", 256 tokens; " in got.line
    assert "min_tokens" not in got.line and "start_percent" not in got.line
    assert "3 other dense self-attention calls" in got.line


def test_sound_as_long_as_the_clip_is_not_taken_for_it(told):
    """Nor the clip for sound: nothing tells them apart but their order."""
    got = told(lambda attend: [attend(TOKENS, TOKENS), attend(TOKENS, TEXT)], sound=TOKENS)
    assert got.counts.sparse == 2 and "reach" not in got.line


def test_a_picture_is_no_clip(told):
    got = told(lambda attend: attend(64, TEXT), latent=(1, 16, 16))
    assert "the picture's " + REPLACED in got.line


@pytest.mark.parametrize(
    "step",
    [
        whole,
        lambda attend: attend(TOKENS + TEXT, TOKENS + TEXT),
        lambda attend: [attend(64, TOKENS) for _ in range(4)],  # frame by frame
        lambda attend: [attend(64, 64) for _ in range(4)],
    ],
    ids=["whole", "with text", "a frame looks at all", "frames"],
)
def test_a_clip_that_came_is_not_missed(told, step):
    for sigmas in ([0.9], [1.0, 0.7]):
        got = told(step, sigmas)
        assert REPLACED not in got.line and not got.counts.missing
    passes = iter(range(9))  # a cache answers the others
    got = told(lambda attend: next(passes) == 1 and step(attend), [1.0, 0.95, 0.9])
    assert REPLACED not in got.line


#: Queries and keys of a self-attention that another node changes.
CHANGED = {
    "further keys": (TOKENS, 2 * TOKENS),
    "merged keys": (TOKENS, TOKENS // 2),
    "some of the queries": (TOKENS // 2, TOKENS),
    "merged queries, further keys": (TOKENS // 2, 2 * TOKENS),
}


@pytest.mark.parametrize("model", [None, torch.nn.Module()], ids=["with a row", "without"])
@pytest.mark.parametrize("case", CHANGED)
def test_self_attention_that_another_node_changes(told, case, model):
    """It is sparse in mode manual, and in the others has a reason that is true."""

    def step(attend):
        attend(*CHANGED[case])
        attend(TOKENS, TEXT)

    given = {"min_tokens": TOKENS // 2, "model": model}
    manual, auto = told(step, **given), told(step, mode=AUTO, **given)
    assert (manual.counts.sparse, manual.counts.dense, manual.counts.cross) == (2, 1, 3)
    assert auto.counts.sparse == 0 and auto.counts.cross == 3
    (why,) = auto.counts.reasons
    assert why.startswith("queries and keys differ in number") and "mode manual serves" in why
    assert "did not reach this node" not in manual.line + auto.line
    if model is None and "keys" in case:
        assert "differ in number in some calls" in manual.line, "tokens stay as they come"


@pytest.mark.parametrize("mode", ["manual", AUTO])
@pytest.mark.parametrize(("start", "end"), [(0.9, 0.1), (0.6, 0.59), (1.0, 0.0)])
def test_an_empty_window_is_told(told, load_pack, monkeypatch, mode, start, end):
    """And nothing is measured for it."""
    measured = []
    heads = load_pack("sparge.session.heads")
    monkeypatch.setattr(heads, "measure", lambda *args, **kwargs: measured.append(1))
    got = told(whole, [1.0, 0.8, 0.5, 0.2, 0.05], mode=mode, start_percent=start, end_percent=end)
    assert got.counts.reasons == {
        f"start_percent {start:g} is above end_percent {end:g}, so no step is between them": 5
    }
    assert not measured


@pytest.mark.parametrize("null", [None, "None", ""])
def test_null_names_no_block(load_pack, told, null):
    """An API graph may have null: ComfyUI makes text of it."""
    node = load_pack("nodes.sparge_attention").SpargeAttention
    assert node.validate_inputs(null) is True
    assert told(whole, [0.5], dense_blocks=null).counts.sparse == 1
    assert "dense_blocks contains 'Nine'" in str(node.validate_inputs("Nine"))
