"""What weights in halves refuse: values that do not fit, casts, state of other models, optimizers that keep weights."""

import warnings

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, NumericsError, StateError, UnsupportedError, prepare
from mezzo.weights import Halves

from ..support.refusals import facts, refused
from .runs import Ours
from .values import BF16, FP16, Net, low_of

POLICIES = {BF16: "O2,dtype=bfloat16", FP16: "O2"}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)


def values_of(prepared):
    """The FP32 values of a prepared model, and that they are in the same objects and dtypes."""
    params = list(prepared.model.parameters())
    return [(id(param), param.dtype) for param in params], facts(*map(prepared.halves.read, params))


# Values -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_stored_is_refused_and_all_others_stay_as_they_were():
    large, fine = nn.Parameter(torch.tensor([1.0, 70000.0])), nn.Parameter(torch.tensor([0.1]))
    weight, halves = nn.Parameter(torch.tensor([0.1, 0.2])), Halves()
    halves.store({weight: FP16})
    before = facts(halves.read(weight))
    for error, call, *words in (
        (
            NumericsError,
            lambda: halves.store({fine: FP16, large: FP16}),
            "beyond the range of float16",
            "largest 70000",
        ),
        (NumericsError, lambda: halves.write(weight, large.detach()), "beyond the range of float16"),
        (StateError, lambda: halves.write(weight, torch.ones(3)), "another shape"),
        (StateError, lambda: halves.write(weight, torch.ones(1)), "another shape"),  # that broadcasts
    ):
        with refused(error, *words, parts=[weight, fine, large, halves.rest_of(weight)]):
            call()
        assert [*halves] == [weight]
        assert facts(halves.read(weight)) == before


CASTS = {
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "to(dtype)": lambda model: model.to(torch.float32),
    "to(device, dtype)": lambda model: model.to("cpu", torch.float64),
    "type": lambda model: model.type(torch.float32),
    "of a part": lambda model: model.first.float(),
    "around it": lambda model: nn.Sequential(model).float(),
}


def test_a_cast_of_a_converted_model_is_refused_and_a_move_is_not():
    model = Net()
    prepared = prepare(model, POLICIES[BF16])
    before = values_of(prepared)
    for name, cast in CASTS.items():
        with refused(StateError, "a converted model is cast"):
            cast(model)
        assert values_of(prepared) == before, name
    for moved in (model.to("cpu"), model.bfloat16(), model.cpu(), model.share_memory()):
        assert moved is model
    assert values_of(prepared) == before
    prepared.remove()
    assert model.half().first.weight.dtype == FP16  # its own again


LOADED = [
    (StateError, "that of another model", "third.weight", torch.ones(3, 6)),
    (StateError, "that of another model", "third.bias", torch.ones(1)),  # which would broadcast
    (NumericsError, "beyond the range", "third.bias", torch.full((3,), 70000.0)),
    (NumericsError, "beyond the range", "third.bias", torch.full((3,), 70000.0).bfloat16()),
]


def test_what_does_not_fit_is_refused_before_anything_is_loaded():
    model = Net()
    prepared = prepare(model, POLICIES[FP16])
    before = values_of(prepared)
    for number, (error, words, name, value) in enumerate(LOADED * 2):
        given = {key: each.clone() for key, each in Net(seed=1).state_dict().items()} | {name: value}
        root, prefix = (nn.Sequential(model), "0.") if number % 2 else (model, "")
        with refused(error, words, name):
            root.load_state_dict({prefix + key: each for key, each in given.items()}, assign=number >= len(LOADED))
        assert values_of(prepared) == before


# Optimizers -------------------------------------------------------------------------------------------------


class Keeps(torch.optim.SGD):
    """Has parameters, or what shares their memory, since it was built, and writes them."""

    def __init__(self, params, own):
        super().__init__(params, lr=0.1)
        self.own = own([param for group in self.param_groups for param in group["params"]])

    @torch.no_grad()
    def step(self, closure=None):
        for each in self.own:
            each.sub_(0.5)


