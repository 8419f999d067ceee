# SPDX-License-Identifier: Apache-2.0
"""Attention backend "sparge" of diffusers, for transformers that choose theirs by name. The import
of this package after that of diffusers registers it, with the policy of `sparge.sdpa`.

stats = register_backend(SparsePolicy(topk=0.3))  # with another one, and counts
pipe.transformer.set_attention_backend("sparge")
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...errors import Unsupported
from ...policy import PerHead
from ...sdpa import MIN_TOKENS, Keep, Substitute
from ...stats import CallStats
from ...torch_attention import TorchCall

NAME = "sparge"
SHARED = (
    "Several GPUs share this model's sequence, which the backend 'sparge' does not serve: take "
    "sparge.integrations.diffusers.enable with the backend 'native'."
)
NO_REGISTRY = (
    "This version of diffusers has no list of attention backends that others can add to. "
    "`with sparge.sdpa(policy):` around the pipeline needs none."
)


def register_backend(
    policy: Keep = None, min_tokens: int = MIN_TOKENS, *, topk: PerHead | None = None
) -> CallStats:
    """Adds the backend "sparge" to those of diffusers; gives what counts its calls.

    Sparse are the calls that `sparge.sdpa` makes sparse, and by the same policy, rule or topk; the
    others go to diffusers' backend "native", with their reason counted. It knows nothing of text,
    grid or steps: where a pipeline has a row, `enable` keeps more of the picture at the same speed.
    Once more it replaces policy and counts.

    Raises:
        Unsupported: this version of diffusers has no such list.
    """
    stats = CallStats()
    serve = Substitute.checked(policy, min_tokens, stats, topk).sparse
    stats.prepare()
    try:
        dispatch: Any = importlib.import_module("diffusers.models.attention_dispatch")
        registry, names = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName
        native: Callable[..., Tensor] = registry._backends[names.NATIVE]
        name = _member(names)
    except (ImportError, AttributeError, KeyError) as error:
        raise Unsupported(NO_REGISTRY) from error

    # diffusers reads the names of arguments, and leaves out those that are not here.
    def sparge_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """Attention of q, k and v (B, N, H, D)."""
        if _parallel_config is not None:  # diffusers' own context does not ask who serves that
            raise Unsupported(SHARED)
        mask = attn_mask
        if mask is not None and mask.shape == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None]  # a flag for each key, as "native" takes it
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = serve(TorchCall(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa))
        if out is None:
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return native(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return out.transpose(1, 2)

    registry.register(name)(sparge_attention)
    return stats


def _member(names: Any) -> Any:
    """Name of our backend in the enum, which has no public way to add one."""
    if NAME in names._value2member_map_:
        return names(NAME)
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member
    names._member_names_.append(member._name_)
    return member
