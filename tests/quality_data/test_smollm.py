# SPDX-License-Identifier: Apache-2.0
"""The tokenizer and the language model on weights of our own making."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from benchmarks.quality_data.smollm import SmolLM
from benchmarks.quality_data.text import python_reference
from benchmarks.quality_data.weights import WeightsMissingError

WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, DEPTH = 32, 4, 2, 8, 64, 2


@pytest.fixture
def tiny(generator: torch.Generator, tmp_path: Path) -> SmolLM:
    """A model that can read and write bytes, with random weights."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"token_embd.weight": draw(258, WIDTH), "output_norm.weight": 1 + draw(WIDTH)}
    of_heads, of_kv_heads = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(DEPTH):
        for name, shape in {
            "attn_norm": (WIDTH,), "attn_q": (of_heads, WIDTH), "attn_k": (of_kv_heads, WIDTH),
            "attn_v": (of_kv_heads, WIDTH), "attn_output": (WIDTH, of_heads),
            "ffn_norm": (WIDTH,), "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH),
            "ffn_down": (WIDTH, HIDDEN),
        }.items():  # fmt: skip
            tensors[f"blk.{layer}.{name}.weight"] = draw(*shape)
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(DEPTH)
    writer.add_context_length(512)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<end>", *sorted(ByteLevel.alphabet()), "lo"])
    writer.add_token_merges(["l o"])
    writer.add_unk_token_id(0)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return SmolLM.load(tmp_path / "tiny.gguf")


def by_hand(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped attention."""
    keys, values = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    logits = q @ keys.mT / q.shape[-1] ** 0.5
    later = torch.ones_like(logits, dtype=torch.bool).triu(1)
    return logits.masked_fill(later, -torch.inf).softmax(-1) @ values


def test_attention_is_pluggable_and_causal(tiny: SmolLM) -> None:
    tokens = tiny.tokens("a text of some length, " * 30, 600)
    assert tokens[0] == 0
    dense = tiny.surprise(tokens)
    assert dense.shape == (599,)
    torch.testing.assert_close(tiny.surprise(tokens, by_hand), dense, rtol=1e-4, atol=1e-4)
    changed = tokens.clone()
    changed[400] += 1
    torch.testing.assert_close(tiny.surprise(changed)[:399], dense[:399])
    assert not torch.allclose(tiny.surprise(changed)[400:], dense[400:])
    assert tiny.perplexity(tokens) == pytest.approx(float(dense.mean().exp()))

    seen: list[tuple[Tensor, ...]] = []

    def watch(layer: int, *qkv: Tensor) -> Tensor:
        seen.append(qkv)
        return torch.zeros_like(qkv[0]) if layer else by_hand(layer, *qkv)

    assert not torch.allclose(tiny.surprise(tokens, watch), dense)
    layers = list(tiny.layers(tokens, dtype=torch.float32))
    names = [(layer.name, layer.grid) for layer in layers]
    assert names == [("smollm 0", None), ("smollm 1", None)]
    for layer, qkv in zip(layers, seen, strict=True):
        for ours, theirs in zip((layer.q, layer.k, layer.v), qkv, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_too_short_a_text_and_parts_that_share_nothing(tiny: SmolLM) -> None:
    with pytest.raises(ValueError, match="6 tokens; 7 are needed"):
        tiny.tokens("short", 7)
    parts = [python_reference(part, 4) for part in range(4)]
    assert min(map(len, parts)) > 60_000  # 8K tokens are about 35,000 letters
    assert len({part[:2000] for part in parts}) == 4


def test_the_real_weights() -> None:
    try:
        model = SmolLM.load()
    except WeightsMissingError as missing:
        pytest.skip(str(missing))
    text = python_reference(0, 4)
    tokens = model.tokens(text, 256)
    assert (model.depth, model.context) == (30, 8192)
    with torch.no_grad():
        perplexity = model.perplexity(tokens)
        shuffled = tokens[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
        assert perplexity < 25 < 500 < model.perplexity(shuffled)
