"""What an optimizer of mezzo's is given and cannot use: refused by name, nothing changed; and what it can use."""

import copy
import math

import numpy
import pytest
import torch
from torch import nn

from mezzo import optim
from mezzo.errors import PolicyError, StateError, UnsupportedError

from ..support.refusals import refused
from .halved import halved, values

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EVERY = [optim.AdamW, optim.Adam, optim.SGD, optim.Lion]


def weight_of(dtype=FP32, shape=(7,)):
    return nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype))


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


# What a group may say -----------------------------------------------------------------------------------

NAN, VAST = math.nan, 10**400
#: What an optimizer refuses, where it is built and where a group is added: its class, the arguments, and what it says.
REFUSED = [
    (optim.AdamW, {"lr": -1.0}, "lr is -1.0"),
    (optim.AdamW, {"lr": None}, "lr is None"),
    (optim.AdamW, {"lr": "1e-3"}, "lr is '1e-3'", "why    it is a finite number from 0", "write  lr=1e-3"),
    (optim.AdamW, {"lr": NAN}, "lr is nan"),
    (optim.AdamW, {"lr": VAST}, "lr is 1000"),
    (optim.AdamW, {"lr": 1j}, "lr is 1j"),
    (optim.AdamW, {"lr": numpy.float32("nan")}, "lr is ", "it is a finite number from 0"),
    (optim.AdamW, {"lr": numpy.float32(-1)}, "lr is ", "it is a finite number from 0"),
    (optim.AdamW, {"lr": torch.tensor(NAN)}, "lr is ", "it is a finite number from 0"),
    (optim.AdamW, {"betas": 0.9}, "betas are 0.9", "why    each is from 0 to below 1"),
    (optim.AdamW, {"betas": (0.9, 1.0)}, "betas are"),
    (optim.AdamW, {"betas": (0.9, "x")}, "betas are"),
    (optim.AdamW, {"betas": (0.9, NAN)}, "betas are"),
    (optim.AdamW, {"betas": (torch.tensor(0.9), torch.tensor(1.0))}, "betas are ", "each is from 0 to below 1"),
    (optim.AdamW, {"betas": (torch.tensor(-0.1), torch.tensor(0.9))}, "betas are ", "each is from 0 to below 1"),
    (optim.AdamW, {"eps": -1e-8}, "eps is"),
    (optim.AdamW, {"eps": math.inf}, "eps is inf", "why    it is a finite number from 0", "write  eps=1e-8"),
    (optim.AdamW, {"weight_decay": NAN}, "weight_decay is nan"),
    (optim.AdamW, {"maximize": torch.ones(2)}, "maximize is a tensor", "it is on or off", "write  maximize=True"),
    (optim.AdamW, {"master": "full"}, "AdamW has no argument 'master'"),
    (optim.AdamW, {"state_dtype": "float16"}, "unknown state_dtype 'float16'"),
    (optim.AdamW, {"state_dtype": "int4"}, "unknown state_dtype 'int4'", 'state_dtype="int8"'),
    (optim.Lion, {"state_dtype": torch.uint8}, "unknown state_dtype 'uint8'", "valid: float32, bfloat16, int8"),
    (optim.SGD, {"state_dtype": "float8"}, "unknown state_dtype 'float8'"),
    (optim.SGD, {"dampening": NAN}, "dampening is nan", "why    it is a finite number", "write  dampening=0.0"),
    (optim.SGD, {"nesterov": True}, "nesterov needs momentum and no dampening"),
    (optim.SGD, {"differentiable": True}, "SGD takes no differentiable=True", "; torch.optim's where it is True"),
    (optim.Adam, {"decoupled_weight_decay": True}, "takes no decoupled_weight_decay=True", "mezzo.optim.AdamW"),
    *((maker, {name: True}, f"{maker.__name__} takes no {name}=True", "why    a step here is always one pass that ",
       "so that a CUDA graph can capture it", "write  leave it out")
      for maker in EVERY for name in ("fused", "foreach", "capturable")),
]  # fmt: skip
#: Of these, what a program may also write into a group between two steps.
NUMBERS = {"lr", "betas", "eps", "weight_decay", "dampening"}


