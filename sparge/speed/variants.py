# SPDX-License-Identifier: Apache-2.0
"""Variants of 8-bit attention on a GPU: those that compute right, and the fastest of them.

Compute capability does not tell cards whose products with float32 sums run at half the rate
(GeForce) from whole ones (RTX PRO, A6000, L40S), so it is measured, in about 0.1 s a head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import torch

from ..attention import attention
from ..kernels.chosen import choose, trying
from ..kernels.device import capabilities
from ..kernels.spec import HEAD_DIMS, Element, variants
from ..kernels.warmup import warm_variants
from ..policy import EIGHT_BIT_DENSE
from .self_test import MOST, error_beside_emulation
from .table import Chosen, Size
from .timing import Work, random_qkv, time_once

logger = logging.getLogger("sparge")

#: Share by which another variant has to be faster than the target's own.
MARGIN = 0.03
#: A call fills each multiprocessor eight times over, so that its ragged end does not count.
TOKENS, MULTIPROCESSORS_A_HEAD = 6144, 4
ROUNDS = 5


def choose_fastest(device: torch.device, candidates: Sequence[Element]) -> Chosen:
    """Chooses among the variants of the device's target, its own first. Waits for the GPU.

    Raises sparge.Unsupported and KernelBuildError where the kernels cannot run, and
    torch.OutOfMemoryError.
    """
    if len(candidates) == 1:
        return Chosen()
    failed = warm_variants(device)
    for element, error in failed.items():
        logger.warning("[Sparge] %s does not compile and is not used: %s", element.name, error)
    elements, refused = {}, {}
    with torch.inference_mode(), torch.cuda.device(device):
        for head_dim in HEAD_DIMS:
            right = [e for e in candidates if e not in failed and _is_right(e, head_dim, device)]
            refused[head_dim] = tuple(e for e in candidates if e not in right)
            seconds = _times(right, head_dim, device)
            elements[head_dim] = fastest(seconds, candidates[0])
            logger.info("[Sparge] head_dim %d: %s", head_dim, _told(seconds, elements[head_dim]))
    return Chosen(elements, refused)


def adopt(chosen: Chosen, device: torch.device) -> None:
    """Lets 8-bit calls of the device use what was chosen, unless such a call came before."""
    if not chosen.elements:
        return
    arch = capabilities(device).arch
    if any(element is not variants(arch)[0] for element in chosen.elements.values()):
        warm_variants(device)  # a kept table may outlive the kernels that it names
    used = choose(device.index or 0, arch, chosen.elements)
    for head_dim, element in chosen.elements.items():
        if used[head_dim] is not element:
            logger.info(
                "[Sparge] calls with head_dim %d use values as %s already; %s, which is faster "
                "here, comes with the next start",
                head_dim,
                used[head_dim].name,
                element.name,
            )


def fastest(seconds: Mapping[Element, Sequence[float]], own: Element) -> Element:
    """Element with the least median of its seconds; the target's own unless another undercuts its
    least ones by MARGIN, so noise speaks for it. Where nothing computes right, it stays."""
    if not seconds:
        return own
    best = min(seconds, key=lambda element: median(seconds[element]))
    if own in seconds and median(seconds[best]) > (1 - MARGIN) * min(seconds[own]):
        return own
    return best


def _times(
    elements: Sequence[Element], head_dim: int, device: torch.device
) -> dict[Element, list[float]]:
    """Seconds of dense calls, `in_turns`."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    heads = max(1, multiprocessors // MULTIPROCESSORS_A_HEAD)
    q, k, v = random_qkv(Size(TOKENS, heads, head_dim), device)

    def call(element: Element) -> None:
        with trying({head_dim: element}):
            attention(q, k, v, EIGHT_BIT_DENSE)

    return in_turns({element: partial(call, element) for element in elements})


def in_turns(works: Mapping[Element, Work]) -> dict[Element, list[float]]:
    """Seconds of the GPU of each work in each of ROUNDS rounds, after one that is not timed."""
    for work in works.values():
        work()
    torch.cuda.synchronize()
    seconds: dict[Element, list[float]] = {element: [] for element in works}
    for _ in range(ROUNDS):
        for element, work in works.items():
            seconds[element].append(time_once(work)[0])
    return seconds


def _is_right(element: Element, head_dim: int, device: torch.device) -> bool:
    error = error_beside_emulation(element, head_dim, device)
    if error <= MOST:
        return True
    logger.warning(
        "[Sparge] %s at head_dim %d computes something else on this GPU than it should (relative "
        "error %.2g, at most %.0e is right) and is not used. Please report it.",
        element.name,
        head_dim,
        error,
        MOST,
    )
    return False


def _told(seconds: Mapping[Element, Sequence[float]], chosen: Element) -> str:
    times = (f"{e.name} {1000 * median(s):.2f} ms" for e, s in seconds.items())
    return f"values as {chosen.name} ({', '.join(times)})"
