# SPDX-License-Identifier: Apache-2.0
"""`enable`: the attention of a pipeline's transformers, sparse where that pays."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ...checks.argument import check_kind
from ...policy import SparsePolicy
from ...session import AUTO_BUDGET, AUTO_QUALITY, MANUAL, QUALITIES, Settings
from .handle import Handle

#: Attributes of pipelines that hold transformers; Wan 2.2 has two, for early and for late steps.
_TRANSFORMERS = ("transformer", "transformer_2")

#: Handle of each model, which its hooks keep alive: held here, it would hold the model for ever.
_enabled: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Handle]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class _PipelineSettings(Settings):
    """Settings with a policy of the caller's own, which manual mode may have."""

    own: SparsePolicy | None = None

    def policy(self) -> SparsePolicy:
        return super().policy() if self.own is None else self.own


def enable(
    pipe: Any,
    mode: str = AUTO_QUALITY,
    *,
    quality: str | None = None,
    topk: float | None = None,
    policy: SparsePolicy | None = None,
    start_percent: float = 0.1,
    end_percent: float = 1.0,
    min_tokens: int = 4096,
    dense_blocks: str = "",
    exact_dense: bool = False,
) -> Handle:
    """Makes the self-attention of a pipeline of diffusers sparse, until the handle is disabled. A
    second call on the same pipeline replaces the first.

    Args:
        pipe: a pipeline with `transformer` (and `transformer_2`) and `scheduler`, before or after
            it is moved, offloaded or compiled.
        mode: "auto quality": heads are measured, and made as sparse as `quality` allows; "auto
            budget": they are measured, and share out `topk`; "manual": all follow one policy.
        quality: "high", "balanced" (without one) or "fast"; for mode "auto quality".
        topk: share of the attention that sparse steps compute, in the mean of the heads ("auto
            budget") or in each ("manual"); 0.5 without one.
        policy: for mode "manual", in place of `topk`. Text stays exact whatever it says.
        start_percent, end_percent: steps before and after these shares of the run are dense.
        min_tokens: attention over fewer tokens is exact.
        dense_blocks: blocks whose attention stays dense, such as "0-2, -1".
        exact_dense: dense calls of the auto modes are exact also where 8 bits are faster.

    Raises:
        ValueError: an argument is none of these or not one of the mode, or the pipeline has no
            transformer.
    """
    goal = _goal(mode, quality, topk, policy)
    settings = _PipelineSettings(
        mode=mode,
        **goal,
        start_percent=start_percent,
        end_percent=end_percent,
        min_tokens=min_tokens,
        dense_blocks=dense_blocks,
        exact_dense=exact_dense,
        own=policy,
    )
    found = [getattr(pipe, name, None) for name in _TRANSFORMERS]
    transformers = [each for each in found if isinstance(each, torch.nn.Module)]
    if not transformers or getattr(pipe, "scheduler", None) is None:
        raise ValueError(
            f"{type(pipe).__name__} has no transformer and scheduler; enable takes a pipeline of "
            "diffusers whose model is a transformer. For other models use sparge.sdpa()."
        )
    for each in transformers:
        earlier = _enabled.pop(getattr(each, "_orig_mod", each), None)
        if earlier is not None and (handle := earlier()) is not None:
            handle.disable()
    handle = Handle(pipe, transformers, settings)
    for model in handle.models:
        _enabled[model] = weakref.ref(handle)
    return handle


def _goal(
    mode: str, quality: str | None, topk: float | None, policy: SparsePolicy | None
) -> dict[str, Any]:
    """Arguments given of how sparse to be. Raises ValueError for one that the mode does not use."""
    if mode in QUALITIES:
        raise ValueError(f'mode is "{mode}"; a quality goes by its name: quality="{mode}".')
    if policy is not None:
        check_kind("policy", policy, SparsePolicy, "a SparsePolicy, say SparsePolicy(topk=0.3)")
        if mode != MANUAL:
            raise ValueError(
                f'policy is given with mode "{mode}"; it is for mode "{MANUAL}". The auto modes '
                "choose themselves: give quality or topk."
            )
        if topk is not None:
            raise ValueError("topk is given beside policy, which has one of its own; give one.")
    if topk is not None and mode == AUTO_QUALITY:
        raise ValueError(
            f'topk is given with mode "{mode}", which takes quality; give mode "{AUTO_BUDGET}" '
            "for a topk."
        )
    if quality is not None and mode in (AUTO_BUDGET, MANUAL):
        raise ValueError(
            f'quality is given with mode "{mode}", which takes topk; leave mode out for a quality.'
        )
    given = {"quality": quality, "topk": topk}
    return {name: value for name, value in given.items() if value is not None}
