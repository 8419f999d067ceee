# SPDX-License-Identifier: Apache-2.0
"""Node SpargeAttention: its widgets, and the clone of the model that it returns."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..sparge.tune import LayerSpans
from .hook import Hook
from .host import inference_device
from .profiles import NamedProfile
from .settings import AUTO_QUALITY, MODES, QUALITIES, Settings
from .sparge_profile_load import ProfileSocket

DEFAULT = Settings()

#: Mode that a node starts with which somebody adds now. Not the default of Settings, which an API
#: graph without `mode` gets: it was written when there was nothing but manual, and has to stay
#: that.
MODE_OF_NEW_NODES = AUTO_QUALITY
#: Likewise: for the same time fewer dense steps and a higher density are truer
#: (docs/experiments.md, Dense steps for the same time).
START_OF_NEW_NODES = 0.1


class SpargeAttention(io.ComfyNode):
    """Node id, widget names, their order and the option texts are in saved graphs: only append."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeAttention",
            display_name="Sparge Attention",
            category="model/patch",
            description=(
                "Makes video models and large images render faster: self-attention skips the parts "
                "that matter least. Put it last, right before the sampler; bypass it to compare. "
                "After each run the node says how much was sparse, and why the rest was not."
            ),
            search_aliases=[
                "sparse attention",
                "spargeattn",
                "sage attention",
                "speed up video",
                "accelerate",
            ],
            inputs=[
                io.Model.Input("model", tooltip="The model to make faster."),
                *_widgets(),
                ProfileSocket.Input(
                    "profile",
                    optional=True,
                    tooltip=(
                        "What an earlier run measured, from Load Sparge Profile. Faster, because "
                        "this run need not measure; truer without, because then this very "
                        "run is measured."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="The same model with sparse attention.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, dense_blocks: str | None = DEFAULT.dense_blocks) -> bool | str:
        try:
            LayerSpans.parse(dense_blocks or "")
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        mode: str = DEFAULT.mode,
        topk: float = DEFAULT.topk,
        pvthreshd: float = DEFAULT.pvthreshd,
        start_percent: float = DEFAULT.start_percent,
        end_percent: float = DEFAULT.end_percent,
        min_tokens: int = DEFAULT.min_tokens,
        dense_blocks: str | None = DEFAULT.dense_blocks,
        select_by: str = DEFAULT.select_by,
        cdfthreshd: float = DEFAULT.cdfthreshd,
        simthreshd1: float = DEFAULT.simthreshd1,
        quality: str = DEFAULT.quality,
        exact_dense: bool = DEFAULT.exact_dense,
        profile: NamedProfile | None = None,
    ) -> io.NodeOutput:
        widgets = (mode, topk, pvthreshd, start_percent, end_percent, min_tokens)
        more = (dense_blocks or "", select_by, cdfthreshd, simthreshd1, quality, exact_dense)
        settings = Settings(*widgets, *more)
        node_id = cls.hidden.unique_id if cls.hidden else None
        hook = Hook(settings, node_id, profile)
        hook.prepare_kernels(inference_device())
        patched = model.clone()
        hook.install(patched)
        return io.NodeOutput(patched)


def _widget(kind: Any, name: str, tooltip: str, **options: Any) -> Any:
    """Makes a widget that is optional to the server, so that a graph saved before it existed, or an
    API graph that names only a few, still runs; execute() has the same defaults."""
    options.setdefault("default", getattr(DEFAULT, name))
    return kind.Input(name, optional=True, tooltip=tooltip, **options)


def _number(name: str, limits: tuple[float, float, float], tooltip: str, **options: Any) -> Any:
    """Makes a widget for a number. limits: least, most, step."""
    kind = io.Int if isinstance(getattr(DEFAULT, name), int) else io.Float
    least, most, step = limits
    return _widget(kind, name, tooltip, min=least, max=most, step=step, **options)


def _widgets() -> list[Any]:
    slider = io.NumberDisplay.slider
    return [
        _widget(
            io.Combo,
            "mode",
            "auto quality measures every head in the last dense step and makes them as sparse "
            "as the quality allows: truer. auto budget shares a mean density, topk, among the "
            "heads: faster, by an amount you can count on, and truer than manual at the same "
            "topk. manual: the numbers below decide, the same for every head.",
            default=MODE_OF_NEW_NODES,
            options=MODES,
        ),
        _number(
            "topk",
            (0.05, 1.0, 0.01),
            "Share of the attention that is computed, in manual mode for each head and in auto "
            "budget as the mean over all heads and sparse steps, of which early ones get more. "
            "Lower is faster, higher is truer: start with 0.5 and go down while you like the "
            "result; 1 computes all of it, in 8 bits. Has no effect in auto quality, nor when "
            "select_by is cdf.",
            display_mode=slider,
        ),
        _number(
            "pvthreshd",
            (1.0, 50.0, 0.5),
            "Second filter: skips a part of the kept attention whose weights are this many "
            "powers of two below the largest. Lower is faster, higher is truer; 50 is off. "
            "Left out on H100 and H200, where looking for such parts costs more than it saves.",
            display_mode=slider,
        ),
        _number(
            "start_percent",
            (0.0, 1.0, 0.01),
            "Sampling before this point stays dense, because the first steps settle layout and "
            "motion. Lower is faster, higher is truer. A position in the noise schedule, which "
            "is the share of the steps for most schedulers.",
            default=START_OF_NEW_NODES,
            advanced=True,
        ),
        _number(
            "end_percent",
            (0.0, 1.0, 0.01),
            "Sampling after this point is dense again. Higher is faster, lower is truer in "
            "fine detail.",
            advanced=True,
        ),
        _number(
            "min_tokens",
            (0, 1 << 20, 256),
            "Attention over fewer tokens stays dense, since there is little to gain there. "
            "Lower is faster in small models only, higher is truer.",
            advanced=True,
        ),
        _widget(
            io.String,
            "dense_blocks",
            "Transformer blocks that stay dense, for example 0-2, -1 for the first three and "
            "the last. Fewer blocks is faster, more is truer.",
            advanced=True,
            placeholder="0-2, -1",
        ),
        _widget(
            io.Combo,
            "select_by",
            "topk keeps the same share everywhere: a speed you can count on. cdf keeps as much "
            "as cdfthreshd asks for: faster where attention is concentrated, truer where it is "
            "not. Manual mode only.",
            options=["topk", "cdf"],
            advanced=True,
        ),
        _number(
            "cdfthreshd",
            (0.0, 1.0, 0.001),
            "Share of the estimated attention weight that is kept. Lower is faster, higher is "
            "truer. Used only in manual mode when select_by is cdf.",
            round=0.001,
            advanced=True,
        ),
        _number(
            "simthreshd1",
            (-1.0, 1.0, 0.01),
            "Blocks whose tokens are less alike than this are never skipped. Lower is faster, "
            "higher is truer; below 0 is off.",
            advanced=True,
        ),
        _widget(
            io.Combo,
            "quality",
            "How far the heads' attention may be from dense attention on average, in auto "
            "quality: "
            + ", ".join(f"{name} {100 * error:g} %" for name, error in QUALITIES.items())
            + ". Louder heads, those with larger output, count more; heads that hardly show "
            "may err more. fast is faster, high is truer.",
            options=list(QUALITIES),
        ),
        _widget(
            io.Boolean,
            "exact_dense",
            "Steps and blocks that are not sparse are computed exactly. Off is faster where this "
            "GPU computes them faster in 8 bits, which nobody sees; on is truer. Auto modes "
            "only: in manual mode they are always exact.",
            advanced=True,
        ),
    ]
