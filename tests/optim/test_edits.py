"""``optimizer.state`` is the user's: what is put there between two steps, the next one goes on from, as torch's."""

import copy
import random
from collections import defaultdict

import pytest
import torch
from torch import nn

import mezzo
from mezzo import optim
from mezzo.errors import StateError
from mezzo.step.moments import decode, encode

from ..support.refusals import refused
from .halved import halved
from .test_optim import give_gradients, parameters, train, ulps

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class PlainLion(torch.optim.Optimizer):
    """Lion in torch's operations, whose state is the momentum alone, made in the first step that finds none."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in (candidate for candidate in group["params"] if candidate.grad is not None):
                state, (beta1, beta2) = self.state[param], group["betas"]
                momentum = state.setdefault("exp_avg", torch.zeros_like(param))
                param.sub_((momentum * beta1 + (1 - beta1) * param.grad).sign(), alpha=group["lr"])
                momentum.mul_(beta2).add_(param.grad, alpha=1 - beta2)


PAIRS = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (optim.Adam, torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9}),
    "dampening": (optim.SGD, torch.optim.SGD, {"momentum": 0.8, "dampening": 0.5, "weight_decay": 0.1}),
    "nesterov": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "plain": (optim.SGD, torch.optim.SGD, {}),
    "lion": (optim.Lion, PlainLion, {}),
}


# Edits, each done to mezzo's optimizer and to torch's: of the optimizer, a parameter of its, and random numbers.


def moments_of(entry):
    """The moments that there are, in the order of their names."""
    return [(name, entry[name]) for name in sorted(entry) if name != "step" and entry[name] is not None]


def fresh(value, draw):
    """Another moment of the same shape, as large as moments are."""
    return torch.full_like(value, draw.choice([0.0, 0.125, 1.0])).abs()


def assign(optimizer, param, draw):
    for name, value in moments_of(optimizer.state.get(param, {})):
        optimizer.state[param][name] = fresh(value, draw)


def assign_one(optimizer, param, draw):
    for name, value in moments_of(optimizer.state.get(param, {}))[:1]:
        optimizer.state[param][name] = value.clone() * 0.5


def write(optimizer, param, draw):
    for _, value in moments_of(optimizer.state.get(param, {})):
        (value.zero_ if draw.random() < 0.5 else lambda value=value: value.mul_(0.5))()


def count_anew(optimizer, param, draw):
    number = draw.choice([0, 1, 3, 100])
    if "step" in optimizer.state.get(param, {}):
        optimizer.state[param]["step"] = torch.tensor(float(number))


def write_count(optimizer, param, draw):
    number = draw.choice([0, 1, 5])
    if "step" in (entry := optimizer.state.get(param, {})):
        entry["step"] += number


def replace_all(optimizer, param, draw):
    of_params = [(key, entry) for key, entry in optimizer.state.items() if isinstance(key, torch.Tensor)]
    copies = {key: {name: value.clone() for name, value in entry.items()} for key, entry in of_params}
    optimizer.state = defaultdict(dict, copies)


def swap(optimizer, param, draw):
    """Two parameters of one shape change places."""
    one, two = optimizer.param_groups[0]["params"][:2]
    if one in optimizer.state and two in optimizer.state:
        optimizer.state[one], optimizer.state[two] = optimizer.state[two], optimizer.state[one]


def move(optimizer, param, draw):
    if len(optimizer.param_groups) > 1:
        group = optimizer.param_groups.pop()
        optimizer.add_param_group({"params": group["params"], "lr": group["lr"] / 2})


def replace_param(optimizer, param, draw):
    group = optimizer.param_groups[-1]
    index = len(group["params"]) - 1
    old = group["params"][index]
    group["params"][index] = nn.Parameter(old.detach().clone())
    optimizer.state.pop(old, None)


def set_state(optimizer, param, draw):
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


EDITS = {
    "clear": lambda optimizer, param, draw: optimizer.state.clear(),
    "put anew": lambda optimizer, param, draw: setattr(optimizer, "state", defaultdict(dict)),
    "pop": lambda optimizer, param, draw: optimizer.state.pop(param, None),
    "empty": lambda optimizer, param, draw: optimizer.state.update({param: {}}),
    "assign": assign,
    "assign one": assign_one,
    "write": write,
    "count": count_anew,
    "write count": write_count,
    "copies": replace_all,
    "same": lambda optimizer, param, draw: optimizer.state.update({param: dict(optimizer.state.get(param, {}))}),
    "swap": swap,
    "move": move,
    "other parameter": replace_param,
    "set state": set_state,
    "load": lambda optimizer, param, draw: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "note": lambda optimizer, param, draw: optimizer.state.update({"epoch": draw.randrange(9)}),
}


def groups_of(params):
    return [{"params": params[:3], "lr": 0.05}, {"params": params[3:]}]


def shapes(seed):
    """Parameters of which the first two have one shape."""
    first, *rest = parameters(seed=seed)
    return [nn.Parameter(first.detach() * 0.5), first, *rest]


def in_groups(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pair", PAIRS)
def test_whatever_is_put_into_the_state_steps_are_torch_s(pair, seed):
    mine, theirs, options = PAIRS[pair]
    ours, other = (optimizer_class(groups_of(shapes(seed)), lr=0.01, **options) for optimizer_class in (mine, theirs))
    draw, done = random.Random(f"{pair} {seed}"), []
    for step in range(25):
        for index in range(len(in_groups(ours))):
            if draw.random() < 0.1:  # counts part
                in_groups(ours)[index].grad = in_groups(other)[index].grad = None
        ours.step()
        other.step()
        assert ulps(in_groups(ours), in_groups(other)) <= 64, done
        for one, two in zip(in_groups(ours), in_groups(other), strict=True):
            agree(ours.state.get(one, {}), other.state.get(two, {}), done)
        same_keys(ours.state_dict(), other.state_dict())
        if draw.random() < 0.7:
            name, index, number = draw.choice(list(EDITS)), draw.randrange(5), draw.random()
            done.append((step, name, index))
            for optimizer in (ours, other):
                EDITS[name](optimizer, in_groups(optimizer)[index], random.Random(number))
        for optimizer in (ours, other):
            give_gradients(in_groups(optimizer), step)


def agree(one, two, done):
    """Two states of a parameter hold the same; what torch does not count is not compared."""
    for name, value in moments_of(two):
        torch.testing.assert_close(one[name], value, rtol=2**-18, atol=2**-22, msg=lambda text: f"{done}: {text}")
    assert [name for name, _ in moments_of(one)] == [name for name, _ in moments_of(two)]
    if "step" in two:
        assert float(one["step"]) == float(two["step"]), done


def same_keys(one, two):
    """Two state dicts have the same names; torch's SGD counts nothing."""
    of_params = [
        {key: set(entry) - {"step"} for key, entry in state_dict["state"].items() if key != "epoch"}
        for state_dict in (one, two)
    ]
    one, two = ({key: names for key, names in entries.items() if names} for entries in of_params)
    assert one == two


