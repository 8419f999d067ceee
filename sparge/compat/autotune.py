# SPDX-License-Identifier: Apache-2.0
"""Upstream's module for tuned attention: thresholds of each head, saved and loaded with a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checks.validate import as_heads_first
from ..common.torch_attention import exact_attention
from ..errors import Unsupported
from .core import Result, refuse_mask_and_dropout, spas_sage2_attn_meansim_cuda
from .tuning import Bounds, Found, Layer, Thresholds

__all__ = [
    "SparseAttentionMeansim",
    "extract_sparse_attention_state_dict",
    "load_sparse_attention_state_dict",
]

logger = logging.getLogger(__name__)

#: Tensors (H,) that are saved of each module. simthreshd2 is upstream's and has no effect.
SAVED = ("is_sparse", "cdfthreshd", "simthreshd1", "simthreshd2", "pvthreshd")
#: Parts of a parameter's name that wrappers put there: torch.compile, DataParallel.
WRAPPERS = ("_orig_mod", "module")


class SparseAttentionMeansim(nn.Module):
    """Attention with thresholds of its own for each head, which it finds in tune mode.

    A call with `tune_mode=True`, or with the environment variable TUNE_MODE set to anything,
    returns exact attention and finds the sparsest thresholds under which the call's error stays
    below the bounds. A later tuned call makes thresholds stricter where it needs that, so that they
    hold for all calls as far as keeping more errs less. All other calls are sparse, and keep the
    first key block. PARALLEL_TUNE has no effect: all heads are tuned at once.

    Args:
        sim_rule: what bounds the error of skipped blocks: "l1", "cosine" or "rmse".
        l1: bound of the relative L1 error of each head, before the PV filter.
        pv_l1: bound of that error with the PV filter.
        cos_sim, rmse: bounds of the other rules.
        rearrange_kwargs: upstream never read it; refused unless empty.
        tune_pv: False leaves the PV filter off.
    """

    is_sparse: nn.Parameter | None
    cdfthreshd: nn.Parameter | None
    simthreshd1: nn.Parameter | None
    simthreshd2: nn.Parameter | None
    pvthreshd: nn.Parameter | None

    def __init__(
        self,
        sim_rule: str = "l1",
        l1: float = 0.07,
        pv_l1: float = 0.08,
        cos_sim: float = 0.98,
        rmse: float = 0.07,
        rearrange_kwargs: Mapping[str, Any] | None = None,
        tune_pv: bool = True,
    ) -> None:
        super().__init__()
        if rearrange_kwargs:
            raise Unsupported("rearrange_kwargs is given, which never had an effect: leave it out.")
        self.bounds = Bounds(sim_rule, l1, pv_l1, cos_sim, rmse, tune_pv)
        self.tuning_sparsity: Tensor | None = None
        self.num_data_passed = 0
        self._found: Found | None = None
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
        refuse_mask_and_dropout(mask, 0.0)
        if tune_mode or os.environ.get("TUNE_MODE"):
            q, k, v = (as_heads_first("q", x, tensor_layout) for x in (q, k, v))
            exact = self._tune(q, k, v, is_causal, scale, smooth_k)
            exact = as_heads_first("the output", exact, tensor_layout)  # its own inverse
            return (exact, 0.0) if return_sparsity else exact
        if self.cdfthreshd is None or self.simthreshd1 is None or self.pvthreshd is None:
            raise RuntimeError(
                "This attention has no thresholds yet: run it with tune_mode=True or TUNE_MODE=1, "
                "or give its model a tuned file by load_sparse_attention_state_dict."
            )
        return spas_sage2_attn_meansim_cuda(
            q,
            k,
            v,
            is_causal=is_causal,
            scale=scale,
            smooth_k=smooth_k,
            simthreshd1=self.simthreshd1.to(q.device),
            cdfthreshd=self.cdfthreshd.to(q.device),
            pvthreshd=self.pvthreshd.to(q.device),
            attention_sink=True,
            tensor_layout=tensor_layout,
            return_sparsity=return_sparsity,
        )

    def _tune(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, smooth_k: bool
    ) -> Tensor:
        exact = exact_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        if self._found is None:
            self._found = Found.nothing(q.shape[1], q.device)
        layer = Layer(q, k, v, exact, is_causal, scale, smooth_k)
        self._found = layer.search(self.bounds, self._found)
        self.num_data_passed += 1
        best = Thresholds.best(self._found, self.num_data_passed)
        self.tuning_sparsity = best.sparsity
        self.set_thresholds(
            is_sparse=best.is_sparse,
            cdfthreshd=best.cdfthreshd,
            simthreshd1=best.simthreshd1,
            simthreshd2=torch.zeros_like(best.simthreshd1),
            pvthreshd=best.pvthreshd,
        )
        logger.info(
            "tuned on %d calls: %.0f %% skipped", self.num_data_passed, 100 * best.sparsity.mean()
        )
        return exact

    def set_thresholds(self, **values: Tensor) -> None:
        """Store tensors (H,) under their names of `SAVED`."""
        with torch.inference_mode(False):
            for name, value in values.items():
                setattr(self, name, nn.Parameter(value.detach().clone(), requires_grad=False))


def extract_sparse_attention_state_dict(
    model: nn.Module, verbose: bool = False
) -> dict[str, Tensor]:
    """The thresholds of every tuned `SparseAttentionMeansim` of `model`, by parameter name."""
    saved: dict[str, Tensor] = {}
    for name, module in _tuned_attention(model):
        own = module.state_dict(prefix=f"{name}." if name else "")
        if verbose:
            logger.info("%s: saving %s", name, ", ".join(own) or "nothing, it was never tuned")
        saved.update(own)
    return saved


def load_sparse_attention_state_dict(
    model: nn.Module,
    saved_state_dict: Mapping[str, Tensor],
    multigpu: bool = False,
    verbose: bool = False,
) -> nn.Module:
    """Give the `SparseAttentionMeansim` modules of `model` their thresholds; returns the model.

    Takes what `extract_sparse_attention_state_dict` makes, here or upstream. Thresholds become
    float32, whatever the dtype of the file and of the model. They go to the device of the model's
    first parameter, or with `multigpu` stay where they are until a call needs them elsewhere.

    Raises:
        ValueError: nothing of it belongs to this model, or a module's part is incomplete.
    """
    by_name = {_plain(name): value for name, value in saved_state_dict.items()}
    modules = list(_tuned_attention(model))
    first = next(model.parameters(), None)
    loaded = 0
    for name, module in modules:
        keys = {part: _plain(f"{name}.{part}") for part in SAVED}
        values = {part: by_name[key] for part, key in keys.items() if key in by_name}
        if not values:
            continue
        _check(name, values)
        device = values["cdfthreshd"].device if multigpu or first is None else first.device
        module.set_thresholds(
            **{
                part: value.to(device, torch.bool if part == "is_sparse" else torch.float32)
                for part, value in values.items()
            }
        )
        loaded += 1
        if verbose:
            logger.info("%s: loaded thresholds of %d heads", name, len(values["cdfthreshd"]))
    if not loaded:
        raise ValueError(
            f"None of the {len(by_name)} saved tensors belongs to one of the {len(modules)} "
            f"SparseAttentionMeansim modules of this model: the first saved name is "
            f"{next(iter(by_name), None)!r}, the first module {next(iter(modules), (None,))[0]!r}."
        )
    return model


def _tuned_attention(model: nn.Module) -> list[tuple[str, SparseAttentionMeansim]]:
    named = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in named if isinstance(module, SparseAttentionMeansim)]


def _plain(name: str) -> str:
    """A parameter's name without what wrappers add, so that either side may be wrapped."""
    return ".".join(part for part in name.split(".") if part and part not in WRAPPERS)


def _check(name: str, values: Mapping[str, Tensor]) -> None:
    missing = [part for part in SAVED if part not in values]
    shapes = {part: tuple(value.shape) for part, value in values.items()}
    if missing or len(set(shapes.values())) > 1 or values["cdfthreshd"].dim() != 1:
        raise ValueError(
            f"The saved thresholds of {name!r} have shapes {shapes}; they must be "
            f"{', '.join(SAVED)}, each with one value for each head."
        )
