# SPDX-License-Identifier: Apache-2.0
"""The model's words on several kernels, a column each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .kernel import Kernel
from .kinds import Kind

_FIRST, _OTHERS = 30, 13  # characters of a column
_HEADS: dict[str, Callable[[Kernel], object]] = {
    "target": lambda kernel: kernel.spec.arch,
    "head_dim": lambda kernel: kernel.spec.head_dim,
    "operands": lambda kernel: kernel.spec.element.name,
    "GPU": lambda kernel: f"{kernel.chip.name} {kernel.chip.cards}",
}
_RESOURCES: dict[str, Callable[[Kernel], object]] = {
    "registers": lambda kernel: kernel.registers,
    "spilled bytes": lambda kernel: kernel.spills,
    "rows a warp": lambda kernel: kernel.warp_rows,
    "warps a thread block": lambda kernel: kernel.warps,
    "thread blocks an SM": lambda kernel: kernel.blocks_an_sm,
    "stages": lambda kernel: kernel.stages,
}


def table(kernels: Sequence[Kernel]) -> str:
    lines = [_line(name, map(value, kernels)) for name, value in _HEADS.items()]
    lines += ["", *(_line(name, map(value, kernels)) for name, value in _RESOURCES.items())]
    lines += ["", "instructions of a warp, 64 keys"]
    for kind in _rows(kernels):
        lines.append(_line(f"  {kind}", (kernel.counts.get(kind, 0) for kernel in kernels)))
    lines.append(_line("  all", (len(kernel.path) for kernel in kernels)))
    lines += ["", "clocks of an SM, 128 queries x 64 keys"]
    for pipe in kernels[0].pipe_clocks:
        lines.append(_line(f"  {pipe}", (round(kernel.pipe_clocks[pipe]) for kernel in kernels)))
    lines.append(_line("  predicted", (round(kernel.clocks) for kernel in kernels)))
    return "\n".join(lines)


def _rows(kernels: Sequence[Kernel]) -> list[str]:
    """Products by opcode, then the other kinds that any kernel has."""
    present = {name for kernel in kernels for name in kernel.counts}
    kinds = [kind.value for kind in Kind]
    return [*sorted(present - set(kinds)), *(kind for kind in kinds if kind in present)]


def _line(name: str, values: Iterable[object]) -> str:
    return f"{name:{_FIRST}}" + "".join(f"{value!s:>{_OTHERS}}" for value in values)
