# SPDX-License-Identifier: Apache-2.0
"""Token orders, measured heads, profiles and reports. Each scenario returns plain JSON values."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import comfy.model_management
import models
import nodes as comfy_nodes
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras import nodes_context_windows, nodes_easycache
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
from session import library_calls, pack, patch, relative_error, replaced, reports, sample


def order_on_and_off(name: str) -> dict[str, Any]:
    """Everything kept, in cubes and in raster order: as the node computes it, and in 16 bits."""
    module = pack("sparge.tune.call")
    library, precision = module.attention, pack("sparge").Precision.SIXTEEN_BIT
    model, segments = models.build(name), set()

    def run(keep_order: bool, sixteen_bit: bool) -> torch.Tensor:
        def attention(q: Any, k: Any, v: Any, policy: Any, **kwargs: Any) -> Any:
            if keep_order:
                segments.add(tuple(part.tokens for part in kwargs["order"].segments))
            else:
                kwargs["order"] = None
            if sixteen_bit:
                policy = dataclasses.replace(policy, precision=precision)
            return library(q, k, v, policy, **kwargs)

        with replaced(module, "attention", attention):
            return sample(patch(model, topk=1.0), name)

    errors = [
        relative_error(run(True, sixteen_bit), run(False, sixteen_bit))
        for sixteen_bit in (False, True)
    ]
    return {"errors": errors, "segments": sorted(segments)}


def auto(name: str = "wan", widgets: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """One run in an auto mode, the same again, and one without the node."""
    patched = patch(models.build(name), **({"mode": "auto quality"} | (widgets or {})))
    with reports() as found, library_calls() as calls:
        out = sample(patched, name, **kwargs)
        again = sample(patched, name, **kwargs)
    return found[0] | {
        "error": relative_error(out, sample(models.build(name), name, **kwargs)),
        "repeatable": torch.equal(out, again) and found[0] == found[1],
        "all_measured": all(call["measured"] for call in calls),
        "segments": sorted({tuple(call["segments"]) for call in calls}),
    }


def two_models(mode: str) -> list[dict[str, Any]]:
    """KSamplerAdvanced twice, a model each, as Wan 2.2 is run: the second has no dense window."""
    advanced = comfy_nodes.NODE_CLASS_MAPPINGS["KSamplerAdvanced"]()
    latent = {"samples": models.empty_latent("wan")}
    conds = models.conditioning("wan"), models.conditioning("wan", negative=True)
    ranges = (("enable", 0, 2, "enable"), ("disable", 2, 10000, "disable"))
    with reports() as found, torch.inference_mode():
        for seed, (add_noise, first, last, leftover) in enumerate(ranges):
            model = patch(models.build("wan", seed=seed), mode=mode)
            (latent,) = advanced.sample(
                model, add_noise, 0, 4, 4.0, "euler", "simple", *conds, latent, first, last,
                leftover,
            )  # fmt: skip
    return found


def auto_batched_or_split(**widgets: Any) -> dict[str, Any]:
    """Cond and uncond in one forward pass, and in two because memory is short."""
    model = models.build("wan")
    patched = patch(model, **({"mode": "auto quality", "quality": "fast"} | widgets))
    hook = pack("nodes.hook").hook_of(patched)
    choices = []
    with reports() as found:
        together = sample(patched, "wan", steps=10)
        choices.append(next(iter(hook.last.profile.choices.values())))
        with replaced(model.model, "memory_required", lambda *args, **kwargs: 1e30):
            apart = sample(patched, "wan", steps=10)
        choices.append(next(iter(hook.last.profile.choices.values())))
    a, b = choices
    return {
        "reports": found,
        "error": relative_error(apart, together),
        "same_choices": all(
            torch.equal(getattr(a, name), getattr(b, name))
            for name in ("density", "pool_weight", "order_kind")
        ),
        "error_difference": float((a.error - b.error).abs().max()),
        "loudness_difference": float((a.head_weight - b.head_weight).abs().max()),
    }


def auto_cancelled() -> dict[str, Any]:
    interrupted = comfy.model_management.InterruptProcessingException
    patched = patch(models.build("wan"), mode="auto quality")

    def cancel(step: int, *_: Any) -> None:
        if step == 5:
            raise interrupted()

    with reports() as found:
        try:
            sample(patched, "wan", steps=10, callback=cancel)
        except interrupted:
            return found[0] | {"raised": True, "report": report(patched)}
    return {"raised": False}


def report(model: Any, save_profile: str = "") -> dict[str, Any]:
    """Output of SpargeReport."""
    node = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeReport"]
    latent = {"samples": torch.zeros(1)}
    passed, text, picture = node.execute(model, latent, save_profile).args
    return {
        "passed": passed is latent,
        "text": text,
        "shape": list(picture.shape),
        "colours": len(picture.flatten(0, 2).unique(dim=0)),
        "in_range": bool((picture >= 0).all() and (picture <= 1).all()),
    }


def errors_in(profile: Any) -> list[float]:
    """Errors that the heads of a profile are expected to make, in all of its choices."""
    all_choices = profile.choices.values()
    return torch.cat([each.error[each.measured].flatten() for each in all_choices]).tolist()


def profile_saved_and_loaded() -> dict[str, Any]:
    """Saved by one run, used by the next, refused for another model and another aim."""
    load = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeProfileLoad"]
    aim = {"mode": "auto quality", "quality": "fast"}
    measured = patch(models.build("wan"), **aim)
    with reports() as found:
        first = sample(measured, "wan")
        saved = report(measured, "tiny wan")["text"].splitlines()[-1]
        unsafe = report(measured, "../elsewhere")["text"].splitlines()[-1]
        named = load.execute("tiny wan").args[0]
        with_profile = patch(models.build("wan"), **aim, profile=named)
        second = sample(with_profile, "wan", denoise=0.5)
        sample(patch(models.build("ltxv"), **aim, profile=named), "ltxv")
        sample(patch(models.build("wan"), mode="auto budget", profile=named), "wan")
        sample(patch(models.build("wan", seed=3), **aim, profile=named), "wan")
        lora = models.build("wan")
        key = "diffusion_model.blocks.0.self_attn.q.weight"
        lora.add_patches({key: ("diff", (torch.zeros_like(lora.model.state_dict()[key]),))}, 1.0)
        sample(patch(lora, **aim, profile=named), "wan")
        sample(patch(models.build("wan"), **aim, profile=load.execute("none").args[0]), "wan")
        sample(patch(models.build("wan"), **aim, profile=named), "wan",
               latent=models.empty_latent("wan", frames=3))  # fmt: skip
        sample(patch(models.build("wan"), profile=named), "wan")
    names = ("measured", "loaded", "other model", "other aim", "other weights", "lora", "missing",
             "other length", "manual")  # fmt: skip
    return {
        "saved": saved,
        "unsafe": unsafe,
        "changed_since": load.fingerprint_inputs("tiny wan") != load.fingerprint_inputs("none"),
        "differs": not torch.equal(first, second),
        "errors": errors_in(named.profile),
        "reports": dict(zip(names, found, strict=True)),
    }


def profile_of_another_prompt() -> dict[str, Any]:
    """Mochi, saved with prompts of 20 and 7 tokens, loaded with longer ones."""
    load = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeProfileLoad"]
    aim = {"mode": "auto quality", "quality": "fast"}
    longer = dataclasses.replace(models.FAMILIES["mochi"], valid=(21, 9))
    with reports() as found:
        measured = patch(models.build("mochi"), **aim)
        sample(measured, "mochi")
        report(measured, "tiny mochi")
        named = load.execute("tiny mochi").args[0]
        with mock.patch.dict(models.FAMILIES, mochi=longer):
            sample(patch(models.build("mochi"), **aim, profile=named), "mochi", denoise=0.5)
    return {"reports": found, "errors": errors_in(named.profile)}


def reports_without_a_run() -> dict[str, Any]:
    return {"no node": report(models.build("wan")), "no run": report(patch(models.build("wan")))}


def auto_beside_others() -> dict[str, Any]:
    """EasyCache, context windows, TorchCompileModel's set-up: reports, by name."""
    aim = {"mode": "auto quality", "quality": "fast"}
    cached = nodes_easycache.EasyCacheNode.execute(models.build("wan"), 3.0, 0.15, 0.95, False)[0]
    windowed = nodes_context_windows.ContextWindowsManualNode.execute(
        models.build("wan"), 4, 1, "standard_static", 1, False, "pyramid", 2, False
    )[0]
    compiled = patch(models.build("wan"), **aim)
    set_torch_compile_wrapper(
        compiled, backend="eager", options={"guard_filter_fn": skip_torch_compile_dict}
    )
    with reports() as found:
        sample(patch(cached, **aim), "wan", steps=10)
        latent = models.empty_latent("wan", frames=7)
        sample(patch(windowed, **aim), "wan", latent=latent)
        sample(compiled, "wan")
    return dict(zip(("cached", "windowed", "compiled"), found, strict=True))
