# SPDX-License-Identifier: Apache-2.0
"""Copies of a sparse model of transformers, also in another process; and continuous batching, where
transformers takes its own attention alone."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge

transformers: Any = pytest.importorskip("transformers", "5.24", reason="needs transformers 5.24")
from sparge.integrations.transformers import enable  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE = sparge.SparsePolicy(topk=1.0, attention_sink=True)
TOKENS, LEAST, LAYERS = 320, 100, 2


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def ids(generator: torch.Generator) -> Tensor:
    return torch.randint(3, 97, (2, TOKENS), generator=generator)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_copies_of_a_sparse_model_keep_working(
    make_model, ids: Tensor, attention: str, make_copy: Any
) -> None:
    model = make_model(attention=attention)
    own = model(ids, use_cache=False).logits
    with enable(model, WHOLE, LEAST) as sparse:
        copied = make_copy(model)
    assert torch.equal(copied(ids, use_cache=False).logits, own)
    assert sparse.stats.sparse_calls + sparse.stats.exact_calls == 0
    with enable(copied, WHOLE, LEAST) as sparse:
        assert not torch.equal(copied(ids, use_cache=False).logits, own)
    assert sparse.stats.sparse_calls == LAYERS
    assert copied.config._attn_implementation == attention


#: Loads a pickled model where another one is sparse, with its own rules, or none.
CHILD = """
import pickle, sys, torch, transformers
transformers.logging.set_verbosity_error()
with_another, file, ids = sys.argv[1] == "True", sys.argv[2], torch.load(sys.argv[3])
if with_another:
    import sparge
    from tests.tiny_models.texts import make_text_model
    from sparge.integrations.transformers import enable
    policy, llamas = sparge.SparsePolicy(topk=0.0), (make_text_model("Llama", n) for n in (1, 2))
    others = [enable(llama, policy, 100) for llama in llamas]
with open(file, "rb") as stream:
    model = pickle.load(stream)
with torch.inference_mode():
    torch.save([model(ids, use_cache=False).logits, model.model(ids)[0]], sys.argv[4])
if with_another:
    assert all(other.stats.sparse_calls + other.stats.exact_calls == 0 for other in others)
    whole = sparge.SparsePolicy(topk=1.0, attention_sink=True)
    with torch.inference_mode(), enable(model, whole, 100) as sparse:
        model(ids)
    assert sparse.stats.sparse_calls == 2, sparse.report()
"""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("with_another", [False, True])
def test_another_process_loads_a_sparse_model_as_it_was_before(
    make_model, ids: Tensor, with_another: bool, attention: str, tmp_path: Path
) -> None:
    model = make_model(attention=attention)
    own = [model(ids, use_cache=False).logits, model.model(ids)[0]]
    files = [str(tmp_path / name) for name in ("model", "ids", "out")]
    torch.save(ids, files[1])
    with enable(model, WHOLE, LEAST):
        Path(files[0]).write_bytes(pickle.dumps(model))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", CHILD, str(with_another), *files]
    subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=True)
    assert all(map(torch.equal, torch.load(files[2]), own))


@pytest.mark.parametrize(
    ("attention", "make_copy"),
    [("sdpa", lambda x: x), ("sdpa", copy.deepcopy), ("eager", lambda x: x)],
)
def test_continuous_batching_is_as_without_us_and_says_so(
    make_model, ids: Tensor, attention: str, make_copy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(attention=attention, dtype=torch.float32)
    greedy: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": -1}
    config = transformers.GenerationConfig(pad_token_id=0, **greedy)
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    prompts = [ids[:1, :50], ids[1:, :40]]
    own = [model.generate(prompt, pad_token_id=0, **greedy)[0, -2:].tolist() for prompt in prompts]
    with torch.inference_mode(False):
        sparse = enable(model, WHOLE, LEAST)
        batched = make_copy(model)
        found = batched.generate_batch(
            [prompt[0].tolist() for prompt in prompts], config, small, progress_bar=False
        )
    assert [found[key].generated_tokens for key in sorted(found)] == own
    assert batched.config._attn_implementation == attention
    if batched is model:
        assert "not sparse any more" in caplog.text and "not sparse any more" in sparse.report()
        sparse = enable(model, WHOLE, LEAST)
    model(ids, use_cache=False)
    assert sparse.stats.sparse_calls == LAYERS
    sparse.disable()
    assert "init_continuous_batching" not in vars(model) | vars(batched)
