"""What a search and a replay are asked for and cannot do."""

import torch
from torch import nn

import mezzo
from mezzo import PolicyError
from mezzo.overflow import Replay, locate

from ..support.refusals import refused

MODEL = nn.Linear(1, 1)
NO_MODEL = "a model must be an nn.Module, not ", "write  mezzo.overflow.locate(fn, model)"
NO_LOSS = "fn returned no floating tensor", "write  mezzo.overflow.locate(lambda: criterion(model(x), y), model)"
NO_SCALE = "the loss scale is ", "a scale is positive and finite"


def one():
    return torch.ones(())


ROWS = [
    *((lambda model=model: locate(one, model), NO_MODEL) for model in (lambda: None, [], [MODEL, 3])),
    *((lambda value=value: locate(lambda: value, MODEL), NO_LOSS) for value in (None, 1.0, torch.tensor(1))),
    *((lambda scale=scale: locate(one, MODEL, loss_scale=scale), NO_SCALE)
      for scale in (0.0, -1.0, float("inf"), float("nan"))),
    (lambda: locate(one(), MODEL), ("fn is ", "no function", NO_LOSS[1])),
    (lambda: locate(one, MODEL, policy="O9"), ("unknown level 'O9'",)),
    (lambda: Replay(["model"], region=lambda: mezzo.autocast("O0")), ("a model must be an nn.Module, not str",)),
]  # fmt: skip


def test_what_no_search_can_take():
    for call, words in ROWS:
        with refused(PolicyError, *words, parts=[MODEL]):
            call()
