# SPDX-License-Identifier: Apache-2.0
"""Profiles: what is saved, what is used again, and what is refused with which reason."""

from __future__ import annotations

import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.nodes.parts import HEADS, LATENT, TOKENS, network

pytestmark = pytest.mark.usefixtures("reference_allowed", "folder")

NEXT = (0.7, 0.6)
"""Steps of a run that has no dense one."""


def wan(layers=1):
    model = network(blocks=range(layers))
    model.norm = torch.nn.LayerNorm(8)
    return model


@pytest.fixture
def run_once(sampled, patcher, generator):
    """run_once(sigmas, patches, calls a step, ...): a run, by default one that measures."""
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)

    def run(sigmas=(0.9, 0.7), model=None, patches=None, calls=1, **given):
        patcher.patches = patches or {}
        return sampled(
            lambda attend: [attend(q, q, q, HEADS) for _ in range(calls)],
            sigmas, model or wan(), **{"mode": "auto quality"} | given,
        )  # fmt: skip

    return run


@pytest.fixture
def load(load_pack):
    return lambda name: load_pack("nodes.sparge_profile_load").SpargeProfileLoad.execute(name)[0]


@pytest.fixture
def report(load_pack):
    """report(patched model, name to save): the text."""
    node = load_pack("nodes.sparge_report").SpargeAttentionReport

    def of(model, name=""):
        latent, text, picture = node.execute(model, {"samples": 0}, name)
        assert latent == {"samples": 0} and picture.ndim == 4 and picture.shape[2] == 800
        return text

    return of


@pytest.fixture
def save(folder, run_once, report, load):
    """save(**run): the profile of a run, saved and loaded."""

    def saved(**run):
        replaced = " over the one of that name" if (folder / "clip.safetensors").exists() else ""
        text = report(run_once(**run).patched, " clip ")
        assert text.endswith(f"Saved the profile clip.safetensors{replaced}.")
        assert (folder / "clip.safetensors").is_file()
        return load("clip.safetensors")

    return saved


@pytest.fixture
def saved(save):
    return save()


def test_a_profile_spares_the_measuring(saved, run_once, load_pack):
    got = run_once(NEXT, profile=saved)
    assert (got.tally.sparse, got.tally.dense, got.notes) == (2, 0, [])
    (measured,) = saved.profile.settings.values()
    assert all(chosen is measured for chosen in got.run.session.tables.chosen[0]._given())
    assert "; heads as the profile clip has them, not measured; " in got.line + "; "
    assert (
        load_pack("sparge.sampling")
        .verdict(got.last)
        .endswith("\n50 % computed, error 4 %, profile clip")
    )