def test_what_a_group_must_not_say_is_refused_wherever_it_is_said():
    for optimizer_class, options, *words in REFUSED:
        with refused(PolicyError, *words):
            optimizer_class([weight_of()], **options)
        param = weight_of()
        optimizer = optimizer_class([param], lr=0.01)
        give_gradients([param], 0)
        optimizer.step()
        if optimizer.defaults.keys() >= options.keys():
            with refused(PolicyError, *words, parts=[optimizer]):
                optimizer.add_param_group({"params": [weight_of()], **options})
        if options.keys() <= NUMBERS and options.get("betas") != 0.9:  # of which Python says it itself
            optimizer.param_groups[0].update(options)
            before = copy.deepcopy((param, optimizer.state[param]))
            with refused(PolicyError, *words):
                optimizer.step()
            assert torch.equal(before[0], param)
            assert all(torch.equal(value, optimizer.state[param][name]) for name, value in before[1].items())


def test_everything_wrong_is_said_at_once_and_misspellings_get_the_nearest_name():
    words = "2 problems\n1. Adam takes no fused=True\n", "2. Adam has no argument 'weight_deacy'"
    with refused(PolicyError, *words, "did you mean 'weight_decay'? valid: params, lr,"):
        optim.Adam([weight_of()], 1e-3, fused=True, weight_deacy=0.1)


def test_a_set_has_no_order_that_a_state_could_belong_to():
    for optimizer_class, collection in zip(EVERY, (set, frozenset, set, frozenset), strict=True):
        words = "ordered collections, not in a ", "set", "why    its order changes", "write  a list of them"
        optimizer = optimizer_class([weight_of()])
        for call in (
            lambda optimizer_class=optimizer_class, its=collection: optimizer_class(its([weight_of()])),
            lambda optimizer_class=optimizer_class, its=collection: optimizer_class([{"params": its([weight_of()])}]),
            lambda its=collection, one=optimizer: one.add_param_group({"params": its([weight_of()])}),
        ):
            with refused(TypeError, *words, parts=[optimizer]):
                call()


# What weights may be ------------------------------------------------------------------------------------


def test_weights_that_no_optimizer_updates_are_refused_before_anything_is_made():
    for optimizer_class, dtype in zip(EVERY, [FP64, torch.complex64, torch.float8_e4m3fn, FP64], strict=True):
        name, wrong = str(dtype).removeprefix("torch."), nn.Parameter(torch.ones(2, 3).to(dtype))
        words = "weights in a format", f"a parameter ({name}, shape (2, 3))", "weights are float32, float16"
        optimizer = optimizer_class([weight_of()], state_dtype="int8")
        with refused(PolicyError, *words):
            optimizer_class([weight_of(), wrong], state_dtype="int8")
        with refused(PolicyError, f"head.weight ({name}"):
            optimizer_class([("head.weight", wrong)])
        with refused(PolicyError, *words, parts=[optimizer]):
            optimizer.add_param_group({"params": (param for param in [wrong])})  # a generator
        optimizer.add_param_group({"params": (param for param in [weight_of()])})
        assert len(optimizer.param_groups[1]["params"]) == 1


def test_weights_that_are_not_trained_may_be_anything_and_those_that_become_float64_are_refused_by_a_step():
    """Quantised ones, say, among ``model.parameters()``."""
    frozen = [nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False) for dtype in (torch.uint8, FP64)]
    trained, later = weight_of(), weight_of()
    optimizer = optim.AdamW([*frozen, trained, later], lr=0.1)
    for _ in range(2):
        give_gradients([trained, later], 0)
        optimizer.step()
        assert all(param.eq(1).all() for param in frozen)
        assert list(optimizer.state) == [trained, later]
    later.data = later.data.double()
    give_gradients([trained, later], 1)
    with refused(PolicyError, "weights in a format", "float64, shape (7,)", parts=[optimizer, trained, later]):
        optimizer.step()


