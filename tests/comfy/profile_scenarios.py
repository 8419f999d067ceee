# SPDX-License-Identifier: Apache-2.0
"""Reports and profiles of measured heads. Each scenario returns plain JSON values."""

from __future__ import annotations

from typing import Any

import models
import nodes as comfy_nodes
import torch
from session import patch, reports, sample


def report(model: Any, save_profile: str) -> list[str]:
    """Lines of SpargeAttentionReport."""
    node = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeAttentionReport"]
    latent = {"samples": torch.zeros(1)}
    passed, text, _ = node.execute(model, latent, save_profile).args
    assert passed is latent
    return text.splitlines()


def lora(model: Any) -> Any:
    """A LoRA that changes nothing."""
    key, adapted = "diffusion_model.blocks.0.self_attn.q.weight", model.clone()
    weight = torch.zeros_like(model.model.state_dict()[key])
    assert adapted.add_patches({key: ("diff", (weight,))}, 1.0)
    return adapted


def profile_saved_and_loaded() -> dict[str, Any]:
    """Saved by one run, used by the next, told of other weights, refused for another model."""
    load = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeProfileLoad"]
    aim = {"mode": "auto quality", "quality": "fast"}
    measured = patch(models.build("wan"), **aim)
    found: dict[str, Any] = {}

    def run(label: str, patched: Any, name: str = "wan", **options: Any) -> None:
        with reports() as told:
            sample(patched, name, **options)
        found[label] = told[0]

    run("measured", measured)
    saved, unsafe = (report(measured, name)[-1] for name in ("tiny wan", "../elsewhere"))
    named = aim["profile"] = load.execute("tiny wan").args[0]
    run("loaded", patch(models.build("wan"), **aim), denoise=0.5)
    run("other model", patch(models.build("ltxv"), **aim), "ltxv")
    run("other weights", patch(models.build("wan", seed=3), **aim))
    run("lora", patch(lora(models.build("wan")), **aim))
    shorter = models.empty_latent("wan", frames=3)
    run("other length", patch(models.build("wan"), **aim), latent=shorter)
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
