# SPDX-License-Identifier: Apache-2.0
"""Path through the main loop that nearly every pass of a warp takes.

It multiplies and it copies the next tile; of all such paths it has the fewest instructions. So it
has no masks, no pooled keys, no raised maximum, and it is not that of thread 0, which fetches the
scales of a tile too.
"""

from __future__ import annotations

from dataclasses import dataclass

from .kinds import is_tensor, is_tile_copy
from .sass import Instruction, Listing

#: Products, copies of tiles, and instructions as a negative number: the greatest is the hot path.
_Worth = tuple[int, int, int]


@dataclass(frozen=True)
class Loop:
    first: int
    last: int
    """Number of the branch that leads back to the first."""


def main_loop(listing: Listing) -> Loop:
    """The loop with most products of matrices, of those the shortest: code that stands far from the
    loop and returns into it looks like one too. Raises ValueError where there is none."""
    loops: dict[Loop, int] = {}
    for last, instruction in enumerate(listing.instructions):
        first = listing.labels.get(instruction.target or "", last + 1)
        if instruction.is_branch and first <= last:
            body = listing.instructions[first : last + 1]
            loops[Loop(first, last)] = sum(map(is_tensor, body))
    if not any(loops.values()):
        raise ValueError("the kernel has no loop with a product of matrices")
    return max(loops, key=lambda loop: (loops[loop], loop.first - loop.last))


def hot_path(listing: Listing) -> tuple[Instruction, ...]:
    """Instructions of one pass through the main loop, in their order."""
    loop = main_loop(listing)
    best: dict[int, _Worth] = {}
    after: dict[int, int] = {}
    for number in range(loop.last, loop.first - 1, -1):
        own = _worth(listing.instructions[number])
        ways = [way for way in _followers(listing, number) if way in best]
        if number == loop.last:
            best[number] = own
        elif ways:
            after[number] = max(ways, key=best.__getitem__)
            best[number] = _add(own, best[after[number]])
    path = [loop.first]
    while path[-1] != loop.last:
        path.append(after[path[-1]])
    return tuple(listing.instructions[number] for number in path)


def _followers(listing: Listing, number: int) -> list[int]:
    """Forward alone: a loop within the loop is passed through once. A call is of a rare case."""
    instruction = listing.instructions[number]
    if instruction.name in ("CALL", "RET", "EXIT") and not instruction.guard:
        return []
    followers = [] if instruction.always_branches else [number + 1]
    if instruction.is_branch:
        target = listing.labels.get(instruction.target or "", -1)
        followers += [target] if target > number else []
    return followers


def _worth(instruction: Instruction) -> _Worth:
    return int(is_tensor(instruction)), int(is_tile_copy(instruction)), -1


def _add(one: _Worth, other: _Worth) -> _Worth:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]
