# SPDX-License-Identifier: Apache-2.0
"""Block of text with which a user tells how fast their card is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import torch

from ..errors import KernelBuildError, Unsupported
from ..order.grid import TokenGrid
from .backend import TORCH
from .one_shape import time_shape
from .table import Size, SpeedTable

DENSITY = 0.2
#: The issue form, in .github/ISSUE_TEMPLATE.
FORM = "speed_on_my_card.yml"
_TRACKER = "Bug Tracker"


@dataclass(frozen=True)
class Model:
    """Self-attention of a model at a usual size."""

    name: str
    heads: int
    head_dim: int
    grid: TokenGrid

    @property
    def size(self) -> Size:
        return Size(self.grid.tokens, self.heads, self.head_dim)


MODELS = (
    Model("Mochi 848x480x163", 24, 128, TokenGrid(28, 30, 53, suffix=256)),
    Model("Wan 14B 832x480x81", 40, 128, TokenGrid(21, 30, 52)),
    Model("CogVideoX-5B 720x480x49", 48, 64, TokenGrid(13, 30, 45, prefix=226)),
)


def block(table: SpeedTable, device: torch.device) -> Iterator[str]:
    """Yields lines; times the calls of `MODELS`, which takes seconds."""
    facts = dict(table.facts)
    yield f"GPU {facts.pop('gpu')}, " + ", ".join(f"{name} {of}" for name, of in facts.items())
    for model in MODELS:
        yield f"{model.name}: {_times(model, device)}"


def _times(model: Model, device: torch.device) -> str:
    given = (model.grid, model.heads, model.head_dim, device, TORCH, (DENSITY,))
    try:
        times = time_shape(*given)
    except torch.OutOfMemoryError:
        return "does not fit in the free memory"
    except (KernelBuildError, Unsupported) as error:
        return str(error)
    cells = {"exact": times.exact, "8-bit dense": times.eight_bit, "20 %": times.sparse[DENSITY]}
    return ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in cells.items())


def where() -> str:
    """Address of the issue form, or words for it where nothing says whose project this is."""
    address = _tracker()
    if address is None:
        return "an issue of this project, with the form Speed on my card"
    return f"{address}/new?template={FORM}"


def _tracker() -> str | None:
    """Address of the issues, by the project file beside the library, else by what is installed."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        found = re.search(rf'^"{_TRACKER}" = "(.+)"$', project.read_text("utf-8"), re.MULTILINE)
        return found[1] if found else None
    try:
        urls = metadata("sparge-attention").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    return next((url.split(", ")[1] for url in urls if url.startswith(_TRACKER)), None)
