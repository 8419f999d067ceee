# SPDX-License-Identifier: Apache-2.0
"""Runs each ceiling's kernel, checks what it computed, and says how much it did a second."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, c_int32, c_uint32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.ceilings.kernel import ARCH, load
from benchmarks.timing import median_ms
from sparge.kernels import capabilities

MIB = 2**20
REPEATS = 20
#: Work of a thread block and round; the first two as in the .cu files.
PRODUCT_ROWS = 2 * 8 * 4 * 64  # warpgroups, repeats, steps of 32 bytes, rows
SPECIAL_STEPS = 512 * 8 * 16  # threads, chains, steps
BLOCKS_A_SM = {"products": 2, "special": 4, "tiles": 2}
#: Milliseconds to tens of them, so that the power limit shows.
PRODUCT_ROUNDS, SPECIAL_ROUNDS, TILES_A_BLOCK = 1500, 500, 4000
#: K and V of one head of a long video, and more than any L2 holds.
REGION_IN_L2, REGION_IN_MEMORY = 16 * MIB, 4096 * MIB
EXP2_FIXED_POINT = 0.641186  # x = 2^-x
INT8_ONES, E4M3_ONES = 0x01010101, 0x38383838

#: Rates a second by kind and by name, or why there is none.
Rates = dict[str, dict[str, float | str]]


class ProductsParams(Structure):
    _fields_ = (("sums", c_void_p), ("rounds", c_int32), ("fill", c_uint32))


class SpecialParams(Structure):
    _fields_ = (("last", c_void_p), ("rounds", c_int32))


class TilesParams(Structure):
    _fields_ = (
        ("region", c_void_p),
        ("list", c_void_p),
        ("sums", c_void_p),
        ("tiles_a_block", c_int32),
    )


@dataclass(frozen=True)
class ProductShape:
    """Product of A, 64 x 32 bytes in registers or in shared memory, and B, `columns` x 32 bytes in
    shared memory."""

    e4m3: bool
    columns: int
    a_in_registers: bool

    @property
    def defines(self) -> dict[str, int]:
        return {
            "PRODUCT_E4M3": int(self.e4m3),
            "PRODUCT_COLUMNS": self.columns,
            "PRODUCT_A_IN_REGISTERS": int(self.a_in_registers),
        }

    @property
    def kind(self) -> str:
        return "e4m3_ops" if self.e4m3 else "int8_ops"

    @property
    def name(self) -> str:
        place = "registers" if self.a_in_registers else "shared memory"
        return f"wgmma m64n{self.columns}k32, A in {place}"


PRODUCT_SHAPES = [
    ProductShape(e4m3, columns, a_in_registers)
    for e4m3 in (False, True)
    for columns in (64, 128)
    for a_in_registers in (False, True)
]


def blocks(name: str) -> int:
    return BLOCKS_A_SM[name] * torch.cuda.get_device_properties("cuda").multi_processor_count


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def product_rate(shape: ProductShape) -> float:
    """Operations a second, two a multiply-add, on random bytes."""
    kernel = load("products", **shape.defines)
    grid = (blocks("products"), 1, 1)
    dtype = torch.float32 if shape.e4m3 else torch.int32
    sums = torch.zeros(grid[0], kernel.info.threads, dtype=dtype, device="cuda")

    def run(rounds: int, fill: int = 0) -> None:
        kernel.launch(grid, ProductsParams(sums.data_ptr(), rounds, fill), stream=stream())

    run(1, E4M3_ONES if shape.e4m3 else INT8_ONES)
    _require(bool((sums == 8 * 4 * 32).all()), f"{shape.kind}, {shape.name} adds up ones wrongly")
    ms = median_ms(lambda: run(PRODUCT_ROUNDS), REPEATS)
    return 2 * grid[0] * PRODUCT_ROUNDS * PRODUCT_ROWS * shape.columns * 32 / ms * 1000


def special_rate(kind: int, elements: int = 1) -> float:
    """Elements a second of one kind: 0 exponentials, 1 integers to float32, 2 float32 to E4M3 (4 a
    step)."""
    kernel = load("special", SPECIAL_KIND=kind)
    grid = (blocks("special"), 1, 1)
    last = torch.zeros(grid[0], kernel.info.threads, device="cuda")
    params = SpecialParams(last.data_ptr(), SPECIAL_ROUNDS)
    ms = median_ms(lambda: kernel.launch(grid, params, stream=stream()), REPEATS)
    if kind == 0:
        off = float((last - 8 * EXP2_FIXED_POINT).abs().max())
        _require(off < 1e-3, f"exponentials end {off} off their fixed point")
    return elements * grid[0] * SPECIAL_ROUNDS * SPECIAL_STEPS / ms * 1000


def tile_rate(tile_bytes: int, region_bytes: int) -> float:
    """Bytes a second of tiles at random places of a region, bulk copies into shared memory."""
    kernel = load("tiles", TILE_BYTES=tile_bytes)
    grid = (blocks("tiles"), 1, 1)
    tiles = region_bytes // tile_bytes
    region = torch.zeros(tiles, tile_bytes // 4, dtype=torch.int32, device="cuda")
    region[:, 0] = torch.arange(tiles, device="cuda")
    picks = torch.randint(tiles, (grid[0], TILES_A_BLOCK), dtype=torch.int32, device="cuda")
    sums = torch.zeros(grid[0], dtype=torch.int32, device="cuda")
    params = TilesParams(region.data_ptr(), picks.data_ptr(), sums.data_ptr(), TILES_A_BLOCK)
    ms = median_ms(lambda: kernel.launch(grid, params, stream=stream()), REPEATS)
    wanted = picks.sum(1, dtype=torch.int64).to(torch.int32)
    _require(torch.equal(sums, wanted), f"tiles of {tile_bytes} bytes came from elsewhere")
    return picks.numel() * tile_bytes / ms * 1000


def copy_rate() -> float:
    """Bytes a second of a copy in device memory, read and written ones together."""
    source = torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source), REPEATS) * 1000


def library_rates(size: int = 8192) -> Rates:
    """Operations a second of PyTorch's own products of that size, or why there are none."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one = torch.ones((), device="cuda")
    # The 8-bit products want their second matrix column by column.
    a_e4m3, b_e4m3 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    a_int8, b_int8 = ((40 * x).clamp(-127, 127).to(torch.int8) for x in (a, b))

    def e4m3() -> Tensor:
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch.ops.aten._scaled_mm(a_e4m3, b_e4m3.t(), one, one, **options)

    def rate(product: Callable[[], Tensor]) -> float | str:
        try:
            return 2 * size**3 / median_ms(product, REPEATS) * 1000
        except (RuntimeError, AttributeError) as error:
            return (str(error).splitlines() or [type(error).__name__])[0]

    return {
        "bf16_flops": {"torch.matmul": rate(lambda: a @ b)},
        "e4m3_ops": {"torch._scaled_mm": rate(e4m3)},
        "int8_ops": {"torch._int_mm": rate(lambda: torch.ops.aten._int_mm(a_int8, b_int8.t()))},
    }


