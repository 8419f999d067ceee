# SPDX-License-Identifier: Apache-2.0
"""CogVideoX transformers in the files of a published one: tiny, or at their own sizes and empty."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROTARY = {"_class_name": "CogVideoXTransformer3DModel", "use_rotary_positional_embeddings": True}
SINCOS = {**ROTARY, "use_rotary_positional_embeddings": False}


#: Arguments of `shapes_of` for models that are published.
PUBLISHED: dict[str, dict[str, Any]] = {
    "2b": {"heads": 30, "layers": 30},
    "5b": {"heads": 48, "layers": 42},
    "1.5": {"heads": 48, "layers": 42, "patch": (128,), "out": 128},
    "1.5-i2v": {"heads": 48, "layers": 42, "patch": (256,), "out": 128, "ofs": 512},
}


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


def write_marked(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """A file of BF16 weights that takes no room on the disk: all zero, but for each tensor's first
    and last element, which are `mark` of its name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    marked, end = [], 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        marked += [(begin, name), (end - 2, name)]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        first = file.tell()
        file.truncate(first + end)
        for at, name in marked:
            file.seek(first + at)
            file.write(mark(name).to_bytes(2, "little"))


def write_empty(folder: Path, size: str, most: float = 5e9) -> Path:
    """The first file of a model of PUBLISHED, each of `most` bytes at most, by `write_marked`."""
    folder.mkdir(parents=True)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes_of(**PUBLISHED[size]).items():
        if sum(map(prod, files[-1].values())) + prod(shape) > most / 2:
            files.append({})
        files[-1][name] = shape
    stem = "diffusion_pytorch_model"
    names = [f"{stem}-{i:05}-of-{len(files):05}" for i in range(1, len(files) + 1)]
    paths = [folder / f"{name}.safetensors" for name in (names if len(files) > 1 else [stem])]
    for path, shapes in zip(paths, files, strict=True):
        write_marked(path, shapes)
    (folder / "config.json").write_text(json.dumps(SINCOS if size == "2b" else ROTARY))
    return paths[0]


def mark(name: str) -> int:
    """Bits of a small BF16 number, another one for nearly each name."""
    return 0x3000 + zlib.crc32(name.encode()) % 0x0F00


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
