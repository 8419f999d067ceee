# SPDX-License-Identifier: Apache-2.0
"""What every graph of one model has: loaders, our node, prompts, sampler, and the clip."""

from __future__ import annotations

from . import parts
from .layout import Group, Item, Node, Row, Stack

T2V = "text to video"
LATENT = "Size and length"


def one_model(
    loaders: tuple[Node, ...],
    size: Node,
    prompts: tuple[Node, ...],
    sampler: Node,
    watched: Group,
    notes_: tuple[Node, ...],
) -> Item:
    widths = (620, 600, 630)
    top = Row(tuple(Stack(width, (each,)) for width, each in zip(widths, notes_, strict=True)))
    what = "picture" if size.kind == "EmptySD3LatentImage" else "clip"
    columns = (
        Stack(
            0,
            (
                Group("1 Load models", Stack(300, loaders)),
                Group("2 " + size.title, Stack(300, (size,))),
            ),
        ),
        Stack(
            0,
            (
                Group("3 Make it faster", Stack(320, (parts.sparge(),))),
                Group(f"4 Describe the {what}", Stack(320, prompts)),
            ),
        ),
        Group("5 Sample", Stack(270, (sampler,))),
        watched,
    )
    return Stack(0, (top, Row(columns)))
