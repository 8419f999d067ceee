# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, sparse beside their own attention: what is sparse, and what is exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import sparge
from benchmarks.metrics import rel_l2
from tests.tiny_models.texts import SIZES, Run, forward, in_parts

transformers: Any = pytest.importorskip("transformers", "5.24", reason="needs transformers 5.24")
from sparge.integrations.transformers import enable  # noqa: E402

pytestmark = pytest.mark.usefixtures("inference")

WHOLE = sparge.SparsePolicy(topk=1.0, attention_sink=True)
TOKENS, LEAST, LAYERS = 320, 100, 2
EIGHT_BITS = 0.02
PLACES = torch.arange(TOKENS)
LEFT = torch.stack([PLACES >= 0, PLACES >= 120]).long()
RIGHT = LEFT.flip(1)
FEW = f"fewer than {LEAST} queries or keys (min_tokens)"
MASK = "a mask with a row for each query, as of padding or chunks"


@pytest.fixture
def ids(generator: torch.Generator) -> Tensor:
    return torch.randint(3, 97, (2, TOKENS), generator=generator)


@dataclass
class Case:
    run: Run
    sparse: int
    exact: dict[str, int] = field(default_factory=dict)
    architecture: str = "Llama"
    model: dict[str, Any] = field(default_factory=dict)


