"""The page of a NaN loss: every fault of its table is planted, found as that kind, and gone with the cure it says."""

import importlib
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import mezzo
from mezzo.overflow import locate
from mezzo.overflow.report import Kind

PAGE = (Path(__file__).parents[1] / "docs" / "nan.md").read_text()
#: What the page's table says to write, by kind: the first code in its last column.
CURES = dict(re.findall(r"^\| `(\w+)` \| .* \| `([^`]+)`[^|]*\|$", PAGE, re.MULTILINE))
ROWS = torch.tensor([[True, True], [False, False]])


class Apply(nn.Module):
    """An op on a parameter's numbers, so that it has a gradient."""

    def __init__(self, op, numbers):
        super().__init__()
        self.op, self.numbers = op, nn.Parameter(torch.tensor(numbers))

    def forward(self):
        return self.op(self.numbers * 1.0).sum()


def applied(op, numbers):
    model = Apply(op, numbers)
    return locate(model, model)


def rewritten(kind, variable="x"):
    """The op that the page says to write, as a function."""
    return lambda x: eval(CURES[kind], {"torch": torch, "mask": ROWS, variable: x})


#: Ops that are wrong by themselves, and numbers that show it; what is done with the cure is the same.
OPS = {
    "zero": (torch.log, lambda: rewritten("zero"), [1.0, 0.0]),
    "domain": (torch.sqrt, lambda: rewritten("domain"), [1.0, -1.0]),
    "unbounded": (torch.exp, lambda: rewritten("unbounded"), [1.0, 200.0]),
    "masked": (
        lambda x: x.masked_fill(ROWS, float("-inf")).softmax(-1).square(),
        lambda: lambda x: rewritten("masked", "scores")(x).softmax(-1).square(),
        [[1.0, 2.0], [3.0, 4.0]],
    ),
    "written": (
        lambda x: x.masked_fill(ROWS, float("-inf")) * 0,
        lambda: lambda x: rewritten("written", "scores")(x) * 0,
        [[1.0, 2.0], [3.0, 4.0]],
    ),
}


def test_the_table_has_every_kind():
    assert sorted(CURES) == sorted(get_args(Kind))


@pytest.mark.parametrize("kind", OPS)
def test_code_that_is_wrong_in_any_format(kind):
    op, cured, numbers = OPS[kind]
    found = applied(op, numbers)
    assert (found.kind, found.cure.partition("   #")[0]) == (kind, CURES[kind])
    assert applied(cured(), numbers) is None


@pytest.mark.parametrize("kind", ["range", "scale"])
def test_numbers_beyond_fp16(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 1))
    if kind == "range":
        nn.init.constant_(model[0].weight, 100.0)
    x = torch.rand(2, 4) * (1e3 if kind == "range" else 1.0)

    def search(policy):
        prepared = mezzo.prepare(model, policy)

        def fn():
            with prepared.autocast():
                # The bias's gradient is 32 times the loss scale: beyond 65504 with 2**16, and with 2**10 within.
                return model(x).float().sum() * (1 if kind == "range" else 16)

        found = locate(fn, model, policy=policy, loss_scale=1 if kind == "range" else policy.loss_scale.init)
        prepared.remove()
        return found

    names = {"policy": mezzo.Policy.parse("O1,dtype=float16,emulate=true")}
    found = search(names["policy"])
    assert (found.kind, found.cure.partition("   #")[0]) == (kind, CURES[kind])
    exec(CURES[kind], names)
    assert search(names["policy"]) is None


@pytest.mark.parametrize("kind", ["input", "parameter", "buffer"])
def test_what_was_there_before(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    mezzo.save("checkpoint.pt", **model.state_dict())
    names = {"torch": torch, "mezzo": mezzo, "model": model, "x": torch.ones(2, 4)}
    planted = {"input": names["x"], "parameter": model[1].weight.data, "buffer": model[0].running_mean}[kind]
    planted.view(-1)[0] = torch.nan

    found = locate(lambda: model(names["x"]).sum(), model)
    assert (found.kind, found.cure.partition("   #")[0]) == (kind, CURES[kind])
    exec(CURES[kind], names)
    assert locate(lambda: model(names["x"]).sum(), model) is None


def test_a_loss_that_fails_behind_the_model():
    model = nn.Linear(4, 1)
    policy = "O1,dtype=float16,emulate=true"
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, on_overflow="explain")

    def fn():
        with amp.autocast():
            y = model(torch.ones(2, 4)).float()
            return (y - y.detach()).abs().sqrt().sum()

    amp.backward(fn())
    found = amp.step().overflow
    assert (found.kind, found.cure.partition("   #")[0]) == ("loss", CURES["loss"])
    # With the loss inside the function it is found, in its line.
    inside = eval(CURES["loss"], {"mezzo": mezzo, "fn": fn, "model": model})
    assert (inside.kind, inside.op, "sqrt()" in inside.code) == ("zero", "sqrt", True)


