# SPDX-License-Identifier: Apache-2.0
"""Pipelines of diffusers whose sequence two processes share, on the CPU (gloo) or on two GPUs
(NCCL), beside one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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
            assert own.shape[-1] == whole.shape[-1] // 2
            assert abs(float(own.mean() - whole.mean())) < 0.06, "so both are equally long"
        latents = found[f"two {model}"], found[f"two {model} of rank 1"]
        assert torch.equal(*latents), "one clip"
    assert found["two unusable calls"].tolist() == [4, 2], "whatever becomes of the other rank"
    assert found["two unusable calls of rank 1"].tolist() == [0, 6]


def test_the_recipe_for_xdit_serves_the_clip_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word, with the calls that xfuser 0.7.0 makes; importing that needs a GPU."""
    torch_attention: Any = torch.nn.functional.scaled_dot_product_attention

    def exact(
        query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        mask = attention_kwargs.get("attn_mask") if attention_kwargs else None
        options = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": is_causal}
        return torch_attention(query, key, value, **options), None

    registry: dict[str, Any] = {"SDPA": exact}
    names = "xfuser", "xfuser.core", "xfuser.core.distributed"
    module = ModuleType(f"{names[-1]}.attention_backend")
    vars(module).update(
        ATTENTION_FUNCTION_REGISTRY=registry, AttentionBackendType=SimpleNamespace(SDPA="SDPA")
    )
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = (Path(__file__).parents[2] / "docs/hosts/parallel.md").read_text("utf-8")
    (recipe,) = [
        part for part in re.findall(r"```py\n(.*?)```", text, re.DOTALL) if "xfuser" in part
    ]
    exec(recipe.replace("(21, 30, 52)", "(3, 8, 10)"), {})
    q, k, v = torch.randn(3, 1, 2, 240, 64)
    row = torch.arange(240)[None, None, None] < 200

    def call(*qkv: Tensor, causal: Any = False, given: Any = None) -> Any:
        return registry["SDPA"](*qkv, dropout_p=None, is_causal=causal, attention_kwargs=given)

    out, lse = call(q, k, v)
    assert not torch.equal(out, exact(q, k, v, 0.0, False)[0]) and lse.shape == (1, 2, 240)
    causal, masked = exact(q, k, v, 0.0, True), exact(q, k, v, 0.0, False, {"attn_mask": row})
    assert torch.equal(call(q, k, v, causal=True)[0], causal[0])
    assert torch.equal(call(q, k, v, given={"attn_mask": row})[0], masked[0])
    few = k[:, :, :77], v[:, :, :77]
    assert torch.equal(call(q, *few)[0], exact(q, *few, 0.0, False)[0])
    assert torch.equal(call(q, k, v, given={"tile_size": 3})[0], out)
