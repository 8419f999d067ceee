# SPDX-License-Identifier: Apache-2.0
"""Attention call in the conventions of `scaled_dot_product_attention`. No copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ...checks.validate import check_inference
from ...errors import Unsupported
from ...session import Call, CallFacts, GivenCall


@dataclass(frozen=True, eq=False)
class SdpaCall(GivenCall):
    """One call: q (B, H, N, D), k and v (B, Hkv, M, D), a mask that broadcasts to (B, H, N, M).

    Results of `tensors` are (B, N, H, D), the layout that transformers go on with; those of
    `of_tensors` are (B, H, N, D).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    options: tuple[str, ...] = ()
    """Names of arguments that change the result and are not served."""
    layout: str = "NHD"

    @cached_property
    def tensors(self) -> Call | str:
        q, k, v = self.q, self.k, self.v
        if not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape or q.shape[1] % k.shape[1]:
            sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            return f"the model sends shapes that are not served: {sizes}"
        try:  # before it is measured
            check_inference(q, k, v, *(() if self.mask is None else (self.mask,)))
        except Unsupported as refusal:
            return refusal.reason
        return Call(q, k, v, self.scale, self.layout, by_backend=self.mask is None)

    @cached_property
    def facts(self) -> CallFacts:
        return CallFacts(
            query_tokens=self.q.shape[-2],
            key_tokens=self.k.shape[-2],
            has_mask=self.mask is not None,
            masks_keys=self.key_mask is not None,
            unknown_options=self.options,
            heads=self.q.shape[:-2].numel(),
        )

    @property
    def key_mask(self) -> Tensor | None:
        """Mask of one row of keys, maybe repeated for each head (Allegro), or of queries and keys
        (HunyuanVideo 1.5)."""
        mask, (batch, heads, queries, _) = self.mask, self.q.shape
        if mask is None or mask.ndim != 4 or mask.shape[3] != self.k.shape[-2]:
            return None
        of_call = mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
        return mask if of_call and mask.shape[2] in (1, queries) else None

    def of_tensors(self, call: Call) -> SdpaCall:
        return SdpaCall(call.q, call.k, call.v, scale=self.scale, layout="HND")
