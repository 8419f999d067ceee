# SPDX-License-Identifier: Apache-2.0
"""Mark of what is patched onto a model's weights, such as LoRAs, for its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .fingerprint import VALUES

#: Number of patched weights that tell LoRAs apart.
PATCHED = 8
#: Strength of a patch, and its tensors.
Patch = tuple[float, Sequence[Tensor]]


def patch_mark(patches: Mapping[str, Sequence[Patch]]) -> Tensor:
    """(2,): 0 without patches, else a place between -1 and 1 on either axis that other keys,
    strengths or values hardly share. Two LoRAs of one model often differ in values alone. Reads a
    few values, so it waits for the GPU.

    patches: those of each weight, by its name.
    """
    if not any(patches.values()):
        return torch.zeros(2)
    digest = hashlib.sha256()
    names = sorted(patches)
    sampled = set(names[:: max(1, len(names) // PATCHED)][:PATCHED])
    for name in names:
        digest.update(name.encode())
        for strength, tensors in patches[name]:
            digest.update(f"{float(strength):g}".encode())
            for tensor in tensors if name in sampled else ():
                digest.update(tensor.detach().flatten()[:VALUES].cpu().float().numpy().tobytes())
    places = [int.from_bytes(digest.digest()[at : at + 3], "big") for at in (0, 3)]
    return torch.tensor(places) / (1 << 23) - 1
