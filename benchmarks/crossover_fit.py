# SPDX-License-Identifier: Apache-2.0
"""The rates of `sparge.plan.worth` from what benchmarks/crossover.py measured.

Least squares of relative errors, for each head_dim and kernel; no rate is below 0. What the host
takes is a median.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparge.plan.worth import RATES_FILE, Call, Estimate, Rates, estimate

Row = Mapping[str, Any]

#: Sizes whose choice is not obvious: one is at most so many times as fast as the other.
CLOSE = 1.5


@dataclass(frozen=True)
class Decision:
    """What the rates say of one row, and what was measured."""

    row: Row
    dense: Row
    predicted: Estimate
    sparse_is_chosen: bool

    @property
    def ratio(self) -> float:
        """Of the sparse call's time to the dense one's."""
        return seconds(self.row) / seconds(self.dense)

    @property
    def is_close(self) -> bool:
        return 1 / CLOSE < self.ratio < CLOSE

    @property
    def too_low(self) -> float:
        """Share by which the ratio is above the predicted one."""
        return self.ratio / (self.predicted.sparse / self.predicted.dense) - 1


def seconds(row: Row) -> float:
    """Of the GPU, or of the host where it is slower."""
    return max(row["ms"], row["host_ms"]) / 1000


def call(row: Row) -> Call:
    sizes = (row["tokens"], row["heads"], row["head_dim"])
    return Call(*sizes, row.get("pv_filter", False), row.get("pooled"))


def is_dense(row: Row) -> bool:
    return "torch_takes" in row


def fit(rows: Sequence[Row]) -> dict[str, Any]:
    """What rates.json holds of one kind of GPU."""
    head_dims = sorted({row["head_dim"] for row in rows})
    facts = {name: rows[0][name] for name in ("gpu", "torch", "commit")}
    by_dim = {
        str(d): fit_head_dim([row for row in rows if row["head_dim"] == d]) for d in head_dims
    }
    return facts | {"head_dims": by_dim}


def fit_head_dim(rows: Sequence[Row]) -> dict[str, Any]:
    sparse = [row for row in rows if not is_dense(row)]
    dense = defaultdict(list)
    for row in rows:
        if is_dense(row):
            dense[row["case"]].append(row)
    plain = [row for row in sparse if row["pooled"] is None]
    budgets = [row for row in sparse if row["pooled"] is not None]
    rates = {
        "sparse": {
            "host": host_seconds(plain),
            "host_budgets": host_seconds(budgets),
            **solve([call(row).sparse_terms(row["density"]) for row in sparse], sparse),
        },
        "dense": {
            kernel: {
                "host": host_seconds(of_kernel),
                **solve([call(row).dense_terms() for row in of_kernel], of_kernel),
            }
            for kernel, of_kernel in dense.items()
        },
        "margin": 0.0,
    }
    near = [each for each in decisions(rows, Rates.read(rates)) if each.is_close]
    rates["margin"] = rounded(max((each.too_low for each in near), default=0.0), 2)
    return rates


def host_seconds(rows: Sequence[Row]) -> float:
    return rounded(statistics.median(row["host_ms"] for row in rows) / 1000)


def solve(terms: Sequence[Mapping[str, float]], rows: Sequence[Row]) -> dict[str, float]:
    """The rates that bring the sums of terms nearest to the GPU's times."""
    names = list(terms[0])
    times = np.array([row["ms"] / 1000 for row in rows])
    matrix = np.array([[term[name] for name in names] for term in terms]) / times[:, None]
    rates = least_squares(matrix, np.ones(len(rows)))
    return {name: rounded(float(rate)) for name, rate in zip(names, rates, strict=True)}


def least_squares(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """With no unknown below 0: the most negative is left out until there is none."""
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


def decisions(rows: Sequence[Row], rates: Rates) -> list[Decision]:
    """Of every sparse row of one head_dim, against the fastest dense one of its size."""
    fastest: dict[tuple[int, int], Row] = {}
    for row in filter(is_dense, rows):
        size = (row["tokens"], row["heads"])
        fastest[size] = min(row, fastest.get(size, row), key=seconds)
    found = []
    for row in rows:
        dense = fastest.get((row["tokens"], row["heads"]))
        if is_dense(row) or dense is None:
            continue
        guess = estimate(call(row), row["density"], rates)
        found.append(Decision(row, dense, guess, row["density"] < guess.break_even))
    return found


def show(rows: Sequence[Row]) -> None:
    """Prints the rates, how far they are off, and where they would choose the slower call."""
    for head_dim, fields in fit(rows)["head_dims"].items():
        rates = Rates.read(fields)
        of_dim = [row for row in rows if row["head_dim"] == int(head_dim)]
        made = decisions(of_dim, rates)
        print(f"# head_dim {head_dim}: {json.dumps(fields)}")
        for kernel, dense in rates.dense.items():
            worst = [
                dense.seconds(call(row)) / seconds(row) - 1
                for row in of_dim
                if row["case"] == kernel
            ]
            print(f"#   {kernel}: {min(worst):+.1%} to {max(worst):+.1%}")
        worst = [each.predicted.sparse / seconds(each.row) - 1 for each in made]
        print(f"#   sparse: {min(worst):+.1%} to {max(worst):+.1%}, margin {rates.margin:.1%}")
        slower = [each.ratio - 1 for each in made if each.sparse_is_chosen and each.ratio > 1]
        missed = [1 - each.ratio for each in made if not each.sparse_is_chosen and each.ratio < 1]
        print(
            f"#   of {len(made)}: {len(slower)} would be slower than dense (by "
            f"{max(slower, default=0):.1%} at most), {len(missed)} stay dense though "
            f"{max(missed, default=0):.1%} faster at most"
        )


def write(rows: Sequence[Row]) -> None:
    """Replaces the rates of the rows' kind of GPU."""
    show(rows)
    kinds = json.loads(RATES_FILE.read_text(encoding="utf-8")) if RATES_FILE.exists() else {}
    kinds[rows[0]["arch"]] = fit(rows)
    RATES_FILE.write_text(json.dumps(kinds, indent=1) + "\n", encoding="utf-8")
    print(f"# in {RATES_FILE}")
