# SPDX-License-Identifier: Apache-2.0
"""Switch of a model between sparse attention and its own."""

from __future__ import annotations

import logging
import sys
import uuid
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ...checks.argument import check_kind
from ...errors import Unsupported
from ...policy import SparsePolicy
from ...sdpa import MIN_TOKENS, Substitute
from ...stats import CallStats
from .attend import EXACT, Functions

logger = logging.getLogger("sparge")

_NAME = "sparge"
#: Rules by which no call is sparse, and none is counted.
OFF = Substitute.checked(None, sys.maxsize, None)
#: Remark of a model that began continuous batching, where transformers refuses other attention.
BATCHED = "Continuous batching took the model's own attention, and it is not sparse any more."


class SparseModel:
    """Model whose long prefills are sparse until `disable`; the end of a context calls it too."""

    def __init__(self, model: PreTrainedModel, substitute: Substitute, stats: CallStats) -> None:
        self.stats = stats
        name = f"{_NAME}_{uuid.uuid4().hex}"
        self._names = {own: name if own == "sdpa" else f"{name}_{own}" for own in EXACT}
        # They stay registered, as copies of the model have their names.
        self._functions = [_register(self._names[own], substitute, own) for own in EXACT]
        self._model = weakref.ref(model)
        self._before = [(each, _before(each._attn_implementation)) for each in _configs(model)]
        _enabled.append(self)
        try:
            model.set_attn_implementation(name)
        except ValueError as error:
            self.disable()
            refusal = f"{type(model).__name__} refuses another attention: {error}"
            raise Unsupported(refusal) from error
        if model.config._attn_implementation != name:
            self.disable()
            raise Unsupported(
                f"{type(model).__name__} does not take its attention from transformers' registry; "
                "`with sparge.sdpa():` around the call may reach it."
            )
        for config, own in self._before:
            if config._attn_implementation == name:
                own = own if own in EXACT else "sdpa"
                config._attn_implementation_internal = self._names[own]
        for part in _parts(model):
            part.sparge_names = _Names(self._names)
        vars(model)["init_continuous_batching"] = partial(_begin_batching, model)

    def __enter__(self) -> SparseModel:
        return self

    def __exit__(self, *raised: object) -> None:
        self.disable()

    def report(self) -> str:
        """Sparse calls and their density, and why others stayed exact. Waits for the GPU."""
        return str(self.stats)

    def disable(self) -> None:
        """Gives the model its own attention back, and copies of it likewise. Twice does no harm."""
        if self not in _enabled:
            return
        _enabled.remove(self)
        if (model := self._model()) is not None:
            for part in _parts(model):
                vars(part).pop("sparge_names", None)
            vars(model).pop("init_continuous_batching", None)
        for config, before in self._before:
            if config._attn_implementation in self._names.values():  # not what others set since
                config._attn_implementation_internal = before
        for functions in self._functions:
            functions.substitute = OFF


_enabled: list[SparseModel] = []


def enable(
    model: PreTrainedModel, policy: SparsePolicy | None = None, min_tokens: int = MIN_TOKENS
) -> SparseModel:
    """Makes attention of `model` sparse where it can be: causal prefill of at least `min_tokens`
    tokens, whole or in chunks, also with padding on either side and with a static cache, and long
    encoders. What else it computes stays as it was, with the reason in the report: decoding,
    sliding windows, packed sequences, capped logits, learned sinks, heads above 128. A second call
    on the same model, a part of it or the whole that it is a part of replaces the first.

    model: also in the wrapper that torch.compile gives.
    policy: without it half of the key blocks, and always the first one. Text needs the first
        (`attention_sink=True`): a head that looks for nothing looks there.

    Raises:
        Unsupported: the model does not take its attention from transformers' registry, or chooses
            keys itself.
    """
    model = getattr(model, "_orig_mod", model)
    check_kind("model", model, PreTrainedModel, "a model of transformers")
    stats = CallStats()
    substitute = Substitute.checked(policy, min_tokens, stats)
    _disable_earlier(model)
    if any(getattr(part, "indexer", None) is not None for part in model.modules()):
        raise Unsupported(
            f"{type(model).__name__} chooses keys by an indexer of its own, which it does for "
            "PyTorch's attention alone; it stays as it is."
        )
    stats.prepare()
    return SparseModel(model, substitute, stats)


def _register(name: str, substitute: Substitute, own: str) -> Functions:
    functions = Functions(substitute, own)
    AttentionInterface.register(name, functions.attend)
    AttentionMaskInterface.register(name, functions.mask)
    return functions


class _Names:
    """Names of the attention of a sparse model, on its parts, and the implementation behind each.

    Copies of the model have them too. Where another process loads one, they become the names of
    what the model had before.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        """names: by the implementation behind each."""
        self._names = names
        for own, name in names.items():
            if name not in AttentionInterface._global_mapping:
                _register(name, OFF, own)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Names, (self._names,)


def _begin_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`init_continuous_batching` of a sparse model or of a copy of one, with its own attention."""
    for each in list(_enabled):
        if each._model() is model:
            each.disable()
            each.stats.remark = BATCHED
            logger.warning("[Sparge] %s", BATCHED)
    vars(model).pop("init_continuous_batching", None)
    for config in _configs(model):
        config._attn_implementation_internal = _before(config._attn_implementation)
    return model.init_continuous_batching(*args, **kwargs)


def _disable_earlier(model: PreTrainedModel) -> None:
    """Gives what is sparse and shares a configuration with a model its own attention back: the
    model itself, a part of it, or the whole that it is a part of."""
    configs = [id(config) for config in _configs(model)]
    for earlier in list(_enabled):
        if earlier._model() is None or any(id(each) in configs for each, _ in earlier._before):
            earlier.disable()


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
