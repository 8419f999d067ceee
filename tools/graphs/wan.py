# SPDX-License-Identifier: Apache-2.0
"""The graphs of Wan, and the one that compares two runs of it."""

from __future__ import annotations

from . import models, notes, parts
from .graph import Graph
from .layout import FOR_LINKS, Group, Node, Row, Stack
from .one_model import LATENT, T2V, one_model

WAN_SIZE = Node("size", "EmptyHunyuanLatentVideo", (832, 480, 81, 1), title=LATENT)
WAN_TOKENS = "32,760 video tokens (21 x 30 x 52)"


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
                "6 Watch", parts.decode(), parts.saved("wan2.1_1.3B_sparge"), parts.video(16)
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
    )
    watch = Row(
        (
            Stack(320, (compare,)),
            Stack(225, (parts.video(16, "compare.comparison"),)),
            Stack(320, (parts.saved("wan2.1_1.3B_compare"),)),
        ),
        FOR_LINKS,
    )
    columns = (
        Stack(
            0,
            (
                Group("1 Load models", Stack(270, loaders)),
                Group("2 Size, length, seed", Stack(270, (size, seed))),
            ),
        ),
        Stack(
            0,
            (
                Group("3 Make it faster", Stack(290, (parts.sparge(),))),
                Group("4 Describe the clip", Stack(290, prompts)),
            ),
        ),
        Group("5 Sample twice", Stack(240, (dense, sparse))),
        Group("6 Decode", Stack(225, decoders)),
        Group("7 Compare", watch),
    )
    top = Row(
        (
            Stack(
                700,
                (
                    notes.start(
                        "Compare: one seed without and with Sparge Attention",
                        WAN_TOKENS,
                        "It is made twice, which takes the time of both runs.",
                        read="Then read the green nodes: how much faster, how much it differs",
                    ),
                ),
            ),
            Stack(700, (notes.settings(notes.COMPARED, ""),)),
            Stack(640, (notes.files(models.WAN_21_SMALL),)),
        )
    )
    return Graph(
        "10 Compare - Wan 2.1 1.3B without and with Sparge Attention",
        *("Compare", "Wan 2.1 1.3B, one seed", "without and with"),
        Stack(0, (top, Row(columns))),
    )


def wan_22(number: int, task: str) -> Graph:
    """Two models: the first takes the noisy half of the steps, the second the rest."""
    from_image = task == "i2v"
    words = "image to video" if from_image else T2V
    files = models.wan_22(task)
    high, low, text, vae = files
    loaders = (
        models.diffusion(high, "high", "High noise model"),
        models.diffusion(low, "low", "Low noise model"),
        models.text_encoder("wan", text),
        models.vae(vae),
    )
    shifts = tuple(
        Node(f"shift_{name}", "ModelSamplingSD3", (5.0,), {"model": name}, f"Shift, {name} noise")
        for name in ("high", "low")
    )
    faster = tuple(
        parts.sparge(f"shift_{name}", f"faster_{name}", f"Sparge Attention, {name} noise")
        for name in ("high", "low")
    )
    prompt, negative = parts.prompts(negative=parts.UNWANTED)
    source = {"positive": "prompt", "negative": "negative"}
    latent = "size"
    image: tuple[Node, ...] = (WAN_SIZE,)
    described: Row = Row((Stack(248, (prompt,)), Stack(248, (negative,))), FOR_LINKS)
    if from_image:
        image = (Node("image", "LoadImage", ("example.png", "image"), title="First picture"),)
        inputs = source | {"vae": "vae", "start_image": "image"}
        size = Node("size", "WanImageToVideo", (832, 480, 81, 1), inputs, title=LATENT)
        source = {"positive": "size.positive", "negative": "size.negative"}
        latent = "size.latent"
        described = Row((Stack(225, (prompt, negative)), Stack(272, (size,))), FOR_LINKS)
    samplers = (
        Node(
            "first",
            "KSamplerAdvanced",
            ("enable", parts.SEED, "fixed", 20, 3.5, "euler", "simple", 0, 10, "enable"),
            source | {"model": "faster_high", "latent_image": latent},
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
    left = Stack(
        0,
        (
            Group("1 Load models", Stack(225, loaders)),
            Group("2 First picture" if from_image else f"2 {LATENT}", Stack(225, image)),
        ),
    )
    middle = Stack(
        0,
        (
            Group(
                "3 Make both models faster",
                Row((Stack(225, shifts), Stack(272, faster)), FOR_LINKS),
            ),
            Group("4 Describe the clip", described),
        ),
    )
    watch = tuple(
        Stack(width, (node,))
        for width, node in (
            (225, parts.decode(latent="second")),
            (225, parts.video(16)),
            (250, parts.saved(f"wan2.2_14B_{task}_sparge")),
        )
    )
    gain = "Both models are 14B: each has a green node of its own, and each measures itself."
    steps = {"read": "Then read the green nodes: how much faster they were"}
    if from_image:
        steps["run"] = "Choose a picture, describe the clip and press Run"
    start = notes.start(f"Wan 2.2 14B, {words}", WAN_TOKENS, gain, height=400, **steps)
    below = Row(
        (
            Stack(412, (start,)),
            Stack(412, (notes.settings(notes.BYPASS_BOTH, "", height=400),)),
            Stack(412, (notes.files(files, height=400),)),
        )
    )
    right = Stack(
        0,
        (
            Row(
                (
                    Group(
                        "5 Sample",
                        Row(tuple(Stack(252, (node,)) for node in samplers), FOR_LINKS),
                    ),
                    Group("6 Watch", Row(watch, FOR_LINKS)),
                )
            ),
            below,
        ),
    )
    return Graph(
        f"{number:02} Wan 2.2 14B - {words}, 832x480, 81 frames",
        *("Wan 2.2 14B", words, "832 x 480, 81 frames"),
        Row((left, middle, right)),
    )
