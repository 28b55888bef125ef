"""Captured train steps: bit for bit the eager loop."""

import pytest
import torch
from torch.nn import functional

from mezzo import LossScale, optim

from ...support.tables import thinned
from .loops import OPTIMIZERS, POLICIES, Loop, batches, both, run


@pytest.mark.parametrize("policy, make", thinned(POLICIES, OPTIMIZERS, every=3))
def test_fifty_captured_steps_are_fifty_eager_ones_bit_for_bit(policy, make, bits):
    def between(loop, number):
        loop.schedule.step()
        if number == 20 and make != "torch":
            loop.optimizer.param_groups[0]["weight_decay"] = 0.3

    data = batches(range(50), bad=(0, 7, 8, 23, 49))
    eager, captured, loop = both(lambda: Loop(policy, OPTIMIZERS[make]), data, between)
    assert bits(eager) == bits(captured)
    assert [graph.replays for graph in loop.graphs] == [50]
    stats = captured[2]
    assert (stats.steps, stats.skipped, stats.backoffs) == (50, 5, 5)
    assert stats.growths > 5


@pytest.mark.parametrize("master", ["split", "full"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_split_and_full_masters_are_captured(master, dtype, bits):
    def make():
        return Loop(f"O2,dtype={dtype},emulate=true", lambda groups: optim.AdamW(groups, lr=1e-2, master=master))

    eager, captured, _ = both(make, batches(range(20), bad=(4,)))
    assert bits(eager) == bits(captured)


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


class TwoLosses(Loop):
    def __init__(self):
        super().__init__(num_losses=2)

    def train_step(self, x, y, boost):
        for loss_id, factor in enumerate((1.0, boost)):
            with self.amp.autocast():
                loss = functional.cross_entropy(self.model(x).float(), y)
            self.amp.backward(loss * factor, loss_id=loss_id)
        step = self.amp.step()
        self.amp.zero_grad()
        return loss, step.scale, step.next_scale


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


class ClippedWeights(Loop):
    def __init__(self):
        super().__init__(make=OPTIMIZERS["torch"])

    def train_step(self, x, y, boost):
        out = super().train_step(x, y, boost)
        with torch.no_grad():
            for param in self.model.parameters():
                param.clamp_(-0.05, 0.05)
        return out


class PutBack(Loop):
    def __init__(self):
        super().__init__(restore_buffers=True)


def skip_rate():
    return Loop(scale=LossScale.dynamic(init=2**10, interval=4, hysteresis=3, refill="clean", skip_rate_limit=0.3))


KINDS = {
    "micro-batches": MicroBatches,
    "a penalty": Penalty,
    "two losses": TwoLosses,
    "two steps": TwoSteps,
    "clipped weights": ClippedWeights,
    "buffers put back": PutBack,
    "skip rate": skip_rate,
    "constant scale": lambda: Loop(scale=LossScale.constant(128)),
    "no scale": lambda: Loop(scale=LossScale.none()),
    "no clipping": lambda: Loop(max_grad_norm=None),
    "rounded at random": lambda: Loop(
        "O3,dtype=bfloat16,emulate=true",
        lambda groups: optim.AdamW(groups, lr=1e-2, master=None, rounding="stochastic", state_dtype="bfloat16"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_train_step_does_is_captured(kind, bits):
    data = batches(range(16), bad=(3, 4, 9))
    data[11] = (data[11][0] * float("inf"), *data[11][1:])  # the loss itself is not finite
    eager, captured, loop = both(KINDS[kind], data)
    assert bits(eager) == bits(captured)
    assert captured[2].skipped >= 3
    assert len(loop.graphs) == 1


def test_two_sessions_in_one_train_step(bits):
    def make():
        loop, other = Loop(), Loop(make=OPTIMIZERS["lion"])

        def train_step(x, y, boost):
            return loop.train_step(x, y, boost), other.train_step(x, y, boost * 0.5)

        return loop, other, train_step

    data = batches(range(10), bad=(2,))
    loop, other, train_step = make()
    eager = run(loop, train_step, data), other.state(), other.amp.stats()
    loop, other, train_step = make()
    captured = run(loop, loop.captured(train_step), data), other.state(), other.amp.stats()
    assert bits(eager) == bits(captured)
