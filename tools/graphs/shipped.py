# SPDX-License-Identifier: Apache-2.0
"""Every graph of workflows/, in the order of their numbers."""

from __future__ import annotations

from . import models, notes, parts
from .graph import Graph
from .layout import FOR_LINKS, Group, Item, Node, Row, Stack

T2V = "text to video"
LATENT = "Size and length"


def _one_model(
    loaders: tuple[Node, ...],
    size: Node,
    prompts: tuple[Node, ...],
    sampler: Node,
    watched: Group,
    notes_: tuple[Node, ...],
) -> Item:
    widths = (620, 600, 630)
    top = Row(tuple(Stack(width, (each,)) for width, each in zip(widths, notes_, strict=True)))
    what = "picture" if size.kind == "EmptySD3LatentImage" else "clip"
    columns = (
        Stack(
            0,
            (
                Group("1 Load models", Stack(300, loaders)),
                Group("2 " + size.title, Stack(300, (size,))),
            ),
        ),
        Stack(
            0,
            (
                Group("3 Make it faster", Stack(320, (parts.sparge(),))),
                Group(f"4 Describe the {what}", Stack(320, prompts)),
            ),
        ),
        Group("5 Sample", Stack(270, (sampler,))),
        watched,
    )
    return Stack(0, (top, Row(columns)))


def _mochi(number: int, frames: int, tokens: str, gain: str) -> Graph:
    diffusion, text, vae = models.MOCHI
    what = f"Mochi, 848 x 480, {frames} frames"
    fp8 = models.MOCHI_FP8
    return Graph(
        f"{number:02} Mochi - {T2V}, 848x480, {frames} frames",
        *("Mochi", T2V, f"848 x 480, {frames} frames"),
        _one_model(
            (models.diffusion(diffusion), models.text_encoder("mochi", text), models.vae(vae)),
            Node("size", "EmptyMochiLatentVideo", (848, 480, frames, 1), title=LATENT),
            parts.prompts(),
            parts.sampler(30, 4.5),
            parts.watched(
                "6 Watch",
                parts.decode(256, 64, 48, 8),
                parts.saved(f"mochi_sparge_{frames}f"),
                parts.video(24),
            ),
            (
                notes.start(what, tokens, gain),
                notes.settings(),
                notes.files(
                    models.MOCHI,
                    f"Short of memory: [{fp8.file}]({fp8.url}) in place of the first. The VAE "
                    "decodes in tiles, because a whole clip at once does not fit consumer cards.",
                ),
            ),
        ),
    )


def _cog(
    number: int,
    version: str,
    repository: str,
    shards: int,
    size: tuple[int, int, int],
    fps: int,
    texts: tuple[str, str, str],
) -> Graph:
    """texts: tokens, gain, and what else the first note says."""
    width, height, frames = size
    name = f"cogvideox_{version}5b".replace(" ", "_").lower()
    vae = models.cog_vae(repository, f"{name}_vae.safetensors")
    transformer = f"{name}_t2v.safetensors"
    model = f"CogVideoX {version}5B"
    return Graph(
        f"{number:02} {model} - {T2V}, {width}x{height}, {frames} frames",
        *(model, T2V, f"{width} x {height}, {frames} frames"),
        _one_model(
            (
                Node("model", "UNETLoader", (transformer, "default")),
                models.text_encoder("cogvideox", models.T5),
                models.vae(vae),
            ),
            Node("size", "EmptyHunyuanLatentVideo", (width, height, frames, 1), title=LATENT),
            parts.prompts(),
            parts.sampler(50, 6.0),
            parts.watched(
                "6 Watch", parts.decode(256, 64, 32, 8), parts.saved(f"{name}_sparge"),
                parts.video(fps),
            ),
            (
                notes.start(
                    f"{model}, {width} x {height}, {frames} frames", *texts, height=290,
                    models="Get the model and convert it once: see the note Models",
                ),
                notes.settings(height=290),
                notes.converted(
                    models.cog_shards(repository, shards), transformer, vae, models.T5, 290
                ),
            ),
        ),
    )  # fmt: skip


def _wan_small(size: Node) -> tuple[tuple[Node, ...], Node, tuple[Node, ...]]:
    diffusion, text, vae = models.WAN_21_SMALL
    loaders = (models.diffusion(diffusion), models.text_encoder("wan", text), models.vae(vae))
    return loaders, size, parts.prompts(negative=parts.UNWANTED)


WAN_SIZE = Node("size", "EmptyHunyuanLatentVideo", (832, 480, 81, 1), title=LATENT)
WAN_TOKENS = "32,760 video tokens (21 x 30 x 52)"


