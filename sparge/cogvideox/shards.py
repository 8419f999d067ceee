# SPDX-License-Identifier: Apache-2.0
"""Files that one model is published in."""

from __future__ import annotations

import re
from pathlib import Path

from .json_text import ConversionError

SUFFIX = ".safetensors"
_SHARD = re.compile(rf"(.+)-(\d{{5}})-of-(\d{{5}})({re.escape(SUFFIX)})", re.ASCII | re.IGNORECASE)
LISTED = 3  # missing files that an error names


def is_later_shard(name: str) -> bool:
    """Whether a file is one of several, and not the first."""
    return bool((found := _SHARD.fullmatch(name)) and int(found[2]) > 1)


def all_shards(path: Path) -> list[Path]:
    """Files in the folder of `path` that make one model with it, in order; `path` alone where its
    name counts no others.

    Raises ConversionError where one is missing.
    """
    if not (found := _SHARD.fullmatch(path.name)):
        return [path]
    stem, number, count, suffix = found.groups()
    if not 1 <= int(number) <= int(count):
        raise ConversionError(f"{path.name} counts files that cannot be: {number} of {count}")
    shards = [
        path.with_name(f"{stem}-{each:05}-of-{count}{suffix}") for each in range(1, int(count) + 1)
    ]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        raise ConversionError(
            f"{', '.join(missing[:LISTED])}{more} of the {len(shards)} files of this model"
            f" {'is' if len(missing) == 1 else 'are'} not beside it; put all of them in one folder"
        )
    return shards
