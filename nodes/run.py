# SPDX-License-Identifier: Apache-2.0
"""One sampling run in ComfyUI, and its forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..sparge.session import (
    Dense,
    GivenCall,
    Kind,
    Layer,
    Pass,
    Progress,
    Session,
    Settings,
    SigmaWindow,
    Step,
    Why,
    Words,
)
from ..sparge.session.calls import Decision
from .attention_call import AttentionCall
from .comfyui import exact_attention, exact_backend, untracked_allocations
from .families import token_layout
from .layers import LayerCounter, ReplacedBlocks
from .override_check import CHANGES, Check, OverrideChecks

#: Reason of a dense call that is unlike all that ComfyUI makes.
UNKNOWN_CALL = "the model calls attention in a way unknown here"
NO_CALL = "no attention call reached this node; "
WORDS = Words(
    no_calls=Why(
        f"{NO_CALL}a node after it replaces the attention, or the model does not offer it (put "
        "Sparge Attention last, before the sampler)",
        ("No attention call reached this node", "Put it last, before the sampler"),
    ),
    whole_graph=Why(
        f"{NO_CALL}torch.compile with fullgraph leaves it no room (turn fullgraph off), or a node "
        "after it replaces the attention",
        ("No attention call reached this node", "Turn fullgraph off in the compile node"),
    ),
    replaced=Why(
        "the {what}'s self-attention did not reach this node; another node replaces it, or the "
        "model computes it in a way of its own",
        ("Another node replaces the attention", "of the {what}, or the model does"),
    ),
    unreached="no self-attention of a whole grid reached this node",
)


def _ignored(text: str) -> None:
    """Shows nothing."""


class Run(Session):
    """One run, shared by its forward passes on every device."""

    def __init__(
        self,
        settings: Settings,
        model_sampling: Any,
        owner: object,
        schedule: Sequence[float] = (),
        model: object = None,
        device: torch.device | None = None,
        show: Callable[[str], None] = _ignored,
    ) -> None:
        """Starts a run. schedule: noise level of each step, as far as it is known. model, device:
        what is sampled, and where. show: shows a line under the node."""
        to_sigma = model_sampling.percent_to_sigma  # in force when sampling starts
        super().__init__(
            settings,
            SigmaWindow.of(settings.start_percent, settings.end_percent, to_sigma),
            schedule,
            exact=exact_backend(),
            words=WORDS,
            untracked=untracked_allocations,
        )
        self.owner = owner
        self.backend_function: str = getattr(exact_attention(), "__name__", "")
        """Name of the function that times of exact calls are of."""
        self.replaced_blocks = ReplacedBlocks()
        self.override_checks = OverrideChecks(self.failures)
        falls = settings.aim is not None and settings.aim.kind == "budget"
        self.needs_level = falls or not self.window.is_everything
        """Whether a pass has to know its noise level, for which it waits."""
        self.progress = Progress(schedule, show)
        self._model, self._device = model, device
        self._evaluations = 0

    def __deepcopy__(self, memo: object) -> Run:
        """Itself: other nodes copy the options of a run deeply, and its state is one."""
        return self

    def begin_evaluation(self) -> None:
        """Begins an evaluation of the model. It counts as a step whatever passes ComfyUI splits it
        into: those follow from the free memory, and the result must not."""
        self._evaluations += 1

    @property
    def step(self) -> int:
        """Number of the step that passes belong to which begin now."""
        return max(0, self._evaluations - 1)

    def which(self, model: object, device: torch.device) -> int:
        """Number of the model that a pass is of: 0 for what is sampled, wherever it was copied to
        (multi-GPU); else a number for another model, which a guider runs beside it on its device
        (DualModelGuider)."""
        if self._model is None or model is self._model or device != self._device:
            return 0
        apart = ", and its heads are measured apart" if self.settings.aim else ""
        self.note(
            "the guider runs a second model as well: it follows the settings of this node, "
            f"whatever nodes it went through{apart}"
        )
        return id(model)  # id of objects that outlive the run


@dataclass(kw_only=True)
class Forward(Pass):
    """One forward pass; lives in its own transformer_options, so threads never share it."""

    session: Run
    layers: LayerCounter

    def __deepcopy__(self, memo: object) -> Forward:
        """Itself, as its run."""
        return self

    @classmethod
    def begin(
        cls,
        run: Run,
        model: Any,
        x: Tensor,
        sigma: Tensor,
        context: Any,
        options: Mapping[str, Any],
        extras: Mapping[str, Any],
    ) -> Forward:
        """Begins a pass of a model. x is its latent and sigma its noise levels; the rest are
        apply_model's."""
        # Video and sound in one flat latent: video is first. Without sound this is the shape of the
        # whole clip, also where a pass is of a context window.
        packed = extras.get("latent_shapes") or ()
        shape = packed[0] if len(packed) > 1 else x.shape
        layout = token_layout(model.diffusion_model, shape, context, extras)
        prompts = tuple(options.get("cond_or_uncond") or (0,))
        # Every step may be sparse where no noise level is asked for.
        steps, which = len(run.schedule) or None, run.which(model, x.device)
        step = Step(prompts, run.step, of_sparse=steps, model=which)
        if run.needs_level and run.unusable(x.device) is None:
            # The one place where a run waits for the GPU: once a pass, for a single number.
            level = float(sigma.max())
            step = run.window.step(step, level, run.schedule)
            with run.failures.caught("nothing was shown while the run goes on"):
                run.progress.at(level)
        run.override_checks.begin_pass(x.device, step)
        beside = frozenset(sound[2] for sound in packed[1:])
        return cls(
            session=run, layout=layout, step=step, device=x.device, layers=LayerCounter(layout),
            beside=beside,
        )  # fmt: skip

    def attend(self, given: AttentionCall | None, dense: Dense) -> Tensor:
        """Result of a call, sparse when nothing speaks against it, else from dense(). None stands
        for a call that nobody here can read."""
        if self.handing_on:
            return dense()
        if given is None:
            self.session.counts.add_dense(UNKNOWN_CALL, 0, False)
            return self._hand_on(dense)
        decision, options, facts = self.decision(given), given.transformer_options, given.facts
        whole = min(facts.query_tokens, facts.key_tokens) >= self.layout.grid_tokens
        if decision.kind is Kind.SELF or (decision.kind is Kind.PART and whole):
            layer = self.layers.next(options, decision.tokens, given.call.head_count)
        else:  # one of several calls in a layer
            layer = self.layers.peek(options)
        check = self._check(given)
        if check is not None and not (decision.why_exact or self.unusable):
            dense = partial(check.compared, layer.row, given.call, given.key_mask, dense)
        return self.serve(given, decision, layer, dense)

    def _check(self, given: AttentionCall) -> Check | None:
        """Check of another node's override; None where none serves the call but backends."""
        if given.override is None or given.call.q.device != self.device:
            return None
        return self.session.override_checks.of(
            given.override, self.layout.rows, self.device, self.step
        )

    def why_dense(self, given: GivenCall, decision: Decision, layer: Layer) -> str | None:
        reason = super().why_dense(given, decision, layer)
        return reason or (CHANGES if self.held_back(given, layer) == CHANGES else None)

    def held_back(self, given: GivenCall, layer: Layer) -> str | None:
        """Heads are measured also where it is not known yet what another node does."""
        assert isinstance(given, AttentionCall)
        check = self._check(given)
        return None if check is None else check.why_dense(layer.row)
