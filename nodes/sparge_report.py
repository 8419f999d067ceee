# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttentionReport: what the last run did, and a picture of it for the width of a node.
Pictures are ComfyUI's: (1, height, width, 3) float32."""

from __future__ import annotations

import functools
import math
import textwrap
from typing import Any

import torch
from comfy_api.latest import io, ui
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..sparge.session import Report, details, verdict
from ..sparge.session.verdict import why_nothing
from .comfyui import show_on_node
from .hook import hook_of

NO_NODE = "This model did not go through Sparge Attention, so there is nothing to report."
NO_RUN = (
    "No sampler has run this model yet. Connect the latent of the sampler that uses it, so that "
    "the report comes after it."
)

Colour = tuple[int, int, int]

PAPER, EMPTY, INK, FAINT = (24, 25, 30), (40, 42, 50), (240, 241, 244), (164, 168, 180)
#: Colours from nothing computed to everything: what is dark was skipped.
SCALE = torch.tensor(
    [[36, 41, 92], [74, 57, 150], [158, 62, 150], [231, 98, 98], [250, 178, 92], [252, 240, 178]]
).float()

# Pixels. A node is about half as wide, so letters of 22 are 11 there.
WIDTH, MARGIN, LEFT, RIGHT, TOP, BOTTOM = 800, 24, 84, 32, 164, 124
HEIGHT, TALLEST_CELL = 460, 56
HEADLINE, TITLE, NUMBER = 33, 25, 22
LINE_LENGTH = 56  # characters of a message


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
            display_name="Report (Sparge Attention)",
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
            image = message(text)
        else:
            text, lines = details(hook.last), "\n".join(verdict(hook.last))
            image = draw(hook.last)
        show_on_node(cls.hidden.unique_id if cls.hidden else None, lines)
        shown = ui.PreviewImage(image, cls=cls).as_dict() | ui.PreviewText(text).as_dict()
        return io.NodeOutput(latent, text, image, ui=shown)


def draw(report: Report) -> Tensor:
    """Picture of the verdict, and of how much each layer computed in each step."""
    by_step, layers = report.densities.by_step, report.densities.layers.tolist()
    if not by_step.numel() or report.counts.missing:
        return message((why_nothing(report) or report.no_calls).lines()[2])
    bottom = TOP + min(HEIGHT, TALLEST_CELL * len(layers))
    image = Image.new("RGB", (WIDTH, bottom + BOTTOM), PAPER)
    headline, second, *_ = verdict(report)
    write(image, headline, 22, MARGIN, INK, HEADLINE)
    write(image, second, 78, MARGIN, FAINT, TITLE + 3)
    _map(image, by_step, layers, bottom)
    _scale(image, bottom + 82)
    return _as_tensor(image)


def message(text: str) -> Tensor:
    """Picture that says why there is none."""
    lines = textwrap.wrap(text, LINE_LENGTH)
    image = Image.new("RGB", (WIDTH, 2 * MARGIN + 36 * len(lines)), PAPER)
    for place, line in enumerate(lines):
        write(image, line, MARGIN + 36 * place, MARGIN, INK, TITLE + 1)
    return _as_tensor(image)


def write(
    image: Image.Image,
    text: str,
    top: int,
    left: float,
    colour: Colour = FAINT,
    size: int = NUMBER,
    before: float = 0.0,
) -> None:
    """Writes a line of text. before: share of its length that stands left of `left`."""
    font = _font(size)
    at = left - before * font.getlength(text), top
    ImageDraw.Draw(image).text(at, text, colour, font)


def _map(image: Image.Image, by_step: Tensor, layers: list[int], bottom: int) -> None:
    left, top, right = LEFT, TOP, WIDTH - RIGHT
    rows, steps = by_step.shape
    colours = coloured(by_step.nan_to_num(0.0))
    colours[by_step.isnan()] = torch.tensor(EMPTY, dtype=torch.uint8)
    size = right - left, bottom - top
    cells = Image.fromarray(colours.numpy())
    image.paste(cells.resize(size, Image.Resampling.BOX), (left, top))
    wide, tall = size[0] / steps, size[1] / rows
    write(image, "layer", top - 38, left - 12, INK, TITLE, before=1)
    for row, layer in enumerate(layers):
        if layer % math.ceil(34 / tall) == 0:
            write(image, str(layer), round(top + (row + 0.5) * tall) - 14, left - 12, before=1)
    for step in range(0, steps, math.ceil(44 / wide)):
        write(image, str(step + 1), bottom + 8, left + (step + 0.5) * wide, before=0.5)
    write(image, "step", bottom + 36, (left + right) / 2, INK, TITLE, before=0.5)


def _scale(image: Image.Image, top: int) -> None:
    """Draws what the colours mean."""
    write(image, "skipped", top, MARGIN, INK, TITLE)
    colours = Image.fromarray(coloured(torch.linspace(0, 1, 180)).repeat(24, 1, 1).numpy())
    left = MARGIN + round(_font(TITLE).getlength("skipped")) + 16
    image.paste(colours, (left, top + 4))
    write(image, "computed", top, left + colours.width + 16, INK, TITLE)


def coloured(density: Tensor) -> Tensor:
    """Colours (..., 3) uint8 for densities (...)."""
    place = density.clamp(0, 1) * (len(SCALE) - 1)
    below = place.long().clamp(max=len(SCALE) - 2)
    return SCALE[below].lerp(SCALE[below + 1], (place - below).unsqueeze(-1)).round().byte()


def _as_tensor(image: Image.Image) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(1, image.height, image.width, 3).float() / 255


@functools.cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
