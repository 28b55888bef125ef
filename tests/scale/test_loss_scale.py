"""LossScale as a value: defaults, text, presets, statistics, and what is refused."""

import dataclasses
import inspect
import math
import pickle
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.errors import PolicyError
from mezzo.scale import LossScale
from mezzo.scale.config import PRESETS

scale_numbers = st.one_of(
    st.integers(-126, 127).map(lambda exponent: 2.0**exponent),
    st.floats(2.0**-126, 2.0**127),
    st.integers(1, 2**60).map(lambda whole: int(float(whole))),
)
counts = st.integers(1, 2**31 - 1)


@st.composite
def any_loss_scale(draw):
    kind = draw(st.sampled_from(["none", "constant", "dynamic"]))
    if kind == "none":
        return LossScale.none()
    if kind == "constant":
        return LossScale.constant(draw(scale_numbers), patience=draw(st.none() | counts))
    floor, init, ceiling = sorted(draw(st.lists(scale_numbers, min_size=3, max_size=3)))
    fields = {
        "init": init,
        "growth": draw(st.floats(1.0, 1e6, exclude_min=True)),
        "backoff": draw(st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)),
        "interval": draw(counts),
        "hysteresis": draw(counts),
        "refill": draw(st.sampled_from(["backoff", "clean", "growth", "clean+backoff"])),
        "floor": floor,
        "ceiling": draw(st.sampled_from([None, ceiling])),
        "patience": draw(st.none() | counts),
        "growth_offset": draw(st.integers(0, 2**31 - 1)),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(fields))))
    chosen |= {"init", "floor", "ceiling"} if chosen & {"init", "floor", "ceiling"} else set()
    return LossScale.dynamic(**{name: fields[name] for name in chosen})


# The value


def test_the_defaults_are_those_of_the_design():
    written = (2.0**16, 2.0, 0.5, 2000, 1, "backoff", 1.0, 2.0**24, None, 0)
    assert dataclasses.astuple(LossScale.dynamic()) == ("dynamic", *written)
    signature = inspect.signature(LossScale.dynamic)
    assert tuple(parameter.default for parameter in signature.parameters.values()) == written
    assert LossScale() == LossScale.dynamic()
    assert list(signature.parameters) == [field.name for field in dataclasses.fields(LossScale)][1:]


def test_it_is_a_value():
    assert LossScale.constant(1024) == LossScale.constant(1024.0)
    assert len({LossScale.constant(1024), LossScale.constant(1024.0), LossScale.none()}) == 2
    assert LossScale.constant(1.0) != LossScale.none()
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossScale.none().init = 2.0
    assert pickle.loads(pickle.dumps(LossScale.like("fleet"))) == LossScale.like("fleet")


@pytest.mark.parametrize("config", [LossScale.none(), LossScale.constant(0.5), LossScale.like("deepspeed")], ids=str)
def test_repr_is_an_expression(config):
    assert eval(repr(config)) == config


@pytest.mark.parametrize(
    "config, expected",
    [
        (LossScale.none(), (1.0, 0)),
        (LossScale.constant(0.25), (0.25, 0)),
        (LossScale.dynamic(init=1024, growth_offset=3), (1024.0, -3)),
    ],
    ids=str,
)
def test_start(config, expected):
    state = config.start()
    assert (state.scale.item(), state.clean_steps.item()) == expected
    assert (state.scale.dtype, state.scale.shape, state.budget.item()) == (torch.float32, (), config.hysteresis)
    assert state.floor_overflows.item() == 0
    assert config.start("meta").scale.device.type == "meta"


# Text


@pytest.mark.parametrize(
    "text, config",
    [
        ("none", LossScale.none()),
        ("dynamic", LossScale.dynamic()),
        ("constant(1024)", LossScale.constant(1024)),
        ("constant(65536)", LossScale.constant(2**16)),
        ("constant(0.3,patience=5)", LossScale.constant(0.3, patience=5)),
        ("dynamic(init=1024,interval=100)", LossScale.dynamic(init=1024, interval=100)),
        (
            "dynamic(floor=2**-126,ceiling=none,growth_offset=2)",
            LossScale.dynamic(floor=2.0**-126, ceiling=None, growth_offset=2),
        ),
        ("dynamic(hysteresis=2,refill=clean+backoff)", LossScale.dynamic(hysteresis=2, refill="clean+backoff")),
    ],
)
def test_text(text, config):
    assert str(config) == text
    assert LossScale.parse(text) == config


