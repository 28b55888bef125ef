"""Moments in codes: loaded from and into other dtypes and memory orders, and what is no state of them."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import mezzo
from mezzo import optim
from mezzo.errors import PolicyError, StateError
from mezzo.step.moments import START, decode, encode, fit

from ..support.refusals import refused
from .halved import halved
from .test_optim import parameters, train

BF16, FP32, INT8, UINT8 = torch.bfloat16, torch.float32, torch.int8, torch.uint8
KINDS = {optim.AdamW: {}, optim.Adam: {"amsgrad": True}, optim.SGD: {"momentum": 0.9}, optim.Lion: {}}


def trained(state_dtype="int8", optimizer_class=optim.AdamW, params=None, steps=3, **options):
    params = parameters() if params is None else params
    optimizer = optimizer_class(params, lr=1e-2, state_dtype=state_dtype, **{**KINDS[optimizer_class], **options})
    train(params, optimizer, range(steps))
    return params, optimizer


def moments(optimizer, param):
    """The moments of a parameter in FP32, by name."""
    state = optimizer.state[param]
    values = {name: value for name, value in state.items() if name != "step" and not name.endswith("_scale")}
    return {
        name.removesuffix("_codes"): decode(v, state[name.replace("_codes", "_scale")])
        if name.endswith("_codes")
        else v.float()
        for name, v in values.items()
    }


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# To other dtypes, and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", KINDS)
def test_moments_of_other_dtypes_become_codes_within_half_a_code_and_codes_what_they_stand_for(optimizer_class):
    for dtype in ("float32", "bfloat16"):
        (params, first), (others, second), (last, third) = (trained(d, optimizer_class, steps=n) for d, n in
            ((dtype, 3), ("int8", 0), (dtype, 0)))  # fmt: skip
        second.load_state_dict(through_a_file(first.state_dict()))
        third.load_state_dict(through_a_file(second.state_dict()))
        for one, two, three in zip(params, others, last, strict=True):
            wide, coded, again = (moments(*sides) for sides in ((first, one), (second, two), (third, three)))
            assert wide.keys() == coded.keys() == again.keys()
            for name, value in coded.items():
                codes = second.state[two][f"{name}_codes"]
                assert codes.dtype == (UINT8 if name.endswith("sq") else INT8)
                scale = encode(wide[name])[1].float().repeat_interleave(32)[: wide[name].numel()].view(wide[name].shape)
                most = (wide[name].abs() + START[codes.dtype] * scale) / 30
                assert ((value - wide[name]).abs() <= most).all(), name
                assert torch.equal(again[name], value.to(getattr(torch, dtype)).float())
            assert int(third.state[three]["step"]) == 3
        train(others, second, range(3, 6))
        train(last, third, range(3, 6))


def test_torchs_optimizer_goes_on_from_what_an_optimizer_in_fp32_has_loaded():
    params, first = trained()
    others, second = trained("float32", steps=0)
    second.load_state_dict(through_a_file(first.state_dict()))
    theirs = torch.optim.AdamW(params, lr=1e-2)
    theirs.load_state_dict(through_a_file(second.state_dict()))
    with torch.no_grad():
        for mine, its in zip(others, params, strict=True):
            mine.copy_(its)
    for weights, its in ((others, second), (params, theirs)):
        train(weights, its, range(3, 6))
    for one, two in zip(params, others, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2.0**-18)


#: Torch's optimizers, and ways of each, that know the moments of ours by name.
READERS = {
    optim.AdamW: (torch.optim.AdamW, torch.optim.Adam, torch.optim.Adamax, torch.optim.RAdam),
    optim.Adam: (torch.optim.Adam,),
    optim.SGD: (torch.optim.SGD,),
    optim.Lion: (torch.optim.AdamW,),
}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"foreach": False, "fused": True}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer_class", READERS)
def test_torch_s_optimizers_take_no_codes_for_moments_and_raise_before_they_write(optimizer_class, way):
    """They would have read 122.0 as a mean, or begun a momentum anew without a word."""
    params, optimizer = trained(optimizer_class=optimizer_class)
    saved = through_a_file(optimizer.state_dict())
    names = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
    for state in (*saved["state"].values(), *optimizer.state.values()):
        assert not any(isinstance(state.get(name), torch.Tensor) for name in names)
    for reader in READERS[optimizer_class]:
        theirs = reader(params, lr=1e-2)
        theirs.load_state_dict(saved)
        theirs.param_groups[0].update(WAYS[way])
        before = [param.detach().clone() for param in params]
        with pytest.raises((KeyError, AttributeError, TypeError, RuntimeError)):
            theirs.step()
        assert all(map(torch.equal, before, params))
    again = optimizer_class(params, lr=1e-2, state_dtype="int8", **KINDS[optimizer_class])
    again.load_state_dict(saved)
    for param in params:
        assert {*again.state[param]} == {*optimizer.state[param]}
        assert all(torch.equal(value, optimizer.state[param][name]) for name, value in again.state[param].items())


def as_before(saved):
    """A state dict as an older release has written it: codes under the names of their moments."""
    names = {"momentum_buffer"} if any("momentum_buffer" in value for value in saved["state"].values()) else set()
    states = {
        index: {n.removesuffix("_codes"): value for n, value in state.items() if n not in names}
        for index, state in saved["state"].items()
    }
    return {**saved, "state": states}


@pytest.mark.parametrize("into", ["int8", "float32"])
@pytest.mark.parametrize("optimizer_class", KINDS)
def test_a_state_of_an_older_release_loads_as_one_of_this_one_does(optimizer_class, into):
    _, optimizer = trained(optimizer_class=optimizer_class)
    saved = through_a_file(optimizer.state_dict())
    assert any(value.dtype == INT8 for value in as_before(saved)["state"][0].values())
    (_, one), (_, two) = (trained(into, optimizer_class, steps=0) for _ in range(2))
    one.load_state_dict(saved)
    two.load_state_dict(as_before(saved))
    for first, second in zip(one.state.values(), two.state.values(), strict=True):
        assert first.keys() == second.keys()
        assert all(map(torch.equal, first.values(), second.values()))


def test_codes_of_an_older_checkpoint_that_was_read_into_fp32_moments_are_refused():
    """Torch's distributed checkpoint copies by name, and casts: of a float, 122.0."""
    _, optimizer = trained()
    saved = as_before(optimizer.state_dict())
    for state in saved["state"].values():
        state |= {name: value.float() for name, value in state.items() if value.dtype in (INT8, UINT8)}
        del state["exp_avg_scale"], state["exp_avg_sq_scale"]
    params, other = trained("float32", steps=1)
    words = "the saved exp_avg is codes without their scales", 'state_dtype="int8"'
    with refused(StateError, *words, parts=[other, *params]):
        other.load_state_dict(saved)


