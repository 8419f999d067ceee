# SPDX-License-Identifier: Apache-2.0
"""Counts of what the compiler makes of the main loop of attend on RTX GPUs, by its SASS.

`python -m tests.kernels.sass` counts anew and writes `FIGURES`, of the NVRTC and the nvdisasm that
it finds.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparge.kernels import device
from sparge.kernels.loader import load_cubin
from sparge.kernels.spec import HEAD_DIMS, Element, KernelSpec

FIGURES = Path(__file__).with_name("hot_loop.json")
SPECS = [
    KernelSpec("attend", arch, head_dim, element)
    for arch in ("sm_89", "sm_120a")  # sm_86 has the code of sm_89
    for head_dim in HEAD_DIMS
    for element in (Element.INT8_INT8, Element.BF16)
]
PRODUCTS = ("IMMA", "HMMA", "QMMA", "OMMA")
#: Kinds that are counted beside the products, each of which counts by its types.
KINDS = {
    "exponentials": ("MUFU",),
    "conversions": ("I2FP", "F2IP", "I2IP", "F2FP"),
    "slow conversions": ("I2F", "F2I", "F2F", "FRND"),
    "shuffles": ("SHFL",),
    "fragments": ("LDSM",),
    "copies": ("LDGSTS",),
}
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
_SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
_LABEL = re.compile(r"\s*\.(L_\w+):")
_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([\w.]+)\s*([^;]*);")
_TARGET = re.compile(r"`\(\.(L_\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """One instruction, such as ``@!P0 LDS.64 R2, [R4+0x10]``: the guard is ``!P0``."""

    guard: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def worth(self) -> tuple[int, int, int]:
        """Products, copies of tiles (16 bytes a thread), and instructions as a negative number."""
        copies = self.name == "LDGSTS" and self.opcode.endswith(".128")
        return self.name in PRODUCTS, copies, -1


class Listing:
    """Instructions of one kernel. Raises ValueError where the disassembly has no such kernel."""

    def __init__(self, text: str, kernel: str) -> None:
        self.code: list[Instruction] = []
        labels: dict[str, int] = {}
        inside = False
        for line in text.splitlines():
            if section := _SECTION.match(line):
                inside = section[1] == kernel
            elif inside and (label := _LABEL.match(line)):
                labels[label[1]] = len(self.code)
            elif inside and (found := _LINE.match(line)):
                self.code.append(Instruction(found[1] or "", found[2], found[3].strip()))
        if not self.code:
            raise ValueError(f"the disassembly has no kernel {kernel}")
        #: By the number of a branch: the number of the instruction that it leads to.
        self.targets = {
            number: labels[found[1]]
            for number, each in enumerate(self.code)
            if each.name == "BRA" and (found := _TARGET.search(each.operands))
        }

    def main_loop(self) -> tuple[int, int]:
        """First and last number of the loop with most products, of those the shortest: code that
        stands far from the loop and returns into it looks like one too."""

        def rank(loop: tuple[int, int]) -> tuple[int, int]:
            body = self.code[loop[0] : loop[1] + 1]
            return sum(each.name in PRODUCTS for each in body), -len(body)

        return max(((to, at) for at, to in self.targets.items() if to <= at), key=rank)

    def hot_path(self) -> list[Instruction]:
        """Instructions that nearly every pass of a warp through the main loop takes.

        It multiplies and copies the next tile; of all such paths it is the shortest. So it has no
        masks, no pooled keys and no raised maximum.
        """
        first, last = self.main_loop()
        best = {last: (self.code[last].worth, [last])}
        for number in range(last - 1, first - 1, -1):
            if ways := [best[after] for after in self._followers(number) if after in best]:
                worth, path = max(ways)
                own = self.code[number].worth
                total = (own[0] + worth[0], own[1] + worth[1], own[2] + worth[2])
                best[number] = (total, [number, *path])
        return [self.code[number] for number in best[first][1]]

    def _followers(self, number: int) -> list[int]:
        """Forward alone: a loop within the loop is passed through once. A call is of a rare
        case."""
        each = self.code[number]
        if each.name in ("CALL", "RET", "EXIT") and not each.guard:
            return []
        # BRA.U, BRA.DIV and `BRA P0` have their condition among the operands.
        always = each.name == "BRA" and not each.guard and "," not in each.operands
        target = self.targets.get(number, -1)
        return [*([] if always else [number + 1]), *([target] if target > number else [])]


def counts_of(spec: KernelSpec) -> dict[str, int]:
    """Instructions of one pass of a warp through the main loop: products, `KINDS`, and all."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(load_cubin(spec).image)
        path = Listing(_nvdisasm("-c", str(cubin)), spec.entry).hot_path()
    acting = [each for each in path if each.guard != "!PT"]
    kinds = (x.opcode if x.name in PRODUCTS else _KIND_OF.get(x.name) for x in acting)
    return dict(sorted(Counter(kind for kind in kinds if kind).items())) | {"all": len(path)}


def versions() -> dict[str, str]:
    """Of what the figures depend on. Raises FileNotFoundError without nvdisasm."""
    release = re.search(r"release (\d+\.\d+)", _nvdisasm("--version"))
    nvrtc = device.compiler().version
    return {"nvrtc": "{}.{}".format(*nvrtc), "nvdisasm": release[1] if release else "unknown"}


def _nvdisasm(*arguments: str) -> str:
    """Output of the one on PATH, else of that of the installed wheel."""
    program = shutil.which("nvdisasm")
    package = importlib.util.find_spec("nvidia")
    for folder in (package and package.submodule_search_locations) or ():
        wheels = sorted(Path(folder).glob("*/bin/nvdisasm*"))
        program = program or (str(wheels[0]) if wheels else None)
    if program is None:
        raise FileNotFoundError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    rows: dict[str, Any] = {"versions": versions()} | {x.id: counts_of(x) for x in SPECS}
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
