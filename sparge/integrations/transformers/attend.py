# SPDX-License-Identifier: Apache-2.0
"""Attention and mask function of sparse models, as transformers' registries take them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...attention import attention
from ...errors import Unsupported
from ...sdpa import MIN_TOKENS, Substitute
from ...stats import count_exact
from ...torch_attention import TorchCall, as_autocast
from .causal_mask import CausalMask, Prefill, prefill

#: Names of our implementation: as `enable` sets it, and as others may, with the policy of
#: `sparge.sdpa`; and of that which computes what stays exact.
NAME, BY_NAME, EXACT = "sparge_enabled", "sparge", "sdpa"
#: Rules of sparse models, by the identity of each configuration that names their attention. A copy
#: of one is another object, so it has none, and its calls are exact.
rules: dict[int, Substitute] = {}
#: Rules by which no call is sparse, and none is counted.
OFF = Substitute.checked(None, sys.maxsize, None)
USUAL = Substitute.checked(None, MIN_TOKENS, None)


def mask(**given: Any) -> Tensor | None:
    """Mask of all layers of a pass, from what transformers gives the functions that make one: a
    `CausalMask` where they may be sparse, else what the model's own implementation takes."""
    own = AttentionMaskInterface._global_mapping[EXACT]
    queries, keys, before = given["q_length"], given["kv_length"], given.get("q_offset", 0)
    padding, function = given.get("attention_mask"), given["mask_function"]
    config = given.get("config")
    # Gemma 4 slices the queries of layers that share keys, and needs a mask that shows which.
    is_sliced = bool(getattr(config, "num_kv_shared_layers", 0)) and queries > 1
    may_skip = given.get("allow_is_causal_skip", True) and not is_sliced

    def make(as_tensor: bool) -> Tensor | None:
        # A static cache adds to its own offset before a layer reads the mask.
        changed = {"q_offset": before, "allow_is_causal_skip": may_skip and not as_tensor}
        return own(**given | changed)

    if function is bidirectional_mask_function:
        made = make(False)
        # Its queries share the memory of one.
        return None if made is None else made[:, :, :1].clone().expand(made.shape)
    is_plain = function is causal_mask_function and not given.get("kv_offset", 0)
    if not is_plain or queries < rules_of(config).min_tokens:
        return make(False)
    if torch.compiler.is_compiling():  # nobody can read what a graph is given
        is_square = padding is None and queries == keys
        return None if is_square and isinstance(before, int) else make(False)
    found = prefill(queries, before, padding, given["batch_size"])
    if found is None or found.tokens > keys:
        return make(False)
    before = found.before
    shape = (given["batch_size"], 1, queries, keys)
    return CausalMask(found, make, shape, torch.bool, given["device"])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer: query (B, H, Nq, D), key and value (B, Hkv, Nk, D)."""
    out, queries, substitute = None, query.shape[2], rules_of(getattr(module, "config", None))
    long, layer = queries >= max(2, substitute.min_tokens), getattr(module, "layer_idx", None)
    own = (getattr(module, "indexer", None), others.get("softcap"), others.get("s_aux"))
    if any(each is not None for each in own):
        raise Unsupported(f"{type(module).__name__} caps logits, has sinks or chooses keys itself.")
    if why := _why_own(module, key, others):
        count_exact(substitute.stats, why)
    elif isinstance(attention_mask, CausalMask):
        seen = attention_mask.prefill
        out = _prefill(substitute, query, key, value, seen, dropout, scaling, layer)
    elif long and attention_mask is not None and _has_row_for_each_query(attention_mask):
        count_exact(substitute.stats, "a mask that hides other keys from some queries")
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and attention_mask is None and queries > 1
        call = (query, key, value, attention_mask, dropout, causal, scaling, True, layer)
        out = substitute.sparse(TorchCall(*call))
        out = None if out is None else out.transpose(1, 2)
    if out is not None:
        return out, None
    if isinstance(attention_mask, CausalMask):
        attention_mask = attention_mask.make(False)
    own = AttentionInterface._global_mapping[EXACT]
    options = {"scaling": scaling, "dropout": dropout, "is_causal": is_causal, **others}
    return own(module, query, key, value, attention_mask, **options)


def _why_own(module: nn.Module, key: Tensor, others: dict[str, Any]) -> str:
    """Why a layer's call is for its own implementation, by its keywords; else empty."""
    if others.get("position_bias") is not None:
        return "a position bias"
    window = others.get("sliding_window")
    if window is not None and key.shape[2] > window:
        return "a sliding window"
    # Checkpointing may hide that gradients are wanted.
    return "training: call eval() on a model that is not trained" if module.training else ""


def rules_of(config: object) -> Substitute:
    """Rules of the layers that have this very configuration."""
    named = getattr(config, "_attn_implementation", None) == BY_NAME
    return rules.get(id(config), USUAL if named else OFF)


def _prefill(
    substitute: Substitute,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Prefill,
    dropout: float,
    scaling: float | None,
    layer: int | None,
) -> Tensor | None:
    """(B, Nq, H, D) of a plain causal call, zeros for padding; None where it stays exact."""
    key, value = key[:, :, : seen.tokens], value[:, :, : seen.tokens]
    stats = substitute.stats
    call = TorchCall(query, key, value, None, dropout, True, scaling, True, layer)
    ruled = substitute.options(call, seen.real is not None)
    if ruled is None:
        return None

    def attend() -> Tensor:
        q, k, v = (as_autocast(x) for x in (query, key, value))
        options: dict[str, Any] = {
            **ruled,
            "causal": "bottom-right",
            "scale": scaling,
            "out_layout": "NHD",
            "stats": None if stats is None else stats.on(q.device),
        }
        if seen.real is None:
            return attention(q, k, v, **options)
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        for entry, (start, end) in enumerate(seen.real):
            # Real queries of this pass; the last of them sees the last real key.
            first, last = max(start - seen.before, 0), end - seen.before
            if last > first:
                one, rows = slice(entry, entry + 1), slice(first, last)
                keys = one, slice(None), slice(start, end)
                out[one, rows] = attention(q[one, :, rows], k[keys], v[keys], **options)
        return out

    return substitute.tried(query.device, attend)


def _has_row_for_each_query(mask: Tensor) -> bool:
    """Whether queries have rows of their own in memory: nobody compares them all."""
    return mask.shape[-2] > 1 and mask.stride(-2) != 0
