# SPDX-License-Identifier: Apache-2.0
"""What is known before a call: settings, steps, layers, tokens, and masks of padding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import SparsePolicy, TokenGrid
from sparge.session import (
    MASK,
    Aim,
    LayerSpans,
    Progress,
    Settings,
    SigmaWindow,
    Step,
    TextPosition,
    TokenLayout,
)
from sparge.session import calls as module
from sparge.session.calls import CAPTURED, UNEVEN, ReadMasks, RealTokens, may_be_padding
from sparge.session.schedule import budgets, fitted

INF = float("inf")


@pytest.mark.parametrize(
    ("mean", "steps", "least", "fall"),
    [
        *((0.05, steps, 0.0, 0.675) for steps in (2, 3, 16)),
        *((mean, 16, 0.0, fall) for mean, fall in ((0.1, 0.6), (0.2, 0.45), (0.45, 0.075))),
        *((0.05, 16, 0.03, 0.27), (0.45, 3, 0.03, 0.07)),
        *((0.2, 1, 0.0, 0.0), (0.5, 16, 0.0, 0.0), (0.9, 16, 0.0, 0.0), (0.1, 16, 0.12, 0.0)),
    ],
)
def test_densities_fall_by_less_the_denser_and_their_mean_is_what_was_asked_for(
    mean: float, steps: int, least: float, fall: float
) -> None:
    """fall: share of the mean that the last step is below it, and the first above."""
    found = budgets(mean, steps, least)
    if fall == 0:
        assert found == [mean]
        return
    assert len(found) == steps and sum(found) / steps == pytest.approx(mean)
    assert all(a > b > least for a, b in itertools.pairwise(found)) and found[0] <= 1
    assert (found[0] / mean - 1, 1 - found[-1] / mean) == pytest.approx((fall, fall), abs=1e-9)


WINDOW = SigmaWindow(0.8, 0.1, start_percent=0.2, end_percent=0.9)
LEVELS = [1.0, 0.9, 0.8, 0.7, 0.3, 0.1, 0.05]


@pytest.mark.parametrize(
    ("window", "sigma", "why_dense", "is_last_dense", "index", "of_sparse"),
    [
        (WINDOW, 1.0, "before start_percent 0.2", False, 0, 4),
        (WINDOW, 0.9, "before start_percent 0.2", True, 0, 4),
        (WINDOW, 0.85, "before start_percent 0.2", True, 0, 4),  # between steps
        (WINDOW, 0.8, None, False, 0, 4),
        (WINDOW, 0.8 * (1 + 1e-7), None, False, 0, 4),  # the float32 schedule's last bit
        (WINDOW, 0.5, None, False, 2, 4),  # as the next one
        (WINDOW, 0.3, None, False, 2, 4),
        (WINDOW, 0.1, None, False, 3, 4),
        (WINDOW, 0.05, "after end_percent 0.9", False, 3, 4),
        (SigmaWindow(INF, 0.0), 14.6, None, False, 0, 7),
        (SigmaWindow(INF, 0.0), 0.0, None, False, 6, 7),
        (SigmaWindow(0.5, 0.45), 0.7, "before start_percent 0", True, None, None),
        (replace(WINDOW, start=0.1, end=0.8, start_percent=0.9, end_percent=0.2), 0.9,
         "start_percent 0.9 is above end_percent 0.2, so no step is between them",
         False, None, None),
    ],
)  # fmt: skip
def test_a_step_by_its_noise_level(
    window, sigma, why_dense, is_last_dense, index, of_sparse
) -> None:
    step = window.step(Step((0, 1), 3, model=1), sigma, LEVELS)
    assert step == Step((0, 1), 3, why_dense, is_last_dense, index, of_sparse, 1)


def test_steps_that_nobody_knows_count_by_their_number() -> None:
    first, later = (WINDOW.step(Step((0,), number), 0.5, []) for number in (2, 7))
    assert later.index is None and later.index_since(first) == 5
    first, later = (WINDOW.step(Step((0,), n), x, LEVELS) for n, x in ((2, 0.8), (9, 0.3)))
    assert later.index_since(first) == 2, "a step may take several evaluations"


def test_open_edges_hold_whatever_a_model_sampling_calls_its_ends() -> None:
    whole, part = (Settings(start_percent=x, end_percent=y) for x, y in ((0.0, 1.0), (0.2, 0.9)))
    window = SigmaWindow.of(whole, lambda x: 0.5 if x in (0.0, 1.0) else 1 - x)
    assert window.is_everything and not WINDOW.is_everything
    assert SigmaWindow.of(part, lambda x: 1 - x) == replace(WINDOW, end=1 - 0.9)


@pytest.mark.parametrize(
    ("levels", "schedule", "shown"),
    [
        ([1.0, 0.8, 0.5, 0.2], 4, ["2 of 4: 2.0 s a step, about 6 s left",
                                   "3 of 4: 2.0 s a step, about 4 s left",
                                   "4 of 4: 2.0 s a step, about 2 s left"]),
        # Several evaluations, between the levels of the schedule or twice at one.
        ([1.0, 1.0, 0.9, 0.8, 0.8, 0.7], 4, ["2 of 4: 2.0 s a step, about 6 s left"]),
        ([1.0, 0.2], 4, ["4 of 4: 0.7 s a step, about 1 s left"]),  # skipped ones share it
        ([1.0, 0.5], 0, []),
        ([0.0, 0.0], 4, []),
    ],
)  # fmt: skip
def test_progress_tells_the_last_steps_seconds_and_the_rest(
    levels, schedule, shown, monkeypatch
) -> None:
    told: list[str] = []
    clock = itertools.count(0.0, 2.0)
    monkeypatch.setattr("sparge.session.schedule.time.perf_counter", lambda: next(clock))
    progress = Progress([1.0, 0.8, 0.5, 0.2][:schedule], told.append)
    for level in levels:
        progress.at(level)
    assert told == [f"Step {line}" for line in shown]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mode": "turbo"}, "mode is 'turbo'"),
        ({"quality": 5}, "quality is"),
        ({"topk": 1.5}, "topk"),
        ({"start_percent": float("nan")}, "start_percent"),
        ({"end_percent": "0.5"}, "end_percent"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"exact_dense": 2}, "exact_dense"),
        ({"dense_blocks": 3}, "dense_blocks"),
        ({"dense_blocks": "x"}, "dense_blocks contains 'x'"),
        ({"select_by": "luck"}, "select_by"),
        ({"cdfthreshd": -1.0}, "cdfthreshd"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**wrong)


def test_a_mode_has_an_aim_and_a_policy(monkeypatch) -> None:
    cdf: Any = {"select_by": "cdf", "cdfthreshd": 0.7, "topk": 0.3, "pvthreshd": 7.0}
    manual = Settings(**cdf)
    assert manual.aim is None and manual.policy() == SparsePolicy(**cdf, simthreshd1=-0.1)
    auto = Settings(mode="auto budget", **cdf)
    assert auto.aim == Aim("budget", 0.3) and auto.policy().select_by == "topk"
    assert Settings(mode="auto quality", quality="fast").aim == Aim("quality", 0.08)
    filtering, device = manual.policy(), torch.device("cuda", 0)
    for arch, saves, kept in (("sm_90a", False, 50.0), ("sm_89", True, 7.0), ("", False, 7.0)):
        name = "sparge.session.schedule"
        monkeypatch.setattr(
            f"{name}.capabilities", lambda _, arch=arch: type("", (), {"arch": arch})
        )
        monkeypatch.setattr(f"{name}.pv_filter_saves", lambda _, saves=saves: saves)
        assert fitted(filtering, device) == replace(filtering, pvthreshd=kept)


@pytest.mark.parametrize(
    ("text", "total", "listed", "missing"),
    [
        ("", 10, [], []), (" , ", 10, [], []), ("None", 10, [], []), ("3", 10, [3], []),
        ("0-2, -1", 10, [0, 1, 2, 9], []), ("-3--1", 10, [7, 8, 9], []), ("5--4", 10, [5, 6], []),
        ("8-20", 10, [8, 9], [20]), ("1, -1", None, [1], [-1]),
        ("0-2, 9-12, -10, -11--1", 10, list(range(10)), [-11, 12]),
    ],
)  # fmt: skip
def test_blocks_that_dense_blocks_lists(text: str, total, listed, missing) -> None:
    spans = LayerSpans.parse(text)
    of_total = spans.of_total(total)
    assert [block for block in range(10) if any(block in span for span in of_total)] == listed
    remark, named = spans.remark(total), ", ".join(map(str, missing))
    assert (remark or "").partition(";")[0] == (named and f"dense_blocks names {named}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("4-2", "ends before it begins: write 2-4"),
        ("1, -1--3", "ends before it begins: write -3--1"),
        *((text, 'for example "0-2, -1"') for text in ("first", "1;2", "0-", "1.5", "0-1-2")),
    ],
)
def test_other_text_is_refused_with_an_example(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        LayerSpans.parse(text)


GRID = TokenGrid(4, 8, 10)  # 320 tokens
FIRST, LAST = replace(GRID, prefix=24), replace(GRID, suffix=24)
SOUND = TokenGrid(1, 1, 30)


@pytest.mark.parametrize(
    ("known", "text", "tokens", "sequence", "ends"),
    [
        # Text before and after, whole and without its padding; never more than there is.
        (FIRST, "FIRST", 344, FIRST, (24, 0)),
        (FIRST, "FIRST", 330, replace(GRID, prefix=10), (10, 0)),
        (FIRST, "FIRST", 320, GRID, (0, 0)),
        (FIRST, "FIRST", 350, None, (30, 0)),
        (FIRST, "FIRST", 300, None, (0, 0)),
        (LAST, "LAST", 344, LAST, (0, 24)),
        (LAST, "LAST", 321, replace(GRID, suffix=1), (0, 1)),
        (LAST, "LAST", 345, None, (0, 25)),
        # Other sequences beside it.
        (FIRST, "FIRST", 30, SOUND, (0, 0)),
        # Further tokens are a tail where no text stands around, and frames may be missing.
        (GRID, "NONE", 330, replace(GRID, tail=10), (0, 0)),
        (GRID, "NONE", 250, replace(GRID, frames=3, tail=10), (0, 0)),
        (GRID, "NONE", 239, None, (0, 0)),
        # Nothing is known of the text's place, or of the grid.
        (GRID, None, 330, None, (0, 0)),
        (None, "FIRST", 344, None, (0, 0)),
    ],
)
def test_the_sequence_of_so_many_tokens(known, text, tokens, sequence, ends) -> None:
    layout = TokenLayout(
        tokens=known,
        text=TextPosition[text] if text else None,
        grid=None if known is None else (4, 8, 10),
        branches=(SOUND,),
        loose_frames=1,
    )
    assert layout.sequence(tokens) == sequence and layout.exact_tokens(tokens) == ends


def test_images_that_are_referred_to_are_no_text() -> None:
    layout = TokenLayout(grid=(4, 8, 10), text=TextPosition.FIRST)
    assert layout.exact_tokens(400, references=64) == (16, 0)
    assert layout.exact_tokens(380, references=64) == (0, 0)


def test_rows_of_layers() -> None:
    layout = TokenLayout.of(30, FIRST)
    assert (layout.rows, layout.row(3, 0), layout.row(3, 2)) == (30, 3, 63)
    assert layout.grid == (4, 8, 10) and layout.frame_tokens == 80 and layout.grid_tokens == 320
    refined = replace(layout, refiners=2)
    assert refined.rows == 32 and refined.refiner_row(1) == 31
    assert TokenLayout().rows > 100


def added(*hidden: int, value: float = torch.finfo().min, dims: int = 4) -> Tensor:
    mask = torch.zeros((1,) * (dims - 1) + (344,))
    mask[..., list(hidden)] = value
    return mask


def of_both(hidden: range) -> Tensor:
    """Queries and keys of text that is hidden."""
    real = ~torch.isin(torch.arange(344), torch.tensor(list(hidden)))
    return (real[:, None] & real)[None, None]


ROW = added(*range(20, 24), value=-3e4)
WEIGHED = ROW + ROW.mT
WEIGHED[..., 20, 99] = -0.5
PLACES = torch.arange(344)
SHIFTED = ((PLACES[:, None] < 324) & (PLACES >= 20))[None, None]
TWO = torch.cat([added(20, 21, 22, 23), added(3, 9, 11, 12)])
MASKS: dict[str, tuple[Tensor, Any]] = {
    "padding that is added": (added(*range(20, 24)), (range(20, 24), False)),
    "bools, in front": (added(*range(4)) == 0, (range(4), False)),
    "of three dimensions": (added(21, dims=3), ([21], False)),
    "of queries, too": (of_both(range(20, 24)), (range(20, 24), True)),
    "of queries, too, and added": (ROW + ROW.mT, (range(20, 24), True)),
    "of keys, for each query": (added(*range(4)).repeat(1, 1, 344, 1), (range(4), False)),
    "of keys, for each head": (added(*range(4)).repeat(1, 2, 1, 1), (range(4), False)),
    "nothing hidden": (added(), None),
    "weights": (added(3, value=-0.5), MASK),
    "a hole in the picture": (added(40), MASK),
    "no real token": (added(*range(344)), MASK),
    "queries that differ": (torch.eye(344, dtype=torch.bool)[None, None], MASK),
    "heads that differ": (torch.cat([added(20), added(21)], 1), MASK),
    "of queries, too, by head": (torch.cat([of_both(range(4)), of_both(range(0))], 1), MASK),
    "weights of a hidden query": (WEIGHED, MASK),
    "as many places as padding leaves": (SHIFTED, MASK),
    "a block of queries and keys with a hole": (
        of_both(range(9)) & (torch.arange(344) != 99),
        MASK,
    ),
    "rows that are added": (-torch.eye(344)[None, None], MASK),
    "another length": (torch.zeros(1, 1, 1, 340), None),
    "entries alike in number": (TWO, "two"),
    "entries that are not": (torch.cat([added(20), added(3, 9)]), UNEVEN),
}


@pytest.mark.parametrize(("mask", "expected"), MASKS.values(), ids=MASKS)
def test_padding_masks_are_read(mask: Tensor, expected: Any) -> None:
    masks = ReadMasks(FIRST)
    found = masks.real_tokens(mask)
    if isinstance(expected, tuple):
        hidden, hides_queries = expected
        assert isinstance(found, RealTokens) and found.hides_queries == hides_queries
        assert found.rest.tolist() == [list(hidden)]
        assert found.index.tolist() == [[n for n in range(344) if n not in hidden]]
        assert masks.real_tokens(mask.clone()) is found, "of equal ones the same"
    elif expected == "two":
        assert isinstance(found, RealTokens) and found.index.shape == (2, 340)
        assert found.rest.tolist() == [[20, 21, 22, 23], [3, 9, 11, 12]]
    else:
        assert found == expected


@pytest.mark.parametrize(
    "shape", [(344,), (1, 1, 340), (1, 3, 1, 344), (3, 1, 1, 344), (1, 1, 7, 344), (3, 344, 344)]
)
def test_masks_of_other_shapes_are_no_padding(shape: tuple[int, ...]) -> None:
    q = torch.zeros(2, 2, 344, 8)
    assert may_be_padding(torch.zeros(2, 2, 344, 344), q, q)
    assert not may_be_padding(torch.zeros(shape), q, q)


def test_a_mask_is_read_once_where_its_changes_show(monkeypatch) -> None:
    mask, masks, reads = added(20), ReadMasks(None), []
    read = module._read
    monkeypatch.setattr(module, "_read", lambda mask: (reads.append(1), read(mask))[1])
    for hidden in (20, 21, 21):
        mask.zero_()[..., hidden] = torch.finfo().min
        found = masks.real_tokens(mask)
        assert isinstance(found, RealTokens), found
        assert found.rest.tolist() == [[hidden]], "NumPy may have written it"
    assert len(reads) == 3
    monkeypatch.setattr("sparge.weak_cache.shows_changes", lambda tensor: True)
    first = masks.real_tokens(mask)
    assert masks.real_tokens(mask) is first and len(reads) == 4
    monkeypatch.setattr(module, "being_recorded", lambda device: True)
    assert masks.real_tokens(mask) == CAPTURED
