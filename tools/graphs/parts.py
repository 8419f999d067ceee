# SPDX-License-Identifier: Apache-2.0
"""Parts that graphs share: our node as it is added, prompts, and what is behind the sampler."""

from __future__ import annotations

from typing import Any

from .layout import FOR_LINKS, Group, Node, Row, Stack

SEED = 42
#: Values of a Sparge Attention node that is added now: mode, quality, then those of every mode.
NEW_NODE = ("auto quality", "balanced", 0.1, 1.0, 4096, "", False)
DOG = (
    "A golden retriever runs along a beach at sunset, waves rolling in behind it, its fur moving "
    "in the wind. The camera follows at the same speed, low above the sand. Warm light, shallow "
    "depth of field."
)
UNWANTED = "blurry, still picture, watermark, subtitles, distorted hands, extra fingers"


def sparge(model: str = "model", name: str = "faster", title: str = "") -> Node:
    return Node(name, "SpargeAttention", NEW_NODE, {"model": model}, title)


def prompts(
    positive: str = DOG,
    negative: str = "",
    negative_title: str = "Negative prompt",
) -> tuple[Node, Node]:
    clip = {"clip": "clip"}
    return (
        Node("prompt", "CLIPTextEncode", (positive,), clip, "Prompt", height=170),
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


def video(fps: float, images: str = "decode") -> Node:
    return Node("video", "CreateVideo", (fps, 8), {"images": images})


def saved(prefix: str) -> Node:
    return Node("saved", "SaveVideo", (f"video/{prefix}", "auto", "auto"), {"video": "video"})


def report() -> Node:
    inputs = {"model": "faster", "latent": "sampler"}
    title = "Sparge Attention Report: appears here after a run"
    return Node("report", "SpargeAttentionReport", ("",), inputs, title)


def watched(title: str, decoder: Node, save: Node, *between: Node, width: int = 380) -> Group:
    """Decoder, what is between it and the saved clip, and the report below them."""
    narrow = 225
    steps = Row(tuple(Stack(narrow, (node,)) for node in (decoder, *between)), FOR_LINKS)
    below = max(narrow * (1 + len(between)) + FOR_LINKS * len(between), 400)
    left = Stack(below, (steps, report()))
    return Group(title, Row((left, Stack(width, (save,))), FOR_LINKS))
