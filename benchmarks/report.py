# SPDX-License-Identifier: Apache-2.0
"""Writes the tables and pictures of docs/benchmarks.md and the README's table of calls.

python -m benchmarks.report [--check]

They are made from benchmarks/results; a test checks them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from sparge.tune.spread import ROW_STEP

from .limits import Ceilings, read_ceilings
from .png import write_png
from .prose import paragraph
from .sample_table import samples_table
from .speed_plot import picture_name, pictures
from .speed_table import OURS, TITLES, Speeds, summary, table, tables
from .timing import ROOT, read_rows

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks:begin -->\n", "<!-- benchmarks:end -->"
CALLS_BEGIN, CALLS_END = "<!-- calls:begin -->\n", "<!-- calls:end -->"
#: File of `benchmarks.attention` and of `benchmarks.limits`.
SPEEDS = "h200.json"
LIMITS = "h200_limits.json"
SPEEDS_H100 = "h100.json"
SAMPLES = "h200_samples.jsonl"
#: File of `benchmarks.attend_errors`.
ERRORS = "h200_errors.jsonl"
#: Files of `benchmarks.comfyui_call`: on one GPU, second runs there, on others by their number, and
#: as a user starts them.
CALLS, AGAIN = "h200_comfyui.jsonl", "h200_comfyui_again.jsonl"
OTHERS, RUNS = "h200_comfyui_others.jsonl", "h200_comfyui_runs.jsonl"
CALLS_H100 = "h100_comfyui.jsonl"
CONFIGS = (
    "default",
    "topk 0.5, pvthreshd 15",
    "topk 0.2, pvthreshd 15",
    "auto budget 0.2, pvthreshd 15",
)
#: Names of the models by `model` of the rows.
NAMES = {
    "mochi": "Mochi",
    "cogvideox": "CogVideoX-5B",
    "wan": "Wan 14B",
    "flux": "Flux",
}
#: Pooled keys in half of the heads by decree, as the node has them and in every step, which it
#: never does.
WITH_RESIDUAL = tuple(
    f"{CONFIGS[-1]}, residual in 0.5{steps}" for steps in (" of every second step", "")
)


def read(name: str) -> list[dict[str, Any]]:
    return read_rows(RESULTS / name)


def _other_rows(samples: list[dict[str, Any]]) -> str:
    """Sentence on the samples that compared more or fewer rows of a query block than now."""
    steps = {row["tokens"]: row.get("row_step", 2) for row in samples}
    other = [f"{tokens:,}" for tokens, step in steps.items() if step != ROW_STEP]
    return f" (those of {', '.join(other)} tokens compared other rows)" if other else ""


def _cell(seconds: float | None) -> str:
    """Three digits; empty where nothing was measured."""
    return "" if seconds is None else f"{seconds:#.3g}"


def comfyui(rows: list[dict[str, Any]]) -> str:
    """Table of ComfyUI calls, without columns for what was not measured."""
    timed = [row for row in rows if "seconds_per_call" in row]
    seconds = {(row["model"], row["config"]): row["seconds_per_call"] for row in timed}
    shapes = {row["model"]: row["shape"] for row in timed}
    measured = {config for _, config in seconds}
    configs = [config for config in (*CONFIGS, *WITH_RESIDUAL) if config in measured]
    lines = [
        [f"{model} {shapes[model]}", *(_cell(seconds.get((model, config))) for config in configs)]
        for model in shapes
    ]
    return table(["one denoising call, seconds", *configs], lines)


def _others() -> str:
    """Seconds of a call of the last of CONFIGS and of the default, as text, from the fastest
    default on."""
    pairs: dict[str, dict[int, dict[str, float]]] = {}
    for row in read(OTHERS):
        of_model = pairs.setdefault(row["model"], {})
        of_model.setdefault(row["gpu_number"], {})[row["config"]] = row["seconds_per_call"]
    described = []
    for model, by_gpu in pairs.items():
        found = sorted((each[CONFIGS[0]], each[CONFIGS[-1]]) for each in by_gpu.values())
        listed = ", ".join(f"{_cell(ours)} ({_cell(default)})" for default, ours in found)
        described.append(f"{model} {listed}")
    return "; ".join(described)


def _runs_of_users() -> str:
    """Seconds of all steps, of the default and of the last of CONFIGS, which may stay dense, as
    text."""
    steps: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in read(RUNS):
        steps.setdefault((row["model"], len(row["seconds"])), {})[row["config"]] = row
    described = []
    for (model, count), rows in sorted(steps.items()):
        default, ours = (rows[config] for config in (CONFIGS[0], CONFIGS[-1]))
        stays = "" if ours["sparse_calls"] else ", as it stays dense"
        times = f"{_cell(default['run_seconds'])} and {_cell(ours['run_seconds'])} s{stays}"
        described.append(f"{model}, {count} steps, default and {CONFIGS[-1]}: {times}")
    return "; ".join(described)


def measuring(rows: list[dict[str, Any]]) -> str:
    """Table of what the heads of a model take in real ComfyUI: measured in the first call, which is
    dense, and chosen for in the next."""
    default = {row["model"]: row["seconds_per_call"] for row in rows if row["config"] == CONFIGS[0]}
    lines = [
        [
            row["model"],
            *map(_cell, (default.get(row["model"]), row["seconds"][0])),
            *map(_cell, (row["calibration_s"][0], row["choosing_s"][1])),
        ]
        for row in rows
        if row["config"] == CONFIGS[-1]
    ]
    head = ("its first run, seconds", "default's call", "measured call", "of it measuring")
    return table([*head, "first choice, in the next"], lines)


def _runs(calls: list[dict[str, Any]]) -> str:
    """Sentence on the run of each shape, which is that of its first row, and the rows of other
    runs."""
    of_shape = {row["shape"]: row["commit"] for row in reversed(calls)}
    commits: dict[str, list[str]] = {}
    for shape in dict.fromkeys(row["shape"] for row in calls):
        commits.setdefault(of_shape[shape], []).append(shape)
    runs = "; ".join(
        f"{', '.join(shapes)} at commit {commit}" for commit, shapes in commits.items()
    )
    others: dict[tuple[str, str], dict[str, None]] = {}
    for row in calls:
        if row["commit"] != of_shape[row["shape"]] and "ms" in row:
            others.setdefault((row["peer"], row["commit"]), {})[row["shape"]] = None
    named = [
        f"`{peer}` of {', '.join(shapes)} (commit {commit})"
        for (peer, commit), shapes in others.items()
    ]
    return runs + (f". Of another run: {', '.join(named)}" if named else "")


def _again(rows: list[dict[str, Any]]) -> str:
    """Sentence on what measuring took in a process's second run."""
    return ", ".join(
        f"a second run of {row['model']}: {_cell(row['calibration_s'][0])} s in all (commit "
        f"{row['commit']})"
        for row in rows
    )


