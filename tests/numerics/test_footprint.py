"""Bytes, counted by hand."""

import torch
from torch import nn

import mezzo
from mezzo.numerics.footprint import SavedBytes, StateBytes, state_bytes


def test_saved_bytes_of_two_layers_are_the_activations_they_need():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.ones(16, 8, requires_grad=True)
    with SavedBytes(model) as saved:
        model(x)
    # the first layer keeps x, ReLU its result, which is also what the second layer keeps; weights do not count
    assert saved.total == 4 * (16 * 8 + 16 * 32)


def test_saved_bytes_count_a_low_precision_copy_of_a_weight_but_not_the_weight():
    layer = nn.Linear(8, 32, bias=False)
    x = torch.ones(16, 8, requires_grad=True)
    with SavedBytes(layer) as saved:
        layer(x)
    assert saved.total == 4 * 16 * 8
    with SavedBytes(layer) as saved:
        nn.functional.linear(x.to(torch.bfloat16), layer.weight.to(torch.bfloat16))
    assert saved.total == 2 * 16 * 8 + 2 * 8 * 32


def test_saved_bytes_count_a_storage_once_through_all_its_views():
    x = torch.ones(4, 100, requires_grad=True)
    with SavedBytes(nn.Identity()) as saved:
        y = x.exp()  # keeps y
        y[0] * y[1] + y[2] * y[3]  # keeps four views of y
    assert saved.total == 4 * 400


def test_saved_bytes_do_not_change_gradients_and_stop_at_the_end_of_the_block():
    x = torch.ones(10, requires_grad=True)
    with SavedBytes(nn.Identity()) as saved:
        y = (x * 2.0).exp().sum()
    inside = saved.total
    x.exp()
    assert saved.total == inside == 40
    y.backward()
    assert torch.allclose(x.grad, 2.0 * torch.full((10,), 2.0).exp())


def test_state_bytes_of_halves_moments_and_gradients():
    model = nn.Linear(10, 10)  # 110 parameters
    prepared = mezzo.prepare(model, "O2,dtype=float16,emulate=true")
    optimizer = torch.optim.AdamW(model.parameters())
    prepared.adopt(optimizer)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    counted = state_bytes(model, optimizer)
    # two 0-d step counters of 4 bytes beside two FP32 moments
    assert counted == StateBytes(weights=220, gradients=220, remainders=220, optimizer=2 * 440 + 2 * 4)
    assert counted.total == 220 + 220 + 220 + 888


def test_state_bytes_count_tied_and_shared_tensors_once():
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].weight.detach()[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted = state_bytes(model, optimizer)
    assert counted == StateBytes(weights=400, gradients=0, remainders=0, optimizer=0)


def test_state_bytes_count_buffers_and_nested_optimizer_state():
    model = nn.BatchNorm1d(8)  # weight, bias, mean, variance in FP32, an int64 counter
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["history"] = [torch.zeros(3), (torch.zeros(5), {"deep": torch.zeros(7)}), 3]
    counted = state_bytes(model, optimizer)
    assert counted == StateBytes(weights=4 * 32 + 8, gradients=0, remainders=0, optimizer=4 * 15)


def test_weights_that_were_gathered_for_a_pass_are_no_activations():
    gathered, inputs = nn.Parameter(torch.ones(8, 8)), torch.ones(4, 8)
    with SavedBytes(nn.Identity()) as saved:
        (inputs @ gathered.t()).exp().sum()
    assert saved.total == 4 * (4 * 8 + 4 * 8)  # the inputs and the result of exp, and not the weight
