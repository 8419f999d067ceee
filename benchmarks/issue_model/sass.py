# SPDX-License-Identifier: Apache-2.0
"""SASS as a list of instructions with labels, from the disassembler's text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
_LABEL = re.compile(r"\s*\.(L_\w+):")
_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<text>[^;]*?)\s*;")
_WORDS = {"64": 2, "128": 4, "2": 2, "4": 4}
_TARGET = re.compile(r"`\(\.(L_\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """One instruction, such as ``@!P0 LDS.64 R2, [R4+0x10]``."""

    opcode: str
    operands: tuple[str, ...] = ()
    guard: str = ""
    """Predicate under which it acts, such as ``!P0``; "" where it always does."""

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def words(self) -> int:
        """Registers that each operand of data has: 4 of LDS.128, and of LDSM of four matrices."""
        return _WORDS.get(self.modifiers[-1], 1) if self.modifiers else 1

    @property
    def never_acts(self) -> bool:
        return self.guard == "!PT"

    @property
    def target(self) -> str | None:
        """Label that a branch leads to."""
        found = _TARGET.search(self.operands[-1]) if self.operands else None
        return found[1] if found else None

    @property
    def is_branch(self) -> bool:
        return self.name == "BRA"

    @property
    def always_branches(self) -> bool:
        """BRA.U, BRA.DIV and ``BRA P0`` have their condition among the operands."""
        return self.is_branch and not self.guard and len(self.operands) == 1


@dataclass(frozen=True)
class Listing:
    """Instructions of one kernel; a label names the number of the instruction after it."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(text: str, kernel: str) -> Listing:
    """Raises ValueError where the text has no such kernel."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for line in text.splitlines():
        if section := _SECTION.match(line):
            inside = section[1] == kernel
        elif not inside:
            continue
        elif label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            guard = (found["guard"] or "").strip().removeprefix("@")
            instructions.append(_instruction(found["text"], guard))
    if not instructions:
        raise ValueError(f"the disassembly has no kernel {kernel}")
    return Listing(tuple(instructions), labels)


def _instruction(text: str, guard: str) -> Instruction:
    opcode, _, rest = text.partition(" ")
    operands = tuple(operand.strip() for operand in rest.split(",")) if rest.strip() else ()
    return Instruction(opcode, operands, guard)
