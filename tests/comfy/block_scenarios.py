# SPDX-License-Identifier: Apache-2.0
"""Blocks that the node takes calls for, and those that they are. Each scenario returns plain JSON
values."""

from __future__ import annotations

from typing import Any

import comfy.sample
import comfy.samplers
import models
import torch
from comfy_extras.nodes_custom_sampler import Guider_DualModel
from comfy_extras.nodes_lt import LTXVAddGuide, LTXVSpatioTemporalGuidance
from comfy_extras.nodes_slg import SkipLayerGuidanceDiTSimple
from session import pack, patch, replaced, reports, sample

AUTO: dict[str, Any] = {"mode": "auto quality", "quality": "fast"}


class Looker:
    """Notes for each self-attention call (conditionings, block that runs, row that it is given)."""

    def __init__(self, network: Any) -> None:
        self.running = -1
        self.seen: set[tuple[tuple[int, ...], int, int]] = set()
        blocks = getattr(network, "transformer_blocks", None) or network.blocks
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, number=number: self._enter(number))

    def _enter(self, number: int) -> None:
        self.running = number

    def look(self) -> Any:
        forward = pack("nodes.forward_facts").Forward
        serve = forward._serve

        def spy(this: Any, call: Any, kind: Any, layer: Any, *args: Any, **named: Any) -> Any:
            if kind.name == "SELF":
                which = tuple(call.options["transformer_options"]["cond_or_uncond"])
                self.seen.add((which, self.running, layer.number if layer.beside else layer.row))
            return serve(this, call, kind, layer, *args, **named)

        return replaced(forward, "_serve", spy)


def skipped_layer(family: str, layer: int) -> dict[str, Any]:
    """ComfyUI's skip-layer guidance, which leaves a block of the negative prompt out."""
    model = models.build(family)
    looker = Looker(model.model.diffusion_model)
    guided = SkipLayerGuidanceDiTSimple.execute(model, 0.0, 1.0, str(layer), "")[0]
    with looker.look(), reports() as found:
        sample(patch(guided, **AUTO), family)
    return {"seen": sorted(looker.seen), "report": found[0]}


def spatio_temporal_guidance(family: str) -> dict[str, Any]:
    """It asks for block 0 without its self-attention, which only models with sound heed."""
    model = models.build(family)
    looker = Looker(model.model.diffusion_model)
    guided = LTXVSpatioTemporalGuidance.execute(model, 1.0, "0", 0.0, 1.0)[0]
    with looker.look(), reports() as found:
        sample(patch(guided, **AUTO), family)
    return {"seen": sorted(looker.seen), "report": found[0]}


def guide_of_half_the_size() -> dict[str, Any]:
    """LTXV's guide for IC-LoRAs, most of whose tokens the model drops."""
    model = models.build("ltxv")
    looker = Looker(model.model.diffusion_model)
    latent = models.empty_latent("ltxv")
    height, width = latent.shape[-2:]
    reference = torch.randn(1, latent.shape[1], 1, height // 2, width // 2)
    guide, drops = LTXVAddGuide.dilate_latent(reference, 2)
    mask = torch.cat([torch.ones(1, 1, *latent.shape[2:]), torch.where(drops < 0, drops, 0)], 2)
    latent = torch.cat([latent, guide], 2)
    keyframes = {"keyframe_idxs": torch.zeros(1, 3, height * width, 2)}
    positive, negative = (
        [[tensor, options | keyframes]]
        for ((tensor, options),) in (
            models.conditioning("ltxv"),
            models.conditioning("ltxv", negative=True),
        )
    )
    noise = comfy.sample.prepare_noise(latent, 0)
    with looker.look(), reports() as found, torch.inference_mode():
        comfy.sample.sample(
            *(patch(model, **AUTO), noise, 4, 4.0, "euler", "simple", positive, negative, latent),
            seed=0,
            disable_pbar=True,
            noise_mask=mask,
        )
    return {"seen": sorted(looker.seen), "report": found[0]}


def two_models_of_a_guider() -> dict[str, Any]:
    """ComfyUI's DualModelGuider; for each model the tables that its sparse calls were given."""
    first, second = models.build("wan", seed=0), models.build("wan", seed=3)
    running: list[str] = [""]
    for name, model in (("first", first), ("second", second)):
        network = model.model.diffusion_model
        network.register_forward_pre_hook(lambda *_, name=name: running.__setitem__(0, name))
    begun, tables = pack("sparge.tune").SessionPass, {"first": set(), "second": set()}
    probe = begun.probe

    def spy(this: Any, plan: Any, *args: Any) -> Any:
        tables[running[0]].add(id(plan.table))
        return probe(this, plan, *args)

    guider = Guider_DualModel(patch(first, **AUTO), second)
    guider.set_conds(models.conditioning("wan"), models.conditioning("wan", negative=True))
    guider.set_cfg(4.0)
    latent = models.empty_latent("wan")
    sampling = first.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", 4)
    sampler, noise = comfy.samplers.sampler_object("euler"), comfy.sample.prepare_noise(latent, 0)
    with replaced(begun, "probe", spy), reports() as found, torch.inference_mode():
        guider.sample(noise, latent, sampler, sigmas, disable_pbar=True, seed=0)
    shared = tables["first"] & tables["second"]
    counts = {name: len(of_model) for name, of_model in tables.items()}
    return {"tables": counts, "shared": len(shared), "report": found[0]}
