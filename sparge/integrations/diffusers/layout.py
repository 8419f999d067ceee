# SPDX-License-Identifier: Apache-2.0
"""Transformers of diffusers: their blocks, and the tokens of one forward pass.

ROWS has what a forward pass does not say, by the name of the class: the token grid, and whether
text stands before or after it. A model without a row works too; its tokens are then all alike to
the policy, text among them, and the line says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...order.grid import TokenGrid
from ...reasons import Reason
from ...session import TextPosition, TokenLayout

#: Attributes that hold the blocks: one list, or one of double-stream and one of single-stream ones.
BLOCK_LISTS = (
    *("transformer_blocks", "single_transformer_blocks", "blocks"),
    *("layers", "visual_transformer_blocks"),
)
NO_ROW = "{name} is not known here: its tokens stay in the order they come, and text is not exact"
RING = Reason("several GPUs share the model's sequence in a ring: take ulysses_degree")
#: Multiple to which Z-Image fills up picture and text.
_Z_IMAGE_FILLS_TO = 32


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Blocks of a model, in the order they run, and behind them those of further lists that hold
    attention, such as the control blocks of Wan VACE; none where no list has a usual name."""
    lists = {name: each for name, each in model.named_children() if isinstance(each, nn.ModuleList)}
    usual = [name for name in BLOCK_LISTS if name in lists]
    others = [name for name, each in lists.items() if name not in usual and _attends(each)]
    return [block for name in (*usual, *others) for block in lists[name]] if usual else []


def parts_of(model: nn.Module) -> list[tuple[int | None, nn.Module]]:
    """Parts of a model in which attention runs, with the number of each block, and None for what
    attends beside the blocks; 0 for all parts of a model whose blocks are not known."""
    blocks = blocks_of(model)
    parts = list(_topmost(model))
    if not blocks:
        return [(0, part) for part in parts]
    beside = [part for part in parts if part not in blocks and _attends(part)]
    return [*enumerate(blocks), *((None, part) for part in beside)]


def _attends(module: nn.Module) -> bool:
    names = (type(part).__name__.lower() for part in module.modules())
    return any("attention" in name or "attn" in name for name in names)


