# SPDX-License-Identifier: Apache-2.0
"""Tiny language models of random weights, and ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 97,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Takes a model and its tokens (batch, tokens), and gives logits of real ones (..., words).
Run = Callable[[Any, Tensor], Tensor]


def make_text_model(
    architecture: str = "Llama",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "sdpa",
    **configuration: Any,
) -> Any:
    """Model for text of an architecture by transformers' name, in evaluation. configuration: fields
    beside or in place of SIZES."""
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, f"{architecture}Config")
    config = kind(**SIZES | configuration, attn_implementation=attention)
    return getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()


def forward(**options: Any) -> Run:
    """One pass without a cache. options: of the model's call; a mask (batch, tokens) also says
    which logits are real."""

    def run(model: Any, ids: Tensor) -> Tensor:
        mask = options.get("attention_mask")
        logits = model(ids, use_cache=False, **options).logits
        return logits if mask is None or mask.dim() > 2 else logits[mask.bool()]

    return run


def in_parts(*ends: int, mask: Tensor | None = None, room: int | None = None) -> Run:
    """Passes of a cache that end at these tokens; `room` makes it a static one of so many."""

    def run(model: Any, ids: Tensor) -> Tensor:
        from transformers import StaticCache

        cache: Any = None
        if room is not None:
            cache = StaticCache(config=model.config, max_cache_len=room)
        logits, start = [], 0
        for end in ends:
            seen = None if mask is None else mask[:, :end]
            out = model(ids[:, start:end], cache=cache, use_cache=True, attention_mask=seen)
            cache, start = out.cache, end
            logits.append(out.logits)
        found = torch.cat(logits, 1)
        return found if mask is None else found[mask[:, : ends[-1]].bool()]

    return run
