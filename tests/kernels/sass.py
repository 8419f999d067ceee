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
#: An instruction that may act, and its operands.
_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([\w.]+)\s*([^;]*);")
_TARGET = re.compile(r"`\(\.(L_\w+)\)")


def main_loop(text: str, kernel: str) -> list[str]:
    """Opcodes of the loop with most products, of those the shortest: code that stands far from the
    loop and returns into it looks like one too. Raises ValueError where the disassembly has no loop
    of this kernel."""
    code: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    inside = False
    for line in text.splitlines():
        if section := _SECTION.match(line):
            inside = section[1] == kernel
        elif inside and (label := _LABEL.match(line)):
            labels[label[1]] = len(code)
        elif inside and (found := _LINE.match(line)):
            if target := _TARGET.search(found[2]):
                jumps.append((len(code), target[1]))
            code.append(found[1])
    loops = [code[labels[to] : at + 1] for at, to in jumps if labels[to] <= at]
    if not loops:
        raise ValueError(f"the disassembly has no loop of kernel {kernel}")
    return max(loops, key=lambda loop: (sum(map(is_product, loop)), -len(loop)))


def is_product(opcode: str) -> bool:
    return opcode.split(".", 1)[0] in PRODUCTS


def counts_of(spec: KernelSpec) -> dict[str, int]:
    """Instructions of the main loop: products, `KINDS`, and all."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(load_cubin(spec).image)
        loop = main_loop(_nvdisasm("-c", str(cubin)), spec.entry)
    kinds = (x if is_product(x) else _KIND_OF.get(x.split(".", 1)[0]) for x in loop)
    return dict(sorted(Counter(kind for kind in kinds if kind).items())) | {"all": len(loop)}


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
