# SPDX-License-Identifier: Apache-2.0
"""The CogVideoX converter, on tiny checkpoints with diffusers' names."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.convert_cogvideox import tensor_file
from tools.convert_cogvideox.convert import convert, find_shards, main
from tools.convert_cogvideox.json_text import ConversionError
from tools.convert_cogvideox.layout import POSITIONS, PositionGrid, core_name

ROOT = Path(__file__).resolve().parents[2]
ROTARY = {"_class_name": "CogVideoXTransformer3DModel", "use_rotary_positional_embeddings": True}
SINCOS = {**ROTARY, "use_rotary_positional_embeddings": False}


def published(
    generator: torch.Generator,
    heads: int = 2,
    layers: int = 2,
    time: int = 32,
    text: int = 48,
    patch: tuple[int, ...] = (16, 2, 2),
    out: int = 64,
    ofs: int | None = None,
) -> dict[str, torch.Tensor]:
    """A state dict of diffusers' CogVideoXTransformer3DModel, written down name by name."""
    width = heads * 64
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, *patch),
        "patch_embed.proj.bias": (width,),
        "patch_embed.text_proj.weight": (width, text),
        "patch_embed.text_proj.bias": (width,),
        "time_embedding.linear_1.weight": (time, width),
        "time_embedding.linear_1.bias": (time,),
        "time_embedding.linear_2.weight": (time, time),
        "time_embedding.linear_2.bias": (time,),
        "norm_final.weight": (width,),
        "norm_final.bias": (width,),
        "norm_out.linear.weight": (2 * width, time),
        "norm_out.linear.bias": (2 * width,),
        "norm_out.norm.weight": (width,),
        "norm_out.norm.bias": (width,),
        "proj_out.weight": (out, width),
        "proj_out.bias": (out,),
    }
    if ofs:
        for each in ("linear_1", "linear_2"):
            shapes[f"ofs_embedding.{each}.weight"] = (ofs, ofs)
            shapes[f"ofs_embedding.{each}.bias"] = (ofs,)
    for block in (f"transformer_blocks.{i}" for i in range(layers)):
        for norm in ("norm1", "norm2"):
            shapes[f"{block}.{norm}.linear.weight"] = (6 * width, time)
            shapes[f"{block}.{norm}.linear.bias"] = (6 * width,)
            shapes[f"{block}.{norm}.norm.weight"] = (width,)
            shapes[f"{block}.{norm}.norm.bias"] = (width,)
        for linear in ("to_q", "to_k", "to_v", "to_out.0"):
            shapes[f"{block}.attn1.{linear}.weight"] = (width, width)
            shapes[f"{block}.attn1.{linear}.bias"] = (width,)
        for norm in ("norm_q", "norm_k"):
            shapes[f"{block}.attn1.{norm}.weight"] = (64,)
            shapes[f"{block}.attn1.{norm}.bias"] = (64,)
        shapes[f"{block}.ff.net.0.proj.weight"] = (4 * width, width)
        shapes[f"{block}.ff.net.0.proj.bias"] = (4 * width,)
        shapes[f"{block}.ff.net.2.weight"] = (width, 4 * width)
        shapes[f"{block}.ff.net.2.bias"] = (width,)
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def write_model(folder: Path, state: dict[str, torch.Tensor], config: dict | None) -> Path:
    """Two shards and a config.json, as a published model has them."""
    transformer = folder / "transformer"
    transformer.mkdir(parents=True)
    names = sorted(state)
    for i, part in enumerate((names[::2], names[1::2]), 1):
        shard = transformer / f"diffusion_pytorch_model-0000{i}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, str(shard))
    if config is not None:
        (transformer / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("diffusers", "core"),
    [
        ("transformer_blocks.11.attn1.to_out.0.bias", "blocks.11.attn_out.bias"),
        ("transformer_blocks.0.attn1.norm_k.weight", "blocks.0.norm_k.weight"),
        ("transformer_blocks.3.ff.net.2.weight", "blocks.3.ff_out.weight"),
        ("transformer_blocks.3.norm2.linear.weight", "blocks.3.norm2.linear.weight"),
        ("ofs_embedding.linear_2.bias", "ofs_embedding_linear_2.bias"),
        ("norm_out.linear.weight", "norm_out.linear.weight"),
    ],
)
def test_names(diffusers: str, core: str) -> None:
    assert core_name(diffusers) == core


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="1.0"),
        pytest.param({"patch": (128,), "out": 128}, id="1.5"),
        pytest.param({"patch": (256,), "out": 128, "ofs": 24}, id="1.5-i2v"),
    ],
)
def test_rotary_models_keep_every_byte(
    tmp_path: Path, generator: torch.Generator, sizes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", 1000)  # every tensor passes in several pieces
    state = published(generator, **sizes)
    out = tmp_path / "model.safetensors"
    assert main([str(write_model(tmp_path / "in", state, ROTARY)), "--out", str(out)]) == 0

    converted = load_file(str(out))
    assert len(converted) == len(state)
    assert not any("transformer_blocks" in name for name in converted)
    for name, tensor in state.items():
        assert torch.equal(converted[core_name(name)], tensor), name
    assert not list(tmp_path.glob("*.part"))


def test_2b_gets_the_position_table(tmp_path: Path, generator: torch.Generator) -> None:
    """Core reads a file without the table as a rotary model, which gives noise."""
    config = {
        **SINCOS,
        "sample_frames": 9,
        "sample_height": 12,
        "sample_width": 20,
        "max_text_seq_length": 7,
    }
    out = tmp_path / "model.safetensors"
    source = write_model(tmp_path / "in", published(generator), config)
    assert main([str(source), "--out", str(out)]) == 0

    table = load_file(str(out))[POSITIONS]
    frames, height, width, channels = 3, 6, 10, 128
    assert table.shape == (1, 7 + frames * height * width, channels)
    assert table[0, :7].abs().max() == 0
    frame, row, column = 2, 4, 7
    token = table[0, 7 + (frame * height + row) * width + column]

    def waves(position: float, size: int) -> list[float]:
        angles = [position / 10000 ** (2 * i / size) for i in range(size // 2)]
        return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]

    wanted = waves(frame, 32) + waves(column / 1.875, 48) + waves(row / 1.875, 48)
    torch.testing.assert_close(token, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_published_heads_decide_without_config(tmp_path: Path, generator: torch.Generator) -> None:
    sizes: dict[str, Any] = {"layers": 1, "time": 8, "text": 8}
    for heads, has_table in ((30, True), (48, False)):
        source = write_model(tmp_path / str(heads), published(generator, heads, **sizes), None)
        tensors = convert(find_shards([source])).tensors
        assert (POSITIONS in tensors) == has_table
        if has_table:
            assert tensors[POSITIONS].shape == (1, 226 + 13 * 30 * 45, 1920)
    assert PositionGrid().table(16).shape == (1, 17776, 16)


def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path, *sources: Path) -> str:
    out = tmp_path / "refused.safetensors"
    assert main([*map(str, sources), "--out", str(out)]) == 1
    assert not out.exists() and not list(tmp_path.glob("*.part"))
    return capsys.readouterr().err


def test_refusals_say_why(
    tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    state = published(generator)
    model = write_model(tmp_path / "good", state, ROTARY)
    first, second = find_shards([model])

    assert "missing (is a shard left out?)" in refusal(capsys, tmp_path, second)
    assert "both in" in refusal(capsys, tmp_path, first, second, second)
    assert "does not exist" in refusal(capsys, tmp_path, tmp_path / "none.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no .safetensors" in refusal(capsys, tmp_path, empty)

    not_safetensors = tmp_path / "diffusion_pytorch_model.bin"
    not_safetensors.write_bytes(b"\x80")
    assert "not a .safetensors file" in refusal(capsys, tmp_path, not_safetensors)

    text = tmp_path / "page.safetensors"
    text.write_text("<html>not found</html>")
    assert "not a safetensors file" in refusal(capsys, tmp_path, text)

    other = tmp_path / "other.safetensors"
    save_file({"blocks.0.attn.weight": torch.zeros(2)}, str(other))
    assert "no CogVideoX transformer" in refusal(capsys, tmp_path, other)

    unknown = write_model(tmp_path / "unknown", state, None)
    assert "config.json" in refusal(capsys, tmp_path, unknown)

    learned = {**state, POSITIONS: torch.zeros(1, 8, 128)}
    both = write_model(tmp_path / "both", learned, ROTARY)
    assert "CogVideoX-5b-I2V" in refusal(capsys, tmp_path, both)


def test_wrong_and_unexpected_parameters_are_named(
    tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    state = published(generator)
    state["transformer_blocks.1.attn1.to_q.weight"] = torch.zeros(64, 128)
    state["transformer_blocks.1.attn1.lora.weight"] = torch.zeros(4)
    text = refusal(capsys, tmp_path, write_model(tmp_path / "in", state, ROTARY))
    assert "blocks.1.q.weight [64, 128] instead of [128, 128]" in text
    assert "1 unexpected: blocks.1.attn1.lora.weight" in text


def test_cut_off_shard(
    tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "in", published(generator), ROTARY)
    shard = find_shards([model])[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "cut off inside" in refusal(capsys, tmp_path, model)


def test_converted_file_is_recognised(
    tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "in", published(generator), ROTARY)
    out = tmp_path / "done.safetensors"
    assert main([str(model), "--out", str(out)]) == 0
    assert "already has the names" in refusal(capsys, tmp_path, out)
    before = out.read_bytes()
    assert main([str(out), "--out", str(out)]) == 1
    assert out.read_bytes() == before


def test_failure_while_writing_leaves_the_old_file(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "in", published(generator), ROTARY)
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"old")
    conversion = convert(find_shards([model]))

    def fail(*_: object) -> None:
        raise OSError("disk error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk error"):
        tensor_file.write_tensors(out, conversion.tensors)
    assert out.read_bytes() == b"old" and not list(tmp_path.glob("*.part"))

    monkeypatch.setattr(tensor_file.shutil, "disk_usage", lambda _: type("", (), {"free": 10}))
    with pytest.raises(ConversionError, match="GB free"):
        tensor_file.write_tensors(out, conversion.tensors)


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
    out = tmp_path / "model.safetensors"
    done = subprocess.run(
        [sys.executable, *command, str(model), "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
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


def core_env(tmp_path: Path) -> dict[str, str]:
    """The environment in which ComfyUI can be imported, as in tests/comfy/conftest.py."""
    comfyui = os.environ.get("COMFYUI_DIR")
    if not comfyui:
        pytest.skip("needs ComfyUI; name a checkout in COMFYUI_DIR")
    if importlib.util.find_spec("torchsde") is None:
        pytest.skip("ComfyUI's requirement torchsde is not installed")
    paths = [comfyui, os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("torchvision") is None and "COMFY_HEADLESS" in os.environ:
        maker = Path(os.environ["COMFY_HEADLESS"]) / "make_stubs.py"
        stubs = tmp_path / "stubs"
        subprocess.run([sys.executable, str(maker), str(stubs)], check=True, capture_output=True)
        paths.insert(0, str(stubs))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.comfy
@pytest.mark.parametrize(
    ("heads", "sizes", "config", "detected"),
    [
        pytest.param(2, {}, ROTARY, {"use_rotary_positional_embeddings": True}, id="5b"),
        pytest.param(
            30, {"layers": 1}, SINCOS, {"use_learned_positional_embeddings": True}, id="2b"
        ),
        pytest.param(2, {"patch": (128,), "out": 128}, ROTARY, {"patch_size_t": 2}, id="1.5"),
        pytest.param(
            2,
            {"patch": (256,), "out": 128, "ofs": 512},
            ROTARY,
            {"type": "CogVideoX_I2V", "ofs_embed_dim": 512, "in_channels": 32},
            id="1.5-i2v",
        ),
    ],
)
def test_core_loads_what_was_converted(
    tmp_path: Path,
    generator: torch.Generator,
    heads: int,
    sizes: dict,
    config: dict,
    detected: dict,
) -> None:
    env = core_env(tmp_path)
    out = tmp_path / "model.safetensors"
    source = write_model(tmp_path / "in", published(generator, heads, **sizes), config)
    assert main([str(source), "--out", str(out)]) == 0

    done = subprocess.run(
        [sys.executable, "-c", IN_CORE, str(out)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = {"type": "CogVideoX_T2V", "num_attention_heads": heads, **detected}
    assert {key: found.get(key) for key in wanted} == wanted
