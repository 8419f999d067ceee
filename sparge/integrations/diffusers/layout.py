# SPDX-License-Identifier: Apache-2.0
"""Layout of one forward pass of a transformer of diffusers, and its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ...order.grid import TokenGrid
from ...session import TextPosition, TokenLayout
from .rows import Row, Tokens

#: Attributes that hold the blocks: one list, or one of double-stream and one of single-stream ones.
BLOCK_LISTS = ("transformer_blocks", "single_transformer_blocks", "blocks")
NO_ROW = "{name} is not known here: its tokens stay in the order they come, and text is not exact"


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
    parts = list(topmost(model))
    if not blocks:
        return [(0, part) for part in parts]
    beside = [part for part in parts if part not in blocks and _attends(part)]
    return [*enumerate(blocks), *((None, part) for part in beside)]


def _attends(module: nn.Module) -> bool:
    names = (type(part).__name__.lower() for part in module.modules())
    return any("attention" in name or "attn" in name for name in names)


def topmost(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that a model calls itself. Lists are not called, but what is in them."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from topmost(child)
        else:
            yield child


def layout_of(
    model: Any, row: Row | None, given: Mapping[str, Any], blocks: int | None
) -> TokenLayout:
    """Layout of a pass. given: arguments of the forward pass by name; blocks: number of the
    model's, None where it has none that are known here."""
    if row is None:
        name = type(model).__name__
        remark = NO_ROW.format(name=name)
        return TokenLayout(family=name, blocks=blocks, remark=remark, prompts=_prompts(given))
    tokens = row.tokens(model.config, given)
    if tokens is None:
        prompts = _prompts(given)
        return TokenLayout(family=row.name, text=row.text, blocks=blocks, prompts=prompts)
    return TokenLayout(
        family=row.name,
        text=row.text,
        grid=tokens.grid,
        tokens=_sequence(row, tokens),
        blocks=blocks,
        heads=model.config.num_attention_heads,
        context=tokens.text,
        prompts=_prompts(given),
        masked=tokens.masked,
    )


def _prompts(given: Mapping[str, Any]) -> frozenset[int]:
    """Lengths of the sequences (batch, tokens, width) that a model is given beside its latent.
    Allegro's text has a dimension more."""
    beside = {name: x for name, x in given.items() if name not in ("hidden_states", "x")}
    text = beside.get("encoder_hidden_states")
    found = (x.shape[-2] for x in beside.values() if isinstance(x, Tensor) and x.ndim == 3)
    return frozenset([*found, *(text.shape[-2:-1] if isinstance(text, Tensor) else ())])


def _sequence(row: Row, tokens: Tokens) -> TokenGrid:
    before = tokens.text if row.text is TextPosition.FIRST else 0
    after = tokens.text if row.text is TextPosition.LAST else 0
    return TokenGrid(*tokens.grid, prefix=before, suffix=after, tail=tokens.tail)
