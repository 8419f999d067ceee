# SPDX-License-Identifier: Apache-2.0
"""The loader of CogVideoX: what it offers, what it hands to ComfyUI, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cogvideox_files import ROTARY, SINCOS, published, write_model
from tests.nodes.stand_ins import folder_paths

FIRST = "cog/transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
SECOND = FIRST.replace("00001", "00002")
ACCEPTED = "Load CogVideoX takes the transformer of a CogVideoX model as .safetensors"


@pytest.fixture
def module(load_pack: Any) -> Any:
    return load_pack("nodes.sparge_cogvideox_load")


@pytest.fixture
def models(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of diffusion models."""
    monkeypatch.setattr(module, "folder_paths", folder_paths(tmp_path))
    (tmp_path / "unet").mkdir()
    return tmp_path / "unet"


@pytest.fixture
def node(module: Any, models: Path) -> Any:
    return module.SpargeCogVideoXLoad


@pytest.fixture
def state(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return published(generator)


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def test_what_may_be_chosen(node: Any, models: Path, state: dict[str, torch.Tensor]) -> None:
    write_model(models / "cog", state, ROTARY)
    for name in ("flux.safetensors", "wan.ckpt", "cog.gguf", "x-00001-of-00003.sft"):
        (models / name).touch()
    name, dtype = node.define_schema().inputs
    assert name.options == [FIRST, "flux.safetensors"], "of several files the first, no pickles"
    assert dtype.options[0] == "default"
    assert [name.id, dtype.id] == ["model_name", "weight_dtype"]


@pytest.fixture
def renamed(module: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state under ComfyUI's names."""
    return {module.core_name(name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("published", "core"),
    [
        ("transformer_blocks.29.attn1.to_q.weight", "blocks.29.q.weight"),
        ("transformer_blocks.0.attn1.to_out.0.bias", "blocks.0.attn_out.bias"),
        ("transformer_blocks.1.attn1.norm_k.bias", "blocks.1.norm_k.bias"),
        ("transformer_blocks.1.norm1.linear.weight", "blocks.1.norm1.linear.weight"),
        ("transformer_blocks.1.ff.net.0.proj.weight", "blocks.1.ff_proj.weight"),
        ("transformer_blocks.1.ff.net.2.weight", "blocks.1.ff_out.weight"),
        ("time_embedding.linear_1.weight", "time_embedding_linear_1.weight"),
        ("ofs_embedding.linear_2.bias", "ofs_embedding_linear_2.bias"),
        ("patch_embed.proj.weight", "patch_embed.proj.weight"),
    ],
)
def test_names(module: Any, published: str, core: str) -> None:
    assert module.core_name(published) == core


@pytest.mark.parametrize("chosen", [FIRST, SECOND])
def test_shards_get_core_names_and_2b_its_positions(node, models, state, renamed, chosen) -> None:
    """As diffusers makes them: channels of 1 frame, 3 columns, 3 rows in eighths."""
    write_model(models / "cog", state, SINCOS)
    (model,) = node.execute(chosen)
    table = model.state.pop("patch_embed.pos_embedding")
    assert_same(model.state, renamed)
    assert model.options == {} and model.disable_dynamic is False
    assert table.shape == (1, 226 + 13 * 30 * 45, 128) and not table[:, :226].any()
    video = table[0, 226:].view(13, 30, 45, 128)
    last = video[12, 29, 44]
    assert last[[0, 16]].tolist() == pytest.approx([math.sin(12), math.cos(12)], abs=1e-6)
    assert last[[32, 56]].tolist() == pytest.approx([f(44 / 1.875) for f in (math.sin, math.cos)])
    assert last[[80, 104]].tolist() == pytest.approx([f(29 / 1.875) for f in (math.sin, math.cos)])


def test_5b_has_rotary_positions_alone(node, models, state) -> None:
    write_model(models / "cog", state, ROTARY)
    assert "patch_embed.pos_embedding" not in node.execute(FIRST)[0].state
    state["transformer_blocks.0.norm1.linear.weight"] = torch.zeros(6 * 48 * 64, 1)
    save_file(state | {"patch_embed.pos_embedding": torch.zeros(1)}, models / "i2v.safetensors")
    with pytest.raises(ValueError, match="two kinds of positions"):
        node.execute("i2v.safetensors")


def test_a_converted_file_loads_as_it_is(node, models, renamed) -> None:
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in renamed.items()}
    scale = {"scaled_fp8": torch.zeros(2, dtype=torch.uint8)}  # ComfyUI's affair
    save_file(prefixed | scale, models / "prefixed.safetensors", {"by": "another tool"})
    (model,) = node.execute("prefixed.safetensors")
    assert_same(model.state, prefixed | scale)
    assert model.metadata == {"by": "another tool"}


def test_types_of_weights_and_copies_for_other_gpus(node, models, state) -> None:
    write_model(models / "cog", state, ROTARY)
    (model,) = node.execute(FIRST, "fp8_e4m3fn_fast")
    assert model.options == {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}
    assert node.execute(FIRST, "fp8_e5m2")[0].options == {"dtype": torch.float8_e5m2}
    load, given = model.cached_patcher_init
    copy = load(*given, disable_dynamic=True)
    assert copy.options == model.options and copy.disable_dynamic is True
    assert_same(copy.state, model.state)


def test_what_cannot_be_loaded_is_said(node, models, state) -> None:
    def refusal(name: str, *words: str) -> None:
        with pytest.raises(ValueError, match=ACCEPTED) as error:
            node.execute(name)
        said = str(error.value)
        assert said.startswith(f"{name} was not loaded: ")
        assert all(word in said for word in words), said
        assert said.endswith("Other models load with Load Diffusion Model.")

    with pytest.raises(FileNotFoundError):
        node.execute("gone.safetensors")
    write_model(models / "cog", state, ROTARY)
    (models / FIRST).with_name("config.json").write_text("{")
    refusal(FIRST)
    (models / SECOND).unlink()
    refusal(FIRST, "00002-of-00002.safetensors is not beside it", "in one folder")
    save_file({"double_blocks.0.x": torch.zeros(2)}, models / "flux.safetensors")
    refusal("flux.safetensors", "no CogVideoX transformer")
    save_file(state | {"other": torch.zeros(2)}, models / "other.safetensors")
    refusal("other.safetensors", "ComfyUI finds no CogVideoX transformer in it")


@pytest.mark.parametrize("prefix", [None, "", "model.diffusion_model."])
def test_each_parameter_is_missed(module, node, models, generator, prefix) -> None:
    """Of files with published names (None) and with ComfyUI's, which may have a prefix."""
    state = published(generator, heads=1, layers=2, time=8, text=8, ofs=8)
    named = {name: name if prefix is None else prefix + module.core_name(name) for name in state}
    whole = {named[name]: tensor for name, tensor in state.items()} | {"extra": torch.zeros(1)}
    save_file(whole, models / "cog.safetensors")
    assert node.execute("cog.safetensors")
    for name in state:
        save_file({n: x for n, x in whole.items() if n != named[name]}, models / "cog.safetensors")
        is_sign = module.core_name(name) == module._SIGN
        said = "no CogVideoX transformer" if is_sign else f"lacks {name} "
        with pytest.raises(ValueError, match=f"{said}.*{ACCEPTED}"):
            node.execute("cog.safetensors")


def test_many_that_are_missed_are_counted(node, models, generator) -> None:
    """A block between two others too: ComfyUI would count the blocks before it."""
    state = published(generator, heads=1, layers=3, time=8, text=8)
    lacking = {n: x for n, x in state.items() if not n.startswith("transformer_blocks.1.")}
    save_file(lacking, models / "cog.safetensors")
    with pytest.raises(ValueError, match=r"blocks\.1\.norm1\.linear\.weight and 23 more param"):
        node.execute("cog.safetensors")
