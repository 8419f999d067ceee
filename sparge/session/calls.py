# SPDX-License-Identifier: Apache-2.0
"""Attention calls as frameworks give them, and what becomes of a call whatever its heads do."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import attention
from ..checks.validate import as_heads_first
from ..compiling import being_recorded
from ..errors import Unsupported
from ..head_settings import HeadSettings
from ..order.grid import TokenGrid, TokenOrder
from ..padding import CAPTURED, as_rows, is_real, key_padding, real_first, row_of_keys
from ..policy import EIGHT_BIT_DENSE, SparsePolicy
from ..reasons import Reason
from ..sdpa import RuleOptions
from ..stats import AttentionStats
from ..torch_attention import TorchCall, exact_attention
from ..weak_cache import WeakTensorCache
from .schedule import Settings
from .tokens import TokenLayout

#: Context around allocations that other calls of a layer do without.
Untracked = Callable[[], AbstractContextManager[None]]
#: Dense attention, as whatever was there computes it.
Dense = Callable[[], Tensor]


@dataclass(eq=False, slots=True)
class Call:
    """An attention call, by views of its tensors: q (B, H, N, D), k and v (B, Hkv, M, D), in any
    strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None
    layout: str = "HND"
    """Layout of its result: "HND" (B, H, N, D), "NHD" (B, N, H, D) or "flat" (B, N, H*D)."""
    by_backend: bool = True
    """Whether the framework's own function serves exact calls, which times are of."""
    mask: Tensor | None = None
    key_mask: Tensor | None = None
    """The mask where it may be padding, by its shape."""
    why_exact: Reason | None = None
    """Reason why it is exact whatever it attends to, such as an option that changes its result."""
    reference_tokens: int = 0
    """Image tokens that a model appends after the grid (Flux edits)."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, layout: str, scale: float | None) -> Call:
        """Call of tensors in the layout of the result."""
        q, k, v = (as_heads_first(n, x, layout) for n, x in (("q", q), ("k", k), ("v", v)))
        return cls(q, k, v, scale, layout)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def query_tokens(self) -> int:
        return self.q.shape[2]

    @property
    def key_tokens(self) -> int:
        return self.k.shape[2]

    @property
    def head_count(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def pairs(self) -> int:
        """Number of query-key pairs of all heads and batch entries."""
        return self.q.shape[:-1].numel() * self.k.shape[2]

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def is_timed(self) -> bool:
        """Whether times are of such calls: else a dense one is exact, and nothing is known of how
        long it takes."""
        return self.by_backend and self.mask is None

    @property
    def look(self) -> Hashable:
        """Facts that calls share which look alike: what becomes of them follows from these, from
        their layer and from their pass."""
        q, mask = self.q, self.mask
        return (
            q.shape,
            self.k.shape,
            q.dtype,
            q.device,
            self.by_backend,
            mask is None,
            self.key_mask is None,
            self.why_exact,
            self.reference_tokens,
        )

    @property
    def shares_keys(self) -> bool:
        """Whether several heads read the same keys and values (GQA)."""
        return self.k.shape[1] != self.q.shape[1]

    def result_heads_first(self, out: Tensor) -> Tensor:
        """View (B, H, N, D) of a result. Raises sparge.Unsupported for one of another shape, which
        whatever serves the framework's exact calls may give."""
        out = out.as_subclass(Tensor)
        batch, heads, tokens, head_dim = self.q.shape
        usual = {
            "HND": (batch, heads, tokens, head_dim),
            "NHD": (batch, tokens, heads, head_dim),
            "flat": (batch, tokens, heads * head_dim),
        }[self.layout]
        if tuple(out.shape) != usual:
            raise Unsupported(
                f"dense attention gave {tuple(out.shape)} instead of {usual}", "changed"
            )
        out = out.unflatten(-1, (heads, -1)) if self.layout == "flat" else out
        return out if self.layout == "HND" else out.transpose(1, 2)

    def result(self, out: Tensor) -> Tensor:
        """Result in its layout, from one (B, H, N, D)."""
        if self.layout == "HND":
            return out
        return out.transpose(1, 2) if self.layout == "NHD" else out.transpose(1, 2).flatten(2)

    def exact(self) -> Tensor:
        """Result of PyTorch's own attention."""
        return self.result(
            exact_attention(*self.qkv, scale=self.scale, enable_gqa=self.shares_keys)
        )

    def sparse(
        self,
        policy: SparsePolicy,
        stats: AttentionStats | None = None,
        order: TokenOrder | None = None,
        head_settings: HeadSettings | None = None,
        ruled: RuleOptions | None = None,
    ) -> Tensor:
        """Raises sparge.Unsupported where the library cannot serve the call. ruled: what a rule
        says of it, beside which text stays exact; of blocks without an order, as tokens come."""
        block_mask = None
        if ruled is not None:
            ends = {"exact_prefix": policy.exact_prefix, "exact_suffix": policy.exact_suffix}
            policy = replace(ruled.get("policy") or policy, **ends)
            block_mask, head_settings = ruled.get("block_mask"), ruled.get("head_settings")
            order = ruled.get("order", order if block_mask is None else None)
        out = attention(
            self.q,
            self.k,
            self.v,
            policy,
            layout="HND",
            out_layout="HND" if self.layout == "HND" else "NHD",
            scale=self.scale,
            order=order,
            head_settings=head_settings,
            block_mask=block_mask,
            stats=stats,
        )
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out.flatten(2) if self.layout == "flat" else out

    def as_torchs(self, layer: int, layout: TokenLayout) -> TorchCall:
        """Call as a rule of the caller sees it."""
        grid = layout.sequence(self.query_tokens)
        return TorchCall(*self.qkv, None, 0.0, False, self.scale, self.shares_keys, layer, grid)

    def eight_bit(self) -> Tensor:
        """Result of 8-bit dense attention. Raises sparge.Unsupported likewise."""
        return self.sparse(EIGHT_BIT_DENSE)


