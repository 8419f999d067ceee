# SPDX-License-Identifier: Apache-2.0
"""Switch of a model between sparse attention and its own."""

from __future__ import annotations

import itertools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ...call_stats import CallStats
from ...checks.argument import check_kind
from ...errors import Unsupported
from ...policy import SparsePolicy
from ...sdpa import MIN_TOKENS, Substitute
from .attend import EXACT, Functions

_numbers = itertools.count(1)
_NAME = "sparge"


class SparseModel:
    """Model whose long prefills are sparse until `disable`."""

    def __init__(self, model: PreTrainedModel, name: str, before: Any, stats: CallStats) -> None:
        self.stats = stats
        self._model, self._name, self._before = model, name, before

    def report(self) -> str:
        """Sparse calls and their density, and why others stayed exact. Waits for the GPU."""
        return str(self.stats)

    def disable(self) -> None:
        """Gives the model its own attention back. Twice does no harm."""
        if self._name in AttentionInterface._global_mapping:
            self._model.set_attn_implementation(self._before)
            _forget(self._name)


def enable(
    model: PreTrainedModel, policy: SparsePolicy | None = None, min_tokens: int = MIN_TOKENS
) -> SparseModel:
    """Makes attention of `model` sparse where it can be: causal prefill of at least `min_tokens`
    tokens, whole or in chunks, also with padding on either side and with a static cache, and long
    encoders. What else it computes stays as it was, with the reason in the report: decoding,
    sliding windows, packed sequences, capped logits, learned sinks, heads above 128.

    policy: without it half of the key blocks, and always the first one. Text needs the first
        (`attention_sink=True`): a head that looks for nothing looks there.

    Raises:
        Unsupported: the model does not take its attention from transformers' registry, or is
            sparse already.
    """
    check_kind("model", model, PreTrainedModel, "a model of transformers")
    stats = CallStats()
    substitute = Substitute.checked(policy, min_tokens, stats)
    before = _implementations(model.config)
    if (model.config._attn_implementation or "").startswith(_NAME):
        raise Unsupported("This model is sparse already: disable() what enable returned, first.")
    name = f"{_NAME}_{next(_numbers)}"
    by_config = {
        id(part.config): _exact(part.config._attn_implementation)
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
    }
    functions = Functions(substitute, by_config, _exact(model.config._attn_implementation))
    AttentionInterface.register(name, functions.attend)
    AttentionMaskInterface.register(name, functions.mask)
    try:
        model.set_attn_implementation(name)
    except ValueError as error:
        _forget(name)
        raise Unsupported(f"{type(model).__name__} refuses another attention: {error}") from error
    if model.config._attn_implementation != name:
        _forget(name)
        raise Unsupported(
            f"{type(model).__name__} does not take its attention from transformers' registry; "
            "`with sparge.sdpa():` around the call may reach it."
        )
    stats.prepare()
    return SparseModel(model, name, before, stats)


def _exact(implementation: str | None) -> str:
    return implementation if implementation in EXACT else "sdpa"


def _implementations(config: Any) -> str | dict[str, Any]:
    """What `set_attn_implementation` takes to restore a model: a name, or names by sub-model."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    own = config._attn_implementation
    below = {key: _implementations(part) for key, part in parts.items() if part is not None}
    return {"": own, **below} if below else own


def _forget(name: str) -> None:
    for registry in (AttentionInterface, AttentionMaskInterface):
        registry._global_mapping.pop(name, None)
