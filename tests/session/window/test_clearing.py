"""Gradients that users clear in mid-window, in any of torch's ways: only what comes afterwards counts."""

import copy
import itertools

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, StateError

from ...support.tables import thinned

RATE = 0.125


def by_hand(model):
    for param in model.parameters():
        param.grad.zero_()


def assigned(model):
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def dropped_and_assigned(model):
    for param in model.parameters():
        param.grad = None
        param.grad = torch.zeros_like(param)


def frozen(model):
    model.requires_grad_(False)
    model.zero_grad()
    model.requires_grad_(True)


WAYS = {
    "model": lambda model, _: model.zero_grad(),
    "model, zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "frozen": lambda model, _: frozen(model),
    "zero_": lambda model, _: by_hand(model),
    "zeros_like": lambda model, _: assigned(model),
    "None, then zeros_like": lambda model, _: dropped_and_assigned(model),
}
POLICIES = ("O1,dtype=float16,loss_scale=64", "O2,dtype=bfloat16", "O2,dtype=float16,loss_scale=64")
OPTIMIZERS = (torch.optim.SGD, mezzo.optim.SGD)


class Loop:
    """Two weights, of which each loss names the gradients: small multiples of 1/4, which every format adds exactly."""

    def __init__(self, make, policy, num_losses=1):
        self.model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.model.weight.fill_(1.0)
        self.optimizer = make(self.model.parameters(), lr=RATE)
        self.amp = MixedPrecision(self.model, self.optimizer, f"{policy},emulate=true", num_losses=num_losses)
        self.sum = torch.zeros(2, dtype=torch.float64)

    def backward(self, number, loss_id=0):
        c = torch.tensor([[0.25 * (number + 1), -0.5 * (number + 1)]])
        with self.amp.autocast():
            loss = self.model(c).float().sum()
        self.amp.backward(loss, loss_id=loss_id)
        self.sum += c[0].double()

    def clear(self, way):
        WAYS[way](self.model, self.optimizer)
        self.sum.zero_()

    def step(self):
        assert not self.amp.step().skipped

    def agrees(self):
        exact = next(self.amp.master_params()) if isinstance(self.optimizer, torch.optim.SGD) else self.master()
        return torch.equal(exact.detach().flatten().double(), 1 - RATE * self.sum)

    def master(self):
        weight = self.model.weight
        return self.optimizer.master_of(weight) if weight.dtype != torch.float32 else weight


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_only_what_comes_after_a_clearing_counts(policy, make):
    for way, before, after in itertools.product(WAYS, (1, 2, 3), (1, 3)):
        loop = Loop(make, policy)
        for number in range(before):
            loop.backward(number)
        loop.clear(way)
        for number in range(after):
            loop.backward(number + 5)
        loop.step()
        assert loop.agrees(), (way, before, after)


@pytest.mark.parametrize(
    "policy, make", thinned(["O1,dtype=float16", "O2,dtype=bfloat16", "O2,dtype=float16"], OPTIMIZERS, every=2)
)
def test_sums_that_were_set_aside_are_cleared_too(policy, make):
    """Two losses, each with a scale of its own."""
    for way, before, after in itertools.product(WAYS, ("01", "10", "011"), ("0", "1", "01")):
        loop = Loop(make, f"{policy},loss_scale=dynamic(init=16)", num_losses=2)
        scales = {"loss_scaler0": 4.0, "loss_scaler1": 64.0}
        loop.amp.load_state_dict({key: {"loss_scale": scale, "unskipped": 0} for key, scale in scales.items()})
        for number, loss_id in enumerate(before):
            loop.backward(number, int(loss_id))
        loop.clear(way)
        for number, loss_id in enumerate(after):
            loop.backward(number, int(loss_id))
        loop.step()
        assert loop.agrees(), (way, before, after)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_refused_leaves_gradients_where_they_can_be_cleared(policy, make):
    def refuse(*_):
        raise ValueError("not now")

    for way, unscaled in itertools.product(WAYS, (False, True)):
        loop = Loop(make, policy)
        for number in range(2):
            loop.backward(number)
        if unscaled:
            loop.amp.unscale_()
        hook = loop.optimizer.register_step_pre_hook(refuse)
        with pytest.raises(ValueError, match="not now"):
            loop.amp.step()
        hook.remove()
        loop.clear(way)
        loop.backward(4)
        loop.step()
        assert loop.agrees(), (way, unscaled)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_closures_clear_in_any_way(policy, way):
    """Each evaluation has the gradient of its own loss alone, as with FP32 weights."""

    def trained(policy):
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[0.5, -0.25]]))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.25, max_iter=3, tolerance_change=0)
        amp = MixedPrecision(model, optimizer, f"{policy},emulate=true")

        def closure():
            if model.weight.grad is not None:
                WAYS[way](model, optimizer)
            with amp.autocast():
                loss = (model(torch.eye(2)).float() - 1).square().sum()
            amp.backward(loss)
            return loss

        amp.step(closure=closure)
        return next(amp.master_params()).detach()

    torch.testing.assert_close(trained(policy), trained("O0"), rtol=2**-5, atol=0)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("edit", ["mul_", "clip", "assign"])