# Moments of low dtypes: what the state holds is what is saved, and what is saved goes on alike --------------------


LOW_EDITS = [
    "clear",
    "put anew",
    "pop",
    "empty",
    "assign",
    "assign one",
    "write",
    "copies",
    "same",
    "swap",
    "move",
    "set state",
]
STORED = [(FP32, "bfloat16"), (FP32, "int8"), (BF16, "int8"), (FP16, "float32"), (BF16, "bfloat16")]
KINDS = {
    "adamw": (optim.AdamW, {}),
    "amsgrad": (optim.Adam, {"amsgrad": True}),
    "nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "lion": (optim.Lion, {}),
}


def of_numbers(name):
    """An edit, told numbers for moments where there are codes."""

    def edit(optimizer, param, draw):
        entry = optimizer.state.get(param, {})
        seen = {key: value for key, value in entry.items() if not key.endswith("_scale")}
        for key in [key for key in seen if key.endswith("_codes")]:
            whole = key.removesuffix("_codes")
            if name in ("assign", "assign one") and (name == "assign" or key == "exp_avg_codes"):
                entry[whole] = fresh(seen[key].float(), draw)
            elif name == "write":
                seen[key].zero_()
        if not any(key.endswith("_codes") for key in seen) or name not in ("assign", "assign one", "write"):
            EDITS[name](optimizer, param, draw)

    return edit


