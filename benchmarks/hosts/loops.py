# SPDX-License-Identifier: Apache-2.0
"""Cases of code that calls PyTorch's attention itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from benchmarks.tiny_models.adapted import adapt

from .case import Case, Subject

TOKENS, HEADS, LAYERS = 320, 4, 2
NAME = "a loop in PyTorch"
#: Standard deviation of logits, about that of trained heads.
SHARPNESS = 2.0
PLACES = torch.arange(TOKENS)
REAL = torch.stack([PLACES < 250, PLACES < TOKENS])
LOWER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def padding(real: Tensor) -> Tensor:
    """(batch, 1, 1, keys) of (batch, keys)."""
    return real[:, None, None]


def added(real: Tensor) -> Tensor:
    """Mask that is added to logits, of one that is True for real keys."""
    return torch.zeros(real.shape, dtype=torch.bfloat16).masked_fill(~real, -torch.inf)


class Layer(nn.Module):
    """Attention of one layer: x (batch, tokens, width) to keys of x, or of others."""

    def __init__(self, width: int, heads: int, kv_heads: int, heads_first: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.heads_first = heads, kv_heads, heads_first
        size = width // heads
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, kv_heads * size)
        self.v = nn.Linear(width, kv_heads * size)
        for projection in (self.q, self.k):
            nn.init.normal_(projection.weight, std=(SHARPNESS / width) ** 0.5)

    def forward(self, x: Tensor, others: Tensor | None = None, **options: Any) -> Tensor:
        others = x if others is None else others
        q = self._by_head(self.q(x), self.heads)
        k, v = (self._by_head(each(others), self.kv_heads) for each in (self.k, self.v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        return out.transpose(1, 2).flatten(2)

    def _by_head(self, x: Tensor, heads: int) -> Tensor:
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return x.contiguous() if self.heads_first else x


class Loop(nn.Module):
    """Layers one after the other."""

    def __init__(
        self,
        head_dim: int = 64,
        heads: int = HEADS,
        kv_heads: int = HEADS,
        heads_first: bool = False,
        hidden: bool = False,
    ) -> None:
        """hidden: with PyTorch's own module, which hides its attention."""
        super().__init__()
        width = heads * head_dim
        self.hidden = nn.MultiheadAttention(width, heads, batch_first=True) if hidden else None
        self.layers = nn.ModuleList(
            Layer(width, heads, kv_heads, heads_first) for _ in range(LAYERS)
        )
        self.width = width

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        if self.hidden is not None:
            torch.backends.mha.set_fastpath_enabled(False)  # which rounds otherwise
            return self.hidden(x, x, x, need_weights=False)[0]
        for layer in self.layers:
            x = layer(layer_norm(x, (self.width,)), **options)
        return x


@dataclass(frozen=True)
class Use:
    """How a loop is made and called."""

    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of PyTorch's function, beside q, k and v."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Loop`."""
    keys: int = 0
    """Tokens that are attended to, where they are not those that attend."""
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = (2,)
    """Entries of each pass."""
    change: Callable[[Loop], object] | None = None
    autocast: bool = False
    gradients: bool = False

    def make(self) -> Subject:
        torch.manual_seed(1)
        loop = Loop(**self.sizes).to(self.dtype).eval()
        if self.change:
            self.change(loop)
        generator = torch.Generator().manual_seed(2)

        def drawn(batch: int, tokens: int) -> Tensor:
            return torch.randn(batch, tokens, loop.width, generator=generator).to(self.dtype)

        given = [drawn(batch, TOKENS) for batch in self.batches]
        others = {"others": drawn(self.batches[0], self.keys)} if self.keys else {}

        def run() -> Iterator[Tensor]:
            with (
                torch.set_grad_enabled(self.gradients),
                torch.autocast("cpu", torch.bfloat16, enabled=self.autocast),
            ):
                for x in given:
                    yield from loop(x, **others, **self.options)

        return Subject(lambda: list(run()), loop)


def offload(loop: nn.Module) -> None:
    from accelerate import cpu_offload

    cpu_offload(loop, execution_device=torch.device("cpu"))


def adapt_all(loop: Loop) -> None:
    for layer in loop.layers:
        adapt(layer, "q")


WINDOW = LOWER & LOWER.T.roll(40, 0)
USES: dict[str, Use] = {
    "plain": Use(),
    "scale": Use({"scale": 0.3}),
    "heads first": Use(sizes={"heads_first": True}),
    "more keys": Use(keys=450),
    "causal": Use({"is_causal": True}),
    "causal, more keys": Use({"is_causal": True}, keys=500),
    "causal, fewer keys": Use({"is_causal": True}, keys=200),
    "GQA": Use({"enable_gqa": True}, {"kv_heads": 2}),
    "GQA, causal": Use({"enable_gqa": True, "is_causal": True}, {"kv_heads": 1}),
    "key padding right": Use({"attn_mask": padding(REAL)}),
    "key padding left": Use({"attn_mask": padding(REAL.flip(1))}),
    "key padding, added": Use({"attn_mask": added(padding(REAL))}),
    "key padding, one for all": Use({"attn_mask": REAL[:1].expand(TOKENS, -1)}),
    "key padding, holes": Use({"attn_mask": padding((PLACES % 5 > 0)[None])}),
    "an entry without keys": Use({"attn_mask": padding(REAL & torch.tensor([[False], [True]]))}),
    "a mask that hides nothing": Use({"attn_mask": added(padding(REAL | True))}),
    "causal, written out": Use({"attn_mask": LOWER}),
    "causal, written out and added": Use({"attn_mask": added(LOWER)}),
    "a window": Use({"attn_mask": WINDOW}),
    "weights of keys": Use({"attn_mask": torch.linspace(-2, 2, TOKENS).bfloat16()[None]}),
    "cfg in one batch": Use({"attn_mask": added(padding(REAL)).expand(-1, HEADS, -1, -1)}),
    "cfg in two passes": Use({"attn_mask": padding(REAL[:1])}, batches=(1, 1)),
    "fp16": Use(dtype=torch.float16),
    "fp32": Use(dtype=torch.float32),
    "fp32 in autocast": Use(dtype=torch.float32, autocast=True),
    "fp64": Use(dtype=torch.float64),
    "head_dim 96": Use(sizes={"head_dim": 96}),
    "head_dim 128": Use(sizes={"head_dim": 128}),
    "head_dim 160": Use(sizes={"head_dim": 160}),
    "dropout": Use({"dropout_p": 0.2}),
    "gradients": Use(gradients=True),
    "few keys": Use(keys=77),
    "nn.MultiheadAttention": Use(sizes={"hidden": True}),
    "LoRA": Use(change=adapt_all),
    "offload": Use(change=offload),
}
COMPILED = ("plain", "causal", "GQA", "key padding left", "causal, written out", "few keys")


def cases() -> Iterator[Case]:
    for name, use in USES.items():
        yield Case(NAME, name, use.make)
    for name in COMPILED:
        yield Case(NAME, f"{name}, torch.compile", USES[name].make, compiled=True)
        whole = f"{name}, torch.compile(fullgraph)"
        yield Case(NAME, whole, USES[name].make, fullgraph=True)
