# SPDX-License-Identifier: Apache-2.0
"""Graphs for the server's /prompt: a tiny model through our node, with tiny_nodes' conditioning."""

from __future__ import annotations

from typing import Any

#: Under flat names, as graphs by hand have them.
ALL_WIDGETS = {
    "mode": "manual", "topk": 0.5, "pvthreshd": 15.0, "start_percent": 0.2, "end_percent": 1.0,
    "min_tokens": 100, "dense_blocks": "", "select_by": "topk", "cdfthreshd": 0.98,
    "simthreshd1": -0.1, "quality": "balanced", "exact_dense": False,
}  # fmt: skip


def graph(family: str, **widgets: Any) -> dict[str, Any]:
    """Model -> SpargeAttention (node 2) -> KSampler -> SaveLatent, with every default but these."""
    cond = [
        {"class_type": "TinyConditioning", "inputs": {"family": family, "negative": negative}}
        for negative in (False, True)
    ]
    settings = {
        "seed": 7, "steps": 4, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
        "denoise": 1.0,
    }  # fmt: skip
    wires = {
        "model": ["2", 0],
        "positive": ["3", 0],
        "negative": ["4", 0],
        "latent_image": ["5", 0],
    }
    return {
        "1": {"class_type": "TinyModel", "inputs": {"family": family}},
        "2": {"class_type": "SpargeAttention", "inputs": {"model": ["1", 0]} | widgets},
        "3": cond[0],
        "4": cond[1],
        "5": {"class_type": "TinyLatent", "inputs": {"family": family}},
        "6": {"class_type": "KSampler", "inputs": settings | wires},
        "7": {
            "class_type": "SaveLatent",
            "inputs": {"samples": ["6", 0], "filename_prefix": family},
        },
    }
