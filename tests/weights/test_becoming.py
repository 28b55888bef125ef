"""A parameter becomes halves and comes back, and stays the object that it is: for graphs and records of before, too."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import mezzo
from mezzo import UnsupportedError
from mezzo.weights import Halves

O2 = "O2,dtype=bfloat16,emulate=true"


def recorded(model, part):
    """Return what torch's profiler has recorded, which refers in C++ to the weights that it has seen."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        part(torch.ones(2, 4))
    return seen


@pytest.mark.parametrize("has_some", [False, True])
def test_a_graph_of_before_gives_its_gradient_to_the_parameter(has_some):
    model = nn.Linear(4, 3)
    loss = model(torch.ones(2, 4)).square().sum()
    wanted = torch.autograd.grad(loss, model.weight, retain_graph=True)[0]
    prepared = mezzo.prepare(model, O2)
    if has_some:
        model.weight.grad = torch.ones(3, 4)
    loss.backward()
    assert isinstance(model.weight, Halves)
    assert torch.equal(model.weight.grad, wanted + has_some)
    model.weight.grad = None
    loss = (model.weight * 2).sum()
    prepared.remove()
    loss.backward()
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model.weight.grad, torch.full((3, 4), 2.0))
    del loss, model.weight.grad
    model.weight.sum().backward()  # whose graph is its own
    assert torch.equal(model.weight.grad, torch.ones(3, 4))


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_what_something_in_torch_refers_to_is_refused_and_nothing_is_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before, seen = [p.detach().clone() for p in model.parameters()], recorded(model, model[1])
    with pytest.raises(UnsupportedError, match=r"(?s)the parameter 1\.weight cannot be stored.*record_shapes"):
        mezzo.prepare(model, O2)
    for param, value in zip(model.parameters(), before, strict=True):
        assert type(param) is nn.Parameter
        assert torch.equal(param, value)
    del seen
    mezzo.prepare(model, O2).remove()


def test_what_it_refers_to_when_halves_are_given_back_stays_what_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before, prepared = model[1].weight.detach().clone(), mezzo.prepare(model, O2)
    seen = recorded(model, model[1])
    with pytest.warns(UserWarning, match=r"(?s)parameters stay in halves.*1\.weight.*copy\.deepcopy"):
        prepared.remove()
    assert [type(p) for p in model.parameters()] == [nn.Parameter, nn.Parameter, Halves, nn.Parameter]
    assert torch.equal(model[1].weight.clone(), before)
    del seen


def test_memory_that_comes_later_is_halves_too():
    """``to_empty()``, and a model on the meta device that is given its values."""
    model = nn.Linear(4, 3)
    prepared = mezzo.prepare(model, O2)
    model.to_empty(device="cpu")
    assert isinstance(model.weight, Halves)
    prepared.remove()
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    values = nn.Linear(4, 3).state_dict()
    mezzo.prepare(model, O2)
    model.load_state_dict(values, assign=True)
    assert isinstance(model.weight, Halves)
    assert torch.equal(model.weight.clone(), values["weight"])
