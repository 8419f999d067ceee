# SPDX-License-Identifier: Apache-2.0
"""How the calls of a clip's sparse steps are sparse, one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.quality.dit import DenseRun
from benchmarks.quality.modes import Mode, order_of
from sparge.head_settings import HeadSettings
from sparge.order.grid import TokenOrder
from sparge.session import Aim, Call, Pass, Session, TokenLayout


class SameBudgets:
    """One budget in all layers and steps, and the orders that steps take in turn."""

    def __init__(self, run: DenseRun, mode: Mode, head_settings: HeadSettings) -> None:
        device = run.begun.device
        self.run = run
        self._orders = [order_of(mode, run.grid, device, n) for n in range(mode.variants)]
        self._head_settings = head_settings

    def begin_step(self, step: int) -> None:
        self._order = self._orders[(self.run.dense_steps + step) % len(self._orders)]

    def of_call(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[TokenOrder | None, HeadSettings]:
        return self._order, self._head_settings

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        pass


class TunedHeads:
    """Heads that a session measures in the last dense step, with the calls recorded of it."""

    def __init__(self, run: DenseRun, aim: Aim, *, judged: bool = False, draw: int = 0) -> None:
        """judged: compare every call with exact attention, of no use to a timed run. draw: of the
        query blocks that are measured."""
        self.run, self._aim, self._judged, self._draw = run, aim, judged, draw
        self.found: list[Tensor] = []
        """(heads,) float64 of each call of the last run where judged: its relative L2 error."""
        self.head_weight: list[Tensor] = []
        """(heads,) for each call: head weights of the settings."""

    def begin_step(self, step: int) -> None:
        if step == 0:
            self._measure()
        else:
            self._running.end()
        self._running = self._begin(self.run.dense_steps + step)

    def _measure(self) -> None:
        steps, dense = self.run.steps, self.run.dense_steps
        self._session = Session.of(
            self._aim, steps=steps, dense_steps=dense, even_if_slower=True, draw=self._draw
        )
        self.found.clear()
        self.head_weight.clear()
        for step in (dense - 2, dense - 1):  # the first tells how many prompts there are
            measured = self._begin(step)
            for call in self.run.measured_calls:
                measured.attend(call.place, call.layer.q, call.layer.k, call.layer.v)
            measured.end()

    def _begin(self, step: int) -> Pass:
        model = self.run.model
        layout = TokenLayout.of(len(model.blocks), self.run.grid)
        return self._session.begin_step(step, layout, self.run.begun.device)

    def of_call(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[TokenOrder | None, HeadSettings]:
        call, running = Call(q, k, v), self._running
        decision = running.decision(call, in_loop=True)
        heads = (running._terms.get(decision) or running._terms_of(call, decision)).heads
        assert heads is not None
        head_settings = heads.of_layer(layer, None)
        if isinstance(head_settings, str):
            raise RuntimeError(f"Layer {layer} is not sparse: {head_settings}.")
        self._heads = heads
        return heads.order(self._running.step.number), head_settings

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Takes the result of the call that `of_call` was asked for last."""
        if self._heads.measures_again:
            self._heads.measure_again(layer, Call(q, k, v), out)
        if self._judged:
            settings, _, places = self._heads.given[-1]
            exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).double()
            self.found.append(_relative(out, exact))
            self.head_weight.append(settings.weight[places[layer]].double().cpu())

    def mean_error(self) -> float:
        """Mean error of the heads in the last run, by head weight."""
        found, weight = torch.stack(self.found), torch.stack(self.head_weight)
        return float((found * weight).sum() / weight.sum())


def _relative(out: Tensor, exact: Tensor) -> Tensor:
    """(heads,) float64 on the CPU: relative L2 errors."""
    error, norm = (x.square().sum((0, 2, 3)) for x in (out.double() - exact, exact))
    return (error / norm).sqrt().cpu()


Budgets = SameBudgets | TunedHeads


class SparseSteps:
    """The calls of sparse steps, in a model's order."""

    def __init__(self, budgets: Budgets) -> None:
        self._head_settingss = budgets
        self._step = -1

    def of_call(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[TokenOrder | None, HeadSettings]:
        """Token order and head settings of the next call, which is one of `layer`.

        The first layer begins a step, and after the last step comes another run.
        """
        if layer == 0:
            run = self._head_settingss.run
            self._step = (self._step + 1) % (run.steps - run.dense_steps)
            self._head_settingss.begin_step(self._step)
        return self._head_settingss.of_call(layer, q, k, v)
