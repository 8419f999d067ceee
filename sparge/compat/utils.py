# SPDX-License-Identifier: Apache-2.0
"""Upstream's helpers: block maps by its rules, thresholds by head, and distances of two outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.metrics import cosine, rel_l1
from ..errors import Unsupported
from ..policy import PV_FILTER_OFF, PerHead
from .block_map import choose_blocks, int8_blocks
from .core import get_cuda_arch_versions, meansim_policy

__all__ = [
    "get_block_map_meansim",
    "get_block_map_meansim_fuse_quant",
    "get_cuda_arch_versions",
    "hyperparameter_check",
    "precision_metric",
]


def precision_metric(
    quant_o: Tensor, fa2_o: Tensor, verbose: bool = True, round_num: int = 4
) -> dict[str, float]:
    """Cosine, relative L1 and RMS error of `quant_o` against `fa2_o`, rounded, and printed."""
    far = (quant_o.double() - fa2_o.to(quant_o.device).double()).square().mean().sqrt()
    errors = {
        "Cossim": cosine(quant_o, fa2_o),
        "L1": rel_l1(quant_o, fa2_o),
        "RMSE": float(far),
    }
    errors = {name: round(value, round_num) for name, value in errors.items()}
    if verbose:
        print(", ".join(f"{name}: {value:.6f}" for name, value in errors.items()))
    return errors


def hyperparameter_check(
    hyper: float | Tensor,
    H: int,  # noqa: N803
    device: torch.device | str,
) -> Tensor:
    """Returns `hyper` as a tensor (H,) on `device`: one number for all heads, or what it is by
    head."""
    if isinstance(hyper, Tensor) and hyper.shape == (H,):
        return hyper.to(device)
    if isinstance(hyper, (int, float)) or (isinstance(hyper, Tensor) and hyper.dim() == 0):
        return torch.full((H,), float(hyper), device=device)
    given = tuple(hyper.shape) if isinstance(hyper, Tensor) else f"a {type(hyper).__name__}"
    raise ValueError(
        f"The hyperparameter is {given}; give one number, or a tensor with one for each of the {H} "
        "heads."
    )


def get_block_map_meansim(
    q: Tensor,
    k: Tensor,
    is_causal: bool = False,
    BLKQ: int = 128,  # noqa: N803
    BLKK: int = 64,  # noqa: N803
    simthreshd1: PerHead = 0.1,
    cdfthreshd: PerHead | None = 0.9,
    topk: PerHead | None = None,
    is_sparse: bool = True,
    return_lut: bool = False,
    attention_sink: bool = False,
) -> Tensor:
    """Bool map (B, H, ceil(Nq / BLKQ), ceil(Nk / BLKK)) of the blocks that the thresholds keep.

    q (B, H, Nq, D) and k (B, Hkv, Nk, D), blocks of any size; `block_sparse_sage2_attn_cuda` takes
    maps of 128 x 64 tokens as they are. k is pooled as it comes: subtract its mean before, as
    attention does. Lookup tables, which upstream's kernels alone read, are refused.
    """
    if return_lut:
        raise Unsupported(
            "return_lut is True; there are no lookup tables here: take the map, and give it to "
            "block_sparse_sage2_attn_cuda."
        )
    if not is_sparse:
        raise Unsupported("is_sparse is False, which never had an effect: pass True, or topk=1.")
    policy = meansim_policy(topk, cdfthreshd, simthreshd1, PV_FILTER_OFF, attention_sink, False)
    return choose_blocks(q, k, policy, BLKQ, BLKK, is_causal)


def get_block_map_meansim_fuse_quant(
    q: Tensor,
    k: Tensor,
    km: Tensor | None = None,
    is_causal: bool = False,
    BLKQ: int = 128,  # noqa: N803
    BLKK: int = 64,  # noqa: N803
    simthreshd1: PerHead = 0.1,
    cdfthreshd: PerHead | None = 0.9,
    topk: PerHead | None = None,
    is_sparse: bool = True,
    return_lut: bool = False,
    attention_sink: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Map of q and k - km, and both in INT8: (map, q levels, q scale, k levels, k scale).

    Levels have the shape of q and k, scales one float32 for each block (B, H, blocks).
    """
    centred = k if km is None else k - km
    block_map = get_block_map_meansim(
        q, centred, is_causal, BLKQ, BLKK, simthreshd1, cdfthreshd, topk, is_sparse, return_lut,
        attention_sink,
    )  # fmt: skip
    return (block_map, *int8_blocks(q, BLKQ), *int8_blocks(centred, BLKK))
