# SPDX-License-Identifier: Apache-2.0
"""Rule that a run is never slower: a call that dense attention would serve faster stays dense."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..kernels import capabilities, pv_filter_saves
from ..policy import PV_FILTER_OFF, SparsePolicy
from ..speed import measuring_cost, worth
from ..speed.measuring_cost import Afforded
from ..speed.worth import (
    TORCH_KERNELS,
    Rates,
    estimate,
    faster_kernel,
    proportions_for,
    rates_for,
    torch_kernel,
)
from .call import Call

#: Environment variable for debugging: with the value 1 speed does not matter. A device without
#: kernels runs the slow reference, not dense, and no call is dense for being slower.
REFERENCE_VARIABLE = "SPARGE_REFERENCE"
#: Dtypes that the rates were measured with; dense attention in float32 is slower by far.
MEASURED_DTYPES = (torch.bfloat16, torch.float16)
#: Fewest tokens that the rates hold for.
FEWEST_TOKENS = 4096
#: Density that no user asks for.
NO_DENSITY = 0.01


def speed_matters() -> bool:
    return os.environ.get(REFERENCE_VARIABLE) != "1"


def gpu_name(device: torch.device) -> str:
    """Name of a GPU in rates, with its target where that is not the GPU's best, which was measured.
    Empty for other devices."""
    if device.type != "cuda":
        return ""
    name, capability = torch.cuda.get_device_name(device), capabilities(device)
    return f"{name} by {capability.arch}" if capability.note else name


def fitted(policy: SparsePolicy, device: torch.device) -> SparsePolicy:
    """Policy as a device shall run it: without the PV filter where that would only cost exactness;
    unchanged where there are no kernels."""
    arch = capabilities(device).arch
    if not policy.pv_filter or not arch or pv_filter_saves(arch):
        return policy
    return replace(policy, pvthreshd=PV_FILTER_OFF)


def slower_reason(call: Call, density: float, pv_filter: bool, pooled: float | None) -> str | None:
    """Why a call that keeps `density` of its pairs shall be dense, or None where it is faster, or
    nothing is known.

    The text holds nothing that differs between layers: the report counts it. pooled: share of the
    heads that use pooled keys; None without head settings.
    """
    rates = known_rates(call)
    if rates is None:
        return None
    sizes = _of_one_entry(call, pv_filter, pooled)
    if density < estimate(sizes, density, rates).break_even:
        return None
    break_even = estimate(sizes, density, rates, call.dense_kernel()).break_even
    if density < break_even:
        return None
    tokens = sizes.tokens
    if break_even < NO_DENSITY:
        return f"at {tokens:,} tokens sparse would be slower"
    return f"at {tokens:,} tokens sparse is faster only below {100 * break_even:.0f} % density"


def affordable(
    call: Call,
    most: int,
    conditionings: int,
    calls: int,
    least: float,
    *,
    layers: int,
    dense_steps: int,
    sparse_steps: int | None,
) -> Afforded:
    """Returns how much of a run is measured, one of its measurements in this dense call: all, with
    `most` token orders, where nothing is known.

    It is a matter of what a measurement takes beside a dense call. On GPUs without rates of their
    own that is taken to be as on an H200 (`proportions_for`); so `measuring_cost.ALWAYS` is as much
    longer there as dense calls are.

    conditionings: each is measured in each of the layers. calls: that each measurement counts for,
    as in `MeasuringRates.seconds`. least: share of pairs that no call goes below. dense_steps and
    sparse_steps: as the host counts them. Whether it pays is told on GPUs with rates of their own.
    """
    known = _rates_hold(call)
    rates = proportions_for(gpu_name(call.q.device), call.head_dim) if known else None
    if (
        rates is None or rates.measuring is None or call.shares_keys
    ):  # they measure one order anyway
        return Afforded(most, again=measuring_cost.UNLIMITED)
    sizes = _of_one_entry(call)
    kernel, measurements = call.dense_kernel(), layers * conditionings
    dense, own = rates.dense_seconds(sizes, kernel), known_rates(call)
    # Slower GPUs wait less for the host, if at all.
    measuring = rates.measuring if own is not None else replace(rates.measuring, host=None)
    afforded = measuring_cost.affordable(
        measuring,
        sizes.rows,
        most,
        dense=dense,
        steps=dense_steps,
        measurements=measurements,
        conditionings=conditionings,
        calls=calls,
        shorter=0.0 if own is None else dense - own.fastest_seconds(sizes, kernel),
    )
    if sparse_steps is None or own is None:
        return afforded
    sparsest = rates.sparse.seconds(_of_one_entry(call, pooled=1.0), least)
    pays = measuring_cost.pays(
        measuring,
        sizes.rows,
        heads=layers * call.head_count,
        measurements=measurements,
        calls=calls,
        dense=dense,
        saved=dense - sparsest,
        steps=sparse_steps,
    )
    return replace(afforded, pays=pays)


def by_faster_kernel(call: Call) -> Tensor | None:
    """Exact result of a call without a mask; None where no kernel of PyTorch's is known to be
    faster than the one that the host would have."""
    rates = known_rates(call)
    if rates is None:
        return None
    q, k, v = call.qkv
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    faster = faster_kernel(pairs, rates, call.dense_kernel())
    if faster is None or torch_kernel(q, k, v, [TORCH_KERNELS[faster]]) != faster:
        return None
    with sdpa_kernel(TORCH_KERNELS[faster]):
        return call.result(scaled_dot_product_attention(q, k, v, scale=call.scale))


def known_rates(call: Call) -> Rates | None:
    """Rates that the times of a call follow; None where nothing is known."""
    return rates_for(gpu_name(call.q.device), call.head_dim) if _rates_hold(call) else None


def _rates_hold(call: Call) -> bool:
    """Whether rates hold for calls like this, where there are any."""
    measured = call.query_tokens >= FEWEST_TOKENS and call.q.dtype in MEASURED_DTYPES
    return measured and speed_matters()


def _of_one_entry(call: Call, pv_filter: bool = False, pooled: float | None = None) -> worth.Call:
    """Facts of one entry of a batch: a host computes entries together or one by one, as memory
    allows, and the result must not depend on it."""
    return worth.Call(call.query_tokens, call.head_count, call.head_dim, pv_filter, pooled)
