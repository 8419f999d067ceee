# SPDX-License-Identifier: Apache-2.0
"""Blocks that calls keep, by the library's own routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sparge import AttentionStats, SparsePolicy, attention, reference
from sparge.blocks import unpack
from sparge.checks.validate import Alignment
from sparge.stages.prepared import PreparedCall


@contextmanager
def routed() -> Iterator[list[Tensor]]:
    """Context that notes the maps (B, H, query blocks, key blocks) bool of calls, or of the groups
    of heads that they are cut into. Nothing is noted of calls that need no map."""
    maps: list[Tensor] = []
    queue, by_reference = PreparedCall.queue, reference.attention

    def on_gpu(self: PreparedCall, *args: Any) -> Tensor:
        workspace = queue(self, *args)
        if "block_map" in self.layout.fields:
            block_map = self.layout.view(workspace, "block_map")
            maps.append(unpack(block_map, self.kind.shape.key_blocks))
        return workspace

    def on_cpu(*args: Any, **named: Any) -> Any:
        attended, route = by_reference(*args, **named)
        maps.append(route.kept)
        return attended, route

    with (
        mock.patch.object(PreparedCall, "queue", on_gpu),
        mock.patch.object(reference, "attention", on_cpu),
    ):
        yield maps


def kept_blocks(
    q: Tensor,
    k: Tensor,
    policy: SparsePolicy,
    *,
    causal: Alignment | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """(B, H, query blocks, key blocks) bool: what `sparge.attention` keeps of q (B, H, Nq, D) and
    k (B, Hkv, Nk, D), whatever the values."""
    stats = AttentionStats(q.device)  # calls that are counted are routed, whatever they keep
    with routed() as maps:
        attention(q, k, k, policy, causal=causal, key_lengths=key_lengths, stats=stats)
    return torch.cat(maps, 1)
