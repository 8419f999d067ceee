# SPDX-License-Identifier: Apache-2.0
"""The block map of a head that the node shows, kept by the run before it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.nodes.parts import HEADS

pytestmark = pytest.mark.usefixtures("reference_allowed")

SIGMAS = (1.0, 0.7, 0.4)
BLOCK_MAP = "SpargeAttentionBlockMap"


@pytest.fixture
def asked_for(monkeypatch):
    """asked_for(*layers): the running graph has a block map node of each, behind node 2."""

    def put(*layers):
        nodes = {"2": {"class_type": "SpargeAttention", "inputs": {}}}
        for layer in layers:
            inputs = {"model": ["2", 0], "layer": layer}
            nodes[f"map {layer}"] = {"class_type": BLOCK_MAP, "inputs": inputs}
        graph = SimpleNamespace(all_node_ids=lambda: set(nodes), get_node=nodes.__getitem__)
        state = SimpleNamespace(dynprompt=graph)
        progress = ModuleType("comfy_execution.progress")
        vars(progress)["get_progress_state"] = lambda: state
        monkeypatch.setitem(sys.modules, progress.__name__, progress)
        return nodes

    return put


@pytest.fixture
def run(load_pack, sampled, step):
    """run(**widgets): a run of three steps, the first of them dense."""
    hook_of = load_pack("nodes.hook").hook_of

    def of(**widgets):
        def prepared(patched):
            hook_of(patched).node_id = "2"

        return sampled(step, SIGMAS, prepared=prepared, **widgets)

    return of


@pytest.fixture
def node(load_pack):
    return load_pack("nodes.sparge_block_map")


def test_nodes_that_do_not_run_are_passed_over(asked_for, load_pack):
    """ComfyUI runs the valid part of a graph: others may have no source, or each other's."""
    nodes = asked_for(1)
    for name, source in (("lost", "77"), ("lora a", "lora b"), ("lora b", "lora a")):
        nodes[name] = {"class_type": BLOCK_MAP, "inputs": {"model": [source, 0], "layer": 5}}
        nodes[f"behind {name}"] = {"class_type": BLOCK_MAP, "inputs": {"model": [name, 0]}}
    nodes |= {"bare": {"class_type": "Lora"}, "map of nothing": {"class_type": BLOCK_MAP}}
    nodes["behind bare"] = {"class_type": BLOCK_MAP, "inputs": {"model": ["bare", 0]}}
    found = load_pack("nodes.host").nodes_behind("2", BLOCK_MAP)
    assert found == {"map 1": {"model": ["2", 0], "layer": 1}}


def test_a_map_behind_a_merge_is_of_its_first_model(asked_for, load_pack):
    """ModelMergeSimple and the like give out a clone of that."""
    nodes = asked_for()
    nodes["other"] = {"class_type": "Loader", "inputs": {}}
    for name, first, second in (("with ours", "2", "other"), ("into another", "other", "2")):
        sources = {"model1": [first, 0], "model2": [second, 0]}
        nodes[name] = {"class_type": "Merge", "inputs": sources}
        nodes[f"map {name}"] = {"class_type": BLOCK_MAP, "inputs": {"model": [name, 0]}}
    found = load_pack("nodes.host").nodes_behind("2", BLOCK_MAP)
    assert set(found) == {"map with ours"}


@pytest.mark.parametrize("mode", ["manual", "auto budget"])
def test_the_run_keeps_the_layer_that_is_asked_for(run, asked_for, mode):
    asked_for(1)
    got = run(mode=mode, topk=0.5)
    assert set(got.last.maps) == {1}
    maps = got.last.maps[1]
    assert maps.heads == HEADS and maps.step == 2, "the last sparse step"
    heads = torch.stack([maps.of_head(head) for head in range(HEADS)])
    assert heads.shape == (HEADS, 2, 4) and heads.dtype == torch.bool
    # Both prompts of the batch have the same tensors, and every block here is whole.
    density = got.last.report.by_step[1, 2]
    assert float(heads.float().mean()) == pytest.approx(float(density)) != 1.0


