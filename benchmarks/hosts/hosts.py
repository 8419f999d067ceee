# SPDX-License-Identifier: Apache-2.0
"""Hosts: ways in which our attention gets into a model, and what each counts.

The context of a host gives a function that tells what was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sparge
from sparge.compat import spas_sage2_attn_meansim_topk_cuda

from .case import LEAST, Subject
from .rounded import torchs_function_is


@dataclass(frozen=True)
class Counts:
    """Calls that a host counted, by what became of them."""

    sparse: int = 0
    dense: int = 0
    left: Mapping[str, int] = field(default_factory=dict)
    density: float = 1.0
    said: str = ""
    """Why nothing was sparse, where no call was seen."""

    @classmethod
    def of(cls, stats: sparge.CallStats) -> Counts:
        return cls(stats.sparse_calls, 0, dict(stats.reasons), stats.density, str(stats))


Counted = Callable[[], Counts]
Opened = Callable[[Subject, float], AbstractContextManager[Counted]]


@dataclass(frozen=True)
class Host:
    """Way in which our attention gets into a model."""

    name: str
    opened: Opened
    """Context around a run, from the subject and the share that is kept."""
    least: int = LEAST
    """Queries and keys of the shortest call that it serves."""
    may_refuse: bool = False
    """Whether it may raise. Others leave to the model what they do not serve."""


def policy(topk: float) -> sparge.SparsePolicy:
    return sparge.SparsePolicy(topk=topk, attention_sink=True)


@contextmanager
def function_mode(subject: Subject, topk: float) -> Iterator[Counted]:
    with sparge.sdpa(policy(topk), LEAST) as stats:
        yield partial(Counts.of, stats)


@contextmanager
def function_replaced(subject: Subject, topk: float) -> Iterator[Counted]:
    stats, kept = sparge.CallStats(), policy(topk)
    stats.prepare()

    def call(*args: Any, **kwargs: Any) -> Tensor:
        return sparge.sdpa_call(*args, policy=kept, min_tokens=LEAST, stats=stats, **kwargs)

    with torchs_function_is(call):
        yield partial(Counts.of, stats)


@contextmanager
def upstream_replaced(subject: Subject, topk: float) -> Iterator[Counted]:
    """Upstream's function in place of PyTorch's, as scripts for SpargeAttn have it."""
    sparsities: list[float] = []
    attend: Any = partial(spas_sage2_attn_meansim_topk_cuda, topk=topk)

    def call(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():  # a graph cannot read the sparsity
            sparsities.append(0.0)
            return attend(*args, **kwargs)
        out, sparsity = attend(*args, return_sparsity=True, **kwargs)
        sparsities.append(sparsity)
        return out

    def counted() -> Counts:
        calls = len(sparsities)
        return Counts(calls, density=1 - sum(sparsities) / max(1, calls))

    with torchs_function_is(call):
        yield counted


@contextmanager
def transformers_enable(subject: Subject, topk: float) -> Iterator[Counted]:
    from sparge.integrations.transformers import enable

    with enable(subject.of, policy(topk), LEAST) as sparse:
        yield partial(Counts.of, sparse.stats)


@contextmanager
def diffusers_enable(mode: str, subject: Subject, topk: float) -> Iterator[Counted]:
    from sparge.integrations.diffusers import enable

    with enable(subject.of, mode, topk=topk, min_tokens=LEAST, start_percent=0.0) as handle:

        def counted() -> Counts:
            result = handle.result
            if result is None:
                return Counts(said=handle.line)
            tally = result.tally
            left = dict(tally.reasons) | ({"cross-attention": tally.cross} if tally.cross else {})
            density = result.report.densities.overall
            return Counts(tally.sparse, tally.eight_bit, left, density, handle.line)

        yield counted


@contextmanager
def diffusers_native_context(subject: Subject, topk: float) -> Iterator[Counted]:
    """`enable` where diffusers' own context chooses its native backend."""
    from diffusers.models.attention_dispatch import attention_backend

    with ExitStack() as stack:
        counted = stack.enter_context(diffusers_enable("manual", subject, topk))
        stack.enter_context(attention_backend("native"))
        yield counted


@contextmanager
def diffusers_backend(subject: Subject, topk: float) -> Iterator[Counted]:
    """Our backend, by its name, in the transformers of a pipeline; "native" afterwards."""
    from sparge.integrations.diffusers import register_backend

    stats, pipe = register_backend(policy(topk), LEAST), subject.of
    models = [each for each in (pipe.transformer, getattr(pipe, "transformer_2", None)) if each]
    for model in models:
        model.set_attention_backend("sparge")
    try:
        yield partial(Counts.of, stats)
    finally:
        for model in models:
            model.set_attention_backend("native")


_IN_PLACE = "F.scaled_dot_product_attention = "
SPARGE_SDPA = Host("sparge.sdpa", function_mode)
SDPA_CALL = Host(f"{_IN_PLACE}sparge.sdpa_call", function_replaced)
UPSTREAM = Host(f"{_IN_PLACE}spas_sage2_attn_meansim_topk_cuda", upstream_replaced, 1, True)
ANY_MODEL = (SPARGE_SDPA, SDPA_CALL, UPSTREAM)
TRANSFORMERS = Host("transformers: enable", transformers_enable)
DIFFUSERS = Host("diffusers: enable, manual", partial(diffusers_enable, "manual"))
DIFFUSERS_AUTO = Host("diffusers: enable, auto budget", partial(diffusers_enable, "auto budget"))
DIFFUSERS_NATIVE = Host("diffusers: enable, attention_backend(native)", diffusers_native_context)
DIFFUSERS_BACKEND = Host("diffusers: set_attention_backend(sparge)", diffusers_backend)
