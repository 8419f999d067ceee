# SPDX-License-Identifier: Apache-2.0
"""Self-attention with a padding mask over text, as HunyuanVideo and Qwen Image have it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("reference_allowed")

TEXT, REAL, GRID, HEADS = 40, 25, 4 * 8 * 8, 2
TOKENS = TEXT + GRID
#: Everything kept: what is left is the error of 8-bit arithmetic.
EIGHT_BIT = 0.02
REASON = "attention mask"


class HunyuanVideo(torch.nn.LayerNorm):
    """Model with text before its grid, by its name; nothing of it runs."""

    patch_size, num_heads, double_blocks, single_blocks = [1, 2, 2], HEADS, range(2), range(1)


class Novelty(torch.nn.LayerNorm):
    blocks = range(3)


def padding(real=REAL, places=None):
    """(1, 1, tokens), to be added: of the text those behind the real ones are hidden."""
    hidden = range(real, TEXT) if places is None else places
    mask = torch.zeros(1, 1, TOKENS)
    mask[..., list(hidden)] = torch.finfo(torch.float32).min
    return mask


@pytest.fixture
def qkv(generator):
    return torch.randn(3, 1, HEADS, TOKENS, 64, generator=generator)


@pytest.fixture
def asked(load_pack, monkeypatch):
    """Requests to the library: (tokens, tokens of each segment)."""
    calls = load_pack("sparge.tune.call")
    library, seen = calls.attention, []

    def spy(q, k, v, policy, **kwargs):
        order = kwargs["order"]
        parts = [part.tokens for part in order.segments] if order is not None else []
        seen.append((q.shape[2], parts))
        return library(q, k, v, policy, **kwargs)

    monkeypatch.setattr(calls, "attention", spy)
    return seen


@pytest.fixture
def run(load_pack, patcher, session, runs):
    """run(step, sigmas, model, **widgets): what the passes gave, and the tally."""

    def sampled(step, sigmas=(0.5,), model=HunyuanVideo, **widgets):
        patcher.model.diffusion_model = model(8)
        node = load_pack("nodes.sparge_attention").SpargeAttention
        patched = node.execute(patcher, **({"min_tokens": 64, "topk": 1.0} | widgets))[0]
        running = session(patched, (4, 16, 16), torch.zeros(1, TEXT, 8))
        given = running.sample(step, list(sigmas), conditionings=([0],))
        return given, runs[-1][0].tally

    return sampled


def masked(q, k, v, mask):
    return scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))


def error(got, expected):
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("heads_first", [False, True])
def test_the_real_tokens_are_served_in_their_order(run, qkv, asked, heads_first):
    q, k, v = qkv
    mask = padding()

    def step(attend):
        if heads_first:
            flags = {"skip_reshape": True, "skip_output_reshape": True}
            return attend(q, k, v, HEADS, mask=mask, **flags)
        flat = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
        return attend(*flat, HEADS, mask=mask)

    (out,), tally = run(step)
    assert (tally.sparse, tally.dense) == (1, 0)
    assert asked == [(REAL + GRID, [REAL, GRID])]
    out = out if heads_first else out.unflatten(2, (HEADS, -1)).transpose(1, 2)
    expected = masked(q, k, v, mask)
    assert error(out, expected) < EIGHT_BIT
    assert error(out[:, :, REAL:TEXT], expected[:, :, REAL:TEXT]) < 1e-5, "that of padding is dense"


def test_padding_in_front_and_a_mask_of_bools(run, qkv, asked):
    q, k, v = qkv
    mask = padding(places=range(0, 10)) == 0
    flags = {"skip_reshape": True, "skip_output_reshape": True}
    (out,), _ = run(lambda attend: attend(q, k, v, HEADS, mask=mask, **flags))
    assert asked == [(TOKENS - 10, [TEXT - 10, GRID])]
    assert error(out, masked(q, k, v, mask)) < EIGHT_BIT


def test_auto_modes_measure_the_real_tokens(run, qkv, asked):
    q, k, v = qkv
    mask, flags = padding(), {"skip_reshape": True, "skip_output_reshape": True}
    given, tally = run(
        lambda attend: attend(q, k, v, HEADS, mask=mask, **flags),
        [1.0, 0.9, 0.7, 0.5],
        mode="auto quality",
    )
    assert tally.reasons == {"before start_percent 0.2": 2} and tally.sparse == 2
    assert asked == [(REAL + GRID, [REAL, GRID])] * 2
    assert all(error(out, masked(q, k, v, mask)) < 0.1 for out in given)


def test_a_mask_that_hides_nothing(run, qkv, asked):
    q, k, v = qkv
    flags = {"skip_reshape": True}
    _, tally = run(lambda attend: attend(q, k, v, HEADS, mask=padding(TEXT), **flags))
    assert tally.sparse == 1 and asked == [(TOKENS, [TEXT, GRID])]


def test_a_model_without_a_row_has_no_order(run, qkv, asked):
    q, k, v = qkv
    mask, flags = padding(), {"skip_reshape": True, "skip_output_reshape": True}
    (out,), _ = run(lambda attend: attend(q, k, v, HEADS, mask=mask, **flags), model=Novelty)
    assert asked == [(REAL + GRID, [])]
    assert error(out, masked(q, k, v, mask)) < EIGHT_BIT


def weights():
    mask = padding()
    mask[..., 3] = -0.5
    return mask


UNSERVED = {
    "of queries too": lambda: torch.zeros(TOKENS, TOKENS),
    "weights": weights,
    "a hole in the picture": lambda: padding(places=[TEXT + 7]),
    "no real token": lambda: padding(places=range(TOKENS)),
}


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
@pytest.mark.parametrize("case", UNSERVED)
def test_other_masks_stay_dense(run, qkv, asked, case, mode):
    q, k, v = qkv
    mask, flags = UNSERVED[case](), {"skip_reshape": True, "skip_output_reshape": True}
    given, tally = run(
        lambda attend: attend(q, k, v, HEADS, mask=mask, **flags), [0.9, 0.5], mode=mode
    )
    assert tally.sparse == 0 and asked == [] and tally.reasons[REASON] >= 1
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert all(torch.equal(out, expected) for out in given)


def test_prompts_of_one_batch_that_are_padded_differently_stay_dense(load_pack):
    module, families = load_pack("sparge.tune.real_tokens"), load_pack("nodes.families")
    layout = families.token_layout(
        HunyuanVideo(8), (2, 4, 4, 16, 16), torch.zeros(2, TEXT, 8), {"attention_mask": 1}
    )
    alike, apart = (torch.cat([padding(), padding(n)]) for n in (REAL, REAL + 1))
    assert module.real_tokens(apart, layout.tokens) == module.UNEVEN
    real = module.real_tokens(alike, layout.tokens)
    assert real.index.shape == (2, REAL + GRID) and real.rest.shape == (2, TEXT - REAL)
    assert layout.expected == (), "nobody knows how many are real before a call"
    assert layout.sequence(REAL + GRID).prefix == REAL


def test_one_look_at_a_mask_in_a_pass_and_none_before_the_window(load_pack, run, qkv, monkeypatch):
    module, looks = load_pack("nodes.forward"), []
    look = module.real_tokens
    monkeypatch.setattr(
        module, "real_tokens", lambda mask, known: (looks.append(1), look(mask, known))[1]
    )
    q, k, v = qkv
    mask, flags = padding(), {"skip_reshape": True}

    def step(attend):
        return [attend(q, k, v, HEADS, mask=mask, **flags) for _ in range(3)]

    _, tally = run(step, [1.0, 0.5])
    assert looks == [1] and tally.sparse == 3
    assert tally.reasons == {"before start_percent 0.2": 3}


def test_text_that_attends_to_itself_with_a_mask_stays_dense(run, qkv, asked):
    """The token refiner of HunyuanVideo."""
    q, k, v = (x[:, :, :TEXT] for x in qkv)
    mask = padding()[..., :TEXT]
    flags = {"skip_reshape": True}
    _, tally = run(lambda attend: attend(q, k, v, HEADS, mask=mask, **flags), min_tokens=0)
    assert tally.sparse == 0 and asked == []
