# SPDX-License-Identifier: Apache-2.0
"""Test nodes for a graph without files: a tiny model, random conditioning. models.py is beside."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import ComfyExtension, io

from . import models


def schema(node_id: str, output: io.Output, *inputs: io.Input) -> io.Schema:
    family = io.Combo.Input("family", options=list(models.FAMILIES))
    return io.Schema(node_id, category="testing", inputs=[family, *inputs], outputs=[output])


class TinyModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("TinyModel", io.Model.Output())

    @classmethod
    def execute(cls, family: str) -> io.NodeOutput:
        return io.NodeOutput(models.build(family))


class TinyConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("TinyConditioning", io.Conditioning.Output(), io.Boolean.Input("negative"))

    @classmethod
    def execute(cls, family: str, negative: bool) -> io.NodeOutput:
        return io.NodeOutput(models.conditioning(family, negative))


class TinyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("TinyLatent", io.Latent.Output())

    @classmethod
    def execute(cls, family: str) -> io.NodeOutput:
        return io.NodeOutput({"samples": models.empty_latent(family)})


class TinyExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]] | Any:
        return [TinyModel, TinyConditioning, TinyLatent]


async def comfy_entrypoint() -> TinyExtension:
    return TinyExtension()
