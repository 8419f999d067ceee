# SPDX-License-Identifier: Apache-2.0
"""Profiles: what is saved, what is used again, and what is refused with which reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

HEADS, TOKENS = 2, 256
LATENT = (4, 16, 16)


class WanModel(torch.nn.Module):
    """Part of Wan that the node sees; its name makes it one."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_size, self.num_heads, self.blocks = (1, 2, 2), HEADS, [0]
        self.norm = torch.nn.LayerNorm(8)


@pytest.fixture
def run_once(load_pack, session, patcher, generator):
    """run_once(sigmas, model, patches, calls a step, **widgets): the patched model, after a run."""
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)

    def run(sigmas=(0.9, 0.7), model=None, patches=None, calls=1, **widgets):
        patcher.model.diffusion_model = model or WanModel()
        patcher.patches = patches or {}
        node = load_pack("nodes.sparge_attention").SpargeAttention
        settings = {"mode": "auto quality", "min_tokens": TOKENS} | widgets
        patched = node.execute(patcher, **settings)[0]

        def step(attend):
            for _ in range(calls):
                attend(q, q, q, HEADS)

        session(patched, LATENT).sample(step, list(sigmas))
        return patched

    return run


@pytest.fixture
def load(load_pack):
    return lambda name: load_pack("nodes.sparge_profile_load").SpargeProfileLoad.execute(name)[0]


@pytest.fixture
def report(load_pack):
    """(latent, text, picture) for a patched model."""
    node = load_pack("nodes.sparge_report").SpargeReport
    return lambda model, name="": node.execute(model, {"samples": 0}, name)


@pytest.fixture
def saved(folder, run_once, report, load):
    """The profile of a run, saved and loaded."""
    _, text, _ = report(run_once(), "clip")
    assert text.endswith("Saved the profile clip.safetensors.")
    assert (folder / "clip.safetensors").is_file()
    return load("clip")


def test_a_profile_spares_the_measuring(saved, run_once, runs):
    run_once(sigmas=[0.7, 0.6], profile=saved)
    ((run, _),) = runs
    assert (run.tally.sparse, run.tally.dense, run.notes) == (2, 0, [])
    (measured,) = saved.profile.settings.values()
    assert all(chosen is measured for chosen in run.session.tables.chosen[0]._given())


class OtherModel(WanModel):
    """Another architecture."""


def finetuned():
    model = WanModel()
    torch.nn.init.normal_(model.norm.weight)
    return model


