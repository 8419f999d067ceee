# SPDX-License-Identifier: Apache-2.0
"""Random chains of overrides around ours. What comes out is what comes out without our node:
exactly where a node beneath ours changes attention, and within 8 bits elsewhere.

    SPARGE_FUZZ_CASES=1000    so many runs instead of 16
    SPARGE_FUZZ_SEED=1234     that run alone, as a failure names it
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import torch

from tests.comfy.overrides import BACKENDS, MEANINGS, backend, only_where, override_of
from tests.nodes.conftest import backend as dense_of
from tests.nodes.parts import HEADS, TOKENS, relative_error

pytestmark = pytest.mark.usefixtures("reference_allowed")

KEY, CASES = "optimized_attention_override", 16
LEVELS = [0.95 - 0.07 * step for step in range(13)]
#: Steps until one layer is compared again, and all are.
NOTICED = 7
#: Relative error of a call by a plain 8-bit backend and by ours, one against the other.
TWO_TIMES_EIGHT_BIT = 0.12
MODES = ("manual", "auto budget")
PLACES = ("over ours", "over ours", "overwriting", "in each pass", "holding")


@dataclass
class Link:
    """Override of one node."""

    name: str
    where: str
    begins: int

    @classmethod
    def draw(cls, rng: random.Random) -> Link:
        names = rng.choice((MEANINGS, MEANINGS, BACKENDS))
        where = rng.choice(("everywhere", "everywhere", "one layer", "one prompt"))
        # A layer alone is compared again in its turn, later than these runs end.
        begins = 0 if where == "one layer" else rng.choice((0, 0, 0, 2))
        return cls(rng.choice(list(names)), where, begins)

    def acts(self, options) -> bool:
        if self.name in BACKENDS or options["step"] < self.begins:
            return False
        if self.name == "gain of one prompt" and 1 not in options["cond_or_uncond"]:
            return False
        if self.where == "one layer":
            return options["block_index"] == 0
        return self.where == "everywhere" or 1 in options["cond_or_uncond"]

    def over(self, previous):
        meaning = (BACKENDS | MEANINGS)[self.name]
        chosen = only_where(meaning, self.acts) if self.name in MEANINGS else meaning
        return override_of(chosen, previous)


class Case:
    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed, self.layers = seed, rng.choice((1, 2, 3))
        self.heads_first = rng.random() < 0.5
        self.dtype = rng.choice((torch.float32, torch.bfloat16))
        self.conditionings = rng.choice(([[1, 0]], [[0], [1]]))
        self.widgets = {"mode": rng.choice(MODES), "start_percent": rng.choice((0.0, 0.2))}
        self.before = [Link.draw(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
        self.after = Link.draw(rng) if rng.random() < 0.4 else None
        self.place = rng.choice(PLACES) if self.after else ""

    @property
    def reaches_ours(self) -> bool:
        return self.place != "holding"

    @property
    def beneath(self) -> list[Link]:
        if self.after is not None and self.place in ("overwriting", "in each pass"):
            return [self.after]
        return self.before

    def overrides(self, ours=None):
        """Overrides before ours, and the last one; ours is left out where it is not given."""
        below = None
        for link in self.before:
            below = link.over(below)
        at_last = ours or below
        if self.after is not None and self.place != "in each pass":
            outside = self.place == "over ours"
            at_last, kept = self.after.over(at_last if outside else None), at_last
            if self.place == "holding":
                at_last = holding(at_last, kept)
        elif self.after is not None and ours is None:
            at_last = self.after.over(None)
        return below, at_last


def holding(override, kept):
    def held(func, *args, **kwargs):
        return override(func, *args, **kwargs) if kept is not func else None

    return held


def in_each_pass(patched, override):
    def wrapper(executor, x, t, context, text, control, options, **kwargs):
        return executor(x, t, context, text, control, options | {KEY: override}, **kwargs)

    patched.add_wrapper_with_key("apply_model", "another node", wrapper)


@pytest.fixture
def run(load_pack, patcher, session, runs):
    """run(case): the options of each call, its result and the one without our node; and the run."""
    node = load_pack("nodes.sparge_attention").SpargeAttention

    def of(case):
        below, expected_of = case.overrides()
        model = patcher.clone()
        if below is not None:
            model.transformer_options[KEY] = below
        patched = node.execute(model, topk=1.0, min_tokens=TOKENS, **case.widgets)[0]
        _, patched.transformer_options[KEY] = case.overrides(patched.transformer_options[KEY])
        if case.place == "in each pass":
            in_each_pass(patched, case.after.over(None))
        generator, found, levels = torch.Generator().manual_seed(case.seed), [], []
        shape = (1, HEADS, TOKENS, 64) if case.heads_first else (1, TOKENS, HEADS * 64)
        layers = torch.randn(case.layers, 3, *shape, generator=generator)
        layers[:, 0] *= 0.7

        class Session(session):
            def forward(self, step, sigma, conditionings):
                levels.append(sigma)
                return super().forward(step, sigma, conditionings)

        def step(attend):
            for index, qkv in enumerate(layers.to(case.dtype)):
                told = {"block_index": index, "step": LEVELS.index(levels[-1])}
                attend.options.update(told)
                told["cond_or_uncond"] = attend.options["cond_or_uncond"]
                out = attend(*qkv.clone(), HEADS, skip_reshape=case.heads_first)
                batch = (torch.cat([x] * len(told["cond_or_uncond"])) for x in qkv)
                wanted = (expected_of or override_of(backend))(
                    dense_of, *batch, HEADS, skip_reshape=case.heads_first, transformer_options=told
                )
                found.append((told, out, wanted))

        Session(patched).sample(step, LEVELS, case.conditionings)
        return found, runs[-1][0]

    return of


def faults(case, found):
    """What is wrong with the results of a run."""
    for told, out, wanted in found:
        error, step = relative_error(out, wanted), told["step"]
        acting = [link.begins for link in case.beneath if link.acts(told)]
        exact = acting or not case.reaches_ours
        if acting and 0 < min(acting) > step - NOTICED:
            continue  # it is not noticed yet
        if exact and error > 1e-6:
            yield f"step {step}, layer {told['block_index']}: {error:.3f} where a node acts"
        elif error > TWO_TIMES_EIGHT_BIT:
            yield f"step {step}, layer {told['block_index']}: {error:.3f}"


def test_random_chains(run):
    seeds = range(int(os.environ.get("SPARGE_FUZZ_CASES", CASES)))
    if "SPARGE_FUZZ_SEED" in os.environ:
        seeds = [int(os.environ["SPARGE_FUZZ_SEED"])]
    wrong, sparse = [], 0
    for seed in seeds:
        case = Case(seed)
        found, ran = run(case)
        sparse += ran.counts.sparse > 0
        wrong += [
            f"SPARGE_FUZZ_SEED={seed}, {case.place}: {fault}" for fault in faults(case, found)
        ]
    assert not wrong, f"{len(wrong)} calls are wrong:\n" + "\n".join(wrong[:20])
    print(f"{len(seeds)} runs, {sparse} with sparse calls")
    if len(seeds) >= CASES:
        assert sparse >= len(seeds) / 3