def test_an_edit_of_one_part_of_a_sum_is_refused(edit, make):
    """``.grad`` is only what the last loss made: whether the rest is meant, nobody knows."""
    loop = Loop(make, "O2,dtype=float16,loss_scale=dynamic(init=16)", num_losses=2)
    for loss_id in (0, 1):
        loop.backward(loss_id, loss_id)
    weight = loop.model.weight
    if edit == "mul_":
        weight.grad.mul_(0.5)
    elif edit == "clip":
        nn.utils.clip_grad_norm_([weight], 0.5)
    else:
        weight.grad = weight.grad * 0.5
    before = weight.grad.clone()
    for call in (loop.amp.step, loop.amp.unscale_, lambda: loop.backward(2), loop.amp.state_dict):
        with pytest.raises(StateError, match=r"earlier part(.|\n)*where  weight\n(.|\n)*write  amp.unscale_\(\)"):
            call()
        assert torch.equal(weight.grad, before)
    loop.amp.zero_grad()
    loop.sum.zero_()
    loop.backward(3, 1)
    loop.step()
    assert loop.agrees()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_losses", [1, 2])
def test_what_was_cleared_is_not_saved(way, num_losses):
    policy = "O2,dtype=float16,loss_scale=dynamic(init=16)"
    loop, other = Loop(torch.optim.SGD, policy, num_losses), Loop(torch.optim.SGD, policy, num_losses)
    for number in range(2):
        loop.backward(number, number % num_losses)
    loop.clear(way)
    other.amp.load_state_dict(copy.deepcopy(loop.amp.state_dict()))
    other.backward(4)
    other.step()
    assert other.agrees()


@pytest.mark.parametrize("cleared", [False, True])
def test_a_window_that_keeps_earlier_passes_with_the_masters_still_loads(cleared):
    """As states were saved before: FP32 sums in ``master_gradients``, and the last pass in ``gradients``."""
    policy = "O2,dtype=float16,loss_scale=64"
    loop, other = Loop(torch.optim.SGD, policy), Loop(torch.optim.SGD, policy)
    for number in range(2):
        loop.backward(number)
    state = copy.deepcopy(loop.amp.state_dict())
    assert not state["master_gradients"]
    state["master_gradients"] = {"weight": torch.tensor([[64.0, -128.0]])}
    state["windows"][0]["beside"] = ["weight"]
    state["gradients"] = {} if cleared else {"weight": torch.tensor([[16.0, 32.0]], dtype=torch.float16)}
    other.amp.load_state_dict(state)
    other.sum += torch.zeros(2) if cleared else torch.tensor([1.25, -1.5])
    other.backward(2)
    other.step()
    assert other.agrees()
    assert all(p.grad_dtype == p.dtype for p in other.model.parameters())


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["torch", "mezzo"])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_filled_with_zeros_after_unscale_are_zeros_on_both_sides(make, policy):
    for way in WAYS:
        loop = Loop(make, policy)
        loop.backward(1)
        loop.amp.unscale_()
        loop.clear(way)
        if "zero" in way:  # a gradient of zeros is one, and steps
            loop.step()
        else:
            with pytest.raises(StateError, match="no parameter has a gradient"):
                loop.amp.step()
        assert loop.model.weight.tolist() == [[1.0, 1.0]], way


class Kept(nn.Linear):
    """Clears its gradients in a way of its own."""

    cleared = 0

    def zero_grad(self, set_to_none=True):
        type(self).cleared += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_zeros_are_written_into_gradients_of_every_kind_that_stay_the_same_tensors(policy, make):
    Kept.cleared = 0
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2), "lookup": nn.Embedding(5, 3, sparse=True)})
    own, rest = Kept(3, 2), torch.optim.SGD(model["lookup"].parameters(), lr=RATE)
    amp = MixedPrecision([model, own], [make(model["a"].parameters(), lr=RATE), rest], policy)
    params = [*model.parameters(), *own.parameters()]
    for param in params:
        param.grad = torch.ones_like(param)
    lookup = model["lookup"].weight
    lookup.grad = torch.ones_like(lookup).to_sparse(1)
    graph = model["b"].weight  # no optimizer has it, and its gradient is part of a graph
    graph.grad = torch.ones_like(graph) * torch.ones((), requires_grad=True)
    gradients = [param.grad for param in params]
    amp.zero_grad(set_to_none=False)
    assert all(param.grad is gradient for param, gradient in zip(params, gradients, strict=True))
    assert all(not gradient.to_dense().any() for gradient in gradients)
    assert graph.grad.grad_fn is None
    assert Kept.cleared == 1
