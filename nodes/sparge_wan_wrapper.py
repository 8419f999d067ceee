# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttentionWanVideoWrapper: sparse attention for a model of WanVideoWrapper, kijai's
pack, whose models go through no node for ComfyUI's own."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from comfy_api.latest import io

from ..sparge import capabilities
from ..sparge.kernels.warmup import warm_up
from ..sparge.session import short_lines, unusable_reason
from . import host
from .settings import Settings
from .wan_wrapper import LAST_STEP, WanWrapperHook

logger = logging.getLogger("sparge")

WanVideoModel = io.Custom("WANVIDEOMODEL")
DEFAULT_START = 2


class SpargeAttentionWanVideoWrapper(io.ComfyNode):
    """Node id, widget names and their order are in saved graphs: only append."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeAttentionWanVideoWrapper",
            # Longer than the name of Sparge Attention, which shall come first in a search.
            display_name="Sparge Attention for WanVideoWrapper (kijai)",
            category="model/patch",
            description=(
                "Makes models of the pack WanVideoWrapper render faster: it skips the work that "
                "shows least. Put it last, right before WanVideo Sampler; bypass it to compare. "
                "After each run the node says how much was computed, or why nothing was skipped. "
                "For ComfyUI's own models take Sparge Attention, which also measures the model."
            ),
            search_aliases=["sparge wanvideo", "sparse attention wan video wrapper", "kijai"],
            inputs=[
                WanVideoModel.Input("model", tooltip="A model of WanVideoWrapper."),
                io.Float.Input(
                    "topk",
                    default=Settings().topk,
                    min=0.05,
                    max=1.0,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    optional=True,
                    tooltip=(
                        "How much of the attention is computed, the same share everywhere. Lower "
                        "is faster, higher is truer: start with 0.5 and go down while you like "
                        "the clip; 1 computes all of it, in 8 bits."
                    ),
                ),
                io.Int.Input(
                    "start_step",
                    default=DEFAULT_START,
                    min=0,
                    max=LAST_STEP,
                    optional=True,
                    tooltip=(
                        "The steps before this one, which settle layout and motion, keep the "
                        "pack's own attention. Lower is faster, higher is truer; take 1 with a "
                        "LoRA for 4 steps."
                    ),
                ),
            ],
            outputs=[WanVideoModel.Output(tooltip="The same model, made faster.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, model: Any, topk: float = Settings().topk, start_step: int = DEFAULT_START
    ) -> io.NodeOutput:
        node_id = cls.hidden.unique_id if cls.hidden else None
        settings, device = Settings(topk=topk), host.inference_device()
        reason = unusable_reason(device)
        if reason is not None:  # the pack's own attention is faster than PyTorch's
            logger.warning("[Sparge] NOTHING IS SPARSE: %s", reason)
            host.show_on_node(node_id, short_lines("NOTHING IS SPARSE", reason))
            return io.NodeOutput(model)
        if capabilities(device).usable:
            warm_up(device, partial(host.show_on_node, node_id))
        patched = model.clone()
        WanWrapperHook(settings, start_step, node_id).install(patched)
        return io.NodeOutput(patched)
