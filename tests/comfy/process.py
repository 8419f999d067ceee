# SPDX-License-Identifier: Apache-2.0
"""Whether ComfyUI can run in a process of its own, and the environment that it needs.

COMFYUI_DIR names a checkout whose requirements the running Python has. Where torchvision and
torchaudio have no CPU build, COMFY_HEADLESS names a folder whose make_stubs.py writes stand-ins.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def why_no_comfyui() -> str:
    """Reason why it cannot run; empty where it can."""
    folder = os.environ.get("COMFYUI_DIR")
    if not folder:
        return "needs ComfyUI; name a checkout in COMFYUI_DIR"
    if not (Path(folder) / "comfy").is_dir():
        return f"COMFYUI_DIR names {folder}, which holds no ComfyUI"
    for module in ("aiohttp", "torchsde", "transformers"):
        if importlib.util.find_spec(module) is None:
            return f"ComfyUI's requirement {module} is not installed"
    if importlib.util.find_spec("torchvision") is None and "COMFY_HEADLESS" not in os.environ:
        return "ComfyUI needs torchvision, or stand-ins from COMFY_HEADLESS"
    return ""


def environment_of_comfyui(stubs: Path) -> dict[str, str]:
    """The environment, with stand-ins in the folder ``stubs`` where they are needed."""
    paths = [os.environ["COMFYUI_DIR"], os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("torchvision") is None:
        maker = Path(os.environ["COMFY_HEADLESS"]) / "make_stubs.py"
        subprocess.run([sys.executable, str(maker), str(stubs)], check=True, capture_output=True)
        paths.insert(0, str(stubs))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
