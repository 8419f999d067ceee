# SPDX-License-Identifier: Apache-2.0
"""The package under upstream's name: what others import of it is there, or refused as they expect.

In a process of its own, with the shim on the path and no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SHIM = ROOT / "shim"
PACKAGE = "spas_sage_attn"
TOPK, CDF = "spas_sage2_attn_meansim_topk_cuda", "spas_sage2_attn_meansim_cuda"
FIRST_TOPK, FIRST_CDF = "spas_sage_attn_meansim_topk_cuda", "spas_sage_attn_meansim_cuda"
BLOCK_SPARSE = "block_sparse_sage2_attn_cuda"
TUNED = ("SparseAttentionMeansim",)
SAVED = ("extract_sparse_attention_state_dict", "load_sparse_attention_state_dict")
FUNCTIONS = (TOPK, CDF, FIRST_TOPK, FIRST_CDF, BLOCK_SPARSE)

#: Who imports what, from their published sources.
SERVED: dict[str, dict[str, tuple[str, ...]]] = {
    "upstream's README": {PACKAGE: FUNCTIONS},
    "upstream's inference_examples": {PACKAGE: (CDF, TOPK)},
    "upstream's evaluate": {f"{PACKAGE}.autotune": (*TUNED, *SAVED)},
    "yunchang": {PACKAGE: (), f"{PACKAGE}.autotune": TUNED},
    "xfuser": {f"{PACKAGE}.autotune": TUNED},
    "raylight": {f"{PACKAGE}.autotune": TUNED},
    "vllm_omni": {
        PACKAGE: (TOPK, BLOCK_SPARSE),
        f"{PACKAGE}.autotune": TUNED,
        f"{PACKAGE}.core": ("get_cuda_arch_versions",),
        f"{PACKAGE}.utils": ("get_block_map_meansim_fuse_quant",),
    },
    "LightX2V": {PACKAGE: ("core",), f"{PACKAGE}.core": (CDF, TOPK)},
    "SGLang": {PACKAGE: (TOPK,), f"{PACKAGE}.core": ("get_cuda_arch_versions",)},
    "MiniMax H3 packs": {
        PACKAGE: (BLOCK_SPARSE, TOPK),
        f"{PACKAGE}.core": ("get_cuda_arch_versions",),
        f"{PACKAGE}.utils": (
            "get_block_map_meansim",
            "get_block_map_meansim_fuse_quant",
            "hyperparameter_check",
        ),
    },
    "radial-attention": {PACKAGE: (BLOCK_SPARSE,)},
    "RadialAttn": {PACKAGE: (BLOCK_SPARSE,)},
    "WanVideoWrapper": {PACKAGE: (BLOCK_SPARSE, CDF), f"{PACKAGE}.autotune": (*TUNED, *SAVED)},
    "scripts for language models": {
        f"{PACKAGE}.core": (FIRST_CDF, FIRST_TOPK, BLOCK_SPARSE),
        f"{PACKAGE}.utils": ("precision_metric", "get_cuda_arch_versions"),
    },
}
#: Upstream's kernels and what feeds them, which others import behind `except ImportError`.
REFUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "sparse-linear attention (TurboDiffusion, FastVideo, SGLang, LightX2V, DiffSynth)": {
        f"{PACKAGE}._qattn": (
            "qk_int8_sv_f8_accum_f16_block_sparse_attn_inst_buf_fuse_v_scale_with_pv_threshold",
        ),
        f"{PACKAGE}._fused": ("transpose_pad_permute_cuda",),
        f"{PACKAGE}.utils": ("get_vanilla_qk_quant", "block_map_lut_triton"),
    },
    "FlashVSR": {
        PACKAGE: ("_qattn", "_fused"),
        f"{PACKAGE}.quant_per_block": ("per_block_int8",),
        f"{PACKAGE}.utils": ("fill_block_map_triton",),
    },
    "upstream's core": {f"{PACKAGE}.quant_per_warp_cuda": ("per_warp_int8",)},
}
PROBE = """
try:
    {line}
    found[{line!r}] = ["served", ""]
except BaseException as error:
    kind = "ImportError" if isinstance(error, ImportError) else type(error).__name__
    has = hasattr(sys.modules.get({module!r}), {name!r})
    found[{line!r}] = [kind, str(error) + (" HAS IT" if has else "")]
