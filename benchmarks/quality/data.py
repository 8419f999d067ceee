# SPDX-License-Identifier: Apache-2.0
"""Attention calls to judge modes by, and those that a measurement may see."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.quality.judge import Call
from benchmarks.quality_data.clips import make_clip
from benchmarks.quality_data.dino import Dino
from benchmarks.quality_data.frames import read_video

FRAMES, HEIGHT, WIDTH = 12, 448, 672  # of a procedural clip


@dataclass(frozen=True, eq=False)
class DataSet:
    """Calls of the same layers; judged and measured ones may be the same calls, for the sampled
    query blocks differ then."""

    name: str
    judged: list[Call]
    measured_calls: Iterable[Call]
    """Calls of each layer that are measured."""

    @property
    def layers(self) -> int:
        return 1 + max(call.place for call in self.judged)


def load(options: Namespace) -> DataSet:
    """Loads the calls of DINOv2 on the clip that the command line asks for.

    Raises:
        WeightsMissingError: the weights are not there; the message says what to do.
    """
    if options.video:
        name, clip = f"dino {options.video.stem}", read_video(options.video, FRAMES)
    else:
        name = f"dino clip {options.seed}"
        clip = make_clip(FRAMES, HEIGHT, WIDTH, options.seed)
    layers = Dino.load(options.weights, options.device).layers(clip)
    calls = [Call(layer, place) for place, layer in enumerate(layers)]
    return DataSet(name, calls, calls)
