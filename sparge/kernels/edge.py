# SPDX-License-Identifier: Apache-2.0
"""One edge of the build graph: compile one kernel into a folder. Run by path, not with ``-m``.

The packages above are entered without running their ``__init__``, which would import torch: two
seconds for every kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def _enter(package: str, folder: Path) -> None:
    module = ModuleType(package)
    module.__path__ = [str(folder)]
    sys.modules[package] = module


def main(csrc: str, out: str, library: str, spec_id: str) -> int:
    """library: path of the NVRTC library."""
    from sparge.errors import KernelBuildError
    from sparge.kernels.nvrtc import Nvrtc
    from sparge.kernels.source import read_sources
    from sparge.kernels.spec import spec_from_id
    from sparge.kernels.store import Store

    spec = spec_from_id(spec_id)
    sources = read_sources(spec.entry, Path(csrc))
    try:
        Store(Path(out)).get(spec, sources, Nvrtc(Path(library)))
    except KernelBuildError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    package = Path(__file__).resolve().parents[1]
    _enter("sparge", package)
    _enter("sparge.kernels", package / "kernels")
    sys.exit(main(*sys.argv[1:]))
