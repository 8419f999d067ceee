# SPDX-License-Identifier: Apache-2.0
"""Handle of a pipeline whose attention is sparse: its runs, one a call of the pipeline."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compiling import has_been_traced
from ...failures import MEANT_FOR_HOST, Failures
from ...kernels import capabilities
from ...kernels.warmup import warm_up
from ...session import (
    FAILED,
    PLAIN,
    Report,
    Session,
    Settings,
    SigmaWindow,
    Step,
    Why,
    details,
    verdict,
)
from .forward import Forward
from .hooks import TransformerHooks
from .layout import layout_of
from .rows import row_of
from .shared import ranks_of
from .steps import Prompts, Steps

logger = logging.getLogger("sparge")

NOT_RUN = "The pipeline has not run since it was enabled."
REPLACED = (
    "NOTHING IS SPARSE; pipe.transformer is another model than when the pipeline was enabled: call "
    "enable again."
)
NO_SCHEDULE = "the scheduler has no timesteps, so the step is not known"
NOT_OF_SCHEDULE = "the model is given no timestep of the scheduler, so the step is not known"
OTHER_THREAD = "another thread ran the model meanwhile: its passes were left as they are"
CONTROLNET = "the attention of the pipeline's controlnet is native, and not counted"
NO_INPUTS = (
    "NOTHING WAS SPARSE; {name} is not known here, and its inputs are not named as usual: "
    "sparge.sdpa() serves it without measuring."
)
#: Names that models have for the latent, which may be a list, and for the timestep.
_LATENTS, _TIMESTEPS = ("hidden_states", "x"), ("timestep", "timesteps", "t")
#: Characters of either part of a line, which no box cuts off.
_WIDEST = 200
_BACKEND = (
    "the pipeline's attention backend does not call PyTorch's (set it to native: "
    'transformer.set_attention_backend("native"))'
)
WORDS = replace(
    PLAIN,
    no_calls=Why(
        f"no attention call came: {_BACKEND}",
        ("No attention call came", 'Set the attention backend to "native"'),
    ),
    whole_graph=Why(  # some model of the process was traced whole, maybe another one
        f"{PLAIN.whole_graph.told}, or {_BACKEND}",
        (
            "No attention call came",
            'Compile without fullgraph, or set the attention backend to "native"',
        ),
    ),
)


class Handle:
    """Handle that `enable` gives; as a context it is disabled at the end.

    A run begins with the first pass of a call of the pipeline, and is replaced by the next one.
    """

    def __init__(
        self,
        pipe: Any,
        transformers: list[torch.nn.Module],
        settings: Settings,
    ) -> None:
        self._pipe, self._settings = pipe, settings
        self._run: Session | None = None
        self._steps: Steps | None = None
        self._prompts = Prompts(pipe)
        self._remark = ""  # why no run began
        self.lock = threading.RLock()
        self._hooks = [
            TransformerHooks(self, transformer, which)
            for which, transformer in enumerate(transformers)
        ]

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *raised: object) -> None:
        self.disable()

    @property
    def models(self) -> list[torch.nn.Module]:
        """Transformers that its hooks are on; none once it is disabled."""
        return [hooks.model for hooks in self._hooks]

    @property
    def line(self) -> str:
        """Verdict on the last run: what it gained and how much was computed, or why nothing was
        sparse. Waits for the GPU."""
        if self._has_other_model:
            return REPLACED
        result = self.result
        if result is None:
            return self._not_run()
        if result.notes and not result.counts.calls:
            return f"NOTHING WAS SPARSE; {result.notes[0]}"
        return verdict(result, _WIDEST).replace("\n", "; ")

    def report(self) -> str:
        """Lines on the last run: its calls by reason, and what was measured of each layer. Waits
        for the GPU."""
        if self._has_other_model:
            return REPLACED
        result = self.result
        return self._not_run() if result is None else details(result)

    @property
    def _has_other_model(self) -> bool:
        """Whether the pipeline was given another transformer since it was enabled."""
        own = getattr(self._pipe, "transformer", None)
        models = self.models
        return bool(models) and own is not None and getattr(own, "_orig_mod", own) not in models

    def _not_run(self) -> str:
        if self._remark:
            return self._remark
        return f"{NOT_RUN} Or {PLAIN.whole_graph.told}." if has_been_traced() else NOT_RUN

    @property
    def result(self) -> Report | None:
        """Facts of the last run; None before there is one. Waits for the GPU."""
        if self._run is None:
            return None
        steps = self._steps
        finished = steps is None or not steps.are_known or steps.is_last
        return self._run.report(stopped=not finished)

    def disable(self) -> None:
        """Takes the hooks off. The pipeline is as it was; the last run can still be asked."""
        with self.lock:
            for hooks in self._hooks:
                hooks.remove()
            self._hooks.clear()
            if self._run is not None:
                self._run.end()

    def begin_pass(self, hooks: TransformerHooks, given: Mapping[str, Any]) -> Forward | None:
        """Begins a pass, and a run where it is the first one of a call of the pipeline."""
        if any(each.are_busy() for each in self._hooks):
            if self._run is not None:
                self._run.note(OTHER_THREAD)
            return None
        try:
            return self._begun(hooks, given)
        except MEANT_FOR_HOST:
            raise
        except Exception as error:  # the picture matters more
            failures = Failures() if self._run is None else self._run.failures
            failures.tell("a pass of the model was computed dense", error)
            if self._run is not None:
                self._run.note(f"passes were dense because of {FAILED}")
            return None

    def end_pass(self, forward: Forward) -> None:
        """Ends a pass. In the last step it waits for the GPU, so that the clock is right."""
        with forward.session.failures.caught("a step was not prepared"):
            forward.end()
            if self._steps is not None and self._steps.is_last:
                device = forward.device
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
                forward.session.stop_clock()

    def _begun(self, hooks: TransformerHooks, given: Mapping[str, Any]) -> Forward | None:
        found = _inputs(given)
        if found is None:
            self._remark = NO_INPUTS.format(name=type(hooks.model).__name__)
            return None
        latents, timestep = found
        row, device = row_of(hooks.model), latents[0].device
        timesteps = getattr(self._pipe.scheduler, "timesteps", None)
        if not isinstance(timesteps, Tensor):
            timesteps = None
        known = self._steps.are_of(timesteps) if self._steps else timesteps is None
        if self._run is None or not known:
            self._new_run(device, timesteps)
        prompts = self._prompts.of(hooks.pass_name, len(latents))
        scale = row.timestep_scale if row else None
        if self._steps and not self._steps.advance(timestep, scale, prompts):
            self._new_run(device, timesteps)  # of a scheduler that keeps its timesteps
            self._steps.advance(timestep, scale, prompts)
        run, steps = self._run, self._steps
        assert run is not None
        layout = layout_of(hooks.model, row, given, len(hooks.blocks) or None)
        ranks = ranks_of(hooks.model)
        unusable = ranks if isinstance(ranks, str) else None
        if not isinstance(ranks, str):
            layout = replace(layout, ranks=ranks, heads=layout.heads and layout.heads // ranks)
        if steps is None or not steps.are_known:
            why = NO_SCHEDULE if steps is None else NOT_OF_SCHEDULE
            step = Step(prompts, 0, why, model=hooks.which)
        else:
            step = Step(prompts, steps.now, model=hooks.which)
            step = run.window.step(step, _level(steps.now, len(steps)), run.schedule)
        return Forward(session=run, layout=layout, step=step, device=device, unusable=unusable)

    def _new_run(self, device: torch.device, timesteps: Tensor | None) -> Session:
        """Begins a run. Waits for the kernels."""
        if self._run is not None:
            self._run.end()
        self._steps = None if timesteps is None else Steps(timesteps)
        self._prompts = Prompts(self._pipe)
        steps = 0 if self._steps is None else len(self._steps)
        settings = self._settings
        window = SigmaWindow.of(
            settings.start_percent, settings.end_percent, lambda percent: steps * (1 - percent)
        )
        schedule = [_level(step, steps) for step in range(steps)]
        run = self._run = Session(settings, window, schedule, words=WORDS)
        if isinstance(getattr(self._pipe, "controlnet", None), torch.nn.Module):
            run.note(CONTROLNET)
        if capabilities(device).usable:
            run.await_kernels(device, lambda: warm_up(device, logger.info).wait(lambda: None))
        return run


def _inputs(given: Mapping[str, Any]) -> tuple[Tensor | list[Tensor], Tensor] | None:
    """Latents of the batch, and the timestep, of a forward pass with these arguments."""
    latents: object = next((given[name] for name in _LATENTS if name in given), None)
    timestep: object = next((given[name] for name in _TIMESTEPS if name in given), None)
    if isinstance(latents, list):
        latents = [each for each in latents if isinstance(each, Tensor)]
    elif not isinstance(latents, Tensor):
        return None
    return (latents, timestep) if len(latents) and isinstance(timestep, Tensor) else None


def _level(step: int, steps: int) -> float:
    """Noise level of a step for the window, which goes by shares of the steps."""
    return float(steps - step)
