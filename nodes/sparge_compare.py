# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttentionCompare: the clip without Sparge Attention beside the one with it, and how
much they differ. Clips are ComfyUI's images: (frames, height, width, 3) float32, 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from .comfyui import show_on_node

#: Factor that makes differences visible.
AMPLIFIED = 4
#: Decibels from which on a difference is called so.
CALLED = (
    (45.0, "No difference to see"),
    (35.0, "Small differences"),
    (25.0, "Details differ"),
    (-math.inf, "Another picture"),
)


def likeness(reference: Tensor, clip: Tensor) -> str:
    """Tells how alike two clips are, by the peak signal-to-noise ratio of all frames together."""
    squares = [float((a - b).square().mean()) for a, b in zip(reference, clip, strict=True)]
    error = sum(squares) / len(squares)
    if not error:
        return "The videos are equal"
    if not math.isfinite(error):
        return "A video has pixels that are no numbers, so the videos cannot be compared"
    psnr = -10 * math.log10(error)
    called = next(words for least, words in CALLED if psnr >= least)
    return f"{called}: {psnr:.1f} dB PSNR"


def as_colours(clip: Tensor, device: torch.device) -> Tensor:
    """Red, green and blue of a clip in float32: some have transparency beside them (layers of Qwen
    Image), or 16 bits (--fp16-intermediates)."""
    return clip[..., :3].to(device, torch.float32)


def mismatch(reference: Tensor, clip: Tensor) -> str | None:
    """Sentence for two clips whose pixels cannot be compared; None where they can."""
    if reference.shape[1:] == clip.shape[1:]:
        return None
    sizes = ["x".join(map(str, (x.shape[2], x.shape[1]))) for x in (reference, clip)]
    return (
        f"The videos are {sizes[0]} and {sizes[1]} pixels, so nothing was compared: give two of "
        "one size, such as the same graph with and without Sparge Attention."
    )


def _split(reference: Tensor, clip: Tensor) -> Tensor:
    """The left half of one and the right half of the other, with a line between them."""
    middle = clip.shape[2] // 2
    out = torch.cat([reference[:, :, :middle], clip[:, :, middle:]], 2)
    out[:, :, max(0, middle - 1) : middle + 1] = 1.0
    return out


def _difference(reference: Tensor, clip: Tensor) -> Tensor:
    return (reference - clip).abs_().mul_(AMPLIFIED).clamp_(0, 1)


#: Ways to show two clips; the names are in saved graphs.
SIDE_BY_SIDE = "side by side"
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    SIDE_BY_SIDE: lambda reference, clip: torch.cat([reference, clip], 2),
    "split": _split,
    f"difference x{AMPLIFIED}": _difference,
}


class SpargeAttentionCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeAttentionCompare",
            display_name="Compare (Sparge Attention)",
            category="image",
            description=(
                "Shows two videos in one, and says how much they differ: the same seed with and "
                "without Sparge Attention, or with two of its settings."
            ),
            search_aliases=["compare videos", "psnr", "difference", "side by side"],
            inputs=[
                io.Image.Input("reference", tooltip="The video without Sparge Attention."),
                io.Image.Input("clip", tooltip="The video with it, of the same seed."),
                io.Combo.Input(
                    "view",
                    options=list(VIEWS),
                    default=SIDE_BY_SIDE,
                    tooltip=(
                        "side by side: the reference is on the left. split: its left half beside "
                        "the right half of the video. difference x4: black where both are alike."
                    ),
                ),
            ],
            outputs=[
                io.Image.Output("comparison", tooltip="Both videos in one, for Create Video."),
                io.String.Output("text", tooltip="How much they differ."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, reference: Tensor, clip: Tensor, view: str = SIDE_BY_SIDE) -> io.NodeOutput:
        reference, clip = (as_colours(each, reference.device) for each in (reference, clip))
        if problem := mismatch(reference, clip):
            return cls._shown(clip, problem)  # a long run must not be lost for it
        frames = min(len(reference), len(clip))
        text = f"{likeness(reference[:frames], clip[:frames])}."
        if len(reference) != len(clip):
            text += (
                f"\nThe videos have {len(reference)} and {len(clip)} frames: the first {frames} "
                "were compared."
            )
        return cls._shown(VIEWS[view](reference[:frames], clip[:frames]), text)

    @classmethod
    def _shown(cls, image: Tensor, text: str) -> io.NodeOutput:
        """Shows the text and the middle frame on the node."""
        show_on_node(cls.hidden.unique_id if cls.hidden else None, text)
        middle = image[len(image) // 2 :][:1]
        shown = ui.PreviewImage(middle, cls=cls).as_dict() | ui.PreviewText(text).as_dict()
        return io.NodeOutput(image, text, ui=shown)
