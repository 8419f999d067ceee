# SPDX-License-Identifier: Apache-2.0
"""The loader of CogVideoX: what it offers, what it hands to ComfyUI, and what it refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.parts import ROTARY, SINCOS, published, write_model
from tests.nodes.stand_ins import folder_paths, model_loading
from tools.convert_cogvideox.convert import main

FIRST = "cog/transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
SECOND = FIRST.replace("00001", "00002")
ACCEPTED = "Load CogVideoX takes the transformer of a CogVideoX model as .safetensors"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of diffusion models."""
    monkeypatch.setitem(sys.modules, "folder_paths", folder_paths(tmp_path))
    for name, module in model_loading().items():
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "unet").mkdir()
    return tmp_path / "unet"


@pytest.fixture
def node(load_pack: Any, models: Path) -> Any:
    return load_pack("nodes.sparge_cogvideox_load").SpargeCogVideoXLoad


@pytest.fixture
def state(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return published(generator)


@pytest.fixture
def converted(models: Path) -> Callable[[], dict[str, torch.Tensor]]:
    """converted(): what the command makes of the model in the folder cog."""

    def convert() -> dict[str, torch.Tensor]:
        out = models.parent / "converted.safetensors"
        assert main([str(models / "cog"), "--out", str(out)]) == 0
        return load_file(out)

    return convert


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def test_the_face_of_the_node(node: Any, models: Path, state: dict[str, torch.Tensor]) -> None:
    write_model(models / "cog", state, ROTARY)
    for name in ("flux.safetensors", "wan.ckpt", "cog.gguf", "x-00001-of-00003.sft"):
        (models / name).touch()
    schema = node.define_schema()
    assert (schema.node_id, schema.display_name) == ("SpargeCogVideoXLoad", "Load CogVideoX")
    assert schema.category == "model/loaders"
    name, dtype = schema.inputs
    assert name.options == [FIRST, "flux.safetensors"], "of several files the first, no pickles"
    assert dtype.options[0] == "default" and dtype.advanced
    assert [each.id for each in schema.inputs] == ["model_name", "weight_dtype"]
    assert all(each.tooltip for each in [*schema.inputs, *schema.outputs])


@pytest.mark.parametrize("config", [ROTARY, SINCOS], ids=["5b", "2b"])
@pytest.mark.parametrize("chosen", [FIRST, SECOND])
def test_shards_become_what_the_command_makes_of_them(node, models, state, converted, config,
                                                      chosen) -> None:  # fmt: skip
    write_model(models / "cog", state, config)
    assert node.validate_inputs(chosen) is True
    (model,) = node.execute(chosen)
    assert_same(model.state, converted())
    assert model.options == {} and model.disable_dynamic is False


def test_one_file_and_a_converted_one_load_alike(node, models, state, converted) -> None:
    write_model(models / "cog", state, ROTARY)
    wanted = converted()
    (models / "one").mkdir()
    save_file(state, models / "one" / "cog.safetensors")
    (models / "one" / "config.json").write_text((models / Path(FIRST).parent / "config.json")
                                                .read_text())  # fmt: skip
    save_file(wanted, models / "converted.safetensors")
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in wanted.items()}
    scale = {"scaled_fp8": torch.zeros(2, dtype=torch.uint8)}  # ComfyUI's affair
    save_file(prefixed | scale, models / "prefixed.safetensors", {"by": "another tool"})
    assert_same(node.execute("one/cog.safetensors")[0].state, wanted)
    assert_same(node.execute("converted.safetensors")[0].state, wanted)
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
    def refusal(name: str | None, *words: str) -> None:
        with pytest.raises(ValueError, match=ACCEPTED) as error:
            node.execute(name)
        said = str(error.value)
        assert all(word in said for word in words), said
        assert said.endswith("Other models load with Load Diffusion Model.")
        assert said.isprintable() and not re.search(r"\.\.|\. \.", said), said

    write_model(models / "cog", state, ROTARY)
    shards = [models / FIRST, models / SECOND]
    refusal(None, "no file was chosen")
    refusal("gone.safetensors", "gone.safetensors is not in models/diffusion_models")
    shards[1].rename(models / "second")
    refusal(FIRST, "00002-of-00002.safetensors of the 2 files of this model is not beside it",
            "put all of them in one folder")  # fmt: skip
    data = (models / "second").read_bytes()
    shards[1].write_bytes(data[:-100])
    refusal(FIRST, "00002-of-00002.safetensors is cut off inside", "download it again")
    shards[1].write_bytes(b"<html>not found</html>")
    refusal(FIRST, "00002-of-00002.safetensors is not a safetensors file")
    shards[1].write_bytes(data)
    save_file({"double_blocks.0.x": torch.zeros(2)}, models / "flux.safetensors")
    refusal("flux.safetensors", "flux.safetensors was not loaded", "no CogVideoX transformer")
    known = {"blocks.0.norm1.linear.weight": torch.zeros(2)}
    save_file(known | {"other": torch.zeros(2)}, models / "other.safetensors")
    refusal("other.safetensors", "ComfyUI finds no CogVideoX transformer in it")
    save_file(known, models / "cut.safetensors")
    (models / "cut.safetensors").write_bytes((models / "cut.safetensors").read_bytes()[:-1])
    refusal("cut.safetensors", "cut.safetensors cannot be read", "download it again")
    (models / "x-00003-of-00002.safetensors").touch()
    refusal("x-00003-of-00002.safetensors", "counts files that cannot be: 00003 of 00002")
    (models / "x-00001-of-99999.safetensors").touch()
    refusal("x-00001-of-99999.safetensors", "and 99995 more of the 99999 files")


def test_positions_of_another_models_config_are_not_taken(node, models, state) -> None:
    """Many models may lie in one folder."""
    write_model(models / "cog", state, SINCOS | {"num_attention_heads": 30})
    with pytest.raises(ValueError, match=r"model with 30 heads, and these weights have 2; put"):
        node.execute(FIRST)


def test_names_are_refused_before_anything_runs(node, models) -> None:
    assert "is not in models/diffusion_models. Load" in node.validate_inputs("gone.safetensors")
    assert "no file was chosen" in node.validate_inputs("")
    (models / "cog.ckpt").touch()
    said = node.validate_inputs("cog.ckpt")
    assert said.startswith("cog.ckpt is no .safetensors file, and other formats can run code")
    assert node.validate_inputs(None) is True, "another node names it"
