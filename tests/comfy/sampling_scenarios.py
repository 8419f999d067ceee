# SPDX-License-Identifier: Apache-2.0
"""Families, samplers, schedules and errors. Each scenario returns plain JSON values."""

from __future__ import annotations

import os
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import models
import nodes as comfy_nodes
import torch
from comfy_extras import nodes_model_advanced
from session import library_calls, pack, patch, relative_error, replaced, reports, sample


def family(name: str) -> dict[str, Any]:
    """Dense, everything kept in 8 bits, and half of the blocks."""
    model = models.build(name)
    dense = sample(model, name)
    with reports() as found, library_calls() as calls:
        everything = sample(patch(model, topk=1.0), name)
        half = sample(patch(model, topk=0.5), name)
        untouched = sample(model, name)
    return {
        "reports": found,
        "calls": calls,
        "error_all": relative_error(everything, dense),
        "error_half": relative_error(half, dense),
        "original_unchanged": torch.equal(untouched, dense),
    }


def run(name: str = "wan", dtype: str = "float32", **kwargs: Any) -> dict[str, Any]:
    """One run with the node and one without: the report and the error at topk 1."""
    widgets = kwargs.pop("widgets", {"topk": 1.0})
    if "frames" in kwargs:
        kwargs["latent"] = models.empty_latent(name, frames=kwargs.pop("frames"))
    model = models.build(name, getattr(torch, dtype))
    with reports() as found:
        out = sample(patch(model, **widgets), name, **kwargs)
    return found[0] | {"error": relative_error(out, sample(model, name, **kwargs))}


def schedule_that_rises_again() -> dict[str, Any]:
    """A restart sampler's schedule: back to noise levels before start_percent."""
    model = models.build("wan")
    latent = models.empty_latent("wan")
    sampling = model.get_model_object("model_sampling")
    percents = [0.0, 0.3, 0.6, 0.1, 0.5, 0.8]  # two of these six are before start_percent 0.2
    sigmas = torch.tensor([sampling.percent_to_sigma(p) for p in percents] + [0.0])
    with reports() as found, torch.inference_mode():
        comfy.sample.sample_custom(
            patch(model),
            comfy.sample.prepare_noise(latent, 0),
            4.0,
            comfy.samplers.sampler_object("euler"),
            sigmas,
            models.conditioning("wan"),
            models.conditioning("wan", negative=True),
            latent,
            disable_pbar=True,
            seed=0,
        )
    return found[0]


def split_over_two_models() -> dict[str, Any]:
    """KSamplerAdvanced twice, a model each, as Wan 2.2 is run."""
    advanced = comfy_nodes.NODE_CLASS_MAPPINGS["KSamplerAdvanced"]()

    def both(high: Any, low: Any) -> torch.Tensor:
        latent = {"samples": models.empty_latent("wan")}
        conds = models.conditioning("wan"), models.conditioning("wan", negative=True)
        ranges = ((high, "enable", 0, 2, "enable"), (low, "disable", 2, 10000, "disable"))
        with torch.inference_mode():
            for model, add_noise, first, last, leftover in ranges:
                (latent,) = advanced.sample(
                    model, add_noise, 0, 4, 4.0, "euler", "simple", *conds, latent, first, last,
                    leftover,
                )  # fmt: skip
        return latent["samples"]

    high, low = models.build("wan", seed=0), models.build("wan", seed=1)
    dense = both(high, low)
    with reports() as found:
        out = both(patch(high, topk=1.0), patch(low, topk=1.0))
    return {"reports": found, "error": relative_error(out, dense)}


def window_follows_a_later_shift() -> list[dict[str, Any]]:
    """ModelSamplingSD3 before and after the node: the same window either way."""
    shift = nodes_model_advanced.ModelSamplingSD3()
    model = models.build("wan")
    with reports() as found:
        sample(patch(shift.patch(model, 20.0)[0]), "wan", steps=10)
        sample(shift.patch(patch(model), 20.0)[0], "wan", steps=10)
    return found


def batched_or_split() -> dict[str, Any]:
    """Cond and uncond in one forward pass, and in two because memory is short."""
    model = models.build("wan")
    patched = patch(model, topk=0.3)
    with reports() as found:
        together = sample(patched, "wan")
        again = sample(patched, "wan")
        with replaced(model.model, "memory_required", lambda *args, **kwargs: 1e30):
            apart = sample(patched, "wan")
    return {
        "reports": found,
        "repeatable": torch.equal(together, again),
        "error": relative_error(apart, together),
    }


def cancelled() -> dict[str, Any]:
    """The user presses Cancel after the second step; then the same patched model runs again."""
    interrupted = comfy.model_management.InterruptProcessingException
    patched = patch(models.build("wan"))

    def cancel(step: int, *_: Any) -> None:
        if step == 1:
            raise interrupted()

    raised = False
    with reports() as found:
        whole = sample(patched, "wan")
        try:
            sample(patched, "wan", callback=cancel)
        except interrupted:
            raised = True
        again = sample(patched, "wan")
    options = patched.model_options["transformer_options"]
    return {
        "reports": found,
        "raised": raised,
        "same_after": torch.equal(whole, again),
        "options": sorted(options),
    }


def library_raises(kind: str) -> dict[str, Any]:
    """Raises an error inside the library; returns what becomes of it."""
    sparge = pack("sparge")
    errors = {
        "unsupported": lambda: sparge.Unsupported("the test allows nothing"),
        "build": lambda: sparge.KernelBuildError("no compiler", "line 1"),
        "memory": lambda: torch.OutOfMemoryError("out of memory"),
        "interrupt": comfy.model_management.InterruptProcessingException,
        "bug": lambda: RuntimeError("a bug"),
        "shape": lambda: ValueError("a shape"),
    }
    model = models.build("wan")
    dense = sample(model, "wan")
    calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        raise errors[kind]()

    raised, same = "", False
    with reports() as found, replaced(pack("sparge.tune.call"), "attention", fail):
        try:
            same = torch.equal(sample(patch(model), "wan"), dense)
        except BaseException as error:
            raised = type(error).__name__
    return {"report": found[0], "raised": raised, "same_as_dense": same, "calls": calls}


def without_a_gpu() -> dict[str, Any]:
    """Runs as users without an NVIDIA GPU do: nothing is sparse, the picture is the same."""
    model = models.build("wan")
    allowed = os.environ.pop("SPARGE_REFERENCE")
    try:
        with reports() as found:
            out = sample(patch(model), "wan")
    finally:
        os.environ["SPARGE_REFERENCE"] = allowed
    return {"report": found[0], "same_as_dense": torch.equal(out, sample(model, "wan"))}


def orders(steps: int) -> list[list[int]]:
    """The first slots of each sparse call's order."""
    with library_calls() as calls:
        sample(patch(models.build("wan"), topk=0.5), "wan", steps=steps)
    return [call["slots"] for call in calls]
