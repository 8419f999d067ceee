# SPDX-License-Identifier: Apache-2.0
"""Every blueprint of subgraphs/: a whole model as one node, from its files to the clip."""

from __future__ import annotations

from . import parts
from .layout import FOR_LINKS, Group, Row, Stack
from .one_model import columns
from .recipes import COGVIDEOX, COGVIDEOX_15, Recipe, mochi
from .subgraph import Face, Subgraph


def _text_to_video(recipe: Recipe) -> Subgraph:
    diffusion, encoder, vae = recipe.loaders
    watch = Row((Stack(225, (recipe.decode,)), Stack(225, (parts.video(recipe.fps),))), FOR_LINKS)
    last = Stack(0, (Group("7 Decode", watch),), 460)
    width, height, frames = recipe.pixels_and_frames
    file = "model_name" if diffusion.kind == "SpargeCogVideoXLoad" else "unet_name"
    return Subgraph(
        f"Text to Video ({recipe.model}, Sparge Attention)",
        f"A clip from a text by {recipe.model}, with the attention that does not matter skipped.",
        columns(recipe.loaders, recipe.size, parts.prompts(), recipe.sampler, last),
        (
            Face("prompt", "STRING", (("prompt", "text"),), parts.DOG),
            Face("negative prompt", "STRING", (("negative", "text"),), ""),
            Face("width", "INT", (("size", "width"),), width),
            Face("height", "INT", (("size", "height"),), height),
            Face("frames", "INT", (("size", "length"),), frames),
            Face("steps", "INT", (("sampler", "steps"),), recipe.sampler.values[2]),
            Face("seed", "INT", (("sampler", "seed"),), parts.SEED),
            Face("model", "COMBO", (("model", file),), diffusion.values[0]),
            Face("text encoder", "COMBO", (("clip", "clip_name"),), encoder.values[0]),
            Face("vae", "COMBO", (("vae", "vae_name"),), vae.values[0]),
        ),
        {"VIDEO": "video"},
        520,
    )


def blueprints() -> list[Subgraph]:
    return [_text_to_video(recipe) for recipe in (mochi(163), COGVIDEOX, COGVIDEOX_15)]
