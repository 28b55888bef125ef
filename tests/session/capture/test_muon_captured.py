"""Steps of Muon as graphs: schedules reach them, overflows do not, and what a graph has frozen is asked."""

import pytest

from mezzo import StateError, optim
from mezzo.optim import optimizer as one_pass
from mezzo.step.executors.whole import WholeUpdate

from ...support.refusals import bits
from .loops import POLICIES, Loop, batches, both


class PredicatedMatrices(WholeUpdate):
    """As on a device where the verdict's flag and the numbers stay."""

    def __init__(self, bucket):
        super().__init__(bucket)
        self.on_cpu = False


@pytest.fixture(autouse=True)
def _predicated_matrices(monkeypatch):
    monkeypatch.setattr(one_pass, "WholeUpdate", PredicatedMatrices)


def muon(groups, **options):
    params = [param for group in groups for param in group["params"]]
    return optim.Muon(params, lr=0.02, adamw={"lr": 1e-2}, **options)


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("policy", POLICIES[2:])
def test_replays_are_the_steps_that_they_stand_for(policy, state_dtype):
    """With a schedule of the learning rates, and overflows in real steps and in replays."""
    eager, captured, loop = both(
        lambda: Loop(policy, make=lambda groups: muon(groups, state_dtype=state_dtype)),
        batches(range(9), bad=(1, 5, 6)),
        between=lambda loop, number: loop.schedule.step(),
    )
    assert bits(eager) == bits(captured)
    assert loop.graph.replays == 6


@pytest.mark.parametrize("name, value", [("ns_steps", 3), ("eps", 1e-3), ("adjust_lr_fn", "original"), ("nesterov", 0)])
def test_a_setting_that_a_graph_has_frozen_is_refused_once_it_is_another(name, value):
    loop = Loop(make=muon)
    captured = loop.captured()
    for data in batches(range(5)):
        captured(*data)
    loop.optimizer.param_groups[0][name] = value
    with pytest.raises(StateError, match=r"holds what the session has left(?s:.*)rules of Muon, optimizer 0\n"):
        captured(*batches([5])[0])
