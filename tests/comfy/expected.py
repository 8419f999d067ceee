# SPDX-License-Identifier: Apache-2.0
"""Numbers that tests of tiny models share: runs have four steps, of which the first is dense."""

from __future__ import annotations

from typing import Any

STEPS, SPARSE_STEPS = 4, 3
WINDOW = "before start_percent 0.2"
#: Blocks of the tiny Wan, which batches cond and uncond in one forward pass.
BLOCKS = 2
#: Relative error of the latent with every block kept, in 8 bits: at most 0.0019 (Mochi) here. Half
#: of the blocks dropped is 0.02 to 0.03.
EIGHT_BIT = 0.004
FAST: dict[str, Any] = {"mode": "auto quality", "quality": "fast"}
