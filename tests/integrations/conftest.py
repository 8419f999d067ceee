# SPDX-License-Identifier: Apache-2.0
"""Tiny language models of random weights, and what a session asks of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

Make = Callable[..., Any]

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 97,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def make_model(seed: int) -> Make:
    """make_model(architecture, dtype=..., attention=..., **configuration): in evaluation."""
    transformers: Any = pytest.importorskip("transformers", "5.24", reason="needs transformers")
    transformers.logging.set_verbosity_error()

    def make(
        architecture: str = "Llama",
        dtype: torch.dtype = torch.bfloat16,
        attention: str = "sdpa",
        **configuration: Any,
    ) -> Any:
        torch.manual_seed(seed)
        config = getattr(transformers, f"{architecture}Config")(
            **(SIZES | configuration), attn_implementation=attention
        )
        return getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()

    return make


class Served(NamedTuple):
    """Call that the library served."""

    q: Tensor
    policy: Any
    order: Any


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    """The calls that sessions give to the library."""
    import sparge.tune.call as module

    library, seen = module.attention, []

    def attention(q: Tensor, k: Tensor, v: Tensor, policy: Any, **kwargs: Any) -> Any:
        seen.append(Served(q.clone(), policy, kwargs["order"]))
        return library(q, k, v, policy, **kwargs)

    monkeypatch.setattr(module, "attention", attention)
    return seen


@pytest.fixture
def reference_allowed(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """The CPU runs the reference, and nothing is dense for being slower."""
    monkeypatch.setenv("SPARGE_REFERENCE", "1")


@pytest.fixture
def no_mode_left() -> Any:
    yield
    assert torch.overrides._get_current_function_mode_stack() == []
