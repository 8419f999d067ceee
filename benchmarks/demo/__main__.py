# SPDX-License-Identifier: Apache-2.0
"""Dense and sparse attention side by side: a clip of the small video DiT, then one call of it.

python -m benchmarks.demo [--out DIR] [--seed N] [--weights FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.demo import call, trained
from benchmarks.demo.device import choose_device
from benchmarks.quality.dit import load_dit, sample_dense
from benchmarks.quality_data.weights import WeightsMissingError
from benchmarks.tiny_video_dit.checkpoint import SHIPPED


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder of the pictures")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another video")
    parser.add_argument("--weights", type=Path, default=SHIPPED, help="of the small video DiT")
    options = parser.parse_args(arguments)
    # The reference is many small operations (docs/experiments.md, Threads of the reference on a
    # CPU).
    torch.set_num_threads(1)
    device, what_runs = choose_device()
    print(f"Ran: {what_runs}")
    options.out.mkdir(parents=True, exist_ok=True)
    size = trained.GPU_SIZE if device.type == "cuda" else trained.CPU_SIZE
    try:
        model = load_dit(options.weights, device)
    except WeightsMissingError as missing:
        parser.exit(1, f"{missing}\n")
    dense = sample_dense(model, size, options.seed)
    trained.run(dense, options.out)
    call.run(dense, options.out)


if __name__ == "__main__":
    main()
