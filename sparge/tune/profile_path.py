# SPDX-License-Identifier: Apache-2.0
"""Path of a profile by the name that a user types: in the profile folder and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".safetensors"
LONGEST_NAME = 100
LONGEST_BYTES = 200  # file systems take 255, with the suffix; a character may have four
#: Windows opens a device where a file is so named, whatever its suffix.
RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])\s*(\..*)?", re.I)
#: Separators, drives and streams, wildcards, what shells redirect with; control characters, and
#: halves of characters, which no file system takes.
REFUSED = re.compile(r'[/\\:*?"<>|\x00-\x1f\x7f\ud800-\udfff]')


class ProfileError(ValueError):
    """A profile cannot be read or written; the message is the sentence that a user reads."""


def profile_path(folder: Path, name: str) -> Path:
    """Returns the file of the profile `name` in `folder`, given with or without its suffix.

    Raises:
        ProfileError: the name could leave the folder, or is none that every system can have.
    """
    stem = name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name
    if not stem or len(stem) > LONGEST_NAME:
        complaint = f"has {len(stem)} characters; it takes 1 to {LONGEST_NAME}"
    elif found := REFUSED.search(stem):
        complaint = f"has the character {found[0]!r}, which file names cannot have everywhere"
    elif (count := len(stem.encode())) > LONGEST_BYTES:
        complaint = f"has {count} bytes; it takes {LONGEST_BYTES}"
    elif stem[0] in ". " or stem[-1] in ". ":
        complaint = "starts or ends with a dot or a space"
    elif RESERVED.fullmatch(stem):
        complaint = "is the name of a device on Windows"
    else:
        return folder / (stem + SUFFIX)
    raise ProfileError(f"The profile name {name!r} {complaint}. Use letters, digits, - and _.")
