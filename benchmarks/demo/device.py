# SPDX-License-Identifier: Apache-2.0
"""Device that the demo runs on, said in a sentence, and how long a call takes there."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import sparge
from benchmarks.timing import median_ms


def choose_device() -> tuple[torch.device, str]:
    """The GPU where our kernels run on it, else the CPU; and a sentence that says so."""
    if torch.cuda.is_available():
        capability = sparge.capabilities(torch.device("cuda"))
        if capability.usable:
            name = torch.cuda.get_device_name()
            return torch.device("cuda"), f"CUDA kernels ({capability.arch}) on {name}"
        reason = capability.reason
    else:
        reason = "torch finds no CUDA GPU"
    slow = "its times say nothing about a GPU, its errors do"
    return torch.device("cpu"), f"the reference in plain torch on the CPU ({reason}); {slow}"


def timed(call: Callable[[], Tensor], device: torch.device, repeats: int) -> tuple[Tensor, float]:
    """Returns the result and the milliseconds of a call; on a GPU the median of repeats after a
    first, with what it waits for the host: some calls are whole runs of a model."""
    if device.type == "cpu":
        start = time.perf_counter()
        return call(), 1000 * (time.perf_counter() - start)
    return call(), median_ms(call, repeats, warm_up=0, with_host=True)
