# SPDX-License-Identifier: Apache-2.0
"""Location of the user's cache, and folders that other users could put code into."""

from __future__ import annotations

import os
import sys

import pytest

from sparge.kernels.folder import cache_folder, distrust, is_private, make_folder

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
root = pytest.mark.skipif(
    os.name == "nt" or os.geteuid() != 0, reason="needs root, to give files away"
)
STRANGER = 12345
VARIABLES = ("SPARGE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA")


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"SPARGE_CACHE": "{}/mine"}, "mine"),
        ("linux", {"SPARGE_CACHE": "~/kernels"}, "kernels"),
        ("linux", {"SPARGE_CACHE": "~no-such-user-here/kernels"}, None),
        ("linux", {"SPARGE_CACHE": "relative"}, "relative"),
        ("linux", {}, ".cache/sparge"),
        ("linux", {"XDG_CACHE_HOME": "{}/set"}, "set/sparge"),
        *(("linux", {"XDG_CACHE_HOME": x}, ".cache/sparge") for x in ("", "cache", "../cache")),
        ("darwin", {}, "Library/Caches/sparge"),
        ("win32", {}, "AppData/Local/sparge"),
        ("win32", {"LOCALAPPDATA": "{}/set"}, "set/sparge"),
    ],
)
def test_the_users_folder(platform, variables, expected, tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == (expected and tmp_path / expected)


@posix
@pytest.mark.parametrize("home", ["", "relative/home"])
def test_a_home_that_is_none_is_that_of_the_account(home, monkeypatch, tmp_path):
    import pwd

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", home)
    accounts = {os.getuid(): type("Account", (), {"pw_dir": str(tmp_path)})}
    monkeypatch.setattr(pwd, "getpwuid", accounts.__getitem__)
    assert cache_folder() == tmp_path / ".cache" / "sparge"
    accounts.clear()
    assert cache_folder() is None


@posix
@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_a_folder_made_here_is_trusted_whatever_the_umask(umask, tmp_path):
    folder = tmp_path / "cache"
    before = os.umask(umask)
    try:
        make_folder(folder)
    finally:
        os.umask(before)
    assert distrust(folder) == "" and is_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o755 & ~umask


@posix
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777, 0o720, 0o702])
def test_a_folder_that_others_may_write_is_not_trusted(mode, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    assert "chmod go-w" in distrust(folder) and not is_private(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert "chmod go-w" in distrust(link)


@posix
def test_a_folder_of_another_user_is_not_trusted(tmp_path, monkeypatch):
    assert distrust(tmp_path / "none") == "", "nobody has made it yet"
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to another user (uid {owner})" in distrust(tmp_path)
    assert not is_private(tmp_path)


@root
def test_neither_is_a_link_of_another_user(tmp_path):
    (tmp_path / "cache").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "cache")
    assert distrust(link) == ""
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert f"uid {STRANGER}" in distrust(link)


def test_windows_has_no_users_to_ask_about(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "geteuid", raising=False)
    tmp_path.chmod(0o777)
    assert distrust(tmp_path) == "" and is_private(tmp_path)


@posix
def test_a_folder_is_private_when_nobody_can_swap_it_or_lead_out_of_it(tmp_path):
    above = tmp_path / "above"
    folder = above / "graph"
    folder.mkdir(parents=True)
    assert is_private(folder)
    above.chmod(0o777)
    assert not is_private(folder), "somebody could rename it"
    above.chmod(0o1777)
    assert is_private(folder), "as in /tmp: owners alone rename"
    above.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert not is_private(link)
    (folder / "log").write_text("")
    assert is_private(folder)
    (tmp_path / "theirs").write_text("")
    os.link(tmp_path / "theirs", folder / "hard")
    assert not is_private(folder)
    (folder / "hard").unlink()
    (folder / "soft").symlink_to(tmp_path / "theirs")
    assert not is_private(folder)
