# SPDX-License-Identifier: Apache-2.0
"""Calls that are prepared once and launched often, on a pretended GPU."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure, c_int32, c_void_p
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import sparge
from sparge import AttentionStats, HeadSettings, Precision, SparsePolicy, TokenGrid, Unsupported
from sparge.kernels.params import PARAMS
from sparge.kernels.spec import HOPPER_ATTEND
from sparge.stages import launches, prepared
from tests.pretended_gpu import Launched, PretendedGpu, PretendedKernel

attention: Any = sparge.attention
pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, GRID = 4, TokenGrid(3, 8, 10)
ORDER = sparge.grid_order(GRID)
SETTINGS = replace(
    HeadSettings.uniform(HEADS, 0.3, pool_weight=1.0),
    order_kind=torch.tensor([0, 1, 0, 1], dtype=torch.int32),
    output_scale=torch.ones(HEADS),
)
SPARSE = SparsePolicy(topk=0.3)


def laid_out(
    heads: int = HEADS, start: int = 0, gap: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """(2, heads, 240, 64), so many elements from the start of memory, and so many apart."""
    rows = 2 * heads * GRID.tokens
    memory = torch.zeros(start + rows * (64 + gap), dtype=dtype)[start:]
    return memory.view(2, heads, GRID.tokens, 64 + gap)[..., :64]


BASE = {"q": laid_out(), "k": laid_out(), "v": laid_out(), "policy": SPARSE}
MASK = torch.ones(2, HEADS, 2, 4, dtype=torch.bool)
LENGTHS = torch.full((2,), GRID.tokens, dtype=torch.int32)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"policy": SparsePolicy(topk=1.0)},
    "settings": {"order": ORDER, "head_settings": SETTINGS},
    "mask": {"block_mask": MASK},
}
#: Calls that differ from a prepared one in one fact.
TWINS: list[dict[str, Any]] = [
    *({name: laid_out(start=n)} for name in "qkv" for n in (1, 4)),
    *({name: laid_out(gap=n)} for name in "qkv" for n in (1, 8)),
    *({name: laid_out(dtype=x)} for name in "qkv" for x in (torch.float16, torch.float32)),
    {"k": laid_out(2), "v": laid_out(2)},
    {name: x[:1] for name, x in BASE.items() if name != "policy"},
    {"return_lse": True}, {"out_layout": "NHD"}, {"output_dtype": torch.float32}, {"scale": 0.3},
    {"stats": AttentionStats("cpu")}, {"key_lengths": LENGTHS}, {"is_causal": True},
    *({"policy": replace(SPARSE, **{name: value})} for name, value in {
        "select_by": "cdf", "topk": 0.4, "cdfthreshd": 0.5, "simthreshd1": 0.2, "pvthreshd": 15.0,
        "attention_sink": True, "keep_diagonal": False, "exact_prefix": 9, "exact_suffix": 9,
        "smooth_k": False, "precision": Precision.SIXTEEN_BIT,
    }.items()),
    {"policy": replace(SPARSE, precision=Precision.INT8_FP16)},
    *({"head_settings": replace(SETTINGS, **change)} for change in (
        {"pools": False}, {"order_kind": None}, {"output_scale": None},
    )),
    {"order": ORDER.of_kind(0)}, {"block_mask": MASK.to(torch.uint8)},
    {"block_mask": MASK.transpose(0, 1).contiguous().transpose(0, 1)},
]  # fmt: skip


def run(gpu: PretendedGpu, call: dict[str, Any]) -> Any:
    """Launches of a call, with its tensors' addresses counted from where they lie; or its error."""
    gpu.launched.clear()
    stats = {"stats": AttentionStats("cpu")} if "stats" in call else {}
    try:
        attention(**BASE | call | stats)
    except ValueError as error:
        return str(error)
    return [
        (spec, grid, [*constants(params)], extra_shared)
        for spec, grid, params, extra_shared in gpu.launched
    ]


