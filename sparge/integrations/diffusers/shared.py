# SPDX-License-Identifier: Apache-2.0
"""Transformers whose sequence several GPUs share, by diffusers' ContextParallelConfig."""

from __future__ import annotations

import json
from typing import Any

import torch

from ...sampling import Settings
from ...speed import known_table
from ...speed.backend import TORCH
from ...speed.table import SpeedTable
from ...tune import ALONE, SharedHeads

RING = "several GPUs share the model's sequence in a ring"
UNEVEN = "{heads} heads are not dealt evenly to {ranks} GPUs"
#: Remark for either.
ADVICE = "{why}: take sparge.integrations.parallel.context_parallel in place of enable"
#: Reason on the GPUs that could be sparse.
ANOTHER = "another GPU of those that share the model stays dense"
#: Remark, and reason, where processes that share a model would not decide alike.
NOT_ALIKE = "the processes that share the model were given other settings"


def is_shared(model: Any) -> bool:
    """Whether several GPUs share the tokens of a model's pass: its calls then hold some of the
    heads, and tokens in other places."""
    return _config_of(model) is not None


def shared_heads(model: Any) -> SharedHeads | str:
    """Processes that share a model's heads, or the reason why they cannot be served."""
    config = _config_of(model)
    if config is None:
        return ALONE
    if config.ring_degree > 1:
        return RING
    shared = SharedHeads.of_group(config._ulysses_mesh.get_group())
    heads = model.config.num_attention_heads
    return UNEVEN.format(heads=heads, ranks=shared.ranks) if heads % shared.ranks else shared


def are_alike(shared: SharedHeads | str, device: torch.device, settings: Settings) -> bool:
    """Whether all processes were given the same, as far as it decides when they measure and choose:
    else some would wait for ever. Waits for them."""
    if isinstance(shared, str) or shared.alone:
        return True
    own = repr(settings)
    return shared.agree(shared.of_first(own, device) == own, device)


def table_of_all(shared: SharedHeads | str, device: torch.device) -> SpeedTable | None:
    """Speed table of the first process, by which all decide alike. Waits for it."""
    own = known_table(device, TORCH)
    if isinstance(shared, str) or shared.alone:
        return own
    text = shared.of_first(json.dumps(None if own is None else own.to_json()), device)
    stored = json.loads(text)
    return None if stored is None else SpeedTable.from_json(stored)


def _config_of(model: Any) -> Any:
    return getattr(getattr(model, "_parallel_config", None), "context_parallel_config", None)