def _topmost(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that a model calls itself. Lists are not called, but what is in them."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _topmost(child)
        else:
            yield child


def ranks_of(model: Any) -> tuple[int, Reason | None]:
    """Number of processes that share the tokens of a model, by diffusers' ContextParallelConfig,
    and why they cannot be served. Each measures and chooses for its own heads."""
    parallel = getattr(model, "_parallel_config", None)
    config = getattr(parallel, "context_parallel_config", None)
    if config is None:
        return 1, None
    return config.ulysses_degree, RING if config.ring_degree > 1 else None


def layout_of(
    model: Any, given: Mapping[str, Any], blocks: int | None, ranks: int = 1
) -> TokenLayout:
    """Layout of a pass. given: arguments of the forward pass by name; blocks: number of the
    model's, None where it has none that are known here."""
    name, row = type(model).__name__, row_of(model)
    layout = TokenLayout(blocks=blocks, prompts=_prompts(given), ranks=ranks)
    if row is None:
        return replace(layout, family=name, remark=Reason(NO_ROW.format(name=name)))
    layout = replace(layout, family=row.name, text=row.text)
    grid = row.grid(model.config, given)
    if grid is None:
        return layout
    text = 0 if row.text is TextPosition.NONE else row.text_tokens(given)
    ends = {TextPosition.FIRST: {"prefix": text}, TextPosition.LAST: {"suffix": text}}
    sound = given.get("audio_hidden_states")
    return replace(
        layout,
        grid=(grid.frames, grid.height, grid.width),
        tokens=replace(grid, **ends.get(row.text, {})),
        context=text,
        beside=frozenset(() if sound is None else sound.shape[1:2]),
    )


def _text(given: Mapping[str, Any]) -> int:
    """Number of tokens of text (batch, tokens, width)."""
    text = given.get("encoder_hidden_states")
    return text.shape[1] if isinstance(text, Tensor) and text.ndim == 3 else 0


def _texts_and_image(given: Mapping[str, Any]) -> int:
    """HunyuanVideo 1.5: tokens of two text encoders and of an image encoder."""
    names = ("encoder_hidden_states", "encoder_hidden_states_2", "image_embeds")
    return sum(given[name].shape[1] for name in names)


def _padded_text(given: Mapping[str, Any]) -> int:
    """Z-Image: list of (tokens, width), each filled up with tokens that are attended to."""
    return _filled_up(max(map(len, given["cap_feats"])))


def _filled_up(tokens: int) -> int:
    return tokens + -tokens % _Z_IMAGE_FILLS_TO


def _prompts(given: Mapping[str, Any]) -> frozenset[int]:
    """Lengths of the sequences (batch, tokens, width) that a model is given beside its latent.
    Allegro's text has a dimension more; Cosmos 2.5 has text and an image in a tuple."""
    beside = {name: x for name, x in given.items() if name not in ("hidden_states", "x")}
    text = beside.get("encoder_hidden_states")
    each = [part for x in beside.values() for part in (x if isinstance(x, tuple) else (x,))]
    found = (x.shape[-2] for x in each if isinstance(x, Tensor) and x.ndim == 3)
    return frozenset([*found, *(text.shape[-2:-1] if isinstance(text, Tensor) else ())])


def _latent(config: Any, given: Mapping[str, Any]) -> TokenGrid:
    """Grid of a latent (batch, channels, time, height, width), or of one without time."""
    return _patches(config, *(1, *given["hidden_states"].shape[2:])[-3:])


def _patches(config: Any, *cells: int) -> TokenGrid:
    patch = config.patch_size
    if isinstance(patch, int):
        patch = getattr(config, "patch_size_t", None) or 1, patch, patch
    return TokenGrid(*(cell // size for cell, size in zip(cells, patch, strict=True)))


def _cogvideox(config: Any, given: Mapping[str, Any]) -> TokenGrid:
    """Latent (batch, time, channels, height, width); no patches along time before version 1.5."""
    _, time, _, height, width = given["hidden_states"].shape
    return _patches(config, time, height, width)


def _kandinsky(config: Any, given: Mapping[str, Any]) -> TokenGrid | None:
    """Latent (batch, time, height, width, channels). NABLA has an order of its own."""
    is_nabla = given.get("sparse_params") is not None
    return None if is_nabla else _patches(config, *given["hidden_states"].shape[1:4])


def _z_image(config: Any, given: Mapping[str, Any]) -> TokenGrid | None:
    """List of latents (channels, time, height, width), each filled up as the text is."""
    latents = given["x"]
    if len({latent.shape for latent in latents}) > 1:
        return None
    patch = given.get("patch_size", 2)
    time, height, width = latents[0].shape[1:]
    grid = time // given.get("f_patch_size", 1), height // patch, width // patch
    return _first_of(_filled_up(math.prod(grid)), *grid)


def _first_of(tokens: int, *grid: int) -> TokenGrid:
    """Grid whose tokens are the first of so many."""
    return TokenGrid(*grid, tail=tokens - math.prod(grid))


def _ltx(config: Any, given: Mapping[str, Any]) -> TokenGrid | None:
    """Latent in tokens (batch, tokens, channels), of a grid that the pipeline names. None with
    tokens of a condition, which stand before it."""
    found = _ltx_2(config, given)
    return found if found is not None and not found.tail else None


def _ltx_2(config: Any, given: Mapping[str, Any]) -> TokenGrid | None:
    """Latent in tokens as `_ltx` has it; tokens of a condition stand behind it."""
    grid = [given.get(name) or 0 for name in ("num_frames", "height", "width")]
    tokens = given["hidden_states"].shape[1]
    return _first_of(tokens, *grid) if 0 < math.prod(grid) <= tokens else None


def _qwen_image(config: Any, given: Mapping[str, Any]) -> TokenGrid | None:
    """Picture in tokens, whose sizes `img_shapes` has for each entry of the batch: that of the
    picture, then those of images to edit or of further layers, which stand behind it."""
    shapes = given.get("img_shapes")
    if not shapes:
        return None
    grid = shapes[0][0] if isinstance(shapes[0], list) else shapes[0]
    return _first_of(given["hidden_states"].shape[1], *grid)


def _flux(config: Any, given: Mapping[str, Any]) -> TokenGrid | None:
    """Picture in tokens; `img_ids` (tokens, 3 or 4) names image, row and column of each. An image
    to edit has a larger number and stands behind the picture. Waits for the device of the ids."""
    ids, tokens = given.get("img_ids"), given["hidden_states"].shape[1]
    if not isinstance(ids, Tensor):
        return None
    number, row, column = (ids if ids.ndim == 2 else ids[0])[:, :3].long().cpu().T
    own = number == number.min()
    height, width = int(row[own].max()) + 1, int(column[own].max()) + 1
    picture = torch.arange(height * width)
    whole = torch.equal((row * width + column)[own], picture) and own[: len(picture)].all()
    whole = whole and len(picture) <= tokens
    return _first_of(tokens, 1, height, width) if whole else None


@dataclass(frozen=True)
class Row:
    """Facts of one class. name is for the user; `grid` gives None for inputs that it does not
    know, from the model's configuration and the arguments of its forward pass by name."""

    name: str
    text: TextPosition
    grid: Callable[[Any, Mapping[str, Any]], TokenGrid | None] = _latent
    """The grid, and as its tail what stands behind it and is no text."""
    text_tokens: Callable[[Mapping[str, Any]], int] = _text


_FIRST, _LAST, _NONE = TextPosition.FIRST, TextPosition.LAST, TextPosition.NONE

ROWS: Mapping[str, Row] = {
    "CogVideoXTransformer3DModel": Row("CogVideoX", _FIRST, _cogvideox),
    "MochiTransformer3DModel": Row("Mochi", _LAST),
    "WanTransformer3DModel": Row("Wan", _NONE),
    "HunyuanVideoTransformer3DModel": Row("HunyuanVideo", _LAST),
    "LTXVideoTransformer3DModel": Row("LTX", _NONE, _ltx),
    "FluxTransformer2DModel": Row("Flux", _FIRST, _flux),
    "SD3Transformer2DModel": Row("SD3", _LAST),
    "AllegroTransformer3DModel": Row("Allegro", _NONE),
    "WanVACETransformer3DModel": Row("Wan VACE", _NONE),
    "WanAnimateTransformer3DModel": Row("Wan Animate", _NONE),
    "SkyReelsV2Transformer3DModel": Row("SkyReels V2", _NONE),
    "ChronoEditTransformer3DModel": Row("ChronoEdit", _NONE),
    "CosmosTransformer3DModel": Row("Cosmos", _NONE),
    "Kandinsky5Transformer3DModel": Row("Kandinsky 5", _NONE, _kandinsky),
    "LTX2VideoTransformer3DModel": Row("LTX-2", _NONE, _ltx_2),
    "HunyuanVideo15Transformer3DModel": Row(
        "HunyuanVideo 1.5", _LAST, text_tokens=_texts_and_image
    ),
    "Flux2Transformer2DModel": Row("Flux 2", _FIRST, _flux),
    "ChromaTransformer2DModel": Row("Chroma", _FIRST, _flux),
    "QwenImageTransformer2DModel": Row("Qwen-Image", _FIRST, _qwen_image),
    "ZImageTransformer2DModel": Row("Z-Image", _LAST, _z_image, text_tokens=_padded_text),
}


def row_of(model: object) -> Row | None:
    """Row of a model; None where it has none. Subclasses inherit their parent's."""
    names = (cls.__name__ for cls in type(model).__mro__)
    return next((ROWS[name] for name in names if name in ROWS), None)
