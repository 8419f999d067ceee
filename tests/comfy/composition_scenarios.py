# SPDX-License-Identifier: Apache-2.0
"""The node beside other nodes. Each scenario returns plain JSON values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import models
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras import nodes_context_windows, nodes_model_advanced
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
from session import library_calls, patch, relative_error, reports, sample


class Recorder:
    """Another pack's override: counts its calls, and how deep the stack is when it is called."""

    def __init__(self) -> None:
        self.calls = 0
        self.depths: set[int] = set()

    def over(self, previous: Callable[..., Any] | None) -> Callable[..., Any]:
        def override(func: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.depths.add(stack_depth())
            return previous(func, *args, **kwargs) if previous else func(*args, **kwargs)

        return override

    def patch(self, model: Any, chained: bool) -> Any:
        clone = model.clone()
        options = clone.model_options["transformer_options"]
        previous = options.get("optimized_attention_override") if chained else None
        options["optimized_attention_override"] = self.over(previous)
        return clone


def stack_depth() -> int:
    depth, frame = 0, sys._getframe()
    while frame := frame.f_back:
        depth += 1
    return depth


def other_override(place: str) -> dict[str, Any]:
    """Another pack's override before the node, after it and chaining, after it and overwriting."""
    recorder = Recorder()
    model = models.build("wan")
    if place == "before":
        patched = patch(recorder.patch(model, chained=True), topk=1.0)
    else:
        patched = recorder.patch(patch(model, topk=1.0), chained=place == "chained")
    with reports() as found:
        out = sample(patched, "wan")
    return {
        "report": found[0],
        "recorded": recorder.calls,
        "error": relative_error(out, sample(model, "wan")),
    }


def attention_backend_node_after() -> dict[str, Any]:
    backend = nodes_model_advanced.ModelAttentionBackend()
    model = models.build("wan")
    with reports() as found:
        sample(backend.patch(patch(model), "pytorch attention")[0], "wan")
    return found[0]


def two_of_ours() -> dict[str, Any]:
    with reports() as found, library_calls() as calls:
        sample(patch(patch(models.build("wan"), topk=0.9), topk=0.3), "wan")
    return {"reports": found, "topks": sorted({call["topk"] for call in calls})}


def many_steps(steps: int) -> dict[str, Any]:
    """A pack that overwrote ours, for many steps: nothing may pile up."""
    recorder = Recorder()
    model = models.build("wan")
    patched = recorder.patch(patch(model, start_percent=1.0), chained=False)
    with reports() as found:
        sample(patched, "wan", steps=steps, latent=torch.zeros(1, 16, 1, 2, 2))
    return {"report": found[0], "depths": len(recorder.depths)}


def rewraps_each_step() -> dict[str, Any]:
    """A node that re-installs itself outside of everything before each step, as ComfyUI's own does
    under this callback key."""
    recorder = Recorder()
    model = patch(models.build("wan"))
    mine: list[Any] = []

    def prepare(patcher: Any, timestep: Any, model_options: dict[str, Any]) -> None:
        options = model_options["transformer_options"]
        current = options.get("optimized_attention_override")
        if current not in mine:
            mine.append(recorder.over(current))
            options["optimized_attention_override"] = mine[-1]

    model.add_callback_with_key("on_prepare_state", "block_sparse_attention", prepare)
    with reports() as found:
        sample(model, "wan", steps=20)
    return {"report": found[0], "wraps": len(mine), "depths": len(recorder.depths)}


def context_windows() -> dict[str, Any]:
    model = models.build("wan")
    windowed = nodes_context_windows.ContextWindowsManualNode.execute(
        model, 4, 1, "standard_static", 1, False, "pyramid", 2, False
    )[0]
    latent = models.empty_latent("wan", frames=7)
    with reports() as found, library_calls() as calls:
        out = sample(patch(windowed, topk=1.0), "wan", latent=latent)
    error = relative_error(out, sample(windowed, "wan", latent=latent))
    return {"report": found[0], "tokens": sorted({c["tokens"] for c in calls}), "error": error}


def lora() -> dict[str, Any]:
    model = models.build("wan")
    plain = sample(model, "wan")
    key = "diffusion_model.blocks.0.self_attn.q.weight"
    weight = model.model.state_dict()[key]
    adapted = model.clone()
    adapted.add_patches({key: ("diff", (torch.randn_like(weight) * 0.1,))}, 1.0)
    with reports() as found:
        out = sample(patch(adapted, topk=1.0), "wan")
    dense = sample(adapted, "wan")
    return {
        "report": found[0],
        "error": relative_error(out, dense),
        "lora_effect": relative_error(dense, plain),
    }


def compiled(name: str) -> dict[str, Any]:
    """TorchCompileModel's own set-up, with the backend that needs no C compiler, for two runs."""
    model = models.build(name)
    dense = sample(model, name)
    outcomes = {}
    for order in ("before", "after"):
        clone = model.clone() if order == "before" else patch(model, topk=1.0)
        set_torch_compile_wrapper(
            clone, backend="eager", options={"guard_filter_fn": skip_torch_compile_dict}
        )
        patched = patch(clone, topk=1.0) if order == "before" else clone
        with reports() as found:
            errors = [relative_error(sample(patched, name), dense) for _ in range(2)]
        outcomes[order] = {"reports": found, "errors": errors}
    return outcomes
