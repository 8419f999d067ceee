# SPDX-License-Identifier: Apache-2.0
"""Clocks that attend takes on GPUs nobody has measured, foretold from its SASS; needs no GPU.

python -m benchmarks.issue_model [--target sm_86 sm_89] [--head-dim 128] [--element INT8_INT8]

Needs nvdisasm (requirements-dev.txt). No GeForce was measured, and on an H100 the model was 1 to
15 % too fast: docs/experiments.md, Issue model.
"""

from __future__ import annotations

import argparse

from sparge.errors import KernelBuildError
from sparge.kernels.spec import HEAD_DIMS, Element, KernelSpec, all_specs, native_element

from . import nvdisasm
from .chips import BY_TARGET
from .kernel import compiled
from .table import table

_TARGETS = ("sm_86", "sm_89", "sm_120a")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", nargs="+", choices=BY_TARGET, default=_TARGETS)
    parser.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument(
        "--element",
        nargs="+",
        choices=Element.__members__,
        help="operand types; by default those that a target runs fastest",
    )
    options = parser.parse_args(arguments)
    specs = [
        KernelSpec("attend", target, head_dim, element)
        for target in options.target
        for element in _elements(target, options.element)
        for head_dim in options.head_dim
    ]
    for spec in specs:
        if spec not in all_specs(spec.arch):
            parser.error(f"{spec.id} is not built")
    try:
        nvdisasm.program()
        print(table(compiled(specs)))
    except (nvdisasm.NvdisasmMissingError, KernelBuildError) as error:
        raise SystemExit(str(error)) from None


def _elements(target: str, names: list[str] | None) -> list[Element]:
    if names is None:
        return [native_element(target, sixteen_bit=False, dtype=None)]
    return [Element[name] for name in names]


if __name__ == "__main__":
    main()
