# SPDX-License-Identifier: Apache-2.0
"""Sparge Attention in engines that split one sequence over several GPUs: two processes on the CPU
(gloo) or on two GPUs (NCCL), beside one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparge.common.metrics import rel_l2
from tests.integrations import two_ranks
from tests.integrations.two_ranks import LAYERS, PICTURE, RANKS, STEPS

#: Most relative error of what keeps all.
EIGHT_BITS = 0.02
#: What sums in another order may differ by on a GPU; on the CPU the bits are the same.
ROUNDING = {"cpu": 0.0, "cuda": EIGHT_BITS / 2}
TOPK = (1.0, 0.3)
on_each_device = pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
            ],
        ),
    ],
)


# One test, for starting two processes takes longer than what they compute.
@on_each_device
def test_two_ranks_compute_what_one_process_does(kind: str, seed: int, tmp_path: Path) -> None:
    found = two_ranks.run(two_ranks.attentions, kind, seed, tmp_path)
    for topk in TOPK:
        check_clip(found, topk, ROUNDING[kind])
        check_picture(found, topk, ROUNDING[kind])
        check_ring(found, topk)
    check_chosen_heads(found, exactly=kind == "cpu")
    check_session(found, ROUNDING[kind])


def check_clip(found: dict[str, Tensor], topk: float, rounding: float) -> None:
    """Ulysses without text."""
    two = found[f"two clip {topk}"]
    assert rel_l2(two, found[f"one clip {topk}"]) <= rounding and found[f"calls clip {topk}"] == 1
    error = rel_l2(two, found["clip"])
    assert error < EIGHT_BITS if topk == 1 else error > EIGHT_BITS


def check_picture(found: dict[str, Tensor], topk: float, rounding: float) -> None:
    """Ulysses with text, which is exact where places are given."""
    text, exact = slice(PICTURE.prefix), found["picture"]
    two = found[f"two picture {topk}, places"]
    assert rel_l2(two, found[f"one picture {topk}"]) <= rounding
    assert rel_l2(two[:, text], exact[:, text]) < EIGHT_BITS
    assert found[f"remarks {topk}, places"] == 0

    unprotected = found[f"two picture {topk}, no places"]
    assert found[f"remarks {topk}, no places"] == 1, "counted"
    if topk < 1:
        assert rel_l2(unprotected[:, text], exact[:, text]) > 5 * EIGHT_BITS


def check_ring(found: dict[str, Tensor], topk: float) -> None:
    """Chunks are merged by their log-sum-exp; each has its part of the text, which is exact."""
    out, exact = found[f"ring {topk}"], found["picture"]
    assert found[f"calls ring {topk}"] == RANKS
    assert rel_l2(out[:, : PICTURE.prefix], exact[:, : PICTURE.prefix]) < EIGHT_BITS
    error = rel_l2(out, exact)
    assert error < EIGHT_BITS if topk == 1 else EIGHT_BITS < error < 0.7


def check_chosen_heads(found: dict[str, Tensor], exactly: bool) -> None:
    """Heads are chosen from what all ranks measured."""
    for name in ("density", "error", "order"):
        one, two = found[f"{name} one"], found[f"{name} two"]
        assert torch.equal(one, two) or not exactly, name
        torch.testing.assert_close(two, one, rtol=0.02, atol=0)
    assert found["density one"].unique().numel() > 1, "heads differ"
    assert not torch.equal(found["density two alone"], found["density one"])
    assert found["ranks with the same bits"] == RANKS, "each with its own head settings"


def check_session(found: dict[str, Tensor], rounding: float) -> None:
    """Heads are measured, chosen, and measured again, as one process does it."""
    for step in range(STEPS):
        assert rel_l2(found[f"two {step}"], found[f"one {step}"]) <= rounding, step
    for name in ("density", "order", "kept"):
        one, two = found[f"one {name}"], found[f"two {name}"]
        assert torch.equal(one, two) or rounding, name
    assert found["two density"].unique().numel() > 1, "heads differ"
    for case in ("one", "two"):
        assert found[f"{case} dense"] == LAYERS, "the first step alone"
        assert found[f"{case} measured"].tolist() == [0, 1, 0, 1], "and again"
    # Layers that one rank has no memory to measure are dense in all, and nobody waits for it.
    assert found["short dense"] == LAYERS + STEPS - 1
    dense, sparse = found["short by step"]
    assert (dense == 1).all() and (sparse[1:] < 1).all()
    assert found["none dense"] == LAYERS * STEPS


@on_each_device
def test_transformers_of_diffusers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", "0.42", reason="needs diffusers")
    found = two_ranks.run(two_ranks.transformers, kind, 0, tmp_path)
    for model in ("wan", "flux"):
        for topk in TOPK:
            one, native = found[f"one {model} {topk}"], found[f"native {model}"]
            error = rel_l2(one, native)
            assert 0 < error < EIGHT_BITS
            ulysses, ring = (found[f"{engine} {model} {topk}"] for engine in ("ulysses", "ring"))
            assert rel_l2(ulysses, one) <= ROUNDING[kind]
            assert rel_l2(ring, native) < 2 * error
            layers = 2  # of sparse calls, and no remarks
            assert found[f"calls ulysses {model} {topk}"].tolist() == [layers, 0]
            assert found[f"calls ring {model} {topk}"].tolist() == [layers * RANKS, 0]
    check_pipelines(found, ROUNDING[kind])


def check_pipelines(found: dict[str, Tensor], rounding: float) -> None:
    """Calls of the clip: sparse ones, and those of the step that is measured. Flux has text, whose
    place changes the sums of the dense step; so its heads may be chosen otherwise by a hair."""
    chosen = 2 * EIGHT_BITS if rounding else 0.0  # by rounding other heads may be denser
    for name, calls, limit in (
        ("wan", [4, 2], chosen),
        ("flux", [4, 2], max(chosen, EIGHT_BITS / 2)),
        ("flux manual", [6, 0], rounding),
    ):
        one, two = found[f"one {name}"], found[f"two {name}"]
        assert rel_l2(two, one) <= limit, name
        for case in ("one", "two"):
            assert found[f"{case} {name} calls"].tolist() == calls
            assert said(found[f"{case} {name} told"]) == ("measuring" if calls[1] else "")
    for name in ("wan", "flux"):
        density = found[f"one {name} density"]
        assert torch.equal(density, found[f"two {name} density"]) or rounding
    density = found["one flux density"]
    assert density[0].unique().numel() > 1, "heads of a layer differ"
    for case, reason in (
        ("otherwise", "were given other settings"),
        ("unusable", "another GPU of those that share the model stays dense"),
    ):
        assert found[f"{case} calls"].tolist() == [0, 6], "all dense, and nobody waits"
        assert reason in said(found[f"{case} told"])


def said(text: Tensor) -> str:
    return bytes(text.tolist()).decode()