def _about_limits() -> str:
    commit = json.loads((RESULTS / LIMITS).read_text(encoding="utf-8"))["commit"]
    return (
        f"The limit is the time that rates measured on a GPU of this kind (commit {commit}) allow "
        "if all overlaps. `benchmarks/limits.py` has the formula. It puts all exponentials on the "
        "special function unit; our kernel computes five of eight elsewhere."
    )


def errors_beside_portable(data: str) -> list[float]:
    """Relative L2 errors of Hopper's attend kernel, in those of the portable one."""
    return [
        row["wgmma_rel_l2"] / row["mma_sync_rel_l2"] for row in read(ERRORS) if row["data"] == data
    ]


def _about_errors() -> str:
    drift, noise = (errors_beside_portable(data) for data in ("drift", "noise"))
    return (
        "Hopper's attend kernel (wgmma) errs as the portable one (`mma.sync`, INT8 and E4M3) does "
        f"with the same operands. Relative L2, commit {_commits(ERRORS)}: on the inputs of the "
        f"tables {min(drift):.3f} to {max(drift):.3f} times as much (`ours` and `ours, budgets`), "
        f"on noise, where no error averages out, {min(noise):.3f} to {max(noise):.3f} times."
    )


def _commits(name: str) -> str:
    """Commits of a file's rows."""
    return ", ".join(dict.fromkeys(row["commit"] for row in read(name)))


