# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttentionReport: what the last run did."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..sparge.session import Report, details, verdict
from .hook import hook_of
from .host import show_on_node

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
            return cls._shown(latent, NO_NODE if hook is None else NO_RUN)
        warnings = []
        if other := _of_another_run(latent, hook.last_shape):
            warnings.append(other)
        text = "\n".join([details(hook.last), *warnings])
        lines = "\n".join([*warnings, verdict(hook.last)])
        return cls._shown(latent, text, lines, hook.last)

    @classmethod
    def _shown(
        cls, latent: Any, text: str, lines: str = "", report: Report | None = None
    ) -> io.NodeOutput:
        """Shows a report on the node as well, where there is room for its picture and few lines:
        two in the size in which it is added, so warnings and what was gained come first."""
        node_id = cls.hidden.unique_id if cls.hidden else None
        show_on_node(node_id, lines or text)
        try:
            from comfy_api.latest import ui

            from . import picture
        except ImportError:  # no Pillow
            return io.NodeOutput(latent, text, torch.zeros(1, 64, 64, 3), ui={"text": (text,)})
        image = picture.message(text) if report is None else picture.draw(report)
        shown = ui.PreviewImage(image, cls=cls).as_dict() | ui.PreviewText(text).as_dict()
        return io.NodeOutput(latent, text, image, ui=shown)


def _of_another_run(latent: Any, shape: tuple[int, ...] | None) -> str | None:
    """Remark when the latent is of another run: ComfyUI keeps latents of earlier prompts, and then
    runs this node alone."""
    samples = latent.get("samples") if isinstance(latent, dict) else None
    given = getattr(samples, "shape", None)
    if shape is None or given is None or len(given) != len(shape) or tuple(given) == shape:
        return None
    was, now = ("x".join(map(str, sizes)) for sizes in (shape, given))
    return (
        f"This is the report of the last run, whose latent was {was}; the one given here is {now}, "
        "of an earlier run or changed since. Run the sampler again, and connect its own latent."
    )
