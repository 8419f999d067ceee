# SPDX-License-Identifier: Apache-2.0
"""The node for WanVideoWrapper, on stand-ins of that pack's model and sampler."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

pytestmark = pytest.mark.usefixtures("reference_allowed")

HEADS, WIDTH, BLOCKS, STEPS = 2, 128, 2, 3
LATENT = (16, 4, 16, 16)
TOKENS = 4 * 8 * 8
CONDITIONINGS = 2
TORCH_ATTENTION = nn.functional.scaled_dot_product_attention


class Block(nn.Module):
    """Self- and cross-attention, each by an attention mode, as the pack has them."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.others: list[str] = []
        """Attentions that are not PyTorch's, in the order they came."""

    def forward(self, x: Tensor, context: Tensor, override: str | None) -> Tensor:
        assert nn.functional.scaled_dot_product_attention is TORCH_ATTENTION
        q, k, v = self._heads(x)
        x = x + self._attend(q, k, v, override or self.mode, "self")
        _, k, v = self._heads(context)
        return x + self._attend(self._heads(x)[0], k, v, self.mode, "cross")

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v (batch, tokens, heads, head_dim)."""
        return self.qkv(x).view(1, -1, 3, HEADS, WIDTH // HEADS).unbind(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mode: str, kind: str) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if mode != "sdpa":
            self.others.append(kind)
            return (torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v).transpose(1, 2).flatten(2)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None)
        return out.transpose(1, 2).contiguous().flatten(2)


class Transformer(nn.Module):
    """Transformer that is given a list of latents and the options of its run."""

    def __init__(self, mode: str = "sdpa") -> None:
        super().__init__()
        self.patch_size, self.num_heads = (1, 2, 2), HEADS
        self.embedding = nn.Conv3d(LATENT[0], WIDTH, self.patch_size, self.patch_size)
        self.blocks = nn.ModuleList(Block(mode) for _ in range(BLOCKS))
        self.fails: tuple[int, type[BaseException]] | None = None
        """Step in which it fails, and with what."""

    def forward(
        self,
        x: list[Tensor],
        context: Tensor,
        is_uncond: bool = False,
        current_step: int = 0,
        last_step: bool | int = 0,
        transformer_options: dict[str, Any] | None = None,
    ) -> Tensor:
        override = (transformer_options or {}).get("attention_mode_override")
        mode = None
        if override is not None and not override["verbose"]:
            steps = range(override["start_step"], override["end_step"])
            mode = override["mode"] if current_step in steps else None
        tokens = self.embedding(x[0][None]).flatten(2).mT
        for block in self.blocks:
            tokens = block(tokens, context, mode)
            if self.fails is not None and self.fails[0] == current_step:
                raise self.fails[1]
        return tokens


class WanPatcher:
    """ModelPatcher of the pack: clones share the model."""

    def __init__(self, model: Any, options: dict[str, Any] | None = None) -> None:
        self.model = model
        self.model_options = {"transformer_options": {"merge_loras": True} | (options or {})}

    def clone(self) -> WanPatcher:
        return WanPatcher(self.model, self.model_options["transformer_options"])


@pytest.fixture
def model(generator: torch.Generator) -> Callable[..., WanPatcher]:
    """model(mode): a loaded model whose loader was told that attention mode."""

    def make(mode: str = "sdpa") -> WanPatcher:
        transformer = Transformer(mode).eval()
        with torch.no_grad():
            for each in transformer.parameters():
                each.copy_(torch.randn(each.shape, generator=generator) / each[0].numel() ** 0.5)
        return WanPatcher(SimpleNamespace(diffusion_model=transformer))

    return make


@pytest.fixture
def sample(generator: torch.Generator) -> Callable[..., Tensor]:
    """sample(patcher, tokens_of_frames=...): what the pack's sampler gives for one and the same
    noise and prompts."""
    noise = torch.randn(LATENT, generator=generator)
    prompts = torch.randn(CONDITIONINGS, 1, 8, WIDTH, generator=generator)

    @torch.inference_mode()
    def run(patcher: WanPatcher, compiled: bool = False, steps: int = STEPS) -> Tensor:
        transformer = patcher.model.diffusion_model
        options = copy.deepcopy(patcher.model_options["transformer_options"])
        if compiled:
            for i, block in enumerate(transformer.blocks):
                inner = getattr(block, "_orig_mod", block)
                transformer.blocks[i] = torch.compile(inner, backend="eager")
        outs = []
        for step in range(steps):
            for uncond in (False, True):
                given = {"is_uncond": uncond, "current_step": step, "last_step": step == steps - 1}
                latent = [noise * (1 - step / steps)]
                out = transformer(
                    x=latent, context=prompts[int(uncond)], transformer_options=options, **given
                )
                outs.append(out)
        return torch.stack(outs)

    return run


@pytest.fixture
def node(load_pack: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WanPatcher]:
    """node(patcher, **widgets): the patcher behind the node, which serves short clips too."""
    module = load_pack("nodes.sparge_wan_wrapper")
    made = module.Settings
    monkeypatch.setattr(module, "Settings", lambda **given: made(min_tokens=TOKENS, **given))
    return lambda patcher, **widgets: module.SpargeAttentionWanVideoWrapper.execute(
        patcher, **widgets
    )[0]


@pytest.fixture
def results(load_pack: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each run told when it was over."""
    seen: list[Any] = []
    report = load_pack("nodes.comfyui")
    monkeypatch.setattr(report, "publish", lambda result, node_id: seen.append(result))
    return seen


