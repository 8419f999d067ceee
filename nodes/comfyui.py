# SPDX-License-Identifier: Apache-2.0
"""Requests of this pack to the running ComfyUI, all but the node API and those for files."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType
from typing import Any

import comfy.ldm.modules.attention as attention
import comfy.model_management
import torch

from ..sparge import capabilities
from ..sparge.kernels.warmup import Needs, warm_up
from ..sparge.session import Exact, Report, Session, summary, verdict
from .families import needs_of

logger = logging.getLogger("sparge")

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


def needs_of_model(model: Any) -> Needs:
    """Kernels that a BaseModel of ComfyUI needs."""
    dtype = getattr(model, "get_dtype_inference", lambda: None)()
    return needs_of(model.diffusion_model, dtype)


def prepare_kernels(device: torch.device, needs: Needs, node_id: str | None) -> None:
    """Starts compiling what a device lacks for a model, where kernels can run."""
    if capabilities(device).usable:
        warm_up(device, functools.partial(show_on_node, node_id), needs)


def await_kernels(run: Session, device: torch.device, needs: Needs, node_id: str | None) -> None:
    """Waits for them, until the user cancels: here ComfyUI does nothing else on the GPU, whose
    speed may be measured."""
    interrupt = comfy.model_management.throw_exception_if_processing_interrupted
    run.await_kernels(device, needs, functools.partial(show_on_node, node_id), interrupt)


def end_run(run: Session, stopped: bool, node_id: str | None) -> Report | None:
    """Ends a run and tells of it; None where that fails, for the run's own outcome, good or bad,
    matters more."""
    try:
        report = run.report(stopped)
        publish(report, node_id)
        return report
    except Exception:
        logger.exception("[Sparge] the report failed")
        return None


def publish(report: Report, node_id: str | None) -> None:
    """Tells of a run: the verdict on the node, one long line in the log."""
    as_meant = report.counts.sparse > 0 or report.stopped_early  # whoever stopped it knows
    level = logging.INFO if as_meant and not report.notes else logging.WARNING
    logger.log(level, "[Sparge] %s", summary(report))
    show_on_node(node_id, "\n".join(verdict(report)))


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


def tell_replaced(hook: Any) -> None:
    """Tells the nodes before that of a hook that they do nothing."""
    while (hook := hook.replaced) is not None:
        show_on_node(hook.node_id, "Replaced by the Sparge Attention after it")


def told_apart(text: str) -> str:
    """The lines of a text, ended like sentences but for the last and those before a bracket: Nodes
    2.0 shows breaks between lines as spaces."""
    return re.sub(r"(?<![.:;!?])\n(?!\()", ".\n", text.rstrip())


def _asking_code() -> CodeType | None:
    """Code of ComfyUI's wrapper around its functions for attention, where it takes out of a call
    which function the model prefers by its file (from 0.38 on)."""
    wrap = getattr(attention, "wrap_attn", None)
    code: CodeType | None = getattr(wrap and wrap(lambda: None), "__code__", None)
    return code if code and "preferred_attention" in code.co_varnames else None


#: Code that asks an override, where it knows more than it hands on.
ASKING = _asking_code()


def preferred_attention() -> Callable[..., Any] | None:
    """Function that the running call's model prefers, where the caller is an override."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not ASKING:
        frame = frame.f_back
    return frame and getattr(frame.f_locals.get("preferred_attention"), "function", None)


def untracked_allocations() -> AbstractContextManager[None]:
    """Context around work inside an attention call that other calls do without. ComfyUI's compiler,
    where there is one, records the allocations of a forward pass and expects the same in the next.
    """
    prefetch = sys.modules.get("comfy.model_prefetch")
    return getattr(prefetch, "pause_malloc_graph", nullcontext)()


def is_own_backend(override: Callable[..., Any]) -> bool:
    """Whether an override is what ComfyUI itself makes of one of its functions for attention
    (*Model Attention Backend*)."""
    cells = getattr(override, "__closure__", None) or ()
    if getattr(override, "__module__", "") != "comfy.model_patcher" or len(cells) != 1:
        return False
    chosen = cells[0].cell_contents
    return getattr(attention, getattr(chosen, "__name__", ""), None) is chosen


def exact_backend() -> Exact:
    """ComfyUI's own function for exact attention, as its start options chose it."""
    chosen = attention.optimized_attention
    return Exact(
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
