# SPDX-License-Identifier: Apache-2.0
"""The published CogVideoX models at their own sizes, in files that hold nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparge.cogvideox.conversion import convert
from sparge.cogvideox.layout import POSITIONS
from sparge.cogvideox.shards import all_shards
from tests.convert.parts import PUBLISHED, shapes_of, write_empty

LATER = {"patch_size_t": 2, "patch_bias": False, "sample_frames": 81}
#: Their config.json, as far as it says something of shapes.
CONFIGS: dict[str, dict[str, Any]] = {
    "2b": {"num_attention_heads": 30, "num_layers": 30},
    "5b": {"num_attention_heads": 48, "num_layers": 42},
    "1.5": {"num_attention_heads": 48, "num_layers": 42, **LATER},
    "1.5-i2v": {
        **{"num_attention_heads": 48, "num_layers": 42, **LATER},
        **{"in_channels": 32, "ofs_embed_dim": 512},
    },
}
BILLIONS = {"2b": "1.73", "5b": "5.57", "1.5": "5.57", "1.5-i2v": "5.57"}


@pytest.mark.parametrize("size", PUBLISHED)
def test_names_and_shapes_are_those_of_diffusers(size: str) -> None:
    diffusers: Any = pytest.importorskip("diffusers", reason="needs diffusers")
    positions = {"use_rotary_positional_embeddings": size != "2b"}
    with torch.device("meta"):
        model = diffusers.CogVideoXTransformer3DModel(**CONFIGS[size], **positions)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes_of(**PUBLISHED[size]) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="files of nothing may take room on the disk")
@pytest.mark.parametrize(("size", "files"), [("2b", 1), ("5b", 3), ("1.5", 3), ("1.5-i2v", 3)])
def test_files_of_their_sizes_are_read(tmp_path: Path, size: str, files: int) -> None:
    shards = all_shards(write_empty(tmp_path / size, size))
    assert len(shards) == files and shards[0].stat().st_blocks * 512 < 50e6
    conversion = convert(shards)
    assert f", {BILLIONS[size]} billion parameters" in conversion.summary
    assert len(conversion.tensors) == len(shapes_of(**PUBLISHED[size])) + (size == "2b")
    assert (POSITIONS in conversion.tensors) == (size == "2b")
