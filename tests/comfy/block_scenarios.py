# SPDX-License-Identifier: Apache-2.0
"""Blocks that the node takes calls for, and those that they are. Each scenario returns plain JSON
values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import comfy.sample
import comfy.samplers
import models
import torch
from comfy_extras.nodes_custom_sampler import Guider_DualModel
from comfy_extras.nodes_lt import LTXVAddGuide, LTXVSpatioTemporalGuidance
from comfy_extras.nodes_slg import SkipLayerGuidanceDiTSimple
from scenarios import PATCHES
from session import pack, patch, replaced, reports, sample

AUTO: dict[str, Any] = {"mode": "auto quality", "quality": "fast"}


@contextlib.contextmanager
def looking(key: Callable[[dict[str, Any]], tuple]) -> Iterator[set[tuple]]:
    """Collects (*key(options), row) of each self-attention call."""
    seen: set[tuple] = set()
    forward = pack("nodes.run").Forward
    attend, serve, options = forward.attend, forward.serve, {}

    def asked(this: Any, call: Any, of_call: dict[str, Any], *args: Any) -> Any:
        options.update(of_call)
        return attend(this, call, of_call, *args)

    def spy(this: Any, call: Any, decision: Any, layer: Any, *args: Any, **named: Any) -> Any:
        if decision.kind.name == "SELF":
            row = layer.number if layer.beside else layer.row
            seen.add((*key(options), row))
        return serve(this, call, decision, layer, *args, **named)

    with replaced(forward, "attend", asked), replaced(forward, "serve", spy):
        yield seen


def guided(kind: str, family: str) -> dict[str, Any]:
    """Each call's conditionings, the block that runs, and its row. Skip-layer guidance leaves block
    0 of the negative prompt out; spatio-temporal guidance asks for block 0 without its
    self-attention, which only models with sound heed; a guide of half the size is LTXV's for
    IC-LoRAs, most of whose tokens the model drops."""
    model, running = models.build(family), [-1]
    network = model.model.diffusion_model
    for number, block in enumerate(getattr(network, "transformer_blocks", None) or network.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: running.__setitem__(0, number))
    latent, given = models.empty_latent(family), {}
    conds = [models.conditioning(family, negative) for negative in (False, True)]
    if kind == "skipped layer":
        model = SkipLayerGuidanceDiTSimple.execute(model, 0.0, 1.0, "0", "")[0]
    elif kind == "spatio-temporal":
        model = LTXVSpatioTemporalGuidance.execute(model, 1.0, "0", 0.0, 1.0)[0]
    else:
        height, width = latent.shape[-2:]
        reference = torch.randn(1, latent.shape[1], 1, height // 2, width // 2)
        guide, drops = LTXVAddGuide.dilate_latent(reference, 2)
        masks = [torch.ones(1, 1, *latent.shape[2:]), torch.where(drops < 0, drops, 0)]
        latent, given = torch.cat([latent, guide], 2), {"noise_mask": torch.cat(masks, 2)}
        keyframes = {"keyframe_idxs": torch.zeros(1, 3, height * width, 2)}
        conds = [[[tensor, options | keyframes]] for ((tensor, options),) in conds]
    with (
        looking(lambda options: (tuple(options["cond_or_uncond"]), running[0])) as seen,
        reports() as found,
        torch.inference_mode(),
    ):
        noise = comfy.sample.prepare_noise(latent, 0)
        comfy.sample.sample(
            *(patch(model, **AUTO), noise, 4, 4.0, "euler", "simple", *conds, latent),
            seed=0,
            disable_pbar=True,
            **given,
        )
    return {"seen": sorted(seen), "report": found[0]}


def perturbed_attention() -> dict[str, Any]:
    """The core node, which replaces the self-attention of a U-Net's middle in a pass of its own.
    Whether it does so in a call, the call's place and its row."""
    model = PATCHES["perturbed"](models.build("square unet"))

    def place(options: dict[str, Any]) -> tuple:
        perturbed = bool(options.get("patches_replace", {}).get("attn1"))
        return (perturbed, *options["block"], options["block_index"])

    with looking(place) as seen, reports() as found:
        sample(patch(model, **AUTO), "square unet")
    return {"seen": sorted(seen), "report": found[0]}


def two_models_of_a_guider() -> dict[str, Any]:
    """ComfyUI's DualModelGuider; for each model the heads that its calls asked."""
    first, second = models.build("wan", seed=0), models.build("wan", seed=3)
    running: list[str] = [""]
    for name, model in (("first", first), ("second", second)):
        network = model.model.diffusion_model
        network.register_forward_pre_hook(lambda *_, name=name: running.__setitem__(0, name))
    heads, asked = pack("sparge.session.heads").Heads, {"first": set(), "second": set()}
    of_layer = heads.of_layer

    def spy(this: Any, *args: Any) -> Any:
        asked[running[0]].add(id(this))
        return of_layer(this, *args)

    guider = Guider_DualModel(patch(first, **AUTO), second)
    guider.set_conds(models.conditioning("wan"), models.conditioning("wan", negative=True))
    guider.set_cfg(4.0)
    latent = models.empty_latent("wan")
    sampling = first.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", 4)
    sampler, noise = comfy.samplers.sampler_object("euler"), comfy.sample.prepare_noise(latent, 0)
    with replaced(heads, "of_layer", spy), reports() as found, torch.inference_mode():
        guider.sample(noise, latent, sampler, sigmas, disable_pbar=True, seed=0)
    shared = asked["first"] & asked["second"]
    counts = {name: len(of_model) for name, of_model in asked.items()}
    return {"heads": counts, "shared": len(shared), "report": found[0]}
