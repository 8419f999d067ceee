# SPDX-License-Identifier: Apache-2.0
"""Seconds of calls by each backend on a pretended GPU: measured once, kept, believed or not."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from sparge import Unsupported
from sparge.order.grid import TokenOrder
from sparge.policy import EIGHT_BIT_DENSE
from sparge.session import Call, Exact, timing
from sparge.session.measure import Candidates
from sparge.session.timing import Times, times_of
from tests.session.parts import CPU, FAST

CUDA = torch.device("cuda", 0)


@dataclass
class OnGpu:
    """Stands for a tensor there."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA

    def __getitem__(self, _: slice) -> OnGpu:
        return self


def call_of(tokens: int = 4096, keys: int = 0, heads: int = 2, **named: Any) -> Call:
    q, k = (OnGpu((1, heads, n, 64), **named) for n in (tokens, keys or tokens))
    return Call(q, k, k)  # type: ignore[arg-type]  # stand-ins, as there is no GPU


@dataclass
class Gpu:
    """Stands for a GPU and its host, with the seconds of each backend."""

    exact: float = 4.0
    eight_bit: float = 2.0
    fixed: float = 0.5
    pairs: float = 3.0
    score: float = 0.1
    host: float = 0.0
    """Of each call."""
    busy: float = 0.0
    only: str = ""
    """Seconds that something else takes of every third call, and the name of those it takes of."""
    now: float = 0.0
    clock: float = 0.0
    done: list[str] = field(default_factory=list)

    def work(self, name: str, seconds: float) -> None:
        self.done.append(name)
        self.clock += self.host
        disturbed = len(self.done) % 3 == 0 and self.only in ("", name)
        self.now += seconds + self.busy * disturbed

    def attention(self, q, k, v, policy, head_settings: float = 0.0, **_: Any) -> None:
        if policy is EIGHT_BIT_DENSE:
            self.work("8-bit", self.eight_bit)
        else:  # a pooled key for each block
            self.work("sparse", self.fixed + self.pairs * (head_settings + 1 / 64))

    def event(self, enable_timing: bool) -> SimpleNamespace:
        mark = SimpleNamespace(at=0.0, synchronize=lambda: None)
        mark.record = lambda: setattr(mark, "at", self.now)
        mark.elapsed_time = lambda end: 1000 * (end.at - mark.at)
        return mark

    def times(self, call: Call | None = None, exact: str = "exact") -> Times | None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.work("exact", self.exact)
            return q

        by = Exact(exact, attend)
        return times_of(call or call_of(), by, None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    gpu = Gpu()
    monkeypatch.delenv(timing.REFERENCE_VARIABLE, raising=False)
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "cache"))
    of_timing = {
        "capabilities": lambda device: SimpleNamespace(usable=True, arch="sm_90a"),
        "driver_version": lambda: 13000,
        "attention": gpu.attention,
        "measure": lambda call: gpu.work("score", gpu.score),
        "HeadSettings": SimpleNamespace(uniform=lambda heads, density, *_: density),
        "Candidates": SimpleNamespace(of=lambda order, *_: Candidates.of(order, CPU)),
        "being_recorded": lambda device: False,
        "as_written": lambda device: nullcontext(),
        "time": SimpleNamespace(perf_counter=lambda: gpu.clock),
        "_known": {},
        "_disturbed": set(),
    }
    of_cuda = {
        "get_device_name": lambda device: "Some GPU", "Event": gpu.event, "device": nullcontext,
        "_sleep": lambda cycles: setattr(gpu, "now", 0.0),  # the same floats each time
    }  # fmt: skip
    for module, names in ((timing, of_timing), (torch.cuda, of_cuda)):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(TokenOrder, "on", lambda self, device: self)
    timing._facts.cache_clear()
    yield gpu
    timing._facts.cache_clear()


@pytest.fixture
def restart(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """restart(): what follows is another process."""

    def restart() -> None:
        monkeypatch.setattr(timing, "_known", {})
        monkeypatch.setattr(timing, "_disturbed", set())
        timing._facts.cache_clear()
        gpu.done.clear()

    return restart


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("times.*.json"))


