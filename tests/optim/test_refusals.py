"""What an optimizer of mezzo's is given and cannot use, in a session and without: refused by name, nothing changed."""

import copy
import itertools
import math

import numpy
import pytest
import torch
from torch import nn

from mezzo import MixedPrecision, optim
from mezzo.errors import NumericsError, PolicyError, StateError, UnsupportedError

from .halved import halved

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EVERY = [optim.AdamW, optim.Adam, optim.SGD, optim.Lion]


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(model, optimizer, steps=range(3)):
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
    optimizer.zero_grad()


def snapshot(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_same(one, two):
    for a, b in zip(*(torch.utils._pytree.tree_leaves(value) for value in (one, two)), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# What weights may be ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_dtypes_may_be_mixed_in_one_group(kind):
    """Each is updated as it would be by an optimizer of its own, but for last bits: short ones go through one call."""
    dtypes = [FP32, BF16, FP16, FP32, BF16]
    together = [nn.Parameter(torch.linspace(-1, 1, 7)) for _ in dtypes]
    alone = copy.deepcopy(together)
    one, others = kind(together, lr=0.01), [kind([param], lr=0.01) for param in alone]
    owners = [
        [halved([param], dtype) for param, dtype in zip(params, dtypes, strict=True)] for params in (together, alone)
    ]
    one.adopt(owners[0])
    for other, halves in zip(others, owners[1], strict=True):
        other.adopt([halves])
    for step in range(3):
        for params in (together, alone):
            for number, param in enumerate(params):
                param.grad = torch.full_like(param, 0.1 * (number + step + 1))
        one.step()
        for other in others:
            other.step()
    for param, own, dtype, mine, its in zip(together, alone, dtypes, *owners, strict=True):
        assert param.dtype == own.dtype == dtype
        torch.testing.assert_close(mine.read(param), its.read(own), rtol=2**-21, atol=2**-24)
        assert not torch.equal(param, torch.linspace(-1, 1, 7).to(param.dtype))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_low_weights_of_no_model_are_refused_before_anything_is_made(kind, dtype):
    owned, alone, idle = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(3))
    optimizer = kind([{"params": [owned]}, {"params": [alone, idle]}], lr=0.01)
    halved([owned], dtype, optimizer)
    alone.data, idle.data = alone.data.to(dtype), idle.data.to(dtype)
    owned.grad, alone.grad = torch.ones_like(owned), torch.ones_like(alone)
    before = copy.deepcopy((owned.detach(), alone.detach()))
    with pytest.raises(StateError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        f"{str(dtype)[6:]} weights without a remainder\n"
        f"  where  {kind.__name__}, group 1: {str(dtype)[6:]} [7]\n"
        f"  why    an update below half a unit in the last place of {str(dtype)[6:]} is lost\n"
        "  write  prepared = mezzo.prepare(model.float(), policy); prepared.adopt(optimizer)\n"
        "         or mezzo.MixedPrecision(model.float(), optimizer, policy)"
    )
    assert not optimizer.state
    assert_same(before, (owned, alone))
    alone.grad = None  # without a gradient it is not looked at
    optimizer.step()
    assert not torch.equal(before[0], owned)


def test_an_optimizer_that_was_left_serves_no_model():
    weight = nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer = optim.AdamW([weight], lr=0.01)
    halves = halved([weight], BF16, optimizer)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    value, moments = halves.read(weight), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.leave()
    with pytest.raises(StateError, match="bfloat16 weights without a remainder"):
        optimizer.step()
    halves.remove()
    assert torch.equal(weight, value)
    assert_same(moments, optimizer.state_dict()["state"])
    optimizer.step()
    assert int(optimizer.state[weight]["step"]) == 2


def test_a_session_mixes_dtypes_in_one_group_too():
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    amp = MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true,fp32_module=0")
    before = copy.deepcopy(list(model.parameters()))
    with amp.autocast():
        loss = model(torch.ones(3, 4)).square().mean()
    amp.backward(loss)
    amp.step()
    assert [param.dtype for param in model.parameters()] == [FP32, FP32, BF16, BF16]
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)


def test_weights_that_no_optimizer_updates_are_refused_before_anything_is_made():
    for kind, dtype in itertools.product(EVERY, [FP64, torch.complex64, torch.float8_e4m3fn]):
        check_refused_weights(kind, dtype)


