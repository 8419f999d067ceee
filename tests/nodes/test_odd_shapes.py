# SPDX-License-Identifier: Apache-2.0
"""Whatever shapes a model sends: a graph that runs without the node runs with it, served or dense
with a reason; and errors of the pack's own are dense, counted and in the log."""

from __future__ import annotations

import pytest
import torch

from sparge.session.calls import DIFFERENT_NUMBERS
from tests.nodes.conftest import backend as plain
from tests.nodes.parts import EIGHT_BIT, HEADS, TOKENS, relative_error

pytestmark = pytest.mark.usefixtures("reference_allowed")

DIM = 64


class LoaderTensor(torch.Tensor):
    """Tensor like a GGUF loader's class, which allocates its own kind and takes a copy for a
    waste.
    """

    def new_empty(self, *args, **kwargs):
        raise AssertionError("the library allocates plain tensors")

    def clone(self, *args, **kwargs):
        return self


FLAT = torch.randn(3, 2, TOKENS, HEADS * DIM, generator=torch.Generator().manual_seed(0))
SPLIT = FLAT.unflatten(-1, (HEADS, DIM))
HEADS_FIRST = SPLIT.transpose(2, 3)
Q, K, V = FLAT
QH, KH, VH = HEADS_FIRST

#: name: (q, k, v, flags, whether it is served)
SHAPES = {
    "flat": (Q, K, V, {}, True),
    "parts of one projection": (*torch.cat([Q, K, V], -1).chunk(3, -1), {}, True),
    "expanded over the batch": (*FLAT[:, :1].expand_as(FLAT), {}, True),
    "v 4-D, as SD3": (Q, K, SPLIT[2], {}, True),
    "v 4-D, strided": (Q, K, HEADS_FIRST[2].contiguous().transpose(1, 2), {}, True),
    "v expanded over tokens": (Q, K, V[:, :1].expand_as(V), {}, True),
    "heads first": (QH, KH, VH, {"skip_reshape": True}, True),
    "heads first, out too": (
        QH, KH, VH, {"skip_reshape": True, "skip_output_reshape": True}, True,
    ),
    "fewer heads of keys": (Q, K[..., :DIM], V[..., :DIM], {}, True),
    "fewer heads of keys, heads first": (
        QH, KH[:, :1], VH[:, :1], {"skip_reshape": True, "enable_gqa": True}, True,
    ),
    "of a GGUF loader": (Q.as_subclass(LoaderTensor), K.as_subclass(LoaderTensor), V, {}, True),
    "options that change nothing": (
        Q, K, V, {"is_causal": False, "window": None, "low_precision_attention": True}, True,
    ),
    "a scale": (Q, K, V, {"scale": 0.3}, True),
    "v 4-D, out heads first": (Q, K, SPLIT[2], {"skip_output_reshape": True}, True),
    "q in tiles, as HyperTile": (Q.reshape(4, TOKENS // 2, -1), K, V, {}, True),
    "k and v 5-D": (
        Q, SPLIT[1].unflatten(1, (4, -1)), SPLIT[2].unflatten(1, (4, -1)), {}, False,
    ),
    "v 4-D with one head of all channels": (Q, K, V.unsqueeze(2), {}, False),
    "k and v of one entry": (Q, K[:1], V[:1], {}, False),
    "k and v of one entry, heads first": (QH, KH[:1], VH[:1], {"skip_reshape": True}, False),
    "v of another head_dim, heads first": (
        QH, KH, VH[..., :32], {"skip_reshape": True}, False,
    ),
    "v of one head, heads first": (QH, KH, VH[:, :1], {"skip_reshape": True}, False),
}  # fmt: skip
#: Those that ComfyUI's own backends refuse; another node's may take them.
REFUSED_BY_COMFYUI = {
    "all 4-D": (*SPLIT, {}),
    "k shorter than v": (Q, K, V[:, :-1], {}),
    "v of another head_dim": (Q, K, V[..., :80], {}),
    "q 2-D": (Q[0], K[0], V[0], {}),
    "nothing": (Q[:, :0], K[:, :0], V[:, :0], {}),
}


@pytest.fixture
def outcome(sampled, asked):
    """outcome(operands, flags, mode, backend): results of four steps, of which the first is before
    the window, and the counts. The library gets views of operands, of no other class."""

    def of(operands, flags, mode, backend=plain):
        def step(attend):
            override = attend.options["optimized_attention_override"]
            return override(backend, *operands, HEADS, transformer_options=attend.options, **flags)

        got = sampled(
            step, [1.0, 0.7, 0.6, 0.5], torch.nn.Module(), conditionings=([0],), mode=mode,
            min_tokens=0, topk=1.0,
        )  # fmt: skip
        for call in asked:
            assert [x.data_ptr() for x in call.tensors[:3]] == [x.data_ptr() for x in operands]
            assert {type(x) for x in call.tensors} == {torch.Tensor}
        return got.given, got.counts

    return of


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_comfyui_takes(outcome, name, mode):
    q, k, v, flags, served = SHAPES[name]
    # One entry for two is read as half as many keys, which mode manual serves.
    half = name == "k and v of one entry"
    served |= half and mode == "manual"
    results, counts = outcome([q, k, v], flags, mode)
    expected = plain(q, k, v, HEADS, **flags)
    for out in results:
        assert out.shape == expected.shape
        assert torch.equal(out, expected) or served
        if mode == "manual":
            assert relative_error(out, expected) < EIGHT_BIT, "half of the blocks dropped is 0.3"
    assert counts.sparse == 3 * served
    why = DIFFERENT_NUMBERS if half else "the model calls attention in a way unknown here"
    assert counts.reasons[why] == (0 if served else 4)
    assert counts.dense == 1 + 3 * (not served) and counts.cross == 0


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
@pytest.mark.parametrize("name", REFUSED_BY_COMFYUI)
def test_shapes_for_another_node(outcome, name, mode):
    """Whatever that gives goes through."""
    *operands, flags = REFUSED_BY_COMFYUI[name]
    results, counts = outcome(operands, flags, mode, lambda q, *_, **__: q + 1)
    assert all(torch.equal(out, operands[0] + 1) for out in results)
    assert counts.sparse == 0 and counts.dense + counts.cross == 4


def test_what_dense_attention_raises_is_not_ours(outcome, caplog):
    def refuse(*args, **kwargs):
        raise ValueError("too many values to unpack")

    for mode in ("manual", "auto quality"):
        with pytest.raises(ValueError, match="unpack"):
            outcome((*SPLIT,), {}, mode, refuse)
    assert "Please report" not in caplog.text


def test_a_dense_result_of_another_shape_is_not_measured(outcome):
    """A node that serves dense calls may give one."""
    results, counts = outcome((Q, K, V), {}, "auto quality", lambda q, *_, **__: q.unsqueeze(0))
    assert all(out.shape == (1, *Q.shape) for out in results)
    assert any("(1, 2, 256, 128)" in reason for reason in counts.reasons)


@pytest.mark.parametrize("where", ["begin", "end"])
def test_an_error_around_a_pass_costs_no_picture(
    load_pack, outcome, monkeypatch, caplog, where, runs
):
    def fail(*args, **kwargs):
        raise AttributeError("no such model")

    monkeypatch.setattr(load_pack("nodes.run").Forward, where, fail)
    results, counts = outcome((Q, K, V), {}, "manual")
    assert len(results) == 4 and all(out.shape == Q.shape for out in results)
    assert caplog.text.count("AttributeError: no such model. Please report it") == 1
    assert counts.calls == (0 if where == "begin" else 4)
    if where == "begin":
        failed = load_pack("sparge.session").FAILED
        assert any(failed in note for note in runs[-1][0].report().notes)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_comfyui_has_to_see_goes_through(load_pack, outcome, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(load_pack("sparge.session.calls"), "attention", fail)
    with pytest.raises(error):
        outcome((Q, K, V), {}, "manual")
