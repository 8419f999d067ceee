# SPDX-License-Identifier: Apache-2.0
"""Requests of this pack to the running ComfyUI, all but the node API and those for models."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import comfy.model_management
import torch

from ..sparge.speed import Backend
from ..sparge.tune.profile_path import SUFFIX
from .host_models import file_names

#: Wrapper points of comfy.patcher_extension.WrappersMP that this pack uses.
OUTER_SAMPLE = "outer_sample"
APPLY_MODEL = "apply_model"
PREDICT_NOISE = "predict_noise"
#: Name of profiles among ComfyUI's kinds of models, and of their folder.
PROFILES = "sparge_profiles"
#: Seconds in which a busy browser drops a picture.
SECONDS_TO_DROP = 1.0
#: Mark of a node whose picture is dropped, in ComfyUI's facts of its progress.
_DROPPED = "sparge_dropped"
#: Packages that ComfyUI's functions for attention call.
_PACKAGES = {
    "attention_sage": "sageattention", "attention_xformers": "xformers",
    "attention_flash": "flash-attn", "attention_comfy_kitchen_int8": "comfy-kitchen",
}  # fmt: skip


def step_sigmas(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float]:
    """Noise level of each step, from the arguments of CFGGuider.outer_sample: (noise, latent,
    sampler, sigmas, ...). Empty when they hold no sigmas. May wait for the GPU."""
    sigmas = kwargs.get("sigmas", args[3] if len(args) > 3 else None)
    return sigmas[:-1].tolist() if isinstance(sigmas, torch.Tensor) else []


def inference_device() -> torch.device:
    return comfy.model_management.get_torch_device()


def raise_if_interrupted() -> None:
    """Raises ComfyUI's InterruptProcessingException once the user has pressed Cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def show_on_node(node_id: str | None, text: str) -> None:
    """Shows a text under the node and, of one in a subgraph, under those that hold it; nothing
    happens where no server runs (scripts)."""
    # Not imported: outside a server that import would start loading one.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if server is None or node_id is None:
        return
    parts, text = node_id.split(":"), told_apart(text)
    for depth in range(1, len(parts) + 1):
        server.send_progress_text(text, ":".join(parts[:depth]))


def told_apart(text: str) -> str:
    """The lines of a text, ended like sentences but for the last and those before a bracket: Nodes
    2.0 shows breaks between lines as spaces."""
    lines = text.rstrip().split("\n")
    for number, following in enumerate(lines[1:]):
        if not lines[number].endswith((".", ":", ";", "!", "?")) and following[:1] != "(":
            lines[number] += "."
    return "\n".join(lines)


def nodes_behind(node_id: str | None, kind: str) -> dict[str, Mapping[str, Any]]:
    """Inputs by id of the nodes of a kind in the running graph that get their model from a node,
    whatever it went through; none where no server runs."""
    progress = sys.modules.get("comfy_execution.progress")
    if progress is None or node_id is None:
        return {}
    graph = progress.get_progress_state().dynprompt
    found: dict[str, Mapping[str, Any]] = {}
    known = graph.all_node_ids()
    for each in known:
        node = graph.get_node(each)
        if node["class_type"] != kind:
            continue
        inputs = given = node.get("inputs", {})  # one that does not run may have none
        passed: set[str] = set()
        # Nodes that merge give out a clone of their first model.
        while isinstance(link := given.get("model", given.get("model1")), list) and link:
            if (source := str(link[0])) == node_id:
                found[each] = inputs
                break
            if source in passed or source not in known:  # a part of the graph that does not run
                break
            passed.add(source)
            given = graph.get_node(source).get("inputs", {})
    return found


def show_picture(node_id: str, image: Any) -> None:
    """Shows a Pillow image on a node of the running graph, until drop_picture or that node runs."""
    _tell_browser(node_id, ("PNG", image, None))


def drop_picture(node_id: str) -> None:
    """Has the browser drop what show_picture showed, in time.

    It drops such a picture .4 s after the node began to run. Nodes 2.0 goes on showing it where the
    node gives its own images sooner, so the node is said to run and then not to, beforehand.
    """
    progress = sys.modules["comfy_execution.progress"]
    entry = progress.get_progress_state().ensure_entry(node_id)
    was, entry["state"] = entry["state"], progress.NodeState.Running
    _tell_browser(node_id)
    entry["state"] = was
    _tell_browser(node_id)
    entry[_DROPPED] = time.perf_counter()


