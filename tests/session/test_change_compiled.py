"""``change()`` of models that torch.compile has compiled: compiled once more, and as without it."""

import pytest
import torch

import mezzo
from mezzo import MixedPrecision, StateError

from ..support.refusals import refused
from .loops import assert_same, attached, built, facts, loss_of, network, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of autograd functions
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo, of any loss
    pytest.mark.filterwarnings("ignore:Dynamo"),  # what it cannot trace it runs in Python
]
WALK = ("O1,bf16,emulate=true", "O2,bf16,emulate=true", "O2,bf16,emulate=true,low=layer_norm", "O3,bf16,emulate=true")


def counting():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    return graphs, backend


@pytest.mark.parametrize("style", ["five lines", "attached"])
def test_a_compiled_model_is_compiled_once_more_and_computes_what_it_does_uncompiled(style):
    def run(policies, compiles=True):
        torch._dynamo.reset()
        model, made = built("mezzo")
        graphs, backend = counting()
        called = torch.compile(model, backend=backend) if compiles else model
        counts = []
        with (
            attached(model, made, policies[0])
            if style == "attached"
            else MixedPrecisions(model, made, *policies) as amp
        ):
            for policy in policies:
                amp.change(policy)
                for _ in range(2):
                    before = len(graphs)
                    step(amp, called, made, style)
                    counts.append(len(graphs) - before)
            return facts(model, made, amp=amp), counts

    compiled, counts = run(WALK)
    assert_same(compiled, run(WALK, compiles=False)[0])
    # As many graphs, at the first call and at the second, as in a session that begins so.
    assert counts == [count for policy in WALK for count in run([policy])[1]]


class MixedPrecisions:
    def __init__(self, model, made, policy, *_):
        self.amp = MixedPrecision(model, made, policy)

    def __enter__(self):
        return self.amp

    def __exit__(self, *_):
        self.amp.close()


def step(amp, called, made, style):
    if style == "attached":
        made.zero_grad()
        loss_of(called, 0).backward()
        made.step()
    else:
        train(amp, called, 0)


def test_a_model_whose_casts_a_plan_has_placed():
    pytest.importorskip("scipy")
    torch._dynamo.reset()
    model, made = built("mezzo", network())
    amp = MixedPrecision(model, made, WALK[0])
    compiled = torch.compile(model, backend=mezzo.compile_backend(WALK[0], inner="eager"))
    train(amp, compiled, 0)
    with refused(StateError, "the model is compiled by a plan", WALK[0].split(",")[0], "and a new session",
                 parts=(model, made, amp)):  # fmt: skip
        amp.change("O2,bf16,emulate=true")