def check_refused_weights(kind, dtype):
    name = str(dtype).removeprefix("torch.")
    wrong = nn.Parameter(torch.ones(2, 3).to(dtype))
    match = rf"weights in a format(.|\n)*a parameter \({name}, shape \(2, 3\)\)\n  why    weights are float32, float16"
    with pytest.raises(PolicyError, match=match):
        kind([nn.Parameter(torch.ones(1)), wrong])
    with pytest.raises(PolicyError, match=rf"head.weight \({name}"):
        kind([("head.weight", wrong)])
    optimizer = kind([nn.Parameter(torch.ones(1))])
    with pytest.raises(PolicyError, match=match):
        optimizer.add_param_group({"params": [wrong]})
    assert len(optimizer.param_groups) == 1


def test_weights_that_are_not_trained_may_be_anything():
    """Quantised ones, say, among ``model.parameters()``."""
    frozen = [nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False) for dtype in (torch.uint8, FP64)]
    trained = nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([*frozen, trained], lr=0.1)
    trained.grad = torch.ones(2)
    optimizer.step()
    assert trained[0] < 1
    assert all(param.eq(1).all() for param in frozen)
    assert list(optimizer.state) == [trained]


def test_weights_that_became_float64_are_refused_by_a_step():
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    model[2].double()
    give_gradients(model, 0)
    before = snapshot(model, optimizer)
    with pytest.raises(PolicyError, match=r"weights in a format(.|\n)*float64, shape \(2, 8\)"):
        optimizer.step()
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize("policy", ["O0", "O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
def test_a_session_refuses_float64_too(policy):
    model = network()
    optimizer = optim.AdamW(model.parameters())
    model[2].double()
    with pytest.raises(UnsupportedError, match=r"float64 parameters(.|\n)*2.weight \(float64\)"):
        MixedPrecision(model, optimizer, policy)
    assert [param.dtype for param in model.parameters()] == [FP32, FP32, FP64, FP64]
    assert not optimizer.state


# What a group may say -----------------------------------------------------------------------------------

NAN, VAST = math.nan, 10**400
#: What an optimizer refuses, where it is built and where a group is added: its class, the arguments, and what it says.
REFUSED = [
    (optim.AdamW, {"lr": -1.0}, r"lr is -1\.0"),
    (optim.AdamW, {"lr": None}, "lr is None"),
    (optim.AdamW, {"lr": "1e-3"}, "lr is '1e-3'(.|\n)*why    it is a finite number from 0\n  write  lr=1e-3"),
    (optim.AdamW, {"lr": NAN}, "lr is nan"),
    (optim.AdamW, {"lr": VAST}, "lr is 1000"),
    (optim.AdamW, {"lr": 1j}, "lr is 1j"),
    (optim.AdamW, {"lr": numpy.float32("nan")}, "lr is (.|\n)*it is a finite number from 0"),
    (optim.AdamW, {"lr": numpy.float32(-1)}, "lr is (.|\n)*it is a finite number from 0"),
    (optim.AdamW, {"lr": torch.tensor(NAN)}, "lr is (.|\n)*it is a finite number from 0"),
    (optim.AdamW, {"betas": 0.9}, "betas are 0.9(.|\n)*why    each is from 0 to below 1"),
    (optim.AdamW, {"betas": (0.9, 1.0)}, "betas are"),
    (optim.AdamW, {"betas": (0.9, "x")}, "betas are"),
    (optim.AdamW, {"betas": (0.9, NAN)}, "betas are"),
    (optim.AdamW, {"betas": (torch.tensor(0.9), torch.tensor(1.0))}, "betas are (.|\n)*each is from 0 to below 1"),
    (optim.AdamW, {"betas": (torch.tensor(-0.1), torch.tensor(0.9))}, "betas are (.|\n)*each is from 0 to below 1"),
    (optim.AdamW, {"eps": -1e-8}, "eps is"),
    (optim.AdamW, {"eps": math.inf}, "eps is inf(.|\n)*why    it is a finite number from 0\n  write  eps=1e-8"),
    (optim.AdamW, {"weight_decay": NAN}, "weight_decay is nan"),
    (optim.AdamW, {"maximize": torch.ones(2)}, "maximize is a tensor(.|\n)*it is on or off\n  write  maximize=True"),
    (optim.AdamW, {"master": "full"}, "AdamW has no argument 'master'"),
    (optim.AdamW, {"state_dtype": "float16"}, "unknown state_dtype 'float16'"),
    (optim.SGD, {"dampening": NAN}, "dampening is nan(.|\n)*why    it is a finite number\n  write  dampening=0\\.0"),
    (optim.SGD, {"nesterov": True}, "nesterov needs momentum and no dampening"),
    (optim.SGD, {"differentiable": True}, "SGD takes no differentiable=True\n(.|\n)*; torch.optim's where it is True"),
    (optim.Adam, {"decoupled_weight_decay": True}, "takes no decoupled_weight_decay=True\n(.|\n)*mezzo.optim.AdamW"),
    *((kind, {name: True}, f"{kind.__name__} takes no {name}=True\n  why    a step here is always one pass that (.|\n)*"
       "so that a CUDA graph can capture it\n  write  leave it out")
      for kind in EVERY for name in ("fused", "foreach", "capturable")),
]  # fmt: skip
#: Of these, what a program may also write into a group between two steps.
NUMBERS = {"lr", "betas", "eps", "weight_decay", "dampening"}


@pytest.mark.parametrize("kind, options, says", REFUSED)
def test_what_a_group_must_not_say_is_refused_wherever_it_is_said(kind, options, says):
    with pytest.raises(PolicyError, match=says):
        kind([nn.Parameter(torch.ones(1))], **options)
    model = network()
    optimizer = kind(model.parameters(), lr=0.01)
    if optimizer.defaults.keys() >= options.keys():
        with pytest.raises(PolicyError, match=says):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **options})
        assert len(optimizer.param_groups) == 1
    if options.keys() <= NUMBERS and options.get("betas") != 0.9:  # of which Python says it itself
        train(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        optimizer.param_groups[0].update(options)
        with pytest.raises(PolicyError, match=says):
            train(model, optimizer)
        assert_same(before, model.state_dict())


# Weights that changed behind the optimizer's back -------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_resized_weight_is_refused(kind, dtype):
    model = network()
    optimizer = kind(model.parameters(), lr=0.01)
    halves = halved(list(model.parameters()), dtype, optimizer)
    train(model, optimizer)
    model[2].weight.data = torch.ones(3, 8, dtype=dtype)
    give_gradients(model, 0)
    before = snapshot(model, optimizer)
    if kind is optim.SGD and dtype == FP32:  # which keeps nothing of that shape
        optimizer.step()
        return
    with pytest.raises(StateError, match=r"resized after(.|\n)*\(2, 8\) → \(3, 8\), (exp_avg|low half)"):
        optimizer.step()
    assert_same(before, snapshot(model, optimizer))
    assert dtype == FP32 or halves.rest_of(model[2].weight).shape == (2, 8)


def test_a_moved_weight_is_refused():
    """Without a second device, by a state that lies elsewhere."""
    model = network()
    optimizer = optim.AdamW(model.parameters())
    halved(list(model.parameters()), BF16, optimizer)
    train(model, optimizer)
    state = optimizer.state[model[2].weight]
    state["exp_avg"] = state["exp_avg"].to("meta")
    model[0].bias.grad = torch.ones_like(model[0].bias)  # other gradients than before: state is looked at again
    model[2].weight.grad = torch.ones_like(model[2].weight)
    with pytest.raises(StateError, match=r"moved after(.|\n)*meta → cpu, shape \(2, 8\)"):
        optimizer.step()


# Gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, "O0", "O1,dtype=bfloat16,emulate=true", "O2,emulate=true"])
def test_sparse_gradients_are_refused_in_a_session_too(policy):
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    optimizer = optim.AdamW(model.parameters())
    amp = MixedPrecision(model, optimizer, policy) if policy else None
    words = torch.tensor([1, 3])
    if amp is None:
        model(words).sum().backward()
    else:
        with amp.autocast():
            loss = model(words).float().sum()
        amp.backward(loss)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=r"cannot use a sparse gradient(.|\n)*shape \(5, 4\)"):
        amp.step() if amp else optimizer.step()
    assert_same(before, model.state_dict())