@pytest.mark.parametrize(
    "given_as, config",
    [
        (None, LossScale.none()),
        (128, LossScale.constant(128)),
        (0.5, LossScale.constant(0.5)),
        ("1024", LossScale.constant(1024)),
        (" 2**10 ", LossScale.constant(1024)),
        ("128.0", LossScale.constant(128)),
        ("dynamic()", LossScale.dynamic()),
        ("none()", LossScale.none()),
        (" dynamic ( init = 2**10 , interval=1e2 ) ", LossScale.dynamic(init=1024, interval=100)),
        (LossScale.like("torch"), LossScale.like("torch")),
    ],
)
def test_parse_accepts(given_as, config):
    assert LossScale.parse(given_as) == config


@settings(deadline=None)
@given(any_loss_scale())
def test_text_round_trips(config):
    text = str(config)
    again = LossScale.parse(text)
    assert again == config
    assert str(again) == text
    assert ";" not in text
    assert text == text.strip()


@settings(deadline=None)
@given(st.text(alphabet="constadymi(),=0123456789*.-+ finge", max_size=30))
def test_any_text_is_read_or_refused(text):
    with suppress(PolicyError):  # any other error fails the test
        config = LossScale.parse(text)
        assert LossScale.parse(str(config)) == config


@pytest.mark.parametrize(
    "text, parts",
    [
        (
            "dynamc",
            [
                "unknown loss scale 'dynamc'",
                "did you mean 'dynamic'?",
                "LossScale.dynamic(init=1024), the text dynamic",
            ],
        ),
        ("", ["unknown loss scale ''", "valid: none, constant, dynamic"]),
        ("dynamic(init=1024", ["unknown loss scale 'dynamic(init=1024'"]),
        ("constant", ["a constant scale needs its factor", "LossScale.constant(1024), the text 1024"]),
        ("constant(patience=3)", ["a constant scale needs its factor"]),
        ("constant(big)", ["init is 'big'", "a number was expected"]),
        ("dynamic(intervall=3)", ["unknown field 'intervall'", "did you mean 'interval'?"]),
        ("dynamic(1024)", ["'1024' is no field", "write  name=value, as init=1024"]),
        ("dynamic(init=4,init=8)", ["init is given twice"]),
        ("dynamic(interval=2.5)", ["interval is '2.5'", "a whole number was expected"]),
        ("dynamic(ceiling=much)", ["ceiling is 'much'", "a number was expected, or none"]),
        ("dynamic(floor=none)", ["floor is 'none'", "a number was expected"]),
        ("dynamic(mode=none)", ["unknown field 'mode'"]),
        ("dynamic(init=2**9999)", ["init is '2**9999'"]),
        ("none(interval=3)", ["a scale of mode 'none' has no interval", "write  LossScale.none()"]),
        ("nan", ["init is nan", "a finite number was expected"]),
        ("1e400", ["init is inf"]),
        ("dynamic(refill=clear)", ["unknown refill 'clear'", "did you mean 'clean'?"]),
        (
            "dynamic(intervall=3,init=big,growth)",
            ["3 problems", "1. unknown field 'intervall'", "2. init is 'big'", "3. 'growth' is no field"],
        ),
    ],
)
def test_text_that_is_refused(text, parts):
    with pytest.raises(PolicyError) as caught:
        LossScale.parse(text)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("value", [True, [], {"init": 3}])
def test_parse_refuses_other_types(value):
    with pytest.raises(PolicyError, match="a number was expected"):
        LossScale.parse(value)


# What is refused


@pytest.mark.parametrize(
    "fields, parts",
    [
        ({"growth": 1.0}, ["growth is 1.0", "a factor above 1 raises the scale", "write  growth=2"]),
        ({"growth": math.inf}, ["growth is inf", "a finite number was expected"]),
        ({"backoff": 1.0}, ["backoff is 1.0", "only a factor between 0 and 1", "write  backoff=0.5"]),
        ({"backoff": 0.0}, ["backoff is 0.0"]),
        ({"backoff": math.nan}, ["backoff is nan", "a finite number was expected"]),
        ({"interval": 0}, ["interval is 0", "it counts steps"]),
        ({"interval": 10.0}, ["interval is 10.0", "a whole number was expected"]),
        ({"interval": 2**31}, ["interval is 2147483648", "from 1 to 2**31 - 1"]),
        ({"interval": True}, ["interval is True", "a whole number was expected"]),
        ({"hysteresis": 0}, ["hysteresis is 0", "it counts overflows"]),
        ({"patience": 0}, ["patience is 0", "write  patience=None"]),
        ({"growth_offset": -1}, ["growth_offset is -1", "from 0"]),
        ({"refill": "cleen"}, ["unknown refill 'cleen'", "did you mean 'clean'?"]),
        ({"refill": None}, ["unknown refill None"]),
        ({"init": 0}, ["init is 0", "a scale is a normal float32 number, from 2**-126"]),
        ({"init": -2.0}, ["init is -2.0"]),
        ({"init": math.nan}, ["init is nan"]),
        ({"init": "1024"}, ["init is '1024'", "a number was expected"]),
        ({"init": 1e39, "ceiling": None}, ["init is 1e+39"]),
        ({"init": 10**400, "ceiling": None}, ["init is 1000", "a normal float32 number"]),
        ({"init": 2**53 + 1, "ceiling": None}, ["init is 9007199254740993", "float64 does not hold it exactly"]),
        ({"floor": 1e-40}, ["floor is 1e-40"]),
        ({"floor": None}, ["floor is None", "a number was expected"]),
        ({"ceiling": math.inf}, ["ceiling is inf", "write  ceiling=None"]),
        ({"floor": 8.0, "ceiling": 4.0, "init": 4.0}, ["floor 8 is above ceiling 4", "write  ceiling=8"]),
        ({"floor": 8.0, "init": 4.0}, ["floor 8 is above init 4", "write  floor=4"]),
        ({"init": 2.0**32}, ["init 2**32 is above ceiling 2**24", "write  ceiling=2**32"]),
    ],
)
def test_impossible_values(fields, parts):
    with pytest.raises(PolicyError) as caught:
        LossScale.dynamic(**fields)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert "problems" not in str(caught.value) or len(fields) > 1


