"""What each update rule may do to a weight and its moments, in the arithmetic of a format."""

import math
from dataclasses import dataclass

import numpy as np

from .near import Near

LR = 2.0**-5
BETA1, BETA2, EPS, DECAY, MOMENTUM = 0.5, 0.75, 2.0**-8, 0.125, 0.5


@dataclass
class Update:
    """What a step may do to one weight."""

    exact: Near
    states: dict


def _state(weight, name, like):
    value = weight.states.get(name)
    return Near(np.zeros_like(like.value) if value is None else value, 0.0, like.dtype)


def _adam(w, g, weight, lr, *, decoupled):
    count = weight.count + 1
    w, g = (w * (1 - lr * DECAY), g) if decoupled else (w, g + w * DECAY)
    mean = _state(weight, "exp_avg", g) * BETA1 + g * (1 - BETA1)
    square = _state(weight, "exp_avg_sq", g) * BETA2 + g * g * (1 - BETA2)
    denominator = square.sqrt() / math.sqrt(1 - BETA2**count) + EPS
    return Update(w - mean / denominator * (lr / (1 - BETA1**count)), {"exp_avg": mean, "exp_avg_sq": square})


def _sgd(w, g, weight, lr):
    g = g + w * DECAY
    buffer = _state(weight, "momentum_buffer", g) * MOMENTUM + g
    return Update(w - buffer * lr, {"momentum_buffer": buffer})


def _lion(w, g, weight, lr):
    mean = _state(weight, "exp_avg", g)
    direction = (mean * BETA1 + g * (1 - BETA1)).sign()
    return Update(w * (1 - lr * DECAY) - direction * lr, {"exp_avg": mean * BETA2 + g * (1 - BETA2)})


RULES = {
    "AdamW": lambda w, g, weight, lr: _adam(w, g, weight, lr, decoupled=True),
    "Adam": lambda w, g, weight, lr: _adam(w, g, weight, lr, decoupled=False),
    "SGD": _sgd,
    "Lion": _lion,
}
