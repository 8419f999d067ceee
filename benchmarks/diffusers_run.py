# SPDX-License-Identifier: Apache-2.0
"""Seconds of whole sampling runs in pipelines of diffusers, as they are and with sparse attention.

python -m benchmarks.diffusers_run [--models cogvideox-2b qwen-image] [--steps 20] [--topk 0.2]
    [--start-percent 0.1] [--native-steps 10] [--mochi-frames 85] [--compile] [--flash]
    [--out FILE]
python -m benchmarks.diffusers_run --tiny --device cpu    # the script itself, in seconds

Transformers of the published sizes with random bf16 weights, made on the GPU; prompts are random
embeddings and results are latents, without text encoder and VAE. One prompt, no guidance.

native_seconds are those of a run of --native-steps after two others, scaled to --steps, since all
steps are alike. free_seconds are likewise, with attention that returns its queries at once.
saved_of_what_can_be is the share of native_seconds - free_seconds that the second run saves.
first_seconds and second_seconds are of two runs with `sparge.integrations.diffusers.enable`; the
first of a machine also compiles the kernels and measures the GPU. ratio is native_seconds over
second_seconds. diffusers may be anywhere on PYTHONPATH.

--compile compiles the blocks of the transformer in all of these runs. --flash leaves cuDNN's
attention to none of them, which PyTorch prefers on Hopper GPUs and ComfyUI does not.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import add_row, commit, require_kernels
from sparge.integrations.diffusers import Handle, enable
from sparge.session.timing import REFERENCE_VARIABLE

WARM_UP_STEPS = 2
#: Kernels of PyTorch's attention but cuDNN's.
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Model:
    """Classes of diffusers, the size of the transformer, and the clip or picture that it samples.
    prompt: tokens, and the name of their width in config. mask: argument of the pipeline for the
    prompt's mask, where it takes one."""

    pipeline: str
    transformer: str
    scheduler: str
    config: dict[str, Any]
    size: dict[str, int]
    prompt: tuple[int, str]
    mask: str | None = None
    small: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `config` that a tiny model has instead."""


FLOW = "FlowMatchEulerDiscreteScheduler"
MODELS = {
    "cogvideox-2b": Model(
        "CogVideoXPipeline", "CogVideoXTransformer3DModel", "CogVideoXDDIMScheduler",
        {
            "num_attention_heads": 30, "attention_head_dim": 64, "in_channels": 16,
            "out_channels": 16, "num_layers": 30, "text_embed_dim": 4096, "time_embed_dim": 512,
            "sample_width": 90, "sample_height": 60, "sample_frames": 49, "patch_size": 2,
            "max_text_seq_length": 226,
        },
        {"num_frames": 49, "height": 480, "width": 720}, (226, "text_embed_dim"),
        small={"sample_width": 24, "sample_height": 16, "sample_frames": 17},
    ),
    "mochi": Model(
        "MochiPipeline", "MochiTransformer3DModel", FLOW,
        {
            "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 48,
            "pooled_projection_dim": 1536, "in_channels": 12, "text_embed_dim": 4096,
            "time_embed_dim": 256, "max_sequence_length": 256, "patch_size": 2,
        },
        {"num_frames": 85, "height": 480, "width": 848}, (256, "text_embed_dim"),
        "prompt_attention_mask",
    ),
    "skyreels-v2": Model(
        "SkyReelsV2Pipeline", "SkyReelsV2Transformer3DModel", FLOW,
        {
            "num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40,
            "ffn_dim": 13824, "text_dim": 4096,
        },
        {"num_frames": 49, "height": 544, "width": 960}, (226, "text_dim"),
        small={"ffn_dim": 64},
    ),
    "qwen-image": Model(
        "QwenImagePipeline", "QwenImageTransformer2DModel", FLOW,
        {
            "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 60,
            "joint_attention_dim": 3584,
        },
        {"height": 1024, "width": 1024}, (226, "joint_attention_dim"), "prompt_embeds_mask",
    ),
}  # fmt: skip


def tiny(model: Model) -> Model:
    """Small model of the same kind, for a run of the script itself."""
    small = {"num_attention_heads": 2, "num_layers": 2, model.prompt[1]: 32, **model.small}
    size = {"height": 128, "width": 192} | (
        {"num_frames": 17} if "num_frames" in model.size else {}
    )
    return replace(model, config=model.config | small, size=size)


@dataclass(frozen=True)
class Sampler:
    """A pipeline on a device, ready to be called."""

    pipe: Any
    given: dict[str, Any]
    device: torch.device

    @classmethod
    def of(cls, model: Model, device: torch.device) -> Sampler:
        diffusers = importlib.import_module("diffusers")
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # 10 billion weights have no room in float32
        try:
            with device:
                transformer = getattr(diffusers, model.transformer)(**model.config)
        finally:
            torch.set_default_dtype(before)
        transformer = transformer.to(device, torch.bfloat16).eval().requires_grad_(False)
        pipe = getattr(diffusers, model.pipeline)(
            transformer=transformer,
            scheduler=getattr(diffusers, model.scheduler)(),
            **dict.fromkeys(("tokenizer", "text_encoder", "vae")),
        )
        pipe.set_progress_bar_config(disable=True)
        tokens, width = model.prompt
        shape = (1, tokens, model.config[width])
        prompt = torch.randn(shape, dtype=torch.bfloat16, device=device)
        given = {"prompt_embeds": prompt, "guidance_scale": 1.0, **model.size}
        if model.mask is not None:
            given[model.mask] = torch.ones(1, tokens, dtype=torch.bool, device=device)
        return cls(pipe, given, device)

    def seconds(self, steps: int) -> tuple[float, Tensor]:
        """Seconds of a run, and its latents."""
        generator = torch.Generator().manual_seed(0)
        started = self._now()
        with torch.inference_mode():
            out = self.pipe(
                num_inference_steps=steps, generator=generator, output_type="latent", **self.given
            )
        return self._now() - started, out[0]

    def warm_seconds(self, steps: int) -> float:
        """Seconds of a run after a short one, which compiles what is to be compiled."""
        self.seconds(WARM_UP_STEPS)
        return self.seconds(steps)[0]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _free_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return query


def measure(name: str, model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Row of one model: its times, and what the handle says."""
    sampler = Sampler.of(model, args.device)
    if args.compile:
        transformer = sampler.pipe.transformer
        for block in getattr(transformer, "transformer_blocks", None) or transformer.blocks:
            block.compile()
    native = sampler.warm_seconds(args.native_steps)
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _free_attention):
        free = sampler.warm_seconds(args.native_steps)
    native, free = (x * args.steps / args.native_steps for x in (native, free))
    with enable(
        sampler.pipe,
        "auto budget",
        topk=args.topk,
        start_percent=args.start_percent,
        min_tokens=100 if args.tiny else 4096,
    ) as handle:
        first, _ = sampler.seconds(args.steps)
        second, latents = sampler.seconds(args.steps)
        row = {
            "model": name, **model.size, "steps": args.steps, "topk": args.topk,
            "start_percent": args.start_percent, "native_steps": args.native_steps,
            "compiled": args.compile, "flash": args.flash,
            "native_seconds": native, "free_seconds": free, "first_seconds": first,
            "second_seconds": second, "ratio": native / second,
            "saved_of_what_can_be": (native - second) / (native - free), **_facts(handle),
            "finite": bool(latents.isfinite().all()),
        }  # fmt: skip
    on_gpu = args.device.type == "cuda"
    row["gpu"] = torch.cuda.get_device_name(args.device) if on_gpu else str(args.device)
    return row | {"torch": torch.__version__, "commit": args.commit or commit()}


