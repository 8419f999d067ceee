# SPDX-License-Identifier: Apache-2.0
"""8-bit dense calls of a run. A model makes the same call in every layer: its launches are recorded
in the first one, which saves the host most of its time in the others."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..call import make_call
from ..compiling import being_recorded
from ..policy import EIGHT_BIT_DENSE
from ..stages import pipeline
from ..stages.launch import raw_stream
from ..stages.recorded import Recording, noting
from .calls import Call

_ALIGNMENT = 16  # bytes of a vector load


@dataclass(frozen=True, eq=False)
class _Recorded:
    """Recorded call, and the sizes of what it allocates."""

    recording: Recording
    workspace_bytes: int

    def run(self, call: Call, stream: int) -> Tensor:
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=call.q.device)
        out = call.empty_result()
        self.recording.run((*call.qkv, workspace, out), stream)
        return call.result(out)


class EightBitDense:
    """8-bit dense calls of a run, as `Call.eight_bit` computes them."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, _Recorded | None] = {}

    def attend(self, call: Call) -> Tensor:
        """Raises sparge.Unsupported where the library cannot serve the call."""
        device = call.q.device
        if device.type != "cuda" or _may_be_derived() or being_recorded(device):
            return call.eight_bit()
        stream = raw_stream(device.index)
        kind = _kind(call, stream)
        if kind not in self._recorded:
            out, self._recorded[kind] = _record(call)
            return out
        recorded = self._recorded[kind]
        if recorded is not None:
            with suppress(torch.OutOfMemoryError):  # groups of heads may fit
                return recorded.run(call, stream)
        return call.eight_bit()


def _may_be_derived() -> bool:
    """Whether a derivative may be wanted, which only a call that is checked refuses."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def _kind(call: Call, stream: int) -> Hashable:
    """Kind of a call, which its launches follow from, and the stream that fills its block map."""
    tensors = ((x.shape, x.stride(), x.dtype, x.data_ptr() % _ALIGNMENT) for x in call.qkv)
    return (*tensors, call.q.device, call.scale, call.layout, stream)


def _record(call: Call) -> tuple[Tensor, _Recorded | None]:
    """Result of a call, and its recording; None where it takes more than a run of the stages."""
    q, k, v = call.qkv
    checked = make_call(q, k, v, EIGHT_BIT_DENSE, "HND", False, call.scale, None, None)
    if not pipeline.has_kernels(checked) or not pipeline.fits(checked):
        return call.eight_bit(), None
    out = call.empty_result()
    with noting() as launches:
        workspace = pipeline.quantize(checked)
        block_map = pipeline.full_map(checked)
        pipeline.attend(checked, workspace, block_map, out)
    recording = Recording.of(launches, (*call.qkv, workspace, out), (block_map,))
    recorded = None if recording is None else _Recorded(recording, workspace.nbytes)
    return call.result(out), recorded
