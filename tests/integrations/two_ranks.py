# SPDX-License-Identifier: Apache-2.0
"""Two processes that share one sequence, and what they compute beside what one process does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import sparge
from benchmarks.ranks import run_ranks
from benchmarks.two_gpus_diffusers import cpu_counts_as_accelerator
from benchmarks.ulysses import ring, to_heads, to_tokens
from sparge.integrations.diffusers import enable
from sparge.integrations.parallel import (
    RankAttention,
    all_heads,
    context_parallel,
    dealt_places,
    heads_of_rank,
)
from sparge.order.grid import grid_order
from sparge.tune import (
    ALONE,
    Aim,
    Measurement,
    Model,
    Session,
    SharedHeads,
    Workload,
    measure_for,
)

RANKS = 2
HEADS, HEAD_DIM, LAYERS = 4, 64, 2
#: Of which the first is dense, and heads are measured again among the others.
STEPS = 10
CLIP = sparge.TokenGrid(6, 8, 16)
PLAIN = sparge.TokenGrid(1, 16, 20)
PICTURE = sparge.TokenGrid(1, 16, 20, prefix=26)
Results = dict[str, Tensor]


def run(
    work: Callable[[torch.device, int], Results], kind: str, seed: int, folder: Path
) -> Results:
    """What `work` gives on rank 0 of two processes, on the CPU or on two GPUs."""
    run_ranks(_kept, kind, RANKS, work, seed, folder / "found.pt")
    return torch.load(folder / "found.pt", weights_only=True)


def _kept(device: torch.device, work: Any, seed: int, file: Path) -> None:
    os.environ["SPARGE_REFERENCE"] = "1"
    found = {name: x.cpu() for name, x in work(device, seed).items()}
    if dist.get_rank() == 0:
        torch.save(found, file)


def drawn(tokens: int, device: torch.device, seed: int) -> list[Tensor]:
    """q, k, v (1, tokens, heads, head_dim), the same on every rank; heads differ in how much their
    tokens are alike."""
    generator = torch.Generator().manual_seed(seed)
    alike = torch.linspace(0.1, 0.8, HEADS)[:, None]

    def draw() -> Tensor:
        blocks = torch.randn(1, -(-tokens // 32), HEADS, HEAD_DIM, generator=generator)
        own = torch.randn(1, tokens, HEADS, HEAD_DIM, generator=generator)
        smooth = blocks.repeat_interleave(32, 1)[:, :tokens]
        return (alike * smooth + 0.6 * own).to(device, torch.bfloat16)

    return [draw() for _ in range(3)]


def dealt(x: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Tokens of this rank: its share of each part."""
    shares = (part.tensor_split(RANKS, 1)[dist.get_rank()] for part in x.split(parts, 1))
    return torch.cat(list(shares), 1)


