# SPDX-License-Identifier: Apache-2.0
"""Attention overrides as packs write them: backends, and such as change what attention means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Tokens of text before the picture, in models that have them.
TEXT = 24

Override = Callable[..., Tensor]
#: attend(q, k, v, heads, mask=None, **kwargs): what the override hands a call to.
Attend = Callable[..., Tensor]
Meaning = Callable[..., Tensor]


def backend(attend: Attend, *args: Any, **kwargs: Any) -> Tensor:
    return attend(*args, **kwargs)


def eight_bit(attend: Attend, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Queries and keys in int8 by blocks of 64 tokens, values in e4m3 by channels."""
    dim = 2 if kwargs.get("skip_reshape") else 1
    mean = k.mean(dim, keepdim=True)
    parts = int8(q, dim), int8(k - mean, dim) + mean, e4m3(v, dim)
    return attend(*parts, *args, **kwargs)


def half_precision(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    return attend(*(x.bfloat16() for x in (q, k, v)), *args, **kwargs).to(q.dtype)


def int8(x: Tensor, dim: int) -> Tensor:
    blocks = x.split(64, dim)
    scales = (block.abs().amax((dim, -1), keepdim=True).clamp_min(1e-20) / 127 for block in blocks)
    pairs = zip(blocks, scales, strict=True)
    return torch.cat([(block / scale).round() * scale for block, scale in pairs], dim)


def e4m3(x: Tensor, dim: int) -> Tensor:
    scale = x.abs().amax(dim, keepdim=True).clamp_min(1e-20) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def temperature(attend: Attend, q: Tensor, *args: Any, by: float = 2.0, **kwargs: Any) -> Tensor:
    return attend(q * by, *args, **kwargs)


def temperature_in_place(attend: Attend, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return attend(q.mul_(2.0), *args, **kwargs)


def further_keys(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Keys and values of a reference beside the model's own."""
    dim = 2 if kwargs.get("skip_reshape") else 1
    pairs = ((x, x.flip(-1) * 1.5) for x in (k, v))
    if kwargs.get("mask") is not None:
        kwargs["mask"] = pad(kwargs["mask"], (0, k.shape[dim]))
    return attend(q, *(torch.cat(pair, dim) for pair in pairs), *args, **kwargs)


def biased(bias: Callable[[Tensor], None]) -> Meaning:
    """Bias that a function writes into a mask of zeros, in self-attention without a mask."""

    def meaning(
        attend: Attend, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        dim = 2 if kwargs.get("skip_reshape") else 1
        masked = kwargs.get("mask") is not None or (args and args[0] is not None)
        if masked or q.shape[dim] != k.shape[dim]:
            return attend(q, k, v, heads, *args, **kwargs)
        mask = q.new_zeros(1, 1, q.shape[dim], k.shape[dim])
        bias(mask)
        return attend(q, k, v, heads, **(kwargs | {"mask": mask}))

    return meaning


def to_text(mask: Tensor) -> None:
    """All tokens attend more to the first ones."""
    mask[..., :TEXT] = 1.5


def apart(mask: Tensor) -> None:
    """The first quarter of the tokens does not see the second half."""
    mask[..., : mask.shape[-2] // 4, mask.shape[-1] // 2 :] = -torch.inf


def gain(attend: Attend, *args: Any, by: float = 1.05, **kwargs: Any) -> Tensor:
    return attend(*args, **kwargs) * by


def gain_of_one_prompt(attend: Attend, *args: Any, **kwargs: Any) -> Tensor:
    """A gain for the negative prompt, wherever it stands in the batch."""
    out = attend(*args, **kwargs)
    prompts = (kwargs.get("transformer_options") or {}).get("cond_or_uncond") or [0]
    parts = out.chunk(len(prompts))
    return torch.cat([x * 1.2 if one else x for x, one in zip(parts, prompts, strict=True)])


def one_head(attend: Attend, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A temperature of the first head."""
    q = q.clone()
    if kwargs.get("skip_reshape"):
        q[:, 0] *= 2
    else:
        heads = args[2] if len(args) > 2 else kwargs["heads"]
        q[..., : q.shape[-1] // heads] *= 2
    return attend(q, *args, **kwargs)


#: Those that change nothing but the arithmetic.
BACKENDS: dict[str, Meaning] = {
    "backend": backend, "eight bit": eight_bit, "half precision": half_precision,
}  # fmt: skip
MEANINGS: dict[str, Meaning] = {
    "temperature": temperature,
    "temperature in place": temperature_in_place,
    "temperature on 8 bits": lambda attend, *args, **kwargs: temperature(
        lambda *a, **k: eight_bit(attend, *a, **k), *args, **kwargs
    ),
    "further keys": further_keys,
    "text bias": biased(to_text),
    "regional mask": biased(apart),
    "gain": gain,
    "gain of one prompt": gain_of_one_prompt,
    "one head": one_head,
}


def only_where(meaning: Meaning, where: Callable[[Mapping[str, Any]], bool]) -> Meaning:
    """Meaning where a call's transformer_options say so, elsewhere none."""

    def chosen(attend: Attend, *args: Any, **kwargs: Any) -> Tensor:
        does = where(kwargs.get("transformer_options") or {})
        return (meaning if does else backend)(attend, *args, **kwargs)

    return chosen


def override_of(meaning: Meaning, previous: Override | None = None) -> Override:
    """Override of a node, over that of another."""

    def override(func: Attend, *args: Any, **kwargs: Any) -> Tensor:
        def attend(*given: Any, **named: Any) -> Tensor:
            return func(*given, **named) if previous is None else previous(func, *given, **named)

        return meaning(attend, *args, **kwargs)

    return override
