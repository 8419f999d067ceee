# SPDX-License-Identifier: Apache-2.0
"""Models without a row in `families.FAMILIES`: what to call them, and what is lost without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Name that a user is shown where the name of a class would tell nothing.
NAMELESS = "This model"

#: Remark on sparse runs of a model without a row, where it is not known what is among its tokens.
UNKNOWN_MODEL = (
    "the pack does not know this model: tokens stay in the order they come, and text, should there "
    "be some among them, is not kept exact"
)
#: Remark where text is in its cross-attention alone.
UNKNOWN_ORDER = (
    "the pack does not know where this model has what: tokens stay in the order they come"
)

#: Names for the user, by class name; subclasses inherit their parent's. Why each has no row stands
#: in docs/guide.md.
NAMES: Mapping[str, str] = {
    "UNetModel": "Stable Diffusion",
    "StageB": "Stable Cascade",
    "StageC": "Stable Cascade",
    "HiDreamO1Transformer": "HiDream O1",
    "MMDiT": "AuraFlow",
    "Ideogram4Transformer2DModel": "Ideogram 4",
    "ErnieImageModel": "Ernie Image",
    "HunYuanDiT": "HunyuanDiT",
    "PixArtMS": "PixArt",
    "NaDiT": "SeedVR2",
    "AudioDiffusionTransformer": "Stable Audio",
    "ACEStepTransformer2DModel": "ACE-Step",
    "AceStepConditionGenerationModel": "ACE-Step",
    "MiniMaxMusic3DiT": "MiniMax Music",
    "Hunyuan3Dv2": "Hunyuan3D",
    "HunYuanDiTPlain": "Hunyuan3D",
    "Trellis2": "Trellis 2",
    "LatentSeqMMFlowModel": "TripoSplat",
}
_NO_TEXT = {"Stable Diffusion", "Stable Cascade"}


def name_of(class_names: Iterable[str]) -> str:
    """Name for the user; class_names: the model's own, then its parents'."""
    return next((NAMES[name] for name in class_names if name in NAMES), NAMELESS)


def remark_of(name: str) -> str:
    """Remark that the end-of-run line makes on sparse runs of a model of that name."""
    return UNKNOWN_ORDER if name in _NO_TEXT else UNKNOWN_MODEL
