# SPDX-License-Identifier: Apache-2.0
"""Cases of pipelines of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.tiny_models.adapted import adapt
from benchmarks.tiny_models.pipelines import ALL, TEXT, Tiny, sd3

from .case import Case, Subject

#: Steps of a run; two for each transformer, as the auto modes measure in the first.
STEPS = {"Wan 2.2": 4}
FEWEST_STEPS = 2
PIPELINES: dict[str, Callable[[], Tiny]] = ALL | {"SD3": lambda: sd3("3")}
#: Those that have both prompts in one batch.
IN_ONE_BATCH = {"CogVideoX", "CogVideoX 1.5", "Mochi", "LTX", "SD3", "SD3.5", "Allegro"}


@dataclass(frozen=True)
class Use:
    """How a pipeline is changed and called."""

    given: dict[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline's call."""
    dtype: torch.dtype = torch.float32
    """In 16 bits the rounding of latents would hide errors of attention."""
    steps: int = FEWEST_STEPS
    change: Callable[[Tiny], object] | None = None
    two_prompts: bool = False


def adapt_all(tiny: Tiny) -> None:
    for block in tiny.pipe.transformer.blocks:
        adapt(block.attn1, "to_q")


def offload(tiny: Tiny) -> None:
    from accelerate import cpu_offload

    device = torch.device("cpu")
    cpu_offload(tiny.pipe.transformer, execution_device=device, offload_buffers=True)


def native(tiny: Tiny) -> None:
    tiny.pipe.transformer.set_attention_backend("native")


def by_math(tiny: Tiny) -> None:
    tiny.pipe.transformer.set_attention_backend("_native_math")


def in_dtype(tiny: Tiny, dtype: torch.dtype) -> Tiny:
    """Pipeline whose transformers and prompts have another dtype."""
    for model in tiny.transformers:
        model.to(dtype)

    def cast(x: Any) -> Any:
        is_number = isinstance(x, Tensor) and x.is_floating_point()
        return x.to(dtype) if is_number else x

    return replace(tiny, given={name: cast(x) for name, x in tiny.given.items()})


def of_two(tiny: Tiny) -> Tiny:
    """Pipeline for two prompts at once, of which the second has other tokens, and fewer real ones
    where the pipeline takes masks."""

    def both(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.cat([x, x & (torch.arange(TEXT) < 5) if x.dtype == torch.bool else x.flip(-1)])

    return replace(tiny, given={name: both(x) for name, x in tiny.given.items()})


def maker(pipeline: Callable[[], Tiny], use: Use) -> Callable[[], Subject]:
    def make() -> Subject:
        tiny = in_dtype(pipeline(), use.dtype)
        if use.two_prompts:
            tiny = of_two(tiny)
        if use.change:
            use.change(tiny)

        def run() -> list[Tensor]:
            return list(tiny(use.steps, **use.given).float())

        return Subject(run, tiny.pipe.transformer, tiny.pipe)

    return make


#: Uses of Wan, which asks diffusers for its attention.
FURTHER: dict[str, Use] = {
    "LoRA": Use(change=adapt_all),
    "offload": Use(change=offload),
    "set_attention_backend(native)": Use(change=native),
    "set_attention_backend(_native_math)": Use(change=by_math),
}
OF_FURTHER = "Wan 2.1"
#: Pipelines in 16 bits, of those whose attention shows in the result although it is rounded.
IN_16_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16}
OF_16_BITS = ("CogVideoX", "Mochi", "SD3.5")
COMPILED = ("CogVideoX", "Wan 2.1", "HunyuanVideo")


def cases() -> Iterator[Case]:
    for name, pipeline in PIPELINES.items():
        steps = STEPS.get(name, FEWEST_STEPS)
        both = "cfg in one batch" if name in IN_ONE_BATCH else "cfg in two passes"
        yield Case(name, both, maker(pipeline, Use(steps=steps)))
        alone = {"guidance": 1.0}
        yield Case(name, "one prompt", maker(pipeline, Use(alone, steps=steps)))
        two = Use(alone, steps=steps, two_prompts=True)
        yield Case(name, "two prompts", maker(pipeline, two))
    for name, use in FURTHER.items():
        yield Case(OF_FURTHER, name, maker(PIPELINES[OF_FURTHER], use))
    for name in OF_16_BITS:
        for dtype in IN_16_BITS:
            yield Case(name, dtype, maker(PIPELINES[name], Use(dtype=IN_16_BITS[dtype])))
    for name in COMPILED:
        make = maker(PIPELINES[name], Use({"guidance": 1.0}))
        yield Case(name, "one prompt, torch.compile", make, compiled=True)
        yield Case(name, "one prompt, torch.compile(fullgraph)", make, fullgraph=True)
