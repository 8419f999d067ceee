# SPDX-License-Identifier: Apache-2.0
"""Choices on disk: a small safetensors file whose metadata says what was measured and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..common.whole_file import write_whole
from .fingerprint import Fingerprint, Verdict
from .profile_header import Header, Table
from .profile_path import ProfileError
from .profile_tables import checked_choices, checked_norm, tensors_of
from .settings_table import SettingsTable

METADATA_KEY = "sparge_profile"
LARGEST = 16 << 20  # bytes; 100 layers of 64 heads at ten token counts are 4 MB
NORM = "norm."  # begins the names of norm tensors; settings are "0.density", "1.pool_weight"


@dataclass(frozen=True, eq=False)
class Profile:
    """Choices by conditioning and tokens, and the model they were measured on."""

    fingerprint: Fingerprint
    settings: Mapping[Table, SettingsTable]
    mode: str
    """Meaning of `asked`: "quality" for a target error, "budget" for a mean density."""
    asked: float
    created: str = ""
    """Date and time in ISO 8601."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Further facts for a reader: model file, sampler, steps."""

    def fits(self, model: Fingerprint) -> Verdict:
        """Whether this profile holds for `model`; the verdict's sentence is for the user."""
        return model.compare(self.fingerprint)

    def nearest(self, wanted: Table, layers: int, heads: int) -> tuple[Table, SettingsTable] | None:
        """Returns the settings that fit a call of so many layers and heads best, and the table they
        were measured for.

        Choices are shares, so those of one text length hold for others: of the same grid the
        nearest one is taken, first of all the same. Without a grid the count of tokens has to be
        the same, and there is one token order, so settings must not take others.
        """
        fits = {
            table: settings
            for table, settings in self.settings.items()
            if settings.density.shape == (layers, heads)
        }
        apart = {table: wanted.differs_in_text_by(table) for table in fits}
        of_grid = [(texts, table) for table, texts in apart.items() if texts is not None]
        if of_grid:
            _, table = min(of_grid, key=lambda found: found[0])
            return table, fits[table]
        settings = fits.get(wanted)
        return None if settings is None or settings.order_kind.any() else (wanted, settings)

    def save(self, path: Path) -> None:
        """Writes to `path` at once or not at all.

        Raises:
            ProfileError: the file cannot be written.
        """
        tensors: dict[str, Tensor] = {
            NORM + name: norm.contiguous() for name, norm in self.fingerprint.norms.items()
        }
        for index, settings in enumerate(self.settings.values()):
            tensors |= {f"{index}.{name}": x for name, x in tensors_of(settings).items()}
        header = Header(
            self.fingerprint.architecture,
            tuple(self.settings),
            tuple(settings.floor for settings in self.settings.values()),
            self.mode,
            self.asked,
            self.created,
            dict(self.notes),
        )
        data = save(tensors, {METADATA_KEY: header.to_json()})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
        except OSError as error:
            raise ProfileError(f"The profile {path.name} cannot be written: {error}.") from error

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads `path`, believing nothing in it.

        Raises:
            ProfileError: there is no such file, or it is no profile; the message says why.
        """
        tensors, header = _read(path)
        settings = {
            table: checked_choices(tensors, f"{index}.", floor)
            for index, (table, floor) in enumerate(zip(header.tables, header.floors, strict=True))
        }
        norms = {
            name.removeprefix(NORM): checked_norm(name, tensors.pop(name))
            for name in sorted(tensors)
            if name.startswith(NORM)
        }
        if tensors:
            raise ProfileError(
                f"The profile {path.name} has a tensor {min(tensors)!r}, which it does not take."
            )
        return cls(
            Fingerprint(header.architecture, norms),
            settings,
            header.mode,
            header.asked,
            header.created,
            header.notes,
        )


def _read(path: Path) -> tuple[dict[str, Tensor], Header]:
    try:
        if not path.is_file():
            raise ProfileError(f"There is no profile {path.name} in {path.parent.name}.")
        if (size := path.stat().st_size) > LARGEST:
            raise ProfileError(f"{path.name} has {size} bytes; a profile has at most {LARGEST}.")
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise ProfileError(f"{path.name} is no safetensors file: {error}.") from error
    except OSError as error:
        raise ProfileError(f"{path.name} cannot be read: {error}.") from error
    if set(metadata) != {METADATA_KEY}:
        raise ProfileError(f"{path.name} is a safetensors file but no profile of heads.")
    return tensors, Header.from_json(metadata[METADATA_KEY])
