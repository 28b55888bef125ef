"""``Halves``: the FP32 values of what a model stores in 16 bits, whatever has written the low half since."""

import pytest
import torch
from torch import nn

from mezzo import prepare
from mezzo.weights import Halves, decode, encode

from .values import BF16, FP16, LOW, Net, kept, low_of, numbers, same

POLICIES = {BF16: "O2,dtype=bfloat16", FP16: "O2"}

each_dtype = pytest.mark.parametrize("dtype", LOW, ids=str)


def stored(values, dtype):
    weight, halves = nn.Parameter(values.clone()), Halves()
    halves.store({weight: dtype})
    return weight, halves


# Storing and giving back ----------------------------------------------------------------------------------


@each_dtype
def test_a_stored_weight_is_the_low_value_and_reads_and_comes_back_as_the_fp32_one(dtype):
    values = numbers(dtype)
    weight, halves = stored(values, dtype)
    assert weight.dtype == dtype
    assert torch.equal(weight, low_of(values, dtype))
    assert same(halves.read(weight), kept(values, dtype))
    halves.remove()
    assert weight not in halves
    assert same(weight.detach(), kept(values, dtype))


@each_dtype
def test_a_written_value_is_read_back_in_the_same_memory(dtype):
    weight, halves = stored(torch.zeros(4096), dtype)
    rest, places = halves.rest_of(weight), (weight.data_ptr(), halves.rest_of(weight).data_ptr())
    version, values = weight._version, numbers(dtype, seed=1)
    halves.write(weight, values)
    assert weight._version > version  # autograd is to know
    assert torch.equal(weight, low_of(values, dtype))
    assert torch.equal(halves.read(weight), kept(values, dtype))
    assert (weight.data_ptr(), rest.data_ptr()) == places
    assert halves.rest_of(weight) is rest


@each_dtype
def test_a_low_value_leaves_the_fp32_value_of_elements_that_hold_it(dtype):
    values = numbers(dtype)
    weight, halves = stored(values, dtype)
    given = weight.detach().clone()
    given[::2] = 1.5
    halves.write(weight, given)
    wanted = kept(values, dtype)
    wanted[::2] = 1.5
    assert torch.equal(halves.read(weight), wanted)


def test_what_came_low_goes_back_low_and_dropped_rests_leave_the_low_values():
    weight, halves = nn.Parameter(torch.randn(9).bfloat16()), Halves()
    before = weight.detach().clone()
    halves.store({weight: BF16})
    halves.write(weight, before.float() * (1 + 2**-12))
    assert torch.equal(halves.read(weight), before.float() * (1 + 2**-12))
    halves.remove()
    assert weight.dtype == BF16
    assert torch.equal(weight, before)
    values = numbers(BF16)
    weight, halves = stored(values, BF16)
    halves.drop()
    assert weight in halves
    assert not halves.has_rest(weight)
    assert torch.equal(halves.read(weight), low_of(values, BF16).float())
    halves.write(weight, torch.full_like(values, 1.001))
    assert torch.equal(halves.read(weight), torch.full_like(values, 1.001).bfloat16().float())
    halves.remove()
    assert weight.dtype == torch.float32


@each_dtype
def test_a_saved_rest_goes_beside_what_is_there(dtype):
    values = numbers(dtype)
    high, rest = encode(values, dtype)
    weight, halves = stored(torch.zeros_like(values), dtype)
    with torch.no_grad():
        weight.copy_(high)
    halves.set_rest(weight, rest)
    assert torch.equal(halves.read(weight), kept(values, dtype))
    assert same(halves.read(weight), decode(high, rest))


@pytest.mark.gpu
@each_dtype
def test_a_weight_moves_to_another_device_with_its_rest(dtype, gpu):
    values, model = numbers(dtype), nn.Module()
    model.weight, halves = stored(values, dtype)
    num_replaced = halves.num_replaced
    model.to(gpu.device)
    assert halves.rest_of(model.weight).device == model.weight.device == gpu.device
    assert halves.num_replaced > num_replaced  # what keeps addresses asks again
    assert torch.equal(halves.read(model.weight).cpu(), kept(values, dtype))
    halves.write(model.weight, values * 2)
    assert torch.equal(halves.read(model.weight).cpu(), kept(values * 2, dtype))


# What is written from outside -------------------------------------------------------------------------------


@each_dtype
def test_any_low_value_from_outside_is_seen_within_half_a_spacing(dtype):
    weight, halves = stored(numbers(dtype), dtype)
    written = low_of(numbers(dtype, seed=2), dtype)
    weight.data.copy_(written)
    spacing = ((written.view(torch.int16) + 1).view(dtype).double() - written.double()).abs()
    far = (halves.read(weight).double() - written.double()).abs()
    finite = written.isfinite() & spacing.isfinite()
    assert (far[finite] <= spacing[finite] / 2).all()
    assert halves.read(weight)[written == 0].abs().max() <= {BF16: 5e-41, FP16: 2.0**-25}[dtype]
    for value in (float("inf"), float("-inf"), float("nan")):
        weight.data.fill_(value)
        assert torch.equal(halves.read(weight).nan_to_num(7.0), torch.full((4096,), value).nan_to_num(7.0))
    values, edited = numbers(dtype), []
    for edit in (lambda w: w.data.clamp_(-0.5, 0.5), lambda w: w.data.add_(1).sub_(1)):
        halves.write(weight, values)
        before = weight.detach().clone()
        edit(weight)
        same_bits, edited = weight == before, halves.read(weight)
        assert torch.equal(edited[same_bits], kept(values, dtype)[same_bits])  # not a bit of the others is lost


