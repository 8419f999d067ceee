# SPDX-License-Identifier: Apache-2.0
"""Companions of the node: ComfyUI's own nodes and options, as users apply them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# ComfyUI's modules are not dependencies of the development environment.
# pyright: reportMissingImports=false

#: Line of EasyCache at a run's end.
SKIPPED = re.compile(r"EasyCache - skipped (\d+)/(\d+) steps")


@dataclass(frozen=True)
class Companion:
    """Companion as it stands in a row's name; apply returns the model with its node."""

    name: str
    apply: Callable[[Any], Any] = lambda model: model


def _compiled(model: Any) -> Any:
    import torch._dynamo
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    # Each run compiles anew: none goes on with what another made.
    torch._dynamo.reset()
    return TorchCompileModel.execute(model, "inductor")[0]


def backend(function: str, name: str) -> Companion:
    """Attention of core by its name there, as core's node ModelAttentionBackend sets it."""

    def apply(model: Any) -> Any:
        from comfy.ldm.modules.attention import get_attention_function

        found = get_attention_function(function, None)
        if found is None:
            raise RuntimeError(f"this ComfyUI finds no {name} on this machine")
        patched = model.clone()
        patched.set_model_optimized_attention(found)
        return patched

    return Companion(name, apply)


ALONE = Companion("")
INT8 = backend("comfy_kitchen_int8", "comfy-kitchen INT8")
SAGE = backend("sage", "SageAttention")
COMPILED = Companion("torch.compile", _compiled)
FP8 = Companion("fp8")  # the model is built so


def easycache(reuse_threshold: float) -> Companion:
    """ComfyUI's EasyCache, its other widgets as a new node has them."""

    def apply(model: Any) -> Any:
        from comfy_extras.nodes_easycache import EasyCacheNode

        return EasyCacheNode.execute(model, reuse_threshold, 0.15, 0.95, False)[0]

    return Companion(f"EasyCache {reuse_threshold:.3g}", apply)