REFUSED = {
    "another model": ({"model": OtherModel()}, "measured on WanModel and this model is OtherModel"),
    "another quality": ({"quality": "high"}, "a mean error of 0.05 and this node asks for"),
    "another mode": ({"mode": "auto budget"}, "this node asks for a mean density of 50 %"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_profile_that_does_not_fit_is_not_used(saved, run_once, runs, case):
    changes, reason = REFUSED[case]
    run_once(sigmas=[0.7, 0.6], profile=saved, **changes)
    ((run, _),) = runs
    assert run.tally.reasons == {"measuring": 1}
    (note,) = run.notes
    assert reason in note and "this run measures" in note


USED = {
    "finetuned": {"model": finetuned()},
    "LoRA": {"patches": {"norm.weight": [(0.8, ("diff", (torch.ones(8),)), 1.0, None, None)]}},
}


@pytest.mark.parametrize("case", USED)
def test_other_weights_are_used_with_a_warning(saved, run_once, runs, case):
    run_once(sigmas=[0.7, 0.6], profile=saved, **USED[case])
    ((run, _),) = runs
    assert run.tally.sparse == 2
    (note,) = run.notes
    assert "a finetune or a LoRA" in note


def test_what_came_from_a_profile_is_not_saved_as_measured_here(
    saved, folder, run_once, report, load, runs
):
    """It would claim to be of this model, and the warning above would be gone for good."""
    tuned = finetuned()
    text = report(run_once(sigmas=[0.7, 0.6], model=tuned, profile=saved), "again")[1]
    assert text.endswith("this run used one instead of measuring.")
    assert not (folder / "again.safetensors").exists()
    report(run_once(sigmas=[0.9, 0.7], model=tuned), "clip")
    run_once(sigmas=[0.7, 0.6], model=tuned, profile=load("clip"))
    assert runs[-1][0].notes == []


class TwoBlocks(WanModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [0, 0]


def test_a_layer_that_a_profile_lacks_says_so(folder, run_once, report, load, runs):
    report(run_once(model=TwoBlocks(), calls=2, dense_blocks="0"), "clip")
    run_once(sigmas=[0.7, 0.6], model=TwoBlocks(), calls=2, profile=load("clip"))
    run = runs[-1][0]
    assert run.tally.reasons == {"the profile has nothing for this layer": 2}
    assert run.tally.sparse == 2


def lora(seed, strength=1.0, keys=300):
    """Patches as ComfyUI keeps them; other seeds are other LoRAs of the same layers."""
    values = torch.randn(keys, 4, 4, generator=torch.Generator().manual_seed(seed))
    adapters = [SimpleNamespace(weights=(value, value.T, 1.0, None)) for value in values]
    return {f"{i}.weight": [(strength, x, 1.0, None, None)] for i, x in enumerate(adapters)}


OTHER_LORAS = {
    "values": lora(1),
    "a strength": lora(0) | {"7.weight": lora(0, 0.99)["7.weight"]},
    "a key": lora(0, keys=299),
    "none": {},
}


@pytest.mark.parametrize("case", OTHER_LORAS)
def test_another_lora_is_told(folder, run_once, report, load, runs, case):
    report(run_once(patches=lora(0)), "styled")
    run_once(sigmas=[0.7, 0.6], profile=load("styled"), patches=lora(0))
    run_once(sigmas=[0.7, 0.6], profile=load("styled"), patches=OTHER_LORAS[case])
    (same, _), (other, _) = runs[-2:]
    assert same.tally.sparse == other.tally.sparse == 2
    assert same.notes == []
    (note,) = other.notes
    assert "a finetune or a LoRA" in note


def test_another_length_is_measured(saved, run_once, runs, monkeypatch, load_pack):
    profile = saved.profile
    (table, settings), = profile.settings.items()  # fmt: skip
    longer = type(table.grid)(5, 8, 8)
    profile.settings[table._replace(tokens=longer.tokens, grid=longer)] = settings
    del profile.settings[table]
    run_once(sigmas=[0.7, 0.6], profile=saved)
    ((run, _),) = runs
    assert run.tally.reasons == {"measuring": 1}
    assert run.notes == [
        "The profile has nothing for 256 tokens of 2 heads, so this run measures them"
    ]


def test_a_profile_fits_where_only_the_text_is_longer(saved, run_once, runs, load_pack):
    profile, grid_of = saved.profile, load_pack("sparge").TokenGrid
    (table, settings), = profile.settings.items()  # fmt: skip
    assert table.grid == grid_of(4, 8, 8) and not table.text
    del profile.settings[table]
    for text in (20, 7):
        grid = grid_of(4, 8, 8, suffix=text)
        profile.settings[table._replace(tokens=TOKENS + text, grid=grid)] = settings
    patched = run_once(sigmas=[0.7, 0.6], profile=saved)
    ((run, _),) = runs
    assert (run.tally.sparse, run.tally.dense) == (2, 0)
    note = "The profile was measured with 7 tokens of text and is used for 0"
    assert run.notes == [note]
    hook = load_pack("nodes.hook").hook_of(patched)
    assert note in load_pack("nodes.report").summary(hook.last)
    assert hook.last.profile is None, "it measured nothing itself"


def test_choices_of_a_clip_are_not_used_where_no_grid_is_known(saved, run_once, runs):
    """A model with as many tokens and heads, whose tokens nobody can order."""
    (settings,) = saved.profile.settings.values()
    settings.order_kind[:] = 1
    run_once(sigmas=[0.7, 0.6], model=WanModel(), profile=saved)
    ((known, _),) = runs
    assert known.tally.reasons == {}
    heads = known.session.tables
    shape = heads.chosen[0].shape
    unordered = type(shape)(shape.tokens, shape.heads, None)
    table = type(heads.chosen[0])(
        unordered, settings.layers, heads.aim, known.asked, torch.device("cpu"), None, None, None
    )
    heads._use_profile(table)
    assert table.settings is None
    assert "The profile has nothing for 256 tokens of 2 heads" in known.notes[-1]


def test_manual_mode_has_no_use_for_one(saved, run_once, runs):
    run_once(mode="manual", profile=saved)
    ((run, _),) = runs
    assert run.notes == ["the profile clip has no effect in manual mode"]


@pytest.mark.parametrize("name", ["", "none", "../up", "a/b", "C:clip"])
def test_a_missing_or_unsafe_name_warns_and_the_run_measures(
    folder, load, run_once, runs, caplog, name
):
    found = load(name)
    assert found.profile is None
    assert found.problem in caplog.text
    run_once(sigmas=[0.7, 0.6], profile=found)
    ((run, _),) = runs
    assert run.tally.reasons == {"measuring": 1}
    assert run.notes == [f"{found.problem} This run measures"]


def test_a_file_that_was_written_since_is_read_again(saved, folder, load_pack):
    node = load_pack("nodes.sparge_profile_load").SpargeProfileLoad
    before = node.fingerprint_inputs("clip")
    assert before == node.fingerprint_inputs("clip.safetensors") != ""
    assert node.fingerprint_inputs("none") == node.fingerprint_inputs("../up") == ""
    (folder / "clip.safetensors").write_bytes(b"")
    assert node.fingerprint_inputs("clip") != before


@pytest.mark.parametrize("name", ["../up", "a/b", "con"])
def test_an_unsafe_name_saves_nothing_and_costs_nothing(folder, run_once, report, name):
    latent, text, _ = report(run_once(), name)
    assert latent == {"samples": 0}
    assert "No profile was saved" in text.splitlines()[-1]
    assert not folder.exists()


def test_nothing_measured_is_nothing_to_save(folder, run_once, report):
    _, text, _ = report(run_once(mode="manual"), "clip")
    assert text.endswith("No profile was saved: no head was measured, which takes an auto mode.")
    assert not folder.exists()


def test_whoever_is_in_an_auto_mode_is_not_told_to_take_one(folder, run_once, report):
    _, text, _ = report(run_once([0.9, 0.95]), "clip")
    assert text.endswith("No profile was saved: no head was measured.")
    assert not folder.exists()


def test_a_used_profile_is_told(saved, load_pack, run_once):
    summary, hook_of = load_pack("nodes.report").summary, load_pack("nodes.hook").hook_of
    used = summary(hook_of(run_once([0.7, 0.6], profile=saved)).last)
    assert "; heads as the profile clip has them, not measured; " in used + "; "
    for refused in ({"quality": "high"}, {"mode": "manual"}):
        told = summary(hook_of(run_once([0.7, 0.6], profile=saved, **refused)).last)
        assert "heads as the profile" not in told


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
    model = run_once()
    hook = load_pack("nodes.hook").hook_of(model)
    options = {"transformer_options": dict(model.transformer_options)}
    guider = SimpleNamespace(model_options=options, model_patcher=model)
    sampler = session(model, LATENT)._wrapped("outer_sample", guider, lambda *_: torch.zeros(ran))
    measured = hook.last
    sampler(None, None, None, torch.tensor([0.9, 0.0]))
    hook.last = measured
    latent = {"samples": torch.zeros(given)}
    _, text, _ = load_pack("nodes.sparge_report").SpargeReport.execute(model, latent, "clip")
    assert ("of an earlier run or changed since" in text) == other
    assert ("No profile was saved, for it would be of another run" in text) == other
    assert (folder / "clip.safetensors").exists() != other


def test_reports_without_a_run(report, patcher, load_pack):
    assert "did not go through" in report(patcher)[1]
    node = load_pack("nodes.sparge_attention").SpargeAttention
    latent, text, picture = report(node.execute(patcher)[0])
    assert "No sampler has run" in text
    assert latent == {"samples": 0} and picture.ndim == 4


def test_a_cancelled_run_is_reported_too(load_pack, session, patcher, report):
    patcher.model.diffusion_model = WanModel()
    node = load_pack("nodes.sparge_attention").SpargeAttention
    patched = node.execute(patcher, mode="auto quality", min_tokens=TOKENS)[0]

    def cancel(attend):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        session(patched, LATENT).sample(cancel, [0.5])
    assert "stopped before the first sparse step" in report(patched)[1].splitlines()[0]


NODES = {
    "SpargeProfileLoad": ("nodes.sparge_profile_load", ["name"], ["profile"]),
    "SpargeReport": (
        "nodes.sparge_report",
        ["model", "latent", "save_profile"],
        ["latent", "text", "picture"],
    ),
}


@pytest.mark.parametrize("name", NODES)
def test_the_faces_of_the_nodes(load_pack, name):
    module, inputs, outputs = NODES[name]
    schema = getattr(load_pack(module), name).define_schema()
    assert schema.node_id == name
    assert schema.category == "model/patch"
    assert [each.id for each in schema.inputs] == inputs
    assert [each.id for each in schema.outputs] == outputs
    assert all(each.tooltip for each in [*schema.inputs, *schema.outputs])
    for each in schema.inputs:
        if type(each).__name__ == "StringInput":
            assert "faster" in each.tooltip.lower() and "truer" in each.tooltip
