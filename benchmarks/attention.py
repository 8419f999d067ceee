# SPDX-License-Identifier: Apache-2.0
"""Our attention beside its peers, in one process: time, work and error on real shapes.

    python -m benchmarks.attention [--shapes mochi,cogx2b] [--densities 1,.5] [--out FILE]

One JSON object a line: shape, peer, density, ms, dense_equivalent_tflops, executed_tflops, rel_l1,
rel_l2, gpu, commit, stages. Every stage of a call is inside `ms`. Errors are against float32
attention on sampled query blocks: of a dense row the whole result, of a sparse row ("rel_l1" of
"ours") the same kept blocks, so that they speak of arithmetic; "drop_rel_l2" is the distance to
dense attention, which on the synthetic data says little about a model.
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparge
from sparge import AttentionStats, BlockPlan, Precision, SparsePolicy, ops, reference
from sparge.call import element_of
from sparge.metrics import rel_l1, rel_l2
from sparge.plan.blocks import KEY_BLOCK, QUERY_BLOCK

from .peers import Peer, absent, available, dense_peers, sparse_peers
from .shapes import SHAPES, Shape
from .timing import ROOT, commit, gpu_name, median_ms, require_kernels, write_rows

SAMPLED_BLOCKS = 3


def draw(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """(1, H, N, D) views of NHD memory: slow drift along the tokens, noise, channel means."""
    generator = torch.Generator("cuda").manual_seed(0)

    def tensor(mean: float) -> Tensor:
        size = (1, shape.tokens, shape.heads, shape.head_dim)
        noise = torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
        knots = torch.randn(
            shape.heads * shape.head_dim, 1, shape.tokens // 64, generator=generator, device="cuda"
        )
        drift = torch.nn.functional.interpolate(knots, size=shape.tokens, mode="linear")
        drift = drift.view(1, shape.heads, shape.head_dim, shape.tokens).permute(0, 3, 1, 2)
        offset = torch.randn(size[-2:], generator=generator, device="cuda") * mean
        return noise.mul_(0.5).add_(drift.to(noise.dtype)).add_(offset.to(noise.dtype))

    q, k, v = (tensor(mean).transpose(1, 2) for mean in (0.0, 1.0, 0.5))
    return q, k, v


def errors(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan | None
) -> tuple[float, float]:
    """Relative L1 and L2 on a few query blocks of two heads."""
    tokens = q.shape[2]
    blocks = -(-tokens // QUERY_BLOCK)
    got, truth = [], []
    for head in {0, q.shape[1] - 1}:
        for block in {blocks * i // SAMPLED_BLOCKS for i in range(SAMPLED_BLOCKS)}:
            rows = slice(block * QUERY_BLOCK, min((block + 1) * QUERY_BLOCK, tokens))
            keys = slice(None)
            if plan is not None:
                keys = plan.kept()[0, head, block].repeat_interleave(KEY_BLOCK)[:tokens]
            one = (x[:, head : head + 1] for x in (k, v))
            exact, _ = reference.exact_attention(
                q[:, head : head + 1, rows], *(x[:, :, keys] for x in one)
            )
            truth.append(exact.flatten())
            got.append(out[:, head : head + 1, rows].float().flatten())
    return rel_l1(torch.cat(got), torch.cat(truth)), rel_l2(torch.cat(got), torch.cat(truth))


def row(shape: Shape, peer: str, density: float, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "shape": shape.name,
        "peer": peer,
        "density": round(density, 4),
        "ms": round(ms, 3),
        "dense_equivalent_tflops": round(shape.flops() / ms / 1e9, 1),
        "executed_tflops": round(shape.flops(density) / ms / 1e9, 1),
        **{name: round(v, 5) if isinstance(v, float) else v for name, v in more.items()},
        "gpu": gpu_name(),
    }


def time_ours(shape: Shape, policy: SparsePolicy, label: str) -> dict[str, Any]:
    q, k, v = draw(shape)
    stats = AttentionStats("cuda")
    out = sparge.attention(q, k, v, policy, out_layout="HND", stats=stats)
    density = stats.density
    plan = sparge.make_plan(q, k, policy)
    l1, l2 = errors(out, q, k, v, plan)
    _, drop = errors(out, q, k, v, None)
    ms = median_ms(lambda: sparge.attention(q, k, v, policy, out_layout="NHD"))
    planned = median_ms(lambda: sparge.attention(q, k, v, policy, out_layout="NHD", plan=plan))
    element = int(element_of(policy.precision, q))
    quantize = median_ms(lambda: ops.quantize(q, k, v, None, True, element, True))
    stages = {
        "means+quantize": round(quantize, 3),
        "means+quantize+attend": round(planned, 3),
        "all": round(ms, 3),
    }
    more = {"rel_l1": l1, "rel_l2": l2, "drop_rel_l2": drop, "stages": stages}
    return row(shape, label, density, ms, **more)


def time_peer(shape: Shape, peer: Peer) -> dict[str, Any]:
    q, k, v = draw(shape)
    out = peer.run(q, k, v)
    l1, l2 = errors(out, q, k, v, None)
    ms = median_ms(lambda: peer.run(q, k, v))
    return row(shape, peer.name, peer.density, ms, rel_l1=l1, rel_l2=l2, stages=None)


def bench(shape: Shape, densities: list[float], pvthreshd: float) -> list[dict[str, Any]]:
    rows = []
    for density in densities:
        peers = sparse_peers(density, shape.head_dim) if density < 1 else dense_peers()
        for peer in peers:
            reason = available(peer, torch.device("cuda")) if shape.head_dim == 128 else ""
            if reason:
                print(f"# {peer.name} does not run here: {reason}", flush=True)
                continue
            try:
                rows.append(time_peer(shape, peer))
            except RuntimeError as error:
                print(f"# {peer.name}, {shape.name}: {str(error).splitlines()[0]}", flush=True)
                continue
            print(json.dumps(rows[-1]), flush=True)
        policy = SparsePolicy(topk=density)
        modes = {
            "ours": policy,
            "ours, PV filter": replace(policy, pvthreshd=pvthreshd),
            "ours, FP16 V": replace(policy, precision=Precision.INT8_FP16),
        }
        for label, mode in modes.items():
            rows.append(time_ours(shape, mode, label))
            print(json.dumps(rows[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", default="cogx2b,mochi", help=", ".join(SHAPES))
    parser.add_argument("--densities", default="1,.5,.3,.2,.1")
    parser.add_argument("--pvthreshd", type=float, default=15.0)
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "new.jsonl")
    options = parser.parse_args()
    require_kernels()
    for reason in absent():
        print(f"# {reason}", flush=True)
    densities = [float(text) for text in options.densities.split(",")]
    rows = []
    for name in options.shapes.split(","):
        for measured in bench(SHAPES[name], densities, options.pvthreshd):
            rows.append({**measured, "commit": options.commit})
    write_rows(options.out, rows)
    print(f"# {len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
