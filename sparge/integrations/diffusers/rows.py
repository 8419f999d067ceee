# SPDX-License-Identifier: Apache-2.0
"""Transformers of diffusers: facts that their forward passes do not say.

They are the token grid, and how many tokens of text stand before or after it. To add a model, add a
row to ROWS under its class name. A model without a row works too; its tokens are then all alike to
the policy, text among them, and the line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...session import TextPosition
from ...weak_cache import WeakTensorCache

Size = tuple[int, int, int]


@dataclass(frozen=True)
class Tokens:
    """Tokens of one pass: grid along (time, height, width), and what stands beside it."""

    grid: Size
    text: int = 0
    tail: int = 0
    """Tokens behind the grid that lie on no part of it, such as an image to edit."""
    masked: bool = False
    """Fewer tokens of text may be real."""


@dataclass(frozen=True)
class Row:
    """Facts of one class. name is for the user; `tokens` gives None for inputs that it does not
    know."""

    name: str
    text: TextPosition
    tokens: Callable[[Any, Mapping[str, Any]], Tokens | None]
    """From the model's configuration, and the arguments of its forward pass by name."""
    timestep_scale: float = 1.0
    """Divisor by which the pipeline makes timesteps of the scheduler's."""


def row_of(model: object) -> Row | None:
    """Row of a model; None where it has none. Subclasses inherit their parent's."""
    names = (cls.__name__ for cls in type(model).__mro__)
    return next((ROWS[name] for name in names if name in ROWS), None)


def _text(given: Mapping[str, Any]) -> int:
    """Number of tokens of text (batch, tokens, width)."""
    text = given.get("encoder_hidden_states")
    return text.shape[1] if isinstance(text, Tensor) and text.ndim == 3 else 0


def _cogvideox(config: Any, given: Mapping[str, Any]) -> Tokens:
    """Latent (batch, time, channels, height, width); no patches along time before version 1.5."""
    _, time, _, height, width = given["hidden_states"].shape
    patch = config.patch_size
    grid = time // (config.patch_size_t or 1), height // patch, width // patch
    return Tokens(grid, _text(given))


def _wan(config: Any, given: Mapping[str, Any]) -> Tokens:
    cells, patch = given["hidden_states"].shape[2:], config.patch_size
    return Tokens((cells[0] // patch[0], cells[1] // patch[1], cells[2] // patch[2]))


def _mochi(config: Any, given: Mapping[str, Any]) -> Tokens:
    """Each entry of the batch attends on its own, without the padding of its text."""
    hidden = given["hidden_states"]
    _, _, time, height, width = hidden.shape
    grid = time, height // config.patch_size, width // config.patch_size
    return Tokens(grid, _text(given), masked=True)


def _hunyuan(config: Any, given: Mapping[str, Any]) -> Tokens:
    """A mask hides the padding of the text."""
    _, _, time, height, width = given["hidden_states"].shape
    patch = config.patch_size
    grid = time // config.patch_size_t, height // patch, width // patch
    return Tokens(grid, _text(given), masked=True)


def _allegro(config: Any, given: Mapping[str, Any]) -> Tokens:
    _, _, time, height, width = given["hidden_states"].shape
    patch = config.patch_size
    return Tokens((time // config.patch_size_t, height // patch, width // patch))


def _ltx(config: Any, given: Mapping[str, Any]) -> Tokens | None:
    """Latent in tokens (batch, tokens, channels), of a grid that the pipeline names."""
    time, height, width = (given.get(name) or 0 for name in ("num_frames", "height", "width"))
    whole = 0 < time * height * width == given["hidden_states"].shape[1]
    return Tokens((time, height, width)) if whole else None  # else with tokens of a condition


def _flux(config: Any, given: Mapping[str, Any]) -> Tokens | None:
    """Picture in tokens; `img_ids` (tokens, 3) names image, row and column of each. An image to
    edit has another number and stands behind the picture."""
    ids, tokens = given.get("img_ids"), given["hidden_states"].shape[1]
    if not isinstance(ids, Tensor):
        return None
    found = _pictures.get(ids)
    if found is None:
        found = _pictures.add(ids, _picture(ids if ids.ndim == 2 else ids[0]))
    height, width = found
    if height * width > tokens or not height:
        return None
    return Tokens((1, height, width), _text(given), tail=tokens - height * width)


#: Rows and columns of the picture of each `img_ids`; (0, 0) where they are no whole picture.
_pictures: WeakTensorCache[tuple[int, int]] = WeakTensorCache(16)


def _picture(ids: Tensor) -> tuple[int, int]:
    """Waits for the device of the ids."""
    number, row, column = ids.long().cpu().T
    own = number == number[0]
    height, width = int(row[own].max()) + 1, int(column[own].max()) + 1
    raster = row * width + column
    whole = raster[own].tolist() == list(range(height * width))
    return (height, width) if whole and bool(own[: height * width].all()) else (0, 0)


def _sd3(config: Any, given: Mapping[str, Any]) -> Tokens:
    """SD3.5 medium attends once more to the picture alone."""
    _, _, height, width = given["hidden_states"].shape
    return Tokens((1, height // config.patch_size, width // config.patch_size), _text(given))


_FIRST, _LAST, _NONE = TextPosition.FIRST, TextPosition.LAST, TextPosition.NONE

ROWS: Mapping[str, Row] = {
    "CogVideoXTransformer3DModel": Row("CogVideoX", _FIRST, _cogvideox),
    "MochiTransformer3DModel": Row("Mochi", _LAST, _mochi),
    "WanTransformer3DModel": Row("Wan", _NONE, _wan),
    "HunyuanVideoTransformer3DModel": Row("HunyuanVideo", _LAST, _hunyuan),
    "LTXVideoTransformer3DModel": Row("LTX", _NONE, _ltx),
    "FluxTransformer2DModel": Row("Flux", _FIRST, _flux, timestep_scale=1000.0),
    "SD3Transformer2DModel": Row("SD3", _LAST, _sd3),
    "AllegroTransformer3DModel": Row("Allegro", _NONE, _allegro),
}
