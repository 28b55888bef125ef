"""A state dict in 16 bits: bit by bit what the products of a trained model read."""

import copy
import io

import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import NumericsError, PolicyError
from mezzo.weights import Halves, export

from ..support.refusals import refused

pytestmark = pytest.mark.usefixtures("emulating")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(16, 6), nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.body(self.embed(ids))))


def net():
    torch.manual_seed(0)
    return Net()


def middle(param):
    """Put values in the middle between two BF16 numbers, where halves round up and casts to even."""
    with torch.no_grad():
        param[0] = 1 + 2.0**-8
        param[1] = -(1 + 2.0**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_plain_model_is_cast(dtype):
    model = net()
    state = export(model, dtype)
    assert list(state) == list(model.state_dict())
    for name, value in model.state_dict().items():
        is_param = name in dict(model.named_parameters(remove_duplicate=False))
        assert torch.equal(state[name], value.to(dtype) if is_param else value)
        assert state[name].dtype == (dtype if is_param else value.dtype)
    assert state["head.weight"] is state["embed.weight"]


@pytest.mark.parametrize("word, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_in_halves_are_their_high_halves(word, dtype):
    model = net()
    middle(model.body[0].weight)
    handle = mezzo.prepare(model, f"O2,{word}")
    state = export(model, dtype)
    in_halves = {name: param for name, param in model.named_parameters() if isinstance(param, Halves)}
    assert set(in_halves) == {"embed.weight", "body.0.weight", "body.2.weight"}
    assert all(torch.equal(state[name], param.hi) for name, param in in_halves.items())
    products = {name: param.to(dtype) for name, param in in_halves.items()}  # what a region's cast hands to them
    assert all(torch.equal(state[name], low) for name, low in products.items())
    assert (dtype == torch.bfloat16) != torch.equal(
        state["body.0.weight"], model.state_dict()["body.0.weight"].to(dtype)
    )
    assert torch.equal(state["body.1.weight"], model.body[1].weight.to(dtype))
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    assert torch.equal(export(model, other)["body.0.weight"], model.body[0].weight.detach().clone().to(other))
    handle.remove()


def test_what_is_exported_stays_while_the_model_trains():
    model = net()
    optimizer = mezzo.optim.AdamW(model.parameters(), lr=0.1)
    amp = mezzo.MixedPrecision(model, optimizer, "O2,bf16")
    state = export(model)
    before = copy.deepcopy(state)
    with amp.autocast():
        loss = model(torch.arange(16)).float().square().mean()
    amp.backward(loss)
    amp.step()
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert not torch.equal(export(model)["body.0.weight"], before["body.0.weight"])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert all(torch.equal(value, before[name]) for name, value in torch.load(file, weights_only=True).items())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_rules_keep_what_they_keep(level):
    model = net()
    handle = mezzo.prepare(model, f"{level},bf16,fp32_module=body.0,fp32_param=embed.weight+head.weight")
    state = export(model)
    wide = {name for name, value in state.items() if value.dtype == torch.float32 and "running" not in name}
    kept = {"body.0.weight", "body.0.bias", "embed.weight", "head.weight"}
    assert wide == kept
    assert state["head.weight"] is state["embed.weight"]
    assert all(torch.equal(state[name], model.state_dict()[name]) for name in kept)
    handle.remove()
    assert export(model)["body.0.weight"].dtype == torch.bfloat16


def test_a_tied_weight_is_wide_if_one_of_its_names_is():
    model = net()
    mezzo.prepare(model, "O1,bf16,fp32_module=head")
    assert export(model)["embed.weight"].dtype == torch.float32


def test_copies_have_no_rules():
    model = net()
    mezzo.prepare(model, "O1,bf16,fp32_module=head")
    assert export(copy.deepcopy(model))["head.weight"].dtype == torch.bfloat16


def test_rules_are_those_of_now():
    model = net()
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters()), "O2,bf16,fp32_module=body.2")
    amp.change("O1,bf16,fp32_module=body.0")
    state = export(model)
    assert [state[f"body.{number}.weight"].dtype for number in (0, 2)] == [torch.float32, torch.bfloat16]


def test_a_low_model_that_loads_it_computes_what_o3_does():
    trained, ids = net().eval(), torch.arange(16)
    trained.norm = nn.Identity()
    engine = copy.deepcopy(trained).bfloat16()
    mezzo.prepare(trained, "O2,bf16")
    engine.load_state_dict(export(trained))
    o3 = copy.deepcopy(trained)
    for name, param in o3.named_parameters():
        param.data.copy_(export(trained)[name])
    handle = mezzo.prepare(o3, "O3,bf16")
    with handle.autocast(), torch.no_grad():
        expected = o3(ids)
    assert torch.equal(engine(ids).float(), expected)


def test_names_are_those_without_wrappers():
    model = net()
    assert list(export(torch.compile(model, backend="eager"))) == list(model.state_dict())
    model.body = torch.compile(model.body, backend="eager")
    assert list(export(model)) == list(net().state_dict())


def test_what_cannot_be_exported():
    model = net()
    model.body[2].weight.data[0, 0] = 1e6
    with refused(NumericsError, "range of FP16", "body.2.weight", "fp32_param=body.2.weight", parts=(model,)):
        export(model, "fp16")
    for wrong in ("float32", "int8", torch.float64, 3):
        with refused(PolicyError, "not exported", "bfloat16", parts=(model,)):
            export(model, wrong)
    mezzo.prepare(model, "O1,fp16,fp32_module=body.2")
    assert export(model, "fp16")["body.2.weight"][0, 0] == 1e6