A_STEP = CONDITIONINGS * BLOCKS
SPARSE_FROM_1 = (STEPS - 1) * A_STEP


def test_only_the_clone_of_the_node_is_sparse(model, sample, node, results) -> None:
    plain, other = model(), model()
    dense, of_other = sample(plain), sample(other)
    patched = node(plain, topk=0.3, start_step=1)
    assert patched is not plain
    assert plain.model_options == {"transformer_options": {"merge_loras": True}}
    sparse = sample(patched)
    (result,) = results
    assert result.counts.sparse == SPARSE_FROM_1
    assert result.counts.reasons == {"before start_step 1": A_STEP}, "the pack's own, counted too"
    assert result.counts.cross == SPARSE_FROM_1 and not result.stopped
    assert torch.equal(sparse[:CONDITIONINGS], dense[:CONDITIONINGS])
    assert not torch.equal(sparse[CONDITIONINGS:], dense[CONDITIONINGS:])
    found = result.densities
    assert found.of_sparse_calls <= 0.5
    assert found.overall == pytest.approx((1 + (STEPS - 1) * found.of_sparse_calls) / STEPS)
    assert found.of_steps[0] == 1 and (found.by_step[:, 0] == 1).all()
    assert torch.equal(sample(plain), dense), "the model without the node has changed"
    assert torch.equal(sample(other), of_other)
    assert len(results) == 1, "a run without the node told something"
    assert nn.functional.scaled_dot_product_attention is TORCH_ATTENTION
    assert _get_current_function_mode_stack() == []
    assert torch.equal(sample(patched), sparse) and len(results) == 2


def test_the_attention_mode_of_the_loader_serves_the_rest(model, sample, node, results) -> None:
    plain = model("sageattn")
    sample(node(plain, start_step=1))
    assert results[0].counts.sparse == SPARSE_FROM_1
    kinds = [kind for block in plain.model.diffusion_model.blocks for kind in block.others]
    assert kinds.count("self") == CONDITIONINGS * BLOCKS, "those of the first step"
    assert kinds.count("cross") == STEPS * CONDITIONINGS * BLOCKS


def test_blocks_that_are_compiled_anew_in_each_run(model, sample, node, results) -> None:
    plain = model()
    expected = sample(node(plain, start_step=1))
    torch._dynamo.reset()
    dense = sample(plain, compiled=True)
    for _ in range(2):
        assert torch.equal(sample(node(plain, start_step=1), compiled=True), expected)
    assert torch.equal(sample(plain, compiled=True), dense)
    assert [result.counts.sparse for result in results] == [SPARSE_FROM_1] * 3
    torch._dynamo.reset()


@pytest.mark.parametrize("options_of", [dict, copy.deepcopy])
def test_a_node_behind_the_clone_takes_the_gate_along(
    model, sample, node, results, options_of
) -> None:
    plain = model()
    patched = node(plain, start_step=1)
    # As by the pack's node for block swap; how deeply options are copied is ComfyUI's affair.
    behind = WanPatcher(plain.model, options_of(patched.model_options["transformer_options"]))
    behind.model_options["transformer_options"]["block_swap_args"] = None
    del patched
    gc.collect()
    sample(behind)
    assert results[0].counts.sparse == SPARSE_FROM_1


def test_of_two_nodes_the_last_one_counts(model, sample, node, results) -> None:
    plain = model()
    sample(node(node(plain, start_step=0), start_step=2))
    (result,) = results
    assert result.counts.sparse == CONDITIONINGS * BLOCKS


class Cancelled(BaseException):
    """As ComfyUI's: no Exception."""


@pytest.mark.parametrize("error", [RuntimeError, Cancelled])
def test_a_run_that_ends_early_leaves_nothing_behind(model, sample, node, results, error) -> None:
    plain = model()
    dense = sample(plain)
    patched = node(plain, start_step=1)
    plain.model.diffusion_model.fails = (2, error)
    with pytest.raises(error):
        sample(patched)
    gc.collect()
    (result,) = results
    assert result.stopped and result.counts.sparse == CONDITIONINGS * BLOCKS + 1
    assert _get_current_function_mode_stack() == []
    plain.model.diffusion_model.fails = None
    assert torch.equal(sample(plain), dense)


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (0, "no attention came to this node"),
        (1, "another node took its place"),
    ],
)
def test_a_node_that_sets_another_mode_is_told(
    load_pack, model, sample, node, results, start, told
) -> None:
    patched = node(model("sageattn"), start_step=start)
    patched.model_options["transformer_options"].pop("attention_mode_override")
    sample(patched)
    assert load_pack("sparge.session").verdict(results[0])[0] == f"Nothing skipped: {told}"


def test_without_kernels_the_model_is_handed_on(load_pack, model, node, monkeypatch) -> None:
    monkeypatch.delenv("SPARGE_REFERENCE")
    told: list[str] = []
    module = load_pack("nodes.sparge_wan_wrapper")
    monkeypatch.setattr(module.comfyui, "show_on_node", lambda node_id, text: told.append(text))
    plain = model()
    assert node(plain) is plain
    (text,) = told
    first, remedy, sentence = text.split("\n")
    assert first.startswith("Nothing skipped: ") and "NVIDIA GPU" in remedy
    assert sentence.startswith("The CPU is not supported")
