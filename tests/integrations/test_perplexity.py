# SPDX-License-Identifier: Apache-2.0
"""The benchmark of perplexity, on a CPU and a toy of a model."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers", "5.24", reason="needs transformers 5.24")
from benchmarks.perplexity import perplexity, sparse_perplexity, widen
from benchmarks.prefill import make_model
from sparge import SparsePolicy
from tests.integrations.test_prefill import TOY

pytestmark = pytest.mark.usefixtures("one_thread", "reference_allowed")


@pytest.fixture
def model():
    return make_model(2, torch.device("cpu"), **TOY)


def test_it_is_that_of_all_logits_and_the_same_in_chunks(model) -> None:
    ids = torch.randint(64, (1, 640))
    with torch.inference_mode():
        logits = model(ids).logits[0, :-1].float()
    expected = cross_entropy(logits, ids[0, 1:]).exp().item()
    assert perplexity(model, ids) == pytest.approx(expected, rel=0.01)
    assert perplexity(model, ids, 3) == pytest.approx(expected, rel=0.01)


def test_sparse_prefills_are_counted_and_every_block_gives_the_models_own(model) -> None:
    ids = torch.randint(64, (1, 640))
    own = perplexity(model, ids)
    whole, density = sparse_perplexity(model, ids, SparsePolicy(topk=1.0), min_tokens=256)
    assert (whole, density) == (pytest.approx(own, rel=0.01), 1)
    assert sparse_perplexity(model, ids, SparsePolicy(topk=0.2), min_tokens=256)[1] < 0.8
    with pytest.raises(RuntimeError, match="not all of its calls were sparse"):
        sparse_perplexity(model, ids, SparsePolicy(topk=0.5), min_tokens=999)


def test_wider_positions_keep_the_slowest_rotation_and_leave_short_texts(model) -> None:
    rotary, context = model.model.rotary_emb, model.config.max_position_embeddings
    before = rotary.inv_freq.float()
    widen(model, context)
    torch.testing.assert_close(rotary.inv_freq.float(), before, rtol=0.01, atol=0)
    widen(model, 3 * context)
    assert rotary.inv_freq[0] == 1
    assert rotary.inv_freq[-1].item() == pytest.approx(before[-1].item() / 3, rel=0.02)