@pytest.mark.parametrize("optimizer_class", [optim.AdamW, optim.SGD])
def test_torch_s_distributed_state_dict_brings_codes_back(optimizer_class):
    def made():
        model = nn.Linear(7, 5)
        options = {"momentum": 0.9} if optimizer_class is optim.SGD else {}
        return model, optimizer_class(model.parameters(), lr=1e-2, state_dtype="int8", **options)

    (model, optimizer), (other, its) = made(), made()
    other.load_state_dict(model.state_dict())
    for step in range(4):
        for net in (model, other) if step == 3 else (model,):
            net.zero_grad()
            net(torch.linspace(-1, 1, 7) * (step + 1)).square().sum().backward()
        optimizer.step()
        if step == 2:
            set_optimizer_state_dict(other, its, get_optimizer_state_dict(model, optimizer))
            other.load_state_dict(model.state_dict())
    its.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_what_is_loaded_shares_no_memory_with_what_was_saved():
    _, first = trained()
    saved = first.state_dict()
    before = copy.deepcopy(saved)
    others, second = trained(steps=0)
    second.load_state_dict(saved)
    train(others, second, range(5))
    for index, state in before["state"].items():
        assert all(torch.equal(value, saved["state"][index][name]) for name, value in state.items())


def test_a_maximum_that_is_turned_on_in_mid_run_is_in_codes_too():
    for dtype in (FP32, BF16):
        params = parameters()
        optimizer = optim.AdamW(params, lr=1e-2, state_dtype="int8")
        halved(params, dtype)
        train(params, optimizer, range(2))
        optimizer.param_groups[0]["amsgrad"] = True
        train(params, optimizer, range(2, 5))
        for param in params:
            state, (mean, square, most) = optimizer.state[param], moments(optimizer, param).values()
            assert (state["max_exp_avg_sq_codes"].dtype, state["max_exp_avg_sq_scale"].dtype) == (UINT8, BF16)
            assert fit(state["max_exp_avg_sq_codes"], state["max_exp_avg_sq_scale"])
            assert (most >= 0.8 * square).all()
            assert (mean.shape, int(state["step"])) == (param.shape, 5)