def test_all_problems_come_in_one_message():
    with pytest.raises(PolicyError) as caught:
        LossScale.dynamic(growth=1, backoff=2, interval=0, refill="x", floor=4, init=2)
    message = str(caught.value)
    assert message.startswith("5 problems")
    for part in ("growth is 1", "backoff is 2", "interval is 0", "unknown refill 'x'", "floor 4 is above init 2"):
        assert part in message


@pytest.mark.parametrize(
    "fields, parts",
    [
        ({"mode": "static"}, ["unknown mode 'static'", "valid: none, constant, dynamic"]),
        ({"mode": "none"}, ["a scale of mode 'none' has no init", "write  LossScale.none()"]),
        ({"mode": "none", "init": 1.0, "patience": 3}, ["has no patience"]),
        (
            {"mode": "constant", "init": 8.0, "interval": 5, "floor": 2.0},
            ["a scale of mode 'constant' has no interval, floor", "write  LossScale.constant(8.0)"],
        ),
    ],
)
def test_modes_refuse_what_they_would_ignore(fields, parts):
    with pytest.raises(PolicyError) as caught:
        LossScale(**fields)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e-40, 1e39])
def test_impossible_constants(scale):
    with pytest.raises(PolicyError, match=r"init is"):
        LossScale.constant(scale)


def test_small_floors_and_scales_are_allowed_when_asked():
    assert LossScale.dynamic(init=0.25, floor=2.0**-20).start().scale.item() == 0.25
    assert LossScale.constant(2.0**-30).start().inverse().item() == 2.0**30
    assert LossScale.constant(2.0**100).init == 2.0**100  # the default ceiling concerns dynamic scales


# Presets


@pytest.mark.parametrize(
    "system, text",
    [
        ("torch", "dynamic(floor=2**-126,ceiling=none)"),
        ("apex", "dynamic(refill=clean,floor=2**-126)"),
        ("paddle", "dynamic(refill=clean+backoff,ceiling=none)"),
        ("fleet", "dynamic(init=32768,interval=1000,hysteresis=2,refill=clean+backoff,ceiling=none)"),
        (
            "deepspeed",
            "dynamic(interval=1000,hysteresis=2,refill=growth,ceiling=none,patience=1,growth_offset=1)",
        ),
        ("megatron", "dynamic(init=2**32,interval=1000,hysteresis=2,refill=growth,ceiling=none)"),
    ],
)
def test_presets(system, text):
    assert str(LossScale.like(system)) == text
    assert LossScale.like(system, init=64.0) == dataclasses.replace(LossScale.parse(text), init=64.0)


def test_every_preset_is_tested_above():
    assert list(PRESETS) == ["torch", "apex", "paddle", "fleet", "deepspeed", "megatron"]
    with pytest.raises(TypeError):
        PRESETS["mine"] = LossScale.none()


def test_torchs_defaults_are_those_of_the_installed_torch():
    parameters = inspect.signature(torch.amp.GradScaler).parameters
    config = LossScale.like("torch")
    assert parameters["init_scale"].default == config.init
    assert parameters["growth_factor"].default == config.growth
    assert parameters["backoff_factor"].default == config.backoff
    assert parameters["growth_interval"].default == config.interval


