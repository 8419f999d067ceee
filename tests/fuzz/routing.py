# SPDX-License-Identifier: Apache-2.0
"""Whether a block map is one that the policy, order and budget of a call may make: forced blocks,
how many others, and those of the highest rank, up to ties that float32 may break either way."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge import Router
from tests.fuzz.oracle import KEY_BLOCK, QUERY_BLOCK, Setting
from tests.fuzz.rounding import UNIT

#: Self-similarities, 0 to 1, agree to about this; nearer to the threshold it may go either way.
NEAR = 2e-3
LEAST_ERROR = 1e-30


class Routing:
    """Facts of all blocks, float64: (B, H, nq, nk) unless said otherwise."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.case, self.policy = setting.case, setting.case.policy
        self.counts = setting.key_counts()
        self.query_counts = _sum_queries(setting, torch.ones_like(setting.q[..., :1])).squeeze(-1)

    def exists(self) -> Tensor:
        """The block holds a pair."""
        exists = (self.counts > 0).unsqueeze(2).expand(-1, -1, self.setting.query_blocks, -1)
        if not self.case.is_causal:
            return exists
        queries, device = self.setting.q.shape[2], exists.device
        rows = torch.arange(self.setting.query_blocks, device=device)
        last = ((rows + 1) * QUERY_BLOCK - 1).clamp(max=queries - 1)
        first_key = torch.arange(exists.shape[-1], device=device) * KEY_BLOCK
        return exists & (first_key <= last.unsqueeze(-1))

    def judge(self, kept: Tensor, faults: list[str], mask: Tensor | None) -> None:
        """Adds what is wrong to `faults`. mask: replaces ranking."""
        exists = self.exists()
        if kept.shape != exists.shape:
            faults.append(f"map of shape {tuple(kept.shape)}, not {tuple(exists.shape)}")
            return
        if mask is not None:
            if not torch.equal(kept, mask & exists):
                faults.append("the map is not the mask")
            return
        if (kept & ~exists).any():
            faults.append("a block without pairs is kept")
        forced, maybe_forced = self._forced(exists)
        dense, maybe_dense = self._dense()
        if (forced & ~maybe_forced & ~kept).any():
            faults.append("a forced block is dropped")
        if ((dense & ~maybe_dense).unsqueeze(-1) & exists & ~kept).any():
            faults.append("a dense row drops a block")
        ranked = exists & ~forced
        judged = ~dense & ~maybe_dense & ~maybe_forced.any(-1)
        low, high = self._scores(exists)
        self._judge_counts(kept, ranked, forced, low, high, judged, faults)
        least_kept = high.masked_fill(~(ranked & kept), torch.inf).amin(-1)
        most_dropped = low.masked_fill(~ranked | kept, -torch.inf).amax(-1)
        wrong = judged & (most_dropped > least_kept)
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            faults.append(
                f"a block of rank {most_dropped[wrong][0]:.6g} is dropped, one of "
                f"{least_kept[wrong][0]:.6g} kept, in row {where}"
            )

    def _judge_counts(
        self,
        kept: Tensor,
        ranked: Tensor,
        forced: Tensor,
        low: Tensor,
        high: Tensor,
        judged: Tensor,
        faults: list[str],
    ) -> None:
        found = (kept & ranked).sum(-1)
        least, most = self._counts(ranked, forced.sum(-1), low, high)
        available = ranked.sum(-1)
        wrong = judged & ((found < least.minimum(available)) | (found > most.minimum(available)))
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            faults.append(
                f"{int(found[wrong][0])} ranked blocks kept, not {int(least[wrong][0])} to "
                f"{int(most[wrong][0])} of {int(available[wrong][0])}, in row {where}"
            )

    def _counts(
        self, ranked: Tensor, forced: Tensor, low: Tensor, high: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(B, H, nq): ranked blocks to be kept, at least and at most."""
        head_settings, policy, blocks = self.case.head_settings, self.policy, ranked.shape[-1]
        floor = 1 if head_settings is None else head_settings.floor
        if head_settings is not None:
            share = self._per_head(head_settings.density)
        else:
            share = self._per_head(policy.topk if policy.select_by == "topk" else policy.cdfthreshd)
        if policy.select_by == "topk":
            counts = [
                (share * blocks * near).floor().clamp(min=floor).expand(forced.shape).long()
                for near in (1 - 1e-6, 1 + 1e-6)
            ]
            if (
                head_settings is not None or self.case.order is not None
            ):  # whole steps of two blocks
                counts = [count + (count + forced) % 2 for count in counts]
            return counts[0], counts[1]
        middle = ((low + high) / 2).masked_fill(~ranked, -torch.inf)
        mass = middle.softmax(-1).nan_to_num(0.0).sort(-1, descending=True).values.cumsum(-1)
        doubt = (high - low).masked_fill(~ranked, 0).amax(-1, keepdim=True) * 2 + 1e-5
        limit = share.unsqueeze(-1)
        everything = limit >= 1 - 1e-7
        most = ((mass <= limit + doubt) | (limit >= 1 - doubt)).sum(-1).clamp(min=floor)
        least = ((mass <= limit - doubt) | everything).sum(-1).clamp(min=floor)
        return least, most

    def _scores(self, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Scores that blocks are ranked by, at least and at most."""
        setting, case, head_settings = self.setting, self.case, self.case.head_settings
        share = 1 / self.counts.clamp(min=1).unsqueeze(-1)
        keys = self._centred_keys()
        mean_key = setting.by_block(keys) * share
        query_share = 1 / self.query_counts.clamp(min=1).unsqueeze(-1)
        mean_query = _sum_queries(setting, setting.q) * query_share
        mass = mean_query @ mean_key.mT * case.scale
        long_key = setting.by_block(keys.norm(dim=-1, keepdim=True)) * share
        long_query = _sum_queries(setting, setting.q.norm(dim=-1, keepdim=True)) * query_share
        tensor_cores = mean_query.norm(dim=-1, keepdim=True) @ mean_key.norm(dim=-1)[:, :, None]
        doubt = case.scale * (2.0**-14 * tensor_cores + 2.0**-17 * long_query @ long_key.mT) + 1e-7
        if head_settings is not None or case.order is not None:
            mass = mass + (self.counts / KEY_BLOCK).log().unsqueeze(2)
        if (
            head_settings is None
            or not head_settings.pools
            or not (head_settings.router == Router.ERROR).any()
        ):
            return mass - doubt, mass + doubt
        error = self._errors(mass, exists, keys, mean_key, mean_query, share)
        by_error = (head_settings.router == Router.ERROR)[:, None, None]
        return (
            torch.where(by_error, error[0], mass) - doubt,
            torch.where(by_error, error[1], mass) + doubt,
        )

    def _errors(
        self,
        mass: Tensor,
        exists: Tensor,
        keys: Tensor,
        mean_key: Tensor,
        mean_query: Tensor,
        share: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """mass + s / 2 + log of sqrt((s / 2)^2 |mean(V_j) - o|^2 + s / 64 tr Var(V_j)), s the
        variance of the block's logits and o the pooled output; variances of keys and means of
        values lie in bf16 between quantize and route."""
        setting, unit = self.setting, UNIT[torch.bfloat16]
        block = setting.k_block[None, :, :, None].expand_as(keys)
        key_off = (keys - mean_key.gather(2, block)).masked_fill(~self._valid(), 0)
        key_variance = setting.by_block(key_off.square()) * share
        values = (setting.v - setting.value_centre).masked_fill(~self._valid(), 0)
        mean_value = setting.by_block(values) * share
        value_off = (values - mean_value.gather(2, block)).masked_fill(~self._valid(), 0)
        scatter = (setting.by_block(value_off.square()) * share).sum(-1).unsqueeze(2)
        weights = mass.masked_fill(~exists, -torch.inf).softmax(-1).nan_to_num(0.0)
        output = weights @ mean_value
        distance = torch.cdist(output, mean_value)
        longest = mean_value.norm(dim=-1)[:, :, None]
        off = unit * (longest + longest.amax(-1, keepdim=True))
        scale = self.case.scale
        variance = scale**2 * mean_query.square() @ key_variance.mT
        largest = keys.abs().amax((-2, -1))[..., None, None]
        floor = (scale * mean_query.norm(dim=-1, keepdim=True) * largest).square() * 2.0**-36
        found = []
        for sign in (-1, 1):
            s = (variance * (1 + sign * unit) + sign * floor).clamp(min=0)
            far = (distance + sign * off).clamp(min=0)
            squared = (s / 2 * far).square() + s / KEY_BLOCK * scatter * (1 + sign * 2.0**-10)
            found.append(mass + s / 2 + squared.clamp(min=LEAST_ERROR).log() / 2)
        return found[0], found[1]

    def _forced(self, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks that are kept whatever their rank, and those that may or may not be."""
        setting, policy, order = self.setting, self.policy, self.case.order
        share = 1 / self.counts.clamp(min=1).unsqueeze(-1)
        directions = _directions(self._centred_keys())
        similarity = (setting.by_block(directions) * share).square().sum(-1)
        forced, near = self._below(similarity)
        starts = torch.arange(setting.key_blocks, device=exists.device) * KEY_BLOCK
        if policy.attention_sink:
            forced = forced | (starts == 0)
        if order is None:
            lengths = self.counts.sum(-1, keepdim=True)
            forced = forced | (starts < policy.exact_prefix)
            forced = forced | (starts + self.counts > lengths - policy.exact_suffix)
        else:
            for part in order.segments:
                if part.keys_exact:
                    inside = slice(part.first_token, part.first_token + part.tokens)
                    blocks = setting.k_block[0, inside].unique()
                    forced[..., blocks] = True
        forced, near = forced.unsqueeze(2), near.unsqueeze(2)
        if self.case.is_causal and policy.keep_diagonal:
            rows = torch.arange(setting.query_blocks, device=exists.device) * QUERY_BLOCK
            forced = forced | (starts + KEY_BLOCK > rows.unsqueeze(-1))
        return forced & exists, near & exists

    def _dense(self) -> tuple[Tensor, Tensor]:
        """(B, H, nq): query blocks that drop nothing, and those that may or may not."""
        setting, policy, order = self.setting, self.policy, self.case.order
        share = 1 / self.query_counts.clamp(min=1).unsqueeze(-1)
        mean = _sum_queries(setting, _directions(setting.q)) * share
        dense, near = self._below(mean.square().sum(-1))
        if order is None:
            starts = torch.arange(setting.query_blocks, device=dense.device) * QUERY_BLOCK
            dense = dense | (starts < policy.exact_prefix)
            ends = starts + self.query_counts
            dense = dense | (ends > setting.q.shape[2] - policy.exact_suffix)
        else:
            for part in order.segments:
                if part.queries_exact:
                    inside = slice(part.first_token, part.first_token + part.tokens)
                    dense[..., setting.q_block[0, inside].unique()] = True
        return dense, near

    def _below(self, similarity: Tensor) -> tuple[Tensor, Tensor]:
        threshold = self._per_head(self.policy.simthreshd1)
        return similarity <= threshold, (similarity - threshold).abs() < NEAR

    def _centred_keys(self) -> Tensor:
        keys = self.setting.k - self.setting.key_centre
        return keys.masked_fill(~self._valid(), 0)

    def _valid(self) -> Tensor:
        return self.setting.valid[:, None, :, None]

    def _per_head(self, value: float | Tensor) -> Tensor:
        """(H, 1)."""
        device, heads = self.setting.q.device, self.setting.q.shape[1]
        value = torch.as_tensor(value, dtype=torch.float64, device=device)
        return value.expand(heads).unsqueeze(-1)


def _sum_queries(setting: Setting, of_queries: Tensor) -> Tensor:
    """(B, H, Nq, X) summed over query blocks: (B, H, nq, X)."""
    batch, heads, _, wide = of_queries.shape
    sums = of_queries.new_zeros(batch, heads, setting.query_blocks, wide)
    index = setting.q_block[None, :, :, None].expand_as(of_queries)
    return sums.scatter_add_(2, index, of_queries)


def _directions(rows: Tensor) -> Tensor:
    length = rows.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, rows / length.clamp(min=1e-300), 0.0)
