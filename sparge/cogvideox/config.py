# SPDX-License-Identifier: Apache-2.0
"""Positions of a CogVideoX transformer, as diffusers' config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .json_text import ConversionError, read_json, shown
from .layout import MOST_TOKENS, PositionGrid

CONFIG_LIMIT = 1 << 20  # bytes; published ones have one thousand
CLASS_NAME = "CogVideoXTransformer3DModel"
ROTARY = "use_rotary_positional_embeddings"
HEADS = "num_attention_heads"
#: Of each number, by its name: the usual value, and the least and greatest that is one.
WHOLE = {
    "patch_size": (2, 1, 64),
    "sample_frames": (49, 1, 10_000),
    "sample_height": (60, 1, 10_000),
    "sample_width": (90, 1, 10_000),
    "temporal_compression_ratio": (4, 1, 64),
    "max_text_seq_length": (226, 1, 10_000),
}
SCALES = {
    "spatial_interpolation_scale": (1.875, 1e-3, 1e3),
    "temporal_interpolation_scale": (1.0, 1e-3, 1e3),
}


@dataclass(frozen=True)
class Config:
    """Values that are usual where the file does not give them."""

    rotary: bool | None
    """None: not said."""
    grid: PositionGrid
    heads: int | None = None
    """None: not said."""

    @classmethod
    def beside(cls, shard: Path) -> Config:
        """Positions by the config.json in a shard's folder; that of another class says nothing.

        Raises ConversionError for a file that is damaged, or has values that no model has.
        """
        path = shard.parent / "config.json"
        content = _read(path) if path.is_file() else {}
        return cls.of(content if content.get("_class_name") == CLASS_NAME else {})

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Config:
        rotary = content.get(ROTARY)
        if rotary is not None and not isinstance(rotary, bool):
            raise ConversionError(
                f"config.json has {ROTARY} = {shown(rotary)}; it is true or false"
            )
        whole = {name: _number(content, name, (int,), *WHOLE[name]) for name in WHOLE}
        scale = {name: _number(content, name, (int, float), *SCALES[name]) for name in SCALES}
        patch = whole["patch_size"]
        for name in ("sample_height", "sample_width"):
            if whole[name] < patch:
                raise ConversionError(
                    f"config.json has {name} = {whole[name]}, less than one patch of {patch}"
                )
        return cls(
            rotary,
            PositionGrid(
                frames=(whole["sample_frames"] - 1) // whole["temporal_compression_ratio"] + 1,
                height=whole["sample_height"] // patch,
                width=whole["sample_width"] // patch,
                text_tokens=whole["max_text_seq_length"],
                spatial_scale=scale["spatial_interpolation_scale"],
                temporal_scale=scale["temporal_interpolation_scale"],
            ),
            _number(content, HEADS, (int,), None, 1, 1000),
        )

    @property
    def table_grid(self) -> PositionGrid:
        """Raises ConversionError where its table would be larger than any model's."""
        if self.grid.tokens > MOST_TOKENS:
            raise ConversionError(
                f"config.json asks for a position table of {self.grid.tokens} tokens; this writes"
                f" up to {MOST_TOKENS}"
            )
        return self.grid


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(CONFIG_LIMIT + 1)
    if len(data) > CONFIG_LIMIT:
        raise ConversionError(f"{path.name} has more than {CONFIG_LIMIT >> 20} MiB")
    return read_json(data, path.name)


def _number(
    content: Mapping[str, Any],
    name: str,
    kinds: tuple[type, ...],
    usual: float | None,
    least: float,
    greatest: float,
) -> Any:
    value = content.get(name)
    if value is None:
        return usual
    if type(value) not in kinds or not least <= value <= greatest:
        whole = " whole" if float not in kinds else ""
        raise ConversionError(
            f"config.json has {name} = {shown(value)}; it takes a{whole} number from {least:g} to"
            f" {greatest:g}"
        )
    return value
