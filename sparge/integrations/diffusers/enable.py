# SPDX-License-Identifier: Apache-2.0
"""`enable`: the attention of a pipeline's transformers, sparse where that pays."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ...checks.argument import check_kind
from ...policy import SparsePolicy
from ...sampling import AUTO_QUALITY, MANUAL, NamedProfile, Settings
from ...tune import Profile
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
    quality: str = "balanced",
    topk: float = 0.5,
    policy: SparsePolicy | None = None,
    start_percent: float = 0.1,
    end_percent: float = 1.0,
    min_tokens: int = 4096,
    dense_blocks: str = "",
    exact_dense: bool = False,
    profile: Profile | str | os.PathLike[str] | None = None,
) -> Handle:
    """Makes the self-attention of a pipeline of diffusers sparse, until the handle is disabled. A
    second call on the same pipeline replaces the first.

    Args:
        pipe: a pipeline with `transformer` (and `transformer_2`) and `scheduler`, before or after
            it is moved, offloaded or compiled.
        mode: "auto quality": heads are measured, and made as sparse as `quality` allows; "auto
            budget": they are measured, and share out `topk`; "manual": all follow one policy.
        quality: "high", "balanced" or "fast".
        topk: share of the attention that sparse steps compute, in the mean of the heads ("auto
            budget") or in each ("manual").
        policy: for mode "manual", in place of `topk`. Text stays exact whatever it says.
        start_percent, end_percent: steps before and after these shares of the run are dense.
        min_tokens: attention over fewer tokens is exact.
        dense_blocks: blocks whose attention stays dense, such as "0-2, -1".
        exact_dense: dense calls of the auto modes are exact also where 8 bits are faster.
        profile: what an earlier run measured for the same mode, so that this one need not measure:
            the path of a file of `Handle.save_profile`, or `Handle.profile()`. It is read here.
            Where it is missing or does not fit the model, the runs measure, and the line says why.

    Raises:
        ValueError: an argument is none of these, or the pipeline has no transformer.
    """
    if policy is not None:
        check_kind("policy", policy, SparsePolicy, "a SparsePolicy, say SparsePolicy(topk=0.3)")
        if mode != MANUAL:
            raise ValueError(
                f'policy is given with mode "{mode}"; it is for mode "{MANUAL}". The auto modes '
                "choose themselves: give quality or topk."
            )
    settings = _PipelineSettings(
        mode=mode,
        quality=quality,
        topk=topk,
        start_percent=start_percent,
        end_percent=end_percent,
        min_tokens=min_tokens,
        dense_blocks=dense_blocks,
        exact_dense=exact_dense,
        own=policy,
    )
    named = None if profile is None else NamedProfile.of(profile)
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
    handle = Handle(pipe, transformers, settings, named)
    for model in handle.models:
        _enabled[model] = weakref.ref(handle)
    return handle