def rates() -> Rates:
    """All rates, by kind and by name."""
    found = library_rates()
    for shape in PRODUCT_SHAPES:
        found[shape.kind][shape.name] = product_rate(shape)
    others: Rates = {
        "exp2": {"ex2.approx.ftz.f32": special_rate(0)},
        "int32_conversions": {"cvt.rn.f32.s32": special_rate(1)},
        "e4m3_conversions": {"cvt.rn.satfinite.e4m3x2.f32": special_rate(2, elements=4)},
        "copy_bytes": {"Tensor.copy_, 2 GiB": copy_rate()},
        "tile_bytes": {
            "8 KiB tiles, 16 MiB region": tile_rate(8192, REGION_IN_L2),
            "4 KiB tiles, 16 MiB region": tile_rate(4096, REGION_IN_L2),
        },
        "tile_bytes_from_memory": {"8 KiB tiles, 4 GiB": tile_rate(8192, REGION_IN_MEMORY)},
    }
    return found | others


def reason_against() -> str:
    """Reason why this GPU's ceilings cannot be measured; "" where they can."""
    arch = capabilities("cuda").arch
    return "" if arch == ARCH else f"these kernels are for {ARCH}, and this GPU takes {arch}."


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise RuntimeError(f"A ceiling's kernel is wrong: {otherwise}.")
