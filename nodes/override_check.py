# SPDX-License-Identifier: Apache-2.0
"""Whether the attention override of another node is a plain backend, which sparse calls may pass
by, or changes what attention means: a temperature, further keys, biases, a gain.

Nothing says so but its results. Until a layer's are known its calls are dense by the override, and
a few query rows of each are compared with exact attention of the same q, k and v. What was found is
read where a later step begins.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..sparge.errors import Unsupported
from ..sparge.failures import Failures
from ..sparge.reasons import Reason
from ..sparge.session import Call, Dense, Step
from .comfyui import untracked_allocations

CHANGES = Reason("another node changes this attention", "changed")
CHECKING = Reason("checking another node's attention", "checking")

Override = Callable[..., Tensor]

#: One layer is compared again in the last of every so many sparse steps, for overrides that begin
#: to act in the middle of a run. Shorter runs do without: its dense call takes 0.5 % of four steps.
_AGAIN_EVERY = 6
#: Parts of names of backends that approximate: sparse ones, and one in 4 bits.
_APPROXIMATIONS = ("solattn", "sageattn3", "spassage")
#: Types that lead everywhere from a closure, so they are not searched.
_NOT_WALKED = (type, ModuleType, torch.nn.Module)

#: Query rows of a batch entry, spread over all its tokens: both ends, where text stands, are among
#: them.
ROWS = 32
#: Heads of keys that are compared, other ones in each layer and step: all 40 of a 14B model would
#: take 9 % of a run of four steps.
HEADS = 2
#: Keys that are summed over side by side: one long sum keeps little of a GPU busy.
_CHUNK = 1024
#: Bytes of a part of the keys in float32.
_PART = 64 << 20
#: Levels of int8 on either side of zero.
_INT8 = 127
#: Mean square of the relative error of rounding to e4m3, whose mantissa has three bits.
_E4M3 = 0.0255**2

#: Times the predicted 8-bit error that a plain backend may err, in all rows, in a row, in a head.
#: SageAttention's arithmetic errs 0.3 to 1.9 times as much; without its smoothing of keys, 2.6
#: times where channels of them are 20 times the others.
_TIMES_EIGHT_BIT = 2.5
#: Relative error of 16-bit arithmetic and of a result in bfloat16, with room.
_SIXTEEN_BIT = 0.004
#: Distance from 1 of the gain of a plain backend, whose errors are as often up as down, and the
#: share of its error that may look like a gain where a head attends to few keys.
_GAIN, _GAIN_BY_ERROR = 0.02, 0.2
#: Relative error and gain of backends that approximate, such as sparse ones, in all rows together:
#: Sol-Attn errs 0.1 to 0.3.
_APPROXIMATE, _APPROXIMATE_GAIN = 0.4, 0.15


class OverrideChecks:
    """Checks of one run: those of each override, device and model apart."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._checks: dict[tuple[int, torch.device, int], Check] = {}
        self._sparse_steps: dict[int, int] = {}
        self._lock = threading.Lock()

    def begin_pass(self, device: torch.device, step: Step) -> None:
        """Begins a pass on a device. Waits for it where calls were compared in an earlier step."""
        with self._lock:
            if step.why_dense is None:
                self._sparse_steps.setdefault(step.number, len(self._sparse_steps))
            place = self._sparse_steps.get(step.number)
            found = list(self._checks.items())
        index = step.number if step.index is None else step.index
        if index + 1 == step.of_sparse:
            place = None  # nothing reads what the last step would tell
        for (_, where, which), check in found:
            if (where, which) == (device, step.model):
                check.begin_step(step.number, place)

    def of(self, override: Override, rows: int, device: torch.device, step: Step) -> Check:
        """Check of the calls of a pass. rows: of a table of the model's layers."""
        key = id(override), device, step.model
        with self._lock:
            if key not in self._checks:
                self._checks[key] = Check(override, rows, device, self._failures)
            return self._checks[key]


