# SPDX-License-Identifier: Apache-2.0
"""What every graph of one model has: loaders, our node, prompts, sampler, and the clip."""

from __future__ import annotations

from . import parts
from .layout import BESIDE, Group, Item, Node, Row, Stack, extent

T2V = "text to video"


def one_model(
    loaders: tuple[Node, ...],
    size: Node,
    prompts: tuple[Node, ...],
    sampler: Node,
    watched: Group,
    notes_: tuple[Node, ...],
) -> Item:
    widths = (658, 640, 671)
    top = Row(tuple(Stack(width, (each,)) for width, each in zip(widths, notes_, strict=True)))
    return Stack(0, (top, columns(loaders, size, prompts, sampler, watched)))


def columns(
    loaders: tuple[Node, ...],
    size: Node,
    prompts: tuple[Node, ...],
    sampler: Node,
    last: Group | Stack,
) -> Row:
    """Columns of which each feeds the next alone, so that no link passes behind a node; two links
    have a way left free: our node's to the report, and the latent's to the sampler."""
    what = "picture" if size.kind == "EmptySD3LatentImage" else "clip"
    load = tuple(node for node in loaders if node.kind != "VAELoader")
    vaes = tuple(node for node in loaders if node.kind == "VAELoader")
    loads = Group("1 Load models", Stack(300, load))
    # The way of the latent to the sampler, between our node and the prompts.
    way = extent(loads)[1] - 298
    return Row(
        (
            Stack(0, (loads, Group("2 " + size.title, Stack(300, (size,)))), gap=BESIDE),
            Stack(
                0,
                (
                    # As wide as what it says after a run is in one line, as Nodes 2.0 writes it.
                    Group("3 Make it faster", Stack(345, (parts.sparge(),))),
                    Group(f"4 Describe the {what}", Stack(345, prompts)),
                ),
                gap=way + 30,
            ),
            Stack(
                0,
                (
                    Group("5 Sample", Stack(270, (sampler,))),
                    Group("6 Load VAE", Stack(270, vaes)),
                ),
                top=way + 252,
                gap=BESIDE,
            ),
            last,
        ),
        36,
    )
