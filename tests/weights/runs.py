"""Training in mezzo's styles, and beside it with FP32 masters that are kept by hand: the oracle of optimizers."""

import contextlib
import copy

import torch

import mezzo
from mezzo import MixedPrecision, prepare

from .values import BF16, kept, low_of

SCALE = 1024.0


class ByHand:
    """FP32 masters, rounded into a model stored low, and an optimizer over them: the oracle."""

    def __init__(self, model, make, dtype, scale=1.0):
        self.model, self.dtype, self.scale = copy.deepcopy(model), dtype, scale
        self.masters = copy.deepcopy(model)
        self.pairs = list(zip(self.model.parameters(), self.masters.parameters(), strict=True))
        for param, master in self.pairs:
            master.data = kept(master, dtype)
            param.data = low_of(master, dtype)
            param.grad_dtype = dtype
        self.optimizer = make(self.masters)

    def step(self, number, skipped=False):
        (self.model(number) * self.scale).backward()
        for param, master in self.pairs:
            if param.grad is not None:
                master.grad = param.grad.float() / self.scale
                param.grad = None
        if not skipped:
            self.optimizer.step()
            self.store()

    def store(self):
        for param, master in self.pairs:
            master.data.copy_(kept(master, self.dtype))
            param.data.copy_(low_of(master, self.dtype))


class Ours:
    """The same with mezzo, in one of its styles."""

    def __init__(self, model, make, dtype, style, scale=SCALE):
        self.model, self.style = copy.deepcopy(model), style
        self.optimizer = make(self.model)
        policy = f"O2,dtype={'bfloat16' if dtype == BF16 else 'float16'},emulate=true"
        if style == "adopt":
            self.prepared = prepare(self.model, policy)
            self.prepared.adopt(self.optimizer)
            self.read = self.prepared.halves.read
            self.halves = self.prepared.halves
        else:
            start = MixedPrecision if style == "five lines" else mezzo.attach
            self.amp = start(self.model, self.optimizer, f"{policy},loss_scale={scale}")
            (self.halves,) = self.amp.weights.halves()
            self.read = self.halves.read

    def step(self, number, skipped=False):
        if self.style == "five lines":
            with self.amp.autocast():
                loss = self.model(number, skipped)
            self.amp.backward(loss)
            assert bool(self.amp.step().skipped) == skipped
            self.amp.zero_grad()
        elif self.style == "attach":
            self.model(number, skipped).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.model(number).backward()
            if not skipped:
                self.optimizer.step()
            self.optimizer.zero_grad()

    def end(self):
        if self.style == "attach":
            self.amp.detach()


@contextlib.contextmanager
def both(model, make, dtype, style="five lines"):
    ours = Ours(model, make, dtype, style)
    try:
        yield ours, ByHand(model, make, dtype, 1.0 if style == "adopt" else SCALE)
    finally:
        ours.end()


def assert_equal(ours, by_hand):
    """Weights and the optimizer's state, bit for bit."""
    for (name, param), (low, master) in zip(ours.model.named_parameters(), by_hand.pairs, strict=True):
        assert torch.equal(ours.read(param), master), name
        assert torch.equal(param, low), name
    assert_same_states(ours.optimizer, by_hand.optimizer)


def assert_same_states(one, two):
    one, two = one.state_dict()["state"], two.state_dict()["state"]
    assert one.keys() == two.keys()
    for key, state in one.items():
        assert state.keys() == two[key].keys()
        for name, value in state.items():
            wanted = two[key][name]
            assert type(value) is type(wanted), name
            if isinstance(value, torch.Tensor):
                assert value.dtype == wanted.dtype, name
                assert torch.equal(value, wanted), name
            elif not isinstance(value, list):
                assert value == wanted, name
