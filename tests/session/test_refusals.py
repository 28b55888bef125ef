"""The arguments of a session in the wrong order, or of the wrong kind."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, PolicyError

ORDER = (
    r"write  MixedPrecision\(model, torch.optim.AdamW\(model.parameters\(\)\), policy\): models first, then optimizers"
)


@pytest.fixture
def pair():
    model = nn.Sequential(nn.Linear(2, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda m, o: (o, m),
        lambda m, o: (o, m, "O2,dtype=bfloat16"),
        lambda m, o: ([o], [m]),
        lambda m, o: (o, nn.ModuleList([m])),
        lambda m, o: ([o, o], m),
    ],
)
def test_the_model_and_the_optimizer_in_each_other_s_place(pair, arguments):
    with pytest.raises(PolicyError, match=f"stand in each other's place\n  {ORDER}"):
        MixedPrecision(*arguments(*pair))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (lambda m, o: ([m, o], o), "a model must be an nn.Module, not SGD"),
        (lambda m, o: ([m], [o, m]), "an optimizer must be a torch.optim.Optimizer, not Sequential"),
        (lambda m, o: ([m, o], [o, m]), "2 problems"),
        (lambda m, o: ("model", o), "a model must be an nn.Module, not str"),
        (lambda m, o: (m, "O1"), "an optimizer must be a torch.optim.Optimizer, not str"),
        (lambda m, o: ("O1", m, o), "a model must be an nn.Module, not str"),
        (lambda m, o: (m, "O1", o), "an optimizer must be a torch.optim.Optimizer, not str"),
        (lambda m, o: (m.parameters(), o), "a model must be an nn.Module, not Parameter"),
        (lambda m, o: (m, m.parameters()), "an optimizer must be a torch.optim.Optimizer, not Parameter"),
        (lambda m, o: (nn.Linear, o), "a model must be an nn.Module, not the class Linear"),
        (lambda m, o: (m, torch.optim.SGD), "an optimizer must be a torch.optim.Optimizer, not the class SGD"),
        (lambda m, o: (None, o), "a model must be an nn.Module, not NoneType"),
        (lambda m, o: (m, None), "an optimizer must be a torch.optim.Optimizer, not NoneType"),
        (lambda m, o: (3, 4), "not int"),
        (lambda m, o: ([], o), "a model must be an nn.Module, and there is none"),
        (lambda m, o: (m, []), "an optimizer must be a torch.optim.Optimizer, and there is none"),
    ],
)
def test_something_else_is_named_and_the_order_is_said(pair, arguments, says):
    with pytest.raises(PolicyError, match=f"{says}(.|\n)*{ORDER}"):
        MixedPrecision(*arguments(*pair))
    MixedPrecision(*pair, "O1,emulate=true")  # and nothing has changed


@pytest.mark.parametrize("container", [list, tuple, iter, lambda each: (one for one in each)])
def test_any_iterable_of_them_will_do(pair, container):
    model, optimizer = pair
    amp = MixedPrecision(container([model]), container([optimizer]), "O1,emulate=true")
    loss = model(torch.ones(1, 2)).sum()
    amp.backward(loss, optimizers=container([optimizer]))
    assert not amp.step(container([optimizer])).skipped


@pytest.mark.parametrize("wrong", ["model", [1], None])
def test_master_weights_are_for_an_optimizer(pair, wrong):
    given = pair[0] if wrong == "model" else wrong
    with pytest.raises(PolicyError, match=rf"not {type(given).__name__}\n  write  MasterWeights\(torch.optim.AdamW"):
        mezzo.MasterWeights(given)
