# SPDX-License-Identifier: Apache-2.0
"""A tiny model through another pack's GGUF loader. Each scenario returns plain JSON values."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import comfy.model_patcher
import folder_paths
import models
import nodes as comfy_nodes
import torch
from session import library_calls, pack, patch, relative_error, replaced, reports, sample


def write_gguf(path: Path, family: str, architecture: str, quantization: str) -> None:
    """Matrices in blocks of 32 weights, everything else in float32, as published files have it."""
    import gguf  # a requirement of the loader, not of ComfyUI

    plain, blocks = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType[quantization]
    writer = gguf.GGUFWriter(None, arch=architecture)
    for name, tensor in models.build(family).model.diffusion_model.state_dict().items():
        kind = blocks if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 else plain
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_gguf(checkout: str, file_name: str, dynamic_vram: bool) -> Any:
    """Loads a GGUF file. With DynamicVRAM, ComfyUI makes its tensors the model's parameters; else
    it copies."""
    if "UnetLoaderGGUF" not in comfy_nodes.NODE_CLASS_MAPPINGS:
        assert asyncio.run(comfy_nodes.load_custom_node(checkout))
    loader = comfy_nodes.NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]()
    with replaced(comfy.model_patcher.ModelPatcher, "is_dynamic", lambda self: dynamic_vram):
        return loader.load_unet(file_name)[0]


def gguf_weights(
    checkout: str, family: str, architecture: str, quantization: str, dynamic_vram: bool
) -> dict[str, Any]:
    """Dense, everything kept, half of the blocks, and measured heads; and the dense model before
    quantization."""
    name = f"{family}-{quantization}.gguf"
    folder = Path(folder_paths.get_folder_paths("diffusion_models")[0])
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / name, family, architecture, quantization)
    model = load_gguf(checkout, name, dynamic_vram)
    dense = sample(model, family)
    delivered: set[str] = set()
    hook = pack("nodes.hook")
    attention_call = hook.AttentionCall

    def look_on(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        delivered.add(type(q).__name__)
        return attention_call(q, *args, **kwargs)

    with reports() as found, library_calls() as calls, replaced(hook, "AttentionCall", look_on):
        everything = sample(patch(model, topk=1.0), family)
        half = sample(patch(model, topk=0.5), family)
        sample(patch(model, mode="auto quality"), family)
    return {
        "reports": found,
        "delivered": sorted(delivered),
        "received": sorted({name for call in calls for name in call["classes"]}),
        "dtypes": sorted({name for call in calls for name in call["dtypes"]}),
        "error_all": relative_error(everything, dense),
        "error_half": relative_error(half, dense),
        "quantization_effect": relative_error(dense, sample(models.build(family), family)),
    }
