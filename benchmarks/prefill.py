# SPDX-License-Identifier: Apache-2.0
"""Prefill of a language model: its own attention, ours, and attention that takes no time.

python -m benchmarks.prefill [--tokens 24576 131072] [--topk 0.3 0.2 0.1] [--layers 4] [--out FILE]

A model of transformers in the shape of Llama 3.1 8B with random weights, bfloat16, batch 1, with a
cache and the logits of the last token alone. Its layers are alike, so a few of them tell the ratios
of all: in 4 of 32 the embedding and the last logits are below 1 % of the time. Without attention
each layer is what it is otherwise. What can be saved is the time between the model's own and that;
the table says which share of it is. Random weights attend evenly, which tells times and not how
true the result is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import commit, gpu_name, median_ms, write_rows
from sparge import SparsePolicy

#: Llama 3.1 8B.
SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
}
LAYERS_OF_ALL = 32
MIN_TOKENS = 1024
#: Attention that gives its queries back, under this name in transformers' registry.
FREE = "free_attention"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one prefill by `attention`, which computed `density` of the pairs."""

    tokens: int
    attention: str
    ms: float
    density: float | None = None

    def row(self, others: dict[str, Any], own: float, free: float) -> dict[str, Any]:
        """Row of the results, beside the model's own attention and none."""
        return others | vars(self) | {
            "times_as_fast": own / self.ms,
            "saved_of_what_can_be": (own - self.ms) / (own - free),
        }  # fmt: skip


def make_model(layers: int) -> Any:
    """Model of random weights, bfloat16, in evaluation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    facts = {"num_hidden_layers": layers, "attn_implementation": "sdpa"}
    config = LlamaConfig(**(SHAPE | facts))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode()
def run(model: Any, ids: Tensor) -> Tensor:
    """(1, words) logits of the last token, after a prefill with a cache."""
    return model(ids, use_cache=True, logits_to_keep=1).logits[:, -1]


def time_all(
    model: Any,
    tokens: int,
    topks: list[float],
    ms_of: Callable[[Callable[[], object]], float],
    min_tokens: int = MIN_TOKENS,
) -> list[Timing]:
    """Timings of one length: the model's own attention, none, and ours at each share."""
    from sparge.integrations.transformers import enable

    device = model.device
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=device)

    def work() -> Any:
        return run(model, ids)

    found = [Timing(tokens, "own", ms_of(work))]
    with free_attention(model):
        found.append(Timing(tokens, "none", ms_of(work)))
    for topk in topks:
        sparse = enable(model, SparsePolicy(topk=topk, attention_sink=True), min_tokens)
        try:
            ms = ms_of(work)
        finally:
            sparse.disable()
        if not sparse.stats.sparse_calls or sparse.stats.dense_calls:
            raise RuntimeError(f"not all of its calls were sparse: {sparse.report()}")
        found.append(Timing(tokens, f"topk {topk:g}", ms, sparse.stats.density))
    return found


@contextmanager
def free_attention(model: Any) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: nn.Module, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2), None

    AttentionInterface.register(FREE, attend)
    AttentionMaskInterface.register(FREE, lambda *_, **__: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(FREE)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| tokens | attention | pairs computed | ms | speedup | saved of what can be |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        density = "" if row["density"] is None else f"{row['density']:.0%}"
        lines.append(
            f"| {row['tokens']:,} | {row['attention']} | {density} | {row['ms']:.1f} | "
            f"{row['times_as_fast']:.2f} | {row['saved_of_what_can_be']:.0%} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[24576, 131072])
    parser.add_argument("--topk", type=float, nargs="+", default=[0.3, 0.2, 0.1])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--min-tokens", type=int, default=MIN_TOKENS)
    parser.add_argument("--out", type=Path, help="a .jsonl file for the rows")
    options = parser.parse_args(arguments)

    def ms_of(work: Callable[[], object]) -> float:
        return median_ms(work, options.repeats, warm_up=1)

    model, where = make_model(options.layers), gpu_name()
    facts = {"layers": options.layers, "where": where, "commit": commit()}
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        found = time_all(model, tokens, options.topk, ms_of, options.min_tokens)
        own, free = (timing.ms for timing in found[:2])
        rows += [timing.row(facts, own, free) for timing in found]
    print(f"{options.layers} of {LAYERS_OF_ALL} layers, {where}\n\n{table(rows)}")
    if options.out:
        write_rows(options.out, rows)


if __name__ == "__main__":
    main()
