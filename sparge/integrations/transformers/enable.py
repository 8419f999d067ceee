# SPDX-License-Identifier: Apache-2.0
"""Switch of a model between sparse attention and its own."""

from __future__ import annotations

import weakref

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ...checks.argument import check_kind
from ...errors import Unsupported
from ...policy import PerHead
from ...sdpa import MIN_TOKENS, Keep, Substitute
from ...stats import CallStats
from .attend import BY_NAME, EXACT, NAME, attend, mask, rules

for name in (NAME, BY_NAME):
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


class SparseModel:
    """Model whose long prefills are sparse until `disable`; the end of a context calls it too."""

    def __init__(self, model: PreTrainedModel, substitute: Substitute, stats: CallStats) -> None:
        self.stats = stats
        self._before = [(each, each._attn_implementation) for each in _configs(model)]
        for config, _ in self._before:
            _enabled[id(config)], rules[id(config)] = self, substitute
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
            del _enabled[id(config)], rules[id(config)]
            if config._attn_implementation == NAME:  # not what others set since
                config._attn_implementation_internal = EXACT if before == NAME else before


#: Sparse models, by the identity of each configuration, as in `rules`.
_enabled: dict[int, SparseModel] = {}


def enable(
    model: PreTrainedModel,
    policy: Keep = None,
    min_tokens: int = MIN_TOKENS,
    *,
    topk: PerHead | None = None,
) -> SparseModel:
    """Makes attention of `model` sparse where it can be: causal prefill of at least `min_tokens`
    tokens, whole or in chunks, also with padding on either side and with a static cache, and long
    encoders. What else it computes stays as it was, with the reason in the report: decoding,
    sliding windows, packed sequences, heads above 128. A second call on the same model, a part of
    it or the whole that it is a part of replaces the first.

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
    substitute = Substitute.checked(policy, min_tokens, stats, topk)
    for config in _configs(model):
        if (earlier := _enabled.get(id(config))) is not None:
            earlier.disable()
    if (own := model.config._attn_implementation) == "eager" or not model._supports_sdpa:
        raise Unsupported(
            f"{type(model).__name__} has the attention {own!r}, which may do what ours cannot "
            '(sinks, capped logits, weights): call model.set_attn_implementation("sdpa") before.'
        )
    if any(getattr(part, "indexer", None) is not None for part in model.modules()):
        raise Unsupported(
            f"{type(model).__name__} chooses keys by an indexer of its own, which it does for "
            "PyTorch's attention alone; it stays as it is."
        )
    stats.prepare()
    return SparseModel(model, substitute, stats)


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