@pytest.mark.parametrize("dtype, state_dtype", STORED)
@pytest.mark.parametrize("optimizer_class", KINDS)
def test_what_the_state_holds_is_what_is_saved_and_used(optimizer_class, dtype, state_dtype):
    make, options = KINDS[optimizer_class]
    for number, name in enumerate(LOW_EDITS):
        params, others = shapes(0), shapes(0)
        one, two = (
            make(groups_of(param_list), lr=0.01, state_dtype=state_dtype, **options) for param_list in (params, others)
        )
        for param_list in (params, others):
            halved(param_list, dtype)
        train(params, one, range(3))
        of_numbers(name)(one, params[number % 5], random.Random(number))
        if name == "move":
            two.add_param_group({"params": two.param_groups.pop()["params"]})
        two.load_state_dict(copy.deepcopy(one.state_dict()))
        with torch.no_grad():
            for mine, its in zip(others, params, strict=True):
                mine.copy_(its)
        train(params, one, range(3, 6))
        train(others, two, range(3, 6))
        assert all(map(torch.equal, params, others)), name
        for mine, its in zip(params, others, strict=True):
            assert one.state[mine].keys() == two.state[its].keys(), name
            assert all(map(torch.equal, one.state[mine].values(), (two.state[its][key] for key in one.state[mine]))), (
                name
            )


def test_numbers_assigned_to_a_moment_in_codes_are_rounded_to_codes():
    (param,) = params = [nn.Parameter(torch.ones(40))]
    optimizer = optim.SGD(params, lr=0.5, momentum=0.5, state_dtype="int8")
    train(params, optimizer, range(2))
    entry, given = optimizer.state[param], torch.linspace(-1, 1, 40)
    entry["momentum_buffer"] = given.clone()
    param.grad = torch.zeros(40)
    before = param.detach().clone()
    optimizer.step()
    assert set(entry) == {"step", "momentum_buffer_codes", "momentum_buffer_scale"}
    rounded = decode(*encode(given))
    torch.testing.assert_close(before - param, 0.25 * rounded, rtol=1e-6, atol=1e-6)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"] == "codes"  # which torch's SGD cannot take for one


def test_another_dtype_of_the_moments_holds_from_the_next_step_on():
    params, others = parameters(), parameters()
    one, two = (optim.AdamW(param_list, lr=0.01) for param_list in (params, others))
    train(params, one, range(2))
    one.param_groups[0]["state_dtype"] = "int8"
    train(params, one, range(2, 4))
    coded = optim.AdamW(others, lr=0.01, state_dtype="int8")
    train(others, two, range(2))
    coded.load_state_dict(two.state_dict())
    train(others, coded, range(2, 4))
    assert all(map(torch.equal, params, others))


# One optimizer's state in another's, and mappings of the user's own -----------------------------------------------


@pytest.mark.parametrize("pair", ["adamw", "momentum"])
def test_two_optimizers_exchange_their_states(pair):
    ends = []
    for optimizer_class in PAIRS[pair][:2]:
        params = parameters()
        one, two = (optimizer_class(params, lr=lr, **PAIRS[pair][2]) for lr in (0.01, 0.02))
        train(params, one, range(3))
        train(params, two, range(3, 5))
        one.state, two.state = two.state, one.state
        for step in range(5, 9):
            train(params, (one, two)[step % 2], [step])
        ends.append([param.detach() for param in params])
    assert ulps(*ends) <= 32


def test_any_mapping_is_a_state():
    class Own(dict):
        pass

    ends = []
    for put in (lambda state: dict(state), lambda state: Own({key: Own(entry) for key, entry in state.items()}), None):
        params = parameters()
        optimizer = optim.AdamW(params, lr=0.01)
        if put is not None:
            optimizer.state = put({})  # which makes no entry by itself
        train(params, optimizer, range(3))
        if put is not None:
            optimizer.state = put(optimizer.state)
            kept = optimizer.state[params[0]]
            mean = kept["exp_avg"]
            train(params, optimizer, range(3, 5))
            assert optimizer.state[params[0]] is kept
            assert kept["exp_avg"] is mean
            assert int(kept["step"]) == 5
        else:
            train(params, optimizer, range(3, 5))
        ends.append(params)
    assert all(map(torch.equal, ends[0], ends[2]))
    assert all(map(torch.equal, ends[1], ends[2]))