def whole(x: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Tokens of all ranks as one process has them."""
    x = x.contiguous()
    found = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(found, x)
    places = dealt_places(parts, RANKS).argsort().to(x.device)
    return torch.cat(found, 1)[:, places]


def ulysses(attend: Callable[..., Any], qkv: list[Tensor], parts: tuple[int, ...]) -> Tensor:
    """Result as the engine joins it."""
    own = [to_heads(dealt(x, parts)) for x in qkv]
    return whole(to_tokens(attend(*own)), parts)


def attentions(device: torch.device, seed: int) -> Results:
    """Every case of the attention function: `one ...` is of one process, `two ...` of both."""
    found: Results = {}
    clip, picture = drawn(CLIP.tokens, device, seed), drawn(PICTURE.tokens, device, seed + 1)
    text = (PICTURE.prefix, PICTURE.tokens - PICTURE.prefix)
    found["clip"], found["picture"] = (_exact(qkv) for qkv in (clip, picture))
    for topk in (1.0, 0.3):
        policy = sparge.SparsePolicy(topk=topk)
        attend = RankAttention(policy, grid=CLIP, min_tokens=0)
        found[f"one clip {topk}"] = _one_process(clip, policy, CLIP)
        found[f"two clip {topk}"] = ulysses(partial(attend, layout="NHD"), clip, (CLIP.tokens,))
        found[f"calls clip {topk}"] = torch.tensor(attend.stats.sparse_calls)

        found[f"one picture {topk}"] = _one_process(picture, policy, PICTURE)
        for name, places in (("places", dealt_places(text, RANKS)), ("no places", None)):
            attend = RankAttention(policy, grid=PICTURE, places=places, min_tokens=0)
            out = ulysses(partial(attend, layout="NHD"), picture, text)
            found[f"two picture {topk}, {name}"] = out
            found[f"remarks {topk}, {name}"] = torch.tensor(attend.stats.remarks.total())

        chunk = sparge.SparsePolicy(topk=topk, exact_prefix=PICTURE.prefix // RANKS)
        attend = RankAttention(chunk, ring=True, min_tokens=0)
        rounds = partial(attend.with_lse, layout="NHD")
        found[f"ring {topk}"] = whole(ring(rounds, *(dealt(x, text) for x in picture)), text)
        found[f"calls ring {topk}"] = torch.tensor(attend.stats.sparse_calls)
    return found | _measured(device, seed) | _sessions(device, seed)


def _measured(device: torch.device, seed: int) -> Results:
    """Settings that each rank chooses from what all measured, beside those of one process, and a
    call with the rank's own."""
    found: Results = {}
    layers, rank = 2, dist.get_rank()
    own = heads_of_rank(HEADS, rank, RANKS)
    tokens = [
        [x.transpose(1, 2) for x in drawn(CLIP.tokens, device, seed + layer)]
        for layer in range(layers)
    ]
    order = grid_order(CLIP)
    tables = {}
    for name, heads in (("one", slice(None)), ("two", own)):
        measurement = Measurement.begin(
            layers=layers,
            heads=len(range(HEADS)[heads]),
            workload=Workload(order),
            measure=measure_for(device),
            device=device,
        )
        for layer, qkv in enumerate(tokens):
            measurement.add(layer, *(x[:, heads] for x in qkv))
        tables[f"{name} alone"] = measurement
        if name == "two":
            measurement = measurement.gathered(all_heads())
        tables[name] = measurement
    for name, measurement in tables.items():
        table = measurement.error_table().choose(mean_density=0.6)
        found[f"density {name}"], found[f"error {name}"] = table.density, table.error
        found[f"order {name}"] = table.order_kind
        if name == "one":
            settings = table.head_settings(1, device)
    both = [torch.empty(layers, HEADS // RANKS, device=device) for _ in range(RANKS)]
    dist.all_gather(both, found["density two alone"].to(device))
    found["density two alone"] = torch.cat(both, 1)

    q, k, v = tokens[1]
    attend = RankAttention(sparge.SparsePolicy(), grid=CLIP, min_tokens=0)
    out = attend(*(x[:, own] for x in (q, k, v)), head_settings=settings, heads=own)
    of_all = sparge.attention(q, k, v, order=order, head_settings=settings)
    same = torch.tensor([torch.equal(of_all[:, own], out)], device=device).int()
    dist.all_reduce(same)
    return found | {"ranks with the same bits": same}


def _one_process(qkv: list[Tensor], policy: sparge.SparsePolicy, grid: sparge.TokenGrid) -> Tensor:
    q, k, v = qkv
    return sparge.attention(q, k, v, policy, order=grid_order(grid), layout="NHD")


def _exact(qkv: list[Tensor]) -> Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in qkv)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _sessions(device: torch.device, seed: int) -> Results:
    """Runs of a session: `one ...` has all heads to itself, `two ...` shares them with the other
    rank. In `short ...` a rank has no memory to measure a layer, nor to measure again, and in `none
    ...` not for any layer."""
    found: Results = {}
    calls = [
        [x.transpose(1, 2) for x in drawn(PLAIN.tokens, device, seed + layer)]
        for layer in range(LAYERS)
    ]
    rank = dist.get_rank()
    failing = {"short": {0}, "none": {*range(LAYERS)}}
    for name in ("one", "two", *failing)[rank > 0 :]:  # one of them for comparison
        shared = ALONE if name == "one" else SharedHeads.of_group()
        own = shared.own(HEADS)
        model = Model(layers=LAYERS, heads=HEADS, grid=PLAIN, shared=shared)
        session = Session(Aim("budget", 0.6), steps=STEPS, dense_steps=1)
        with _little_memory(failing.get(name, set()) if rank == 1 else set()) as measured:
            for step in range(STEPS):
                running = session.begin_step(step, model, device)
                outs = [
                    running.attend(layer, *(x[:, own] for x in qkv))
                    for layer, qkv in enumerate(calls)
                ]
                running.end()
                found[f"{name} {step}"] = shared.gather(torch.cat(outs), 1)
        report = session.report()
        found[f"{name} by step"] = report.by_step  # of this rank's heads
        found[f"{name} dense"] = torch.tensor(sum(report.reasons.values()))
        found[f"{name} measured"] = torch.tensor(measured)
        for table in session.chosen:
            assert table.of_all_heads is not None
            found[f"{name} density"] = table.of_all_heads.density
            found[f"{name} order"] = table.of_all_heads.order_kind
            found[f"{name} kept"] = shared.gather(report.shapes[0].density.to(device), 1)
        session.end()
    return found


@contextmanager
def _little_memory(layers: set[int]) -> Iterator[list[int]]:
    """Gives the layers that are measured. layers: these fail, and then whatever is measured
    again."""
    add, seen = Measurement.add, []

    def watched(measurement: Measurement, number: int, *qkv: Tensor, **more: Any) -> None:
        if number in layers or (layers and measurement.earlier_blocks):
            raise torch.OutOfMemoryError("no memory")
        add(measurement, number, *qkv, **more)
        seen.append(number)

    with mock.patch.object(Measurement, "add", watched):
        yield seen


def _pipelines(device: torch.device) -> Results:
    """Pipelines of diffusers with `enable`, `one ...` alone and `two ...` under Ulysses."""
    from benchmarks.tiny_models.pipelines import diffusers, flux, wan

    diffusers.logging.set_verbosity_error()
    found: Results = {}
    rank, budget = dist.get_rank(), {"mode": "auto budget", "topk": 0.5}
    settings: dict[str, dict[str, Any]] = {
        "wan": budget,
        "flux": {"mode": "auto quality", "quality": "fast"},
        "flux manual": {"mode": "manual", "topk": 0.3},
    }
    for name, given in settings.items():
        make = wan if name == "wan" else flux
        if rank == 0:  # for comparison
            found |= _ran(f"one {name}", make(), device, given)
        found |= _ran(f"two {name}", _shared(make(), device), device, given)

    found |= _ran("otherwise", _shared(wan(), device), device, budget | {"topk": 0.5 + 0.1 * rank})
    why_not = "no kernels" if rank else None
    with mock.patch("sparge.sampling.run.unusable_reason", lambda device: why_not):
        found |= _ran("unusable", _shared(wan(), device), device, budget)
    return found


def _ran(case: str, tiny: Any, device: torch.device, given: dict[str, Any]) -> Results:
    """Latents of a pipeline, its calls and reasons, and densities of its heads."""
    model = tiny.pipe.transformer.to(device)
    model.set_attention_backend("native")  # which diffusers keeps for all models
    with enable(tiny.pipe, min_tokens=100, start_percent=0.0, **given) as handle:
        found = {case: tiny(3, guidance=1.0)}
    result, run = handle.result, handle._run
    assert result is not None and run is not None
    told = "; ".join([*result.notes, *result.tally.reasons]).encode()
    found[f"{case} told"] = torch.tensor(list(told))
    found[f"{case} calls"] = torch.tensor([result.tally.sparse, result.tally.dense])
    for table in run.session.chosen:
        assert table.of_all_heads is not None
        found[f"{case} density"] = table.of_all_heads.density
    return found


def _shared(tiny: Any, device: torch.device) -> Any:
    """Pipeline whose transformer shares its sequence with the other rank."""
    _share(tiny.pipe.transformer.to(device), device, ulysses_degree=RANKS)
    return tiny


def _share(model: Any, device: torch.device, **degree: Any) -> Any:
    """Shares a transformer's sequence with the other rank; gives the configuration."""
    from benchmarks.tiny_models.pipelines import diffusers

    config = diffusers.ContextParallelConfig(**degree)
    with cpu_counts_as_accelerator(device):
        model.enable_parallelism(config=config)
    return config


def transformers(device: torch.device, seed: int) -> Results:
    """Transformers of diffusers under its ContextParallelConfig."""
    from benchmarks.tiny_models.pipelines import diffusers, flux, wan

    diffusers.logging.set_verbosity_error()
    found: Results = {}
    for name, make in (("wan", wan), ("flux", flux)):
        model, given = _first_pass(make(), device)
        found[f"native {name}"] = model(**given)[0]

        def compute(case: str, model: Any, config: Any, given: Any = given) -> None:
            for topk in (1.0, 0.3):
                policy = sparge.SparsePolicy(topk=topk)
                with context_parallel(model, config, policy, min_tokens=100) as stats:
                    found[f"{case} {topk}"] = model(**given)[0]
                counts = [stats.sparse_calls, stats.remarks.total()]
                found[f"calls {case} {topk}"] = torch.tensor(counts)

        compute(f"one {name}", model, SimpleNamespace(ring_degree=1, ulysses_degree=1))
        for kind, backend in (("ulysses", "native"), ("ring", "_native_flash")):
            model = make().pipe.transformer.to(device)
            model.set_attention_backend(backend)
            config = _share(model, device, **{f"{kind}_degree": RANKS})
            compute(f"{kind} {name}", model, config)
    return found | _pipelines(device)


def _first_pass(tiny: Any, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Transformer of a pipeline, and what its first pass is given, on `device`."""
    passes: list[dict[str, Any]] = []
    model = tiny.pipe.transformer
    hook = model.register_forward_pre_hook(
        lambda module, args, given: passes.append(given), with_kwargs=True
    )
    tiny(steps=1)
    hook.remove()
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in passes[0].items()}
    return model.to(device), given | {"return_dict": False}