PACKED = torch.cat([torch.arange(150), torch.arange(170)]).expand(2, -1)
CUSTOM = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
WIDE = "head_dim is 160; up to 128 is supported."
CASES = {
    "prefill": Case(forward(), LAYERS),
    "all real": Case(forward(attention_mask=torch.ones_like(LEFT)), LAYERS),
    "left padding": Case(forward(attention_mask=LEFT), 0, {MASK: LAYERS}),
    "right padding": Case(forward(attention_mask=RIGHT), 0, {MASK: LAYERS}),
    "decode": Case(in_parts(317, 318, 319, 320), LAYERS, {FEW: 3 * LAYERS}),
    "chunks": Case(in_parts(110, 210, 320), LAYERS, {MASK: 2 * LAYERS}),
    "short chunks": Case(in_parts(150, 200, 320), LAYERS, {FEW: LAYERS, MASK: LAYERS}),
    "chunks, left padding": Case(in_parts(110, 215, 320, mask=LEFT), 0, {MASK: 3 * LAYERS}),
    "static cache": Case(in_parts(200, 201, 320, room=400), LAYERS, {FEW: LAYERS, MASK: LAYERS}),
    "packed": Case(forward(position_ids=PACKED), 0, {MASK: LAYERS}),
    "own mask": Case(forward(attention_mask=CUSTOM), 0, {MASK: LAYERS}),
    "holes": Case(forward(attention_mask=(PLACES % 5 > 0).long().expand(2, -1)), 0, {MASK: LAYERS}),
    "many heads": Case(forward(), LAYERS, model={"num_key_value_heads": 2}),
    "fp32": Case(forward(), LAYERS, model={"dtype": torch.float32}),
    "wide heads": Case(forward(), 0, {WIDE: LAYERS}, model={"head_dim": 160}),
    "Mistral, sliding": Case(
        forward(), 0, {"a sliding window": LAYERS}, "Mistral", {"sliding_window": 100}
    ),
    "Mistral, within its window": Case(forward(), LAYERS, {}, "Mistral", {"sliding_window": 400}),
    "Qwen3, one sliding layer": Case(
        in_parts(200, 320),
        1,
        {"a sliding window": 2, MASK: 1},
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_models_own_but_for_eight_bits(make_model, ids: Tensor, name: str) -> None:
    case = CASES[name]
    model = make_model(case.architecture, **case.model)
    own = case.run(model, ids)
    sparse = enable(model, WHOLE, min_tokens=LEAST)
    found = case.run(model, ids)
    assert (sparse.stats.sparse_calls, dict(sparse.stats.reasons)) == (case.sparse, case.exact)
    assert rel_l2(found, own) < EIGHT_BITS and torch.equal(found, own) == (case.sparse == 0)
    assert f"{case.sparse} sparse calls" in sparse.report()
    sparse.disable()
    assert torch.equal(case.run(model, ids), own)
    sparse.disable()


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "left padding"])
def test_generate_gives_the_same_tokens(make_model, ids: Tensor, cache: Any, mask: Any) -> None:
    model = make_model()
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(ids) if mask is None else mask}
    options |= {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    own = model.generate(ids, **options)
    sparse = enable(model, WHOLE, min_tokens=LEAST)
    assert torch.equal(model.generate(ids, **options), own)
    assert sparse.stats.sparse_calls == (LAYERS if mask is None else 0)
    assert sparse.stats.dense_calls == LAYERS * (4 if mask is None else 5)


def test_calls_are_sparse_and_the_first_key_block_is_kept(make_model, ids: Tensor) -> None:
    model = make_model("Llama")
    long = ids.repeat(1, 3)
    own = model(long, use_cache=False).logits
    sparse = enable(model, sparge.SparsePolicy(topk=0.2), min_tokens=LEAST)
    far = rel_l2(model(long, use_cache=False).logits, own)
    density = sparse.stats.density
    sparse.disable()
    assert 0.3 < density < 0.6 and far > EIGHT_BITS
    by_default = enable(model, min_tokens=LEAST)
    model(long, use_cache=False)
    assert by_default.stats.density > 0.75


def test_whole_graphs(make_model, ids: Tensor) -> None:
    torch._dynamo.reset()
    model = make_model(num_hidden_layers=1)
    with enable(model, WHOLE, min_tokens=LEAST):
        expected = model.model(ids).last_hidden_state
    sparse = enable(model, WHOLE, min_tokens=LEAST)
    compiled = torch.compile(model.model, fullgraph=True, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(ids).last_hidden_state, expected)
    assert sparse.stats.sparse_calls == 2 and sparse.stats.dense_calls == 0
    for _ in range(2):  # it may be packed, or padded: a graph cannot look
        compiled(ids, use_cache=False)
        compiled(ids, attention_mask=LEFT)
    assert sparse.stats.sparse_calls == 2 and sparse.stats.reasons == {MASK: 2}
    other = make_model(num_hidden_layers=1)  # of the same code and weights
    own = other.model(ids).last_hidden_state
    assert torch.equal(torch.compile(other.model, backend="eager")(ids).last_hidden_state, own)
    assert torch.equal(compiled(ids).last_hidden_state, expected)
    sparse.disable()
    assert torch.equal(compiled(ids).last_hidden_state, own) and not torch.equal(own, expected)


def test_two_models_have_rules_and_counts_of_their_own(make_model, ids: Tensor) -> None:
    models = [make_model(), make_model("Qwen3")]
    first, second = (enable(model, WHOLE, n) for model, n in zip(models, (LEAST, 999), strict=True))
    for model in models:
        model(ids, use_cache=False)
    assert (first.stats.sparse_calls, second.stats.sparse_calls) == (LAYERS, 0)
    first.disable()
    models[1](ids, use_cache=False)
    assert second.stats.dense_calls == 2 * LAYERS


def test_a_second_enable_replaces_the_first(make_model, ids: Tensor) -> None:
    model = make_model()
    own = model(ids, use_cache=False).logits
    first = enable(model, min_tokens=LEAST)
    assert "No attention call came" in first.report()
    wrapped: Any = torch.compile(model, backend="eager")
    with enable(wrapped, WHOLE, LEAST) as second:
        first.disable()  # no longer the one that it has
        assert not torch.equal(model(ids, use_cache=False).logits, own)
    assert (first.stats.sparse_calls, second.stats.sparse_calls) == (0, LAYERS)
    assert torch.equal(model(ids, use_cache=False).logits, own)


@pytest.mark.parametrize("reentrant", [True, False])
def test_training_stays_the_models_own(make_model, ids: Tensor, reentrant: bool) -> None:
    """Checkpointing that is reentrant runs layers without gradients, and again with them."""
    with torch.inference_mode(False), torch.enable_grad():
        model = make_model(dtype=torch.float32).train()
        options = {"use_reentrant": reentrant}
        model.activation_checkpointing_enable(options)
        weight, ids = model.model.layers[0].self_attn.q_proj.weight, ids.clone()
        model(ids, labels=ids, use_cache=False).loss.backward()
        own = weight.grad
        model.zero_grad()
        sparse = enable(model, WHOLE, LEAST)
        model(ids, labels=ids, use_cache=False).loss.backward()
        assert torch.equal(weight.grad, own) and own.abs().sum() > 0
    assert sparse.stats.sparse_calls == 0
    assert all("training" in reason for reason in sparse.stats.reasons)


def test_tensors_without_data_stay_the_models_own(make_model, ids: Tensor) -> None:
    model = make_model()
    sparse = enable(model, WHOLE, LEAST)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, mask = mode.from_tensor(ids), mode.from_tensor(LEFT)
        assert model(fake, attention_mask=mask).logits.shape == (2, TOKENS, 97)
    assert sparse.stats.sparse_calls == 0 and sparse.stats.dense_calls == LAYERS
    assert model.to("meta")(ids.to("meta")).logits.is_meta
    assert sparse.stats.sparse_calls == 0 and sparse.stats.dense_calls == 2 * LAYERS


def test_what_cannot_be_enabled_says_why_and_other_attention_can(
    make_model, ids: Tensor, monkeypatch
) -> None:
    with pytest.raises(ValueError, match=r"model is a torch.*Linear; give a model"):
        enable(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="policy is 3"):
        enable(make_model(), 3)  # type: ignore[arg-type]
    for model, other, remedy in (
        (make_model(), "eager", r"call model.set_attn_implementation\(\"sdpa\"\) before"),
        (make_model("Gemma2", attention="eager"), "flex", "cannot have sdpa, so it stays as it is"),
    ):
        model.set_attn_implementation(other.replace("flex", "flex_attention"))
        said = f"has the attention '{other}.*, which may do.*{remedy}"
        with pytest.raises(sparge.Unsupported, match=said):
            enable(model)
    model = make_model()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_can_set_attn_implementation", lambda _: False)
        with pytest.raises(sparge.Unsupported, match="does not take its attention from"):
            enable(model)
    own = model(ids).logits
    model.set_attn_implementation("flex_attention")
    with enable(model, WHOLE, LEAST) as sparse:
        assert 0 < rel_l2(model(ids).logits, own) < EIGHT_BITS
    assert sparse.stats.sparse_calls == LAYERS
    assert model.config._attn_implementation == "flex_attention"


def test_parts_that_are_eager_are_left_alone_and_others_get_their_own_back(
    seed: int, ids: Tensor
) -> None:
    torch.manual_seed(seed)
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1
    )
    text = transformers.LlamaConfig(**SIZES)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=96)
    own = {"": "sdpa", "vision_config": "eager", "text_config": "sdpa"}
    model = transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation=own
    ).eval()
    parts = [model.config, model.config.vision_config, model.config.text_config]
    image, places = torch.zeros(1, 3, 224, 224), (224 // vision.patch_size) ** 2
    ids = torch.cat([torch.full((1, places), 96), ids[:1].clamp(max=95)], 1)
    expected = model(input_ids=ids, pixel_values=image).logits
    sparse = enable(model, WHOLE, min_tokens=40)
    found = model(input_ids=ids, pixel_values=image).logits
    assert rel_l2(found, expected) < EIGHT_BITS
    assert (sparse.stats.sparse_calls, sparse.stats.dense_calls) == (2, 0), sparse.report()
    sparse.disable()
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]
