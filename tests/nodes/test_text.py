# SPDX-License-Identifier: Apache-2.0
"""Text is exact in calls without a token order too, at that end where the model has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

HEADS, LATENT, GRID = 2, (4, 16, 16), 4 * 8 * 8
TEXT, REFERENCE = 70, 64

pytestmark = pytest.mark.usefixtures("reference_allowed")


class Model(torch.nn.LayerNorm):
    """Model of which the node sees its class name and sizes alone."""

    patch_size, num_heads, blocks = 2, HEADS, range(1)


@pytest.fixture
def sparse_calls(load_pack, patcher, session, monkeypatch) -> Callable[..., list[Any]]:
    """sparse_calls(class name, tokens, options): policy and order of each call of a run. The node
    expects no text, as the session has no context."""
    given: list[Any] = []

    def library(q: Any, k: Any, v: Any, policy: Any, **kwargs: Any) -> Any:
        given.append((policy, kwargs.get("order")))
        return q

    monkeypatch.setattr(load_pack("sparge.tune.call"), "attention", library)

    def run(name: str, tokens: int, **options: Any) -> list[Any]:
        patcher.model.diffusion_model = type(name, (Model,), {})(8)
        node = load_pack("nodes.sparge_attention").SpargeAttention
        patched = node.execute(patcher, min_tokens=GRID, topk=0.5)[0]
        patched.transformer_options.update(options)
        q = torch.randn(1, tokens, HEADS * 64)
        session(patched, LATENT).sample(lambda attend: attend(q, q, q, HEADS), [0.5, 0.4])
        return given

    return run


@pytest.mark.parametrize(
    ("name", "exact"), [("Flux", (TEXT, 0)), ("AsymmDiTJoint", (0, TEXT))], ids=["first", "last"]
)
def test_text_is_exact_where_no_order_fits(sparse_calls, name: str, exact: tuple[int, int]) -> None:
    calls = sparse_calls(name, GRID + TEXT)
    assert len(calls) == 2
    for policy, order in calls:
        assert order is None
        assert (policy.exact_prefix, policy.exact_suffix) == exact


def test_images_to_edit_are_no_text(sparse_calls) -> None:
    calls = sparse_calls("Flux", GRID + TEXT + REFERENCE, reference_image_num_tokens=[REFERENCE])
    assert len(calls) == 2
    for policy, order in calls:
        assert order is None
        assert (policy.exact_prefix, policy.exact_suffix) == (TEXT, 0)
