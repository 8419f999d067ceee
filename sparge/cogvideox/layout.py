# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's transformer as ComfyUI core v0.33 names it, and what each parameter must measure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .json_text import ConversionError, shown

HEAD_DIM = 64  # fixed in core's detection: heads = width // 64
POSITIONS = "patch_embed.pos_embedding"
CORE_SIGN = "blocks.0.norm1.linear.weight"  # by which core's detection knows the model

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
_BLOCK = re.compile(r"^blocks\.(\d+)\.(.+)\.(weight|bias)$", re.ASCII)
MOST_BLOCKS = 1000  # published models have 30 and 42
MOST_TOKENS = 1 << 16  # of a position table; the published model's has 17,776


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
        """Reads the sizes from shapes under core's names.

        Raises KeyError where one is missing, ConversionError for sizes that no model has.
        """
        modulation = _sizes(shapes, CORE_SIGN, 2)
        ofs = "ofs_embedding_linear_1.weight"
        return cls(
            heads=modulation[0] // 6 // HEAD_DIM,
            layers=_layers(shapes),
            time_dim=modulation[1],
            text_dim=_sizes(shapes, "patch_embed.text_proj.weight", 2)[1],
            patch_shape=_sizes(shapes, "patch_embed.proj.weight", 2, 4),
            out_features=_sizes(shapes, "proj_out.weight", 2)[0],
            ofs_dim=_sizes(shapes, ofs, 2)[1] if ofs in shapes else None,
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


def _sizes(shapes: Mapping[str, tuple[int, ...]], name: str, *dimensions: int) -> tuple[int, ...]:
    shape = shapes[name]
    if len(shape) not in dimensions or 0 in shape:
        raise ConversionError(f"{name} has shape {shown(list(shape))}, which is no layer's")
    return shape


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    numbers = {match[1] for name in shapes if (match := _BLOCK.match(name))}
    for number in numbers:
        if len(number) > len(str(MOST_BLOCKS)) or int(number) >= MOST_BLOCKS:
            raise ConversionError(
                f"there is a block {shown(number)}; models have no more than {MOST_BLOCKS}"
            )
    return max(map(int, numbers)) + 1


@dataclass(frozen=True)
class PositionGrid:
    """The grid CogVideoX-2B was trained on: its positions are a fixed table, not parameters."""

    frames: int = 13
    height: int = 30
    width: int = 45
    text_tokens: int = 226
    spatial_scale: float = 1.875
    temporal_scale: float = 1.0

    @property
    def tokens(self) -> int:
        return self.text_tokens + self.frames * self.height * self.width

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
        table = np.zeros((1, self.tokens, channels), np.float32)
        video = table[0, self.text_tokens :].reshape(self.frames, self.height, self.width, channels)
        begin = 0
        for part in parts:
            video[..., begin : begin + part.shape[-1]] = part
            begin += part.shape[-1]
        return table


def _waves(positions: np.ndarray, channels: int) -> np.ndarray:
    half = channels // 2
    angles = np.outer(positions, 10000.0 ** -(np.arange(half) / half))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
