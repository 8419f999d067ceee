# SPDX-License-Identifier: Apache-2.0
"""Contexts of `sparge.sdpa` in each other, in tasks, generators and threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sparge
from sparge.session import Call

pytestmark = pytest.mark.usefixtures("no_gradients")

torch_attention: Callable[..., Tensor] = functional.scaled_dot_product_attention
WHOLE, TOKENS = sparge.SparsePolicy(topk=1.0), 320


def test_contexts_nest_and_the_inner_one_comes_first(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, TOKENS)
    with sparge.sdpa(min_tokens=128) as outer:
        with sparge.sdpa(WHOLE, 128) as inner:
            functional.scaled_dot_product_attention(q, k, v)
        with sparge.sdpa(min_tokens=9999) as longer:
            functional.scaled_dot_product_attention(q, k, v)
    assert [x.sparse_calls for x in (outer, inner, longer)] == [1, 1, 0]
    assert [x.dense_calls for x in (outer, inner, longer)] == [0, 0, 1]


@pytest.mark.parametrize("first_out", [0, 1])
def test_tasks_have_contexts_of_their_own(make_qkv, first_out: int) -> None:
    q, k, v = make_qkv(1, 2, TOKENS)
    exact = torch_attention(q, k, v)
    policies, outs, found = (WHOLE, sparge.SparsePolicy(topk=0.2)), {}, {}

    async def task(number: int) -> None:
        with sparge.sdpa(policies[number], 128) as found[number]:
            for _ in range(3):
                await asyncio.sleep(0)
                outs[number] = functional.scaled_dot_product_attention(q, k, v)
            if number != first_out:
                await done.wait()
                functional.scaled_dot_product_attention(q, k, v)
        done.set()
        assert torch.equal(functional.scaled_dot_product_attention(q, k, v), exact)

    async def both() -> None:
        await asyncio.gather(task(0), task(1))
        assert torch.equal(functional.scaled_dot_product_attention(q, k, v), exact)

    done = asyncio.Event()
    asyncio.run(both())
    assert [found[n].sparse_calls for n in (first_out, 1 - first_out)] == [3, 4]
    assert all(stats.dense_calls == 0 and not stats.remark for stats in found.values())
    assert found[0].density == 1 > found[1].density
    for number, policy in enumerate(policies):
        assert torch.equal(outs[number], sparge.sdpa_call(q, k, v, policy=policy, min_tokens=128))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_generators_that_end_in_another_order_say_so_and_leave_nothing_on(make_qkv) -> None:
    """They run in the context of whoever asks them on."""
    q, k, v = make_qkv(1, 2, TOKENS)

    def part() -> Generator[sparge.CallStats]:
        with sparge.sdpa(WHOLE, 128) as stats:
            yield stats
            functional.scaled_dot_product_attention(q, k, v)

    with sparge.sdpa(WHOLE, 128) as around, torch.device("cpu"):
        parts = [part(), part()]
        found = [next(each) for each in parts]
        for each in parts:
            assert next(each, None) is None
        functional.scaled_dot_product_attention(q, k, v)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert [stats.sparse_calls for stats in (*found, around)] == [0, 2, 1]
    assert all("opened last" in str(stats) for stats in found) and not around.remark
    abandoned = part()
    stats = next(abandoned)
    thread = threading.Thread(target=abandoned.close)
    thread.start()
    thread.join()
    assert (
        torch.equal(functional.scaled_dot_product_attention(q, k, v), torch_attention(q, k, v))
        and not stats.sparse_calls
    )
    while torch.overrides._get_current_function_mode_stack():  # another thread cannot take it off
        torch.overrides._pop_mode()


def test_threads_have_contexts_of_their_own(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, TOKENS)
    barrier, found = threading.Barrier(2), {}

    def run(number: int) -> None:
        with torch.no_grad(), sparge.sdpa(WHOLE, 128) as found[number]:
            for _ in range(number + 1):
                functional.scaled_dot_product_attention(q, k, v)
            barrier.wait()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [found[number].sparse_calls for number in range(2)] == [1, 2]


def test_ours_and_what_we_call_exact_stay_out_of_it(make_qkv, monkeypatch) -> None:
    q, k, v = make_qkv(1, 2, TOKENS)
    exact = torch_attention(q, k, v)
    with sparge.sdpa(WHOLE, 128) as stats:
        sparge.attention(q, k, v)
        assert torch.equal(Call(q, k, v).exact(), exact)
    assert stats.sparse_calls == stats.dense_calls == 0
    monkeypatch.setattr(functional, "scaled_dot_product_attention", sparge.sdpa_call)
    assert torch.equal(functional.scaled_dot_product_attention(q, k, v), exact), (
        "too short by default"
    )
    assert torch.equal(Call(q, k, v).exact(), exact)
    with sparge.sdpa(WHOLE, 128) as stats:  # sees what the replacement leaves to torch
        assert not torch.equal(functional.scaled_dot_product_attention(q, k, v), exact)
    assert stats.sparse_calls == 1
