"""Attached models that a program pickles whole, as ``torch.save(model)`` does: plain FP32 models, without mezzo."""

import copy
import io
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo

from ..loops import batch, network
from .loops import OPTIMIZERS, POLICIES, attached, build, train


class WithoutMezzo(pickle.Unpickler):
    """Loads what can be loaded where mezzo is not installed."""

    def find_class(self, module, name):
        assert not module.startswith("mezzo"), f"{module}.{name}"
        return super().find_class(module, name)


PLAIN = types.ModuleType("plain_pickle")
PLAIN.Unpickler, PLAIN.load = WithoutMezzo, pickle.load


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False, pickle_module=PLAIN)


def pickled(protocol):
    return lambda value: WithoutMezzo(io.BytesIO(pickle.dumps(value, protocol))).load()


WAYS = {"torch.save": saved, "protocol 0": pickled(0), "protocol 4": pickled(4), "deepcopy": copy.deepcopy}


def holds_nothing_of_ours(twin, plain):
    assert vars(twin).keys() == vars(plain).keys()
    for module in twin.modules():
        assert {name: kept for name, kept in vars(module).items() if "hook" in name and kept} == {
            name: kept for name, kept in vars(module).items() if name == "_is_full_backward_hook" and kept
        }


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_a_plain_model_with_the_masters_values(policy):
    model, built = build()
    with attached(model, built, POLICIES[policy]) as amp:
        train(model, built, spoilt=())
        for way in WAYS.values():
            twin = way(model)
            assert all(map(torch.equal, [p.detach().float() for p in amp.master_params()], twin.parameters()))
            assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float32 for p in twin.parameters())
            assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
            holds_nothing_of_ours(twin, network())
        train(twin, OPTIMIZERS["SGD"](twin.parameters()), spoilt=())
        train(model, built, spoilt=())  # and the model itself goes on


@pytest.mark.parametrize("policy", ["O1", "O2, bfloat16", "O3, bfloat16"])
@pytest.mark.parametrize("optimizer", ["SGD", "mezzo"])
def test_parts_alone_and_inside_of_others_are_as_plain(policy, optimizer):
    model, built = build(optimizer)
    with attached(model, built, POLICIES[policy]):
        train(model, built, steps=range(1), spoilt=())
        for way in WAYS.values():
            held = way({"epoch": 3, "all": model, "part": model[0], "list": nn.ModuleList([model])})
            assert held["part"] is held["all"][0] is held["list"][0][0]
            for part in (held["part"], way(model[0])):
                assert all(map(torch.equal, model[0].state_dict().values(), part.state_dict().values()))
                holds_nothing_of_ours(part, network()[0])