def test_nothing_is_kept_where_nobody_asks(run, load_pack, monkeypatch):
    module = load_pack("sparge.stages.on_reference")
    monkeypatch.setattr(module, "pack", lambda kept: pytest.fail("made for nobody"))
    got = run()
    assert got.tally.sparse and not got.last.maps


def test_maps_are_those_of_the_positive_prompt(sampled, step, asked_for, load_pack):
    """Where prompts come one by one the negative one is the last."""
    asked_for(0)
    hook_of, found = load_pack("nodes.hook").hook_of, []

    def of_prompt(attend):
        def attended(q, *rest):
            return attend(q.flip(1) if attend.options["cond_or_uncond"] == [1] else q, *rest)

        return step(attended)

    def prepared(patched):
        hook_of(patched).node_id = "2"

    for batches in ([[0], [1]], [[0]], [[1]]):
        got = sampled(of_prompt, SIGMAS, conditionings=batches, prepared=prepared, topk=0.5)
        found.append(got.last.maps[0].packed if got.last.maps else None)
    both, positive, negative = found
    assert torch.equal(both, positive) and negative is None


def shown(node, got, layer=0, head=0):
    return node.SpargeAttentionBlockMap.execute(got.patched, {"samples": None}, layer, head)


def test_the_node_shows_the_map(run, asked_for, node, load_pack, monkeypatch):
    asked_for(1)
    got = run()
    words, picture = [], load_pack("nodes.picture")
    write = picture.write

    def listen(image, text, *rest, **more):
        words.append(text)
        write(image, text, *rest, **more)

    monkeypatch.setattr(picture, "write", listen)
    output = shown(node, got, 1, 1)
    image = output[0]
    assert image.shape[0] == 1 and image.shape[2:] == (800, 3) and image.dtype == torch.float32
    assert words[:2] == [
        "Layer 1, head 1: 50 % computed", "Step 3. A row is 128 queries, a column 64 keys"
    ]  # fmt: skip
    assert {"query block", "key block", "skipped", "computed", "0", "1", "3"} <= set(words)
    block = load_pack("nodes.block_picture")
    kept = got.last.maps[1].of_head(1)
    rows, columns = kept.shape
    for row in range(rows):
        for column in range(columns):
            at = (
                block.TOP + round((row + 0.5) * block.SIDE / rows),
                block.LEFT + round((column + 0.5) * block.SIDE / columns),
            )
            colour = picture.coloured(kept[row, column].float()).float()
            assert torch.equal((255 * image[0][at]).round(), colour)


def test_many_blocks_share_a_pixel(load_pack):
    """As 118,800 tokens have them."""
    kept = torch.zeros(929, 1857, dtype=torch.bool)
    kept[:, ::2] = True
    picture, block = load_pack("nodes.picture"), load_pack("nodes.block_picture")
    image = 255 * block.draw(kept, 0, 0, 0)[0]
    inside = image[block.TOP + 9 : block.TOP + 99, block.LEFT + 9 : block.LEFT + 99]
    mean = picture.coloured(torch.tensor(0.5)).float()
    assert (inside.mean((0, 1)) - mean).abs().max() < 25


@pytest.mark.parametrize(
    ("layer", "head", "told"),
    [
        (0, 0, "The last run kept no map of layer 0"),
        (9, 0, "This model has no layer 9: its layers are 0 to 1."),
        (1, 5, "Layer 1 has no head 5: its heads are 0 to 1."),
    ],
)
def test_what_there_is_no_map_of_is_said(run, asked_for, node, layer, head, told):
    asked_for(1)
    got = run()
    assert node.why_none(got.last, layer, head).startswith(told)
    assert shown(node, got, layer, head)[0].shape[2] == 800


def test_a_dense_run_has_no_map(run, asked_for, node):
    asked_for(1)
    got = run(min_tokens=100000)
    assert node.why_none(got.last, 1, 0).startswith("Nothing was sparse in the last run")


def test_models_that_were_not_sampled_are_told(node, patch, patcher):
    for model in (patcher, patch()):
        image = node.SpargeAttentionBlockMap.execute(model, {"samples": None}, 0, 0)[0]
        assert image.shape[2] == 800
