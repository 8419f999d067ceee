# SPDX-License-Identifier: Apache-2.0
"""Seconds of an attention call by each backend: exact, 8-bit dense, sparse.

They are measured on this GPU at the shape that the model calls with, where the first such call
comes, and kept beside the kernels by GPU, driver, torch, kernels and exact backend. They decide by
which backend a call is computed, and never what its heads get.

The kernels are tested once on each GPU, before anything is kept of them: a small 8-bit call beside
masked attention in float64 on the CPU.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention import attention
from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count
from ..compiling import being_recorded
from ..errors import Unsupported
from ..head_settings import HeadSettings, Router
from ..kernels.device import capabilities
from ..kernels.driver import driver_version
from ..kernels.folder import (
    cache_folder,
    distrust,
    make_folder,
    read_file,
    why_none,
    write_whole,
)
from ..kernels.source import read_sources
from ..kernels.store import entry_stem
from ..kernels.warmup import UNKNOWN, Needs, eight_bit_specs
from ..order.grid import TokenGrid, grid_order, raster_order
from ..policy import EIGHT_BIT_DENSE, SparsePolicy
from ..reasons import Reason
from ..stages.as_written import as_written
from ..torch_attention import exact_attention
from .calls import Call
from .measure import Candidates, MeasuredCall, measure

logger = logging.getLogger("sparge")

#: Environment variable for debugging: with the value 1 speed does not matter. A device without
#: kernels runs the slow reference, not dense, and no call is dense for being slower.
REFERENCE_VARIABLE = "SPARGE_REFERENCE"
#: Fewest tokens of a call that is timed, and dtypes: exact attention in float32 is slower by far.
FEWEST_TOKENS = 1536
DTYPES = (torch.bfloat16, torch.float16)
#: Share by which another backend has to be faster than the exact one, or sparse than dense.
MARGIN = 0.03
#: Share of a call's host time that its GPU time has to cover. The rest of a layer covers the other:
#: where calls are as short as that, it takes the GPU longer than attention, and the host far less.
HOST_SHARE = 0.5
#: Densities at which sparse calls are timed; between and beyond them seconds are on a line.
DENSITIES = (0.1, 0.4)
#: Timed calls of each kind after a first one, and clock cycles in which the GPU sleeps while the
#: host queues one: about 1 ms.
CALLS, ASLEEP = 2, 2_000_000
BLOCKS = 4  # query blocks of the measurement that is timed: those of one of two prompts
#: Lengths with which times are shared, a twelfth of a doubling: seconds then go by pairs.
LENGTHS = 12
#: Ratio of two timed calls from which on something else used the GPU: such times are not kept.
DISTURBED = 1.25
#: Density that no user asks for.
NO_DENSITY = 0.01
_FORMAT = "5"  # changes with what is measured and how
_MOST_SECONDS = 1000.0
_MOST_KINDS = 256  # of calls in a file


class Backend(enum.Enum):
    """Ways to compute a call; the last one measures it."""

    EXACT = "exact"
    EIGHT_BIT = "8-bit dense"
    SPARSE = "sparse"
    MEASURING = "measuring"


@dataclass(frozen=True)
class Exact:
    """Function of a framework for exact attention, and its name, under which times are kept."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Gives some result of q, k and v (B, H, N, D), in any layout."""


TORCH = Exact("attention_pytorch", exact_attention)


