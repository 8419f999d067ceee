# SPDX-License-Identifier: Apache-2.0
"""Reports and profiles of measured heads. Each scenario returns plain JSON values."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import folder_paths
import models
import nodes as comfy_nodes
import torch
from session import pack, patch, replaced, reports, sample
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


def benchmark(family: str, of_image: bool = False) -> dict[str, Any]:
    """SpargeGPUBenchmark with pretended times of its calls; without them, and after our node.
    of_image: the latent is Empty Latent Image's, of 8 x 8 pixels a cell."""
    node, latent = (
        comfy_nodes.NODE_CLASS_MAPPINGS["SpargeGPUBenchmark"],
        {"samples": models.empty_latent(family)},
    )
    if of_image:
        (latent,) = comfy_nodes.NODE_CLASS_MAPPINGS["EmptyLatentImage"]().generate(320, 256)
    model, module, timed = models.build(family), pack("nodes.sparge_benchmark"), []

    def time_shape(grid: Any, heads: int, head_dim: int, *_: Any) -> Any:
        timed.append((grid.tokens, heads, head_dim))
        return pack("sparge.speed").ShapeTimes(
            1e-9, 2e-9, dict.fromkeys((0.5, 0.3, 0.2, 0.1), 5e-10)
        )

    def run(model: Any) -> Any:
        with torch.inference_mode():
            return node.execute(model, models.conditioning(family), latent)

    cpu, after = run(model).args[0], run(patch(model)).args[0]
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("capabilities", lambda _: SimpleNamespace(reason="")),
            ("warm_up", lambda *_: SimpleNamespace(wait=lambda check: None)),
            ("time_shape", time_shape),
        ):
            stack.enter_context(replaced(module, name, value))
        stack.enter_context(replaced(torch.cuda, "get_device_name", lambda _: "a GPU"))
        given = run(model)
    assert len(given.ui["images"]) == 1 and given.args[1].shape[2] == 800
    return {"cpu": cpu, "after": after, "timed": timed, "text": given.args[0]}
