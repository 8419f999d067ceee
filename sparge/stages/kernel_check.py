# SPDX-License-Identifier: Apache-2.0
"""Builds a call's kernels before the first is launched.

Targets differ in operand types and in the layout of the workspace, so a call that began on one
cannot end on the next.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..call import CheckedCall
from ..kernels import KernelSpec, warm
from ..kernels.spec import attend_path

_built: set[Hashable] = set()


def build_kernels(call: CheckedCall, arch: str) -> None:
    """Builds kernels for ``arch``, the target of the moment, or the next one whose kernels compile.

    A set is looked into where that was done before. Raises KernelBuildError as `warm` does.
    """
    q, policy, plans = call.q, call.policy, call.v is None
    kind = (arch, q.device, q.dtype, int(q.shape[3]), call.element, policy.pv_filter, plans)
    if kind not in _built:
        warm(q.device, lambda arch: _specs_of(call, arch))
        _built.add(kind)


def _specs_of(call: CheckedCall, arch: str) -> Iterable[KernelSpec]:
    """Specs of a call like this, with or without a plan of its own."""
    entries = ["means", "quantize", "route"]
    if call.v is not None:
        entries.append(attend_path(arch, call.element).entry)
    for entry in entries:
        yield KernelSpec(entry, arch, call.shape.head_dim, call.element, call.policy.pv_filter)