@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, torch.float8_e5m2])
def test_gradients_of_another_dtype_are_read_as_their_fp32_value(dtype):
    one, other = (nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2))
    optimizers = [optim.AdamW([param], lr=0.01) for param in (one, other)]
    halves = halved([one, other], BF16, *optimizers)
    gradient = torch.linspace(-3, 1, 50, dtype=FP64).to(dtype)
    one.grad_dtype, other.grad_dtype = dtype, FP32
    one.grad, other.grad = gradient, gradient.float()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(halves.read(one), halves.read(other))


# Values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_a_weight_that_is_nan_stays_so_and_no_other_becomes_so(kind):
    for dtype, num in itertools.product([FP32, BF16, FP16], [5, 40_000]):
        check_nan(kind, dtype, num)


def check_nan(kind, dtype, num):
    weight = nn.Parameter(torch.ones(num))
    with torch.no_grad():
        weight[1], weight[3] = math.nan, -math.nan
    optimizer = kind([weight], lr=0.1)
    halves = halved([weight], dtype, optimizer)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    expected = torch.arange(num).eq(1) | torch.arange(num).eq(3)
    assert torch.equal(weight.isnan(), expected)
    assert torch.equal(halves.read(weight).isnan(), expected)


@pytest.mark.parametrize("policy", ["O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
def test_a_session_shows_the_forward_pass_every_nan(policy):
    """Rounded as they stand, 0x7FFFFFFF would be −0 in BF16, and 0x7F800001 infinity."""
    for pattern in (0x7FFF_FFFF, -1, 0x7F80_0001, 0x7FC0_0000):
        check_visible_nan(policy, pattern)


def check_visible_nan(policy, pattern):
    model = network()
    with torch.no_grad():
        model[2].weight.view(torch.int32)[1, 2] = pattern
    optimizer = optim.AdamW(model.parameters())
    amp = MixedPrecision(model, optimizer, policy)
    assert model[2].weight.isnan().nonzero().tolist() == [[1, 2]]
    assert model.state_dict()["2.weight"].isnan().nonzero().tolist() == [[1, 2]]
    amp.close()


@pytest.mark.parametrize("value", [65520.0, -1e30])
def test_a_weight_beyond_float16_is_named_and_nothing_is_changed(value):
    model = network()
    with torch.no_grad():
        model[2].weight[1, 1] = value
    optimizer = optim.AdamW(model.parameters())
    before = snapshot(model, optimizer)
    with pytest.raises((NumericsError, UnsupportedError), match=r"float16(.|\n)*2.weight(.|\n)*beyond 65504") as caught:
        MixedPrecision(model, optimizer, "O2,emulate=true")
    assert caught.match(r"keep_fp32\(params=\['2.weight'\]\)")
    assert_same(before, snapshot(model, optimizer))
    assert all(param.dtype == FP32 for param in model.parameters())


@pytest.mark.parametrize("value", [65504.0, -65504.0, math.inf])
def test_the_largest_of_float16_and_what_was_infinite_before_are_kept(value):
    model = network()
    with torch.no_grad():
        model[2].weight[1, 1] = value
    amp = MixedPrecision(model, optim.AdamW(model.parameters()), "O2,emulate=true")
    assert model[2].weight[1, 1] == model.state_dict()["2.weight"][1, 1] == value
    amp.close()


def test_nothing_at_all_changes_if_the_last_group_has_a_sparse_gradient():
    dense, embedding = nn.Parameter(torch.ones(3)), nn.Embedding(4, 2, sparse=True)
    optimizer = optim.AdamW([{"params": [dense]}, {"params": embedding.parameters()}], lr=0.1)
    dense.grad = torch.ones(3)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match=r"sparse gradient(?s:.*)group 1"):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(dense, torch.ones(3))


def test_a_generator_of_parameters_is_looked_at_too():
    optimizer = optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(PolicyError, match="float64"):
        optimizer.add_param_group({"params": (p for p in [nn.Parameter(torch.ones(2, dtype=FP64))])})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": (p for p in [nn.Parameter(torch.ones(2))])})
    assert len(optimizer.param_groups[1]["params"]) == 1
