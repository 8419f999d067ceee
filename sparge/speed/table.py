# SPDX-License-Identifier: Apache-2.0
"""Speed table: seconds of an attention call from its sizes, by each way to compute it.

With H heads of all batch entries, N tokens, and a share of the pairs that is kept:

    rows        = H N
    pairs       = H N^2
    exact       = launch + pair pairs
    8-bit dense = launch + token rows + pair pairs
    sparse      = launch + token rows + pair pairs (share + pooled / 64)

pooled is the share of the heads that have pooled keys. Each way has rates of its own. A call takes
no less than HOST_SHARE of the time that the host takes to queue it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from ..blocks import KEY_BLOCK

#: Fewest tokens that a table holds for: it is measured from about as many on.
FEWEST_TOKENS = 1536
#: Share by which a way has to be faster at least, since a formula never fits all sizes.
LEAST_MARGIN = 0.03
#: Share of a call's host time that its GPU time has to cover. The rest of a layer covers the other:
#: where calls are as short as that, it takes the GPU longer than attention, and the host far less
#: (docs/experiments.md, Speed table of the user's GPU).
HOST_SHARE = 0.5
#: Most seconds that a stored rate may be: what is above is no rate of an attention call.
_MOST_SECONDS = 10.0


@dataclass(frozen=True)
class Size:
    """Sizes that the time of a call depends on, beside the share of its pairs that is kept."""

    tokens: int
    heads: int
    """Heads of all batch entries together."""
    head_dim: int

    @property
    def rows(self) -> int:
        return self.heads * self.tokens

    @property
    def pairs(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True)
class Cost:
    """Rates of one way in seconds, as in the formulas above."""

    host: float
    launch: float
    token: float
    pair: float

    def gpu(self, size: Size, share: float = 1.0) -> float:
        return self.launch + self.token * size.rows + self.pair * size.pairs * share

    def seconds(self, size: Size, share: float = 1.0) -> float:
        """Seconds of a call that computes this share of its pairs."""
        return max(HOST_SHARE * self.host, self.gpu(size, share))

    def share_within(self, size: Size, seconds: float) -> float:
        """Largest share of its pairs that a call can compute in that time; below 0 where none."""
        left = seconds - self.gpu(size, 0.0)
        if seconds < HOST_SHARE * self.host or left < 0:
            return -1.0
        whole = self.pair * size.pairs
        return left / whole if whole else math.inf


@dataclass(frozen=True)
class Times:
    """Costs of the three ways at one head_dim."""

    exact: Cost
    eight_bit: Cost
    sparse: Cost
    margin: float
    """Largest relative misfit of the formulas."""

    def eight_bit_is_faster(self, size: Size) -> bool:
        """Whether 8-bit dense attention is faster than exact for sure."""
        return self.eight_bit.seconds(size) * (1 + self.margin) <= self.exact.seconds(size)

    def sparse_density_within(self, size: Size, seconds: float, pooled: float) -> float:
        """Density below which a sparse call takes less than so many seconds for sure; 0 where none
        does. pooled: share of its heads that have pooled keys."""
        share = self.sparse.share_within(size, seconds / (1 + self.margin))
        return max(0.0, share - pooled / KEY_BLOCK)

    def sparse_seconds(self, size: Size, density: float, pooled: float) -> float:
        return self.sparse.seconds(size, density + pooled / KEY_BLOCK)


@dataclass(frozen=True)
class SpeedTable:
    """Times of one GPU."""

    facts: Mapping[str, str]
    """Facts that they were measured with; a table of other facts is not used."""
    created: str
    """When, in ISO 8601 with a time zone."""
    by_head_dim: Mapping[int, Times]

    def of(self, head_dim: int) -> Times | None:
        """Times at a head_dim; None where nothing was measured."""
        return self.by_head_dim.get(head_dim)

    def to_json(self) -> dict[str, Any]:
        times = {str(head_dim): asdict(times) for head_dim, times in self.by_head_dim.items()}
        facts = {"facts": dict(self.facts), "created": self.created}
        return {**facts, "head_dims": times}

    @classmethod
    def from_json(cls, stored: Any) -> SpeedTable:
        """Raises ValueError, KeyError or TypeError for what `to_json` never wrote."""
        head_dims = {
            int(head_dim): _times(times) for head_dim, times in stored["head_dims"].items()
        }
        facts = {str(name): str(fact) for name, fact in stored["facts"].items()}
        created = str(stored["created"])
        if datetime.fromisoformat(created).tzinfo is None:
            raise ValueError(f"{created!r} has no time zone")
        return cls(facts, created, head_dims)


def _times(stored: Mapping[str, Any]) -> Times:
    ways = [
        Cost(*(_seconds(stored[way.name][rate.name]) for rate in fields(Cost)))
        for way in fields(Times)[:3]
    ]
    return Times(*ways, margin=_seconds(stored["margin"]))


def _seconds(stored: Any) -> float:
    if not isinstance(stored, float | int) or not 0 <= stored <= _MOST_SECONDS:
        raise ValueError(f"{stored!r} is no rate")
    return float(stored)
