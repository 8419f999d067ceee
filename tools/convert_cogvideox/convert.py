# SPDX-License-Identifier: Apache-2.0
"""CogVideoX transformers from their published (diffusers) files to the one file ComfyUI core loads.

    python tools/convert_cogvideox SOURCE [SOURCE ...] --out FILE

SOURCE is the model's folder, its `transformer` folder, or the safetensors shards themselves. Core
names the parameters otherwise than diffusers and loads no published file as it is. The VAE needs no
conversion: core loads `vae/diffusion_pytorch_model.safetensors` under its published names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sparge.cogvideox.conversion import convert
from sparge.cogvideox.json_text import ConversionError
from sparge.cogvideox.tensor_file import write_tensors


def find_shards(sources: Sequence[Path]) -> list[Path]:
    """The safetensors files that `sources` name. Raises ConversionError where there are none."""
    shards: list[Path] = []
    for source in sources:
        if source.is_dir():
            folder = source / "transformer" if (source / "transformer").is_dir() else source
            found = sorted(folder.glob("*.safetensors"))
            if not found:
                raise ConversionError(f"{folder} holds no .safetensors file")
            shards += found
        elif not source.is_file():
            raise ConversionError(f"{source} does not exist")
        elif source.suffix != ".safetensors":
            raise ConversionError(
                f"{source.name} is not a .safetensors file; other formats can run code when they"
                " are opened and are not read, so download the safetensors shards"
            )
        else:
            shards.append(source)
    return shards


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="convert_cogvideox",
        description="Convert a CogVideoX transformer from its diffusers files for ComfyUI.",
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        shards = find_shards(options.sources)
        if any(options.out.exists() and options.out.samefile(shard) for shard in shards):
            raise ConversionError("--out names one of the sources")
        if not options.out.parent.is_dir():
            raise ConversionError(f"{options.out.parent} is not a folder")
        conversion = convert(shards)
        write_tensors(options.out, conversion.tensors)
    except (ConversionError, OSError) as error:
        print(_printable(f"not converted: {error}"), file=sys.stderr)
        return 1
    print(_printable(f"{options.out}: {conversion.summary}"))
    return 0


def _printable(line: str) -> str:
    """Paths may hold bytes that no output takes."""
    return line.encode("utf-8", "backslashreplace").decode()
