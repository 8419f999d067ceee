# SPDX-License-Identifier: Apache-2.0
"""Masks of transformers of diffusers: padding is served, whatever form it has and however often it
changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("diffusers")

from benchmarks.metrics import rel_l2
from sparge.integrations.diffusers import enable
from sparge.session import MASK
from tests.tiny_models.pipelines import drawn, flow

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

TOKENS, EIGHT_BIT = 320, 0.03
PLACES = torch.arange(TOKENS)
MANUAL: dict[str, Any] = {"min_tokens": 100, "start_percent": 0.0, "topk": 1.0}
#: Forms of a padding mask, of (TOKENS).
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda real: real[None, None, None].clone(),
    "added, by head": lambda real: ((real.float() - 1) * 1e5)[None, None, None].repeat(1, 2, 1, 1),
    "padding times padding": lambda real: (real[:, None] & real)[None, None],
    "and added": lambda real: torch.where(real[:, None] & real, 0, -torch.inf)[None, None],
}


class Masked(torch.nn.Module):
    """Transformer that fills one mask anew for each of its blocks."""

    class Block(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, x, mask)

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self.transformer_blocks = torch.nn.ModuleList(self.Block() for _ in masks)
        self.masks, self.mask = masks, masks[0].clone()

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        outs = []
        for block, mask in zip(self.transformer_blocks, self.masks, strict=True):
            np.copyto(self.mask.numpy(), mask.numpy())  # of which PyTorch does not know
            outs.append(block(hidden_states, self.mask))
        return torch.stack(outs)


def loop(model: Any, steps: int = 2, **given: Any) -> tuple[list[Tensor], Any]:
    """Results of a pass in each step, and the counts of a run with everything kept."""
    pipe = SimpleNamespace(transformer=model, scheduler=flow())
    pipe.scheduler.set_timesteps(steps)
    with enable(pipe, "manual", **MANUAL) as handle:
        outs = [model(timestep=t[None].bfloat16(), **given) for t in pipe.scheduler.timesteps]
    assert handle.stats is not None
    return outs, handle.stats.counts


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_each_block_fills_anew_is_read_anew(form: str, mode: Any) -> None:
    """It is of one entry, for the whole batch."""
    reals = [PLACES < 250, PLACES >= 30, PLACES >= 0, PLACES % 3 > 0]
    with mode():
        model = Masked([FORMS[form](real) for real in reals])
        hidden = drawn(2, 2, TOKENS, 64, seed=1).float()
        native = model(hidden, torch.ones(1))
        outs, counts = loop(model, hidden_states=hidden)
    assert (counts.sparse, counts.dense) == (2 * len(reals), 0)
    assert all(0 < rel_l2(out, native) < EIGHT_BIT for out in outs)


def test_other_masks_of_queries_and_keys_stay_native() -> None:
    """Those that are no padding, though as many places of them are seen."""
    causal = (PLACES[:, None] >= PLACES)[None, None]
    shifted = ((PLACES[:, None] < 200) & (PLACES >= 120))[None, None]
    swapped = FORMS["padding times padding"](PLACES < 200)
    swapped[..., 0, 0], swapped[..., 0, 250] = False, True
    padding = FORMS["padding times padding"](PLACES < 200)
    of_one_head = torch.cat([padding, torch.zeros_like(padding)], 1)
    rows = torch.cat([FORMS["row"](PLACES < 200), FORMS["row"](PLACES < 100)], 1)
    weights = padding.float()  # which Chroma's pipeline adds
    for mask in (causal, shifted, swapped, of_one_head, rows, weights):
        model = Masked([mask])
        hidden = drawn(1, 2, TOKENS, 64, seed=1).float()
        native = model(hidden, torch.ones(1))
        outs, counts = loop(model, hidden_states=hidden)
        assert counts.reasons == {MASK: 2} and all(torch.equal(out, native) for out in outs)
