"""Captured train steps as real CUDA graphs: the plain loop's results, no host sync, and refusals."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import LossScale, MixedPrecision, Policy, optim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICIES = [f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]
OPTIMIZERS = {
    "adamw": lambda params: optim.AdamW(params, lr=1e-3),
    "sgd": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9),
    "lion": lambda params: optim.Lion(params, lr=1e-4),
    "torch": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(1e-3, device="cuda"), fused=True, capturable=True
    ),
}


class Loop:
    def __init__(self, policy="O2,dtype=bfloat16", make=OPTIMIZERS["adamw"], *, dropout=0.0):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 16)
            self.model = nn.Sequential(*layers).cuda()
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)
        scale = LossScale.dynamic(init=2.0**10, interval=4)
        policy = dataclasses.replace(Policy.parse(policy), loss_scale=scale)
        self.amp = MixedPrecision(self.model, self.optimizer, policy, max_grad_norm=1.0)

    def train_step(self, x, y, boost):
        with self.amp.autocast():
            loss = functional.cross_entropy(self.model(x).float(), y)
        self.amp.backward(loss * boost)
        step = self.amp.step()
        self.amp.zero_grad()
        return loss, step.skipped, step.scale, step.next_scale

    def captured(self):
        return mezzo.capture(self.train_step, self.amp)

    def recorded(self):
        """A captured step whose graph is there."""
        captured = self.captured()
        for number in range(4):
            captured(*batch(number))
        return captured


def batch(number, boost=1.0, device="cuda"):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(128, 64, generator=generator)
    tensors = x, x[:, :16].argmax(1), torch.tensor(boost)
    return tuple(tensor.to(device) for tensor in tensors)


def run(loop, call, steps=30, bad=(3, 4, 17)):
    history = []
    for number in range(steps):
        history.append([value.detach().clone() for value in call(*batch(number, 1e38 if number in bad else 1.0))])
        loop.schedule.step()
    return [torch.stack(column) for column in zip(*history, strict=True)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_thirty_captured_steps_are_thirty_eager_ones(policy, make):
    eager, other = (Loop(policy, OPTIMIZERS[make]) for _ in range(2))
    captured = other.captured()
    assert captured._graph is not None
    losses, *rest = run(eager, eager.train_step)
    losses_captured, *rest_captured = run(other, captured)
    torch.testing.assert_close(losses_captured, losses, rtol=1e-3, atol=1e-3)
    for one, two in zip(rest, rest_captured, strict=True):  # skipped, scales
        assert torch.equal(one, two)
    for one, two in zip(eager.amp.master_params(), other.amp.master_params(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-2, atol=1e-3)
    assert eager.amp.stats() == other.amp.stats()
    assert other.amp.stats().skipped == 3


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_call_makes_no_host_sync(make):
    loop = Loop(make=OPTIMIZERS[make])
    captured = loop.recorded()
    data = [batch(number, 1e38 if number == 5 else 1.0) for number in range(40)]
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for args in data:
            captured(*args)
            loop.schedule.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loop.amp.stats().steps == 44


def test_dropout_draws_anew_in_each_replay():
    loop = Loop(dropout=0.5)
    captured = mezzo.capture(lambda x: (loop.train_step(*x), loop.model(x[0]).float().sum())[1], loop.amp)
    sums = {captured(batch(0, 1e38)).item() for _ in range(8)}  # every step is skipped: only the masks differ
    assert len(sums) == 8


def test_batches_in_pinned_host_memory_are_copied():
    loop = Loop()
    data = [tuple(tensor.pin_memory() for tensor in batch(number, device="cpu")) for number in range(8)]
    captured = loop.captured()
    assert captured._graph is not None
    assert all(torch.isfinite(captured(*args)[0]) for args in data)


def late(loop, ask, calls):
    """A train step that asks the device from some call on."""
    seen = []

    def train_step(*data):
        out = loop.train_step(*data)
        seen.append(None)
        if len(seen) > calls:
            ask(out[0])
        return out

    return mezzo.capture(train_step, loop.amp)


@pytest.mark.parametrize("ask", [lambda loss: loss.item(), print, lambda loss: torch.tensor(1.0, device="cuda")])
@pytest.mark.parametrize("calls", [0, 3])
def test_asking_the_device_is_refused_and_explained(ask, calls):
    loop = Loop()
    captured = late(loop, ask, calls)
    for number in range(calls or 2):
        captured(*batch(number))
    steps = loop.amp.stats().steps
    before = [param.detach().clone() for param in loop.model.parameters()]
    with pytest.raises(RuntimeError) as caught:
        captured(*batch(0))
    assert "nothing may wait for the device" in caught.value.__notes__[0]
    if calls:  # in the graph, of which nothing has run
        assert loop.amp.stats().steps == steps
        assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    else:
        assert torch.isfinite(loop.recorded()(*batch(0))[0])  # the device is as usable as before


def test_a_sync_that_only_a_capture_sees_leaves_stream_and_random_numbers_usable():
    loop = Loop(dropout=0.5)
    captured = late(loop, lambda loss: torch.cuda.synchronize(), 0)
    for number in range(3):
        captured(*batch(number))
    before, device = torch.cuda.current_stream(), torch.cuda.current_device()
    with pytest.raises(RuntimeError):
        captured(*batch(3))
    assert (torch.cuda.current_stream(), torch.cuda.current_device()) == (before, device)
    assert torch.isfinite(torch.randn(4, device="cuda")).all()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch itself says it, once a process
def test_a_loss_that_was_kept_breaks_no_graph_in_silence():
    """Its graph ties gradients to the stream of that step: what a capture says of it, or a graph that is right."""
    loop = Loop()
    loss = loop.train_step(*batch(0))[0]
    captured, refused = loop.captured(), ""
    try:
        for number in range(5):
            before = [param.detach().clone() for param in loop.amp.master_params()]
            captured(*batch(number))
    except RuntimeError as error:
        refused = str(error.__notes__)
    moved = not any(torch.equal(a, b) for a, b in zip(before, loop.amp.master_params(), strict=True))
    assert "the loss of an earlier step" in refused or moved
    assert torch.isfinite(loss)


@pytest.mark.slow
def test_compiled_models_are_captured():
    eager, other = Loop(), Loop()
    other.model.compile()
    captured = other.captured()
    losses, losses_captured = run(eager, eager.train_step)[0], run(other, captured)[0]
    torch.testing.assert_close(losses_captured, losses, rtol=2e-2, atol=2e-2)
