"""Any torch optimizer sees FP32 while it steps: against masters kept by hand, bit for bit, all of ``torch.optim``."""

from itertools import product

import pytest
import torch

import mezzo
from mezzo.weights import views

from .runs import assert_equal, both
from .values import LOW, Net


def _variants():
    """Every class of torch.optim, as loop, foreach and fused where this machine has them, and with its options."""
    optim = torch.optim
    named = {
        "ASGD": (optim.ASGD, {"lr": 0.05}), "Adadelta": (optim.Adadelta, {"lr": 0.5}),
        "Adagrad": (optim.Adagrad, {"lr": 0.1}), "Adam": (optim.Adam, {"lr": 0.05}),
        "AdamW": (optim.AdamW, {"lr": 0.05}), "Adamax": (optim.Adamax, {"lr": 0.05}),
        "NAdam": (optim.NAdam, {"lr": 0.05}), "RAdam": (optim.RAdam, {"lr": 0.05}),
        "RMSprop": (optim.RMSprop, {"lr": 0.01}), "Rprop": (optim.Rprop, {"lr": 0.01}),
        "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    }  # fmt: skip
    made = {}
    for name, (kind, options) in named.items():
        made[name] = kind, options | {"foreach": False}
        made[f"{name}, foreach"] = kind, options | {"foreach": True}
    for name in ("Adagrad", "Adam", "AdamW", "SGD"):
        made[f"{name}, fused"] = named[name][0], named[name][1] | {"fused": True}
    return made | {
        "SGD, plain": (optim.SGD, {"lr": 0.05}),
        "SGD, fused and plain": (optim.SGD, {"lr": 0.05, "fused": True}),
        "SGD, nesterov": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        "Adam, amsgrad": (optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.01}),
        "AdamW, maximize": (optim.AdamW, {"lr": 0.01, "maximize": True}),
        "AdamW, rate as tensor": (optim.AdamW, {"lr": torch.tensor(0.05), "foreach": False}),
        "RMSprop, centered": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
        "Adagrad, from 0.1": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
        "Adafactor": (optim.Adafactor, {"lr": 0.05}),
        "Muon": (optim.Muon, {"lr": 0.05}),
        "mezzo.AdamW": (mezzo.optim.AdamW, {"lr": 0.05}),
        "mezzo.Adam": (mezzo.optim.Adam, {"lr": 0.05}),
        "mezzo.SGD": (mezzo.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        "mezzo.Lion": (mezzo.optim.Lion, {"lr": 0.01}),
    }


OPTIMIZERS = _variants()


def test_no_class_of_torch_is_left_out():
    kinds = {kind for kind, _ in OPTIMIZERS.values()}
    elsewhere = {torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Optimizer}  # below
    assert {kind for kind in vars(torch.optim).values() if isinstance(kind, type)} <= kinds | elsewhere


def made(name, model):
    kind, options = OPTIMIZERS[name]
    params = [param for param in model.parameters() if kind is not torch.optim.Muon or param.ndim == 2]
    return kind(params, **options)


WAYS = list(product(LOW, ["whole", "parts"], ["five lines", "attach", "adopt"]))


@pytest.mark.parametrize(
    "name, dtype, part, style",
    [
        (name, *WAYS[(5 * number + turn) % len(WAYS)])
        for number, name in enumerate(OPTIMIZERS)
        for turn in ((0, 7) if "fused" in name or "mezzo" in name else (0,))
    ],
    ids=str,
)
def test_weights_and_state_are_those_of_masters_kept_by_hand(name, dtype, part, style, monkeypatch):
    if part == "parts":
        monkeypatch.setitem(views._PART, "cpu", 20)
    with both(Net(), lambda model: made(name, model), dtype, style) as (ours, by_hand):
        places = [(p.data_ptr(), ours.halves.rest_of(p).data_ptr()) for p in ours.model.parameters()]
        for number in range(5):
            for each in (ours, by_hand):
                each.step(number, skipped=number in (1, 3))
            assert_equal(ours, by_hand)
        assert [(p.data_ptr(), ours.halves.rest_of(p).data_ptr()) for p in ours.model.parameters()] == places
