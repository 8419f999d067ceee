# SPDX-License-Identifier: Apache-2.0
"""Attention calls, prepared once and launched often.

A kind of calls makes a `PreparedCall`: kernels loaded, parameter blocks filled but for addresses,
sizes of what is allocated. A run allocates, writes the addresses into a copy of the blocks and
queues the launches, so threads and streams share it.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Hashable, Iterator
from ctypes import Structure, c_void_p, sizeof

import torch
from torch import Tensor

from ..errors import Unsupported
from ..kernels import Kernel, capabilities, load_all
from .kind import CallKind, CallRules, CallTensors, result_size
from .launches import RESULTS, Launches, raw_stream

#: Workspace that a call may take, as a share of q + k + v; beyond it heads are served in groups.
MEMORY_SHARE = 0.55
#: Least bytes for which a call is split: padding alone outgrows the share in tiny calls.
MEMORY_FLOOR = 1 << 20
#: Most kinds of calls that are kept, of 7 KiB each. None holds a caller's tensor.
MOST_KEPT = 512

_WORD = sizeof(c_void_p)
#: What a run has addresses of, in the order in which it looks them up. Blocks are the array of all
#: parameter blocks itself, to which kernels' arguments point.
_PLACES = (*CallTensors._fields, "workspace", *RESULTS, "blocks")
#: While blocks are filled an address is the number of its place, from 1, times this and an offset.
_PLACE = 1 << 48
_STAND_INS = {name: number * _PLACE for number, name in enumerate(_PLACES, 1)}

_kept: dict[Hashable, PreparedCall] = {}
_keeping = threading.Lock()
find = _kept.get


def prepare(key: Hashable, tensors: CallTensors, rules: CallRules) -> PreparedCall:
    """Prepares calls of a kind, by one of them that was checked, with tensors (B, H, N, D), on a
    GPU that has kernels. Raises Unsupported and KernelBuildError."""
    kind = CallKind.of(tensors, rules)
    prepared = PreparedCall(kind, capabilities(kind.device).arch)
    with _keeping:
        while len(_kept) >= MOST_KEPT:
            del _kept[next(iter(_kept))]
        return _kept.setdefault(key, prepared)


class PreparedCall:
    """Launches of all calls of one kind. A run changes nothing of it."""

    def __init__(self, kind: CallKind, arch: str) -> None:
        launches = Launches(kind, arch)
        self.kind, self.layout = kind, launches.layout
        self._arch, self._device_index = arch, kind.device.index or 0
        load_all(launches.specs, self._device_index)
        shape = kind.shape
        self._lse_size = (shape.batch, shape.heads, kind.query_tokens)
        self._out_size = result_size(kind.rules.out_layout, (*self._lse_size, shape.channels))
        self._group = _heads_at_once(kind, self.layout.nbytes)
        self._parts: dict[int, PreparedCall] = {}
        results = {"out", "lse"} if kind.rules.with_lse else {"out"}
        launches.addresses = {name: _STAND_INS[name] for name in kind.given | results}
        launches.addresses |= self.layout.addresses(_STAND_INS["workspace"])
        #: Parameter blocks, each with a word behind it for its own address.
        self._words = array("Q")
        #: Index of each word that is an address, of its place, and bytes from there.
        self._addresses: list[tuple[int, int, int]] = []
        #: Kernel, grid, dynamic shared memory, and bytes from the array's start to the address of
        #: its parameter block.
        self._launches: list[tuple[Kernel, tuple[int, int, int], int, int]] = []
        for kernel, grid, params, extra_shared in launches:
            kernel.allow_shared(extra_shared)
            self._add(params)
            self._launches.append((kernel, grid, extra_shared, (len(self._words) - 1) * _WORD))

    def _add(self, params: Structure) -> None:
        first = len(self._words)
        self._words.frombytes(bytes(params))
        for word in _address_words(type(params), first):
            if self._words[word]:
                place, offset = divmod(self._words[word], _PLACE)
                self._addresses.append((word, place - 1, offset))
        self._addresses.append((len(self._words), _PLACES.index("blocks"), first * _WORD))
        self._words.append(0)

    def run(self, tensors: CallTensors, layout: str = "HND") -> tuple[Tensor, Tensor | None]:
        """Result in the layout that was asked for, and log-sum-exps (B, H, Nq) where they were.

        layout: that of q, k and v. Raises Unsupported where there is no memory for one head.
        """
        device, rules, kv_heads = self.kind.device, self.kind.rules, self.kind.shape.kv_heads
        out = torch.empty(self._out_size, dtype=rules.out_dtype, device=device)
        lse = None
        if rules.with_lse:
            lse = torch.empty(self._lse_size, dtype=torch.float32, device=device)
        group = self._group
        if group == kv_heads:
            try:
                self.queue(tensors, out, lse)
                return out, lse
            except torch.OutOfMemoryError as error:
                if group == 1:
                    raise self._no_memory() from error
                group = (group + 1) // 2
        if layout != "HND":
            q, k, v = (x.transpose(1, 2) for x in tensors[:3])
            tensors = tensors._replace(q=q, k=k, v=v)
        by_head = out if rules.out_layout == "HND" else out.transpose(1, 2)
        self._run_in_groups(tensors, by_head, lse, group)
        return out, lse

    def queue(self, tensors: CallTensors, out: Tensor, lse: Tensor | None) -> Tensor:
        """Queues the launches of all heads on torch's current stream; gives the workspace. `out` is
        memory with the strides of the result."""
        workspace = torch.empty(self.layout.nbytes, dtype=torch.uint8, device=self.kind.device)
        stream = raw_stream(self._device_index)
        words = self._words[:]
        blocks, _ = words.buffer_info()
        places = [0 if x is None else x.data_ptr() for x in (*tensors, workspace, out, lse)]
        places.append(blocks)
        for word, place, offset in self._addresses:
            words[word] = places[place] + offset
        for kernel, grid, extra_shared, pointer in self._launches:
            kernel.launch(grid, blocks + pointer, extra_shared, stream)
        return workspace

    def _run_in_groups(
        self, tensors: CallTensors, out: Tensor, lse: Tensor | None, group: int
    ) -> None:
        """Runs so many KV heads at a time, fewer where memory is short. Tensors and `out` are (B,
        H, N, D)."""
        kv_heads, first = self.kind.shape.kv_heads, 0
        shared_by = self.kind.shape.heads // kv_heads
        while first < kv_heads:
            last = min(first + group, kv_heads)
            heads = slice(first * shared_by, last * shared_by)
            part = self._parts.get(last - first)
            if part is None:
                part = PreparedCall(self.kind.of_heads(last - first), self._arch)
                self._parts[last - first] = part
            part_lse = None if lse is None else torch.empty_like(lse[:, heads])
            try:
                part.queue(tensors.heads(first, last), out[:, heads], part_lse)
            except torch.OutOfMemoryError as error:
                if group == 1:
                    raise part._no_memory() from error
                group = (group + 1) // 2
                continue
            if lse is not None and part_lse is not None:
                lse[:, heads] = part_lse
            first = last

    def _no_memory(self) -> Unsupported:
        return Unsupported(
            f"the {self.layout.nbytes / 2**20:.0f} MiB that sparse attention needs for one head do "
            "not fit in the GPU's free memory: lower the resolution or length, or free memory.",
            "memory",
        )


def _heads_at_once(kind: CallKind, workspace_bytes: int) -> int:
    """Number of KV heads whose workspace stays within `MEMORY_SHARE`."""
    shape = kind.shape
    of_queries = kind.query_tokens * shape.heads * kind.q.dtype.itemsize
    of_keys = kind.key_tokens * shape.kv_heads * (kind.k.dtype.itemsize + kind.v.dtype.itemsize)
    given = shape.batch * shape.channels * (of_queries + of_keys)
    limit = max(MEMORY_FLOOR, int(MEMORY_SHARE * given))
    return min(shape.kv_heads, max(1, shape.kv_heads * limit // workspace_bytes))


def _address_words(struct: type[Structure], first: int) -> Iterator[int]:
    """Indices of the words that are addresses in a struct that begins at word `first`."""
    for name, of in (field[:2] for field in struct._fields_):
        word = first + getattr(struct, name).offset // _WORD
        if of is c_void_p:
            yield word
        elif issubclass(of, Structure):
            yield from _address_words(of, word)
