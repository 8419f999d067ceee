# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttentionCompare: the clip without Sparge Attention beside the one with it."""

from __future__ import annotations

from comfy_api.latest import io
from torch import Tensor

from .comparison import Likeness, View, as_colours, mismatch
from .host import show_on_node


class SpargeAttentionCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeAttentionCompare",
            display_name="Sparge Attention Compare",
            category="image",
            description=(
                "Shows two clips in one, and says how much they differ: the same seed with and "
                "without Sparge Attention, or with two of its settings."
            ),
            search_aliases=["compare videos", "psnr", "ssim", "difference", "side by side"],
            inputs=[
                io.Image.Input("reference", tooltip="The clip without Sparge Attention."),
                io.Image.Input("clip", tooltip="The clip with it, of the same seed."),
                io.Combo.Input(
                    "view",
                    options=[view.value for view in View],
                    default=View.SIDE_BY_SIDE.value,
                    tooltip=(
                        "side by side: the reference is on the left. split: its left half beside "
                        "the right half of the clip. difference x4: black where both are alike."
                    ),
                ),
            ],
            outputs=[
                io.Image.Output("comparison", tooltip="Both clips in one, for Create Video."),
                io.String.Output("text", tooltip="How much they differ."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, reference: Tensor, clip: Tensor, view: str = View.SIDE_BY_SIDE.value
    ) -> io.NodeOutput:
        reference, clip = (as_colours(each, reference.device) for each in (reference, clip))
        if problem := mismatch(reference, clip):
            return cls._shown(clip, problem)  # a long run must not be lost for it
        frames = min(len(reference), len(clip))
        text = f"{Likeness.of(reference[:frames], clip[:frames])}."
        if len(reference) != len(clip):
            text += (
                f"\nThe clips have {len(reference)} and {len(clip)} frames: the first {frames} "
                "were compared."
            )
        return cls._shown(View(view).of(reference[:frames], clip[:frames]), text)

    @classmethod
    def _shown(cls, image: Tensor, text: str) -> io.NodeOutput:
        """Shows the text and the middle frame on the node."""
        from comfy_api.latest import ui  # only what a run shows needs it

        show_on_node(cls.hidden.unique_id if cls.hidden else None, text)
        middle = image[len(image) // 2 :][:1]
        shown = ui.PreviewImage(middle, cls=cls).as_dict() | ui.PreviewText(text).as_dict()
        return io.NodeOutput(image, text, ui=shown)
