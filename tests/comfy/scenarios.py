# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder ask ComfyUI's process to do. Each returns plain JSON values."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import comfy.sample
import comfy.samplers
import comfy.utils
import models
import nodes as comfy_nodes
import torch
from comfy_extras import nodes_context_windows, nodes_easycache, nodes_model_advanced

#: Below the tokens of every tiny model's video, above its text (the token refiner of HunyuanVideo).
MIN_TOKENS = 100


def pack(name: str) -> Any:
    """A module of the pack, which ComfyUI loaded under the path of its folder."""
    suffix = f"my-sparge-attention.{name}"
    return next(module for key, module in sys.modules.items() if key.endswith(suffix))


def patch(model: Any, **widgets: Any) -> Any:
    node = comfy_nodes.NODE_CLASS_MAPPINGS["SpargeAttention"]
    return node.execute(model, **({"min_tokens": MIN_TOKENS, "pvthreshd": 50.0} | widgets))[0]


def sample(
    model: Any,
    family: str,
    steps: int = 4,
    sampler: str = "euler",
    cfg: float = 4.0,
    latent: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    latent = models.empty_latent(family) if latent is None else latent
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            comfy.sample.prepare_noise(latent, 0),
            steps,
            cfg,
            sampler,
            "simple",
            models.conditioning(family),
            models.conditioning(family, negative=True),
            latent,
            seed=0,
            disable_pbar=True,
            **kwargs,
        )


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got - expected).norm() / expected.norm())


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def reports() -> Iterator[list[dict[str, Any]]]:
    """Collects what every run inside reports, as numbers."""
    collected: list[dict[str, Any]] = []
    report = pack("nodes.report")
    publish = report.publish

    def collect(run: Any, node_id: str | None, stopped: bool) -> None:
        publish(run, node_id, stopped)
        tally = run.tally
        collected.append(
            {
                "sparse": tally.sparse,
                "dense": tally.dense,
                "cross": tally.cross,
                "forwards": tally.forwards,
                "reasons": dict(tally.reasons),
                "density": run.density(),
                "stopped": stopped,
                "text": report.summary(run, stopped),
            }
        )

    with replaced(report, "publish", collect):
        yield collected


@contextlib.contextmanager
def library_calls() -> Iterator[list[dict[str, Any]]]:
    """Collects what the library is asked for."""
    collected: list[dict[str, Any]] = []
    module = pack("nodes.attention_call")
    attention = module.attention

    def spy(q: Any, k: Any, v: Any, policy: Any, **kwargs: Any) -> Any:
        out = attention(q, k, v, policy, **kwargs)
        tokens = q.shape[1 if kwargs["layout"] == "NHD" else 2]
        collected.append(
            {
                "tokens": tokens,
                "head_dim": q.shape[-1],
                "batch": q.shape[0],
                "exact": [policy.exact_prefix, policy.exact_suffix],
                "topk": policy.topk,
                "copied": any(t.data_ptr() == 0 for t in (q, k, v)),
            }
        )
        return out

    with replaced(module, "attention", spy):
        yield collected


def family(name: str) -> dict[str, Any]:
    """Dense, everything kept in 8 bits, and half of the blocks."""
    model = models.build(name)
    dense = sample(model, name)
    with reports() as found, library_calls() as calls:
        everything = sample(patch(model, topk=1.0), name)
        half = sample(patch(model, topk=0.5), name)
        untouched = sample(model, name)
    return {
        "reports": found,
        "calls": calls,
        "error_all": relative_error(everything, dense),
        "error_half": relative_error(half, dense),
        "original_unchanged": torch.equal(untouched, dense),
    }


def run(name: str = "wan", dtype: str = "float32", **kwargs: Any) -> dict[str, Any]:
    """One run with the node and one without: the report and the error at topk 1."""
    widgets = kwargs.pop("widgets", {"topk": 1.0})
    if "frames" in kwargs:
        kwargs["latent"] = models.empty_latent(name, frames=kwargs.pop("frames"))
    model = models.build(name, getattr(torch, dtype))
    with reports() as found:
        out = sample(patch(model, **widgets), name, **kwargs)
    return found[0] | {"error": relative_error(out, sample(model, name, **kwargs))}


def schedule_that_rises_again() -> dict[str, Any]:
    """A restart sampler's schedule: back to noise levels before start_percent."""
    model = models.build("wan")
    latent = models.empty_latent("wan")
    sampling = model.get_model_object("model_sampling")
    percents = [0.0, 0.3, 0.6, 0.1, 0.5, 0.8]  # two of these six are before start_percent 0.2
    sigmas = torch.tensor([sampling.percent_to_sigma(p) for p in percents] + [0.0])
    with reports() as found, torch.inference_mode():
        comfy.sample.sample_custom(
            patch(model),
            comfy.sample.prepare_noise(latent, 0),
            4.0,
            comfy.samplers.sampler_object("euler"),
            sigmas,
            models.conditioning("wan"),
            models.conditioning("wan", negative=True),
            latent,
            disable_pbar=True,
            seed=0,
        )
    return found[0]


