# SPDX-License-Identifier: Apache-2.0
"""Bounds on the distance of a call from `tests.fuzz.oracle`, derived from the steps of its
roundings.

A logit s_j = scale q.k_j is off by d_j, a weight p_j by a relative e_j and a value by dv_j. Then

    out' - out = sum p_j (exp(d_j) - 1) (v_j - out) / sum p_j exp(d_j)  +  sum p_j (e_j v_j + dv_j)

with values around their mean, which is added unrounded. Every term is bounded twice. Errors of
independent roundings have the variance step^2 / 12, add up like random numbers, and pass their
expected square by a factor that `Confidence` knows. Errors of STRUCTURED data may all have one
sign: their largest values add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.fuzz.data import STRUCTURED
from tests.fuzz.oracle import Exact, Setting
from tests.fuzz.rounding import FLOOR, INT8_LEVELS, UNIT, Arithmetic, casts


@dataclass(frozen=True)
class Confidence:
    """Confidence of one in 10^9 that a test of `rows` rows fails by chance.

    A sum of independent roundings exceeds sqrt(2 x) deviations with a chance of 2 exp(-x), as
    rounding errors are sub-Gaussian with their variance; its square summed over channels exceeds (1
    + sqrt(2 x))^2 times what is expected with exp(-x), as no direction has more than all of it.
    """

    rows: int

    @property
    def x(self) -> float:
        return math.log(max(1, self.rows) / 1e-9)

    @property
    def deviations(self) -> float:
        return math.sqrt(2 * self.x)

    @property
    def norm(self) -> float:
        return 1 + math.sqrt(2 * self.x)


@dataclass(frozen=True, eq=False)
class Bounds:
    """out: (B, H, Nq), norms over channels. lse: (B, H, Nq)."""

    out: Tensor
    lse: Tensor
    expected: Tensor
    """(B, H, Nq): square of out's error that independent roundings make on average; NaN where they
    are not independent, or more than the first order counts."""


def logit_errors(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Steps of INT8 queries (B, H, Nq), rotated ones in bf16 before, and of keys (B, H, Nk). What
    a logit of the row loses at most to float32 (B, H, Nq): sums over channels, and the product with
    the scales."""
    keys = (setting.k - setting.key_centre).masked_fill(~setting.valid[:, None, :, None], 0)
    q, keys = operands(setting, keys)
    largest = setting.case.scale * q.norm(dim=-1) * keys.norm(dim=-1).amax(-1, keepdim=True)
    if not Arithmetic.of(setting).int8:
        steps = q.shape[-1] + 16
        lost = largest * (steps * 2.0**-23 + 2 * casts(setting))
        return torch.zeros_like(q[..., 0]), torch.zeros_like(keys[..., 0]), lost
    q_step = q.abs().amax(-1) / INT8_LEVELS
    kept = 2 * UNIT[torch.bfloat16] * (setting.channel_factors.amax(-1) > 0)
    if setting.case.data in STRUCTURED:
        q_step = q_step + kept * q.abs().amax(-1)
    else:
        q_step = (q_step.square() + kept**2 * q.square().mean(-1)).sqrt()
    k_step = setting.largest_by_block(keys.abs().amax(-1)) / INT8_LEVELS
    return q_step, k_step, largest * 2.0**-20


