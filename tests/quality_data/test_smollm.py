# SPDX-License-Identifier: Apache-2.0
"""The GGUF reader and the tokenizer on data of our own making, and the language model on both."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softmax

from benchmarks.quality_data.bpe import SHOWN_AS, BytePairs
from benchmarks.quality_data.gguf import read_gguf
from benchmarks.quality_data.smollm import SmolLM, rotate
from benchmarks.quality_data.text import python_reference
from benchmarks.quality_data.wheel import WeightsMissingError

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8
WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, DEPTH = 32, 4, 2, 8, 64, 2


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def fact(value: Any) -> bytes:
    """Type, then value."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + string(value)
    if isinstance(value, list):
        body = b"".join(fact(entry)[4:] for entry in value)
        return struct.pack("<I", 9) + fact(value[0])[:4] + struct.pack("<Q", len(value)) + body
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    return (
        struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    )


def gguf(
    facts: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]]
) -> Any:
    """tensors: shape (slowest axis first), GGML type and bytes of each."""
    headers, body = b"", b""
    for name, (shape, kind, data) in tensors.items():
        axes = b"".join(struct.pack("<Q", n) for n in reversed(shape))
        headers += string(name) + struct.pack("<I", len(shape)) + axes
        headers += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % 32)
    start = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(facts))
    start += b"".join(string(key) + fact(value) for key, value in facts.items()) + headers
    return np.frombuffer(start + bytes(-len(start) % 32) + body, np.uint8)


def f32(tensor: Tensor) -> tuple[tuple[int, ...], int, bytes]:
    return tuple(tensor.shape), F32, tensor.contiguous().numpy().tobytes()


def test_facts_and_alignment() -> None:
    facts = {"a": 7, "b": 0.5, "c": True, "d": "é", "e": ["x", "yz"], "f": [1, 2, 3]}
    read = read_gguf(gguf(facts, {"t": ((3,), F32, struct.pack("<3f", 1, 2, 3))}))
    assert read.facts == facts
    assert read.tensors["t"].tolist() == [1, 2, 3]


def test_quantized_types(seed: int) -> None:
    random = np.random.default_rng(seed)
    scales = random.uniform(0.1, 2, (6, 2)).astype("<f2")
    codes = random.integers(0, 256, (6, 32)).astype(np.uint8)
    half = random.standard_normal((2, 5)).astype("<f2")

    def groups(scale_count: int, code_count: int) -> bytes:
        return b"".join(
            scale[:scale_count].tobytes() + code[:code_count].tobytes()
            for scale, code in zip(scales, codes, strict=True)
        )

    read = read_gguf(
        gguf(
            {},
            {
                "half": ((2, 5), F16, half.tobytes()),
                "eight": ((2, 96), Q8_0, groups(1, 32)),
                "four": ((3, 64), Q4_1, groups(2, 16)),
            },
        )
    ).tensors
    assert np.array_equal(read["half"], half.astype(np.float32))
    for at in range(6 * 32):
        group, place = divmod(at, 32)
        scale, least = (float(value) for value in scales[group])
        byte = int(codes[group, place])
        assert read["eight"].flat[at] == np.float32(scale * (byte - 256 if byte > 127 else byte))
        nibble = int(codes[group, place % 16]) >> (4 if place >= 16 else 0) & 15
        assert read["four"].flat[at] == pytest.approx(scale * nibble + least, rel=1e-6)
    assert read["eight"].shape == (2, 96)


def test_damaged_and_unknown_files_are_refused() -> None:
    good = gguf({"a": 1}, {"t": ((32,), F32, bytes(128))})
    with pytest.raises(ValueError, match="cut short"):
        read_gguf(good[:-1])
    with pytest.raises(ValueError, match="cut short"):
        read_gguf(good[:40])
    with pytest.raises(ValueError, match="Not a GGUF 3 file"):
        read_gguf(np.zeros(100, np.uint8))
    with pytest.raises(ValueError, match="t has GGML type 2;"):
        read_gguf(gguf({}, {"t": ((32,), Q4_0, bytes(18))}))


def test_best_merge_first_and_words_apart() -> None:
    space = SHOWN_AS[ord(" ")]
    merges = ["l o", "o w", "lo w", f"{space} n", "e w"]
    tokens = sorted({*SHOWN_AS.values(), *(pair.replace(" ", "") for pair in merges)})
    pairs = BytePairs(tokens, merges)

    def cut(text: str) -> list[str]:
        return [tokens[index].replace(space, " ") for index in pairs.encode(text)]

    assert cut("low new") == ["low", " n", "ew"]
    assert cut("slow") == ["s", "low"]
    assert cut("ow12") == ["ow", "1", "2"]
    assert cut("l  ow") == ["l", " ", " ", "ow"]  # no merge over the edge of a word
    for text in ("naïve\n\n\t'tis  9 _x_ ü 字 ½", "", "  ", "it's 2.5 €"):
        assert pairs.decode(pairs.encode(text)) == text


