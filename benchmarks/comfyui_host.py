# SPDX-License-Identifier: Apache-2.0
"""Real ComfyUI in this process, with the pack loaded as ComfyUI loads it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# ComfyUI's modules are not dependencies of the development environment.
# pyright: reportMissingImports=false
import torch
from torch import Tensor

from benchmarks.comfyui_models import VideoModel, conditioning
from benchmarks.timing import ROOT

GIB = 2**30
REPORT = re.compile(
    r"\[Sparge\].*?(\d+) sparse and (\d+) dense self-attention calls, density ([\d.]+) %"
)


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One sampling run: seconds of each model call, its first result, and the final latent."""

    seconds: list[float]
    first_call: Tensor
    latent: Tensor
    held_gib: float
    peak_gib: float


class CallTimer:
    """ComfyUI wrapper around the model. Installed first, so the node's own work is inside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: list[float] = []
        self.first_call: Tensor | None = None

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        synchronize(self._device)
        started = time.perf_counter()
        out = executor(*args, **kwargs)
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - started)
        if self.first_call is None:
            self.first_call = out.float().cpu()
        return out


class NodeLines(logging.Handler):
    """Lines that the node writes into the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Host:
    """ComfyUI of the folder `comfyui`, a checkout."""

    def __init__(self, comfyui: str) -> None:
        # This pack's root holds a package `nodes` too; ComfyUI's must be found.
        sys.path[:] = [comfyui, *(p for p in sys.path if Path(p).resolve() != ROOT)]
        self._base = tempfile.TemporaryDirectory()
        cpu = [] if torch.cuda.is_available() else ["--cpu"]
        sys.argv = ["main.py", *cpu, "--base-directory", self._base.name]
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.model_management
        import comfyui_version
        import nodes

        loaded = asyncio.run(nodes.load_custom_node(str(ROOT)))  # pyright: ignore
        assert loaded, "ComfyUI could not load the pack; its log says why"
        self.node = nodes.NODE_CLASS_MAPPINGS["SpargeAttention"]  # pyright: ignore
        self.device: torch.device = comfy.model_management.get_torch_device()
        self.version: str = comfyui_version.__version__
        self._pack = self.node.__module__.rsplit(".", 2)[0]
        self.log = NodeLines()
        logging.getLogger("sparge").addHandler(self.log)

    def warm_up_seconds(self) -> float:
        """Seconds until this GPU's kernels are compiled and loaded, which a first run would wait
        for."""
        hook, settings = (
            sys.modules[f"{self._pack}.nodes.{name}"] for name in ("hook", "settings")
        )
        started = time.perf_counter()
        warmup = hook.Hook(settings.Settings(), None).prepare_kernels(self.device)
        failure = warmup.wait(lambda: None)
        assert failure is None, failure
        return time.perf_counter() - started

    def measure_in_any_case(self) -> None:
        """Makes runs measure in any case, as those with the usual share of dense steps do.

        A run without dense steps saves on token orders, and its sparse calls with them; one of few
        steps may not pay for measuring.
        """
        costs = vars(sys.modules[f"{self._pack}.sparge.speed.measuring_cost"])
        costs |= {"ALWAYS": float("inf"), "CHOOSING": float("-inf")}

    def sample(
        self, model: VideoModel, patcher: Any, widgets: dict[str, Any] | None, calls: int
    ) -> Sampled:
        """Samples ``calls`` steps of Euler at cfg 1, which is one model call a step."""
        import comfy.sample
        from comfy.patcher_extension import WrappersMP

        timer = CallTimer(self.device)
        patched = patcher.clone()
        patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "benchmark", timer)
        if widgets is not None:
            patched = self.node.execute(patched, **widgets)[0]
        latent = torch.zeros(1, *model.latent)
        noise = comfy.sample.prepare_noise(latent, 0)
        positive, negative = conditioning(model, 1), conditioning(model, 2)
        held = start_peak(self.device)
        with torch.inference_mode():
            out = comfy.sample.sample(
                *(patched, noise, calls, 1.0, "euler", "simple", positive, negative, latent),
                seed=0,
                disable_pbar=True,
            )
        assert timer.first_call is not None
        assert torch.isfinite(timer.first_call).all(), "the model's result is not finite"
        assert torch.isfinite(out).all(), "the latent is not finite"
        return Sampled(timer.seconds, timer.first_call, out, held, peak_gib(self.device))

    def report(self, may_stay_dense: bool = False) -> dict[str, Any]:
        """Returns what the node said about the last run. Raises AssertionError when nothing was
        sparse that should have been."""
        line = self.log.lines[-1] if self.log.lines else ""
        match = REPORT.search(line)
        if not match and may_stay_dense and "NOTHING WAS SPARSE" in line:
            return {"sparse_calls": 0, "report": line}
        assert match, f"the node reports no sparse call: {line!r}"
        return {
            "sparse_calls": int(match[1]),
            "dense_calls": int(match[2]),
            "density": round(float(match[3]) / 100, 4),
            "report": line,
        }

    def forget(self) -> None:
        """Gives the memory of models that nobody holds any more back to the driver."""
        import comfy.model_management

        comfy.model_management.unload_all_models()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_peak(device: torch.device) -> float:
    """Starts a new measurement; returns the GiB that are allocated now."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) / GIB


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0
