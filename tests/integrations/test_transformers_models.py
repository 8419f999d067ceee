# SPDX-License-Identifier: Apache-2.0
"""Models of transformers whose files ask by name which attention they have, models made of parts,
copies of a sparse model, and continuous batching, where transformers takes its own attention
alone."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", "5.24", reason="needs transformers 5.24")

import sparge
from sparge.integrations.transformers import enable

transformers: Any = sys.modules["transformers"]  # its parts are found when they are asked for

pytestmark = pytest.mark.usefixtures("inference")

SIZE: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
SHORT, LEAST, LAYERS = 40, 100, 2
WHOLE = sparge.SparsePolicy(topk=1.0, attention_sink=True)


@pytest.fixture
def ids(generator: torch.Generator) -> Tensor:
    return torch.randint(3, 97, (1, 160), generator=generator)


@pytest.mark.parametrize("options", [{}, {"logits_to_keep": 3}], ids=["whole", "last three"])
def test_short_prompts_of_layers_that_share_keys_are_the_models_own(
    ids: Tensor, options: dict[str, int]
) -> None:
    """Gemma 4 then computes the last queries alone, with their rows of the mask."""
    config = transformers.Gemma4TextConfig(
        **SIZE, intermediate_size=64, num_hidden_layers=4, head_dim=16, global_head_dim=16,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=99, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.Gemma4ForCausalLM(config).float().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    own = model(ids[:, :SHORT], **options).logits
    with enable(model, min_tokens=LEAST) as sparse:
        assert torch.allclose(model(ids[:, :SHORT], **options).logits, own, atol=1e-5)
    assert sum(sparse.stats.reasons.values()) == 4 and not sparse.stats.sparse_calls


def test_parts_without_an_attention_are_left_without() -> None:
    config = transformers.MoshiConfig(
        **SIZE, num_hidden_layers=1, head_dim=16, ffn_dim=128
    )  # its sub-configs name none
    model = transformers.MoshiForCausalLM(config).eval()
    parts = [config, *(getattr(config, key) for key in config.sub_configs)]
    before = [part and part._attn_implementation for part in parts]
    enable(model).disable()
    assert [part and part._attn_implementation for part in parts] == before


def test_a_part_and_the_whole_replace_each_other(make_model, ids: Tensor) -> None:
    model = make_model()
    own = model(ids).logits
    for first, second in ((model.model, model), (model, model.model)):
        replaced = enable(first, min_tokens=LEAST)
        with enable(second, min_tokens=LEAST) as sparse:
            model(ids)
        assert (replaced.stats.sparse_calls, sparse.stats.sparse_calls) == (0, LAYERS)
        assert torch.equal(model(ids).logits, own)


def test_a_model_that_chooses_keys_itself_is_refused(make_model) -> None:
    model = make_model()
    model.model.layers[0].self_attn.indexer = torch.nn.Identity()
    with pytest.raises(sparge.Unsupported, match="chooses keys by an indexer of its own"):
        enable(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_sparse_model_has_the_attention_that_it_had_before(
    make_model, ids: Tensor, make_copy: Any
) -> None:
    model = make_model()
    own = model(ids, use_cache=False).logits
    with enable(model, WHOLE, LEAST) as sparse:
        copied = make_copy(model)
        assert torch.equal(copied(ids, use_cache=False).logits, own)
        assert sparse.stats.sparse_calls + sparse.stats.dense_calls == 0
        with enable(copied, WHOLE, LEAST) as of_copy:
            model(ids, use_cache=False)
            assert not torch.equal(copied(ids, use_cache=False).logits, own)
        assert sparse.stats.sparse_calls == of_copy.stats.sparse_calls == LAYERS
    assert copied.config._attn_implementation == model.config._attn_implementation == "sdpa"


def test_a_model_that_is_dropped_is_freed(make_model, ids: Tensor) -> None:
    model = make_model()
    enable(model, WHOLE, LEAST)
    model(ids, use_cache=False)
    held = weakref.ref(model.config)
    del model
    gc.collect()
    assert held() is None


def test_a_model_takes_it_by_its_name(make_model, ids: Tensor, monkeypatch) -> None:
    model, stats = make_model(), sparge.CallStats()
    with enable(model, min_tokens=LEAST):
        expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("sparge")
    module = importlib.import_module("sparge.integrations.transformers")
    monkeypatch.setattr(module, "USUAL", module.Substitute.checked(None, LEAST, stats))
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert stats.sparse_calls == LAYERS
    capped = make_model("Gemma2", attention="eager")
    capped.set_attn_implementation("sparge")
    with pytest.raises(sparge.Unsupported, match="Gemma2Attention caps logits, has sinks or"):
        capped(ids)


def test_a_rule_knows_the_layer_and_topk_needs_no_policy(make_model, ids: Tensor) -> None:
    model, seen = make_model(), []

    def rule(call: sparge.TorchCall) -> Any:
        seen.append((call.layer, call.is_causal))
        return sparge.SparsePolicy(topk=0.3, attention_sink=True) if call.layer else None

    with enable(model, rule, LEAST) as sparse:
        model(ids)
    assert (sparse.stats.sparse_calls, sparse.stats.dense_calls) == (1, 1)
    assert seen == [(0, True), (1, True)]
    with enable(model, topk=0.3, min_tokens=LEAST) as by_topk:
        model(ids)
    assert by_topk.stats.density == sparse.stats.density


def test_continuous_batching_is_refused_until_it_is_disabled(make_model, ids: Tensor) -> None:
    model = make_model(dtype=torch.float32)
    greedy: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": -1}
    config = transformers.GenerationConfig(pad_token_id=0, **greedy)
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    prompts = [ids[0, :50].tolist(), ids[0, 50:90].tolist()]
    with torch.inference_mode(False):
        with (
            enable(model, WHOLE, LEAST),
            pytest.raises(ValueError, match="sparge_enabled is not supported for cont"),
        ):
            model.generate_batch(prompts, config, small, progress_bar=False)
        found = model.generate_batch(prompts, config, small, progress_bar=False)
    own = [
        model.generate(torch.tensor([prompt]), pad_token_id=0, **greedy)[0, -2:].tolist()
        for prompt in prompts
    ]
    assert [found[key].generated_tokens for key in sorted(found)] == own
