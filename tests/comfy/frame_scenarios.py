# SPDX-License-Identifier: Apache-2.0
"""Frames beside the clip, frames that attend on their own, U-Nets. Each returns plain JSON."""

from __future__ import annotations

from typing import Any

import frame_models  # noqa: F401  adds its models
import models
import torch
from comfy_extras.nodes_hypertile import HyperTile
from comfy_extras.nodes_pag import PerturbedAttentionGuidance
from comfy_extras.nodes_tomesd import TomePatchModel
from comfy_extras.nodes_wan import WanAnimate2Cache
from session import library_calls, pack, patch, relative_error, replaced, reports, sample

AUTO: dict[str, Any] = {"mode": "auto quality", "quality": "fast"}


def beside_the_clip(name: str) -> dict[str, Any]:
    """Runs with everything kept, and in an auto mode: what the library is asked for, and how far
    off."""
    model = models.build(name)
    dense = sample(model, name)
    found: dict[str, Any] = {}
    for mode, widgets in (("manual", {"topk": 1.0}), ("auto", AUTO)):
        with reports() as told, library_calls() as calls:
            out = sample(patch(model, **widgets), name)
        found[mode] = {"report": told[0], "calls": calls, "error": relative_error(out, dense)}
    return found


def frame_by_frame(cached: bool) -> dict[str, Any]:
    """Wan Animate 2, with its own cache of the pose branch or without."""

    def model() -> Any:
        built = models.build("animate2")
        return WanAnimate2Cache.execute(built, "cpu").result[0] if cached else built

    dense = sample(model(), "animate2")
    found: dict[str, Any] = {}
    cases = {"everything": {"topk": 1.0}, "half": {"topk": 0.5}, "auto": AUTO}
    for name, widgets in cases.items():
        with reports() as told, library_calls() as calls:
            out = sample(patch(model(), **widgets), "animate2")
        error = relative_error(out, dense)
        tokens = sorted({call["tokens"] for call in calls})
        found[name] = {"report": told[0], "error": error, "tokens": tokens}
    return found


def perturbed_attention() -> dict[str, Any]:
    """The core node, which replaces the self-attention of a U-Net's middle in a pass of its own.
    The rows that calls of each place were given, in passes with it and without."""
    guided = PerturbedAttentionGuidance.execute(models.build("square unet"), 3.0).result[0]
    forward = pack("nodes.forward_facts").Forward
    serve, seen = forward._serve, set()

    def spy(this: Any, call: Any, kind: Any, layer: Any, *args: Any, **named: Any) -> Any:
        options = call.options["transformer_options"]
        if kind.name == "SELF":
            perturbed = bool(options.get("patches_replace", {}).get("attn1"))
            seen.add((perturbed, *options["block"], options["block_index"], layer.row))
        return serve(this, call, kind, layer, *args, **named)

    dense = sample(guided, "square unet")
    with replaced(forward, "_serve", spy), reports() as told:
        sample(patch(guided, **AUTO), "square unet")
    with reports() as everything:
        out = sample(patch(guided, topk=1.0), "square unet")
    return {
        "seen": sorted(seen),
        "report": told[0],
        "everything": everything[0],
        "error": relative_error(out, dense),
    }


def merged_tokens() -> dict[str, Any]:
    """The core node for ToMe, which merges queries of self-attention and leaves its keys."""
    model = TomePatchModel.execute(models.build("square unet"), 0.3).result[0]

    def seeded(patched: Any) -> torch.Tensor:
        torch.manual_seed(0)  # it merges at random
        return sample(patched, "square unet")

    dense, found = seeded(model), {}
    for name, widgets in (("manual", {"topk": 1.0}), ("auto", AUTO)):
        with reports() as told:
            out = seeded(patch(model, **widgets))
        found[name] = {"report": told[0], "error": relative_error(out, dense)}
    return found


def padded_prompt() -> dict[str, Any]:
    """HunyuanVideo with a mask over its text; with cfg 1, as ComfyUI does not batch such masks."""
    name = "hunyuan, padded"
    model = models.build(name)
    dense = sample(model, name, cfg=1.0)
    found: dict[str, Any] = {}
    for mode, widgets in (("manual", {"topk": 1.0}), ("half", {"topk": 0.5}), ("auto", AUTO)):
        with reports() as told, library_calls() as calls:
            out = sample(patch(model, **widgets), name, cfg=1.0)
        found[mode] = {"report": told[0], "calls": calls, "error": relative_error(out, dense)}
    return found


def tiles() -> dict[str, Any]:
    """The core node HyperTile, which cuts the queries of large levels into tiles."""
    model = HyperTile.execute(models.build("square unet"), 128, 2, 0, False)[0]

    def seeded(patched: Any) -> torch.Tensor:
        torch.manual_seed(0)  # it cuts at random
        return sample(patched, "square unet")

    dense = seeded(model)
    with reports() as told, library_calls() as calls:
        out = seeded(patch(model, topk=1.0))
    tokens = sorted({call["tokens"] for call in calls})
    return {"report": told[0], "tokens": tokens, "error": relative_error(out, dense)}
