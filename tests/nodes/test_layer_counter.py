# SPDX-License-Identifier: Apache-2.0
"""Block that an attention call is of, in models that say so and in models that do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

HEADS = 8
WAN: dict[str, Any] = {"patch_size": (1, 2, 2), "blocks": [0] * 30}


@pytest.fixture
def module(load_pack):
    return load_pack("nodes.run")


@pytest.fixture
def counter(load_pack, module):
    """counter(class name, latent, parents, **attributes) of a pass of such a model."""
    layout_of = load_pack("nodes.families").token_layout

    def make(name, latent=(1, 16, 4, 16, 20), parents=(SimpleNamespace,), text=0, **attributes):
        model, context = type(name, parents, {})(**attributes), torch.zeros(1, text, 8)
        return module.LayerCounter(layout_of(model, latent, context))

    return make


@pytest.fixture
def ltx(counter):
    return counter("LTXBaseModel", transformer_blocks=[0] * 5)


def numbers(counter, *tokens, options=None):
    """Numbers of the blocks of calls over so many tokens."""
    return [counter.next(options or {}, count, HEADS).number for count in tokens]


def test_models_that_publish_their_block_are_asked(counter):
    blocks = {"double_blocks": [0] * 19, "single_blocks": [0] * 38}
    flux = counter("Flux", (1, 16, 128, 128), patch_size=2, **blocks)
    published = {"block_index": 3, "total_blocks": 38}
    flux.calls = 7
    assert flux.layout.blocks == 57
    assert flux.peek(published | {"block_type": "double"}).number == 3
    assert flux.peek(published | {"block_type": "single"}).number == 22
    assert flux.peek({}).number == 7
    assert flux.peek({"block_index": 0, "block": ("input", 1)}).number == 7, "a U-Net's"
    patch = {"patch_temporal": 1, "patch_spatial": 2}
    cosmos = counter("MiniTrainDIT", blocks=[0] * 4, **patch)  # it does not say how many it has
    assert [cosmos.next({"block_index": n}, 320, HEADS).row for n in (0, 3, 3)] == [0, 3, 7]


def test_a_second_call_under_one_block_number_has_a_row_of_its_own(counter):
    """The control blocks of Wan VACE make such calls; shorter calls get no row of the block."""
    wan = counter("WanModel", **WAN)
    grid, short = wan.layout.grid_tokens, wan.layout.frame_tokens + 7
    places = []
    for block, tokens in [(0, short), (0, grid), (0, grid), (1, grid), (2, grid), (2, grid)]:
        published = {"block_index": block, "total_blocks": 30, "block_type": "double"}
        layer = wan.next(published, tokens, HEADS)
        assert not layer.beside
        places.append((layer.number, layer.row))
    assert places == [(0, 0), (0, 0), (0, 30), (1, 1), (2, 2), (2, 32)]
    assert wan.layout.rows == 30


def test_the_picture_alone_attends_a_second_time_in_a_layer_of_sd35_medium(counter):
    """Its first 13 of 24 layers have such a call behind that of text and picture."""
    sd3 = counter(
        "OpenAISignatureMMDITWrapper",
        (1, 16, 16, 20),
        text=30,
        patch_size=2,
        joint_blocks=[0] * 24,
    )
    layers = [sd3.next({}, tokens, HEADS) for tokens in (110, 80, 110, 80, 110, 110)]
    assert [layer.number for layer in layers] == [0, 0, 1, 1, 2, 3]
    assert [layer.row for layer in layers] == [0, 24, 1, 25, 2, 3]
    assert not any(layer.beside for layer in layers)


@pytest.mark.parametrize("chunks", [[14] * 4, [12, *4 * [11]]], ids=["alike", "not alike"])
def test_calls_for_some_heads_at_a_time_are_of_one_layer(counter, chunks):
    """A node that saves memory makes such calls in MiniMax H3, which publishes no block."""
    blocks = [SimpleNamespace(attn=SimpleNamespace(heads=56))] * 3
    found = counter("MiniMaxH3Model", text=24, patch_size=(1, 2, 2), blocks=blocks)
    tokens = found.layout.tokens.tokens
    layers = [found.next({}, tokens, heads) for _ in range(3) for heads in chunks]
    count = len(chunks)
    assert [layer.number for layer in layers] == [block for block in range(3) for _ in chunks]
    assert [layer.row for layer in layers[:count]] == [3 * call for call in range(count)]
    assert len({layer.row for layer in layers}) == len(layers)


@pytest.mark.parametrize("shortened", [True, False])
def test_sound_that_follows_is_no_block(ltx, shortened):
    """A guide that is smaller than the clip shortens all blocks: LTXV drops its empty tokens."""
    video = ltx.layout.grid_tokens - (60 if shortened else 0)
    sound = ltx.layout.frame_tokens + 7
    assert numbers(ltx, *(video, sound, sound) * 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert ltx.next({}, video, HEADS).row == 3


def test_text_that_attends_to_itself_first_is_no_block(counter):
    mochi = counter("AsymmDiTJoint", patch_size=2, blocks=[0] * 4)
    text, grid = mochi.layout.frame_tokens + 5, mochi.layout.grid_tokens
    assert numbers(mochi, text, grid, grid) == [0, 0, 1]


@pytest.fixture
def unet(counter):
    """unet() counts in a small SDXL: modules of a U-Net, some with transformers of some blocks."""

    def module(blocks):
        transformer = SimpleNamespace(transformer_blocks=[0] * blocks)
        return [SimpleNamespace(), transformer] if blocks else [SimpleNamespace()]

    sides = {
        "input_blocks": [module(n) for n in (0, 0, 2)],
        "middle_block": module(3),
        "output_blocks": [module(n) for n in (2, 2, 0)],
    }
    return lambda: counter("UNetModel", (1, 4, 16, 16), **sides)


def at(side, number, index=0):
    return {"block": (side, number), "block_index": index, "transformer_index": 7}


def test_the_blocks_of_a_unet_have_the_numbers_that_comfyui_says(unet):
    found = unet()
    assert (found.layout.blocks, found.layout.rows) == (9, 9)
    places = [at("input", 2), at("input", 2, 1), at("middle", 0, 2), at("output", 1, 1)]
    layers = [found.next(place, 256, HEADS) for place in places]
    assert [(layer.number, layer.row, layer.beside) for layer in layers] == [
        (number, number, False) for number in (0, 1, 4, 8)
    ]
    over_time = found.next(at("output", 1, 1), 14, HEADS)
    assert over_time.row == 8 + 9, "SVD's, in the same block"
    unknown = found.next(at("output", 9), 256, HEADS)
    assert unknown.number == 5, "counted, where the model has no such block"
    # Perturbed attention guidance leaves the self-attention of the middle out.
    perturbed = unet()
    assert perturbed.next(at("input", 2), 256, HEADS).row == 0
    assert perturbed.next(at("output", 0), 256, HEADS).row == 5


@pytest.mark.parametrize("numbered", [True, False], ids=["Z-Image", "OmniGen 2"])
def test_refiners_come_before_the_blocks_and_have_no_number(load_pack, counter, numbered):
    lists = {"context_refiner": [0] * 2, "noise_refiner": [0] * 2, "ref_image_refiner": [0] * 2}
    found = counter("NextDiT", layers=[0] * 30, patch_size=2, **lists)
    assert found.layout.rows == 30 + 4, "without a reference its refiner does not run"
    refiners = [found.next({}, tokens, HEADS) for tokens in (24, 24, 320, 320)]
    published = [{"block_index": n} if numbered else {} for n in range(3)]
    blocks = [found.next(options, 344, HEADS) for options in published]
    assert [(layer.number, layer.row) for layer in blocks] == [(0, 0), (1, 1), (2, 2)]
    assert [layer.row for layer in refiners] == [30, 31, 32, 33]
    spans = load_pack("sparge.session").LayerSpans.parse("0-29, -30--1, 60").of_total(30)
    assert not any(layer.number in span for layer in refiners for span in spans)


STG = {"stg_self_attn_blocks": frozenset({1, 2})}  # LTXV's spatio-temporal guidance


@pytest.mark.parametrize(("name", "blocks"), [("LTXAVModel", [0, 3, 4]), ("LTXVModel", [0, 1, 2])])
def test_blocks_are_passed_over_where_the_model_leaves_their_self_attention_out(
    counter, name, blocks
):
    """It does with sound. Without sound ComfyUI's option of that name does nothing."""
    parents = (type("LTXBaseModel", (SimpleNamespace,), {}),)
    plain, guided = (counter(name, parents=parents, transformer_blocks=[0] * 5) for _ in range(2))
    both = plain.layout.grid_tokens, plain.layout.frame_tokens + 7  # the block's sound has its row
    every = [[plain.next({}, n, HEADS) for n in both] for _ in range(5)]
    found = [[guided.next(STG, n, HEADS) for n in both] for _ in range(3)]
    assert found == [every[block] for block in blocks]


@pytest.mark.parametrize(
    ("replaced", "blocks"),
    [
        ([("double_block", 0)], [1, 2, 3, 4]),
        ([("double_block", 1), ("double_block", 3), ("single_block", 0)], [0, 2, 4]),
        ([("layer", "self_attn", 2)], [0, 1, 2, 3, 4]),
    ],
)
def test_replaced_blocks_keep_the_numbers_of_the_others(ltx, replaced, blocks):
    """ComfyUI's skip-layer guidance."""
    options = {"patches_replace": {"dit": dict.fromkeys(replaced), "other": 1}}
    assert numbers(ltx, *len(blocks) * [ltx.layout.grid_tokens], options=options) == blocks
