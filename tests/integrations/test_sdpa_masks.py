# SPDX-License-Identifier: Apache-2.0
"""Masks inside `sparge.sdpa` that somebody fills anew, whether or not PyTorch takes notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sparge
from sparge.checks import padding
from sparge.common import weak_cache
from sparge.common.metrics import rel_l2
from sparge.common.torch_attention import exact_attention

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE = sparge.SparsePolicy(topk=1.0)
EIGHT_BITS = 0.02
TOKENS = 320
PLACES = torch.arange(TOKENS)
REAL = torch.stack([PLACES < 250, PLACES < TOKENS])


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def added(real: Tensor) -> Tensor:
    return torch.zeros(real.shape, dtype=torch.bfloat16).masked_fill(~real, -torch.inf)


#: Ways to fill a mask anew; PyTorch counts the first alone, and not in inference mode.
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in place": lambda mask, new: mask.copy_(new),
    ".data": lambda mask, new: mask.data.copy_(new),
    "NumPy": lambda mask, new: np.copyto(mask.numpy(), new.numpy()),
}
#: Forms of a padding mask (2, TOKENS), in memory of its own.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bools": lambda real: real[:, None, None].clone(),
    "added": lambda real: added(real[:, None, None]).float(),
    "by head": lambda real: real[:, None, None].repeat(1, 4, 1, 1),
    "every query": lambda real: added(real[:, None, None]).float().repeat(1, 1, TOKENS, 1),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_is_filled_anew_is_read_anew(
    make_qkv, form: str, write: str, mode: Any
) -> None:
    q, k, v = make_qkv(2, 4, TOKENS)
    q = q.float() if form in ("added", "every query") else q
    k, v = (x.to(q.dtype) for x in (k, v))
    paddings = [REAL, PLACES.expand(2, -1) < 60, PLACES.expand(2, -1) >= 200, PLACES % 3 > REAL]
    with mode(), sparge.sdpa(WHOLE, 128) as stats:
        mask = FORMS[form](REAL)
        for real in paddings:
            WRITES[write](mask, FORMS[form](real))
            out = functional.scaled_dot_product_attention(q, k, v, mask)
            assert rel_l2(out, exact_attention(q, k, v, mask)) < EIGHT_BITS
    assert (stats.sparse_calls, stats.exact_calls) == (len(paddings), 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_a_mask_that_becomes_more_than_padding_is_torchs(make_qkv, write: str, mode: Any) -> None:
    q, k, v = (x.float() for x in make_qkv(2, 4, TOKENS))
    with mode(), sparge.sdpa(WHOLE, 128) as stats:
        mask = FORMS["added"](REAL)
        for real, is_sparse in ((REAL, True), (REAL * 0.5, False), (REAL.flip(1), True)):
            WRITES[write](mask, FORMS["added"](real) if is_sparse else real[:, None, None])
            out = functional.scaled_dot_product_attention(q, k, v, mask)
            exact = exact_attention(q, k, v, mask)
            assert torch.equal(out, exact) != is_sparse and rel_l2(out, exact) < EIGHT_BITS
    assert stats.sparse_calls == 2 and "weighs keys" in next(iter(stats.reasons))


@pytest.mark.parametrize("form", FORMS)
def test_the_host_waits_once_for_a_mask_whose_changes_show(
    make_qkv, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of those on a GPU. Which keys it hides is found there in each call, so `.data` is heeded
    too."""
    reads: list[Tensor] = []
    read = padding._read
    monkeypatch.setattr(padding, "_read", lambda rows: (reads.append(rows), read(rows))[1])
    monkeypatch.setattr(weak_cache, "shows_changes", lambda tensor: True)
    q, k, v = (x.float() for x in make_qkv(2, 4, TOKENS))
    mask, waits = FORMS[form](REAL), int(form != "bools")
    with sparge.sdpa(WHOLE, 128) as stats:
        for real in (REAL, REAL.flip(1), PLACES % 3 > REAL):
            mask.data.copy_(FORMS[form](real))
            out = functional.scaled_dot_product_attention(q, k, v, mask)
            assert rel_l2(out, exact_attention(q, k, v, mask)) < EIGHT_BITS
        assert len(reads) == waits and stats.sparse_calls == 3
        functional.scaled_dot_product_attention(q, k, v, mask.logical_not_())
    assert len(reads) == 2 * waits


def test_two_dimensions_are_queries_and_keys_to_torch() -> None:
    """To `key_padding` they are batch and keys."""
    square = torch.ones(2, TOKENS, dtype=torch.bool)
    square[1, 7:] = False
    assert sparge.key_padding(square).key_lengths is not None
    with pytest.raises(sparge.Unsupported, match="hides other keys"):
        padding.torch_mask_padding(square)


def test_masks_that_nobody_can_read_while_a_cuda_graph_is_captured(make_qkv, monkeypatch) -> None:
    """A row of bools is read by the graph, whenever it runs."""
    monkeypatch.setattr(padding, "is_captured", lambda tensor: True)
    q, k, v = make_qkv(2, 4, TOKENS)
    with sparge.sdpa(WHOLE, 128) as stats:
        functional.scaled_dot_product_attention(q, k, v, REAL[:, None, None])
        assert stats.sparse_calls == 1
        exact = functional.scaled_dot_product_attention(q, k, v, added(REAL[:, None, None]))
    assert torch.equal(exact, exact_attention(q, k, v, added(REAL[:, None, None])))
    assert stats.sparse_calls == 1 and stats.reasons == {padding.CAPTURED: 1}
