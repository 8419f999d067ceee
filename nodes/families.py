# SPDX-License-Identifier: Apache-2.0
"""Model families: facts that models do not publish.

They are the token grid, where text stands, and how many layers they have. To add a family, add a
row to FAMILIES under the class name of its diffusion model (docs/developing.md has all steps). A
model without a row works too; its tokens are then all alike to the policy, and the end-of-run line
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..sparge import TokenGrid
from ..sparge.session import TextPosition, TokenLayout
from . import off_grid
from .off_grid import ModelInputs, OffGrid, Patch, in_patches


def _patch(model: Any) -> Patch:
    """Patch that a model publishes: one number for height and width, or a sequence of three, or of
    two in the image variant of a video model."""
    if hasattr(model, "patch_temporal"):
        return (model.patch_temporal, model.patch_spatial, model.patch_spatial)
    size = getattr(model, "patch_size", None) or model.patch
    if isinstance(size, int):
        return (getattr(model, "patch_size_t", None) or 1, size, size)
    time, height, width = [1, *size][-3:]
    return (time, height, width)


def _one_cell(model: Any) -> Patch:
    return (1, 1, 1)


@dataclass(frozen=True)
class Family:
    """Facts of one family. name is for the user."""

    name: str
    text: TextPosition
    off_grid: Callable[[Any, ModelInputs], OffGrid] | None = None
    """Tokens that stand beside the grid, from the model and its inputs."""
    patch: Callable[[Any], Patch] = _patch
    """Latent cells per token along (time, height, width)."""
    left_out_key: str | None = None
    """Entry of transformer_options that names layers whose self-attention the model leaves out."""
    branches: Callable[[ModelInputs], tuple[TokenGrid, ...]] | None = None
    """Other sequences that attend to themselves in the same layers."""
    frame_by_frame: bool = False
    """Whether each frame of the grid attends on its own, to the whole grid and to what belongs to
    it."""


_FIRST, _LAST, _NONE = TextPosition.FIRST, TextPosition.LAST, TextPosition.NONE
_WAN_OF_TIME = Family("Wan", _NONE, off_grid.wan_of_time)
_WAN_HUMO = Family("Wan", _NONE, off_grid.wan_humo)

#: Rows by class name, so that nothing here imports a model; subclasses inherit their parent's row.
FAMILIES: Mapping[str, Family] = {
    "AsymmDiTJoint": Family("Mochi", _LAST, off_grid.mochi),
    "CogVideoXTransformer3DModel": Family("CogVideoX", _FIRST, off_grid.text_first),
    "WanModel": Family("Wan", _NONE, off_grid.wan),
    "VaceWanModel": _WAN_OF_TIME,
    "CameraWanModel": _WAN_OF_TIME,
    "WanModel_S2V": _WAN_HUMO,
    "HumoWanModel": _WAN_HUMO,
    "SCAILWanModel": Family("Wan", _NONE, off_grid.wan_scail),
    "WanAnimate2Model": Family("Wan", _NONE, branches=off_grid.pose_branch, frame_by_frame=True),
    "HunyuanVideo": Family("HunyuanVideo", _FIRST, off_grid.hunyuan),
    "LTXBaseModel": Family("LTXV", _NONE, off_grid.ltx, _one_cell),
    "LTXAVModel": Family("LTXV", _NONE, off_grid.ltx, _one_cell, "stg_self_attn_blocks"),
    "Kandinsky5": Family("Kandinsky 5", _NONE),
    "Flux": Family("Flux", _FIRST, off_grid.edits_last),
    "Chroma": Family("Chroma", _FIRST, off_grid.text_first),
    "OpenAISignatureMMDITWrapper": Family("SD3", _FIRST, off_grid.text_first),
    "GeneralDIT": Family("Cosmos", _NONE),
    "MiniTrainDIT": Family("Cosmos Predict2", _NONE),
    "Anima": Family("Anima", _NONE),
    "HiDreamImageTransformer2DModel": Family("HiDream", _LAST, off_grid.hidream),
    "MiniMaxH3Model": Family("MiniMax H3", _FIRST, off_grid.minimax),
    "SingleStreamDiT": Family("Krea 2", _FIRST, off_grid.krea),
    "OmniGen2Transformer2DModel": Family(
        "OmniGen2", _FIRST, off_grid.edits_first, branches=off_grid.refined
    ),
    "BooguTransformer2DModel": Family(
        "Boogu", _FIRST, off_grid.edits_first, branches=off_grid.refined
    ),
    "MageFlowTransformer2DModel": Family("MageFlow", _FIRST, off_grid.edits_last),
    "JoyImageTransformer3DModel": Family("JoyImage", _LAST, off_grid.joy_image),
    "LensTransformer2DModel": Family("Lens", _LAST, off_grid.text_last, _one_cell),
    "PixDiT_T2I": Family("PixelDiT", _FIRST, off_grid.pixel_dit),
    "PidNet": Family("PiD", _FIRST, off_grid.pixel_dit),
    "NextDiT": Family("Z-Image or Lumina", _FIRST, off_grid.next_dit),
    "QwenImageTransformer2DModel": Family("Qwen Image", _FIRST, off_grid.edits_last),
}

#: Remark on sparse runs of a model without a row.
UNKNOWN_MODEL = (
    "the pack does not know this model: tokens stay in the order they come, and text, should there "
    "be some among them, is not kept exact"
)

#: Place of a U-Net's block: side ("input", "middle" or "output"), module on that side, block in it.
Place = tuple[str, int, int]

#: Attributes that hold the layers: a model has one of these lists, or a double and a single one.
_BLOCK_LISTS = (
    "double_blocks", "single_blocks", "double_stream_blocks", "single_stream_blocks",
    "double_stream_layers", "single_stream_layers", "joint_blocks", "patch_blocks", "blocks",
    "transformer_blocks", "visual_transformer_blocks", "layers",
)  # fmt: skip
#: Layers that run before those of the lists above and that ComfyUI gives no number, each with the
#: input without which it does not run.
_REFINERS: Mapping[str, str | None] = {
    "context_refiner": None,
    "noise_refiner": None,
    "ref_image_refiner": "ref_latents",
    "siglip_refiner": "ref_latents",
}


@dataclass(frozen=True, kw_only=True)
class ModelLayout(TokenLayout):
    """Layout of a pass of one of ComfyUI's models.

    Attributes:
        double: layers before the single-stream ones, which models number from 0 again.
        places: number of each layer of a U-Net.
        left_out_key: as in `Family`.
    """

    double: int = 0
    places: Mapping[Place, int] = field(default_factory=dict)
    left_out_key: str | None = None


def token_layout(
    diffusion_model: Any,
    latent_shape: Sequence[int],
    context: Any = None,
    extras: Mapping[str, Any] | None = None,
) -> ModelLayout:
    """Layout for a latent of shape (batch, channels, [time,] height, width), and what else the
    model is given: its context (batch, text tokens, width) and named extras."""
    model = getattr(diffusion_model, "_orig_mod", diffusion_model)  # torch.compile's wrapper
    names = [cls.__name__ for cls in type(model).__mro__]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    given = extras or {}
    sequences = [x for x in given.values() if isinstance(x, Tensor) and x.ndim == 3]
    layout = ModelLayout(
        family=names[0],
        remark=UNKNOWN_MODEL,
        context=off_grid.length(context),
        prompts=frozenset(map(off_grid.length, sequences)),
        **_layers(model, given),
    )
    if family is None:
        return layout
    patch, cells = family.patch(model), latent_shape[2:]
    layout = replace(
        layout,
        family=family.name,
        remark="",
        text=family.text,
        grid=in_patches(cells, patch) if len(cells) in (2, 3) else None,
        heads=_num_heads(model),
        left_out_key=family.left_out_key,
        frame_by_frame=family.frame_by_frame,
        masked=given.get("attention_mask") is not None,
    )
    if layout.grid is None:
        return layout
    inputs = ModelInputs(layout.grid, patch, context, given)
    beside = family.off_grid(model, inputs) if family.off_grid else OffGrid()
    return replace(
        layout,
        tokens=beside.around(layout.grid),
        branches=family.branches(inputs) if family.branches else (),
        loose_frames=beside.loose_frames,
    )


def _num_heads(model: Any) -> int | None:
    first = next(iter(getattr(model, "blocks", ())), None)
    owners = model, getattr(first, "attn", None)  # MiniMax H3 has them there
    names = ("num_heads", "num_attention_heads", "n_heads", "heads")
    return next((getattr(x, n) for x in owners for n in names if hasattr(x, n)), None)


def _layers(model: Any, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of a model's layers, as `ModelLayout` has them. extras: what the model is given
    beside latent and text."""
    places: dict[Place, int] = {}
    for place in _places(model):
        places.setdefault(place, len(places))
    if places:
        return {"blocks": len(places), "places": places}
    lists = [getattr(model, name, None) for name in _BLOCK_LISTS]
    lengths = [len(blocks) for blocks in lists if blocks is not None]
    refiners = sum(
        len(getattr(model, name, None) or ())
        for name, given in _REFINERS.items()
        if given is None or extras.get(given) is not None
    )
    double = len(getattr(model, "double_blocks", ()))
    return {"blocks": sum(lengths), "double": double, "refiners": refiners} if lengths else {}


def _places(model: Any) -> Iterator[Place]:
    """Yields the places of a U-Net's blocks, in the order they run."""
    sides = {
        "input": getattr(model, "input_blocks", None) or (),
        "middle": [getattr(model, "middle_block", None) or ()],
        "output": getattr(model, "output_blocks", None) or (),
    }
    for side, modules in sides.items():
        for number, module in enumerate(modules):
            for layer in module:
                for index, _ in enumerate(getattr(layer, "transformer_blocks", ())):
                    yield side, number, index
