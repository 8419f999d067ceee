# SPDX-License-Identifier: Apache-2.0
"""Transformers of pipelines that are copied or trained while they are enabled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.integrations.needed import REASON

pytest.importorskip("diffusers", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from sparge.integrations.diffusers import enable
from sparge.integrations.diffusers.handle import Handle
from tests.tiny_models.pipelines import ALL, TEXT, WIDTH, drawn

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

TINY: dict[str, Any] = {"topk": 0.5, "min_tokens": 100, "start_percent": 0.0}


def calls_of(handle: Handle) -> int:
    assert handle.result is not None and handle.result.counts.sparse
    return handle.result.counts.sparse


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_the_transformer_is_native(make_copy: Any) -> None:
    tiny = ALL["Wan 2.1"]()
    native, model = tiny(2), tiny.pipe.transformer
    with enable(tiny.pipe, "manual", **TINY) as handle:
        sparse = tiny(2)
        calls = calls_of(handle)
        tiny.pipe.transformer = copied = make_copy(model)
        assert copied.cache_context.__self__._named.__self__ is copied
        assert torch.equal(tiny(2), native) and calls_of(handle) == calls
        with enable(tiny.pipe, "manual", **TINY) as of_copy:
            assert torch.equal(tiny(2), sparse) and calls_of(of_copy) == calls
        tiny.pipe.transformer = model
        assert torch.equal(tiny(2), sparse)
    assert torch.equal(tiny(2), native)


@pytest.mark.parametrize("mode", ["manual", "auto budget"])
def test_a_pass_with_gradients_is_native_and_measures_nothing(mode: str) -> None:
    """Checkpointing then finds the tensors of the first run of a block in the second one."""
    tiny = ALL["Wan 2.1"]()
    model = tiny.pipe.transformer.train()
    model.enable_gradient_checkpointing()
    tiny.pipe.scheduler.set_timesteps(2)
    latents, text = drawn(1, 4, 5, 16, 24, seed=1), drawn(1, TEXT, WIDTH, seed=2)
    weight = model.blocks[0].attn1.to_q.weight
    gradients = []
    for timestep in tiny.pipe.scheduler.timesteps:
        given = {"timestep": timestep.expand(1), "encoder_hidden_states": text}
        for enabled in (False, True):
            handle = enable(tiny.pipe, mode, **TINY) if enabled else None
            model(latents, **given).sample.float().square().sum().backward()
            gradients.append(weight.grad)
            weight.grad = None
            if handle is not None:
                result = handle.result
                assert result is not None and not result.counts.sparse and not result.notes
                assert "no backward pass" in next(iter(result.counts.reasons))
                handle.disable()
        assert torch.equal(*gradients[-2:]) and gradients[-1].abs().sum() > 0
