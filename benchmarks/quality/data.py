# SPDX-License-Identifier: Apache-2.0
"""Attention calls to judge modes by, and those that calibration may see."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from benchmarks.quality.dit import JUDGED_STEPS, DenseRun, load_dit, named, sample_dense
from benchmarks.quality.judge import Call
from benchmarks.quality_data.clips import make_clip
from benchmarks.quality_data.dino import Dino
from benchmarks.quality_data.frames import read_video
from benchmarks.quality_data.layer import Layer
from benchmarks.quality_data.smollm import SmolLM
from benchmarks.quality_data.text import python_reference

FRAMES, HEIGHT, WIDTH = 12, 448, 672  # of a procedural clip
TEXT_PARTS = 4  # of the text: the first is judged by, the second calibrated on


@dataclass(frozen=True, eq=False)
class DataSet:
    """Calls of the same layers; judged and calibrated on may be the same calls, for the sampled
    query blocks differ then."""

    name: str
    judged: list[Call]
    calibrated: Iterable[Call]
    """Calls of each layer to calibrate on."""
    text: tuple[SmolLM, Tensor] | None = None
    """The language model and the tokens to take the perplexity of."""
    runs: tuple[DenseRun, ...] = ()
    """Clips to sample in the modes; the calls are those of the first."""

    @property
    def layers(self) -> int:
        return 1 + max(call.place for call in self.judged)


def load(options: Namespace) -> DataSet:
    """Loads the data that the command line asks for.

    Raises:
        WeightsMissingError: the weights are not there; the message says what to do.
    """
    return {"dino": _dino, "smollm": _smollm, "dit": _dit}[options.data](options)


def _dino(options: Namespace) -> DataSet:
    if options.video:
        name, clip = f"dino {options.video.stem}", read_video(options.video, FRAMES)
    else:
        name = f"dino clip {options.seed}"
        clip = make_clip(FRAMES, HEIGHT, WIDTH, options.seed)
    network = Dino.load(options.weights, options.device)
    calls = list(_calls(network.layers(clip), False, options.layers, network.depth))
    return DataSet(name, calls, calls)


def _smollm(options: Namespace) -> DataSet:
    model = SmolLM.load(options.weights, options.device)
    tokens, others = (
        model.tokens(python_reference(part, TEXT_PARTS), options.tokens) for part in (0, 1)
    )
    judged = list(_calls(model.layers(tokens), True, options.layers, model.depth))
    calibrated = _calls(model.layers(others), True, options.layers, model.depth)
    return DataSet(f"smollm {options.tokens}", judged, calibrated, text=(model, tokens))


def _dit(options: Namespace) -> DataSet:
    model = load_dit(options.weights, options.device)
    grid = tuple(options.grid)
    seeds = range(options.seed, options.seed + max(1, options.clips))
    first = sample_dense(model, grid, seeds[0], options.layers, JUDGED_STEPS)
    others = (sample_dense(model, grid, seed, options.layers) for seed in seeds[1:])
    runs = (first, *others)
    name = named(first.grid, f"scene {first.seed}")
    return DataSet(name, first.judged, first.calibrated, runs=runs)


def _calls(
    layers: Iterator[Layer], is_causal: bool, wanted: Collection[int], depth: int
) -> Iterator[Call]:
    """Calls of the layers `wanted`, or of all where it is empty."""
    place = 0
    for index, layer in enumerate(layers):
        if not wanted or index in wanted:
            yield Call(layer, is_causal, place=place)
            place += 1
        if index + 1 == (max(wanted) + 1 if wanted else depth):
            return
