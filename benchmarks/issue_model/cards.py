# SPDX-License-Identifier: Apache-2.0
"""Milliseconds that calls of three models should take on RTX cards, ours beside those of others."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.speed_table import table
from sparge.blocks import KEY_BLOCK
from sparge.speed.post import DENSITY, MODELS, POOLED, Model
from sparge.speed.predicted import BEYOND, Card, predicted_range

#: Multiprocessors, boost clock and bandwidth as NVIDIA publishes them.
CARDS: Mapping[str, tuple[str, Card]] = {
    "RTX 3060": ("sm_86", Card(28, 1.777, 360)),
    "RTX 3090": ("sm_86", Card(82, 1.695, 936)),
    "RTX A6000": ("sm_86", Card(84, 1.800, 768)),
    "RTX 4060 Ti": ("sm_89", Card(34, 2.535, 288)),
    "RTX 4090": ("sm_89", Card(128, 2.520, 1008)),
    "L40S": ("sm_89", Card(142, 2.520, 864)),
    "RTX 5070 Ti": ("sm_120a", Card(70, 2.452, 896)),
    "RTX 5090": ("sm_120a", Card(170, 2.407, 1792)),
}
#: Cards whose products with float32 sums run at the whole rate. Exact attention is up to twice as
#: fast there, and no figure of it is known.
WHOLE = ("RTX A6000", "L40S")


@dataclass(frozen=True)
class Peer:
    """Clocks of another package for a block of 128 queries x 64 keys, by target and head_dim;
    docs/experiments.md, Peers on RTX cards, says how they were found."""

    name: str
    clocks: Mapping[str, Mapping[int, float]]
    density: float = 1.0
    quantizes: bool = True
    """Whether it moves as many bytes before as ours does."""
    of_whole: bool = True
    """Whether the clocks are those of `WHOLE` too."""

    def cell(self, name: str, model: Model) -> str:
        arch, card = CARDS[name]
        clocks = self.clocks[arch].get(model.head_dim)
        if clocks is None or (name in WHOLE and not self.of_whole):
            return ""
        before = card.preparing(model.size) if self.quantizes else 0.0
        return _ms(card.attending(model.size, self.density, clocks) + before)


PEERS = (
    # FlashAttention 2 in 16 bits, which ComfyUI asks PyTorch for first: bound by tensor cores.
    Peer(
        "exact",
        {
            "sm_86": {64: 4300, 128: 8400},
            "sm_89": {64: 4350, 128: 8500},
            "sm_120a": {64: 4400, 128: 8600},
        },
        quantizes=False,
        of_whole=False,
    ),
    # Published rates at head_dim 128; at 64 the model, slower by what it was off at 128.
    Peer(
        "SageAttention 2++",
        {
            "sm_86": {64: 2520, 128: 4300},
            "sm_89": {64: 1440, 128: 2850},
            "sm_120a": {64: 1550, 128: 2850},
        },
    ),
    # The model: its exact part alone. It takes head_dim 128 only.
    Peer(
        f"sol_attn, {100 * DENSITY:.0f} %, at least",
        {"sm_86": {128: 2578}, "sm_89": {128: 2446}, "sm_120a": {128: 2220}},
        DENSITY,
    ),
)


def predicted_table() -> str:
    """Table of all models and cards, ours as a range: BEYOND is how far off the model was."""
    off = ", ".join(f"{BEYOND[d]:g} times at head_dim {d}" for d in sorted(BEYOND, reverse=True))
    rows = []
    for model in MODELS:
        for name, (arch, card) in CARDS.items():
            found = predicted_range(card, arch, model.size, DENSITY, POOLED)
            assert found is not None, f"the model knows no clocks of {arch}"
            peers = (peer.cell(name, model) for peer in PEERS)
            rows.append([model.name, name, *peers, " to ".join(map(_ms, found))])
    head = ["predicted, ms", "card", *(peer.name for peer in PEERS), f"ours, {100 * DENSITY:.0f} %"]
    said = (
        "Predicted, not measured. Ours is with pooled keys in all heads, "
        f"1/{KEY_BLOCK} of the blocks more; its second number counts by how much calls on an H100 "
        f"took longer than predicted, up to {off}."
    )
    return f"\n{table(head, rows)}\n{textwrap.fill(said, 120)}\n"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"
