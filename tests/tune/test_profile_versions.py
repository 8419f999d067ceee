# SPDX-License-Identifier: Apache-2.0
"""Files of earlier versions: read, checked, and used as they were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparge.tune import Profile, ProfileError, Table, profile_path
from tests.tune.profiles import GRID, KEY, metadata_of, same_bits


def save_as_version(version: int, profile: Profile, path: Path) -> None:
    """Nothing of contrasts; before version 3 one set of choices for all steps, those of steps that
    pool, and nothing of loudness."""
    profile.save(path)
    old = {x: tensor for x, tensor in load_file(path).items() if not x.endswith(".contrast")}
    if version < 3:
        old = {
            name.replace(".pooling.", "."): tensor
            for name, tensor in old.items()
            if ".dropping." not in name and not name.endswith(".loudness")
        }
    header = json.loads(metadata_of(path)) | {"version": version}
    for table in header["tables"] if version == 1 else ():
        del table["grid"]
    save_file(old, path, {KEY: json.dumps(header)})


@pytest.mark.parametrize("version", [1, 2])
def test_choices_of_earlier_versions_are_for_both_kinds(
    profile: Profile, tmp_path: Path, version: int
) -> None:
    path = profile_path(tmp_path, "a")
    save_as_version(version, profile, path)
    found = Profile.load(path)
    assert len(found.choices) == len(profile.choices)
    for again, before in zip(found.choices.values(), profile.choices.values(), strict=True):
        ones = torch.ones(3, 4)
        expected = replace(before.pooling, loudness=ones, contrast=ones)
        assert bool(expected.gain.any()), "the residual in all steps, as it was"
        for step in range(4):
            assert same_bits(again.in_turn(step), expected)
    found.save(path)
    assert json.loads(metadata_of(path))["version"] == 5
    for before, again in zip(
        found.choices.values(), Profile.load(path).choices.values(), strict=True
    ):
        assert same_bits(before.dropping, again.dropping)


@pytest.mark.parametrize("version", [3, 4])
def test_files_of_later_versions_have_no_contrast(
    profile: Profile, tmp_path: Path, version: int
) -> None:
    path = profile_path(tmp_path, "a")
    save_as_version(version, profile, path)
    found = Profile.load(path)
    for table, before in profile.choices.items():
        for step in range(2):
            kind = before.in_turn(step)
            expected = replace(kind, contrast=torch.ones_like(kind.contrast))
            assert same_bits(found.choices[table].in_turn(step), expected)
    tensors = load_file(path)
    del tensors["1.dropping.density"]
    save_file(tensors, path, {KEY: metadata_of(path)})
    with pytest.raises(ProfileError, match=r"no tensor 1\.dropping\.density"):
        Profile.load(path)


@pytest.mark.parametrize("missing", ["density", "gain", "measured"])
def test_earlier_versions_are_checked_too(profile: Profile, tmp_path: Path, missing: str) -> None:
    path = profile_path(tmp_path, "a")
    save_as_version(2, profile, path)
    tensors = load_file(path)
    del tensors[f"0.{missing}"]
    save_file(tensors, path, {KEY: metadata_of(path)})
    with pytest.raises(ProfileError, match=f"no tensor 0.{missing}"):
        Profile.load(path)


def test_files_of_version_1_are_read(profile: Profile, tmp_path: Path) -> None:
    path = profile_path(tmp_path, "a")
    save_as_version(1, profile, path)
    found = Profile.load(path)
    assert list(found.choices) == [Table("cond", 18444), Table("uncond", 340)]
    for layers, tokens, fits in ((3, 340, True), (3, 341, False), (2, 340, False)):
        grid = replace(GRID, suffix=tokens - 320)
        assert (found.nearest(Table("uncond", tokens, grid), layers, 4) is not None) == fits


def test_grids_of_files_that_know_of_no_tail_have_none(profile: Profile, tmp_path: Path) -> None:
    path = profile_path(tmp_path, "a")
    profile.save(path)
    header = json.loads(metadata_of(path))
    for table in header["tables"]:
        if table["grid"] is not None:
            assert table["grid"].pop("tail") == 0
    save_file(load_file(path), path, {KEY: json.dumps(header)})
    assert list(Profile.load(path).choices) == list(profile.choices)
