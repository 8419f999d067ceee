# SPDX-License-Identifier: Apache-2.0
"""Node SpargeCogVideoXLoad: CogVideoX from its published files."""

from __future__ import annotations

from pathlib import Path

from comfy_api.latest import io

from .cogvideox import SUFFIX, WEIGHT_DTYPES, is_later_shard, load_cogvideox
from .host_models import DIFFUSION_MODELS, file_names, file_path

ACCEPTED = (
    "Load CogVideoX takes the transformer of a CogVideoX model as .safetensors: the published "
    "files, all of one model in one folder, or a file that was converted for ComfyUI. Other models "
    "load with Load Diffusion Model."
)


def transformer_names() -> list[str]:
    """Files that may be chosen; of several that make one model, the first."""
    names = file_names(DIFFUSION_MODELS)
    return [x for x in names if x.lower().endswith(SUFFIX) and not is_later_shard(x)]


class SpargeCogVideoXLoad(io.ComfyNode):
    """Loads what ComfyUI's loader does not know by its published names."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeCogVideoXLoad",
            display_name="Load CogVideoX",
            category="model/loaders",
            description=(
                "Loads CogVideoX from its published files, which Load Diffusion Model does not "
                "know. Nothing has to be converted."
            ),
            search_aliases=["cogvideo", "diffusers", "shards"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=transformer_names(),
                    tooltip=(
                        "A file in models/diffusion_models; press R to see new ones. Of a model "
                        "in several files (00001-of-00003), put all in one folder and choose the "
                        "first. Files that were converted for ComfyUI load too."
                    ),
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    advanced=True,
                    tooltip=(
                        "Type that the weights are kept in. default: as in the file. The fp8 "
                        "types take half the memory and change the picture a little."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="For Sparge Attention, a LoRA or the sampler.")],
        )

    @classmethod
    def validate_inputs(cls, model_name: str | None = None) -> bool | str:
        """Refuses a file that is not there, before anything runs. None: another node names it."""
        try:
            return model_name is None or bool(_file(model_name))
        except ValueError as error:
            return str(error)

    @classmethod
    def execute(cls, model_name: str | None, weight_dtype: str = "default") -> io.NodeOutput:
        file = _file(model_name or "")  # null where the list is empty
        try:
            return io.NodeOutput(load_cogvideox(str(file), weight_dtype))
        except (ValueError, OSError) as error:
            raise ValueError(f"{model_name} was not loaded: {error}. {ACCEPTED}") from error


def _file(name: str) -> Path:
    """Raises ValueError where no such file may be chosen."""
    if name and not name.lower().endswith(SUFFIX):
        raise ValueError(
            f"{name} is no {SUFFIX} file, and other formats can run code when opened. {ACCEPTED}"
        )
    if not (path := file_path(DIFFUSION_MODELS, name)):
        given = f"{name} is not in models/diffusion_models" if name else "no file was chosen"
        raise ValueError(f"{given}. {ACCEPTED}")
    return path
