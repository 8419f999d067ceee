# SPDX-License-Identifier: Apache-2.0
"""Model families: facts that models do not publish.

They are the token grid, where text stands, and how many layers they have. To add a family, add a
row to FAMILIES under the class name of its diffusion model (docs/developing.md has all steps). A
model without a row works too; its tokens are then all alike to the policy, and the end-of-run line
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..sparge import TokenGrid
from ..sparge.session import TextPosition, TokenLayout
from . import off_grid, unlisted_models
from .layer_counts import LayerCounts
from .off_grid import ModelInputs, OffGrid, Patch, in_patches


def _num_heads(model: Any) -> int | None:
    names = ("num_heads", "num_attention_heads", "n_heads", "heads")
    return next((getattr(model, name) for name in names if hasattr(model, name)), None)


@dataclass(frozen=True)
class Family:
    """Facts of one family. name is for the user; patch gives latent cells per token along (time,
    height, width)."""

    name: str
    text: TextPosition
    patch: Callable[[Any], Patch]
    off_grid: Callable[[Any, ModelInputs], OffGrid] | None = None
    """Tokens that stand beside the grid, from the model and its inputs."""
    heads: Callable[[Any], int | None] = _num_heads
    left_out_key: str | None = None
    """Entry of transformer_options that names layers whose self-attention the model leaves out."""
    branches: Callable[[ModelInputs], tuple[TokenGrid, ...]] | None = None
    """Other sequences that attend to themselves in the same layers."""
    frame_by_frame: bool = False
    """Whether each frame of the grid attends on its own, to the whole grid and to what belongs to
    it."""


def _spatial(model: Any) -> Patch:
    return (1, model.patch_size, model.patch_size)


def _spatial_and_temporal(model: Any) -> Patch:
    return (model.patch_size_t or 1, model.patch_size, model.patch_size)


def _as_published(model: Any) -> Patch:
    """Patch that the model publishes: a sequence of three numbers, or of two in the image variant
    of a video model."""
    time, height, width = [1, *model.patch_size][-3:]
    return (time, height, width)


def _one_cell(model: Any) -> Patch:
    return (1, 1, 1)


def _cosmos(model: Any) -> Patch:
    return (model.patch_temporal, model.patch_spatial, model.patch_spatial)


def _krea(model: Any) -> Patch:
    return (1, model.patch, model.patch)


def _heads_of_first_block(model: Any) -> int | None:
    return model.blocks[0].attn.heads


def _heads_of_first_layer(model: Any) -> int | None:
    return model.visual_transformer_blocks[0].self_attention.num_heads


_FIRST, _LAST, _NONE = TextPosition.FIRST, TextPosition.LAST, TextPosition.NONE
_PIXEL_DIT = Family("PixelDiT", _FIRST, _spatial, off_grid.pixel_dit)

#: Rows by class name, so that nothing here imports a model; subclasses inherit their parent's row.
FAMILIES: Mapping[str, Family] = {
    "AsymmDiTJoint": Family("Mochi", _LAST, _spatial, off_grid.mochi),
    "CogVideoXTransformer3DModel": Family(
        "CogVideoX", _FIRST, _spatial_and_temporal, off_grid.text_first
    ),
    "WanModel": Family("Wan", _NONE, _as_published, off_grid.wan),
    "VaceWanModel": Family("Wan", _NONE, _as_published, off_grid.wan_of_time),
    "CameraWanModel": Family("Wan", _NONE, _as_published, off_grid.wan_of_time),
    "WanModel_S2V": Family("Wan", _NONE, _as_published, off_grid.wan_sound_to_video),
    "HumoWanModel": Family("Wan", _NONE, _as_published, off_grid.wan_humo),
    "SCAILWanModel": Family("Wan", _NONE, _as_published, off_grid.wan_scail),
    "WanAnimate2Model": Family(
        "Wan", _NONE, _as_published, branches=off_grid.pose_branch, frame_by_frame=True
    ),
    "HunyuanVideo": Family("HunyuanVideo", _FIRST, _as_published, off_grid.hunyuan),
    "LTXBaseModel": Family("LTXV", _NONE, _one_cell, off_grid.ltx),
    "LTXAVModel": Family(
        "LTXV", _NONE, _one_cell, off_grid.ltx, left_out_key="stg_self_attn_blocks"
    ),
    "Kandinsky5": Family("Kandinsky 5", _NONE, _as_published, heads=_heads_of_first_layer),
    "Flux": Family("Flux", _FIRST, _spatial, off_grid.edits_last),
    "Chroma": Family("Chroma", _FIRST, _spatial, off_grid.text_first),
    "OpenAISignatureMMDITWrapper": Family("SD3", _FIRST, _spatial, off_grid.text_first),
    "GeneralDIT": Family("Cosmos", _NONE, _cosmos),
    "MiniTrainDIT": Family("Cosmos Predict2", _NONE, _cosmos),
    "Anima": Family("Anima", _NONE, _cosmos),
    "HiDreamImageTransformer2DModel": Family("HiDream", _LAST, _spatial, off_grid.hidream),
    "MiniMaxH3Model": Family(
        "MiniMax H3", _FIRST, _as_published, off_grid.minimax, heads=_heads_of_first_block
    ),
    "SingleStreamDiT": Family("Krea 2", _FIRST, _krea, off_grid.krea),
    "OmniGen2Transformer2DModel": Family(
        "OmniGen2", _FIRST, _spatial, off_grid.edits_first, branches=off_grid.refined
    ),
    "BooguTransformer2DModel": Family(
        "Boogu", _FIRST, _spatial, off_grid.edits_first, branches=off_grid.refined
    ),
    "MageFlowTransformer2DModel": Family("MageFlow", _FIRST, _spatial, off_grid.edits_last),
    "JoyImageTransformer3DModel": Family("JoyImage", _LAST, _as_published, off_grid.joy_image),
    "LensTransformer2DModel": Family("Lens", _LAST, _one_cell, off_grid.text_last),
    "PixDiT_T2I": _PIXEL_DIT,
    "PidNet": replace(_PIXEL_DIT, name="PiD"),
    "NextDiT": Family("Z-Image or Lumina", _FIRST, _spatial, off_grid.next_dit),
    "QwenImageTransformer2DModel": Family("Qwen Image", _FIRST, _spatial, off_grid.edits_last),
}


@dataclass(frozen=True, kw_only=True)
class ModelLayout(TokenLayout):
    """Layout of a pass of one of ComfyUI's models.

    Attributes:
        counts: layers of the model.
        left_out_key: as in `Family`.
    """

    counts: LayerCounts = field(default_factory=LayerCounts)
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
    counts, text = LayerCounts.of(model, given), off_grid.length(context)
    sequences = [x for x in given.values() if isinstance(x, Tensor) and x.ndim == 3]
    prompts = frozenset(map(off_grid.length, sequences))
    if family is None:
        name = unlisted_models.name_of(names)
        return ModelLayout(
            family=name, blocks=counts.total, refiners=counts.refiners, counts=counts,
            remark=unlisted_models.remark_of(name), context=text, prompts=prompts,
        )  # fmt: skip
    patch, cells = family.patch(model), latent_shape[2:]
    layout = ModelLayout(
        family=family.name,
        blocks=counts.total,
        refiners=counts.refiners,
        text=family.text,
        grid=in_patches(cells, patch) if len(cells) in (2, 3) else None,
        counts=counts,
        heads=family.heads(model),
        left_out_key=family.left_out_key,
        frame_by_frame=family.frame_by_frame,
        context=text,
        prompts=prompts,
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
