# SPDX-License-Identifier: Apache-2.0
"""Runs of tiny models in ComfyUI's process. Each scenario returns plain JSON values.

`sampled` is the one that most tests need; the others change what happens inside a run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import comfy.ldm.genmo.joint_model.asymm_models_joint
import comfy.ldm.minimax.model
import comfy.ldm.wan.model
import comfy.model_management
import comfy.sample
import comfy.samplers
import image_models
import models
import nodes as comfy_nodes
import torch
from comfy.ldm.modules.attention import attention_pytorch, optimized_attention
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras import nodes_context_windows, nodes_easycache, nodes_model_advanced
from comfy_extras.nodes_hypertile import HyperTile
from comfy_extras.nodes_nag import NAGuidance
from comfy_extras.nodes_pag import PerturbedAttentionGuidance
from comfy_extras.nodes_tomesd import TomePatchModel
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
from comfy_extras.nodes_wan import WanAnimate2Cache
from session import (
    Recorder,
    library_calls,
    pack,
    patch,
    relative_error,
    replaced,
    reports,
    sample,
)

models.FAMILIES |= image_models.FAMILIES

INTERRUPTED = comfy.model_management.InterruptProcessingException


def windows(model: Any) -> Any:
    return nodes_context_windows.ContextWindowsManualNode.execute(
        model, 4, 1, "standard_static", 1, False, "pyramid", 2, False
    )[0]


def compiled(model: Any) -> Any:
    """TorchCompileModel's own set-up, with the backend that needs no C compiler."""
    clone = model.clone()
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(clone, backend="eager", options=options)
    return clone


