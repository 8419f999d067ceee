# SPDX-License-Identifier: Apache-2.0
"""A model without a row in FAMILIES, or one with other tokens than its clip's, runs sparse, and the
run says what it lacks."""

from __future__ import annotations

import pytest
import torch

TOKENS, HEADS = 128, 2  # of the session's latent in Wan's patches


class WanModel(torch.nn.LayerNorm):
    """Model with a row, by its name; nothing of it runs."""

    patch_size, num_heads, blocks = (1, 2, 2), HEADS, range(3)


class Novelty(torch.nn.LayerNorm):
    blocks = range(3)


def called(name, *parents):
    """A model whose class has that name."""
    return type(name, (*parents, torch.nn.LayerNorm), {"blocks": range(3)})(8)


@pytest.fixture
def notes_of(load_pack, reference_allowed, patcher, session, generator, runs):
    """notes_of(model, tokens, **widgets): sparse calls, of two, and the remarks of the run."""
    execute = load_pack("nodes.sparge_attention").SpargeAttention.execute

    def run(model, tokens=TOKENS, **widgets):
        q = torch.randn(1, tokens, HEADS * 64, generator=generator)
        patcher.model.diffusion_model = model
        patched = execute(patcher, **({"min_tokens": TOKENS} | widgets))[0]
        session(patched).sample(lambda attend: attend(q, q, q, HEADS), [0.7, 0.6])
        found = runs[-1][0]
        return found.tally.sparse, found.notes

    return run


def test_it_is_told(load_pack, notes_of):
    unknown = load_pack("nodes.unlisted_models").UNKNOWN_MODEL
    assert notes_of(Novelty(8)) == (2, [unknown])
    assert "text, should there be some" in unknown and "order" in unknown


@pytest.mark.parametrize("name", ["UNetModel", "GeneralDIT", "MiniTrainDIT", "Anima", "PixArtMS"])
def test_nothing_is_told_of_text_where_none_is_among_the_tokens(notes_of, name):
    for model in (called(name), called("Finetune", type(called(name)))):
        sparse, (note,) = notes_of(model)
        assert sparse == 2 and "text" not in note and "order" in note


@pytest.mark.parametrize("name", ["OpenAISignatureMMDITWrapper", "NextDiT", "SingleStreamDiT"])
def test_text_is_told_where_it_is_or_may_be_among_them(notes_of, name):
    _, (note,) = notes_of(called(name))
    assert "text" in note and "not kept exact" in note


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("OpenAISignatureMMDITWrapper", "SD3"),
        ("MiniTrainDIT", "Cosmos Predict2"),
        ("NextDiT", "Z-Image or Lumina"),
        ("UNetModel", "Stable Diffusion"),
        ("SomeoneElsesDiT3D", "This model"),
    ],
)
def test_no_class_name_is_shown(load_pack, notes_of, runs, name, shown):
    notes_of(called(name))
    told = load_pack("nodes.report").summary(runs[-1][0].result(None, False))
    assert told.startswith(f"{shown}, 128 tokens; ") and name not in told


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1 = self.attn2 = torch.nn.Identity()


class UNetModel(torch.nn.Module):
    """U-Net like SDXL's: 70 transformer blocks in lists of resolutions."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.input_blocks = torch.nn.ModuleList(of(n) for n in (0, 2, 2, 10, 10))
        self.middle_block = of(10)
        self.output_blocks = torch.nn.ModuleList(of(n) for n in (10, 10, 10, 2, 2, 2))


class JointModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.joint_blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(24))


def of(transformers):
    return torch.nn.Sequential(*(Transformer() for _ in range(transformers)))


@pytest.mark.parametrize(
    ("model", "dense", "layers"),
    [
        (UNetModel, 1, 70),
        (UNetModel, 2, 6),  # those of the shape that the first step had
        (JointModel, 1, 24),
        (JointModel, 3, 6),
        (torch.nn.Identity, 1, 40),
    ],
)
def test_measuring_is_costed_by_the_layers_there_are(
    load_pack, patcher, session, generator, reference_allowed, monkeypatch, model, dense, layers
):
    """Not by the rows of its tables, of which there are 256."""
    ways, asked = load_pack("sparge.tune").Ways, []
    affordable = ways.affordable

    def spy(*args, run, **kwargs):
        asked.append(run.layers)
        return affordable(*args, run=run, **kwargs)

    monkeypatch.setattr(ways, "affordable", spy)
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)
    patcher.model.diffusion_model = model()
    node = load_pack("nodes.sparge_attention").SpargeAttention
    patched = node.execute(patcher, mode="auto quality", min_tokens=0)[0]
    steps = [*[1.0, 0.95, 0.9][-dense:], 0.5]
    session(patched).sample(lambda attend: [attend(q, q, q, HEADS) for _ in range(6)], steps)
    assert asked == [layers]


def test_tokens_that_are_not_the_clips_are_told(load_pack, notes_of):
    told = load_pack("nodes.families").UNKNOWN_TOKENS
    assert notes_of(WanModel(8), TOKENS - 16, min_tokens=0) == (2, [told])
    assert notes_of(WanModel(8), TOKENS + 64) == (2, []), "the clip is on its grid before them"


def test_nothing_is_told_of_a_known_model_or_a_dense_run(notes_of):
    assert notes_of(WanModel(8)) == (2, [])
    assert notes_of(Novelty(8), min_tokens=TOKENS + 1) == (0, [])
