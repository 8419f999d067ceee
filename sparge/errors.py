# SPDX-License-Identifier: Apache-2.0
"""Errors that the library raises on purpose; every other exception is a bug or the machine's."""

from __future__ import annotations


class Unsupported(ValueError):
    """Error of a call that cannot be served here; ``reason`` is a sentence for the user. Its
    arguments are those of a `Reason`.

    Callers with a dense path catch this type. The ComfyUI nodes, which do not know what a model
    will send, catch others as well, and report those as errors.
    """

    # No __init__, and no Reason, which torch.compile could not trace into: compiled code may catch
    # this too.
    @property
    def reason(self) -> str:
        return self.args[0] if self.args else ""

    def __str__(self) -> str:
        return str(self.reason)


class KernelBuildError(RuntimeError):
    """Error of a kernel that cannot be built; ``log`` is what NVRTC said, empty where there is no
    NVRTC."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log
