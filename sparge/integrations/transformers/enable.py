# SPDX-License-Identifier: Apache-2.0
"""Switch of a model between sparse attention and its own."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ...call_stats import CallStats
from ...checks.argument import check_kind
from ...errors import Unsupported
from ...policy import SparsePolicy
from ...sdpa import MIN_TOKENS, Substitute
from .attend import EXACT, Functions

_numbers = itertools.count(1)
_NAME = "sparge"


@dataclass(frozen=True)
class _Enabled:
    """A model that is sparse, and what it had before."""

    model: weakref.ref[PreTrainedModel]
    before: list[tuple[PreTrainedConfig, str | None]]

    def restore(self, name: str) -> None:
        for config, before in self.before:
            if config._attn_implementation == name:  # not what others set since
                config._attn_implementation_internal = before
        _forget(name)


#: Sparse models by the name of their attention.
_enabled: dict[str, _Enabled] = {}


class SparseModel:
    """Model whose long prefills are sparse until `disable`; the end of a context calls it too."""

    def __init__(self, name: str, stats: CallStats) -> None:
        self.stats = stats
        self._name = name

    def __enter__(self) -> SparseModel:
        return self

    def __exit__(self, *raised: object) -> None:
        self.disable()

    def report(self) -> str:
        """Sparse calls and their density, and why others stayed exact. Waits for the GPU."""
        return str(self.stats)

    def disable(self) -> None:
        """Gives the model its own attention back. Twice does no harm."""
        if self._name in _enabled:
            _enabled[self._name].restore(self._name)


def enable(
    model: PreTrainedModel, policy: SparsePolicy | None = None, min_tokens: int = MIN_TOKENS
) -> SparseModel:
    """Makes attention of `model` sparse where it can be: causal prefill of at least `min_tokens`
    tokens, whole or in chunks, also with padding on either side and with a static cache, and long
    encoders. What else it computes stays as it was, with the reason in the report: decoding,
    sliding windows, packed sequences, capped logits, learned sinks, heads above 128. A second call
    on the same model replaces the first.

    model: also in the wrapper that torch.compile gives.
    policy: without it half of the key blocks, and always the first one. Text needs the first
        (`attention_sink=True`): a head that looks for nothing looks there.

    Raises:
        Unsupported: the model does not take its attention from transformers' registry, chooses
            keys itself, has a part that is sparse, or is the copy of one that was.
    """
    model = getattr(model, "_orig_mod", model)
    check_kind("model", model, PreTrainedModel, "a model of transformers")
    stats = CallStats()
    substitute = Substitute.checked(policy, min_tokens, stats)
    _replace_earlier(model)
    if any(getattr(part, "indexer", None) is not None for part in model.modules()):
        raise Unsupported(
            f"{type(model).__name__} chooses keys by an indexer of its own, which it does for "
            "PyTorch's attention alone; it stays as it is."
        )
    before = [(config, config._attn_implementation) for config in _configs(model)]
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
    _enabled[name] = _Enabled(weakref.ref(model), before)
    stats.prepare()
    return SparseModel(name, stats)


def _replace_earlier(model: PreTrainedModel) -> None:
    """Gives a model that is sparse its own attention back."""
    name = model.config._attn_implementation or ""
    found = _enabled.get(name)
    earlier = None if found is None else found.model()
    if found is not None and earlier is model:
        found.restore(name)
    elif any(part is earlier for part in model.modules()):
        raise Unsupported("A part of this model is sparse: call that one's disable() first.")
    elif name.startswith(_NAME):
        raise Unsupported(
            "This is a copy of a model that was sparse, and has the attention of that one: first "
            'give it its own back, as by set_attn_implementation("sdpa").'
        )


def _exact(implementation: str | None) -> str:
    return implementation if implementation in EXACT else "sdpa"


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


def _forget(name: str) -> None:
    _enabled.pop(name, None)
    for registry in (AttentionInterface, AttentionMaskInterface):
        registry._global_mapping.pop(name, None)
