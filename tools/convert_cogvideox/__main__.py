# SPDX-License-Identifier: Apache-2.0
"""The command, by module name or by folder."""

import sys

if __package__:
    from .convert import main
else:
    # `python tools/convert_cogvideox`, which Windows' portable Python needs: it finds no module in
    # the current folder.
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tools.convert_cogvideox.convert import main

if __name__ == "__main__":
    sys.exit(main())
