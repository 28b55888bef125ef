"""Captured train steps: bit for bit the plain loop, its first calls real steps and all others replays."""

import pytest
import torch
from torch.nn import functional

from mezzo import LossScale, optim

from ...support.refusals import bits
from .loops import OPTIMIZERS, POLICIES, Loop, batches, both, run


@pytest.mark.parametrize("policy, make", list(zip(POLICIES, OPTIMIZERS, strict=True)))
def test_captured_steps_are_eager_ones_bit_for_bit(policy, make):
    def between(loop, number):
        loop.schedule.step()
        if number == 9 and make != "torch":
            loop.optimizer.param_groups[0]["weight_decay"] = 0.3

    data = batches(range(20), bad=(0, 6, 7, 19))
    eager, captured, loop = both(lambda: Loop(policy, OPTIMIZERS[make]), data, between)
    assert bits(eager) == bits(captured)
    assert (loop.graph.runs, loop.graph.replays) == (3, 17)
    stats = captured[2]
    assert (stats.steps, stats.skipped, stats.backoffs) == (20, 4, 4)
    assert stats.growths == 3


class MicroBatches(Loop):
    def train_step(self, x, y, boost):
        for part in range(4):
            with self.amp.autocast():
                loss = functional.cross_entropy(self.model(x[part::4]).float(), y[part::4])
            self.amp.backward(loss / 4 * boost)
        step = self.amp.step()
        self.amp.zero_grad()
        return loss, step.skipped


class Penalty(Loop):
    def train_step(self, x, y, boost):
        x = x.clone().requires_grad_()
        with self.amp.autocast():
            out = self.model(x)
            loss = functional.cross_entropy(out.float(), y) * boost
        (slope,) = self.amp.grad(out.float().sum(), x, create_graph=True)
        with self.amp.autocast():
            loss = loss + slope.square().sum()
        self.amp.backward(loss)
        step = self.amp.step()
        self.amp.zero_grad()
        return loss, step.skipped, slope


class TwoSteps(Loop):
    """Two steps in one train step, the first with a look at the gradients, and gradients cleared at the beginning."""

    def train_step(self, x, y, boost):
        norms = []
        for factor in (boost, 1.0):
            self.amp.zero_grad()
            with self.amp.autocast():
                loss = functional.cross_entropy(self.model(x).float(), y)
            self.amp.backward(loss * factor)
            if factor is boost:
                self.amp.unscale_()
                for param in self.amp.master_params():
                    param.grad.clamp_(-1e-3, 1e-3)
            norms.append(self.amp.step().grad_norm)
        return norms


class ClearedToZeros(Loop):
    def train_step(self, x, y, boost):
        out = super().train_step(x, y, boost)
        self.amp.zero_grad(set_to_none=False)
        return out


class TwoOptimizers(Loop):
    """Each steps by itself, under one scale."""

    def __init__(self):
        super().__init__(make=lambda groups: [optim.AdamW(groups[:1], lr=1e-2), optim.Lion(groups[1:], lr=1e-3)])

    def train_step(self, x, y, boost):
        steps = []
        for optimizer, factor in zip(self.optimizers, (1.0, boost), strict=True):
            with self.amp.autocast():
                loss = functional.cross_entropy(self.model(x).float(), y)
            self.amp.backward(loss * factor, optimizer)
            step = self.amp.step(optimizer)
            steps.append((step.skipped, step.scale, step.next_scale))
        self.amp.zero_grad()
        return steps


class ClearedFirst(Loop):
    """Gradients of the last call are there when it begins, and are no part of the graph."""

    def train_step(self, x, y, boost):
        self.amp.zero_grad()
        with self.amp.autocast():
            loss = functional.cross_entropy(self.model(x).float(), y)
        self.amp.backward(loss * boost)
        step = self.amp.step()
        return loss, step.skipped


class Opened(Loop):
    """A region that was made before."""

    def __init__(self):
        super().__init__()
        self.region = self.amp.autocast()

    def train_step(self, x, y, boost):
        with self.region:
            loss = functional.cross_entropy(self.model(x).float(), y)
        self.amp.backward(loss * boost)
        self.amp.step()
        self.amp.zero_grad()
        return loss


LOOPS = {
    "micro-batches": MicroBatches,
    "a penalty": Penalty,
    "two steps": TwoSteps,
    "gradients cleared to zeros": ClearedToZeros,
    "two optimizers": TwoOptimizers,
    "gradients cleared first": ClearedFirst,
    "a region made before": Opened,
    "constant scale": lambda: Loop(scale=LossScale.constant(128)),
    "no scale": lambda: Loop(scale=LossScale.none()),
    "no clipping": lambda: Loop(max_grad_norm=None),
    "moments rounded at random": lambda: Loop(
        "O3,dtype=bfloat16,emulate=true",
        lambda groups: optim.AdamW(groups, lr=1e-2, state_dtype="bfloat16"),
    ),
    "moments in codes": lambda: Loop(make=lambda groups: optim.AdamW(groups, lr=1e-2, state_dtype="int8")),
}


@pytest.mark.parametrize("name", LOOPS)
def test_whatever_a_train_step_does_is_captured(name):
    data = batches(range(11), bad=(3, 4, 7))
    data[9] = (data[9][0] * float("inf"), *data[9][1:])  # the loss itself is not finite
    eager, captured, loop = both(LOOPS[name], data)
    assert bits(eager) == bits(captured)
    assert captured[2].skipped >= 3
    assert loop.graph.replays == 8


def test_steps_without_the_graph_come_in_between():
    eager, other = (Loop("O2,dtype=float16,emulate=true") for _ in range(2))
    captured, turn = other.captured(), []

    def alternating(*data):
        turn.append(len(turn) // 3 % 2)
        return (captured, other.train_step)[turn[-1]](*data)

    data = batches(range(18), bad=(2, 3, 5, 6, 8, 11))
    assert bits(run(eager, eager.train_step, data)) == bits(run(other, alternating, data))
    assert (other.graph.runs, other.graph.replays) == (3, 6)


def test_torchs_fused_sgd_is_recorded_once_it_has_momentum():
    def make():
        return Loop(make=lambda groups: torch.optim.SGD(groups, lr=torch.tensor(1e-2), momentum=0.9, fused=True))

    eager, captured, loop = both(make, batches(range(12), bad=(0, 1, 2, 3, 4, 8)))
    assert bits(eager) == bits(captured)
    assert (loop.graph.runs, loop.graph.replays) == (6, 6)
