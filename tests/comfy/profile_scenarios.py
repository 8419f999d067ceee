# SPDX-License-Identifier: Apache-2.0
"""Reports and profiles of measured heads. Each scenario returns plain JSON values."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import folder_paths
import models
import nodes as comfy_nodes
import torch
from session import patch, reports, sample
from utils.extra_config import load_extra_path_config


def report(model: Any, save_profile: str) -> list[str]:
    """Lines of SpargeAttentionReport."""
    node, latent = (
        comfy_nodes.NODE_CLASS_MAPPINGS["SpargeAttentionReport"],
        {"samples": torch.zeros(1)},
    )
    given = node.execute(model, latent, save_profile)
    passed, text, picture = given.args
    assert passed is latent
    assert given.ui["text"] == (text,) and len(given.ui["images"]) == 1
    assert picture.shape[2] == 800
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

    before = listed()
    run("measured", measured)
    names = "tiny wan", "tiny wan", "../elsewhere"
    saved, again, unsafe = (report(measured, name)[-1] for name in names)
    more = elsewhere("more/of wan.safetensors")
    named = aim["profile"] = load.execute("tiny wan").args[0]
    run("loaded", patch(models.build("wan"), **aim), denoise=0.5)
    run("other model", patch(models.build("ltxv"), **aim), "ltxv")
    run("other weights", patch(models.build("wan", seed=3), **aim))
    run("lora", patch(lora(models.build("wan")), **aim))
    changed = load.fingerprint_inputs("tiny wan") != load.fingerprint_inputs("none")
    return found | {
        "saved": saved,
        "again": again,
        "unsafe": unsafe,
        "changed": changed,
        "errors": errors_in(named.profile),
        "listed": [before, listed()],
        "more": [str(load.execute(more).args[0]), str(named)],
    }


def listed() -> list[str]:
    """Profiles that the loader offers."""
    load = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeProfileLoad"]
    return load.INPUT_TYPES()["optional"]["name"][1]["options"]


def elsewhere(name: str) -> str:
    """Name of a copy of the profile "tiny wan" in a folder that extra_model_paths.yaml names."""
    base = Path(folder_paths.models_dir).parent
    profile = base / "models" / "sparge_profiles" / "tiny wan.safetensors"
    file = base / "shared" / name
    file.parent.mkdir(parents=True)
    shutil.copy(profile, file)
    settings = base / "extra_model_paths.yaml"
    settings.write_text(f"shared:\n  base_path: {base}\n  sparge_profiles: shared\n")
    load_extra_path_config(str(settings))
    return name


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
