# SPDX-License-Identifier: Apache-2.0
"""Predictions of the model for one kernel, from its cubin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sparge.blocks import QUERY_BLOCK
from sparge.kernels.cubin import Cubin, read_sizes, read_static_shared
from sparge.kernels.loader import load_cubin
from sparge.kernels.spec import KernelSpec

from . import kinds, nvdisasm, sass, scheduler
from .chips import BY_TARGET, SCHEDULERS, Chip
from .hot_path import hot_path
from .pipes import pipe_clocks

_WARP = 32
_REGISTERS = 65_536  # of an SM
_REGISTER_STEP = 8  # a thread's are handed out by
_KEPT_BYTES = 1024  # of shared memory, by the driver for each thread block
_LIST_BYTES = 512  # of shared memory, as csrc/attend/layout.cuh expects the list of key blocks


@dataclass(frozen=True)
class Kernel:
    """An attend kernel on the GPU that its target is for.

    Raises ValueError where the model does not know its target or an instruction.
    """

    spec: KernelSpec
    cubin: Cubin

    @cached_property
    def chip(self) -> Chip:
        if self.spec.arch not in BY_TARGET:
            raise ValueError(f"the model knows no GPU of {self.spec.arch}")
        return BY_TARGET[self.spec.arch]

    @cached_property
    def path(self) -> tuple[sass.Instruction, ...]:
        return hot_path(sass.parse(nvdisasm.disassemble(self.cubin.image), self.spec.entry))

    @property
    def registers(self) -> int:
        """Number of registers of a thread."""
        assert self.cubin.report is not None, "the compiler reported no resources"
        return self.cubin.report.registers

    @property
    def spills(self) -> int:
        assert self.cubin.report is not None, "the compiler reported no resources"
        return self.cubin.report.spills

    @property
    def warps(self) -> int:
        """Number of warps of a thread block."""
        return self.cubin.info.threads // _WARP

    @property
    def warp_rows(self) -> int:
        """Query rows of a warp."""
        sizes = read_sizes(self.cubin.image, self.spec.entry)
        return QUERY_BLOCK // getattr(sizes, "parts", 1) // self.warps

    @property
    def blocks_an_sm(self) -> int:
        """Thread blocks that an SM holds: registers, shared memory or threads limit them."""
        info = self.cubin.info
        registers = -(-self.registers // _REGISTER_STEP) * _REGISTER_STEP
        static = read_static_shared(self.cubin.image, self.spec.entry)
        shared = info.shared_bytes + static + _LIST_BYTES + _KEPT_BYTES
        return min(
            _REGISTERS // (registers * info.threads),
            self.chip.shared_kib * 1024 // shared,
            self.chip.threads // info.threads,
        )

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline. One stage has two barriers a block; of more, a pass
        leaves all but two pending."""
        barriers = sum(kinds.kind_of(each) is kinds.Kind.BARRIER for each in self.path)
        pending = [int(each.operands[-1], 16) for each in self.path if each.name == "DEPBAR"]
        return 1 if barriers > 1 else max(pending, default=-1) + 2

    @property
    def passes(self) -> float:
        """Passes of its warps that a scheduler has in a block of 128 queries."""
        return QUERY_BLOCK / self.warp_rows / SCHEDULERS

    @cached_property
    def counts(self) -> dict[str, int]:
        """Instructions of one pass of a warp, by kind."""
        return kinds.count(self.path)

    @cached_property
    def pipe_clocks(self) -> dict[str, float]:
        """Clocks of a block of 128 queries x 64 keys for which each pipe is filled."""
        return {pipe: n * self.passes for pipe, n in pipe_clocks(self.path, self.chip).items()}

    @cached_property
    def clocks(self) -> float:
        """Clocks that an SM takes for a block of 128 queries x 64 keys."""
        warps = scheduler.Warps(self.blocks_an_sm, self.warps // SCHEDULERS)
        return self.passes * scheduler.clocks_a_pass(self.path, self.chip, warps)


def compiled(specs: Sequence[KernelSpec]) -> list[Kernel]:
    """Each from the user's cache or compiled now. Raises KernelBuildError."""
    return [Kernel(spec, load_cubin(spec)) for spec in specs]