# Memory orders ------------------------------------------------------------------------------------------------


def convolution(memory_format):
    weight = torch.randn((8, 6, 3, 3), generator=torch.Generator().manual_seed(4))
    return [nn.Parameter(weight.contiguous(memory_format=memory_format))]


@pytest.mark.parametrize(
    "formats", [(torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last)]
)
def test_codes_of_another_memory_order_are_decoded_where_strides_tell_and_refused_where_they_do_not(formats):
    there, here = (convolution(layout) for layout in formats)
    _, first = trained(params=there)
    _, second = trained(params=here, steps=0)
    saved = through_a_file(first.state_dict())
    second.load_state_dict(saved)
    for name, value in moments(first, there[0]).items():
        codes = second.state[here[0]][f"{name}_codes"]
        assert codes.stride() == here[0].stride()
        wanted = torch.empty_like(here[0]).copy_(value)  # in this order, so that groups are of other neighbours
        encoded = encode(wanted, codes.dtype)
        assert torch.equal(codes, encoded[0])
        assert torch.equal(second.state[here[0]][f"{name}_scale"], encoded[1])
    for name in ("exp_avg_codes", "exp_avg_sq_codes"):
        saved["state"][0][name] = torch.empty_like(here[0], dtype=saved["state"][0][name].dtype).copy_(
            saved["state"][0][name]
        )
    with refused(
        StateError,
        "the saved exp_avg and its scales are not those of one state",
        "keeps no strides",
        parts=[second, *here],
    ):
        second.load_state_dict(saved)
    train(here, second, range(3, 5))


# What is no state of codes --------------------------------------------------------------------------------------


