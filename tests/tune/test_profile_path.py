# SPDX-License-Identifier: Apache-2.0
"""Names of profiles: to a file in their folder on every system, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparge.tune import ProfileError, profile_path


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "../x",
            "a/b",
            "a\\b",
            "C:x",
            ".hidden",
            "..",
            "x.",
            "x ",
            "a\nb",
            "a\0b",
            'a"b',
            "a*",
        ),
        *("con", "NUL", "nul.txt", "Com1", "LPT9.safetensors", "com¹", "aux .x", "x" * 101),
        *("\ud800", "😀" * 51),
    ],
)
def test_names_that_leave_the_folder_or_a_system(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProfileError, match="The profile name"):
        profile_path(tmp_path, name)


@pytest.mark.parametrize(
    "name", ["wan 14b", "wan-2.2_high.v1", "console", "été", "x" * 100, "网" * 66]
)
def test_names_that_are_fine(tmp_path: Path, name: str) -> None:
    expected = tmp_path / f"{name}.safetensors"
    assert profile_path(tmp_path, name) == expected
    assert profile_path(tmp_path, expected.name) == expected
