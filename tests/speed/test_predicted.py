# SPDX-License-Identifier: Apache-2.0
"""What a model foretells of cards that nobody measured, and the lines that a user posts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.shapes import SHAPES
from sparge import Unsupported
from sparge.kernels import Element
from sparge.kernels.driver import Attribute, DriverError
from sparge.speed import Cost, ShapeTimes, Size, SpeedTable, Times, post, predicted
from sparge.speed import __main__ as command
from sparge.speed.post import MODELS
from sparge.speed.predicted import BEYOND, Card
from sparge.speed.table import Chosen

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda", 0)
#: What the driver says of an RTX 4090.
TOLD = {
    Attribute.MULTIPROCESSORS: 128,
    Attribute.KILOHERTZ: 2_520_000,
    Attribute.MEMORY_KILOHERTZ: 10_501_000,
    Attribute.MEMORY_BUS_BITS: 384,
}
COST = Cost(1e-4, 1e-4, 1e-9, 1e-12)
FACTS = {"format": "2", "gpu": "NVIDIA GeForce RTX 4090", "driver": "13000", "torch": "2.13.0"}
TABLE = SpeedTable(
    FACTS,
    "2026-01-01T00:00:00+00:00",
    {64: Times(COST, COST, COST, margin=0.03)},
    Chosen({64: Element.INT8_INT8, 128: Element.INT8_E4M3}),
)


def test_a_range_covers_what_an_h100_took() -> None:
    """docs/experiments.md, Peers on RTX cards: code of sm_86, so its clocks there."""
    h100, clocks = Card(132, 1.755, 3350), {64: 1108, 128: 1920}
    for name, least, most in (
        ("mochi", 12.2e-3, 12.2e-3),
        ("wan480", 11.5e-3, 11.5e-3),
        ("cogx2b", 1.9e-3, 2.1e-3),
    ):
        shape = SHAPES[name]
        size = Size(shape.tokens, shape.heads, shape.head_dim)
        seconds = h100.attending(size, 0.2, clocks[shape.head_dim]) + h100.preparing(size)
        assert seconds < least and most < seconds * BEYOND[shape.head_dim] < 1.1 * most


def test_the_models_are_those_of_the_benchmarks() -> None:
    shapes = [SHAPES[name] for name in ("mochi", "wan480", "cogx5b")]
    assert [(m.grid, m.heads, m.head_dim) for m in MODELS] == [
        (s.grid, s.heads, s.head_dim) for s in shapes
    ]
    assert all(m.size.tokens == s.tokens for m, s in zip(MODELS, shapes, strict=True))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[Attribute, int]:
    """A pretended RTX 4090, as its driver tells it; its calls take no time to measure."""
    told = dict(TOLD)

    def time_shape(grid: Any, heads: int, *_: Any) -> ShapeTimes:
        if heads == 40:
            raise torch.OutOfMemoryError("full")
        if heads == 48:
            raise Unsupported("not today")
        return ShapeTimes(0.157, 0.0526, {0.2: 0.01234})

    monkeypatch.setattr(post, "time_shape", time_shape)
    monkeypatch.setattr(predicted, "attribute", lambda index, of: told[of])
    monkeypatch.setattr(predicted, "capabilities", lambda _: SimpleNamespace(arch="sm_89"))
    return told


def test_the_block_says_card_values_times_and_what_was_predicted(card) -> None:
    lines = list(post.block(TABLE, GPU))
    assert lines == [
        "GPU NVIDIA GeForce RTX 4090, format 2, driver 13000, torch 2.13.0",
        "values: head_dim 128 INT8_E4M3, head_dim 64 INT8_INT8",
        "Mochi 848x480x163: exact 157 ms, 8-bit dense 52.6 ms, 20 % 12.3 ms; predicted at 20 %: "
        "10.6 to 13.8 ms",
        "Wan 14B 832x480x81: does not fit in the free memory",
        "CogVideoX-5B 720x480x49: not today",
    ]


@pytest.mark.parametrize("silent", [True, False])
def test_without_rates_nothing_is_predicted(card, monkeypatch, silent: bool) -> None:
    card[Attribute.MEMORY_KILOHERTZ] = 0
    if silent:

        def fail(*_: object) -> int:
            raise DriverError("cuDeviceGetAttribute", 1, "CUDA_ERROR", "unknown")

        monkeypatch.setattr(predicted, "attribute", fail)
    assert list(post.block(TABLE, GPU))[2].endswith("20 % 12.3 ms")


def test_the_command_ends_with_the_block_and_where_to_post_it(card, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(command, "kept_tables", list)
    monkeypatch.setattr(command, "speed_table", lambda device: TABLE)
    command.main([])
    before, block = capsys.readouterr().out.split("Please post these lines: ")
    assert "8-bit dense" in before and block.count("Mochi") == 1
    where, rest = block.split("\n\n")
    assert rest.splitlines() == list(post.block(TABLE, GPU))
    assert re.fullmatch(r"https://github\.com/.+/issues/new\?template=speed_on_my_card\.yml", where)
    assert (ROOT / ".github" / "ISSUE_TEMPLATE" / post.FORM).is_file()


def test_an_installed_library_knows_the_address_or_says_it_in_words(monkeypatch) -> None:
    urls = ["Repository, https://some.org/pack", "Bug Tracker, https://some.org/pack/issues"]
    monkeypatch.setattr(post, "__file__", "/nowhere/at/all/post.py")
    monkeypatch.setattr(post, "metadata", lambda name: SimpleNamespace(get_all=lambda key: urls))
    assert post.where() == "https://some.org/pack/issues/new?template=speed_on_my_card.yml"

    def missing(name: str) -> None:
        raise post.PackageNotFoundError(name)

    monkeypatch.setattr(post, "metadata", missing)
    assert "the form Speed on my card" in post.where()
