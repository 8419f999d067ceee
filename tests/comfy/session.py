# SPDX-License-Identifier: Apache-2.0
"""Patching, sampling and looking on, for the scenarios. Runs in ComfyUI's process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import comfy.sample
import comfy.utils
import models
import nodes as comfy_nodes
import torch

#: Below the tokens of every tiny model's video, above its text (the token refiner of HunyuanVideo).
MIN_TOKENS = 100


def pack(name: str) -> Any:
    """A module of the pack, which ComfyUI loaded under the path of its folder."""
    return next(
        module
        for key, module in sys.modules.items()
        if "custom_nodes" in key and key.endswith(f".{name}")
    )


def patch(model: Any, **widgets: Any) -> Any:
    node = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeAttention"]
    return node.execute(model, **({"min_tokens": MIN_TOKENS, "pvthreshd": 50.0} | widgets))[0]


def sample(
    model: Any,
    family: str,
    steps: int = 4,
    sampler: str = "euler",
    cfg: float = 4.0,
    latent: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The latent; of video and sound, both in one flat tensor."""
    latent = models.empty_latent(family) if latent is None else latent
    with torch.inference_mode():
        out = comfy.sample.sample(
            model,
            comfy.sample.prepare_noise(latent, 0),
            steps,
            cfg,
            sampler,
            "simple",
            models.conditioning(family),
            models.conditioning(family, negative=True),
            latent,
            seed=0,
            disable_pbar=True,
            **kwargs,
        )
        return comfy.utils.pack_latents(out.unbind())[0] if out.is_nested else out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def reports() -> Iterator[list[dict[str, Any]]]:
    """Collects what every run inside reports, as numbers."""
    collected: list[dict[str, Any]] = []
    report, session = pack("nodes.comfyui"), pack("sparge.session")
    publish = report.publish

    def collect(result: Any, node_id: str | None) -> None:
        publish(result, node_id)
        counts = result.counts
        collected.append(
            {
                "sparse": counts.sparse,
                "dense": counts.dense,
                "cross": counts.cross,
                "passes": counts.passes,
                "reasons": dict(counts.reasons),
                "text": session.summary(result),
                "verdict": "\n".join(session.verdict(result)),
                "by_step": [
                    [round(x, 3) for x in row] for row in result.densities.by_step.tolist()
                ],
                "kept": result.of_heads("density").tolist(),
                "error_of_heads": result.error,
            }
        )

    with replaced(report, "publish", collect):
        yield collected


@contextlib.contextmanager
def library_calls() -> Iterator[list[dict[str, Any]]]:
    """Collects what the library is asked for."""
    collected: list[dict[str, Any]] = []
    module = pack("sparge.session.calls")
    attention = module.attention

    def spy(q: Any, k: Any, v: Any, policy: Any, **kwargs: Any) -> Any:
        out, order = attention(q, k, v, policy, **kwargs), kwargs["order"]
        collected.append(
            {
                "tokens": q.shape[2],
                "exact": [policy.exact_prefix, policy.exact_suffix],
                "segments": [part.tokens for part in order.segments] if order else [],
                "measured": kwargs["head_settings"] is not None,
            }
        )
        return out

    with replaced(module, "attention", spy):
        yield collected
