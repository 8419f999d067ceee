# SPDX-License-Identifier: Apache-2.0
"""A real server on a GPU, no toolchain in sight, the kernel cache cold: the kernels serve.

The models are files, because DynamicVRAM moves no others: COMFY_HEADLESS names a folder whose
make_tiny_ckpts.py writes them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.comfy.graphs import ALL_WIDGETS, graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "COMFY_HEADLESS" not in os.environ, reason="needs the model files of COMFY_HEADLESS"
    ),
]

FAMILIES = ("wan", "cogvideox")
MEMORY = {"dynamic vram": (), "static vram": ("--disable-dynamic-vram",)}


@pytest.fixture(scope="module")
def base(tiny_nodes: Path, comfyui_env: dict[str, str]) -> Path:
    """The base directory with the models' files."""
    maker = Path(os.environ["COMFY_HEADLESS"]) / "make_tiny_ckpts.py"
    command = [sys.executable, str(maker), str(tiny_nodes), *FAMILIES]
    subprocess.run(command, check=True, capture_output=True, env=comfyui_env)
    return tiny_nodes


@pytest.fixture(scope="module")
def env(no_toolchain: dict[str, str], tmp_path_factory) -> dict[str, str]:
    """Kernels or dense attention, not the reference; nothing compiled yet."""
    cold = {"SPARGE_CACHE": str(tmp_path_factory.mktemp("cold_cache"))}
    return {name: no_toolchain[name] for name in no_toolchain if name != "SPARGE_REFERENCE"} | cold


@pytest.fixture(scope="module", params=MEMORY)
def server(request, start_server, base: Path, env: dict[str, str]) -> Any:
    """One that has computed before: the first run of a process gives other bits than its repeats,
    without our node too (by 0.04 of the tiny Wan's latent on an H200)."""
    started = start_server(base, env, MEMORY[request.param])
    started.run_graph(without_the_node(from_file(FAMILIES[0])))
    yield started
    started.stop()


def from_file(family: str, **widgets: Any) -> dict[str, Any]:
    loader = {"unet_name": f"tiny_{family}.safetensors", "weight_dtype": "default"}
    model = {"class_type": "UNETLoader", "inputs": loader}
    return graph(family, **ALL_WIDGETS | widgets) | {"1": model}


def without_the_node(prompt: dict[str, Any]) -> dict[str, Any]:
    prompt["6"]["inputs"]["model"] = prompt["2"]["inputs"]["model"]
    return {node: part for node, part in prompt.items() if node != "2"}


def latents(base: Path, family: str) -> list[str]:
    """Digests: pytest would compare the bytes themselves for minutes to show where they differ."""
    files = sorted((base / "output").glob(f"{family}_*.latent"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_serve_and_repeats_are_bit_identical(server, base, env, family, mode):
    before = len(latents(base, family))
    for _ in range(2):
        server.run_graph(from_file(family, mode=mode))
        lines = re.findall(r"(\d+) sparse and \d+ dense self-attention calls", server.log())
        assert lines and int(lines[-1]) > 0
    assert list(Path(env["SPARGE_CACHE"]).rglob("*.cubin"))
    first, second = latents(base, family)[before:]
    assert first == second
