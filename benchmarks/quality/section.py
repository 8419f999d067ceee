# SPDX-License-Identifier: Apache-2.0
"""Section on quality of docs/benchmarks.md, from benchmarks/results/quality.json alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.prose import paragraph
from benchmarks.quality.rows import EMULATION, REFERENCE, Row, of_densities, of_targets
from benchmarks.quality.study import DROP_NOISE, PREDICTED_WITHIN
from benchmarks.quality.targets import TARGETS

BEGIN, END = "<!-- quality:begin -->\n", "<!-- quality:end -->"
#: Beginning of the names of data that have rows of targets.
CLIPS = "dit clips "
#: Titles of the modes, in their order in tables and pictures.
MODES = {
    "drop": "`drop` is SpargeAttn's rule: a top-k of block means, and the rest is gone",
    "sol": "`sol` adds one term a query block for the rest, as Sol-Attn does",
    "ours manual": "`ours manual` is this node with mode manual",
    "ours auto": "`ours auto` is mode auto budget",
}
SMALL_GRID = re.compile(r" \d+x\d+x\d+$")  # ends names of clips not of full size


@dataclass(frozen=True)
class Part:
    """Part of the section on one kind of data: a table, and a picture where it has a file name."""

    begins: str
    """Beginning of the names of the rows' data."""
    field: str
    title: str
    """Title of the picture's vertical axis."""
    about: str
    """{layers} becomes which share of them was judged."""
    digits: int
    picture: str = ""


PARTS = (
    Part(
        "dino ",
        "rel_l2",
        "relative L2 error",
        "Relative L2 error of an attention call, mean over the 6 heads of {layers} "
        "layers of DINOv2 ViT-S on 12 video frames that attend jointly (18,444 tokens), over 8 "
        "query blocks of each head; `ours auto` as in the steps with pooled keys, measured on "
        "8 other query blocks of the same calls",
        3,
        "quality_rel_l2.png",
    ),
    Part(
        CLIPS,
        "psnr",
        "PSNR, dB",
        "PSNR in dB of clips of our small video DiT (21,420 tokens, 20 steps, the first 4 dense) "
        "against the same clips sampled dense",
        1,
        "quality_psnr.png",
    ),
    Part("dit comfyui clips ", "psnr", "PSNR, dB", "The same by ComfyUI's own sampler", 1),
    Part(
        "dit of seed 1 clips ",
        "psnr",
        "PSNR, dB",
        "PSNR in dB of clips of a second model of that size, trained from another seed for 290 s "
        "of a shared H200, sampled as in the first table of clips",
        1,
    ),
    Part(
        "dit of seed 2 clips ",
        "psnr",
        "PSNR, dB",
        "The same of a third model, 384 instead of 256 channels wide, with 6 instead of 8 blocks",
        1,
    ),
    Part(
        "dit of seed 3 clips ",
        "psnr",
        "PSNR, dB",
        "And of a fourth, 512 channels wide, with 4 blocks, trained for 130 s only (1,491 steps)",
        1,
    ),
    Part(
        "dit of seed 3 at 1,144 steps clips ",
        "psnr",
        "PSNR, dB",
        "And of a fifth, trained like the fourth while the GPU had more to do beside (1,144 "
        "steps): on it twice the density helps drop more than measuring does",
        1,
    ),
)


def chosen(rows: Iterable[Row], part: Part) -> list[Row]:
    """Rows of mean densities of the part's data set. Where a mode ran in several places, only those
    of a GPU's kernels."""
    return best_places(_latest(of_densities(rows), part.begins))


def _latest(rows: Iterable[Row], begins: str) -> list[Row]:
    """Rows of the data so named; of several, those that entered the file last."""
    rows = list(rows)
    names = [row["data"] for row in rows if row["data"].startswith(begins)]
    names = [name for name in names if not SMALL_GRID.search(name)]
    return [row for row in rows if names and row["data"] == names[-1]]


