# SPDX-License-Identifier: Apache-2.0
"""Models without a row in `families.FAMILIES`: what to call them, and what is lost without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

#: Name that a user is shown where the name of a class would tell nothing.
NAMELESS = "This model"

_IN_ORDER = "tokens stay in the order they come"
#: Remark on sparse runs of a model without a row, where it is not known what is among its tokens.
UNKNOWN_MODEL = (
    f"the pack does not know this model: {_IN_ORDER}, and text, should there be some among them, "
    "is not kept exact"
)
#: Remark where its self-attention has text beside the picture.
UNKNOWN_TEXT = (
    "the pack does not know where this model has what: text among its tokens is not kept exact, "
    f"and {_IN_ORDER}"
)
#: Remark where text is in its cross-attention alone.
UNKNOWN_ORDER = f"the pack does not know where this model has what: {_IN_ORDER}"

#: Names for the user, by class name; subclasses inherit their parent's.
_NAMES: Mapping[str, str] = {
    "MMDiT": "AuraFlow",
    "UNetModel": "Stable Diffusion",
    "HiDreamO1Transformer": "HiDream O1",
    "PixDiT_T2I": "PixelDiT",
    "Ideogram4Transformer2DModel": "Ideogram 4",
    "ErnieImageModel": "Ernie Image",
    "HunYuanDiT": "HunyuanDiT",
    "PixArtMS": "PixArt",
    "NaDiT": "SeedVR2",
    "StageB": "Stable Cascade",
    "StageC": "Stable Cascade",
}
_TEXT_AMONG_TOKENS = {"AuraFlow", "PixelDiT"}
_NO_TEXT = {
    *("Stable Diffusion", "Stable Cascade", "PixArt", "HunyuanDiT"),
}


def name_of(class_names: Iterable[str]) -> str:
    """Name for the user; class_names: the model's own, then its parents'."""
    return next((_NAMES[name] for name in class_names if name in _NAMES), NAMELESS)


def remark_of(name: str) -> str:
    """Remark that the end-of-run line makes on sparse runs of a model of that name."""
    if name in _NO_TEXT:
        return UNKNOWN_ORDER
    return UNKNOWN_TEXT if name in _TEXT_AMONG_TOKENS else UNKNOWN_MODEL


def layers_of(model: Any) -> int | None:
    """About how many self-attentions a model has whose blocks cannot be counted by their lists."""
    if not isinstance(model, nn.Module):
        return None
    # UNets hold lists of resolutions, and in each other numbers of transformer blocks.
    blocks = sum(hasattr(module, "attn1") for module in model.modules())
    lists = (child for child in model.children() if isinstance(child, nn.ModuleList))
    return blocks or sum(map(len, lists)) or None
