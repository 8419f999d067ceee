# SPDX-License-Identifier: Apache-2.0
"""Places of the intermediates of a call."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sparge.kernels import Element
from sparge.stages.workspace import CallShape, layout_of

SHAPE = CallShape(2, 4, 2, 300, 700, 96)


@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("pools", [False, True])
def test_fields_lie_one_after_another(element: Element, pools: bool) -> None:
    layout = layout_of(SHAPE, element, True, True, pools)
    fields = list(layout.fields.values())
    for field, following in pairwise(fields):
        assert field.offset + field.nbytes <= following.offset
        assert following.offset % 256 == 0
    assert fields[-1].offset + fields[-1].nbytes <= layout.nbytes
    assert ("pool_k" in layout.fields) == pools


def test_addresses_are_those_of_the_views() -> None:
    layout = layout_of(SHAPE, Element.INT8_E4M3, True, True, True)
    workspace = torch.empty(layout.nbytes, dtype=torch.uint8)
    addresses = layout.addresses(workspace)
    assert addresses.keys() == layout.fields.keys()
    for name, address in addresses.items():
        assert layout.view(workspace, name).data_ptr() == address
