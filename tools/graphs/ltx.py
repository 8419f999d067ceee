# SPDX-License-Identifier: Apache-2.0
"""The graph of LTX-2: two passes, each a subgraph, for its parts are many and nobody turns them."""

from __future__ import annotations

from dataclasses import replace

from . import models, notes, parts
from .graph import Graph
from .layout import FOR_LINKS, Board, Group, Node, Row, Stack
from .subgraph import Face, Subgraph

WIDTH, HEIGHT, FRAMES, FPS = 960, 544, 121, 25
FIRST_SIGMAS = "1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"
SECOND_SIGMAS = "0.909375, 0.725, 0.421875, 0.0"
LOW = 340
"""Pixels above the columns within a pass, for links from its face."""


def _sampled(sigmas: str, *before: Stack, top: int) -> Row:
    """Sampler without guidance, and columns of nodes before it, the last of which joins its latent.
    Above the columns, and `top` above the sampler, is the way of the links from the face."""
    settings = (
        Node("method", "KSamplerSelect", ("euler_ancestral",)),
        Node("sigmas", "ManualSigmas", (sigmas,)),
    )
    inputs = {"sampler": "method", "sigmas": "sigmas", "latent_image": "joined"}
    sampler = Node("sampler", "SamplerCustom", (True, parts.SEED, "fixed", 1.0), inputs)
    *first, last = before
    last = replace(last, items=(*last.items, *settings))
    return Row((*first, last, Stack(260, (sampler,), top=top)), 3 * FOR_LINKS)


def _both() -> tuple[Face, Face]:
    sampler = "sampler"
    return (
        Face("model", "MODEL", ((sampler, "model"),)),
        Face("prompt", "CONDITIONING", ((sampler, "positive"), (sampler, "negative"))),
    )


def first_pass() -> Subgraph:
    latents = (
        Node("video", "EmptyLTXVLatentVideo", (WIDTH, HEIGHT, FRAMES, 1)),
        Node("sound", "LTXVEmptyLatentAudio", (FRAMES, FPS, 1)),
    )
    inputs = {"video_latent": "video", "audio_latent": "sound"}
    joined = Node("joined", "LTXVConcatAVLatent", (), inputs)
    return Subgraph(
        "LTX-2, first pass",
        "Picture and sound at half the width and height.",
        _sampled(FIRST_SIGMAS, Stack(270, latents, LOW), Stack(240, (joined,), LOW), top=0),
        (
            *_both(),
            Face("sound VAE", "VAE", (("sound", "audio_vae"),)),
            Face("width", "INT", (("video", "width"),), WIDTH),
            Face("height", "INT", (("video", "height"),), HEIGHT),
            Face("frames", "INT", (("video", "length"), ("sound", "frames_number")), FRAMES),
            Face("seed", "INT", (("sampler", "noise_seed"),), parts.SEED),
        ),
        {"LATENT": "sampler.output"},
        240,
    )


def second_pass() -> Subgraph:
    load = Node(
        *("upscaler", "LatentUpscaleModelLoader", (models.LTX_2_UPSCALER.file,)),
        models=(models.LTX_2_UPSCALER,),
    )
    parted = Node("parted", "LTXVSeparateAVLatent")
    larger = {"samples": "parted.video_latent", "upscale_model": "upscaler"}
    joined = {"video_latent": "larger", "audio_latent": "parted.audio_latent"}
    decoders = (
        Node("sound", "LTXVAudioVAEDecode", (), {"samples": "sampler.output"}),
        Node("decode", "VAEDecodeTiled", (512, 64, 4096, 8), {"samples": "sampler.output"}),
    )
    passes = _sampled(
        SECOND_SIGMAS,
        # The VAE's link passes above these two, and the sound below the next.
        Stack(270, (parted, load), LOW + 220),
        Stack(240, (Node("larger", "LTXVLatentUpsampler", (), larger),), LOW),
        Stack(240, (Node("joined", "LTXVConcatAVLatent", (), joined),), LOW + 220),
        top=230,
    )
    return Subgraph(
        "LTX-2, second pass",
        "Twice the width and height, then picture and sound.",
        Row((passes, Stack(240, decoders)), 3 * FOR_LINKS),
        (
            Face("VAE", "VAE", (("larger", "vae"), ("decode", "vae"))),
            *_both(),
            Face("latent", "LATENT", (("parted", "av_latent"),)),
            Face("sound VAE", "VAE", (("sound", "audio_vae"),)),
            Face("upscaler", "COMBO", (("upscaler", "model_name"),), models.LTX_2_UPSCALER.file),
            Face("seed", "INT", (("sampler", "noise_seed"),), parts.SEED),
        ),
        {"IMAGE": "decode", "AUDIO": "sound"},
        230,
    )


def ltx_2(number: int) -> Graph:
    checkpoint, text = models.LTX_2
    first, second = first_pass(), second_pass()
    whole = Node("model", "CheckpointLoaderSimple", (checkpoint.file,), models=(checkpoint,))
    encoder = Node(
        *("clip", "LTXAVTextEncoderLoader", (text.file, checkpoint.file, "default")),
        models=(text, checkpoint),
    )
    sound_vae = Node(*("sound_vae", "LTXVAudioVAELoader", (checkpoint.file,)), models=(checkpoint,))
    prompt, _ = parts.prompts(f"{parts.DOG} {parts.SOUNDS}")
    prompt = replace(prompt, height=190)  # it is longer than others
    shared = {"model": "faster", "prompt": "prompt", "sound VAE": "sound_vae"}
    passes = (
        first.node("first", shared),
        second.node("second", shared | {"VAE": "model.VAE", "latent": "first"}),
    )
    watch = (
        Stack(225, (parts.video(FPS, "second.IMAGE", "second.AUDIO"),)),
        Stack(320, (parts.saved("ltx_2_sparge"),)),
    )
    size = f"{2 * WIDTH} x {2 * HEIGHT}, {FRAMES} frames"
    start = notes.start(
        f"LTX-2, {size}, with sound",
        "32,640 video tokens (16 x 34 x 60)",
        "Those are of the second pass, where most of the attention is; the first has a quarter. "
        "It has few steps, and the first of them stay dense, so it gains less than a model of "
        "many. The green node shows the second pass. Sound is computed in full.",
        height=480,
    )
    return Graph(
        f"{number:02} LTX-2 - text to video with sound, {2 * WIDTH}x{2 * HEIGHT}, {FRAMES} frames",
        *("LTX-2", "text to video with sound", size),
        Board(
            (
                (0, 0, Group("1 Load models", Stack(300, (whole, encoder)))),
                (0, 400, Stack(320, (start,))),
                (356, 138, Group("2 Make it faster", Stack(300, (parts.sparge(),)))),
                (356, 526, Group("3 Load the VAE of the sound", Stack(300, (sound_vae,)))),
                (356, 708, Group("4 Describe the clip", Stack(300, (prompt,)))),
                (770, 808, Group("5 First pass: half the size", Stack(270, passes[:1]))),
                (1130, 40, Group("6 Second pass: full size", Stack(290, passes[1:]))),
                (1480, 40, Group("7 Watch", Row(watch, FOR_LINKS))),
                (1130, 660, Stack(460, (notes.settings(more="", height=390),))),
                (
                    1610,
                    660,
                    Stack(460, (notes.files((*models.LTX_2, models.LTX_2_UPSCALER), height=390),)),
                ),
            )
        ),
        (first, second),
    )
