# SPDX-License-Identifier: Apache-2.0
"""CogVideoX models from their files to ComfyUI."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from ..sparge.cogvideox.conversion import Conversion, convert, has_core_names
from ..sparge.cogvideox.json_text import ConversionError
from ..sparge.cogvideox.layout import core_name
from ..sparge.cogvideox.shards import all_shards
from ..sparge.cogvideox.tensor_file import NewTensor
from .host_models import model_of_tensors, tensors_of_file

logger = logging.getLogger("sparge")

#: Types that weights may be kept in, as ComfyUI's own loader names them, and what that asks for.
WEIGHT_DTYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}


def load_cogvideox(path: str, weight_dtype: str, disable_dynamic: bool = False) -> Any:
    """ComfyUI's model of a published file, or of the first of several, or of a file that ComfyUI
    loads as it is. Tensors stay in the mapped files until ComfyUI copies them into the model.

    Raises ConversionError for files that are damaged, or are not all there, or of no CogVideoX
    transformer; OSError where one cannot be read.
    """
    shards = all_shards(Path(path))
    as_it_is = any(map(has_core_names, shards))
    conversion = None if as_it_is else convert(shards)
    tensors, metadata = {}, None
    for shard in shards:
        found, metadata = _read(shard)
        tensors |= found
    if conversion:
        tensors = _renamed(tensors, conversion)
        logger.info("[Sparge] %s: %s", shards[0].name, conversion.summary)
    model = model_of_tensors(tensors, metadata, WEIGHT_DTYPES[weight_dtype], disable_dynamic)
    if type(getattr(model, "model", None)).__name__ != "CogVideoX":
        raise ConversionError("ComfyUI finds no CogVideoX transformer in it")
    # ComfyUI makes further copies of a model with this, one for each GPU.
    model.cached_patcher_init = (load_cogvideox, (path, weight_dtype))
    return model


def _read(shard: Path) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    try:
        return tensors_of_file(shard)
    except Exception as error:  # readers of safetensors have errors of their own
        raise ConversionError(
            f"{shard.name} cannot be read ({error}); download it again"
        ) from error


def _renamed(tensors: dict[str, torch.Tensor], conversion: Conversion) -> dict[str, torch.Tensor]:
    """The tensors under core's names, and those that no file holds."""
    made = {
        name: torch.frombuffer(tensor.data, dtype=torch.float32).view(tensor.shape)
        for name, tensor in conversion.tensors.items()
        if isinstance(tensor, NewTensor)
    }
    return made | {core_name(name): tensor for name, tensor in tensors.items()}
