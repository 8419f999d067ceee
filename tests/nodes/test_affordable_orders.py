# SPDX-License-Identifier: Apache-2.0
"""Fewer token orders are measured where dense steps are few or short: the same ones in all layers,
and however ComfyUI batches."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

HEADS, TOKENS = 2, 512
CUBES, ROWS = range(2)


@pytest.fixture
def measurement_costs(load_pack, monkeypatch):
    """measurement_costs(share): lets a measurement of all orders take this share of a dense call by
    flash, which takes twice as long as cuDNN; with margin=0 that is faster for sure."""
    worth, node = load_pack("sparge.speed.worth"), load_pack("sparge.tune.worth")
    cost = load_pack("sparge.speed.measuring_cost")
    monkeypatch.delenv("SPARGE_REFERENCE", raising=False)
    monkeypatch.setattr(node, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(node, "MEASURED_DTYPES", (torch.float32,))
    monkeypatch.setattr(load_pack("nodes.run_state"), "unusable_reason", lambda device: None)
    monkeypatch.setattr(load_pack("sparge.tune.call"), "torch_kernel", lambda *args: "flash")

    def pretend(share, launch=True, margin=1.0):
        sparse = worth.SparseRates(0, 0, 0, 0, 1e-12, 0, 0)
        cudnn, flash = (worth.DenseRates(0, launch=seconds, pair=0) for seconds in (0.5, 1.0))
        measuring = cost.MeasuringRates(once=0, launch=share / 3, token=0) if launch else None
        rates = worth.Rates(sparse, {"cudnn": cudnn, "flash": flash}, margin, measuring)
        for name in ("rates_for", "proportions_for"):
            monkeypatch.setattr(node, name, lambda gpu, head_dim: rates)

    return pretend


@pytest.fixture
def call_of(load_pack):
    """call_of(q, k, v): the call of (B, H, N, D)."""
    return load_pack("sparge.tune").Call


@pytest.fixture
def afforded(load_pack, call_of):
    """afforded(dense steps): of three token orders, in a run of very many measurements."""

    def order_kinds(steps, layers=10**9, calls=1, tensors=None):
        q = torch.zeros(1, HEADS, TOKENS, 64)
        call, afford = call_of(*(tensors or (q, q, q))), load_pack("sparge.tune.worth").affordable
        found = afford(call, 3, 2, calls, 0.0, layers=layers, dense_steps=steps, sparse_steps=9)
        return found.order_kinds

    return order_kinds


def test_more_dense_steps_afford_more_orders(measurement_costs, afforded):
    measurement_costs(0.08)
    assert [afforded(steps) for steps in range(1, 7)] == [1, 1, 2, 3, 3, 3]
    assert [afforded(steps, calls=2) for steps in range(1, 7)] == [1, 1, 1, 2, 2, 3]
    measurement_costs(10)
    assert afforded(1) == 1
    assert afforded(1, layers=1e-9) == 3


def test_the_kernel_that_serves_counts(measurement_costs, afforded, load_pack, monkeypatch):
    measurement_costs(0.08)
    for kernel, order_kinds in ("flash", 3), ("cudnn", 1), ("", 1):
        found = load_pack("sparge.tune.call")
        monkeypatch.setattr(found, "torch_kernel", lambda *args, kernel=kernel: kernel)
        assert afforded(4) == order_kinds


def test_all_orders_where_nothing_is_known(measurement_costs, afforded, load_pack, monkeypatch):
    node = load_pack("sparge.tune.worth")
    known = node.proportions_for
    measurement_costs(10)
    q, k = torch.zeros(1, HEADS, TOKENS, 64), torch.zeros(1, 1, TOKENS, 64)
    assert afforded(1, tensors=(q.half(),) * 3) == 3, "another dtype"
    assert afforded(1, tensors=(q, k, k)) == 3, "heads that share keys share their order"
    monkeypatch.setenv("SPARGE_REFERENCE", "1")
    assert afforded(1) == 3
    monkeypatch.delenv("SPARGE_REFERENCE")
    measurement_costs(10, launch=False)
    assert afforded(1) == 3, "only calls were measured"
    monkeypatch.setattr(node, "proportions_for", known)
    assert afforded(1) == 3, "a CPU"


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "fewest"), [(44776, 24, 128, 3), (17776, 48, 64, 6)]
)
def test_other_gpus_go_by_the_proportions_of_the_measured_one(
    load_pack, call_of, monkeypatch, tokens, heads, head_dim, fewest
):
    """Mochi and CogVideoX-5B, served by flash: here cuDNN, being faster, pays for all orders. But
    elsewhere no kernel is known to be faster, and no call is dense for being slower."""
    node = load_pack("sparge.tune.worth")
    monkeypatch.delenv("SPARGE_REFERENCE", raising=False)
    monkeypatch.setattr(load_pack("sparge.tune.call"), "torch_kernel", lambda *args: "flash")
    q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, heads, tokens, head_dim)
    call, found = call_of(q, q, q), {}
    for gpu in ("NVIDIA H200", "NVIDIA GeForce RTX 4090"):
        monkeypatch.setattr(node, "gpu_name", lambda device, gpu=gpu: gpu)
        afford = partial(node.affordable, call, 2, 2, 1, 0.2, layers=48, sparse_steps=9)
        found[gpu] = [afford(dense_steps=steps) for steps in range(1, 11)]
    measured, other = found.values()
    order_kinds = [afforded.order_kinds for afforded in other]
    assert order_kinds == [1] * (fewest - 1) + [2] * (11 - fewest)
    assert not any(afforded.by_faster_kernel for afforded in other)
    assert all(afforded.by_faster_kernel and afforded.order_kinds == 2 for afforded in measured)
    assert node.known_rates(call) is None and node.slower_reason(call, 1.0, False, None) is None


def test_a_short_call_waits_for_the_host_where_rates_are_its_own(load_pack, call_of, monkeypatch):
    """Elsewhere nothing is known of it: a slower GPU may never wait."""
    node = load_pack("sparge.tune.worth")
    monkeypatch.delenv("SPARGE_REFERENCE", raising=False)
    monkeypatch.setattr(load_pack("sparge.tune.call"), "torch_kernel", lambda *args: "flash")
    q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 32, 8192, 64)
    order_kinds = {}
    for gpu in ("NVIDIA H200", "NVIDIA GeForce RTX 4090"):
        monkeypatch.setattr(node, "gpu_name", lambda device, gpu=gpu: gpu)
        run = {"layers": 28, "dense_steps": 4, "sparse_steps": 16}
        order_kinds[gpu] = node.affordable(call_of(q, q, q), 2, 2, 1, 0.2, **run).order_kinds
    assert list(order_kinds.values()) == [1, 2]


def test_a_batch_affords_what_its_entries_do(measurement_costs, afforded):
    measurement_costs(0.08)
    both = (torch.zeros(2, HEADS, TOKENS, 64),) * 3
    for steps in range(1, 7):
        assert afforded(steps, tensors=both) == afforded(steps)


@pytest.fixture
def chosen(load_pack, call_of):
    """chosen(dense steps, *passes): the table of two layers after passes of (conditioning, q, k, v)
    in the last dense step."""
    module, grid = load_pack("sparge.tune.head_table"), load_pack("sparge").TokenGrid(8, 8, 8)
    aim = load_pack("sparge.tune").Aim("budget", 0.5)
    facts = load_pack("sparge.tune").PassFacts
    exact = load_pack("sparge.tune").ExactOnce

    def run(dense_steps, *passes):
        shape, policy = module.Shape(TOKENS, HEADS, grid), load_pack("sparge").SparsePolicy()
        afford = load_pack("sparge.tune.worth").affordable
        afford = partial(afford, layers=2, dense_steps=dense_steps, sparse_steps=9)
        table = module.HeadTable(shape, 2, aim, policy, torch.device("cpu"), afford)
        for conditioning, *qkv in passes:
            table.begin_pass(facts(conditioning, 0, "before start_percent", True))
            for row in range(2):
                call = call_of(*qkv)
                own = partial(scaled_dot_product_attention, *qkv)
                table.measure(row, call, exact(own))
        table.begin_pass(facts(passes[0][0], 1))
        return table

    return run


@pytest.fixture
def qkv_of(load_pack, generator):
    """qkv_of(*token orders): of heads whose keys are alike in the blocks of these token orders."""
    sparge = load_pack("sparge")
    order = sparge.grid_order(sparge.TokenGrid(8, 8, 8))

    def made(*order_kinds):
        q, k, v = torch.randn(3, 1, HEADS, TOKENS, 64, generator=generator)
        for head, order_kind in enumerate(order_kinds):
            block = order.token_slots[order_kind].long() // 64
            k[0, head] = 2 * torch.randn(order.key_blocks, 64, generator=generator)[block]
        return [q, k, v]

    return made


@pytest.mark.parametrize(("steps", "one_order"), [(1, True), (2, True), (3, False)])
def test_heads_take_measured_orders_in_a_batch_and_apart(
    measurement_costs, chosen, qkv_of, load_pack, monkeypatch, steps, one_order
):
    measurement_costs(0.08)
    monkeypatch.setattr(load_pack("sparge.speed.measuring_cost"), "ALWAYS", 0.0)
    uncond, cond = qkv_of(ROWS, CUBES), qkv_of(ROWS, CUBES)
    both = [torch.cat(each) for each in zip(uncond, cond, strict=True)]
    batch = chosen(steps, ((1, 0), *both))
    apart = chosen(steps, ((1,), *uncond), ((0,), *cond))
    for table in (batch, apart):
        assert table.one_order == one_order
    one, other = (table.choices for table in (batch, apart))
    taken = set(one.order_kind.flatten().tolist())
    assert taken == {CUBES} if one_order else {CUBES, ROWS}
    kinds = ("pool_weight", "output_scale", "order_kind")
    for name in ("density", *kinds, "error", "head_weight"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_orders_are_settled_once(measurement_costs, chosen, qkv_of, load_pack, monkeypatch):
    """Even if another kernel would serve later calls."""
    measurement_costs(0.08)
    monkeypatch.setattr(load_pack("sparge.speed.measuring_cost"), "ALWAYS", 0.0)
    kernels = itertools.chain(["cudnn"], itertools.repeat("flash"))
    module = load_pack("sparge.tune.call")
    monkeypatch.setattr(module, "torch_kernel", lambda *args: next(kernels))
    table = chosen(4, ((1,), *qkv_of(ROWS, CUBES)), ((0,), *qkv_of(ROWS, CUBES)))
    assert next(kernels) == "flash" and table.one_order
    assert not table.choices.order_kind.any()
    assert table.head_settings(0).order_kind is None


def test_measuring_pays_from_some_steps_on(load_pack, call_of, monkeypatch):
    """Flux at 1024 x 1024, where a sparse call saves half a millisecond and the GPU waits for the
    host to queue a measurement, and at 2048 x 2048."""
    node = load_pack("sparge.tune.worth")
    monkeypatch.delenv("SPARGE_REFERENCE", raising=False)
    monkeypatch.setattr(load_pack("sparge.tune.call"), "torch_kernel", lambda *args: "flash")

    def pays(tokens, steps, gpu="NVIDIA H200"):
        monkeypatch.setattr(node, "gpu_name", lambda device: gpu)
        q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 24, tokens, 128)
        run = {"layers": 57, "dense_steps": 1, "sparse_steps": steps}
        return node.affordable(call_of(q, q, q), 2, 1, 2, 0.235, **run).pays

    assert [pays(4608, steps) for steps in (0, 1, 7, 8, 16)] == [False] * 3 + [True] * 2
    assert pays(16896, 1) and not pays(16896, 0)
    assert pays(4608, None), "nobody knows how many come"
    assert pays(4608, 1, gpu="NVIDIA GeForce RTX 4090"), "nor what a call takes there"


class WanModel(torch.nn.LayerNorm):
    """Model of which the node sees its name and sizes alone."""

    patch_size, num_heads, blocks = (1, 2, 2), HEADS, range(2)


@pytest.mark.parametrize("mode", ["auto budget", "auto quality"])
def test_a_run_tells_it_and_its_profile_holds_it(
    measurement_costs, load_pack, patcher, session, runs, qkv_of, monkeypatch, mode
):
    monkeypatch.setattr(load_pack("sparge.speed.measuring_cost"), "ALWAYS", 0.0)
    patcher.model.diffusion_model = WanModel(8)
    node, hook_of = load_pack("nodes.sparge_attention").SpargeAttention, load_pack("nodes.hook")
    patched = node.execute(patcher, mode=mode, topk=0.5, min_tokens=TOKENS)[0]
    qkv = qkv_of(ROWS, CUBES)
    told = "measured one token order alone: the dense steps are few or short"

    def step(attend):
        for _ in range(2):
            attend(*qkv, HEADS, skip_reshape=True)

    def line(dense_steps):
        sigmas = [1 - number / 100 for number in range(dense_steps)]
        session(patched, (8, 16, 16)).sample(step, [*sigmas, 0.7, 0.6, 0.5, 0.4])
        return load_pack("nodes.report").summary(hook_of.hook_of(patched).last)

    measurement_costs(0.03)
    assert told in line(1)
    result = hook_of.hook_of(patched).last
    ((shape,), (choices,)) = result.report.shapes, result.profile.choices.values()
    assert list(shape.order_kinds.values()) == [4, 0]
    assert not choices.order_kind.any()
    assert "token order" not in line(4)
    assert runs[-1][0].tally.sparse == 8


@pytest.mark.parametrize(("margin", "faster"), [(0.0, 2), (1.0, 0)])
def test_only_measured_calls_go_by_a_faster_kernel(
    measurement_costs, load_pack, patcher, session, runs, qkv_of, monkeypatch, margin, faster
):
    """The second of two dense steps is measured."""
    patcher.model.diffusion_model = WanModel(8)
    node = load_pack("nodes.sparge_attention").SpargeAttention
    patched = node.execute(patcher, mode="auto budget", topk=0.5, min_tokens=TOKENS)[0]
    qkv, served, given = qkv_of(ROWS, CUBES), [], []

    def by_faster(call):
        served.append(call.result(scaled_dot_product_attention(*call.qkv)))
        return served[-1]

    monkeypatch.setattr(load_pack("nodes.forward"), "by_faster_kernel", by_faster)
    monkeypatch.setattr(load_pack("nodes.host"), "sdpa_order", lambda func: ())

    def step(attend):
        given.extend(attend(*qkv, HEADS, skip_reshape=True) for _ in range(2))

    measurement_costs(0.08, margin=margin)
    session(patched, (8, 16, 16)).sample(step, [0.99, 0.98, 0.7, 0.6, 0.5])
    tally = runs[-1][0].tally
    assert (len(served), tally.faster_dense, tally.dense, tally.sparse) == (faster, faster, 4, 6)
    taken = [place for place, out in enumerate(given) if any(out is one for one in served)]
    assert taken == [2, 3][:faster]


@pytest.mark.parametrize("mode", ["auto budget", "auto quality"])
@pytest.mark.parametrize("dense_steps", [0, 1, 2])
def test_a_run_that_cannot_pay_for_measuring_stays_dense(
    measurement_costs, load_pack, patcher, session, runs, qkv_of, monkeypatch, mode, dense_steps
):
    """A measurement takes two thirds of a dense call, and choosing for all heads as long as one."""
    monkeypatch.setattr(load_pack("sparge.speed.measuring_cost"), "CHOOSING", 1.0 / (2 * HEADS))
    patcher.model.diffusion_model = WanModel(8)
    node = load_pack("nodes.sparge_attention").SpargeAttention
    patched = node.execute(patcher, mode=mode, topk=0.5, min_tokens=TOKENS)[0]
    qkv = qkv_of(ROWS, CUBES)

    def step(attend):
        for _ in range(2):
            attend(*qkv, HEADS, skip_reshape=True)

    def tally(sparse_steps):
        before = [1 - number / 100 for number in range(dense_steps)]
        steps = sparse_steps + (not dense_steps)  # the first one is dense to be measured
        after = [0.7 - number / 100 for number in range(steps)]
        measurement_costs(2.0)
        session(patched, (8, 16, 16)).sample(step, [*before, *after])
        return runs[-1][0].tally

    reason = "too few steps are left to pay for measuring"
    short = tally(1)
    assert short.sparse == 0 and not runs[-1][0].session.tables.chosen
    assert short.reasons[reason] == 2 * (1 + (not dense_steps))
    assert reason in load_pack("nodes.report").summary(
        load_pack("nodes.hook").hook_of(patched).last
    )
    long = tally(2)
    assert long.sparse == 2 * 2 and reason not in long.reasons
