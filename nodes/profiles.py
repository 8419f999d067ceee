# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of a model of ComfyUI, which profiles are fitted by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..sparge.tune import Fingerprint, patch_mark

#: Start of the names of the network's weights in a model of ComfyUI.
NETWORK = "diffusion_model."


def fingerprint_of(model_patcher: Any) -> Fingerprint:
    """Fingerprint of the model as in its file, and of what is patched onto its weights (LoRA).
    Waits for the GPU."""
    patches = {
        str(key): [(strength, list(_tensors_in(value))) for strength, value, *_ in of_key]
        for key, of_key in model_patcher.patches.items()
    }
    files = {
        key.removeprefix(NETWORK): saved.weight
        for key, saved in model_patcher.backup.items()  # of weights that are patched at present
        if key.startswith(NETWORK)
    }
    network = model_patcher.model.diffusion_model
    return Fingerprint.of_network(network, files, patches=patch_mark(patches))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a patch, whose values ComfyUI nests in tuples and in adapters'
    `weights`."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_in(part)
    elif hasattr(value, "weights"):
        yield from _tensors_in(value.weights)
