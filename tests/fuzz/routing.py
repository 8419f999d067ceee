# SPDX-License-Identifier: Apache-2.0
"""Whether a block map is one that the policy, order and budget of a call may make: forced blocks,
how many others, and those of the highest rank, up to ties that float32 may break either way."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge import Router
from tests.fuzz.oracle import KEY_BLOCK, QUERY_BLOCK, Setting
from tests.fuzz.rounding import Arithmetic

#: Self-similarities, 0 to 1, agree to about this; nearer to the threshold it may go either way.
NEAR = 2e-3
LEAST_ERROR = 1e-30


class Routing:
    """Facts of all blocks, float64: (B, H, nq, nk) unless said otherwise."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.case, self.policy = setting.case, setting.case.policy
        self.head_settings = setting.case.head_settings
        self.counts = setting.key_counts()
        self.query_counts = _sum_queries(setting, torch.ones_like(setting.q[..., :1])).squeeze(-1)
        self.exists = self._exists()
        self.key_share = 1 / self.counts.clamp(min=1).unsqueeze(-1)
        self.query_share = 1 / self.query_counts.clamp(min=1).unsqueeze(-1)
        self.keys = self._of_valid(setting.k - setting.key_centre)
        self.mean_key = self._mean_of_keys(self.keys)
        self.mean_query = self._mean_of_queries(setting.q)

    def _exists(self) -> Tensor:
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
        exists = self.exists
        if kept.shape != exists.shape:
            faults.append(f"map of shape {tuple(kept.shape)}, not {tuple(exists.shape)}")
            return
        if mask is not None:
            keys, queries = self._exact()
            exact = keys.unsqueeze(2) | queries.unsqueeze(3)
            if not torch.equal(kept, (mask | exact) & exists):
                faults.append("the map is not the mask and what is exact")
            return
        if (kept & ~exists).any():
            faults.append("a block without pairs is kept")
        forced, maybe_forced = self._forced()
        dense, maybe_dense = self._dense()
        if (forced & ~maybe_forced & ~kept).any():
            faults.append("a forced block is dropped")
        if ((dense & ~maybe_dense).unsqueeze(-1) & exists & ~kept).any():
            faults.append("a dense row drops a block")
        ranked = exists & ~forced
        judged = ~dense & ~maybe_dense & ~maybe_forced.any(-1)
        low, high = self._scores()
        found, available = (kept & ranked).sum(-1), ranked.sum(-1)
        least, most = self._counts(ranked, forced.sum(-1), low, high)
        least, most = least.minimum(available), most.minimum(available)
        for where in (judged & ((found < least) | (found > most))).nonzero().tolist()[:1]:
            counts = ", ".join(str(int(x[tuple(where)])) for x in (found, least, most, available))
            faults.append(f"ranked blocks kept, least, most, all: {counts}, in row {where}")
        least_kept = high.masked_fill(~(ranked & kept), torch.inf).amin(-1)
        most_dropped = low.masked_fill(~ranked | kept, -torch.inf).amax(-1)
        for where in (judged & (most_dropped > least_kept)).nonzero().tolist()[:1]:
            dropped, lowest = (float(x[tuple(where)]) for x in (most_dropped, least_kept))
            faults.append(f"rank {dropped:.6g} is dropped, {lowest:.6g} kept, in row {where}")

    def _counts(
        self, ranked: Tensor, forced: Tensor, low: Tensor, high: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(B, H, nq): ranked blocks to be kept, at least and at most."""
        policy, head_settings = self.policy, self.head_settings
        by_count = policy.select_by == "topk"
        given = policy.topk if by_count else policy.cdfthreshd
        if head_settings is not None:
            given = head_settings.density
        share = self._per_head(given)
        if by_count:
            counts = []
            for near in (1 - 1e-6, 1 + 1e-6):
                count = (share * ranked.shape[-1] * near).floor().clamp(min=1)
                count = count.expand(forced.shape).long()
                if self._in_whole_steps:  # of two blocks
                    count = count + (count + forced) % 2
                counts.append(count)
            return counts[0], counts[1]
        middle = ((low + high) / 2).masked_fill(~ranked, -torch.inf)
        mass = middle.softmax(-1).nan_to_num(0.0).sort(-1, descending=True).values.cumsum(-1)
        doubt = (high - low).masked_fill(~ranked, 0).amax(-1, keepdim=True) * 2 + 1e-5
        limit = share.unsqueeze(-1)
        everything = limit >= 1 - 1e-7
        most = ((mass <= limit + doubt) | (limit >= 1 - doubt)).sum(-1).clamp(min=1)
        least = ((mass <= limit - doubt) | everything).sum(-1).clamp(min=1)
        return least, most

    @property
    def _in_whole_steps(self) -> bool:
        return self.head_settings is not None or self.case.order is not None

    def _scores(self) -> tuple[Tensor, Tensor]:
        """Scores that blocks are ranked by, at least and at most."""
        scale, head_settings = self.case.scale, self.head_settings
        mass = self.mean_query @ self.mean_key.mT * scale
        long_key = self._mean_of_keys(self.keys.norm(dim=-1, keepdim=True))
        long_query = self._mean_of_queries(self.setting.q.norm(dim=-1, keepdim=True))
        lengths = self.mean_key.norm(dim=-1)[:, :, None]
        tensor_cores = self.mean_query.norm(dim=-1, keepdim=True) @ lengths
        doubt = scale * (2.0**-14 * tensor_cores + 2.0**-17 * long_query @ long_key.mT) + 1e-7
        if self._in_whole_steps:
            mass = mass + (self.counts / KEY_BLOCK).log().unsqueeze(2)
        low = high = mass
        if head_settings is not None and head_settings.pools:
            by_error = (head_settings.router == Router.ERROR)[:, None, None]
            if by_error.any():
                errors = self._errors(mass)
                low, high = (torch.where(by_error, error, mass) for error in errors)
        return low - doubt, high + doubt

    def _errors(self, mass: Tensor) -> tuple[Tensor, Tensor]:
        """mass + s / 2 + log of sqrt((s / 2)^2 |mean(V_j) - o|^2 + s / 64 tr Var(V_j)), s the
        variance of the block's logits and o the pooled output; variances of keys and means of
        values lie in bf16 between quantize and route."""
        setting, unit, scale = self.setting, Arithmetic.of(self.setting).mean_unit, self.case.scale
        key_variance = self._mean_of_keys(self._off_mean(self.keys).square())
        values = self._of_valid(setting.v - setting.value_centre)
        mean_value = self._mean_of_keys(values)
        scatter = self._mean_of_keys(self._off_mean(values).square()).sum(-1).unsqueeze(2)
        weights = mass.masked_fill(~self.exists, -torch.inf).softmax(-1).nan_to_num(0.0)
        distance = torch.cdist(weights @ mean_value, mean_value)
        longest = mean_value.norm(dim=-1)[:, :, None]
        off = unit * (longest + longest.amax(-1, keepdim=True))
        variance = scale**2 * self.mean_query.square() @ key_variance.mT
        largest = self.keys.abs().amax((-2, -1))[..., None, None]
        floor = (scale * self.mean_query.norm(dim=-1, keepdim=True) * largest).square() * 2.0**-36
        found = []
        for sign in (-1, 1):
            s = (variance * (1 + sign * unit) + sign * floor).clamp(min=0)
            far = (distance + sign * off).clamp(min=0)
            squared = (s / 2 * far).square() + s / KEY_BLOCK * scatter * (1 + sign * 2.0**-10)
            found.append(mass + s / 2 + squared.clamp(min=LEAST_ERROR).log() / 2)
        return found[0], found[1]

    def _exact(self) -> tuple[Tensor, Tensor]:
        """(B, H, nk): blocks of exact keys, and the sink; (B, H, nq): blocks of exact queries. They
        are kept whatever a ranking or a mask says."""
        setting, policy, order = self.setting, self.policy, self.case.order
        starts = torch.arange(setting.key_blocks, device=self.counts.device) * KEY_BLOCK
        keys = (self.counts < 0) | ((starts == 0) & policy.attention_sink)
        queries = self.query_counts < 0
        if order is None:
            lengths = self.counts.sum(-1, keepdim=True)
            keys = keys | (starts < policy.exact_prefix)
            keys = keys | (starts + self.counts > lengths - policy.exact_suffix)
            starts = torch.arange(setting.query_blocks, device=keys.device) * QUERY_BLOCK
            queries = queries | (starts < policy.exact_prefix)
            ends = starts + self.query_counts
            return keys, queries | (ends > setting.q.shape[2] - policy.exact_suffix)
        for part in order.segments:
            inside = slice(part.first_token, part.first_token + part.tokens)
            keys[..., setting.k_block[0, inside].unique()] |= part.keys_exact
            queries[..., setting.q_block[0, inside].unique()] |= part.queries_exact
        return keys, queries

    def _forced(self) -> tuple[Tensor, Tensor]:
        """Blocks that are kept whatever their rank, and those that may or may not be."""
        forced, near = self._below(self._mean_of_keys(_directions(self.keys)))
        forced, near = (forced | self._exact()[0]).unsqueeze(2), near.unsqueeze(2)
        if self.case.is_causal and self.policy.keep_diagonal:
            starts = torch.arange(self.setting.key_blocks, device=forced.device) * KEY_BLOCK
            rows = torch.arange(self.setting.query_blocks, device=forced.device) * QUERY_BLOCK
            forced = forced | (starts + KEY_BLOCK > rows.unsqueeze(-1))
        return forced & self.exists, near & self.exists

    def _dense(self) -> tuple[Tensor, Tensor]:
        """(B, H, nq): query blocks that drop nothing, and those that may or may not."""
        dense, near = self._below(self._mean_of_queries(_directions(self.setting.q)))
        return dense | self._exact()[1], near

    def _below(self, mean_direction: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks whose rows are too little alike to be judged by their mean."""
        similarity = mean_direction.square().sum(-1)
        threshold = self._per_head(self.policy.simthreshd1)
        return similarity <= threshold, (similarity - threshold).abs() < NEAR

    def _of_valid(self, of_keys: Tensor) -> Tensor:
        return of_keys.masked_fill(~self.setting.valid[:, None, :, None], 0)

    def _mean_of_keys(self, of_keys: Tensor) -> Tensor:
        return self.setting.by_block(of_keys) * self.key_share

    def _off_mean(self, of_keys: Tensor) -> Tensor:
        """Distance of each valid key or value from the mean of its block."""
        block = self.setting.k_block[None, :, :, None].expand_as(of_keys)
        return self._of_valid(of_keys - self._mean_of_keys(of_keys).gather(2, block))

    def _mean_of_queries(self, of_queries: Tensor) -> Tensor:
        return _sum_queries(self.setting, of_queries) * self.query_share

    def _per_head(self, value: float | Tensor) -> Tensor:
        """(H, 1)."""
        device, heads = self.setting.q.device, self.setting.q.shape[1]
        values = torch.as_tensor(value, dtype=torch.float64, device=device)
        return values.expand(heads).unsqueeze(-1)


def _sum_queries(setting: Setting, of_queries: Tensor) -> Tensor:
    """(B, H, Nq, X) summed over query blocks: (B, H, nq, X)."""
    batch, heads, _, wide = of_queries.shape
    sums = of_queries.new_zeros(batch, heads, setting.query_blocks, wide)
    index = setting.q_block[None, :, :, None].expand_as(of_queries)
    return sums.scatter_add_(2, index, of_queries)


def _directions(rows: Tensor) -> Tensor:
    length = rows.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, rows / length.clamp(min=1e-300), 0.0)
