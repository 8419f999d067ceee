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


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("given", [TOPK, CDF, BY_HEAD], ids=["topk", "cdf", "by head"])
def test_a_block_map_is_the_librarys_plan(make_qkv, given: dict[str, Any], is_causal: bool) -> None:
    """Of blocks that have something in common, the last one ragged."""
    q, k, _ = (x + 0.3 * x[:, :, :1] for x in make_qkv(2, 4, 700, 64, kv_heads=2))
    kept = block_map(q, k, is_causal=is_causal, **given)
    by = "cdf" if given["cdfthreshd"] is not None else "topk"
    given = {name: value for name, value in given.items() if value is not None}
    policy = sparge.SparsePolicy(select_by=by, keep_diagonal=False, smooth_k=False, **given)
    assert torch.equal(kept, sparge.make_plan(q, k, policy, is_causal=is_causal).kept())
    assert 0.1 < kept.float().mean() < 0.95


@pytest.mark.parametrize("blocks", [(64, 128), (40, 100)])
def test_a_block_map_of_any_block_size(make_qkv, blocks: tuple[int, int]) -> None:
    """One key block holds all that the queries look at: it is what a map of one block keeps."""
    q, k, _ = make_qkv(1, 2, 700, 64)
    rows, columns = -(-700 // blocks[0]), -(-700 // blocks[1])
    k[:, :, 500:600] += 3 * q[:, :, :1]
    q = q + 2 * q[:, :, :1]
    given = {"topk": 1 / columns, "cdfthreshd": None, "simthreshd1": -1}
    kept = block_map(q, k, BLKQ=blocks[0], BLKK=blocks[1], **given)
    best = 500 // blocks[1] + (blocks[1] == 128)  # 512 to 640 of 500 to 600
    expected = torch.arange(columns).eq(best).expand(1, 2, rows, columns)
    assert torch.equal(kept, expected)


def test_causal_blocks_see_no_later_key(make_qkv) -> None:
    q, k, _ = make_qkv(1, 1, 300, 64)
    kept = block_map(q, k, is_causal=True, BLKQ=64, BLKK=128, cdfthreshd=1.0, simthreshd1=-1)
    seen = torch.ones(300, 300).tril()
    expected = [[bool(x.any()) for x in row.split(128, 1)] for row in seen.split(64, 0)]
    assert kept[0, 0].tolist() == expected


@pytest.mark.parametrize(
    "given, keys, reason",
    [
        ({"return_lut": True}, 128, "no lookup tables"),
        ({"is_sparse": False}, 128, "never had an effect"),
        ({"topk": 0.5}, 128, "set exactly one"),
        ({"BLKQ": 0}, 128, "BLKQ is 0"),
        ({"is_causal": True}, 100, "128 queries and 100 keys"),
    ],
)
def test_a_block_map_refuses(make_qkv, given: dict[str, Any], keys: int, reason: str) -> None:
    q, k, _ = make_qkv(1, 1, 128, 64, kv_tokens=keys)
    with pytest.raises(ValueError, match=reason):
        block_map(q, k, **given)


def test_a_map_with_levels(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 700, 64)
    k, q[:, 0] = k + 5, 0
    mean = k.mean(2, keepdim=True)
    found = utils.get_block_map_meansim_fuse_quant(q, k, mean, **TOPK)
    assert torch.equal(found[0], block_map(q, k - mean, **TOPK))
    for (levels, scale), x, block in ((found[1:3], q, 128), (found[3:], k - mean, 64)):
        assert levels.dtype == torch.int8 and levels.shape == x.shape
        assert scale.shape == (1, 2, -(-700 // block))
        each = scale.repeat_interleave(block, 2)[:, :, :700, None]
        assert ((levels * each - x.float()).abs() <= each * 0.501).all()
        assert levels[:, 1].abs().amax() == 127
    assert not found[1][:, 0].any() and not found[2][:, 0].any(), "zeros have scale zero"
    given = compat.block_sparse_sage2_attn_cuda(q, k, v, found[0])
    assert torch.equal(given, compat.spas_sage2_attn_meansim_topk_cuda(q, k, v, topk=0.3))


def test_a_hyperparameter_is_one_number_for_all_heads_or_one_each() -> None:
    for value, expected in (
        (0.25, [0.25, 0.25]), (torch.tensor(3), [3.0, 3.0]), (torch.tensor([0.5, 2.0]), [0.5, 2.0]),
    ):  # fmt: skip
        by_head = utils.hyperparameter_check(value, 2, "cpu")
        assert by_head.dtype == torch.float32 and by_head.tolist() == expected
    wrong: list[tuple[Any, str]] = [
        (torch.ones(3), r"\(3,\)"), (torch.ones(2, 2), r"\(2, 2\)"), ("x", "str"),
    ]  # fmt: skip
    for value, given in wrong:
        with pytest.raises(ValueError, match=f"is .*{given}.*each of the 2 heads"):
            utils.hyperparameter_check(value, 2, "cpu")


def test_precision_metric_prints_rounded_errors(capsys: pytest.CaptureFixture[str]) -> None:
    value, truth = torch.tensor([[3.0, 3.0]]), torch.tensor([[3.0, 4.0]])
    expected = {"Cossim": 0.9899, "L1": 0.1429, "RMSE": 0.7071}
    assert utils.precision_metric(value, truth) == expected
    assert capsys.readouterr().out == "Cossim: 0.989900, L1: 0.142900, RMSE: 0.707100\n"
    errors = utils.precision_metric(value, truth, verbose=False, round_num=2)
    assert errors == {"Cossim": 0.99, "L1": 0.14, "RMSE": 0.71}
    assert capsys.readouterr().out == ""
