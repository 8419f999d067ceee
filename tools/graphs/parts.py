# SPDX-License-Identifier: Apache-2.0
"""Parts that graphs share: our node as it is added, prompts, and what is behind the sampler."""

from __future__ import annotations

from typing import Any

from .layout import FOR_LINKS, Group, Node, Row, Stack, extent

SEED = 42
#: Values of a Sparge Attention node that is added now: mode, quality, then those of every mode.
NEW_NODE = ("auto quality", "balanced", 0.1, 1.0, 4096, "", False)
DOG = (
    "A golden retriever runs along a beach at sunset, waves rolling in behind it, its fur moving "
    "in the wind. The camera follows at the same speed, low above the sand. Warm light, shallow "
    "depth of field."
)
SOUNDS = "Waves roar, gulls cry, paws splash through the shallow water."
UNWANTED = "blurry, still picture, watermark, subtitles, distorted hands, extra fingers"


def sparge(model: str = "model", name: str = "faster", title: str = "Sparge Attention") -> Node:
    """title: as the notes call it; the node's own, which is for the search, is cut off here."""
    return Node(name, "SpargeAttention", NEW_NODE, {"model": model}, title)


def prompts(
    positive: str = DOG,
    negative: str = "",
    negative_title: str = "Negative prompt",
) -> tuple[Node, Node]:
    clip = {"clip": "clip"}
    return (
        Node("prompt", "CLIPTextEncode", (positive,), clip, "Prompt", height=150),
        Node("negative", "CLIPTextEncode", (negative,), clip, negative_title, height=106),
    )


def sampler(steps: int, cfg: float, name: str = "euler", **options: Any) -> Node:
    """options: of Node; inputs are added to those that every graph has."""
    values = (SEED, "fixed", steps, cfg, name, "simple", 1.0)
    usual = {"model": "faster", "positive": "prompt", "negative": "negative"}
    inputs = usual | {"latent_image": "size"} | options.pop("inputs", {})
    return Node(options.pop("node", "sampler"), "KSampler", values, inputs, **options)


def decode(*tiles: int, latent: str = "sampler", name: str = "decode", title: str = "") -> Node:
    """tiles: size, overlap, frames and their overlap; none decodes the whole at once."""
    kind = "VAEDecodeTiled" if tiles else "VAEDecode"
    return Node(name, kind, tiles, {"samples": latent, "vae": "vae"}, title)


def video(fps: float, images: str = "decode", audio: str = "") -> Node:
    sound = {"audio": audio} if audio else {}
    return Node("video", "CreateVideo", (fps, 8), {"images": images} | sound)


def saved(prefix: str) -> Node:
    return Node("saved", "SaveVideo", (f"video/{prefix}", "auto", "auto"), {"video": "video"})


def report() -> Node:
    inputs = {"model": "faster", "latent": "sampler"}
    title = "Sparge Attention Report: appears here after a run"
    return Node("report", "SpargeAttentionReport", ("",), inputs, title)


def watched(title: str, decoders: tuple[Node, ...], save: Node, *between: Node) -> Group:
    """The report, below it the decoders and what is between them and the saved clip."""
    steps, whole = (decoders, *((node,) for node in between)), 470
    narrow = (whole - FOR_LINKS * len(between)) // len(steps)
    row = Row(tuple(Stack(narrow, nodes) for nodes in steps), FOR_LINKS)
    left = Stack(whole, (report(), row))
    low = extent(left)[1] - extent(save)[1]
    return Group(title, Row((left, Stack(380, (save,), top=low)), 2 * FOR_LINKS))
