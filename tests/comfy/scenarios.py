# SPDX-License-Identifier: Apache-2.0
"""Runs of tiny models in ComfyUI's process. Each scenario returns plain JSON values.

`sampled` is the one that most tests need; the others change what happens inside a run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import comfy.model_patcher
import comfy.sample
import comfy.utils
import folder_paths
import image_models
import models
import nodes as comfy_nodes
import overrides
import torch
from comfy.ldm.modules import attention
from comfy.ldm.modules.attention import attention_pytorch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras import nodes_context_windows, nodes_easycache, nodes_model_advanced
from comfy_extras.nodes_hypertile import HyperTile
from comfy_extras.nodes_lt import LTXVSpatioTemporalGuidance
from comfy_extras.nodes_model_advanced import ModelAttentionBackend
from comfy_extras.nodes_nag import NAGuidance
from comfy_extras.nodes_pag import PerturbedAttentionGuidance
from comfy_extras.nodes_slg import SkipLayerGuidanceDiTSimple
from comfy_extras.nodes_tomesd import TomePatchModel
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
from session import library_calls, patch, relative_error, replaced, reports, sample

models.FAMILIES |= image_models.FAMILIES

OVERRIDE = "optimized_attention_override"


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


def overridden(meaning: overrides.Meaning) -> Callable[[Any], Any]:
    """Attention override of a pack."""

    def patched(model: Any) -> Any:
        clone = model.clone()
        options = clone.model_options["transformer_options"]
        options[OVERRIDE] = overrides.override_of(meaning, options.get(OVERRIDE))
        return clone

    return patched


def function_of_a_pack(model: Any) -> Any:
    """ComfyUI's own override of a function that is not its own."""
    clone = model.clone()
    clone.set_model_optimized_attention(lambda *args, **kw: attention_pytorch(*args, **kw))
    return clone