@each_dtype
@pytest.mark.parametrize("shadow", ["fp32", "low"])
def test_other_memory_is_seen_while_it_is_there_and_the_own_one_has_its_value_again(dtype, shadow):
    values, other = numbers(dtype), numbers(dtype, seed=3)
    weight, halves = stored(values, dtype)
    backup = weight.data
    weight.data = other.clone() if shadow == "fp32" else low_of(other, dtype)
    halves.settle()
    assert weight.dtype == dtype
    assert torch.equal(weight, low_of(other, dtype))
    if shadow == "fp32":
        assert torch.equal(halves.read(weight), kept(other, dtype))
    weight.data = backup
    for _ in range(2):  # at once, and once it is settled
        assert torch.equal(halves.read(weight), kept(values, dtype))
        assert torch.equal(decode(weight.detach(), halves.rest_of(weight)), kept(values, dtype))
        halves.settle()


def test_memory_that_comes_to_lie_where_the_own_was_is_another(monkeypatch):
    memory = bytearray(2 * 4096)  # torch frees what was there, and gives that memory to the next one that asks

    def encode_there(tensor, dtype):
        high, rest = encode(tensor.detach().float(), dtype)
        return torch.frombuffer(memory, dtype=dtype).copy_(high), rest

    monkeypatch.setattr("mezzo.weights.halves._encoded", encode_there)
    weight, halves = stored(numbers(BF16), BF16)
    values = numbers(BF16, seed=3)
    weight.data = values.clone()
    halves.settle()
    halves.settle()
    assert same(halves.read(weight), values)


@each_dtype
def test_memory_that_was_given_for_good_is_left_again_and_has_its_own_rest_when_it_comes_back(dtype):
    weight, halves = stored(numbers(dtype), dtype)
    for seed in (3, 4, 5):
        values = numbers(dtype, seed=seed)
        weight.data = values.clone()  # and what was there is freed
        halves.settle()
        kept_low, before = weight.data, halves.read(weight)
        weight.data = numbers(dtype, seed=seed + 10)
        halves.settle()
        weight.data = kept_low
        assert same(halves.read(weight), before)
        assert same(before, kept(values, dtype))


# Buffers ----------------------------------------------------------------------------------------------------


@each_dtype
def test_a_buffer_that_is_written_since_is_what_it_holds(dtype):
    values, halves = numbers(dtype), Halves()
    buffer = values.clone()
    halves.store({buffer: dtype})
    assert torch.equal(halves.read(buffer), kept(values, dtype))
    buffer.mul_(1)
    assert torch.equal(halves.read(buffer), low_of(values, dtype).float())
    halves.write(buffer, values)
    assert torch.equal(halves.read(buffer), kept(values, dtype))
    halves.remove()
    assert buffer.dtype == torch.float32
    assert torch.equal(buffer, kept(values, dtype))


# Models -----------------------------------------------------------------------------------------------------


@each_dtype
def test_trained_frozen_and_tied_parameters_and_buffers_are_stored_and_given_back(dtype):
    model = Net()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    objects = dict(model.named_parameters(remove_duplicate=False))
    prepared = prepare(model, POLICIES[dtype])
    assert {each.dtype for each in (*model.parameters(), *model.buffers())} == {dtype}
    for name, param in objects.items():
        assert model.get_parameter(name) is param
        assert torch.equal(prepared.halves.read(param), kept(before[name], dtype))
    assert torch.equal(prepared.halves.read(model.mean), kept(before["mean"], dtype))
    assert model.first.weight is model.second.weight
    assert not model.frozen.weight.requires_grad
    prepared.remove()
    assert model.first.weight is model.second.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept(before[name], dtype)), name


@pytest.mark.parametrize("first", [0, 1])
def test_models_that_share_a_tensor_read_and_give_back_one_value(first):
    models = [Net(), Net(seed=1)]
    models[1].third.weight = shared = models[0].third.weight
    values = shared.detach().clone()
    handles = [prepare(model, POLICIES[BF16]) for model in models]
    assert same(handles[0].halves.read(shared), values)
    assert same(handles[1].halves.read(shared), values)
    handles[first].halves.write(shared, values * 1.001)
    assert same(handles[1 - first].halves.read(shared), values * 1.001)
    handles[first].remove()
    handles[1 - first].remove()
    assert shared.dtype == torch.float32
    assert same(shared.detach(), values * 1.001)
    for model in models:
        assert {each.dtype for each in model.parameters()} == {torch.float32}
