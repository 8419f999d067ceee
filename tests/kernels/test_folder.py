# SPDX-License-Identifier: Apache-2.0
"""Location of the user's cache, and folders that other users could put code into."""

from __future__ import annotations

import os
import sys

import pytest

from sparge.kernels.folder import cache_folder, distrust, make_folder

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
STRANGER = 12345
XDG = "XDG_CACHE_HOME"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch) -> None:
    for name in ("SPARGE_CACHE", XDG, "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"SPARGE_CACHE": "{}/mine"}, "mine"),
        ("linux", {"SPARGE_CACHE": "~/kernels"}, "kernels"),
        ("linux", {"SPARGE_CACHE": "~no-such-user-here/kernels"}, None),
        ("linux", {"SPARGE_CACHE": "relative"}, "relative"),
        ("linux", {}, ".cache/sparge"),
        ("linux", {XDG: "{}/set"}, "set/sparge"),
        *(("linux", {XDG: x}, ".cache/sparge") for x in ("", "../cache")),
        ("win32", {}, "AppData/Local/sparge"),
        ("win32", {"LOCALAPPDATA": "{}/set"}, "set/sparge"),
    ],
)
def test_the_users_folder(platform, variables, expected, tmp_path, monkeypatch):
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == (expected and tmp_path / expected)


@posix
def test_folders_that_others_may_write_or_own_are_not_trusted(tmp_path, monkeypatch):
    folder, link = tmp_path / "cache", tmp_path / "link"
    assert distrust(folder) == "", "nobody has made it yet"
    before = os.umask(0)
    try:
        make_folder(folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755
    link.symlink_to(folder)
    assert distrust(link) == ""
    for mode in (0o1777, 0o720, 0o702):
        folder.chmod(mode)
        assert "chmod go-w" in distrust(folder) and "chmod go-w" in distrust(link)
    folder.chmod(0o700)
    if os.geteuid() == 0:  # who else could give files away
        os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
        assert f"uid {STRANGER}" in distrust(link)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to another user (uid {owner})" in distrust(folder)
    folder.chmod(0o777)
    monkeypatch.delattr(os, "geteuid")
    assert distrust(folder) == "", "Windows has no such users"
