# SPDX-License-Identifier: Apache-2.0
"""Fit of the rates of `sparge.speed.worth` to what benchmarks/crossover.py measured.

Least squares of relative errors, for each head_dim and kernel; no rate is below 0. What the host
takes is the median of all calls: it hardly depends on the size, and a machine's host is not always
equally fast.
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
    sparse: float
    """Seconds, as `dense` with the host's part of the rates."""
    dense: float
    sparse_is_chosen: bool

    @property
    def ratio(self) -> float:
        """Ratio of the sparse call's time to the dense one's."""
        return self.sparse / self.dense

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


def terms_of(row: Row) -> dict[str, float]:
    return call(row).dense_terms() if is_dense(row) else call(row).sparse_terms(row["density"])


def fit(rows: Sequence[Row]) -> dict[str, Any]:
    """Rates as rates.json holds them for one kind of GPU."""
    rows = [row for row in rows if not is_held_out(row)]
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
            **solve(sparse),
        },
        "dense": {
            kernel: {
                "host": host_seconds(of_kernel),
                **solve(of_kernel),
            }
            for kernel, of_kernel in dense.items()
        },
        "margin": 0.0,
    }
    read = Rates.read(rates)
    near = [d for kernel in dense for d in decisions(large(rows), read, kernel) if d.is_close]
    rates["margin"] = rounded(max((each.too_low for each in near), default=0.0), 2)
    return rates


def host_seconds(rows: Sequence[Row]) -> float:
    return rounded(statistics.median(row["host_ms"] for row in rows) / 1000)


def solve(rows: Sequence[Row]) -> dict[str, float]:
    """Rates that bring the sums of terms nearest to the GPU's times."""
    rows = large(rows)
    terms = [terms_of(row) for row in rows]
    names = list(terms[0])
    times = np.array([row["ms"] / 1000 for row in rows])
    matrix = np.array([[term[name] for name in names] for term in terms]) / times[:, None]
    rates = least_squares(matrix, np.ones(len(rows)))
    return {name: rounded(float(rate)) for name, rate in zip(names, rates, strict=True)}


def large(rows: Sequence[Row]) -> list[Row]:
    """Rows that are fitted; in a tiny run all."""
    fitted = [row for row in rows if not is_held_out(row)]
    return [row for row in fitted if row["tokens"] >= FEWEST_TOKENS] or fitted


def is_held_out(row: Row) -> bool:
    return row.get("held_out", False)


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
        if is_dense(row):
            continue
        guess = estimate(call(row), row["density"], rates, kernel)
        sparse = max(row["ms"] / 1000, rates.sparse.host_of(call(row)))
        against = dense[row["tokens"], row["heads"]]
        found.append(Decision(row, guess, sparse, against, row["density"] < guess.break_even))
    return found


def show(rows: Sequence[Row]) -> None:
    """Prints the rates, how far they are off, and where they would choose the slower call."""
    for head_dim, fields in fit(rows)["head_dims"].items():
        rates = Rates.read(fields)
        of_dim = [row for row in rows if row["head_dim"] == int(head_dim)]
        print(f"# head_dim {head_dim}: {json.dumps(fields)}")
        for kernel, dense in rates.dense.items():
            of_kernel = [row for row in of_dim if row["case"] == kernel]
            print(f"#   {kernel}: {off(of_kernel, [dense.gpu(call(row)) for row in of_kernel])}")
        sparse = [row for row in of_dim if not is_dense(row)]
        predicted = [rates.sparse.gpu(call(row), row["density"]) for row in sparse]
        print(f"#   sparse: {off(sparse, predicted)}; margin {rates.margin:.1%}")
        asked = [row for row in of_dim if row["tokens"] >= FEWEST_TOKENS] or of_dim
        for kernel in rates.dense:
            made = decisions(asked, rates, kernel)
            chosen = [each for each in made if each.sparse_is_chosen]
            slower = [each.ratio - 1 for each in chosen if each.ratio > 1]
            missed = [1 - d.ratio for d in made if not d.sparse_is_chosen and d.ratio < 1]
            print(
                f"#   beside {kernel}: of {len(made)} calls {len(chosen)} are sparse, "
                f"{len(slower)} of them slower (by {max(slower, default=0):.1%} at most); "
                f"{len(missed)} stay dense that are faster ({max(missed, default=0):.1%} at most)"
            )


def off(rows: Sequence[Row], predicted: Sequence[float]) -> str:
    """The worst relative misfits of the GPU's times: of sizes fitted, held out, and all."""
    errors = {
        id(row): 1000 * guess / row["ms"] - 1 for row, guess in zip(rows, predicted, strict=True)
    }
    kinds = {
        f"from {FEWEST_TOKENS} tokens on": [errors[id(row)] for row in large(rows)],
        "held out": [errors[id(row)] for row in rows if is_held_out(row)],
        "in all": list(errors.values()),
    }
    return ", ".join(f"{min(e):+.1%} to {max(e):+.1%} {kind}" for kind, e in kinds.items() if e)


def write(rows: Sequence[Row]) -> None:
    """Replaces the rates of the rows' kind of GPU, but those that `sample_cost` writes."""
    show(rows)
    kinds = json.loads(RATES_FILE.read_text(encoding="utf-8")) if RATES_FILE.exists() else {}
    before, kind = kinds.get(rows[0]["gpu"], {"head_dims": {}}), fit(rows)
    for head_dim, fields in kind["head_dims"].items():
        if sample := before["head_dims"].get(head_dim, {}).get("sample"):
            fields["sample"] = sample
    kinds[rows[0]["gpu"]] = kind
    RATES_FILE.write_text(json.dumps(kinds, indent=1) + "\n", encoding="utf-8")
    print(f"# in {RATES_FILE}")
