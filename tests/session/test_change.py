"""``amp.change``: values and objects across a change, and the run after it against a fresh session."""

import copy
import itertools

import pytest
import torch
from torch import nn

import mezzo
import mezzo.session.grad_scaler
from mezzo import MixedPrecision, StateError
from mezzo.session.session import weights_of

from .loops import OPTIMIZERS, attached, batch, built, loss_of, network, train

POLICIES = (
    "O0",
    "O1,bf16,emulate=true",
    "O1,fp16,emulate=true,loss_scale=dynamic(init=1024)",
    "O2,bf16,emulate=true",
    "O2,fp16,emulate=true,loss_scale=dynamic(init=512,interval=3)",
    "O3,bf16,emulate=true",
)
ROUNDS = "O3,bf16,emulate=true"
PAIRS = [pair for pair in itertools.product(POLICIES, repeat=2) if pair[0] != pair[1]]
#: Each policy once before, and once after.
ROUND = [*itertools.pairwise((*POLICIES, POLICIES[0]))]


def bits(tensor):
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


def state_of(optimizer):
    """All tensors that an optimizer keeps, by the number of their parameter and their name."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        (number, name): value.clone()
        for number, param in enumerate(params)
        for name, value in optimizer.state.get(param, {}).items()
        if isinstance(value, torch.Tensor)
    }


def values_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        assert torch.equal(bits(one[name]), bits(two[name])), name


def rounded(values, policy):
    """What a policy's storage leaves of FP32 values, by torch's own casts."""
    dtype = torch.bfloat16 if policy == ROUNDS else None
    return {name: value if dtype is None else value.to(dtype).float() for name, value in values.items()}


@pytest.mark.parametrize(
    "before, after, optimizer",
    [(*pair, made) for made in ("AdamW", "mezzo") for pair in PAIRS]
    + [(*pair, made) for made in ("SGD", "fused", "int8") for pair in ROUND],
)
def test_a_change_keeps_values_moments_and_objects(before, after, optimizer):
    make = OPTIMIZERS.get(optimizer, lambda params: mezzo.optim.AdamW(params, lr=1e-2, state_dtype="int8"))
    model, made = built(make)
    amp = MixedPrecision(model, made, before)
    schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
    train(amp, model, 0)
    params, values, moments = list(map(id, model.parameters())), values_of(model), state_of(made)
    rest = copy.deepcopy([made.state_dict()["param_groups"], schedule.state_dict(), amp.stats().steps])
    drawn, wanted = torch.get_rng_state(), rounded(values, after)
    if after == ROUNDS != before and optimizer not in ("mezzo", "int8"):
        with pytest.raises(StateError, match="FP32 state"):
            amp.change(after)
        after, wanted = before, values
    else:
        amp.change(after)
    assert str(amp.policy) == str(mezzo.Policy.of(after))
    assert list(map(id, model.parameters())) == params
    same({name: value.float() for name, value in values_of(model).items()}, {k: v.float() for k, v in wanted.items()})
    if before == ROUNDS != after and optimizer not in ("mezzo", "int8"):
        moments = {key: value.float() for key, value in moments.items()}
    same(state_of(made), moments)
    assert [made.state_dict()["param_groups"], schedule.state_dict(), amp.stats().steps] == rest
    assert torch.equal(torch.get_rng_state(), drawn)
    train(amp, model, 1)
    amp.close()
    assert all(type(param) is nn.Parameter and param.dtype == torch.float32 for param in model.parameters())


# The run after it -----------------------------------------------------------------------------------------------


def fresh_from(model, made, optimizer, policy, scale, make=network):
    """A session that begins under a policy, over a plain model and an optimizer that are given another one's values."""
    twin = make()
    twin.load_state_dict({name: value.float() for name, value in values_of(model).items()})
    twin, twin_made = built(optimizer, twin)
    twin_made.load_state_dict(copy.deepcopy(made.state_dict()))
    amp = MixedPrecision(twin, twin_made, policy)
    if scale is not None:
        amp.load_state_dict({"scale": scale[0], "_growth_tracker": scale[1]})
    return twin, twin_made, amp


def scale_of(amp):
    state = amp.state_dict()["loss_scale"]
    return state["scale"], state["clean_steps"]


