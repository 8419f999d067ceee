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
from scenarios import with_the_node
from session import pack, patch, relative_error, replaced, sample


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


def gguf_weights(
    checkout: str, family: str, architecture: str, quantization: str, dynamic_vram: bool
) -> dict[str, Any]:
    """Everything kept, half of the blocks, and measured heads. With DynamicVRAM, ComfyUI makes the
    tensors of the file the model's parameters; else it copies."""
    name = f"{family}-{quantization}.gguf"
    folder = Path(folder_paths.get_folder_paths("diffusion_models")[0])
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / name, family, architecture, quantization)
    if "UnetLoaderGGUF" not in comfy_nodes.NODE_CLASS_MAPPINGS:
        assert asyncio.run(comfy_nodes.load_custom_node(checkout))
    loader = comfy_nodes.NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]()
    with replaced(comfy.model_patcher.ModelPatcher, "is_dynamic", lambda self: dynamic_vram):
        model = loader.load_unet(name)[0]
    dense, delivered = sample(model, family), set()
    module = pack("nodes.attention_call")
    is_plain = module._is_plain

    def look_on(tensor: torch.Tensor) -> bool:
        delivered.add(type(tensor).__name__)
        return is_plain(tensor)

    with replaced(module, "_is_plain", look_on):
        runs = [
            with_the_node(patch(model, **widgets), family, dense, {}, repeat=False)
            for widgets in ({"topk": 1.0}, {"topk": 0.5}, {"mode": "auto quality"})
        ]
    effect = relative_error(dense, sample(models.build(family), family))
    return {"runs": runs, "delivered": sorted(delivered), "quantization_effect": effect}
