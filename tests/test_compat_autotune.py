# SPDX-License-Identifier: Apache-2.0
"""Tuned attention: thresholds by head, and the files that keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparge import compat
from sparge.compat import autotune
from sparge.compat.autotune import SAVED
from sparge.compat.autotune import extract_sparse_attention_state_dict as extract
from sparge.compat.autotune import load_sparse_attention_state_dict as load

cdf_attention: Any = compat.spas_sage2_attn_meansim_cuda
tuned_attention: Any = autotune.SparseAttentionMeansim


def test_what_cannot_be_done_is_said(make_qkv) -> None:
    with pytest.raises(ValueError, match="tuned file"):
        tuned_attention(l1=0.06)(*make_qkv())
    with pytest.raises(ValueError, match="no element mask"):
        tuned_attention()(*make_qkv(), mask=torch.ones(256, 256))
    load(model := Layers(), upstreams_file())
    with pytest.raises(ValueError, match="not tuned here"):
        model.attention(0)(*make_qkv(), tune_mode=True)


NAME = "blocks.{}.attn1.inner."


class Layers(nn.Module):
    """A layer 10 beside layer 1, and a first parameter that has nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn1": nn.ModuleDict({"inner": tuned_attention()})}) for _ in range(11)
        )

    def attention(self, layer: int) -> Any:
        return self.get_submodule(NAME.format(layer).rstrip("."))


def part(values: list[float]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.bfloat16), requires_grad=False)


def upstreams_file(layers: int = 11, heads: int = 2) -> dict[str, Tensor]:
    """File that upstream saves: Parameters of bf16, one tensor (heads,) a part."""
    return {
        NAME.format(layer) + name: part([1 if name == "is_sparse" else (layer + 1) / 16] * heads)
        for layer in range(layers)
        for name in SAVED
    }


class TestFiles:
    def test_upstreams_file_loads(self, make_qkv, tmp_path: Path) -> None:
        last = {"cdfthreshd": [0.3, 1.0], "simthreshd1": [-0.9375] * 2, "pvthreshd": [9.4] * 2}
        saved = upstreams_file() | {NAME.format(10) + n: part(x) for n, x in last.items()}
        torch.save(saved, tmp_path / "tuned.pt")
        model = Layers()
        loaded = torch.load(tmp_path / "tuned.pt", weights_only=True)
        assert load(model, loaded) is model
        for layer in range(10):
            for name in SAVED[1:]:
                value = getattr(model.attention(layer), name)
                assert value.dtype == torch.float32 and not value.requires_grad
                assert value.tolist() == [(layer + 1) / 16] * 2
        assert model.attention(10).is_sparse.dtype == torch.bool
        q, k, v = make_qkv(1, 2, 640, 64)
        out, sparsity = model.attention(10)(q, k, v, return_sparsity=True)
        given = {name: part(values).data for name, values in last.items()}
        assert torch.equal(out, cdf_attention(q, k, v, attention_sink=True, **given))
        assert 0.2 < sparsity < 0.5

    def test_saved_is_loaded(self) -> None:
        model, fresh = Layers(), Layers()
        load(model, upstreams_file(3), verbose=True)
        saved = extract(model, verbose=True)
        assert sorted(saved) == sorted(upstreams_file(3)), "untuned layers have nothing to save"
        load(fresh, saved)
        assert all(torch.equal(x, saved[name]) for name, x in extract(fresh).items())
        assert fresh.attention(10).cdfthreshd is None
        one = extract(model.attention(2))
        layer = load(tuned_attention(), one)
        assert sorted(extract(layer)) == sorted(SAVED), "or one alone"

    def test_wrapped_models_and_several_gpus(self) -> None:
        for wrap in ("_orig_mod.", "module._orig_mod."):
            saved = {wrap + name: value for name, value in upstreams_file().items()}
            for multigpu, device in ((True, "cpu"), (False, "meta")):
                load(model := Layers().to("meta"), saved, multigpu=multigpu)
                assert model.attention(1).cdfthreshd.device.type == device
        wrapped = nn.ModuleDict({"_orig_mod": Layers()})
        load(wrapped, upstreams_file())
        assert next(iter(extract(wrapped))).startswith("_orig_mod.")

    def test_a_file_of_another_model_or_half_a_layer_is_refused(self, make_qkv) -> None:
        saved = upstreams_file(2)
        last = NAME.format(1) + "pvthreshd"
        for changed, words in (
            ({n.replace("attn1", "attn"): x for n, x in saved.items()}, "None of the saved"),
            ({"": saved[last]}, "None of the saved"),
            ({n: x for n, x in saved.items() if n != last}, r"blocks.1.*one value for each head"),
            (saved | {last: torch.ones(3)}, "one value for each head"),
        ):
            with pytest.raises(ValueError, match=words):
                load(Layers(), changed)
        model = Layers()
        load(model, upstreams_file(heads=3))
        with pytest.raises(ValueError, match="each of the 2 query heads"):
            model.attention(0)(*make_qkv(1, 2, 256, 64))
