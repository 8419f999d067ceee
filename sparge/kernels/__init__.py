# SPDX-License-Identifier: Apache-2.0
"""Kernels from description to launch: spec, compile, cache, load, launch.

Importing this touches neither the driver nor NVRTC.
"""

from __future__ import annotations

from .device import Capability, capabilities
from .driver import DriverError, Kernel
from .loader import get_kernel, load_all, warm
from .spec import Element, KernelSpec, native_element, pv_filter_saves

__all__ = [
    "Capability",
    "DriverError",
    "Element",
    "Kernel",
    "KernelSpec",
    "capabilities",
    "get_kernel",
    "load_all",
    "native_element",
    "pv_filter_saves",
    "warm",
]
