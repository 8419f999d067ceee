# SPDX-License-Identifier: Apache-2.0
"""The table of hosts: its judge finds attention that is wrong, and the rows on file are of all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.hosts import hosts, loops
from benchmarks.hosts.__main__ import finish
from benchmarks.hosts.case import Case, Subject
from benchmarks.hosts.hosts import Counted, Counts, Host
from benchmarks.hosts.measure import rows_of
from benchmarks.hosts.rounded import TORCH_ATTENTION, torchs_function_is
from benchmarks.hosts.row import Row, Verdict
from benchmarks.hosts.table import read, whole

pytestmark = pytest.mark.usefixtures("one_thread")

#: What the table has to have a row of, at least.
HOSTS = {
    "sparge.sdpa",
    "F.scaled_dot_product_attention = sparge.sdpa_call",
    "F.scaled_dot_product_attention = spas_sage2_attn_meansim_topk_cuda",
    "transformers: enable",
    "diffusers: enable, manual",
    "diffusers: enable, auto budget",
    "diffusers: enable, attention_backend(native)",
    "diffusers: set_attention_backend(sparge)",
}
MODELS = {
    *(
        "a loop in PyTorch",
        "Llama",
        "Qwen2",
        "Qwen3",
        "Gemma",
        "Gemma 3, sliding layers",
        "Mistral",
    ),
    *("CogVideoX", "CogVideoX 1.5", "Mochi", "Wan 2.1", "Wan 2.2", "HunyuanVideo", "LTX", "Flux"),
    *("SD3", "SD3.5", "Allegro"),
}
LEFT = {"a reason": 2}
Wrong = Callable[..., Tensor]


def host_of(attend: Wrong, counts: Counts) -> Host:
    """Host whose calls `attend` computes, and which counts them so."""

    @contextmanager
    def opened(subject: Subject, topk: float) -> Iterator[Counted]:
        with torchs_function_is(attend):
            yield lambda: counts

    return Host("a host", opened, may_refuse=attend is refusing)


def scaled(*call: Any, **options: Any) -> Tensor:
    return 1.1 * TORCH_ATTENTION(*call, **options)


def bottom_right(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return TORCH_ATTENTION(q, k, v, attn_mask=seen if is_causal else None)


def without_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    return TORCH_ATTENTION(q, k, v)


def not_a_number(*call: Any, **options: Any) -> Tensor:
    return TORCH_ATTENTION(*call, **options) * math.nan


def refusing(*call: Any, **options: Any) -> Tensor:
    raise ValueError("That is not served.\nAnd more.")


def row_of(use: str, host: Host) -> Row:
    (row,) = rows_of(Case("a loop", use, loops.USES[use].make), [host])
    return row


@pytest.mark.parametrize(
    ("use", "attend"),
    [
        ("plain", scaled),
        ("causal, more keys", bottom_right),
        ("key padding left", without_mask),
        ("plain", not_a_number),
    ],
)
def test_wrong_attention_is_silently_wrong_whatever_was_counted(use: str, attend: Wrong) -> None:
    row = row_of(use, host_of(attend, Counts(sparse=loops.LAYERS)))
    assert row.verdict is Verdict.SILENTLY_WRONG
    for counts in ({"left": LEFT}, {"sparse": 0, "left": LEFT}, {"sparse": 0}):
        assert replace(row, **counts).verdict is Verdict.SILENTLY_WRONG


def test_what_is_left_has_every_bit_and_is_told() -> None:
    row = row_of("plain", host_of(TORCH_ATTENTION, Counts(left=LEFT)))
    assert row.verdict is Verdict.TRUE and row.error == 0
    assert replace(row, error=1e-6).verdict is Verdict.SILENTLY_WRONG
    assert replace(row, left={}).verdict is Verdict.SILENTLY_DENSE
    said = host_of(TORCH_ATTENTION, Counts(said="No call came.\nSee there."))
    assert row_of("plain", said).left == {"No call came.": loops.LAYERS}
    refused = row_of("plain", host_of(refusing, Counts()))
    assert refused.verdict is Verdict.REFUSED
    assert refused.refused == "ValueError: That is not served."
    with pytest.raises(ValueError, match="That is not served"):
        row_of("plain", replace(host_of(refusing, Counts()), may_refuse=False))


@pytest.mark.parametrize("use", ["GQA, causal", "key padding left"])
def test_ours_is_within_a_bound_that_shows_noise(use: str) -> None:
    row = row_of(use, hosts.SPARGE_SDPA)
    assert row.verdict is Verdict.TRUE and row.sparse == row.calls == loops.LAYERS
    assert 0 < row.error < row.bound < row.noise_error
    assert row.fewer_sparse == row.sparse and 0.4 < row.fewer_density < 1


def test_the_command_fails_and_writes_nothing_where_a_row_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Row("a host", "a model", "one", error=0.02, rounded_error=0.01, calls=2, sparse=2)
    wrong, out = replace(right, case="another", error=0.04), tmp_path / "rows.jsonl"
    assert finish([right, wrong], {}, out) == 1 and not out.exists()
    told = capsys.readouterr()
    assert "another" in told.err and "1 silently wrong" in told.out
    assert finish([right], {"commit": "c1"}, out) == 0
    assert json.loads(out.read_text("utf-8"))["commit"] == "c1" and read(out) == [right]


def test_rows_on_file_are_right_and_would_show_what_is_wrong() -> None:
    rows = read()
    assert [row for row in rows if row.verdict.is_bad] == []
    assert [row for row in rows if row.bound and row.bound >= row.noise_error] == []
    served = {row.host for row in rows if row.verdict is Verdict.TRUE and row.sparse}
    assert served >= HOSTS
    assert {row.model for row in rows} >= MODELS
    assert {row.model for row in rows if row.verdict is Verdict.TRUE and row.sparse} >= MODELS


def test_rows_on_file_are_of_every_case_and_host() -> None:
    pytest.importorskip("diffusers", reason="needs diffusers (requirements-dev.txt)")
    from benchmarks.hosts.suite import cases

    expected = [(host.name, case.model, case.name) for case, of_case in cases() for host in of_case]
    assert len(set(expected)) == len(expected)
    found = [(row.host, row.model, row.case) for row in read()]
    assert found == expected, "run: python -m benchmarks.hosts"


def test_a_bar_in_a_reason_is_no_end_of_a_cell() -> None:
    row = Row("a host", "a model", "one", refused="ValueError: no | never")
    assert "| 1 | ValueError: no \\| never |" in whole([row])