def best_places(rows: Iterable[Row]) -> list[Row]:
    """One row for each mode and asked density, from the kernels where they ran."""
    found = {(row["mode"], row["asked_density"]): row for row in sorted(rows, key=by_kernels)}
    return list(found.values())


def by_kernels(row: Row) -> bool:
    return row["where"] not in (EMULATION, REFERENCE)


def section(rows: Sequence[Row]) -> str:
    """Text between BEGIN and END; a sentence where nothing was measured."""
    parts = [(part, found) for part in PARTS if (found := chosen(rows, part))]
    of_clips = _targets(_latest(of_targets(rows), CLIPS))
    if not parts and not of_clips:
        return "\nNot measured yet: `python -m benchmarks.quality --help`.\n\n"
    pictures = [
        f"![{part.title} against density](../benchmarks/results/{part.picture})\n"
        for part, _ in parts
        if part.picture
    ]
    tables = [*(_table(part, found) for part, found in parts), *of_clips]
    about = paragraph(f"{'; '.join(MODES.values())}. All in 8 bits.")
    return "\n".join(["", about, *pictures, *tables, ""])


def _table(part: Part, rows: list[Row]) -> str:
    densities = sorted({row["asked_density"] for row in rows})
    values = {(row["mode"], row["asked_density"]): row[part.field] for row in rows}
    header = [f"{rows[0]['data']}, asked density", *(f"{100 * d:g} %" for d in densities)]
    lines = [header, ["---"] * len(header)]
    for mode in MODES:
        cells = [values.get((mode, density)) for density in densities]
        if any(cell is not None for cell in cells):
            lines.append([mode, *("" if c is None else f"{c:.{part.digits}f}" for c in cells)])
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return paragraph(f"{_about(part, rows)} ({_places(rows)}):") + "\n" + text


def _about(part: Part, rows: list[Row]) -> str:
    """Sentence about a part. Raises ValueError where rows of one table are of different layers."""
    if "{layers}" not in part.about:
        return part.about
    counts = {row["layers"] for row in rows}
    if len(counts) > 1:
        raise ValueError(f"Rows of {rows[0]['data']} are of {sorted(counts)} layers: run them all.")
    (count,) = counts
    return part.about.format(layers="all 12" if count == 12 else f"{count} of the 12")


def _targets(rows: list[Row]) -> list[str]:
    """Table of the node's own targets, none where no row has one."""
    found = {row["target"]: row for row in sorted(rows, key=by_kernels)}
    shown = {name: found[target] for name, target in TARGETS.items() if target in found}
    if not shown:
        return []
    header = [
        f"{rows[0]['data']}, quality",
        "target error",
        "density",
        "PSNR, dB",
        "error reached (worst clip)",
        f"heads within {PREDICTED_WITHIN:g} x of the prediction",
        f"heads at most {DROP_NOISE:g} x as far off as drop",
    ]
    lines = [header, ["---"] * len(header)]
    for name, row in shown.items():
        shares = (row[field] for field in ("heads_within", "no_worse_than_drop"))
        figures = [f"{row['target']:g}", _percent(row["density"]), f"{row['psnr']:.1f}"]
        reached = f"{row['mean_error']:.3f} ({row['worst_mean_error']:.3f})"
        lines.append([name, *figures, reached, *map(_percent, shares)])
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    about = (
        "Mode auto quality on such clips. The target is of the mean error of the heads, each "
        "counted by its head weight. A head's own error is its mean over the sparse steps of a "
        "clip, and drop is at the head's density"
    )
    places = ", ".join(dict.fromkeys(f"{r['where']}, commit {r['commit']}" for r in shown.values()))
    return [paragraph(f"{about} ({places}):") + "\n" + text]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _places(rows: list[Row]) -> str:
    """Places and commits at which each mode ran."""
    modes: dict[str, list[str]] = {}
    for row in rows:
        if row["mode"] in MODES:
            named = modes.setdefault(row["where"], [])
            named += [row["mode"]] if row["mode"] not in named else []
    places = "; ".join(f"{where}: {', '.join(named)}" for where, named in modes.items())
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return f"{places}; commit {commits}"
