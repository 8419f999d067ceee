# SPDX-License-Identifier: Apache-2.0
"""Runs in ComfyUI's process: loads ComfyUI and the pack, then answers one scenario per line.

usage: worker.py BASE_DIRECTORY PACK_FOLDER_NAME PACK. stdin: JSON [name, arguments]; stdout: JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    base, folder, pack = sys.argv[1:]
    # Only answers may reach the parent: whatever ComfyUI prints goes to the log.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.argv = ["main.py", "--cpu", "--base-directory", base]
    import comfy.options

    comfy.options.enable_args_parsing()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    import nodes

    loaded = asyncio.run(nodes.load_custom_node(str(Path(base, "custom_nodes", folder))))
    sys.path.append(pack)  # behind ComfyUI, which has a module called nodes too
    import scenarios

    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            assert loaded, "ComfyUI could not load the pack"
            answer = {"result": getattr(scenarios, name)(**arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
