# SPDX-License-Identifier: Apache-2.0
"""`sparge.sdpa` and `sparge.sdpa_call` beside torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparge
from benchmarks.metrics import rel_l2
from sparge import padding, weak_cache
from sparge.torch_attention import exact_attention

pytestmark = pytest.mark.usefixtures("no_gradients")

torch_attention: Callable[..., Tensor] = functional.scaled_dot_product_attention
WHOLE = sparge.SparsePolicy(topk=1.0)
EIGHT_BITS = 0.02
TOKENS = 320
PLACES = torch.arange(TOKENS)
REAL = torch.stack([PLACES < 250, PLACES < TOKENS])
ADDED = torch.zeros(2, 1, 1, TOKENS, dtype=torch.bfloat16)


def added(real: Tensor) -> Tensor:
    return torch.zeros(real.shape, dtype=torch.bfloat16).masked_fill(~real, -torch.inf)


#: Name -> keywords of the call, and of `make_qkv`; both calls compute the same.
SPARSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.3}, {}),
    "causal": ({"is_causal": True}, {}),
    "causal, more keys": ({"is_causal": True}, {"kv_tokens": 500}),
    "causal, fewer keys": ({"is_causal": True}, {"kv_tokens": 200}),
    "other length": ({}, {"kv_tokens": 450}),
    "gqa": ({"enable_gqa": True, "is_causal": True}, {"kv_heads": 2}),
    "fp32": ({}, {"dtype": torch.float32}),
    "tokens first": ({}, {"layout": "NHD"}),
    "padding": ({"attn_mask": REAL[:, None, None]}, {}),
    "padding in front": ({"attn_mask": REAL.flip(1)[:, None, None]}, {}),
    "padding of one entry": ({"attn_mask": REAL[:1, None, None]}, {}),
    "padding, every query": ({"attn_mask": REAL[:, None, None].expand(-1, 4, TOKENS, -1)}, {}),
    "padding, added": ({"attn_mask": added(REAL[:, None, None])}, {}),
    "padding, one for all": ({"attn_mask": REAL[:1].expand(TOKENS, TOKENS)}, {}),
    "padding, one row": ({"attn_mask": REAL[:1]}, {}),
    "padding, by head": ({"attn_mask": REAL[:1].expand(4, 1, -1)}, {}),
    "nothing hidden": ({"attn_mask": ADDED}, {}),
}


@pytest.mark.parametrize("name", SPARSE)
def test_whole_calls_are_torchs_but_for_eight_bits(make_qkv, name: str) -> None:
    options, inputs = SPARSE[name]
    q, k, v = make_qkv(2, 4, TOKENS, 64, **inputs)
    if inputs.get("layout") == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    exact = torch_attention(q, k, v, **options)
    with sparge.sdpa(WHOLE, min_tokens=128) as stats:
        out = functional.scaled_dot_product_attention(q, k, v, **options)
    assert rel_l2(out, exact) < EIGHT_BITS
    assert not torch.equal(out, exact)
    assert (out.dtype, out.shape) == (exact.dtype, exact.shape)
    assert (stats.sparse_calls, stats.dense_calls) == (1, 0), str(stats)
    counted = sparge.CallStats()
    call = partial(sparge.sdpa_call, policy=WHOLE, min_tokens=128, stats=counted)
    assert torch.equal(call(q, k, v, **options), out) and counted.sparse_calls == 1
    if inputs.get("layout") == "NHD":
        assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("real", [REAL, REAL.flip(1), (PLACES % 7 > 1).expand(2, -1)])
def test_padding_times_padding_is_sparse(make_qkv, real: Tensor) -> None:
    """Its rows of padding, which no other token sees, are finite."""
    (q, k, v), of_both = make_qkv(2, 4, TOKENS, 64), (real[:, None] & real[:, :, None])[:, None]
    for mask in (of_both, added(of_both)):
        exact = torch_attention(q, k, v, mask)
        with sparge.sdpa(WHOLE, min_tokens=128) as stats:
            out = functional.scaled_dot_product_attention(q, k, v, mask)
        assert rel_l2(*(x.mT[..., real[0]] for x in (out[0], exact[0]))) < EIGHT_BITS
        assert out.isfinite().all() and stats.sparse_calls == 1, str(stats)


TRIANGLE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
#: Name -> the same, and words of the reason.
EXACT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "short": ({}, {"tokens": 100}, "fewer than 128 queries or keys"),
    "few keys": ({}, {"kv_tokens": 77}, "fewer than 128 queries or keys"),
    "mask": ({"attn_mask": TRIANGLE}, {}, "hides other keys from some queries"),
    "weights": ({"attn_mask": ADDED - 3}, {}, "weighs keys"),
    "heads": ({"attn_mask": TRIANGLE[:4, None].expand(2, 4, TOKENS, -1)}, {}, "hides other keys"),
    "wide heads": ({}, {"head_dim": 160}, "head_dim is 160"),
    "fp64": ({}, {"dtype": torch.float64}, "q is torch.float64"),
    "negative scale": ({"scale": -0.2}, {}, "scale is -0.2"),
    "both": ({"attn_mask": REAL[:, None, None], "is_causal": True}, {}, "a mask and is_causal"),
    "one head of keys": ({}, {"kv_heads": 1}, "without enable_gqa"),
}


@pytest.mark.parametrize("name", EXACT)
def test_other_calls_stay_torchs_with_a_reason(make_qkv, name: str) -> None:
    options, inputs, words = EXACT[name]
    q, k, v = make_qkv(**({"batch": 2, "heads": 4, "tokens": TOKENS} | inputs))
    with sparge.sdpa(min_tokens=128) as stats:
        out = functional.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(out, torch_attention(q, k, v, **options))
    assert stats.sparse_calls == 0 and stats.density == 1
    ((reason, count),) = stats.reasons.items()
    assert words in reason and count == 1 and reason in str(stats)
    call = partial(sparge.sdpa_call, min_tokens=128)
    assert torch.equal(call(q, k, v, **options), out)


def test_what_torch_refuses_it_still_refuses(make_qkv) -> None:
    q, k, v = make_qkv(2, 4, TOKENS)
    few_heads, mask = k[:, :2], REAL[:, None, None]
    calls: list[Any] = [
        functional.scaled_dot_product_attention,
        partial(sparge.sdpa_call, min_tokens=8),
    ]
    with sparge.sdpa(WHOLE, 128) as stats:
        for given, options in (
            ((q, few_heads, few_heads), {}),
            ((q, k.float(), v), {}),
            ((q, k, v), {"attn_mask": mask.expand(-1, 3, -1, -1)}),
            ((q, k, v), {"attn_mask": mask.int()}),
            ((q, k, v), {"attn_mask": added(mask).half()}),
            ((q, k, v), {"attn_mask": added(mask).double()}),
            ((q, k[:, :, :0], v[:, :, :0].float()), {}),
        ):
            for call in calls:
                with pytest.raises(RuntimeError):
                    call(*given, **options)
    assert stats.sparse_calls == 0


def test_dropout_gradients_and_transforms_stay_torchs(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, TOKENS, dtype=torch.float32)
    torch.manual_seed(3)
    expected = torch_attention(q, k, v, None, 0.5)
    with sparge.sdpa(min_tokens=128) as stats:
        torch.manual_seed(3)
        out = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        with torch.enable_grad():
            wanted = q.clone().requires_grad_()
            functional.scaled_dot_product_attention(wanted, k, v).sum().backward()
            bias = torch.zeros(1, 1, 1, TOKENS, requires_grad=True)
            functional.scaled_dot_product_attention(q, k, v, bias).sum().backward()
        assert wanted.grad is not None and bias.grad is not None
        torch.vmap(functional.scaled_dot_product_attention)(*(x[None] for x in (q, k, v)))
        functional.scaled_dot_product_attention(q[0], k[0], v[0])
        nested = torch.nested.nested_tensor([q[0].transpose(0, 1)], layout=torch.jagged)
        nested = nested.transpose(1, 2)
        functional.scaled_dot_product_attention(nested, nested, nested)
        assert stats.sparse_calls == 0
        with torch.enable_grad():  # nobody wants one
            functional.scaled_dot_product_attention(q, k, v)
    assert stats.sparse_calls == 1 and torch.equal(out, expected)
    words = ["dropout", "gradients", "torch.vmap", "not (batch, heads", "nested"]
    assert sorted(stats.reasons.values()) == [1, 1, 1, 1, 2]
    assert all(any(word in reason for reason in stats.reasons) for word in words)


def test_autocast_decides_the_dtype(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, TOKENS, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), sparge.sdpa(WHOLE, 128) as stats:
        out = functional.scaled_dot_product_attention(q, k, v)
        assert torch.equal(functional.scaled_dot_product_attention(q, k, v.bfloat16()), out)
    with torch.autocast("cpu", torch.bfloat16):
        exact = torch_attention(q, k, v)
    assert out.dtype == exact.dtype == torch.bfloat16 and stats.sparse_calls == 2
    assert rel_l2(out, exact) < EIGHT_BITS
    q, k, v = (x.double() for x in (q, k, v))  # which autocast leaves as they are
    with torch.autocast("cpu", torch.bfloat16), sparge.sdpa(WHOLE, 128) as stats:
        out = functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, torch_attention(q, k, v)) and out.dtype == torch.float64
    assert "q is torch.float64" in next(iter(stats.reasons))


def test_density_is_that_of_all_calls_and_waits_for_nobody(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 1024)
    with sparge.sdpa(sparge.SparsePolicy(topk=0.25), 128) as stats:
        functional.scaled_dot_product_attention(q, k, v)
        assert stats.density == pytest.approx(0.25)
        functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert 0.25 < stats.density < 0.44
    assert "2 sparse calls" in str(stats)
    with sparge.sdpa(min_tokens=128) as by_default:
        out = functional.scaled_dot_product_attention(q, k, v)
    assert by_default.density == pytest.approx(0.5, abs=0.07)
    assert torch.equal(out, sparge.sdpa_call(q, k, v, min_tokens=128))
    with sparge.sdpa() as longer:
        functional.scaled_dot_product_attention(q, k, v)
    assert "fewer than 4096" in next(iter(longer.reasons)) and stats.sparse_calls == 2


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


@pytest.mark.parametrize(
    ("write", "mode"),
    [("in place", torch.inference_mode), (".data", torch.no_grad), ("NumPy", torch.no_grad)],
)
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
        assert (stats.sparse_calls, stats.dense_calls) == (len(paddings), 0)
        if form == "added":
            WRITES[write](mask, 0.5 * REAL[:, None, None])
            out = functional.scaled_dot_product_attention(q, k, v, mask)
            assert torch.equal(out, exact_attention(q, k, v, mask)), "more than padding"
            assert "weighs keys" in next(iter(stats.reasons))


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


def test_masks_that_nobody_can_read_while_a_cuda_graph_is_captured(make_qkv, monkeypatch) -> None:
    """A row of bools is read by the graph, whenever it runs."""
    monkeypatch.setattr(padding, "being_recorded", lambda device: True)
    q, k, v = make_qkv(2, 4, TOKENS)
    with sparge.sdpa(WHOLE, 128) as stats:
        functional.scaled_dot_product_attention(q, k, v, REAL[:, None, None])
        assert stats.sparse_calls == 1
        exact = functional.scaled_dot_product_attention(q, k, v, added(REAL[:, None, None]))
    assert torch.equal(exact, torch_attention(q, k, v, added(REAL[:, None, None])))
    assert stats.sparse_calls == 1 and stats.reasons == {padding.CAPTURED: 1}


class Block(nn.Module):
    """Attention as models write it: short heads, then transposed back."""

    def __init__(self, calls: int = 1, mask: Tensor | None = None, causal: bool = False) -> None:
        super().__init__()
        self.calls, self.mask, self.causal = calls, mask, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q
        for _ in range(self.calls):
            out = functional.scaled_dot_product_attention(
                out, k, v, attn_mask=self.mask, is_causal=self.causal
            )
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_whole_graphs_are_traced_once_and_counted(make_qkv, backend: str) -> None:
    torch._dynamo.reset()
    traces: list[Any] = []
    inner = torch._dynamo.lookup_backend(backend)

    def counting(graph: Any, inputs: Any) -> Any:
        traces.append(graph)
        return inner(graph, inputs)

    block = Block(calls=2, causal=True)
    compiled = torch.compile(block, fullgraph=True, backend=counting)
    q, k, v = make_qkv(1, 2, TOKENS)
    with sparge.sdpa(min_tokens=128) as own:
        expected = block(q, k, v)
    for runs in (1, 3):
        with sparge.sdpa(min_tokens=128) as stats:
            for _ in range(runs):
                out = compiled(q, k, v)
        assert torch.equal(out, expected)
        assert stats.sparse_calls == 2 * runs and stats.dense_calls == 0
        assert stats.density == pytest.approx(own.density)
    assert len(traces) == 1
    assert rel_l2(compiled(q, k, v), block(q, k, v)) == 0, "without the context it is torch's"


@pytest.mark.parametrize(
    ("inputs", "mask", "words"),
    [
        ({}, REAL[:1, None, None], "a mask in a graph"),
        ({"head_dim": 160}, None, "sparge.attention refused it"),
        ({"tokens": 100}, None, "fewer than 128"),
    ],
)
def test_exact_calls_of_whole_graphs(make_qkv, inputs: dict, mask: Any, words: str) -> None:
    torch._dynamo.reset()
    block = Block(mask=mask)
    q, k, v = make_qkv(**({"batch": 1, "tokens": TOKENS} | inputs))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    expected = block(q, k, v)
    with sparge.sdpa(min_tokens=128) as stats:
        for _ in range(3):
            assert torch.equal(compiled(q, k, v), expected)
    ((reason, count),) = stats.reasons.items()
    assert words in reason and count == 1 and stats.sparse_calls == 0


def test_the_function_in_whole_graphs(make_qkv) -> None:
    torch._dynamo.reset()
    q, k, v = make_qkv(1, 2, TOKENS)
    stats = sparge.CallStats()
    stats.prepare()
    call: Any = partial(sparge.sdpa_call, min_tokens=128, stats=stats)
    compiled = torch.compile(lambda *qkv: call(*qkv) + 1, fullgraph=True, backend="aot_eager")
    for _ in range(12):  # more than torch traces a function anew
        assert torch.equal(compiled(q, k, v), call(q, k, v) + 1)
    assert stats.sparse_calls == 24
    compiled(q[:, :, :100], k, v)
    assert stats.reasons == {"fewer than 128 queries or keys (min_tokens)": 1}


def test_multihead_attention_is_counted() -> None:
    layer = nn.MultiheadAttention(128, 2, batch_first=True).eval()
    x = torch.randn(1, TOKENS, 128)
    with sparge.sdpa(WHOLE, 128) as stats:
        out = layer(x, x, x, need_weights=False)[0]
    assert torch.allclose(out, layer(x, x, x, need_weights=False)[0], atol=1e-5)
    assert stats.sparse_calls == 0 and "MultiheadAttention" in next(iter(stats.reasons))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": 0.3}, "policy is 0.3; give a SparsePolicy"),
        ({"policy": sparge.SparsePolicy}, "policy is the class SparsePolicy; give a SparsePolicy"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 0.5}, "min_tokens is 0.5"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sparge.sdpa(**options)
    call: Any = partial(sparge.sdpa_call, *[torch.zeros(1, 1, 1, 64)] * 3)
    with pytest.raises(ValueError, match="stats is"):
        call(stats=sparge.AttentionStats("cpu"))
