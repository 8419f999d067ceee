# SPDX-License-Identifier: Apache-2.0
"""What users combine the node with: ComfyUI's own nodes and options, as users apply them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# ComfyUI's modules are not dependencies of the development environment.
# pyright: reportMissingImports=false

#: Line of EasyCache at a run's end.
SKIPPED = re.compile(r"EasyCache - skipped (\d+)/(\d+) steps")
#: Range of reuse_threshold, EasyCache's widget.
LOWEST, HIGHEST = 1e-3, 3.0
TRIALS = 12


@dataclass(frozen=True)
class Companion:
    """Companion as it stands in a row's name; apply returns the model with its node."""

    name: str
    apply: Callable[[Any], Any] = lambda model: model
    fp8: bool = False
    """The weights are 8-bit floats, and so are matrix products, as in UNETLoader's weight_dtype
    fp8_e4m3fn_fast."""
    compiles: bool = False
    """The first run compiles."""


ALONE = Companion("")
FP8 = Companion("fp8", fp8=True)


def easycache(reuse_threshold: float) -> Companion:
    """ComfyUI's EasyCache, its other widgets as a new node has them."""

    def apply(model: Any) -> Any:
        from comfy_extras.nodes_easycache import EasyCacheNode

        return EasyCacheNode.execute(model, reuse_threshold, 0.15, 0.95, False)[0]

    return Companion(f"EasyCache {reuse_threshold:.3g}", apply)


def compiled(backend: str) -> Companion:
    """ComfyUI's TorchCompileModel, which has the backends inductor and cudagraphs."""

    def apply(model: Any) -> Any:
        import torch._dynamo
        from comfy_extras.nodes_torch_compile import TorchCompileModel

        # The node's guards leave out transformer_options, where ours puts attention: what was
        # compiled without it would serve with it.
        torch._dynamo.reset()
        return TorchCompileModel.execute(model, backend)[0]

    return Companion("torch.compile", apply, compiles=True)


def threshold_to_skip(steps: int, skipped_at: Callable[[float], int]) -> float:
    """EasyCache's reuse_threshold at which it skips so many steps, or as many as come near."""
    low, high, best = LOWEST, HIGHEST, (steps + 1, HIGHEST)
    for _ in range(TRIALS):
        middle = (low * high) ** 0.5
        skipped = skipped_at(middle)
        best = min(best, (abs(skipped - steps), middle))
        if skipped == steps:
            break
        low, high = (middle, high) if skipped < steps else (low, middle)
    return best[1]
