# SPDX-License-Identifier: Apache-2.0
"""Map of a run that goes on, on the report nodes of its model."""

from __future__ import annotations

import time
from functools import cached_property

import torch

from ..sparge.tune import Session
from .host import drop_picture, nodes_behind, show_picture

#: Node id of the report.
REPORT = "SpargeAttentionReport"
#: Seconds between two pictures: drawing one takes a hundredth of that, in which the GPU rests.
SECONDS = 1.0


class LiveMap:
    """Picture of the steps that are over; never waits for the GPU. It goes when the last step
    begins, or with the run, to make room for the report's own."""

    def __init__(self, session: Session, steps: int, node_id: str | None) -> None:
        """steps: number of steps of the schedule. node_id: of the node that patched the model."""
        self._session, self._steps, self._node_id = session, steps, node_id
        self._next = 0.0

    def show(self, text: str) -> None:
        """Shows how far the run is, under a line that says so."""
        if time.perf_counter() < self._next or not self._reports:
            return
        densities = self._session.so_far()
        if densities is None or not len(layers := densities.layers):
            return
        try:
            from . import picture
        except ImportError:  # no Pillow
            return
        done = densities.by_step[layers]
        to_come = done.new_full((len(done), max(0, self._steps - done.shape[1])), torch.nan)
        by_step = torch.cat([done, to_come], 1)
        image = picture.so_far(text.replace(": ", "\n", 1), by_step, layers.tolist())
        for node in self._reports:
            show_picture(node, image)
        self._next = time.perf_counter() + SECONDS

    def drop(self) -> None:
        """Takes the picture from the nodes, where it is still there."""
        if self._next:
            self._next = 0.0
            for node in self._reports:
                drop_picture(node)

    @cached_property
    def _reports(self) -> list[str]:
        return list(nodes_behind(self._node_id, REPORT))
