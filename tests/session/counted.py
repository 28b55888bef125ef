"""Sessions over parameters whose gradients are all ones, for what is counted of their steps."""

from mezzo import LossScale, Policy

from .loops import INF, Weights, over


def session(rules="none", *, level="O0", params=1, **options):
    model = Weights(*[2] * params)
    policy = Policy.parse(level).evolve(loss_scale=rules if isinstance(rules, LossScale) else LossScale.parse(rules))
    return model, over(model, policy, **options)[1]


def iterate(model, amp, event=".", poison=INF, where=0):
    """One step: clean, with an overflow (X), or with a loss that is not finite itself (F)."""
    loss = model.loss(*[1.0] * len(model.each))
    amp.backward(loss * poison if event == "F" else loss)
    if event == "X":
        model.each[where].grad[0] = poison
    try:
        return amp.step()
    finally:
        amp.zero_grad()
