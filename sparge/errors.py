# SPDX-License-Identifier: Apache-2.0
"""What the library raises on purpose; every other exception is a bug or the machine's."""

from __future__ import annotations


class Unsupported(ValueError):
    """The call cannot be served here; ``reason`` is a sentence written for the user.

    Callers with a dense path (the ComfyUI nodes) catch this type, and only this type.
    """

    # No __init__, which torch.compile could not trace into: compiled code may catch this too.
    @property
    def reason(self) -> str:
        return self.args[0] if self.args else ""


class KernelBuildError(RuntimeError):
    """A kernel cannot be built; ``log`` is what NVRTC said, empty where there is no NVRTC."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log
