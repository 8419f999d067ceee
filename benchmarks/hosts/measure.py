# SPDX-License-Identifier: Apache-2.0
"""Rows of one case: its model runs by itself, with rounded operands or noise, and in each host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparge.common import compiling
from sparge.common.metrics import rel_l1

from .case import Case, Subject
from .hosts import Counts, Host
from .rounded import noisy, rounded, served_by
from .row import Row

HALF = 0.5


def rows_of(case: Case, hosts: Iterable[Host]) -> Iterator[Row]:
    """Row of the case with each host."""
    own, by_least = outputs(case.make()), {}
    alike, of_alike = case.make, own
    if case.alike:
        alike, of_alike = case.alike, outputs(case.alike())
    for host in hosts:
        if host.least not in by_least:
            by_least[host.least] = beside_own(alike, of_alike, host.least)
        row = Row(host.name, case.model, case.name, **by_least[host.least])
        yield measured(row, case, host, own)


def beside_own(make: Callable[[], Subject], own: Sequence[Tensor], least: int) -> dict[str, Any]:
    """Fields of a row that no host matters to. own: outputs of what `make` makes; least: queries
    and keys of calls that are served."""
    with served_by(rounded, least) as served:
        rounded_error = largest_error(outputs(make()), own)
    with served_by(noisy, least):
        noise_error = largest_error(outputs(make()), own)
    errors = {"rounded_error": rounded_error, "noise_error": noise_error}
    return errors | {"calls": served.calls}


def measured(row: Row, case: Case, host: Host, own: Sequence[Tensor]) -> Row:
    """Row with what the host made of the case. own: outputs of the model by itself. Raises what a
    host raises that may not refuse."""
    try:
        whole, counts = used(case, host, 1.0)
        _, fewer = used(case, host, HALF)
    except Exception as error:
        if not host.may_refuse:
            raise
        return replace(row, refused=f"{type(error).__name__}: {sentence(str(error))}")
    left = dict(counts.left)
    if not counts.sparse + counts.dense + len(left) and counts.said:
        left = {sentence(counts.said): row.calls}
    return replace(
        row,
        error=largest_error(whole, own),
        sparse=counts.sparse,
        dense=counts.dense,
        left=left,
        fewer_sparse=fewer.sparse,
        fewer_density=round(fewer.density, 3),
    )


def used(case: Case, host: Host, topk: float) -> tuple[list[Tensor], Counts]:
    """Outputs of the case in the host, and what that counted."""
    if case.compiled or case.fullgraph:
        torch._dynamo.reset()
        compiling._traced.clear()
    subject = case.prepared()
    with host.opened(subject, topk) as counted:
        found = outputs(subject)
        return found, counted()


def outputs(subject: Subject) -> list[Tensor]:
    torch.manual_seed(0)
    return [x.detach() for x in subject.run()]


def largest_error(found: Sequence[Tensor], own: Sequence[Tensor]) -> float:
    """Largest relative L1 of the outputs; infinite where they have other shapes, or numbers that
    are not finite in other places."""
    return max(
        (_error(x, y) for x, y in zip(found, own, strict=True)),
        default=math.inf,
    )


def _error(found: Tensor, own: Tensor) -> float:
    finite = own.isfinite()
    if found.shape != own.shape or not torch.equal(found.isfinite(), finite):
        return math.inf
    return rel_l1(found[finite], own[finite])


def sentence(text: str) -> str:
    """First line of a text."""
    return text.strip().partition("\n")[0]