def _kernels(args: argparse.Namespace) -> AbstractContextManager[Any]:
    return sdpa_kernel(NOT_CUDNN) if args.flash else nullcontext()


def _facts(handle: Handle) -> dict[str, Any]:
    result = handle.stats
    assert result is not None
    return {
        "density": result.densities.of_sparse_calls, "sparse": result.counts.sparse,
        "dense": result.counts.dense, "eight_bit": result.counts.eight_bit, "line": handle.line,
        "report": handle.report(),
    }  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        description=about[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--native-steps", type=int, default=10)
    parser.add_argument("--topk", type=float, default=0.2)
    parser.add_argument("--start-percent", type=float, default=0.1)
    parser.add_argument("--mochi-frames", type=int, default=85, help="163 takes four times as long")
    parser.add_argument("--compile", action="store_true", help="the transformer's blocks")
    parser.add_argument("--flash", action="store_true", help="PyTorch without cuDNN's attention")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tiny", action="store_true", help="little models, for the script itself")
    parser.add_argument("--commit", default="", help="in a copy of the repository without history")
    parser.add_argument("--out", type=Path, help="file that rows are added to")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.device.type == "cuda":
        require_kernels()
        args.device = torch.device("cuda", torch.cuda.current_device())
    else:
        os.environ.setdefault(REFERENCE_VARIABLE, "1")
    for name in args.models:
        model = MODELS[name]
        if name == "mochi":
            model = replace(model, size=model.size | {"num_frames": args.mochi_frames})
        with _kernels(args):
            row = measure(name, tiny(model) if args.tiny else model, args)
        print(row.pop("report"))
        print(
            f"{name}: native {row['native_seconds']:.3g} s, first run {row['first_seconds']:.3g} s,"
            f" second {row['second_seconds']:.3g} s, speedup {row['ratio']:.2f}x,"
            f" {row['saved_of_what_can_be']:.0%} of what there is to save"
        )
        add_row(row, args.out)
        gc.collect()  # modules of diffusers hold each other
        if args.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
