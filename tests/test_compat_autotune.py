# SPDX-License-Identifier: Apache-2.0
"""Tuned attention: thresholds by head within a bound, and the files that keep them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import compat
from sparge.common.metrics import cosine, rel_l1
from sparge.compat import tuning
from sparge.compat.autotune import (
    SAVED,
    SparseAttentionMeansim,
    extract_sparse_attention_state_dict,
    load_sparse_attention_state_dict,
)

Qkv = tuple[Tensor, Tensor, Tensor]
cdf_attention: Any = compat.spas_sage2_attn_meansim_cuda


@pytest.fixture(autouse=True)
def no_tune_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNE_MODE", raising=False)


@pytest.fixture
def clustered(generator: torch.Generator) -> Qkv:
    """Heads that need few blocks, most blocks, and all: queries look for keys of their kind."""
    kinds = torch.randn(1, 3, 6, 1, 32, generator=generator)
    noise = torch.randn(1, 3, 6, 64, 32, generator=generator)
    sharpness = torch.tensor([1.2, 0.7, 0.0]).view(1, 3, 1, 1, 1)
    q = (sharpness * (kinds + 0.3 * noise)).flatten(2, 3)
    k = (kinds + 0.3 * torch.randn(noise.shape, generator=generator)).flatten(2, 3)
    v = torch.randn(q.shape, generator=generator)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One similarity instead of four."""
    monkeypatch.setattr(tuning, "SIMILARITIES", (-1.0,))


def errors(attend: SparseAttentionMeansim, qkv: Qkv, **options: Any) -> list[float]:
    truth = scaled_dot_product_attention(*qkv, is_causal=options.get("is_causal", False))
    out = attend(*qkv, **options)
    return [rel_l1(out[:, head], truth[:, head]) for head in range(out.shape[1])]


