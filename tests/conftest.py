# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every test may use: the gpu marker, and inputs that are random but repeatable."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sparge.kernels import device
from sparge.stages import prepared
from tests.pretended_gpu import PretendedGpu

Inputs = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

#: Number of workers at most where they share a GPU: each holds a CUDA context of its own.
WORKERS_ON_GPU = 4

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several workers would wait for each other
    torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)  # pytest without xdist knows no such hook
def pytest_xdist_auto_num_workers() -> int:
    """Number of workers of `-n auto`."""
    cores = os.cpu_count() or 1
    return cores if no_gpu_reason() else min(cores, WORKERS_ON_GPU)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="shifts the random inputs of every test")
    parser.addoption("--trained", type=Path, help="weights of another small video DiT")
    parser.addoption("--arch", help="kernels of this target on a Hopper GPU, such as sm_90_as_89")
    parser.addoption("--all-kernels", action="store_true", help="compile every kernel")


def pytest_configure(config: pytest.Config) -> None:
    if arch := config.getoption("--arch"):
        device.SERVED_BY[9, 0] = arch


def no_gpu_reason() -> str:
    """Reason why this machine cannot run the tests marked gpu; empty where it can."""
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU; this torch is built for AMD"
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU; torch finds none"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"needs compute capability 8.0 or newer; this GPU has {major}.{minor}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest test first, so that no worker waits for it in the end.
    items.sort(key=lambda item: "quality_gate" not in item.nodeid)
    reason = no_gpu_reason()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, for tests of tiny tensors: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Differs from test to test, and with --seed, yet is the same in every run."""
    shift: int = request.config.getoption("--seed") or 0
    return zlib.crc32(request.node.nodeid.encode()) + shift


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def make_qkv(generator: torch.Generator) -> Inputs:
    """make_qkv(batch, heads, tokens, head_dim, *, kv_heads, kv_tokens, dtype, device, layout)

    Fresh normal q, k, v in the order that `layout` names ("HND": batch, heads, tokens, head_dim).
    """

    def make(
        batch: int = 1,
        heads: int = 2,
        tokens: int = 256,
        head_dim: int = 64,
        *,
        kv_heads: int | None = None,
        kv_tokens: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        layout: str = "HND",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def draw(n_heads: int, n_tokens: int) -> torch.Tensor:
            shape = (
                (batch, n_heads, n_tokens, head_dim)
                if layout == "HND"
                else (batch, n_tokens, n_heads, head_dim)
            )
            return torch.randn(shape, generator=generator).to(device, dtype)

        of_keys = (kv_heads or heads, kv_tokens or tokens)
        return draw(heads, tokens), draw(*of_keys), draw(*of_keys)

    return make


@pytest.fixture
def fresh_targets(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets which targets were learned; the test's end brings them back."""

    def forget() -> None:
        monkeypatch.setattr(device, "_known", {})

    return forget


@pytest.fixture
def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, fresh_targets: Callable[[], None]
) -> Iterator[Callable[..., PretendedGpu]]:
    """pretend_gpu(arch): a GPU of that target, or an H200 whose target is found as a real one's."""
    prepared._kept.clear()

    def pretend(arch: str | None) -> PretendedGpu:
        fresh_targets()
        return PretendedGpu(monkeypatch, arch)

    yield pretend
    prepared._kept.clear()


@pytest.fixture
def pretended_gpu(pretend_gpu: Callable[..., PretendedGpu]) -> PretendedGpu:
    return pretend_gpu("sm_90a")
