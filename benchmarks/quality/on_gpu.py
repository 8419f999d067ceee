# SPDX-License-Identifier: Apache-2.0
"""The same modes through the kernels, where `sparge.attention` can express them."""

from __future__ import annotations

import torch
from torch import Tensor

import sparge
from benchmarks.quality.judge import Call, Sample
from benchmarks.quality.modes import Mode


def why_not(mode: Mode, has_grid: bool) -> str:
    """Why `sparge.attention` cannot run this mode; empty where it can."""
    if mode.centroid:
        return "one pooled term a query block is a peer's method, which the kernels do not have"
    if mode.measured or mode.gain:
        return "sparge.attention takes no budget per head and no residual yet"
    if mode.cubes and has_grid:
        return "sparge.attention takes no token order yet"
    return ""


def unusable() -> str:
    """Why this machine cannot run the kernels; empty where it can."""
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU."
    return sparge.capabilities(torch.device("cuda")).reason


def attend(call: Call, share: float, sample: Sample, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Output (heads, rows, D) float32 at the sampled tokens, and density (heads,) float64."""
    q, k, v = (x.to(device) for x in (call.layer.q, call.layer.k, call.layer.v))
    policy = sparge.SparsePolicy(topk=share)
    plan = sparge.make_plan(q, k, policy, is_causal=call.is_causal)
    out = sparge.attention(q, k, v, policy, is_causal=call.is_causal, output_dtype=torch.float32)
    assert isinstance(out, Tensor)  # a pair only when the log-sum-exp is asked for
    density = plan.kept_pairs()[0].double() / plan.valid_pairs()[0].double()
    return out[0, :, sample.tokens.to(device)].cpu(), density.cpu()
