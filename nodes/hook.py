# SPDX-License-Identifier: Apache-2.0
"""Hook of the node into a model's attention: three entries on a clone, gone with the clone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from ..sparge.compiling import frame_compiler, is_traced_whole, untraced
from ..sparge.reasons import Reason
from ..sparge.session import FAILED, Report, Settings
from . import comfyui
from .attention_call import call_of
from .override_check import Override, leads_to
from .run import Forward, Run

#: Wrapper point of comfy.patcher_extension.WrappersMP.
OUTER_SAMPLE = "outer_sample"
#: Name of our wrappers on a model patcher: a second node replaces the first one's.
WRAPPER_KEY = "sparge_attention"
#: Keys of transformer_options. Their values are class instances, because ComfyUI copies dicts and
#: lists in there.
RUN_KEY = "sparge_run"
FORWARD_KEY = "sparge_forward"
OVERRIDE_KEY = "optimized_attention_override"
#: Callback key of ComfyUI's own block-sparse node.
CORE_SPARSE_KEY = "block_sparse_attention"
CORE_SPARSE = Reason(
    "ComfyUI's Model Sparse Attention is on the same model and wins, being outside of this node; "
    "the results do not add up, remove one",
    "core",
)
PASSES_FAILED = Reason(f"passes were dense because of {FAILED}", FAILED.kind)

#: Attribute of our overrides that holds their Mark.
MARK = "__sparge__"


@dataclass(frozen=True)
class Mark:
    """Owner of an override, and what it was put over."""

    hook: Hook
    previous: Override | None


class Hook:
    """Hook of one execution of the node. A run's state is in the run's options; what stays here is
    the result of the last one."""

    def __init__(self, settings: Settings, node_id: str | None) -> None:
        self.settings = settings
        self.node_id = node_id
        self.last: Report | None = None
        self.replaced: Hook | None = None  # of a node before this one
        self._on_top: Override | None = None

    def __deepcopy__(self, memo: object) -> Hook:
        """Itself: its override has it, and functions are not copied."""
        return self

    def install(self, model: Any) -> None:
        """Puts the override and the wrappers on ``model``, a clone that nobody else has yet."""
        self.replaced = hook_of(model)
        options = model.model_options.setdefault("transformer_options", {})
        current = options.get(OVERRIDE_KEY)
        ours: Mark | None = getattr(current, MARK, None)
        options[OVERRIDE_KEY] = make_override(self, ours.previous if ours else current)
        for point, wrapper in (
            (OUTER_SAMPLE, self.outer_sample),
            ("predict_noise", self.predict_noise),
            ("apply_model", self.apply_model),
        ):
            model.remove_wrappers_with_key(point, WRAPPER_KEY)
            model.add_wrapper_with_key(point, WRAPPER_KEY, wrapper)

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps a whole sampling run: makes its state, and reports however it ends."""
        guider = executor.class_obj
        options = guider.model_options["transformer_options"]
        found, patcher = options.get(OVERRIDE_KEY), guider.model_patcher
        run = Run(
            self.settings,
            patcher,
            comfyui.step_sigmas(args, kwargs),
            owner=self,
            show=partial(comfyui.show_on_node, self.node_id),
        )
        if any(CORE_SPARSE_KEY in by_key for by_key in options.get("callbacks", {}).values()):
            run.note(CORE_SPARSE)
        finished = False
        try:
            comfyui.await_kernels(
                run, patcher.load_device, comfyui.needs_of_model(patcher.model), self.node_id
            )
            comfyui.tell_replaced(self)
            options[OVERRIDE_KEY] = self._reinstalled(found)
            options[RUN_KEY] = run
            result = executor(*args, **kwargs)
            finished = True
            return result
        finally:
            options.pop(RUN_KEY, None)
            options.pop(OVERRIDE_KEY, None)
            if found is not None:
                options[OVERRIDE_KEY] = found
            self.last = comfyui.end_run(run, not finished, self.node_id)

    def predict_noise(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps all forward passes of one evaluation of the model: conditionings, batched or not,
        and context windows."""
        run = executor.class_obj.model_options["transformer_options"].get(RUN_KEY)
        if run is not None and run.owner is self:
            run.step += 1
        return executor(*args, **kwargs)

    def apply_model(
        self,
        executor: Any,
        x: torch.Tensor,
        t: torch.Tensor,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Wraps each forward pass: hands the override what is known about the pass."""
        options = transformer_options or {}
        run = options.get(RUN_KEY)
        if run is None or run.owner is not self:
            return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
        forward: Forward | None = None
        with run.failures.caught("a pass of the model was computed dense"):
            model = executor.class_obj
            forward = Forward.begin(run, model, x, t, c_crossattn, options, kwargs)
            options = {**options, FORWARD_KEY: forward}
            if OVERRIDE_KEY in options:  # one may come after the run began
                options[OVERRIDE_KEY] = self._reinstalled(options[OVERRIDE_KEY])
        if forward is None:
            run.note(PASSES_FAILED)
        result = executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
        if forward is not None:
            with run.failures.caught("a step was not prepared"):
                forward.end()
        return result

    def _reinstalled(self, found: Override | None) -> Override:
        """Override that this run shall use: one that overwrote ours becomes our dense path.

        One that calls ours instead stays outside, as its author meant it.
        """
        if found is not None and leads_to(found, self._is_ours):
            return found
        mark: Mark | None = getattr(self._on_top, MARK, None)
        if mark is None or mark.previous is not found:
            # Kept for the next run: a new function object would make compiled models recompile.
            self._on_top = make_override(self, found)
        assert self._on_top is not None
        return self._on_top

    def _is_ours(self, item: Any) -> bool:
        mark: Mark | None = getattr(item, MARK, None)
        return mark is not None and mark.hook is self


def hook_of(model: Any) -> Hook | None:
    """Returns the hook that takes part in the sampling of ``model``, if our node was used on it."""
    for wrapper in model.get_wrappers(OUTER_SAMPLE, WRAPPER_KEY):
        owner = getattr(wrapper, "__self__", None)
        if isinstance(owner, Hook):
            return owner
    return None


def make_override(hook: Hook, previous: Override | None) -> Override:
    """Makes the function that ComfyUI calls in place of its attention backend ``func``. Dense calls
    get their arguments as they came."""
    checked = None if previous is None or comfyui.is_own_backend(previous) else previous

    def override(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling() and frame_compiler() is None:
            return attend(func, *args, **kwargs)
        if is_traced_whole():
            dense = func if previous is None else partial(previous, func)
            return dense(*args, **kwargs)
        return attend_untraced(func, *args, **kwargs)

    def attend(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        if previous is None:
            if comfyui.ASKING is not None:
                func = comfyui.preferred_attention() or func
            dense = partial(func, *args, **kwargs)
        else:
            dense = partial(previous, func, *args, **kwargs)
        options = kwargs.get("transformer_options") or {}
        forward = options.get(FORWARD_KEY)
        if forward is None or forward.session.owner is not hook:
            return dense()  # outside a sampling run, or a node after this one took over
        name = getattr(func, "__name__", "")
        timed = previous is None and name == forward.session.backend_function
        return forward.attend(call_of(args, kwargs, timed), options, checked, dense)

    attend_untraced = untraced(attend)
    setattr(override, MARK, Mark(hook, previous))
    return cast(Override, override)
