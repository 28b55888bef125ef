"""Regions that are held: entered by one call, and left by another, in whatever order with other contexts."""

import threading

import pytest
import torch
from torch import nn

import mezzo
from mezzo.cast.held import HeldRegion

pytestmark = pytest.mark.usefixtures("emulating")


@pytest.fixture
def held():
    model = nn.Linear(4, 4)
    region = HeldRegion(mezzo.prepare(model, "O1").autocast(), [model])
    region.model = model
    yield region
    region.leave() if region.casts else None
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not torch.is_autocast_enabled("cpu")


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_it_casts_until_it_is_left(held):
    assert (product(), held.casts) == (torch.float16, True)
    with held.off():
        assert (product(), held.casts) == (torch.float32, False)
        with held.on(), held.off(), held.on():
            assert product() == torch.float16
        assert product() == torch.float32
    assert product() == torch.float16
    held.leave()
    assert (product(), held.casts) == (torch.float32, False)


def test_contexts_that_are_entered_inside_outlive_it(held):
    device = torch.device("meta")
    device.__enter__()
    held.leave()
    assert torch.ones(1).device.type == "meta"
    device.__exit__(None, None, None)
    assert torch.ones(1).device.type == "cpu"


def test_it_is_a_threads_own(held):
    found = []

    def other():
        with held.off(), held.on():
            found.append((product(), held.casts))
        with pytest.raises(mezzo.StateError, match="casts hold for a thread"):
            held.leave()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [(torch.float32, False)]
    assert product() == torch.float16


def test_each_call_of_a_model_begins_without_casts_of_before(held):
    x = torch.ones(1, 4)
    with torch.no_grad():
        first = held.model(x)
        held.model.weight.data.mul_(2)
        held.model.bias.data.mul_(2)
        assert torch.equal(held.model(x), 2 * first)


def test_copies_of_its_models_are_plain(held):
    import copy

    copied = copy.deepcopy(held.model)
    held.leave()
    assert copied(torch.ones(1, 4)).dtype == torch.float32
