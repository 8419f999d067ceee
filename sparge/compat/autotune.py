# SPDX-License-Identifier: Apache-2.0
"""Upstream's module for tuned attention: thresholds of each head, loaded with a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Unsupported
from .core import Result, refuse_mask, spas_sage2_attn_meansim_cuda

__all__ = [
    "SparseAttentionMeansim",
    "extract_sparse_attention_state_dict",
    "load_sparse_attention_state_dict",
]

#: Tensors (H,) that are saved of each module. simthreshd2 has no effect.
SAVED = ("is_sparse", "cdfthreshd", "simthreshd1", "simthreshd2", "pvthreshd")
#: Parts of a parameter's name that wrappers put there: torch.compile, DataParallel.
WRAPPERS = ("_orig_mod", "module")


class SparseAttentionMeansim(nn.Module):
    """Attention with thresholds of its own for each head, which a file of upstream's tuning gives.

    Calls keep the first key block. Tuning is refused: `sparge.session.Session` measures heads while
    a model samples, and needs no file. The bounds of upstream's constructor are for tuning alone.
    """

    def __init__(self, *bounds: Any, **more_bounds: Any) -> None:
        super().__init__()
        for name in SAVED:
            self.register_parameter(name, None)

    @torch.no_grad()
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        tensor_layout: str = "HND",
        tune_mode: bool = False,
        smooth_k: bool = True,
        return_sparsity: bool = False,
    ) -> Result:
        """q, k, v and the result as `spas_sage2_attn_meansim_cuda` has them."""
        refuse_mask(mask)
        names = ("simthreshd1", "cdfthreshd", "pvthreshd")
        thresholds = {name: getattr(self, name) for name in names}
        if tune_mode or os.environ.get("TUNE_MODE") or None in thresholds.values():
            raise Unsupported(
                "this attention is not tuned here: give its model a tuned file of SpargeAttn's by "
                "load_sparse_attention_state_dict, or call spas_sage2_attn_meansim_topk_cuda."
            )
        return spas_sage2_attn_meansim_cuda(
            q,
            k,
            v,
            is_causal=is_causal,
            scale=scale,
            smooth_k=smooth_k,
            attention_sink=True,
            tensor_layout=tensor_layout,
            return_sparsity=return_sparsity,
            **{name: value.to(q.device) for name, value in thresholds.items()},
        )


def extract_sparse_attention_state_dict(
    model: nn.Module, verbose: bool = False
) -> dict[str, Tensor]:
    """The thresholds of every `SparseAttentionMeansim` of `model`, by parameter name."""
    saved: dict[str, Tensor] = {}
    for name, module in _tuned_attention(model):
        saved.update(module.state_dict(prefix=f"{name}." if name else ""))
    return saved


def load_sparse_attention_state_dict(
    model: nn.Module,
    saved_state_dict: Mapping[str, Tensor],
    multigpu: bool = False,
    verbose: bool = False,
) -> nn.Module:
    """Gives the `SparseAttentionMeansim` modules of `model` their thresholds; returns the model.

    Thresholds become float32, and go to the device of the model's first parameter, or with
    `multigpu` stay where they are until a call needs them elsewhere.

    Raises:
        ValueError: nothing of it belongs to this model, or a module's part is incomplete.
    """
    by_name = {_plain(name): value for name, value in saved_state_dict.items()}
    first, loaded = next(model.parameters(), None), 0
    for name, module in _tuned_attention(model):
        keys = {part: _plain(f"{name}.{part}") for part in SAVED}
        values = {part: by_name[key] for part, key in keys.items() if key in by_name}
        if not values:
            continue
        if len(values) < len(SAVED) or len({value.shape for value in values.values()}) > 1:
            raise ValueError(
                f"The saved thresholds of {name!r} must be {', '.join(SAVED)}, each with one value "
                "for each head."
            )
        for part, value in values.items():
            device = value.device if multigpu or first is None else first.device
            kept = value.to(device, torch.bool if part == "is_sparse" else torch.float32, copy=True)
            setattr(module, part, nn.Parameter(kept, requires_grad=False))
        loaded += 1
    if not loaded:
        raise ValueError("None of the saved tensors belongs to a SparseAttentionMeansim here.")
    return model


def _tuned_attention(model: nn.Module) -> list[tuple[str, SparseAttentionMeansim]]:
    named = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in named if isinstance(module, SparseAttentionMeansim)]


def _plain(name: str) -> str:
    """A parameter's name without what wrappers add, so that either side may be wrapped."""
    return ".".join(part for part in name.split(".") if part and part not in WRAPPERS)
