# SPDX-License-Identifier: Apache-2.0
"""Tiny CogVideoX transformers in the files of a published one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROTARY = {"_class_name": "CogVideoXTransformer3DModel", "use_rotary_positional_embeddings": True}
SINCOS = {**ROTARY, "use_rotary_positional_embeddings": False}


def shapes_of(
    heads: int, layers: int, time: int = 512, text: int = 4096,
    patch: tuple[int, ...] = (16, 2, 2), out: int = 64, ofs: int | None = None,
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Shapes of diffusers' CogVideoXTransformer3DModel, by their names."""
    width = heads * 64
    block = {
        **{f"norm{n}.linear": (6 * width, time) for n in (1, 2)},
        **{f"norm{n}.norm": (width,) for n in (1, 2)},
        **{f"attn1.{name}": (width, width) for name in ("to_q", "to_k", "to_v", "to_out.0")},
        **{f"attn1.{name}": (64,) for name in ("norm_q", "norm_k")},
        "ff.net.0.proj": (4 * width, width),
        "ff.net.2": (width, 4 * width),
    }
    weights: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (width, *patch),
        "patch_embed.text_proj": (width, text),
        "time_embedding.linear_1": (time, width),
        "time_embedding.linear_2": (time, time),
        "norm_final": (width,),
        "norm_out.linear": (2 * width, time),
        "norm_out.norm": (width,),
        "proj_out": (out, width),
        **({f"ofs_embedding.linear_{n}": (ofs, ofs) for n in (1, 2)} if ofs else {}),
        **{f"transformer_blocks.{i}.{name}": x for i in range(layers) for name, x in block.items()},
    }
    shapes = {f"{name}.weight": shape for name, shape in weights.items()}
    return shapes | {f"{name}.bias": shape[:1] for name, shape in weights.items()}


def published(
    generator: torch.Generator, heads: int = 2, layers: int = 2, time: int = 32, text: int = 48,
    **sizes: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A state dict of random weights. sizes: others of `shapes_of`."""
    shapes = shapes_of(heads, layers, time, text, **sizes)
    return {name: torch.randn(x, generator=generator).bfloat16() for name, x in shapes.items()}


def write_model(folder: Path, state: dict[str, torch.Tensor], config: dict | None) -> Path:
    """Two shards and a config.json, as a published model has them."""
    transformer = folder / "transformer"
    transformer.mkdir(parents=True)
    names = sorted(state)
    for i, part in enumerate((names[::2], names[1::2]), 1):
        shard = transformer / f"diffusion_pytorch_model-0000{i}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, str(shard))
    if config is not None:
        (transformer / "config.json").write_text(json.dumps(config))
    return folder
