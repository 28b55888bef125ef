"""The page of a NaN loss: every fault of its table is planted, found as that kind, and gone with the cure it says."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import mezzo
from mezzo.overflow import locate
from mezzo.overflow.diagnose import Kind

PAGE = (Path(__file__).parents[1] / "docs" / "nan.md").read_text()
#: What the page's table says to write, by kind: the first code in its last column.
CURES = dict(re.findall(r"^\| `(\w+)` \| .* \| `([^`]+)`[^|]*\|$", PAGE, re.MULTILINE))


#: Code that is wrong in any format, the numbers that show it, and what follows.
WRONG = {
    "zero": ("x.log()", [1.0, 0.0], torch.sum),
    "domain": ("x.sqrt()", [1.0, -1.0], torch.sum),
    "unbounded": ("x.exp()", [1.0, 200.0], torch.sum),
    "masked": ("x.masked_fill(mask, -inf)", [[1.0, 2.0], [3.0, 4.0]], lambda y: y.softmax(-1).square().sum()),
    "written": ("x.masked_fill(mask, -inf)", [[1.0, 2.0], [3.0, 4.0]], lambda y: (y * 0).sum()),
}


class Code(nn.Module):
    """Code on a parameter's numbers, so that it has a gradient."""

    def __init__(self, code, numbers, after):
        super().__init__()
        self.code, self.numbers, self.after = code, nn.Parameter(torch.tensor(numbers)), after

    def forward(self):
        names = {"torch": torch, "mask": torch.tensor([[True], [False]]), "inf": torch.inf}
        return self.after(eval(self.code, {**names, "x": self.numbers * 1.0, "scores": self.numbers * 1.0}))


def is_found(overflow, fault):
    """Whether a report has this kind, and writes the cure that the page does."""
    return (overflow.kind, overflow.cure.partition("   #")[0]) == (fault, CURES[fault])


def test_code_that_is_wrong_in_any_format():
    assert sorted(CURES) == sorted(get_args(Kind))
    for fault, (code, numbers, after) in WRONG.items():
        model, cured = Code(code, numbers, after), Code(CURES[fault], numbers, after)
        assert is_found(locate(model, model), fault), fault
        assert locate(cured, cured) is None, fault


@pytest.mark.parametrize("fault, weights, inputs, factor", [("range", 100.0, 1e3, 1), ("scale", 0.1, 1.0, 16)])
def test_numbers_beyond_fp16(fault, weights, inputs, factor):
    """Of ``scale`` the bias's gradient is 32 times the loss scale: beyond 65504 with 2**16, and with 2**10 within."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 1)), torch.full((2, 4), inputs)
    nn.init.constant_(model[0].weight, weights)

    def search(policy):
        prepared = mezzo.prepare(model, policy)

        def fn():
            with prepared.autocast():
                return model(x).float().sum() * factor

        overflow = locate(fn, model, policy=policy, loss_scale=1 if fault == "range" else policy.loss_scale.init)
        prepared.remove()
        return overflow

    names = {"policy": mezzo.Policy.parse("O1,fp16,emulate=true")}
    assert is_found(search(names["policy"]), fault)
    exec(CURES[fault], names)
    assert search(names["policy"]) is None


@pytest.mark.parametrize("fault", ["input", "parameter", "buffer"])
def test_what_was_there_before(fault, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    mezzo.save("checkpoint.pt", **model.state_dict())
    names = {"torch": torch, "mezzo": mezzo, "model": model, "x": torch.ones(2, 4)}
    planted = {"input": names["x"], "parameter": model[1].weight.data, "buffer": model[0].running_mean}[fault]
    planted.view(-1)[0] = torch.nan
    assert is_found(locate(lambda: model(names["x"]).sum(), model), fault)
    exec(CURES[fault], names)
    assert locate(lambda: model(names["x"]).sum(), model) is None


def test_a_loss_that_fails_behind_the_model():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.MixedPrecision(model, optimizer, "O1,fp16,emulate=true", on_overflow="locate")

    def fn():
        with amp.autocast():
            y = model(torch.ones(2, 4)).float()
            return (y - y.detach()).abs().sqrt().sum()

    amp.backward(fn())
    assert is_found(amp.step().overflow, "loss")
    inside = eval(CURES["loss"], {"mezzo": mezzo, "fn": fn, "model": model})
    assert (inside.kind, inside.op, "sqrt()" in inside.code) == ("zero", "sqrt", True)
