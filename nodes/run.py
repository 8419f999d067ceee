# SPDX-License-Identifier: Apache-2.0
"""One sampling run in ComfyUI, and its forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..sparge.reasons import Reason
from ..sparge.session import (
    UNNUMBERED,
    Call,
    Dense,
    Kind,
    Layer,
    Pass,
    Progress,
    Session,
    Settings,
    SigmaWindow,
    Step,
    TextPosition,
)
from .comfyui import exact_backend, untracked_allocations
from .families import ModelLayout, token_layout
from .override_check import CHANGES, Override, OverrideChecks

#: Reason of a dense call that is unlike all that ComfyUI makes.
UNKNOWN_CALL = Reason("the model calls attention in a way unknown here", "own")
NO_CALL = "no attention call reached this node; "


class Run(Session):
    """One run, shared by its forward passes on every device."""

    no_calls = Reason(
        f"{NO_CALL}a node after it replaces the attention, or the model does not offer it (put "
        "Sparge Attention last, before the sampler)",
        "no call",
    )

    def __init__(
        self,
        settings: Settings,
        patcher: Any,
        schedule: Sequence[float],
        owner: object,
        show: Callable[[str], None],
    ) -> None:
        """Starts a run of a patched model. schedule: noise level of each step, as far as it is
        known. show: shows a line under the node."""
        # What is in force when sampling starts.
        to_sigma = patcher.get_model_object("model_sampling").percent_to_sigma
        super().__init__(
            settings,
            SigmaWindow.of(settings, to_sigma),
            schedule,
            exact=exact_backend(),
            untracked=untracked_allocations,
        )
        self.owner = owner
        self.backend_function = self.exact.name.split(" ")[0]
        """Name of the function that times of exact calls are of."""
        self.override_checks = OverrideChecks(self.failures)
        falls = settings.aim is not None and settings.aim.kind == "budget"
        self.needs_level = falls or not self.window.is_everything
        """Whether a pass has to know its noise level, for which it waits."""
        self.progress = Progress(schedule, show)
        self._model, self._device = patcher.model, patcher.load_device
        self.step = -1
        """Number of the evaluation of the model that runs. It counts as a step whatever passes
        ComfyUI splits it into: those follow from the free memory, and the result must not."""

    def __deepcopy__(self, memo: object) -> Run:
        """Itself: other nodes copy the options of a run deeply, and its state is one."""
        return self

    def which(self, model: object, device: torch.device) -> int:
        """Number of the model that a pass is of: 0 for what is sampled, wherever it was copied to
        (multi-GPU); else a number for another model, which a guider runs beside it on its device
        (DualModelGuider)."""
        if model is self._model or device != self._device:
            return 0
        apart = ", and its heads are measured apart" if self.settings.aim else ""
        sentence = "the guider runs a second model as well: it follows the settings of this node, "
        self.note(Reason(f"{sentence}whatever nodes it went through{apart}", "second model"))
        return id(model)  # id of objects that outlive the run


@dataclass
class LayerCounter:
    """Numbers the self-attention calls of one forward pass by layer (transformer block).

    Where ComfyUI says which layer runs it is asked. In other models (LTXV, Mochi, CogVideoX) calls
    are counted, one self-attention over the grid a layer, or several that have its heads between
    them, as nodes make them that save memory. A layer whose call does not come would shift all
    after it: skip-layer guidance replaces layers, STG leaves their self-attention out (of LTXV with
    sound; without sound it does nothing). Both say so in the options of a pass.
    """

    layout: ModelLayout
    calls: int = 0
    """Calls counted so far: the number of the running layer, in models that publish none."""
    _of_layer: dict[int, int] = field(default_factory=dict, repr=False)
    _heads_left: int = field(default=0, repr=False)  # of the running layer, whose calls are to come
    _refiners: int = field(default=0, repr=False)  # refiners whose calls came
    _shortened: int | None = field(default=None, repr=False)

    def next(self, options: Mapping[str, Any], tokens: int, heads: int) -> Layer:
        """Layer of a self-attention call over so many tokens, which is counted."""
        published = self._published(options)
        if published is None and self._refiners < self.layout.refiners:
            self._refiners += 1
            return Layer(UNNUMBERED, self.layout.refiner_row(self._refiners - 1))
        again = published is None and self.calls > 0 and self._is_without_text(tokens)
        is_whole = again or tokens >= self.layout.grid_tokens
        if not is_whole and not self._counts(tokens, published is not None):
            return self.peek(options)
        if heads <= self._heads_left:
            self._heads_left -= heads
        elif not again:
            if published is None:
                left_out = self._left_out(options)
                while self.calls in left_out:
                    self.calls += 1
            self.calls += 1
            self._heads_left = (self.layout.heads or heads) - heads
        number = self.calls - 1 if published is None else published
        earlier = self._of_layer.get(number, 0)
        self._of_layer[number] = earlier + 1
        return Layer(number, self.layout.row(number, earlier))

    def peek(self, options: Mapping[str, Any]) -> Layer:
        """Layer of a call that is not to be counted: the layer's own came before, if any did."""
        published = self._published(options)
        counted = self.calls - 1 if self._of_layer else self.calls
        number = counted if published is None else published
        row = self.layout.row(number, self._of_layer.get(number, 0))
        return Layer(number, row, beside=published is None)

    def _published(self, options: Mapping[str, Any]) -> int | None:
        """Number of the running layer, where ComfyUI says it in transformer_options."""
        index, place = options.get("block_index"), options.get("block")
        if isinstance(place, tuple):  # U-Net blocks, whose index starts again in each module
            return self.layout.places.get((*place[:2], index or 0))
        if not isinstance(index, int):
            return None
        return index + (self.layout.double if options.get("block_type") == "single" else 0)

    def _left_out(self, options: Mapping[str, Any]) -> set[int]:
        """Layers that do not call: other nodes replace them, or their self-attention."""
        key = self.layout.left_out_key
        own = (options.get(key) if key else None) or ()
        replaced = (options.get("patches_replace") or {}).get("dit") or ()
        places = (x for x in replaced if isinstance(x, tuple) and len(x) == 2)
        return {*own, *(number for kind, number in places if kind == "double_block")}

    def _is_without_text(self, tokens: int) -> bool:
        """Whether a call is of pictures alone where text stands with them: the second one of a
        layer of SD3.5 medium and Boogu."""
        known, text = self.layout.tokens, self.layout.context
        if known is None or not 0 < text <= known.prefix + known.suffix:
            return False
        return tokens == known.tokens - text

    def _counts(self, tokens: int, published: bool) -> bool:
        """Whether a call of fewer tokens than the grid has is counted: not one of text or sound
        alone.

        LTXV drops tokens of guides that are smaller than the clip: all layers then have as many as
        the first, whose video comes before its sound.
        """
        alone = self.layout.text is TextPosition.NONE and tokens >= self.layout.frame_tokens
        if published or not alone:
            return False
        if self._shortened is None and not self._of_layer:
            self._shortened = tokens
        return tokens == self._shortened


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
        beside = frozenset(sound[2] for sound in packed[1:])
        layout = replace(token_layout(model.diffusion_model, shape, context, extras), beside=beside)
        prompts = tuple(options.get("cond_or_uncond") or (0,))
        # Every step may be sparse where no noise level is asked for.
        steps, which = len(run.schedule) or None, run.which(model, x.device)
        step = Step(prompts, max(0, run.step), of_sparse=steps, model=which)
        if run.needs_level and run.unusable(x.device) is None:
            # The one place where a run waits for the GPU: once a pass, for a single number.
            level = float(sigma.max())
            step = run.window.step(step, level, run.schedule)
            with run.failures.caught("nothing was shown while the run goes on"):
                run.progress.at(level)
        run.override_checks.begin_pass(x.device, step)
        layers = LayerCounter(layout)
        return cls(session=run, layout=layout, step=step, device=x.device, layers=layers)

    def attend(
        self,
        call: Call | None,
        options: Mapping[str, Any],
        override: Override | None,
        dense: Dense,
    ) -> Tensor:
        """Result of a call, sparse when nothing speaks against it, else from dense().

        call: None stands for one that nobody here can read. options: the model's at the call.
        override: of another node, where it serves the call and may be more than a backend.
        """
        if self.handing_on:
            return dense()
        if call is None:
            self.session.counts.add_dense(UNKNOWN_CALL, 0, False)
            return self._hand_on(dense)
        decision = self.decision(call)
        counts = decision.kind is Kind.SELF
        if decision.kind is Kind.PART:
            counts = min(call.query_tokens, call.key_tokens) >= self.layout.grid_tokens
        if counts:
            layer = self.layers.next(options, decision.tokens, call.head_count)
        else:  # one of several calls in a layer
            layer = self.layers.peek(options)
        if override is None or call.q.device != self.device:
            return self.serve(call, decision, layer, dense)
        checks = self.session.override_checks
        check = checks.of(override, self.layout.rows, self.device, self.step)
        why = check.why_dense(layer.row, self.step)
        if not (decision.why_exact or self.unusable):
            dense = partial(check.compared, layer.row, self.step, call, dense)
        if why == CHANGES:
            return self.serve(call, decision, layer, dense, why=why)
        # Heads are measured also where it is not known yet what the override does.
        return self.serve(call, decision, layer, dense, held=why)