def _on_an_h100() -> list[str]:
    """Section on an H100: every shape in one run with the peers, flash-attn-4 among them, and calls
    of models."""
    calls = read(SPEEDS_H100)
    shapes = [Speeds.of(calls, shape) for shape in dict.fromkeys(row["shape"] for row in calls)]
    about = (
        f"Milliseconds of one attention call on one {calls[0]['gpu']}, whose memory is slower than "
        f"an H200's. flash-attn-4 is among the peers. Commit {_commits(SPEEDS_H100)}; "
        f"`{SPEEDS_H100}` has every row."
    )
    about_models = (
        "Calls of full-size models with random weights in ComfyUI on GPUs of that kind, commit "
        f"{_commits(CALLS_H100)} (`{CALLS_H100}`):"
    )
    return [
        "## The same on an H100\n",
        paragraph(about),
        summary("H100", shapes, None),
        paragraph(about_models),
        comfyui(read(CALLS_H100)),
    ]


def _attention_calls(calls: list[dict[str, Any]], most: Ceilings | None) -> list[str]:
    about = [
        f"Milliseconds of one attention call on one {calls[0]['gpu']}, every stage included, each "
        f"shape in one run: {_runs(calls)}. The error of our rows is against float32 over the same "
        "blocks, that of the others against float32 over all keys (`sol_attn` adds pooled terms "
        "for what it drops).",
        _about_errors(),
    ]
    if any(row["peer"] == OURS for row in calls):
        about.append(
            "Rows named `budgets` have head settings: tokens in cube order, a density for each "
            "head, pooled keys in every second head. The settings are made up to time the kernels "
            "and the inputs are random, so their error, which is against float32 over all keys, "
            "says nothing about the auto modes. [How near to dense](#how-near-to-dense) does."
        )
    if any("stages" in row for row in calls):
        about.append(
            "The executed rate of attend counts the pairs that the attend kernel computes, "
            "pooled keys among them. Its time is that of the call less that of means, quantize "
            "and route, which come before it and are timed together. 100 % is the rate of `ours`, "
            "dense."
        )
    if most is not None:
        about.append(_about_limits())
    folder = "../" + RESULTS.relative_to(ROOT).as_posix()
    shown = [
        f"![Milliseconds against density: {TITLES[shape]}]({folder}/{picture_name(shape)})\n"
        for shape in pictures(calls, most)
    ]
    about_others = (
        "The host takes some 0.4 ms to queue a sparse call, longer than some calls of flux1k take "
        "on the GPU. Here and in a model it runs ahead. With head settings the text of flux1k "
        "alone makes 20 and 10 % one density. SageAttention 2 and upstream's SpargeAttn have no "
        "wheels for this GPU on PyPI and were not run."
    )
    head = "## One attention call, H200\n"
    return [head, *map(paragraph, about), *shown, tables(calls, most), paragraph(about_others)]


def _model_calls(model_calls: list[dict[str, Any]]) -> list[str]:
    about = (
        f"ComfyUI {model_calls[-1]['comfyui']}, full-size models with random weights, GPU of the "
        f"same kind, commit {_commits(CALLS)}. Medians of sparse calls, as the first one takes "
        "longer; an auto mode's first call is dense and measured."
    )
    about_pooled = (
        "Random weights do not say which heads take pooled keys (`residual` in the results). In "
        "the last column half of the heads have them in every step; the node leaves them out of "
        "every second one."
    )
    about_others = (
        f"At the power limit GPUs of a kind differ. {CONFIGS[-1]}, and the default in brackets, on "
        f"others: {_others()} (`{OTHERS}`, commit {_commits(OTHERS)})."
    )
    about_runs = (
        "Whole runs, as a user starts them (start_percent 0.2, the second in a process): "
        f"{_runs_of_users()} (`{RUNS}`, commit {_commits(RUNS)})."
    )
    return [
        "## One denoising call of a model in ComfyUI, H200\n",
        paragraph(about),
        paragraph(about_pooled),
        comfyui(model_calls),
        paragraph(about_others),
        paragraph(about_runs),
    ]


