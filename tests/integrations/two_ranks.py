# SPDX-License-Identifier: Apache-2.0
"""Two processes that share one sequence by diffusers' Ulysses, beside one process that does not."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from sparge.integrations.diffusers import enable

RANKS = 2
Results = dict[str, Tensor]


def run(kind: str, folder: Path) -> Results:
    """What `pipelines` gives on each rank of two processes, on the CPU (gloo) or two GPUs (NCCL):
    rank 1's under names that end in "of rank 1"."""
    # Multicast over NVLink needs rights that containers often lack.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    spawn(_rank, (kind, address, folder), nprocs=RANKS)
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS))
    return first | {f"{name} of rank 1": x for name, x in second.items()}


def _rank(rank: int, kind: str, address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["SPARGE_REFERENCE"] = "1"
    device, options = torch.device(kind), {}
    if kind == "cuda":
        device = torch.device(kind, rank)
        torch.cuda.set_device(device)
        options["device_id"] = device
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, address, rank=rank, world_size=RANKS, **options)
    with torch.inference_mode():
        found = pipelines(device)
    torch.save({name: x.cpu() for name, x in found.items()}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def pipelines(device: torch.device) -> Results:
    """`one ...` alone and `two ...` under Ulysses."""
    from tests.tiny_models.pipelines import diffusers, flux, wan

    diffusers.logging.set_verbosity_error()
    found: Results = {}
    budget, manual = {"mode": "auto budget", "topk": 0.5}, {"mode": "manual", "topk": 0.3}
    for name, make, given in (("wan", wan, budget), ("wan manual", wan, manual),
                              ("flux", flux, budget), ("flux manual", flux, manual)):  # fmt: skip
        found |= _ran(f"one {name}", make(), device, given)
        found |= _ran(f"two {name}", _shared(make(), device), device, given)
    why_not = "no kernels" if dist.get_rank() else None
    with mock.patch("sparge.session.session.unusable_reason", lambda device: why_not):
        found |= _ran("two unusable", _shared(wan(), device), device, budget)
    return found


def _ran(case: str, tiny: Any, device: torch.device, given: dict[str, Any]) -> Results:
    """Latents of a pipeline, its calls, and densities of its heads."""
    model = tiny.pipe.transformer.to(device)
    model.set_attention_backend("native")  # which diffusers keeps for all models
    with enable(tiny.pipe, min_tokens=100, start_percent=0.0, **given) as handle:
        found = {case: tiny(3, guidance=1.0)}
    result, run = handle.stats, handle._run
    assert result is not None and run is not None
    found[f"{case} calls"] = torch.tensor([result.counts.sparse, result.counts.dense])
    for heads in run.heads.by_shape.values() if run.heads else ():
        if heads.settings is not None:
            found[f"{case} density"] = heads.settings.density
    return found


def _shared(tiny: Any, device: torch.device) -> Any:
    """Pipeline whose transformer shares its sequence with the other rank."""
    from tests.tiny_models.pipelines import diffusers

    # diffusers asks how many accelerators there are, before it asks which backend is used.
    counted = mock.patch.object(torch.accelerator, "device_count", lambda: 1)
    with counted if device.type == "cpu" else nullcontext():
        config = diffusers.ContextParallelConfig(ulysses_degree=RANKS)
        tiny.pipe.transformer.to(device).enable_parallelism(config=config)
    return tiny
