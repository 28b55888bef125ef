"""What a converted model shows: FP32 in state dicts, both ways, in copies, pickles and averages; no trace of ours."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mezzo
from mezzo import prepare

from ..support.tables import pairwise
from .values import BF16, FP16, LOW, Net, kept, low_of, same

POLICIES = {BF16: "O2,dtype=bfloat16", FP16: "O2"}

each_dtype = pytest.mark.parametrize("dtype", LOW, ids=str)


def tensors_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def prepared_net(dtype=BF16, seed=0):
    model = Net(seed)
    before = {name: kept(value, dtype) for name, value in tensors_of(model).items()}
    return model, prepare(model, POLICIES[dtype]), before


def assert_holds(model, values):
    shown = model.state_dict()
    assert shown.keys() == values.keys()
    for name, value in shown.items():
        assert value.dtype == torch.float32, name
        assert torch.equal(value, values[name]), name


# Saving -----------------------------------------------------------------------------------------------------


@each_dtype
def test_a_state_dict_holds_fp32_values_and_tied_ones_once(dtype):
    model, _, before = prepared_net(dtype)
    shown = model.state_dict()
    assert_holds(model, before)
    assert shown["first.weight"] is shown["second.weight"]
    shown["first.weight"].zero_()  # its own memory
    assert_holds(model, before)
    assert type(shown) is type(Net().state_dict())
    assert shown._metadata == Net().state_dict()._metadata
    assert same(model.third.state_dict()["weight"], before["third.weight"])  # under a part's own keys
    around, given = nn.Sequential(nn.Identity(), model).state_dict(), {}
    model.state_dict(destination=given, prefix="1.")
    for each in (around, given):
        assert {key.removeprefix("1.") for key in each} == before.keys()
        assert all(same(value, before[key.removeprefix("1.")]) for key, value in each.items())


def test_two_state_dicts_at_two_times_hold_two_values():
    model, prepared, before = prepared_net()
    first = model.state_dict()
    prepared.halves.write(model.third.weight, before["third.weight"] * 3)
    second = model.state_dict()
    assert same(first["third.weight"], before["third.weight"])
    assert same(second["third.weight"], before["third.weight"] * 3)


# Loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, assign, wraps", pairwise(LOW, [False, True], [False, True]))
def test_fp32_values_are_loaded_whole_into_the_same_objects_and_memory(dtype, assign, wraps):
    model, *_ = prepared_net(dtype)
    given = tensors_of(Net(seed=1))
    params = dict(model.named_parameters(remove_duplicate=False))
    places = {name: param.data_ptr() for name, param in params.items()}
    if wraps:
        nn.Sequential(model).load_state_dict({f"0.{key}": value for key, value in given.items()}, assign=assign)
    else:
        model.load_state_dict(given, assign=assign)
    assert_holds(model, {name: kept(value, dtype) for name, value in given.items()})
    for name, param in params.items():
        assert model.get_parameter(name) is param
        assert type(param) is nn.Parameter
        assert param.data_ptr() == places[name]
        assert torch.equal(param, low_of(given[name], dtype))
    assert model.mean.dtype == dtype
    assert not model.frozen.weight.requires_grad
    assert model.first.weight is model.second.weight


@each_dtype
@pytest.mark.parametrize("assign", [False, True])
def test_low_values_that_a_model_holds_already_leave_its_fp32_values_and_what_is_left_out_stays(dtype, assign):
    model, _, before = prepared_net(dtype)
    model.load_state_dict({name: low_of(value, dtype) for name, value in before.items()}, assign=assign)
    assert_holds(model, before)
    given = {name: low_of(value, dtype) for name, value in tensors_of(Net(seed=1)).items()}
    model.load_state_dict(given, assign=assign)
    held = {name: value.float() if name != "mean" else before[name] for name, value in given.items()}
    assert_holds(model, held)
    keys = model.load_state_dict({"third.bias": torch.full((3,), 0.1), "unknown": torch.ones(2)}, strict=False)
    assert (len(keys.missing_keys), keys.unexpected_keys) == (len(before) - 1, ["unknown"])
    assert_holds(model, held | {"third.bias": kept(torch.full((3,), 0.1), dtype)})
    with pytest.raises(RuntimeError, match="Unexpected key"):  # torch's own words
        model.load_state_dict(before | {"unknown": torch.ones(2)})


# Copies and pickles -----------------------------------------------------------------------------------------


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle 2": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": saved,
    "in a tuple": lambda model: copy.deepcopy((model, 1))[0],
    "around it": lambda model: copy.deepcopy(nn.Sequential(model))[0],
    "pickle around it": lambda model: pickle.loads(pickle.dumps(nn.Sequential(model)))[0],
}
MODELS = {
    "prepared": lambda model: prepare(model, POLICIES[BF16]),
    "in a session": lambda model: mezzo.MixedPrecision(
        model, torch.optim.AdamW(model.parameters()), "O2,dtype=bfloat16,emulate=true"
    ),
}


def traces(model):
    """What a plain module has none of."""
    found = []
    for name, module in model.named_modules():
        plain = vars(nn.Module()).keys() | vars(type(module)(1, 1) if type(module) is nn.Linear else Net()).keys()
        found += [f"{name}.{each}" for each in vars(module) if each not in plain]
        found += [f"{name}.{each}" for each, value in vars(module).items() if each.endswith("hooks") and value]
    return found


def hook(module, args, out):
    module.calls = getattr(module, "calls", 0) + 1


@pytest.mark.parametrize("case, state", [*itertools.product(COPIES, ["prepared"]), ("deepcopy", "in a session")])
def test_a_copy_is_a_plain_fp32_model_which_trains_in_plain_torch(case, state):
    model = Net()
    before = tensors_of(model)
    handle = MODELS[state](model)
    made = COPIES[case](model)
    assert_holds(made, before)
    assert traces(made) == []
    assert made.first.weight is made.second.weight
    assert made.first.weight is not model.first.weight
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in Net().parameters()]
    assert {p.dtype for p in (*made.parameters(), *made.buffers())} == {torch.float32}
    twin = Net()
    for each in (made, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for number in range(3):
            each(number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_holds(made, tensors_of(twin))
    assert_holds(model, before)
    assert model.first.weight.dtype == BF16
    made.half()
    del handle
    part = prepared_net()[0].third
    part.register_forward_hook(hook)  # the user's own stays
    made = COPIES[case](part)
    assert made.weight.dtype == torch.float32
    made(torch.ones(1, 5))
    assert (made.calls, hasattr(part, "calls")) == (1, False)


def test_a_model_and_its_optimizer_that_are_copied_together_train_as_they_would_in_torch():
    both = [(model := Net(), torch.optim.AdamW(model.parameters(), lr=0.1)) for _ in range(2)]
    prepared = prepare(both[0][0], POLICIES[BF16])
    prepared.adopt(both[0][1])
    copied = copy.deepcopy(both[0])
    for model, optimizer in (copied, both[1]):
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {*map(id, model.parameters())}
        for number in range(3):
            model(number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_holds(copied[0], tensors_of(both[1][0]))


# Averages ---------------------------------------------------------------------------------------------------


def assert_is_average(averaged, values):
    wanted = torch.stack([value.double() for value in values]).mean(0)
    assert averaged.dtype == torch.float32
    assert (averaged.double() - wanted).abs().max() <= 2.0**-22 * wanted.abs().max()


@pytest.mark.parametrize("style", ["five lines", "attach"])
def test_averaged_models_average_fp32_values(style):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    make = mezzo.attach if style == "attach" else mezzo.MixedPrecision
    amp = make(model, optimizer, "O2,dtype=bfloat16,emulate=true,loss_scale=none")
    try:
        averaged, seen = AveragedModel(model), []
        assert_holds(averaged.module, tensors_of(model))
        for number in range(4):
            if style == "attach":
                model(number).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                amp.backward(model(number))
                amp.step()
                amp.zero_grad()
            averaged.update_parameters(model)
            seen.append(tensors_of(model)["third.weight"])
        assert_is_average(averaged.module.third.weight.detach(), seen)
    finally:
        amp.close()


class Shadows:
    """An average of weights as many repositories have it: shadows by name, swapped in through ``.data``."""

    def __init__(self, model):
        self.model = model
        self.values = {n: p.detach().float().clone() for n, p in model.named_parameters()}

    def update(self):
        for name, param in self.model.named_parameters():
            self.values[name] = 0.5 * self.values[name] + 0.5 * param.detach()

    def apply(self):
        self.backup = {}
        for name, param in self.model.named_parameters():
            self.backup[name] = param.data
            param.data = self.values[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            param.data = self.backup[name]


def test_shadows_that_are_swapped_in_for_an_evaluation_leave_no_trace():
    runs = []
    for swaps in (False, True):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true,loss_scale=none")
        shadows = Shadows(model)
        for number in range(4):
            with amp.autocast():
                loss = model(number)
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
            shadows.update()
            if swaps:
                shadows.apply()
                with torch.no_grad(), amp.autocast():
                    model(number)
                assert same(model.state_dict()["third.weight"], shadows.values["third.weight"])
                shadows.restore()
        runs.append(tensors_of(model))
    assert_holds(model, runs[0])
