# SPDX-License-Identifier: Apache-2.0
"""The CogVideoX converter, on tiny checkpoints with diffusers' names."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from sparge.cogvideox import tensor_file
from sparge.cogvideox.conversion import convert
from sparge.cogvideox.json_text import ConversionError
from sparge.cogvideox.layout import POSITIONS, core_name
from tests.comfy.process import environment_of_comfyui, why_no_comfyui
from tests.convert.parts import ROTARY, SINCOS, published, write_model
from tools.convert_cogvideox.convert import find_shards, main

ROOT = Path(__file__).resolve().parents[2]


def converted(folder: Path, state: dict[str, torch.Tensor], config: dict | None) -> Path:
    """The file that comes of a model in this folder."""
    out = folder / "model.safetensors"
    assert main([str(write_model(folder / "in", state, config)), "--out", str(out)]) == 0
    assert not list(folder.glob("*.part"))
    return out


SIZES: dict[str, dict[str, Any]] = {
    "1.0": {},
    "1.5": {"patch": (128,), "out": 128},
    "1.5-i2v": {"patch": (256,), "out": 128, "ofs": 24},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rotary_models_keep_every_byte(tmp_path, generator, sizes: dict, monkeypatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", 1000)  # every tensor passes in several pieces
    state = published(generator, **sizes)
    found = load_file(str(converted(tmp_path, state, ROTARY)))
    assert len(found) == len(state)
    for name, tensor in state.items():
        assert torch.equal(found[core_name(name)], tensor), name
    names = {
        "attn1.to_out.0.bias": "attn_out.bias", "attn1.norm_k.weight": "norm_k.weight",
        "ff.net.2.weight": "ff_out.weight", "norm2.linear.weight": "norm2.linear.weight",
    }  # fmt: skip
    assert all(core_name(f"transformer_blocks.1.{a}") == f"blocks.1.{b}" for a, b in names.items())
    assert ("ofs_embedding_linear_2.bias" in found) == ("ofs" in sizes)


def test_2b_gets_the_position_table(tmp_path: Path, generator: torch.Generator) -> None:
    """Core reads a file without the table as a rotary model, which gives noise."""
    sizes = {"sample_frames": 9, "sample_height": 12, "sample_width": 20, "max_text_seq_length": 7}
    table = load_file(str(converted(tmp_path, published(generator), SINCOS | sizes)))[POSITIONS]
    frames, height, width, channels = 3, 6, 10, 128
    assert table.shape == (1, 7 + frames * height * width, channels)
    assert not table[0, :7].any()
    frame, row, column = 2, 4, 7
    token = table[0, 7 + (frame * height + row) * width + column]

    def waves(position: float, size: int) -> list[float]:
        angles = [position / 10000 ** (2 * i / size) for i in range(size // 2)]
        return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]

    wanted = waves(frame, 32) + waves(column / 1.875, 48) + waves(row / 1.875, 48)
    torch.testing.assert_close(token, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "table"), [(30, (1, 226 + 13 * 30 * 45, 1920)), (48, None)])
def test_published_heads_decide_without_config(tmp_path, generator, heads, table) -> None:
    state = published(generator, heads, layers=1, time=8, text=8)
    tensors = convert(find_shards([write_model(tmp_path, state, None)])).tensors
    assert (tensors[POSITIONS].shape if POSITIONS in tensors else None) == table


def test_refusals_say_why_and_leave_nothing(tmp_path: Path, generator, capsys) -> None:
    def refusal(*sources: Path, out: Path = tmp_path / "refused.safetensors") -> str:
        before = out.read_bytes() if out.exists() else None
        assert main([*map(str, sources), "--out", str(out)]) == 1
        assert (out.read_bytes() if out.exists() else None) == before
        assert not list(tmp_path.glob("*.part"))
        return capsys.readouterr().err

    state = published(generator)
    first, second = find_shards([write_model(tmp_path / "good", state, ROTARY)])
    assert "missing (is a shard left out?)" in refusal(second)
    assert "both in" in refusal(first, second, second)
    assert "does not exist" in refusal(tmp_path / "none.safetensors")
    assert "is not a folder" in refusal(first, second, out=tmp_path / "no folder" / "x")
    (tmp_path / "empty").mkdir()
    assert "holds no .safetensors" in refusal(tmp_path / "empty")
    for name, data, words in (
        ("diffusion_pytorch_model.bin", b"\x80", "not a .safetensors file"),
        ("page.safetensors", b"<html>not found</html>", "not a safetensors file"),
        ("other.safetensors", save({"blocks.0.x": torch.zeros(2)}), "no CogVideoX transformer"),
    ):
        (tmp_path / name).write_bytes(data)
        assert words in refusal(tmp_path / name)
    assert "config.json" in refusal(write_model(tmp_path / "unknown", state, None))
    learned = state | {POSITIONS: torch.zeros(1, 8, 128)}
    assert "CogVideoX-5b-I2V" in refusal(write_model(tmp_path / "both", learned, ROTARY))
    second.write_bytes(second.read_bytes()[:-100])
    assert "cut off inside" in refusal(first.parent)
    done = converted(tmp_path, state, ROTARY)
    assert "already has the names" in refusal(done)
    assert "--out names one of the sources" in refusal(done, out=done)
    state["transformer_blocks.1.attn1.to_q.weight"] = torch.zeros(64, 128)
    state["transformer_blocks.1.attn1.lora.weight"] = torch.zeros(4)
    said = refusal(write_model(tmp_path / "wrong", state, ROTARY))
    assert "blocks.1.q.weight [64, 128] instead of [128, 128]" in said
    assert "1 unexpected: blocks.1.attn1.lora.weight" in said


def test_failure_while_writing_leaves_the_old_file(tmp_path, generator, monkeypatch) -> None:
    model = write_model(tmp_path / "in", published(generator), ROTARY)
    tensors, out = convert(find_shards([model])).tensors, tmp_path / "model.safetensors"
    out.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("disk error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk error"):
        tensor_file.write_tensors(out, tensors)
    assert out.read_bytes() == b"old" and not list(tmp_path.glob("*.part"))
    monkeypatch.setattr(tensor_file.shutil, "disk_usage", lambda _: type("", (), {"free": 10}))
    with pytest.raises(ConversionError, match="GB free"):
        tensor_file.write_tensors(out, tensors)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "tools.convert_cogvideox"], id="by module"),
        # Isolated, as Windows' portable Python is: no module is found in the current folder.
        pytest.param(["-I", "tools/convert_cogvideox"], id="by folder"),
    ],
)
def test_command_line(tmp_path: Path, generator: torch.Generator, command: list[str]) -> None:
    model = write_model(tmp_path / "in", published(generator), ROTARY)
    words = [sys.executable, *command, str(model), "--out", str(tmp_path / "model.safetensors")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "2 blocks of 2 heads, rotary positions" in done.stdout


IN_CORE = """
import json, sys
import comfy.cli_args
comfy.cli_args.args.cpu = True
import torch, comfy.model_detection, comfy.ops, comfy.utils
state = comfy.utils.load_torch_file(sys.argv[1])
config = comfy.model_detection.model_config_from_unet(state, "")
model = config.get_model(state, "")
result = model.diffusion_model.load_state_dict(state, strict=True)
extra = {k: v for k, v in config.unet_config.items() if isinstance(v, (int, bool, str))}
print(json.dumps({"type": type(config).__name__, **extra}))
"""


@pytest.mark.comfy
@pytest.mark.parametrize(
    ("heads", "sizes", "config", "detected"),
    [
        (2, {}, ROTARY, {"use_rotary_positional_embeddings": True}),
        (30, {"layers": 1}, SINCOS, {"use_learned_positional_embeddings": True}),
        (2, SIZES["1.5"], ROTARY, {"patch_size_t": 2}),
        (2, SIZES["1.5-i2v"] | {"ofs": 512}, ROTARY,
         {"type": "CogVideoX_I2V", "ofs_embed_dim": 512, "in_channels": 32}),
    ],
    ids=["5b", "2b", "1.5", "1.5-i2v"],
)  # fmt: skip
def test_core_loads_what_was_converted(tmp_path, generator, heads, sizes, config, detected) -> None:
    if reason := why_no_comfyui():
        pytest.skip(reason)
    out = converted(tmp_path, published(generator, heads, **sizes), config)
    command = [sys.executable, "-c", IN_CORE, str(out)]
    env = environment_of_comfyui(tmp_path / "stubs")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = {"type": "CogVideoX_T2V", "num_attention_heads": heads, **detected}
    assert {key: found.get(key) for key in wanted} == wanted