def test_unknown_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="no token for 'b'"):
        BytePairs(["a"], []).encode("ab")


def test_rotation_keeps_length_and_knows_distance_only(generator: torch.Generator) -> None:
    row, other = torch.randn(2, HEAD_DIM, generator=generator, dtype=torch.float64)
    turned, others = (rotate(x.expand(50, -1), 10000.0) for x in (row, other))
    torch.testing.assert_close(turned[0], row)
    torch.testing.assert_close(turned.norm(dim=-1), row.norm().expand(50))
    torch.testing.assert_close(turned[7] @ others[3], turned[47] @ others[43])
    assert not torch.isclose(turned[7] @ others[3], turned[7] @ others[4])
    # The first pair turns by one radian a token.
    assert math.isclose(float(turned[1, 0]), float(row[0] * math.cos(1) - row[1] * math.sin(1)))


@pytest.fixture
def tiny(generator: torch.Generator, tmp_path: Path) -> SmolLM:
    """A model that can read and write bytes, with random weights."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"token_embd.weight": draw(257, WIDTH), "output_norm.weight": 1 + draw(WIDTH)}
    for layer in range(DEPTH):
        tensors |= {
            f"blk.{layer}.{name}.weight": draw(*shape)
            for name, shape in {
                "attn_norm": (WIDTH,),
                "attn_q": (HEADS * HEAD_DIM, WIDTH),
                "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
                "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
                "attn_output": (WIDTH, HEADS * HEAD_DIM),
                "ffn_norm": (WIDTH,),
                "ffn_gate": (HIDDEN, WIDTH),
                "ffn_up": (HIDDEN, WIDTH),
                "ffn_down": (WIDTH, HIDDEN),
            }.items()
        }
    facts = {
        "llama.block_count": DEPTH,
        "llama.context_length": 512,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": ["<end>", *SHOWN_AS.values()],
        "tokenizer.ggml.merges": ["zz zz"],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(facts, {name: f32(tensor) for name, tensor in tensors.items()}).tobytes())
    return SmolLM.load(path)


def by_hand(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped attention, one head at a time."""
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        keys, values = (part[0, head // (q.shape[1] // k.shape[1])] for part in (k, v))
        logits = q[0, head] @ keys.T / q.shape[-1] ** 0.5
        later = torch.ones_like(logits, dtype=torch.bool).triu(1)
        out[0, head] = softmax(logits.masked_fill(later, -torch.inf), -1) @ values
    return out


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

    seen: list[int] = []

    def nothing(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(layer)
        return torch.zeros_like(q)

    assert not torch.allclose(tiny.surprise(tokens, nothing), dense)
    assert seen == [0, 1]


def test_layers_are_what_attention_sees(tiny: SmolLM) -> None:
    tokens = tiny.tokens("other words " * 9, 77)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def watch(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k, v))
        return by_hand(layer, q, k, v)

    tiny.surprise(tokens, watch)
    layers = list(tiny.layers(tokens, dtype=torch.float32))
    assert [layer.name for layer in layers] == ["smollm 0", "smollm 1"]
    for layer, qkv in zip(layers, seen, strict=True):
        assert layer.q.shape == (1, HEADS, 77, HEAD_DIM)
        assert layer.k.shape == layer.v.shape == (1, KV_HEADS, 77, HEAD_DIM)
        assert layer.grid is None
        for ours, theirs in zip((layer.q, layer.k, layer.v), qkv, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_too_short_a_text(tiny: SmolLM) -> None:
    with pytest.raises(ValueError, match="6 tokens; 7 are needed"):
        tiny.tokens("short", 7)


def test_parts_of_the_reference_share_nothing() -> None:
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


def test_data_is_bytes_of_any_kind(tmp_path: Path) -> None:
    """A mapped file reads like bytes in memory."""
    data: NDArray[np.uint8] = gguf({"a": 1}, {"t": ((4,), F32, struct.pack("<4f", 1, 2, 3, 4))})
    (tmp_path / "x.gguf").write_bytes(data.tobytes())
    mapped = read_gguf(np.memmap(tmp_path / "x.gguf", mode="r"))
    assert np.array_equal(mapped.tensors["t"], read_gguf(data).tensors["t"])
