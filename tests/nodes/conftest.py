# SPDX-License-Identifier: Apache-2.0
"""The pack without ComfyUI: stand-ins for the few names it imports, recording what they are given.

tests/comfy runs the same code in real ComfyUI.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS, LATENT, TOKENS, network
from tests.nodes.stand_ins import folder_paths, model_loading, module_of, ui

PACK = Path(__file__).resolve().parents[2]
PACK_NAME = "sparge-pack-under-test"


class Recorded(SimpleNamespace):
    """Whatever a schema is made of: keeps its arguments as attributes."""

    def __init__(self, id: str | None = None, **kwargs: Any) -> None:
        super().__init__(id=id, **kwargs)


class NumberDisplay(str, enum.Enum):
    slider = "slider"


def _io() -> SimpleNamespace:
    numbers = "Float", "Int", "String", "Boolean"
    kinds = "Model", "Combo", "Latent", "Image", "Conditioning", *numbers

    def kind_of(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            Input=type(f"{name}Input", (Recorded,), {}),
            Output=type(f"{name}Output", (Recorded,), {}),
        )

    dynamic = SimpleNamespace(
        Input=type("DynamicComboInput", (Recorded,), {}),
        Option=lambda key, inputs: SimpleNamespace(key=key, inputs=inputs),
        Type=dict,
    )
    return SimpleNamespace(
        DynamicCombo=dynamic,
        ComfyNode=type("ComfyNode", (), {"hidden": None}),
        Schema=Recorded,
        NodeOutput=lambda *values, ui=None: values,
        NumberDisplay=NumberDisplay,
        Hidden=SimpleNamespace(unique_id="unique_id"),
        Custom=kind_of,
        **{kind: kind_of(kind) for kind in kinds},
    )


@pytest.fixture(scope="session")
def load_pack() -> Any:
    """load_pack("nodes.hook") imports that module of the pack, with the stand-ins in place."""
    management = module_of(
        "comfy.model_management",
        get_torch_device=lambda: torch.device("cpu"),
        throw_exception_if_processing_interrupted=lambda: None,
    )
    loading = model_loading()
    parts = {name.removeprefix("comfy."): module for name, module in loading.items()}
    stand_ins = {
        "folder_paths": folder_paths(Path("no models")),
        "comfy": module_of("comfy", model_management=management, **parts),
        **loading,
        "comfy.model_management": management,
        "comfy.ldm": module_of("comfy.ldm"),
        "comfy.ldm.modules": module_of("comfy.ldm.modules"),
        "comfy.ldm.modules.attention": module_of(
            "comfy.ldm.modules.attention", optimized_attention=backend
        ),
        "comfy_api": module_of("comfy_api"),
        "comfy_api.latest": module_of(
            "comfy_api.latest", ComfyExtension=type("ComfyExtension", (), {}), io=_io(), ui=ui()
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins.items():
            patch.setitem(sys.modules, name, module)
        spec = importlib.util.spec_from_file_location(
            PACK_NAME, PACK / "__init__.py", submodule_search_locations=[str(PACK)]
        )
        assert spec and spec.loader
        package = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, PACK_NAME, package)
        spec.loader.exec_module(package)
        yield lambda name="": importlib.import_module(f"{PACK_NAME}.{name}" if name else PACK_NAME)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """All tests here are of such."""


@pytest.fixture
def reference_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARGE_REFERENCE", "1")


class Flow:
    """A model sampling whose sigma falls from 1 to 0 in proportion to the percent."""

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 - percent


class Patcher:
    """Part of a ModelPatcher that a node sees which patches attention."""

    def __init__(self, diffusion_model: Any = None) -> None:
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.load_device = torch.device("cpu")
        self.model = SimpleNamespace(diffusion_model=diffusion_model or torch.nn.Module())

    def clone(self) -> Patcher:
        other = Patcher(self.model.diffusion_model)
        other.model_options = {"transformer_options": dict(self.transformer_options)}
        other.wrappers = {
            point: {key: list(value) for key, value in keys.items()}
            for point, keys in self.wrappers.items()
        }
        return other

    @property
    def transformer_options(self) -> dict[str, Any]:
        return self.model_options["transformer_options"]

    def add_wrapper_with_key(self, point: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(point, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, point: str, key: str) -> None:
        self.wrappers.get(point, {}).pop(key, None)

    def get_wrappers(self, point: str, key: str) -> list[Any]:
        return self.wrappers.get(point, {}).get(key, [])

    def get_model_object(self, name: str) -> Any:
        assert name == "model_sampling"
        return Flow()


def executor(class_obj: Any, function: Any) -> Any:
    """Executor that a wrapper is handed: calls on, and knows whom it wraps."""
    made: Any = functools.partial(function)
    made.class_obj = class_obj
    return made


class Session:
    """Runs a patched model's wrappers and override as ComfyUI does, on a model of your choice."""

    def __init__(
        self, patcher: Patcher, latent: tuple[int, ...] = (2, 16, 16), context: Any = None
    ) -> None:
        self.patcher = patcher
        self.model = patcher.model
        self.latent = torch.zeros(1, 4, *latent)
        self.context = context
        self.extras: dict[str, Any] = {}  # of the conditioning, for the model

    def sample(
        self,
        step: Any,
        sigmas: list[float],
        conditionings: Sequence[list[int]] = ([1, 0],),
    ) -> list[Any]:
        """Calls step(attend) for each sigma and batch of conditionings; attend(q, k, v, heads,
        **kwargs) is the model's, of q, k, v that all conditionings of a batch share, and
        attend.options the transformer_options of the pass."""
        guider = SimpleNamespace(
            model_options={"transformer_options": dict(self.patcher.transformer_options)},
            model_patcher=self.patcher,
        )
        self.options = guider.model_options["transformer_options"]

        def evaluation(sigma: float) -> list[Any]:
            return [self.forward(step, sigma, batch) for batch in conditionings]

        def inner(*_: Any) -> list[Any]:
            evaluate = self._wrapped("predict_noise", guider, evaluation)
            return [result for sigma in sigmas for result in evaluate(sigma)]

        levels = torch.tensor([*sigmas, 0.0])
        noise = latent = sampler = None
        return self._wrapped("outer_sample", guider, inner)(noise, latent, sampler, levels)

    def forward(self, step: Any, sigma: float, conditionings: list[int]) -> Any:
        def model(x: Any, t: Any, a: Any, b: Any, c: Any, options: dict[str, Any], **_: Any) -> Any:
            def attend_batch(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
                q, k, v = (torch.cat([each] * len(conditionings)) for each in (q, k, v))
                return attend(options, q, k, v, *args, **kwargs)

            setattr(attend_batch, "options", options)  # noqa: B010
            return step(attend_batch)

        call = self._wrapped("apply_model", self.model, model)
        options = {**self.options, "cond_or_uncond": conditionings}
        given = None, self.context, None, options
        return call(self.latent, torch.tensor([sigma]), *given, **self.extras)

    def _wrapped(self, point: str, class_obj: Any, function: Any) -> Any:
        for keyed in self.patcher.wrappers.get(point, {}).values():
            for wrapper in keyed:
                function = functools.partial(wrapper, executor(class_obj, function))
        return function


def attend(options: dict[str, Any], q: Any, k: Any, v: Any, heads: int, **kwargs: Any) -> Any:
    """ComfyUI's wrap_attn around its backend."""
    kwargs |= {"transformer_options": options, "_inside_attn_wrapper": True}
    override = options.get("optimized_attention_override")
    if override is None:
        return backend(q, k, v, heads, **kwargs)
    return override(backend, q, k, v, heads, **kwargs)


def backend(
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: Any = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Dense attention in ComfyUI's conventions."""
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (
            t.reshape(len(q), -1, heads if t.ndim > 3 else t.shape[-1] // head_dim, head_dim)
            .transpose(1, 2) for t in (q, k, v)
        )  # fmt: skip
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k.to(q.dtype), v.to(q.dtype), mask, enable_gqa=k.shape[1] != q.shape[1],
        scale=kwargs.get("scale"),
    )  # fmt: skip
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@pytest.fixture
def runs(load_pack: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """The (run, stopped) of every run that ends."""
    seen: list[tuple[Any, bool]] = []
    run_class = load_pack("nodes.run").Run
    made = run_class.report

    def report(run: Any, stopped: bool = False) -> Any:
        seen.append((run, stopped))
        return made(run, stopped)

    monkeypatch.setattr(run_class, "report", report)
    return seen


@pytest.fixture
def session() -> type[Session]:
    return Session


@pytest.fixture
def patcher() -> Patcher:
    return Patcher()


@pytest.fixture
def patch(load_pack: Any, patcher: Patcher) -> Callable[..., Patcher]:
    """patch(model, **widgets): the patcher of a model that went through the node."""
    node = load_pack("nodes.sparge_attention").SpargeAttention

    def patched(model: Any = None, **widgets: Any) -> Patcher:
        patcher.model.diffusion_model = network() if model is None else model
        return node.execute(patcher, **({"min_tokens": TOKENS} | widgets))[0]

    return patched


@pytest.fixture
def sampled(
    load_pack: Any, patch: Callable[..., Patcher], runs: list[tuple[Any, bool]]
) -> Callable[..., Any]:
    """sampled(step, sigmas, ...): a run with the node, when it is over.

    prepared: changes the patched model. extras: conditioning. Further names are widgets.
    """
    hook_of, told = load_pack("nodes.hook").hook_of, load_pack("sparge.session")

    def run(
        step: Any,
        sigmas: Sequence[float] = (0.5,),
        model: Any = None,
        latent: tuple[int, ...] = LATENT,
        context: Any = None,
        conditionings: Sequence[list[int]] = ([1, 0],),
        prepared: Callable[[Any], Any] = lambda patched: None,
        extras: dict[str, Any] | None = None,
        **widgets: Any,
    ) -> SimpleNamespace:
        patched = patch(model, **widgets)
        prepared(patched)
        session = Session(patched, latent, context)
        session.extras = extras or {}
        given = session.sample(step, list(sigmas), conditionings)
        (run, _), last = runs[-1], hook_of(patched).last
        return SimpleNamespace(
            given=given, patched=patched, options=session.options, run=run,
            counts=run.counts, notes=[*run._notes], last=last, line=last and told.summary(last),
            details=last and told.details(last),
        )  # fmt: skip

    return run


@pytest.fixture
def step(generator: torch.Generator) -> Callable[[Any], list[torch.Tensor]]:
    """A forward pass: a self-attention over the clip in each block."""
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)
    return lambda attend: [attend(*layer, HEADS) for layer in layers]


class Asked(NamedTuple):
    """Call of the library."""

    tensors: tuple[torch.Tensor, ...]
    """q, k, v and the result."""
    policy: Any
    order: Any
    heads: int | None
    """Number of heads that have settings of their own; None where none has."""


@pytest.fixture
def asked(load_pack: Any, monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """The calls of the library."""
    module = load_pack("sparge.session.calls")
    library, seen = module.attention, []

    def attention(q: Any, k: Any, v: Any, policy: Any, **kwargs: Any) -> Any:
        out, found = library(q, k, v, policy, **kwargs), kwargs["head_settings"]
        seen.append(Asked((q, k, v, out), policy, kwargs["order"], found and found.heads))
        return out

    monkeypatch.setattr(module, "attention", attention)
    return seen
