# SPDX-License-Identifier: Apache-2.0
"""Checks of what kernels take for granted of a token order, made where an order is made."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count
from ..checks.argument import check_tensor

_TAKE = "a token order is made by cube_order or grid_order"


def check_tensors(of_tokens: dict[str, Tensor], of_blocks: dict[str, Tensor]) -> None:
    """Checks types, sizes, devices and strides, and values where that waits for no device.

    of_tokens: slot_tokens (orders, slots) and token_slots (orders, tokens), int32.
    of_blocks: block_counts (key blocks,) int32, keys_exact (key blocks,) and queries_exact (query
        blocks,) bool.
    """
    for name, value in (of_tokens | of_blocks).items():
        check_tensor(name, value, _TAKE)
    slot_tokens, token_slots = of_tokens.values()
    counts, keys_exact, queries_exact = of_blocks.values()
    order_kinds = slot_tokens.shape[0] if slot_tokens.dim() else 0
    key_blocks = counts.numel()
    slots = key_blocks * KEY_BLOCK
    tokens = token_slots.shape[-1] if token_slots.dim() else 0
    needed = {
        "slot_tokens": (slot_tokens, torch.int32, (order_kinds, slots)),
        "token_slots": (token_slots, torch.int32, (order_kinds, tokens)),
        "block_counts": (counts, torch.int32, (key_blocks,)),
        "keys_exact": (keys_exact, torch.bool, (key_blocks,)),
        "queries_exact": (queries_exact, torch.bool, (block_count(slots, QUERY_BLOCK),)),
    }
    for name, (value, dtype, shape) in needed.items():
        if value.dtype != dtype or tuple(value.shape) != shape:
            raise ValueError(
                f"{name} is {value.dtype} of shape {tuple(value.shape)}; {key_blocks} key blocks "
                f"in {order_kinds} order kinds need {dtype} of shape {shape}: {_TAKE}."
            )
        if value.device != slot_tokens.device or not value.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and on {slot_tokens.device}, as slot_tokens is."
            )
    if slot_tokens.numel() == 0 or tokens == 0:
        raise ValueError(f"slot_tokens has shape {tuple(slot_tokens.shape)} and no token: {_TAKE}.")
    plain = all(type(value) is Tensor for value, _, _ in needed.values())  # with numbers in it
    if plain and slot_tokens.device.type == "cpu":
        _check_values(slot_tokens, token_slots, counts)


def _check_values(slot_tokens: Tensor, token_slots: Tensor, counts: Tensor) -> None:
    """Checks values in NumPy: torch would answer as the caller's modes say, which may be with fake
    tensors."""
    slot_token, token_slot, count = map(np.from_dlpack, (slot_tokens, token_slots, counts))
    slots, tokens = slot_token.shape[1], token_slot.shape[1]
    filled = (np.arange(KEY_BLOCK) < count[:, None]).ravel()  # the same slots in every order
    in_range = bool(((token_slot >= 0) & (token_slot < slots)).all())
    if (
        not in_range
        or int(filled.sum()) != tokens
        or not np.array_equal(slot_token >= 0, np.broadcast_to(filled, slot_token.shape))
        or not (
            np.take_along_axis(slot_token, token_slot.astype(np.int64), 1) == np.arange(tokens)
        ).all()
    ):
        raise ValueError(
            "slot_tokens, token_slots and block_counts do not belong together: each token has one "
            "slot in every order, tokens come first in their key block, and empty slots hold -1; "
            f"{_TAKE}."
        )
