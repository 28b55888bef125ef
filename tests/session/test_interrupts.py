"""A step happens whole or not at all, whichever of mezzo's lines an interrupt comes at."""

import contextlib
import copy
import itertools
import os
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import MixedPrecision

HOME = os.path.dirname(mezzo.__file__)
INF = float("inf")


class Interrupt:
    """Raise KeyboardInterrupt before the n-th line of mezzo's, as a signal between two operations does."""

    def __init__(self, number):
        self.left, self.where = number, None

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def call(self, frame, event, _):
        return self.line if frame.f_code.co_filename.startswith(HOME) else None

    def line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{os.path.relpath(frame.f_code.co_filename, HOME)}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.line


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def torch_adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def torch_fused(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def torch_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mezzo_adamw(params, **options):
    return mezzo.optim.AdamW(params, lr=0.01, **options)


def mezzo_sgd(params):
    return mezzo.optim.SGD(params, lr=0.1, momentum=0.9)


def mezzo_full(params):
    return mezzo.optim.AdamW(params, lr=0.01, master="full")


def mezzo_lion(params):
    return mezzo.optim.Lion(params, lr=0.01, state_dtype="bfloat16")


def mezzo_unmastered(params):
    return mezzo.optim.AdamW(params, lr=0.01, master=None, rounding="kahan")


DYNAMIC = "loss_scale=dynamic(init=1024,interval=2)"


class Training:
    """A session just before a step that follows another one."""

    def __init__(self, policy, kinds, micro_batches=1, overflow=False, **options):
        self.model = network()
        params = list(self.model.parameters())
        self.optimizers = [kind(params[number :: len(kinds)]) for number, kind in enumerate(kinds)]
        self.amp = MixedPrecision(self.model, self.optimizers, policy, **options)
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in self.optimizers]
        self.backward(0)
        self.amp.step()
        self.amp.zero_grad()
        for number in range(micro_batches):
            self.backward(number + 1)
        if overflow:
            next(p for p in params if p.grad is not None).grad.view(-1)[0] = INF

    def backward(self, number):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator)
        with self.amp.autocast():
            loss = functional.cross_entropy(self.model(x).float(), y)
        self.amp.backward(loss)

    def facts(self):
        """All that a step changes."""
        amp = self.amp
        states = [state for o in self.optimizers for state in o.state_dict()["state"].values()]
        stats = amp.stats()
        return copy.deepcopy(
            {
                "weights": [p.detach() for p in self.model.parameters()],
                "masters": [p.detach() for p in amp.master_params()],
                "states": states,
                "stats": (stats.steps, stats.skipped, stats.scale, stats.growths, stats.backoffs),
                "scale": [scaler.state_dict() for scaler in amp._core.scalers],
                "windows": [group.window is None for group in amp._core.groups],
                "rates": [group["lr"] for o in self.optimizers for group in o.param_groups],
                "flags": [name for o in self.optimizers for name in vars(o) if name in ("found_inf", "grad_scale")],
            }
        )


def same(one, other):
    flat_one, flat_other = (torch.utils._pytree.tree_leaves(each) for each in (one, other))
    return len(flat_one) == len(flat_other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(flat_one, flat_other, strict=True)
    )


def every_line(make, step, stride=1, start=1):
    """Interrupt a step at each line: before it everything is as it was, and a second call takes it; or it is whole."""
    plain = make()
    before = plain.facts()
    step(plain)
    after = plain.facts()
    assert not same(before, after)
    found = {"before": 0, "whole": 0}
    for number in itertools.count(start, stride):
        training = make()
        with Interrupt(number) as interrupt, contextlib.suppress(KeyboardInterrupt):
            step(training)
        if interrupt.where is None:
            return found
        if training.amp._core.groups[0].window is not None:
            found["before"] += 1
            step(training)
        else:
            found["whole"] += 1
        assert same(training.facts(), after), interrupt.where
        training.amp.zero_grad()
        training.backward(9)
        training.amp.step()
    raise AssertionError


def take(training):
    training.amp.step()


CASES = {
    "O0": ("O0", [torch_adamw], {}),
    "O0 scaled": (f"O0,{DYNAMIC}", [torch_fused], {"max_grad_norm": 0.1}),
    "O1": (f"O1,emulate=true,{DYNAMIC}", [torch_adamw], {"max_grad_norm": 0.1}),
    "O2": (f"O2,emulate=true,{DYNAMIC}", [torch_adamw], {}),
    "O2 fused": (f"O2,emulate=true,{DYNAMIC}", [torch_fused], {"micro_batches": 2}),
    "O2 overflow": (f"O2,emulate=true,{DYNAMIC}", [torch_adamw], {"overflow": True}),
    "O2 mezzo": (f"O2,emulate=true,{DYNAMIC}", [mezzo_adamw], {"max_grad_norm": 0.1}),
    "O2 full": ("O2,dtype=bfloat16,emulate=true", [mezzo_full], {"micro_batches": 2}),
    "O2 lion": ("O2,dtype=bfloat16,emulate=true", [mezzo_lion], {}),
    "O3": ("O3,dtype=bfloat16,emulate=true", [mezzo_unmastered], {}),
    "two": (f"O2,emulate=true,{DYNAMIC}", [mezzo_adamw, torch_sgd], {"max_grad_norm": 0.1}),
    "two of torch": (f"O1,emulate=true,{DYNAMIC}", [torch_adamw, torch_sgd], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_some_lines_leaves_a_whole_step_or_none(case):
    """At every 29th line, from another one on in each case."""
    policy, kinds, options = CASES[case]
    start = 1 + 7 * list(CASES).index(case) % 29
    found = every_line(lambda: Training(policy, kinds, **options), take, stride=29, start=start)
    assert sum(found.values()) > 5


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line_leaves_a_whole_step_or_none(case):
    policy, kinds, options = CASES[case]
    found = every_line(lambda: Training(policy, kinds, **options), take)
    assert min(found.values()) > 10
