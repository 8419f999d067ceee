# SPDX-License-Identifier: Apache-2.0
"""Transformers whose sequence several GPUs share, by diffusers' ContextParallelConfig: each GPU
measures and chooses for its own heads."""

from __future__ import annotations

from typing import Any

RING = "several GPUs share the model's sequence in a ring: take ulysses_degree"


def ranks_of(model: Any) -> int | str:
    """Number of processes that share the tokens of a model, or why they cannot be served."""
    parallel = getattr(model, "_parallel_config", None)
    config = getattr(parallel, "context_parallel_config", None)
    if config is None:
        return 1
    return RING if config.ring_degree > 1 else config.ulysses_degree
