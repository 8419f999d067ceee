# SPDX-License-Identifier: Apache-2.0
"""What the models do not publish: the token grid, where text stands, and how blocks are counted.

To add a family, add a row to FAMILIES under the class name of its diffusion model. A model without
a row works too; its tokens are then all alike to the policy.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Patch = tuple[int, int, int]


class TextPosition(enum.Enum):
    """Where the self-attention sequence holds the tokens that are not on the video grid."""

    FIRST = "first"
    LAST = "last"
    NONE = "none"


@dataclass(frozen=True)
class Family:
    """name is for the user; patch gives latent cells per token along (time, height, width)."""

    name: str
    text: TextPosition
    patch: Callable[[Any], Patch]


def _spatial(model: Any) -> Patch:
    return (1, model.patch_size, model.patch_size)


def _spatial_and_temporal(model: Any) -> Patch:
    return (model.patch_size_t or 1, model.patch_size, model.patch_size)


def _as_published(model: Any) -> Patch:
    """A sequence of three numbers, or of two in the image variant of a video model."""
    time, height, width = [1, *model.patch_size][-3:]
    return (time, height, width)


def _one_cell(model: Any) -> Patch:
    return (1, 1, 1)


#: By class name, so that nothing here imports a model; subclasses inherit their parent's row.
FAMILIES: Mapping[str, Family] = {
    "AsymmDiTJoint": Family("Mochi", TextPosition.LAST, _spatial),
    "CogVideoXTransformer3DModel": Family("CogVideoX", TextPosition.FIRST, _spatial_and_temporal),
    "WanModel": Family("Wan", TextPosition.NONE, _as_published),
    "HunyuanVideo": Family("HunyuanVideo", TextPosition.FIRST, _as_published),
    "LTXBaseModel": Family("LTXV", TextPosition.NONE, _one_cell),
    "Flux": Family("Flux", TextPosition.FIRST, _spatial),
    "Chroma": Family("Chroma", TextPosition.FIRST, _spatial),
}

#: A model has one of these lists, or the first two.
_BLOCK_LISTS = ("double_blocks", "single_blocks", "blocks", "transformer_blocks", "layers")


@dataclass(frozen=True)
class TokenLayout:
    """What is known about the tokens of one forward pass.

    Attributes:
        family: the model's name for the user.
        text: position of the tokens off the grid; None for a model without a row in FAMILIES.
        grid: tokens along (time, height, width); None when it is not known.
        double_blocks: blocks before the single-stream ones, which models number from 0 again.
        blocks: blocks in all lists; None when the model has no list known here.
    """

    family: str
    text: TextPosition | None
    grid: tuple[int, int, int] | None
    double_blocks: int
    blocks: int | None

    @property
    def grid_tokens(self) -> int:
        return math.prod(self.grid) if self.grid else 0

    def exact_tokens(self, tokens: int, references: int = 0) -> tuple[int, int]:
        """(prefix, suffix) of a self-attention over ``tokens`` tokens that must stay exact.

        references counts image tokens that a model appends after the grid (Flux edits).
        """
        text = tokens - self.grid_tokens - references
        if self.grid is None or text <= 0:
            return (0, 0)
        if self.text is TextPosition.FIRST:
            return (text, 0)
        return (0, text) if self.text is TextPosition.LAST else (0, 0)

    def block_index(self, options: Mapping[str, Any], self_attention_calls: int) -> int:
        """Number of the running block over all lists; models that publish none are counted."""
        if "block_index" not in options or "total_blocks" not in options:
            return self_attention_calls
        single_stream = options.get("block_type") == "single"
        return options["block_index"] + (self.double_blocks if single_stream else 0)


def token_layout(diffusion_model: Any, latent_shape: Sequence[int]) -> TokenLayout:
    """Layout for a latent of shape (batch, channels, [time,] height, width)."""
    model = getattr(diffusion_model, "_orig_mod", diffusion_model)  # torch.compile's wrapper
    names = [cls.__name__ for cls in type(model).__mro__]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    counts = [
        len(blocks) for name in _BLOCK_LISTS if (blocks := getattr(model, name, None)) is not None
    ]
    return TokenLayout(
        family=family.name if family else names[0],
        text=family.text if family else None,
        grid=_grid(family.patch(model), latent_shape) if family else None,
        double_blocks=len(getattr(model, "double_blocks", ())),
        blocks=sum(counts) if counts else None,
    )


def _grid(patch: Patch, latent_shape: Sequence[int]) -> tuple[int, int, int] | None:
    cells = latent_shape[2:]
    if len(cells) not in (2, 3):
        return None
    time, height, width = (
        math.ceil(extent / step) for extent, step in zip([1, *cells][-3:], patch, strict=True)
    )
    return (time, height, width)
