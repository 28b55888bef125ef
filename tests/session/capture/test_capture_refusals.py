"""What cannot be captured: a reason for each refusal, and nothing changed."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import StateError, UnsupportedError
from mezzo.session.capture.captured import Captured

from .host_graph import HostGraph
from .loops import OPTIMIZERS, POLICIES, Loop, batch, batches, both, everything


def refused(loop, error, match, step=None, **options):
    """Capture, be refused with a message, and find everything as it was; then train as if nothing had been."""
    before, addresses = everything(loop)
    with pytest.raises(error, match=match) as caught:
        loop.captured(step, **options)
    assert "write" in str(caught.value)
    after, addresses_after = everything(loop)
    before[1]["state"] = after[1]["state"] = {}
    assert str(before) == str(after)
    assert addresses == addresses_after
    if loop.amp.on_overflow == "skip":
        loop.train_step(*batch(1))
    return str(caught.value)


def eager_loss(loop):
    x, y, _ = batch(0)
    with loop.amp.autocast():
        loss = functional.cross_entropy(loop.model(x).float(), y)
    loop.amp.backward(loss)
    loop.amp.step()
    loop.amp.zero_grad()
    return loss


def marks(loop):
    edges = [torch.autograd.graph.get_gradient_edge(param) for param in loop.model.parameters()]
    return [edge.node.metadata for edge in edges if edge.node.metadata]


KEPT = (
    r"a graph of an earlier step is still alive(?s:.*)0\.weight, 0\.bias(?s:.*)DistributedData(?s:.*)loss\.detach\(\)"
)


@pytest.mark.parametrize("policy", POLICIES[::2], ids=str)
def test_a_loss_that_was_kept_is_refused(policy):
    loop = Loop(policy)
    loss = eager_loss(loop)
    assert loss.grad_fn is not None
    refused(loop, StateError, KEPT)
    assert marks(loop) == []
    del loss
    loop.captured()(*batch(1))


@pytest.mark.parametrize("policy", POLICIES[::2], ids=str)
def test_what_holds_no_graph_may_be_kept(policy):
    loop = Loop(policy)
    loss = eager_loss(loop).detach()
    with loop.amp.autocast():
        loop.model(batch(0)[0])  # under O1 the session keeps casts of weights, and their graph
    cycle = [eager_loss(loop)]
    cycle.append(cycle)
    del cycle
    loop.captured()(*batch(1))
    assert torch.isfinite(loss)
    assert marks(loop) == []


def test_a_train_step_may_begin_before_its_session_knows():
    loop = Loop()
    region = loop.amp.autocast()

    def train_step(x, y, boost):
        with region:
            loss = functional.cross_entropy(loop.model(x).float(), y)
        loop.amp.backward(loss * boost)
        loop.amp.step()
        loop.amp.zero_grad()
        return loss

    assert torch.isfinite(loop.captured(train_step)(*batch(1)))


def test_a_loss_kept_since_the_capture_is_refused_by_the_call_that_captures_anew():
    loop = Loop()
    captured = loop.captured()
    loss = eager_loss(loop)
    loop.amp.max_grad_norm = 0.1
    with pytest.raises(StateError, match=KEPT):
        captured(*batch(1))
    del loss
    captured(*batch(1))


def test_a_scheduler_inside_is_refused():
    loop = Loop()
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)

    def handed_over(x, y, boost):
        with loop.amp.autocast():
            loss = loop.model(x).square().mean()
        loop.amp.backward(loss)
        loop.amp.step(scheduler=schedule)

    def stepped(x, y, boost):
        loop.train_step(x, y, boost)
        schedule.step()

    refused(
        loop, UnsupportedError, r"scheduler= cannot be captured(?s:.*)scheduler\.step\(\) after each call", handed_over
    )
    text = refused(loop, StateError, "the train step changes its optimizer's options", stepped)
    assert re.search(r"AdamW, group 0: lr 0\.01 → 0\.001\n +AdamW, group 1: lr", text)


def test_a_scheduler_of_a_tensor_inside_is_refused():
    loop = Loop(make=OPTIMIZERS["torch"])
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)

    def stepped(x, y, boost):
        loop.train_step(x, y, boost)
        schedule.step()

    refused(loop, StateError, "group 0: lr was written in place", stepped)
    assert loop.optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-2)


def test_a_closure_is_refused():
    loop = Loop()
    refused(
        loop,
        UnsupportedError,
        r"closure= cannot be captured(?s:.*)amp\.backward\(loss\), then amp\.step\(\)",
        lambda *data: (loop.amp.autocast(), loop.amp.step(closure=lambda: None)),
    )


@pytest.mark.parametrize("option", ["explain", "raise"])
def test_asking_the_host_about_overflows_is_refused(option):
    refused(Loop(on_overflow=option), UnsupportedError, f'on_overflow="{option}" cannot be captured(?s:.*)="skip"')


MAKES = {
    "cannot skip a step on the device": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    r"RMSprop cannot skip(?s:.*)mezzo\.optim\.AdamW": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    r"not made to be captured(?s:.*)capturable=True": lambda groups: torch.optim.AdamW(
        groups, lr=torch.tensor(1e-2), fused=True
    ),
    r"would be frozen(?s:.*)lr=0\.01, a Python number(?s:.*)lr=torch\.tensor\(0\.01": lambda groups: torch.optim.AdamW(
        groups, lr=1e-2, fused=True, capturable=True
    ),
    r"fused SGD has no momentum yet(?s:.*)mezzo\.optim\.SGD": lambda groups: torch.optim.SGD(
        groups, lr=torch.tensor(1e-2), momentum=0.9, fused=True
    ),
}


@pytest.mark.parametrize("match", MAKES)
def test_optimizers_that_need_the_host_are_refused(match):
    refused(Loop(make=MAKES[match]), UnsupportedError, match)


def test_torchs_fused_sgd_is_captured_once_it_has_momentum(bits):
    def make():
        loop = Loop(make=lambda groups: torch.optim.SGD(groups, lr=torch.tensor(1e-2), momentum=0.9, fused=True))
        loop.train_step(*batch(100))
        return loop

    eager, captured, _ = both(make, batches(range(8), bad=(3,)))
    assert bits(eager) == bits(captured)


def test_an_open_window_is_refused():
    loop = Loop()

    def begin():
        with loop.amp.autocast():
            loss = loop.model(batch(0)[0]).float().square().mean()
        loop.amp.backward(loss)

    refused(loop, StateError, "window is open at the end of the train step", lambda *data: begin())
    loop.amp.zero_grad()
    captured = loop.captured()
    begin()
    with pytest.raises(StateError, match="a captured step inside an accumulation window"):
        captured(*batch(0))
    with pytest.raises(StateError, match="cannot be captured inside an accumulation window"):
        loop.captured()
    loop.amp.step()
    loop.amp.zero_grad()
    captured(*batch(0))


def test_graphs_of_compiled_code_inside_are_explained():
    loop, theirs = Loop(), {"__name__": "torch._inductor.cudagraph_trees"}
    exec("def replay(): raise RuntimeError('Expected curr_block')", theirs)

    def train_step(x, y, boost):
        theirs["replay"]()
        return loop.train_step(x, y, boost)

    text = refused(loop, UnsupportedError, "the train step makes CUDA graphs of its own", train_step)
    assert 'where  torch.compile(…, mode="reduce-overhead")' in text
    assert "why    Expected curr_block" in text
    assert "max-autotune-no-cudagraphs" in text


@pytest.mark.parametrize("ask", [lambda loss: loss.item(), "{:.3f}".format, bool])
def test_asking_the_device_is_explained(ask):
    loop = Loop()

    def train_step(x, y, boost):
        out = loop.train_step(x, y, boost)
        ask(out["loss"])

    text = refused(loop, UnsupportedError, "a line of the train step cannot be part of a CUDA graph", train_step)
    assert re.search(r"where .*test_capture_refusals\.py:\d+", text)
    assert "operation not permitted when stream is capturing" in text


def test_other_errors_stay_as_they_are():
    loop = Loop()

    def train_step(x, y, boost):
        loop.train_step(x, y, boost)
        raise KeyError("mine")

    before, _ = everything(loop)
    with pytest.raises(KeyError, match="mine"):
        loop.captured(train_step)
    after, _ = everything(loop)
    before[1]["state"] = after[1]["state"] = {}
    assert str(before) == str(after)


def test_a_train_step_without_a_session_is_refused():
    model = nn.Linear(8, 3)
    with pytest.raises(StateError, match=r"uses no session(?s:.*)MixedPrecision\(model, optimizer, policy\)"):
        Captured(lambda x, y, boost: model(x), batch(0), HostGraph)


def test_an_optimizer_of_no_session_is_refused():
    loop, other = Loop(), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = other.weight.detach().clone()

    def train_step(x, y, boost):
        loop.train_step(x, y, boost)
        other(x).sum().backward()
        optimizer.step()

    refused(loop, StateError, r"belongs to no session(?s:.*)SGD(?s:.*)amp\.step\(\)", train_step)
    assert torch.equal(other.weight, before)
    optimizer.step()  # elsewhere it is nobody's business


def test_a_frozen_option_that_changes_is_refused():
    loop = Loop(make=OPTIMIZERS["torch"])
    captured = loop.captured()
    captured(*batch(0))
    group = loop.optimizer.param_groups[0]
    group["weight_decay"] = 0.5
    with pytest.raises(
        StateError, match=r"weight_decay was changed(?s:.*)AdamW, group 0: 0\.01 → 0\.5(?s:.*)mezzo\.optim"
    ):
        captured(*batch(1))
    group["weight_decay"] = 0.01
    lr, group["lr"] = group["lr"], torch.tensor(0.5)
    with pytest.raises(StateError, match=r'lr was changed(?s:.*)group\["lr"\]\.fill_'):
        captured(*batch(1))
    group["lr"] = lr
    captured(*batch(1))


def test_a_closed_session_and_nesting_are_refused():
    loop, outer = Loop(), Loop()
    captured = loop.captured()
    refused(outer, StateError, "a captured step inside a train step", lambda *d: (outer.train_step(*d), captured(*d)))
    refused(outer, StateError, r"mezzo\.capture\(\) inside", lambda *d: (outer.train_step(*d), loop.captured()))
    loop.amp.close()
    with pytest.raises(StateError, match=r"captured\(\) after close\(\)"):
        captured(*batch(0))


def test_an_update_that_was_interrupted_half_way_is_refused():
    class Interrupted(torch.optim.AdamW):
        def step(self, closure=None):
            if armed:
                raise KeyboardInterrupt
            super().step(closure)

    armed = []
    loop = Loop(make=lambda groups: Interrupted(groups, lr=torch.tensor(1e-2), fused=True, capturable=True))
    captured = loop.captured()
    armed.append(True)
    with pytest.raises(KeyboardInterrupt):
        loop.train_step(*batch(0))
    with pytest.raises(StateError, match="an update was interrupted half-way"):
        captured(*batch(0))
