# SPDX-License-Identifier: Apache-2.0
"""Attention calls to judge modes by, and those that a measurement may see."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from benchmarks.quality.judge import Call
from benchmarks.quality_data.clips import make_clip
from benchmarks.quality_data.dino import Dino
from benchmarks.quality_data.frames import read_video
from benchmarks.quality_data.layer import Layer
from benchmarks.quality_data.smollm import SmolLM
from benchmarks.quality_data.text import python_reference

FRAMES, HEIGHT, WIDTH = 12, 448, 672  # of a procedural clip
TEXT_PARTS = 4  # of the text: the first is judged by, the second measured


@dataclass(frozen=True, eq=False)
class DataSet:
    """Calls of the same layers; judged and measured ones may be the same calls, for the sampled
    query blocks differ then."""

    name: str
    judged: list[Call]
    measured_calls: Iterable[Call]
    """Calls of each layer that are measured."""
    text: tuple[SmolLM, Tensor] | None = None
    """The language model and the tokens to take the perplexity of."""

    @property
    def layers(self) -> int:
        return 1 + max(call.place for call in self.judged)


def load(options: Namespace) -> DataSet:
    """Loads the data that the command line asks for.

    Raises:
        WeightsMissingError: the weights are not there; the message says what to do.
    """
    return {"dino": _dino, "smollm": _smollm}[options.data](options)


def _dino(options: Namespace) -> DataSet:
    if options.video:
        name, clip = f"dino {options.video.stem}", read_video(options.video, FRAMES)
    else:
        name = f"dino clip {options.seed}"
        clip = make_clip(FRAMES, HEIGHT, WIDTH, options.seed)
    calls = list(_calls(Dino.load(options.weights, options.device).layers(clip), False))
    return DataSet(name, calls, calls)


def _smollm(options: Namespace) -> DataSet:
    model = SmolLM.load(options.weights, options.device)
    tokens, others = (
        model.tokens(python_reference(part, TEXT_PARTS), options.tokens) for part in (0, 1)
    )
    judged, measured_calls = (_calls(model.layers(each), True) for each in (tokens, others))
    return DataSet(f"smollm {options.tokens}", list(judged), measured_calls, (model, tokens))


def _calls(layers: Iterator[Layer], is_causal: bool) -> Iterator[Call]:
    for place, layer in enumerate(layers):
        yield Call(layer, is_causal, place=place)
