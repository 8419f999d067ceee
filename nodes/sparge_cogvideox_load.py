# SPDX-License-Identifier: Apache-2.0
"""Node SpargeCogVideoXLoad: CogVideoX from its published files, whose tensors have other names in
ComfyUI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io
from torch import Tensor

ACCEPTED = (
    "Load CogVideoX takes the transformer of a CogVideoX model as .safetensors: the published "
    "files, all of one model in one folder, or a file that was converted for ComfyUI. Other models "
    "load with Load Diffusion Model."
)
#: Types that weights may be kept in, as ComfyUI's own loader names them, and what that asks for.
WEIGHT_DTYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
_FOLDER, _SUFFIX = "diffusion_models", ".safetensors"
_SHARD = re.compile(rf"(.+)-(\d{{5}})-of-(\d{{5}})\{_SUFFIX}", re.IGNORECASE)
#: By which ComfyUI knows the model, and its positions.
_SIGN, _POSITIONS = "blocks.0.norm1.linear.weight", "patch_embed.pos_embedding"
#: Parts of names in the files of diffusers, and what ComfyUI calls them.
_RENAMED = (
    (r"^transformer_blocks\.", "blocks."),
    (r"^(time|ofs)_embedding\.linear_", r"\1_embedding_linear_"),
    (r"\.attn1\.to_out\.0\.", ".attn_out."),
    (r"\.attn1\.(?:to_)?(q|k|v|norm_q|norm_k)\.", r".\1."),
    (r"\.ff\.net\.0\.proj\.", ".ff_proj."),
    (r"\.ff\.net\.2\.", ".ff_out."),
)
#: Published names of all layers, which have a weight and a bias each. _OFS: of CogVideoX 1.5 I2V.
_LAYERS = (
    "patch_embed.proj", "patch_embed.text_proj", "time_embedding.linear_1",
    "time_embedding.linear_2", "norm_final", "norm_out.linear", "norm_out.norm", "proj_out",
)  # fmt: skip
_OFS = ("ofs_embedding.linear_1", "ofs_embedding.linear_2")
_IN_BLOCK = (
    "norm1.linear", "norm1.norm", "norm2.linear", "norm2.norm", "attn1.to_q", "attn1.to_k",
    "attn1.to_v", "attn1.to_out.0", "attn1.norm_q", "attn1.norm_k", "ff.net.0.proj", "ff.net.2",
)  # fmt: skip


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
    def execute(cls, model_name: str, weight_dtype: str = "default") -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise(_FOLDER, model_name)
        try:
            return io.NodeOutput(load_cogvideox(path, weight_dtype))
        except (ValueError, OSError) as error:
            raise ValueError(f"{model_name} was not loaded: {error}. {ACCEPTED}") from error


def transformer_names() -> list[str]:
    """Files that may be chosen; of several that make one model, the first. Those of other formats
    can run code when they are opened."""
    names = folder_paths.get_filename_list(_FOLDER)
    return [
        name
        for name in names
        if name.lower().endswith(_SUFFIX)
        and not ((shard := _SHARD.fullmatch(name)) and int(shard[2]) > 1)
    ]


def load_cogvideox(path: str, weight_dtype: str, disable_dynamic: bool = False) -> Any:
    """ComfyUI's model of a published file, or of one of several, or of a file that has ComfyUI's
    names. Tensors stay in the mapped files until ComfyUI copies them into the model.

    Raises ValueError for files that are not all there or of no CogVideoX transformer.
    """
    tensors, metadata = {}, None
    for shard in _all_shards(Path(path)):
        found, metadata = comfy.utils.load_torch_file(str(shard), return_metadata=True)
        tensors |= found
    is_published = _sign(tensors) is None
    if is_published:
        tensors = {core_name(name): x for name, x in tensors.items()}
    _check_whole(tensors)
    if is_published:
        tensors = _with_positions(tensors, Path(path).with_name("config.json"))
    model: Any = comfy.sd.load_diffusion_model_state_dict(
        tensors, dict(WEIGHT_DTYPES[weight_dtype]), metadata, disable_dynamic=disable_dynamic
    )
    if type(getattr(model, "model", None)).__name__ != "CogVideoX":
        raise ValueError("ComfyUI finds no CogVideoX transformer in it")
    # ComfyUI makes further copies of a model with this, one for each GPU.
    model.cached_patcher_init = (load_cogvideox, (path, weight_dtype))
    return model


def core_name(name: str) -> str:
    """ComfyUI's name for a parameter of diffusers' CogVideoXTransformer3DModel."""
    for pattern, renamed in _RENAMED:
        name = re.sub(pattern, renamed, name)
    return name


def _sign(tensors: dict[str, Tensor]) -> str | None:
    """The name of `_SIGN`, which may have a prefix."""
    return next((name for name in tensors if f".{name}".endswith(f".{_SIGN}")), None)


def _check_whole(tensors: dict[str, Tensor]) -> None:
    """Raises ValueError unless each parameter is among ComfyUI's names: of others ComfyUI makes
    random ones, or a smaller model."""
    sign = _sign(tensors)
    if sign is None or tensors[sign].ndim != 2:
        raise ValueError("this is no CogVideoX transformer, or not the whole of one")
    names = {name.removeprefix(sign.removesuffix(_SIGN)) for name in tensors}
    blocks = {name.split(".")[1] for name in names if name.startswith("blocks.")}
    layers = [*_LAYERS, *(_OFS if any(name.startswith("ofs_") for name in names) else ())]
    layers += [f"transformer_blocks.{i}.{layer}" for i in range(len(blocks)) for layer in _IN_BLOCK]
    published = (f"{layer}.{part}" for layer in layers for part in ("weight", "bias"))
    if missing := [name for name in published if core_name(name) not in names]:
        more = f" and {len(missing) - 1} more parameters" if len(missing) > 1 else ""
        raise ValueError(f"it lacks {missing[0]}{more} of CogVideoX; download it again")


def _all_shards(path: Path) -> list[Path]:
    """The files that make one model with a file, in order."""
    if not (found := _SHARD.fullmatch(path.name)):
        return [path]
    names = (f"{found[1]}-{i:05}-of-{found[3]}{_SUFFIX}" for i in range(1, int(found[3]) + 1))
    shards = [path.with_name(name) for name in names]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise ValueError(f"{missing[0]} is not beside it; put all files of a model in one folder")
    return shards


def _with_positions(tensors: dict[str, Tensor], config: Path) -> dict[str, Tensor]:
    """Tensors under ComfyUI's names, with the table of positions that CogVideoX-2B has no file of:
    without one ComfyUI takes the positions for rotary."""
    width = tensors[_SIGN].shape[0] // 6
    said = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    rotary = said.get("use_rotary_positional_embeddings", width == 48 * 64)
    if rotary and _POSITIONS in tensors:
        raise ValueError("ComfyUI would give noise for two kinds of positions (CogVideoX-5b-I2V)")
    return tensors if rotary or _POSITIONS in tensors else tensors | {_POSITIONS: _table(width)}


def _table(width: int) -> Tensor:
    """(1, tokens, width): zero for 226 of text, then sines and cosines of 13 frames x 30 x 45. A
    quarter of the channels is of the frame, the rest of the column and of the row."""

    def waves(count: int, channels: int, scale: float) -> Tensor:
        rates = 10000.0 ** -(torch.arange(channels // 2, dtype=torch.float64) * 2 / channels)
        angles = torch.arange(count, dtype=torch.float64)[:, None] / scale * rates
        return torch.cat([angles.sin(), angles.cos()], -1)

    time, x, y = waves(13, width // 4, 1), *(waves(n, 3 * width // 8, 1.875) for n in (45, 30))
    grid = (time[:, None, None], x[None, None], y[None, :, None])
    video = torch.cat([part.expand(13, 30, 45, -1) for part in grid], -1).flatten(0, 2)
    return torch.cat([video.new_zeros(226, width), video])[None].float()
