"""What a program writes into the weights of an attached model through `.data`, as averages are swapped in and out."""

import copy
import io

import pytest
import torch
from torch import nn

import mezzo

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
}
POLICIES = ("O2,dtype=bfloat16,emulate=true", "O2,dtype=float16,loss_scale=64,emulate=true")


def begun(policy, make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = make(model.parameters())
    return model, optimizer, mezzo.attach(model, optimizer, policy)


def train(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()


def written(model):
    """Write other values through `.data`, and return what was there, and what a plain FP32 model would have of it."""
    before, values = {}, {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        before[name] = param.data.clone()
        param.data[..., 0] += 0.5
        values[name][..., 0] = param.data[..., 0].float()
    return before, values


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_they_are_in_checkpoints_and_copies_and_leave_no_trace_where_they_are_taken_back(policy, make):
    model, optimizer, amp = begun(policy, make)
    train(model, optimizer, 6)
    expected = copy.deepcopy(model.state_dict())
    train(model, optimizer, 3, seed=2)
    later = copy.deepcopy(model.state_dict())
    amp.detach()
    model, optimizer, amp = begun(policy, make)
    train(model, optimizer, 6)
    before, values = written(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for found in (model, copy.deepcopy(model), torch.load(file, weights_only=False), model):
        state = found.state_dict()
        assert all(torch.equal(state[name], value) for name, value in values.items())
    assert all(torch.equal(p.data[..., 0].float(), values[n][..., 0]) for n, p in model.named_parameters())
    for name, param in model.named_parameters():
        param.data.copy_(before[name])
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    train(model, optimizer, 3, seed=2)
    assert all(torch.equal(value, later[name]) for name, value in model.state_dict().items())
    amp.detach()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_they_stay_where_the_session_ends(policy, make):
    model, optimizer, amp = begun(policy, make)
    train(model, optimizer, 4)
    _, values = written(model)
    amp.detach()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_masters_that_were_edited_in_place_count_before_them(make):
    model, optimizer, amp = begun(POLICIES[0], make)
    train(model, optimizer, 4)
    with torch.no_grad():
        for master in amp.master_params():
            master.add_(0.25)
    masters = [master.detach().clone() for master in amp.master_params()]
    assert all(map(torch.equal, model.state_dict().values(), masters))
    assert all(torch.equal(p.float(), m.to(p.dtype).float()) for p, m in zip(model.parameters(), masters, strict=True))
    amp.detach()
    assert all(map(torch.equal, model.parameters(), masters))
