# SPDX-License-Identifier: Apache-2.0
"""Scenarios of other people's models and nodes: shapes, replacements, fullgraph, NaN. ComfyUI's
process.

Each scenario returns plain JSON values.
"""

from __future__ import annotations

import types
from typing import Any

import comfy.ldm.genmo.joint_model.asymm_models_joint
import comfy.ldm.wan.model
import comfy.model_management
import models
import other_models
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from session import library_calls, patch, relative_error, replaced, reports, sample

assert other_models.OTHERS.keys() <= models.FAMILIES.keys()


def foreign(name: str, steps: int = 4, **widgets: Any) -> dict[str, Any]:
    """Runs with the widgets' defaults but these, beside the dense result."""
    model = models.build(name)
    dense = sample(model, name, steps=steps)
    with reports() as found, library_calls() as calls:
        out = sample(patch(model, **widgets), name, steps=steps)
    return found[0] | {"error": relative_error(out, dense), "calls": calls}


def replaced_self_attention(name: str, before: bool, **widgets: Any) -> dict[str, Any]:
    """Object patches over the self-attention of the clip in each block, as memory-saving nodes of
    other packs have them."""
    model = models.build(name)

    def past_the_override(module: Any) -> Any:
        inner = module.forward

        def forward(self: Any, *args: Any, transformer_options: Any = None, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        return types.MethodType(forward, module)

    def apply(patcher: Any) -> Any:
        patcher = patcher.clone()
        wan = name == "wan"
        key, attribute = ("blocks", "self_attn") if wan else ("transformer_blocks", "attn1")
        for index, block in enumerate(getattr(model.model.diffusion_model, key)):
            place = f"diffusion_model.{key}.{index}.{attribute}.forward"
            patcher.add_object_patch(place, past_the_override(getattr(block, attribute)))
        return patcher

    patched = patch(apply(model), **widgets) if before else apply(patch(model, **widgets))
    with reports() as found:
        sample(patched, name)
    return found[0]


#: Where the classes of the families take their attention from.
_MODULES = {"wan": comfy.ldm.wan.model, "mochi": comfy.ldm.genmo.joint_model.asymm_models_joint}


def whole_graph(name: str, by_block: bool, before: bool) -> dict[str, Any]:
    """Another pack's compile nodes with fullgraph on, for two runs. ComfyUI's own choice on a CPU
    cannot be traced whole, whatever nodes there are."""
    torch._dynamo.reset()
    model = models.build(name)
    keys = ["diffusion_model"]
    if by_block:
        blocks = len(model.model.diffusion_model.blocks)
        keys = [f"diffusion_model.blocks.{i}" for i in range(blocks)]
    clone = model.clone() if before else patch(model)
    set_torch_compile_wrapper(clone, backend="eager", fullgraph=True, keys=keys)
    patched = patch(clone) if before else clone
    with reports() as found, replaced(_MODULES[name], "optimized_attention", attention_pytorch):
        dense = sample(model, name)
        errors = [relative_error(sample(patched, name), dense) for _ in range(2)]
    return {"reports": found, "errors": errors}


def not_finite(value: float, **widgets: Any) -> dict[str, Any]:
    """A weight of a v projection is NaN or inf."""
    model = models.build("wan")
    with torch.no_grad():
        model.model.diffusion_model.blocks[0].self_attn.v.weight[0, 0] = value
    with reports() as found:
        sample(patch(model, **widgets), "wan")
    return found[0]


def stopped_in_the_first_step(by: str) -> dict[str, Any]:
    """Stops the run by an error of the model, or by the user."""
    patched = patch(models.build("wan"))
    interrupted = comfy.model_management.InterruptProcessingException

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise interrupted() if by == "user" else RuntimeError("sizes do not match")

    head = patched.model.diffusion_model.head
    raised = ""
    with reports() as found, replaced(head, "forward", fail):
        try:
            sample(patched, "wan")
        except BaseException as error:
            raised = type(error).__name__
    return found[0] | {"raised": raised}
