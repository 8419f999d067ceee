# SPDX-License-Identifier: Apache-2.0
"""Self-attention over a clip and text: padded, as HunyuanVideo and Qwen Image have it with a mask,
and in calls that no token order fits."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.nodes.parts import EIGHT_BIT, HEADS, network, relative_error
from tests.nodes.parts import TOKENS as GRID

pytestmark = pytest.mark.usefixtures("reference_allowed")

TEXT, REAL = 40, 25
TOKENS = TEXT + GRID
FLAGS = {"skip_reshape": True, "skip_output_reshape": True}


def hunyuan():
    return network(
        "HunyuanVideo", patch_size=[1, 2, 2], double_blocks=range(2), single_blocks=range(1)
    )


def padding(real=REAL, places=None):
    """(1, 1, tokens), to be added: of the text those behind the real ones are hidden."""
    mask = torch.zeros(1, 1, TOKENS)
    mask[..., list(range(real, TEXT) if places is None else places)] = torch.finfo().min
    return mask


@pytest.fixture
def qkv(generator):
    return torch.randn(3, 1, HEADS, TOKENS, 64, generator=generator)


@pytest.fixture
def run(sampled, qkv, asked):
    """run(mask, sigmas, ...): a run of calls with that mask, and the error of each result. Its
    asked: tokens of each call of the library, and of the segments of its order."""

    def of(mask, sigmas=(0.5,), model=None, step=None, batch=(0,), **widgets):
        got = sampled(
            step or (lambda attend: attend(*qkv, HEADS, mask=mask, **FLAGS)), sigmas,
            model or hunyuan(), context=torch.zeros(1, TEXT, 8), conditionings=(list(batch),),
            **{"min_tokens": 64, "topk": 1.0} | widgets,
        )  # fmt: skip
        got.asked = [
            (call.tensors[0].shape[2], [part.tokens for part in call.order.segments])
            if call.order else (call.tensors[0].shape[2], []) for call in asked
        ]  # fmt: skip
        return got

    return of


def masked(qkv, mask):
    return scaled_dot_product_attention(*qkv, attn_mask=mask)


@pytest.mark.parametrize("heads_first", [False, True])
def test_the_real_tokens_are_served_in_their_order(run, qkv, heads_first):
    mask, flat = padding(), [x.transpose(1, 2).flatten(2) for x in qkv]
    step = None if heads_first else lambda attend: attend(*flat, HEADS, mask=mask)
    got = run(mask, step=step)
    assert (got.counts.sparse, got.counts.dense) == (1, 0)
    assert got.asked == [(REAL + GRID, [REAL, GRID])]
    (out,) = got.given
    out = out if heads_first else out.unflatten(2, (HEADS, -1)).transpose(1, 2)
    expected = masked(qkv, mask)
    assert relative_error(out, expected) < EIGHT_BIT
    padded = slice(REAL, TEXT)
    assert relative_error(out[:, :, padded], expected[:, :, padded]) < 1e-5, "that is dense"


@pytest.mark.parametrize(
    ("mask", "model", "batch", "wanted"),
    [
        (padding(places=range(10)) == 0, None, [0], (TOKENS - 10, [TEXT - 10, GRID])),
        (padding(TEXT), None, [0], (TOKENS, [TEXT, GRID])),
        (padding()[None], None, [1, 0], (REAL + GRID, [REAL, GRID])),
        (padding(), network("Novelty"), [0], (REAL + GRID, [])),
    ],
    ids=["in front, of bools", "none hidden", "one for both prompts", "a model without a row"],
)
def test_other_padding(run, qkv, mask, model, batch, wanted):
    """A model without a row has no order."""
    got = run(mask, model=model, batch=batch)
    assert got.counts.sparse == 1 and got.asked == [wanted]
    expected = torch.cat([masked(qkv, mask)] * len(batch))
    assert relative_error(got.given[0], expected) < EIGHT_BIT


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
@pytest.mark.parametrize(
    "mask",
    [torch.zeros(TOKENS, TOKENS), padding(places=[TEXT + 7])],
    ids=["of queries too", "a hole in the picture"],
)
def test_other_masks_stay_dense(run, qkv, mask, mode):
    got = run(mask, [0.9, 0.5], mode=mode)
    assert got.counts.sparse == 0 and got.asked == [] and got.counts.reasons["attention mask"] >= 1
    assert all(torch.equal(out, masked(qkv, mask)) for out in got.given)


def test_prompts_of_one_batch_that_differ_in_length_stay_dense(load_pack, run, qkv):
    both, uneven = torch.cat([qkv, qkv], 1), load_pack("sparge.session.calls").UNEVEN
    in_front, longer = padding(places=range(TEXT - REAL)), padding(REAL + 1)
    for second, reasons in ((in_front, {}), (longer, {uneven: 1})):
        mask = torch.cat([padding(), second])[:, None]
        got = run(mask, step=lambda attend, mask=mask: attend(*both, HEADS, mask=mask, **FLAGS))
        assert got.counts.reasons == reasons and got.counts.sparse == 1 - len(reasons)
        assert relative_error(got.given[0], masked(both, mask)) < EIGHT_BIT
