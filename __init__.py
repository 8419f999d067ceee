# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's entry point. Nothing heavy is imported before ComfyUI asks for the nodes."""

from __future__ import annotations

# Without a package name this file was picked up by a tool (pytest, say), not by ComfyUI, and the
# relative imports below could not work.
if __package__:
    WEB_DIRECTORY = "./web"

    async def comfy_entrypoint():
        from .nodes import SpargeExtension

        return SpargeExtension()
