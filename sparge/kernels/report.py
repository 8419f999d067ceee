# SPDX-License-Identifier: Apache-2.0
"""Resources that a kernel uses as the assembler says, read from its ``-v`` text."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields

# Lines worth a reader's time: warnings, and the C75xx notes that say wgmma was serialised.
_NOTE = re.compile(r"warning( #|\s*:)|Potential Performance Loss", re.IGNORECASE)


@dataclass(frozen=True)
class Report:
    """Resources of one kernel; sizes in bytes, registers and stack per thread."""

    registers: int
    static_shared: int
    stack: int
    spill_stores: int
    spill_loads: int
    notes: tuple[str, ...] = ()

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, object]) -> Report:
        """Raises KeyError for a missing field, ValueError for one of another type; other keys are
        ignored."""
        values = {field.name: data[field.name] for field in fields(cls)}
        notes = values.pop("notes")
        if not isinstance(notes, list | tuple) or not all(isinstance(note, str) for note in notes):
            raise ValueError("the report's notes are no texts")
        "".join(notes).encode()  # halves of characters, which no terminal shows, raise here
        if not all(type(value) is int and value >= 0 for value in values.values()):
            raise ValueError("the report's numbers are none")
        return cls(**values, notes=tuple(notes))  # type: ignore[arg-type]


def parse_report(log: str) -> Report | None:
    """Read a ptxas ``-v`` log of one kernel, from NVRTC or nvcc; None when it says nothing.

    A kernel without a report still runs: only the build's table and the spill test need one.
    """
    registers = _first(log, r"Used (\d+) registers")
    if registers is None:
        return None
    return Report(
        registers=registers,
        static_shared=_first(log, r"(\d+) bytes smem") or 0,
        stack=_first(log, r"(\d+) bytes stack frame") or 0,
        spill_stores=_first(log, r"(\d+) bytes spill stores") or 0,
        spill_loads=_first(log, r"(\d+) bytes spill loads") or 0,
        notes=tuple(dict.fromkeys(s.strip() for s in log.splitlines() if _NOTE.search(s))),
    )


def _first(log: str, pattern: str) -> int | None:
    found = re.search(pattern, log)
    return int(found[1]) if found else None
