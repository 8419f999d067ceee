# SPDX-License-Identifier: Apache-2.0
"""Profiles: what goes in comes out, and nothing else comes in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparge import TokenGrid
from sparge.tune import Fingerprint, Fit, Profile, ProfileError, Table, profile_path
from tests.tune.profiles import GRID, KEY, metadata_of, same_bits, settings


def test_round_trip(profile: Profile, tmp_path: Path) -> None:
    path = profile_path(tmp_path / "new folder", "mine")
    profile.save(path)
    found = Profile.load(path)
    assert list(found.settings) == list(profile.settings)
    for table, expected in profile.settings.items():
        assert same_bits(found.settings[table], expected)
    assert (found.mode, found.asked, found.created) == ("budget", 0.2, "2026-11-21T19:00:00Z")
    assert found.notes == profile.notes
    assert found.fits(profile.fingerprint).fit is Fit.FITS
    again = found.settings[Table("cond", 18444)]
    head_settings = again.head_settings(0)
    assert head_settings is not None and head_settings.floor == 2
    assert again.head_settings(1) is None
    assert [x.name for x in path.parent.iterdir()] == ["mine.safetensors"]


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def set_tensor(name: str, value: torch.Tensor) -> Change:
    return lambda tensors, header: tensors.__setitem__(name, value)


def set_header(name: str, value: object) -> Change:
    return lambda tensors, header: header.__setitem__(name, value)


def set_grid(name: str, value: object) -> Change:
    return lambda tensors, header: header["tables"][1]["grid"].__setitem__(name, value)


def row(tokens: int) -> dict[str, Any]:
    return {"conditioning": "c", "tokens": tokens, "floor": 1, "grid": None}


def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((3, 4), value, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            set_tensor("0.density", full(1.5)),
            "0.density goes from 1.5 to 1.5; it takes 0 to 1",
        ),
        (set_tensor("0.density", full(-0.1)), "0.density goes from"),
        (
            set_tensor("1.pool_weight", full(float("nan"))),
            "1.pool_weight holds a value that is not finite",
        ),
        (set_tensor("0.pool_weight", full(-1.0)), "0.pool_weight goes from -1"),
        (set_tensor("0.output_scale", full(1, torch.float64)), "has type torch.float64"),
        (set_tensor("1.output_scale", full(0)), "1.output_scale goes from 0 to 0"),
        (set_tensor("0.output_scale", full(1e4)), "0.output_scale goes from 10000"),
        (set_tensor("0.order_kind", full(2, torch.int32)), "0.order_kind goes from 2 to 2"),
        (
            set_tensor("0.order_kind", full(1, torch.int64)),
            "0.order_kind has type torch.int64",
        ),
        (set_tensor("0.error", torch.zeros(12)), r"0.error has .* shape \(12,\)"),
        (
            set_tensor("0.error", torch.zeros(2, 4)),
            r"0.error has shape \(2, 4\) beside \(3, 4\)",
        ),
        (
            set_tensor("0.measured", torch.ones(2).bool()),
            r"0.measured has shape \(2,\)",
        ),
        (set_tensor("0.density", torch.zeros(0, 4)), "0.density is empty"),
        (set_tensor("0.head_weight", full(-0.5)), "0.head_weight goes from -0.5"),
        (set_tensor("0.spare", torch.zeros(1)), "has a tensor '0.spare'"),
        (set_tensor("2.density", full(1.0)), "has a tensor '2.density'"),
        (set_tensor("norm.q", torch.zeros(65)), "norm.q has .* up to 64"),
        (set_tensor("norm.q", torch.full((64,), torch.nan)), "norm.q holds"),
        (lambda tensors, header: tensors.pop("1.order_kind"), "no tensor 1.order"),
        (lambda tensors, header: tensors.pop("0.measured"), "no tensor 0.measured"),
        (
            set_header("version", 2),
            "version 2 and only version 1 is read: measure anew and save again",
        ),
        (set_header("version", True), "version = True"),
        (set_grid("frames", 0), "grid of the profile is none: frames is 0"),
        (set_grid("prefix", True), "grid has prefix = True"),
        (set_grid("width", 9.0), "grid has width = 9.0"),
        (set_grid("width", 9), "has 340 tokens, and its grid 308"),
        (set_grid("spare", 9), "grid has .*'spare'"),
        (lambda tensors, header: header["tables"][1].pop("grid"), "table has"),
        (lambda tensors, header: header["tables"][1]["grid"].pop("suffix"), "grid has"),
        (lambda tensors, header: header["tables"][1].update(grid=[4, 8, 10]), r"grid = \[4, 8"),
        (set_header("spare", 1), "header has .*'spare'"),
        (lambda tensors, header: header.pop("mode"), "header has"),
        (set_header("mode", "fast"), "mode is 'fast'"),
        (set_header("asked", 0), "asks for 0"),
        (set_header("asked", float("nan")), "asks for nan"),
        (set_header("asked", True), "asked = True"),
        (set_header("architecture", 7), "architecture = 7"),
        (set_header("notes", {"a": 1}), "not text"),
        (set_header("tables", []), "no table"),
        (set_header("tables", [{"conditioning": "c", "tokens": 5}]), "table has"),
        (set_header("tables", [row(0)]), "from 1"),
        (set_header("tables", [row(5) | {"floor": 2}]), "its floor is more key blocks"),
        (set_header("tables", [row(5)] * 2), "two for"),
        (lambda tensors, header: header["tables"].append(row(5)), "no tensor 2.density"),
    ],
)
def test_what_is_not_as_it_must_be_is_refused(
    profile: Profile, tmp_path: Path, change: Change, complaint: str
) -> None:
    path = profile_path(tmp_path, "a")
    profile.save(path)
    tensors = load_file(path)
    header = json.loads(metadata_of(path))
    change(tensors, header)
    save_file(tensors, path, {KEY: json.dumps(header)})
    with pytest.raises(ProfileError, match=complaint):
        Profile.load(path)


def table(grid: TokenGrid) -> Table:
    return Table("shared", grid.tokens, grid)


@pytest.fixture
def of_texts(profile: Profile, generator: torch.Generator) -> Profile:
    """Profile of one grid with 7 and 20 tokens of text, and of a wider one with 5."""
    grids = (replace(GRID, suffix=7), GRID, TokenGrid(4, 8, 12, suffix=5))
    return replace(profile, settings={table(grid): settings(generator) for grid in grids})


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        (GRID, 20),
        (replace(GRID, suffix=7), 7),
        (replace(GRID, suffix=0), 7),
        (replace(GRID, suffix=13), 7),
        (replace(GRID, suffix=14), 20),
        (replace(GRID, suffix=500), 20),
        (replace(GRID, prefix=10, suffix=10), 7),
        (TokenGrid(4, 8, 12, prefix=9), 5),
        (TokenGrid(4, 10, 8, suffix=20), None),  # as many tokens, turned
        (TokenGrid(4, 10, 8, suffix=21), None),
        (replace(GRID, lead_frames=1, suffix=21), None),
        (TokenGrid(5, 8, 10, suffix=20), None),
    ],
)
def test_the_nearest_text_of_a_grid_is_taken(
    of_texts: Profile, grid: TokenGrid, text: int | None
) -> None:
    found = of_texts.nearest(table(grid), 3, 4)
    assert (found and found[0].text) == text
    assert found is None or found[1] is of_texts.settings[found[0]]
    assert of_texts.nearest(table(grid)._replace(conditioning="cond"), 3, 4) is None
    for layers, heads in ((2, 4), (3, 5)):
        assert of_texts.nearest(table(grid), layers, heads) is None


def test_only_choices_of_one_order_fit_tokens_without_a_grid(
    of_texts: Profile, generator: torch.Generator
) -> None:
    wanted, without = Table("shared", GRID.tokens), settings(generator)
    assert of_texts.nearest(wanted, 3, 4) is None, "measured in a grid"
    profile = replace(of_texts, settings={wanted: without})
    assert profile.nearest(wanted, 3, 4) is None
    without.order_kind.zero_()
    assert profile.nearest(wanted, 3, 4) == (wanted, without)
    assert profile.nearest(wanted._replace(tokens=GRID.tokens + 1), 3, 4) is None
    assert profile.nearest(table(GRID), 3, 4) is None, "measured without a grid"


def test_other_files_are_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(ProfileError, match=r"no profile a\.safetensors"):
        Profile.load(path)
    with pytest.raises(ProfileError, match="cannot be read"):
        Profile.load(tmp_path / ("x" * 300))
    path.write_bytes(b"not at all")
    with pytest.raises(ProfileError, match="no safetensors file"):
        Profile.load(path)
    profile.save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ProfileError, match="no safetensors file"):
        Profile.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ProfileError, match="no profile of heads"):
        Profile.load(path)
    for text, complaint in (("{", "no JSON"), ("[]", "version None"), ("[" * 9999, "no JSON")):
        save_file({"x": torch.zeros(1)}, path, {KEY: text})
        with pytest.raises(ProfileError, match=complaint):
            Profile.load(path)
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ProfileError, match="at most"):
        Profile.load(path)


def test_a_failed_write_leaves_the_old_profile(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile_path(tmp_path, "a")
    profile.save(path)
    before = path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(ProfileError, match="No space left"):
        replace(profile, asked=0.3).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o644), (0o077, 0o600)])
def test_whoever_shares_the_folder_may_read(
    profile: Profile, tmp_path: Path, umask: int, mode: int
) -> None:
    path = profile_path(tmp_path, "a")
    before = os.umask(umask)
    try:
        profile.save(path)
        assert path.stat().st_mode & 0o7777 == mode
        path.chmod(0o600)
        profile.save(path)
        assert path.stat().st_mode & 0o7777 == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize("place", ["architecture", "created", "conditioning", "notes", "key"])
def test_halves_of_characters_are_refused(profile: Profile, tmp_path: Path, place: str) -> None:
    """A report could not show them. JSON has an escape for them, which every reader takes."""
    path = profile_path(tmp_path, "a")
    profile.save(path)
    header, tensors = json.loads(metadata_of(path)), load_file(path)
    half = "Wan\ud83d"
    if place == "conditioning":
        header["tables"][0]["conditioning"] = half
    elif place in ("notes", "key"):
        header["notes"] = {half: "x"} if place == "key" else {"model": half}
    else:
        header[place] = half
    save_file(tensors, path, {KEY: json.dumps(header)})
    with pytest.raises(ProfileError, match="half of a character") as refused:
        Profile.load(path)
    assert str(refused.value).encode()
    whole = json.dumps(header).replace("\\ud83d", "\\ud83d\\ude00")
    save_file(tensors, path, {KEY: whole})
    assert Profile.load(path)


def test_halves_of_characters_are_not_saved(profile: Profile, tmp_path: Path) -> None:
    path = profile_path(tmp_path, "a")
    with pytest.raises(ProfileError, match="half of a character"):
        replace(profile, notes={"model": "\udfff"}).save(path)
    assert not path.exists()


def test_an_answer_for_every_model(generator: torch.Generator) -> None:
    norms = {"norm.q": torch.rand(48, generator=generator) + 0.5, "norm.k": torch.ones(100)}
    here = Fingerprint.of("WanModel", norms)
    profile = Profile(here, {}, "quality", 0.05)
    for model, fit, words in (
        (here, Fit.FITS, "was measured on this WanModel"),
        (Fingerprint.of("WanModel", {n: x.bfloat16() for n, x in norms.items()}), Fit.FITS, ""),
        (
            Fingerprint.of("WanModel", norms | {"norm.k": torch.ones(100) * 1.02}),
            Fit.DIFFERENT_WEIGHTS,
            "norm.k differs",
        ),
        (
            Fingerprint.of("WanModel", norms | {"norm.q": torch.ones(40)}),
            Fit.OTHER_MODEL,
            "another size",
        ),
        (Fingerprint.of("WanModel", {"norm.q": norms["norm.q"]}), Fit.OTHER_MODEL, "another size"),
        (Fingerprint.of("Flux", norms), Fit.OTHER_MODEL, "on WanModel and this model is Flux"),
    ):
        verdict = profile.fits(model)
        assert verdict.fit is fit
        assert words in verdict.sentence
        assert verdict.usable == (fit is not Fit.OTHER_MODEL)
