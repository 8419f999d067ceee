# SPDX-License-Identifier: Apache-2.0
"""Upstream's evaluation, through the package under its name: tune, save, load, run sparse."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from sparge.common.metrics import rel_l1

SHIM = Path(__file__).parent.parent / "shim"
WIDTH, HEADS, TOKENS = 64, 2, 7 * 64
L1, PV_L1 = 0.06, 0.065


class Attention(nn.Module):
    """Queries look for tokens like themselves. Tuned attention is hung into it from outside, as
    upstream's evaluation does with diffusers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        for layer in (self.to_q, self.to_v, self.to_out):
            nn.init.orthogonal_(layer.weight)
        self.inner_attention: Any = scaled_dot_product_attention

    def forward(self, hidden: Tensor) -> Tensor:
        normed = nn.functional.layer_norm(hidden, (WIDTH,))
        q, k, v = (
            layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.to_q, self.to_q, self.to_v)
        )
        return hidden + 0.2 * self.to_out(self.inner_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def autotune() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SHIM))
        yield importlib.import_module("spas_sage_attn.autotune")
    for name in [name for name in sys.modules if name.split(".")[0] == "spas_sage_attn"]:
        del sys.modules[name]


def model_of(inner: Any) -> nn.Sequential:
    """Model of two attention layers, with the same weights every time."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).bfloat16().eval()
    for layer in model:
        if inner:
            layer.inner_attention = inner()
    return model


@torch.no_grad()
@pytest.mark.parametrize("tune_pv", [True, False])
def test_tune_save_load_and_run(
    autotune: ModuleType, generator, monkeypatch, tmp_path: Path, tune_pv: bool
) -> None:
    kinds = torch.randn(1, 7, 1, WIDTH, generator=generator)
    noise = torch.randn(2, 1, 7, TOKENS // 7, WIDTH, generator=generator)
    inputs = [
        (kinds + scale * n).flatten(1, 2).bfloat16()
        for scale, n in zip((0.4, 0.3), noise, strict=True)
    ]
    exact = [model_of(None)(x) for x in inputs]

    def tuned(**options: Any) -> nn.Sequential:
        return model_of(lambda: autotune.SparseAttentionMeansim(l1=L1, pv_l1=PV_L1, **options))

    model, calls = tuned(tune_pv=tune_pv), []
    for place, layer in enumerate(model):
        attend: Any = layer.inner_attention
        attend.register_forward_hook(lambda _, qkv, out, at=place: calls.append((at, qkv)))
    monkeypatch.setenv("TUNE_MODE", "1")
    assert all(map(torch.equal, map(model, inputs), exact)), "tuning gives exact attention"
    saved = autotune.extract_sparse_attention_state_dict(model)
    assert len(saved) == 5 * len(model) and all(".inner_attention." in key for key in saved)
    torch.save(saved, tmp_path / "tuned.pt")

    fresh = tuned()
    monkeypatch.setenv("TUNE_MODE", "")
    with pytest.raises(RuntimeError, match="no thresholds yet"):
        fresh(inputs[0])
    loaded = torch.load(tmp_path / "tuned.pt", weights_only=True)
    autotune.load_sparse_attention_state_dict(fresh, loaded)
    bound = PV_L1 if tune_pv else L1
    for x, truth in zip(inputs, exact, strict=True):
        assert 0 < rel_l1(fresh(x), truth) < bound
    for place, (q, k, v) in calls:
        attend = fresh[place].inner_attention
        truth = scaled_dot_product_attention(q, k, v)
        result, sparsity = attend(q, k, v, return_sparsity=True)
        assert sparsity > 0.1
        for head in range(HEADS):
            assert rel_l1(result[:, head], truth[:, head]) < bound
