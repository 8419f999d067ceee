# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's DualModelGuider: a second model runs with the options of the one that is sampled."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS, LATENT, TOKENS

pytestmark = pytest.mark.usefixtures("reference_allowed")


@pytest.fixture
def two_models(session, patch, runs, generator):
    """two_models(tokens of the second's calls, **widgets): the patched model, and its run."""

    def step(tokens):
        layers = torch.randn(BLOCKS, 3, 1, tokens, HEADS * 64, generator=generator)
        return lambda attend: [attend(*layer, HEADS) for layer in layers]

    def run(tokens=TOKENS, mode="auto quality", **widgets):
        patched = patch(mode=mode, **widgets)
        sampling = session(patched, LATENT)
        network = copy.deepcopy(sampling.model.diffusion_model)
        second = type(sampling.model)(diffusion_model=network)
        # What is set here is of the pass that follows.
        models = itertools.cycle([second, sampling.model])
        passes = itertools.cycle([step(TOKENS), step(tokens)])

        def in_turn(attend):
            sampling.model = next(models)
            return next(passes)(attend)

        sampling.sample(in_turn, [1.0, 0.9, 0.7], conditionings=([0], [0]))
        return patched, runs[-1][0]

    return run


def test_it_is_measured_by_itself(two_models):
    _, run = two_models()
    assert [heads.sparse_rows for heads in run.heads.by_shape.values()] == [{*range(BLOCKS)}] * 2
    assert run.report().notes[0].startswith("the guider runs a second model")
    assert run.report().notes[0].endswith("measured apart")
    sampled, other = run._model, object()  # a copy on another device is none
    assert run.which(other, torch.device("meta")) == run.which(sampled, run._device) == 0
    assert run.which(other, run._device) == id(other)
