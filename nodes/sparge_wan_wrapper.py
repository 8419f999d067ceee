# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttentionWanVideoWrapper: sparse attention for a model of WanVideoWrapper, kijai's
pack, whose models go through no node for ComfyUI's own.

Clones of such a model share its transformer, and with it our gate. It lets passes through whose
options do not carry what the node put into those of its own clone.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from ..sparge import TokenGrid
from ..sparge.compiling import is_traced_whole, untraced
from ..sparge.failures import Failures
from ..sparge.reasons import Reason
from ..sparge.sdpa import AttentionMode
from ..sparge.session import (
    Report,
    Session,
    Settings,
    Step,
    TextPosition,
    TokenLayout,
    unusable_reason,
)
from ..sparge.session.torch_pass import TorchPass
from ..sparge.torch_attention import TorchCall
from . import comfyui
from .families import needs_of
from .run import NO_CALL

logger = logging.getLogger("sparge")

WanVideoModel = io.Custom("WANVIDEOMODEL")
DEFAULT_START = 2
CARRIED_KEY = "sparge_attention"
#: Key of the pack's own node WanVideoSetAttentionModeOverride, and how long that lasts.
MODE_KEY = "attention_mode_override"
LAST_STEP = 10000


class SpargeAttentionWanVideoWrapper(io.ComfyNode):
    """Node id, widget names and their order are in saved graphs: only append."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeAttentionWanVideoWrapper",
            display_name="WanVideoWrapper (Sparge Attention)",
            category="model/patch",
            description=(
                "Makes models of the pack WanVideoWrapper render faster: it skips the work that "
                "shows least. Put it last, right before WanVideo Sampler; bypass it to compare. "
                "After each run the node says how much was computed, or why nothing was skipped. "
                "For ComfyUI's own models take Sparge Attention, which also measures the model."
            ),
            search_aliases=["sparge wanvideo", "sparse attention wan video wrapper", "kijai"],
            inputs=[
                WanVideoModel.Input("model", tooltip="A model of WanVideoWrapper."),
                io.Float.Input(
                    "topk",
                    default=Settings().topk,
                    min=0.05,
                    max=1.0,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    optional=True,
                    tooltip=(
                        "How much of the attention is computed, the same share everywhere. Lower "
                        "is faster, higher is closer to the original: start with 0.5 and go down "
                        "while you like the video; 1 computes all of it, in 8 bits."
                    ),
                ),
                io.Int.Input(
                    "start_step",
                    default=DEFAULT_START,
                    min=0,
                    max=LAST_STEP,
                    optional=True,
                    tooltip=(
                        "The steps before this one, which settle layout and motion, keep the "
                        "pack's own attention. Lower is faster, higher is closer to the original; "
                        "take 1 with a LoRA for 4 steps."
                    ),
                ),
            ],
            outputs=[WanVideoModel.Output(tooltip="The same model, made faster.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, model: Any, topk: float = Settings().topk, start_step: int = DEFAULT_START
    ) -> io.NodeOutput:
        node_id = cls.hidden.unique_id if cls.hidden else None
        settings, device = Settings(topk=topk), comfyui.inference_device()
        reason = unusable_reason(device)
        if reason is not None:  # the pack's own attention is faster than PyTorch's
            logger.warning("[Sparge] nothing is skipped: %s", reason)
            comfyui.show_on_node(node_id, "\n".join(reason.lines()))
            return io.NodeOutput(model)
        comfyui.prepare_kernels(device, needs_of(model.model.diffusion_model, None), node_id)
        patched = model.clone()
        WanWrapperHook(settings, start_step, node_id).install(patched)
        return io.NodeOutput(patched)


class WrapperRun(Session):
    """One run of the pack's sampler."""

    finished = False
    no_calls = Reason(
        f"{NO_CALL}a node after this one sets another attention mode, or the model computes "
        "attention past that mode (radial attention, MultiTalk, or torch.compile with fullgraph)",
        "no call",
    )

    def report(self, stopped: bool = False) -> Report:
        """Without its seconds: nobody knows what the pack's own attention would have taken."""
        return replace(super().report(stopped), seconds=0.0)

    def end_for(self, node_id: str | None) -> None:
        comfyui.end_run(self, not self.finished, node_id)


class Carried:
    """Mark in the options of a clone. The pack copies those deeply for each run: the copy of this
    is that run's, and goes when the run is over."""

    def __init__(self, hook: WanWrapperHook) -> None:
        self.hook = hook
        self.run: WrapperRun | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Carried:
        return Carried(self.hook)


