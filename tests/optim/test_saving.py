"""State dicts of mezzo's optimizers against torch's: hooks, counts, notes of the user's, numbers of NumPy's."""

import copy
import io
from fractions import Fraction

import numpy
import pytest
import torch
from torch import nn

from mezzo import optim
from mezzo.errors import StateError

from ..support.refusals import refused

PAIRS = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {}),
    "adam": (optim.Adam, torch.optim.Adam, {}),
    "sgd": (optim.SGD, torch.optim.SGD, {"momentum": 0.9}),
}
EVERY = [optim.AdamW, optim.Adam, optim.SGD, optim.Lion]


def weights(count=2):
    return [nn.Parameter(torch.linspace(-1, 1, 5 + number)) for number in range(count)]


def train(params, optimizer, steps=3):
    for step in range(steps):
        for index, param in enumerate(params):
            param.grad = torch.full_like(param, 0.1 * (step + index + 1))
        optimizer.step()


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Hooks --------------------------------------------------------------------------------------------------


def watched(optimizer_class, options):
    """Train one, and load it into another, with all four kinds of hooks, of which some replace what they see."""
    seen = []
    params = weights()
    one, two = optimizer_class(params, lr=0.1, **options), optimizer_class(weights(), lr=0.5, **options)
    train(params, one)

    def note(name, state):
        kept = sorted((index, *sorted(values)) for index, values in state["state"].items())
        dtypes = {value.dtype for values in state["state"].values() for n, value in values.items() if n != "step"}
        seen.append((name, sorted(state), kept, dtypes, [group["lr"] for group in state["param_groups"]]))

    def add(optimizer, state):
        note("saved, first", state)
        state["extra"] = 1  # in place

    def replace(optimizer, state):
        note("saved, second", state)
        return {**state, "version": 7}

    def migrate(optimizer, state):
        note("loaded, first", state)
        groups = [{**group, "lr": 0.25} for group in state["param_groups"]]
        return {"state": {index: dict(values) for index, values in state["state"].items()}, "param_groups": groups}

    def edit(optimizer, state):
        note("loaded, second", state)
        for values in state["state"].values():
            for name, value in values.items():
                values[name] = value + 1 if name == "step" else value * 2

    one.register_state_dict_pre_hook(lambda optimizer: seen.append(("about to be saved", len(optimizer.state))))
    one.register_state_dict_post_hook(replace)
    one.register_state_dict_post_hook(add, prepend=True)
    two.register_load_state_dict_pre_hook(edit)
    two.register_load_state_dict_pre_hook(migrate, prepend=True)
    two.register_load_state_dict_post_hook(lambda optimizer: seen.append(("loaded", len(optimizer.state))))
    saved = one.state_dict()
    before = copy.deepcopy(saved)
    two.load_state_dict(saved)
    assert saved.keys() == before.keys()
    assert saved["param_groups"] == before["param_groups"]  # a hook got a copy
    return seen, sorted(saved), two


@pytest.mark.parametrize("pair", PAIRS)
def test_all_four_kinds_of_hooks_run_where_torch_s_do_and_see_what_torch_s_see(pair):
    mine, theirs, options = PAIRS[pair]
    (one, keys, first), (two, same_keys, second) = watched(mine, options), watched(theirs, options)
    if pair == "sgd":  # torch's counts nothing
        one = [
            (*event[:2], [tuple(n for n in k if n != "step") for k in event[2]], *event[3:])
            if len(event) > 2
            else event
            for event in one
        ]
    assert one == two
    assert keys == same_keys
    assert "version" in keys
    assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] == 0.25
    name = "momentum_buffer" if pair == "sgd" else "exp_avg"
    for a, b in zip(first.state.values(), second.state.values(), strict=True):
        torch.testing.assert_close(a[name], b[name], rtol=2**-21, atol=1e-9)
        assert pair == "sgd" or int(a["step"]) == int(b["step"]) == 4


# Counts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_torch_goes_on_from_a_saved_count(options):
    """Its fused kernels too, which want a float32."""
    one, other = weights(), weights()
    first = optim.AdamW(one, lr=0.1)
    train(one, first)
    second = torch.optim.AdamW(other, lr=0.1, **options)
    second.load_state_dict(through_a_file(first.state_dict()))
    train(other, second)
    assert {float(state["step"]) for state in second.state.values()} == {6.0}