def wide(*_):
    """A network with layers that products below sixteen bits take."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(8, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32)]
        return nn.Sequential(*layers, nn.Linear(32, 3))


def assert_goes_on(model, made, amp, optimizer, policy, scale, make=network):
    twin, twin_made, other = fresh_from(model, made, optimizer, policy, scale, make)
    if draws := amp.state_dict().get("products", {}).get("draws"):
        weights_of(other).memories()[0].draws.fill_(draws[0])
    for number in range(10, 15):
        ours, theirs = train(amp, model, number, spoilt=number == 12), train(other, twin, number, spoilt=number == 12)
        assert torch.equal(ours.grad_norm.nan_to_num(), theirs.grad_norm.nan_to_num()), number
        assert float(amp.loss_scale) == float(other.loss_scale)
    same(values_of(model), values_of(twin))
    same(state_of(made), state_of(twin_made))
    other.close()


@pytest.mark.parametrize(
    "before, after, optimizer", [*((*pair, "mezzo") for pair in PAIRS), *((*pair, "SGD") for pair in ROUND)]
)
def test_the_run_goes_on_as_one_that_begins_under_the_policy(before, after, optimizer):
    model, made = built(optimizer)
    amp = MixedPrecision(model, made, before)
    for number in range(4):
        train(amp, model, number, spoilt=number == 2)
    scale = scale_of(amp) if "dynamic" in before and "dynamic" in after else None
    if after == ROUNDS and optimizer == "SGD":
        return  # which is refused, or no other policy
    amp.change(after)
    if before != after:
        assert_goes_on(model, made, amp, optimizer, after, scale)


RULES = (
    "O1,bf16,emulate=true",
    "O1,bf16,emulate=true,fp32_module=1",
    "O1,bf16,emulate=true,low=layer_norm",
    "O2,bf16,emulate=true,fp32_param=1.*",
    "O1,bf16,emulate=true,nvfp4_module=*",
    "O1,bf16,emulate=true,fp8_module=1+3",
    "O2,bf16,emulate=true,mxfp8_module=*",
    "O3,bf16,emulate=true,fp32_module=3",
)


@pytest.mark.parametrize("before, after", [*itertools.pairwise((*RULES, *RULES[::-2], RULES[1]))])
def test_rules_and_recipes_change(before, after):
    model, made = built("mezzo", wide())
    amp = MixedPrecision(model, made, before)
    train(amp, model, 0)
    amp.change(after)
    if before != after:
        assert_goes_on(model, made, amp, "mezzo", after, None, wide)


def test_a_scale_goes_on_within_its_bounds():
    model, made = built()
    amp = MixedPrecision(model, made, "O1,fp16,emulate=true,loss_scale=dynamic(init=1024,interval=2)")
    for number in range(4):
        train(amp, model, number)
    assert float(amp.loss_scale) == 4096
    amp.change("O1,fp16,emulate=true,loss_scale=dynamic(init=2,interval=2)")
    assert float(amp.loss_scale) == 4096
    amp.change("O1,fp16,emulate=true,loss_scale=dynamic(init=2,ceiling=512)")
    assert (float(amp.loss_scale), amp.stats().highest_scale, amp.stats().steps) == (512, 512, 4)
    amp.change("O1,bf16,emulate=true")
    train(amp, model, 5)
    amp.change("O1,fp16,emulate=true,loss_scale=dynamic(init=64)")
    assert float(amp.loss_scale) == 64
    (loss := loss_of(model, 6, amp)).retain_grad()
    amp.backward(loss)
    assert float(loss.grad) == 1.0


def test_histories_go_on_and_no_noise_comes_twice():
    recipe = "emulate=true,fp8_recipe=delayed,fp8_history=4"
    model, made = built("mezzo", wide())
    amp = MixedPrecision(model, made, f"O1,bf16,{recipe},fp8_module=1+3")
    for number in range(3):
        train(amp, model, number)
    before = {name: value.clone() for name, value in amp.state_dict()["products"]["histories"].items()}
    amp.change(f"O2,bf16,{recipe},fp8_module=1+3")
    same(amp.state_dict()["products"]["histories"], before)
    amp.change(f"O2,bf16,{recipe},fp8_module=1")
    same(amp.state_dict()["products"]["histories"], {"1.weight": before["1.weight"]})
    amp.change("O1,bf16,emulate=true,nvfp4_module=1")
    train(amp, model, 3)
    (drawn,) = amp.state_dict()["products"]["draws"]
    amp.change("O1,bf16,emulate=true")
    amp.change("O1,bf16,emulate=true,nvfp4_module=1")
    assert amp.state_dict()["products"]["draws"] == [drawn]
    assert drawn > 0


# Loops of the program's own -------------------------------------------------------------------------------------


class Net(nn.Module):
    """A model with a method beside ``forward``, and a part that is called by itself."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))

    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x) + self.head(self.body(x)), y)


