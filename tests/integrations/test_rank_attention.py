# SPDX-License-Identifier: Apache-2.0
"""Attention of one rank in the slots of engines: what they send, get, and are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparge
from sparge.common.metrics import rel_l2
from sparge.integrations.parallel import (
    RankAttention,
    balanced_heads,
    context_parallel,
    dealt_places,
    heads_of_rank,
    sageattention_module,
    sageattention_slot,
    work_of_ranks,
    xdit_function,
)
from sparge.order.grid import grid_order

pytestmark = pytest.mark.usefixtures("one_thread")

EIGHT_BITS, HEAD_DIM = 0.02, 64
WHOLE = sparge.SparsePolicy(topk=1.0)
#: What yunchang's ring gives every kind of attention.
OF_YUNCHANG: dict[str, Any] = {
    "dropout_p": 0, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None,
    "return_softmax": False,
}  # fmt: skip


def exact(
    qkv: Iterable[Tensor], causal: bool = False, scale: float = HEAD_DIM**-0.5
) -> tuple[Tensor, Tensor]:
    """Attention and natural log-sum-exp, heads first."""
    q, k, v = qkv
    logits = q.float() @ k.float().mT * scale
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
    return logits.softmax(-1) @ v.float(), logits.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_the_slot_of_sageattention(make_qkv, layout: str, causal: bool) -> None:
    attend = RankAttention(WHOLE, min_tokens=0)
    module = sageattention_module(attend)
    assert module.__spec__ is not None  # importlib.util.find_spec asks for it
    q, k, v = make_qkv(1, 2, 320, layout=layout)
    by_head = (q, k, v) if layout == "HND" else (x.transpose(1, 2) for x in (q, k, v))
    out_exact, lse_exact = exact(by_head, causal, 0.2)
    out_exact = out_exact if layout == "HND" else out_exact.transpose(1, 2)

    own = {"is_causal": causal, "sm_scale": 0.2}
    yunchang = {"causal": causal, "softmax_scale": 0.2} | OF_YUNCHANG
    for arguments in (own, yunchang):
        out, lse = module.sageattn(q, k, v, tensor_layout=layout, return_lse=True, **arguments)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert rel_l2(out, out_exact) < EIGHT_BITS
        assert lse.dtype == torch.float32 and (lse - lse_exact).abs().max() < 0.05
    assert torch.equal(module.sageattn(q, k, v, layout, causal, 0.2), out)
    assert attend.stats.sparse_calls == 3 and not attend.stats.exact_calls


@pytest.mark.parametrize(
    "option", [{"window_size": (128, 0)}, {"softcap": 30.0}, {"dropout_p": 0.1}, {"sinks": None}]
)
def test_what_would_change_the_result_is_refused(make_qkv, option: dict[str, Any]) -> None:
    with pytest.raises(sparge.Unsupported, match=f"asked for {next(iter(option))}="):
        sageattention_slot(RankAttention(WHOLE))(*make_qkv(), **option)


def with_arguments(function: Any, *qkv: Tensor, **more: Any) -> Any:
    """Call as xfuser 0.5.0 to 0.7.0 makes it."""
    return function(*qkv, **{"dropout_p": 0.0, "is_causal": False, "attention_kwargs": None} | more)


@dataclass
class AttnCall:
    """Stand-in for that of xDiT's later sources."""

    dropout_p: float = 0.0
    is_causal: bool = False
    varlen: Any = None
    ulysses_world_size: int = 2
    ring_world_size: int = 1
    attention_kwargs: dict[str, Any] = field(default_factory=dict)


def with_one_object(function: Any, *qkv: Tensor, **more: Any) -> Any:
    """Call as xDiT's later sources make it."""
    return function(*qkv, AttnCall(**more))


@pytest.mark.parametrize("send", [with_arguments, with_one_object])
def test_the_slot_of_xdit(make_qkv, send: Any) -> None:
    attend = RankAttention(WHOLE, min_tokens=0)
    function, qkv = xdit_function(attend), make_qkv(1, 2, 320)
    harmless = {"thw": (4, 8, 10), "pre_quantized": False, "indices_k": None, "attn_mask": None}
    for causal, of_model in ((False, harmless), (True, {})):
        out, lse = send(function, *qkv, is_causal=causal, attention_kwargs=of_model)
        out_exact, lse_exact = exact(qkv, causal)
        assert rel_l2(out, out_exact) < EIGHT_BITS and (lse - lse_exact).abs().max() < 0.05
    assert attend.stats.sparse_calls == 2 and not attend.stats.exact_calls


