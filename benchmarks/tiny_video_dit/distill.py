# SPDX-License-Identifier: Apache-2.0
"""Distills the small video model to a few steps on one GPU, as models of four steps are made.

python -m benchmarks.tiny_video_dit.distill --out FILE --steps 4 --seconds 300 [--rank 16]
    [--seed N] [--commit HASH]

The student starts as the teacher. Of each step of its own schedule it learns the mean flow of the
teacher's finer ones (progressive distillation, Salimans and Ho 2022, all at once). FILE gets what
it differs by, as a LoRA of --rank.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.tiny_video_dit import checkpoint, flow
from benchmarks.tiny_video_dit.curriculum import FULL, Batch, Phase
from benchmarks.tiny_video_dit.model import Attention, VideoDiT, dense
from benchmarks.tiny_video_dit.train import (
    WORKING_TYPE,
    Example,
    Trainer,
    cudnn_attention,
    draw_noisy,
    train_for,
)

#: Steps of the teacher in one of the student's.
FINER = 5
#: Share of the learning rates of training: the student starts from what the teacher knows.
RATE = 0.2
#: Clips of the judged size only, in which the student has to serve.
PHASES = (Phase(1.0, (FULL,)),)


def draw_example(
    batch: Batch,
    seed: int,
    device: torch.device,
    teacher: VideoDiT,
    steps: int,
    attention: Attention,
) -> Example:
    """Clips at noise levels of the student's schedule, and the teacher's mean flow from each to the
    level after it."""
    levels = flow.sampling_sigmas(steps).to(device)
    number = (torch.arange(batch.clips, device=device) + seed) % steps
    first, last = levels[number], levels[number + 1]
    begun = draw_noisy(batch, torch.Generator(device).manual_seed(seed), first)
    latent = begun.latent.float()
    between = torch.lerp(first, last, torch.linspace(0, 1, FINER + 1, device=device)[:, None])
    with torch.no_grad():
        for sigma, following in pairwise(between):
            answer = teacher(
                latent.to(WORKING_TYPE), sigma * flow.TIMESTEPS, begun.context, attention
            )
            latent += _of_clip(following - sigma) * answer.float()
    return replace(begun, flow=(latent - begun.latent.float()) / _of_clip(last - first))


def lora_of(student: dict[str, Tensor], teacher: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Differences of two state dicts: of matrices the best factors of a rank, `name.up` (rows,
    rank) and `name.down` (rank, columns), of the rest all numbers, `name.diff`."""
    stored = {}
    for name, before in teacher.items():
        difference = student[name].float() - before.float()
        if difference.ndim != 2 or min(difference.shape) <= rank:
            stored[f"{name}.diff"] = difference
            continue
        u, s, v = torch.linalg.svd(difference, full_matrices=False)
        root = s[:rank].sqrt()
        stored[f"{name}.up"], stored[f"{name}.down"] = u[:, :rank] * root, root[:, None] * v[:rank]
    return stored


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="file of the LoRA")
    parser.add_argument("--steps", type=int, required=True, help="of the student")
    parser.add_argument("--seconds", type=float, required=True, help="training time")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="", help="noted in the file's header")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = cudnn_attention if device.type == "cuda" else dense
    teacher = checkpoint.load_model(checkpoint.SHIPPED, device, WORKING_TYPE)
    student = checkpoint.load_model(checkpoint.SHIPPED).requires_grad_()
    draw = partial(draw_example, teacher=teacher, steps=options.steps, attention=attention)
    trainer = Trainer(student, options.seed, device, PHASES, attention, draw, RATE)
    train_for(trainer, options.seconds)
    loss = round(trainer.validation_loss(FULL), 5)
    said = {"steps": options.steps, "seed": options.seed, "commit": options.commit, "loss": loss}
    print(json.dumps(said | {"step": trainer.optimizer.step}))
    lora = lora_of(trainer.optimizer.average, dict(teacher.named_parameters()), options.rank)
    checkpoint.save_lora(options.out, lora, said | {"seconds": options.seconds})


def _of_clip(number: Tensor) -> Tensor:
    return number.view(-1, 1, 1, 1, 1)


if __name__ == "__main__":
    main()
