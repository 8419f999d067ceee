# SPDX-License-Identifier: Apache-2.0
"""Requests of this pack to the running ComfyUI for files of models and for models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: Name of the kind that holds the networks which sample.
DIFFUSION_MODELS = "diffusion_models"


def file_names(kind: str) -> list[str]:
    """Names of the files of a kind of models, as they are now. Those in subfolders have a path."""
    import folder_paths

    try:
        return folder_paths.get_filename_list(kind)
    except OSError:  # what it remembers holds a folder that is gone
        names, *_ = folder_paths.get_filename_list_(kind)
        return names


def file_path(kind: str, name: str) -> Path | None:
    """File of a kind of models by its name; None where there is none. No name leads out of the
    folders."""
    import folder_paths

    path = folder_paths.get_full_path(kind, name)
    return Path(path) if path else None


def tensors_of_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Tensors of a safetensors file by name, mapped and not read where ComfyUI may do so, and its
    metadata."""
    import comfy.utils as utils

    return utils.load_torch_file(str(path), return_metadata=True)


def model_of_tensors(
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None,
    options: dict[str, Any],
    disable_dynamic: bool,
) -> Any:
    """ModelPatcher of a diffusion model, None for tensors of none that ComfyUI knows. options, and
    disable_dynamic: those of ComfyUI's loader."""
    import comfy.sd as sd

    return sd.load_diffusion_model_state_dict(
        tensors, dict(options), metadata, disable_dynamic=disable_dynamic
    )