@pytest.mark.parametrize("send", [with_arguments, with_one_object])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pre_quantized": True}, "turn use_fp8_comms off"),
        ({"indices_k": torch.arange(3)}, "the real keys of a padded sequence"),
        ({"attn_mask": torch.ones(1, 1, 1, 320, dtype=torch.bool)}, "xDiT sends a mask"),
    ],
)
def test_what_xdit_sends_that_we_cannot_serve_is_refused(
    make_qkv, send: Any, given: dict[str, Any], said: str
) -> None:
    function, qkv = xdit_function(RankAttention(WHOLE, min_tokens=0)), make_qkv(1, 2, 320)
    with pytest.raises(sparge.Unsupported, match=said):
        send(function, *qkv, attention_kwargs=given)
    with pytest.raises(sparge.Unsupported, match="cannot be ours: dropout"):
        send(function, *qkv, dropout_p=0.5)


def test_short_calls_are_torchs_or_whole_where_the_log_sum_exp_is_asked_for(make_qkv) -> None:
    attend = RankAttention(sparge.SparsePolicy(topk=0.1), min_tokens=400)
    qkv = make_qkv(1, 2, 320)
    out = attend(*qkv)
    assert torch.equal(out, functional.scaled_dot_product_attention(*qkv))
    out, lse = attend.with_lse(*qkv)
    out_exact, lse_exact = exact(qkv)
    assert rel_l2(out, out_exact) < EIGHT_BITS and (lse - lse_exact).abs().max() < 0.05
    short = "fewer than 400 queries or keys"
    assert set(attend.stats.reasons) == {
        short, f"{short}; so all was kept, in 8 bits, because the log-sum-exp is asked for"
    }  # fmt: skip
    assert attend.stats.sparse_calls == 0


def test_calls_of_other_tokens_than_the_grids_keep_all(make_qkv) -> None:
    attend = RankAttention(grid=sparge.TokenGrid(1, 16, 20), min_tokens=0)
    qkv = make_qkv(1, 2, 300)
    assert torch.equal(attend(*qkv), functional.scaled_dot_product_attention(*qkv))
    qkv = make_qkv(1, 2, 320)
    assert torch.equal(
        attend(*qkv, is_causal=True), functional.scaled_dot_product_attention(*qkv, is_causal=True)
    )
    reasons = list(attend.stats.reasons)
    assert "300 queries and 300 keys, and not the 320 of the grid" in reasons
    assert any("A token order and is_causal" in reason for reason in reasons)


def test_a_log_sum_exp_that_we_cannot_give_is_refused(make_qkv) -> None:
    attend = RankAttention(min_tokens=0)
    q, k, v = make_qkv(1, 2, 320)
    mask = torch.ones(1, 320, dtype=torch.bool)
    masked = attend(q, k, v, mask=mask)
    assert torch.equal(masked, functional.scaled_dot_product_attention(q, k, v, mask))
    with pytest.raises(sparge.Unsupported, match="cannot be ours: dropout"):
        attend.with_lse(q, k, v, dropout_p=0.5)


def test_exact_tokens_of_a_policy_follow_their_places(make_qkv) -> None:
    """Without a grid: text first, the rest in the order it comes."""
    policy, places = sparge.SparsePolicy(topk=0.2, exact_prefix=26), dealt_places((26, 320), 2)
    q, k, v = make_qkv(1, 2, 346)
    seen = [x[:, :, places] for x in (q, k, v)]
    attend = RankAttention(policy, places=places, min_tokens=0)
    out = attend(*seen)[:, :, places.argsort()]
    of_all, _ = exact((q, k, v))
    assert rel_l2(out[:, :, :26], of_all[:, :, :26]) < EIGHT_BITS < rel_l2(out, of_all)
    assert not attend.stats.remarks

    blind = RankAttention(policy, min_tokens=0)
    out = blind(*seen)[:, :, places.argsort()]
    assert rel_l2(out[:, :, :26], of_all[:, :, :26]) > 5 * EIGHT_BITS
    assert blind.stats.remarks.total() == 1 and "text was not kept exact" in str(blind.stats)
    plain = sparge.attention(seen[0], seen[1], seen[2], sparge.SparsePolicy(topk=0.2))
    assert torch.equal(out, plain[:, :, places.argsort()]), "no other tokens in its place"


