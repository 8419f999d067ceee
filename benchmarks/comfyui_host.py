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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# ComfyUI's modules are not dependencies of the development environment.
# pyright: reportMissingImports=false
import torch
from torch import Tensor

from benchmarks.comfyui_models import VideoModel, conditioning
from benchmarks.companions import ALONE, SKIPPED, Companion
from benchmarks.timing import ROOT

GIB = 2**30
REPORT = re.compile(
    r"\[Sparge\].*?(\d+) sparse and (\d+) dense self-attention calls,.*?sparse calls ([\d.]+) %"
)
NOTHING = "nothing was skipped"
#: Beginnings of ComfyUI's lines that say that it did not do what it was asked to.
REFUSED = ("Exception during fp8 op", "loaded partially")


@dataclasses.dataclass(frozen=True)
class Sampling:
    steps: int
    cfg: float = 1.0
    one_by_one: bool = False  # a prompt is a token shorter, so that both cannot be in one batch

    def parts(self, models: int) -> list[tuple[int, int]]:
        """First step, and the step after the last, of each model."""
        edges = [self.steps * index // models for index in range(models)]
        return list(zip(edges, [*edges[1:], self.steps], strict=True))


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One sampling run: seconds of each model call and of all, first result, and final latent."""

    seconds: list[float]
    run_seconds: float
    first_call: Tensor
    latent: Tensor
    held_gib: float
    peak_gib: float


class CallTimer:
    """ComfyUI wrapper around the model. Installed first, so the node's own work is inside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        self.seconds: list[float] = []
        self.first_call: Tensor | None = None

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        started = seconds_of(self._device)
        out = executor(*args, **kwargs)
        self.seconds.append(seconds_of(self._device) - started)
        if self.first_call is None:
            self.first_call = out.float().cpu()
        return out


class LogLines(logging.Handler):
    """Lines that ComfyUI and the node write into the log."""

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
        import comfy.utils
        import comfyui_version
        import nodes

        comfy.utils.set_progress_bar_enabled(False)
        loaded = asyncio.run(nodes.load_custom_node(str(ROOT)))  # pyright: ignore
        assert loaded, "ComfyUI could not load the pack; its log says why"
        self.node = nodes.NODE_CLASS_MAPPINGS["SpargeAttention"]  # pyright: ignore
        self._sampler = nodes.KSamplerAdvanced()  # pyright: ignore
        self.device: torch.device = comfy.model_management.get_torch_device()
        self.version: str = comfyui_version.__version__
        self._pack = self.node.__module__.rsplit(".", 2)[0]
        self.log = LogLines()
        logging.getLogger().addHandler(self.log)

    def warm_up_seconds(self) -> float:
        """Seconds until this GPU's kernels are compiled and loaded, which a first run would wait
        for."""
        warmup = sys.modules[f"{self._pack}.sparge.kernels.warmup"]
        started = time.perf_counter()
        failure = warmup.warm_up(self.device, lambda text: None).wait(lambda: None)
        assert failure is None, failure
        return time.perf_counter() - started

    def measure_in_any_case(self) -> None:
        """Makes runs measure and be sparse in any case, as those with the usual share of dense
        steps are: one of few steps may not pay for measuring."""
        heads = sys.modules[f"{self._pack}.sparge.session.heads"].Heads
        heads._pays = lambda self, times: True

    def sample(
        self,
        model: VideoModel,
        patchers: Sequence[Any],
        sampling: Sampling,
        widgets: dict[str, Any] | None = None,
        companion: Companion = ALONE,
        runs: int = 1,
    ) -> list[Sampled]:
        """Runs a graph so often: on each model the node, unless widgets is None, and then the
        companion."""
        from comfy.patcher_extension import WrappersMP

        models, timer = [], CallTimer(self.device)
        for patcher in patchers:
            patched = patcher.clone()
            patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "benchmark", timer)
            if widgets is not None:
                patched = self.node.execute(patched, **widgets)[0]
            models.append(companion.apply(patched))
        return [self._sampled(model, models, timer, sampling) for _ in range(runs)]

    def _sampled(
        self, model: VideoModel, models: list[Any], timer: CallTimer, sampling: Sampling
    ) -> Sampled:
        """Samples as a graph does that has a KSamplerAdvanced for each model."""
        positive, negative = conditioning(model, 1), conditioning(model, 2, sampling.one_by_one)
        latent = {"samples": torch.zeros(1, *model.latent)}
        self.log.lines.clear()
        timer.restart()
        held, started = start_peak(self.device), seconds_of(self.device)
        with torch.inference_mode():
            for patched, (start, end) in zip(models, sampling.parts(len(models)), strict=True):
                latent = self._sampler.sample(
                    *(patched, "disable" if start else "enable", 0, sampling.steps, sampling.cfg),
                    *("euler", "simple", positive, negative, latent, start, end),
                    return_with_leftover_noise="disable" if end == sampling.steps else "enable",
                )[0]
        run_seconds, out = seconds_of(self.device) - started, latent["samples"]
        assert timer.first_call is not None
        assert torch.isfinite(timer.first_call).all(), "the model's result is not finite"
        assert torch.isfinite(out).all(), "the latent is not finite"
        peak = peak_gib(self.device)
        return Sampled(timer.seconds, run_seconds, timer.first_call, out, held, peak)

    def remarks(self) -> dict[str, Any]:
        """Returns ComfyUI's own remarks on the last run: steps that EasyCache skipped, refusals."""
        skipped = [int(match[1]) for line in self.log.lines if (match := SKIPPED.match(line))]
        refused = Counter(line for line in self.log.lines if line.startswith(REFUSED))
        found = {"skipped_steps": sum(skipped)} if skipped else {}
        return found | ({"refused": dict(refused)} if refused else {})

    def report(self, may_stay_dense: bool = False) -> dict[str, Any]:
        """Returns what the node said about the last run, of several models their sum. Raises
        AssertionError when nothing was sparse that should have been."""
        lines = [line for line in self.log.lines if REPORT.search(line) or NOTHING in line]
        found = [match for line in lines if (match := REPORT.search(line))]
        report = "\n".join(lines)
        sparse = sum(int(match[1]) for match in found)
        if not sparse and may_stay_dense and NOTHING in report:
            return {"sparse_calls": 0, "report": report}
        assert sparse, f"the node reports no sparse call: {report!r}"
        percent = sum(int(match[1]) * float(match[3]) for match in found) / sparse
        return {
            "sparse_calls": sparse,
            "dense_calls": sum(int(match[2]) for match in found),
            "density": round(percent / 100, 4),
            "report": report,
        }

    def forget(self) -> None:
        """Gives the memory of models that nobody holds any more back to the driver."""
        import comfy.model_management

        comfy.model_management.unload_all_models()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def seconds_of(device: torch.device) -> float:
    """Seconds of a clock when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def start_peak(device: torch.device) -> float:
    """Starts a new measurement; returns the GiB that are allocated now."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) / GIB


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0
