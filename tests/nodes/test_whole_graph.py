# SPDX-License-Identifier: Apache-2.0
"""torch.compile with fullgraph: dense, with a sentence, instead of an error."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

TOKENS, HEADS = 256, 2


@pytest.fixture
def run(load_pack, patcher, session, generator, runs, monkeypatch):
    """run(compiled, ...): results, the tally and the line of a run of three steps, with a model
    of one call that is compiled or not."""
    torch._dynamo.reset()
    monkeypatch.setattr(load_pack("sparge.common.whole_graph"), "_traced", set())
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)

    def of(prepared=lambda patched: None, **compiling):
        node = load_pack("nodes.sparge_attention").SpargeAttention
        patched = node.execute(patcher, min_tokens=TOKENS)[0]
        prepared(patched)

        def dense(q, k, v, heads, **kwargs):
            q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return out.transpose(1, 2).flatten(2)

        def model(x, options):
            override = options["optimized_attention_override"]
            x = x + 1
            return override(dense, x, x, x, HEADS, transformer_options=options) * 2

        compiled = torch.compile(model, backend="eager", **compiling) if compiling else model
        running = session(patched)
        results = [
            torch.stack(running.sample(lambda attend: compiled(q, attend.options), [0.7, 0.6, 0.5]))
            for _ in range(2)
        ]
        assert torch.equal(*results)
        hook = load_pack("nodes.hook").hook_of(patched)
        line = load_pack("nodes.report").summary(hook.last)
        return results[0], runs[-1][0].tally, line, 2 * dense(q + 1, q + 1, q + 1, HEADS)

    return of


def test_a_graph_of_the_whole_model_stays_dense_and_says_so(run):
    results, tally, line, dense = run(fullgraph=True)
    assert all(torch.equal(out, dense) for out in results)
    assert tally.calls == 0
    assert "NOTHING WAS SPARSE: no attention call reached this node; torch.compile with" in line
    assert "turn fullgraph off" in line


def test_a_node_under_ours_is_in_that_graph(run):
    def earlier(func, *args, **kwargs):
        return func(*args, **kwargs) + 1

    def under(patched):
        patched.transformer_options["optimized_attention_override"] = earlier

    results, _, line, dense = run(under, fullgraph=True)
    assert all(torch.equal(out, dense + 2) for out in results)
    assert "turn fullgraph off" in line


@pytest.mark.parametrize("compiling", [{}, {"fullgraph": False}, {"dynamic": True}])
def test_any_other_graph_leaves_room(run, compiling):
    results, tally, line, dense = run(**compiling)
    assert tally.sparse == 3 and "fullgraph" not in line
    assert not any(torch.equal(out, dense) for out in results)


def test_replaced_blocks_may_be_in_that_graph(load_pack):
    """They are those of skip-layer guidance, which are told apart for the counter of layers."""
    torch._dynamo.reset()
    replaced = load_pack("nodes.layer_counter").ReplacedBlocks()
    options = {"patches_replace": {"dit": {("double_block", 1): lambda args, _: args["img"] + 1}}}
    patch = replaced.told(options)["patches_replace"]["dit"]["double_block", 1]

    def block(x):
        return patch({"img": x, "transformer_options": {}}, {})

    whole = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(whole(torch.zeros(2)), torch.ones(2))
