"""A run that is saved in the middle of an accumulation window goes on bit for bit: the whole table.

Policy × optimizer × backward passes before saving × order of loading. The oracle is the run itself, which goes on.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from mezzo import MixedPrecision, optim
from mezzo.step.executors.cpp.launch import Cpp
from mezzo.step.executors.portable import Portable

from ...support.tables import thinned

LOW = {"fp16": "dtype=float16,emulate=true", "bf16": "dtype=bfloat16,emulate=true"}
POLICIES = {
    "O0": "O0",
    **{f"{level} {name}": f"{level},{text}" for level in ("O1", "O2", "O3") for name, text in LOW.items()},
}
ORDERS = list(itertools.permutations(("model", "optimizer", "amp")))
TORCHS = {
    "torch adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
    "torch fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4, fused=True),
    "torch sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.25),
}
RULES = {
    "adamw": (optim.AdamW, {"lr": 0.01}),
    "adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.25}),
    "lion": (optim.Lion, {"lr": 0.003}),
}
MASTERS = [{"master": "split"}, {"master": "full"}]
BARE = [{"master": None, "rounding": rounding} for rounding in ("nearest", "stochastic", "kahan")]
STATES = [{"state_dtype": "float32"}, {"state_dtype": "bfloat16"}]


def ours(stored):
    """Every rule under every way of storing weights and moments."""
    for (name, (kind, options)), store, state in itertools.product(RULES.items(), stored, STATES):
        given = {**options, **store, **state}
        words = " ".join(str(word) for word in (*store.values(), *state.values()))
        yield f"{name} {words}", lambda params, kind=kind, given=given: kind(params, **given)


def optimizers(policy, low_model):
    if low_model:  # an FP32 policy over weights that are low already: only an optimizer of mezzo's may train them
        return dict(ours([*MASTERS, BARE[2]]))
    if policy.startswith("O2"):
        return TORCHS | dict(ours(MASTERS))
    # Under O3 no master is kept whatever is asked for, and FP32 weights need none.
    return TORCHS | dict(ours([MASTERS[0], *BARE[1:]] if policy.startswith("O3") else MASTERS[:1]))


class Run:
    def __init__(self, policy, make, dtype=torch.float32):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
        self.dtype = dtype
        self.optimizer = make(self.model.parameters())
        self.amp = MixedPrecision(self.model, self.optimizer, POLICIES[policy], max_grad_norm=0.5)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "amp": self.amp}

    def backward(self, number):
        x = torch.sin(torch.arange(24.0) * (number + 1)).view(4, 6).to(self.dtype)
        with self.amp.autocast():
            loss = self.model(x).float().square().mean()
        self.amp.backward(loss)

    def window(self, numbers):
        for number in numbers:
            self.backward(number)
        self.amp.step()
        self.amp.zero_grad()

    def saved(self):
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load(self, saved, order):
        saved = copy.deepcopy(saved)
        for name in order:
            self.parts[name].load_state_dict(saved[name])


#: Backward passes before saving, and the orders of loading after them; each order comes twice.
WINDOWS = {1: ORDERS[::2], 2: ORDERS, 3: ORDERS[1::2]}


def check_table(policy, make, bits, dtype=torch.float32, windows=WINDOWS):
    run, used = Run(policy, make, dtype), Run(policy, make, dtype)
    used.window([90, 91])
    run.window([0])
    for done, orders in windows.items():
        for number in range(done):
            run.backward(number)
        saved = copy.deepcopy(run.saved())
        for each in (rest := ([7], [8, 9], [10])):
            run.window(each)
        expected = bits(run.saved())
        for place, order in enumerate(orders):
            again = used if place % 2 else Run(policy, make, dtype)  # one that trained already, or a new process's
            again.load(saved, order)
            for each in rest:
                again.window(each)
            assert bits(again.saved()) == expected, (done, order)


def check_all(every, policy, bits, **options):
    for name, make in every.items():
        try:
            check_table(policy, make, bits, **options)
        except Exception as error:
            error.add_note(f"{policy}, {name}")
            raise


@pytest.mark.parametrize("policy, part", thinned(POLICIES, range(4), every=7))
def test_a_resume_in_mid_window_is_bit_exact(policy, part, bits):
    """A quarter of the optimizers each, and each order of loading once: two after each number of backward passes."""
    every = optimizers(policy, low_model=False)
    windows = {done: ORDERS[done - 1 :: 3] for done in WINDOWS}
    check_all({name: every[name] for name in list(every)[part::4]}, policy, bits, windows=windows)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_resume_in_mid_window_is_bit_exact_in_every_order(policy, bits):
    check_all(optimizers(policy, low_model=False), policy, bits)


@pytest.mark.parametrize("dtype, part", thinned([torch.float16, torch.bfloat16], range(2), every=2))
def test_weights_that_were_low_before_the_session_resume_too(dtype, part, bits):
    every = optimizers("O0", low_model=True)
    some = [name for name in every if name.startswith(("adamw", "sgd"))][part::2]
    check_all({name: every[name] for name in some}, "O0", bits, dtype=dtype, windows={2: ORDERS[::3]})


@pytest.mark.parametrize("executor", [Portable(), Cpp()], ids=["blocked", "cpp"])
@pytest.mark.parametrize("policy", ["O2 bf16", "O2 fp16", "O3 bf16"])
def test_whatever_executor_carries_the_step_out(monkeypatch, policy, executor, bits):
    """Weights as small as these would all take the same one."""
    monkeypatch.setattr("mezzo.optim.optimizer.executor_for", lambda *_: executor)
    every = optimizers(policy, low_model=False)
    some = [name for name in every if name.startswith(("adamw", "sgd")) and name.endswith("float32")]
    check_all({name: every[name] for name in some}, policy, bits, windows={2: ORDERS[::2]})