@pytest.mark.parametrize(
    "system, overrides, parts",
    [
        ("pytorch", {}, ["unknown system 'pytorch'", "did you mean 'torch'?", 'write  LossScale.like("torch")']),
        ("torch", {"growth_interval": 3}, ["unknown field 'growth_interval'", "LossScale.like('torch', …)"]),
        ("torch", {"intervall": 3, "inti": 4}, ["2 problems", "did you mean 'interval'?", "did you mean 'init'?"]),
        ("torch", {"mode": "none"}, ["unknown field 'mode'"]),
        ("apex", {"init": 2.0**32}, ["init 2**32 is above ceiling 2**24"]),
    ],
)
def test_presets_refuse(system, overrides, parts):
    with pytest.raises(PolicyError) as caught:
        LossScale.like(system, **overrides)
    assert [part for part in parts if part not in str(caught.value)] == []


# From statistics


@pytest.mark.parametrize(
    "largest, margin, scale",
    [
        (1.0, 1.0, 32768.0),
        (0.5, 1.0, 65536.0),
        (65504.0, 1.0, 0.5),  # 1 · 65504 is not below 65504
        (65503.0, 1.0, 1.0),
        (65504.0 / 1024, 1.0, 512.0),
        (1.0, 2.0, 16384.0),
        (1e-6, 1.0, 2.0**35),
        (3.0e4, 1e3, 2.0**-9),
        (torch.tensor(0.25), 1.0, 131072.0),
    ],
)
def test_from_statistics(largest, margin, scale):
    assert LossScale.from_statistics(largest, margin) == LossScale.constant(scale)


@settings(deadline=None)
@given(st.floats(1e-30, 1e30), st.floats(1e-3, 1e3))
def test_from_statistics_is_the_largest_power_of_two(largest, margin):
    config = LossScale.from_statistics(largest, margin)
    mantissa, exponent = math.frexp(config.init)
    assert mantissa == 0.5
    # Exact in integers: scale · margin · largest < 65504 ≤ 2 · scale · margin · largest.
    a, b = largest.as_integer_ratio()
    c, d = margin.as_integer_ratio()
    up, down = 2 ** max(exponent - 1, 0), 2 ** max(1 - exponent, 0)
    assert up * a * c < 65504 * b * d * down
    assert 2 * up * a * c >= 65504 * b * d * down


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0.0,), "max_abs_grad is 0.0"),
        ((-1.0,), "max_abs_grad is -1.0"),
        ((math.inf,), "max_abs_grad is inf"),
        ((math.nan,), "max_abs_grad is nan"),
        ((1.0, 0.0), "margin is 0.0"),
        ((1.0, math.nan), "margin is nan"),
        ((1e-45,), "a largest gradient of 1e-45 asks for the scale 2**165"),
        ((1e300,), "asks for the scale 2**-981"),
    ],
)
def test_from_statistics_refuses(arguments, message):
    with pytest.raises(PolicyError) as caught:
        LossScale.from_statistics(*arguments)
    assert message in str(caught.value)
    assert "LossScale.dynamic()" in str(caught.value)


# What strangers send ---------------------------------------------------------------------------------------------

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2),
    st.just(0).map(lambda _: 10**5000), st.sampled_from([10**400, -(10**400), 2**63, 1j, ..., "dynamic", "clean"]),
    st.sampled_from([np.float32(2), np.float64(2), np.int64(3), np.array([1, 2]), torch.ones(2), torch.ones(())]),
)  # fmt: skip
NAMES = [field.name for field in dataclasses.fields(LossScale)]


@given(st.dictionaries(st.sampled_from(NAMES), ODD, min_size=1, max_size=3), ODD)
def test_odd_values_are_refused_in_few_words(fields, value):
    for make in (
        lambda: LossScale(**fields),
        lambda: LossScale.dynamic(**{name: each for name, each in fields.items() if name != "mode"}),
        lambda: LossScale.parse(value),
        lambda: LossScale.like(value),
        lambda: LossScale.like("torch", **fields),
    ):
        with suppress(PolicyError):
            made = make()
            assert LossScale.parse(str(made)) == made


def test_numbers_beyond_every_float_are_refused():
    for name in NAMES:
        with pytest.raises(PolicyError, match=name):
            LossScale(**{name: 10**400})
    with pytest.raises(PolicyError, match="max_abs_grad is 1000"):
        LossScale.from_statistics(10**400)
    with pytest.raises(PolicyError, match="init is a int"):
        LossScale.parse(10**5000)


def test_long_texts_are_refused_in_few_words():
    for text in ("x" * 1_000_000, "1" * 1_000_000, "dynamic(" + "a=1," * 300_000 + ")", "(" * 1_000_000):
        with pytest.raises(PolicyError, match=r"is too long\n  why    a loss scale's text has at most 1,000") as caught:
            LossScale.parse(text)
        assert len(str(caught.value)) < 1000