class Check:
    """Knowledge of an override in the layers of a model, on one device."""

    def __init__(
        self, override: Override, rows: int, device: torch.device, failures: Failures
    ) -> None:
        self._changed: set[int] = set()
        """Rows in which it changes what attention means."""
        self._plain: dict[int, set[int]] = {}
        """Conditionings in whose calls it does not, by row."""
        self._again: int | None = None
        """Row that is compared again in this step."""
        self._override, self._failures = override, failures  # what has an id must live
        self._approximates = approximates(override)
        self._rows = rows
        with untracked_allocations():
            self._excess = torch.zeros(rows + 1, device=device)
        self._compared: dict[int, set[int]] = {}
        """Conditionings whose calls were compared in `_step`, by row."""
        self._step = -1

    def why_dense(self, row: int, step: Step) -> Reason | None:
        """Reason why a call of a layer is dense; None where the override is plain there."""
        row = min(row, self._rows)  # calls for which there is no room share the last one
        if row in self._changed:
            return CHANGES
        known = self._plain.get(row, set()).issuperset(step.prompts)
        return None if known and row != self._again else CHECKING

    def compared(self, row: int, step: Step, call: Call, dense: Dense) -> Tensor:
        """Result of dense(), which is compared where it is not known what the override does, and in
        the last dense step once more. Never waits."""
        why = self.why_dense(row, step)
        if why == CHANGES or (why is None and not step.is_last_dense):
            return dense()
        expected: PlainRows | None = None
        with self._caught():  # before the override has the tensors: it may change them in place
            expected = PlainRows.of(call, first_head=row + step.number * HEADS)
        out = dense()
        with self._caught():
            if expected is not None:
                self._compare(min(row, self._rows), expected, call, out, step)
        return out

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """Context around work without which a layer stays dense."""
        with (
            suppress(torch.OutOfMemoryError),
            self._failures.caught("another node's attention was not checked"),
            untracked_allocations(),
        ):
            yield

    def _compare(self, row: int, expected: PlainRows, call: Call, out: Tensor, step: Step) -> None:
        try:
            excess = expected.excess(call.result_heads_first(out), self._approximates)
        except Unsupported:  # it gave another shape
            excess = torch.full_like(self._excess[0], torch.inf)
        self._excess[row] = torch.maximum(self._excess[row], excess)
        self._step = step.number
        self._compared.setdefault(row, set()).update(step.prompts)

    def begin_step(self, step: int, sparse_step: int | None) -> None:
        """Reads what was found in an earlier step. sparse_step: its place among the sparse ones;
        None where no layer is to be compared again."""
        if self._compared and step != self._step:
            self._read()
        self._again = None
        if sparse_step is None or not self._plain:
            return
        group, place = divmod(sparse_step, _AGAIN_EVERY)
        if place == _AGAIN_EVERY - 1:
            known = sorted(self._plain)
            self._again = known[group % len(known)]

    def _read(self) -> None:
        compared, self._compared = self._compared, {}
        excess = self._excess.tolist()
        found = {row for row in compared if excess[row] > 1} - self._changed
        if found & self._plain.keys():  # it has begun to act, and may have in every layer
            self._plain = {}
        self._changed |= found
        for row, conditionings in compared.items():
            if row not in self._changed:
                self._plain.setdefault(row, set()).update(conditionings)


def approximates(override: Override) -> bool:
    """Whether an override is known for an approximation by the names that its code holds."""
    return leads_to(override, _names_an_approximation)


def _names_an_approximation(item: Any) -> bool:
    called = item if isinstance(item, FunctionType) else vars(type(item)).get("__call__")
    if not isinstance(called, FunctionType):
        return False
    helpers = (called.__globals__.get(name) for name in called.__code__.co_names)
    own = (x for x in helpers if isinstance(x, FunctionType) and x.__module__ == called.__module__)
    names = [called.__module__ or ""]
    for function in (called, *own):
        names += [function.__qualname__, *_names(function.__code__)]
    told = (name.lower().replace("_", "").replace("-", "") for name in names)
    return any(part in name for name in told for part in _APPROXIMATIONS)


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def leads_to(override: Callable[..., Any], is_target: Callable[[Any], bool]) -> bool:
    """Whether calling ``override`` can reach a target.

    It does when it keeps one in a closure, a partial, a bound method, or an attribute of an object
    that these hold. Nothing but is_target is called.
    """
    seen: set[int] = set()
    pending: list[Any] = [override]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if is_target(item):
            return True
        pending.extend(_held_by(item))
    return False


def _held_by(item: Any) -> list[Any]:
    if isinstance(item, FunctionType):
        held = []
        for cell in item.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # a cell that is not filled yet
                continue
        return [value for value in held if callable(value) or _is_plain_state(value)]
    if isinstance(item, MethodType):
        return [item.__func__, item.__self__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, _NOT_WALKED):
        return []
    return [value for value in getattr(item, "__dict__", {}).values() if callable(value)]


def _is_plain_state(value: Any) -> bool:
    """Whether a value is an object of a pack's own, as opposed to data or a model."""
    return hasattr(value, "__dict__") and not isinstance(value, _NOT_WALKED)