def test_a_moment_that_is_assigned_is_the_one_that_steps_write():
    """As of torch's optimizers; one that lies otherwise is copied, and is as it was."""
    params = parameters()
    optimizer = optim.AdamW(params, lr=0.01)
    train(params, optimizer, range(2))
    entry = optimizer.state[params[0]]
    mine, spread, wide = torch.zeros(5, 7), torch.zeros(()).expand(5, 7), torch.zeros(3, dtype=torch.float64)
    entry["exp_avg"], entry["exp_avg_sq"] = mine, spread
    optimizer.state[params[1]]["exp_avg"] = wide
    train(params, optimizer, range(2, 3))
    assert entry["exp_avg"] is mine
    assert mine.any()
    assert entry["exp_avg_sq"].stride() == (7, 1)
    assert not spread.any()
    assert not wide.any()
    assert optimizer.state[params[1]]["exp_avg"].dtype == FP32


def test_memory_of_moments_that_a_program_lets_go_of_is_free_before_others_are_made():
    params = [nn.Parameter(torch.ones(64))]
    optimizer = optim.AdamW(params)
    train(params, optimizer, range(2))
    gone = torch.utils.weak.TensorWeakRef(optimizer.state[params[0]]["exp_avg"])
    optimizer.state.clear()
    made, zeros = [], mezzo.optim.optimizer.zeros

    def watched(*args):
        made.append(gone() is None)
        return zeros(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mezzo.optim.optimizer.zeros", watched)
        train(params, optimizer, range(1))
    assert made == [True, True]


@pytest.mark.parametrize("fails_in", ["zeros", "executor_for", "_counted"])
def test_where_memory_runs_out_the_state_is_as_it_was_and_the_step_can_be_taken_again(fails_in, monkeypatch):
    """After a batch that was too large a program goes on with a smaller one: with no half of a state."""
    params, others = shapes(0), shapes(0)
    optimizer, other = (optim.AdamW(groups_of(param_list), lr=0.01) for param_list in (params, others))
    plain, calls = getattr(mezzo.optim.optimizer, fails_in), []

    def fails(*args):
        calls.append(fails_in)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return plain(*args)

    for step in range(4):
        for weights, its in ((params, optimizer), (others, other)):
            give_gradients(weights, step)
            if step == 2:
                its.state.pop(weights[0])
                its.state[weights[4]]["exp_avg"] = torch.ones(())
        if step in (0, 2):
            calls.clear()
            with monkeypatch.context() as patched:
                patched.setattr(mezzo.optim.optimizer, fails_in, fails)
                with refused(torch.OutOfMemoryError, parts=params):
                    optimizer.step()
        optimizer.step()
        other.step()
    assert all(map(torch.equal, params, others))
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 4, 4, 4, 4]


def test_steps_and_edits_in_inference_mode_leave_a_state_that_steps_go_on_from():
    params, others = parameters(), parameters()
    for param_list in (params, others):
        optimizer = optim.AdamW(param_list, lr=0.01)
        give_gradients(param_list, 0)
        with torch.inference_mode(mode=param_list is params):
            optimizer.step()
        train(param_list, optimizer, range(1, 3))
    assert all(map(torch.equal, params, others))


# What no step can use ----------------------------------------------------------------------------------------------


