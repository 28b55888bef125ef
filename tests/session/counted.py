"""Sessions over parameters whose gradients are all ones, for what is counted of their steps."""

import torch
from torch import nn

from mezzo import LossScale, MixedPrecision, Policy

INF, NAN = float("inf"), float("nan")


class Weights(nn.Module):
    """Parameters whose gradients are all ones."""

    def __init__(self, *names):
        super().__init__()
        self.of = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in names or ("w",)})

    def loss(self):
        return sum(param.float().sum() for param in self.of.values())


def session(rules="none", *, level="O0", names=(), **options):
    model = Weights(*names)
    policy = Policy.parse(level).evolve(loss_scale=rules if isinstance(rules, LossScale) else LossScale.parse(rules))
    return model, MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), policy, **options)


def iterate(model, amp, event=".", poison=INF, where="w"):
    """One step: clean, with an overflow (X), or with a loss that is not finite itself (F)."""
    loss = model.loss()
    amp.backward(loss * poison if event == "F" else loss)
    if event == "X":
        model.of[where].grad[0] = poison
    try:
        return amp.step()
    finally:
        amp.zero_grad()
