# SPDX-License-Identifier: Apache-2.0
"""Upstream's helpers: block maps of any block size, thresholds by head, errors of an output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparge
from sparge import compat
from sparge.compat import utils

TOPK: dict[str, Any] = {"topk": 0.3, "cdfthreshd": None, "simthreshd1": -0.1}
CDF: dict[str, Any] = {"simthreshd1": 0.02, "cdfthreshd": 0.7}
BY_HEAD: dict[str, Any] = {
    "simthreshd1": torch.tensor([-0.1, 0.02, 0.03, 0.5]),
    "cdfthreshd": torch.tensor([0.2, 0.5, 0.9, 1.0]),
    "attention_sink": True,
}
block_map = utils.get_block_map_meansim
block_sparse: Any = compat.block_sparse_sage2_attn_cuda
topk_attention: Any = compat.spas_sage2_attn_meansim_topk_cuda


@pytest.fixture
def leaning(make_qkv) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Grouped-query tensors whose blocks have something in common, the last one ragged."""
    q, k, v = make_qkv(2, 4, 700, 64, kv_heads=2)
    return q + 0.3 * q[:, :, :1], k + 0.3 * k[:, :, :1], v


class TestBlockMap:
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("given", [TOPK, CDF, BY_HEAD], ids=["topk", "cdf", "by head"])
    def test_is_the_librarys_plan(self, leaning, given: dict[str, Any], is_causal: bool) -> None:
        q, k, _ = leaning
        kept = block_map(q, k, is_causal=is_causal, **given)
        by = "cdf" if given["cdfthreshd"] is not None else "topk"
        given = {name: value for name, value in given.items() if value is not None}
        policy = sparge.SparsePolicy(select_by=by, keep_diagonal=False, smooth_k=False, **given)
        plan = sparge.make_plan(q, k, policy, is_causal=is_causal)
        assert torch.equal(kept, plan.kept())
        assert 0.1 < kept.float().mean() < 0.95

    @pytest.mark.parametrize("blocks", [(64, 128), (40, 100)])
    def test_any_block_size(self, make_qkv, blocks: tuple[int, int]) -> None:
        """One key block holds all that the queries look at: it is what a map of one block keeps."""
        q, k, _ = make_qkv(1, 2, 700, 64)
        rows, columns = -(-700 // blocks[0]), -(-700 // blocks[1])
        k[:, :, 500:600] += 3 * q[:, :, :1]
        q = q + 2 * q[:, :, :1]
        kept = block_map(
            q, k, BLKQ=blocks[0], BLKK=blocks[1], topk=1 / columns, cdfthreshd=None, simthreshd1=-1
        )
        assert kept.shape == (1, 2, rows, columns)
        assert kept.sum(-1).eq(1).all()
        starts = range(0, 700, blocks[1])
        overlap = [min(600, start + blocks[1]) - max(500, start) for start in starts]
        best = max(range(columns), key=overlap.__getitem__)
        assert kept[..., best].all()

    def test_hopper_blocks_make_a_mask_too(self, make_qkv) -> None:
        """Packages make them where the GPU is an H100."""
        q, k, v = make_qkv(1, 2, 700, 64)
        wide = block_map(q, k, BLKQ=64, BLKK=128, **TOPK)
        out, sparsity = block_sparse(q, k, v, wide, return_sparsity=True)
        kept = wide.repeat_interleave(64, 2).repeat_interleave(128, 3)[:, :, :700, :700]
        assert out.isfinite().all()
        assert 0.2 < sparsity <= 1 - kept.float().mean()

    def test_causal_blocks_see_no_later_key(self, make_qkv) -> None:
        q, k, _ = make_qkv(1, 1, 300, 64)
        kept = block_map(q, k, is_causal=True, BLKQ=64, BLKK=128, cdfthreshd=1.0, simthreshd1=-1)
        seen = torch.ones(300, 300).tril()
        expected = [[bool(x.any()) for x in row.split(128, 1)] for row in seen.split(64, 0)]
        assert kept[0, 0].tolist() == expected
        with pytest.raises(sparge.Unsupported, match="300 queries and 200 keys"):
            block_map(q, k[:, :, :200], is_causal=True)

    @pytest.mark.parametrize(
        "given, kind, reason",
        [
            ({"return_lut": True}, sparge.Unsupported, "no lookup tables"),
            ({"is_sparse": False}, sparge.Unsupported, "never had an effect"),
            ({"topk": 0.5}, sparge.Unsupported, "set exactly one"),
            ({"BLKQ": 0}, ValueError, "BLKQ is 0"),
        ],
    )
    def test_refuses(self, make_qkv, given: dict[str, Any], kind: Any, reason: str) -> None:
        q, k, _ = make_qkv(1, 1, 128, 64)
        with pytest.raises(kind, match=reason):
            block_map(q, k, **given)


class TestFusedQuant:
    def test_map_and_levels(self, make_qkv) -> None:
        q, k, v = make_qkv(1, 2, 700, 64)
        k = k + 5
        mean = k.mean(2, keepdim=True)
        kept, q_int8, q_scale, k_int8, k_scale = utils.get_block_map_meansim_fuse_quant(
            q, k, mean, **TOPK
        )
        assert torch.equal(kept, block_map(q, k - mean, **TOPK))
        for levels, scale, x, block in ((q_int8, q_scale, q, 128), (k_int8, k_scale, k - mean, 64)):
            assert levels.dtype == torch.int8 and levels.shape == x.shape
            assert scale.shape == (1, 2, -(-700 // block))
            each = scale.repeat_interleave(block, 2)[:, :, :700, None]
            assert ((levels * each - x.float()).abs() <= each * 0.501).all()
            assert levels.abs().amax() == 127
        out = block_sparse(q, k, v, kept)
        assert torch.equal(out, topk_attention(q, k, v, topk=0.3))

    def test_zeros_have_scale_zero(self) -> None:
        zeros = torch.zeros(1, 1, 130, 64)
        _, levels, scale, _, _ = utils.get_block_map_meansim_fuse_quant(zeros, zeros, **CDF)
        assert not levels.any() and not scale.any()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.25, [0.25, 0.25]), (torch.tensor(3), [3.0, 3.0]), (torch.tensor([0.5, 2.0]), [0.5, 2.0])],
)
def test_one_number_is_everyones(value: Any, expected: list[float]) -> None:
    by_head = utils.hyperparameter_check(value, 2, "cpu")
    assert by_head.dtype == torch.float32 and by_head.tolist() == expected


@pytest.mark.parametrize(
    ("value", "given"), [(torch.ones(3), r"\(3,\)"), (torch.ones(2, 2), r"\(2, 2\)"), ("x", "str")]
)
def test_other_hyperparameters_are_refused(value: Any, given: str) -> None:
    with pytest.raises(ValueError, match=f"is .*{given}.*each of the 2 heads"):
        utils.hyperparameter_check(value, 2, "cpu")


def test_precision_metric_prints_rounded_errors(capsys: pytest.CaptureFixture[str]) -> None:
    value, truth = torch.tensor([[3.0, 3.0]]), torch.tensor([[3.0, 4.0]])
    expected = {"Cossim": 0.9899, "L1": 0.1429, "RMSE": 0.7071}
    assert utils.precision_metric(value, truth) == expected
    assert capsys.readouterr().out == "Cossim: 0.989900, L1: 0.142900, RMSE: 0.707100\n"
    errors = utils.precision_metric(truth + 1e-7, truth, verbose=False, round_num=3)
    assert errors == {"Cossim": 1.0, "L1": 0.0, "RMSE": 0.0}
    assert capsys.readouterr().out == ""
