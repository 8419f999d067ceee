# SPDX-License-Identifier: Apache-2.0
"""Pipelines of diffusers whose sequence two processes share, on the CPU (gloo) or on two GPUs
(NCCL), beside one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparge.common.metrics import rel_l2
from tests.integrations import two_ranks

#: What sums in another order may differ by on a GPU; on the CPU the bits are the same.
ROUNDING = {"cpu": 0.0, "cuda": 0.01}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


# One test, for starting two processes takes longer than what they compute.
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def test_each_rank_chooses_for_its_own_heads(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", "0.42", reason="needs diffusers")
    found = two_ranks.run(kind, tmp_path)
    for model in ("wan", "flux"):
        one, two = found[f"one {model} manual"], found[f"two {model} manual"]
        assert rel_l2(two, one) <= ROUNDING[kind], "nothing is chosen"
        assert rel_l2(found[f"two {model}"], found[f"one {model}"]) < 0.1
        whole = found[f"one {model} density"]
        for rank in ("", " of rank 1"):
            assert found[f"two {model} calls{rank}"].tolist() == [4, 2], "the first step is dense"
            own = found[f"two {model} density{rank}"]
            assert own.shape[1] == whole.shape[1] // 2
            assert abs(float(own.mean() - whole.mean())) < 0.06, "so both are equally long"
        latents = found[f"two {model}"], found[f"two {model} of rank 1"]
        assert torch.equal(*latents), "one clip"
    assert found["two unusable calls"].tolist() == [4, 2], "whatever becomes of the other rank"
    assert found["two unusable calls of rank 1"].tolist() == [0, 6]