def constants(params: Structure) -> Any:
    """Values of a parameter block; of an address, whether there is one."""
    for name, kind in (field[:2] for field in params._fields_):
        value = getattr(params, name)
        if kind is c_void_p:
            yield bool(value)
        elif isinstance(value, Structure):
            yield from constants(value)
        else:
            yield [*value] if hasattr(value, "__len__") else value


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_differ_in_one_fact_share_no_preparation(pretended_gpu, kind: str) -> None:
    """What a twin launches, or says, is what it does where nothing was prepared before."""
    differ = 0
    for twin in TWINS:
        call = KINDS[kind] | twin
        prepared._kept.clear()
        alone = run(pretended_gpu, call)
        prepared._kept.clear()
        base = run(pretended_gpu, KINDS[kind])
        assert run(pretended_gpu, call) == alone == run(pretended_gpu, call), twin
        differ += alone != base
    assert differ > len(TWINS) / 2


def reads(launch: Launched, k: Tensor, stats: AttentionStats) -> bool:
    if launch.spec.entry in ("means", "quantize"):
        return launch.params.k.data == k.data_ptr()
    return launch.params.counters == stats.counters.data_ptr()


def test_a_prepared_call_reads_its_own_tensors(pretended_gpu: PretendedGpu, monkeypatch) -> None:
    """Whatever thread makes it."""
    held: list[Any] = []  # so that no two calls have tensors of one address
    launch = PretendedKernel.launch

    def slow(*given: Any) -> None:
        time.sleep(0.0005)  # others run between filling and launching
        launch(*given)

    monkeypatch.setattr(PretendedKernel, "launch", slow)

    def call(_: int) -> None:
        stats = AttentionStats("cpu")
        q, k, v = given = laid_out(), laid_out(), laid_out()
        out, lse = attention(*given, SPARSE, return_lse=True, stats=stats, **KINDS["settings"])
        held.append((given, out, lse, stats))
        launched = {x.spec.entry: x.params for x in [*pretended_gpu.launched] if reads(x, k, stats)}
        means, quantize, route, attend = launched.values()
        assert means.v.data == quantize.v.data == v.data_ptr()
        assert quantize.q.data == attend.q.data == q.data_ptr()
        assert (attend.out.data, attend.lse) == (out.data_ptr(), lse.data_ptr())
        assert route.thresholds == attend.thresholds == SETTINGS.table(SPARSE).data_ptr()
        assert attend.problem.slot_token == ORDER.slot_tokens.data_ptr()
        assert attend.k_tiles == quantize.k_tiles and means.reach == attend.reach
        assert attend.block_map == route.block_map

    with torch.no_grad():
        call(0)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(call, range(40)))
    assert len(prepared._kept) == 1


def frames_of(work: Callable[[], object]) -> list[str]:
    """Python functions of the library that run."""
    found: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "sparge" in frame.f_globals.get("__name__", ""):
            found.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else "")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("kind", ["dense", "settings"])
@torch.no_grad()
def test_a_steady_call_takes_few_frames(pretended_gpu: PretendedGpu, kind: str) -> None:
    call = BASE | KINDS[kind] | {"stats": None if kind == "dense" else AttentionStats("cpu")}
    attention(**call)
    assert 5 < len(frames_of(lambda: attention(**call))) <= 30


