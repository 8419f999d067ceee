# SPDX-License-Identifier: Apache-2.0
"""Transformers of pipelines that are copied while they are enabled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.integrations.needed import REASON

pytest.importorskip("diffusers", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from benchmarks.tiny_models.pipelines import ALL
from sparge.integrations.diffusers import enable
from sparge.integrations.diffusers.handle import Handle

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

TINY: dict[str, Any] = {"topk": 0.5, "min_tokens": 100, "start_percent": 0.0}


def calls_of(handle: Handle) -> int:
    assert handle.result is not None and handle.result.tally.sparse
    return handle.result.tally.sparse


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_the_transformer_is_native(make_copy: Any) -> None:
    tiny = ALL["Wan 2.1"]()
    native, model = tiny(2), tiny.pipe.transformer
    with enable(tiny.pipe, "manual", **TINY) as handle:
        sparse = tiny(2)
        calls = calls_of(handle)
        tiny.pipe.transformer = copied = make_copy(model)
        assert copied.cache_context.__self__._named.__self__ is copied
        assert torch.equal(tiny(2), native) and calls_of(handle) == calls
        with enable(tiny.pipe, "manual", **TINY) as of_copy:
            assert torch.equal(tiny(2), sparse) and calls_of(of_copy) == calls
        tiny.pipe.transformer = model
        assert torch.equal(tiny(2), sparse)
    assert torch.equal(tiny(2), native)
