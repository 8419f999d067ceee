# SPDX-License-Identifier: Apache-2.0
"""Times of transformers of diffusers that several GPUs share by its Ulysses, beside one GPU.

python -m benchmarks.two_gpus_diffusers [--models wan flux] [--topk 0.3 0.2] [--layers 4]
                                        [--ranks 2] [--out FILE]
python -m benchmarks.two_gpus_diffusers --tiny --device cpu    # the script itself, in seconds

One pass of a transformer of the published width with random bf16 weights, of some of its layers,
alike but for their weights: first on one GPU, then with `enable_parallelism`, which cuts the tokens
and brings them together. PyTorch's attention as diffusers calls it, and sparse in
`context_parallel`. Times are medians in ms, of the slowest rank:

one_ms    a pass on one GPU
two_ms    the same pass on the ranks
ratio     one_ms over two_ms
nccl_ms   what NCCL's kernels take of a pass, waiting for the other rank included; None on a CPU
rel_l2    of the ranks' result to that of one GPU; same_bits where they are equal
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import sparge
from benchmarks.ranks import add_options, all_ranks, check_options, median_on_ranks, run_ranks
from benchmarks.timing import add_row, commit
from sparge.common.metrics import rel_l2
from sparge.integrations.parallel import context_parallel

TORCH = "PyTorch"
MODELS = ("wan", "flux")


def wan(layers: int, tiny: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Class, configuration and inputs of Wan 2.1 14B at 832 x 480, 81 frames."""
    heads, width, latent, text = (4, 32, (3, 16, 24), 26) if tiny else (40, 128, (21, 60, 104), 512)
    config = {
        "num_attention_heads": heads, "attention_head_dim": width, "num_layers": layers,
        "ffn_dim": 64 if tiny else 13824, "text_dim": 64 if tiny else 4096,
    }  # fmt: skip
    given = {
        "hidden_states": torch.randn(1, 16, *latent),
        "encoder_hidden_states": torch.randn(1, text, config["text_dim"]),
        "timestep": torch.tensor([500]),
    }
    return "WanTransformer3DModel", config, given


def flux(layers: int, tiny: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Class, configuration and inputs of Flux at 1024 x 1024; of two layers one has two streams."""
    heads, width, side, text = (4, 32, 16, 26) if tiny else (24, 128, 64, 512)
    config = {
        "num_attention_heads": heads, "attention_head_dim": width, "num_layers": layers // 2,
        "num_single_layers": layers - layers // 2, "joint_attention_dim": 64 if tiny else 4096,
        "axes_dims_rope": (8, 12, 12) if tiny else (16, 56, 56), "guidance_embeds": True,
    }  # fmt: skip
    row, column = (x.flatten() for x in torch.meshgrid(*2 * [torch.arange(side)], indexing="ij"))
    given = {
        "hidden_states": torch.randn(1, side * side, 64),
        "encoder_hidden_states": torch.randn(1, text, config["joint_attention_dim"]),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.stack([torch.zeros_like(row), row, column], 1),
        "txt_ids": torch.zeros(text, 3),
    }
    return "FluxTransformer2DModel", config, given


class Pass:
    """A pass of one transformer, the same weights and inputs on every rank."""

    def __init__(self, model: str, layers: int, tiny: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        name, config, given = {"wan": wan, "flux": flux}[model](layers, tiny)
        self._diffusers: Any = importlib.import_module("diffusers")
        self._diffusers.logging.set_verbosity_error()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            self.model: Any = getattr(self._diffusers, name)(**config).to(dtype).eval()
        self.model.set_attention_backend("native")
        keeps = ("timestep", "img_ids", "txt_ids")
        self.given = {
            key: x.to(device) if key in keeps else x.to(device, dtype) for key, x in given.items()
        }
        self.device, self.tiny = device, tiny
        self.config: Any = SimpleNamespace(ring_degree=1, ulysses_degree=1)

    def share(self) -> None:
        """From here on the ranks share the tokens."""
        self.config = self._diffusers.ContextParallelConfig(ulysses_degree=dist.get_world_size())
        with cpu_counts_as_accelerator(self.device):
            self.model.enable_parallelism(config=self.config)

    def __call__(self) -> Tensor:
        return self.model(**self.given, return_dict=False)[0]

    def measured(self, way: str, repeats: int) -> tuple[Tensor, float, float | None, int]:
        """Result, milliseconds, those of NCCL's kernels, and sparse calls of a pass."""
        attention: Any = nullcontext()
        if way != TORCH:
            policy = sparge.SparsePolicy(topk=float(way.removeprefix("topk ")))
            least = 100 if self.tiny else 4096
            attention = context_parallel(self.model, self.config, policy, min_tokens=least)
        with attention as stats:
            out = self()
            sparse = stats.sparse_calls if stats is not None else 0
            ms = median_on_ranks(self, self.device, repeats)
            return out, ms, nccl_ms(self, self.device), sparse


def nccl_ms(work: Callable[[], object], device: torch.device) -> float | None:
    """Milliseconds of NCCL's kernels in `work`."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize(device)
    found = (e for e in profile.key_averages() if "nccl" in e.key.lower())
    return sum(e.self_device_time_total for e in found) / 1000


@contextmanager
def cpu_counts_as_accelerator(device: torch.device) -> Iterator[None]:
    """diffusers asks how many accelerators there are, before it asks which backend is used."""
    if device.type != "cpu":
        yield
        return
    with mock.patch.object(torch.accelerator, "device_count", lambda: 1):
        yield


def measure(
    device: torch.device, models: list[str], topk: list[float], options: argparse.Namespace
) -> None:
    """Work of one rank; the first one prints the rows."""
    ways = [TORCH, *(f"topk {each:g}" for each in (1.0, *topk))]
    for name in models:
        of_model = Pass(name, options.layers, options.tiny, device)
        alone = {way: of_model.measured(way, options.repeats) for way in ways}
        of_model.share()
        for way in ways:
            expected, one_ms, _, _ = alone[way]
            out, two_ms, in_nccl, sparse = of_model.measured(way, options.repeats)
            one_ms, two_ms = max(all_ranks(one_ms, device)), max(all_ranks(two_ms, device))
            row = {
                "model": name, "layers": options.layers, "way": way,
                "ranks": dist.get_world_size(), "one_ms": one_ms, "two_ms": two_ms,
                "ratio": one_ms / two_ms, "nccl_ms": in_nccl, "sparse_calls": sparse,
                "rel_l2": rel_l2(out, expected), "same_bits": torch.equal(out, expected),
                "gpu": torch.cuda.get_device_name(device) if in_nccl is not None else "none",
                "torch": torch.__version__, "commit": options.commit or commit(),
            }  # fmt: skip
            if dist.get_rank() == 0:
                add_row(row, options.out)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        description=about[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=4)
    add_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    check_options(args)
    run_ranks(measure, args.device, args.ranks, args.models, args.topk, args)


if __name__ == "__main__":
    main()