def _wan_21() -> Graph:
    return Graph(
        f"07 Wan 2.1 1.3B - {T2V}, 832x480, 81 frames, small cards",
        *("Wan 2.1 1.3B", T2V, "832 x 480, 81 frames, small cards"),
        _one_model(
            *_wan_small(WAN_SIZE),
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


def _hunyuan() -> Graph:
    diffusion, qwen, byt5, vae = models.HUNYUAN_15
    size = Node("size", "EmptyHunyuanVideo15Latent", (1280, 720, 121, 1), title=LATENT)
    return Graph(
        f"08 HunyuanVideo 1.5 - {T2V}, 1280x720, 121 frames",
        *("HunyuanVideo 1.5", T2V, "1280 x 720, 121 frames"),
        _one_model(
            (
                models.diffusion(diffusion),
                models.text_encoder("hunyuan_video_15", qwen, byt5),
                models.vae(vae),
            ),
            size,
            parts.prompts(),
            parts.sampler(20, 6.0),
            parts.watched(
                "6 Watch", parts.decode(), parts.saved("hunyuan_video_1.5_sparge"), parts.video(24)
            ),
            (
                notes.start(
                    "HunyuanVideo 1.5, 1280 x 720, 121 frames",
                    "111,600 video tokens (31 x 45 x 80)",
                    "Nearly all of a step is attention: this gains most.",
                ),
                notes.settings(),
                notes.files(models.HUNYUAN_15),
            ),
        ),
    )


def _flux() -> Graph:
    diffusion, clip_l, t5, vae = models.FLUX
    save = Node("saved", "SaveImage", ("flux_sparge_2048",), {"images": "decode"})
    prompt = (
        "A mountain village at dawn seen from above, hundreds of slate roofs, smoke from chimneys, "
        "a river with a stone bridge, fields with hedges, far snowy peaks. Photograph, fine detail."
    )
    return Graph(
        "09 Flux dev - text to image, 2048x2048",
        *("Flux dev", "text to image", "2048 x 2048"),
        _one_model(
            (
                models.diffusion(diffusion),
                models.text_encoder("flux", clip_l, t5),
                models.vae(vae),
            ),
            Node("size", "EmptySD3LatentImage", (2048, 2048, 1), title="Size"),
            parts.prompts(prompt, negative_title="Negative prompt (not used: cfg is 1)"),
            parts.sampler(20, 1.0),
            parts.watched("6 Look", parts.decode(), save, width=440),
            (
                notes.start(
                    "Flux dev, 2048 x 2048",
                    "16,384 image tokens (128 x 128)",
                    "At 1024 x 1024 it has 4,096, where there is hardly anything to gain.",
                ),
                notes.settings(),
                notes.files(models.FLUX),
            ),
        ),
    )


def _compare() -> Graph:
    loaders, size, prompts = _wan_small(WAN_SIZE)
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
        *("compare", "SpargeCompare", ("side by side",)),
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
                        "The clip is made twice, so it takes the time of both.",
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


def _wan_22(number: int, task: str) -> Graph:
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
            Stack(400, (start,)),
            Stack(400, (notes.settings(more="", height=400),)),
            Stack(400, (notes.files(files, height=400),)),
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


def graphs() -> list[Graph]:
    return [
        _mochi(
            *(1, 163, "44,520 video tokens (28 x 30 x 53)"),
            "This is Mochi at its full length: most of a step is attention, so it gains most. It "
            "also needs the most memory; try settings in the graph of 85 frames.",
        ),
        _mochi(
            *(2, 85, "23,850 video tokens (15 x 30 x 53)"),
            "At 25 frames it has 7,950, where there is little to gain; at 163 it has 44,520 and "
            "gains more.",
        ),
        _cog(
            *(3, "", "CogVideoX-5b", 2, (720, 480, 49), 8),
            (
                "17,550 video tokens (13 x 30 x 45)",
                "That is less than a long Mochi clip has, so expect a smaller gain.",
                "**A limit of ComfyUI 0.33**, with or without this node: it spaces the positions "
                "of CogVideoX 1.0 models 1.875 times too widely in height and width, so clips "
                "differ from the original code's. CogVideoX 1.5 is computed as published.",
            ),
        ),
        _cog(
            *(4, "1.5 ", "CogVideoX1.5-5B", 3, (1360, 768, 81), 16),
            (
                "44,880 video tokens (11 x 48 x 85)",
                "Most of a step is attention, so this gains more than 720 x 480.",
                "",
            ),
        ),
        _wan_22(5, "t2v"),
        _wan_22(6, "i2v"),
        _wan_21(),
        _hunyuan(),
        _flux(),
        _compare(),
    ]
