# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of a transformer of diffusers, which profiles are fitted by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...tune import Fingerprint, Patch, patch_mark


def fingerprint_of(model: nn.Module) -> Fingerprint:
    """Fingerprint of a model as loaded, and of the LoRAs on it. Waits for the GPU."""
    layers = {name: _adapters(module) for name, module in model.named_modules()}
    adapted = {name: adapters for name, adapters in layers.items() if adapters}
    return Fingerprint.of_network(model, patches=patch_mark(adapted))


def _adapters(module: Any) -> list[Patch]:
    """LoRAs that are switched on in a layer, as PEFT has them."""
    scaling = getattr(module, "scaling", None)
    if not isinstance(scaling, Mapping) or not hasattr(module, "lora_A"):
        return []
    if module.disable_adapters:
        return []
    found: list[Patch] = []
    for name in sorted(scaling.keys() & set(module.active_adapters)):
        weights = module.lora_A[name].weight, module.lora_B[name].weight
        found.append((scaling[name], [x for x in weights if not x.is_meta]))
    return found
