# SPDX-License-Identifier: Apache-2.0
"""Kinds of instructions, as the tables count them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from enum import Enum

from .sass import Instruction


class Kind(str, Enum):
    """Each name is what a table says. ALU is whatever no other kind has."""

    TENSOR = "products of matrices"
    MUFU = "MUFU"
    CONVERT = "I2FP F2IP F2FP"
    SLOW_CONVERT = "I2F F2I F2F"
    FLOAT = "FFMA FADD FMUL HFMA2"
    MAXIMUM = "FMNMX"
    MULTIPLY = "IMAD IDP"
    ALU = "other ALU"
    UNIFORM = "uniform"
    LDSM = "LDSM"
    LDS = "LDS"
    STS = "STS"
    SHFL = "SHFL"
    LDGSTS = "LDGSTS"
    MEMORY = "other memory"
    BARRIER = "BAR"
    BRANCH = "BRA"
    IDLE = "NOP and the like"


_TENSOR = ("IMMA", "HMMA", "QMMA", "OMMA")
_BY_NAME = {
    **dict.fromkeys(_TENSOR, Kind.TENSOR),
    "MUFU": Kind.MUFU,
    **dict.fromkeys(("I2FP", "F2IP", "I2IP", "F2FP"), Kind.CONVERT),
    **dict.fromkeys(("I2F", "F2I", "F2F", "FRND"), Kind.SLOW_CONVERT),
    **dict.fromkeys(("FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2"), Kind.FLOAT),
    **dict.fromkeys(("HFMA2", "HADD2", "HMUL2"), Kind.FLOAT),
    **dict.fromkeys(("FMNMX", "FMNMX3"), Kind.MAXIMUM),
    **dict.fromkeys(("IMAD", "IDP"), Kind.MULTIPLY),
    **{kind.value: kind for kind in (Kind.LDSM, Kind.LDS, Kind.STS, Kind.SHFL, Kind.LDGSTS)},
    **dict.fromkeys(("S2R", "S2UR", "LDC", "LDCU", "ULDC", "LD", "LDG", "LDL"), Kind.MEMORY),
    **dict.fromkeys(("ST", "STG", "STL", "ATOMG", "RED"), Kind.MEMORY),
    "BAR": Kind.BARRIER,
    "BRA": Kind.BRANCH,
    **dict.fromkeys(("NOP", "BSSY", "BSYNC", "WARPSYNC", "YIELD"), Kind.IDLE),
    **dict.fromkeys(("DEPBAR", "LDGDEPBAR", "EXIT", "CALL", "RET"), Kind.IDLE),
}


def kind_of(instruction: Instruction) -> Kind:
    if instruction.never_acts or instruction.operands[:2] == ("URZ", "URZ"):
        return Kind.IDLE  # what ptxas puts between instructions that must not meet
    if known := _BY_NAME.get(instruction.name):
        return known
    return Kind.UNIFORM if re.match(r"U[A-Z]|R2UR", instruction.name) else Kind.ALU


def is_tensor(instruction: Instruction) -> bool:
    return instruction.name in _TENSOR


def is_tile_copy(instruction: Instruction) -> bool:
    """Whether it copies 16 bytes a thread to shared memory."""
    return instruction.name == "LDGSTS" and instruction.modifiers[-1:] == ("128",)


def count(path: Iterable[Instruction]) -> dict[str, int]:
    """Number of instructions by kind; those of a product of matrices by opcode."""
    names = ((each.opcode, kind_of(each)) for each in path)
    return Counter(opcode if kind is Kind.TENSOR else kind.value for opcode, kind in names)