class Tied(nn.Module):
    """Ties two weights, has a list of its parameters, and a module that keeps one, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.cells = nn.LSTM(4, 4)
        self.register_buffer("shift", torch.full((4,), 1 / 3))
        self.decayed = {"weights": [self.embed.weight, self.cells.weight_ih_l0]}
        self.decayed["itself"] = self.decayed

    def forward(self, tokens):
        return self.head(self.cells(self.embed(tokens) + self.shift)[0])


@pytest.mark.parametrize("policy", ["O1", "O2, bfloat16", "O3, bfloat16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "mezzo"])
def test_what_was_one_tensor_is_one_tensor(policy, optimizer):
    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(8).view(2, 4)
    built = OPTIMIZERS[optimizer](model.parameters())
    with attached(model, built, POLICIES[policy]):
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        built.step()
        for way in WAYS.values():
            twin, again = way(model), way(model)
            assert twin.head.weight is twin.embed.weight is twin.decayed["weights"][0]
            assert twin.cells.weight_ih_l0 is twin.cells._flat_weights[0] is twin.decayed["weights"][1]
            assert again.head.weight is again.embed.weight is not twin.head.weight
            assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
            assert twin(tokens).dtype == torch.float32


@pytest.mark.parametrize("policy", ["O1", "O2, bfloat16", "O2", "O3, bfloat16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "mezzo"])
def test_an_optimizer_beside_it_trains_it(policy, optimizer):
    model, built = build(optimizer)
    amp = mezzo.attach(model, built, POLICIES[policy])
    train(model, built, spoilt=())
    save = (lambda value: pickle.loads(pickle.dumps(value))) if optimizer == "mezzo" else saved
    copies = [way(each) for way in (save, copy.deepcopy) for each in ([model, built], [built, model])]
    alone = save(built)
    assert {param.dtype for group in alone.param_groups for param in group["params"]} == {torch.float32}
    amp.detach()
    assert not {"__deepcopy__", "__reduce_ex__"} & vars(built).keys()
    train(model, built, spoilt=())
    for one, other in copies:
        twin, theirs = (one, other) if isinstance(one, nn.Module) else (other, one)
        train(twin, theirs, spoilt=())
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_pickle_has_the_values_of_now_and_what_is_the_users():
    model, built = build()
    model[0].weight.is_first = True
    model.register_forward_hook(Doubles())
    with attached(model, built, "O2,dtype=bfloat16,emulate=true") as amp:
        train(model, built, spoilt=())
        model[2].weight.requires_grad_(False)
        first = saved(model)
        for way in (saved, copy.deepcopy):
            with torch.no_grad():
                model[0].weight.mul_(0.5)
            twin = way(model)
            assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
            assert not torch.equal(first[0].weight, twin[0].weight)
        assert [p.requires_grad for p in first.parameters()] == [p.requires_grad for p in model.parameters()]
        assert first[0].weight.is_first
        assert [type(hook) for hook in first._forward_hooks.values()] == [Doubles]
        assert all(p.dtype == torch.float32 for p in amp.master_params())
    assert torch.equal(saved(model)(batch(0)[0]), model(batch(0)[0]))


class Doubles:
    def __call__(self, module, args, output):
        return 2 * output


def halved(self, x):
    return nn.Sequential.forward(self, x) / 2


def test_what_a_program_has_bound_itself_is_in_a_copy_and_stays():
    model, built = build()
    model.forward = types.MethodType(halved, model)
    own = vars(model)["forward"]
    with attached(model, built, "O1,emulate=true"):
        twin = copy.deepcopy(model)
        model[0].forward = later = model[0].forward
        assert torch.equal(twin(batch(0)[0]), halved(network(), batch(0)[0]))
        assert vars(twin)["forward"].__self__ is twin
    assert vars(model)["forward"] is own
    assert vars(model[0])["forward"] is later


@pytest.mark.parametrize("policy", ["O1", "O2, bfloat16"])
def test_a_shallow_copy_shares_what_the_model_has(policy):
    model, built = build()
    with attached(model, built, POLICIES[policy]):
        twin = copy.copy(model)
        assert twin is not model
        assert all(mine is theirs for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True))
        assert twin._forward_hooks is model._forward_hooks


def test_a_class_that_copies_and_pickles_itself_does_so_of_plain_values():
    torch.manual_seed(0)
    model = Kept()
    built = OPTIMIZERS["SGD"](model.parameters())
    with attached(model, built, POLICIES["O2, bfloat16"]):
        functional.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
        built.step()
        for way in WAYS.values():
            twin = way(model)
            assert twin.notes == ("copied" if way is copy.deepcopy else "unpickled")
            assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
            assert {p.dtype for p in twin.parameters()} == {torch.float32}
            holds_nothing_of_ours(twin, Kept())


class Kept(nn.Linear):
    """Has ways of its own to be copied and pickled."""

    def __init__(self):
        super().__init__(4, 4)
        self.notes = "built"

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo), notes="copied")
        return made

    def __reduce__(self):
        return remade, (type(self), (dict(vars(self)), ["more"]))


def remade(kind, state):
    made = kind.__new__(kind)
    vars(made).update(state[0], notes="unpickled")
    return made
