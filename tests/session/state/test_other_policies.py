"""A session's state under another policy: FP32 weights survive, whatever the order of loading."""

import itertools
import logging

import pytest
import torch
from torch import nn

from mezzo import LossScale, MixedPrecision

from ...support.tables import thinned
from .runs import DYNAMIC, ORDERS, POLICIES, Run, through_a_file

EXACT = [name for name in POLICIES if not name.startswith("O3")]  # those that stand for FP32 weights


# with the seed 0, fresh masters round to most of the saved weights
@pytest.mark.parametrize("change, seed", thinned([*itertools.permutations(EXACT, 2)], [0, 1], every=2))
def test_fp32_weights_and_optimizer_state_survive_a_change_of_policy(change, seed, bits):
    before, after = change
    run = Run(before, "adamw")
    run.train(range(3))
    saved, weights = through_a_file(run.saved()), bits(run.fp32())
    assert all(weight.dtype == torch.float32 for weight in run.fp32().values())
    ends = set()
    for order in ORDERS:
        again = Run(after, "adamw", seed=seed)
        again.load(saved, order)
        assert bits(again.fp32()) == weights
        assert bits([again.one.state_dict(), again.two.state_dict()]) == bits([saved["one"], saved["two"]])
        for model in (again.trunk, again.tail):  # and the model computes with these very weights
            rounded = {
                name: again.fp32()[f"{int(model is again.tail)}.{name}"].to(p.dtype)
                for name, p in model.named_parameters()
            }
            assert bits(rounded) == bits(dict(model.named_parameters()))
        if "fp16" in before and "fp16" in after:
            assert again.amp.state_dict()["loss_scales"] == saved["amp"]["loss_scales"]
            assert again.amp.stats() == run.amp.stats()
        else:
            fresh = LossScale.parse(DYNAMIC if "fp16" in after else None).start().state_dict()
            assert again.amp.state_dict()["loss_scales"] == [fresh, fresh]
            now, then = again.amp.stats(), run.amp.stats()
            assert (now.steps, now.skipped) == (then.steps, then.skipped)
            assert (now.growths, now.backoffs) == (0, 0)
            assert now.lowest_scale == now.highest_scale == now.scale
        ends.add(str(bits(again.everything())))
    assert len(ends) == 1
    again.train(range(3, 4))


def test_a_chain_of_policies_loses_nothing(bits, caplog):
    """FP32 → O1 → O2 → O1 → FP32, as processes that only load and save."""
    run = Run("O0", "adamw")
    run.train(range(3))
    start, weights = run.saved(), bits(run.fp32())
    saved = start
    for number, policy in enumerate(["O1 fp16", "O2 bf16", "O2 fp16", "O1 bf16", "O0"]):
        run = Run(policy, "adamw", seed=number)
        with caplog.at_level(logging.INFO, logger="mezzo"):
            run.load(through_a_file(saved), ORDERS[number])
        saved = run.saved()
    assert "level: O1 → O0" in caplog.text
    assert bits(run.fp32()) == weights
    same = ("one", "two", "trunk", "tail")
    assert bits([saved[name] for name in same]) == bits([start[name] for name in same])
    run.train(range(3, 5))
    plain = Run("O0", "adamw", seed=7)
    plain.load(start)
    plain.train(range(3, 5))
    assert bits(run.fp32()) == bits(plain.fp32())


def test_the_step_count_goes_on_whatever_the_losses(bits):
    run = Run("O0", num_losses=2)
    run.train(range(3))
    again = Run("O1 bf16", num_losses=1)
    again.load(run.saved())
    assert again.amp.stats().steps == 3


@pytest.mark.parametrize(
    "before, after, scale",
    [
        ("dynamic(init=2**20)", "dynamic(ceiling=2**17)", 2.0**17),
        ("dynamic(init=1,floor=2**-9)", "dynamic(floor=64)", 64.0),
        ("dynamic(init=4096)", "dynamic(init=16,skip_rate_limit=0.5,interval=9)", 4096.0),
        ("dynamic(init=4096,skip_rate_limit=0.5,interval=9)", "dynamic", 4096.0),
        ("constant(128)", "constant(1024)", 1024.0),
        ("constant(128)", "dynamic(init=16)", 16.0),
        ("dynamic(init=16)", "constant(128)", 128.0),
    ],
)
def test_a_loss_scale_under_other_rules(before, after, scale):
    run = Run(f"O1,emulate=true,loss_scale={before}")
    run.train(range(1))
    again = Run(f"O1,emulate=true,loss_scale={after}")
    again.train(range(3))  # which a fresh start forgets
    again.load(through_a_file(run.saved()))
    assert again.amp.loss_scale.tolist() == [scale, scale]
    state = run.amp.state_dict()
    for each in state["loss_scales"]:
        each["noted by a later version"] = 7
    again.amp.load_state_dict(state)
    assert again.amp.loss_scale.tolist() == [scale, scale]
    again.train(range(3, 13))
    assert again.amp.stats().steps == 11


@pytest.mark.parametrize("order", ORDERS)
def test_o3_continues_as_o2_exactly(order, bits):
    for dtype in ("fp16", "bf16"):
        run = Run(f"O3 {dtype}")
        run.train(range(3))
        low = {name: param.float() for name, param in run.fp32().items()}
        for after in (f"O2 {dtype}", "O0", "O2 fp16"):
            again = Run(after)
            again.load(through_a_file(run.saved()), order)
            assert bits(again.fp32()) == bits({name: nn.Parameter(value) for name, value in low.items()})


def test_frozen_weights_follow_the_policy(bits):
    """What no optimizer updates has no master: the model's state dict and the policy say what it is."""

    def build(policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        return model, optimizer, MixedPrecision(model, optimizer, policy)

    first = build("O1,emulate=true")
    second = build("O2,emulate=true")
    for part, mine in zip(first, second, strict=True):
        mine.load_state_dict(part.state_dict())
    assert torch.equal(second[0][0].weight, first[0][0].weight.half())
    assert bits([*second[2].master_params()]) == bits([*first[2].master_params()])
