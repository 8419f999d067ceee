# SPDX-License-Identifier: Apache-2.0
"""The kernel that scores measurement's candidates against torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sparge import Unsupported
from sparge.blocks import pack
from sparge.kernels import Element, KernelSpec, capabilities, get_kernel
from sparge.kernels.spec import measuring_element
from sparge.order.grid import raster_order
from sparge.stages.measuring import Measuring, shared_bytes
from sparge.stages.workspace import CallShape, WorkspaceLayout
from tests.session.reference_score import fields_of, score_by_reference

pytestmark = pytest.mark.gpu

BATCH, KV_HEADS, GROUP, BLOCKS = 2, 3, 2, 2
HEADS = KV_HEADS * GROUP
DROPPED = [0.9, 0.4]  # share of the key blocks, of each density but the last
DENSITIES = len(DROPPED) + 1


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of the op but `found`, on the CPU."""

    exact_out: Tensor
    exact_max: Tensor
    exact_sum: Tensor
    q: Tensor  # (B, 2 S x rows, H, D): every second row counts
    workspace: Tensor
    shape: CallShape
    kept: Tensor
    scale: float

    def score(self, found: Tensor, dtype: torch.dtype, *, by_kernel: bool = True) -> None:
        """found: of two orders and of one head more than there are, of which the second order and
        all heads but the first are filled in. dtype: of the exact parts."""
        device = found.device
        exact = (self.exact_out, self.exact_max, self.exact_sum)
        out, most, total = (x.to(device, dtype) for x in exact)
        q = self.q.to(device).transpose(1, 2)[:, :, ::2]
        workspace, kept = self.workspace.to(device), self.kept.to(device)
        given = (out, most, total), q, workspace, self.shape
        if by_kernel:
            measuring = Measuring(q, q, raster_order(64), self.scale)  # it reads no keys
            measuring.score(*given, kept, found[:, 1, :, 1:])
        else:
            score_by_reference(*given, element(), kept, self.scale, found[:, 1, :, 1:])


def element() -> Element:
    """Operand types of measurements on this GPU."""
    return measuring_element(capabilities("cuda").arch)


def inputs(
    channels: int, key_blocks: int, rows: int, generator: torch.Generator, dtype: torch.dtype
) -> Inputs:
    """rows: of each query block. Of some rows some buckets, or all, hold no key; of some query
    blocks no key block is dropped, or all are."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    exact = (BATCH, HEADS, DENSITIES, BLOCKS * rows)
    exact_sum, exact_max = random(*exact).abs() + 0.1, 9 * random(*exact)
    # Of two heads nothing at first, of one nothing at all.
    exact_sum[:, 0, :2], exact_sum[:, 1] = 0, 0
    exact_max[exact_sum == 0] = -torch.inf
    exact_out = (random(*exact, channels) + 3) * exact_sum.unsqueeze(-1)

    shape = CallShape(BATCH, HEADS, KV_HEADS, BLOCKS * 128, key_blocks * 64 - 5, channels)
    layout = WorkspaceLayout(shape, element(), False, True)
    workspace = torch.full((layout.nbytes,), 255, dtype=torch.uint8)  # NaN
    counts = torch.randint(1, 65, (BATCH, 1, key_blocks), generator=generator, dtype=torch.int32)
    counts[1, :, -2:] = 0
    layout.view(workspace, "key_counts").copy_(counts)
    for name in ("k_block_mean", "v_block_mean", "v_mean"):
        field = layout.view(workspace, name).zero_()
        field[..., :channels] = random(*field.shape)[..., :channels]
    layout.view(workspace, "k_block_mean")[:, -1, :, :channels].add_(30)  # logits of hundreds

    rank = random(BATCH, HEADS, 1, BLOCKS, key_blocks).argsort(-1)
    rank[:, 2, :, 0] = -1  # nothing is dropped
    rank[:, :, :, :, 3] = -1  # never
    rank[:, 1, :, 1] = key_blocks  # everything
    rank[:, 3] = torch.where(rank[:, 3] % 7 == 0, key_blocks, -1)  # the same at every density
    least = torch.tensor([1 - share for share in DROPPED]).view(-1, 1, 1) * key_blocks
    kept = (rank < least) & (counts > 0)[:, :, None, None]
    q = random(BATCH, 2 * BLOCKS * rows, HEADS, channels).to(dtype)
    scale = channels**-0.5
    return Inputs(exact_out, exact_max, exact_sum, q, workspace, shape, pack(kept), scale)


def room_for(given: Inputs) -> Tensor:
    """`found` of `Inputs.score`, full of something else."""
    room = (fields_of(DENSITIES), 2, BATCH, HEADS + 1, given.exact_max.shape[-1])
    return torch.full(room, 77.0, device="cuda")


def check(given: Inputs) -> None:
    """Products near 0 keep the rounding of vectors of square 128 x 10 and more."""
    found, expected = room_for(given), room_for(given)
    given.score(found, torch.float32)
    given.score(expected, torch.float64, by_kernel=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [128, 64, 40, 72])
@pytest.mark.parametrize(("key_blocks", "rows"), [(75, 38), (64, 64), (700, 20), (5, 16)])
def test_score(key_blocks: int, rows: int, channels: int, dtype: torch.dtype, generator) -> None:
    """dtype: of the queries."""
    check(inputs(channels, key_blocks, rows, generator, dtype))


def test_few_rows_a_thread_block(generator: torch.Generator) -> None:
    """The weights of 16 do not fit there, and the kernel's thread blocks have fewer."""
    given = inputs(128, 5000, 16, generator, torch.bfloat16)
    sizes = get_kernel(KernelSpec("score", capabilities("cuda").arch, 128), 0).sizes
    assert shared_bytes(given.shape, len(DROPPED), 16, sizes) > 227 * 1024
    check(given)


def test_sizes_that_do_not_fit(generator: torch.Generator) -> None:
    given = inputs(40, 20, 8, generator, torch.bfloat16)
    wide = replace(given, shape=given.shape._replace(keys=64 * 60_000))
    with pytest.raises(Unsupported, match="60000 key blocks, whose weights do not fit"):
        wide.score(room_for(given), torch.float32)