#: What an optimizer keeps of parameters.
KEPT = {
    "a tuple": tuple,
    "a dict": lambda params: dict(enumerate(params)),
    "data": lambda params: [param.data for param in params],
    "detach": lambda params: [param.detach() for param in params],
    "view": lambda params: [param.data.view(-1) for param in params],
    "nested": lambda params: [[param] for param in params],
}


@pytest.mark.parametrize("early", [True, False])
def test_an_optimizer_that_keeps_aliases_of_parameters_is_refused(early):
    for name, own in KEPT.items():
        model = Net()
        optimizer = Keeps(list(model.parameters()), own) if early else None
        prepared = prepare(model, POLICIES[BF16])
        optimizer = optimizer or Keeps(list(model.parameters()), own)
        before = vars(optimizer).keys()
        with refused(UnsupportedError, "own beside param_groups", "Keeps: own"):
            prepared.adopt(optimizer)
        assert vars(optimizer).keys() == before, name
        assert not optimizer._optimizer_step_pre_hooks
        outer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer.base_optimizer = optimizer
        with refused(UnsupportedError, "own beside param_groups", "Keeps: own"):
            MixedPrecision(prepared, outer, POLICIES[BF16])
    model = Net()
    optimizer = Keeps(list(model.parameters()), lambda params: [param.detach().clone() for param in params])
    prepare(model, POLICIES[BF16]).adopt(optimizer)  # copies are no aliases
    model(0).backward()
    optimizer.step()
    assert torch.equal(model.first.weight, low_of(Net().first.weight, BF16))


def test_differentiable_steps_and_optimizers_that_shard_by_themselves_are_refused(alone):
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which it imports
        from torch.distributed.optim import ZeroRedundancyOptimizer

        trained = [param for param in model.parameters() if param.requires_grad]
        zero = ZeroRedundancyOptimizer(trained, optimizer_class=torch.optim.SGD, lr=0.1)
    differentiable = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    prepared = prepare(model, POLICIES[BF16])
    for optimizer, word in ((zero, "ZeroRedundancyOptimizer"), (differentiable, "differentiable=True")):
        with refused(UnsupportedError, word):
            prepared.adopt(optimizer)


def test_an_optimizer_that_reaches_the_models_parameters_in_another_way_is_told_after_its_step():
    class Reaching(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                model.first.weight.sub_(0.5)

    model = Net()
    optimizer = Reaching(model.parameters(), lr=0.1)
    prepare(model, POLICIES[BF16]).adopt(optimizer)
    model(0).backward()
    with pytest.raises(StateError, match="wrote parameters of the model"):
        optimizer.step()
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, model.parameters())]


def test_low_weights_of_another_model_are_not_trained_beside_nor_those_that_no_halves_keep():
    run = Ours(Net(), adamw, BF16, "adopt")
    with refused(StateError, "adopted already"):
        run.prepared.adopt(run.optimizer)
    other = nn.Linear(2, 2).bfloat16()
    run.optimizer.add_param_group({"params": list(other.parameters())})
    run.model(0).backward()
    run.optimizer.step()  # which they have no gradients for
    other(torch.ones(1, 2).bfloat16()).sum().backward()
    before = values_of(run.prepared)
    with refused(StateError, "low weights without a remainder", parts=[other]):
        run.optimizer.step()
    assert values_of(run.prepared) == before
    for start in (MixedPrecision, mezzo.attach):
        model = Net().bfloat16()
        with refused(UnsupportedError, "would be trained without masters", parts=[model]):
            start(model, adamw(model), "O1,dtype=bfloat16")


def test_blocks_of_fp32_do_not_nest_and_hold_no_step():
    model = Net()
    optimizer = adamw(model)
    amp = MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
    with amp.fp32(optimizer), pytest.raises(StateError, match="inside of itself"), amp.fp32(optimizer):
        pass
    with amp.autocast():
        loss = model(0)
    amp.backward(loss)
    with amp.fp32(optimizer), pytest.raises(StateError):
        amp.step()
    assert torch.equal(model.first.weight, low_of(Net().first.weight, BF16))
    amp.step()
    assert not torch.equal(model.first.weight, low_of(Net().first.weight, BF16))