def operands(setting: Setting, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Queries, and keys (B, H, C, D) around the centre, whose channels are rounded: balanced and
    rotated ones where they become INT8. Their products are those of the queries and keys given."""
    if not Arithmetic.of(setting).int8:
        return setting.q, keys
    factors = setting.channel_factors
    balances = factors.amax(-1, keepdim=True) > 0
    divided = keys / factors.masked_fill(~balances, 1)
    rotated = _rotated(setting.q * factors), _rotated(divided)
    eights = (0, -keys.shape[-1] % 8)
    plain = pad(setting.q, eights), pad(keys, eights)
    q, keys = (torch.where(balances, *both) for both in zip(rotated, plain, strict=True))
    return q, keys


def _rotated(x: Tensor) -> Tensor:
    """Eight neighbouring channels times an orthogonal matrix, those beyond the last being 0."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=x.dtype, device=x.device) / math.sqrt(2)
    eights = pad(x, (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (eights @ torch.kron(torch.kron(two, two), two)).flatten(-2)


def slack(setting: Setting) -> Tensor:
    """(B, H, Nq): how far a logit of the row may be off."""
    q_step, k_step, float_error = logit_errors(setting)
    keys = setting.k - setting.key_centre
    return _reach(setting, _deviation(setting, keys, q_step, k_step)).amax(-1) + float_error


def _deviation(setting: Setting, keys: Tensor, q_step: Tensor, k_step: Tensor) -> Tensor:
    """(B, H, Nq, C): deviation of the error that INT8 makes of each logit, of structured data the
    error itself at most; keys (B, H, C, D) around the centre."""
    q, keys = operands(setting, keys)
    channels = q.shape[-1]
    q_step, k_step = q_step[..., None], k_step[:, :, None]
    if setting.case.data in STRUCTURED:
        of_keys = q.abs().sum(-1, keepdim=True) * k_step / 2
        of_queries = keys.abs().sum(-1)[:, :, None] + channels * k_step / 2
        return setting.case.scale * (of_keys + of_queries * q_step / 2)
    squares = (q.square().sum(-1, keepdim=True) + channels * q_step.square() / 12) * k_step.square()
    squares = squares + keys.square().sum(-1)[:, :, None] * q_step.square()
    return setting.case.scale * (squares / 12).sqrt()


def _reach(setting: Setting, deviation: Tensor) -> Tensor:
    """Largest of errors with these deviations."""
    if setting.case.data in STRUCTURED:
        return deviation
    return Confidence(deviation.numel()).deviations * deviation


def bounds(setting: Setting, exact: Exact, out_dtype: torch.dtype) -> Bounds:
    return _Row(setting, exact).bounds(out_dtype)


class _Row:
    """Material of the bounds of each row."""

    def __init__(self, setting: Setting, exact: Exact) -> None:
        self.setting, self.exact, self.scale = setting, exact, setting.case.scale
        self.arithmetic = Arithmetic.of(setting)
        self.structured = setting.case.data in STRUCTURED
        self.sure = Confidence(exact.seen.numel())
        self.q_step, k_step, self.float_error = logit_errors(setting)
        q, self.keys = operands(setting, exact.keys)
        self.k_step = _with_pools(setting, self.keys, k_step)
        self.q_length = q.square().sum(-1)
        self.centred = exact.p @ exact.values  # output before output scale
        # Logits: the deviation of each, and the most it is off by.
        self.deviation = _deviation(setting, exact.keys, self.q_step, self.k_step)
        self.furthest_off = _reach(setting, self.deviation) + self.float_error[..., None]
        self.most = self.furthest_off.clamp(max=50)  # exp of more is inf, and inf times p = 0 NaN
        self.least_sum = (exact.p * (-self.most).exp()).sum(-1)
        # Weights within a few roundings of each other are rounded alike.
        logits = exact.logits.masked_fill(exact.p == 0, 0)
        mean = (exact.p * logits).sum(-1, keepdim=True)
        spread = (exact.p * (logits - mean).square()).sum(-1).sqrt()
        self.alike = (spread < 8 * self.arithmetic.p_unit) | self.structured

    def bounds(self, out_dtype: torch.dtype) -> Bounds:
        setting, exact, arithmetic = self.setting, self.exact, self.arithmetic
        p, values, centred = exact.p, exact.values, self.centred
        channels = setting.q.shape[-1]
        length = values.square().sum(-1)[:, :, None]
        distance = length - 2 * centred @ values.mT + centred.square().sum(-1, keepdim=True)
        distance = distance.clamp(min=0)  # |v_j - out|^2 for each row
        grown = p * self.most.expm1()
        all_logits = (grown * distance.sqrt()).sum(-1)
        beyond_first = ((grown - p * self.most) * distance.sqrt()).sum(-1)
        shaken = (p * distance.sqrt()).sum(-1) * self.float_error
        peaked = _peaked(exact.logits, self.furthest_off, distance.sqrt())

        v_units = _value_units(setting, arithmetic, p.shape[-1])
        weights = arithmetic.p_unit**2 * p.square()
        weights = weights * (length + distance if arithmetic.sums_rounded else length)
        v_floor = (arithmetic.v_floor * _largest_value(setting)).square().sum(-1)
        of_values = v_units.square() * p.square() * length
        p_floor = (arithmetic.p_floor * p.amax(-1)) * ((p > 0) * length).sum(-1).sqrt()
        counted = p.square().sum(-1)
        rounded = ((arithmetic.p_unit + v_units) * p * length.sqrt()).sum(-1)
        if arithmetic.sums_rounded:
            rounded = rounded + arithmetic.p_unit * centred.norm(dim=-1)
        rounded = rounded + p_floor * math.sqrt(p.shape[-1]) + v_floor[..., None].sqrt()
        floats = (p.shape[-1] / 8 + 32) * arithmetic.float_unit
        floats = floats * ((p * length.sqrt()).sum(-1) + centred.norm(dim=-1))
        # The reference takes values around their mean in 16 bits too.
        floats = floats + 2.0**-22 * setting.mean(setting.v).norm(dim=-1)
        output_scale = exact.output_scale.abs()
        written = UNIT[out_dtype] * exact.out.norm(dim=-1) + FLOOR[out_dtype] * math.sqrt(channels)

        of_keys = (p.square() * self.k_step.square()[:, :, None] * distance).sum(-1) * self.q_length
        of_queries = self.q_step.square() * _covariance(p, self.keys, values, centred)
        first = self.scale**2 / 12 * (of_keys + of_queries)
        roundings = (weights + of_values).sum(-1) / 3 + p_floor.square() / 3
        roundings = roundings + v_floor[..., None] * counted / 3
        expected = (first + roundings) * output_scale.square() + written.square() / 3
        higher = (p * self.deviation.square() * distance.sqrt()).sum(-1) * output_scale
        expected_all = (expected + higher.square()) / self.least_sum.square()

        if self.structured:
            of_logits, of_rounding = all_logits / self.least_sum, rounded
        else:
            of_logits = self.sure.norm * first.sqrt() + beyond_first + shaken
            of_logits = of_logits / self.least_sum
            of_rounding = torch.where(self.alike, rounded, self.sure.norm * roundings.sqrt())
        out = output_scale * (of_logits.minimum(peaked) + of_rounding + floats) + written
        known = ~self.alike & exact.seen & (higher.square() < 0.1 * expected)
        known = known & (2 * (shaken + floats) * output_scale < expected.sqrt())
        lse = self.lse_bound()
        if exact.doubtful is not None:
            lost = p[..., : exact.doubtful.shape[-1]].masked_fill(~exact.doubtful, 0).sum(-1)
            furthest = distance.masked_fill(p == 0, 0).amax(-1).sqrt()
            spoilt = lost / (1 - lost).clamp(min=1e-12)
            out, lse = out + output_scale * spoilt * furthest * 2, lse + spoilt
            known = known & (lost == 0)
        out = out.masked_fill(~exact.seen, 0)  # such rows are 0, exactly
        return Bounds(out, lse, expected_all.masked_fill(~known, torch.nan))

    def lse_bound(self) -> Tensor:
        """log sum p exp(d), and row sums of rounded P where they are."""
        setting, exact, arithmetic, p = self.setting, self.exact, self.arithmetic, self.exact.p
        lse = exact.lse.masked_fill(~exact.seen, 0)
        off = (exact.logits - lse.unsqueeze(-1) + self.furthest_off).logsumexp(-1)
        if not self.structured:
            first = self.q_length * (p.square() * self.k_step.square()[:, :, None]).sum(-1)
            first = first + self.q_step.square() * (p @ self.keys).square().sum(-1)
            second = (p * (self.most.expm1() - self.most)).sum(-1) + self.float_error
            by_chance = self.sure.deviations * self.scale * (first / 12).sqrt() + second
            off = off.minimum(by_chance / self.least_sum)
        if arithmetic.sums_rounded:
            by_chance = p.square().sum(-1).sqrt() / math.sqrt(3)
            by_chance = self.sure.deviations * arithmetic.p_unit * by_chance
            most = by_chance.clamp(max=arithmetic.p_unit)
            off = off + torch.where(self.alike, arithmetic.p_unit, most)
            off = off + arithmetic.p_floor * p.shape[-1]
        shift = setting.q.norm(dim=-1) * setting.key_centre.norm(dim=-1) * self.scale
        tokens = p.shape[-1] / 8 + 32
        floats = (lse.abs() + shift) * (setting.q.shape[-1] + 8) * 2.0**-24
        return off + floats + tokens * arithmetic.float_unit


def _peaked(logits: Tensor, off: Tensor, distance: Tensor) -> Tensor:
    """(B, H, Nq): how far the output is at most where one key has nearly all of the weight, however
    large the errors of logits are: it stays near that key's value, as the others cannot come up."""
    top = logits.argmax(-1, keepdim=True)
    behind = logits - logits.gather(-1, top) + off + off.gather(-1, top)
    share = behind.nan_to_num(-math.inf).clamp(max=0).exp().scatter(-1, top, 0.0)
    own = distance.gather(-1, top)
    return (share * (distance + own)).sum(-1) + own.squeeze(-1)


def _with_pools(setting: Setting, keys: Tensor, k_step: Tensor) -> Tensor:
    """(B, H, C): pooled keys have a step of their own."""
    rest = keys[:, :, k_step.shape[2] :].abs().amax(-1)
    arithmetic = Arithmetic.of(setting)
    if not arithmetic.int8:  # a mean of 16-bit keys is rounded to 16 bits
        return torch.cat([k_step, rest * 2 * arithmetic.mean_unit], 2)
    return torch.cat([k_step, rest / INT8_LEVELS], 2)


def _value_units(setting: Setting, arithmetic: Arithmetic, columns: int) -> Tensor:
    """(C,): relative rounding of the columns' values."""
    units = setting.q.new_full((columns,), arithmetic.v_unit + casts(setting))
    if not arithmetic.int8:
        units[setting.k.shape[2] :] = arithmetic.mean_unit
    return units


def _covariance(p: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """(B, H, Nq): squared norm of the matrix sum_j p_j k_j (v_j - out)^T, for an error of q moves
    the output by that matrix times it; by way of the keys' and values' Gram matrices."""
    products = keys @ keys.mT
    mean_key = p @ keys
    along_out, along_mean = out @ values.mT, mean_key @ keys.mT
    squared = (p * (p @ (products * (values @ values.mT)))).sum(-1)
    squared = squared - 2 * (p * along_out * along_mean).sum(-1)
    return (squared + out.square().sum(-1) * mean_key.square().sum(-1)).clamp(min=0)


def _largest_value(setting: Setting) -> Tensor:
    """(B, H, D): of a channel, around the centre."""
    values = setting.v - setting.value_centre
    return values.masked_fill(~setting.valid[:, None, :, None], 0).abs().amax(2)