class TestTuning:
    def test_each_head_gets_what_it_can_bear(self, clustered: Qkv) -> None:
        attend = SparseAttentionMeansim(l1=0.06, pv_l1=0.065)
        tuned = attend(*clustered, tune_mode=True)
        assert torch.equal(tuned, scaled_dot_product_attention(*clustered))
        assert attend.is_sparse is not None and attend.is_sparse.tolist() == [True, True, False]
        assert attend.tuning_sparsity is not None
        few, most, none = attend.tuning_sparsity.tolist()
        assert few > most > none == 0
        off = errors(attend, clustered)
        assert max(off[:2]) < 0.065
        assert off[2] < 0.02, "dense in 8 bits"
        _, sparsity = attend(*clustered, return_sparsity=True)
        assert sparsity == pytest.approx((few + most) / 3)

    @pytest.mark.usefixtures("quick")
    def test_nothing_sparser_keeps_to_the_bound(self, clustered: Qkv) -> None:
        """Each threshold is the last of its steps: one lower, and the head errs too much."""
        attend = SparseAttentionMeansim(l1=0.04, pv_l1=0.05)
        attend(*clustered, tune_mode=True)
        assert attend.cdfthreshd is not None and attend.pvthreshd is not None
        truth = scaled_dot_product_attention(*clustered)

        def l1(cdfthreshd: Tensor, pvthreshd: Tensor | float) -> Tensor:
            shared = {"simthreshd1": -1.0, "attention_sink": True}
            out = cdf_attention(*clustered, cdfthreshd=cdfthreshd, pvthreshd=pvthreshd, **shared)
            return tuning.relative_l1(out, truth)[:2]

        def step_below(values: Tensor, grid: tuple[float, ...]) -> Tensor:
            return torch.tensor([grid[max(0, grid.index(value) - 1)] for value in values.tolist()])

        cdf, pv = attend.cdfthreshd.data, attend.pvthreshd.data
        below = step_below(cdf, tuning.CDF_GRID)
        assert (l1(cdf, 50.0) < 0.04).all() and (l1(below, 50.0) >= 0.04).all()
        assert (l1(cdf, pv) < 0.05).all()
        below = step_below(pv, tuning.PV_GRID)
        assert (l1(cdf, below) >= 0.05)[pv[:2] > 0].all()
        assert (pv[:2] < 50).all()

    @pytest.mark.usefixtures("quick")
    @pytest.mark.parametrize("rule, bound", [("l1", 0.06), ("cosine", 0.995), ("rmse", 0.01)])
    def test_rules_without_the_filter(self, clustered: Qkv, rule: str, bound: float) -> None:
        given: dict[str, Any] = {"cos_sim" if rule == "cosine" else rule: bound}
        attend = SparseAttentionMeansim(rule, tune_pv=False, **given)
        attend(*clustered, tune_mode=True)
        assert attend.pvthreshd is not None and (attend.pvthreshd == 50).all()
        out, sparsity = attend(*clustered, return_sparsity=True)
        truth = scaled_dot_product_attention(*clustered)
        assert sparsity > 0.1
        for head in range(2):
            a, b = out[:, head].float(), truth[:, head].float()
            if rule == "cosine":
                assert cosine(a, b) > bound
            else:
                found = rel_l1(a, b) if rule == "l1" else (a - b).square().mean().sqrt()
                assert found < bound

    def test_a_similarity_may_serve_a_head_best(self, generator: torch.Generator) -> None:
        """A block of unlike keys whose mean says nothing holds all that the queries look for: kept
        for being unlike, the rest can be dropped; ranked by its mean it comes last."""
        aim = torch.randn(32, generator=generator)
        k = 0.5 * aim + 0.3 * torch.randn(1, 1, 512, 32, generator=generator)
        k[:, :, 256:320] = 3 * aim * torch.tensor([1.0, -1.0]).repeat(32).unsqueeze(1)
        q = (aim + 0.1 * torch.randn(1, 1, 512, 32, generator=generator)) * 1.5
        v = torch.randn(1, 1, 512, 32, generator=generator)
        qkv = (q.bfloat16(), k.bfloat16(), v.bfloat16())
        attend = SparseAttentionMeansim()
        attend(*qkv, tune_mode=True, smooth_k=False)
        assert attend.simthreshd1 is not None and 0 < attend.simthreshd1.item() < 1
        assert max(errors(attend, qkv, smooth_k=False)) < 0.08

    @pytest.mark.usefixtures("quick")
    def test_later_calls_make_it_stricter(self, clustered: Qkv) -> None:
        attend = SparseAttentionMeansim(l1=0.06, pv_l1=0.065)
        attend(*clustered, tune_mode=True)
        assert attend.cdfthreshd is not None
        easy, hard, everything = attend.cdfthreshd.tolist()
        assert easy != hard
        q, k, v = clustered
        exchanged = (q[:, [1, 0, 2]], k[:, [1, 0, 2]], v[:, [1, 0, 2]])
        attend(*exchanged, tune_mode=True)
        assert attend.num_data_passed == 2
        assert attend.cdfthreshd.tolist() == [max(easy, hard), max(easy, hard), everything]
        for qkv in (clustered, exchanged):
            assert max(errors(attend, qkv)[:2]) < 0.065
        attend(q.flip(1), k.flip(1), v.flip(1), tune_mode=True)
        assert attend.is_sparse is not None
        assert attend.is_sparse.tolist() == [False, True, False], "no call is left out"

    @pytest.mark.usefixtures("quick")
    def test_causal_grouped_heads_and_layout(self, clustered: Qkv) -> None:
        q, k, v = clustered
        qkv = (q[:, :2], k[:, :1], v[:, :1])
        attend = SparseAttentionMeansim(l1=0.06, pv_l1=0.065)
        swapped = [x.transpose(1, 2) for x in qkv]
        options: dict[str, Any] = {"is_causal": True, "tensor_layout": "NHD", "scale": 0.2}
        truth = scaled_dot_product_attention(*qkv, is_causal=True, scale=0.2, enable_gqa=True)
        tuned, sparsity = attend(*swapped, tune_mode=True, return_sparsity=True, **options)
        assert torch.equal(tuned.transpose(1, 2), truth) and sparsity == 0
        out = attend(*swapped, **options)
        assert rel_l1(out.transpose(1, 2), truth) < 0.065

    @pytest.mark.usefixtures("quick")
    def test_a_head_that_needs_two_blocks_of_all(self, generator: torch.Generator) -> None:
        """Each has half of the mass, and the block that crosses cdfthreshd is not kept: only values
        just below 1 keep both and drop others."""
        kinds = 8 * torch.eye(4, 64).view(1, 1, 4, 1, 64)
        q, k = (
            (kinds + 0.1 * torch.randn(1, 1, 4, 128, 64, generator=generator)).flatten(2, 3)
            for _ in range(2)
        )
        v = torch.randn(1, 1, 512, 64, generator=generator)
        qkv = (q.bfloat16(), k.bfloat16(), v.bfloat16())
        attend = SparseAttentionMeansim()
        attend(*qkv, tune_mode=True)
        assert attend.cdfthreshd is not None and 255 / 256 < attend.cdfthreshd.item() < 1
        _, sparsity = attend(*qkv, return_sparsity=True)
        assert sparsity > 0.2
        assert max(errors(attend, qkv)) < 0.08

    @pytest.mark.usefixtures("quick")
    @pytest.mark.parametrize("value", ["1", "yes"])
    def test_by_environment_in_inference_mode_and_in_bf16(
        self, clustered: Qkv, monkeypatch, value: str
    ) -> None:
        q, k, v = clustered
        zeros_first = (q, k, v * torch.tensor([0, 1, 1]).view(1, 3, 1, 1))
        attend = SparseAttentionMeansim(l1=0.06, pv_l1=0.065)
        monkeypatch.setenv("TUNE_MODE", value)
        with torch.inference_mode():
            attend(*zeros_first)
        monkeypatch.delenv("TUNE_MODE")
        assert attend.num_data_passed == 1
        assert attend.is_sparse is not None and attend.is_sparse[0].item() is True, (
            "a head of zeros"
        )
        out = attend(*clustered)
        cast = copy.deepcopy(attend).to(torch.bfloat16)
        assert cast.cdfthreshd is not None and cast.cdfthreshd.dtype == torch.bfloat16
        assert torch.equal(cast(*clustered), out)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"sim_rule": "l2"}, "'l1', 'cosine' or 'rmse'"),
        ({"l1": 0.08, "pv_l1": 0.08}, "a larger one"),
        ({"l1": -0.1}, "from 0 up"),
        ({"cos_sim": 1.1}, "up to 1"),
        ({"rmse": -1}, "from 0 up"),
        ({"rearrange_kwargs": {"w": 2}}, "leave it out"),
    ],
)
def test_bounds_are_checked(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SparseAttentionMeansim(**given)


def test_untuned_and_masked_calls_say_what_to_do(make_qkv) -> None:
    with pytest.raises(RuntimeError, match="tune_mode=True or TUNE_MODE=1"):
        SparseAttentionMeansim()(*make_qkv())
    with pytest.raises(sparge.Unsupported, match="no element mask"):
        SparseAttentionMeansim()(*make_qkv(), mask=torch.ones(256, 256), tune_mode=True)


class Layers(nn.Module):
    """Names as in CogVideoX, and a layer 10 beside layer 1."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(nn.Module() for _ in range(11))
        for block in self.transformer_blocks:
            block.attn1 = nn.Module()
            block.attn1.to_q = nn.Linear(4, 4, dtype=torch.bfloat16)
            block.attn1.inner_attention = SparseAttentionMeansim()

    def attention(self, layer: int) -> Any:
        block: Any = self.transformer_blocks[layer]
        return block.attn1.inner_attention


def part(values: list[float]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.bfloat16), requires_grad=False)


def upstreams_file(layers: int = 11, heads: int = 2) -> dict[str, Tensor]:
    """File that upstream saves: Parameters of bf16, one tensor (heads,) a part."""
    return {
        f"transformer_blocks.{layer}.attn1.inner_attention.{name}": part([layer / 16] * heads)
        for layer in range(layers)
        for name in SAVED
    }


class TestFiles:
    def test_upstreams_file_loads(self, make_qkv, tmp_path: Path) -> None:
        saved = upstreams_file()
        name = "transformer_blocks.10.attn1.inner_attention."
        saved[name + "cdfthreshd"] = part([0.3, 1])
        saved[name + "simthreshd1"].data.fill_(-0.9375)
        saved[name + "pvthreshd"].data.fill_(9.4)
        torch.save(saved, tmp_path / "tuned.pt")
        model = Layers()
        loaded = torch.load(tmp_path / "tuned.pt", weights_only=True)
        assert load_sparse_attention_state_dict(model, loaded) is model
        for layer in range(10):
            for name in ("cdfthreshd", "simthreshd1", "simthreshd2", "pvthreshd"):
                value = getattr(model.attention(layer), name)
                assert value.dtype == torch.float32 and not value.requires_grad
                assert value.tolist() == [layer / 16] * 2
        assert model.attention(10).is_sparse.dtype == torch.bool

        q, k, v = make_qkv(1, 2, 640, 64)
        out, sparsity = model.attention(10)(q, k, v, return_sparsity=True)
        pv = float(torch.tensor(9.4).bfloat16())
        given = {"cdfthreshd": part([0.3, 1]).data, "simthreshd1": -0.9375, "pvthreshd": pv}
        assert torch.equal(out, cdf_attention(q, k, v, attention_sink=True, **given))
        assert 0.2 < sparsity < 0.5

    def test_saved_is_loaded(self, caplog: pytest.LogCaptureFixture) -> None:
        model, fresh = Layers(), Layers()
        with caplog.at_level("INFO", "sparge.compat.autotune"):
            load_sparse_attention_state_dict(model, upstreams_file(3), verbose=True)
            saved = extract_sparse_attention_state_dict(model, verbose=True)
        for word in ("loaded", "saving"):
            assert f"transformer_blocks.1.attn1.inner_attention: {word}" in caplog.text
        assert sorted(saved) == sorted(upstreams_file(3)), "untuned layers have nothing to save"
        load_sparse_attention_state_dict(fresh, saved)
        again = extract_sparse_attention_state_dict(fresh)
        assert all(torch.equal(again[name], saved[name]) for name in saved)
        assert fresh.attention(10).cdfthreshd is None
        layer = load_sparse_attention_state_dict(
            SparseAttentionMeansim(), extract_sparse_attention_state_dict(model.attention(2))
        )
        assert sorted(extract_sparse_attention_state_dict(layer)) == sorted(SAVED), "or one alone"

    def test_wrapped_models_and_several_gpus(self) -> None:
        for wrap in ("_orig_mod.", "module._orig_mod."):
            saved = {wrap + name: value.to("meta") for name, value in upstreams_file().items()}
            model = Layers()
            load_sparse_attention_state_dict(model, saved, multigpu=True)
            assert model.attention(1).cdfthreshd.device.type == "meta", "where it was"
        wrapped = nn.ModuleDict({"_orig_mod": Layers()})
        load_sparse_attention_state_dict(wrapped, upstreams_file())
        assert next(iter(extract_sparse_attention_state_dict(wrapped))).startswith("_orig_mod.")

    def test_a_file_of_another_model_or_half_a_layer_is_refused(self, make_qkv) -> None:
        saved = upstreams_file(2)
        last = "transformer_blocks.1.attn1.inner_attention.pvthreshd"
        cut = {name: value for name, value in saved.items() if name != last}
        for changed, words in (
            ({n.replace("attn1", "attn"): x for n, x in saved.items()}, r"None of the 10 .*11 Spa"),
            ({"": saved[last]}, "None of the 1 saved"),
            (cut, r"blocks.1.*one value for each head"),
            (saved | {last: torch.ones(3)}, r"'pvthreshd': \(3,\)"),
        ):
            with pytest.raises(ValueError, match=words):
                load_sparse_attention_state_dict(Layers(), changed)
        model = Layers()
        load_sparse_attention_state_dict(model, upstreams_file(heads=3))
        with pytest.raises(ValueError, match="each of the 2 query heads"):
            model.attention(0)(*make_qkv(1, 2, 256, 64))
