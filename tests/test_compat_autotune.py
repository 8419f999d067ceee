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

from sparge import compat
from sparge.common.metrics import cosine, rel_l1
from sparge.compat import autotune, tuning
from sparge.compat.autotune import SAVED
from sparge.compat.autotune import extract_sparse_attention_state_dict as extract
from sparge.compat.autotune import load_sparse_attention_state_dict as load

Qkv = tuple[Tensor, Tensor, Tensor]
cdf_attention: Any = compat.spas_sage2_attn_meansim_cuda
tuned_attention: Any = autotune.SparseAttentionMeansim
quick = pytest.mark.usefixtures("one_similarity")


@pytest.fixture(autouse=True)
def no_tune_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNE_MODE", raising=False)


@pytest.fixture
def one_similarity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of four, as is quicker."""
    monkeypatch.setattr(tuning, "SIMILARITIES", (-1.0,))


@pytest.fixture
def clustered() -> Qkv:
    """Heads that need few blocks, most blocks, and all: queries look for keys of their kind."""
    generator = torch.Generator().manual_seed(2)
    kinds = torch.randn(1, 3, 6, 1, 32, generator=generator)
    noise = torch.randn(1, 3, 6, 64, 32, generator=generator)
    sharpness = torch.tensor([1.2, 0.7, 0.0]).view(1, 3, 1, 1, 1)
    q = (sharpness * (kinds + 0.3 * noise)).flatten(2, 3)
    k = (kinds + 0.3 * torch.randn(noise.shape, generator=generator)).flatten(2, 3)
    return q.bfloat16(), k.bfloat16(), torch.randn(q.shape, generator=generator).bfloat16()


def errors(attend: Any, qkv: Qkv, **options: Any) -> list[float]:
    truth = scaled_dot_product_attention(*qkv)
    out = attend(*qkv, **options)
    return [rel_l1(out[:, head], truth[:, head]) for head in range(out.shape[1])]


def test_each_head_gets_what_it_can_bear(clustered: Qkv) -> None:
    attend = tuned_attention(l1=0.06, pv_l1=0.065)
    tuned = attend(*clustered, tune_mode=True)
    assert torch.equal(tuned, scaled_dot_product_attention(*clustered))
    assert attend.is_sparse.tolist() == [True, True, False]
    few, most, none = attend.tuning_sparsity.tolist()
    assert few > most > none == 0
    off = errors(attend, clustered)
    assert max(off[:2]) < 0.065 and off[2] < 0.02, "dense in 8 bits"
    _, sparsity = attend(*clustered, return_sparsity=True)
    assert sparsity == pytest.approx((few + most) / 3)


@quick
def test_nothing_sparser_keeps_to_the_bound(clustered: Qkv) -> None:
    """Each threshold is the last of its steps: one lower, and the head errs too much."""
    attend = tuned_attention(l1=0.04, pv_l1=0.05)
    attend(*clustered, tune_mode=True)
    truth = scaled_dot_product_attention(*clustered)

    def l1(cdfthreshd: Tensor, pvthreshd: Tensor | float) -> Tensor:
        shared = {"simthreshd1": -1.0, "attention_sink": True}
        out = cdf_attention(*clustered, cdfthreshd=cdfthreshd, pvthreshd=pvthreshd, **shared)
        return tuning.relative_l1(out, truth)[:2]

    def step_below(values: Tensor, grid: tuple[float, ...]) -> Tensor:
        return torch.tensor([grid[max(0, grid.index(value) - 1)] for value in values.tolist()])

    cdf, pv = attend.cdfthreshd.data, attend.pvthreshd.data
    assert (l1(cdf, 50.0) < 0.04).all()
    assert (l1(step_below(cdf, tuning.CDF_GRID), 50.0) >= 0.04).all()
    assert (pv[:2] < 50).all() and (l1(cdf, pv) < 0.05).all()
    assert (l1(cdf, step_below(pv, tuning.PV_GRID)) >= 0.05)[pv[:2] > 0].all()


@quick
@pytest.mark.parametrize("rule, bound", [("cosine", 0.995), ("rmse", 0.01)])
def test_other_rules_without_the_filter(clustered: Qkv, rule: str, bound: float) -> None:
    attend = tuned_attention(rule, tune_pv=False, cos_sim=0.995, rmse=0.01)
    attend(*clustered, tune_mode=True)
    assert (attend.pvthreshd == 50).all()
    out, sparsity = attend(*clustered, return_sparsity=True)
    assert sparsity > 0.1
    truth = scaled_dot_product_attention(*clustered)
    for head in range(2):
        a, b = out[:, head].float(), truth[:, head].float()
        met = cosine(a, b) > bound if rule == "cosine" else (a - b).square().mean().sqrt() < bound
        assert met, head


def test_a_similarity_may_serve_a_head_best(generator: torch.Generator) -> None:
    """A block of unlike keys whose mean says nothing holds all that the queries look for: kept for
    being unlike, the rest can be dropped; ranked by its mean it comes last."""
    aim, noise = torch.randn(32, generator=generator), torch.randn(3, 512, 32, generator=generator)
    k = 0.5 * aim + 0.3 * noise[0]
    k[256:320] = 3 * aim * torch.tensor([1.0, -1.0]).repeat(32).unsqueeze(1)
    q, v = (aim + 0.1 * noise[1]) * 1.5, noise[2]
    qkv: Any = tuple(x.bfloat16().view(1, 1, 512, 32) for x in (q, k, v))
    attend = tuned_attention()
    attend(*qkv, tune_mode=True, smooth_k=False)
    assert 0 < attend.simthreshd1.item() < 1
    assert max(errors(attend, qkv, smooth_k=False)) < 0.08


@quick
def test_a_head_that_needs_two_blocks_of_all(generator: torch.Generator) -> None:
    """Each has half of the mass, and the block that crosses cdfthreshd is not kept: only values
    just below 1 keep both and drop others."""
    noise = torch.randn(2, 4, 128, 64, generator=generator)
    q, k = (8 * torch.eye(4, 64).view(4, 1, 64) + 0.1 * noise).view(2, 1, 1, 512, 64).bfloat16()
    v = torch.randn(1, 1, 512, 64, generator=generator).bfloat16()
    attend = tuned_attention()
    attend(q, k, v, tune_mode=True)
    assert 255 / 256 < attend.cdfthreshd.item() < 1
    _, sparsity = attend(q, k, v, return_sparsity=True)
    assert sparsity > 0.2 and max(errors(attend, (q, k, v))) < 0.08


@quick
def test_later_calls_make_it_stricter(clustered: Qkv) -> None:
    attend = tuned_attention(l1=0.06, pv_l1=0.065)
    attend(*clustered, tune_mode=True)
    easy, hard, everything = attend.cdfthreshd.tolist()
    assert easy != hard
    exchanged: Any = tuple(x[:, [1, 0, 2]] for x in clustered)
    attend(*exchanged, tune_mode=True)
    assert attend.num_data_passed == 2
    assert attend.cdfthreshd.tolist() == [max(easy, hard), max(easy, hard), everything]
    for qkv in (clustered, exchanged):
        assert max(errors(attend, qkv)[:2]) < 0.065
    attend(*(x.flip(1) for x in clustered), tune_mode=True)
    assert attend.is_sparse.tolist() == [False, True, False], "no call is left out"


@quick
def test_causal_grouped_heads_and_layout(clustered: Qkv) -> None:
    q, k, v = clustered
    attend, qkv = tuned_attention(l1=0.06, pv_l1=0.065), (q[:, :2], k[:, :1], v[:, :1])
    swapped = [x.transpose(1, 2) for x in qkv]
    options: dict[str, Any] = {"is_causal": True, "tensor_layout": "NHD", "scale": 0.2}
    truth = scaled_dot_product_attention(*qkv, is_causal=True, scale=0.2, enable_gqa=True)
    tuned, sparsity = attend(*swapped, tune_mode=True, return_sparsity=True, **options)
    assert torch.equal(tuned.transpose(1, 2), truth) and sparsity == 0
    assert rel_l1(attend(*swapped, **options).transpose(1, 2), truth) < 0.065


@quick
def test_by_environment_in_inference_mode_and_in_bf16(clustered: Qkv, monkeypatch) -> None:
    q, k, v = clustered
    attend = tuned_attention(l1=0.06, pv_l1=0.065)
    monkeypatch.setenv("TUNE_MODE", "yes")
    with torch.inference_mode():
        attend(q, k, v * torch.tensor([0, 1, 1]).view(1, 3, 1, 1))
    monkeypatch.setenv("TUNE_MODE", "")
    assert attend.num_data_passed == 1 and attend.is_sparse[0].item(), "a head of zeros"
    cast = copy.deepcopy(attend).to(torch.bfloat16)
    assert cast.cdfthreshd.dtype == torch.bfloat16
    assert torch.equal(cast(*clustered), attend(*clustered))


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
def test_what_cannot_be_done_is_said(make_qkv, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tuned_attention(**given)
    # Untuned and masked calls say what to do.
    with pytest.raises(RuntimeError, match="tune_mode=True or TUNE_MODE=1"):
        tuned_attention()(*make_qkv())
    with pytest.raises(ValueError, match="no element mask"):
        tuned_attention()(*make_qkv(), mask=torch.ones(256, 256), tune_mode=True)


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
        NAME.format(layer) + name: part([layer / 16] * heads)
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
                assert value.tolist() == [layer / 16] * 2
        assert model.attention(10).is_sparse.dtype == torch.bool
        q, k, v = make_qkv(1, 2, 640, 64)
        out, sparsity = model.attention(10)(q, k, v, return_sparsity=True)
        given = {name: part(values).data for name, values in last.items()}
        assert torch.equal(out, cdf_attention(q, k, v, attention_sink=True, **given))
        assert 0.2 < sparsity < 0.5

    def test_saved_is_loaded(self, caplog: pytest.LogCaptureFixture) -> None:
        model, fresh = Layers(), Layers()
        with caplog.at_level("INFO", "sparge.compat.autotune"):
            load(model, upstreams_file(3), verbose=True)
            saved = extract(model, verbose=True)
        for word in ("loaded", "saving"):
            assert f"{NAME.format(1)[:-1]}: {word}" in caplog.text
        assert sorted(saved) == sorted(upstreams_file(3)), "untuned layers have nothing to save"
        load(fresh, saved)
        assert all(torch.equal(x, saved[name]) for name, x in extract(fresh).items())
        assert fresh.attention(10).cdfthreshd is None
        one = extract(model.attention(2))
        layer = load(tuned_attention(), one)
        assert sorted(extract(layer)) == sorted(SAVED), "or one alone"

    def test_wrapped_models_and_several_gpus(self) -> None:
        for wrap in ("_orig_mod.", "module._orig_mod."):
            saved = {wrap + name: value.to("meta") for name, value in upstreams_file().items()}
            model = Layers()
            load(model, saved, multigpu=True)
            assert model.attention(1).cdfthreshd.device.type == "meta", "where it was"
        wrapped = nn.ModuleDict({"_orig_mod": Layers()})
        load(wrapped, upstreams_file())
        assert next(iter(extract(wrapped))).startswith("_orig_mod.")

    def test_a_file_of_another_model_or_half_a_layer_is_refused(self, make_qkv) -> None:
        saved = upstreams_file(2)
        last = NAME.format(1) + "pvthreshd"
        for changed, words in (
            ({n.replace("attn1", "attn"): x for n, x in saved.items()}, r"None of the 10 .*11 Spa"),
            ({"": saved[last]}, "None of the 1 saved"),
            ({n: x for n, x in saved.items() if n != last}, r"blocks.1.*one value for each head"),
            (saved | {last: torch.ones(3)}, r"'pvthreshd': \(3,\)"),
        ):
            with pytest.raises(ValueError, match=words):
                load(Layers(), changed)
        model = Layers()
        load(model, upstreams_file(heads=3))
        with pytest.raises(ValueError, match="each of the 2 query heads"):
            model.attention(0)(*make_qkv(1, 2, 256, 64))
