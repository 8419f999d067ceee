# SPDX-License-Identifier: Apache-2.0
"""The benchmark of prefills, on a CPU and a toy of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", "5.24", reason="needs transformers 5.24")
from benchmarks import prefill
from benchmarks.timing import read_rows

pytestmark = pytest.mark.usefixtures("one_thread")
TOY = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
}


@pytest.mark.parametrize("chunk", [640, 320])
def test_rows_compare_own_free_and_sparse_attention(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, chunk: int
) -> None:
    out = tmp_path / "rows.jsonl"
    given = ["--tokens", "640", "--topk", "1", "0.2", "--layers", "2", "--repeats", "1"]
    given += ["--chunk", str(chunk), "--min-tokens", "256", "--device", "cpu", "--out", str(out)]
    rows = prefill.main(given, **TOY)
    assert read_rows(out) == rows
    assert [row["attention"] for row in rows] == ["own", "none", "topk 1", "topk 0.2"]
    own, free, whole, sparse = rows
    assert (own["times_as_fast"], free["saved_of_what_can_be"]) == (1, 1)
    assert whole["density"] == 1 and 0.2 < sparse["density"] < 0.8
    for row in rows:
        saved = (own["ms"] - row["ms"]) / (own["ms"] - free["ms"])
        assert row["saved_of_what_can_be"] == pytest.approx(saved)
    assert "2 of 32 layers" in capsys.readouterr().out


def test_free_attention_gives_queries_and_goes_again() -> None:
    model = prefill.make_model(1, torch.device("cpu"), **TOY)
    ids = torch.randint(64, (1, 128))
    before = prefill.run(model, ids, 128)
    with prefill.free_attention(model):
        assert not torch.equal(prefill.run(model, ids, 128), before)
    assert torch.equal(prefill.run(model, ids, 128), before)
    assert torch.allclose(prefill.run(model, ids, 50), before, atol=0.1), "in chunks, too"


def test_calls_that_stay_exact_are_no_result() -> None:
    model = prefill.make_model(1, torch.device("cpu"), **TOY)
    with pytest.raises(RuntimeError, match="not all of its calls were sparse"):
        prefill.time_all(model, 128, [0.5], 128, lambda work: work() is None or 1.0, 999)
