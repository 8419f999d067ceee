# SPDX-License-Identifier: Apache-2.0
"""The attention calls to judge modes by, and those that calibration may see."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.judge import Call
from benchmarks.quality_data.clips import make_clip
from benchmarks.quality_data.dino import Dino
from benchmarks.quality_data.frames import read_video
from benchmarks.quality_data.layer import Layer
from benchmarks.quality_data.smollm import SmolLM
from benchmarks.quality_data.text import python_reference
from benchmarks.quality_data.wheel import WeightsMissingError
from benchmarks.tiny_video_dit import flow
from benchmarks.tiny_video_dit.checkpoint import SHIPPED, load_model
from benchmarks.tiny_video_dit.clips import draw_clips
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from benchmarks.tiny_video_dit.latent import clip_size, to_latent
from benchmarks.tiny_video_dit.model import dense
from benchmarks.tiny_video_dit.sample import SCENE_SEED, starting_noise
from benchmarks.tiny_video_dit.scenes import context, draw_scenes
from sparge.plan.grid import TokenGrid

FRAMES, HEIGHT, WIDTH = 12, 448, 672  # of a procedural clip
TEXT_PARTS = 4  # of the text: the first is judged by, the second calibrated on
STEPS, DENSE_STEP, SPARSE_STEP = 20, 2, 10  # calibrated on one step of a video, judged by a later


@dataclass(frozen=True, eq=False)
class DataSet:
    """Calls of the same layers in the same order; judged and calibrated on may be the same calls,
    for the sampled query blocks differ."""

    name: str
    judged: list[Call]
    calibrated: Iterable[Call]
    text: tuple[SmolLM, Tensor] | None = None
    """The language model and the tokens to take the perplexity of."""


def load(options: Namespace) -> DataSet:
    """The data of the command line's `data`, `weights`, `video`, `seed`, `tokens`, `layers`.

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
    network = Dino.load(options.weights)
    calls = list(_calls(network.layers(clip), False, options.layers, network.depth))
    return DataSet(name, calls, calls)


def _smollm(options: Namespace) -> DataSet:
    model = SmolLM.load(options.weights)
    tokens, others = (
        model.tokens(python_reference(part, TEXT_PARTS), options.tokens) for part in (0, 1)
    )
    judged = list(_calls(model.layers(tokens), True, options.layers, model.depth))
    calibrated = _calls(model.layers(others), True, options.layers, model.depth)
    return DataSet(f"smollm {options.tokens}", judged, calibrated, (model, tokens))


def _dit(options: Namespace) -> DataSet:
    path = options.weights or SHIPPED
    if not path.is_file():
        raise WeightsMissingError(
            f"{path.name} is not there: the small video DiT is not trained yet. Train it with "
            "`python -m benchmarks.tiny_video_dit.train`, or name a weights' file with --weights."
        )
    model = load_model(path, dtype=torch.float32)
    scenes = draw_scenes(
        1, clip_size(FULL_GRID), torch.Generator().manual_seed(SCENE_SEED + options.seed)
    )
    latent = to_latent(draw_clips(scenes, clip_size(FULL_GRID)))
    noise = starting_noise(1, FULL_GRID, options.seed)
    sigmas = flow.sampling_sigmas(STEPS)
    calls: dict[int, list[Call]] = {}
    for step in (SPARSE_STEP, DENSE_STEP):
        layers: list[Layer] = []

        def recording(q: Tensor, k: Tensor, v: Tensor, index: int, to=layers) -> Tensor:
            grid = TokenGrid(*FULL_GRID)
            to.append(Layer(f"dit {index}", q.bfloat16(), k.bfloat16(), v.bfloat16(), grid))
            return dense(q, k, v, index)

        sigma = sigmas[step : step + 1]
        with torch.inference_mode():
            mixed = flow.noisy(latent, noise, sigma)
            model(mixed, sigma * flow.TIMESTEPS, context(scenes), recording)
        calls[step] = list(_calls(iter(layers), False, options.layers, len(layers)))
    return DataSet(f"dit scene {options.seed}", calls[SPARSE_STEP], calls[DENSE_STEP])


def _calls(
    layers: Iterator[Layer], is_causal: bool, wanted: Collection[int], depth: int
) -> Iterator[Call]:
    """Those of `wanted`, or all layers where it is empty."""
    for index, layer in enumerate(layers):
        if not wanted or index in wanted:
            yield Call(layer, is_causal)
        if index + 1 == (max(wanted) + 1 if wanted else depth):
            return
