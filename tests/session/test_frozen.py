"""Weights that no optimizer updates: rounded for the model's arithmetic, and given back as they were."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mezzo
from mezzo import MixedPrecision, NumericsError, optim

from ..support.tables import thinned

POLICIES = [f"O2,dtype={dtype},emulate=true" for dtype in ("float16", "bfloat16")]
LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
MAKE = {
    "torch": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
    "mezzo": lambda params: optim.AdamW(params, lr=0.01),
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """A frozen part with batch norm and a buffer, and a head that trains."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.register_buffer("shift", torch.randn(6))
        self.backbone.requires_grad_(False).eval()
        nn.init.normal_(self.backbone[1].weight)

    def forward(self, x):
        return self.head(self.backbone(x + self.shift))


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def loss_of(model, number):
    return cross_entropy(model(torch.sin(torch.arange(48.0) * (number + 1)).view(8, 6)), torch.arange(8) % 3)


def five_lines(model, optimizer, policy):
    amp = MixedPrecision(model, optimizer, policy)

    def step(number):
        with amp.autocast():
            loss = loss_of(model, number)
        amp.backward(loss)
        amp.step()
        amp.zero_grad()

    return amp, step


def own_loop(model, optimizer, policy):
    amp = mezzo.attach(model, optimizer, policy)

    def step(number):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()

    return amp, step


def frozen_part(model):
    return {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("head")}


@pytest.mark.parametrize("policy, make, begin", thinned(POLICIES, MAKE, [five_lines, own_loop], every=2))
def test_they_are_given_back_as_they_were(policy, make, begin, bits):
    model = net()
    before, head = bits(frozen_part(model)), model.head.weight.detach().clone()
    amp, step = begin(model, MAKE[make](model.head.parameters()), policy)
    assert model.backbone[0].weight.dtype == LOW[policy[9:].partition(",")[0]]  # and that is what computes
    for number in range(3):
        step(number)
        if begin is own_loop:
            assert bits(frozen_part(model)) == before
            assert bits(frozen_part(copy.deepcopy(model))) == before
    amp.close()
    assert bits(frozen_part(model)) == before
    assert not torch.equal(model.head.weight, head)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_handle_keeps_them_from_session_to_session(policy, bits):
    model = net()
    before, handle = bits(frozen_part(model)), mezzo.prepare(model, policy)
    for _ in range(2):
        amp = MixedPrecision(handle, MAKE["mezzo"](model.head.parameters()))
        with amp.autocast():
            loss = loss_of(model, 0)
        amp.backward(loss)
        amp.step()
        amp.close()
    handle.remove()
    assert bits(frozen_part(model)) == before


