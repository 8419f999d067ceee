# SPDX-License-Identifier: Apache-2.0
"""Specs of what can be built: the architectures, and one frozen value per specialised kernel."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass

from .params import HOPPER_ATTEND, HOPPER_ATTEND_16, PARAMS


class Element(enum.IntEnum):
    """Operand types of the two products (QK, PV); the numbers are ``SPARGE_ELEMENT``."""

    INT8_FP16 = 0
    INT8_E4M3 = 1
    BF16 = 2
    FP16 = 3
    INT8_INT8 = 4

    @property
    def quantized(self) -> bool:
        """Whether QK is INT8; else both products have 16-bit operands as they come."""
        return self not in (Element.BF16, Element.FP16)

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in the tiles that attend reads."""
        return 1 if self in (Element.INT8_E4M3, Element.INT8_INT8) else 2


class Source(enum.IntEnum):
    """Types of q, k and v that `quantize` is built for; the numbers are ``SPARGE_SOURCE``. Code for
    any takes seven times as long to compile as code for one."""

    BF16 = 0
    FP16 = 1
    ANY = 3
    """They may differ, be float32 or lie where no 16-byte loads reach."""

    @classmethod
    def of(cls, dtype: object) -> Source:
        """Source of tensors that all have this torch.dtype, in reach of 16-byte loads."""
        return {"torch.bfloat16": cls.BF16, "torch.float16": cls.FP16}.get(str(dtype), cls.ANY)


@dataclass(frozen=True)
class Arch:
    """One compile target.

    ``path`` is what csrc branches on (``SPARGE_ARCH``): 12.1 runs the code written for 12.0.
    ``needs`` is the first NVRTC that builds our kernels for it.
    ``shared_limit`` is the most dynamic shared memory, in bytes, that a block may ask for on every
    GPU this target serves. ``suffix`` is that of targets with features of their own.
    """

    name: str
    number: int
    path: int
    needs: tuple[int, int]
    shared_limit: int
    suffix: str = ""

    @property
    def target(self) -> str:
        """Name of the target as compilers know it."""
        return f"sm_{self.number}{self.suffix}"


_KIB = 1024
#: The oldest NVRTC our sources were compiled with; 12.1 lacks __builtin_bit_cast, and E4M3 mma.sync
#: came with 12.4 too.
_OLDEST = (12, 4)
ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        # 99 KiB although 8.0 and 8.7 have 163: more was not measured.
        Arch("sm_80", 80, 80, _OLDEST, 99 * _KIB),
        Arch("sm_86", 86, 86, _OLDEST, 99 * _KIB),
        Arch("sm_89", 89, 89, _OLDEST, 99 * _KIB),
        Arch("sm_90a", 90, 90, _OLDEST, 227 * _KIB, "a"),
        Arch("sm_100a", 100, 100, (12, 8), 227 * _KIB, "a"),
        Arch("sm_103a", 103, 100, (12, 9), 227 * _KIB, "a"),
        Arch("sm_120a", 120, 120, (12, 8), 99 * _KIB, "a"),
        Arch("sm_121a", 121, 120, (12, 9), 99 * _KIB, "a"),
        # The code of consumer GPUs, its tiles and stages, for tests on a Hopper GPU.
        Arch("sm_90_as_86", 90, 86, _OLDEST, 99 * _KIB),
        Arch("sm_90_as_89", 90, 89, _OLDEST, 99 * _KIB),
        Arch("sm_90_as_120", 90, 120, _OLDEST, 99 * _KIB),
    )
}
#: What ``--arch all`` means; 103a and 121a are the same code paths for newer chips.
RELEASE_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")