def test_ring_takes_no_grid_and_no_head_settings(make_qkv) -> None:
    with pytest.raises(sparge.Unsupported, match="A grid or places and ring=True"):
        RankAttention(grid=sparge.TokenGrid(1, 16, 20), ring=True)
    settings = sparge.HeadSettings.uniform(2, 0.5)
    with pytest.raises(sparge.Unsupported, match="Head settings and ring=True"):
        RankAttention(ring=True)(*make_qkv(), head_settings=settings)


def test_heads_are_dealt_in_order() -> None:
    assert [heads_of_rank(6, rank, 2) for rank in range(2)] == [slice(0, 3), slice(3, 6)]
    shares = [heads_of_rank(30, rank, 4) for rank in range(4)]
    assert [len(range(30)[share]) for share in shares] == [8, 8, 8, 6]
    with pytest.raises(ValueError, match="rank is 2; it takes a whole number from 0 to 1"):
        heads_of_rank(6, 2, 2)


def test_balanced_heads_give_ranks_equal_work_and_the_same_results(make_qkv, generator) -> None:
    work = torch.rand(40, generator=generator).square()  # a few heads need most
    work, ranks = work.sort().values, 4  # the worst order
    before, order = work_of_ranks(work, ranks), balanced_heads(work, ranks)
    after = work_of_ranks(work[order], ranks)
    assert torch.equal(order.sort().values, torch.arange(40))
    assert before.max() > 1.5 * before.mean() and after.max() < 1.02 * after.mean()
    with pytest.raises(ValueError, match="40 heads are not dealt evenly to 3 ranks"):
        balanced_heads(work, 3)
    no_tensor: Any = [1.0, 2.0]
    with pytest.raises(ValueError, match="give a torch tensor: one number for each head"):
        balanced_heads(no_tensor, 2)
    wrong: list[dict[str, Any]] = [
        {"grid": (1, 2, 3)}, {"places": [0, 1]}, {"places": torch.zeros(0, dtype=torch.long)},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(options))} is .*; give"):
            RankAttention(**options)

    heads = torch.tensor([2, 0, 3, 1])
    qkv = make_qkv(1, 4, 320)
    settings = sparge.HeadSettings.uniform(4, 0.3)
    settings = sparge.HeadSettings(
        torch.tensor([0.1, 0.3, 0.5, 0.9]), settings.pool_weight, settings.router, pools=False
    )
    dealt = sparge.HeadSettings(
        settings.density[heads], settings.pool_weight, settings.router, pools=False
    )
    order = grid_order(sparge.TokenGrid(1, 16, 20))
    of_all = sparge.attention(*qkv, order=order, head_settings=settings)
    out = sparge.attention(*(x[:, heads] for x in qkv), order=order, head_settings=dealt)
    assert torch.equal(out[:, heads.argsort()], of_all)


