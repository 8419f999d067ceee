# SPDX-License-Identifier: Apache-2.0
"""Says what this machine can run and compiles its kernels ahead of the first video.

ComfyUI-Manager runs this after it installed requirements.txt; running it again is harmless. It
installs nothing and never fails: without it the kernels are compiled when they are first needed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def say(text: str) -> None:
    print(f"[Sparge] {text}", flush=True)


def prepare(index: int) -> None:
    """Compiles and loads every kernel that a user of GPU `index` can reach."""
    import torch

    from sparge.kernels import capabilities, warm

    name = torch.cuda.get_device_name(index)
    capability = capabilities(index)
    if not capability.usable:
        say(f"GPU {index}, {name}: attention stays dense. {capability.reason}")
        return

    def progress(done: int, total: int, kernel: str) -> None:
        if done in (1, total) or done % 10 == 0:
            say(f"GPU {index}: {done} of {total} kernels ready")

    say(f"GPU {index}, {name}: preparing the kernels for {capability.arch}")
    started = time.perf_counter()
    warm(index, progress=progress)
    say(f"GPU {index}, {name}: ready in {time.perf_counter() - started:.1f} s")


def prepare_all() -> None:
    try:
        import torch

        from sparge.kernels import capabilities
    except ModuleNotFoundError as error:
        say(f"{sys.executable} lacks {error.name}: run this with the Python that runs ComfyUI.")
        return
    if torch.version.hip or not torch.cuda.is_available():
        say(f"Attention stays dense. {capabilities('cuda').reason}")
        return
    for index in range(torch.cuda.device_count()):
        prepare(index)


def main() -> int:
    # An embedded Python (ComfyUI's Windows portable) leaves the script's folder off the path.
    sys.path.insert(0, str(ROOT))
    try:
        prepare_all()
    except Exception as error:
        say(f"The kernels could not be prepared: {error}")
        say("They are tried again at the first run; please report this if that fails too.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