@dataclass(frozen=True)
class Times:
    """Seconds of calls of one shape, one entry of the batch."""

    tokens: int
    exact: float
    eight_bit: float
    """Infinite where dense calls are to be exact."""
    sparse_fixed: float
    """Seconds of a sparse call that would keep nothing."""
    sparse_pairs: float
    """Seconds more of one that keeps all."""
    measuring: float
    """Seconds of one measurement of heads, for one of two prompts."""

    @property
    def is_eight_bit(self) -> bool:
        """Whether dense calls are computed in 8 bits."""
        return self.eight_bit * (1 + MARGIN) <= self.exact

    @functools.cached_property
    def dense(self) -> float:
        return self.eight_bit if self.is_eight_bit else self.exact

    def sparse(self, density: float) -> float:
        return self.sparse_fixed + self.sparse_pairs * density

    def why_slower(self, density: float) -> Reason | None:
        """Why a call stays dense that would keep so many pairs, or None. The text holds nothing
        that differs between layers: the report counts it."""
        if self.sparse(density) * (1 + MARGIN) < self.dense:
            return None
        left = self.dense / (1 + MARGIN) - self.sparse_fixed
        most = left / self.sparse_pairs if self.sparse_pairs > 0 else 0.0
        below = f"is faster only below {100 * most:.0f} % density"
        found = "would be slower" if most < NO_DENSITY else below
        return Reason(f"at {self.tokens:,} tokens sparse {found}", "slow")

    def why_policy_slower(self, policy: SparsePolicy) -> Reason | None:
        """`why_slower` of a call whose heads all follow a policy. What cdf keeps is not known, nor
        what heads do that have a share each."""
        if policy.select_by != "topk" or isinstance(policy.topk, Tensor):
            return None
        text = (policy.exact_prefix + policy.exact_suffix) / self.tokens
        # A share of the tokens, text, attends and is attended to densely.
        return self.why_slower(text + (1 - text) * min(1.0, text + policy.topk))

    def of_tokens(self, tokens: int) -> Times:
        """Times of a sequence of about the same length."""
        share = (tokens / self.tokens) ** 2
        seconds = {name: x * share for name, x in asdict(self).items() if isinstance(x, float)}
        return replace(self, tokens=tokens, **seconds)


def speed_matters() -> bool:
    return os.environ.get(REFERENCE_VARIABLE) != "1"


def unusable_reason(device: torch.device) -> Reason | None:
    """Reason why the kernels cannot run on a device, or None when they can."""
    if not speed_matters():
        return None
    capability = capabilities(device)
    if capability.usable:
        return None
    if device.type != "cpu":
        return capability.reason
    trial = f"(for trying out, {REFERENCE_VARIABLE}=1 lets the slow reference run)"
    return Reason(f"{capability.reason.rstrip('.')} {trial}.", capability.reason.kind)


_known: dict[tuple[str, str], Times] = {}  # by facts of the GPU and kind of the call
_disturbed: set[tuple[str, str]] = set()  # of these what something else had a part in
_lock = threading.Lock()


def times_of(call: Call, exact: Exact, grid: TokenGrid | None) -> Times | None:
    """Times of calls like this one: of this process, kept ones, or measured now, which waits for
    the GPU and takes about twelve calls. None where the device has no kernels or no memory left,
    and for calls that are not timed. grid: of the tokens."""
    if not _is_timed(call):
        return None
    needs = Needs(call.head_dim, call.q.dtype)
    key, kind = _key(call.q.device, exact, needs), _kind(call)
    with _lock:
        if (key, kind) not in _known:
            _known.update({(key, of): times for of, times in (_read(key) or {}).items()})
        if (key, kind) not in _known:
            try:
                times, disturbed = _measured(call, exact, grid)
            except (torch.OutOfMemoryError, Unsupported) as error:
                logger.info("[Sparge] attention was not timed: %s", error)
                return None
            _known[key, kind] = times
            if disturbed:
                _disturbed.add((key, kind))
            else:
                _keep(key)
        return _known[key, kind].of_tokens(call.query_tokens)


def _is_timed(call: Call) -> bool:
    device = call.q.device
    if device.type != "cuda" or not speed_matters() or not capabilities(device).usable:
        return False
    whole = call.query_tokens == call.k.shape[2] >= FEWEST_TOKENS
    return whole and call.q.dtype in DTYPES and not being_recorded(device)


def _kind(call: Call) -> str:
    """Kind of calls that share times."""
    length = round(math.log2(call.query_tokens) * LENGTHS)
    sizes = length, call.q.shape[1], call.k.shape[1], call.head_dim
    return f"{call.q.dtype} {' '.join(map(str, sizes))}"


def _key(device: torch.device, exact: Exact, needs: Needs) -> str:
    """Facts that times depend on, as text."""
    return _facts(device, capabilities(device).arch, exact.name, needs)


