# SPDX-License-Identifier: Apache-2.0
"""Padding masks turned into what attention takes: the real keys first, and how many they are.

padding = sparge.key_padding(mask)              # waits for the GPU
k, v, key_lengths = padding.apply(k, v)
out = sparge.attention(q, k, v, policy, key_lengths=key_lengths)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks.argument import check_tensor
from .checks.validate import as_heads_first
from .compiling import being_recorded
from .errors import Unsupported
from .reasons import Reason
from .weak_cache import WeakTensorCache

#: Additive mask values at or below this hide a key: no logit makes up for it.
HIDDEN = -1e4
#: Reason of a call whose mask nobody can read; what it hides may change between runs of the graph.
CAPTURED = Reason(
    "a mask in a CUDA graph that is captured, where nobody can read what it hides", "graph"
)


@dataclass(frozen=True, eq=False)
class KeyPadding:
    """Real keys of a padding mask (B, N). Where all keys are real, both tensors are None."""

    tokens: int
    """Number N of keys of each batch entry, real or not."""
    key_lengths: Tensor | None = None
    """(B,) int32: real keys of each entry; `apply` gives those for attention."""
    index: Tensor | None = None
    """(B, most real keys) int64: the places of the real keys, in order; None where they come first.
    Entries with fewer are filled up with places that `key_lengths` cuts off."""

    def apply(
        self, k: Tensor, v: Tensor, layout: str = "HND"
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns k, v and key_lengths for attention, k and v with the real keys first.

        They are copied only where there are holes; keys have other places then. So key_lengths are
        (B, 1) in place of (B,), which causal calls and token orders refuse.

        Raises:
            ValueError: the mask is of another number of keys, or of other batch entries.
        """
        by_head = [as_heads_first(name, x, layout) for name, x in (("k", k), ("v", v))]
        lengths, batch = self.key_lengths, k.shape[0]
        entries = batch if lengths is None else lengths.shape[0]
        for x in by_head:
            if x.shape[2] != self.tokens or entries not in (1, x.shape[0]):
                raise ValueError(
                    f"k and v hold {x.shape[2]} keys of {x.shape[0]} batch entries; the mask is of "
                    f"{self.tokens} keys of {entries}: they must agree."
                )
        if lengths is None:
            return k, v, None
        if lengths.device != k.device:
            raise ValueError(f"The mask is on {lengths.device}; put it on {k.device}, as k is.")
        lengths = lengths.expand(batch).contiguous()
        if self.index is None:
            return k, v, lengths
        entry = torch.arange(batch, device=k.device).unsqueeze(1)
        tokens_first = (x[entry, :, self.index.expand(batch, -1)] for x in by_head)
        k, v = (x.transpose(1, 2) if layout == "HND" else x for x in tokens_first)
        return k, v, lengths.unsqueeze(1)


def key_padding(mask: Tensor) -> KeyPadding:
    """Reads the real keys off `mask`: (B, N), not torch's (Nq, Nk), or (B, 1, 1, N), or (B, H, Nq,
    N) with equal rows, or (B, 1, N, N) that is padding times padding; bool, True for real keys, or
    floating point to be added to logits, 0 for them.

    In padding times padding a token that is hidden as a key asks for nothing either: queries of
    padding then see the real keys, where torch gives their rows NaN, zeros or the mean of `v`.

    It waits for the mask's device, and is not read again while the same object comes and PyTorch
    counts no change of it. A mask on the CPU, or made in torch.inference_mode(), is read each time,
    as its changes do not show. A write on the GPU that PyTorch does not count, by `.data` or a
    kernel of one's own, goes unseen here: then give attention the `key_lengths` yourself.

    Raises:
        Unsupported: the mask is more than padding: queries or heads differ, a value is neither 0
            nor hides its key, or an entry has no real key and values that dense attention would
            weigh against each other; or a CUDA graph is captured.
        ValueError: it is no such tensor.
    """
    check_tensor("mask", mask, "bool or floating point, (B, N) or (B, 1, 1, N)")
    if being_recorded(mask.device):
        raise Unsupported(CAPTURED)
    found = _paddings.get(mask)
    if found is None:
        found = _paddings.add(mask, _read(mask))
    if isinstance(found, str):
        raise Unsupported(found)
    return found


