# SPDX-License-Identifier: Apache-2.0
"""`enable`: the attention of a pipeline's transformers, sparse where that pays; and the handle of
that, whose runs are one a call of the pipeline."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...compiling import has_been_traced
from ...failures import MEANT_FOR_HOST, Failures
from ...kernels.warmup import Needs
from ...policy import SparsePolicy
from ...reasons import Reason
from ...sdpa import Keep, Substitute
from ...session import (
    AUTO_BUDGET,
    AUTO_QUALITY,
    FAILED,
    MANUAL,
    QUALITIES,
    Report,
    Session,
    Settings,
    SigmaWindow,
    Step,
    details,
    verdict,
)
from ...session.torch_pass import TorchPass
from ...session.verdict import WHOLE_GRAPH, why_nothing
from .hooks import TransformerHooks
from .layout import layout_of, ranks_of
from .steps import Prompts, Steps

logger = logging.getLogger("sparge")

#: Attributes of pipelines that hold transformers; Wan 2.2 has two, for early and for late steps.
_TRANSFORMERS = ("transformer", "transformer_2")
#: Arguments beside the mode that say how sparse to be, by mode.
_GOALS = {AUTO_QUALITY: ("quality",), AUTO_BUDGET: ("topk",), MANUAL: ("topk", "policy")}

NOT_RUN = "The pipeline has not run since it was enabled."
REPLACED = (
    "Nothing is skipped; pipe.transformer is another model than when the pipeline was enabled: "
    "call enable again."
)
OTHER_THREAD = Reason("another thread ran the model meanwhile: its passes were left as they are")
CONTROLNET = Reason("the attention of the pipeline's controlnet is native, and not counted")
NO_INPUTS = (
    "{name} is not known here, and its inputs are not named as usual: sparge.sdpa() serves it "
    "without measuring"
)
#: Names that models have for the latent, which may be a list, and for the timestep.
_LATENTS, _TIMESTEPS = ("hidden_states", "x"), ("timestep", "timesteps", "t")

#: Handle of each model, which its hooks keep alive: held here, it would hold the model for ever.
_enabled: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Handle]] = (
    weakref.WeakKeyDictionary()
)


def enable(
    pipe: Any,
    mode: str | Keep = None,
    *,
    quality: str | float | None = None,
    topk: float | None = None,
    policy: Keep = None,
    start_percent: float = 0.1,
    end_percent: float = 1.0,
    min_tokens: int = 4096,
    dense_blocks: str = "",
    exact_dense: bool = False,
) -> Handle:
    """Makes the self-attention of a pipeline of diffusers sparse, until the handle is disabled. A
    second call on the same pipeline replaces the first.

    Args:
        pipe: a pipeline with `transformer` (and `transformer_2`) and `scheduler`, before or after
            it is moved, offloaded or compiled.
        mode: "auto quality": heads are measured, and made as sparse as `quality` allows; "auto
            budget": they are measured, and share out `topk`; "manual": all follow one policy.
            Without one the next three say it; a policy or a rule may stand in its place.
        quality: "high", "balanced" (without one) or "fast", or a mean error such as 0.05; for mode
            "auto quality".
        topk: share of the attention that sparse steps compute, in the mean of the heads ("auto
            budget") or in each ("manual"); 0.5 without one.
        policy: for mode "manual", in place of `topk`; or a rule, as `sparge.sdpa` takes one, whose
            calls have `layer` and `grid`. Text stays exact whatever it says; an order says itself.
        start_percent, end_percent: steps before and after these shares of the run are dense.
        min_tokens: attention over fewer tokens is exact.
        dense_blocks: blocks whose attention stays dense, such as "0-2, -1".
        exact_dense: dense calls of the auto modes are exact also where 8 bits are faster.

    Raises:
        ValueError: an argument is none of these or not one of the mode, or the pipeline has no
            transformer.
    """
    if mode is not None and not isinstance(mode, str):
        if policy is not None:
            raise ValueError("policy is given twice, by its name and in place of a mode.")
        mode, policy = None, mode
    if mode in QUALITIES:
        raise ValueError(f'mode is "{mode}"; a quality goes by its name: quality="{mode}".')
    goals = {"quality": quality, "topk": topk, "policy": policy}
    given = {name: goal for name, goal in goals.items() if goal is not None}
    if mode is None:
        mode = next((each for each, names in _GOALS.items() if {*given} & {*names}), AUTO_QUALITY)
    if mode in _GOALS and (len(given) > 1 or not {*given} <= {*_GOALS[mode]}):
        takes = (f'mode "{each}" takes {" or ".join(names)}' for each, names in _GOALS.items())
        raise ValueError(f'{" and ".join(given)} given with mode "{mode}": {", ".join(takes)}.')
    Substitute.checked(policy, min_tokens, None)
    settings = Settings(
        mode=mode,
        start_percent=start_percent,
        end_percent=end_percent,
        min_tokens=min_tokens,
        dense_blocks=dense_blocks,
        exact_dense=exact_dense,
        **{name: goal for name, goal in given.items() if name != "policy"},
    )
    found = [getattr(pipe, name, None) for name in _TRANSFORMERS]
    transformers = [each for each in found if isinstance(each, torch.nn.Module)]
    if not transformers or getattr(pipe, "scheduler", None) is None:
        raise ValueError(
            f"{type(pipe).__name__} has no transformer and scheduler; enable takes a pipeline of "
            "diffusers whose model is a transformer. For other models use sparge.sdpa()."
        )
    for each in transformers:
        earlier = _enabled.pop(getattr(each, "_orig_mod", each), None)
        if earlier is not None and (handle := earlier()) is not None:
            handle.disable()
    handle = Handle(pipe, transformers, settings, policy)
    for model in handle.models:
        _enabled[model] = weakref.ref(handle)
    return handle


class PipelineRun(Session):
    """Run of one call of a pipeline."""

    no_calls = Reason(
        "no attention call came: the pipeline's attention backend does not call PyTorch's (set it "
        'to native: transformer.set_attention_backend("native"))'
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
        policy: Keep,
    ) -> None:
        self._pipe, self._settings, self._policy = pipe, settings, policy
        self._run: Session | None = None
        self._steps = Steps(None)
        self._prompts = Prompts(pipe)
        self._remark = ""  # why no run began
        self._failures = Failures()
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
        result = self.stats
        if result is None or self._has_other_model:
            return self._no_run()
        why, (first, second, *_) = why_nothing(result), verdict(result)
        said = result.notes[0] if result.notes else why or second
        return f"{'Nothing skipped' if why else first}; {said}"

    def report(self) -> str:
        """Lines on the last run: its calls by reason, and what was measured of each layer. Waits
        for the GPU."""
        result = self.stats
        return self._no_run() if result is None or self._has_other_model else details(result)

    @property
    def _has_other_model(self) -> bool:
        """Whether the pipeline was given another transformer since it was enabled."""
        own = getattr(self._pipe, "transformer", None)
        models = self.models
        return bool(models) and own is not None and getattr(own, "_orig_mod", own) not in models

    def _no_run(self) -> str:
        """Why there is no run of this model to tell of."""
        if self._has_other_model:
            return REPLACED
        if self._remark:
            return f"Nothing skipped; {self._remark}"
        return f"{NOT_RUN} Or {WHOLE_GRAPH}." if has_been_traced() else NOT_RUN

    @property
    def stats(self) -> Report | None:
        """Counts and facts of the last run; None before there is one. Waits for the GPU."""
        if self._run is None:
            return None
        return self._run.report(stopped=not self._steps.is_last)

    def disable(self) -> None:
        """Takes the hooks off. The pipeline is as it was; the last run can still be asked."""
        with self.lock:
            for hooks in self._hooks:
                hooks.remove()
            self._hooks.clear()

    def begin_pass(self, hooks: TransformerHooks, given: Mapping[str, Any]) -> TorchPass | None:
        """Begins a pass, and a run where it is the first one of a call of the pipeline."""
        if any(each.are_busy() for each in self._hooks):
            self._note(OTHER_THREAD)
            return None
        try:
            return self._begun(hooks, given)
        except MEANT_FOR_HOST:
            raise
        except Exception as error:  # the picture matters more
            self._failures.tell("a pass of the model was computed dense", error)
            self._note(Reason(f"passes were dense because of {FAILED}"))
            return None

    def _note(self, remark: Reason) -> None:
        if self._run is None:
            self._remark = remark
        else:
            self._run.note(remark)

    def end_pass(self, forward: TorchPass) -> None:
        """Ends a pass. In the last step it waits for the GPU, so that the clock is right."""
        with forward.session.failures.caught("a step was not prepared"):
            forward.end()
            if self._steps.is_last:
                device = forward.device
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
                forward.session.stop_clock()

    def _begun(self, hooks: TransformerHooks, given: Mapping[str, Any]) -> TorchPass | None:
        found = _inputs(given)
        if found is None:
            self._note(Reason(NO_INPUTS.format(name=type(hooks.model).__name__)))
            return None
        latents, timestep = found
        device = latents[0].device
        timesteps = getattr(self._pipe.scheduler, "timesteps", None)
        run = self._run
        if run is None or timesteps is not self._steps.timesteps:
            run = self._new_run(hooks.model, device, timesteps)
        prompts = self._prompts.of(hooks.pass_name, len(latents))
        if not self._steps.advance(timestep, prompts):
            # The scheduler keeps its timesteps.
            run = self._new_run(hooks.model, device, timesteps)
            self._steps.advance(timestep, prompts)
        ranks, unusable = ranks_of(hooks.model)
        layout, now = layout_of(hooks.model, given, hooks.blocks, ranks), self._steps.now
        step = Step(prompts, max(0, now), self._steps.unknown, model=hooks.which)
        if step.why_dense is None:
            step = run.window.step(step, run.schedule[now], run.schedule)
        return TorchPass(session=run, layout=layout, step=step, device=device, unusable=unusable)

    def _new_run(self, model: Any, device: torch.device, timesteps: object) -> Session:
        """Begins a run. Waits for the kernels."""
        self._steps, self._prompts = Steps(timesteps), Prompts(self._pipe)
        steps = len(self._steps)
        settings = self._settings
        # The window goes by noise levels, and here by shares of the steps.
        window = SigmaWindow.of(settings, lambda percent: steps * (1 - percent))
        schedule = [float(steps - step) for step in range(steps)]
        run = self._run = PipelineRun(settings, window, schedule)
        if isinstance(self._policy, SparsePolicy):
            run.asked = self._policy
        else:
            run.rule = self._policy
        if isinstance(getattr(self._pipe, "controlnet", None), torch.nn.Module):
            run.note(CONTROLNET)
        head_dim = getattr(getattr(model, "config", None), "attention_head_dim", None)
        dtype = getattr(model, "dtype", None)
        needs = Needs(head_dim if isinstance(head_dim, int) else None, dtype)
        run.await_kernels(device, needs, logger.info)
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
