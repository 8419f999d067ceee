# SPDX-License-Identifier: Apache-2.0
"""Which launches may begin before the one before them ends; tests/gpu has the real ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparge import launch
from sparge.kernels import Capability, Element
from sparge.workspace import CallShape


@pytest.fixture
def overlaps(monkeypatch: pytest.MonkeyPatch, arch: str) -> dict[str, bool]:
    """By entry: whether the launch may overlap with the one before it."""
    found: dict[str, bool] = {}

    def get_kernel(spec, _index):
        def record(_grid, _params, _extra_shared, _stream, overlap):
            found[spec.entry.removesuffix("_hopper")] = overlap

        return SimpleNamespace(launch=record)

    monkeypatch.setattr(launch, "get_kernel", get_kernel)
    monkeypatch.setattr(launch, "capabilities", lambda _: Capability(True, "", arch))
    monkeypatch.setattr(launch, "resident_blocks", lambda _: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    return found


def run(element: Element) -> None:
    q = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16)
    shape = CallShape.of(q, q)
    workspace = launch.quantize(q, q, q, None, True, element, True)
    rules = launch.RouteRules(0, 2, 1.0, -1.0, 0.1, False, False, True, 0, 0)
    routed = (workspace, shape, element, True, None, None, None)
    block_map, _ = launch.route(*routed, rules, None)
    attended = (q, workspace, block_map, shape, element, True, None, None, 0.1, 50.0, False, False)
    launch.attend(*attended, torch.empty_like(q), None, None, None)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_only_the_first_launch_waits_for_all_before_it(overlaps: dict[str, bool]) -> None:
    run(Element.INT8_FP16)
    assert overlaps == {"means": False, "quantize": True, "route": True, "attend": True}
    overlaps.clear()
    run(Element.BF16)
    assert overlaps == {"quantize": False, "route": True, "attend": True}, "there are no means"


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_nothing_overlaps_where_kernels_cannot_wait(overlaps: dict[str, bool]) -> None:
    run(Element.INT8_FP16)
    assert not any(overlaps.values())
