# SPDX-License-Identifier: Apache-2.0
"""The GPU tests under compute-sanitizer, many processes at once; findings are of our kernels.

python -m tests.gpu.sanitize [--tools racecheck memcheck synccheck initcheck] [--gpus 0 1]
                             [--workers 24] [--sanitizer PATH] [-k EXPRESSION] [--logs FOLDER]
                             [--arch sm_90_as_89]

A line for each group of tests as it ends, with what was found where that is not clean, then what
was clean; the exit status is 0 when all was.
racecheck (hazards in shared memory) and synccheck (barriers) keep torch's memory cache, without
which each allocation waits for all processes. memcheck must not, or it would not see the end of a
tensor, nor must initcheck: what a tensor before left in a block of the cache counts as written.

initcheck looks at what our kernels read of global memory. It watches all kernels, because it knows
no writes but those of watched ones. Tests copy whole workspaces, gaps between fields included:
what the host or a kernel of torch's copies or compares is no finding. So a gap in an output is not
found here; tests of outputs poison those.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
KERNELS = ("means", "quantize", "route", "attend", "score")
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")
#: Those that keep torch's memory cache.
CACHED = ("racecheck", "synccheck")
TESTS_A_PROCESS = 6
#: Under initcheck, which watches the reference's torch kernels as well: a test takes up to minutes.
TESTS_UNDER_INITCHECK = 1
SECONDS = 900  # for one process

#: Too long or too large under the tools, or about what the tools change: launches, synchronisation,
#: memory, compilation.
LEFT_OUT = re.compile(
    "long_sequences|beyond_two|extra_memory|four_launches|opcheck|torch_compile|repeats_are"
    "|no_memory_for|sampling_takes|waits_for|test_soak"
)
#: Graph capture may not allocate, as torch does without its cache.
NEEDS_CACHE = re.compile("cuda_graph|rules_of_a_caller")
SUMMARY = re.compile(r"(?:RACECHECK SUMMARY: (\d+) hazard|ERROR SUMMARY: (\d+) error)")
#: Not at the start of a line alone: pytest's dots may come between.
HOST_COPY = re.compile(r"=+ +Uninitialized access to \S+ on access by cudaMemcpy")
#: By a kernel that is not ours: the finding, and the lines that belong to it.
OTHERS_READ = re.compile(
    rf"^.*Uninitialized \S+ memory read.*\n=+ +at (?!{'|'.join(KERNELS)}).*\+0x.*\n"
    r"(?:=+ {5,}(?!Uninitialized|at ).*\n)*",
    re.MULTILINE,
)
FOUND = 77  # the exit status of the tools where they have found something
#: Of each process. Findings that are not printed count, and a torch kernel that compares workspaces
#: reads their gaps thousands of times.
PRINTED = 100_000
SHOWN = 12  # lines of a log that is not clean


@dataclass(frozen=True)
class Group:
    """Tests of one process."""

    number: int
    tool: str
    gpu: int
    tests: tuple[str, ...]
    arch: tuple[str, ...] = ()
    """Options that choose the target of the kernels."""

    def environment(self) -> dict[str, str]:
        own = {"CUDA_VISIBLE_DEVICES": str(self.gpu), "OMP_NUM_THREADS": "1"}
        if self.tool not in CACHED and not any(map(NEEDS_CACHE.search, self.tests)):
            own["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        return os.environ | own

    def command(self, sanitizer: str) -> list[str]:
        watched = () if self.tool == "initcheck" else KERNELS
        kernels = [word for name in watched for word in ("--kernel-name", f"kns={name}")]
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *self.arch]
        pytest += self.tests
        limits = ["--error-exitcode", str(FOUND), "--print-limit", str(PRINTED)]
        if self.tool == "initcheck":
            limits += ["--show-backtrace", "no"]  # forty lines each; kernel and test say enough
        return [sanitizer, "--tool", self.tool, *limits, *kernels, *pytest]


def groups(
    tests: Sequence[str], tools: Sequence[str], gpus: Sequence[int], arch: tuple[str, ...] = ()
) -> Iterator[Group]:
    """Every test once for each tool; those that need the cache on their own."""
    apart = [test for test in tests if NEEDS_CACHE.search(test)]
    together = [test for test in tests if test not in apart]
    turn = cycle(gpus)
    pairs: list[tuple[str, tuple[str, ...]]] = []
    for tool in tools:
        most = TESTS_UNDER_INITCHECK if tool == "initcheck" else TESTS_A_PROCESS
        chunks = [tuple(together[at : at + most]) for at in range(0, len(together), most)]
        pairs += [(tool, chunk) for chunk in [*((test,) for test in apart), *chunks]]
    for number, (tool, chunk) in enumerate(pairs):
        yield Group(number, tool, next(turn), chunk, arch)


def collected(expression: str) -> list[str]:
    """The ids of the GPU tests that fit the tools."""
    chosen = ["-k", expression] if expression else []
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        raise SystemExit(f"The GPU tests cannot be collected:\n{listing.stdout[-2000:]}")
    ids = [f"tests/{line}" for line in listing.stdout.splitlines() if "::" in line]
    return [test for test in ids if not LEFT_OUT.search(test)]


def is_clean(tool: str, status: int, log: str, tests: int) -> bool:
    """All tests passed, none was skipped, and the tool found nothing in our kernels."""
    passed, summary = re.search(r"(\d+) passed", log), SUMMARY.search(log)
    if not passed or not summary or int(passed[1]) != tests:
        return False
    forgiven = 0
    if tool == "initcheck":
        forgiven = len(HOST_COPY.findall(log)) + len(OTHERS_READ.findall(log))
    return int(summary[1] or summary[2]) == forgiven and status == (FOUND if forgiven else 0)


def findings(log: str) -> list[str]:
    """The first lines of the tool and of pytest that say what is not clean: machines on loan keep
    no logs. Copies by the host, which initcheck names in two lines, are left out."""
    kept = OTHERS_READ.sub("", log).splitlines()
    lines = [line for line in kept if re.search("==+ .*[a-z]|^E  |^FAILED", line)]
    copies = {at for at, line in enumerate(lines) if HOST_COPY.search(line)}
    copies |= {at - 1 for at in copies}
    return [line for at, line in enumerate(lines) if at not in copies][:SHOWN]


def run(group: Group, sanitizer: str, logs: Path) -> bool:
    started = time.monotonic()
    log = logs / f"{group.tool}.{group.number}.log"
    try:
        with log.open("w") as out:
            status = subprocess.run(
                group.command(sanitizer),
                cwd=ROOT,
                env=group.environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
            ).returncode
    except subprocess.TimeoutExpired:
        status = -1
    found = log.read_text(errors="replace")
    clean = is_clean(group.tool, status, found, len(group.tests))
    took = time.monotonic() - started
    verdict = "clean" if clean else f"NOT CLEAN (status {status}), see {log}"
    said = [f"{group.tool} {group.number}: {len(group.tests)} tests, {took:.0f} s, {verdict}"]
    if not clean:
        said += [*group.tests, *findings(found)]
    print("\n    ".join(said), flush=True)
    return clean


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--gpus", nargs="+", type=int, default=[0])
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 8) - 8))
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--arch", help="as that of tests/conftest.py")
    parser.add_argument("-k", dest="expression", default="", help="as pytest's")
    parser.add_argument("--logs", type=Path, default=None)
    options = parser.parse_args(arguments)
    tests = collected(options.expression)
    if not tests:
        print("No GPU test was collected.", file=sys.stderr)
        return 1
    logs = options.logs or Path(tempfile.mkdtemp(prefix="sanitize-"))
    logs.mkdir(parents=True, exist_ok=True)
    arch = ("--arch", options.arch) if options.arch else ()
    todo = list(groups(tests, options.tools, options.gpus, arch))
    with ThreadPoolExecutor(options.workers) as pool:
        clean = list(pool.map(lambda group: run(group, options.sanitizer, logs), todo))
    for tool in options.tools:
        of_tool = [(ok, group) for ok, group in zip(clean, todo, strict=True) if group.tool == tool]
        good = sum(len(group.tests) for ok, group in of_tool if ok)
        print(f"{tool}: {good} of {len(tests)} tests clean")
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