REFUSED = {
    "another model": (
        {"model": network("OtherModel", type(wan()))},
        "measured on WanModel and this model is OtherModel",
    ),
    "another quality": ({"quality": "high"}, "a mean error of 0.05 and this run asks for"),
    "another mode": ({"mode": "auto budget"}, "this run asks for a mean density of 50 %"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_profile_that_does_not_fit_is_not_used(saved, run_once, case):
    changes, reason = REFUSED[case]
    got = run_once(NEXT, profile=saved, **changes)
    assert got.tally.reasons == {"measuring": 1}
    (note,) = got.notes
    assert reason in note and "this run measures" in note
    assert "heads as the profile" not in got.line


def test_manual_mode_has_no_use_for_one(saved, run_once):
    got = run_once(mode="manual", profile=saved)
    assert got.notes == ["manual mode does not use the profile clip"]
    assert "heads as the profile" not in got.line


def finetuned():
    model = wan()
    torch.nn.init.normal_(model.norm.weight)
    return model


def test_what_came_from_a_profile_is_not_saved_as_measured_here(
    save, saved, folder, run_once, report
):
    """It would claim to be of this model, and the warning would be gone for good."""
    tuned = finetuned()
    got = run_once(NEXT, tuned, profile=saved)
    assert got.tally.sparse == 2
    (note,) = got.notes
    assert "a finetune or a LoRA" in note
    assert report(got.patched, "again").endswith("this run used one instead of measuring.")
    assert not (folder / "again.safetensors").exists()
    assert run_once(NEXT, tuned, profile=save(model=tuned)).notes == []


def lora(seed, strength=1.0, keys=300):
    """Patches as ComfyUI keeps them; other seeds are other LoRAs of the same layers."""
    values = torch.randn(keys, 4, 4, generator=torch.Generator().manual_seed(seed))
    adapters = [SimpleNamespace(weights=(value, value.T, 1.0, None)) for value in values]
    return {f"{i}.weight": [(strength, x, 1.0, None, None)] for i, x in enumerate(adapters)}


NORM = "diffusion_model.norm.weight"
OTHER_LORAS = {
    "values": lora(1),
    "a strength": lora(0) | {"7.weight": lora(0, 0.99)["7.weight"]},
    "a key": lora(0, keys=299),
    "a difference": {"norm.weight": [(0.8, ("diff", (torch.ones(8),)), 1.0, None, None)]},
    "none": {},
}


@pytest.mark.parametrize("case", OTHER_LORAS)
def test_another_lora_is_told(save, run_once, case):
    styled = save(patches=lora(0))
    same = run_once(NEXT, profile=styled, patches=lora(0))
    other = run_once(NEXT, profile=styled, patches=OTHER_LORAS[case])
    assert same.tally.sparse == other.tally.sparse == 2 and same.notes == []
    (note,) = other.notes
    assert "a finetune or a LoRA" in note


def test_a_lora_on_a_norm_is_the_same_before_it_is_loaded_and_after(load_pack, patcher):
    """ComfyUI patches weights in place when it loads a model, and keeps those of the file."""
    fingerprint_of = load_pack("nodes.profiles").fingerprint_of
    patcher.model.diffusion_model = model = wan()
    patcher.patches = {NORM: [(0.8, ("diff", (torch.ones(8),)), 1.0, None, None)]}
    before = fingerprint_of(patcher)
    patcher.backup[NORM] = SimpleNamespace(weight=model.norm.weight.detach().clone())
    with torch.no_grad():
        model.norm.weight += 0.8
    assert fingerprint_of(patcher).compare(before).fit.name == "FITS"
    patcher.backup.clear()
    assert fingerprint_of(patcher).compare(before).fit.name == "DIFFERENT_WEIGHTS"


def test_a_layer_that_a_profile_lacks_says_so(save, run_once):
    profile = save(model=wan(2), calls=2, dense_blocks="0")
    got = run_once(NEXT, wan(2), calls=2, profile=profile)
    assert got.tally.reasons == {"the profile has nothing for this layer": 2}
    assert got.tally.sparse == 2


def test_another_length_is_measured(saved, run_once):
    ((table, settings),) = saved.profile.settings.items()
    longer = type(table.grid)(5, 8, 8)
    saved.profile.settings[table._replace(tokens=longer.tokens, grid=longer)] = settings
    del saved.profile.settings[table]
    got = run_once(NEXT, profile=saved)
    assert got.tally.reasons == {"measuring": 1}
    assert got.notes == [
        "The profile has nothing for 256 tokens of 2 heads, so this run measures them"
    ]


def test_a_profile_fits_where_only_the_text_is_longer(saved, run_once, load_pack):
    grid_of = load_pack("sparge").TokenGrid
    ((table, settings),) = saved.profile.settings.items()
    assert table.grid == grid_of(4, 8, 8) and not table.text
    del saved.profile.settings[table]
    for text in (20, 7):
        grid = grid_of(4, 8, 8, suffix=text)
        saved.profile.settings[table._replace(tokens=TOKENS + text, grid=grid)] = settings
    got = run_once(NEXT, profile=saved)
    assert (got.tally.sparse, got.tally.dense) == (2, 0)
    note = "The profile was measured with 7 tokens of text and is used for 0"
    assert got.notes == [note] and note in got.line
    assert got.last.profile is None, "it measured nothing itself"


@pytest.mark.parametrize("name", [None, "", " ", "none", "../up", "a/b", "C:clip", "spoilt"])
def test_a_name_without_a_profile_warns_and_the_run_measures(
    load, run_once, load_pack, folder, caplog, name
):
    folder.mkdir()
    (folder / "spoilt.safetensors").write_bytes(b"")
    (folder.parent / "up.safetensors").write_bytes(b"")
    found = load(name)
    assert found.profile is None and found.problem in caplog.text
    if not (name or "").strip():
        assert found.problem == "Load Sparge Profile has no name"
    elif name == "spoilt":
        assert found.problem.startswith("spoilt.safetensors is no safetensors file")
    else:
        assert found.problem == f"There is no profile {name}"
    got = run_once(NEXT, profile=found)
    assert got.tally.reasons == {"measuring": 1}
    assert got.notes == [f"{found.problem}, so this run measures"]
    said = load_pack("sparge.sampling").verdict(got.last).split("\n")[1]
    assert said.removesuffix(" ...") in got.notes[0] and len(said) > 15


def test_the_loader_lists_what_there_is(save, folder, load_pack, load):
    """Those of subfolders and of extra_model_paths.yaml, too; of one name, the one saved here."""
    node = load_pack("nodes.sparge_profile_load").SpargeProfileLoad

    def names():
        return node.define_schema().inputs[0].options

    (none_saved,) = names()
    assert none_saved == "none saved yet" and load(none_saved).profile is None
    assert load(none_saved).problem == "Load Sparge Profile has no name"
    save()
    more = folder.parent / "more"
    (more / "wan").mkdir(parents=True)
    shutil.copy(folder / "clip.safetensors", more / "wan" / "long.safetensors")
    (more / "clip.safetensors").write_bytes(b"spoilt")
    (folder / "clip.safetensors.0a.part").write_bytes(b"")
    assert names() == ["clip.safetensors", "wan/long.safetensors"]
    assert load("wan/long.safetensors").name == "wan/long"
    assert all(str(load(name)) == "WanModel, for a mean error of 0.05" for name in names())
    assert node.validate_inputs("gone") is True, "a graph runs where its profile is not"


def test_a_folder_that_is_gone_does_not_end_the_list(folder, load_pack, monkeypatch):
    """ComfyUI looks at the folders that it remembers."""
    names = load_pack("nodes.host").profile_names
    paths = sys.modules["folder_paths"]
    monkeypatch.setattr(paths, "get_filename_list", lambda kind: os.listdir(folder / "gone"))
    anew = (["a.safetensors", "notes.txt"], {}, 0.0)
    monkeypatch.setattr(paths, "get_filename_list_", lambda kind: anew, raising=False)
    assert names() == ["a.safetensors"]


def test_a_name_that_an_api_graph_has_as_a_number(save, folder, load_pack, load):
    save()
    (folder / "clip.safetensors").rename(folder / "5.safetensors")
    node = load_pack("nodes.sparge_profile_load").SpargeProfileLoad
    assert load(5).name == "5" and load(5).profile is not None
    assert node.fingerprint_inputs(5) == node.fingerprint_inputs("5") != ""


def test_a_file_that_was_written_since_is_read_again(saved, folder, load_pack):
    node = load_pack("nodes.sparge_profile_load").SpargeProfileLoad
    before = node.fingerprint_inputs("clip")
    assert before == node.fingerprint_inputs("clip.safetensors") != ""
    assert node.fingerprint_inputs("none") == node.fingerprint_inputs("../up") == ""
    (folder / "clip.safetensors").write_bytes(b"")
    assert node.fingerprint_inputs("clip") != before


@pytest.mark.parametrize(
    ("name", "run", "why"),
    [
        ("../up", {}, "No profile was saved: "),
        ("a/b", {}, "No profile was saved: "),
        ("con", {}, "No profile was saved: "),
        (
            "clip",
            {"mode": "manual"},
            "No profile was saved: no head was measured, which takes an auto mode.",
        ),
        (
            "clip",
            {"sigmas": (0.9, 0.95)},
            "No profile was saved: nothing was sparse (before start_percent 0.2).",
        ),
        (
            "clip",
            {"min_tokens": 300},
            "No profile was saved: nothing was sparse (fewer than min_tokens (300) tokens).",
        ),
    ],
)
def test_what_cannot_be_saved_costs_nothing_and_is_told(folder, run_once, report, name, run, why):
    last = report(run_once(**run).patched, name).splitlines()[-1]
    assert last == why if why.endswith(".") else last.startswith(why)
    assert not folder.exists()


def test_null_in_an_api_graph_is_no_name(folder, run_once, report):
    assert "profile" not in report(run_once().patched, str(None)).splitlines()[-1]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("ran", "given", "other"),
    [
        ((1, 16, 4, 8, 8), (1, 16, 4, 8, 8), False),
        ((1, 16, 3, 8, 8), (1, 16, 4, 8, 8), True),
        ((1, 1, 4096), (1, 1, 2048), False),  # sound and video in one: nothing to compare
    ],
)
def test_a_latent_of_an_earlier_run_is_told(
    folder, run_once, session, load_pack, ran, given, other
):
    """ComfyUI keeps what earlier prompts made, and then runs the report alone."""
    model = run_once().patched
    hook = load_pack("nodes.hook").hook_of(model)
    options = {"transformer_options": dict(model.transformer_options)}
    guider = SimpleNamespace(model_options=options, model_patcher=model)
    sampler = session(model, LATENT)._wrapped("outer_sample", guider, lambda *_: torch.zeros(ran))
    measured = hook.last
    sampler(None, None, None, torch.tensor([0.9, 0.0]))
    hook.last = measured
    latent = {"samples": torch.zeros(given)}
    node = load_pack("nodes.sparge_report").SpargeAttentionReport
    _, text, _ = node.execute(model, latent, "clip")
    assert ("of an earlier run or changed since" in text) == other
    assert ("No profile was saved, for it would be of another run" in text) == other
    assert (folder / "clip.safetensors").exists() != other


def test_reports_without_a_run(report, patcher, patch):
    assert "did not go through" in report(patcher)
    assert "No sampler has run" in report(patch())


def test_a_cancelled_run_is_reported_too(sampled, report):
    def cancel(attend):
        raise InterruptedError

    got = sampled(cancel, raises=(InterruptedError,), mode="auto quality")
    assert "stopped before the first sparse step" in report(got.patched).splitlines()[0]


NODES = {
    "SpargeProfileLoad": ("nodes.sparge_profile_load", ["name"], ["profile"]),
    "SpargeAttentionReport": (
        "nodes.sparge_report",
        ["model", "latent", "save_profile"],
        ["latent", "text", "picture"],
    ),
}


@pytest.mark.parametrize("name", NODES)
def test_the_faces_of_the_nodes(load_pack, name):
    module, inputs, outputs = NODES[name]
    schema = getattr(load_pack(module), name).define_schema()
    assert (schema.node_id, schema.category) == (name, "model/patch")
    assert [each.id for each in schema.inputs] == inputs
    assert [each.id for each in schema.outputs] == outputs
    assert all(each.tooltip for each in [*schema.inputs, *schema.outputs])
    for each in schema.inputs:
        if type(each).__name__ == "StringInput":
            assert "faster" in each.tooltip.lower() and "truer" in each.tooltip
