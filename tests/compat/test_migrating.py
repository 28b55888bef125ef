"""The migration page: programs as their systems teach them train as those by hand, and scales of checkpoints go on."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import mezzo
from mezzo.compat import paddle
from mezzo.compat.apex import amp
from mezzo.compat.torch import GradScaler, autocast

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()


def programs(section):
    """The Python blocks of a section of the page."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def trained(program):
    """Run a program from seed 0: its FP32 weights at the start, how far they went, its last loss, its stats."""
    torch.manual_seed(0)
    names = {"__name__": "__snippet__"}
    first, rest = program.split("\nbatches = ")
    exec(compile(first, "snippet", "exec"), names)
    before = flat(names["model"])
    exec(compile(f"batches = {rest}", "snippet", "exec"), names)
    stats = None
    if isinstance(session := names.get("amp"), mezzo.MixedPrecision):
        stats = session.stats()
        session.close()
    return before, flat(names["model"]) - before, names["loss"].item(), stats


def flat(model):
    return torch.cat([param.detach().flatten().clone() for param in model.parameters()])


#: What stands for apex's calls: the five lines, under the policy that the page names.
FIVE_LINES = """
import mezzo
amp = mezzo.MixedPrecision(model, optimizer, "O2,fp16", max_grad_norm=1.0)
for x, y in batches:
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)
    step = amp.step()
    amp.zero_grad()
"""


@pytest.mark.parametrize("section", ["torch.amp", "apex"])
def test_programs_of_a_section_take_the_steps_of_the_five_lines(section):
    theirs, *by_hand = programs(section)
    if section == "apex":
        made, _ = theirs.split("\nmodel, optimizer = amp.initialize")
        assert 'under `"O2,fp16"`' in PAGE
        by_hand = [made + FIVE_LINES]
    by_hand = by_hand[0]
    before, moved, loss, _ = trained(theirs)
    same, mine, own_loss, stats = trained(by_hand)
    assert torch.equal(before, same)
    assert stats.steps > stats.skipped == 0
    assert moved.norm() > 1e-3
    assert (moved - mine).norm() < 1e-3 * moved.norm()  # apex unscales before it clips: sums in another order
    assert loss == pytest.approx(own_loss, rel=1e-3)


# Checkpoints of the three systems, each one step from a change of its scale -----------------------------------------

TORCH = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 1999}
APEX = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 1999}}
PADDLE = {
    "scale": np.array([512.0], dtype=np.float32), "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 2000,
    "decr_every_n_nan_or_inf": 1, "incr_count": 1999, "decr_count": 0, "use_dynamic_loss_scaling": True,
}  # fmt: skip


class Session:
    """The five-line loop."""

    def __init__(self, loss_scale):
        self.model, optimizer = fresh()
        self.amp = mezzo.MixedPrecision(self.model, optimizer, f"O1,dtype=bfloat16,loss_scale={loss_scale}")
        self.load = self.amp.load_state_dict

    def scale_after(self, overflow):
        with self.amp.autocast():
            loss = loss_of(self.model, 1e38 if overflow else 1.0)  # finite, and its scaled gradient is not
        self.amp.backward(loss)
        return float(self.amp.step().next_scale)


class TorchStyle:
    def __init__(self, scaler, autocast):
        (self.model, self.optimizer), self.scaler, self.autocast = fresh(), scaler, autocast
        self.load = scaler.load_state_dict

    def scale_after(self, overflow):
        with self.autocast():
            loss = loss_of(self.model)
        self.scaler.scale(loss).backward()
        plant(self.model, overflow)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(np.squeeze(self.scaler.state_dict()["scale"]))


class ApexStyle:
    def __init__(self):
        self.model, self.optimizer = amp.initialize(*fresh(), opt_level="O1", verbosity=0)
        self.load = amp.load_state_dict

    def scale_after(self, overflow):
        with amp.scale_loss(loss_of(self.model), self.optimizer) as scaled_loss:
            scaled_loss.backward()
            plant(self.model, overflow)
        self.optimizer.step()
        return amp.state_dict()["loss_scaler0"]["loss_scale"]


def fresh():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_of(model, x=1.0):
    model.zero_grad()
    return model(torch.full((1, 2), x)).float().sum()


def plant(model, overflow):
    if overflow:
        model.weight.grad.fill_(float("inf"))


LOOPS = {
    "torch, import changed": (TORCH, lambda: TorchStyle(GradScaler("cpu"), lambda: autocast("cpu", torch.bfloat16))),
    "torch, by hand": (TORCH, lambda: Session(mezzo.LossScale.like("torch"))),
    "Paddle, import changed": (PADDLE, lambda: TorchStyle(paddle.GradScaler(), paddle.auto_cast)),
    "Paddle, by hand": (PADDLE, lambda: Session(mezzo.LossScale.like("paddle"))),
    "apex, import changed": (APEX, ApexStyle),
    "apex, by hand": (APEX, lambda: Session(mezzo.LossScale.like("apex"))),
}


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_a_checkpoint_s_scale_goes_on(name, overflow):
    state, make = LOOPS[name]
    loop = make()
    loop.load(state)
    assert loop.scale_after(overflow) == (256.0 if overflow else 1024.0)
    assert loop.scale_after(False) == (256.0 if overflow else 1024.0)