#: Attend kernels with persistent blocks, which ``wgmma`` is needed for.
HOPPER_ENTRIES = (HOPPER_ATTEND, HOPPER_ATTEND_16)
ENTRIES = ("means", "quantize", "route", "attend", *HOPPER_ENTRIES, "score")
_WITHOUT_ELEMENT = ("means", "route", "score")
HEAD_DIMS = (64, 128)
HOPPER_PATH = 90
#: Consumer GPUs, where products with float32 sums run at half the rate, and those of integers at
#: the full one.
_INTEGER_PATHS = (86, 89, 120)
#: Paths that kernels of an element are built for; of an element that is not here, all. Tests alone
#: use integer values on sm_90a.
_BUILT = {
    Element.INT8_E4M3: (HOPPER_PATH,),
    Element.INT8_INT8: (*_INTEGER_PATHS, HOPPER_PATH),
}
#: B300 runs INT8 products at a fifteenth of the rate of 16-bit ones, as published; nobody has run
#: these kernels on one.
_SLOW_INT8 = ("sm_103a",)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to build. The ``-D`` list, cache key, test id and benchmark label derive from it.

    ``entry`` names ``csrc/<entry>.cu`` and the ``extern "C"`` kernel inside it. A field that an
    entry does not read is held at its default, so equal kernels are equal specs.

    Raises ValueError for an architecture or head_dim that is not built.
    """

    entry: str
    arch: str
    head_dim: int = 128
    element: Element = Element.INT8_FP16
    pv_filter: bool = False
    source: Source = Source.ANY

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(f"arch {self.arch!r} is not one of {', '.join(ARCHS)}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim {self.head_dim} is not built: pad to one of {HEAD_DIMS}")
        if self.entry in HOPPER_ENTRIES and ARCHS[self.arch].path != HOPPER_PATH:
            raise ValueError(f"{self.entry} is not built for {self.arch}: only sm_90a has wgmma")
        if not self.reads_element:
            object.__setattr__(self, "element", Element.INT8_FP16)
        if self.entry in (*_WITHOUT_ELEMENT, "quantize"):
            object.__setattr__(self, "pv_filter", False)
        if self.entry != "quantize":
            object.__setattr__(self, "source", Source.ANY)

    @property
    def reads_element(self) -> bool:
        return self.entry not in _WITHOUT_ELEMENT

    @property
    def id(self) -> str:
        parts = [self.entry, self.arch, f"d{self.head_dim}"]
        if self.reads_element:
            parts.append(self.element.name.lower())
        if self.pv_filter:
            parts.append("pv")
        if self.source is not Source.ANY:
            parts.append(self.source.name.lower())
        return "-".join(parts)

    @property
    def defines(self) -> list[str]:
        """The ``-D`` options."""
        return [
            f"-DSPARGE_ARCH={ARCHS[self.arch].path}",
            f"-DSPARGE_HEAD_DIM={self.head_dim}",
            f"-DSPARGE_ELEMENT={int(self.element)}",
            f"-DSPARGE_PV_FILTER={int(self.pv_filter)}",
            f"-DSPARGE_SOURCE={int(self.source)}",
            f"-DSPARGE_PARAMS_BYTES={ctypes.sizeof(PARAMS[self.entry])}",
        ]


def native_element(arch: str, sixteen_bit: bool, dtype: object) -> Element:
    """Operand types that ``arch`` runs fastest; ``dtype`` is that of 16-bit operands."""
    if sixteen_bit or arch in _SLOW_INT8:
        return Element.FP16 if str(dtype) == "torch.float16" else Element.BF16
    path = ARCHS[arch].path
    if path in _INTEGER_PATHS:
        return Element.INT8_INT8
    return Element.INT8_E4M3 if path == HOPPER_PATH else Element.INT8_FP16


def eight_bit_element(arch: str) -> Element:
    """Operand types of 8-bit calls of ``arch``; BF16 stands for 16-bit ones of either type."""
    return native_element(arch, sixteen_bit=False, dtype=None)


def measuring_element(arch: str) -> Element:
    """Operand types that heads are measured with where 8-bit calls of ``arch`` have 16-bit ones.

    They are quantized: 16-bit keys are not centred, and pooled keys, which they would be compared
    with, are.
    """
    own = eight_bit_element(arch)
    return own if own.quantized else Element.INT8_FP16


def attend_entry(arch: str, element: Element) -> str:
    """Chooses between the ``mma.sync`` family and the warpgroup kernels; no other place does."""
    without_wgmma = element in (Element.INT8_FP16, Element.INT8_INT8)
    if ARCHS[arch].path != HOPPER_PATH or without_wgmma:
        return "attend"
    return HOPPER_ATTEND if element is Element.INT8_E4M3 else HOPPER_ATTEND_16


def pv_filter_saves(arch: str) -> bool:
    """Whether the PV filter makes 8-bit attention faster; elsewhere it only makes it less exact:
    the warpgroup kernel computes what it leaves out all the same, for a branch would part the
    exponentials from what hides their latency."""
    return attend_entry(arch, eight_bit_element(arch)) == "attend"


def all_specs(arch: str) -> list[KernelSpec]:
    """Every kernel that exists for ``arch``, each once, entries in launch order."""
    path = ARCHS[arch].path
    elements = [e for e in Element if path in _BUILT.get(e, (path,))]
    specs = (
        KernelSpec(entry, arch, head_dim, element, pv_filter, source)
        for entry in ENTRIES
        for head_dim in HEAD_DIMS
        for element in elements
        for pv_filter in (False, True)
        for source in Source
        if entry not in HOPPER_ENTRIES or attend_entry(arch, element) == entry
        # 16-bit operands are of the type that q, k and v have.
        if element.quantized or source is Source.ANY or element.name == source.name
    )
    return list(dict.fromkeys(specs))


def native_specs(arch: str) -> list[KernelSpec]:
    """Specs of ``all_specs`` that a user's call can reach: what is worth compiling ahead."""
    reached = (eight_bit_element(arch), measuring_element(arch), Element.BF16, Element.FP16)
    return [
        spec
        for spec in all_specs(arch)
        if not spec.reads_element
        or (
            spec.element in reached
            and (spec.entry == "quantize" or spec.entry == attend_entry(arch, spec.element))
        )
    ]


def spec_from_id(spec_id: str) -> KernelSpec:
    """The spec whose ``id`` this is; raises ValueError when there is none."""
    for arch in ARCHS:
        for spec in all_specs(arch):
            if spec.id == spec_id:
                return spec
    raise ValueError(f"no kernel is called {spec_id!r}")
