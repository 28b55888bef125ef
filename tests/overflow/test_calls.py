"""What is kept of a step, and for how long."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from mezzo.overflow import locate
from mezzo.overflow.replay import CallKeeper, Kept


def events(keeper):
    return ["forward" if event.task is None else "backward" for event in keeper.events]


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.fixture
def keeper(model):
    return CallKeeper([model])


def test_a_forward_pass_that_waits_survives_clearing(model, keeper):
    """``zero_grad`` between forward and backward is what many loops do."""
    loss = model(torch.ones(1, 2)).sum()
    keeper.clear()
    assert events(keeper) == ["forward"]
    loss.backward(retain_graph=True)
    keeper.clear()
    assert events(keeper) == []
    loss.backward()  # once more, after it was forgotten
    assert events(keeper) == ["forward", "backward"]


def test_nothing_piles_up_in_an_evaluation(model, keeper):
    for _ in range(5):
        model(torch.ones(1, 2))
    assert len(keeper.events) == 1  # the last one's graph is dropped with the next
    with torch.no_grad():
        for _ in range(5):
            model(torch.ones(1, 2))
    assert len(keeper.events) == 1
    keeper.clear()
    with torch.inference_mode():
        model(torch.ones(1, 2))
    assert not keeper.events


def test_inputs_and_output_gradients_live_until_cleared(model, keeper):
    x = torch.ones(1, 2)
    kept = weakref.ref(x)
    loss = model(x).sum()
    loss.backward()
    gradient = weakref.ref(keeper.events[1].call.arrivals[keeper.events[1].task][0].tensor)
    assert keeper.events[0].call.inputs[0].tensor is x
    assert keeper.events[0].call.args[0] is x  # no copy
    del x, loss
    gc.collect()
    assert kept() is not None
    assert gradient() is not None
    keeper.clear()
    gc.collect()
    assert kept() is None
    assert gradient() is None


def test_copies_of_the_model_are_watched_by_nobody(model, keeper):
    model(torch.ones(1, 2, requires_grad=True) * 2).sum().backward()
    twin = copy.deepcopy(model)
    restored = pickle.loads(pickle.dumps(model))
    before = len(keeper.events)
    for other in (twin, restored):
        other(torch.ones(1, 2)).sum().backward()
    assert len(keeper.events) == before
    model(torch.ones(1, 2)).sum().backward()
    assert len(keeper.events) == before + 2


def test_a_compiled_model_is_recorded_and_a_compiled_function_is_not(model):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    keeper = CallKeeper([compiled])
    compiled(torch.ones(1, 2)).sum().backward()
    assert events(keeper) == ["forward", "backward"]
    keeper.remove()
    keeper = CallKeeper([model])
    torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)(torch.ones(1, 2)).backward()
    assert not keeper.events


def test_which_changes_are_seen():
    for write, is_seen in (
        (lambda x: x.add_(1), True),
        (lambda x: x[0].zero_(), True),
        (lambda x: setattr(x, "data", torch.zeros(2, 2)), True),
        (lambda x: x + 1, False),
        (lambda x: x.data.add_(1), False),  # torch counts no version there
    ):
        x = torch.ones(2, 2)
        kept = Kept.of(x, "input 0")
        write(x)
        assert kept.is_changed == is_seen
        assert str(kept) == "input 0 (float32, 2×2)"
    for make in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn):  # without an address
        kept = Kept.of(made := make(torch.ones(2, 2)), "input 0")
        made.mul_(2)
        assert kept.is_changed
        with torch.inference_mode():
            assert not Kept.of(make(torch.ones(2, 2)), "input 0").is_changed  # without a version


def test_after_an_exception_it_goes_on_and_a_search_is_not_recorded(model, keeper):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 3))
    model(torch.ones(1, 2)).sum().backward()
    assert events(keeper) == ["forward", "backward"]
    keeper.clear()
    assert locate(lambda: model(torch.ones(1, 2)).sum(), model) is None
    assert not keeper.events
    outer = nn.Sequential(model, nn.ReLU())
    both = CallKeeper([outer, model])  # of a model that calls another, which is kept once
    outer(torch.ones(1, 2)).sum().backward()
    assert [(event.call.module, event.task is None) for event in both.events] == [(outer, True), (outer, False)]
