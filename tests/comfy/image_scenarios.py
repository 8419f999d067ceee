# SPDX-License-Identifier: Apache-2.0
"""Looks at where a tiny model puts text and picture among its tokens. Runs in ComfyUI's process."""

from __future__ import annotations

from typing import Any

import comfy.sample
import models
import torch


def places(name: str) -> dict[str, Any]:
    """First and last token that differ with another prompt, and with another seed, in the keys of
    the first of the longest self-attention calls; None where none does. tokens: all there are."""
    first = _keys(name, prompt=False, seed=0)
    return {
        "tokens": first.shape[-2],
        "text": _changed(first, _keys(name, prompt=True, seed=0)),
        "picture": _changed(first, _keys(name, prompt=False, seed=1)),
    }


def _changed(one: torch.Tensor, other: torch.Tensor) -> list[int] | None:
    """First and last token of which the keys (tokens, channels) differ."""
    found = (one != other).any(-1).nonzero()
    return [int(found.min()), int(found.max())] if len(found) else None


def _keys(name: str, prompt: bool, seed: int) -> torch.Tensor:
    """Keys (tokens, channels) of the first of the longest self-attention calls in one step."""
    kept: list[torch.Tensor] = []

    def override(func: Any, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        keys = k[0].transpose(0, 1).flatten(1) if kwargs.get("skip_reshape") else k[0].flatten(1)
        if q.shape[-2] == k.shape[-2] and len(keys) > (len(kept[0]) if kept else 0):
            kept[:] = [keys.clone()]
        return func(q, k, v, heads, *args, **kwargs)

    model = models.build(name).clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = override
    latent = models.empty_latent(name)
    noise = comfy.sample.prepare_noise(latent, seed)
    (_, extra), (text, _) = models.conditioning(name)[0], models.conditioning(name, prompt)[0]
    given = [[text, extra]]
    with torch.inference_mode():
        comfy.sample.sample(
            *(model, noise, 1, 1.0, "euler", "simple", given, given, latent),
            disable_pbar=True,
            seed=0,
        )
    return kept[0]
