# SPDX-License-Identifier: Apache-2.0
"""Cases of language models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.tiny_models.adapted import adapt
from benchmarks.tiny_models.texts import Run, forward, in_parts, make_text_model

from .case import Case, Subject

TOKENS, NEW_TOKENS = 320, 4
PLACES = torch.arange(TOKENS)
LEFT = torch.stack([PLACES >= 0, PLACES >= 120]).long()
RIGHT = LEFT.flip(1)
HOLES = (PLACES % 5 > 0).long().expand(2, -1)
PACKED = torch.cat([torch.arange(150), torch.arange(170)]).expand(2, -1)
LOWER = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()

#: Name -> architecture and fields of its configuration. All have grouped heads but one.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, heads of keys for all": ("Llama", {"num_key_value_heads": 2}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
    "Qwen3, a sliding layer": (
        "Qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    ),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, sliding": ("Mistral", {"sliding_window": 100}),
    "Gemma": ("Gemma", {}),
    "Gemma 2, sliding and capped": (
        "Gemma2", {"attention": "eager", "query_pre_attn_scalar": 64, "sliding_window": 64},
    ),
    "Gemma 3, sliding layers": (
        "Gemma3",
        {
            "sliding_window": 64, "query_pre_attn_scalar": 64, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "GPT-OSS, learned sinks": (
        "GptOss", {"attention": "eager", "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}  # fmt: skip

#: Uses of every model.
USES: dict[str, Run] = {
    "prefill": forward(),
    "a batch padded left": forward(attention_mask=LEFT),
    "a batch padded right": forward(attention_mask=RIGHT),
    "a packed batch": forward(position_ids=PACKED),
    "chunked prefill": in_parts(110, 210, 320),
    "chunked prefill, padded left": in_parts(110, 215, 320, mask=LEFT),
    "decode": in_parts(317, 318, 319, 320),
    "static cache": in_parts(200, 201, 320, room=400),
}


def generated(**options: Any) -> Run:
    """Logits of generated tokens. The tokens are forced, or rounding would change those to come."""

    def run(model: Any, ids: Tensor) -> Tensor:
        out = model.generate(
            ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
            logits_processor=[_the_same_token], **options,
        )  # fmt: skip
        return torch.stack(out.logits)

    return run


def _the_same_token(ids: Tensor, scores: Tensor) -> Tensor:
    forced = torch.full_like(scores, -torch.inf)
    forced[:, 5] = 0
    return forced


def adapt_all(model: Any) -> None:
    for layer in model.model.layers:
        adapt(layer.self_attn, "q_proj")


def offload(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


@dataclass(frozen=True)
class Use:
    """Further use of one model."""

    run: Run
    change: Callable[[Any], object] | None = None
    configuration: dict[str, Any] = field(default_factory=dict)


_STATIC = {"cache_implementation": "static", "disable_compile": True}
#: Uses of one model.
FURTHER: dict[str, Use] = {
    "cfg in one batch": Use(forward(attention_mask=torch.cat([LEFT[1:], LEFT[:1]]))),
    "holes in the mask": Use(forward(attention_mask=HOLES)),
    "a mask of its own": Use(forward(attention_mask=LOWER)),
    "chunked prefill, padded right": Use(in_parts(110, 220, 320, mask=RIGHT)),
    "short chunks": Use(in_parts(150, 200, 320)),
    "generate": Use(generated(attention_mask=torch.ones_like(LEFT))),
    "generate, padded left": Use(generated(attention_mask=LEFT)),
    "generate, static cache, padded left": Use(generated(attention_mask=LEFT, **_STATIC)),
    "fp16": Use(forward(), configuration={"dtype": torch.float16}),
    "fp32": Use(forward(), configuration={"dtype": torch.float32}),
    "head_dim 128": Use(forward(), configuration={"head_dim": 128}),
    "head_dim 160": Use(forward(), configuration={"head_dim": 160}),
    "head_dim 160, static cache": Use(USES["static cache"], configuration={"head_dim": 160}),
    "LoRA": Use(forward(), adapt_all),
    "offload": Use(forward(), offload),
}
OF_FURTHER = "Llama"
COMPILED = {"prefill": forward(), "a batch padded left": forward(attention_mask=LEFT)}


def maker(model: str, use: Use) -> Callable[[], Subject]:
    architecture, configuration = MODELS[model]

    def make() -> Subject:
        made = make_text_model(architecture, seed=1, **configuration | use.configuration)
        if use.change:
            use.change(made)
        ids = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(2))

        def run() -> list[Tensor]:
            with torch.inference_mode():
                return [use.run(made, ids)]

        return Subject(run, made, made)

    return make


def cases() -> Iterator[Case]:
    for model in MODELS:
        for name, run in USES.items():
            yield Case(model, name, maker(model, Use(run)))
    for name, use in FURTHER.items():
        yield Case(OF_FURTHER, name, maker(OF_FURTHER, use))
    by_eager, by_sdpa = (
        maker(OF_FURTHER, Use(in_parts(200, 201), configuration={"attention": name}))
        for name in ("eager", "sdpa")
    )
    yield Case(OF_FURTHER, "behind eager", by_eager, alike=by_sdpa)
    for name, run in COMPILED.items():
        make = maker(OF_FURTHER, Use(run))
        yield Case(OF_FURTHER, f"{name}, torch.compile", make, compiled=True)
        yield Case(OF_FURTHER, f"{name}, torch.compile(fullgraph)", make, fullgraph=True)