def test_a_loop_of_torch_amp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(model[2].weight, 100.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def fn():
        with torch.autocast("cpu", dtype=torch.float16):
            return model(torch.ones(2, 4)).float().mean()

    found = locate(fn, model, loss_scale=scaler.get_scale())
    assert (found.kind, found.phase) == ("scale", "backward")
    assert locate(fn, model, loss_scale=float(re.search(r"init=(\d+)", found.cure)[1])) is None


@pytest.mark.parametrize("factor, error", [(1e9, mezzo.ScaleCollapsed), (float("inf"), mezzo.NumericsError)])
def test_patience_ends_a_run_that_only_skips(factor, error):
    assert "loss_scale=dynamic(patience=20)" in PAGE
    model = nn.Linear(4, 1)
    policy = "O1,dtype=float16,emulate=true,loss_scale=dynamic(init=1,patience=20)"
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)

    def run(steps):
        for _ in range(steps):
            with amp.autocast():
                loss = model(torch.ones(2, 4)).float().sum() * factor
            amp.backward(loss)
            amp.step()
            amp.zero_grad()

    run(20)
    with pytest.raises(error, match="20") as raised:
        run(1)  # the step after, which knows
    assert type(raised.value) is error


def test_every_leaf_of_the_tree_is_a_call_that_exists():
    tree = PAGE.partition("## ")[0]
    for name in ("mezzo.overflow.locate", "mezzo.numerics.diagnose", "mezzo.numerics.tune", "mezzo.explain"):
        assert name in tree
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))
    assert 'on_overflow="explain"' in tree
    assert "mezzo inspect train.py" in tree


@pytest.mark.parametrize("policy", ["O2,dtype=float16,loss_scale=none", "O3,dtype=float16", "O2,dtype=bfloat16"])
def test_what_is_said_of_weights_holds(policy):
    assert "from an update beyond 65504 where FP16 weights are stored, under O2 and O3" in PAGE
    model = nn.Linear(4, 1)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=5e4), f"{policy},emulate=true")
    with amp.autocast():
        loss = model(torch.ones(2, 4)).float().sum()
    amp.backward(loss)
    assert not amp.step().skipped
    assert bool(model.weight.isfinite().all()) == ("bfloat16" in policy)


def test_an_attached_loop_says_where_each_overflow_began(caplog):
    assert 'mezzo.attach(model, optimizer, "O1,dtype=float16", on_overflow="explain")' in PAGE
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.attach(model, optimizer, "O1,dtype=float16", on_overflow="explain")
    model(torch.tensor([[1.0, 2.0, 3.0, float("inf")]])).sum().backward()
    optimizer.step()
    found = amp.last_step.overflow
    amp.detach()
    assert found.kind == "input"
    assert str(found) in caplog.text


@pytest.mark.parametrize("is_half", [True, False])
def test_adam_breaks_a_half_model_and_o2_does_not(is_half):
    assert "where Adam's eps of 10⁻⁸ is 0 after `model.half()`: leave the model in FP32, and take O2" in PAGE
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(model[0].bias, -100.0)  # a dead unit: its gradients and so their squares are 0
    model = model.half() if is_half else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    amp = None if is_half else mezzo.MixedPrecision(model, optimizer, "O2,dtype=float16,loss_scale=128")
    x = torch.ones(2, 4)
    if amp is None:
        model(x.half()).float().sum().backward()
        optimizer.step()
        found = locate(lambda: model(x.half()).float().sum(), model)
        assert found.kind == "parameter"
        assert found.cause.endswith(
            "without FP32 masters an optimizer computes in float16, where Adam's eps of 1e-8 is 0"
        )
        return
    with amp.autocast():
        loss = model(x).sum()
    amp.backward(loss)
    assert not amp.step().skipped
    assert all(bool(param.isfinite().all()) for param in model.parameters())