class DenseOnce:
    """Dense result of a call in its layout, computed once however often it is asked for."""

    def __init__(self, exact: Dense, eight_bit: Callable[[], Tensor | None]) -> None:
        """exact: by whatever serves the framework's exact calls. eight_bit: by 8-bit dense
        attention; gives None where exact attention is to be."""
        self._exact, self._eight_bit = exact, eight_bit
        self._out: Tensor | None = None
        self.by_eight_bit = False
        """Whether it is that of 8-bit dense attention."""
        self.failure: Exception | None = None
        """Error that `exact` raised: not one of this pack."""

    def result(self) -> Tensor:
        if self._out is None:
            self._out = self._eight_bit()
            self.by_eight_bit = self._out is not None
        if self._out is None:
            try:
                self._out = self._exact()
            except Exception as error:
                self.failure = error
                raise
        return self._out


#: Reason of a dense call with a mask that is no padding of text.
MASK = Reason("attention mask", "mask")
#: Reason of a dense masked call whose batch entries have different numbers of real tokens.
UNEVEN = Reason("attention mask (the prompts of a batch are padded differently)", "uneven")
CROSS_ATTENTION = Reason("cross-attention")
FRAME_BY_FRAME = Reason("the model attends frame by frame, which only mode manual serves", "frames")
#: Remark on sparse calls of a known model whose tokens are not those of its clip.
UNKNOWN_TOKENS = Reason(
    "some calls have other tokens than the video and its text (an image of another size?): those "
    "stay in the order they come, which errs more",
    "tokens",
)
#: Remark on such calls of a model that several GPUs share.
TEXT_NOT_EXACT = Reason(
    "several GPUs share the model, and text was not exact: nobody says where it stands",
    "tokens",
)
#: Remarks on sparse calls of other numbers of queries and keys.
FRAMES_AS_THEY_COME = Reason(
    "the model attends frame by frame: those calls keep their tokens as they come",
    "tokens",
)
PART_AS_IT_COMES = Reason(
    "queries and keys differ in number in some calls (a node adds or merges tokens?): those keep "
    "their tokens as they come, and text among them is not exact",
    "parts kept",
)
DIFFERENT_NUMBERS = Reason(
    "queries and keys differ in number (a node adds or merges tokens?), which only mode manual "
    "serves",
    "parts",
)
FEWER_THAN_A_FRAME = Reason("fewer tokens than a frame has", "beside")


def unknown_options(names: Iterable[str]) -> Reason | None:
    """Reason of a call with options that change its result; None without any."""
    found = ", ".join(names)
    return Reason(f"the model uses an option unknown here ({found})", "own") if found else None


class Kind(enum.Enum):
    """Kinds of attention calls: what attends to what."""

    SELF = enum.auto()
    PART = enum.auto()
    """Self-attention, as far as is known, of other numbers of queries and keys: of some queries, or
    with further keys or merged ones."""
    CROSS = enum.auto()
    """Attention to the prompt, or between the clip and what is sampled beside it."""

    @classmethod
    def of(cls, call: Call, layout: TokenLayout) -> Kind:
        """Kind of a call, by lengths of what the model is given."""
        if call.query_tokens == call.key_tokens:
            return cls.SELF
        others = {layout.context, *layout.prompts, *layout.beside} - {layout.grid_tokens}
        return cls.CROSS if others & {call.query_tokens, call.key_tokens} else cls.PART


