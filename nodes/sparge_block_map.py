# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttentionBlockMap: what one head of one layer computed, as a picture."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..sparge.sampling import RunResult
from .hook import BLOCK_MAP, hook_of
from .sparge_report import NO_NODE, NO_RUN

#: Most that the widgets take; no model has as many.
MOST = 1000


class SpargeAttentionBlockMap(io.ComfyNode):
    """Finds the run as the report does. The run keeps the map of a layer because it finds this node
    in the graph where it starts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=BLOCK_MAP,
            display_name="Sparge Attention Block Map",
            category="model/patch",
            description=(
                "Shows which parts of the clip one head of one layer looked at in its last sparse "
                "step: bright was computed, dark was skipped."
            ),
            search_aliases=["sparse attention", "spargeattn", "attention mask", "heatmap"],
            inputs=[
                io.Model.Input("model", tooltip="The model that Sparge Attention gave out."),
                io.Latent.Input("latent", tooltip="The sampler's result: the map comes after it."),
                _number(
                    "layer",
                    "Number of the layer, as the report counts them. Another layer needs another "
                    "run of the sampler, which keeps the map of this one alone.",
                ),
                _number("head", "Number of the head, from 0. Another head needs no other run."),
            ],
            outputs=[io.Image.Output("picture", tooltip="What is shown on the node.")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any, latent: Any, layer: int = 0, head: int = 0) -> io.NodeOutput:
        hook = hook_of(model)
        result = None if hook is None else hook.last
        if result is None:
            return cls._shown(NO_NODE if hook is None else NO_RUN)
        if problem := why_none(result, layer, head):
            return cls._shown(problem)
        maps = result.maps[layer]
        return cls._shown("", maps.of_head(head), layer, head, maps.step)

    @classmethod
    def _shown(cls, problem: str, *of_map: Any) -> io.NodeOutput:
        """Shows a map, or the sentence why there is none."""
        try:
            from comfy_api.latest import ui

            from . import block_picture, picture
        except ImportError:  # no Pillow
            return io.NodeOutput(torch.zeros(1, 64, 64, 3))
        image = picture.message(problem) if problem else block_picture.draw(*of_map)
        return io.NodeOutput(image, ui=ui.PreviewImage(image, cls=cls).as_dict())


def why_none(result: RunResult, layer: int, head: int) -> str:
    """Sentence why a run has no map of a head; empty where it has one."""
    layers = result.report.layers.tolist()
    if layers and layer not in layers:
        return f"This model has no layer {layer}: its layers are {layers[0]} to {layers[-1]}."
    if not result.tally.sparse:
        return "Nothing was sparse in the last run, so all blocks were computed."
    if layer not in result.maps:
        return (
            f"The last run kept no map of layer {layer}. A run keeps the layer that stands here "
            "when it starts, and needs a sparse step: run the sampler again, with another seed."
        )
    last = result.maps[layer].heads - 1
    return "" if head <= last else f"Layer {layer} has no head {head}: its heads are 0 to {last}."


def _number(name: str, tooltip: str) -> Any:
    """Makes a widget for a number. A link would hide it from the run, which reads it first."""
    return io.Int.Input(name, default=0, min=0, max=MOST, tooltip=tooltip, socketless=True)
