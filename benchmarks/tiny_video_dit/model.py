# SPDX-License-Identifier: Apache-2.0
"""Wan's video diffusion transformer, small: its state dict is one that ComfyUI loads as Wan 2.1.

The architecture is that of "Wan: Open and Advanced Large-Scale Video Generative Models" (2025),
section 4: patches of 1 x 2 x 2, self-attention with RMS-normed queries and keys and a 3-D rotary
position, cross-attention to the text, a feed-forward layer, and six modulation vectors a block from
one shared projection of the time. The names of the modules are the keys of the state dict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    gelu,
    layer_norm,
    linear,
    rms_norm,
    scaled_dot_product_attention,
)

HEAD_DIM = 128  # ComfyUI takes the number of heads to be width // 128
CHANNELS = 16  # of the latent, in and out
PATCH = 2  # latent rows and columns a token; one frame
TIME_WAVES = 256
GATES = (2, 5)  # of a block's six modulation vectors; 0, 3 shift and 1, 4 scale
EPS = 1e-6
ROPE_BASE = 10000.0

#: attention(q, k, v, block) -> out, all (batch, heads, tokens, HEAD_DIM); tokens in raster order of
#: the (frames, rows, columns) grid. Called for self-attention only.
Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of the model. The defaults give 8.0 M parameters: a file of 5.5 MB."""

    width: int = 256
    blocks: int = 8
    hidden: int = 768  # width of the feed-forward layer
    text_width: int = 64

    @property
    def heads(self) -> int:
        return self.width // HEAD_DIM


def dense(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def grid_of(latent: Tensor) -> tuple[int, int, int]:
    """(frames, rows, columns) of the tokens of a latent (batch, channels, frames, height, width).

    Raises ValueError where height or width is odd.
    """
    frames, height, width = latent.shape[2:]
    if height % PATCH or width % PATCH:
        raise ValueError(f"the latent is {height} x {width}; both must be even (patches of 2 x 2)")
    return frames, height // PATCH, width // PATCH


class VideoDiT(nn.Module):
    """Predicts the flow (noise minus clip) of a noisy latent."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.patch_embedding = PatchEmbedding(width)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_width, width), nn.GELU("tanh"), nn.Linear(width, width)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(TIME_WAVES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.head = Head(width)

    def forward(
        self, latent: Tensor, timestep: Tensor, context: Tensor, attention: Attention = dense
    ) -> Tensor:
        """The flow, shaped like `latent`.

        Args:
            latent: (batch, CHANNELS, frames, height, width), height and width even.
            timestep: (batch,) float32, 1000 x sigma.
            context: (batch, text tokens, text_width).
            attention: what computes self-attention.
        """
        grid = grid_of(latent)
        time = self.time_embedding(waves(timestep).to(latent.dtype))
        modulation = self.time_projection(time).unflatten(1, (6, -1))
        context = self.text_embedding(context)
        turns = rotary(grid, latent.device)
        tokens = self.patch_embedding(patches(latent, grid))
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, modulation, context, turns, attention, index)
        return unpatched(self.head(tokens, time), grid)


class PatchEmbedding(nn.Module):
    """The weights of a convolution whose stride is its kernel, applied as a matrix product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, CHANNELS, 1, PATCH, PATCH))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, patches: Tensor) -> Tensor:
        return linear(patches, self.weight.flatten(1), self.bias)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.modulation = nn.Parameter(torch.empty(1, 6, width))
        self.self_attn = Projections(width)
        self.norm3 = nn.LayerNorm(width, EPS)
        self.cross_attn = Projections(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, config.hidden), nn.GELU("tanh"), nn.Linear(config.hidden, width)
        )

    def forward(
        self,
        tokens: Tensor,
        modulation: Tensor,
        context: Tensor,
        turns: Tensor,
        attention: Attention,
        index: int,
    ) -> Tensor:
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.modulation + modulation).split(
            1, dim=1
        )
        seen = modulated(tokens, shift, scale)
        q, k, v = self.self_attn.qkv(seen, seen)
        found = attention(rotated(q, turns), rotated(k, turns), v, index)
        tokens = torch.addcmul(tokens, self.self_attn.joined(found), gate)
        q, k, v = self.cross_attn.qkv(self.norm3(tokens), context)
        tokens = tokens + self.cross_attn.joined(scaled_dot_product_attention(q, k, v))
        grown = gelu(self.ffn[0](modulated(tokens, ffn_shift, ffn_scale)), approximate="tanh")
        return torch.addcmul(tokens, self.ffn[2](grown), ffn_gate)


