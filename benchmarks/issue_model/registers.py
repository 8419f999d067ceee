# SPDX-License-Identifier: Apache-2.0
"""Registers and predicates that an instruction reads and writes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .kinds import is_tensor
from .sass import Instruction

_REGISTER = re.compile(r"(?<!\w)(U?R)(\d+)(?!\d)(\.64)?")
_PREDICATE = re.compile(r"!?(?:U?P[\dT])\Z")
_NAMED_PREDICATE = re.compile(r"(?<!\w)U?P\d(?!\w)")
#: Nothing that a later instruction of a warp waits for is written by these.
_WRITES_NOTHING = {
    *("ST", "STS", "STG", "STL", "RED", "LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR", "BRA"),
    *("BSSY", "BSYNC", "WARPSYNC", "YIELD", "NOP", "EXIT", "CALL", "RET"),
}


@dataclass(frozen=True)
class Access:
    """Names such as R12, UR4 and P0."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


def access(instruction: Instruction) -> Access:
    if is_tensor(instruction):
        return _of_product(instruction)
    count = _destinations(instruction)
    written, read = instruction.operands[:count], instruction.operands[count:]
    wide = "WIDE" in instruction.modifiers or instruction.name == "CS2R"
    width = 2 if wide else instruction.words
    writes = [name for operand in written for name in _names(operand, width)]
    reads = _NAMED_PREDICATE.findall(instruction.guard)
    for operand in read:
        stored = instruction.name.startswith("ST") and not operand.startswith("[")
        reads += _names(operand, width if stored else 1)
    if "WIDE" in instruction.modifiers:
        reads += _names(instruction.operands[-1], 2)
    return Access(tuple(dict.fromkeys(reads)), tuple(writes))


def _of_product(instruction: Instruction) -> Access:
    """D = A x B + C: 4 registers of A and 2 of B, as mma.sync of 16 x 8 has them."""
    d, a, b, c, *_ = instruction.operands
    sums = 2 if instruction.modifiers[1:2] == ("F16",) else 4
    reads = (*_names(a, 4), *_names(b, 2), *_names(c, sums))
    return Access(reads, tuple(_names(d, sums)))


def _destinations(instruction: Instruction) -> int:
    """Number of operands that are written: they stand first."""
    operands = instruction.operands
    if instruction.name in _WRITES_NOTHING or not operands:
        return 0
    first_is_predicate = bool(_PREDICATE.match(operands[0]))
    if instruction.name in ("VOTE", "VOTEU", "FCHK") or len(operands) == 1:
        return 1
    second_is_predicate = bool(_PREDICATE.match(operands[1])) and not operands[1].startswith("!")
    return 2 if first_is_predicate or second_is_predicate else 1


def _names(operand: str, width: int) -> list[str]:
    """``width`` registers from each one named, two from R2.64; and predicates."""
    names = [
        f"{file}{int(first) + number}"
        for file, first, wide in _REGISTER.findall(operand)
        for number in range(2 if wide else width)
    ]
    return names + _NAMED_PREDICATE.findall(operand)
