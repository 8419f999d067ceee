# SPDX-License-Identifier: Apache-2.0
"""Token grids: where each token of a video or an image lies, and orders of the tokens.

Kernels take an order's tensors as they lie, so orders are made here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count
from ..checks.argument import check_kind, check_tensor, whole_number
from .variants import VARIANTS, OrderKind, order_ranks, unmeasured_kind

EMPTY = -1  # the token of a slot that holds none


@dataclass(frozen=True)
class TokenGrid:
    """Tokens of one sequence: `prefix` text, a grid in raster order, a `tail`, `suffix` text.

    An image is one frame. Raises ValueError for sizes that no grid has.
    """

    frames: int
    height: int
    width: int
    prefix: int = 0
    """Tokens before the grid, such as text; always exact."""
    suffix: int = 0
    """Tokens at the end; always exact. Key lengths may cut these, and only these."""
    lead_frames: int = 0
    """Frames at the start that form a segment of their own, whose keys are never dropped."""
    tail: int = 0
    """Tokens after the grid that lie on no part of it, such as an image of another size. They form
    a segment of their own in the order they come, and may be dropped as those of the grid are."""

    def __post_init__(self) -> None:
        for part in fields(self):
            least = 1 if part.name in ("frames", "height", "width") else 0
            whole = whole_number(part.name, getattr(self, part.name), least)
            object.__setattr__(self, part.name, whole)
        if self.lead_frames > self.frames:
            raise ValueError(
                f"lead_frames is {self.lead_frames}; the grid has {self.frames} frames to lead."
            )

    @property
    def frame_tokens(self) -> int:
        return self.height * self.width

    @property
    def tokens(self) -> int:
        return self.prefix + self.frames * self.frame_tokens + self.tail + self.suffix


@dataclass(frozen=True)
class Segment:
    """Segment of an order: tokens first_token .. first_token + tokens - 1, from key block
    `first_block` on."""

    first_block: int
    first_token: int
    tokens: int
    keys_exact: bool
    """Whether its key blocks are never dropped."""
    queries_exact: bool
    """Whether its queries drop nothing."""

    @property
    def key_blocks(self) -> int:
        return block_count(self.tokens, KEY_BLOCK)


class OrderFacts(NamedTuple):
    """Plain values of a token order."""

    order_kinds: int
    slots: int
    tokens: int
    least_keys: int | None


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Tokens of a sequence in slots: 64 to a key block, 128 to a query block, some empty at segment
    ends.

    Inside a key block the tokens come first and the empty slots last. There may be several orders
    (`OrderKind`), of which each head takes one (`HeadSettings.order_kind`), the first by default.
    They put other tokens into the slots; which slots are empty and which blocks exact is the same
    for all.
    """

    slot_tokens: Tensor
    """(orders, slots) int32, slots = 64 x key blocks: the token in each slot, -1 where it is
    empty.
    """
    token_slots: Tensor
    """(orders, tokens) int32: the slot of each token."""
    block_counts: Tensor
    """(key_blocks,) int32, tokens in each key block: 1 to 64."""
    keys_exact: Tensor
    """(key_blocks,) bool: key blocks that are never dropped."""
    queries_exact: Tensor
    """(query_blocks,) bool: query blocks that hold a query which drops nothing."""
    least_keys: int | None = None
    """Fewest keys that lengths may leave; None where they may cut none off."""
    segments: tuple[Segment, ...] = ()
    """Empty in an order of a permutation or another sequence: there they are not in one piece."""
    facts: str = field(default="", init=False, repr=False)
    """`OrderFacts` as text."""
    # Not given, so that `replace` makes new ones: copies hold these blocks.
    _copies: dict[torch.device, TokenOrder] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        facts = (self.order_kinds, self.slots, self.tokens, self.least_keys)
        object.__setattr__(self, "facts", repr(facts))

    @property
    def slot_token(self) -> Tensor:
        """(slots,): the token in each slot of the first order."""
        return self.slot_tokens[0]

    @property
    def order_kinds(self) -> int:
        return self.slot_tokens.shape[0]

    @property
    def tokens(self) -> int:
        return self.token_slots.shape[1]

    @property
    def slots(self) -> int:
        return self.slot_tokens.shape[1]

    @property
    def key_blocks(self) -> int:
        return self.block_counts.shape[0]

    @property
    def query_blocks(self) -> int:
        return block_count(self.slots, QUERY_BLOCK)

    @classmethod
    def of_permutation(
        cls, permutation: Tensor, *, exact_prefix: int = 0, exact_suffix: int = 0
    ) -> TokenOrder:
        """Order of your own, on the CPU: slots take the tokens as `permutation` (tokens,) int names
        them, the first and the last of them, as many as are exact, in blocks of their own. Lengths
        of keys do not go with it. Waits for its device. Raises ValueError where it does not name
        every token once, or all of them are exact."""
        named = _checked_permutation("permutation", permutation).cpu()
        between = len(named) - exact_prefix - exact_suffix
        row = TokenGrid(1, 1, between, prefix=exact_prefix, suffix=exact_suffix)
        return _order_of_kinds(row, (OrderKind.ROWS,), 0).taken_from(named.argsort())

    def block_ranges(self, grid: TokenGrid) -> tuple[Tensor, Tensor]:
        """Where the blocks of the first token order, which a `block_mask` is of, lie on its grid:
        (query_blocks, 3, 2) and (key_blocks, 3, 2) int64, the first frame, row and column of a
        block, and those after its last. 0 and 0 in a block without tokens of the grid."""
        if grid.tokens != self.tokens:
            raise ValueError(f"The grid has {grid.tokens} tokens and the order {self.tokens}.")
        empty = 0, -self.slots % QUERY_BLOCK
        token = torch.nn.functional.pad(self.slot_token, empty, value=EMPTY).long() - grid.prefix
        frame, cell = token // grid.frame_tokens, token % grid.frame_tokens
        place = torch.stack([frame, cell // grid.width, cell % grid.width], -1)
        outside = ((frame < 0) | (frame >= grid.frames)).unsqueeze(-1)
        first, end = place.masked_fill(outside, self.tokens), (place + 1).masked_fill(outside, 0)

        def of_blocks(size: int) -> Tensor:
            most = end.unflatten(0, (-1, size)).amax(1)
            return torch.stack([first.unflatten(0, (-1, size)).amin(1).minimum(most), most], -1)

        return of_blocks(QUERY_BLOCK), of_blocks(KEY_BLOCK)[: self.key_blocks]

    def on(self, device: torch.device | str) -> TokenOrder:
        """Copy of this order on `device`, made once: call it before attention is recorded. It lives
        as long as the order."""
        device = torch.device(device)
        if device == self.slot_tokens.device:
            return self
        copy = self._copies.get(device)
        if copy is None:
            tensors = {name: x.to(device) for name, x in vars(self).items() if torch.is_tensor(x)}
            copy = self._copies[device] = replace(self, **tensors)
        return copy

    def of_kind(self, index: int) -> TokenOrder:
        """Order that keeps one of the token orders alone; copies nothing."""
        only = slice(index, index + 1)
        return replace(
            self,
            slot_tokens=self.slot_tokens[only],
            token_slots=self.token_slots[only],
        )

    def taken_from(self, places: Tensor) -> TokenOrder:
        """Order of the same tokens where they stand in another sequence, such as the one that a
        rank sees after an all-to-all (`dealt_places`): the same tokens share the same slots, so
        attention gives the same bits. Waits for the device of `places`.

        places: (tokens,) int, the token of this order that stands at each place of the other
            sequence. Lengths of keys do not go with it: they would cut other tokens.

        Raises:
            ValueError: places do not name every token once.
        """
        taken = _checked_permutation("places", places, self.tokens).to(self.slot_tokens.device)
        place_of = taken.argsort().int()
        moved = place_of[self.slot_tokens.clamp(min=0).long()]
        return replace(
            self,
            slot_tokens=torch.where(self.slot_tokens == EMPTY, EMPTY, moved),
            token_slots=self.token_slots[:, taken].contiguous(),
            least_keys=None,
            segments=(),
        )

    def query_counts(self) -> Tensor:
        """(query_blocks,) int32: queries in each query block."""
        counts = torch.nn.functional.pad(self.block_counts, (0, self.key_blocks % 2))
        return counts.unflatten(0, (-1, 2)).sum(-1, dtype=torch.int32)

    def key_counts(self, key_lengths: Tensor | None, batch: int) -> Tensor:
        """(B, key_blocks) int32: valid keys of each key block. They are its first ones, because key
        lengths cut nothing but the suffix."""
        if key_lengths is None:
            return self.block_counts.expand(batch, -1)
        token = self.slot_token
        valid = (token != EMPTY) & (token < key_lengths.to(token.device).unsqueeze(-1))
        return valid.unflatten(-1, (-1, KEY_BLOCK)).sum(-1, dtype=torch.int32)


def _checked_permutation(name: str, value: Tensor, tokens: int | None = None) -> Tensor:
    """`value` as int64. tokens: how many it names, any number where nothing says so."""
    check_tensor(name, value, "the number of each token, each once")
    whole = torch.arange(value.numel() if tokens is None else tokens, device=value.device)
    if value.is_floating_point() or not torch.equal(value.long().sort().values, whole):
        raise ValueError(
            f"{name} is {value.dtype} of shape {tuple(value.shape)}; give the numbers from 0 to "
            f"{len(whole) - 1}, each once: the tokens in the order that they stand in."
        )
    return value.long()


def grid_order(grid: TokenGrid, variant: int = 0) -> TokenOrder:
    """All token orders of `grid`, cubes first, on the CPU: ceil(n / 64) key blocks a segment.

    variant: its number, below `VARIANTS`. Sampling steps that take other variants make errors that
    do not add up.
    """
    check_kind("grid", grid, TokenGrid, "a TokenGrid")
    variant = whole_number("variant", variant, 0, VARIANTS - 1)
    return _order_of_kinds(grid, tuple(OrderKind), variant)


def unmeasured_order(grid: TokenGrid, variant: int) -> TokenOrder:
    """Order that sampling steps of that variant take where no head is measured, on the CPU."""
    return _order_of_kinds(grid, (unmeasured_kind(variant),), variant)


#: Grids whose orders are kept: a run has one a conditioning, a context window or two.
_KEPT_GRIDS = 8


@lru_cache(maxsize=_KEPT_GRIDS * VARIANTS)
def _order_of_kinds(
    grid: TokenGrid, order_kinds: tuple[OrderKind, ...], variant: int
) -> TokenOrder:
    """Order of `grid` with these token orders, on the CPU."""
    frame, lead = grid.frame_tokens, grid.lead_frames
    walked = [lead * frame, (grid.frames - lead) * frame]
    tokens = [grid.prefix, *walked, grid.tail, grid.suffix]
    exact = [(True, True), (True, False), (False, False), (False, False), (True, True)]
    segments: list[Segment] = []
    first = block = 0
    for count, (keys_exact, queries_exact) in zip(tokens, exact, strict=True):
        if count:
            segments.append(Segment(block, first, count, keys_exact, queries_exact))
            first, block = first + count, block + segments[-1].key_blocks
    slots = np.stack(
        [_token_slot(grid, order_kind, segments, variant) for order_kind in order_kinds]
    )
    return _order(slots, tuple(segments))


def _token_slot(
    grid: TokenGrid, order_kind: OrderKind, segments: list[Segment], variant: int
) -> NDArray[np.int32]:
    """(tokens,): slot of each token. Segments of whole frames are ordered, others stay as they
    come."""
    parts = []
    end_of_grid = grid.prefix + grid.frames * grid.frame_tokens
    for segment in segments:
        if segment.queries_exact or segment.first_token >= end_of_grid:
            rank = np.arange(segment.tokens, dtype=np.int32)
        else:
            frames = segment.tokens // grid.frame_tokens
            rank = order_ranks(order_kind, frames, grid.height, grid.width, variant).ravel()
        parts.append(rank + np.int32(segment.first_block * KEY_BLOCK))
    return np.concatenate(parts)


@lru_cache(maxsize=32)
def raster_order(tokens: int) -> TokenOrder:
    """Order in which tokens stay as they come: slot = token."""
    slots = np.arange(tokens, dtype=np.int32)[None]
    return _order(slots, (Segment(0, 0, tokens, False, False),))


def _order(token_slots: NDArray[np.int32], segments: tuple[Segment, ...]) -> TokenOrder:
    """Makes an order from token_slots (orders, tokens).

    Computed in NumPy: orders are kept, and what torch makes here would follow the default device of
    whoever asks first.
    """
    key_blocks = sum(segment.key_blocks for segment in segments)
    order_kinds, tokens = token_slots.shape
    slot_tokens = np.full((order_kinds, key_blocks * KEY_BLOCK), EMPTY, dtype=np.int32)
    np.put_along_axis(slot_tokens, token_slots, np.arange(tokens, dtype=np.int32)[None], axis=1)
    filled = slot_tokens[0] != EMPTY
    counts = filled.reshape(-1, KEY_BLOCK).sum(-1, dtype=np.int32)
    keys_exact = np.zeros(key_blocks, dtype=bool)
    queries_exact = np.zeros(block_count(key_blocks * KEY_BLOCK, QUERY_BLOCK), dtype=bool)
    blocks_a_row = QUERY_BLOCK // KEY_BLOCK
    for segment in segments:
        end = segment.first_block + segment.key_blocks
        if segment.keys_exact:
            keys_exact[segment.first_block : end] = True
        if segment.queries_exact:
            rows = slice(segment.first_block // blocks_a_row, block_count(end, blocks_a_row))
            queries_exact[rows] = True
    *before, last = segments
    ends_in_text = before and last.queries_exact
    return TokenOrder(
        _real_tensor(slot_tokens),
        _real_tensor(token_slots),
        _real_tensor(counts),
        _real_tensor(keys_exact),
        _real_tensor(queries_exact),
        last.first_token if ends_in_text else tokens,
        segments,
    )


def _real_tensor(array: NDArray[Any]) -> Tensor:
    """Tensor on the CPU, of the array's type. `torch.from_numpy` makes a fake one in a
    `FakeTensorMode`, which the next caller would be given."""
    return torch.from_dlpack(array)


def dealt_places(parts: Sequence[int], ranks: int) -> Tensor:
    """(tokens,) int64: the token of the whole sequence that stands at each place of what a rank
    sees, where an engine deals each part by itself: text 0, picture 0, text 1, picture 1, ...

    parts: numbers of tokens of the parts of the sequence in their order, such as (512, 4096) for
        text and picture; an engine that deals the sequence as one has one.
    ranks: number of ranks that share the sequence. Where it does not divide a part, the first ones
        get a token more, as `torch.tensor_split` has it.
    """
    shares = [part.tensor_split(ranks) for part in torch.arange(sum(parts)).split(list(parts))]
    return torch.cat([share for of_rank in zip(*shares, strict=True) for share in of_rank])


def order_as_dealt(order: TokenOrder, grid: TokenGrid, ranks: int) -> TokenOrder:
    """Order of a grid as ranks see its tokens; of one rank, the order itself. Diffusers deals the
    text before the grid, the grid with its tail, and the text after it, each by itself."""
    # Of one rank nothing is kept here: `_order_of_kinds` lets its orders go.
    return order if ranks == 1 else _as_dealt(order, grid, ranks)


@lru_cache(maxsize=_KEPT_GRIDS * VARIANTS)  # the very object each time, which has copies on devices
def _as_dealt(order: TokenOrder, grid: TokenGrid, ranks: int) -> TokenOrder:
    parts = grid.prefix, grid.tokens - grid.prefix - grid.suffix, grid.suffix
    return order.taken_from(dealt_places(parts, ranks))