def torch_mask_padding(mask: Tensor) -> KeyPadding:
    """Padding of a mask of torch's own attention, whose dimensions are the last of (B, H, Nq, N),
    so that two are (Nq, N).

    It is of what the mask holds when the GPU comes to the call, whoever wrote that: its real keys
    are found on its device. A bool row of keys for each batch entry can be nothing but padding, so
    the host does not wait for it. Whether another mask is padding is read as `key_padding` reads
    it, which raises the same.
    """
    if mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    rows = as_rows(mask)
    if mask.dtype != torch.bool or rows.shape[1] * rows.shape[2] > 1:
        key_padding(mask)
    real = is_real(rows.amax((1, 2)))
    return KeyPadding(real.shape[1], real.sum(1, dtype=torch.int32), real_first(real))


#: Padding of each mask, or the reason why it is more than padding.
_paddings: WeakTensorCache[KeyPadding | str] = WeakTensorCache()


def _read(mask: Tensor) -> KeyPadding | str:
    one, fits, _ = row_of_keys(as_rows(mask))
    added = mask.dtype != torch.bool
    real = is_real(one)
    known = real | (one <= HIDDEN) if added else torch.ones_like(one)
    finite_hidden = one.isfinite() & ~real if added else torch.zeros_like(one)
    lengths = real.sum(1, dtype=torch.int32)
    first = torch.arange(one.shape[1], device=mask.device) < lengths.unsqueeze(1)
    empty = lengths == 0
    facts = torch.stack([
        fits,
        known.all(),
        (empty & finite_hidden.any(1)).any(),
        real.all(),
        (real == first).all(),
        lengths.max(),
    ])  # fmt: skip
    same, only_padding, weighed, all_real, in_front, most = facts.tolist()  # the only wait
    if not only_padding:
        return (
            f"The mask has values other than 0 (a real key) and {HIDDEN:g} or less (a hidden one): "
            "it weighs keys and is no padding of them. Stay dense."
        )
    if not same:
        return (
            f"The mask {tuple(mask.shape)} hides other keys from some queries or heads than from "
            "others: it is no padding of keys. Stay dense."
        )
    if weighed:
        return (
            "A batch entry of the mask has no real key, and its values are finite: dense attention "
            "then attends to the padding. Stay dense, or leave the entry out."
        )
    tokens = one.shape[1]
    if all_real:
        return KeyPadding(tokens)
    if in_front:
        return KeyPadding(tokens, lengths)
    return KeyPadding(tokens, lengths, real_first(real)[:, : max(1, most)].contiguous())


def row_of_keys(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row (B, N) of keys of a mask (B, H, Nq, N), and on its device whether the mask is no more
    than that row: it is the same for each query and head, or, in padding times padding, for each
    query that it does not hide as a key. The last says whether it hides such queries."""
    keys = rows.amax((1, 2))
    same = (rows.amin((1, 2)) == keys).all()
    if rows.shape[1] > 1 or rows.shape[2] != rows.shape[3]:
        return keys, same, torch.zeros_like(same)
    real, own = is_real(rows), is_real(keys)
    places, times = real.sum(), own.sum(1).square().sum()
    hidden = rows.numel() - places if rows.dtype == torch.bool else (rows <= HIDDEN).sum()
    of_both = (real.any(-1)[:, 0] == own).all() & (places == times)
    of_both = of_both & (places + hidden == rows.numel())
    return keys, same | of_both, of_both & ~same


def is_real(row: Tensor) -> Tensor:
    """Which places of a padding mask are real."""
    return row if row.dtype == torch.bool else row == 0


def real_first(real: Tensor) -> Tensor:
    """Places (B, N) of all keys, real ones first and in their order."""
    return (~real).to(torch.uint8).argsort(dim=1, stable=True)


def as_rows(mask: Tensor) -> Tensor:
    """(B, H, Nq, N) view of a mask, dimensions that it is expanded along cut to 1."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"mask is {mask.dtype}; give bool (True for real keys, say mask != 0) or floating "
            "point to be added to logits."
        )
    if mask.dim() not in (2, 4) or 0 in mask.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; it takes (B, N) or (B, 1, 1, N), a row of keys "
            "for each batch entry."
        )
    if mask.dim() == 2:
        return mask[:, None, None]
    for axis in (1, 2):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask
