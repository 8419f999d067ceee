# SPDX-License-Identifier: Apache-2.0
"""The host half of every kernel's parameter block; ``csrc/params.cuh`` is the device half.

Field meanings, shapes and units stand there. A test compiles both and compares every offset. With
empty slots a field that does not exist is refused.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_uint32, c_void_p


class TensorView(Structure):
    __slots__ = ()
    _fields_ = (
        ("data", c_void_p),
        ("batch_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
        ("dtype", c_int32),
        ("vectorized", c_int32),
    )


class Problem(Structure):
    __slots__ = ()
    _fields_ = (
        ("key_lengths", c_void_p),
        ("slot_token", c_void_p),
        ("slot_counts", c_void_p),
        ("head_order_kind", c_void_p),
        ("batch", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("queries", c_int32),
        ("keys", c_int32),
        ("order_kinds", c_int32),
        ("channels", c_int32),
    )


class MeansParams(Structure):
    __slots__ = ()
    _fields_ = (
        ("problem", Problem),
        ("k", TensorView),
        ("v", TensorView),
        ("k_mean", c_void_p),
        ("v_mean", c_void_p),
        ("v_scale", c_void_p),
        ("reach", c_void_p),
        ("smooth_k", c_int32),
        ("k_stride", c_int32),
    )


class QuantizeParams(Structure):
    __slots__ = ()
    _fields_ = (
        ("problem", Problem),
        ("q", TensorView),
        ("k", TensorView),
        ("v", TensorView),
        ("k_mean", c_void_p),
        ("v_mean", c_void_p),
        ("v_scale", c_void_p),
        ("k_tiles", c_void_p),
        ("v_tiles", c_void_p),
        ("k_scale", c_void_p),
        ("v_block_scale", c_void_p),
        ("key_counts", c_void_p),
        ("q_block_mean", c_void_p),
        ("k_block_mean", c_void_p),
        ("q_similarity", c_void_p),
        ("k_similarity", c_void_p),
        ("next_item", c_void_p),
        ("reach", c_void_p),
        ("finite", c_void_p),
        ("k_variance", c_void_p),
        ("v_block_mean", c_void_p),
        ("v_variance", c_void_p),
        ("v_square", c_void_p),
        ("pool_k", c_void_p),
        ("pool_v", c_void_p),
        ("pool_columns", c_void_p),
        ("pool_value_scale", c_void_p),
        ("with_queries", c_int32),
        ("with_similarity", c_int32),
        ("key_run", c_int32),
        ("key_runs", c_int32),
        ("query_run", c_int32),
    )


class RouteParams(Structure):
    __slots__ = ()
    _fields_ = (
        ("problem", Problem),
        ("q_block_mean", c_void_p),
        ("k_block_mean", c_void_p),
        ("q_similarity", c_void_p),
        ("k_similarity", c_void_p),
        ("block_mask", c_void_p),
        ("mask_stride", c_int64 * 4),
        ("thresholds", c_void_p),
        ("key_counts", c_void_p),
        ("keys_exact", c_void_p),
        ("queries_exact", c_void_p),
        ("k_variance", c_void_p),
        ("v_block_mean", c_void_p),
        ("v_variance", c_void_p),
        ("v_square", c_void_p),
        ("block_map", c_void_p),
        ("counters", c_void_p),
        ("cdfthreshd", c_float),
        ("simthreshd1", c_float),
        ("score_scale", c_float),
        ("select", c_int32),
        ("floor", c_int32),
        ("upstream", c_int32),
        ("topk_blocks", c_int32),
        ("exact_prefix", c_int32),
        ("exact_suffix", c_int32),
        ("causal", c_int32),
        ("attention_sink", c_int32),
        ("keep_diagonal", c_int32),
        ("rows_per_cta", c_int32),
        ("score_pitch", c_int32),
    )


class AttendParams(Structure):
    __slots__ = ()
    _fields_ = (
        ("problem", Problem),
        ("q", TensorView),
        ("out", TensorView),
        ("k_tiles", c_void_p),
        ("v_tiles", c_void_p),
        ("k_scale", c_void_p),
        ("v_block_scale", c_void_p),
        ("key_counts", c_void_p),
        ("k_mean", c_void_p),
        ("v_mean", c_void_p),
        ("v_scale", c_void_p),
        ("reach", c_void_p),
        ("finite", c_void_p),
        ("pool_k", c_void_p),
        ("pool_v", c_void_p),
        ("pool_columns", c_void_p),
        ("pool_value_scale", c_void_p),
        ("block_map", c_void_p),
        ("thresholds", c_void_p),
        ("lse", c_void_p),
        ("partial_out", c_void_p),
        ("partial_max", c_void_p),
        ("partial_sum", c_void_p),
        ("counters", c_void_p),
        ("next_item", c_void_p),
        ("tokens", c_int32),
        ("scale", c_float),
        ("pvthreshd", c_float),
        ("causal", c_int32),
    )


class ScoreParams(Structure):
    __slots__ = ()
    _fields_ = (
        ("exact_out", c_void_p),
        ("exact_max", c_void_p),
        ("exact_sum", c_void_p),
        ("q", TensorView),
        ("k_block_mean", c_void_p),
        ("v_block_mean", c_void_p),
        ("v_mean", c_void_p),
        ("key_counts", c_void_p),
        ("kept", c_void_p),
        ("found", c_void_p),
        ("field_stride", c_int64),
        ("batch_stride", c_int64),
        ("head_stride", c_int64),
        ("scale", c_float),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("densities", c_int32),
        ("blocks", c_int32),
        ("rows", c_int32),
        ("channels", c_int32),
        ("key_blocks", c_int32),
        ("room", c_int32),
        ("rows_per_cta", c_int32),
    )


class HeadThresholds(Structure):
    __slots__ = ()
    _fields_ = (
        ("selection", c_float),
        ("simthreshd1", c_float),
        ("pvthreshd", c_float),
        ("log2_pool_weight", c_float),
        ("router", c_float),
        ("output_scale", c_float),
    )


class PoolColumn(Structure):
    __slots__ = ()
    _fields_ = (("scale", c_float), ("bias", c_float))


class MeansSizes(Structure):
    __slots__ = ()
    _fields_ = (("slices", c_uint32),)


class RouteSizes(Structure):
    __slots__ = ()
    _fields_ = (("rows", c_uint32), ("key_step", c_uint32), ("spare_bytes", c_uint32))


class AttendSizes(Structure):
    __slots__ = ()
    _fields_ = (("parts", c_uint32),)


class ScoreSizes(Structure):
    __slots__ = ()
    _fields_ = (("rows", c_uint32), ("step", c_uint32), ("query_bytes", c_uint32))


#: Structs that lie in tensors rather than in a parameter block; all their fields are float32.
IN_TENSORS: tuple[type[Structure], ...] = (HeadThresholds, PoolColumn)

#: The entries of the warpgroup kernels, of 8-bit and of 16-bit operands.
HOPPER_ATTEND = "attend_hopper"
HOPPER_ATTEND_16 = "attend_hopper16"

PARAMS: dict[str, type[Structure]] = {
    "means": MeansParams,
    "quantize": QuantizeParams,
    "route": RouteParams,
    "attend": AttendParams,
    HOPPER_ATTEND: AttendParams,
    HOPPER_ATTEND_16: AttendParams,
    "score": ScoreParams,
}

#: What an entry's cubin says beside `LaunchInfo`, where it says more.
SIZES: dict[str, type[Structure]] = {
    "means": MeansSizes,
    "route": RouteSizes,
    "attend": AttendSizes,
    "score": ScoreSizes,
}
