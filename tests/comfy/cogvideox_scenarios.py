# SPDX-License-Identifier: Apache-2.0
"""A tiny CogVideoX from its published files. Each scenario returns plain JSON values."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import comfy.model_patcher
import comfy.utils
import folder_paths
import nodes as comfy_nodes
import torch
from session import replaced, sample


def cogvideox_loaded(published: str, weight_dtype: str, dynamic_vram: bool) -> dict[str, Any]:
    """The model of our node beside that of ComfyUI's. With DynamicVRAM, ComfyUI makes the tensors
    of the file the model's parameters; else it copies."""
    node = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeCogVideoXLoad"]
    with replaced(comfy.model_patcher.ModelPatcher, "is_dynamic", lambda self: dynamic_vram):
        ours = node.execute(published, weight_dtype).args[0]
        with tempfile.TemporaryDirectory() as folder:
            saved = str(Path(folder) / "core.safetensors")
            plain = node.execute(published).args[0].model.diffusion_model.state_dict()
            comfy.utils.save_torch_file(plain, saved)
            with replaced(folder_paths, "get_full_path_or_raise", lambda kind, name: saved):
                (core,) = comfy_nodes.UNETLoader().load_unet("core", weight_dtype)
    load, given = ours.cached_patcher_init
    copied, *models = load(*given, disable_dynamic=True), ours, core
    states = [each.model.diffusion_model.state_dict() for each in (copied, *models)]
    outputs = [sample(each, "cogvideox") for each in models]
    return {
        "tensors": len(states[0]),
        "offered": node.define_schema().inputs[0].options,
        "dtypes": node.define_schema().inputs[1].options,
        "core's dtypes": comfy_nodes.UNETLoader.INPUT_TYPES()["required"]["weight_dtype"][0],
        "facts": [
            {
                "model": type(each.model).__name__,
                "config": repr(each.model.model_config.unet_config),
                "latents": type(each.model.latent_format).__name__,
                "dtype": str(each.model_dtype()),
                "cast": str(each.model.manual_cast_dtype),
                "devices": [str(each.load_device), str(each.offload_device)],
                "patcher": type(each).__name__,
            }
            for each in models
        ],
        "weights differ": [
            name
            for state in states
            for name, tensor in states[-1].items()
            if state[name].dtype != tensor.dtype
            or not torch.equal(state[name].float(), tensor.float())  # 8 bits cannot be compared
        ],
        "finite": bool(outputs[0].isfinite().all() and outputs[0].std() > 0),
        "outputs are equal": torch.equal(*outputs),
    }


def cogvideox_at_its_size(name: str) -> dict[str, Any]:
    """A model of DynamicVRAM. ends: bits of each tensor's first and last element."""
    node = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeCogVideoXLoad"]
    before = _own_bytes()
    with replaced(comfy.model_patcher.ModelPatcher, "is_dynamic", lambda self: True):
        model = node.execute(name).args[0].model
    network = model.diffusion_model.state_dict()
    return {
        "network": type(model).__name__,
        "taken": _own_bytes() - before,
        "shapes": {key: list(tensor.shape) for key, tensor in network.items()},
        "ends": {
            key: [end.view(torch.int16).item() for end in tensor.flatten()[[0, -1]]]
            for key, tensor in network.items()
            if tensor.dtype == torch.bfloat16
        },
    }


def _own_bytes() -> int:
    """Bytes of memory that the process has to itself: mapped files are not among them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) << 10
