# SPDX-License-Identifier: Apache-2.0
"""Other nodes' attention overrides beside ours, in ComfyUI's process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import models
import overrides
import torch
from comfy.ldm.modules import attention
from comfy_extras.nodes_model_advanced import ModelAttentionBackend
from session import pack, patch, relative_error, reports, sample

KEY = "optimized_attention_override"
STEPS = 6

WHERE: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "the second block": lambda options: options.get("block_index") == 1,
    "later steps": lambda options: (
        options["sigmas"].max() < options["sample_sigmas"][len(options["sample_sigmas"]) // 2]
    ),
}


def _options(model: Any) -> dict[str, Any]:
    return model.model_options["transformer_options"]


def _set(model: Any, meaning: overrides.Meaning, chained: bool) -> Any:
    clone = model.clone()
    previous = _options(clone).get(KEY) if chained else None
    _options(clone)[KEY] = overrides.override_of(meaning, previous)
    return clone


def _put_into_each_pass(model: Any, meaning: overrides.Meaning) -> Any:
    """A node that wraps the model function, and overwrites whatever override a pass has."""
    clone, override = model.clone(), overrides.override_of(meaning)

    def wrapper(apply_model: Any, given: Mapping[str, Any]) -> Any:
        options = given["c"]["transformer_options"] | {KEY: override}
        return apply_model(
            given["input"], given["timestep"], **(given["c"] | {"transformer_options": options})
        )

    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def _patched(model: Any, place: str, meaning: overrides.Meaning, widgets: dict[str, Any]) -> Any:
    if place == "before":
        return patch(_set(model, meaning, chained=True), **widgets)
    if place == "in each pass":
        return _put_into_each_pass(patch(model, **widgets), meaning)
    return _set(patch(model, **widgets), meaning, chained=place == "chained")


def overridden(
    name: str,
    meaning: str,
    place: str = "before",
    where: str = "",
    split: bool = False,
    steps: int = STEPS,
    **widgets: Any,
) -> dict[str, Any]:
    """Report of a run with an override and our node, the error of its result against that without
    our node, and how much the override changes there."""
    chosen = (overrides.BACKENDS | overrides.MEANINGS)[meaning]
    if where:
        chosen = overrides.only_where(chosen, WHERE[where])
    model = models.build(name)
    if split:
        model.model.memory_required = lambda *args, **kwargs: 1e30
    plain = sample(model, name, steps=steps)
    theirs = sample(_set(model, chosen, chained=True), name, steps=steps)
    with reports() as found:
        out = sample(_patched(model, place, chosen, widgets), name, steps=steps)
    return found[0] | {
        "error": relative_error(out, theirs),
        "changes": relative_error(theirs, plain),
    }


def from_one_run_to_the_next(**widgets: Any) -> list[dict[str, Any]]:
    """The same patched model: as it is, with an override that came meanwhile, and without it."""
    model, found = models.build("wan"), []
    patched = patch(model, **widgets)
    ours, changed = _options(patched)[KEY], overrides.override_of(overrides.temperature)
    for override in (ours, changed, ours):
        _options(patched)[KEY] = override
        expected = sample(
            model if override is ours else _set(model, overrides.temperature, False), "wan"
        )
        with reports() as told:
            out = sample(patched, "wan")
        found.append(told[0] | {"error": relative_error(out, expected)})
    return found


def kept_and_never_called(some: bool) -> dict[str, Any]:
    """An override that holds ours, and calls it in no layer, or not in the first."""
    model = models.build("wan")
    patched = patch(model, topk=1.0)
    ours = _options(patched)[KEY]

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        layer = (kwargs.get("transformer_options") or {}).get("block_index")
        return ours(func, *args, **kwargs) if some and layer else func(*args, **kwargs)

    _options(patched)[KEY] = override
    with reports() as found:
        out = sample(patched, "wan")
    return found[0] | {"error": relative_error(out, sample(model, "wan"))}


def with_backends(order: str, twice: bool = False) -> dict[str, Any]:
    """ComfyUI's node for a backend, before ours or after it."""
    model = models.build("wan")
    choose = lambda m: ModelAttentionBackend().patch(m, "pytorch attention")[0]  # noqa: E731
    patched = (
        patch(choose(model), topk=1.0) if order == "before" else choose(patch(model, topk=1.0))
    )
    host = pack("nodes.comfyui")
    with reports() as found:
        out = sample(patched, "wan")
    chosen = _options(choose(model))[KEY]
    functions = attention.attention_pytorch, attention.attention_split
    own = [host.is_own_backend(chosen)]
    for function in (*functions, overrides.backend):
        clone = model.clone()
        clone.set_model_optimized_attention(function)
        own.append(host.is_own_backend(_options(clone)[KEY]))
    return found[0] | {"error": relative_error(out, sample(model, "wan")), "own": own}


def copied_deeply(at: str, **widgets: Any) -> dict[str, Any]:
    """Packs that copy the options of a model deeply, between runs or in each pass."""
    model = models.build("wan")
    patched = patch(model, **widgets)
    expected = sample(patched, "wan")
    if at == "between runs":
        patched = patched.clone()
        patched.model_options = copy.deepcopy(patched.model_options)
    else:

        def wrapper(apply_model: Any, given: Mapping[str, Any]) -> Any:
            return apply_model(given["input"], given["timestep"], **copy.deepcopy(given["c"]))

        patched = patched.clone()
        patched.set_model_unet_function_wrapper(wrapper)
    with reports() as found:
        out = sample(patched, "wan")
    return found[0] | {"same": torch.equal(out, expected)}


def preferred(mode: str, compiled: bool = False, **widgets: Any) -> dict[str, Any]:
    """A model whose file prefers a function for the self-attention of its first block, in a ComfyUI
    that has such models: calls of that function without our node, and with it."""
    model, calls = models.build("wan"), []

    def chosen(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs["transformer_options"]["block_index"])
        return attention.attention_pytorch(*args, **kwargs)

    model.model.diffusion_model.blocks[0].self_attn.comfy_attention.function = chosen
    expected = sample(model, "wan")
    without, calls[:] = list(calls), []
    patched = patch(model, mode=mode, **widgets)
    if compiled:
        from scenarios import compiled as compile_model

        patched = compile_model(patched)
    with reports() as found:
        out = sample(patched, "wan")
    return found[0] | {
        "error": relative_error(out, expected),
        "without": without,
        "with": list(calls),
    }


def has_preferences() -> bool:
    """Whether this ComfyUI knows models whose files prefer a function for attention."""
    return hasattr(attention, "ComfyAttention")
