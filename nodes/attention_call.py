# SPDX-License-Identifier: Apache-2.0
"""Attention call in ComfyUI's conventions, and its tensors as the library takes them. No copies.

Models send what ComfyUI's backends happen to accept: SD3's v has heads of its own where q and k are
flat. What else somebody's model or node may send is nothing to guess at: such a call stays dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..sparge.reasons import Reason
from ..sparge.session import Call, may_be_padding, unknown_options

#: Keywords that do not change the result, or that the library honours.
_KNOWN_OPTIONS = {
    *("transformer_options", "_inside_attn_wrapper", "low_precision_attention"),
    *("preferred_attention", "enable_gqa", "scale"),
}
FULL_PRECISION = Reason("the model asks for full precision here", "own")
#: Key of transformer_options: tokens of each image that a model appends after the grid.
_REFERENCES = "reference_image_num_tokens"
#: Method that classes have whose tensors have no memory of their own.
_DISPATCH = "__torch_dispatch__"


def call_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], by_backend: bool = False
) -> Call | None:
    """Call by the arguments of ComfyUI's functions for attention; None where they are others, or
    its tensors not such as this pack can read. by_backend: as in `Call`.

    q, k, v are (B, S, H*D), or (B, H, S, D) when ``skip_reshape``, in any strides; k and v may be
    (B, S, H, D) as well. The result is (B, S, H*D), or (B, H, S, D) when ``skip_output_reshape``,
    in q's dtype.
    """
    try:
        q, k, v, heads, mask, skip_reshape, skip_output_reshape, options = _named(*args, **kwargs)
    except TypeError:
        return None
    if not isinstance(heads, int) or not (mask is None or _is_plain(mask)):
        return None
    if not type(q) is type(k) is type(v) is Tensor:
        if not (_is_plain(q) and _is_plain(k) and _is_plain(v)):
            return None
        # Plain tensors: a GGUF loader's class, which changes new_empty, clone and shape, passes
        # from the weights of a norm to q and k when DynamicVRAM loads the model.
        q, k, v = q.as_subclass(Tensor), k.as_subclass(Tensor), v.as_subclass(Tensor)
    views = (q, k, v) if skip_reshape else _split(q, k, v, heads)
    if views is None or not _go_together(*views):
        return None
    why_exact = None
    if not _KNOWN_OPTIONS.issuperset(options):
        changing = (x for x in options if x not in _KNOWN_OPTIONS and options[x] is not None)
        why_exact = unknown_options(x for x in changing if options[x] is not False)
    if options.get("low_precision_attention") is False:
        why_exact = FULL_PRECISION
    of_model = options.get("transformer_options") or {}
    return Call(
        *views,
        scale=options.get("scale"),
        layout="HND" if skip_output_reshape else "flat",
        by_backend=by_backend,
        mask=mask,
        key_mask=mask if mask is not None and _is_one_row(mask, *views[:2]) else None,
        why_exact=why_exact,
        reference_tokens=sum(of_model.get(_REFERENCES) or ()),
    )


def _is_one_row(mask: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether a mask is a row of keys for all heads and queries. Others of ComfyUI are no padding,
    and looking at a row for each query in every layer takes time."""
    same = mask.shape[1:-1] if mask.ndim > 2 else mask.shape[:-1]
    return set(same) <= {1} and may_be_padding(mask, q, k)


def _named(
    q: Any,
    k: Any,
    v: Any,
    heads: Any,
    mask: Any = None,
    attn_precision: Any = None,
    skip_reshape: Any = False,
    skip_output_reshape: Any = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Arguments as ComfyUI's functions for attention have them."""
    return q, k, v, heads, mask, skip_reshape, skip_output_reshape, options


def _is_plain(x: object) -> bool:
    """Whether x is a tensor with memory of its own, maybe of a class whose methods are other ones:
    no container of tensors, and no quantized or distributed one."""
    return isinstance(x, Tensor) and getattr(type(x), _DISPATCH, None) is getattr(Tensor, _DISPATCH)


def _split(q: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """(B, H, N, D) views of q (B, N, H*D), and of k and v flat or with heads as a dimension of
    their own; None for other shapes."""
    sizes, strides = q.shape, q.stride()
    if len(sizes) != 3 or heads < 1 or sizes[2] % heads or not (q.numel() and k.numel()):
        return None
    batch, tokens, width = sizes
    head_dim = width // heads
    if k.shape == v.shape == sizes and k.stride() == v.stride() == strides:
        entry, token, channel = strides
        # One step for each, where a view and its transpose take two.
        of_heads = batch, heads, tokens, head_dim
        steps = entry, head_dim * channel, token, channel
        return (
            q.as_strided(of_heads, steps),
            k.as_strided(of_heads, steps),
            v.as_strided(of_heads, steps),
        )
    found = []
    for x in (q, k, v):
        if x.ndim == 3 and x.shape[0] != batch and x.numel() % (batch * x.shape[-1]) == 0:
            x = x.reshape(batch, -1, x.shape[-1])  # HyperTile cuts queries alone into tiles
        if x.ndim == 3 and x.shape[-1] % head_dim == 0:
            x = x.view(*x.shape[:2], x.shape[-1] // head_dim, head_dim)
        if x.ndim != 4:
            return None
        found.append(x.transpose(1, 2))
    return found[0], found[1], found[2]


def _go_together(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether views have one batch and one head_dim, and k and v are alike: those may have fewer
    heads (GQA) and another number of tokens than q."""
    of_q, of_k = q.shape, k.shape
    if not len(of_q) == len(of_k) == 4 or of_k != v.shape or not (q.numel() and k.numel()):
        return False
    return of_q[0] == of_k[0] and of_q[3] == of_k[3] and of_q[1] % of_k[1] == 0