def split_over_two_models() -> dict[str, Any]:
    """KSamplerAdvanced twice, a model each, as Wan 2.2 is run."""
    advanced = comfy_nodes.NODE_CLASS_MAPPINGS["KSamplerAdvanced"]()

    def both(high: Any, low: Any) -> torch.Tensor:
        latent = {"samples": models.empty_latent("wan")}
        conds = models.conditioning("wan"), models.conditioning("wan", negative=True)
        ranges = ((high, "enable", 0, 2, "enable"), (low, "disable", 2, 10000, "disable"))
        with torch.inference_mode():
            for model, add_noise, first, last, leftover in ranges:
                (latent,) = advanced.sample(
                    model, add_noise, 0, 4, 4.0, "euler", "simple", *conds, latent, first, last,
                    leftover,
                )  # fmt: skip
        return latent["samples"]

    high, low = models.build("wan", seed=0), models.build("wan", seed=1)
    dense = both(high, low)
    with reports() as found:
        out = both(patch(high, topk=1.0), patch(low, topk=1.0))
    return {"reports": found, "error": relative_error(out, dense)}


def window_follows_a_later_shift() -> list[dict[str, Any]]:
    """ModelSamplingSD3 before and after the node: the same window either way."""
    shift = nodes_model_advanced.ModelSamplingSD3()
    model = models.build("wan")
    with reports() as found:
        sample(patch(shift.patch(model, 20.0)[0]), "wan", steps=10)
        sample(shift.patch(patch(model), 20.0)[0], "wan", steps=10)
    return found


def batched_or_split() -> dict[str, Any]:
    """Cond and uncond in one forward pass, and in two because memory is short."""
    model = models.build("wan")
    patched = patch(model, topk=0.3)
    with reports() as found:
        together = sample(patched, "wan")
        again = sample(patched, "wan")
        with replaced(model.model, "memory_required", lambda *args, **kwargs: 1e30):
            apart = sample(patched, "wan")
    return {
        "reports": found,
        "repeatable": torch.equal(together, again),
        "error": relative_error(apart, together),
    }


def cancelled() -> dict[str, Any]:
    """The user presses Cancel after the second step; then the same patched model runs again."""
    interrupted = comfy.model_management.InterruptProcessingException
    patched = patch(models.build("wan"))

    def cancel(step: int, *_: Any) -> None:
        if step == 1:
            raise interrupted()

    raised = False
    with reports() as found:
        whole = sample(patched, "wan")
        try:
            sample(patched, "wan", callback=cancel)
        except interrupted:
            raised = True
        again = sample(patched, "wan")
    options = patched.model_options["transformer_options"]
    return {
        "reports": found,
        "raised": raised,
        "same_after": torch.equal(whole, again),
        "options": sorted(options),
    }


def library_raises(kind: str) -> dict[str, Any]:
    """What becomes of an error inside the library."""
    sparge = pack("sparge")
    errors = {
        "unsupported": lambda: sparge.Unsupported("the test allows nothing"),
        "build": lambda: sparge.KernelBuildError("no compiler", "line 1"),
        "memory": lambda: torch.OutOfMemoryError("out of memory"),
        "interrupt": comfy.model_management.InterruptProcessingException,
        "bug": lambda: RuntimeError("a bug"),
    }
    model = models.build("wan")
    dense = sample(model, "wan")
    calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        raise errors[kind]()

    raised, same = "", False
    with reports() as found, replaced(pack("nodes.attention_call"), "attention", fail):
        try:
            same = torch.equal(sample(patch(model), "wan"), dense)
        except BaseException as error:
            raised = type(error).__name__
    return {"report": found[0], "raised": raised, "same_as_dense": same, "calls": calls}


