# SPDX-License-Identifier: Apache-2.0
"""One edge of the build graph: compile one kernel into a folder. Run by path, not with ``-m``.

The packages above are entered without running their ``__init__``, which would import torch: two
seconds for every kernel.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType


def _enter(package: str, folder: Path) -> None:
    module = ModuleType(package)
    module.__path__ = [str(folder)]
    sys.modules[package] = module


def main(arguments: list[str]) -> int:
    from sparge.errors import KernelBuildError
    from sparge.kernels.compile import NvrtcCompiler
    from sparge.kernels.nvrtc import Nvrtc
    from sparge.kernels.source import read_sources
    from sparge.kernels.spec import spec_from_id
    from sparge.kernels.store import Store

    parser = argparse.ArgumentParser(prog="edge.py")
    parser.add_argument("spec")
    parser.add_argument("--csrc", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nvrtc", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    spec = spec_from_id(chosen.spec)
    compiler = NvrtcCompiler(Nvrtc(chosen.nvrtc))
    try:
        Store(chosen.out).get(spec, read_sources(spec.entry, chosen.csrc), compiler)
    except KernelBuildError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    library = Path(__file__).resolve().parents[1]
    _enter("sparge", library)
    _enter("sparge.kernels", library / "kernels")
    sys.exit(main(sys.argv[1:]))
