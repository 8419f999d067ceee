# SPDX-License-Identifier: Apache-2.0
"""What stands beside the video grid in a self-attention sequence: text, and reference images.

Text is before or after the grid and always exact. A reference of the grid's own frame size is more
frames of the grid. A wrong guess does no harm: a call with another number of tokens keeps them in
the order they come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..sparge import TokenGrid

Patch = tuple[int, int, int]


@dataclass(frozen=True)
class OffGrid:
    """Tokens before and after the frames, and reference frames around those of the clip."""

    before: int = 0
    after: int = 0
    first_frames: int = 0
    """Reference frames before the clip: their keys are never dropped."""
    last_frames: int = 0

    def around(self, grid: tuple[int, int, int]) -> TokenGrid:
        frames, height, width = grid
        frames += self.first_frames + self.last_frames
        return TokenGrid(frames, height, width, self.before, self.after, self.first_frames)


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """What the model is given: its token grid and patch, text (batch, tokens, width), the rest."""

    grid: tuple[int, int, int]
    patch: Patch
    context: Any
    extras: Mapping[str, Any]

    @property
    def text(self) -> int:
        return _length(self.context)

    def length(self, name: str) -> int:
        """Tokens of a further input (batch, tokens, width), 0 when it is not given."""
        return _length(self.extras.get(name))

    def latents(self, name: str) -> Sequence[Tensor]:
        found = self.extras.get(name)
        if found is None:
            return ()
        return found if isinstance(found, list | tuple) else (found,)

    def frames_in(self, latent: Tensor) -> int | None:
        """Frames of a latent whose frames are as large as the grid's; None for another size."""
        cells = (1, *latent.shape[2:])[-3:]
        time, height, width = (math.ceil(c / p) for c, p in zip(cells, self.patch, strict=True))
        return time if (height, width) == self.grid[1:] else None


def nothing(model: Any, inputs: ModelInputs) -> OffGrid:
    return OffGrid()


def text_first(model: Any, inputs: ModelInputs) -> OffGrid:
    return OffGrid(before=inputs.text)


def mochi(model: Any, inputs: ModelInputs) -> OffGrid:
    """The prompt's real tokens, without its padding."""
    return OffGrid(after=int(inputs.extras.get("num_tokens", inputs.text)))


def wan(model: Any, inputs: ModelInputs) -> OffGrid | None:
    """No text; a reference frame before the clip, further latents behind it."""
    first = inputs.latents("reference_latent") if getattr(model, "ref_conv", None) else ()
    last = [*inputs.latents("time_dim_concat"), *inputs.latents("context_latents")]
    return _with_frames(inputs, first, last)


def hunyuan(model: Any, inputs: ModelInputs) -> OffGrid | None:
    """Up to three text encoders before the clip, then a reference."""
    text = inputs.text + inputs.length("txt_byt5") + inputs.length("clip_fea")
    return _with_frames(inputs, inputs.latents("ref_latent"), (), before=text)


def flux(model: Any, inputs: ModelInputs) -> OffGrid | None:
    """Text first; the images to edit last."""
    return _with_frames(inputs, (), inputs.latents("ref_latents"), before=inputs.text)


def _with_frames(
    inputs: ModelInputs, first: Sequence[Tensor], last: Sequence[Tensor], before: int = 0
) -> OffGrid | None:
    """None where a reference is of another size: its tokens are image, and not to be exact."""
    first_frames = [inputs.frames_in(latent) for latent in first]
    last_frames = [inputs.frames_in(latent) for latent in last]
    if None in first_frames or None in last_frames:
        return None
    return OffGrid(before, 0, sum(filter(None, first_frames)), sum(filter(None, last_frames)))


def _length(value: Any) -> int:
    return value.shape[1] if isinstance(value, Tensor) and value.ndim > 1 else 0
