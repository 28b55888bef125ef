"""Training loops that are captured, and the same ones run eagerly."""

import copy
import dataclasses

import torch
from torch import nn
from torch.nn import functional

from mezzo import LossScale, MixedPrecision, Policy, optim
from mezzo.session.capture import Captured

from .host_graph import HostGraph

POLICIES = [
    Policy.parse(f"{level},dtype={dtype},emulate=true") for level in ("O1", "O2") for dtype in ("float16", "bfloat16")
]

SCALE = LossScale.dynamic(init=2**10, interval=4, hysteresis=1)

OPTIMIZERS = {
    "adamw": lambda groups, **o: optim.AdamW(groups, lr=1e-2, **o),
    "sgd": lambda groups, **o: optim.SGD(groups, lr=5e-2, momentum=0.9, nesterov=True, **o),
    "lion": lambda groups, **o: optim.Lion(groups, lr=1e-3, weight_decay=0.1, **o),
    "torch": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), fused=True, capturable=True),
}


class Loop:
    """A model, its session, and a train step with all that it decides."""

    def __init__(self, policy="O2,dtype=bfloat16,emulate=true", make=OPTIMIZERS["adamw"], scale=SCALE, **options):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
        params = list(self.model.parameters())
        made = make([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}])
        self.optimizers = made if isinstance(made, list) else [made]
        self.optimizer = self.optimizers[0]
        policy = dataclasses.replace(Policy.of(policy), loss_scale=scale)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.amp = MixedPrecision(self.model, self.optimizers, policy, **{"max_grad_norm": 0.5, **options})

    def train_step(self, x, y, boost):
        with self.amp.autocast():
            loss = functional.cross_entropy(self.model(x).float(), y)
        self.amp.backward(loss * boost)
        step = self.amp.step()
        self.amp.zero_grad()
        return {"loss": loss, "step": (step.skipped, step.scale, step.next_scale, step.grad_norm)}

    def captured(self, step=None):
        self.graph = HostGraph()
        return Captured(step or self.train_step, self.amp, self.graph)

    def state(self):
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return copy.deepcopy((self.model.state_dict(), optimizers, self.amp.state_dict()))


def batch(number, boost=1.0):
    """A batch; a boost of 1e38 makes gradients overflow under any scale, and the loss itself stays finite."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    return x, y, torch.tensor(boost)


def batches(steps, bad=()):
    return [batch(number, 1e38 if number in bad else 1.0) for number in steps]


def detached(output):
    return torch.utils._pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)


def run(loop, call, data, between=lambda loop, number: None):
    history = []
    for number, args in enumerate(data):
        history.append(copy.deepcopy(detached(call(*args))))
        between(loop, number)
    return history, loop.state(), loop.amp.stats()


def both(make, data, between=lambda loop, number: None):
    """The same steps, plain and captured, with what happens between them; both histories, and the captured loop."""
    eager, other = make(), make()
    captured = other.captured()
    return run(eager, eager.train_step, data, between), run(other, captured, data, between), other