# What users note down, and numbers of NumPy's -----------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [optim.AdamW, optim.SGD])
def test_what_users_note_in_the_state_is_saved_and_loaded(optimizer_class):
    params, others = weights(), weights()
    optimizer, loaded = optimizer_class(params), optimizer_class(others)
    optimizer.state["epoch"] = 3
    optimizer.state["history"] = [1.0, torch.ones(2)]
    train(params, optimizer)
    optimizer.state[params[1]]["tag"] = "second"
    optimizer.state[params[1]]["seen"] = torch.arange(3)
    params[0].grad = None  # counts part, so that all state is gone through
    optimizer.step()
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    assert loaded.state["epoch"] == 3
    assert loaded.state["history"][0] == 1.0
    assert torch.equal(loaded.state["history"][1], torch.ones(2))
    assert loaded.state[others[1]]["tag"] == "second"
    assert torch.equal(loaded.state[others[1]]["seen"], torch.arange(3))
    assert loaded.state_dict()["state"]["epoch"] == 3
    train(others, loaded)
    assert copy.deepcopy(loaded).state["epoch"] == 3


# States of which a part is missing ----------------------------------------------------------------------


def test_a_note_alone_is_no_history():
    params = weights()
    optimizer = optim.AdamW(params, lr=0.1)
    lone = {i: {"tag": "mine"} for i, _ in enumerate(params)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": lone})
    assert all(optimizer.state[param] == {"tag": "mine"} for param in params)
    train(params, optimizer, 1)
    assert all(int(optimizer.state[param]["step"]) == 1 for param in params)


def test_parameters_without_an_entry_begin_anew():
    params = weights()
    optimizer = optim.AdamW(params)
    train(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    assert params[1] not in optimizer.state
    train(params, optimizer, 1)
    assert [int(optimizer.state[param]["step"]) for param in params] == [4, 1]


# Numbers --------------------------------------------------------------------------------------------------


def test_a_count_is_saved_exactly():
    for optimizer_class, count in zip(EVERY * 2, (0, 1, 2**24 - 1, 2**24 + 1, 2**31 + 1, 2**53 - 1), strict=False):
        params, others = weights(), weights()
        optimizer, loaded = optimizer_class(params), optimizer_class(others)
        train(params, optimizer, 1)
        for param in params:
            optimizer.state[param]["step"].fill_(count)
        loaded.load_state_dict(through_a_file(optimizer.state_dict()))
        assert [int(loaded.state[param]["step"]) for param in others] == [count, count]


def test_numbers_of_numpy_s_are_numbers():
    for optimizer_class, number in zip(
        EVERY, (numpy.float32(0.5), numpy.float64(0.5), numpy.float16(0.5), Fraction(1, 2)), strict=True
    ):
        one, other = weights(), weights()
        optimizer, same = optimizer_class(one, lr=number), optimizer_class(other, lr=0.5)
        train(one, optimizer)
        train(other, same)
        for mine, plain in ((optimizer, number / 2), (same, 0.25)):  # in mid-run, as a scheduler does
            mine.param_groups[0]["lr"] = plain
            mine.param_groups[0]["weight_decay"] = numpy.int64(0) if mine is optimizer else 0
        train(one, optimizer)
        train(other, same)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        if not isinstance(number, Fraction):
            saved = through_a_file(optimizer.state_dict())["param_groups"][0]
            assert (type(saved["lr"]), saved["lr"], type(saved["weight_decay"])) == (float, 0.25, int)


# What is no state of this optimizer's -----------------------------------------------------------------------

#: Where a value stands in a state dict, what is put there (None: it is left out), and what the error says of it.
MALFORMED = [
    ((), 3, "this is no optimizer's state: 3, not a mapping"),
    (("state",), [], "has no attribute"),  # of containers of another kind Python says it
    (("param_groups",), {}, "different number of parameter groups"),
    (("param_groups", 0), [0, 1], "indices must be integers"),
    (("param_groups", 0, "params"), 0, "not iterable"),
    (("param_groups", 0, "params", 1), [], "unhashable"),
    (("state", 1), "None", "state[1] is 'None', not a mapping"),
    (("state", 1, "step"), "3", "state[1].step is '3', not a count"),
    (("state", 1, "step"), 10**400, "state[1].step is "),
    (("state", 1, "step"), torch.ones(2), "state[1].step is a tensor, float32 [2], not a count"),
    (("state", 0, "exp_avg"), -1, "state[0].exp_avg is -1, not a dense tensor of real numbers"),
    (("state", 0, "exp_avg"), "x\x1b[2J", "state[0].exp_avg is 'x\\x1b[2J', not a dense tensor"),
    (("state", 0, "exp_avg"), torch.ones(5).to_sparse(), "is a sparse_coo tensor, float32"),
    (("state", 0, "exp_avg"), torch.ones(5, device="meta"), "is a tensor, float32 [5] on meta, not a dense"),
    (("state", 0, "exp_avg"), torch.ones(5, dtype=torch.complex64), "is a tensor, complex64 [5], not a dense"),
    (("state", 0, "exp_avg"), torch.ones(2), "the saved exp_avg belongs to another parameter"),
    (("state", 0, "exp_avg_sq"), None, "the saved state has no exp_avg_sq"),
    (("state", 0, "step"), None, "the saved state has no step"),  # bias corrections follow from it
    (("state", 1, "step"), torch.tensor(-1.0), "the saved step is -"),
    (("state", 1, "step"), torch.tensor(float("nan")), "the saved step is -"),
]  # fmt: skip
#: State of torch's that fits in form, and is another rule's.
OTHERS = [
    (optim.AdamW, lambda params: torch.optim.Adam(params, weight_decay=0.1), "saved weight decay is not decoupled"),
    (optim.Adam, torch.optim.AdamW, "saved weight decay is decoupled, and this optimizer's is not"),
    (optim.AdamW, lambda params: torch.optim.AdamW(params[:1]), "size of optimizer's group"),  # torch's own words
    (optim.AdamW, lambda params: torch.optim.AdamW([{"params": [p]} for p in params]), "different number of parameter"),
]


def test_what_no_optimizer_of_the_kind_has_written_is_named_and_nothing_is_loaded():
    params = weights()
    optimizer = optim.AdamW(params)
    train(params, optimizer)
    good = copy.deepcopy(optimizer.state_dict())
    for path, value, says in MALFORMED:
        bad = entry = copy.deepcopy(good)
        *way, last = path or [None]
        for step in way:
            entry = entry[step]
        if last is None:
            bad = value
        elif value is None:
            del entry[last]
        else:
            entry[last] = value
        with refused((StateError, AttributeError, TypeError, ValueError), says, parts=[optimizer, *params]):
            optimizer.load_state_dict(bad)
    for optimizer_class, make, says in OTHERS:
        mine = optimizer_class(weights())
        with refused((StateError, ValueError), says, parts=[mine]):
            mine.load_state_dict(make(weights()).state_dict())


def test_what_a_hook_returns_is_loaded_and_checked_before():
    """Another library's names, and no count: what a hook is for."""
    params = weights(1)
    optimizer = optim.AdamW(params)
    old = {"state": {0: {"mean": torch.ones(5), "square": torch.ones(5)}}, "param_groups": [{"params": [0], "lr": 0.5}]}
    handle = optimizer.register_load_state_dict_pre_hook(lambda *_: {"state": {}})
    with refused(StateError, "no optimizer's state: param_groups missing", parts=[optimizer]):
        optimizer.load_state_dict(old)
    handle.remove()
    names = {"mean": "exp_avg", "square": "exp_avg_sq"}

    def migrate(_, state):
        renamed = {
            i: {names[n]: v for n, v in s.items()} | {"step": torch.tensor(9.0)} for i, s in state["state"].items()
        }
        return {**state, "state": renamed}

    optimizer.register_load_state_dict_pre_hook(migrate)
    optimizer.load_state_dict(old)
    assert int(optimizer.state[params[0]]["step"]) == 9
    assert optimizer.state[params[0]]["exp_avg"].eq(1).all()