FORM, FIT = "is in codes of another form", "and its scales are not those of one state"
WITHOUT = "the saved exp_avg has codes without scales"
#: Of the first parameter, which has 35 elements: what is put in whose place (None: it is left out), and what is said.
DAMAGED = [
    ("exp_avg_scale", lambda state: None, WITHOUT),
    ("exp_avg_sq_scale", lambda state: None, "the saved exp_avg_sq has codes without scales"),
    ("exp_avg_scale", lambda state: 1.0, WITHOUT, "exp_avg_scale: 1.0"),
    ("exp_avg_scale", lambda state: state["exp_avg_scale"].view(torch.int16), WITHOUT, "int16 [2]"),
    ("exp_avg_scale", lambda state: state["exp_avg_scale"].to("meta"), WITHOUT, "on meta"),
    ("exp_avg_scale", lambda state: state["exp_avg_scale"].to_sparse(), WITHOUT, "a sparse_coo tensor"),
    ("exp_avg_scale", lambda state: state["exp_avg_scale"].to(torch.complex64), WITHOUT),
    # Groups of 64, and of 16.
    (
        "exp_avg_scale",
        lambda state: state["exp_avg_scale"][::2],
        FORM,
        "with scales [1], [2] expected",
        "32 neighbours",
    ),
    ("exp_avg_sq_scale", lambda state: state["exp_avg_sq_scale"].repeat(2), FORM, "with scales [4], [2] expected"),
    # Two shards of a model on two ranks, put together.
    ("exp_avg_scale", lambda state: state["exp_avg_scale"].view(2, 1), FORM, "with scales [2, 1], [2] expected"),
    ("exp_avg_scale", lambda state: state["exp_avg_scale"][0], FORM, "with scales [], [2] expected"),
    ("exp_avg_codes", lambda state: state["exp_avg_codes"].view(UINT8), FORM, "uint8 [5, 7]"),
    ("exp_avg_sq_codes", lambda state: state["exp_avg_sq_codes"].view(INT8), FORM, "int8 [5, 7]"),
    ("exp_avg_codes", lambda state: state["exp_avg_sq_codes"], FORM),
    ("exp_avg_codes", lambda state: torch.full_like(state["exp_avg_codes"], 60), FIT, "they are damaged"),
    ("exp_avg_sq_codes", lambda state: state["exp_avg_sq_codes"] // 2, FIT),
    ("exp_avg_scale", lambda state: -state["exp_avg_scale"], FIT),
    (
        "exp_avg_codes",
        lambda state: torch.where(state["exp_avg_codes"].abs() == 127, -128, state["exp_avg_codes"]).to(INT8),
        FIT,
    ),
    ("exp_avg_codes", lambda state: state["exp_avg_codes"][:4], "the saved exp_avg belongs to another parameter"),
]


@pytest.mark.parametrize("into", ["int8", "float32"])
def test_damaged_codes_are_refused_and_nothing_is_loaded(into):
    good = copy.deepcopy(trained()[1].state_dict())
    params, optimizer = trained(into, steps=1)
    for entry, damage, *words in DAMAGED:
        bad = copy.deepcopy(good)
        state = bad["state"][0]
        state[entry] = damage(state)
        if state[entry] is None:
            del state[entry]
        with refused(StateError, *words, parts=[optimizer, *params]):
            optimizer.load_state_dict(bad)
    optimizer.load_state_dict(good)


def test_a_dtype_of_the_state_that_is_written_to_a_group_is_looked_at_when_state_is_made():
    for word in ("int7", "bf16", INT8):
        params, optimizer = trained("float32", steps=0)
        optimizer.param_groups[0]["state_dtype"] = word
        with refused(PolicyError, f"unknown state_dtype {str(word)!r}", 'write  state_dtype="', parts=params):
            train(params, optimizer, range(1))


def test_moments_that_were_set_to_zero_are_saved_and_loaded():
    params, optimizer = trained()
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[params[0]][f"{name}_codes"].zero_()
    others, resumed = trained(steps=0)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert not resumed.state[others[0]]["exp_avg_codes"].any()


# Checkpoints of torch.distributed, in one process ---------------------------------------------------------------


@pytest.fixture
def session_of():
    def made(state_dtype, steps=0):
        torch.manual_seed(0)
        model = nn.Linear(7, 5)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, state_dtype=state_dtype)
        amp = mezzo.MixedPrecision(model, optimizer, "O0")
        for step in range(steps):
            amp.zero_grad()
            with amp.autocast():
                loss = model(torch.linspace(-1, 1, 7) * (step + 1)).square().sum()
            amp.backward(loss)
            amp.step()
        return model, optimizer, amp

    return made


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
def test_codes_are_read_into_no_moments_of_another_dtype(session_of, tmp_path):
    """A checkpoint is copied into the tensors that are there, by name, whatever their dtype."""
    model, optimizer, amp = session_of("int8", 3)
    checkpoint.save({"app": amp.stateful()}, checkpoint_id=tmp_path / "session")
    checkpoint.save({"own": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "torch")
    other, its, session = session_of("float32")
    with pytest.raises((RuntimeError, checkpoint.CheckpointException), match=r"exp_avg"):
        checkpoint.load({"app": session.stateful()}, checkpoint_id=tmp_path / "session")
    with pytest.raises((RuntimeError, checkpoint.CheckpointException), match=r"weight\.exp_avg"):
        checkpoint.load({"own": get_optimizer_state_dict(other, its)}, checkpoint_id=tmp_path / "torch")
    session.stateful().load_state_dict(amp.stateful().state_dict())  # where nothing was copied, they are decoded
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in moments(optimizer, one).items():
            assert torch.equal(its.state[two][name], value)


def test_notes_in_the_state_are_no_codes(session_of):
    model, optimizer, amp = session_of("float32", 1)
    optimizer.state[model.weight] |= {"note": torch.ones(7, 10), "note_scale": torch.tensor(2.0)}
    saved = amp.stateful().state_dict()["optimizers"]["0"]["weight"]
    assert saved["note_scale"].shape == ()


def test_gradients_that_are_not_finite_spoil_their_group_alone_and_a_skip_none():
    for bad in (math.nan, math.inf):
        params = [nn.Parameter(torch.ones(96))]
        _, optimizer = trained(params=params)
        params[0].grad[40] = bad
        optimizer.step()
        spoilt = torch.arange(96) // 32 == 1
        for name, value in moments(optimizer, params[0]).items():
            assert torch.equal(~value.isfinite(), spoilt), name
        assert params[0].isfinite()[~spoilt].all()
        _, loaded = trained(params=[nn.Parameter(torch.ones(96))], steps=0)
        loaded.load_state_dict(through_a_file(optimizer.state_dict()))  # a state that steps have made
