# SPDX-License-Identifier: Apache-2.0
"""Arguments of `enable` for pipelines of diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.needed import REASON

pytest.importorskip("diffusers", reason=REASON)

import sparge
from benchmarks.tiny_models.pipelines import ALL, Tiny
from sparge.integrations.diffusers import enable


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    made = ALL["Wan 2.1"]()
    yield made
    assert not made.pipe.transformer._forward_hooks


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mode": "auto"}, "mode is 'auto'; it takes one of"),
        ({"mode": "fast"}, 'a quality goes by its name: quality="fast"'),
        ({"topk": 0.2}, 'topk given with mode "auto quality": mode "auto quality" takes quality'),
        ({"mode": "manual", "quality": "fast"}, 'mode "manual" takes topk or policy'),
        ({"policy": sparge.SparsePolicy()}, 'policy given with mode "auto quality"'),
        ({"mode": "manual", "policy": 0.3}, "policy is 0.3; give a SparsePolicy"),
        (
            {"mode": "manual", "policy": sparge.SparsePolicy(), "topk": 0.2},
            "topk and policy given with mode",
        ),
        ({"mode": "manual", "topk": "0.5"}, "topk is .*; (it takes|give)"),
        ({"start_percent": None}, "start_percent is .*; (it takes|give)"),
        ({"min_tokens": -1}, "min_tokens is .*; it takes"),
        ({"min_tokens": None}, "min_tokens is .*; it takes"),
        ({"dense_blocks": [0, 1]}, "dense_blocks is .*; give"),
        ({"exact_dense": "no"}, "exact_dense is .*; (it takes|give)"),
    ],
)
def test_wrong_arguments_are_named(tiny: Tiny, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        enable(tiny.pipe, **given)


def test_a_pipeline_without_a_transformer_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="SimpleNamespace has no transformer and scheduler"):
        enable(SimpleNamespace(unet=tiny.pipe.transformer))
