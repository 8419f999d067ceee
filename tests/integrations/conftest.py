# SPDX-License-Identifier: Apache-2.0
"""Tiny language models, and what a session asks of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparge import compiling
from tests.tiny_models.texts import make_text_model

Make = Callable[..., Any]


@pytest.fixture
def make_model(seed: int) -> Make:
    """make_model(architecture, dtype=..., attention=..., **configuration): in evaluation."""
    transformers: Any = pytest.importorskip("transformers", "5.24", reason="needs transformers")
    transformers.logging.set_verbosity_error()

    def make(architecture: str = "Llama", **configuration: Any) -> Any:
        return make_text_model(architecture, seed, **configuration)

    return make


class Served(NamedTuple):
    """Call that the library served."""

    q: Tensor
    policy: Any
    order: Any


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    """The calls that sessions give to the library."""
    import sparge.session.calls as module

    library, seen = module.attention, []

    def attention(q: Tensor, k: Tensor, v: Tensor, policy: Any, **kwargs: Any) -> Any:
        seen.append(Served(q.clone(), policy, kwargs["order"]))
        return library(q, k, v, policy, **kwargs)

    monkeypatch.setattr(module, "attention", attention)
    return seen


@pytest.fixture
def inference(one_thread: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def no_gradients(one_thread: None) -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def reference_allowed(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """The CPU runs the reference, and nothing is dense for being slower."""
    monkeypatch.setenv("SPARGE_REFERENCE", "1")


@pytest.fixture
def no_mode_left() -> Any:
    yield
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.fixture
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiling, "_traced", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
