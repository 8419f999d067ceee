# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for modules of ComfyUI that show things and find files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from safetensors import safe_open


class Shown(SimpleNamespace):
    """Stand-in for what a node shows on itself."""

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def ui() -> SimpleNamespace:
    return SimpleNamespace(
        PreviewImage=lambda image, cls: Shown(images=[image]),
        PreviewText=lambda text: Shown(text=(text,)),
    )


def module_of(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


def folder_paths(models: Path) -> ModuleType:
    """ComfyUI's folders of models."""
    of_kind = {"diffusion_models": [models / "unet"]}

    def names(kind: str) -> list[str]:
        folders = of_kind[kind]
        files = {x.relative_to(each) for each in folders for x in each.rglob("*") if x.is_file()}
        return sorted(map(str, files))

    def full_path(kind: str, name: str) -> str:
        found = (each / name for each in of_kind[kind])
        path = next((str(path) for path in found if path.is_file()), None)
        if path is None:
            raise FileNotFoundError(f"Model in folder '{kind}' with filename '{name}' not found.")
        return path

    return module_of(
        "folder_paths",
        models_dir=str(models),
        get_filename_list=names,
        get_full_path_or_raise=full_path,
    )


def model_loading() -> dict[str, ModuleType]:
    """ComfyUI's functions that load a diffusion model: the result has what they were given."""

    def load_torch_file(path: str, return_metadata: bool) -> Any:
        assert return_metadata
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # an open file cannot be iterated itself
            return {name: file.get_tensor(name) for name in names}, file.metadata()

    def load(state: Any, options: Any, metadata: Any, disable_dynamic: bool) -> Any:
        known = any(name.endswith("blocks.0.norm1.linear.weight") for name in state)
        kind = type("CogVideoX" if known and "other" not in state else "Other", (), {})
        return SimpleNamespace(
            model=kind(), state=state, options=options, metadata=metadata,
            disable_dynamic=disable_dynamic,
        )  # fmt: skip

    return {
        "comfy.utils": module_of("comfy.utils", load_torch_file=load_torch_file),
        "comfy.sd": module_of("comfy.sd", load_diffusion_model_state_dict=load),
    }
