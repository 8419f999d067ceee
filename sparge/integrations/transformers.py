# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in models of transformers.

from sparge.integrations.transformers import enable

sparse = enable(model, sparge.SparsePolicy(topk=0.3, attention_sink=True))
model.generate(**inputs)
print(sparse.report())
sparse.disable()
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..checks.argument import check_kind
from ..errors import Unsupported
from ..policy import PerHead
from ..sdpa import MIN_TOKENS, Keep, Substitute
from ..stats import CallStats, count_exact
from ..torch_attention import TorchCall

#: Names of our implementation: as `enable` sets it, and as others may, with the policy of
#: `sparge.sdpa`; and of that which computes what stays exact.
NAME, BY_NAME, EXACT = "sparge_enabled", "sparge", "sdpa"
#: Rules by which no call is sparse, and those of `BY_NAME`; neither counts.
OFF, USUAL = (Substitute.checked(None, least, None) for least in (sys.maxsize, MIN_TOKENS))
#: Sparse models, by the identity of each configuration that names their attention. A copy of one is
#: another object, so it is not here, and its calls are exact.
_enabled: dict[int, SparseModel] = {}


def rules_of(config: object) -> Substitute:
    """Rules of the layers that have this very configuration."""
    model = _enabled.get(id(config))
    if model is not None:
        return model.rules
    return USUAL if getattr(config, "_attn_implementation", None) == BY_NAME else OFF


def mask(**given: Any) -> Tensor | None:
    """Mask of all layers of a pass, as `EXACT` has it: none for a whole causal prefill."""
    # Gemma 4 slices the queries of layers that share keys, and needs a mask that shows which.
    if getattr(given.get("config"), "num_kv_shared_layers", 0):
        given["allow_is_causal_skip"] = False
    return AttentionMaskInterface._global_mapping[EXACT](**given)


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
    rules = rules_of(getattr(module, "config", None))
    own = (getattr(module, "indexer", None), others.get("softcap"), others.get("s_aux"))
    if any(each is not None for each in own):
        raise Unsupported(f"{type(module).__name__} caps logits, has sinks or chooses keys itself.")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    if why := _why_exact(module, key, attention_mask, others, rules.min_tokens):
        count_exact(rules.stats, why)
    else:
        layer = getattr(module, "layer_idx", None)
        call = (query, key, value, attention_mask, dropout, causal, scaling, True, layer)
        out = rules.sparse(TorchCall(*call))
        if out is not None:
            return out.transpose(1, 2), None
    options = {"scaling": scaling, "dropout": dropout, "is_causal": is_causal, **others}
    exact = AttentionInterface._global_mapping[EXACT]
    return exact(module, query, key, value, attention_mask, **options)


def _why_exact(
    module: nn.Module, key: Tensor, mask: Tensor | None, others: dict[str, Any], least: int
) -> str:
    """Reason why a layer's call is not sparse; empty where none is known yet. least: min_tokens."""
    if others.get("position_bias") is not None:
        return "a position bias"
    window = others.get("sliding_window")
    if window is not None and key.shape[2] > window:
        return "a sliding window"
    if mask is not None and mask.shape[-2] >= max(2, least):
        return "a mask with a row for each query, as of padding or chunks"  # nobody compares them
    # Checkpointing may hide that gradients are wanted.
    return "training: call eval() on a model that is not trained" if module.training else ""


for name in (NAME, BY_NAME):
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


class SparseModel:
    """Model whose long prefills are sparse until `disable`; the end of a context calls it too."""

    def __init__(self, model: PreTrainedModel, rules: Substitute, stats: CallStats) -> None:
        self.rules, self.stats = rules, stats
        self._before = [(each, each._attn_implementation) for each in _configs(model)]
        _enabled.update({id(config): self for config, _ in self._before})
        self._end = weakref.finalize(model, self.disable)
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            self.disable()
            raise Unsupported(
                f"{type(model).__name__} does not take its attention from transformers' registry; "
                "`with sparge.sdpa():` around the call may reach it."
            )
        for config, before in self._before:
            if before in (None, "eager"):  # a part for which nothing exact stands behind ours
                config._attn_implementation_internal = before

    def __enter__(self) -> SparseModel:
        return self

    def __exit__(self, *raised: object) -> None:
        self.disable()

    def report(self) -> str:
        """Sparse calls and their density, and why others stayed exact. Waits for the GPU."""
        return str(self.stats)

    def disable(self) -> None:
        """Gives the model its own attention back. Twice does no harm."""
        self._end.detach()
        for config, before in self._before:
            if _enabled.get(id(config)) is not self:
                continue
            del _enabled[id(config)]
            if config._attn_implementation == NAME:  # not what others set since
                config._attn_implementation_internal = EXACT if before == NAME else before


def enable(
    model: PreTrainedModel,
    policy: Keep = None,
    min_tokens: int = MIN_TOKENS,
    *,
    topk: PerHead | None = None,
) -> SparseModel:
    """Makes attention of `model` sparse where it can be: causal prefill of at least `min_tokens`
    tokens, whole and without padding, and long encoders. What else it computes stays as it was,
    with the reason in the report: decoding, chunks, padded batches, sliding windows, packed
    sequences, heads above 128. A second call on the same model, a part of it or the whole that
    it is a part of replaces the first.

    model: also in the wrapper that torch.compile gives.
    policy: without it half of the key blocks, and always the first one. Text needs the first
        (`attention_sink=True`): a head that looks for nothing looks there. Or a rule, or topk, as
        `sparge.sdpa` takes them.

    Raises:
        Unsupported: the model cannot have PyTorch's attention or has "eager", does not take its
            attention from transformers' registry, or chooses keys itself.
    """
    model = getattr(model, "_orig_mod", model)
    check_kind("model", model, PreTrainedModel, "a model of transformers")
    stats = CallStats()
    rules = Substitute.checked(policy, min_tokens, stats, topk)
    for config in _configs(model):
        if (earlier := _enabled.get(id(config))) is not None:
            earlier.disable()
    if (own := model.config._attn_implementation) == "eager" or not model._supports_sdpa:
        can = 'call model.set_attn_implementation("sdpa") before'
        remedy = can if model._supports_sdpa else "the model cannot have sdpa, so it stays as it is"
        raise Unsupported(
            f"{type(model).__name__} has the attention {own!r}, which may do what ours cannot "
            f"(sinks, capped logits, weights): {remedy}."
        )
    if any(getattr(part, "indexer", None) is not None for part in model.modules()):
        raise Unsupported(
            f"{type(model).__name__} chooses keys by an indexer of its own, which it does for "
            "PyTorch's attention alone; it stays as it is."
        )
    stats.prepare()
    return SparseModel(model, rules, stats)


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Configurations that name an attention: those of the model's parts, and what these are of."""
    left = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    found: dict[int, PreTrainedConfig] = {}
    while left:
        config = left.pop()
        if id(config) not in found:
            found[id(config)] = config
            below = (getattr(config, key, None) for key in config.sub_configs)
            left += [part for part in below if isinstance(part, PreTrainedConfig)]
    return list(found.values())
