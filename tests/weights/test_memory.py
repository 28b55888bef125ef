"""Bytes that weights in halves take while somebody else's optimizer steps, and between."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.weights import Halves, parts
from mezzo.weights.models import store

from .values import BF16

optim = torch.optim


def halved(model):
    names = {param: name for name, param in model.named_parameters()}
    store(dict.fromkeys(names, BF16), names)
    return model


class Storages(TorchDispatchMode):
    """Counts the bytes of every storage that it has seen and that lives."""

    def __init__(self, tensors):
        super().__init__()
        self.living, self.peak = {}, 0
        for tensor in tensors:
            self.know(tensor)

    def know(self, tensor):
        for part in [tensor.hi, tensor.lo, tensor.cell.decoded] if isinstance(tensor, Halves) else [tensor]:
            if part is not None:
                storage = part.untyped_storage()
                self.living[storage._cdata] = weakref.ref(storage)

    def bytes(self):
        return sum(storage.nbytes() for ref in self.living.values() if (storage := ref()) is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                self.know(leaf)
        self.peak = max(self.peak, self.bytes())
        return out


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=str)
def test_sixteen_bytes_a_parameter_are_kept_and_four_more_needed_within_a_step(options):
    """4 of the weight, 4 of its gradient, 8 of the moments."""
    model = halved(nn.ParameterList(nn.Parameter(torch.randn(32, 32)) for _ in range(32)))
    optimizer = optim.AdamW(model.parameters(), **options)
    size = sum(p.numel() for p in model.parameters())
    for _ in range(2):
        sum(p.square().sum() for p in model.parameters()).backward()
        with Storages(()):  # under a watch all is decoded before a step, as where a kernel cannot be cut
            optimizer.step()
    state = [v for state_of in optimizer.state.values() for v in state_of.values()]
    kept_now = Storages([*model.parameters(), *(p.grad for p in model.parameters()), *state])
    assert kept_now.bytes() == 16 * size + 4 * len(optimizer.state)  # and the counts of steps
    with kept_now:
        optimizer.step()
    tables = 64 * len(optimizer.state)
    assert kept_now.bytes() <= 16 * size + tables
    assert 16 * size < kept_now.peak <= 20 * size + 3 * 4 * 1024 + tables  # and a loop's temporaries


def test_frozen_weights_and_those_without_a_gradient_are_not_decoded():
    model = halved(nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(3)))
    model[1].requires_grad_(False)
    seen = []

    class Looks(optim.SGD):
        def step(self, closure=None):
            seen.append([p.cell.decoded is not None for p in model])
            super().step(closure)

    optimizer = Looks(model.parameters(), lr=0.1)
    model[0].square().sum().backward()
    optimizer.step()
    assert seen == [[True, False, False]]
    assert [p.cell.decoded for p in model] == [None] * 3


def test_what_is_assigned_lies_in_halves_again_once_nobody_else_has_it():
    """As a target network that follows by assignment, or ``view_as_complex`` in a forward pass."""
    weight = halved(nn.Linear(8, 8)).weight
    expected = weight.detach().clone()
    for _ in range(3):
        weight.data = weight.data * 0.9 + 0.01
        expected = expected * 0.9 + 0.01
        assert weight.cell.decoded is not None
        assert torch.equal(weight.to(BF16), weight.hi)
        assert weight.cell.decoded is None
        assert torch.equal(weight.detach().clone(), expected)
    other = halved(nn.Linear(8, 8)).weight
    kept = weight.data = torch.randn(8, 8)
    view = torch.view_as_complex(other.detach().view(8, 4, 2))
    for tensor in (weight, other):
        tensor.to(BF16)
        assert tensor.cell.decoded is not None
    kept.mul_(2)
    assert torch.equal(weight.detach().clone(), kept)
    del kept, view
    for tensor in (weight, other):
        tensor.to(BF16)
        assert tensor.cell.decoded is None


def test_what_a_program_keeps_of_a_weight_is_its_own_while_another_stands_there():
    """As an evaluation with averaged weights, which are assigned before it, and the others after it."""
    weight = halved(nn.Linear(8, 8)).weight
    before, kept = weight.detach().clone(), weight.data
    weight.data = torch.full((8, 8), 0.7)
    assert torch.equal(weight.to(BF16), torch.full((8, 8), 0.7, dtype=BF16))
    assert torch.equal(kept.clone(), before)
    weight.data = kept
    assert torch.equal(weight.detach().clone(), before)
    assert torch.equal(weight.to(BF16), before.to(BF16))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("part", [1 << 22, 100], ids=["a part is all", "parameters are cut"])
def test_a_fused_kernel_updates_a_part_at_a_time_bit_for_bit(monkeypatch, name, part):
    """Of parameters with and without halves, laid out otherwise, and with gradients that have gaps."""
    monkeypatch.setattr(parts, "_CPU_PART", part)
    torch.manual_seed(0)
    shapes = (7, 11), (3, 5, 2, 2), (40,), (1, 13), (12, 12)
    values = [torch.randn(shape) for shape in shapes]
    values[1] = values[1].to(memory_format=torch.channels_last)
    ends = []
    for in_halves in (False, True):
        params = [nn.Parameter(value.clone()) for value in values]
        chosen = [param for param in params if param.dim() > 1 and param.shape[0] > 1]
        if in_halves:
            store(dict.fromkeys(chosen, BF16), dict.fromkeys(chosen, "weight"))
        options = {"momentum": 0.9} if name == "SGD" else {"amsgrad": True}
        optimizer = getattr(optim, name)(params, lr=0.0123, weight_decay=0.01, fused=True, **options)
        generator = torch.Generator().manual_seed(1)
        versions = {param: param._version for param in params}
        for number in range(8):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            if number == 2:
                params[0].grad = torch.randn(11, 7, generator=generator).t()
            if number == 5:
                params[4].grad = torch.randn(12, 12, generator=generator).t()
            if number == 3:
                params[4].grad = None
            optimizer.found_inf = torch.tensor(float(number == 3))  # which skips
            optimizer.step()
        if in_halves:
            assert all(param._version > versions[param] for param in chosen)
            assert all(param.cell.decoded is None for param in chosen)
            assert {plan._scratch.nbytes() for plan in vars(optimizer)["_mezzo_parts"]._plans.values()} == {0}
        ends.append([param.detach().clone() for param in params])
    assert all(map(torch.equal, *ends))
