# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers of diffusers with random weights, and what their pipelines give to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .pipelines import TEXT, WIDTH, diffusers, drawn, made, mask

CLIP, PICTURE, EDITED = (3, 6, 8), (1, 10, 14), (1, 6, 8)
LATENT = (3, 12, 16)
#: Real tokens of text of masked models; tokens of what else models are given.
REAL, SECOND_TEXT, IMAGE, SOUND, CONDITION = 19, 9, 5, 20, 7


@dataclass(frozen=True)
class TinyTransformer:
    """A transformer and what a pass gets beside the timestep; self-attention calls of the clip in
    it, real tokens of text before and after the grid, those behind it that are no text, and calls
    of a few tokens outside of the blocks."""

    model: nn.Module
    given: dict[str, Any]
    grid: tuple[int, int, int] = CLIP
    sparse: int = 2
    text: tuple[int, int] = (0, 0)
    tail: int = 0
    beside: int = 0

    def __call__(self, seed: int) -> Tensor:
        listed = "x" in self.given
        prompt, timestep = ("cap_feats", "t") if listed else ("encoder_hidden_states", "timestep")
        text = self.given[prompt]
        if isinstance(text, Tensor):
            text = drawn(*text.shape, seed=seed)
        else:
            text = type(text)([drawn(*text[0].shape, seed=seed), *text[1:]])
        given = self.given | {prompt: text, timestep: torch.ones(1).bfloat16()}
        (out, *_) = self.model(**given, return_dict=False)
        return out[0] if listed else out


def _loaded(model: Any) -> Any:
    """A model as loading leaves it, with gates that hide nothing."""
    for name, module in model.bfloat16().named_modules():
        if any(part in name.split(".") for part in model._keep_in_fp32_modules or ()):
            module.float()
    for weight in model.parameters():
        if not weight.any():
            nn.init.normal_(weight, std=0.1)
    return model.eval()


def _tiny(kind: str, given: dict[str, Any], facts: Any = None, **config: Any) -> TinyTransformer:
    sizes = {"in_channels": 4, "num_layers": 2} | config
    common = {
        "hidden_states": drawn(1, sizes["in_channels"], *LATENT, seed=1),
        "encoder_hidden_states": drawn(1, TEXT, WIDTH, seed=2),
    }  # fmt: skip
    model = _loaded(made(getattr(diffusers, kind), **sizes))
    return TinyTransformer(model, common | given, **facts or {})


def _picture(kind: str, given: Any, real: int, tail: int = 0, **config: Any) -> TinyTransformer:
    sizes = {"in_channels": 16, "joint_attention_dim": WIDTH, "axes_dims_rope": (16, 24, 24)}
    tokens = {"hidden_states": drawn(1, prod(PICTURE) + tail, 16, seed=1)}
    facts = {"grid": PICTURE, "text": (real, 0), "tail": tail}
    return _tiny(f"{kind}Transformer2DModel", tokens | given, facts, **sizes | config)


def _ids(number: int, grid: tuple[int, int, int], columns: int) -> Tensor:
    ids = torch.cartesian_prod(torch.tensor([number]), *map(torch.arange, grid[1:]))
    return nn.functional.pad(ids, (0, columns - 3))


def _wan(kind: str, given: Any = None, facts: Any = None, **config: Any) -> TinyTransformer:
    sizes = {"text_dim": WIDTH, "freq_dim": 32, "ffn_dim": 64, "rope_max_seq_len": 64} | config
    sizes |= {"patch_size": (1, 2, 2), "out_channels": 4}
    return _tiny(f"{kind}Transformer3DModel", given or {}, facts, **sizes)


def wan_animate() -> TinyTransformer:
    pose, faces = drawn(1, 4, 2, 12, 16, seed=3), drawn(1, 3, 5, 16, 16, seed=4)
    return _wan(
        "WanAnimate", {"pose_hidden_states": pose, "face_pixel_values": faces}, in_channels=12,
        latent_channels=4, image_dim=None, motion_dim=4, inject_face_latents_blocks=2,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16}, motion_encoder_size=16,
        motion_style_dim=16, motion_encoder_dim=16, face_encoder_hidden_dim=16,
    )  # fmt: skip


def cosmos_2_5() -> TinyTransformer:
    text_and_image = drawn(1, TEXT, WIDTH, seed=2), drawn(1, IMAGE, 16, seed=3)
    return _tiny(
        "CosmosTransformer3DModel", {"encoder_hidden_states": text_and_image}, out_channels=4,
        text_embed_dim=WIDTH, adaln_lora_dim=16, max_size=(8, 32, 32), concat_padding_mask=False,
        extra_pos_embed_type=None, img_context_dim_in=16, img_context_dim_out=128,
    )  # fmt: skip