#: The rule, the dtype of its moments, what is done to the state of the first parameter (5×7), and what a step says.
REFUSED = [
    ("adamw", "float32", lambda entry: entry.pop("exp_avg"), "the edited state has no exp_avg", "step 2 of a"),
    ("adamw", "float32", lambda entry: entry.pop("exp_avg_sq"), "the edited state has no exp_avg_sq", "another size"),
    ("adamw", "float32", lambda entry: entry.pop("step"), "the edited state has no step", "optimizer.state.pop(param"),
    ("adamw", "int8", lambda entry: entry.pop("exp_avg_codes"), "the edited state has no exp_avg"),
    ("adamw", "float32", lambda entry: entry.update(exp_avg=0.0), "exp_avg is 0.0, not a dense tensor of real"),
    ("adamw", "float32", lambda entry: entry.update(exp_avg=torch.zeros(5, 6)), "(5, 6) → (5, 7), exp_avg"),
    ("adamw", "float32", lambda entry: entry.update(exp_avg=torch.zeros(5, 7).to_sparse()), "a sparse_coo tensor"),
    ("adamw", "float32", lambda entry: entry.update(exp_avg=torch.zeros(5, 7, dtype=torch.int8)), "codes without"),
    ("adamw", "float32", lambda entry: entry.update(step=-1), "the edited step is -1", "it counts updates"),
    ("adamw", "float32", lambda entry: entry.update(step=torch.tensor(float("nan"))), "the edited step is nan"),
    ("adamw", "float32", lambda entry: entry.update(step=torch.ones(2)), "step is a tensor, float32 [2], not a count"),
    ("nesterov", "float32", lambda entry: entry.update(step="3"), "step is '3', not a count"),
    ("adamw", "int8", lambda entry: entry.pop("exp_avg_scale"), "the edited exp_avg has codes without scales"),
    ("adamw", "int8", lambda entry: entry.update(exp_avg_scale=torch.ones(1, dtype=BF16)), "with scales [1], [2] exp"),
    ("adamw", "int8", lambda entry: entry.update(exp_avg_scale=torch.ones(2, dtype=BF16, device="meta")), "on meta"),
    ("adamw", "int8", lambda entry: entry.update(exp_avg_codes=torch.zeros(5, 7, dtype=torch.uint8)), "another form"),
    ("lion", "float32", lambda entry: entry.update(exp_avg=[0.0]), "exp_avg is a list, not a dense tensor"),
]  # fmt: skip


@pytest.mark.parametrize("optimizer_class, state_dtype, edit, words", [(*row[:3], row[3:]) for row in REFUSED])
def test_what_no_step_can_use_is_refused_before_anything_is_written(optimizer_class, state_dtype, edit, words):
    make, options = KINDS[optimizer_class]
    params = parameters()
    optimizer = make([{"params": params[1:]}, {"params": params[:1]}], lr=0.01, state_dtype=state_dtype, **options)
    train(params, optimizer, range(2))
    before = [param.detach().clone() for param in params]
    good = copy.deepcopy(optimizer.state_dict())
    edit(optimizer.state[params[0]])
    give_gradients(params, 2)
    with pytest.raises(StateError) as caught:
        optimizer.step()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert all(map(torch.equal, before, params))
    optimizer.load_state_dict(good)
    train(params, optimizer, range(2, 4))


def test_an_entry_that_is_no_mapping_is_refused():
    params = parameters()
    optimizer = optim.AdamW(params)
    train(params, optimizer, range(1))
    optimizer.state[params[0]] = None
    optimizer.state[params[1]] = [1.0]
    with refused(StateError, "optimizer.state of float32 [3] is a list, not a mapping"):
        optimizer.step()
    del optimizer.state[params[1]]
    train(params, optimizer, range(1, 3))
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 2, 3, 3]


# In sessions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    ["O0", "O1,dtype=bfloat16,emulate=true", "O2,dtype=float16,emulate=true", "O2,dtype=bfloat16,emulate=true"],
)
@pytest.mark.parametrize("style", ["five lines", "accumulate", "attach"])
def test_edits_between_the_steps_of_a_session_are_honoured(policy, style):
    """A state that is cleared is that of an optimizer which begins: both go on alike, to the bit."""
    ends = []
    for clears in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        if style == "attach":
            amp = mezzo.attach(model, optimizer, policy)
        else:
            amp = mezzo.MixedPrecision(model, optimizer, policy)
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            if step == 3 and clears:
                optimizer.state.clear()
            elif step == 3:  # what an optimizer that begins has
                for entry in optimizer.state.values():
                    for value in entry.values():
                        value.zero_()
            for _ in range(1 + (style == "accumulate")):
                x = torch.randn(4, 8, generator=generator)
                if style == "attach":
                    model(x).square().mean().backward()
                else:
                    with amp.autocast():
                        loss = model(x).square().mean()
                    amp.backward(loss)
            if style == "attach":
                optimizer.step()
                optimizer.zero_grad()
            else:
                amp.step()
                amp.zero_grad()
        amp.detach() if style == "attach" else amp.close()
        ends.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *ends))
