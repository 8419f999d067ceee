# SPDX-License-Identifier: Apache-2.0
"""8-bit dense calls whose launches are recorded: the same bits as calls that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparge import Unsupported
from sparge.kernels import Kernel
from sparge.session.calls import Call, EightBitDense
from sparge.stages import launch

pytestmark = pytest.mark.gpu
LAYOUTS = ("HND", "NHD", "flat")


Qkv = tuple[Tensor, Tensor, Tensor]


def qkv(tokens: int = 700, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Qkv:
    """(2, 3, tokens, head_dim) views of one tensor, as of a linear layer for all three."""
    packed = torch.randn(2, tokens, 3, 3, head_dim, device="cuda").to(dtype)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    return q, k, v


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Entries that were prepared, one by one."""
    names: list[str] = []
    find = launch.find_kernel

    def find_kernel(entry: str, *args: Any) -> Kernel:
        names.append(entry)
        return find(entry, *args)

    monkeypatch.setattr(launch, "find_kernel", find_kernel)
    return names


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_other_tensors_of_one_kind_are_prepared_once(
    queued: list[str], layout: str, head_dim: int
) -> None:
    calls, held = EightBitDense(), []
    with torch.no_grad():
        for number in range(4):
            call = Call(*qkv(head_dim=head_dim), layout=layout)
            queued.clear()
            out = calls.attend(call)
            assert bool(queued) == (number == 0)
            held.append((out, call.eight_bit()))  # memory that the next call has to do without
        assert all(torch.equal(*pair) for pair in held)


def test_another_kind_is_prepared_anew(queued: list[str]) -> None:
    calls = EightBitDense()
    (q, k, v), (_, k_of_others, v_of_others) = (qkv() for _ in range(2))
    odd = torch.randn(q.numel() + 1, device="cuda").bfloat16()[1:].view(q.shape)
    kinds = [
        qkv(),
        qkv(701),
        qkv(dtype=torch.float16),
        (q.contiguous(), k.contiguous(), v.contiguous()),
        (odd, k_of_others, v_of_others),  # q at an address that takes no vector loads
    ]
    with torch.no_grad():
        for tensors in kinds:
            for again in (False, True):
                queued.clear()
                call = Call(*tensors)
                assert torch.equal(calls.attend(call), call.eight_bit())
                entries = [*queued]
                assert len(entries) == (3 if again else 6)  # eight_bit() alone, or both
        queued.clear()
        calls.attend(Call(*kinds[0], scale=0.5))
        assert queued


def test_a_stream_of_its_own_and_a_graph(queued: list[str]) -> None:
    calls, call = EightBitDense(), Call(*qkv())
    with torch.no_grad():
        expected = calls.attend(call)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            queued.clear()
            found = calls.attend(call)
            assert queued, "the map of another stream's recording may not be filled yet"
        stream.synchronize()
        assert torch.equal(found, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = calls.attend(call)
        graph.replay()
        assert torch.equal(found, expected)


def test_q_as_keys_is_served_and_not_recorded() -> None:
    calls, x = EightBitDense(), qkv()[0].contiguous()
    with torch.no_grad():
        for _ in range(2):
            call = Call(x, x, x)
            assert torch.equal(calls.attend(call), call.eight_bit())
    assert [*calls._recorded.values()] == [None]


def test_derivatives_are_refused_as_ever() -> None:
    calls, (q, k, v) = EightBitDense(), qkv()
    with torch.no_grad():
        calls.attend(Call(q, k, v))
        with forward_ad.dual_level(), pytest.raises(Unsupported, match="forward-mode"):
            calls.attend(Call(forward_ad.make_dual(q, torch.ones_like(q)), k, v))
    with pytest.raises(Unsupported, match="backward pass"):
        calls.attend(Call(q.requires_grad_(), k, v))


def test_without_memory_for_all_heads_groups_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = EightBitDense()
    with torch.no_grad():
        first = Call(*qkv())
        calls.attend(first)
        (recorded,) = calls._recorded.values()
        assert recorded is not None
        tried = []

        def run(*_: object) -> None:
            tried.append(1)
            raise torch.OutOfMemoryError

        monkeypatch.setattr(type(recorded), "run", run)
        assert torch.equal(calls.attend(first), first.eight_bit())
        assert tried
