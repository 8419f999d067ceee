# SPDX-License-Identifier: Apache-2.0
"""One call of a model as it is sampled: its time, and its self-attention calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ..sparge.speed import Size
from ..sparge.tune import Call
from . import host
from .attention_call import AttentionCall
from .hook import OVERRIDE_KEY

#: Steps that are sampled. The first call of a process loads kernels, so the last one counts.
STEPS = 2


@dataclass(eq=False)
class ModelCall:
    """Last call of a model in a short run without guidance."""

    seconds: float = 0.0
    calls: Counter[Size] = field(default_factory=Counter)
    """Number of self-attention calls without a mask, by size."""

    @classmethod
    def of(cls, model: Any, positive: Any, latent: Any) -> ModelCall:
        """Samples a few steps of a model as it is, without noise masks. Waits for the GPU."""
        found, patched = cls(), model.clone()
        options = patched.model_options.setdefault("transformer_options", {})
        options[OVERRIDE_KEY] = found._observe(options.get(OVERRIDE_KEY))
        patched.add_wrapper_with_key(host.APPLY_MODEL, "sparge_benchmark", found._timed)
        host.sample(patched, positive, latent, STEPS)
        return found

    @property
    def main(self) -> Size | None:
        """Size that most of the attention is of; None without any."""
        sizes = self.calls.items()
        return max(sizes, key=lambda of: of[0].pairs * of[1])[0] if sizes else None

    def _timed(self, executor: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self.calls.clear()
        started = host.seconds_when_done()
        out = executor(*args, **kwargs)
        self.seconds = host.seconds_when_done() - started
        return out

    def _observe(self, previous: Any) -> Callable[..., Tensor]:
        """Makes an override of ComfyUI's attention that counts calls and changes nothing."""

        def override(
            func: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            heads: int,
            mask: Tensor | None = None,
            attn_precision: Any = None,
            skip_reshape: bool = False,
            skip_output_reshape: bool = False,
            **kwargs: Any,
        ) -> Any:
            tensors = q, k, v, heads, mask
            call = AttentionCall(*tensors, skip_reshape, skip_output_reshape, {}).tensors
            if mask is None and isinstance(call, Call) and call.k.shape[2] == call.query_tokens:
                self.calls[call.size] += 1
            compute = func if previous is None else partial(previous, func)
            return compute(
                q, k, v, heads, mask=mask, attn_precision=attn_precision,
                skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **kwargs,
            )  # fmt: skip

        return override
