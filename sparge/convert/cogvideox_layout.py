# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's transformer as ComfyUI core v0.33 names it, and what each parameter must measure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

HEAD_DIM = 64  # fixed in core's detection: heads = width // 64
POSITIONS = "patch_embed.pos_embedding"

_PREFIXES = (
    (re.compile(r"^transformer_blocks\."), "blocks."),
    (re.compile(r"^time_embedding\.linear_"), "time_embedding_linear_"),
    (re.compile(r"^ofs_embedding\.linear_"), "ofs_embedding_linear_"),
)
_IN_BLOCK = {
    "attn1.to_q": "q",
    "attn1.to_k": "k",
    "attn1.to_v": "v",
    "attn1.to_out.0": "attn_out",
    "attn1.norm_q": "norm_q",
    "attn1.norm_k": "norm_k",
    "ff.net.0.proj": "ff_proj",
    "ff.net.2": "ff_out",
}
_BLOCK = re.compile(r"^blocks\.(\d+)\.(.+)\.(weight|bias)$")


def core_name(diffusers_name: str) -> str:
    """The name core gives a parameter of diffusers' CogVideoXTransformer3DModel."""
    name = diffusers_name
    for pattern, replacement in _PREFIXES:
        name = pattern.sub(replacement, name)
    if match := _BLOCK.match(name):
        index, module, kind = match.groups()
        name = f"blocks.{index}.{_IN_BLOCK.get(module, module)}.{kind}"
    return name


@dataclass(frozen=True)
class Layout:
    """The sizes that fix every parameter's shape, read from a few of them."""

    heads: int
    layers: int
    time_dim: int
    text_dim: int
    patch_shape: tuple[int, ...]  # of patch_embed.proj.weight: 4-D is CogVideoX 1.0, 2-D is 1.5
    out_features: int
    ofs_dim: int | None

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Reads the sizes from shapes under core's names. Raises KeyError where one is missing."""
        modulation = shapes["blocks.0.norm1.linear.weight"]
        blocks = {int(m[1]) for name in shapes if (m := _BLOCK.match(name))}
        ofs = shapes.get("ofs_embedding_linear_1.weight")
        return cls(
            heads=modulation[0] // 6 // HEAD_DIM,
            layers=max(blocks) + 1,
            time_dim=modulation[1],
            text_dim=shapes["patch_embed.text_proj.weight"][1],
            patch_shape=shapes["patch_embed.proj.weight"],
            out_features=shapes["proj_out.weight"][0],
            ofs_dim=ofs[1] if ofs else None,
        )

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter core creates for these sizes, positions apart."""
        width, time = self.width, self.time_dim
        shapes: dict[str, tuple[int, ...]] = {}

        def linear(name: str, inputs: int, outputs: int) -> None:
            shapes[f"{name}.weight"] = (outputs, inputs)
            shapes[f"{name}.bias"] = (outputs,)

        def norm(name: str, size: int) -> None:
            shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (size,)

        shapes["patch_embed.proj.weight"] = (width, *self.patch_shape[1:])
        shapes["patch_embed.proj.bias"] = (width,)
        linear("patch_embed.text_proj", self.text_dim, width)
        linear("time_embedding_linear_1", width, time)
        linear("time_embedding_linear_2", time, time)
        if self.ofs_dim:
            linear("ofs_embedding_linear_1", self.ofs_dim, self.ofs_dim)
            linear("ofs_embedding_linear_2", self.ofs_dim, self.ofs_dim)
        for block in (f"blocks.{i}" for i in range(self.layers)):
            for each in ("norm1", "norm2"):
                linear(f"{block}.{each}.linear", time, 6 * width)
                norm(f"{block}.{each}.norm", width)
            for each in ("q", "k", "v", "attn_out"):
                linear(f"{block}.{each}", width, width)
            for each in ("norm_q", "norm_k"):
                norm(f"{block}.{each}", HEAD_DIM)
            linear(f"{block}.ff_proj", width, 4 * width)
            linear(f"{block}.ff_out", 4 * width, width)
        norm("norm_final", width)
        linear("norm_out.linear", time, 2 * width)
        norm("norm_out.norm", width)
        linear("proj_out", width, self.out_features)
        return shapes


@dataclass(frozen=True)
class PositionGrid:
    """The grid CogVideoX-2B was trained on: its positions are a fixed table, not parameters."""

    frames: int = 13
    height: int = 30
    width: int = 45
    text_tokens: int = 226
    spatial_scale: float = 1.875
    temporal_scale: float = 1.0

    def table(self, channels: int) -> np.ndarray:
        """(1, text_tokens + frames * height * width, channels) float32, zero for text.

        A quarter of the channels holds the frame, the rest the column and the row, each as sines
        then cosines. Core has another formula of its own and uses it where a file lacks the table.
        """
        for_space = 3 * channels // 8
        parts = [
            _waves(np.arange(self.frames) / self.temporal_scale, channels // 4)[:, None, None],
            _waves(np.arange(self.width) / self.spatial_scale, for_space)[None, None, :],
            _waves(np.arange(self.height) / self.spatial_scale, for_space)[None, :, None],
        ]
        grid = (self.frames, self.height, self.width)
        video = np.concatenate([np.broadcast_to(p, (*grid, p.shape[-1])) for p in parts], axis=-1)
        text = np.zeros((self.text_tokens, channels))
        return np.concatenate([text, video.reshape(-1, channels)])[None].astype(np.float32)


def _waves(positions: np.ndarray, channels: int) -> np.ndarray:
    half = channels // 2
    angles = np.outer(positions, 10000.0 ** -(np.arange(half) / half))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
