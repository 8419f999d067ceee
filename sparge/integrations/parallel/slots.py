# SPDX-License-Identifier: Apache-2.0
"""A rank's attention under the names and signatures that other engines call.

sys.modules["sageattention"] = sageattention_module(attend)     # yunchang, raylight
ATTENTION_FUNCTION_REGISTRY[AttentionBackendType.SAGE] = xdit_function(attend)     # xDiT to 0.7.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from ...checks.argument import shown
from ...errors import Unsupported
from .attend import RankAttention

#: Arguments that engines pass on to every kind of attention, with what leaves a result as it is.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "window_size": ((-1, -1), [-1, -1], None),
    "softcap": (0, None),
    "alibi_slopes": (None,),
    "attn_mask": (None,),
    "dropout_p": (0, None),
}
#: What of our arithmetic has no such choice: whatever is given, the result means the same.
_OF_ARITHMETIC = {
    "return_softmax", "deterministic", "smooth_k", "pv_accum_dtype", "qk_quant_gran", "attn_type",
}  # fmt: skip

#: What xDiT's models may send in `attention_kwargs` that changes the result, with what to do.
_OF_XDIT = {
    "pre_quantized": "xDiT sends q, k and v quantized to FP8 (use_fp8_comms), and Sparge Attention "
    "quantizes what the model computed: turn use_fp8_comms off.",
    "indices_k": "xDiT sends the real keys of a padded sequence (indices_k), and Sparge Attention "
    "does not give the log-sum-exp of those: choose another attention for this model.",
    "attn_mask": "xDiT sends a mask (attn_mask), and Sparge Attention does not give the "
    "log-sum-exp of a masked call: choose another attention for this model.",
}


class XditCall(Protocol):
    """Fields that are read of the `AttnCall` of xDiT's later sources."""

    dropout_p: float
    is_causal: bool
    attention_kwargs: Mapping[str, Any]


def sageattention_slot(attend: RankAttention) -> Callable[..., Any]:
    """Function with the signature of `sageattention.sageattn`: (q, k, v, tensor_layout="HND",
    is_causal=False, sm_scale=None, return_lse=False). yunchang's names for the same, `causal` and
    `softmax_scale`, mean the same. What would change the result is refused, never ignored.

    It gives the result in `tensor_layout`, and with return_lse also the natural log-sum-exp (B, H,
    Nq) float32.
    """

    def sageattn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        causal, scale = options.pop("causal", False), options.pop("softmax_scale", None)
        _refuse("sageattn", options)
        function = attend.with_lse if return_lse else attend
        return function(
            q,
            k,
            v,
            layout=tensor_layout,
            is_causal=is_causal or bool(causal),
            scale=scale if sm_scale is None else sm_scale,
        )

    return sageattn


def sageattention_module(attend: RankAttention) -> ModuleType:
    """Module to stand in `sys.modules["sageattention"]` before yunchang is imported. Where
    SageAttention itself is installed, set its `sageattn` to `sageattention_slot(attend)` instead.
    """
    module = ModuleType("sageattention", "Sparge Attention in the place of SageAttention.")
    module.__spec__ = ModuleSpec("sageattention", loader=None)
    vars(module)["sageattn"] = sageattention_slot(attend)
    return module


def xdit_function(attend: RankAttention) -> Callable[..., tuple[Tensor, Tensor]]:
    """Function for xDiT: q, k, v (B, H, N, D) -> (result, natural log-sum-exp (B, H, Nq) float32).

    It fits both of its registries: functions of ATTENTION_FUNCTION_REGISTRY (xfuser 0.5.0 to 0.7.0)
    get dropout_p, is_causal and attention_kwargs besides; the `impl` of a `Spec` of
    `xfuser.core.attention` (later sources) gets one `AttnCall`, which holds the three.

    Raises:
        Unsupported: xDiT sends a mask, packed keys or quantized tensors.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float | XditCall | None = 0.0,
        is_causal: bool = False,
        attention_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if dropout_p is not None and not isinstance(dropout_p, (int, float)):
            call = dropout_p
            dropout_p, is_causal = call.dropout_p, call.is_causal
            attention_kwargs = call.attention_kwargs
        for name, sentence in _OF_XDIT.items():
            given = (attention_kwargs or {}).get(name)
            if given is not None and given is not False:
                raise Unsupported(sentence)
        return attend.with_lse(
            query, key, value, dropout_p=dropout_p or 0.0, is_causal=bool(is_causal)
        )

    return attention


def _refuse(name: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        harmless = _HARMLESS.get(option, ())
        if option not in _OF_ARITHMETIC and not any(value == each for each in harmless):
            raise Unsupported(
                f"{name} is asked for {option}={shown(value)}, which Sparge Attention does not "
                "serve: leave it out, or use another attention for these calls."
            )