@dataclass(frozen=True, eq=False)
class PlainRows:
    """A few query rows of a few heads of the result of a call, in exact arithmetic, and how far
    from them a plain backend may be: whatever computes just this attention, in 16 bits or in 8.

    The error that 8 bits make differs by a factor of ten between layers, so it is predicted for the
    very rows, keys and values: a fixed limit would take a temperature in one layer for rounding,
    and rounding in another for a temperature.
    """

    rows: Tensor
    """(rows,) int64: their places among the queries."""
    heads: Tensor
    """(heads,) int64: numbers of the query heads."""
    out: Tensor
    """(B, heads, rows, D) float32: the exact result."""
    noise: Tensor
    """(B, heads, rows) float32: expected square of the error of 8 bits."""

    @classmethod
    @torch.no_grad()
    def of(cls, call: Call, first_head: int = 0) -> PlainRows:
        """Computes them, part by part of the heads. Never waits. first_head: number of the first
        head of keys, counted on from the last one to 0."""
        device, kv_heads = call.q.device, call.k.shape[1]
        rows, group = _spread(call.query_tokens, device), call.head_count // kv_heads
        compared = min(HEADS, kv_heads)
        of_keys = torch.arange(compared, device=device) * kv_heads // compared + first_head
        of_keys = of_keys % kv_heads
        heads = of_keys.unsqueeze(1) * group + torch.arange(group, device=device)
        with torch.autocast(device.type, enabled=False):
            parts = [_attended(*part) for part in _parts(call, rows, of_keys)]
        outs, noises = zip(*parts, strict=True)
        return cls(rows, heads.flatten(), torch.cat(outs, 1), torch.cat(noises, 1))

    @torch.no_grad()
    def excess(self, out: Tensor, approximates: bool) -> Tensor:
        """Largest quotient of what a result (B, H, N, D) shows and what a plain backend may show:
        above 1 it is none. A scalar on the device. approximates: the backend is known for an
        approximation."""
        found = out.index_select(1, self.heads).index_select(2, self.rows).float()
        known = self.out.isfinite().all(-1)
        error, norm, along = (
            torch.where(known, x.sum(-1), 0)
            for x in ((found - self.out).square(), self.out.square(), found * self.out)
        )
        noise = torch.where(known, self.noise, 0)
        quotients = []
        for dims in ((1, 2),) if approximates else ((1, 2), (1,), (2,)):
            square = norm.sum(dims).clamp_min(1e-30)
            relative, eight_bit = ((x.sum(dims) / square).sqrt() for x in (error, noise))
            gain = ((along - norm).sum(dims) / square).abs()
            if approximates:
                quotients += [relative / _APPROXIMATE, gain / _APPROXIMATE_GAIN]
                continue
            quotients.append(relative / (_TIMES_EIGHT_BIT * eight_bit + _SIXTEEN_BIT))
            if dims != (1,):  # in a row alone the errors of a few keys do not cancel
                quotients.append(gain / (_GAIN + _GAIN_BY_ERROR * eight_bit))
        largest = torch.stack([x.amax() for x in quotients]).amax()
        return largest.nan_to_num(nan=torch.inf)


def _spread(tokens: int, device: torch.device) -> Tensor:
    if tokens <= ROWS:
        return torch.arange(tokens, device=device)
    return torch.arange(ROWS, device=device) * (tokens - 1) // (ROWS - 1)


def _parts(
    call: Call, rows: Tensor, kv_heads: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, float, Tensor | None]]:
    """Yields q (B, heads, a key head's heads, rows, D), k and v (B, heads, 1, M, D) in float32,
    scale and mask of some of these key heads."""
    q, k, v = call.qkv
    batch, every, keys, head_dim = k.shape
    mask = None if call.key_mask is None else call.key_mask.reshape(-1, 1, 1, 1, keys)
    q = q.index_select(2, rows).unflatten(1, (every, -1))
    for part in kv_heads.split(max(1, _PART // (4 * batch * keys * head_dim))):
        queries, keys_of, values_of = (x.index_select(1, part).float() for x in (q, k, v))
        yield queries, keys_of.unsqueeze(2), values_of.unsqueeze(2), call.softmax_scale, mask


def _summed(weights: Tensor, x: Tensor) -> Tensor:
    """(..., rows, D): products of weights (..., rows, M) and x (..., M, D)."""
    whole = x.shape[-2] // _CHUNK * _CHUNK
    rest = weights[..., whole:] @ x[..., whole:, :]
    if not whole:
        return rest
    parts = weights[..., :whole].unflatten(-1, (-1, _CHUNK)).movedim(-2, -3)
    return (parts @ x[..., :whole, :].unflatten(-2, (-1, _CHUNK))).sum(-3) + rest


def _attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Exact result (B, heads, rows, D) and expected square of the error of 8 bits."""
    finite = q.nan_to_num(0, 0, 0)
    levels = finite.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30) / _INT8
    rounded = (q / levels).round() * levels
    scores = torch.cat([q, rounded], -2) @ k.mT * scale
    if mask is not None:
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if hides else scores + mask
    weights = scores.softmax(-1)
    out, of_rounded = _summed(weights, v).chunk(2, -2)
    squares = weights.chunk(2, -2)[0].square()
    # The keys' error differs from key to key, and so do those of weights and values: they add up by
    # their squares. That of a query is the same for all keys.
    mean = k.mean(-2, keepdim=True)
    least, most = k.aminmax(dim=-2, keepdim=True)
    reach = torch.maximum(most - mean, mean - least)
    of_score = (scale / _INT8 * reach.amax(-1, keepdim=True)).square() / 12
    of_score = of_score * q.square().sum(-1, keepdim=True)
    sizes = torch.linalg.vector_norm(v, dim=-1).square()
    of_values = (squares * sizes.unsqueeze(-2)).sum(-1, keepdim=True)
    of_out = squares.sum(-1, keepdim=True) * out.square().sum(-1, keepdim=True)
    noise = 2 * (_E4M3 + of_score) * of_values + 2 * of_score * of_out
    noise = noise.squeeze(-1) + (of_rounded - out).square().sum(-1)
    return out.flatten(1, 2), noise.flatten(1, 2)