@pytest.mark.parametrize("optimizer_class", EVERY)
def test_dtypes_may_be_mixed_in_one_group_and_a_nan_stays_where_it_is(optimizer_class):
    """Each is updated as it would be by an optimizer of its own, but for last bits: short ones go through one call."""
    dtypes = [FP32, BF16, FP16, FP32, BF16]
    together = [weight_of() for _ in dtypes]
    for param in together:
        param.data[1], param.data[3] = math.nan, -math.nan
    alone = copy.deepcopy(together)
    one, others = optimizer_class(together, lr=0.01), [optimizer_class([param], lr=0.01) for param in alone]
    for params in (together, alone):
        for param, dtype in zip(params, dtypes, strict=True):
            halved([param], dtype)
    for step in range(3):
        for params in (together, alone):
            give_gradients(params, step)
        for stepped in (one, *others):
            stepped.step()
    for param, own in zip(together, alone, strict=True):
        torch.testing.assert_close(values([param]), values([own]), rtol=2**-21, atol=2**-24, equal_nan=True)
        assert param.isnan().nonzero().flatten().tolist() == [1, 3]
        assert not torch.equal(param.nan_to_num(), weight_of().nan_to_num())


@pytest.mark.parametrize("optimizer_class, dtype", [(optim.AdamW, BF16), (optim.SGD, FP16)])
def test_low_weights_of_no_model_are_refused_before_anything_is_made(optimizer_class, dtype):
    owned, alone, idle = weight_of(), weight_of(dtype), weight_of(dtype)
    optimizer = optimizer_class([{"params": [owned]}, {"params": [alone, idle]}], lr=0.01)
    halved([owned], dtype)
    give_gradients([owned, alone], 0)
    before, name = owned.detach().clone(), str(dtype)[6:]
    words = (
        f"{name} weights without a remainder\n"
        f"  where  {optimizer_class.__name__}, group 1: {name} [7]\n"
        f"  why    an update below half a unit in the last place of {name} is lost\n"
        "  write  mezzo.prepare(model.float(), policy), or mezzo.MixedPrecision(model.float(), optimizer, policy), "
        "with O2: weights are FP32, stored in two halves"
    )
    with refused(StateError, words, parts=[optimizer, owned, alone]):
        optimizer.step()
    alone.grad = None  # without a gradient it is not looked at
    optimizer.step()
    assert not torch.equal(before, owned)


def test_a_weight_that_was_resized_or_moved_since_is_refused():
    for optimizer_class, dtype in ((optim.AdamW, FP32), (optim.AdamW, BF16), (optim.Lion, BF16)):
        one, two = weight_of(), weight_of(shape=(2, 8))
        optimizer = optimizer_class([one, two], lr=0.01)
        halved([one, two], dtype)
        give_gradients([one, two], 0)
        optimizer.step()
        two.data = torch.ones(3, 8)
        give_gradients([one, two], 1)
        with refused(StateError, "resized after", "(2, 8) → (3, 8), ", parts=[optimizer, one, two]):
            optimizer.step()
    one, two = weight_of(), weight_of()
    optimizer = optim.AdamW([one, two])
    give_gradients([one, two], 0)
    optimizer.step()
    optimizer.state[two]["exp_avg"] = optimizer.state[two]["exp_avg"].to("meta")  # for want of a second device
    one.grad = None  # other gradients than before: state is looked at again
    with pytest.raises(StateError, match=r"moved after(.|\n)*meta → cpu, shape \(7,\)"):
        optimizer.step()


# Gradients ----------------------------------------------------------------------------------------------


def test_a_sparse_gradient_in_the_last_group_is_refused_and_nothing_is_changed():
    dense, embedding = weight_of(), nn.Embedding(5, 4, sparse=True)
    optimizer = optim.AdamW([{"params": [dense]}, {"params": embedding.parameters()}], lr=0.1)
    give_gradients([dense], 0)
    embedding(torch.tensor([1])).sum().backward()
    words = "AdamW cannot use a sparse gradient", "group 1, a parameter of shape (5, 4)"
    with refused(UnsupportedError, *words, parts=[optimizer, dense, embedding]):
        optimizer.step()
    assert not optimizer.state


def test_gradients_of_another_dtype_are_read_as_their_fp32_value():
    for dtype in (FP64, FP32, FP16, torch.float8_e5m2):
        one, other = weight_of(shape=(50,)), weight_of(shape=(50,))
        optimizers = [optim.AdamW([param], lr=0.01) for param in (one, other)]
        halved([one, other], BF16)
        gradient = torch.linspace(-3, 1, 50, dtype=FP64).to(dtype)
        one.grad_dtype, other.grad_dtype = dtype, FP32
        one.grad, other.grad = gradient, gradient.float()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(one, other), dtype
