# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the `forward` of a module, for what has to be undone however a call ends.

torch runs no hook where an interrupt (Ctrl+C) or another BaseException ends a module's call, nor
where any error ends one that it compiled. A `forward` of ours may have `with`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..compiling import is_traced_whole


class StandIn:
    """Stand-in for a module's `forward`, until it is removed.

    Offloading puts functions of its own there, too, and may take ours away with them. So one is
    made where what it is for begins, over whatever is there, and removed at the end.
    """

    def __init__(
        self, module: nn.Module, around: Callable[..., AbstractContextManager[Any]]
    ) -> None:
        """around: takes the arguments of a call; gives what it runs in."""
        functools.update_wrapper(self, module.forward, updated=())  # others ask for its signature
        self._own: Callable[..., Any] = module.forward
        self._module, self._around = module, around
        self._before = vars(module).get("forward")
        self._is_removed = False
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_removed or is_traced_whole():
            return self._own(*args, **kwargs)
        with self._around(*args, **kwargs):
            # torch.compile runs what breaks within `with` as it is, and traces what it calls.
            torch._dynamo.graph_break()
            return self._own(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """State of the stand-in of a copy of the module, which only hands on."""
        return vars(self) | {"_is_removed": True, "_around": None}

    def remove(self) -> None:
        """Gives the module back what it had. Under another function that was put over it meanwhile
        it stays, and only hands on. Twice does no harm."""
        self._is_removed = True
        if vars(self._module).get("forward") is not self:
            return
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before