class Gate:
    """Stand-in for the `forward` of a transformer: takes passes that carry a mark to its hook, and
    changes no others."""

    def __init__(self, transformer: Any) -> None:
        self.transformer, self.own = transformer, transformer.forward
        functools.update_wrapper(self, self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        carried = (kwargs.get("transformer_options") or {}).get(CARRIED_KEY)
        if torch.compiler.is_compiling() or not isinstance(carried, Carried):
            return self.own(*args, **kwargs)
        return carried.hook.around(self, carried, *args, **kwargs)


class WanWrapperHook:
    """Hook of one execution of the node."""

    def __init__(self, settings: Settings, start_step: int, node_id: str | None) -> None:
        """start_step: number of the first step that may be sparse."""
        self._settings, self._start_step, self.node_id = settings, start_step, node_id
        self.replaced: WanWrapperHook | None = None  # of a node before this one
        self._failures = Failures()
        self._forward: TorchPass | None = None
        self._mode = AttentionMode(self._serve)  # one for all passes, or graphs are traced anew

    def install(self, model: Any) -> None:
        """Puts the hook on `model`, a clone that nobody else has yet."""
        options = model.model_options.setdefault("transformer_options", {})
        self.replaced = getattr(options.get(CARRIED_KEY), "hook", None)
        options[CARRIED_KEY] = Carried(self)
        options[MODE_KEY] = {
            "mode": "sdpa",
            "start_step": self._start_step,
            "end_step": LAST_STEP,
            "verbose": False,
        }
        transformer = model.model.diffusion_model
        if not isinstance(transformer.__dict__.get("forward"), Gate):
            transformer.forward = Gate(transformer)

    def around(self, gate: Gate, carried: Carried, *args: Any, **kwargs: Any) -> Any:
        """Result of a pass, sparse from start_step on."""
        own, forward = partial(gate.own, *args, **kwargs), None
        if self._forward is not None:  # another pack's wrapper is between two gates
            return own()
        with self._failures.caught("a pass of the model was left as it is"):
            forward = self._begun(carried, gate.transformer, kwargs)
        out = own() if forward is None else self._sparse(forward, own)
        if carried.run is not None:
            carried.run.finished |= bool(kwargs.get("last_step"))
        return out

    def _sparse(self, forward: TorchPass, own: Callable[[], Any]) -> Any:
        self._forward = forward
        try:
            # ComfyUI's Cancel ends the pass with a BaseException, at which no hook of torch runs.
            with self._mode:
                return own()
        finally:
            self._forward = None
            with self._failures.caught("a step was not prepared"):
                forward.end()

    def _serve(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Result of a call of `scaled_dot_product_attention`; None for one that stays torch's."""
        return None if is_traced_whole() else self._attend(*args, **kwargs)

    @untraced
    def _attend(self, *args: Any, **kwargs: Any) -> Tensor | None:
        assert self._forward is not None
        return self._forward.attend_torch(0, TorchCall(*args, **kwargs))  # numbered as they come

    def _begun(
        self, carried: Carried, transformer: Any, given: Mapping[str, Any]
    ) -> TorchPass | None:
        """Begins a pass, and a run with the first one; None for a pass before start_step."""
        latent, step = given["x"][0], given["current_step"]
        device = latent.device
        run = carried.run
        if run is None:
            run = carried.run = WrapperRun(self._settings)
            weakref.finalize(carried, run.end_for, self.node_id).atexit = False
            comfyui.await_kernels(run, device, needs_of(transformer, None), self.node_id)
            comfyui.tell_replaced(self)
        layout = _layout(transformer, latent, given)
        native = Reason(f"before start_step {self._start_step}", "start step")
        native = native if step < self._start_step else None
        of_pass = Step((int(bool(given.get("is_uncond"))),), step)
        begun = TorchPass(session=run, layout=layout, step=of_pass, device=device, unusable=native)
        if native is None:
            return begun
        # The pack's own attention computes it: its self-attention is counted here, and it never
        # ends as one in which the clip's could have been missed.
        for row in range(len(transformer.blocks)):
            pairs = len(given["x"]) * transformer.num_heads * layout.grid_tokens**2
            begun.record.add_dense(row, pairs)
            run.counts.add_dense(native, layout.grid_tokens, False)
        return None


def _layout(transformer: Any, latent: Tensor, given: Mapping[str, Any]) -> TokenLayout:
    """Layout of a pass over a latent (channels, time, height, width). Frames of reference beside
    the clip make another number of tokens, which stay in the order they come."""
    sizes = zip(latent.shape[1:], transformer.patch_size, strict=True)
    time, height, width = (cells // patch for cells, patch in sizes)
    return TokenLayout(
        family="Wan",
        text=TextPosition.NONE,
        grid=(time, height, width),
        tokens=TokenGrid(time, height, width),
        prompts=frozenset(_lengths(given)) | {getattr(transformer, "text_len", 0)},
    )


def _lengths(given: Mapping[str, Any]) -> Iterator[int]:
    """Yields the lengths of the sequences of features (..., tokens, width) that a pass is given,
    the prompt's among them."""
    for name, value in given.items():
        for x in value if isinstance(value, list | tuple) else (value,):
            if name != "x" and isinstance(x, Tensor) and x.ndim in (2, 3):
                yield x.shape[-2]