def needs_grad(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


@pytest.mark.parametrize(
    ("call", "change", "words"),
    [
        *(({}, {name: needs_grad(laid_out())}, "no backward pass") for name in "qkv"),
        ({"policy": SparsePolicy(topk=torch.full((HEADS,), 0.3))},
         {"policy": SparsePolicy(topk=needs_grad(torch.full((HEADS,), 0.3)))}, "no backward pass"),
        ({"policy": SparsePolicy(topk=torch.full((HEADS,), 0.3))},
         {"policy": SparsePolicy(topk=torch.full((3,), 0.3))}, r"topk has shape \(3,\)"),
        ({"head_settings": HeadSettings.uniform(HEADS, 0.3)},
         {"head_settings": replace(HeadSettings.uniform(HEADS, 0.3),
                                   density=needs_grad(torch.ones(HEADS)))}, "no backward pass"),
        ({"key_lengths": LENGTHS}, {"key_lengths": LENGTHS.long()}, "int32"),
        ({"key_lengths": LENGTHS, "is_causal": True}, {"key_lengths": LENGTHS[:, None]}, "moved"),
        ({"block_mask": MASK}, {"block_mask": MASK[:, :2]}, "block_mask has shape"),
        ({"order": ORDER}, {"order": sparge.grid_order(TokenGrid(3, 8, 9))}, "216 tokens"),
        ({"order": ORDER, "key_lengths": LENGTHS},
         {"order": ORDER.taken_from(torch.arange(240).flip(0))}, "another sequence"),
        ({"stats": AttentionStats("cpu")}, {"stats": AttentionStats("meta")}, "count on meta"),
        *(({}, {"is_causal": x}, "takes True or False") for x in (0, 1)),
        ({"scale": 1.0}, {"scale": True}, "scale is True"),
        *(({}, {"return_lse": x}, "takes True or False") for x in (0, None)),
        ({}, {"layout": "BHND"}, "layout"),
    ],
)  # fmt: skip
def test_errors_are_the_same_before_and_after_preparing(
    pretended_gpu: PretendedGpu, call: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    for before in ({}, BASE | call):
        prepared._kept.clear()
        if before:
            attention(**before)
            assert prepared._kept
        with pytest.raises(ValueError, match=words):
            attention(**BASE | call | change)


def test_a_forward_derivative_of_a_prepared_call_is_refused(pretended_gpu: PretendedGpu) -> None:
    with torch.no_grad():
        attention(**BASE)
        with forward_ad.dual_level(), pytest.raises(Unsupported, match="forward-mode"):
            attention(**BASE | {"q": forward_ad.make_dual(laid_out(), laid_out())})


@torch.no_grad()
def test_modes_see_prepared_calls(pretended_gpu: PretendedGpu) -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    attention(**BASE)
    with Mode():
        attention(**BASE)
    assert seen[-1] == "sparge::attention"
    x, q = torch.zeros(3, 1, 2, 200, 64), torch.zeros(1, 2, 200, 64)
    for call in (lambda x: attention(x, x, x), lambda x: attention(q, q, x)):
        with pytest.raises(Unsupported, match=r"torch\.vmap .* one call, or loop"):
            torch.vmap(call)(x)


@pytest.mark.parametrize("kind", [c_int32, c_void_p])
@pytest.mark.parametrize("entry", ["means", "quantize", "route", HOPPER_ATTEND])
def test_a_parameter_that_nobody_gives_is_refused(
    pretended_gpu: PretendedGpu, monkeypatch, entry: str, kind: Any
) -> None:
    struct = PARAMS[entry]
    fields = (*((name, of) for name, of in struct._fields_), ("brand_new", kind))
    longer = type("Longer", (Structure,), {"__slots__": (), "_fields_": fields})
    attention(**BASE)
    prepared._kept.clear()
    monkeypatch.setitem(launches.PARAMS, entry, longer)
    with pytest.raises(TypeError, match="nobody gives brand_new of Longer"):
        attention(**BASE)


@torch.no_grad()
def test_few_kinds_are_kept(pretended_gpu: PretendedGpu, monkeypatch) -> None:
    monkeypatch.setattr(prepared, "MOST_KEPT", 3)
    for tokens in itertools.islice(itertools.cycle((100, 130, 160, 190)), 8):
        x = laid_out()[:, :, :tokens]
        attention(x, x, x)
        assert 0 < len(prepared._kept) <= 3


@torch.no_grad()
def test_without_memory_for_all_heads_groups_are_halved(
    pretended_gpu: PretendedGpu, monkeypatch
) -> None:
    empty, tries, room = torch.empty, [], 10**9

    def short(size: Any, **options: Any) -> Tensor:
        if options.get("dtype") is torch.uint8:
            tries.append(size)
            if size > room:
                raise torch.OutOfMemoryError
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", short)
    q, k = laid_out(12), laid_out(6)
    for heads in (6, 3, 2, 1):
        attention(q, k, k)
        attended = [x for x in pretended_gpu.launched if x.spec.entry == HOPPER_ATTEND]
        assert [x.params.problem.kv_heads for x in attended] == [heads] * (6 // heads)
        pretended_gpu.launched.clear()
        room = tries[-1] - 1
    with pytest.raises(Unsupported, match="do not fit in the GPU's free memory"):
        attention(q, k, k)
