# SPDX-License-Identifier: Apache-2.0
"""Errors of this pack where a model would run without it.

The call is dense, counted, and in the log. What a model sends is not in our hands, so a shape that
nobody thought of must not cost a user the picture. Nor must it go unseen: whoever reads the log
finds the error with its traceback.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger("sparge")

#: A framework makes room and tries again; and after an error of the device nothing runs on it.
MEANT_FOR_HOST: tuple[type[Exception], ...] = (
    torch.OutOfMemoryError,
    *filter(None, [getattr(torch, "AcceleratorError", None)]),
)


class Failures:
    """Errors of this pack in one run. Each kind is logged once: a layer that fails does so in every
    step."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, outcome: str, error: Exception) -> None:
        """Logs an error. outcome: what became of the call, for the user."""
        text = (
            f"{outcome}, because of an error of Sparge Attention: {type(error).__name__}: {error}"
        )
        with self._lock:
            if text in self._told:
                return
            self._told.add(text)
        logger.error("[Sparge] %s. Please report it.", text.rstrip("."), exc_info=error)

    @contextmanager
    def caught(self, outcome: str) -> Iterator[None]:
        """Context around work that the model can do without."""
        try:
            yield
        except MEANT_FOR_HOST:
            raise
        except Exception as error:
            self.tell(outcome, error)
