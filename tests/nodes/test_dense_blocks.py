# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def spans(load_pack):
    return load_pack("nodes.settings").LayerSpans


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("", []),
        (" , ", []),
        ("0-2, -1", [0, 1, 2, 9]),
        ("3", [3]),
        ("-3--1", [7, 8, 9]),
        ("5--4", [5, 6]),
        ("8-20", [8, 9]),
    ],
)
def test_blocks_of_ten(spans, text, listed):
    parsed = spans.parse(text)
    assert [block for block in range(10) if parsed.contains(block, 10)] == listed


def test_counting_from_an_unknown_end_matches_nothing(spans):
    parsed = spans.parse("1, -1")
    assert parsed.needs_total
    assert [block for block in range(4) if parsed.contains(block, None)] == [1]


@pytest.mark.parametrize("text", ["4-2", "1, -1--3"])
def test_a_range_the_wrong_way_round_is_refused(spans, text):
    with pytest.raises(ValueError, match=r"ends before it begins: write (2-4|-3--1)"):
        spans.parse(text)


def test_numbers_that_no_block_has(spans):
    parsed = spans.parse("0-2, 9-12, -10, -11--1")
    assert parsed.missing(10) == [-11, 12]
    assert parsed.missing(13) == []


@pytest.mark.parametrize("text", ["first", "1;2", "0-", "1.5", "0-1-2"])
def test_other_text_is_refused_with_an_example(spans, text):
    with pytest.raises(ValueError, match=r'for example "0-2, -1"'):
        spans.parse(text)