@pytest.mark.parametrize(
    "before, after, optimizer", [*((*pair, "mezzo") for pair in PAIRS), *((*pair, "SGD") for pair in ROUND)]
)
def test_an_attached_run_goes_on_as_one_that_begins_there(before, after, optimizer):
    if before == after or (after == ROUNDS and optimizer == "SGD"):
        return
    model, made = built(optimizer, Net())
    with attached(model, made, before) as amp:
        forward, loss = model.forward, model.loss  # which a program may keep
        for number in range(3):
            made.zero_grad()
            loss(*batch(number)).backward()
            made.step()
        gradients = [param.grad for param in model.parameters()]
        scale = scale_of(amp) if "dynamic" in before and "dynamic" in after else None
        amp.change(after)
        if ROUNDS not in (before, after):
            assert all(param.grad is gradient for param, gradient in zip(model.parameters(), gradients, strict=True))
        values, moments = copy.deepcopy([values_of(model), made.state_dict()])
        train_by_calls(model, made, forward, loss)
        end = values_of(model), state_of(made), float(amp.loss_scale)
    twin, twin_made = built(optimizer, Net())
    twin.load_state_dict({name: value.float() for name, value in values.items()})
    twin_made.load_state_dict({name: value for name, value in moments.items() if name != "mezzo"})
    with attached(twin, twin_made, after) as amp:
        if scale is not None:
            amp.load_state_dict({"scale": scale[0], "_growth_tracker": scale[1]})
        train_by_calls(twin, twin_made, twin.forward, twin.loss)
        same(values_of(twin), end[0])
        same(state_of(twin_made), end[1])
        assert float(amp.loss_scale) == end[2]


def train_by_calls(model, made, forward, loss):
    """Steps by all ways into a model: itself, a method, bound functions of before, a part."""
    for number in range(3, 7):
        made.zero_grad()
        x, y = batch(number)
        total = nn.functional.cross_entropy(model(x), y) + loss(x, y) + forward(x).square().mean()
        (total + model.head(model.norm(model.body(x))).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()


# Beside what else a session does --------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [("O1", "O2"), ("O2", "O3"), ("O3", "O1")], ids="-".join)
def test_an_overflow_after_a_change_is_located_as_in_a_fresh_session(levels):
    def text_of_overflow(*policies):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.125)
        made = mezzo.optim.SGD(model.parameters(), lr=0.0)
        amp = MixedPrecision(model, made, policies[0], on_overflow="locate")
        for policy in policies:
            amp.change(policy)
            with amp.autocast():
                loss = (model(torch.ones(2, 4)) * (float("inf") if policy == policies[-1] else 1.0)).float().sum()
            amp.backward(loss)
            step = amp.step()
            amp.zero_grad()
        amp.close()
        return str(step.overflow)

    policies = [f"{level},bf16,emulate=true" for level in levels]
    assert text_of_overflow(*policies) == text_of_overflow(policies[1]) != "None"


def test_scales_of_inner_gradients_and_a_grad_scaler_go_on():
    model, made = built()
    amp = MixedPrecision(model, made, "O1,fp16,emulate=true,loss_scale=dynamic(init=1024)")
    x = batch(0)[0].requires_grad_()
    with amp.autocast():
        out = model(x)
    (slope,) = amp.grad(out.float().sum(), x, create_graph=True)
    amp.backward(slope.square().sum())
    amp.step()
    amp.zero_grad()
    rows = amp.state_dict()["inner_scales"]
    amp.change("O2,fp16,emulate=true,loss_scale=dynamic(init=1024,interval=5)")
    assert amp.state_dict()["inner_scales"] == rows != []
    scaler = mezzo.session.grad_scaler.SessionScaler(amp)
    for policy in ("O1,fp16,emulate=true,loss_scale=64", "O2,bf16,emulate=true"):
        amp.change(policy)
        scaler.scale(loss_of(model, 1, amp)).backward()
        scaler.step(made)
        scaler.update()
        assert not scaler.last_step.skipped
        made.zero_grad()
