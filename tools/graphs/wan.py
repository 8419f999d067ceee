# SPDX-License-Identifier: Apache-2.0
"""The graphs of Wan, and the one that compares two runs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import models, notes, parts
from .graph import Graph
from .layout import FOR_LINKS, Board, Group, Model, Node, Row, Stack
from .one_model import T2V, one_model
from .recipes import LATENT

WAN_SIZE = Node("size", "EmptyHunyuanLatentVideo", (832, 480, 81, 1), title=LATENT)
WAN_TOKENS = "32,760 video tokens (21 x 30 x 52)"
GAIN = "Both models are 14B: each has a green node of its own, and each measures itself."
READ_BOTH = {"read": "Then read the green nodes: how much faster they were"}


def _small(size: Node) -> tuple[tuple[Node, ...], Node, tuple[Node, ...]]:
    diffusion, text, vae = models.WAN_21_SMALL
    loaders = (models.diffusion(diffusion), models.text_encoder("wan", text), models.vae(vae))
    return loaders, size, parts.prompts(negative=parts.UNWANTED)


def wan_21() -> Graph:
    return Graph(
        f"07 Wan 2.1 1.3B - {T2V}, 832x480, 81 frames, small cards",
        *("Wan 2.1 1.3B", T2V, "832 x 480, 81 frames, small cards"),
        one_model(
            *_small(WAN_SIZE),
            parts.sampler(30, 6.0, "uni_pc"),
            parts.watched(
                "7 Watch", (parts.decode(),), parts.saved("wan2.1_1.3B_sparge"), parts.video(16)
            ),
            (
                notes.start(
                    "Wan 2.1 1.3B, 832 x 480, 81 frames",
                    WAN_TOKENS,
                    "The model is small, the clip is not: most of a step is attention.",
                ),
                notes.settings(),
                notes.files(models.WAN_21_SMALL),
            ),
        ),
    )


def compare() -> Graph:
    loaders, size, prompts = _small(WAN_SIZE)
    seed = Node("seed", "PrimitiveInt", (parts.SEED, "fixed"), title="Seed of both")
    dense, sparse = (
        parts.sampler(
            *(30, 6.0, "uni_pc"), node=name, title=title, inputs={"model": model, "seed": "seed"}
        )
        for name, title, model in (
            ("dense", "Without Sparge Attention", "model"),
            ("sparse", "With Sparge Attention", "faster"),
        )
    )
    decoders = tuple(
        parts.decode(latent=each.name, name=f"decoded_{each.name}", title=f"Decode {words}")
        for each, words in ((dense, "without"), (sparse, "with"))
    )
    compare = Node(
        *("compare", "SpargeAttentionCompare", ("side by side",)),
        {"reference": "decoded_dense", "clip": "decoded_sparse"},
        "Compare: appears after a run",
    )
    watch = Row(
        (
            Stack(300, (compare,)),
            Stack(225, (parts.video(16, "compare.comparison"),), top=200),
            Stack(275, (parts.saved("wan2.1_1.3B_compare"),), top=66),
        ),
        FOR_LINKS,
    )
    start = notes.start(
        "Compare: one seed without and with Sparge Attention",
        WAN_TOKENS,
        "It is made twice, which takes the time of both runs.",
        height=325,
        read="Then read the green nodes: how much faster, how much it differs",
    )
    *load, vae = loaders
    prompt, negative = prompts
    prompts = replace(prompt, height=180), negative  # they are narrower here than elsewhere
    return Graph(
        "12 Compare - Wan 2.1 1.3B without and with Sparge Attention",
        *("Compare", "Wan 2.1 1.3B, one seed", "without and with"),
        Board(
            (
                (0, 0, Stack(290, (start,))),
                (0, 370, Group("1 Load models", Stack(270, tuple(load)))),
                (330, 0, Group("2 Make it faster", Stack(270, (parts.sparge(),)))),
                (330, 470, Group("3 Describe the clip", Stack(270, prompts))),
                (330, 900, Group("4 Size, length, seed", Stack(270, (size, seed)))),
                (720, 0, Group("5 Sample twice", Stack(230, (sparse, dense), gap=60))),
                (720, 760, Group("6 Load VAE", Stack(230, (vae,)))),
                (1000, 260, Group("7 Decode", Stack(225, decoders, gap=120))),
                (1275, 0, Group("8 Compare", watch)),
                (1000, 650, Stack(560, (notes.settings(notes.COMPARED, "", height=300),))),
                (1572, 650, Stack(560, (notes.files(models.WAN_21_SMALL, height=300),))),
            )
        ),
    )


def wan_22(number: int, task: str) -> Graph:
    """Two models: the first takes the noisy half of the steps, the second the rest."""
    words = "image to video" if task == "i2v" else T2V
    files = models.wan_22(task)
    at, source, middle = (_from_image if task == "i2v" else _from_text)(files, words)
    samplers = (
        Node(
            "first",
            "KSamplerAdvanced",
            ("enable", parts.SEED, "fixed", 20, 3.5, "euler", "simple", 0, 10, "enable"),
            source | {"model": "faster_high"},
            "Steps 1 to 10, high noise",
        ),
        Node(
            "second",
            "KSamplerAdvanced",
            ("disable", 0, "fixed", 20, 3.5, "euler", "simple", 10, 10000, "disable"),
            source | {"model": "faster_low", "latent_image": "first"},
            "Steps 11 to 20, low noise",
        ),
    )
    first, second = (Stack(252, (each,)) for each in samplers)
    before = sum(isinstance(item, Group) for _, _, item in middle)
    vae = models.vae(files[-1])
    watch = (
        Stack(225, (parts.decode(latent="second"),)),
        Stack(225, (parts.video(16),)),
        Stack(225, (parts.saved(f"wan2.2_14B_{task}_sparge"),)),
    )
    return Graph(
        f"{number:02} Wan 2.2 14B - {words}, 832x480, 81 frames",
        *("Wan 2.2 14B", words, "832 x 480, 81 frames"),
        Board(
            (
                *middle,
                (826, at[0], Group(f"{before + 1} Sample: noisy half", first)),
                (1128, at[1], Group(f"{before + 2} Sample: the rest", second)),
                (1128, at[1] - 182, Group(f"{before + 3} Load VAE", Stack(252, (vae,)))),
                (1412, at[1], Group(f"{before + 4} Watch", Row(watch, 14))),
            )
        ),
    )


#: Pixels above the two samplers, their inputs, what stands before them, and the notes.
_Half = tuple[tuple[int, int], dict[str, str], tuple[tuple[int, int, Stack | Row | Group], ...]]


def _from_text(files: Sequence[Model], words: str) -> _Half:
    high, low, text, _ = files
    start = notes.start(f"Wan 2.2 14B, {words}", WAN_TOKENS, GAIN, height=318, **READ_BOTH)
    encoder = models.text_encoder("wan", text)
    middle = (
        (0, 0, _faster(1, "high", high)),
        (0, 384, Stack(450, (start,))),
        (0, 742, Group("2 Load text encoder", Stack(430, (encoder,)))),
        (478, 384, Group(f"3 {LATENT}", Stack(270, (WAN_SIZE,)))),
        (478, 622, Group("4 Describe the clip", Stack(270, _prompts(), gap=8))),
        (0, 956, _faster(5, "low", low)),
        (1412, 0, Stack(355, (_settings(),))),
        (1779, 0, Stack(355, (notes.files(files, height=400),))),
    )
    source = {"positive": "prompt", "negative": "negative", "latent_image": "size"}
    return (250, 560), source, middle


def _from_image(files: Sequence[Model], words: str) -> _Half:
    high, low, text, vae = files
    steps = READ_BOTH | {"run": "Choose a picture, describe the clip and press Run"}
    start = notes.start(f"Wan 2.2 14B, {words}", WAN_TOKENS, GAIN, height=400, **steps)
    image = Node("image", "LoadImage", ("example.png", "image"), title="First picture")
    inputs = {
        "positive": "prompt",
        "negative": "negative",
        "vae": "vae_of_picture",
        "start_image": "image",
    }
    size = Node("size", "WanImageToVideo", (832, 480, 81, 1), inputs, title=LATENT)
    vae_of_picture = models.vae(vae, "vae_of_picture", "VAE for the picture")
    encoder = models.text_encoder("wan", text)
    middle = (
        (0, 0, _faster(1, "high", high)),
        (0, 491, Group("3 First picture", Stack(225, (image,)))),
        (255, 384, Group("2 Load VAE", Stack(225, (vae_of_picture,)))),
        (255, 612, Group("4 Describe the clip", Stack(225, _prompts(), gap=8))),
        (502, 440, Group(f"5 {LATENT}", Stack(246, (size,)))),
        (0, 949, Group("6 Load text encoder", Stack(225, (encoder,)))),
        # The links of the text encoder pass left of it.
        (280, 949, _faster(7, "low", low)),
        (1412, 0, Stack(355, (start,))),
        (1779, 0, Stack(355, (_settings(),))),
        (1068, 1050, Stack(1066, (notes.files(files, height=235),))),
    )
    source = {
        "positive": "size.positive",
        "negative": "size.negative",
        "latent_image": "size.latent",
    }
    return (20, 480), source, middle


def _prompts() -> tuple[Node, Node]:
    first, negative = parts.prompts(negative=parts.UNWANTED)
    return replace(first, height=102), negative


def _settings() -> Node:
    return notes.settings(notes.BYPASS_BOTH, "", height=400)


def _faster(number: int, noise: str, file: Model) -> Group:
    """One of the two models, from its file to our node."""
    nodes = (
        models.diffusion(file, noise, f"{noise.title()} noise model"),
        Node(
            *(f"shift_{noise}", "ModelSamplingSD3", (5.0,), {"model": noise}),
            f"Shift, {noise} noise",
        ),
        parts.sparge(f"shift_{noise}", f"faster_{noise}", f"Sparge Attention, {noise} noise"),
    )
    row = tuple(Stack(width, (node,)) for width, node in zip((225, 225, 270), nodes, strict=True))
    return Group(f"{number} Make the {noise} noise model faster", Row(row, 14))
