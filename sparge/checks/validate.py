# SPDX-License-Identifier: Apache-2.0
"""Checks of a caller's arguments, in this one place. Everything below it trusts them."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count
from ..errors import Unsupported
from .argument import check_tensor, number, shown

MAX_HEAD_DIM = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Most tokens of a call: kernels count the pairs of a query block in 32 bits.
MOST_TOKENS = 2**32 // QUERY_BLOCK - 1
LAYOUTS = {"HND": "(B, H, N, D)", "NHD": "(B, N, H, D)"}
#: Alignments. "top-left": query i sees keys 0..i. "bottom-right": the last query sees the last key.
#: They differ by the whole past of a sequence: with a cache of 600 keys one query sees key 0 alone,
#: or all of them. So a caller with other numbers of keys than queries says which.
Alignment = Literal["top-left", "bottom-right"]


def as_heads_first(name: str, tensor: Tensor, layout: str) -> Tensor:
    """Returns a (B, H, N, D) view. Raises ValueError for a wrong rank or layout name."""
    check_layout("layout", layout)
    check_tensor(name, tensor, LAYOUTS[layout])
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; layout {layout} takes {LAYOUTS[layout]}."
        )
    return tensor if layout == "HND" else tensor.transpose(1, 2)


def check_layout(name: str, layout: str) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"{name} is {shown(layout)}; it takes 'HND' for (B, H, N, D) or 'NHD'.")


def check_pair(q: Tensor, k: Tensor, name: str = "k") -> None:
    """Checks q (B, H, Nq, D) against k or v (B, Hkv, Nk, D)."""
    for label, tensor in (("q", q), (name, k)):
        if tensor.dtype not in DTYPES:
            raise Unsupported(
                f"{label} is {tensor.dtype}; bfloat16, float16 and float32 are supported.",
                "dtype",
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise Unsupported(
                f"{label}'s last dimension has stride {tensor.stride(-1)}; it must be contiguous "
                "(the other dimensions may have any strides): call .contiguous() first.",
                "own",
            )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"q {tuple(q.shape)} or {name} {tuple(k.shape)} has an empty dimension.")
    if q.device != k.device:
        raise ValueError(f"q is on {q.device} and {name} on {k.device}; put them on one device.")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q is (B, H, N, D) = {tuple(q.shape)} and {name} {tuple(k.shape)}: B and D must be "
            "equal, and q's heads a multiple of the others'."
        )
    if q.shape[-1] > MAX_HEAD_DIM:
        sentence = f"head_dim is {q.shape[-1]}; up to {MAX_HEAD_DIM} is supported."
        raise Unsupported(sentence, "own")
    if q.shape[2] > MOST_TOKENS or k.shape[2] > MOST_TOKENS:
        raise Unsupported(
            f"The call has {q.shape[2]} queries and {k.shape[2]} keys; up to {MOST_TOKENS} of each "
            "are supported."
        )


def check_values(k: Tensor, v: Tensor) -> None:
    """Checks v against k. Torch's own attention takes values of another width, so that is
    Unsupported and no mistake of the caller."""
    if v.shape[:-1] == k.shape[:-1] and v.shape[-1] != k.shape[-1]:
        raise Unsupported(
            f"v has head_dim {v.shape[-1]} and k {k.shape[-1]}: they must be equal here."
        )
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}: they must agree.")


def check_key_lengths(key_lengths: Tensor | None, q: Tensor) -> None:
    if key_lengths is None:
        return
    check_tensor("key_lengths", key_lengths, f"int32 of shape ({q.shape[0]},)")
    shape = (q.shape[0], 1) if key_lengths.dim() == 2 else (q.shape[0],)
    if key_lengths.shape != shape or key_lengths.dtype != torch.int32:
        raise ValueError(
            f"key_lengths is {key_lengths.dtype} {tuple(key_lengths.shape)}; give int32 of shape "
            f"({q.shape[0]},), the valid keys of each batch entry."
        )
    if key_lengths.device != q.device or not key_lengths.is_contiguous():
        raise ValueError(f"key_lengths must be contiguous and on {q.device}, as q is.")


def check_block_mask(block_mask: Tensor | None, q: Tensor, k: Tensor, slots: int | None) -> None:
    """slots: of the token order, whose blocks they are then."""
    if block_mask is None:
        return
    check_tensor("block_mask", block_mask, "one entry for each block of queries and of keys")
    queries, keys = (x.shape[2] if slots is None else slots for x in (q, k))
    expected = (*q.shape[:2], block_count(queries, QUERY_BLOCK), block_count(keys, KEY_BLOCK))
    if tuple(block_mask.shape) != expected:
        raise ValueError(
            f"block_mask has shape {tuple(block_mask.shape)}; {queries} queries and {keys} keys "
            f"(slots, with an order) take {expected}: one entry for {QUERY_BLOCK} queries x "
            f"{KEY_BLOCK} keys, on every GPU."
        )
    if block_mask.is_floating_point() or block_mask.is_complex():
        raise ValueError(
            f"block_mask is {block_mask.dtype}; give bool or integers, nonzero for blocks that are "
            "kept: of a mask that is added to logits (0 and -inf) block_mask == 0."
        )
    if block_mask.device != q.device:
        raise ValueError(f"block_mask is on {block_mask.device}; put it on {q.device}, as q is.")


def check_output_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise Unsupported(
            f"output_dtype is {shown(dtype)}; torch.bfloat16, torch.float16 and torch.float32 are "
            "supported, and None means q's."
        )


def ends_with_the_keys(
    is_causal: bool, causal: Alignment | None, n_queries: int, n_keys: int
) -> bool:
    """Whether the call is causal in the meaning "bottom-right".

    Raises:
        ValueError: `causal` is neither meaning.
        Unsupported: the call may mean either.
    """
    if causal is not None and causal not in get_args(Alignment):
        raise ValueError(
            f"causal is {shown(causal)}; it takes 'top-left' (query i sees keys 0..i), "
            "'bottom-right' (the last query sees the last key) or None."
        )
    if is_causal and causal is None and n_queries != n_keys:
        raise Unsupported(
            f"is_causal=True with {n_queries} queries and {n_keys} keys may mean two things: say "
            "causal='bottom-right' (the last query sees the last key, as with a cache of keys) or "
            "causal='top-left' (query i sees keys 0..i, as torch has it)."
        )
    return causal == "bottom-right"


def check_bottom_right(
    n_queries: int, n_keys: int, key_lengths: Tensor | None, block_mask: Tensor | None
) -> None:
    """Raises Unsupported for arguments that have no one meaning there, or no parts that blocks can
    be cut into."""
    if key_lengths is not None:
        raise Unsupported(
            "key_lengths and causal='bottom-right' do not go together: the last query may belong "
            "to the last key or to the last valid one. Cut the keys off, one batch entry a call."
        )
    if n_queries == n_keys:
        return
    skipped, block = (
        (n_queries - n_keys, QUERY_BLOCK) if n_queries > n_keys else (n_keys - n_queries, KEY_BLOCK)
    )
    if block_mask is not None and skipped % block:
        raise Unsupported(
            f"block_mask and causal='bottom-right' take {n_queries} queries and {n_keys} keys "
            f"that differ by whole blocks of {block}: one block of the mask would lie on both "
            "sides of the border between old and new tokens."
        )


#: Least scale: far above those whose product with the scale of a key block of zeros (2^-80)
#: underflows to 0, which times a masked score is NaN. Small scales of query rows are raised for the
#: same reason (csrc/attend/row_scale.cuh).
LEAST_SCALE = 2.0**-20


def checked_scale(scale: float | None, head_dim: int) -> float:
    """Returns the softmax scale of a call."""
    if scale is None:
        return head_dim**-0.5
    given = number("scale", scale, "a number (the softmax scale), or None for head_dim ** -0.5")
    if not LEAST_SCALE <= given < math.inf:
        raise Unsupported(
            f"scale is {given}; the softmax scale is a finite number from {LEAST_SCALE:g} up: "
            "for a negative one pass -q, for 0 average v.",
            "own",
        )
    return given


def check_inference(*tensors: Tensor) -> None:
    """Checks that no gradient is wanted, of everything that a caller may want a derivative of."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise Unsupported(
            "Sparse attention has no backward pass: run under torch.no_grad() or "
            "torch.inference_mode(), or detach the inputs.",
            "training",
        )
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise Unsupported(
            "Sparse attention has no forward-mode derivative (torch.func.jvp, dual tensors): "
            "detach the inputs, or use dense attention where a tangent is asked for.",
            "training",
        )