@pytest.mark.parametrize("way", ["in place", "through .data", "other data"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_element_that_is_written_counts_to_half_a_spacing(policy, way):
    """A momentum encoder, for one, is written by the program itself; all other elements keep every bit."""
    model = net()
    weight, before = model.backbone[0].weight, model.backbone[0].weight.detach().clone()
    amp, step = own_loop(model, MAKE["torch"](model.head.parameters()), policy)
    step(0)
    with torch.no_grad():
        if way == "in place":
            weight[0] += 1
        elif way == "through .data":
            weight.data[0] += 1
        else:
            weight.data = torch.cat([weight[:1] + 1, weight[1:]])
    written, half = weight[0].detach().float(), torch.finfo(weight.dtype).eps / 2
    assert ((written - before[0]) > 0.9).all()
    kept = [model.state_dict()["backbone.0.weight"], copy.deepcopy(model).backbone[0].weight.detach()]
    amp.detach()
    for found in (*kept, weight.detach()):
        assert ((found[0] - written).abs() <= half * written.abs()).all()
        assert torch.equal(found[1:], before[1:])


@pytest.mark.parametrize("begin", [five_lines, own_loop])
@pytest.mark.parametrize("policy", POLICIES)
def test_values_that_are_loaded_into_a_session_are_kept_whole(policy, begin, bits):
    model, other = net(), net(seed=1)
    amp, _ = begin(model, MAKE["torch"](model.head.parameters()), policy)
    model.load_state_dict(other.state_dict())
    amp.close()
    assert bits(frozen_part(model)) == bits(frozen_part(other))


def test_a_rounded_checkpoint_leaves_what_rounds_to_it(bits):
    model = net()
    before = bits(frozen_part(model))
    amp, step = five_lines(model, MAKE["torch"](model.head.parameters()), POLICIES[1])
    saved = copy.deepcopy([model.state_dict(), amp.state_dict()])
    step(0)
    model.load_state_dict(saved[0])
    amp.load_state_dict(saved[1])
    amp.close()
    assert bits(frozen_part(model)) == before


def test_values_that_do_not_fit_are_refused_while_they_load(bits):
    model = net()
    amp, _ = five_lines(model, MAKE["torch"](model.head.parameters()), POLICIES[0])
    large, before = model.state_dict(), bits(model.state_dict())
    large = {name: value.clone().float() for name, value in large.items()}
    large["backbone.0.weight"][0, 0] = 1e5
    with pytest.raises(NumericsError, match=r"beyond the range of the model's dtype\n  where  weight"):
        model.backbone[0].load_state_dict({"weight": large["backbone.0.weight"], "bias": large["backbone.0.bias"]})
    assert bits(model.state_dict()) == before
    amp.close()


@pytest.mark.parametrize(
    "policy, make, begin, is_frozen", thinned(POLICIES, MAKE, [five_lines, own_loop], [False, True], every=4)
)
def test_a_layer_that_thaws_goes_on_from_the_weights_that_it_had(policy, make, begin, is_frozen, bits):
    """As if its group had been there from the beginning, without gradients: the oracle is that run."""

    def run(early):
        model = net()
        layer = model.backbone[3]
        groups = [{"params": [*model.head.parameters()]}]
        optimizer = MAKE[make]([*groups, {"params": [*layer.parameters()]}] if early else groups)
        amp, step = begin(model, optimizer, policy)
        for number in range(2):
            step(number)
        if not early and is_frozen:
            optimizer.add_param_group({"params": [*layer.parameters()]})
        layer.requires_grad_(True)
        if not early and not is_frozen:
            optimizer.add_param_group({"params": [*layer.parameters()]})
        for number in range(2, 5):
            step(number)
        amp.close()
        return model

    late, early, still = run(early=False), run(early=True), net()
    assert bits(late.state_dict()) == bits(early.state_dict())
    assert not torch.equal(late.backbone[3].weight, still.backbone[3].weight)
    assert torch.equal(late.backbone[0].weight, still.backbone[0].weight)


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_that_thaws_may_close_before_its_first_step(policy, make, bits):
    model = net()
    before = bits(frozen_part(model))
    optimizer = MAKE[make](model.head.parameters())
    amp, step = own_loop(model, optimizer, policy)
    step(0)
    model.backbone[3].requires_grad_(True)
    optimizer.add_param_group({"params": [*model.backbone[3].parameters()]})
    assert bits(frozen_part(model)) == before
    amp.detach()
    assert bits(frozen_part(model)) == before


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_optimizer_that_comes_later_takes_them_over_whole(policy, make):
    model = net()
    before = model.backbone[3].weight.detach().clone()
    amp, step = own_loop(model, MAKE[make](model.head.parameters()), policy)
    step(0)
    model.backbone[3].requires_grad_(True)
    amp.add(later := MAKE[make](model.backbone[3].parameters()))
    assert torch.equal(model.state_dict()["backbone.3.weight"], before)
    assert len(later.param_groups) == 1


@pytest.mark.parametrize("policy, make, begin", thinned(POLICIES, MAKE, [five_lines, own_loop], every=2))
def test_parts_that_take_turns_move_in_their_own_turns_only(policy, make, begin):
    """``requires_grad_`` flips in every step, as in a GAN."""
    model = net()
    parts = [model.head, model.backbone[3]]
    optimizers = [MAKE[make](part.parameters()) for part in parts]
    amp = (MixedPrecision if begin is five_lines else mezzo.attach)(model, optimizers, policy)
    for number in range(6):
        turn = number % 2
        for place, part in enumerate(parts):
            part.requires_grad_(place == turn)
        before = [part.weight.detach().clone() for part in parts]
        if begin is five_lines:
            with amp.autocast():
                loss = loss_of(model, number)
            amp.backward(loss, optimizers[turn])
            assert not amp.step(optimizers[turn]).skipped
            amp.zero_grad()
        else:
            optimizers[turn].zero_grad()
            loss_of(model, number).backward()
            optimizers[turn].step()
        assert [torch.equal(part.weight, was) for part, was in zip(parts, before, strict=True)] == [
            turn == 1,
            turn == 0,
        ]
    amp.close()
    still = net()
    assert torch.equal(model.backbone[0].weight, still.backbone[0].weight)
    assert all(param.dtype == torch.float32 and param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_for_any_policy_holds_them_whole(policy, bits):
    """``amp.stateful()``, into a session under O1, and back into one under O2."""
    model, fp32, again = net(), net(seed=1), net(seed=2)
    before = frozen_part(model)
    weights = {name: value for name, value in before.items() if name in dict(model.named_parameters())}
    amp, step = five_lines(model, MAKE["torch"](model.head.parameters()), policy)
    step(0)
    saved = copy.deepcopy(amp.stateful().state_dict())
    for other, level in ((fp32, "O1,emulate=true"), (again, policy)):
        session, _ = five_lines(other, MAKE["torch"](other.head.parameters()), level)
        session.stateful().load_state_dict(copy.deepcopy(saved))
        session.close()
        assert bits({name: value for name, value in frozen_part(other).items() if name in weights}) == bits(weights)
