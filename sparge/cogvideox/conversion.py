# SPDX-License-Identifier: Apache-2.0
"""Tensors of a published CogVideoX transformer under the names that ComfyUI core loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .config import Config
from .json_text import ConversionError, shown
from .layout import CORE_SIGN, POSITIONS, Layout, core_name
from .tensor_file import (
    FileTensor,
    NewTensor,
    TensorData,
    parameter_count,
    read_header,
    read_tensors,
)

LISTED = 5  # names an error spells out: enough to recognise the cause
HEADS_OF_SINCOS, HEADS_OF_ROTARY = 30, 48  # the published models: 2B, and every 5B


@dataclass(frozen=True)
class Conversion:
    layout: Layout
    tensors: dict[str, TensorData]

    @property
    def summary(self) -> str:
        positions = "a position table" if POSITIONS in self.tensors else "rotary positions"
        return (
            f"CogVideoX with {self.layout.layers} blocks of {self.layout.heads} heads, {positions},"
            f" {parameter_count(self.tensors) / 1e9:.2f} billion parameters"
        )


def convert(shards: Sequence[Path]) -> Conversion:
    """Maps the shards' tensors to core's names and checks every name and shape.

    Raises ConversionError, listing what is missing, unexpected or of the wrong shape.
    """
    source: dict[str, FileTensor] = {}
    for shard in shards:
        for name, tensor in read_tensors(shard).items():
            if name in source:
                raise ConversionError(
                    f"{shown(name)} is both in {source[name].path.name} and in {shard.name}; give"
                    " the shards of one model only"
                )
            source[name] = tensor
    if CORE_SIGN in source:
        raise ConversionError("this file already has the names that ComfyUI loads")

    tensors: dict[str, TensorData] = {core_name(name): source[name] for name in sorted(source)}
    if len(tensors) < len(source):
        raise ConversionError("one parameter has two names, diffusers' and ComfyUI's")
    try:
        layout = Layout.of({name: tensor.shape for name, tensor in tensors.items()})
    except KeyError as error:
        raise ConversionError(
            "this is no CogVideoX transformer, or its first shard is missing: there is no"
            f" {error.args[0]} under ComfyUI's names"
        ) from error

    positions = tensors.pop(POSITIONS, None)
    _check(layout, tensors)
    config = Config.beside(shards[0])
    if config.heads not in (None, layout.heads):
        raise ConversionError(
            f"config.json is of a model with {config.heads} heads, and these weights have"
            f" {layout.heads}; put each model in a folder of its own"
        )
    return Conversion(layout, _with_positions(layout, tensors, positions, config))


def has_core_names(path: Path) -> bool:
    """Whether ComfyUI loads a file as it is: it has core's names, under any prefix.

    Raises ConversionError for what is no safetensors file.
    """
    header, _ = read_header(path)
    return any(f".{name}".endswith(f".{CORE_SIGN}") for name in header)


def _check(layout: Layout, tensors: dict[str, TensorData]) -> None:
    expected = layout.expected_shapes()
    problems = [
        _listed("missing (is a shard left out?)", [n for n in expected if n not in tensors]),
        _listed("unexpected", [n for n in tensors if n not in expected]),
        _listed(
            "of the wrong shape",
            [
                f"{n} {shown(list(tensors[n].shape))} instead of {list(shape)}"
                for n, shape in expected.items()
                if n in tensors and tensors[n].shape != shape
            ],
        ),
    ]
    if any(problems):
        raise ConversionError("the parameters do not fit: " + "; ".join(filter(None, problems)))


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {what}: {', '.join(map(shown, names[:LISTED]))}{more}" if names else ""


def _with_positions(
    layout: Layout, tensors: dict[str, TensorData], stored: TensorData | None, config: Config
) -> dict[str, TensorData]:
    rotary = config.rotary
    if rotary is None:
        if layout.heads not in (HEADS_OF_SINCOS, HEADS_OF_ROTARY):
            raise ConversionError(
                f"with {layout.heads} heads this is no published model, so whether its positions"
                " are rotary is not known; put the model's config.json beside the shards"
            )
        rotary = layout.heads == HEADS_OF_ROTARY
    if rotary and stored is not None:
        raise ConversionError(
            "this model has a learned position table and rotary positions at once (CogVideoX-5b-I2V"
            " does); ComfyUI reads the table as a sign that there is no rotation, and would give"
            " noise"
        )
    if rotary:
        return tensors
    if stored is None:
        table = config.table_grid.table(layout.width).astype("<f4", copy=False)
        stored = NewTensor("F32", table.shape, table.data.cast("B"))
    elif len(stored.shape) != 3 or stored.shape[0] != 1 or stored.shape[2] != layout.width:
        raise ConversionError(
            f"{POSITIONS} has shape {shown(list(stored.shape))}; a table has [1, tokens,"
            f" {layout.width}]"
        )
    return {POSITIONS: stored, **tensors}
