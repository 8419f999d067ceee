# SPDX-License-Identifier: Apache-2.0
"""Profiles of pipelines of diffusers: saved by one run, used by another one, or refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.needed import REASON

pytest.importorskip("diffusers", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from benchmarks.tiny_models.pipelines import ALL, Tiny
from sparge.integrations.diffusers import enable
from sparge.integrations.diffusers.fingerprint import fingerprint_of
from sparge.tune import Measurement, Profile, ProfileError

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")
diffusers: Any = sys.modules["diffusers"]  # its parts are found when they are asked for
diffusers.logging.set_verbosity_error()
#: The second run of a profile has no dense step, nor one that is measured.
FROM_START: dict[str, Any] = {"min_tokens": 100, "start_percent": 0.0}
BUDGET: dict[str, Any] = {"mode": "auto budget", "topk": 0.5} | FROM_START
STEPS = 2
#: Self-attention calls of one step of Wan 2.1 without guidance.
CALLS = 2


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that were measured since it was cleared."""
    add, seen = Measurement.add, []

    def watched(measurement: Measurement, layer: int, *qkv: Any, **more: Any) -> None:
        seen.append(layer)
        add(measurement, layer, *qkv, **more)

    monkeypatch.setattr(Measurement, "add", watched)
    return seen


@pytest.fixture
def tiny() -> Tiny:
    return ALL["Wan 2.1"]()


@pytest.fixture
def saved(tiny: Tiny, tmp_path: Path) -> Path:
    """Profile that a first run saved, under a name without suffix."""
    with enable(tiny.pipe, **BUDGET) as handle:
        tiny(STEPS, guidance=1.0)
        assert handle.save_profile(tmp_path / "clip") == "Saved the profile clip.safetensors."
    return tmp_path / "clip.safetensors"


def ran(tiny: Tiny, **given: Any) -> tuple[Any, torch.Tensor]:
    """Result of a run, and its latents."""
    with enable(tiny.pipe, **BUDGET | given) as handle:
        latents = tiny(STEPS, guidance=1.0)
    assert handle.result is not None
    return handle, latents


def test_a_profile_spares_the_measuring(tiny: Tiny, saved: Path, measured: list[int]) -> None:
    measuring, _ = ran(tiny)
    assert measured and measuring.result.tally.dense == CALLS, "the first step is measured"
    measured.clear()
    handle, latents = ran(tiny, profile=str(saved.with_suffix("")))
    tally = handle.result.tally
    assert not measured and (tally.sparse, tally.dense) == (STEPS * CALLS, 0)
    assert handle.result.notes == () and handle.line.endswith("profile clip")
    assert "; heads as the profile clip has them, not measured; " in handle.report()
    again, same = ran(ALL["Wan 2.1"](), profile=measuring.profile())
    assert not measured and torch.equal(same, latents), "the same run in another pipeline"
    assert "heads as the profile given has them" in again.report()
    assert handle.profile() is None
    with pytest.raises(ProfileError, match="was saved: this run used one instead of measuring"):
        handle.save_profile(saved)


def test_what_was_measured_is_what_is_written(tiny: Tiny, saved: Path) -> None:
    handle, _ = ran(tiny)
    said = handle.save_profile(saved)
    assert said == "Saved the profile clip.safetensors over the one of that name."
    own, read = handle.profile(), Profile.load(saved)
    assert own is not None and list(own.settings) == list(read.settings)
    for one, other in zip(own.settings.values(), read.settings.values(), strict=True):
        assert torch.equal(one.density, other.density) and one.density.unique().numel() > 1
    assert read.fingerprint.architecture == "WanTransformer3DModel"
    assert read.notes == {"model": "Wan"} and (read.mode, read.asked) == ("budget", 0.5)


def other_weights(tiny: Tiny) -> None:
    norms = [x for name, x in tiny.pipe.transformer.named_parameters() if "norm" in name]
    for norm in norms:
        torch.nn.init.normal_(norm)


class Adapted(torch.nn.Module):
    """Layer in the wrapper that PEFT puts it in, with a LoRA of rank 2 that changes nothing."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, {"style": 1.0}
        self.active_adapters, self.disable_adapters = ["style"], False
        self.lora_A, self.lora_B = (
            torch.nn.ModuleDict({"style": torch.nn.Linear(*sizes, bias=False)})
            for sizes in ((base.in_features, 2), (2, base.out_features))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x)


def test_other_weights_and_loras_are_told(tiny: Tiny, saved: Path) -> None:
    block, other = tiny.pipe.transformer.blocks[0].attn1, ALL["Wan 2.1"]()
    other_weights(other)
    block.to_q = adapted = Adapted(block.to_q)
    for changed in (tiny, other):
        handle, _ = ran(changed, profile=saved)
        (note,) = handle.result.notes
        assert "a finetune or a LoRA" in note and handle.result.tally.dense == 0
    adapted.disable_adapters = True
    assert ran(tiny, profile=saved)[0].result.notes == ()


def test_a_lora_on_a_layer_of_a_norm_is_no_model_of_another_size() -> None:
    """Flux has linear layers in its norms, which LoRAs take."""
    model = torch.nn.ModuleDict({"norm1": torch.nn.ModuleDict({"linear": torch.nn.Linear(8, 8)})})
    before = fingerprint_of(model)
    model["norm1"]["linear"] = Adapted(model["norm1"]["linear"])  # pyright: ignore
    verdict = fingerprint_of(model).compare(before)
    assert verdict.usable and "(patches differs): a finetune or a LoRA" in verdict.sentence


def test_a_profile_for_something_else_is_not_used(saved: Path, tiny: Tiny) -> None:
    for changes, reason, dense in (
        ({"topk": 0.4}, "is for a mean density of 50 % and this run asks for", CALLS),
        ({"mode": "manual"}, "manual mode does not use the profile clip", 0),
    ):
        handle, _ = ran(tiny, profile=saved, **changes)
        (note,) = handle.result.notes
        assert reason in note and not handle.result.from_profile
        assert handle.result.tally.dense == dense


def test_a_profile_of_another_model_or_none_leaves_the_run_measuring(
    saved: Path, tiny: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    for model, file, reason in (
        (ALL["Flux"](), saved, "on WanTransformer3DModel and this model is FluxTransformer2DModel"),
        (tiny, tmp_path / "none", f"no profile none.safetensors in {tmp_path.name}, so this run"),
        (tiny, tmp_path / "broken", "broken.safetensors is no safetensors file"),
    ):
        handle, _ = ran(model, profile=file)
        (note,) = handle.result.notes
        assert reason in note and "this run measures" in note and reason in handle.report()
        assert handle.result.tally.reasons["measuring"] and handle.profile() is not None


def test_what_a_profile_may_be_is_checked(tiny: Tiny) -> None:
    for wrong in (3, "", SimpleNamespace()):
        with pytest.raises(ValueError, match=r'profile is .*; give the path of a file, say "wan'):
            enable(tiny.pipe, profile=wrong)  # pyright: ignore[reportArgumentType]
    handle = enable(tiny.pipe, **BUDGET)
    assert handle.profile() is None
    with pytest.raises(ProfileError, match="No profile was saved: The pipeline has not run"):
        handle.save_profile("clip")
    handle.disable()