#: What other nodes and packs make of a model.
PATCHES: dict[str, Callable[[Any], Any]] = {
    "": lambda model: model,
    "windows": windows,
    "compiled": compiled,
    "easy cache": lambda m: nodes_easycache.EasyCacheNode.execute(m, 3.0, 0.15, 0.95, False)[0],
    "shift": lambda m: nodes_model_advanced.ModelSamplingSD3().patch(m, 20.0)[0],
    "merged tokens": lambda m: TomePatchModel.execute(m, 0.3).result[0],
    "tiles": lambda m: HyperTile.execute(m, 128, 2, 0, False)[0],
    "perturbed": lambda m: PerturbedAttentionGuidance.execute(m, 3.0).result[0],
    "normalized": lambda m: NAGuidance.execute(m, 5.0, 0.5, 1.5).result[0],
    "skipped layer": lambda m: SkipLayerGuidanceDiTSimple.execute(m, 0.0, 1.0, "0", "")[0],
    "spatio-temporal": lambda m: LTXVSpatioTemporalGuidance.execute(m, 1.0, "0", 0.0, 1.0)[0],
    "chosen backend": lambda m: ModelAttentionBackend().patch(m, "pytorch attention")[0],
    "function of a pack": function_of_a_pack,
    **{name: overridden(each) for name, each in (overrides.BACKENDS | overrides.MEANINGS).items()},
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
    of ours; the dense result has what is before.
    """

    model = PATCHES[before](models.build(name, getattr(torch, dtype)))
    if "frames" in options:
        options["latent"] = models.empty_latent(name, frames=options.pop("frames"))
    dense = seeded(model, name, options)
    found = []
    for each in widgets:
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


def preferred() -> dict[str, Any] | None:
    """Report of a model whose file prefers a function for its first block, with the blocks of the
    calls of that function, without our node and with it. None: ComfyUI has no such models yet."""
    if not hasattr(attention, "ComfyAttention"):
        return None
    model, calls = models.build("wan"), []

    def chosen(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs["transformer_options"]["block_index"])
        return attention_pytorch(*args, **kwargs)

    model.model.diffusion_model.blocks[0].self_attn.comfy_attention.function = chosen
    dense = sample(model, "wan")
    without, calls[:] = list(calls), []
    found = with_the_node(patch(model, topk=1.0), "wan", dense, {}, repeat=False)
    return found | {"without": without, "with": calls}


def places(name: str) -> dict[str, Any]:
    """First and last token that differ with another prompt, and with another seed, in the keys of
    the first of the longest self-attention calls; None where none does. tokens: all there are."""
    first = _keys(name, prompt=False, seed=0)
    return {
        "tokens": first.shape[-2],
        "text": _changed(first, _keys(name, prompt=True, seed=0)),
        "picture": _changed(first, _keys(name, prompt=False, seed=1)),
    }


def _changed(one: torch.Tensor, other: torch.Tensor) -> list[int] | None:
    """First and last token of which the keys (tokens, channels) differ."""
    found = (one != other).any(-1).nonzero()
    return [int(found.min()), int(found.max())] if len(found) else None


def _keys(name: str, prompt: bool, seed: int) -> torch.Tensor:
    """Keys (tokens, channels) of the first of the longest self-attention calls in one step."""
    kept: list[torch.Tensor] = []

    def override(func: Any, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        keys = k[0].transpose(0, 1).flatten(1) if kwargs.get("skip_reshape") else k[0].flatten(1)
        if q.shape[-2] == k.shape[-2] and len(keys) > (len(kept[0]) if kept else 0):
            kept[:] = [keys.clone()]
        return func(q, k, v, heads, *args, **kwargs)

    model = models.build(name).clone()
    model.model_options["transformer_options"][OVERRIDE] = override
    latent = models.empty_latent(name)
    noise = comfy.sample.prepare_noise(latent, seed)
    (_, extra), (text, _) = models.conditioning(name)[0], models.conditioning(name, prompt)[0]
    given = [[text, extra]]
    with torch.inference_mode():
        comfy.sample.sample(
            *(model, noise, 1, 1.0, "euler", "simple", given, given, latent),
            disable_pbar=True,
            seed=0,
        )
    return kept[0]


def cogvideox_loaded(published: str, weight_dtype: str, dynamic_vram: bool) -> int:
    """Asserts that our node offers a published file and loads what ComfyUI's own loader does of the
    same tensors under ComfyUI's names. Returns their number. With DynamicVRAM, ComfyUI makes the
    tensors of the file the model's parameters; else it copies."""
    node, loader = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeCogVideoXLoad"], comfy_nodes.UNETLoader
    names, dtypes = (each.options for each in node.define_schema().inputs)
    assert published in names and published.replace("00001", "00002") not in names
    assert dtypes == loader.INPUT_TYPES()["required"]["weight_dtype"][0]
    with replaced(comfy.model_patcher.ModelPatcher, "is_dynamic", lambda self: dynamic_vram):
        ours = node.execute(published, weight_dtype).args[0]
        with tempfile.TemporaryDirectory() as folder:
            saved = str(Path(folder) / "core.safetensors")
            plain = node.execute(published).args[0].model.diffusion_model.state_dict()
            comfy.utils.save_torch_file(plain, saved)
            with replaced(folder_paths, "get_full_path_or_raise", lambda kind, name: saved):
                (core,) = loader().load_unet("core", weight_dtype)
    assert _facts(ours) == _facts(core) and type(ours.model).__name__ == "CogVideoX"
    load, given = ours.cached_patcher_init
    expected = core.model.diffusion_model.state_dict()
    for each in (ours, load(*given, disable_dynamic=True)):
        state = each.model.diffusion_model.state_dict()
        for name, tensor in expected.items():  # 8 bits cannot be compared
            same = torch.equal(state[name].float(), tensor.float())
            assert same and state[name].dtype == tensor.dtype, name
    out = sample(ours, "cogvideox")
    assert torch.equal(out, sample(core, "cogvideox"))
    assert out.isfinite().all() and out.std() > 0
    return len(expected)


def _facts(patcher: Any) -> list[Any]:
    model = patcher.model
    return [
        *map(type, (model, patcher, model.latent_format)), repr(model.model_config.unet_config),
        *(patcher.model_dtype(), model.manual_cast_dtype),
        *(patcher.load_device, patcher.offload_device),
    ]  # fmt: skip
