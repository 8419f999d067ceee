# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for modules of ComfyUI that show things and find files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


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
    """ComfyUI's folders of profiles: that of models, and one "more" of extra_model_paths.yaml."""
    folders = [models / "more"]

    def add(kind: str, path: str, is_default: bool) -> None:
        assert kind == "sparge_profiles" and is_default
        folders[:] = dict.fromkeys([Path(path), *folders])

    def names(kind: str) -> list[str]:
        files = {x.relative_to(each) for each in folders for x in each.rglob("*") if x.is_file()}
        return sorted(map(str, files))

    def full_path(kind: str, name: str) -> str | None:
        return next((str(each / name) for each in folders if (each / name).is_file()), None)

    return module_of(
        "folder_paths",
        models_dir=str(models),
        add_model_folder_path=add,
        get_filename_list=names,
        get_full_path=full_path,
    )