class Recorder:
    """Another pack's override: counts its calls, and how deep the stack is when it is called."""

    def __init__(self) -> None:
        self.calls = 0
        self.depths: set[int] = set()

    def over(self, previous: Callable[..., Any] | None) -> Callable[..., Any]:
        def override(func: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.depths.add(stack_depth())
            return previous(func, *args, **kwargs) if previous else func(*args, **kwargs)

        return override

    def patch(self, model: Any, chained: bool) -> Any:
        clone = model.clone()
        options = clone.model_options["transformer_options"]
        previous = options.get("optimized_attention_override") if chained else None
        options["optimized_attention_override"] = self.over(previous)
        return clone


def stack_depth() -> int:
    depth, frame = 0, sys._getframe()
    while frame := frame.f_back:
        depth += 1
    return depth


def other_override(place: str) -> dict[str, Any]:
    """Another pack's override before the node, after it and chaining, after it and overwriting."""
    recorder = Recorder()
    model = models.build("wan")
    if place == "before":
        patched = patch(recorder.patch(model, chained=True), topk=1.0)
    else:
        patched = recorder.patch(patch(model, topk=1.0), chained=place == "chained")
    with reports() as found:
        out = sample(patched, "wan")
    return {
        "report": found[0],
        "recorded": recorder.calls,
        "error": relative_error(out, sample(model, "wan")),
    }


def attention_backend_node_after() -> dict[str, Any]:
    backend = nodes_model_advanced.ModelAttentionBackend()
    model = models.build("wan")
    with reports() as found:
        sample(backend.patch(patch(model), "pytorch attention")[0], "wan")
    return found[0]


def two_of_ours() -> dict[str, Any]:
    with reports() as found, library_calls() as calls:
        sample(patch(patch(models.build("wan"), topk=0.9), topk=0.3), "wan")
    return {"reports": found, "topks": sorted({call["topk"] for call in calls})}


def many_steps(steps: int) -> dict[str, Any]:
    """A pack that overwrote ours, for many steps: nothing may pile up."""
    recorder = Recorder()
    model = models.build("wan")
    patched = recorder.patch(patch(model, start_percent=1.0), chained=False)
    with reports() as found:
        sample(patched, "wan", steps=steps, latent=torch.zeros(1, 16, 1, 2, 2))
    return {"report": found[0], "depths": len(recorder.depths)}


def rewraps_each_step() -> dict[str, Any]:
    """A node that re-installs itself outside of everything before each step, as ComfyUI's own does
    under this callback key."""
    recorder = Recorder()
    model = patch(models.build("wan"))
    mine: list[Any] = []

    def prepare(patcher: Any, timestep: Any, model_options: dict[str, Any]) -> None:
        options = model_options["transformer_options"]
        current = options.get("optimized_attention_override")
        if current not in mine:
            mine.append(recorder.over(current))
            options["optimized_attention_override"] = mine[-1]

    model.add_callback_with_key("on_prepare_state", "block_sparse_attention", prepare)
    with reports() as found:
        sample(model, "wan", steps=20)
    return {"report": found[0], "wraps": len(mine), "depths": len(recorder.depths)}


def easy_cache() -> dict[str, Any]:
    model = nodes_easycache.EasyCacheNode.execute(models.build("wan"), 3.0, 0.15, 0.95, False)[0]
    with reports() as found:
        sample(patch(model), "wan", steps=10)
        sample(models.build("wan"), "wan", steps=10)
    return found[0]


def context_windows() -> dict[str, Any]:
    model = models.build("wan")
    windowed = nodes_context_windows.ContextWindowsManualNode.execute(
        model, 4, 1, "standard_static", 1, False, "pyramid", 2, False
    )[0]
    latent = models.empty_latent("wan", frames=7)
    with reports() as found, library_calls() as calls:
        out = sample(patch(windowed, topk=1.0), "wan", latent=latent)
    error = relative_error(out, sample(windowed, "wan", latent=latent))
    return {"report": found[0], "tokens": sorted({c["tokens"] for c in calls}), "error": error}


def lora() -> dict[str, Any]:
    model = models.build("wan")
    plain = sample(model, "wan")
    key = "diffusion_model.blocks.0.self_attn.q.weight"
    weight = model.model.state_dict()[key]
    adapted = model.clone()
    adapted.add_patches({key: ("diff", (torch.randn_like(weight) * 0.1,))}, 1.0)
    with reports() as found:
        out = sample(patch(adapted, topk=1.0), "wan")
    dense = sample(adapted, "wan")
    return {
        "report": found[0],
        "error": relative_error(out, dense),
        "lora_effect": relative_error(dense, plain),
    }


def compiled(name: str) -> dict[str, Any]:
    """TorchCompileModel's own set-up, with the backend that needs no C compiler, for two runs."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    model = models.build(name)
    dense = sample(model, name)
    outcomes = {}
    for order in ("before", "after"):
        clone = model.clone() if order == "before" else patch(model, topk=1.0)
        set_torch_compile_wrapper(
            clone, backend="eager", options={"guard_filter_fn": skip_torch_compile_dict}
        )
        patched = patch(clone, topk=1.0) if order == "before" else clone
        with reports() as found:
            errors = [relative_error(sample(patched, name), dense) for _ in range(2)]
        outcomes[order] = {"reports": found, "errors": errors}
    return outcomes
