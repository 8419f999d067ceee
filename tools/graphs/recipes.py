# SPDX-License-Identifier: Apache-2.0
"""How a model makes its clip: what the graphs and the blueprint of one model share."""

from __future__ import annotations

from dataclasses import dataclass

from . import models, parts
from .layout import Model, Node

LATENT = "Size and length"


@dataclass(frozen=True)
class Recipe:
    """A model of Mochi or CogVideoX.

    Attributes:
        model: its name.
        loaders: diffusion model, text encoder and VAE.
        size: its empty latent.
        prefix: of the names of its files.
        fps: frames a second.
        shards: files of a transformer that is published in several.
        vae: its file.
    """

    model: str
    loaders: tuple[Node, Node, Node]
    size: Node
    sampler: Node
    decode: Node
    fps: int
    prefix: str
    vae: Model
    shards: tuple[Model, ...] = ()

    @property
    def pixels_and_frames(self) -> tuple[int, int, int]:
        width, height, frames = self.size.values[:3]
        return width, height, frames


def mochi(frames: int) -> Recipe:
    diffusion, text, vae = models.MOCHI
    return Recipe(
        "Mochi",
        (models.diffusion(diffusion), models.text_encoder("mochi", text), models.vae(vae)),
        Node("size", "EmptyMochiLatentVideo", (848, 480, frames, 1), title=LATENT),
        parts.sampler(30, 4.5),
        parts.decode(256, 64, 48, 8),
        24,
        f"mochi_sparge_{frames}f",
        vae,
    )


def cogvideox(
    version: str, repository: str, shards: int, size: tuple[int, int, int], fps: int
) -> Recipe:
    """version: "" or "1.5 "."""
    name = f"cogvideox_{version}5b".replace(" ", "_").lower()
    vae = models.cog_vae(repository, f"{name}_vae.safetensors")
    transformer = tuple(models.cog_shards(repository, shards))
    return Recipe(
        f"CogVideoX {version}5B",
        (
            models.cogvideox(transformer),
            models.text_encoder("cogvideox", models.T5),
            models.vae(vae),
        ),
        Node("size", "EmptyHunyuanLatentVideo", (*size, 1), title=LATENT),
        parts.sampler(50, 6.0),
        parts.decode(256, 64, 32, 8),
        fps,
        f"{name}_sparge",
        vae,
        transformer,
    )


COGVIDEOX = cogvideox("", "CogVideoX-5b", 2, (720, 480, 49), 8)
COGVIDEOX_15 = cogvideox("1.5 ", "CogVideoX1.5-5B", 3, (1360, 768, 81), 16)
