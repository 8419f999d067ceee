# SPDX-License-Identifier: Apache-2.0
"""Numbers of a model's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Place of a U-Net's block: side ("input", "middle" or "output"), module on that side, block in it.
Place = tuple[str, int, int]

#: Attributes that hold the layers: a model has one of these lists, or a double and a single one.
_BLOCK_LISTS = (
    "double_blocks",
    "single_blocks",
    "double_stream_blocks",
    "single_stream_blocks",
    "double_stream_layers",
    "single_stream_layers",
    "joint_blocks",
    "patch_blocks",
    "blocks",
    "transformer_blocks",
    "visual_transformer_blocks",
    "layers",
)
#: Layers that run before those of the lists above and that ComfyUI gives no number, each with the
#: input without which it does not run.
_REFINERS: Mapping[str, str | None] = {
    "context_refiner": None,
    "noise_refiner": None,
    "ref_image_refiner": "ref_latents",
    "siglip_refiner": "ref_latents",
}


@dataclass(frozen=True)
class LayerCounts:
    """Layers (transformer blocks) of a model.

    Attributes:
        total: layers that have numbers, from 0; None where the model has no list known here.
        double: layers before the single-stream ones, which models number from 0 again.
        refiners: layers that run before them and have no number.
        places: number of each layer of a U-Net.
    """

    total: int | None = None
    double: int = 0
    refiners: int = 0
    places: Mapping[Place, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, extras: Mapping[str, Any]) -> LayerCounts:
        """Counts the layers of a model. extras: what the model is given beside latent and text."""
        places: dict[Place, int] = {}
        for place in _places(model):
            places.setdefault(place, len(places))
        if places:
            return cls(len(places), places=places)
        lists = [getattr(model, name, None) for name in _BLOCK_LISTS]
        lengths = [len(blocks) for blocks in lists if blocks is not None]
        refiners = sum(
            len(getattr(model, name, None) or ())
            for name, given in _REFINERS.items()
            if given is None or extras.get(given) is not None
        )
        return cls(
            sum(lengths) if lengths else None,
            len(getattr(model, "double_blocks", ())),
            refiners if lengths else 0,
        )


def _places(model: Any) -> Iterator[Place]:
    """Yields the places of a U-Net's blocks, in the order they run."""
    sides = {
        "input": getattr(model, "input_blocks", None) or (),
        "middle": [getattr(model, "middle_block", None) or ()],
        "output": getattr(model, "output_blocks", None) or (),
    }
    for side, modules in sides.items():
        for number, module in enumerate(modules):
            for layer in module:
                for index, _ in enumerate(getattr(layer, "transformer_blocks", ())):
                    yield side, number, index
