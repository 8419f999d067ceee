# SPDX-License-Identifier: Apache-2.0
"""Node SpargeGPUBenchmark: what Sparge Attention gains on this GPU, for this model and clip."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..sparge import KernelBuildError, TokenGrid, Unsupported, capabilities
from ..sparge.kernels.warmup import warm_up
from ..sparge.speed import MeasuringCost, Size, speed_table, time_shape
from . import host
from .expected_run import DENSITIES, ExpectedRun
from .families import token_layout
from .hook import hook_of
from .model_call import ModelCall

ALREADY_ON = (
    "This model went through Sparge Attention: connect the one before it, as it comes from the "
    "loader."
)
NO_ATTENTION = "No self-attention reached ComfyUI's attention function: nothing can be made faster."
NO_MEMORY = "Too little memory is free to time this size: free some, or take a smaller clip."


class SpargeGPUBenchmark(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeGPUBenchmark",
            display_name="Sparge GPU Benchmark",
            category="model/patch",
            description=(
                "Measures how much faster Sparge Attention makes this model at this size on this "
                "GPU, in the time of two steps. It changes nothing, and says nothing about the "
                "picture."
            ),
            search_aliases=["sparge", "speed test", "how fast", "benchmark gpu"],
            inputs=[
                io.Model.Input("model", tooltip="The model as it comes from its loader."),
                io.Conditioning.Input("positive", tooltip="Any prompt."),
                io.Latent.Input("latent", tooltip="An empty latent of the size that you render."),
                io.Int.Input(
                    "steps", default=20, min=1, max=1000, tooltip="Steps that you render with."
                ),
            ],
            outputs=[
                io.String.Output("text", tooltip="What was measured."),
                io.Image.Output("picture", tooltip="Bars of an attention call's times."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any, positive: Any, latent: Any, steps: int = 20) -> io.NodeOutput:
        device = host.inference_device()
        problem = ALREADY_ON if hook_of(model) else capabilities(device).reason
        if problem:
            return cls._shown(problem)
        if failure := warm_up(device, cls._show).wait(host.raise_if_interrupted):
            return cls._shown(failure)
        cls._show(f"Timing two steps of {steps}")
        latent = host.sampled_latent(model, latent)
        called = ModelCall.of(model, positive, latent)
        size = called.main
        if size is None:
            return cls._shown(NO_ATTENTION)
        backend = host.exact_backend()
        try:
            table = speed_table(device, backend)  # it names the operand types of 8-bit calls too
            times = time_shape(
                _grid(model, latent, size), size.heads, size.head_dim, device, backend, DENSITIES
            )
        except torch.OutOfMemoryError:
            return cls._shown(NO_MEMORY)
        except (Unsupported, KernelBuildError) as error:
            return cls._shown(f"Nothing can be made faster here: {error}")
        rates = table.of(size.head_dim) if table else None
        cost = MeasuringCost(rates.sparse, size, times.dense, calls=1) if rates else None
        run = ExpectedRun(size, called.calls[size], called.seconds, times, steps, cost)
        return cls._shown(run.details(torch.cuda.get_device_name(device)), run)

    @classmethod
    def _show(cls, text: str) -> None:
        host.show_on_node(cls.hidden.unique_id if cls.hidden else None, text)

    @classmethod
    def _shown(cls, text: str, run: ExpectedRun | None = None) -> io.NodeOutput:
        cls._show(text)
        try:
            from comfy_api.latest import ui

            from . import bars, picture
        except ImportError:  # no Pillow
            return io.NodeOutput(text, torch.zeros(1, 64, 64, 3), ui={"text": (text,)})
        image = picture.message(text) if run is None else bars.draw(run.verdict(), run.rows())
        shown = ui.PreviewImage(image, cls=cls).as_dict() | ui.PreviewText(text).as_dict()
        return io.NodeOutput(text, image, ui=shown)


def _grid(model: Any, latent: Any, size: Size) -> TokenGrid:
    """Grid of the tokens of a call; a line of them where the model is not known."""
    layout = token_layout(model.get_model_object("diffusion_model"), latent.shape)
    grid = layout.sequence(size.tokens)
    return grid or TokenGrid(1, 1, size.tokens)
