# SPDX-License-Identifier: Apache-2.0
"""Model families: facts that models do not publish.

They are the token grid, what stands beside it in a self-attention sequence (text, and reference
images), and how many layers they have. To add a family, add a row to FAMILIES under the class name
of its diffusion model (docs/developing.md has all steps). A model without a row works too; its
tokens are then all alike to the policy, and the end-of-run line says so.

Text is before or after the grid and always exact. A reference of the grid's own frame size is more
frames of the grid. One of another size is exact before the grid, and after it keeps its tokens in
the order they come. A wrong guess does no harm: whatever the order, each token is itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..sparge import TokenGrid
from ..sparge.kernels.warmup import Needs
from ..sparge.reasons import Reason
from ..sparge.session import TextPosition, TokenLayout

Patch = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Inputs of the model: its token grid and patch, text (batch, tokens, width), the rest."""

    grid: tuple[int, int, int]
    patch: Patch
    context: Any
    extras: Mapping[str, Any]

    @property
    def text(self) -> int:
        """Number of tokens of text, of all encoders (HunyuanVideo has up to three)."""
        others = (self.extras.get(name) for name in ("txt_byt5", "clip_fea"))
        return sum(map(length, (self.context, *others)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a further input; () when it is not given."""
        found = self.extras.get(name)
        return tuple(found.shape) if isinstance(found, Tensor) else ()

    def latents(self, *names: str, padded: bool = True) -> list[Patch]:
        """Tokens along (time, height, width) of each latent of further inputs. padded: a patch that
        the latent fills in part counts."""
        found = [self.extras[name] for name in names if self.extras.get(name) is not None]
        several = [y for x in found for y in (x if isinstance(x, list | tuple) else (x,))]
        return [in_patches(latent.shape[2:], self.patch, padded) for latent in several]

    def around(self, first: Sequence[Patch], last: Sequence[Patch], before: int = 0) -> TokenGrid:
        """Sequence of text, latents before the clip, the clip, and latents behind it. Keys of the
        first frames are never dropped."""
        time, height, width = self.grid
        if any(size[1:] != (height, width) for size in first):
            before, first = before + sum(map(math.prod, first)), ()
        fitting = 0
        while fitting < len(last) and last[fitting][1:] == (height, width):
            fitting += 1
        lead = sum(size[0] for size in first)
        frames = lead + time + sum(size[0] for size in last[:fitting])
        tail = sum(map(math.prod, last[fitting:]))
        return TokenGrid(frames, height, width, before, lead_frames=lead, tail=tail)


def pixel_dit(model: Any, inputs: ModelInputs) -> TokenGrid:
    """PixelDiT: no more of the prompt than the model has places for."""
    return TokenGrid(*inputs.grid, prefix=min(inputs.text, model.txt_max_length))


def mochi(model: Any, inputs: ModelInputs) -> TokenGrid:
    """Mochi: the prompt's real tokens, without its padding."""
    return TokenGrid(*inputs.grid, suffix=int(inputs.extras.get("num_tokens", inputs.text)))


def wan(model: Any, inputs: ModelInputs) -> TokenGrid:
    """Wan: no text; a reference frame before the clip, further latents behind it."""
    has_place = getattr(model, "ref_conv", None) is not None
    first = inputs.latents("reference_latent", padded=False) if has_place else []
    return inputs.around(first, inputs.latents("time_dim_concat", "context_latents"))


def guide_frames(inputs: ModelInputs) -> int:
    """LTX: guides are the last frames of the latent; of small ones the model leaves tokens out."""
    shape = inputs.shape("keyframe_idxs")  # (batch, axes, tokens, ends)
    guides = shape[2] if len(shape) > 2 else 0
    frames, height, width = inputs.grid
    return min(frames - 1, guides // (height * width))


def next_dit(model: Any, inputs: ModelInputs) -> TokenGrid:
    """Z-Image and Lumina 2: prompts, what a vision model saw of the images to edit, those, and the
    picture. Z-Image fills up each of them to whole 32 tokens."""
    step = getattr(model, "pad_tokens_multiple", None) or 1
    images = inputs.latents("ref_latents", padded=False)
    before, images_tokens = [inputs.text], list(map(math.prod, images))
    if images:
        prompts = list(map(length, inputs.extras.get("ref_contexts") or ()))
        before += prompts + [1] * (len(images) - len(prompts))
    if images and getattr(model, "siglip_embedder", None) is not None:
        seen = [math.prod(x.shape[1:3]) for x in inputs.extras.get("siglip_feats") or ()]
        seen = seen[: len(images)]
        before += seen + [1] * (len(images) + 1 - len(seen))
    if any(tokens % step for tokens in images_tokens):
        before, images = before + images_tokens, []
    exact = sum(tokens + -tokens % step for tokens in before)
    return replace(inputs.around(images, (), exact), tail=-math.prod(inputs.grid) % step)


def krea(model: Any, inputs: ModelInputs) -> TokenGrid:
    """Krea 2: takes images to edit where model or conditioning says how."""
    method = inputs.extras.get("ref_latents_method", getattr(model, "default_ref_method", None))
    images = inputs.latents("ref_latents") if method is not None else ()
    return inputs.around((), images, inputs.text)


def minimax(model: Any, inputs: ModelInputs) -> TokenGrid:
    """MiniMax H3: text, key frames and references with their sound, the clip's sound, the clip."""
    packed = (inputs.extras.get("minimax_payload") or {}).get("layout")
    before = packed.segments[-1][0] if packed else inputs.text
    return TokenGrid(*inputs.grid, prefix=before)


def hidream(model: Any, inputs: ModelInputs) -> TokenGrid:
    """HiDream: the image to edit to the right of the picture; T5's text last, then Llama's last
    layer and the one of this block."""
    llama, image = inputs.shape("encoder_hidden_states_llama3"), inputs.shape("image_cond")
    time, height, width = inputs.grid
    width += sum(image[-1:]) // inputs.patch[2]
    return TokenGrid(time, height, width, suffix=inputs.text + 2 * sum(llama[-2:-1]))


def pose_branch(inputs: ModelInputs) -> tuple[TokenGrid, ...]:
    """Branch of Wan Animate 2: sequences of the poses' own frames."""
    return tuple(TokenGrid(*size) for size in inputs.latents("pose_latents") if min(size) > 0)


def refined(inputs: ModelInputs) -> tuple[TokenGrid, ...]:
    """Sequences of the refiners of OmniGen2 and Boogu: the picture, and the images to edit."""
    images = inputs.latents("ref_latents")
    of_images = [TokenGrid(*images[0], tail=sum(map(math.prod, images[1:])))] if images else []
    return (TokenGrid(*inputs.grid), *of_images)


def length(value: Any) -> int:
    """Number of tokens of (batch, tokens, width)."""
    return value.shape[1] if isinstance(value, Tensor) and value.ndim > 1 else 0


def in_patches(cells: Sequence[int], patch: Patch, padded: bool = True) -> Patch:
    """Tokens along (time, height, width) of latent cells along ([time,] height, width)."""
    whole = math.ceil if padded else math.floor
    time, height, width = (whole(c / p) for c, p in zip((1, *cells)[-3:], patch, strict=True))
    return (time, height, width)


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
    first: tuple[str, ...] = ()
    """Inputs of the model whose latents stand before the clip, behind the text."""
    last: tuple[str, ...] = ()
    """Names of inputs whose latents stand behind the clip."""
    sequence: Callable[[Any, ModelInputs], TokenGrid] | None = None
    """The whole sequence, from the model and its inputs; None where it is text and the clip between
    the latents above."""
    loose_frames: Callable[[ModelInputs], int] = lambda inputs: 0
    """Last frames of the sequence, of which the model may leave tokens out."""
    patch: Callable[[Any], Patch] = _patch
    """Latent cells per token along (time, height, width)."""
    left_out_key: str | None = None
    """Entry of transformer_options that names layers whose self-attention the model leaves out."""
    branches: Callable[[ModelInputs], tuple[TokenGrid, ...]] | None = None
    """Other sequences that attend to themselves in the same layers."""
    frame_by_frame: bool = False
    """Whether each frame of the grid attends on its own, to the whole grid and to what belongs to
    it."""

    def sequence_of(self, model: Any, inputs: ModelInputs) -> TokenGrid:
        if self.sequence is not None:
            return self.sequence(model, inputs)
        before = inputs.text if self.text is TextPosition.FIRST else 0
        after = inputs.text if self.text is TextPosition.LAST else 0
        first, last = inputs.latents(*self.first), inputs.latents(*self.last)
        return replace(inputs.around(first, last, before), suffix=after)


_FIRST, _LAST, _NONE = TextPosition.FIRST, TextPosition.LAST, TextPosition.NONE
_WAN_OF_TIME = Family("Wan", _NONE, last=("time_dim_concat",))
_WAN_HUMO = Family("Wan", _NONE, last=("time_dim_concat", "reference_latent"))
_OMNIGEN2 = Family("OmniGen2", _FIRST, ("ref_latents",), branches=refined)
_FLUX = Family("Flux", _FIRST, last=("ref_latents",))
_LTX = Family("LTXV", _NONE, loose_frames=guide_frames, patch=_one_cell)

#: Rows by class name, so that nothing here imports a model; subclasses inherit their parent's row.
FAMILIES: Mapping[str, Family] = {
    "AsymmDiTJoint": Family("Mochi", _LAST, sequence=mochi),
    "CogVideoXTransformer3DModel": Family("CogVideoX", _FIRST),
    "WanModel": Family("Wan", _NONE, sequence=wan),
    "VaceWanModel": _WAN_OF_TIME,
    "CameraWanModel": _WAN_OF_TIME,
    "WanModel_S2V": _WAN_HUMO,  # with what came before it last
    "HumoWanModel": _WAN_HUMO,
    "SCAILWanModel": Family(
        "Wan", _NONE, ("reference_latent",), ("time_dim_concat", "pose_latents")
    ),
    "WanAnimate2Model": Family("Wan", _NONE, branches=pose_branch, frame_by_frame=True),
    "HunyuanVideo": Family("HunyuanVideo", _FIRST, ("ref_latent",)),
    "LTXBaseModel": _LTX,
    "LTXAVModel": replace(_LTX, left_out_key="stg_self_attn_blocks"),
    "Kandinsky5": Family("Kandinsky 5", _NONE),
    "Flux": _FLUX,
    "Chroma": Family("Chroma", _FIRST),
    "OpenAISignatureMMDITWrapper": Family("SD3", _FIRST),
    "GeneralDIT": Family("Cosmos", _NONE),
    "MiniTrainDIT": Family("Cosmos Predict2", _NONE),
    "Anima": Family("Anima", _NONE),
    "HiDreamImageTransformer2DModel": Family("HiDream", _LAST, sequence=hidream),
    "MiniMaxH3Model": Family("MiniMax H3", _FIRST, sequence=minimax),
    "SingleStreamDiT": Family("Krea 2", _FIRST, sequence=krea),
    "OmniGen2Transformer2DModel": _OMNIGEN2,
    "BooguTransformer2DModel": replace(_OMNIGEN2, name="Boogu"),
    "MageFlowTransformer2DModel": replace(_FLUX, name="MageFlow"),
    "JoyImageTransformer3DModel": replace(_FLUX, name="JoyImage", text=_LAST),
    "LensTransformer2DModel": Family("Lens", _LAST, patch=_one_cell),
    "PixDiT_T2I": Family("PixelDiT", _FIRST, sequence=pixel_dit),
    "PidNet": Family("PiD", _FIRST, sequence=pixel_dit),
    "NextDiT": Family("Z-Image or Lumina", _FIRST, sequence=next_dit),
    "QwenImageTransformer2DModel": replace(_FLUX, name="Qwen Image"),
}

#: Remark on sparse runs of a model without a row.
UNKNOWN_MODEL = Reason(
    "the pack does not know this model: tokens stay in the order they come, and text, should there "
    "be some among them, is not kept exact",
    "unknown",
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
        heads: attention heads, as far as they are known.
    """

    double: int = 0
    places: Mapping[Place, int] = field(default_factory=dict)
    left_out_key: str | None = None
    heads: int | None = None


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
        context=length(context),
        prompts=frozenset(map(length, sequences)),
        **_layers(model, given),
    )
    if family is None:
        return layout
    patch, cells = family.patch(model), latent_shape[2:]
    layout = replace(
        layout,
        family=family.name,
        remark=None,
        text=family.text,
        grid=in_patches(cells, patch) if len(cells) in (2, 3) else None,
        heads=_num_heads(model),
        left_out_key=family.left_out_key,
        frame_by_frame=family.frame_by_frame,
    )
    if layout.grid is None:
        return layout
    inputs = ModelInputs(layout.grid, patch, context, given)
    return replace(
        layout,
        tokens=family.sequence_of(model, inputs),
        branches=family.branches(inputs) if family.branches else (),
        loose_frames=family.loose_frames(inputs),
    )


def _num_heads(model: Any) -> int | None:
    first = next(iter(getattr(model, "blocks", ())), None)
    owners = model, getattr(first, "attn", None)  # MiniMax H3 has them there
    names = ("num_heads", "num_attention_heads", "n_heads", "heads")
    return next((getattr(x, n) for x in owners for n in names if hasattr(x, n)), None)


#: Attributes of models and of their attention that hold the head dimension.
_HEAD_DIMS = ("head_dim", "dim_head", "attention_head_dim")


def needs_of(network: Any, dtype: torch.dtype | None) -> Needs:
    """Kernels that a network needs which computes in a dtype, as far as it says so."""
    parts = network.modules() if isinstance(network, nn.Module) else ()
    found = (getattr(part, name, None) for part in parts for name in _HEAD_DIMS)
    head_dim = next((each for each in found if isinstance(each, int)), None)
    hidden, heads = getattr(network, "hidden_size", None), _num_heads(network)
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    return Needs(head_dim, dtype)


def _layers(model: Any, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of a model's layers, as `ModelLayout` has them. extras: what the model is given
    beside latent and text."""
    if places := {place: number for number, place in enumerate(_places(model))}:
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
    sides = "input", "middle", "output"
    for side in sides if hasattr(model, "middle_block") else ():
        modules = [model.middle_block] if side == "middle" else getattr(model, f"{side}_blocks")
        for number, module in enumerate(modules):
            # One for each place: SVD has two in a block, over space and over time.
            blocks = (len(getattr(layer, "transformer_blocks", ())) for layer in module)
            yield from ((side, number, index) for index in range(max(blocks, default=0)))
