# SPDX-License-Identifier: Apache-2.0
"""Reports and profiles of measured heads. Each scenario returns plain JSON values."""

from __future__ import annotations

from typing import Any

import models
import nodes as comfy_nodes
import torch
from scenarios import lora
from session import patch, reports, sample


def report(model: Any, save_profile: str = "") -> dict[str, Any]:
    """Output of SpargeReport."""
    node = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeReport"]
    latent = {"samples": torch.zeros(1)}
    passed, text, _ = node.execute(model, latent, save_profile).args
    return {"passed": passed is latent, "text": text}


def reports_without_a_run() -> dict[str, Any]:
    return {"no node": report(models.build("wan")), "no run": report(patch(models.build("wan")))}


def profile_saved_and_loaded() -> dict[str, Any]:
    """Saved by one run, used by the next, refused for another model and another aim."""
    load = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeProfileLoad"]
    aim = {"mode": "auto quality", "quality": "fast"}
    measured = patch(models.build("wan"), **aim)
    found: dict[str, Any] = {}

    def run(label: str, patched: Any, name: str = "wan", **options: Any) -> None:
        with reports() as told:
            sample(patched, name, **options)
        found[label] = told[0]

    run("measured", measured)
    saved, unsafe = (
        report(measured, name)["text"].splitlines()[-1] for name in ("tiny wan", "../elsewhere")
    )
    named, missing = (load.execute(name).args[0] for name in ("tiny wan", "none"))
    aim["profile"] = named
    run("loaded", patch(models.build("wan"), **aim), denoise=0.5)
    run("other model", patch(models.build("ltxv"), **aim), "ltxv")
    run("other aim", patch(models.build("wan"), mode="auto budget", profile=named))
    run("other weights", patch(models.build("wan", seed=3), **aim))
    run("lora", patch(lora(models.build("wan"), 0.0), **aim))
    run("missing", patch(models.build("wan"), **aim | {"profile": missing}))
    shorter = models.empty_latent("wan", frames=3)
    run("other length", patch(models.build("wan"), **aim), latent=shorter)
    run("manual", patch(models.build("wan"), profile=named))
    changed = load.fingerprint_inputs("tiny wan") != load.fingerprint_inputs("none")
    errors = errors_in(named.profile)
    return found | {"saved": saved, "unsafe": unsafe, "changed": changed, "errors": errors}


def errors_in(profile: Any) -> list[float]:
    """Errors that the heads of a profile are expected to make, in all of its settings."""
    all_settings = profile.settings.values()
    return torch.cat([each.error[each.measured].flatten() for each in all_settings]).tolist()


def profile_of_another_prompt() -> dict[str, Any]:
    """Mochi, saved with prompts of 20 and 7 tokens, loaded with longer ones."""
    aim = {"mode": "auto quality", "quality": "fast"}
    with reports() as found:
        measured = patch(models.build("mochi"), **aim)
        sample(measured, "mochi")
        report(measured, "tiny mochi")
        named = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeProfileLoad"].execute("tiny mochi").args[0]
        patched = patch(models.build("mochi"), **aim, profile=named)
        sample(patched, "mochi, longer prompts", denoise=0.5)
    return {"reports": found, "errors": errors_in(named.profile)}