class Unknown(nn.Module):
    """Transformer of a class that has no row."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)


def test_context_parallel_leaves_the_model_as_it_was_and_says_what_it_does_not_know(
    make_qkv, no_mode_left: None
) -> None:
    model, qkv = Unknown(), make_qkv(1, 2, 320)
    config: Any = SimpleNamespace(ring_degree=1, ulysses_degree=2)
    with context_parallel(model, config, sparge.SparsePolicy(topk=0.3), min_tokens=0) as stats:
        inside = model(*qkv)
        with pytest.raises(TypeError):
            model(None, None, None)
    assert not torch.equal(model(*qkv), inside)
    assert torch.equal(model(*qkv), functional.scaled_dot_product_attention(*qkv))
    assert stats.sparse_calls == 1 and any("Unknown: its tokens" in x for x in stats.remarks)
    other: Any = object()
    with (
        pytest.raises(ValueError, match="give the ContextParallelConfig"),
        context_parallel(model, other),
    ):
        pass


def test_a_copy_of_a_model_in_context_parallel_is_native(make_qkv) -> None:
    model, qkv = Unknown(), make_qkv(1, 2, 320)
    config: Any = SimpleNamespace(ring_degree=1, ulysses_degree=2)
    with context_parallel(model, config, sparge.SparsePolicy(topk=0.3), min_tokens=0) as stats:
        copied = copy.deepcopy(model)
        assert torch.equal(copied(*qkv), functional.scaled_dot_product_attention(*qkv))
        assert stats.sparse_calls + stats.exact_calls == 0
        assert not torch.equal(model(*qkv), copied(*qkv)) and stats.sparse_calls == 1


def test_calls_of_other_shapes_stay_torchs(make_qkv) -> None:
    model, (q, k, v) = Unknown(), make_qkv(2, 2, 320)
    config: Any = SimpleNamespace(ring_degree=1, ulysses_degree=2)
    with context_parallel(model, config, min_tokens=0) as stats:
        for given in ((q[0], k[0], v[0]), (q, k[:1], v[:1]), (q[:, :, :0], k, v)):
            assert torch.equal(model(*given), functional.scaled_dot_product_attention(*given))
    assert (stats.sparse_calls, stats.exact_calls) == (0, 3), str(stats)


def test_an_interrupted_pass_of_context_parallel_serves_no_other_model(make_qkv) -> None:
    model, qkv = Unknown(), make_qkv(1, 2, 320)
    config: Any = SimpleNamespace(ring_degree=1, ulysses_degree=2)
    expected = functional.scaled_dot_product_attention(*qkv)

    class Interrupting(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise KeyboardInterrupt

    with context_parallel(model, config, sparge.SparsePolicy(topk=0.3), min_tokens=0) as stats:
        with pytest.raises(KeyboardInterrupt):
            model(qkv[0].as_subclass(Interrupting), *qkv[1:])
        assert torch.overrides._get_current_function_mode_stack() == []
        assert torch.equal(functional.scaled_dot_product_attention(*qkv), expected)
        assert stats.sparse_calls == 0
        model(*qkv)
        assert stats.sparse_calls == 1


def test_context_parallel_of_a_compiled_model_is_sparse_or_says_why_not(make_qkv) -> None:
    config: Any = SimpleNamespace(ring_degree=1, ulysses_degree=2)
    policy, qkv = sparge.SparsePolicy(topk=0.3), make_qkv(1, 2, 320)
    found = []
    for options in (None, {"fullgraph": False}, {"fullgraph": True}):
        model = Unknown()
        if options is not None:
            torch._dynamo.reset()
            model.compile(backend="eager", **options)
        with context_parallel(model, config, policy, min_tokens=0) as stats:
            found.append(model(*qkv))
        assert (stats.sparse_calls == 1) != ("compile without fullgraph" in str(stats))
    torch._dynamo.reset()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], functional.scaled_dot_product_attention(*qkv))


class FluxTransformer2DModel(nn.Module):
    """What one rank of a ring computes: its queries over one chunk of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=2)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, img_ids: Tensor, qkv: Any
    ) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(*qkv)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_text_is_exact_in_each_chunk_of_a_ring(make_qkv, ulysses: int) -> None:
    """Unless Ulysses has dealt it further."""
    rows, columns = torch.meshgrid(torch.arange(20), torch.arange(24), indexing="ij")
    ids = torch.stack([torch.zeros(480), rows.flatten(), columns.flatten()], 1)
    text, qkv = 26 // 2, make_qkv(1, 2, (26 + 480) // 2)
    config: Any = SimpleNamespace(ring_degree=2, ulysses_degree=ulysses)
    model, policy = FluxTransformer2DModel(), sparge.SparsePolicy(topk=0.2)
    with context_parallel(model, config, policy, min_tokens=0) as stats:
        out, lse, *_ = model(torch.zeros(1, 480, 8), torch.zeros(1, 26, 8), ids, qkv)
    out_exact, lse_exact = exact(qkv)
    own, others = (
        rel_l2(out[:, :, x], out_exact[:, :, x]) for x in (slice(text), slice(text, None))
    )
    assert stats.sparse_calls == 1 and lse.shape == lse_exact.shape and others > 5 * EIGHT_BITS
    if ulysses == 1:
        assert own < EIGHT_BITS and not stats.remarks
        assert (lse - lse_exact)[:, :, :text].abs().max() < 0.05
    else:
        assert own > 5 * EIGHT_BITS and stats.remarks.total() == 1
