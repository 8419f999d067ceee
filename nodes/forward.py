# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a model in ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..sparge.sampling import Dense, Kind, ServedPass
from ..sparge.tune import PassFacts, fitted
from .attention_call import AttentionCall
from .families import token_layout
from .layer_counter import LayerCounter
from .run_state import Run


@dataclass(kw_only=True)
class Forward(ServedPass):
    """One forward pass; lives in its own transformer_options, so threads never share it."""

    run: Run
    layers: LayerCounter

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
        unusable = run.meet(layout, x.device)
        conditioning = tuple(options.get("cond_or_uncond") or (0,))
        facts = PassFacts(conditioning, run.step_of(conditioning), which=which)
        if unusable is None and run.needs_level:
            # The one place where a run waits for the GPU: once a pass, for a single number.
            level = float(sigma.max())
            facts = run.window.facts(facts, level, run.schedule)
            with run.failures.caught("nothing was shown while the run goes on"):
                run.progress.at(level)
        policy = fitted(run.asked, x.device)
        begun = run.session.begin_pass(layout, policy, x.device, facts, usable=unusable is None)
        beside = frozenset(sound[2] for sound in packed[1:])
        return cls(
            run=run, layout=layout, begun=begun, unusable=unusable, layers=LayerCounter(layout),
            beside=beside,
        )  # fmt: skip

    def attend(self, given: AttentionCall, dense: Dense) -> Tensor:
        """Result of a call, sparse when nothing speaks against it, else from dense()."""
        if self.handing_on:
            return dense()
        decision, options, facts = self.decision(given), given.transformer_options, given.facts
        whole = min(facts.query_tokens, facts.key_tokens) >= self.layout.grid_tokens
        if decision.kind is Kind.SELF or (decision.kind is Kind.PART and whole):
            layer = self.layers.next(options, decision.tokens, given.heads)
        else:  # one of several calls in a layer
            layer = self.layers.peek(options)
        return self.serve(given, decision, layer, dense)
