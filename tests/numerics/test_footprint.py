"""Bytes, counted by hand."""

import torch
from torch import nn

import mezzo
from mezzo.numerics.footprint import SavedBytes, StateBytes, state_bytes


def saved_bytes(model, run):
    with SavedBytes(model) as saved:
        run()
    return saved.total


def test_saved_bytes_are_those_of_activations_each_storage_once():
    two = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.ones(16, 8, requires_grad=True)
    # The first layer keeps x, ReLU its result, which is also what the second layer keeps; weights do not count.
    assert saved_bytes(two, lambda: two(x)) == 4 * (16 * 8 + 16 * 32)
    layer, low = nn.Linear(8, 32, bias=False), torch.bfloat16
    assert saved_bytes(layer, lambda: layer(x)) == 4 * 16 * 8
    # A low copy of a weight counts.
    product = saved_bytes(layer, lambda: nn.functional.linear(x.to(low), layer.weight.to(low)))
    assert product == 2 * 16 * 8 + 2 * 8 * 32
    rows = torch.ones(4, 100, requires_grad=True)

    def views():
        y = rows.exp()
        y[0] * y[1] + y[2] * y[3]

    assert saved_bytes(nn.Identity(), views) == 4 * 400
    gathered = nn.Parameter(torch.ones(8, 8))  # for a pass, of a model that is sharded
    assert saved_bytes(nn.Identity(), lambda: (torch.ones(4, 8) @ gathered.t()).exp()) == 4 * (4 * 8 + 4 * 8)


def test_saved_bytes_do_not_change_gradients_and_stop_at_the_end_of_the_block():
    x = torch.ones(10, requires_grad=True)
    with SavedBytes(nn.Identity()) as saved:
        y = (x * 2.0).exp().sum()
    inside = saved.total
    x.exp()
    assert saved.total == inside == 40
    y.backward()
    assert torch.allclose(x.grad, 2.0 * torch.full((10,), 2.0).exp())


def test_state_bytes():
    model = nn.Linear(10, 10)  # 110 parameters
    mezzo.prepare(model, "O2,dtype=float16,emulate=true")
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    counted = state_bytes(model, optimizer)
    # A matrix in two halves and a vector in FP32; two 0-d step counters of 4 bytes beside two FP32 moments.
    assert counted == StateBytes(weights=200 + 40, gradients=440, remainders=200, optimizer=2 * 440 + 2 * 4)
    assert counted.total == 440 + 440 + 888
    x = torch.ones(4, 10)
    with torch.autocast("cpu", torch.float16):  # a cast of the weight is its high half, and saved as that
        assert saved_bytes(model, lambda: model(x)) == 2 * 4 * 10
    tied = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    tied[1].weight = tied[0].weight
    tied.register_buffer("view", tied[0].weight.detach()[:2])
    counted = state_bytes(tied, torch.optim.SGD(tied.parameters(), lr=0.1))
    assert counted == StateBytes(weights=400, gradients=0, remainders=0, optimizer=0)
    norm = nn.BatchNorm1d(8)  # weight, bias, mean, variance in FP32, an int64 counter
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    optimizer.state[norm.weight]["history"] = [torch.zeros(3), (torch.zeros(5), {"deep": torch.zeros(7)}), 3]
    counted = state_bytes(norm, optimizer)
    assert counted == StateBytes(weights=4 * 32 + 8, gradients=0, remainders=0, optimizer=4 * 15)