@dataclass(eq=False)
class Decision:
    """Decision on calls that look alike, whatever their layer and their heads are like."""

    kind: Kind
    why_exact: Reason | None
    """Why they are exact in every step; None where they may be sparse."""
    tokens: int
    """Tokens of the sequence that they are of."""
    is_of_clip: bool
    """Whether they are of the clip's self-attention or, as some models have it, a part of it: never
    of text or sound alone, nor of the clip attending to text or sound."""
    ends: tuple[int, int]
    """Tokens at either end that stay exact in sparse ones."""
    remarks: tuple[Reason, ...]
    """On sparse ones, for the user."""
    raises: bool = False
    """Whether errors are the caller's; else such a call is dense."""

    @classmethod
    def in_loop(cls, call: Call, layout: TokenLayout) -> Decision:
        """Decision on calls of a loop over sampling steps: they are of the clip's self-attention,
        and what is not is exact."""
        tokens = call.query_tokens
        if call.key_tokens != tokens:
            why = Reason("queries and keys differ in number")
            return cls(Kind.PART, why, tokens, True, (0, 0), (), True)
        grid = layout.sequence(tokens)
        ends = (grid.prefix, grid.suffix) if grid else (0, 0)
        return cls(Kind.SELF, None, tokens, True, ends, (), True)

    @classmethod
    def of(cls, call: Call, layout: TokenLayout, settings: Settings) -> Decision:
        kind, tokens = Kind.of(call, layout), call.query_tokens
        sequence = tokens
        if kind is Kind.PART:
            longer = max(tokens, call.key_tokens)
            sequence = min(longer, layout.grid_tokens or longer)
        alone = tokens in layout.beside and tokens != layout.grid_tokens
        long = min(tokens, call.key_tokens) >= layout.frame_tokens
        return cls(
            kind,
            _why_exact(kind, call, layout, settings),
            sequence,
            kind is not Kind.CROSS and long and not alone,
            *_ends_and_remarks(kind, call, layout),
        )


def _why_exact(kind: Kind, call: Call, layout: TokenLayout, settings: Settings) -> Reason | None:
    """Reason why a call is exact in every step, or None. What the arithmetic cannot serve
    (head_dim, strides, gradients) the library refuses itself, with a reason."""
    if kind is Kind.CROSS:
        return CROSS_ATTENTION
    if call.mask is not None and (kind is not Kind.SELF or call.key_mask is None):
        return MASK
    if call.why_exact is not None:
        return call.why_exact
    # A frame is a part of the clip, which is long.
    queries = call.key_tokens if layout.frame_by_frame else call.query_tokens
    if min(queries, call.key_tokens) < settings.min_tokens:
        least = settings.min_tokens
        return Reason(f"fewer than min_tokens ({least}) tokens", "small", least)
    if kind is Kind.PART and settings.aim is not None:
        return FRAME_BY_FRAME if layout.frame_by_frame else DIFFERENT_NUMBERS
    if call.query_tokens < layout.frame_tokens:
        return FEWER_THAN_A_FRAME  # text or sound alone; text stays exact
    return None


def _ends_and_remarks(
    kind: Kind, call: Call, layout: TokenLayout
) -> tuple[tuple[int, int], tuple[Reason, ...]]:
    known = (layout.remark,) if layout.remark else ()
    if kind is not Kind.SELF:
        part = FRAMES_AS_THEY_COME if layout.frame_by_frame else PART_AS_IT_COMES
        return (0, 0), known or (part,)
    ends = layout.exact_tokens(call.query_tokens, call.reference_tokens)
    if layout.sequence(call.query_tokens) is not None:
        return ends, known
    if any(ends) and layout.ranks > 1:
        return (0, 0), (TEXT_NOT_EXACT, *(known or (UNKNOWN_TOKENS,)))
    return ends, known or (UNKNOWN_TOKENS,)


@dataclass(frozen=True, eq=False)
class RealTokens:
    """Real tokens of a call with a padding mask.

    index (entries, real tokens) and rest (entries, others), int64: their places in the sequence.
    One entry stands for a whole batch.
    """

    index: Tensor
    rest: Tensor
    hides_queries: bool
    """Whether the rest sees nothing, and is 0."""

    def call(self, call: Call) -> Call:
        """Same attention among the real tokens alone, (B, H, S, D) in and out."""
        q, k, v = (_take(x, self.index) for x in call.qkv)
        return replace(call, q=q, k=k, v=v, layout="HND", mask=None, key_mask=None)

    def rows(self, call: Call, out: Tensor) -> Tensor:
        """Rows of the real tokens in a result of `call`, as `self.call` has it."""
        return _take(call.result_heads_first(out), self.index)

    def whole(self, call: Call, real: Call, out: Tensor) -> Tensor:
        """Result of `call`, from that of its real tokens."""
        batch, heads, tokens, head_dim = call.q.shape
        result = call.q.new_empty(batch, tokens, heads, head_dim)
        _put(result, self.index, out)
        if self.hides_queries:
            _put(result, self.rest, result.new_zeros(batch, heads, self.rest.shape[1], head_dim))
        elif self.rest.shape[1]:
            k, v = real.k.to(result.dtype), real.v.to(result.dtype)
            rest = replace(real, q=_take(call.q, self.rest), k=k, v=v)
            _put(result, self.rest, rest.exact())
        return call.result(result.transpose(1, 2))


