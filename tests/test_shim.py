# SPDX-License-Identifier: Apache-2.0
"""The package under upstream's name: what others import of it is there.

In a process of its own, with the shim on the path and no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparge.compat import core

ROOT = Path(__file__).parent.parent
SHIM = ROOT / "shim"
PACKAGE = "spas_sage_attn"
#: What others import by their published sources: module and names, "" for the module alone.
SERVED = {
    # upstream's README, inference_examples and evaluate
    PACKAGE: "spas_sage2_attn_meansim_topk_cuda spas_sage2_attn_meansim_cuda core "
    "spas_sage_attn_meansim_topk_cuda spas_sage_attn_meansim_cuda block_sparse_sage2_attn_cuda",
    # yunchang, xfuser, raylight, vllm_omni, WanVideoWrapper
    f"{PACKAGE}.autotune": "SparseAttentionMeansim extract_sparse_attention_state_dict "
    "load_sparse_attention_state_dict",
    # LightX2V, SGLang, scripts for language models
    f"{PACKAGE}.core": "get_cuda_arch_versions spas_sage2_attn_meansim_cuda "
    "spas_sage2_attn_meansim_topk_cuda spas_sage_attn_meansim_cuda "
    "spas_sage_attn_meansim_topk_cuda block_sparse_sage2_attn_cuda",
    # packs for MiniMax H3
    f"{PACKAGE}.utils": "get_block_map_meansim get_block_map_meansim_fuse_quant",
}
#: Imports each name; those of the library are the library's.
PROBE = """
import importlib, json, sys
import sparge.compat, sparge.compat.autotune, sparge.compat.core, sparge.compat.utils
import spas_sage_attn.autotune
for module, names in json.loads(sys.argv[1]).items():
    for name in names.split():
        assert hasattr(importlib.import_module(module), name), (module, name)
for name in sparge.compat.__all__:
    assert getattr(spas_sage_attn, name) is getattr(sparge.compat, name), name
for part in ("core", "autotune", "utils"):
    ours, library = getattr(spas_sage_attn, part), getattr(sparge.compat, part)
    assert all(getattr(ours, name) is getattr(library, name) for name in ours.__all__), part
"""


def python(code: str, *arguments: str, path: tuple[Path, ...] = (ROOT, SHIM)) -> str:
    """Output of `code`, in a process that finds these folders and no GPU."""
    places = os.pathsep.join(map(str, path))
    added = {"PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=SHIM, env=os.environ | added, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_others_import_is_there() -> None:
    python(PROBE, json.dumps(SERVED))


@pytest.mark.parametrize(
    ("hidden", "part", "printed", "expected"),
    [
        ("sparge", "", "'there'", "there"),  # yunchang asks so, and then, unguarded, for autotune
        ("sparge", ".autotune", "error", "not installed: run `pip install .`"),
        ("torch", "", "error.name", "torch"),  # not taken for the library
    ],
)
def test_without_a_module_it_says_what_to_install(hidden, part, printed, expected) -> None:
    code = f"""
import sys; sys.modules[{hidden!r}] = None
try:
    import spas_sage_attn{part}
except ImportError as error:
    print({printed})
"""
    assert expected in python(code, path=(SHIM,) if hidden == "sparge" else (ROOT, SHIM))


def test_archs_have_upstreams_names(monkeypatch) -> None:
    capabilities = [(8, 0), (9, 0), (12, 0)]
    monkeypatch.setattr(core.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(core.torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert core.get_cuda_arch_versions() == ["sm80", "sm90", "sm120"]
