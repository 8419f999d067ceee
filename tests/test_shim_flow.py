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
from tests.tiny_tuned_models import HEADS, CogVideoX, Flux, attention_layers, steps, tuned_processor

SHIM = Path(__file__).parent.parent / "shim"
MODELS = {"CogVideoX": CogVideoX, "Flux": Flux}
L1, PV_L1 = 0.06, 0.065


@pytest.fixture(scope="module")
def autotune() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SHIM))
        yield importlib.import_module("spas_sage_attn.autotune")
    for name in [name for name in sys.modules if name.split(".")[0] == "spas_sage_attn"]:
        del sys.modules[name]


def tuned(make: type[nn.Module], autotune: ModuleType, **options: Any) -> nn.Module:
    """A model with the same weights every time, and untuned attention in it."""
    torch.manual_seed(0)
    model = make().bfloat16().eval()
    for layer in attention_layers(model):
        layer.inner_attention = autotune.SparseAttentionMeansim(l1=L1, pv_l1=PV_L1, **options)
        layer.processor = tuned_processor
    return model


def calls_of(model: nn.Module) -> list[tuple[int, tuple[Tensor, ...]]]:
    """Grows with the model's calls of attention: which layer, and its q, k, v."""
    calls: list[tuple[int, tuple[Tensor, ...]]] = []
    layer: Any
    for place, layer in enumerate(attention_layers(model)):
        layer.inner_attention.register_forward_hook(
            lambda module, qkv, out, place=place: calls.append((place, qkv))
        )
    return calls


@torch.no_grad()
def run(model: nn.Module, inputs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [model(*tokens) for tokens in inputs]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tune_pv", [True, False])
def test_tune_save_load_and_run(
    autotune: ModuleType, generator, monkeypatch, tmp_path: Path, name: str, tune_pv: bool
) -> None:
    inputs = steps(generator, 2)
    torch.manual_seed(0)
    exact = run(MODELS[name]().bfloat16().eval(), inputs)

    model = tuned(MODELS[name], autotune, tune_pv=tune_pv)
    tuned_on = calls_of(model)
    monkeypatch.setenv("TUNE_MODE", "1")
    assert all(map(torch.equal, run(model, inputs), exact)), "tuning gives exact attention"
    saved = autotune.extract_sparse_attention_state_dict(model)
    assert len(saved) == 5 * len(attention_layers(model))
    assert all(".inner_attention." in key for key in saved)
    torch.save(saved, tmp_path / "tuned.pt")

    fresh = tuned(MODELS[name], autotune)
    monkeypatch.setenv("TUNE_MODE", "")
    with pytest.raises(RuntimeError, match="no thresholds yet"):
        run(fresh, inputs)
    autotune.load_sparse_attention_state_dict(
        fresh, torch.load(tmp_path / "tuned.pt", weights_only=True)
    )
    sparse_calls = calls_of(fresh)
    out = run(fresh, inputs)
    bound = PV_L1 if tune_pv else L1
    for value, truth in zip(out, exact, strict=True):
        assert 0 < rel_l1(value, truth) < bound
    assert [place for place, _ in sparse_calls] == [place for place, _ in tuned_on]
    layers: list[Any] = [layer.inner_attention for layer in attention_layers(fresh)]
    for place, (q, k, v) in list(tuned_on):
        truth = scaled_dot_product_attention(q, k, v)
        result, sparsity = layers[place](q, k, v, return_sparsity=True)
        assert sparsity > 0.1
        for head in range(HEADS):
            assert rel_l1(result[:, head], truth[:, head]) < bound
