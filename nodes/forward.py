# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a model in ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..sparge.session import Call, Dense, GivenCall, Kind, Layer, Pass, Step
from ..sparge.session.calls import Decision
from .attention_call import AttentionCall
from .families import token_layout
from .layer_counter import LayerCounter
from .override_check import CHANGES, Check
from .run_state import Run

#: Reason of a dense call that is unlike all that ComfyUI makes.
UNKNOWN_CALL = "the model calls attention in a way unknown here"


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
        diffusion_model: Any,
        x: Tensor,
        sigma: Tensor,
        context: Any,
        options: Mapping[str, Any],
        extras: Mapping[str, Any],
        which: int = 0,
    ) -> Forward:
        """Begins a pass. x is its latent and sigma its noise levels; which: as in `Run`; the rest
        are apply_model's."""
        # Video and sound in one flat latent: video is first. Without sound this is the shape of the
        # whole clip, also where a pass is of a context window.
        packed = extras.get("latent_shapes") or ()
        shape = packed[0] if len(packed) > 1 else x.shape
        layout = token_layout(diffusion_model, shape, context, extras)
        prompts = tuple(options.get("cond_or_uncond") or (0,))
        # Every step may be sparse where no noise level is asked for.
        steps = len(run.schedule) or None
        step = Step(prompts, run.step_of(prompts), of_sparse=steps, model=which)
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
            layer = self.layers.next(options, decision.tokens, given.heads)
        else:  # one of several calls in a layer
            layer = self.layers.peek(options)
        check, call = self._check(given), given.tensors
        if (
            check is not None
            and isinstance(call, Call)
            and not (decision.why_exact or self.unusable)
        ):
            dense = partial(check.compared, layer.row, call, given.key_mask, dense)
        return self.serve(given, decision, layer, dense)

    def _check(self, given: AttentionCall) -> Check | None:
        """Check of another node's override; None where none serves the call but backends."""
        if given.override is None or given.q.device != self.device:
            return None
        return self.session.override_checks.of(
            given.override, self.layout.rows, self.device, self.step
        )

    def why_dense(self, given: GivenCall, decision: Decision, layer: Layer) -> str | None:
        reason = super().why_dense(given, decision, layer)
        return reason or (CHANGES if self._why_held(given, layer) == CHANGES else None)

    def held_back(self, given: GivenCall, layer: Layer) -> str | None:
        """Heads are measured also where it is not known yet what another node does."""
        return self._why_held(given, layer)

    def _why_held(self, given: GivenCall, layer: Layer) -> str | None:
        assert isinstance(given, AttentionCall)
        check = self._check(given)
        return None if check is None else check.why_dense(layer.row)
