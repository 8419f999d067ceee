# SPDX-License-Identifier: Apache-2.0
"""The speed table of a GPU: measured once, kept beside the kernels, the same for every run.

A table is of one GPU, driver, torch, kernels and backend for exact attention, which its file's name
stands for. Its file is written whole and believed only where it is the user's own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from pathlib import Path

import torch

from ..common.whole_file import write_whole
from ..errors import Unsupported
from ..kernels.device import capabilities
from ..kernels.driver import driver_version
from ..kernels.folder import cache_folder, distrust, make_folder, read_file, why_none
from ..kernels.source import read_sources
from ..kernels.store import entry_stem
from ..kernels.warmup import eight_bit_specs
from .backend import TORCH, Backend
from .self_test import WrongKernels, check_kernels
from .table import SpeedTable
from .timing import measure_speed

logger = logging.getLogger("sparge")

#: Changes with what is measured and how.
_FORMAT = "3"
_LARGEST = 1 << 16  # bytes
#: Misfit that no undisturbed measurement has.
_DISTURBED = 0.15

_Kind = tuple[str, str, str]  # name of a GPU, target and backend
_known: dict[tuple[int, _Kind], SpeedTable] = {}  # by number of the GPU and kind
_lock = threading.Lock()


def known_table(device: torch.device, backend: Backend = TORCH) -> SpeedTable | None:
    """Table that this process has, of this GPU or of another one of its name; never measures, never
    waits for the GPU."""
    if device.type != "cuda":
        return None
    index, kind = device.index or 0, _kind(device, backend)
    table = _known.get((index, kind))
    if table is None:
        table = next((known for (_, of), known in [*_known.items()] if of == kind), None)
        if table is not None:
            _known[index, kind] = table
    return table


def speed_table(device: torch.device | str, backend: Backend = TORCH) -> SpeedTable | None:
    """Table of a GPU: that of this process, else the kept one, else measured, in about a second.

    None for devices without kernels, and where memory is too full to measure. Raises
    KernelBuildError where a kernel does not compile, WrongKernels where one computes something
    else than it should.
    """
    device = torch.empty(0, device=device).device
    if not capabilities(device).usable or device.type != "cuda":
        return None
    with _lock:
        if (known := known_table(device, backend)) is not None:
            return known
        facts = facts_of(device, backend)
        table = _read(facts)
        if table is None:
            try:
                check_kernels(device)
                table = _measure(device, backend, facts)
            except WrongKernels:
                raise
            except (torch.OutOfMemoryError, Unsupported) as error:
                logger.info("[Sparge] the speed of this GPU was not measured: %s", error)
                return None
            if is_disturbed(table):
                logger.info("[Sparge] the GPU was busy while its speed was measured: not kept")
            else:
                _keep(table)
        _known[device.index or 0, _kind(device, backend)] = table
        return table


def _measure(device: torch.device, backend: Backend, facts: dict[str, str]) -> SpeedTable:
    table = measure_speed(device, backend, facts)
    return measure_speed(device, backend, facts) if is_disturbed(table) else table


def is_disturbed(table: SpeedTable) -> bool:
    """Whether something else used the GPU while it was measured."""
    return any(times.margin > _DISTURBED for times in table.by_head_dim.values())


def kept_tables() -> list[tuple[Path, SpeedTable]]:
    """Tables in the cache that can be believed, whatever they are of."""
    folder = cache_folder()
    paths = [] if folder is None or distrust(folder) else sorted(folder.glob("speed.*.json"))
    found = [(path, _read_file(path)) for path in paths]
    return [(path, table) for path, table in found if table is not None]


def facts_of(device: torch.device, backend: Backend) -> dict[str, str]:
    """Facts that a table depends on."""
    arch = capabilities(device).arch
    stems = sorted(entry_stem(s, read_sources(s.entry)) for s in eight_bit_specs(arch))
    return {
        "format": _FORMAT,
        "gpu": torch.cuda.get_device_name(device),
        "driver": str(driver_version()),
        "torch": torch.__version__,
        "kernels": _short_hash("".join(stems)),
        "exact": backend.name,
    }


def path_of(facts: dict[str, str]) -> Path | None:
    """File of a table; None where this user has no cache folder."""
    folder = cache_folder()
    return folder and folder / f"speed.{_short_hash(json.dumps(facts, sort_keys=True))}.json"


def _kind(device: torch.device, backend: Backend) -> _Kind:
    return torch.cuda.get_device_name(device), capabilities(device).arch, backend.name


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(facts: dict[str, str]) -> SpeedTable | None:
    """The kept table; None where there is none that can be believed."""
    path = path_of(facts)
    if path is None or distrust(path.parent):
        return None
    return _read_file(path)


def _read_file(path: Path) -> SpeedTable | None:
    try:
        stored = json.loads(read_file(path, _LARGEST))
        if stored["facts"]["format"] != _FORMAT:
            return None  # of another version of this pack
        table = SpeedTable.from_json(stored)
        if path_of(dict(table.facts)) != path:
            raise ValueError("it is of another GPU, driver, torch or kernels")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("Speed table %s is not used, and is measured anew: %s", path.name, error)
        return None
    return table


def _keep(table: SpeedTable) -> None:
    path = path_of(dict(table.facts))
    why = why_none()
    if path is not None:
        try:
            make_folder(path.parent)
            if not (why := distrust(path.parent)):
                write_whole(path, json.dumps(table.to_json(), indent=1).encode())
                return
        except OSError as error:
            why = str(error)
    logger.warning(
        "The speed of this GPU is measured again at the next start, and results may then differ in "
        "the last bits: %s. Set SPARGE_CACHE to a folder of your own.",
        why,
    )
