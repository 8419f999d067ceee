# SPDX-License-Identifier: Apache-2.0
"""Methods compared, all in the same 8-bit arithmetic: what each keeps, and its substitute for the
rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from benchmarks.quality.at_once import attend_at_once
from benchmarks.quality.centroid import centroids
from benchmarks.shares import share_of
from sparge.head_settings import HeadBudget, Router
from sparge.kernels.spec import Element
from sparge.order.variants import TURNS
from sparge.policy import SparsePolicy
from sparge.reference.choose import Choice, choose_blocks
from sparge.reference.packed import Packed
from sparge.reference.partial import Partial
from sparge.reference.pooled import attend_packed, with_contrast
from sparge.reference.route import route

ELEMENT = Element.INT8_E4M3  # compute type of the native kernels of Ada, Hopper and Blackwell


@dataclass(frozen=True)
class Mode:
    name: str
    cubes: bool
    """Packed cube order where the tokens have a grid; else the order they come in."""
    gain: float = 0.0
    router: Router = Router.MASS
    centroid: bool = False
    """One pooled term a query block, from its mean query, for all that it drops."""
    measured: bool = False
    """Whether calibration chose what a head keeps and how it makes up for the rest, under the mean
    density."""
    upstream: bool = False
    """Routing as upstream has it: a ragged last block weighs as much as a whole one."""
    text_sink: bool = False
    """Under causal the first key block is exact: a language model's first token takes the attention
    that a head has no use for, and the mean of its block hides it from routing."""

    @property
    def turns(self) -> int:
        """Number of variants of the token order that the steps of a sampling run take in turn."""
        return TURNS if self.cubes and not self.centroid else 1

    def rules(self, budget: HeadBudget, is_causal: bool) -> tuple[SparsePolicy, HeadBudget | None]:
        """Arguments that attention is given for `budget`: a policy says what it can say of that, as
        in mode manual of the node."""
        policy = SparsePolicy(attention_sink=self.text_sink and is_causal)
        if self.measured or self.gain > 0:
            return policy, budget
        return replace(policy, topk=budget.density), None


MODES = (
    # Upstream SpargeAttn: pooled top-k, dropped blocks are gone.
    Mode("drop", cubes=False, upstream=True),
    # Sol-Attn (arXiv 2607.24027) orders tokens along a space-filling curve. ComfyUI's port leaves
    # that out; with cubes it is the harder one to beat.
    Mode("sol", cubes=True, centroid=True),
    # Mode of the library without a measurement.
    Mode("ours manual", cubes=True, text_sink=True),
    Mode("ours auto", cubes=True, measured=True, text_sink=True),
)
#: Pooled keys and router the same in every head, asked for by name: right for encoders, ruinous for
#: flat heads.
RESIDUAL = Mode("ours residual", cubes=True, gain=1.0, router=Router.ERROR, text_sink=True)
BY_NAME = {mode.name: mode for mode in (*MODES, RESIDUAL)}


def uniform(mode: Mode, heads: int, share: float) -> HeadBudget:
    """Head settings of a mode that treats all heads alike."""
    return HeadBudget.uniform(heads, share, mode.gain, mode.router)


def attend(
    mode: Mode,
    packed: Packed,
    budget: HeadBudget,
    *,
    is_causal: bool = False,
    query_blocks: Tensor | None = None,
    at_once: bool = False,
) -> tuple[Tensor, Choice]:
    """Attention of a mode by slot, (B, H, Nq, D) float32, and what it chose everywhere.

    query_blocks: (nq,) bool, those to compute; the rows of others hold nothing of meaning. at_once:
    in few large products, which is quicker for all query blocks; not for causal.
    """
    scale = packed.operands.head_dim**-0.5
    choice = choose(mode, packed, budget, is_causal)
    kept, pooled, valid = choice.kept, choice.pooled, choice.valid
    if query_blocks is not None:
        kept, pooled, valid = (x & query_blocks[:, None] for x in (kept, pooled, valid))
    if at_once:
        part = attend_at_once(packed, kept, pooled, budget.gain, scale=scale)
    else:
        attended = attend_packed(
            packed,
            kept,
            pooled,
            budget.gain,
            scale=scale,
            is_causal=is_causal,
        )
        part = Partial(attended.unnormalised, attended.row_max, attended.row_sum)
    if mode.centroid:
        part = part.plus(centroids(packed, valid & ~kept, scale=scale))
    out = part.output()
    if budget.contrast is not None:
        out = with_contrast(out, part.row_sum, packed.operands, kept, budget.contrast)
    return out, choice


def choose(mode: Mode, packed: Packed, budget: HeadBudget, is_causal: bool) -> Choice:
    """Blocks that a mode keeps and pools."""
    scale, (policy, own) = packed.operands.head_dim**-0.5, mode.rules(budget, is_causal)
    choice = choose_blocks(packed, policy, own, scale=scale, is_causal=is_causal)
    if not mode.upstream:
        return choice
    plan = route(packed.operands, policy, scale=scale, is_causal=is_causal)
    return replace(choice, kept=plan.kept())


def reached_density(choice: Choice) -> Tensor:
    """(heads,) float64: kept over valid query-key pairs."""
    return choice.kept_pairs().sum(0).double() / choice.valid_pairs().sum(0).double()


def share_for(mode: Mode, packed: Packed, density: float, is_causal: bool) -> float:
    """Largest share of key blocks a query block whose density does not exceed `density`.

    They differ: forced blocks come on top, and under causal the early query blocks see few keys. A
    density that forced blocks alone exceed gives the least share there is.
    """
    blocks, heads = packed.operands.key_counts.shape[1], packed.operands.heads

    def density_of(count: int) -> float:
        budget = HeadBudget.uniform(heads, share_of(count, blocks))
        return float(reached_density(choose(mode, packed, budget, is_causal)).mean())

    low, high = 1, blocks + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if density_of(middle) <= density else (low, middle)
    return share_of(low, blocks)
