# SPDX-License-Identifier: Apache-2.0
"""A profile of random settings, and how tests look at one."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import torch

from sparge import OrderKind, TokenGrid
from sparge.tune import Fingerprint, Profile, SettingsTable, Table

KEY = "sparge_profile"
GRID = TokenGrid(4, 8, 10, suffix=20)


def settings(generator: torch.Generator) -> SettingsTable:
    shape = (3, 4)
    pools = torch.rand(shape, generator=generator) > 0.5
    return SettingsTable(
        torch.rand(shape, generator=generator),
        pools * torch.rand(shape, generator=generator),
        0.5 + torch.rand(shape, generator=generator),
        torch.randint(0, len(OrderKind), shape, generator=generator, dtype=torch.int32),
        torch.rand(shape, generator=generator),
        2 * torch.rand(shape, generator=generator),
        torch.tensor([True, False, True]),
        floor=2,
    )


def same_bits(found: SettingsTable, expected: SettingsTable) -> bool:
    """Tells nothing of NaN, which no profile has."""
    for part in fields(SettingsTable):
        value, before = (getattr(x, part.name) for x in (found, expected))
        if not isinstance(value, torch.Tensor):
            same = value == before
        else:
            same = torch.equal(value, before) and value.dtype == before.dtype
        if not same:
            return False
    return True


def metadata_of(path: Path) -> str:
    """The header of a profile's file."""
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"][KEY]


def drawn(generator: torch.Generator) -> Profile:
    """Profile of two conditionings, one with a grid."""
    model = Fingerprint.of("WanModel", {"norm.q": torch.randn(200, generator=generator)})
    tables = {
        Table("cond", 18444): settings(generator),
        Table("uncond", GRID.tokens, GRID): settings(generator),
    }
    notes = {"sampler": "euler, 20 Schritte, schön"}
    return Profile(model, tables, "budget", 0.2, "2026-11-21T19:00:00Z", notes)
