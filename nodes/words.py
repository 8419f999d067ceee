# SPDX-License-Identifier: Apache-2.0
"""Sentences of the node on why nothing was sparse."""

from __future__ import annotations

from dataclasses import replace

from ..sparge.session import Why, Words

_NO_CALL = "no attention call reached this node; "

WORDS = Words(
    no_calls=Why(
        f"{_NO_CALL}a node after it replaces the attention, or the model does not offer it (put "
        "Sparge Attention last, before the sampler)",
        ("No attention call reached this node", "Put it last, before the sampler"),
    ),
    whole_graph=Why(
        f"{_NO_CALL}torch.compile with fullgraph leaves it no room (turn fullgraph off), or a node "
        "after it replaces the attention",
        ("No attention call reached this node", "Turn fullgraph off in the compile node"),
    ),
    replaced=Why(
        "the {what}'s self-attention did not reach this node; another node replaces it, or the "
        "model computes it in a way of its own",
        ("Another node replaces the attention", "of the {what}, or the model does"),
    ),
    unreached="no self-attention of a whole grid reached this node",
)

_NO_CALL_OF_WRAPPER = Why(
    f"{_NO_CALL}a node after this one sets another attention mode, or the model computes attention "
    "past that mode (radial attention, MultiTalk, or torch.compile with fullgraph)",
    ("No attention call reached this node", "Put it last, before the sampler"),
)
#: In WanVideoWrapper, which says where its attention goes by the attention mode.
WAN_WRAPPER = replace(
    WORDS,
    no_calls=_NO_CALL_OF_WRAPPER,
    whole_graph=_NO_CALL_OF_WRAPPER,
    replaced=Why(
        "the {what}'s self-attention did not reach this node; the model computes it past the "
        "attention mode",
        ("The {what}'s self-attention", "did not reach this node"),
    ),
)