def may_be_padding(mask: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether a mask may be padding, by its shape: a row of keys, maybe for each head, or as many
    rows as queries. Its dimensions are the last of (B, H, Nq, M); three are without H."""
    if not 2 <= mask.ndim <= 4:
        return False
    *outer, rows, keys = mask.shape
    sizes = q.shape[:1] if mask.ndim == 3 else q.shape[: mask.ndim - 2]
    fits = all(x in (1, size) for x, size in zip(outer, sizes, strict=True))
    return fits and keys == k.shape[2] and rows in (1, q.shape[2])


class ReadMasks:
    """Masks of the self-attention calls of one pass, and the real tokens that they leave.

    The host waits for the mask of each call, so the GPU's queue runs empty there: a model may fill
    it anew between two layers. It does not wait where the same object comes again and PyTorch says
    that nobody changed it, which it says of no tensor that was made in inference mode.
    """

    def __init__(self, known: TokenGrid | None) -> None:
        """known: whole sequence, of which padding is never on the grid; None where that is not
        known."""
        self._known = known
        self._rows: WeakTensorCache[_Row | Reason] = WeakTensorCache()
        self._found: list[tuple[_Row, RealTokens | Reason | None]] = []

    def real_tokens(self, mask: Tensor) -> RealTokens | Reason | None:
        """Real tokens of a call with this mask: None where all tokens are, or why the call stays
        dense. mask: as `may_be_padding` takes it."""
        if being_recorded(mask.device):
            return CAPTURED
        row = self._rows.get(mask)
        if row is None:
            row = self._rows.add(mask, _read(mask))
        if isinstance(row, Reason):
            return row
        for earlier, found in self._found:
            if row.hides_queries == earlier.hides_queries and torch.equal(row.keys, earlier.keys):
                return found
        self._found.append((row, row.real_tokens(self._known, mask.device)))
        return self._found[-1][1]


class _Row(NamedTuple):
    """Row of a mask for each batch entry, on the host."""

    keys: Tensor
    hides_queries: bool
    """Whether what a hidden token asks for is hidden, too."""

    def real_tokens(
        self, known: TokenGrid | None, device: torch.device
    ) -> RealTokens | Reason | None:
        try:
            padding = key_padding(self.keys)
        except (Unsupported, ValueError):
            return MASK
        if padding.key_lengths is None:
            return None
        counts = padding.key_lengths.tolist()
        real = is_real(self.keys)
        if known is not None:
            of_grid = slice(known.prefix, known.tokens - known.suffix)
            if real.shape[-1] != known.tokens or not real[:, of_grid].all():
                return MASK
        if min(counts) != max(counts):
            return UNEVEN
        if not counts[0]:
            return MASK
        places = real_first(real).to(device)
        return RealTokens(places[:, : counts[0]], places[:, counts[0] :], self.hides_queries)


def _read(mask: Tensor) -> _Row | Reason:
    """Row of a mask, or why it is no padding. Waits for its device."""
    try:
        rows = as_rows(mask if mask.dim() == 4 else mask[(None,) * (3 - mask.dim())][:, None])
    except ValueError:
        return MASK
    if rows.shape[1] > 1 and rows.shape[2] > 1:
        return MASK
    keys, *facts = row_of_keys(rows)
    told = torch.stack(facts).to(keys.dtype).expand(keys.shape[0], 2)
    read = torch.cat([keys, told], 1).cpu()
    return _Row(read[:, :-2], bool(read[0, -1])) if read[0, -2] else MASK


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Takes rows: (B, H, n, D) of (B, H, N, D)."""
    if places.shape[0] == 1:
        return x.index_select(2, places[0])
    entry = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x[entry, :, places].transpose(1, 2)


def _put(result: Tensor, places: Tensor, rows: Tensor) -> None:
    """Writes rows (B, H, n, D) into result (B, N, H, D)."""
    rows = rows.transpose(1, 2).to(result.dtype)
    if places.shape[0] == 1:
        result[:, places[0]] = rows
        return
    result[torch.arange(result.shape[0], device=result.device).unsqueeze(1), places] = rows