@functools.lru_cache(maxsize=16)
def _facts(device: torch.device, arch: str, exact: str, needs: Needs) -> str:
    specs = eight_bit_specs(arch, needs)
    stems = sorted(entry_stem(spec, read_sources(spec.entry)) for spec in specs)
    facts = {
        "format": _FORMAT,
        "gpu": torch.cuda.get_device_name(device),
        "driver": str(driver_version()),
        "torch": torch.__version__,
        "kernels": _short_hash("".join(stems)),
        "exact": exact,
    }
    return json.dumps(facts, sort_keys=True)


def _measured(call: Call, exact: Exact, grid: TokenGrid | None) -> tuple[Times, bool]:
    """Times of a call's first entry of the batch, and whether something else used the GPU."""
    (q, k, v), device, scale = (x[:1] for x in call.qkv), call.q.device, call.softmax_scale
    whole = raster_order(call.query_tokens) if grid is None else grid_order(grid)
    order, candidates = whole.on(device), Candidates.of(whole, device, call.shares_keys)
    rows = (~whole.queries_exact).nonzero().flatten().tolist()[:BLOCKS]
    measured = MeasuredCall(q, k, v, scale, order, candidates, rows)
    disturbed = False

    def seconds(work: Callable[[], object]) -> float:
        nonlocal disturbed
        work()
        timed = [_time_once(work) for _ in range(CALLS)]
        disturbed |= max(timed) > DISTURBED * min(timed)
        return min(timed)

    def sparse(density: float) -> Callable[[], object]:
        heads = HeadSettings.uniform(q.shape[1], density, 1.0, Router.ERROR, device)
        in_order = None if grid is None else order
        return lambda: attention(
            q, k, v, SparsePolicy(), order=in_order, head_settings=heads, scale=scale
        )

    with torch.cuda.device(device), as_written(device), torch.inference_mode():
        least, most = (seconds(sparse(density)) for density in DENSITIES)
        pairs = max(0.0, most - least) / (DENSITIES[1] - DENSITIES[0])
        times = Times(
            call.query_tokens,
            seconds(lambda: exact.attend(q, k, v)),
            seconds(lambda: attention(q, k, v, EIGHT_BIT_DENSE, scale=scale)),
            max(0.0, least - pairs * (DENSITIES[0] + 1 / KEY_BLOCK)),
            pairs,
            seconds(lambda: measure(measured)) if rows else 0.0,
        )
    return times, disturbed


def _time_once(work: Callable[[], object]) -> float:
    """Seconds of the GPU, or of the share of those in which the host queued it. Waits."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(ASLEEP)
    queued = time.perf_counter()
    start.record()
    work()
    end.record()
    host = time.perf_counter() - queued
    end.synchronize()
    return max(start.elapsed_time(end) / 1000, HOST_SHARE * host)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _path(key: str) -> Path | None:
    """File of times; None where this user has no cache folder."""
    folder = cache_folder()
    return folder and folder / f"times.{_short_hash(key)}.json"


def _read(key: str) -> dict[str, Times] | None:
    """Kept times by kind of call; None where there is no file that can be believed."""
    path = _path(key)
    if path is None or distrust(path.parent):
        return None
    try:
        stored = json.loads(read_file(path))
        if stored["facts"] != json.loads(key):
            raise ValueError("it is of another GPU, driver, torch or kernels")
        return {str(kind): _times(times) for kind, times in stored["times"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("Times %s are not used, and are measured anew: %s", path.name, error)
        return None


def _times(stored: Any) -> Times:
    """Raises ValueError, KeyError or TypeError for what `_keep` never wrote."""
    tokens, *seconds = (stored[field.name] for field in fields(Times))
    for each in seconds:
        if not isinstance(each, float) or not 0 <= each <= _MOST_SECONDS:
            raise ValueError(f"{each!r} is no time of a call")
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"{tokens!r} is no number of tokens")
    return Times(tokens, *seconds)


def _keep(key: str) -> None:
    """Writes the times of this GPU to the user's cache, at once or not at all."""
    path, why = _path(key), why_none()
    sound = [(kind, x) for (of, kind), x in _known.items() if of == key and (of, kind) not in
             _disturbed]  # fmt: skip
    times = {kind: asdict(x) for kind, x in sound[-_MOST_KINDS:]}
    stored = {"facts": json.loads(key), "times": times}
    if path is not None:
        try:
            make_folder(path.parent)
            if not (why := distrust(path.parent)):
                write_whole(path, json.dumps(stored, indent=1).encode())
                return
        except OSError as error:
            why = str(error)
    logger.warning(
        "Attention is timed again at the next start: %s. Set SPARGE_CACHE to a folder of your own.",
        why,
    )


