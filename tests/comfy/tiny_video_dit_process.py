# SPDX-License-Identifier: Apache-2.0
"""Runs in ComfyUI's process: compares the small video model there with ours.

usage: tiny_video_dit_process.py SCRATCH_FOLDER. stdout: one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    # Only the answer may reach the parent: whatever ComfyUI prints goes to the log.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.argv = ["main.py", "--cpu", "--base-directory", str(folder)]
    import comfy.options

    comfy.options.enable_args_parsing()
    import tiny_video_dit_scenario

    answer.write(json.dumps(tiny_video_dit_scenario.compare(folder)) + "\n")


if __name__ == "__main__":
    main()