"""


def python(code: str, *arguments: str, path: tuple[Path, ...] = (ROOT, SHIM)) -> str:
    """Output of `code`, in a process that finds these folders and no GPU."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=SHIM,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def statements(
    table: dict[str, dict[str, tuple[str, ...]]],
) -> dict[str, tuple[str, str | None, str]]:
    """Import statement -> module, name, and one of the packages that have it."""
    return {
        f"from {module} import {name}" if name else f"import {module}": (module, name, package)
        for package, modules in table.items()
        for module, names in modules.items()
        for name in names or (None,)
    }


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[str, str]]:
    probes = [
        PROBE.format(line=line, module=module, name=name or "")
        for line, (module, name, _) in (statements(SERVED) | statements(REFUSED)).items()
    ]
    code = "import json, sys\nfound = {}\n" + "".join(probes) + "print(json.dumps(found))"
    return json.loads(python(code))


@pytest.mark.parametrize("line", statements(SERVED))
def test_what_others_import_is_there(found: dict[str, Any], line: str) -> None:
    assert found[line] == ["served", ""], statements(SERVED)[line]


@pytest.mark.parametrize("line", statements(REFUSED))
def test_upstreams_kernels_are_an_import_error(found: dict[str, Any], line: str) -> None:
    kind, message = found[line]
    assert kind == "ImportError", statements(REFUSED)[line]
    assert "upstream's own kernels" in message
    assert "block_sparse_sage2_attn_cuda" in message, "says what to do"
    assert "HAS IT" not in message, "hasattr asks in vain, without an error"


def test_names_are_the_librarys() -> None:
    code = """
import spas_sage_attn, spas_sage_attn.autotune
import sparge.compat, sparge.compat.autotune, sparge.compat.core, sparge.compat.utils
for name in sparge.compat.__all__:
    assert getattr(spas_sage_attn, name) is getattr(sparge.compat, name), name
    assert getattr(spas_sage_attn.core, name) is getattr(sparge.compat, name), name
for part in ("core", "utils", "autotune"):
    ours = getattr(spas_sage_attn, part)
    for name in ours.__all__:
        assert getattr(ours, name) is getattr(getattr(sparge.compat, part), name), name
print("same")
"""
    assert python(code) == "same\n"


#: yunchang's two imports: whether the package is there, and then what it needs of it, unguarded.
YUNCHANG = {
    "globals.py": """
try:
    import spas_sage_attn
    HAS_SPARSE_SAGE_ATTENTION = True
except ImportError:
    HAS_SPARSE_SAGE_ATTENTION = False
""",
    "kernels/__init__.py": """
from ..globals import HAS_SPARSE_SAGE_ATTENTION
if HAS_SPARSE_SAGE_ATTENTION:
    from spas_sage_attn.autotune import SparseAttentionMeansim
""",
    "__init__.py": "",
}


@pytest.mark.parametrize("library", [True, False])
def test_yunchang(tmp_path: Path, library: bool) -> None:
    for name, text in YUNCHANG.items():
        path = tmp_path / "yunchang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    code = """
from yunchang import globals, kernels
print(globals.HAS_SPARSE_SAGE_ATTENTION, hasattr(kernels, "SparseAttentionMeansim"))
"""
    hidden = "" if library else "import sys; sys.modules['sparge'] = None\n"
    path = (ROOT, SHIM, tmp_path) if library else (SHIM, tmp_path)
    assert python(hidden + code, path=path) == f"{library} {library}\n"


@pytest.mark.parametrize(
    ("hidden", "part", "printed", "expected"),
    [
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


def test_its_project_lists_every_folder() -> None:
    project = (SHIM / "pyproject.toml").read_text(encoding="utf-8")
    folders = {
        str(path.parent.relative_to(SHIM)).replace(os.sep, ".")
        for path in (SHIM / PACKAGE).rglob("__init__.py")
    }
    assert f"packages = {json.dumps(sorted(folders))}" in project


def test_archs_are_named_as_upstream_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparge.compat import core

    capabilities = [(8, 0), (9, 0), (12, 0)]
    monkeypatch.setattr(core.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(core.torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert core.get_cuda_arch_versions() == ["sm80", "sm90", "sm120"]
