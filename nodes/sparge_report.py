# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttentionReport: what the last run did."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..sparge.session import details, verdict
from . import picture
from .comfyui import show_on_node
from .hook import hook_of

NO_NODE = "This model did not go through Sparge Attention, so there is nothing to report."
NO_RUN = (
    "No sampler has run this model yet. Connect the latent of the sampler that uses it, so that "
    "the report comes after it."
)


class SpargeAttentionReport(io.ComfyNode):
    """Finds the run through the model: the patched model carries the hook of its Sparge Attention
    node, and the hook keeps the result of its last run.

    The latent is passed through only so that ComfyUI runs this node after the sampler. Where two
    samplers use one patched model, the one that ran last is reported.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeAttentionReport",
            display_name="Sparge Attention Report",
            category="model/patch",
            description=(
                "Shows what Sparge Attention did in the last run, on the node itself: how much "
                "each layer computed in each step, how far off it was, and why calls were dense."
            ),
            search_aliases=["sparse attention", "spargeattn", "statistics", "measurement"],
            inputs=[
                io.Model.Input("model", tooltip="The model that Sparge Attention gave out."),
                io.Latent.Input(
                    "latent", tooltip="The sampler's result: the report comes after it."
                ),
            ],
            outputs=[
                io.Latent.Output("latent", tooltip="The latent as it came."),
                io.String.Output("text", tooltip="What happened, layer by layer."),
                io.Image.Output("picture", tooltip="What is shown on the node."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any, latent: Any) -> io.NodeOutput:
        hook = hook_of(model)
        if hook is None or hook.last is None:
            text = lines = NO_NODE if hook is None else NO_RUN
            image = picture.message(text)
        else:
            text, lines = details(hook.last), verdict(hook.last)
            image = picture.draw(hook.last)
        show_on_node(cls.hidden.unique_id if cls.hidden else None, lines)
        shown = ui.PreviewImage(image, cls=cls).as_dict() | ui.PreviewText(text).as_dict()
        return io.NodeOutput(latent, text, image, ui=shown)