#: Largest error of a right kernel, as `row_errors` has it. Rounding as the kernels do errs by up to
#: 0.25 with E4M3 values, which have the fewest bits, and by half of that with others. Faults of one
#: block, scale, fragment or row err by 0.5 and more (`tests/session/test_self_test.py`).
MOST = 0.4
HEADS, KV_HEADS, TOKENS = 4, 2, 330  # the last block of queries and of keys is short
KEPT = 0.6  # of the blocks


def check_once(device: torch.device, exact: Exact, needs: Needs = UNKNOWN) -> None:
    """Raises Unsupported where 8-bit calls are not right on this GPU. They are tested where no file
    of times tells that they were right. Without memory for it a later run tests them."""
    if device.type != "cuda" or _read(key := _key(device, exact, needs)) is not None:
        return
    try:
        wrong = why_wrong(device, needs)
    except torch.OutOfMemoryError:
        logger.info("[Sparge] the kernels were not tested: memory is full")
        return
    if wrong:
        raise Unsupported(wrong, "wrong")
    with _lock:
        _keep(key)  # without times yet


@functools.cache  # a GPU has the same kernels until the process ends
def why_wrong(device: torch.device, needs: Needs) -> str:
    """Fault of 8-bit calls, for the user; empty where there is none."""
    dtype = needs.dtype or torch.bfloat16
    for head_dim in needs.head_dims:
        if not (error := largest_error(head_dim, device, dtype)) <= MOST:
            return (
                "the kernels compute something else on this GPU than they should "
                f"(error {error:.2g} at head_dim {head_dim}): please report it."
            )
    return ""


def largest_error(
    head_dim: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Largest of `row_errors` of an 8-bit call; NaN where its result is no number. Raises as
    `sparge.attention` does."""
    inputs = make_inputs(head_dim, dtype)
    q, k, v, kept = (x.to(device) for x in inputs)
    with torch.inference_mode():
        found = attention(q, k, v, block_mask=kept, output_dtype=torch.float32)
    return float(row_errors(found.cpu(), masked_attention(*inputs)).max())


def row_errors(found: Tensor, true: Tensor) -> Tensor:
    """(1, HEADS, TOKENS): largest error of an element of each row, in units of the row's root mean
    square. A mean over more would hide what is wrong in one tile, row or column alone."""
    return (found - true).abs().amax(-1) / true.square().mean(-1).sqrt()


def masked_attention(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """(1, HEADS, TOKENS, head_dim) float64: attention over the kept blocks."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    seen = kept.repeat_interleave(QUERY_BLOCK, 2).repeat_interleave(KEY_BLOCK, 3)
    logits = q.double() @ k.mT * q.shape[-1] ** -0.5
    return logits.masked_fill(~seen[..., :TOKENS, :TOKENS], -torch.inf).softmax(-1) @ v


def make_inputs(
    head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a block mask. What has a scale of its own differs in size from its neighbour:
    rows of queries, blocks of keys and of values, channels of values. Keys and values have a mean,
    which the kernels take off."""
    with torch.device("cpu"):  # whatever the caller's default is
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int, tokens: int = TOKENS) -> Tensor:
            shape = (1, heads, tokens, head_dim)
            return torch.randn(shape, generator=generator, dtype=torch.float32)

        token, channel = torch.arange(TOKENS)[:, None], torch.arange(head_dim)
        odd = token // KEY_BLOCK % 2
        q = normal(HEADS) * (1 + token % 2) / 2
        k = normal(KV_HEADS) * (1 + odd) + normal(KV_HEADS, 1)
        v = normal(KV_HEADS) * (1 + channel % 2) * (3 - 2 * odd) + normal(KV_HEADS, 1) / 2
        blocks = (1, HEADS, block_count(TOKENS, QUERY_BLOCK), block_count(TOKENS, KEY_BLOCK))
        kept = torch.rand(blocks, generator=generator, dtype=torch.float32) < KEPT
        kept[..., 0] = True
        return q.to(dtype), k.to(dtype), v.to(dtype), kept
