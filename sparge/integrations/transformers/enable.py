# SPDX-License-Identifier: Apache-2.0
"""Switch of a model between sparse attention and its own."""

from __future__ import annotations

import logging
import sys
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

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

logger = logging.getLogger("sparge")

_NAME = "sparge"
#: Remark of a model that began continuous batching, where transformers refuses other attention.
BATCHED = "Continuous batching took the model's own attention, and it is not sparse any more."


@dataclass(frozen=True, eq=False)
class _Enabled:
    """A model that is sparse, and what it had before."""

    model: weakref.ref[PreTrainedModel]
    before: list[tuple[PreTrainedConfig, str | None]]
    functions: dict[str, Functions]
    """Functions by the name that the parts of the model have of them. They stay registered, as
    copies of the model have the names."""
    stats: CallStats

    def restore(self) -> None:
        """Gives the model its own attention back, and copies of it likewise."""
        if (model := self.model()) is not None:
            for part in _parts(model):
                vars(part).pop("sparge_names", None)
            vars(model).pop("init_continuous_batching", None)
        for config, before in self.before:
            if config._attn_implementation in self.functions:  # not what others set since
                config._attn_implementation_internal = before
        for functions in self.functions.values():
            functions.turn_off()
        if self in _enabled:
            _enabled.remove(self)


_enabled: list[_Enabled] = []


class SparseModel:
    """Model whose long prefills are sparse until `disable`; the end of a context calls it too."""

    def __init__(self, enabled: _Enabled) -> None:
        self.stats = enabled.stats
        self._enabled = enabled

    def __enter__(self) -> SparseModel:
        return self

    def __exit__(self, *raised: object) -> None:
        self.disable()

    def report(self) -> str:
        """Sparse calls and their density, and why others stayed exact. Waits for the GPU."""
        return str(self.stats)

    def disable(self) -> None:
        """Gives the model its own attention back. Twice does no harm."""
        self._enabled.restore()


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
            keys itself, or shares its configuration with another one that is sparse.
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
    name = f"{_NAME}_{uuid.uuid4().hex}"
    names = {own: name if own == "sdpa" else f"{name}_{own}" for own in EXACT}
    functions = {names[own]: Functions(substitute, own) for own in EXACT}
    for each, function in functions.items():
        _register(each, function)
    before = [(config, _before(config._attn_implementation)) for config in _configs(model)]
    enabled = _Enabled(weakref.ref(model), before, functions, stats)
    _enabled.append(enabled)
    try:
        model.set_attn_implementation(name)
    except ValueError as error:
        enabled.restore()
        raise Unsupported(f"{type(model).__name__} refuses another attention: {error}") from error
    if model.config._attn_implementation != name:
        enabled.restore()
        raise Unsupported(
            f"{type(model).__name__} does not take its attention from transformers' registry; "
            "`with sparge.sdpa():` around the call may reach it."
        )
    for config, own in before:
        if config._attn_implementation == name:
            config._attn_implementation_internal = names[own if own in EXACT else "sdpa"]
    for part in _parts(model):
        part.sparge_names = _Names({names[own]: own for own in EXACT})
    vars(model)["init_continuous_batching"] = partial(_begin_batching, model)
    stats.prepare()
    return SparseModel(enabled)


def _register(name: str, functions: Functions) -> None:
    AttentionInterface.register(name, functions.attend)
    AttentionMaskInterface.register(name, functions.mask)


class _Names:
    """Names of the attention of a sparse model, on its parts, and the implementation behind each.

    Copies of the model have them too. Where another process loads one, they become the names of
    what the model had before.
    """

    def __init__(self, own: Mapping[str, str]) -> None:
        self._own = own
        for name in own:
            if name not in AttentionInterface._global_mapping:
                off = Substitute.checked(None, sys.maxsize, None)
                _register(name, Functions(off, own[name]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Names, (self._own,)


def _begin_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`init_continuous_batching` of a sparse model or of a copy of one, with its own attention."""
    for each in list(_enabled):
        if each.model() is model:
            each.restore()
            each.stats.remark = BATCHED
            logger.warning("[Sparge] %s", BATCHED)
    vars(model).pop("init_continuous_batching", None)
    for config in _configs(model):
        config._attn_implementation_internal = _before(config._attn_implementation)
    return model.init_continuous_batching(*args, **kwargs)


def _replace_earlier(model: PreTrainedModel) -> None:
    """Gives a model that is sparse its own attention back."""
    configs = [id(config) for config in _configs(model)]
    for earlier in list(_enabled):
        owner = earlier.model()
        if owner is model or owner is None:
            earlier.restore()
        elif any(id(config) in configs for config, _ in earlier.before):
            raise Unsupported(
                f"This {type(model).__name__} shares its configuration with a "
                f"{type(owner).__name__} that is sparse, such as a part of it or the whole that it "
                "is a part of: call disable() of that one first."
            )


def _before(implementation: str | None) -> str | None:
    """Implementation of a configuration. That of a copy of a sparse one is the original's own."""
    if implementation is None or not implementation.startswith(f"{_NAME}_"):
        return implementation
    return "eager" if implementation.endswith("_eager") else "sdpa"


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Configurations that name an attention: those of the model's parts, and what these are of."""
    left = [part.config for part in _parts(model)]
    found: dict[int, PreTrainedConfig] = {}
    while left:
        config = left.pop()
        if id(config) not in found:
            found[id(config)] = config
            below = (getattr(config, key, None) for key in config.sub_configs)
            left += [part for part in below if isinstance(part, PreTrainedConfig)]
    return list(found.values())


def _parts(model: PreTrainedModel) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]
