# SPDX-License-Identifier: Apache-2.0
"""Head weights: what errors count beside each other."""

from __future__ import annotations

import numpy as np
import pytest

from sparge.tune.head_weights import LEAST, head_weight


def test_heads_count_by_their_norms_and_layers_by_the_roots_of_theirs() -> None:
    found = head_weight(np.array([[1.0, 3.0], [4.0, 12.0]]))
    assert found[:, 1] / found[:, 0] == pytest.approx([3, 3])
    assert found[1] / found[0] == pytest.approx([2, 2])
    assert found.mean() == pytest.approx(1)


def test_silence_counts_next_to_nothing() -> None:
    found = head_weight(np.array([[0.0, 2.0], [0.0, 0.0]]))
    assert found.tolist() == [[LEAST, pytest.approx(4)], [LEAST, LEAST]]
    assert head_weight(np.zeros((2, 2))).tolist() == [[1, 1], [1, 1]]