def kandinsky() -> TinyTransformer:
    torch.manual_seed(0)
    sizes = {"time_dim": 32, "model_dim": 128, "ff_dim": 64, "num_text_blocks": 1}
    texts = {"in_text_dim": WIDTH, "in_text_dim2": 16}
    model = diffusers.Kandinsky5Transformer3DModel(num_visual_blocks=2, **sizes, **texts)
    given = {
        "hidden_states": drawn(1, *LATENT, 4, seed=1), "text_rope_pos": torch.arange(TEXT),
        "encoder_hidden_states": drawn(1, TEXT, WIDTH, seed=2),
        "pooled_projections": drawn(1, 16, seed=3),
        "visual_rope_pos": [torch.arange(size) for size in CLIP],
    }  # fmt: skip
    return TinyTransformer(_loaded(model), given)


def ltx_2() -> TinyTransformer:
    tokens = prod(CLIP) + CONDITION
    given = dict(zip(("num_frames", "height", "width"), CLIP, strict=True)) | {
        "hidden_states": drawn(1, tokens, 16, seed=1), "audio_num_frames": SOUND,
        "audio_hidden_states": drawn(1, SOUND, 8, seed=3),
        "audio_encoder_hidden_states": drawn(1, TEXT, WIDTH, seed=4),
        "video_coords": torch.rand(1, 3, tokens, 2),
    }  # fmt: skip
    return _tiny(
        "LTX2VideoTransformer3DModel", given, {"tail": CONDITION}, in_channels=16, out_channels=16,
        cross_attention_dim=128, audio_cross_attention_dim=64, audio_num_attention_heads=2,
        audio_attention_head_dim=32, audio_in_channels=8, audio_out_channels=8,
        caption_channels=WIDTH,
    )  # fmt: skip


def hunyuan_video_1_5() -> TinyTransformer:
    """Its mask is padding of queries times padding of keys."""
    given = {
        "encoder_attention_mask": mask(REAL), "image_embeds": drawn(1, IMAGE, 16, seed=4) * 0,
        "encoder_hidden_states_2": drawn(1, SECOND_TEXT, 32, seed=3),
        "encoder_attention_mask_2": torch.arange(SECOND_TEXT)[None] < 4,
    }  # fmt: skip
    return _tiny(
        "HunyuanVideo15Transformer3DModel", given, {"text": (0, 4 + REAL), "beside": 1},
        num_refiner_layers=1, patch_size=2, text_embed_dim=WIDTH, text_embed_2_dim=32,
        out_channels=4, image_embed_dim=16, rope_axes_dim=(16, 24, 24),
    )  # fmt: skip


def flux_2() -> TinyTransformer:
    ids = torch.cat([_ids(0, PICTURE, 4), _ids(10, EDITED, 4)])
    return _picture(
        "Flux2", {"img_ids": ids[None], "txt_ids": torch.zeros(1, TEXT, 4)}, TEXT, prod(EDITED),
        axes_dims_rope=(16, 16, 16, 16), num_layers=1, num_single_layers=1, guidance_embeds=False,
    )  # fmt: skip


def chroma() -> TinyTransformer:
    real = torch.cat([mask(REAL), torch.ones(1, prod(PICTURE), dtype=torch.bool)], 1)
    ids = {"img_ids": _ids(0, PICTURE, 3), "txt_ids": torch.zeros(TEXT, 3)}
    return _picture(
        "Chroma", ids | {"attention_mask": real}, REAL, num_layers=1, num_single_layers=1,
        approximator_hidden_dim=32, approximator_layers=1,
    )  # fmt: skip


def z_image() -> TinyTransformer:
    """Picture and text are filled up to multiples of 32; the picture's refiner is sparse, too."""
    torch.manual_seed(0)
    model = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=128, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=WIDTH, axes_dims=[16, 24, 24], axes_lens=[256, 256, 256],
    )  # fmt: skip
    given = {"x": [drawn(4, 1, 20, 28, seed=1)], "cap_feats": [drawn(TEXT, WIDTH, seed=2)]}
    return TinyTransformer(_loaded(model), given, PICTURE, 3, (0, 32), 160 - prod(PICTURE))


# fmt: off
VACE = {"control_hidden_states": drawn(1, 4, *LATENT, seed=3)}
TRANSFORMERS: dict[str, Callable[[], TinyTransformer]] = {
    "Wan VACE": lambda: _wan("WanVACE", VACE, {"sparse": 3}, vace_layers=[0], vace_in_channels=4),
    "Wan Animate": wan_animate,
    "SkyReels V2": lambda: _wan("SkyReelsV2"),
    "ChronoEdit": lambda: _wan("ChronoEdit"),
    "Cosmos": cosmos_2_5,
    "Kandinsky 5": kandinsky,
    "LTX-2": ltx_2,
    "HunyuanVideo 1.5": hunyuan_video_1_5,
    "Flux 2": flux_2,
    "Chroma": chroma,
    "Qwen-Image": lambda: _picture(
        "QwenImage", {"encoder_hidden_states_mask": mask(REAL), "img_shapes": [[PICTURE, EDITED]]},
        REAL, prod(EDITED), out_channels=4, num_layers=2,
    ),
    "Z-Image": z_image,
}
