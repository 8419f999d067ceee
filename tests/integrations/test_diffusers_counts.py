# SPDX-License-Identifier: Apache-2.0
"""All self-attention of a transformer of diffusers is counted, wherever in the model it stands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.integrations.needed import REASON

pytest.importorskip("diffusers", reason=REASON)

from sparge.integrations.diffusers import enable
from sparge.sdpa import AttentionMode
from tests.tiny_models.pipelines import drawn, flow

diffusers: Any = sys.modules["diffusers"]  # its parts are found when they are asked for

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

LEAST, TEXT, WIDTH, STEPS = 64, 26, 32, 2


def wan_vace() -> tuple[nn.Module, dict[str, Any]]:
    """Its control blocks stand in a list of their own."""
    model = diffusers.WanVACETransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=64, in_channels=4,
        out_channels=4, text_dim=WIDTH, freq_dim=32, ffn_dim=64, num_layers=2,
        rope_max_seq_len=64, vace_layers=[0, 1], vace_in_channels=8,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn(1, 4, 3, 12, 10, seed=1),
        "control_hidden_states": drawn(1, 8, 3, 12, 10, seed=2),
        "encoder_hidden_states": drawn(1, TEXT, WIDTH, seed=3),
    }


def aura_flow() -> tuple[nn.Module, dict[str, Any]]:
    """The first of its lists has no usual name."""
    model = diffusers.AuraFlowTransformer2DModel(
        sample_size=24, patch_size=2, in_channels=4, num_mmdit_layers=2, num_single_dit_layers=2,
        attention_head_dim=64, num_attention_heads=2, joint_attention_dim=WIDTH,
        caption_projection_dim=128, out_channels=4, pos_embed_max_size=144,
    )  # fmt: skip
    text = drawn(1, TEXT, WIDTH, seed=3)
    return model, {"hidden_states": drawn(1, 4, 24, 24, seed=1), "encoder_hidden_states": text}


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


class Parts(nn.Module):
    """Long and short attention in no list, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Attention()])
        self.pooling, self.norm = nn.Sequential(nn.Identity(), Attention()), nn.LayerNorm(64)

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        short = self.pooling(hidden_states[:, :, : LEAST - 1])
        x = self.norm(self.pooling(hidden_states)) + short.mean()
        return self.transformer_blocks[0](x)


def own() -> tuple[nn.Module, dict[str, Any]]:
    return Parts(), {"hidden_states": drawn(1, 2, 200, 64, seed=1)}


def loop(model: nn.Module, given: dict[str, Any], pipe: Any) -> None:
    for t in pipe.scheduler.timesteps:
        model(timestep=t[None].bfloat16() / 1000, **given)


@pytest.mark.parametrize(
    ("made", "beside"), [(wan_vace, 0), (aura_flow, 0), (own, 1)], ids=["VACE", "AuraFlow", "own"]
)
def test_sparse_and_dense_calls_are_those_that_came(
    made: Callable[[], tuple[nn.Module, dict[str, Any]]], beside: int
) -> None:
    torch.manual_seed(0)
    model, given = made()
    pipe = SimpleNamespace(transformer=model.bfloat16().eval(), scheduler=flow())
    pipe.scheduler.set_timesteps(STEPS)
    seen: list[int] = []

    def see(query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
        if query.shape[2] == key.shape[2] >= LEAST:
            seen.append(query.shape[2])

    with torch.no_grad():
        with AttentionMode(see):
            loop(model, given, pipe)
        with enable(pipe, "manual", topk=0.3, min_tokens=LEAST, start_percent=0.0) as handle:
            loop(model, given, pipe)
    assert handle.result is not None
    counts = handle.result.counts
    assert counts.sparse + counts.dense == len(seen) and counts.dense == beside * STEPS
    assert handle.line.startswith(f"{counts.sparse} of {len(seen)} calls were sparse")


def test_a_controlnet_that_is_not_served_is_told() -> None:
    model, given = own()
    pipe = SimpleNamespace(transformer=model.bfloat16(), scheduler=flow(), controlnet=nn.Identity())
    pipe.scheduler.set_timesteps(1)
    with enable(pipe, "manual", min_tokens=LEAST, start_percent=0.0) as handle:
        loop(model, given, pipe)
    assert "the attention of the pipeline's controlnet is native, and not counted" in handle.line