def replaced_attention(model: Any) -> Any:
    """Object patches over the self-attention of the clip in each block, as memory-saving nodes of
    other packs have them."""

    def past_the_override(module: Any) -> Any:
        inner = module.forward

        def forward(self: Any, *args: Any, transformer_options: Any = None, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        return types.MethodType(forward, module)

    clone, network = model.clone(), model.model.diffusion_model
    wan = hasattr(network, "blocks")
    key, attribute = ("blocks", "self_attn") if wan else ("transformer_blocks", "attn1")
    for index, block in enumerate(getattr(network, key)):
        place = f"diffusion_model.{key}.{index}.{attribute}.forward"
        clone.add_object_patch(place, past_the_override(getattr(block, attribute)))
    return clone


def two_heads_at_a_time(model: Any) -> Any:
    """Object patches over the attention of each block of MiniMax H3, which save memory."""
    whole = comfy.ldm.minimax.model.optimized_attention

    def in_pairs(q: Any, k: Any, v: Any, heads: int, **kwargs: Any) -> torch.Tensor:
        q, k, v = (x.take() for x in (q, k, v))
        pairs = (slice(first, first + 2) for first in range(0, heads, 2))
        outs = [whole(q[:, two], k[:, two], v[:, two], 2, **kwargs) for two in pairs]
        return torch.cat(outs, -1)

    def patched(attention: Any) -> Any:
        inner = attention.forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with replaced(comfy.ldm.minimax.model, "optimized_attention", in_pairs):
                return inner(*args, **kwargs)

        return types.MethodType(forward, attention)

    clone = model.clone()
    for index, block in enumerate(model.model.diffusion_model.blocks):
        place = f"diffusion_model.blocks.{index}.attn.forward"
        clone.add_object_patch(place, patched(block.attn))
    return clone


def other_keys(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    """Patch of a U-Net whose self-attentions have these keys and values."""

    def patched(model: Any) -> Any:
        clone = model.clone()
        clone.set_model_attn1_patch(lambda q, k, v, _: (q, change(k), change(v)))
        return clone

    return patched


def queries_in_halves(model: Any) -> Any:
    """Replacements of a U-Net's self-attentions, which save memory."""

    def halves(q: Any, k: Any, v: Any, options: dict[str, Any]) -> torch.Tensor:
        heads = options["n_heads"]
        outs = [
            optimized_attention(part, k, v, heads, transformer_options=options)
            for part in q.chunk(2, 1)
        ]
        return torch.cat(outs, 1)

    clone = model.clone()
    for side in ("input", "middle", "output"):
        for number in range(6):
            clone.set_model_attn1_replace(halves, side, number)
    return clone


#: What other nodes and packs make of a model.
PATCHES: dict[str, Callable[[Any], Any]] = {
    "": lambda model: model,
    "windows": windows,
    "compiled": compiled,
    "replaced attention": replaced_attention,
    "easy cache": lambda m: nodes_easycache.EasyCacheNode.execute(m, 3.0, 0.15, 0.95, False)[0],
    "shift": lambda m: nodes_model_advanced.ModelSamplingSD3().patch(m, 20.0)[0],
    "merged tokens": lambda m: TomePatchModel.execute(m, 0.3).result[0],
    "tiles": lambda m: HyperTile.execute(m, 128, 2, 0, False)[0],
    "perturbed": lambda m: PerturbedAttentionGuidance.execute(m, 3.0).result[0],
    "normalized": lambda m: NAGuidance.execute(m, 5.0, 0.5, 1.5).result[0],
    "heads apart": two_heads_at_a_time,
    "keys of a reference": other_keys(lambda x: torch.cat([x, x.flip(1) + 1], 1)),
    "merged keys": other_keys(lambda x: x.unflatten(1, (-1, 4)).mean(2)),
    "queries in halves": queries_in_halves,
    "pose cache": lambda m: WanAnimate2Cache.execute(m, "cpu").result[0],
}


def sampled(
    name: str,
    widgets: Sequence[dict[str, Any] | None],
    before: str = "",
    after: str = "",
    dtype: str = "float32",
    repeat: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Returns what `with_the_node` finds for each of `widgets` (None: no node), beside the dense
    result of the same model. `before` and `after` name what else patches the model, on either side
    of ours.
    """

    def build() -> Any:
        return PATCHES[before](models.build(name, getattr(torch, dtype)))

    model = build()
    if "frames" in options:
        options["latent"] = models.empty_latent(name, frames=options.pop("frames"))
    dense = seeded(model, name, options)
    found = []
    for each in widgets:
        if before == "pose cache":  # it remembers
            model = build()
        patched = model if each is None else PATCHES[after](patch(model, **each))
        found.append(with_the_node(patched, name, dense, options, repeat))
    return found


def seeded(model: Any, name: str, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)  # some nodes merge and cut at random
    return sample(model, name, **options)


def with_the_node(
    patched: Any, name: str, dense: torch.Tensor, options: dict[str, Any], repeat: bool
) -> dict[str, Any]:
    """Report of a run, what it asked the library for, the error of its result; and, asked for,
    whether another one repeats it."""
    with reports() as told:
        with library_calls() as calls:
            out = seeded(patched, name, options)
        repeats = repeat and torch.equal(out, seeded(patched, name, options)) and told[0] == told[1]
    found = {"calls": calls, "error": relative_error(out, dense), "repeats": repeats}
    return (told[0] if told else {}) | found


def advanced(high: Any, low: Any) -> torch.Tensor:
    """KSamplerAdvanced twice, a model each, as Wan 2.2 is run."""
    node = comfy_nodes.NODE_CLASS_MAPPINGS["KSamplerAdvanced"]()
    latent = {"samples": models.empty_latent("wan")}
    conds = models.conditioning("wan"), models.conditioning("wan", negative=True)
    ranges = ((high, "enable", 0, 2, "enable"), (low, "disable", 2, 10000, "disable"))
    with torch.inference_mode():
        for model, add_noise, first, last, leftover in ranges:
            given = (model, add_noise, first, 4, 4.0, "euler", "simple")
            (latent,) = node.sample(*given, *conds, latent, first, last, leftover)
    return latent["samples"]


def two_samplers(**widgets: Any) -> dict[str, Any]:
    high, low = models.build("wan", seed=0), models.build("wan", seed=1)
    with reports() as found:
        out = advanced(patch(high, **widgets), patch(low, **widgets))
    return {"reports": found, "error": relative_error(out, advanced(high, low))}


def batched_or_split(**widgets: Any) -> dict[str, Any]:
    """Cond and uncond in one forward pass, and in two because memory is short; and by how much the
    settings differ that were measured."""
    model = models.build("wan")
    patched, settings = patch(model, **widgets), []
    with reports() as found:
        together = sample(patched, "wan", steps=5)
        last = pack("nodes.hook").hook_of(patched).last
        settings.append(last)
        with replaced(model.model, "memory_required", lambda *args, **kwargs: 1e30):
            apart = sample(patched, "wan", steps=5)
        last = pack("nodes.hook").hook_of(patched).last
        settings.append(last)
    differences = {}
    for name in ("density", "pool_weight", "expected", "weight"):
        parts = [each.of_heads(name) for each in settings]
        differences[name] = float((parts[0] - parts[1]).abs().max()) if len(parts[0]) else None
    error = relative_error(apart, together)
    return {"reports": found, "error": error, "differences": differences}


def cancelled(at: int, steps: int, **widgets: Any) -> dict[str, Any]:
    """The user presses Cancel after a step; before and after it the same patched model runs."""
    patched = patch(models.build("wan"), **widgets)

    def cancel(step: int, *_: Any) -> None:
        if step == at:
            raise INTERRUPTED()

    raised = False
    with reports() as found:
        whole = sample(patched, "wan", steps=steps)
        try:
            sample(patched, "wan", steps=steps, callback=cancel)
        except INTERRUPTED:
            raised = True
        again = sample(patched, "wan", steps=steps)
    return {
        "reports": found,
        "raised": raised,
        "same_after": torch.equal(whole, again),
        "options": sorted(patched.model_options["transformer_options"]),
    }


def raising(kind: str, inside: str) -> dict[str, Any]:
    """Raises an error inside the library or the model; returns what becomes of it."""
    errors = {"interrupt": INTERRUPTED, "bug": lambda: RuntimeError("a bug")}
    model = models.build("wan")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise errors[kind]()

    library = pack("sparge.session.calls"), "attention"
    head, raised = (model.model.diffusion_model.head, "forward"), ""
    with reports() as found, replaced(*(library if inside == "library" else head), fail):
        try:
            sample(patch(model), "wan")
        except BaseException as error:
            raised = type(error).__name__
    return found[0] | {"raised": raised}


def rewraps_each_step() -> dict[str, Any]:
    """A node that re-installs itself outside of everything before each step, as ComfyUI's own does
    under this callback key."""
    recorder, model, mine = Recorder(), patch(models.build("wan")), []

    def prepare(patcher: Any, timestep: Any, model_options: dict[str, Any]) -> None:
        options = model_options["transformer_options"]
        current = options.get("optimized_attention_override")
        if current not in mine:
            mine.append(recorder.over(current))
            options["optimized_attention_override"] = mine[-1]

    model.add_callback_with_key("on_prepare_state", "block_sparse_attention", prepare)
    with reports() as found:
        sample(model, "wan", steps=20)
    return found[0] | {"wraps": len(mine), "depths": len(recorder.depths)}


#: Where the classes of the families take their attention from.
_MODULES = {"wan": comfy.ldm.wan.model, "mochi": comfy.ldm.genmo.joint_model.asymm_models_joint}


def whole_graph(name: str, by_block: bool, before: bool) -> dict[str, Any]:
    """Another pack's compile nodes with fullgraph on. ComfyUI's own choice on a CPU cannot be
    traced whole, whatever nodes there are."""
    torch._dynamo.reset()
    model, keys = models.build(name), ["diffusion_model"]
    if by_block:
        blocks = range(len(model.model.diffusion_model.blocks))
        keys = [f"diffusion_model.blocks.{i}" for i in blocks]
    clone = model.clone() if before else patch(model)
    set_torch_compile_wrapper(clone, backend="eager", fullgraph=True, keys=keys)
    with replaced(_MODULES[name], "optimized_attention", attention_pytorch):
        dense = sample(model, name)
        patched = patch(clone) if before else clone
        return with_the_node(patched, name, dense, {}, repeat=True)
