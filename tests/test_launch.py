# SPDX-License-Identifier: Apache-2.0
"""What kernels are told about tensors, on a machine where none runs."""

from __future__ import annotations

import importlib
from ctypes import Structure
from types import SimpleNamespace

import pytest
import torch

from sparge import SparsePolicy, TokenGrid, TokenOrder, grid_order
from sparge.call import make_call
from sparge.kernels import Capability, Element
from sparge.kernels.params import HOPPER_ATTEND, MeansSizes, RouteSizes
from sparge.order.facts import NO_ORDER, OrderFacts
from sparge.stages import ops, pipeline
from sparge.stages.key_mean import LEAST_KEYS, STRIDE
from sparge.stages.rules import QuantizeRules, RouteRules, Select

launch = importlib.import_module("sparge.stages.launch")

#: Elements of two bytes in a load of 16.
LOAD = 8


@pytest.mark.parametrize("odd", ["nothing", "address", "batch", "head", "token"])
def test_vector_loads_need_every_step_to_be_whole(odd: str) -> None:
    """A load of 16 bytes at an address that is no multiple of 16 is an error on a GPU."""
    steps = {"batch": 4096, "head": 1024, "token": 64}
    if odd in steps:
        steps[odd] += LOAD // 2
    store = torch.zeros(20_000, dtype=torch.bfloat16)
    x = store.as_strided((2, 3, 5, 64), (*steps.values(), 1), 1 if odd == "address" else 0)
    view = launch.view_of(x)
    assert (view.batch_stride, view.head_stride, view.token_stride) == tuple(steps.values())
    assert view.data == x.data_ptr()
    assert bool(view.vectorized) is (odd == "nothing")


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> dict[str, Structure]:
    """The parameters of every launch, by its entry; nothing is launched."""
    parameters: dict[str, Structure] = {}

    sizes = {"means": MeansSizes(slices=4), "route": RouteSizes(16, 16, 1000)}

    def find_kernel(entry: str, *_: object) -> SimpleNamespace:
        return SimpleNamespace(entry=entry, sizes=sizes.get(entry), static_shared=20_000)

    def queue(kernel: SimpleNamespace, grid: object, params: Structure, _: int = 0) -> None:
        parameters[kernel.entry] = params

    capability = Capability(True, "", "sm_90a")
    for name in ("sparge.stages.launch", "sparge.call"):
        monkeypatch.setattr(importlib.import_module(name), "capabilities", lambda _: capability)
    monkeypatch.setattr(launch, "find_kernel", find_kernel)
    monkeypatch.setattr(launch, "queue", queue)
    monkeypatch.setattr(launch, "resident_blocks", lambda _: 132)
    return parameters


@pytest.mark.parametrize(
    ("order", "stride"),
    [
        (grid_order(TokenGrid(2, 64, 64)), STRIDE),
        (grid_order(TokenGrid(2, 32, 64)), 1),
        (None, 1),
    ],
    ids=["long", "short", "no order"],
)
def test_the_mean_key_is_sampled_in_long_orders_alone(
    queued: dict[str, Structure], order: TokenOrder | None, stride: int
) -> None:
    tokens = order.tokens if order else LEAST_KEYS
    assert (tokens >= LEAST_KEYS) == (stride > 1 or order is None)
    facts = OrderFacts(order.slot_tokens, order.block_counts) if order else NO_ORDER
    q = torch.zeros(1, 1, tokens, 64, dtype=torch.bfloat16)
    launch.quantize(q, q, q, None, Element.INT8_E4M3, QuantizeRules(), facts)
    assert getattr(queued["means"], "k_stride") == stride  # noqa: B009


def test_what_a_policy_says_reaches_the_kernels(
    queued: dict[str, Structure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the ops' own functions, as on a GPU."""
    stages = {name: getattr(ops, f"_{name}") for name in ("quantize", "route", "attend")}
    monkeypatch.setattr(pipeline, "ops", SimpleNamespace(**stages))
    policy = SparsePolicy(
        topk=0.5, cdfthreshd=0.875, simthreshd1=0.25, pvthreshd=15.0, attention_sink=True,
        keep_diagonal=False, exact_prefix=3, exact_suffix=5, smooth_k=False,
    )  # fmt: skip
    q = torch.zeros(1, 2, 640, 64, dtype=torch.bfloat16)
    call = make_call(q, q, q, policy, "HND", True, 0.125, None, None, None)
    pipeline.run_kernels(call, torch.empty_like(q), None, None)

    def told(entry: str, *names: str) -> list[float]:
        return [getattr(queued[entry], name) for name in names]

    assert told("means", "smooth_k") == [False]
    flags = ("with_queries", "with_values", "with_similarity")
    assert told("quantize", *flags) == [True, True, True]
    assert told("route", "select", "topk_blocks", "floor", "upstream") == [Select.TOPK, 5, 1, True]
    assert told("route", "cdfthreshd", "simthreshd1", "score_scale") == [0.875, 0.25, 0.125]
    assert told("route", "causal", "attention_sink", "keep_diagonal") == [True, True, False]
    assert told("route", "exact_prefix", "exact_suffix", "rows_per_cta") == [3, 5, 16]
    attended = told(HOPPER_ATTEND, "scale", "pvthreshd", "causal", "tokens")
    assert attended == [0.125, 15.0, True, 640]


def test_rules_are_the_same_after_an_op() -> None:
    rules = RouteRules(Select.CDF, 7, 0.9, -0.1, 0.2, True, False, True, 3, 4, 2, False)
    assert RouteRules.of_flat(*rules.flat()) == rules
    order = OrderFacts(*torch.eye(5).unbind())
    assert vars(OrderFacts(*order.flat())) == vars(order)
    with pytest.raises(ValueError, match="zip"):
        RouteRules.of_flat([1], [True], [0.5])
