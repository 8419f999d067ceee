# SPDX-License-Identifier: Apache-2.0
"""Row of the table of hosts, and the verdict on it.

The bound of a case is derived from the case itself: the model runs with attention whose queries and
keys are rounded to 8 bits and which is PyTorch's otherwise, mask and all
(`benchmarks.hosts.rounded`). Three times the error of that run is allowed where calls were served
in 8 bits. Where none was, every call is the model's own, and not a bit may differ. A reason that
was counted excuses nothing: the call that it is of was left to the host, which computes it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: What rounding may cost, beside the rounded run of the same model.
MARGIN = 3.0


class Verdict(Enum):
    """Judgement of a row."""

    TRUE = "as the model's own"
    REFUSED = "refused"
    """The host raised, with a sentence."""
    SILENTLY_WRONG = "silently wrong"
    """The output differs by more than the bound, and nothing was raised."""
    SILENTLY_DENSE = "silently dense"
    """No call was served, and nobody was told why."""

    @property
    def is_bad(self) -> bool:
        return self in (Verdict.SILENTLY_WRONG, Verdict.SILENTLY_DENSE)


@dataclass(frozen=True)
class Row:
    """One host with one case of one model. Errors are relative L1, the largest of the outputs."""

    host: str
    model: str
    case: str
    error: float = 0.0
    """Error of the output where everything is kept, beside the model's own attention."""
    rounded_error: float = 0.0
    """Error of the model's own output where queries and keys are rounded to 8 bits."""
    noise_error: float = 0.0
    """Error where a tenth of noise is added to what each attention call gives: so much the output
    shows of attention that is wrong."""
    calls: int = 0
    """Attention calls that the model makes by itself."""
    sparse: int = 0
    dense: int = 0
    """Calls in 8 bits that skip nothing by a rule, as in the first steps of a run."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Calls that were left to the host, by reason."""
    fewer_sparse: int = 0
    """Sparse calls where half is kept."""
    fewer_density: float = 1.0
    """Share of the query-key pairs that those computed."""
    refused: str = ""
    """Error that the host raised, as text."""

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Row:
        """Row of a file, which has more fields: commit and versions."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    @property
    def bound(self) -> float:
        return MARGIN * self.rounded_error if self.sparse + self.dense else 0.0

    @property
    def verdict(self) -> Verdict:
        if self.refused:
            return Verdict.REFUSED
        if not self.error <= self.bound:  # so that a NaN is wrong
            return Verdict.SILENTLY_WRONG
        if self.sparse + self.dense + sum(self.left.values()) < min(1, self.calls):
            return Verdict.SILENTLY_DENSE
        return Verdict.TRUE
