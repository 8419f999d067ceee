# SPDX-License-Identifier: Apache-2.0
"""What kernels are told about tensors, on a machine where none runs."""

from __future__ import annotations

import importlib
from ctypes import Structure
from types import SimpleNamespace

import pytest
import torch

from sparge import TokenGrid, grid_order
from sparge.kernels import Element
from sparge.kernels.params import MeansParams, MeansSizes
from sparge.plan.key_mean import LEAST_KEYS, STRIDE

launch = importlib.import_module("sparge.launch")

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

    def find_kernel(entry: str, *_: object) -> SimpleNamespace:
        return SimpleNamespace(entry=entry, sizes=MeansSizes(slices=4))

    def queue(kernel: SimpleNamespace, grid: object, params: Structure) -> None:
        parameters[kernel.entry] = params

    monkeypatch.setattr(launch, "find_kernel", find_kernel)
    monkeypatch.setattr(launch, "queue", queue)
    monkeypatch.setattr(launch, "resident_blocks", lambda _: 132)
    return parameters


def means_of(queued: dict[str, Structure]) -> MeansParams:
    params = queued["means"]
    assert isinstance(params, MeansParams)
    return params


@pytest.mark.parametrize(
    ("keys", "ordered", "stride"),
    [
        (LEAST_KEYS, True, STRIDE),
        (LEAST_KEYS, False, 1),
        (LEAST_KEYS - 1, True, 1),
    ],
)
def test_the_mean_key_is_sampled_in_long_orders_alone(
    queued: dict[str, Structure], keys: int, ordered: bool, stride: int
) -> None:
    k = torch.zeros(1, 1, keys, 64, dtype=torch.bfloat16)
    launch.means(k, k, None, True, Element.INT8_E4M3, ordered)
    assert means_of(queued).k_stride == stride


@pytest.mark.parametrize("ordered", [False, True])
def test_quantize_asks_for_the_mean_of_its_order(
    queued: dict[str, Structure], ordered: bool
) -> None:
    order = grid_order(TokenGrid(2, 64, 64))
    assert order.tokens >= LEAST_KEYS
    facts = launch.OrderFacts(order.slot_tokens, order.block_counts) if ordered else launch.NO_ORDER
    q = torch.zeros(1, 1, order.tokens, 64, dtype=torch.bfloat16)
    launch.quantize(q, q, q, None, True, Element.INT8_E4M3, True, False, facts)
    assert means_of(queued).k_stride == (STRIDE if ordered else 1)
