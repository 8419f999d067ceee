# SPDX-License-Identifier: Apache-2.0
"""What the models do not publish: the token grid, where text stands, and how many blocks they have.

To add a family, add a row to FAMILIES under the class name of its diffusion model. A model without
a row works too; its tokens are then all alike to the policy, and the end-of-run line says so.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..sparge import TokenGrid
from . import off_grid, unlisted_models
from .off_grid import ModelInputs, OffGrid, Patch

#: Said of sparse calls of a known model whose tokens are not those of its clip.
UNKNOWN_TOKENS = (
    "some calls have other tokens than the clip and its text (an image of another size?): those "
    "stay in the order they come, which errs more"
)


class TextPosition(enum.Enum):
    """Where the self-attention sequence holds the tokens that are not on the video grid."""

    FIRST = "first"
    LAST = "last"
    NONE = "none"


def _num_heads(model: Any) -> int | None:
    return getattr(model, "num_heads", None) or getattr(model, "num_attention_heads", None)


@dataclass(frozen=True)
class Family:
    """name is for the user; patch gives latent cells per token along (time, height, width)."""

    name: str
    text: TextPosition
    patch: Callable[[Any], Patch]
    off_grid: Callable[[Any, ModelInputs], OffGrid | None] = off_grid.nothing
    """What stands beside the grid, from the model and what it is given; None when unknown."""
    heads: Callable[[Any], int | None] = _num_heads
    left_out_key: str | None = None
    """Entry of transformer_options that names blocks whose self-attention the model leaves out."""


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


def _heads_of_first_block(model: Any) -> int | None:
    return model.visual_transformer_blocks[0].self_attention.num_heads


_FIRST, _LAST, _NONE = TextPosition.FIRST, TextPosition.LAST, TextPosition.NONE

#: By class name, so that nothing here imports a model; subclasses inherit their parent's row.
FAMILIES: Mapping[str, Family] = {
    "AsymmDiTJoint": Family("Mochi", _LAST, _spatial, off_grid.mochi),
    "CogVideoXTransformer3DModel": Family(
        "CogVideoX", _FIRST, _spatial_and_temporal, off_grid.text_first
    ),
    "WanModel": Family("Wan", _NONE, _as_published, off_grid.wan),
    "HunyuanVideo": Family("HunyuanVideo", _FIRST, _as_published, off_grid.hunyuan),
    "LTXBaseModel": Family("LTXV", _NONE, _one_cell),
    "LTXAVModel": Family("LTXV", _NONE, _one_cell, left_out_key="stg_self_attn_blocks"),
    "Kandinsky5": Family("Kandinsky 5", _NONE, _as_published, heads=_heads_of_first_block),
    "Flux": Family("Flux", _FIRST, _spatial, off_grid.flux),
    "Chroma": Family("Chroma", _FIRST, _spatial, off_grid.flux),
}

#: A model has one of these lists, or the first two.
_BLOCK_LISTS = (
    "double_blocks",
    "single_blocks",
    "blocks",
    "transformer_blocks",
    "visual_transformer_blocks",
    "layers",
)

#: Rows for the layers of a model whose blocks cannot be counted: more than any has.
_UNCOUNTED_ROWS = 256


@dataclass(frozen=True)
class TokenLayout:
    """What is known about the tokens of one forward pass.

    Attributes:
        family: the model's name for the user.
        text: position of the tokens off the grid; None for a model without a row in FAMILIES.
        grid: tokens along (time, height, width); None when it is not known.
        double_blocks: blocks before the single-stream ones, which models number from 0 again.
        blocks: blocks in all lists; None when the model has no list known here.
        tokens: the whole self-attention sequence; None when what is beside the grid is not known.
        heads: attention heads; None when they are not known before a call.
        left_out_key: as in `Family`.
        remark: what sparse runs of a model without a row say; "" with one.
        layers: self-attentions of a model whose `blocks` are not known, about.
    """

    family: str
    text: TextPosition | None
    grid: tuple[int, int, int] | None
    double_blocks: int
    blocks: int | None
    tokens: TokenGrid | None = None
    heads: int | None = None
    left_out_key: str | None = None
    remark: str = ""
    layers: int | None = None

    @property
    def grid_tokens(self) -> int:
        return math.prod(self.grid) if self.grid else 0

    @property
    def frame_tokens(self) -> int:
        return math.prod(self.grid[1:]) if self.grid else 0

    @property
    def rows(self) -> int:
        """Rows of tables that hold one for each self-attention layer, as `row` numbers them."""
        return 2 * self.blocks if self.blocks else _UNCOUNTED_ROWS

    def row(self, block: int, earlier_calls: int) -> int:
        """Of a self-attention call in `block` after so many others there: a second one, which the
        control blocks of Wan VACE make under the number of the block they steer, has a row of its
        own. At least `rows` when there is no room for it."""
        return block + earlier_calls * (self.blocks or 0)

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


def token_layout(
    diffusion_model: Any,
    latent_shape: Sequence[int],
    context: Any = None,
    extras: Mapping[str, Any] | None = None,
) -> TokenLayout:
    """Layout for a latent of shape (batch, channels, [time,] height, width), and what else the
    model is given: its context (batch, text tokens, width) and named extras."""
    model = getattr(diffusion_model, "_orig_mod", diffusion_model)  # torch.compile's wrapper
    names = [cls.__name__ for cls in type(model).__mro__]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    counts = [
        len(blocks) for name in _BLOCK_LISTS if (blocks := getattr(model, name, None)) is not None
    ]
    blocks = sum(counts) if counts else None
    double_blocks = len(getattr(model, "double_blocks", ()))
    if family is None:
        name = unlisted_models.name_of(names)
        remark, layers = unlisted_models.remark_of(name), unlisted_models.layers_of(model)
        return TokenLayout(
            name, None, None, double_blocks, blocks, remark=remark, layers=blocks or layers
        )
    patch = family.patch(model)
    grid = _grid(patch, latent_shape)
    tokens = None
    if grid is not None:
        beside = family.off_grid(model, ModelInputs(grid, patch, context, extras or {}))
        tokens = beside.around(grid) if beside else None
    return TokenLayout(
        family.name,
        family.text,
        grid,
        double_blocks,
        blocks,
        tokens,
        family.heads(model),
        family.left_out_key,
    )


def _grid(patch: Patch, latent_shape: Sequence[int]) -> tuple[int, int, int] | None:
    cells = latent_shape[2:]
    if len(cells) not in (2, 3):
        return None
    time, height, width = (
        math.ceil(extent / step) for extent, step in zip([1, *cells][-3:], patch, strict=True)
    )
    return (time, height, width)
