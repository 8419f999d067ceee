# SPDX-License-Identifier: Apache-2.0
"""Entries of a run that are measured, as tables.

An entry is its prompt and its step: c, u, d and e are prompts, b is a batch of c and u, t one of c
twice; c1.5 is between steps 1 and 2, c1' again at step 1.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

STEPS = 20
PROMPTS = {"c": (0,), "u": (1,), "d": (2,), "e": (3,), "b": (0, 1), "t": (0, 0)}
#: Numbers of heads and tokens, and the head_dim.
SIZES = 1, 256, 16


@pytest.fixture
def measured(load_pack, monkeypatch):
    """measured(passes, dense steps): those measured, and the first that is sparse."""
    module, session = load_pack("sparge.session.heads"), load_pack("sparge.session")
    aim, policy = session.Aim("quality", 0.05), load_pack("sparge").SparsePolicy()
    shape, call = module.Shape(SIZES[1], 1, None), session.Call(*torch.randn(3, 1, *SIZES))
    both = session.Call(*(x.expand(2, -1, -1, -1) for x in call.qkv))

    def run(passes: str, dense: float, levels=range(STEPS, 0, -1)) -> tuple[str, str | None]:
        window = session.SigmaWindow(start=STEPS - dense if dense else float("inf"), end=0.0)
        heads = module.Heads(shape, aim, policy, torch.device("cpu"), (), nullcontext)
        found, earlier = [], set()
        for number, name in enumerate(passes.split()):
            prompts, level = PROMPTS[name[0]], STEPS - float(name[1:].rstrip("'"))
            step = window.step(session.Step(prompts, number), level, list(levels))
            heads.begin_pass(step)
            if step.why_dense is None and not isinstance(heads.of_layer(0, None), str):
                return " ".join(found), name
            given = both if len(prompts) > 1 else call
            for layer in range(2):
                heads.measure(layer, given, None, given.exact, nullcontext)
            new = sorted(heads._measured - earlier)
            found += ["cude"[prompt] + name[1:] for layer, prompt in new if layer == 0]
            earlier = set(heads._measured)
        return " ".join(found), None

    return run


@pytest.mark.parametrize(
    ("dense", "passes", "expected", "sparse_from"),
    [
        # The last dense step, whatever conditionings there are.
        (4, "c0 u0 c1 u1 c2 u2 c3 u3 c4 u4", "c3 u3", "c4"),
        (4, "b0 b1 b2 b3 b4", "c3 u3", "b4"),
        (4, "c0 c1 c2 c3 c4", "c3", "c4"),
        (4, "t0 t1 t2 t3 t4", "c3", "t4"),
        (4, "b0 b1 b2 c3 u3 b4", "c3 u3", "b4"),  # memory got short
        (4, "c0 u0 d0 e0 c1 u1 d1 e1 c2 u2 d2 e2 c3 u3 d3 e3 c4", "c3 u3 d3 e3", "c4"),
        (1, "c0 u0 c1 u1", "c0 u0", "c1"),
        (1, "b0 b1", "c0 u0", "b1"),
        (2, "b0 b1 b2", "c1 u1", "b2"),
        (3, "c0 u0 c1 u1 c2 u2 c3", "c2 u2", "c3"),
        # Without a dense step the first of each prompt.
        (0, "c0 u0 c1 u1", "c0 u0", "c1"),
        (0, "b0 b1", "c0 u0", "b1"),
        (0, "c0 c0.5 c1", "c0", "c0.5"),
        (0, "c16 u16 c17 u17", "c16 u16", "c17"),
        # Heun: at the level of the next step, and there again.
        (4, "b0 b1 b1' b2 b2' b3 b3' b4 b4'", "c3 u3", "b4"),
        (4, "c0 u0 c1 u1 c1' u1' c2 u2 c2' u2' c3 u3 c3' u3' c4", "c3 u3", "c4"),
        # DPM++ 2S: between the levels.
        (4, "b0 b0.5 b1 b1.5 b2 b2.5 b3 b3.5 b4", "c3 u3", "b4"),
        (4, "c0 u0 c0.5 u0.5 c1 u1 c1.5 u1.5 c2 u2 c2.5 u2.5 c3 u3 c3.5 u3.5 c4", "c3 u3", "c4"),
        # A window that starts between two evaluations.
        (3.4, "b0 b0.5 b1 b1.5 b2 b2.5 b3 b3.5", "c3 u3", "b3.5"),
        # Prompts that come late take the settings as they are, and others stay away.
        (4, "c0 c1 c2 c3 u3 c4 u4", "c3 u3", "c4"),
        (4, "c0 c1 c2 c3 u4 c4 u5", "c3", "u4"),
        (4, "c0 u0 c1 u1 c2 c3 c4", "c3", "c4"),  # u is over
        # Schedules that go otherwise.
        (4, "c0 u0 c1 u1 c4 u4 c5", "c4 u4", "c5"),  # the last dense steps never come
        (4, "b0 b1 b2 b3 b1' b2' b3' b4", "c3 u3", "b4"),  # back to more noise
        (4, "b0 b1", "", None),  # cancelled
        # Three windows of context, of which one is enough.
        (4, "b0 b0' b0'' b1 b1' b1'' b2 b2' b2'' b3 b3' b3'' b4", "c3 u3", "b4"),
        (4, "c0 u0 c0' u0' c0'' u0'' c4 u4 c4' u4' c5", "c4 u4", "c5"),
        (4, "c2 u2 c2' u2' c3 u3 c3' u3' c3'' u3'' c4 u4", "c3 u3", "c4"),
        (1, "c0 u0 c0' u0' c0'' u0'' c1 u1 c1' u1'", "c0 u0", "c1"),
    ],
)
def test_what_is_measured(measured, dense, passes, expected, sparse_from):
    assert measured(passes, dense) == (expected, sparse_from)


@pytest.mark.parametrize(
    ("levels", "dense", "passes", "expected", "sparse_from"),
    [
        (range(18, 0, -1), 4, "b2 b3 b4", "c3 u3", "b4"),
        (range(10, 0, -1), 4, "c10 u10 c11", "c10 u10", "c11"),
        ((), 3, "c0 u0 c1 u1 c2 u2 c3", "c0 u0", "c3"),
    ],
    ids=["starts in the window", "starts past it", "a schedule nobody knows"],
)
def test_other_schedules(measured, levels, dense, passes, expected, sparse_from):
    assert measured(passes, dense, levels) == (expected, sparse_from)
