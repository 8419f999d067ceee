# SPDX-License-Identifier: Apache-2.0
"""Settings of a run as one frozen value, and their defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..checks.argument import check_kind, flag, number, shown, whole_number
from ..kernels import capabilities, pv_filter_saves
from ..policy import PV_FILTER_OFF, SparsePolicy
from .schedule import Aim

NO_COUNT = "this model's block count is unknown"
_SPAN = re.compile(r"(-?\d+)(?:\s*-\s*(-?\d+))?")


@dataclass(frozen=True)
class LayerSpans:
    """Spans of a text: "0-2, -1" means the first three layers and the last.

    Spans of layer numbers are inclusive; a negative number counts from the last layer.
    """

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> LayerSpans:
        """Reads the text of the widget dense_blocks.

        Raises ValueError, with what is accepted, for text that is not a list of layers.

        ComfyUI makes the text "None" of null in an API graph: no layer.
        """
        spans = []
        if text.strip() == "None":
            return cls()
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            match = _SPAN.fullmatch(part)
            if match is None:
                raise ValueError(
                    f"dense_blocks contains {part!r}; give block numbers and ranges separated by "
                    'commas, for example "0-2, -1" (negative numbers count from the last block).'
                )
            first = int(match[1])
            last = first if match[2] is None else int(match[2])
            if last < first and (last < 0) == (first < 0):
                raise ValueError(
                    f"dense_blocks contains {part!r}, which ends before it begins: write {last}-"
                    f"{first}."
                )
            spans.append((first, last))
        return cls(tuple(spans))

    def of_total(self, total: int | None) -> list[range]:
        """Layers that are listed, of so many. Without a total, spans counted from the end are left
        out."""
        ends = total or 0
        return [
            range(first + ends * (first < 0), last + ends * (last < 0) + 1)
            for first, last in self.spans
            if total is not None or min(first, last) >= 0
        ]

    def missing(self, total: int) -> list[int]:
        """Numbers that stand in the text and that none of `total` layers has."""
        return sorted({number for span in self.spans for number in span} - {*range(-total, total)})

    def remark(self, total: int | None) -> str:
        """What is asked in vain of a model of so many layers; empty where nothing is."""
        if total is None:
            asks = any(min(span) < 0 for span in self.spans)
            return f"negative dense_blocks do nothing: {NO_COUNT}" if asks else ""
        missing = ", ".join(map(str, self.missing(total)))
        return missing and f"dense_blocks names {missing}; this model has blocks 0-{total - 1}"


# These texts are in saved graphs of ComfyUI: only append. A new node starts with the first.
AUTO_QUALITY = "auto quality"
AUTO_BUDGET = "auto budget"
MANUAL = "manual"
MODES = [AUTO_QUALITY, AUTO_BUDGET, MANUAL]
#: Target errors: mean relative L2 error of the heads' outputs, each by its head weight
#: (`SettingsTable.head_weight`; docs/experiments.md, Targets of the qualities).
QUALITIES = {"high": 0.03, "balanced": 0.05, "fast": 0.08}


@dataclass(frozen=True)
class Settings:
    """Settings of one run, in the order of the node's widgets; what a mode does not use has its
    default."""

    mode: str = MANUAL
    quality: str = "balanced"
    topk: float = 0.5
    pvthreshd: float = 50.0  # off
    select_by: str = "topk"
    cdfthreshd: float = 0.98
    simthreshd1: float = -0.1
    start_percent: float = 0.2
    end_percent: float = 1.0
    min_tokens: int = 4096
    dense_blocks: str = ""
    exact_dense: bool = False

    def __post_init__(self) -> None:
        """Checks the values where a run is asked for, not steps later. Raises ValueError."""
        for name, options in (("mode", MODES), ("quality", list(QUALITIES))):
            given = getattr(self, name)
            if given not in options:
                raise ValueError(f"{name} is {shown(given)}; it takes one of {options}.")
        for name in ("topk", "start_percent", "end_percent"):
            value = getattr(self, name)
            if not 0 <= number(name, value, "a number from 0 to 1") <= 1:
                raise ValueError(f"{name} is {value}; it takes a number from 0 to 1.")
        whole_number("min_tokens", self.min_tokens, 0)
        flag("exact_dense", self.exact_dense)
        check_kind("dense_blocks", self.dense_blocks, str, 'a text of block numbers, say "0-2, -1"')
        self.policy()
        LayerSpans.parse(self.dense_blocks)

    @cached_property
    def aim(self) -> Aim | None:
        """Aim for measured heads; None in manual mode, which measures nothing."""
        if self.mode == AUTO_QUALITY:
            return Aim("quality", QUALITIES[self.quality])
        return Aim("budget", self.topk) if self.mode == AUTO_BUDGET else None

    @cached_property
    def dense_layers(self) -> LayerSpans:
        return LayerSpans.parse(self.dense_blocks)

    def policy(self) -> SparsePolicy:
        """Policy without the text, which calls have in different places."""
        return SparsePolicy(
            # A measured head keeps a share of the blocks, never one of the mass.
            select_by="topk" if self.aim else self.select_by,
            topk=self.topk,
            cdfthreshd=self.cdfthreshd,
            simthreshd1=self.simthreshd1,
            pvthreshd=self.pvthreshd,
        )


def fitted(policy: SparsePolicy, device: torch.device) -> SparsePolicy:
    """Policy as a device shall run it: without the PV filter where that would only cost exactness;
    unchanged where there are no kernels."""
    arch = capabilities(device).arch
    if not policy.pv_filter or not arch or pv_filter_saves(arch):
        return policy
    return replace(policy, pvthreshd=PV_FILTER_OFF)
