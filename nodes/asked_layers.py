# SPDX-License-Identifier: Apache-2.0
"""Layers whose block maps the running graph asks for."""

from __future__ import annotations

from .host import nodes_behind

#: Node id of what shows a block map.
BLOCK_MAP = "SpargeAttentionBlockMap"


def asked_layers(node_id: str | None) -> set[int]:
    """Layers that block map nodes of the running graph name, of the model that a node gives out."""
    layers = (inputs.get("layer") for inputs in nodes_behind(node_id, BLOCK_MAP).values())
    return {layer for layer in layers if isinstance(layer, int)}