class Projections(nn.Module):
    """Linear layers around an attention, and the norms of its queries and keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = Scale(width), Scale(width)

    def qkv(self, tokens: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, heads, tokens, HEAD_DIM) each of q, k and v; the norm spans all heads, as in
        Wan.
        """
        q, k, v = self.norm_q(self.q(tokens)), self.norm_k(self.k(source)), self.v(source)
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in (q, k, v))
        return q, k, v

    def joined(self, heads: Tensor) -> Tensor:
        return self.o(heads.transpose(1, 2).flatten(2))


class Scale(nn.Module):
    """RMS norm with a weight a channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, EPS)


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 2, width))
        self.head = nn.Linear(width, CHANNELS * PATCH * PATCH)

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.modulation + time.unsqueeze(1)).split(1, dim=1)
        return self.head(modulated(tokens, shift, scale))


def modulated(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, layer_norm(tokens, tokens.shape[-1:], eps=EPS), 1 + scale)


def waves(timestep: Tensor) -> Tensor:
    """(batch, TIME_WAVES) float32: cosines, then sines, of wavelengths up to ROPE_BASE."""
    half = TIME_WAVES // 2
    steps = torch.arange(half, device=timestep.device, dtype=torch.float32) / half
    angles = timestep.float()[:, None] * ROPE_BASE**-steps
    return torch.cat([angles.cos(), angles.sin()], 1)


def rotary(grid: tuple[int, int, int], device: torch.device) -> Tensor:
    """(tokens, HEAD_DIM / 2) complex64 rotations: 22 pairs turn with the frame, 21 with row and
    column."""
    pairs = HEAD_DIM // 2
    spatial = pairs // 3
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
    angles = [
        axis.reshape(-1, 1) * ROPE_BASE ** (-torch.arange(n, device=device).double() / n)
        for axis, n in zip(axes, (pairs - 2 * spatial, spatial, spatial), strict=True)
    ]
    turned = torch.cat(angles, 1)
    return torch.polar(torch.ones_like(turned), turned).to(torch.complex64)


def rotated(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotates heads: neighbouring channels are the parts of one complex number."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(heads.dtype)


def patches(latent: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """(batch, tokens, CHANNELS x 4), the channels outermost."""
    frames, rows, columns = grid
    split = latent.reshape(latent.shape[0], -1, frames, rows, PATCH, columns, PATCH)
    return split.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def unpatched(tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """The latent of tokens (batch, tokens, 4 x CHANNELS), the channels innermost."""
    frames, rows, columns = grid
    split = tokens.reshape(tokens.shape[0], frames, rows, columns, PATCH, PATCH, CHANNELS)
    joined = split.permute(0, 6, 1, 2, 4, 3, 5)
    return joined.reshape(-1, CHANNELS, frames, rows * PATCH, columns * PATCH)


@torch.no_grad()
def initialised(config: Config, seed: int) -> VideoDiT:
    """A model to train: weights drawn from `seed` on the CPU, the same on every machine.

    Linear layers keep the variance; those that write to the residual stream are smaller by the
    square root of their number (Radford et al. 2019); gates start at one, the output at zero.
    """
    model = VideoDiT(config)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.startswith(("head.", "time_projection.")) or name.endswith(("modulation", "bias")):
            parameter.zero_()
            if name.startswith("blocks.") and name.endswith("modulation"):
                parameter[:, GATES] = 1
        elif parameter.ndim == 1:
            parameter.fill_(1)
        else:
            writes = name.endswith(("o.weight", "ffn.2.weight"))
            branches = 3 * config.blocks if writes else 1
            deviation = (parameter[0].numel() * branches) ** -0.5
            parameter.normal_(0, deviation, generator=random)
    return model
