# SPDX-License-Identifier: Apache-2.0
"""The bound of a call follows from the ceilings as the formula says; their kernels compile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.ceilings import measure
from benchmarks.ceilings.kernel import image
from benchmarks.limits import Ceilings, bound, bounds, ceilings, read_ceilings
from benchmarks.shapes import SHAPES, Shape
from sparge import TokenGrid
from sparge.kernels.cubin import read_launch_info

MOST = Ceilings(
    int8_ops=1.6e15,
    e4m3_ops=1.2e15,
    bf16_flops=7e14,
    exp2=3.7e12,
    e4m3_conversions=3e13,
    tile_bytes=8e12,
    copy_bytes=4e12,
)
SMALL = Shape("small", 3, 1280, 64, TokenGrid(5, 16, 16))


def test_each_part_is_its_work_over_its_rate() -> None:
    pairs = 3 * 1280 * 1280 * 0.25
    found = bound(SMALL, 0.25, MOST)
    assert found.tensor == pytest.approx(1e3 * 2 * 64 * pairs * (1 / 1.6e15 + 1 / 1.2e15))
    assert found.exponential == pytest.approx(1e3 * pairs / 3.7e12)
    assert found.conversion == pytest.approx(1e3 * pairs / 3e13)
    elements = 3 * 1280 * 64
    tiles = 10 * 20 * 0.25 * 3 * (2 * 64 * 64)  # 10 query blocks see a quarter of 20 key blocks
    assert found.memory == pytest.approx(1e3 * max(tiles / 8e12, 4 * elements / 4e12))
    block_products = 2 * 64 * 3 * 10 * 20
    prepared = 12 * elements / 4e12 + block_products / 7e14
    assert found.preparation == pytest.approx(1e3 * prepared)
    assert bound(SMALL, 1.0, MOST).preparation == pytest.approx(1e3 * 12 * elements / 4e12)


@pytest.mark.parametrize("kind", ["int8_ops", "exp2", "e4m3_conversions", "tile_bytes"])
def test_the_slowest_part_is_the_bound(kind: str) -> None:
    slow = replace(MOST, **{kind: getattr(MOST, kind) / 1000})
    mochi = SHAPES["mochi"]
    found = bound(mochi, 0.2, slow)
    parts = {
        "int8_ops": found.tensor,
        "exp2": found.exponential,
        "e4m3_conversions": found.conversion,
        "tile_bytes": found.memory,
    }
    assert found.total == pytest.approx(parts[kind] + found.preparation)
    assert found.total > 20 * bound(mochi, 0.2, MOST).total


def test_exponentials_bound_the_narrow_heads_and_products_the_wide() -> None:
    narrow, wide = bound(SHAPES["cogx2b"], 1.0, MOST), bound(SHAPES["mochi"], 1.0, MOST)
    assert narrow.exponential > narrow.tensor
    assert wide.tensor > wide.exponential


def test_pseudo_keys_cost_a_sixty_fourth_of_dense() -> None:
    with_pools = bound(SMALL, 0.5, MOST, pooled_heads=1.0)
    assert with_pools.tensor == pytest.approx(bound(SMALL, 0.5 + 1 / 64, MOST).tensor)
    assert with_pools.preparation == bound(SMALL, 0.5, MOST).preparation


def rates() -> dict[str, dict[str, float | str]]:
    found: dict[str, dict[str, float | str]] = {
        kind: {"one": rate / 2, "other": rate} for kind, rate in MOST.__dict__.items()
    }
    found["int8_ops"]["torch._int_mm"] = "not on this GPU"
    found["int32_conversions"] = {"cvt": 1.0}  # not in the model
    return found


def test_ceilings_are_the_most_of_each_kind(tmp_path: Path) -> None:
    assert ceilings(rates()) == MOST
    path = tmp_path / "limits.json"
    assert read_ceilings(path) is None
    path.write_text(json.dumps({"gpu": "some GPU", "rates": rates()}))
    assert read_ceilings(path) == MOST
    with pytest.raises(ValueError, match="exp2"):
        ceilings(rates() | {"exp2": {"one": "it failed"}})


def test_every_shape_and_density_has_a_bound() -> None:
    rows = bounds(MOST)
    assert len(rows) == 5 * len(SHAPES)
    for row in rows:
        wanted = bound(SHAPES[row["shape"]], row["density"], MOST)
        assert row["total"] == pytest.approx(wanted.total, abs=1e-4)


@pytest.mark.parametrize("shape", measure.PRODUCT_SHAPES, ids=lambda shape: f"{shape}")
def test_product_kernels_compile(shape: measure.ProductShape) -> None:
    assert read_launch_info(image("products", **shape.defines)).threads == 2 * 128


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_special_kernels_compile(kind: int) -> None:
    info = read_launch_info(image("special", SPECIAL_KIND=kind))
    assert measure.SPECIAL_STEPS % info.threads == 0 == info.shared_bytes


@pytest.mark.parametrize("tile_bytes", [4096, 8192])
def test_two_blocks_of_tiles_fit_a_multiprocessor(tile_bytes: int) -> None:
    shared = read_launch_info(image("tiles", TILE_BYTES=tile_bytes)).shared_bytes
    assert 2 * (shared + 1024) <= 228 * 1024


@pytest.mark.gpu
def test_the_kernels_compute_what_they_time() -> None:
    if reason := measure.reason_against():
        pytest.skip(reason)
    for shape in measure.PRODUCT_SHAPES:
        assert measure.product_rate(shape) > 1e14
    assert measure.special_rate(0) > 1e12
    for tile_bytes in (4096, 8192):
        # Tiles of the L2 come faster than memory could ever bring them.
        assert measure.tile_rate(tile_bytes, measure.REGION_IN_L2) > measure.copy_rate()
    assert torch.cuda.memory_allocated() < 2**30, "nothing large stays"