def _measurements(
    model_calls: list[dict[str, Any]], samples: list[dict[str, Any]], again: list[dict[str, Any]]
) -> list[str]:
    about = (
        "A layer's heads are measured once in the dense steps of a run and up to twice in the "
        "sparse ones. The table gives what a measurement takes in shares of a dense call by flash "
        "attention, for which ComfyUI asks first. A run of 20 steps has four dense ones by "
        "default, our graph for CogVideoX with 50 has ten. Commit "
        f"{', '.join(dict.fromkeys(row['commit'] for row in samples))}{_other_rows(samples)}."
    )
    about_exact = (
        "Where cuDNN's exact attention is known to be faster, it serves the measured calls. Their "
        "attention is then shorter than the default's although they are measured."
    )
    about_models = (
        "In ComfyUI the first measurement of a process takes 0.1 to 0.3 s longer, in which kernels "
        f"are loaded. The others take what the table says: {_again(again)}. Later choices take an "
        "eighth to a third of the first one's time, or nearly all of it where heads were measured "
        "again. Models of the table before, with that first measurement:"
    )
    return [
        "## What measuring takes\n",
        paragraph(about),
        paragraph(about_exact),
        samples_table(samples),
        paragraph(about_models),
        measuring(model_calls),
    ]


def section(
    calls: list[dict[str, Any]],
    most: Ceilings | None,
    model_calls: list[dict[str, Any]],
    samples: list[dict[str, Any]],
    again: list[dict[str, Any]],
) -> str:
    """Text between BEGIN and END. again: second runs of a process."""
    made = [*_attention_calls(calls, most), *_model_calls(model_calls), *_on_an_h100()]
    made += _measurements(model_calls, samples, again)
    return "\n".join(["", *made, ""])


def calls_table(model_calls: list[dict[str, Any]]) -> str:
    """Text between CALLS_BEGIN and CALLS_END: a model a line, dense beside sparse."""
    timed = [row for row in model_calls if "seconds_per_call" in row]
    seconds = {(row["model"], row["config"]): row["seconds_per_call"] for row in timed}
    lines = []
    for model, shape in {row["model"]: row["shape"] for row in timed}.items():
        dense, sparse = (seconds[model, config] for config in (CONFIGS[0], CONFIGS[-1]))
        name = f"{NAMES[model]} {shape.split(',')[0]}"
        lines.append([name, f"{_cell(dense)} s", f"{_cell(sparse)} s", f"{dense / sparse:.2f}"])
    head = ("one call of the model", "ComfyUI's attention", "auto budget 0.2", "times as fast")
    return "\n" + table(head, lines) + "\n"


def _between(text: str, begin: str, end: str, made: str) -> str:
    before, rest = text.split(begin)
    return before + begin + made + end + rest.split(end)[1]


def main() -> int:
    page, readme = (path.read_text(encoding="utf-8") for path in (PAGE, README))
    calls, most = read(SPEEDS), read_ceilings(RESULTS / LIMITS)
    made = section(calls, most, read(CALLS), read(SAMPLES), read(AGAIN))
    wanted = (
        (PAGE, page, _between(page, BEGIN, END, made)),
        (README, readme, _between(readme, CALLS_BEGIN, CALLS_END, calls_table(read(CALLS)))),
    )
    if "--check" in sys.argv[1:]:
        return int(any(text != new for _, text, new in wanted))
    for path, _, new in wanted:
        path.write_text(new, encoding="utf-8")
    for shape, pixels in pictures(calls, most).items():
        write_png(RESULTS / picture_name(shape), pixels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