def test_times_are_those_of_the_gpu_measured_once_and_kept(gpu, restart, tmp_path) -> None:
    found = gpu.times()
    expected = (4.0, 2.0, 0.5, 3.0, 0.1)
    names = ("exact", "eight_bit", "sparse_fixed", "sparse_pairs", "measuring")
    assert [getattr(found, name) for name in names] == pytest.approx(expected)
    assert found.tokens == 4096 and {gpu.done.count(name) for name in gpu.done} == {3, 6}
    measured = len(gpu.done)
    assert gpu.times() == found and len(gpu.done) == measured
    (path,) = kept(tmp_path)
    before = path.read_bytes()
    restart()
    assert gpu.times() == found and not gpu.done and path.read_bytes() == before
    assert gpu.times(exact="attention_sage") == found and len(gpu.done) == measured
    assert len(kept(tmp_path)) == 2, "another function has a file of its own"
    gpu.host = 6.0  # half of it counts
    found = gpu.times(call_of(heads=3))
    assert (found.exact, found.eight_bit, found.measuring) == pytest.approx((4, 3, 3))


def test_about_the_same_lengths_share_times_by_pairs(gpu) -> None:
    gpu.times()
    gpu.done.clear()
    near = gpu.times(call_of(4150))
    assert not gpu.done and near.tokens == 4150
    assert near.exact == pytest.approx(4 * (4150 / 4096) ** 2)
    assert near.measuring == pytest.approx(0.1 * (4150 / 4096) ** 2)
    for other in (call_of(4400), call_of(heads=3), call_of(dtype=torch.float16)):
        gpu.done.clear()
        assert gpu.times(other) is not None and gpu.done


def test_other_calls_are_not_timed(gpu, monkeypatch) -> None:
    for call in (call_of(1535), call_of(keys=4095), call_of(dtype=torch.float32),
                 call_of(device=CPU)):  # fmt: skip
        assert gpu.times(call) is None
    for patched in (
        lambda now: now.setenv(timing.REFERENCE_VARIABLE, "1"),
        lambda now: now.setattr(timing, "being_recorded", lambda device: True),
        lambda now: now.setattr(timing, "capabilities", lambda _: SimpleNamespace(usable=False)),
    ):
        with monkeypatch.context() as now:
            patched(now)
            assert gpu.times() is None
    assert not gpu.done


@pytest.mark.parametrize("only", ["", "exact"])
def test_disturbed_times_are_not_kept(gpu, restart, tmp_path, only: str) -> None:
    """Not even with those of other calls."""
    gpu.busy, gpu.only = 2.0, only
    found = gpu.times()
    assert found.exact == pytest.approx(4) and not kept(tmp_path)
    gpu.busy = 0.0
    gpu.done.clear()
    assert gpu.times() == found and not gpu.done, "this process uses them"
    gpu.times(call_of(8192))
    restart()
    gpu.times(call_of(8192))
    assert not gpu.done
    gpu.times()
    assert gpu.done


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), Unsupported("no")])
def test_without_room_nothing_is_known_for_now(gpu, monkeypatch, caplog, error) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    caplog.set_level(logging.INFO)
    with monkeypatch.context() as now:
        now.setattr(timing, "attention", fails)
        assert gpu.times() is None and "was not timed" in caplog.text
    assert gpu.times() is not None


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.cuda, "get_device_name", lambda device: "Another GPU"),
        (timing, "driver_version", lambda: 13010),
        (torch, "__version__", "9.9"),
        (timing, "entry_stem", lambda spec, sources: "another kernel"),
        (timing, "_FORMAT", "newer"),
    ],
)
def test_times_are_of_one_gpu_driver_torch_and_kernels(
    gpu, restart, monkeypatch, owner: Any, name: str, value: Any, caplog
) -> None:
    gpu.times()
    restart()
    monkeypatch.setattr(owner, name, value)
    assert gpu.times() is not None and gpu.done and not caplog.messages


def spoilt(**changes: Any) -> Callable[[Path], None]:
    """A file with other values in its times, or other parts."""

    def spoil(path: Path) -> None:
        stored = json.loads(path.read_bytes())
        for name, value in changes.items():
            if name in stored:
                stored[name] = value
            else:
                stored["times"][next(iter(stored["times"]))][name] = value
        path.write_text(json.dumps(stored))

    return spoil


