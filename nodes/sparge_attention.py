# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttention: its widgets, and the clone of the model that it returns."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from ..sparge.session import AUTO_BUDGET, AUTO_QUALITY, MANUAL, QUALITIES, Settings
from .comfyui import inference_device, needs_of_model, prepare_kernels
from .hook import Hook

DEFAULT = Settings()
#: Not the default of Settings, which an API graph gets: for the same time fewer dense steps and a
#: higher density come closer to the original (docs/experiments.md, Dense steps for the same time).
START_OF_NEW_NODES = 0.1
#: Least and most of each number.
LIMITS = {
    "topk": (0.05, 1.0), "pvthreshd": (1.0, 50.0), "cdfthreshd": (0.0, 1.0),
    "simthreshd1": (-1.0, 1.0), "start_percent": (0.0, 1.0), "end_percent": (0.0, 1.0),
    "min_tokens": (0, 1 << 20),
}  # fmt: skip


class SpargeAttention(io.ComfyNode):
    """Node id, widget names, their order and the option texts are in saved graphs: only append.

    A new node starts in the first mode. An API graph without `mode` runs as manual: it was written
    when there was nothing else.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeAttention",
            # ComfyUI's search puts words of the name first, whatever the aliases say, and those of
            # a short name before those of a long one: only WaveSpeed Image Upscale has more speed.
            display_name="Sparge Attention (sparse, speed)",
            category="model/patch",
            description=(
                "Makes video models and large images render faster: it skips the work that shows "
                "least. Put it last, right before the sampler; bypass it to compare. After each "
                "run the node says how much time it saved, or why it did not."
            ),
            search_aliases=[
                *("sparge", "spargeattn", "sparse attention", "sage attention"),
                *("speed", "speed up video", "faster", "fast", "accelerate", "optimize"),
                *("performance", "加速", "稀疏", "高速化"),
            ],
            inputs=[
                io.Model.Input("model", tooltip="The model to make faster."),
                *_widgets(),
            ],
            outputs=[io.Model.Output(tooltip="The same model, made faster.")],
            hidden=[io.Hidden.unique_id],
            # What belongs to a mode reaches execute() under its flat name, too.
            accept_all_inputs=True,
        )

    @classmethod
    def validate_inputs(cls, mode: Any = None, **inputs: Any) -> bool:
        """Raises ValueError, which the server tells once, and a text that is returned once for each
        input. What comes through a link is None here."""
        settings_of(mode, inputs)
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        mode: io.DynamicCombo.Type | str = DEFAULT.mode,
        **widgets: Any,
    ) -> io.NodeOutput:
        settings = settings_of(mode, widgets)
        node_id = cls.hidden.unique_id if cls.hidden else None
        prepare_kernels(inference_device(), needs_of_model(model.model), node_id)
        patched = model.clone()
        Hook(settings, node_id).install(patched)
        return io.NodeOutput(patched)


def settings_of(mode: Any, inputs: dict[str, Any]) -> Settings:
    """Settings of what the server hands to the node. What `mode` shows comes nested in it from the
    browser (`mode.topk`), and beside it from API graphs (`topk`). What is None was not given, and
    names with $$ are the browser's own. Raises ValueError for all others."""
    given = {name.removeprefix("mode."): value for name, value in inputs.items()}
    nested = mode if isinstance(mode, dict) else {"mode": mode}
    given |= {name: value for name, value in nested.items() if value is not None}
    given = {n: x for n, x in given.items() if not (x is None or n == "model" or n[:2] == "$$")}
    known = [field.name for field in fields(Settings)]
    if unknown := ", ".join(sorted(given.keys() - known)):
        raise ValueError(f"Sparge Attention has no {unknown}; it takes {', '.join(known)}.")
    for name, (least, most) in LIMITS.items():
        value = given.get(name)
        if isinstance(value, int | float) and not least <= value <= most:
            value = float(value) if isinstance(most, float) else value  # as the server has it
            raise ValueError(f"{name} is {value}; it takes a number from {least} to {most}.")
    return Settings(**given)


def _widget(kind: Any, name: str, tooltip: str, **options: Any) -> Any:
    """Makes a widget that is optional to the server, so that a graph saved before it existed, or an
    API graph that names only a few, still runs; Settings has the same defaults."""
    options.setdefault("default", getattr(DEFAULT, name))
    return kind.Input(name, optional=True, tooltip=tooltip, **options)


