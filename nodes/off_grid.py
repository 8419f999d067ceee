# SPDX-License-Identifier: Apache-2.0
"""Tokens beside the video grid in a self-attention sequence: text, and reference images.

Text is before or after the grid and always exact. A reference of the grid's own frame size is more
frames of the grid. One of another size is exact before the grid, and after it keeps its tokens in
the order they come. A wrong guess does no harm: whatever the order, each token is itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    tail: int = 0
    """Tokens behind the frames that lie on no grid of theirs."""
    loose_frames: int = 0
    """Last frames of the grid, of which the model may leave tokens out."""
    columns: int = 0
    """Columns of tokens to the right of the clip, of an image that lies there."""

    def around(self, grid: tuple[int, int, int]) -> TokenGrid:
        frames, height, width = grid
        frames += self.first_frames + self.last_frames
        width += self.columns
        return TokenGrid(
            frames, height, width, self.before, self.after, self.first_frames, self.tail
        )


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Inputs of the model: its token grid and patch, text (batch, tokens, width), the rest."""

    grid: tuple[int, int, int]
    patch: Patch
    context: Any
    extras: Mapping[str, Any]

    @property
    def text(self) -> int:
        return length(self.context)

    def length(self, name: str) -> int:
        """Number of tokens of a further input (batch, tokens, width), 0 when it is not given."""
        return length(self.extras.get(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a further input; () when it is not given."""
        found = self.extras.get(name)
        return tuple(found.shape) if isinstance(found, Tensor) else ()

    def latents(self, name: str, padded: bool = True) -> list[Patch]:
        """Tokens along (time, height, width) of each latent of a further input. padded: a patch
        that the latent fills in part counts."""
        found = self.extras.get(name)
        if found is None:
            return []
        several = found if isinstance(found, list | tuple) else (found,)
        return [in_patches(latent.shape[2:], self.patch, padded) for latent in several]

    def around(self, first: Sequence[Patch], last: Sequence[Patch], before: int = 0) -> OffGrid:
        """Tokens off the grid: text, then latents before the clip and others behind it."""
        if any(size[1:] != self.grid[1:] for size in first):
            before, first = before + sum(map(math.prod, first)), ()
        fitting = 0
        while fitting < len(last) and last[fitting][1:] == self.grid[1:]:
            fitting += 1
        return OffGrid(
            before,
            first_frames=sum(time for time, *_ in first),
            last_frames=sum(time for time, *_ in last[:fitting]),
            tail=sum(map(math.prod, last[fitting:])),
        )


def text_first(model: Any, inputs: ModelInputs) -> OffGrid:
    return OffGrid(before=inputs.text)


def text_last(model: Any, inputs: ModelInputs) -> OffGrid:
    return OffGrid(after=inputs.text)


def pixel_dit(model: Any, inputs: ModelInputs) -> OffGrid:
    """PixelDiT: no more of the prompt than the model has places for."""
    return OffGrid(before=min(inputs.text, model.txt_max_length))


def mochi(model: Any, inputs: ModelInputs) -> OffGrid:
    """Mochi: the prompt's real tokens, without its padding."""
    return OffGrid(after=int(inputs.extras.get("num_tokens", inputs.text)))


def wan(model: Any, inputs: ModelInputs) -> OffGrid:
    """Wan: no text; a reference frame before the clip, further latents behind it."""
    has_place = getattr(model, "ref_conv", None) is not None
    first = inputs.latents("reference_latent", padded=False) if has_place else []
    last = [*inputs.latents("time_dim_concat"), *inputs.latents("context_latents")]
    return inputs.around(first, last)


def wan_of_time(model: Any, inputs: ModelInputs) -> OffGrid:
    """Wan with further frames behind the clip alone."""
    return inputs.around((), inputs.latents("time_dim_concat"))


def wan_humo(model: Any, inputs: ModelInputs) -> OffGrid:
    """Wan HuMo and sound to video: the reference behind the clip. What came before it, in sound to
    video, is last."""
    last = inputs.latents("time_dim_concat")
    return inputs.around((), [*last, *inputs.latents("reference_latent", padded=False)])


def wan_scail(model: Any, inputs: ModelInputs) -> OffGrid:
    """Wan SCAIL: references before the clip, all in one latent, and poses behind it, as a rule of
    half its size."""
    last = [*inputs.latents("time_dim_concat"), *inputs.latents("pose_latents")]
    return inputs.around(inputs.latents("reference_latent"), last)


def ltx(model: Any, inputs: ModelInputs) -> OffGrid:
    """LTX: guides are the last frames of the latent; of small ones the model leaves tokens out."""
    shape = inputs.shape("keyframe_idxs")  # (batch, axes, tokens, ends)
    guides = shape[2] if len(shape) > 2 else 0
    frames, height, width = inputs.grid
    return OffGrid(loose_frames=min(frames - 1, guides // (height * width)))


def hunyuan(model: Any, inputs: ModelInputs) -> OffGrid:
    """Hunyuan: up to three text encoders before the clip, then a reference."""
    text = inputs.text + inputs.length("txt_byt5") + inputs.length("clip_fea")
    return inputs.around(inputs.latents("ref_latent"), (), before=text)


def edits_last(model: Any, inputs: ModelInputs) -> OffGrid:
    """Flux, Qwen Image and MageFlow: text first; the images to edit last."""
    return inputs.around((), inputs.latents("ref_latents"), before=inputs.text)


def edits_first(model: Any, inputs: ModelInputs) -> OffGrid:
    """OmniGen2 and Boogu: text, the images to edit, the picture."""
    return inputs.around(inputs.latents("ref_latents"), (), before=inputs.text)


def joy_image(model: Any, inputs: ModelInputs) -> OffGrid:
    """JoyImage: the images to edit behind the picture; text last."""
    return replace(edits_last(model, inputs), before=0, after=inputs.text)


def next_dit(model: Any, inputs: ModelInputs) -> OffGrid:
    """Z-Image and Lumina 2: prompts, what a vision model saw of the images to edit, those, and the
    picture. Z-Image fills up each of them to whole 32 tokens."""
    step = getattr(model, "pad_tokens_multiple", None) or 1
    images = inputs.latents("ref_latents", padded=False)
    before, images_tokens = [inputs.text], list(map(math.prod, images))
    if images:
        prompts = list(map(length, inputs.extras.get("ref_contexts") or ()))
        before += prompts + [1] * (len(images) - len(prompts))
    if images and getattr(model, "siglip_embedder", None) is not None:
        seen = [math.prod(x.shape[1:3]) for x in inputs.extras.get("siglip_feats") or ()]
        seen = seen[: len(images)]
        before += seen + [1] * (len(images) + 1 - len(seen))
    if any(tokens % step for tokens in images_tokens):
        before, images = before + images_tokens, []
    exact = sum(tokens + -tokens % step for tokens in before)
    return replace(inputs.around(images, (), exact), tail=-math.prod(inputs.grid) % step)


def krea(model: Any, inputs: ModelInputs) -> OffGrid:
    """Krea 2: takes images to edit where model or conditioning says how."""
    method = inputs.extras.get("ref_latents_method", getattr(model, "default_ref_method", None))
    return edits_last(model, inputs) if method is not None else text_first(model, inputs)


def minimax(model: Any, inputs: ModelInputs) -> OffGrid:
    """MiniMax H3: text, key frames and references with their sound, the clip's sound, the clip."""
    packed = (inputs.extras.get("minimax_payload") or {}).get("layout")
    return OffGrid(before=packed.segments[-1][0] if packed else inputs.text)


def hidream(model: Any, inputs: ModelInputs) -> OffGrid:
    """HiDream: the image to edit beside the picture; T5's text last, then Llama's last layer and
    the one of this block."""
    llama, image = inputs.shape("encoder_hidden_states_llama3"), inputs.shape("image_cond")
    after = inputs.text + 2 * sum(llama[-2:-1])
    return OffGrid(after=after, columns=sum(image[-1:]) // inputs.patch[2])


def pose_branch(inputs: ModelInputs) -> tuple[TokenGrid, ...]:
    """Branch of Wan Animate 2: sequences of the poses' own frames."""
    return tuple(TokenGrid(*size) for size in inputs.latents("pose_latents") if min(size) > 0)


def refined(inputs: ModelInputs) -> tuple[TokenGrid, ...]:
    """Sequences of the refiners of OmniGen2 and Boogu: the picture, and the images to edit."""
    images = inputs.latents("ref_latents")
    of_images = [TokenGrid(*images[0], tail=sum(map(math.prod, images[1:])))] if images else []
    return (TokenGrid(*inputs.grid), *of_images)


def length(value: Any) -> int:
    """Number of tokens of (batch, tokens, width)."""
    return value.shape[1] if isinstance(value, Tensor) and value.ndim > 1 else 0


def in_patches(cells: Sequence[int], patch: Patch, padded: bool = True) -> Patch:
    """Tokens along (time, height, width) of latent cells along ([time,] height, width)."""
    whole = math.ceil if padded else math.floor
    time, height, width = (whole(c / p) for c, p in zip((1, *cells)[-3:], patch, strict=True))
    return (time, height, width)