WRONG: list[Any] = [-1e-9, math.nan, math.inf, 1001.0, "1", None, [], 1, True]
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such modes")


@pytest.mark.parametrize(
    "spoil",
    [
        *(lambda path, content=content: path.write_bytes(content)
          for content in (b"", b"{", b"[" * 10**5, b"{}", b"3", b"[]", b"\xff", b" " * 300_000)),
        *(spoilt(**{name: value}) for value in WRONG for name in ("exact", "measuring")),
        *(spoilt(tokens=value) for value in (0, -1, 4096.0, "1", None)),
        *(spoilt(times=value) for value in ([], None, {"x": {}}, {"x": 3})),
        *(spoilt(facts=value) for value in ({}, None, {"gpu": "Another GPU"})),
        pytest.param(lambda path: path.chmod(0o666), marks=posix),
        pytest.param(lambda path: path.parent.chmod(0o777), marks=posix),
    ],
)  # fmt: skip
def test_a_file_that_is_not_believed(gpu, restart, tmp_path, caplog, spoil) -> None:
    found = gpu.times()
    (path,) = kept(tmp_path)
    spoil(path)
    restart()
    assert gpu.times() == found and gpu.done and caplog.messages
    if path.parent.stat().st_mode & 0o022 == 0:
        assert json.loads(path.read_bytes())["facts"]["gpu"] == "Some GPU", "and is written anew"


def test_a_folder_that_cannot_be_written_is_said(gpu, monkeypatch, caplog, tmp_path) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(timing, "write_whole", refuse)
    assert gpu.times() == gpu.times() is not None and not kept(tmp_path)
    assert caplog.text.count("timed again at the next start") == 1
    assert "read-only" in caplog.text and "SPARGE_CACHE" in caplog.text


def test_kernels_are_tested_once_on_a_gpu_and_wrong_ones_refused_each_time(
    gpu, restart, untested, monkeypatch, tmp_path
) -> None:
    exact, errors, tested = Exact("exact", lambda q, k, v: q), [math.nan, 0.1, 0.1], []
    monkeypatch.setattr(
        timing, "largest_error", lambda head_dim, *_: (tested.append(head_dim),
                                                              errors[len(tested) - 1])[1]
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(Unsupported, match="error nan at head_dim 64"):
            timing.check_once(CUDA, exact)
    with monkeypatch.context() as full:
        full.setattr(timing, "why_wrong", Mock(side_effect=torch.OutOfMemoryError))
        timing.check_once(CUDA, exact)
    assert tested == [64] and not kept(tmp_path)
    timing.why_wrong.cache_clear()
    for _ in range(2):
        restart()
        timing.check_once(CUDA, exact)
    timing.check_once(CPU, exact)
    assert tested == [64, 64, 128] and len(kept(tmp_path)) == 1, "a file says that they passed"
    assert gpu.times() is not None and gpu.done


@pytest.mark.parametrize(
    ("changes", "is_eight_bit", "told"),
    [
        ({}, False, ((0.9, None), (1.0, None))),
        ({"exact": 0.4}, False, ((0.7, None), (0.8, "only below 76 % density"))),
        ({"eight_bit": 0.98}, False, ()),
        ({"eight_bit": 0.96}, True, ()),
        ({"eight_bit": 0.4}, True, ((0.7, None), (0.8, "only below 76 % density"))),
        ({"eight_bit": math.inf}, False, ((1.0, None),)),
        ({"sparse_fixed": 0.98}, False, ((0.0, "sparse would be slower"),)),
        ({"sparse_pairs": 0.0, "sparse_fixed": 2.0}, False, ((0.1, "would be slower"),)),
        ({"sparse_pairs": 200.0}, False, ((0.1, "sparse would be slower"),)),
    ],
)  # fmt: skip
def test_which_backend_is_faster(changes, is_eight_bit: bool, told) -> None:
    """By 3 %, at the density that a call would keep."""
    times = replace(FAST, **changes)
    assert times.is_eight_bit == is_eight_bit
    assert times.dense == (times.eight_bit if is_eight_bit else times.exact)
    for density, words in told:
        reason = times.why_slower(density)
        assert (reason is None) == (words is None) and (words or "") in (reason or "")
        assert reason is None or reason.startswith("at 392 tokens sparse ")