def _number(name: str, step: float, tooltip: str, **options: Any) -> Any:
    """Makes a widget for a number."""
    kind = io.Int if isinstance(getattr(DEFAULT, name), int) else io.Float
    least, most = LIMITS[name]
    return _widget(kind, name, tooltip, min=least, max=most, step=step, **options)


def _topk(tooltip: str) -> Any:
    """Its label in the browser is of locales/en: ComfyUI 0.33 forgets display_name in a mode."""
    slider = io.NumberDisplay.slider
    return _number("topk", 0.01, tooltip, display_mode=slider)


def _manual() -> list[Any]:
    return [
        _topk(
            "How much of the attention is computed, the same share everywhere. Lower is faster, "
            "higher is closer to the original: start with 0.5 and go down while you like the "
            "video; 1 computes all of it, in 8 bits. Not used when select_by is cdf."
        ),
        _number(
            "pvthreshd",
            0.5,
            "Also skips what weighs next to nothing in the rest: this many powers of two below the "
            "largest. Lower is faster, higher is closer to the original; 50 is off. H100 and H200 "
            "leave it out, where it costs more than it saves.",
            display_mode=io.NumberDisplay.slider,
        ),
        _widget(
            io.Combo,
            "select_by",
            "topk keeps the same share everywhere: a speed you can count on. cdf keeps as much "
            "as cdfthreshd asks for: faster where little matters, closer to the original where "
            "much does.",
            options=["topk", "cdf"],
            advanced=True,
        ),
        _number(
            "cdfthreshd",
            0.001,
            "How much of the weight of attention is kept, by estimate, when select_by is cdf. "
            "Lower is faster, higher is closer to the original.",
            round=0.001,
            advanced=True,
        ),
        _number(
            "simthreshd1",
            0.01,
            "Parts of the video that are less uniform than this are never skipped. Lower is "
            "faster, higher is closer to the original; below 0 is off.",
            advanced=True,
        ),
    ]


def _widgets() -> list[Any]:
    option = io.DynamicCombo.Option
    quality = _widget(
        io.Combo,
        "quality",
        "How close the video stays to the original, made without this node. fast is faster, "
        "high is closer. "
        "Each allows attention a mean error: "
        + ", ".join(f"{name} {100 * error:g} %" for name, error in QUALITIES.items())
        + ".",
        options=list(QUALITIES),
    )
    average = (
        "How much of the attention is computed, on average: parts of the model that need more get "
        "more. Lower is faster, higher is closer to the original: start with 0.5 and go down "
        "while you like the video."
    )
    return [
        io.DynamicCombo.Input(
            "mode",
            optional=True,
            tooltip=(
                "auto quality: you say how close the video must stay, and the node skips what it "
                "can; closer to the original. auto budget: you say how much is computed; faster, "
                "by an amount you can count on. manual: fixed numbers, the same for the whole "
                "model."
            ),
            options=[
                option(AUTO_QUALITY, [quality]),
                option(AUTO_BUDGET, [_topk(average)]),
                option(MANUAL, _manual()),
            ],
        ),
        _number(
            "start_percent",
            0.01,
            "The first part of the run, which settles layout and motion, is computed in full. "
            "Lower is faster, higher is closer to the original. A position in the noise schedule: "
            "for most schedulers the share of the steps.",
            default=START_OF_NEW_NODES,
            advanced=True,
        ),
        _number(
            "end_percent",
            0.01,
            "After this point of the run all is computed in full again. Higher is faster, lower "
            "is closer to the original in fine detail.",
            advanced=True,
        ),
        _number(
            "min_tokens",
            256,
            "Videos and images of fewer tokens than this are computed in full, because they gain "
            "little. An image of 1024 x 1024 has 4096 tokens in most models. Lower makes smaller "
            "ones faster, too; higher is closer to the original.",
            advanced=True,
        ),
        _widget(
            io.String,
            "dense_blocks",
            "Layers of the model that are computed in full, for example 0-2, -1 for the first "
            "three and the last. Fewer is faster, more is closer to the original.",
            advanced=True,
            placeholder="0-2, -1",
        ),
        _widget(
            io.Boolean,
            "exact_dense",
            "What is computed in full is computed exactly. Off is faster where 8 bits are faster "
            "on this GPU, and nobody sees the difference; on is closer to the original. For the "
            "auto modes: manual always is exact.",
            advanced=True,
        ),
    ]
