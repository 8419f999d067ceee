# SPDX-License-Identifier: Apache-2.0
"""Models of ComfyUI at full size with random weights: time does not depend on the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# ComfyUI's modules are not dependencies of the development environment.
# pyright: reportMissingImports=false
import torch


@dataclass(frozen=True)
class VideoModel:
    """Facts that it takes to build a model and to sample one clip with it.

    Attributes:
        shape: of the clip, width x height x frames, and the model's size.
        comfyui_class: name in ``comfy.supported_models``.
        config: of the diffusion model.
        latent: (channels, [frames,] height, width).
        text: (tokens, channels) of the prompt.
        tiny: entries of config of a model that takes seconds on a CPU, to try the benchmark itself;
            ComfyUI's Mochi asserts an MLP 12288 wide.
        wants_text_mask: the model reads the number of text tokens from an attention mask.
        pooled: width of the pooled text embedding, 0 where the model takes none.
        may_stay_dense: its calls are so short that sparse attention need not be the faster.
        experts: number of models in a row, each for as many of the steps, as Wan 2.2's two.
    """

    name: str
    shape: str
    comfyui_class: str
    config: dict[str, Any]
    latent: list[int]
    text: tuple[int, int]
    tiny: dict[str, Any]
    wants_text_mask: bool = False
    pooled: int = 0
    may_stay_dense: bool = False
    experts: int = 1

    def made_tiny(self) -> VideoModel:
        size = (4, 16, 20) if len(self.latent) == 4 else (32, 40)
        latent, config = [self.latent[0], *size], self.config | self.tiny
        return replace(self, shape="tiny", config=config, latent=latent, text=(24, 64))


MODELS = {
    name: VideoModel(name, **facts)
    for name, facts in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")).items()
}


def build(
    model: VideoModel, device: torch.device, dtype: torch.dtype, fp8: bool = False
) -> list[Any]:
    """Builds ComfyUI's ModelPatcher of each expert, loaded on ``device``; weights keep activations
    near unit size. With fp8 they are as UNETLoader's weight_dtype fp8_e4m3fn_fast makes them."""
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models

    patchers = []
    for seed in range(model.experts):
        config = getattr(comfy.supported_models, model.comfyui_class)(dict(model.config))
        config.set_inference_dtype(*((torch.float8_e4m3fn, dtype) if fp8 else (dtype, None)))
        config.optimizations["fp8"] = fp8
        base = config.get_model({}, "", device=device)
        randomize(base.diffusion_model, dtype, torch.Generator(device).manual_seed(seed))
        patchers.append(comfy.model_patcher.ModelPatcher(base, device, device))
    # ComfyUI's count of free memory does not know that the weights are there.
    comfy.model_management.load_models_gpu(patchers, force_full_load=True)
    return patchers


@torch.no_grad()
def randomize(network: Any, dtype: torch.dtype, generator: torch.Generator) -> None:
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            values, fan_in = torch.empty_like(parameter, dtype=dtype), parameter[0].numel()
            parameter.copy_(values.normal_(0.0, fan_in**-0.5, generator=generator))
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)


def conditioning(model: VideoModel, seed: int, shorter_by: int = 0) -> list[Any]:
    tokens, channels = model.text[0] - shorter_by, model.text[1]
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(1, tokens, channels, generator=generator)
    extra = {}
    if model.wants_text_mask:
        extra["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
    if model.pooled:
        extra["pooled_output"] = torch.randn(1, model.pooled, generator=generator)
    return [[text, extra]]
