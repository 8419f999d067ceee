# SPDX-License-Identifier: Apache-2.0
"""The nodes of the pack, and the only code in it that imports ComfyUI."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import ComfyExtension, io


class SpargeExtension(ComfyExtension):
    """Entry point that ComfyUI loads: it asks for the list of nodes once, at start-up."""

    async def get_node_list(self) -> list[type[io.ComfyNode]] | Any:
        from .sparge_attention import SpargeAttention
        from .sparge_cogvideox_load import SpargeCogVideoXLoad
        from .sparge_compare import SpargeAttentionCompare
        from .sparge_report import SpargeAttentionReport
        from .sparge_wan_wrapper import SpargeAttentionWanVideoWrapper

        return [
            SpargeAttention,
            SpargeAttentionReport,
            SpargeAttentionCompare,
            SpargeCogVideoXLoad,
            SpargeAttentionWanVideoWrapper,
        ]