def let_picture_go(node_id: str | None) -> None:
    """Waits for what drop_picture asked of the node that runs now, where that is not long ago."""
    progress = sys.modules.get("comfy_execution.progress")
    if progress is None or node_id is None:
        return
    dropped = progress.get_progress_state().ensure_entry(node_id).get(_DROPPED, -math.inf)
    time.sleep(max(0.0, dropped + SECONDS_TO_DROP - time.perf_counter()))


def _tell_browser(node_id: str, picture: tuple[str, Any, None] | None = None) -> None:
    """Sends the progress of all nodes, and a picture for one."""
    state = sys.modules["comfy_execution.progress"].get_progress_state()
    if (browser := state.handlers.get("webui")) is not None:
        entry = state.ensure_entry(node_id)
        browser.update_handler(node_id, 0, 1, entry, state.prompt_id, picture)


def untracked_allocations() -> AbstractContextManager[None]:
    """Context around work inside an attention call that other calls do without. ComfyUI's compiler,
    where there is one, records the allocations of a forward pass and expects the same in the next.
    """
    prefetch = sys.modules.get("comfy.model_prefetch")
    return getattr(prefetch, "pause_malloc_graph", nullcontext)()


def exact_attention() -> Callable[..., torch.Tensor]:
    """ComfyUI's own function for exact attention, as its start options chose it."""
    import comfy.ldm.modules.attention as attention

    return attention.optimized_attention


def exact_backend() -> Backend:
    chosen = exact_attention()
    return Backend(
        backend_name(chosen), lambda q, k, v: chosen(q, k, v, q.shape[1], skip_reshape=True)
    )


def backend_name(function: object) -> str:
    """Name of one of ComfyUI's functions for attention, with the version of the package that it
    calls, and the order in which it asks PyTorch for kernels."""
    name = getattr(function, "__name__", "")
    order = getattr(sys.modules.get("comfy.ops"), "SDPA_BACKEND_PRIORITY", ())
    return " ".join([name, *_version(name), *(kernel.name for kernel in order)])


@functools.cache
def _version(name: str) -> tuple[str, ...]:
    """Version of the package behind an attention function; none where it is PyTorch's."""
    with contextlib.suppress(KeyError, importlib.metadata.PackageNotFoundError):
        return (importlib.metadata.version(_PACKAGES[name]),)
    return ()


def profile_folder() -> Path:
    """Folder that profiles of measured heads are saved in; it may not exist yet. It is the first of
    those that ComfyUI looks for them in, which extra_model_paths.yaml may add to."""
    import folder_paths

    folder = Path(folder_paths.models_dir) / PROFILES
    folder_paths.add_model_folder_path(PROFILES, str(folder), is_default=True)
    return folder


def profile_names() -> list[str]:
    """Names of the files with profiles, as `file_names` has them."""
    profile_folder()
    return [name for name in file_names(PROFILES) if name.lower().endswith(SUFFIX)]


def profile_file(name: str) -> Path | None:
    """File of a profile, named with or without its suffix; None for what is not in the list, so
    that no name leads out of the folders."""
    import folder_paths

    known = {name, name + SUFFIX}.intersection(profile_names())
    found = [folder_paths.get_full_path(PROFILES, each) for each in known]
    return next((Path(path) for path in found if path), None)


def seconds_when_done() -> float:
    """Seconds of a clock when the device has done all that it was given."""
    device = inference_device()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def sampled_latent(model: Any, latent: Mapping[str, Any]) -> Any:
    """Tensor of a latent as a KSampler samples it: an empty one of another model's is resized."""
    import comfy.sample

    ratios = (latent.get(f"downscale_ratio_{along}") for along in ("spacial", "temporal"))
    return comfy.sample.fix_empty_latent_channels(model, latent["samples"], *ratios)


def sample(model: Any, positive: Any, latent: Any, steps: int) -> None:
    """Samples a `sampled_latent` without guidance, as a KSampler of that many steps does."""
    import comfy.sample

    noise = comfy.sample.prepare_noise(latent, 0)
    conds = positive, positive
    comfy.sample.sample(
        model, noise, steps, 1.0, "euler", "simple", *conds, latent, disable_pbar=True
    )
