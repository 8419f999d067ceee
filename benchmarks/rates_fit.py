# SPDX-License-Identifier: Apache-2.0
"""Fit of sparge/speed/rates.json to what benchmarks/rates.py measured.

Least squares of relative errors, for each head_dim and kernel; no rate is below 0. What the host
takes for a call is the median of all: it hardly depends on the size, and a machine's host is not
always equally fast.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparge.speed.measuring_cost import measuring_terms
from sparge.speed.worth import RATES_FILE, Call, Estimate, Rates, estimate

Row = Mapping[str, Any]

#: Fewest tokens of a size that is fitted. Smaller ones would only bend the lines: the host takes
#: longer for a sparse call than the GPU for a dense one. The node asks no rates there.
FEWEST_TOKENS = 4096
#: Largest ratio of both times where the choice is not obvious.
CLOSE = 1.5


@dataclass(frozen=True)
class Decision:
    """Choice that the rates make for one row, and what was measured."""

    row: Row
    predicted: Estimate
    ratio: float
    """Ratio of the sparse call's time to the dense one's, both with the host's part of the
    rates."""
    sparse_is_chosen: bool

    @property
    def is_close(self) -> bool:
        return 1 / CLOSE < self.ratio < CLOSE

    @property
    def too_low(self) -> float:
        """Share by which the ratio is above the predicted one."""
        return self.ratio / (self.predicted.sparse / self.predicted.dense) - 1


def call(row: Row) -> Call:
    sizes = (row["tokens"], row["heads"], row["head_dim"])
    return Call(*sizes, row.get("pv_filter", False), row.get("pooled"))


def is_dense(row: Row) -> bool:
    return "torch_takes" in row


def is_held_out(row: Row) -> bool:
    return row.get("held_out", False)


def fit_calls(rows: Sequence[Row]) -> dict[str, Any]:
    """Rates of calls as rates.json holds them for one kind of GPU."""
    facts = {name: rows[0][name] for name in ("gpu", "torch", "commit")}
    fitted = [row for row in rows if not is_held_out(row)]
    return facts | {"head_dims": {d: _calls(own) for d, own in _by_head_dim(fitted).items()}}


def _by_head_dim(rows: Sequence[Row]) -> dict[str, list[Row]]:
    head_dims = sorted({row["head_dim"] for row in rows})
    return {str(d): [row for row in rows if row["head_dim"] == d] for d in head_dims}


def _calls(rows: Sequence[Row]) -> dict[str, Any]:
    sparse = [row for row in rows if not is_dense(row)]
    dense = defaultdict(list)
    for row in filter(is_dense, rows):
        dense[row["case"]].append(row)
    rates = {
        "sparse": {
            "host": _host([row for row in sparse if row["pooled"] is None]),
            "host_budgets": _host([row for row in sparse if row["pooled"] is not None]),
            **solve(sparse, _sparse_terms),
        },
        "dense": {
            kernel: {"host": _host(own), **solve(own, lambda row: call(row).dense_terms())}
            for kernel, own in dense.items()
        },
        "margin": 0.0,
    }
    read = Rates.read(rates)
    near = [d for kernel in dense for d in decisions(large(rows), read, kernel) if d.is_close]
    rates["margin"] = rounded(max((each.too_low for each in near), default=0.0), 2)
    return rates


def _sparse_terms(row: Row) -> dict[str, float]:
    return call(row).sparse_terms(row["density"])


def _host(rows: Sequence[Row]) -> float:
    return rounded(statistics.median(row["host_ms"] for row in rows) / 1000)


def fit_measurements(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Rates of measurements by head_dim, as rates.json has them, of the usual query blocks."""
    usual = [row for row in rows if row.get("calls", 1) == 1]
    return {
        d: {**solve(own, _measuring_terms), "host": solve(own, _measuring_terms, "host_ms")}
        for d, own in _by_head_dim(usual).items()
    }


def _measuring_terms(row: Row) -> dict[str, float]:
    return measuring_terms(row["heads"] * row["tokens"], row["walks"])


def solve(
    rows: Sequence[Row], terms_of: Callable[[Row], dict[str, float]], field: str = "ms"
) -> dict[str, float]:
    """Rates that bring the sums of terms nearest to the times."""
    rows = large(rows)
    terms = [terms_of(row) for row in rows]
    names = list(terms[0])
    times = np.array([row[field] / 1000 for row in rows])
    matrix = np.array([[term[name] for name in names] for term in terms]) / times[:, None]
    rates = least_squares(matrix, np.ones(len(rows)))
    return {name: rounded(float(rate)) for name, rate in zip(names, rates, strict=True)}


def large(rows: Sequence[Row]) -> list[Row]:
    """Rows that are fitted; in a tiny run all."""
    return [row for row in rows if row["tokens"] >= FEWEST_TOKENS] or list(rows)


def least_squares(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with no unknown below 0: the most negative is left out until there is none."""
    sizes = np.abs(matrix).max(0)
    used = sizes > 0
    found = np.zeros(matrix.shape[1])
    while used.any():
        scaled = matrix[:, used] / sizes[used]
        some = np.linalg.lstsq(scaled, wanted, rcond=None)[0]
        if some.min() >= 0:
            found[used] = some / sizes[used]
            break
        used[np.flatnonzero(used)[some.argmin()]] = False
    return found


def rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def decisions(rows: Sequence[Row], rates: Rates, kernel: str = "cudnn") -> list[Decision]:
    """Decisions of every sparse row of one head_dim, against a dense kernel."""
    dense = {
        (row["tokens"], row["heads"]): max(row["ms"] / 1000, rates.dense[kernel].host)
        for row in rows
        if is_dense(row) and row["case"] == kernel
    }
    found = []
    for row in rows:
        if not is_dense(row):
            guess = estimate(call(row), row["density"], rates, kernel)
            sparse = max(row["ms"] / 1000, rates.sparse.host_of(call(row)))
            ratio = sparse / dense[row["tokens"], row["heads"]]
            found.append(Decision(row, guess, ratio, row["density"] < guess.break_even))
    return found


def write_calls(rows: Sequence[Row]) -> None:
    """Replaces the rates of the rows' kind of GPU, but those of measurements."""
    kinds = _read()
    before, kind = kinds.get(rows[0]["gpu"], {"head_dims": {}}), fit_calls(rows)
    for head_dim, fields in kind["head_dims"].items():
        if sample := before["head_dims"].get(head_dim, {}).get("measuring"):
            fields["measuring"] = sample
    _write(kinds | {rows[0]["gpu"]: kind})


def write_measurements(rows: Sequence[Row]) -> None:
    """Replaces the rates of measurements of the rows' kind of GPU, whose calls have theirs."""
    kinds = _read()
    for head_dim, fields in fit_measurements(rows).items():
        kinds[rows[0]["gpu"]]["head_dims"][head_dim]["measuring"] = fields
    _write(kinds)


def _read() -> dict[str, Any]:
    return json.loads(RATES_FILE.read_text(encoding="utf-8")) if RATES_FILE.exists() else {}


def _write(kinds: dict[str, Any]) -> None:
    RATES_FILE.write_text(json.dumps(kinds, indent=1) + "\n", encoding="utf-8")
    print(f"# in {RATES_FILE}")
