"""LossScale as a value: defaults, text, presets, statistics."""

import dataclasses
import inspect
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    assert all(
        eval(repr(each)) == each for each in (LossScale.none(), LossScale.constant(0.5), LossScale.like("fleet"))
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossScale.none().init = 2.0
    assert pickle.loads(pickle.dumps(LossScale.like("fleet"))) == LossScale.like("fleet")


def test_start():
    for config, expected in [
        (LossScale.none(), (1.0, 0)),
        (LossScale.constant(0.25), (0.25, 0)),
        (LossScale.dynamic(init=1024, growth_offset=3), (1024.0, -3)),
    ]:
        state = config.start()
        assert (state.scale.item(), state.clean_steps.item()) == expected
        assert (state.scale.dtype, state.scale.shape, state.budget.item()) == (torch.float32, (), config.hysteresis)
        assert state.floor_overflows.item() == 0
        assert config.start("meta").scale.device.type == "meta"


# Text


def test_text():
    for text, config in [
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
    ]:
        assert str(config) == text
        assert LossScale.parse(text) == config


def test_parse_accepts():
    for given_as, config in [
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
    ]:
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


def test_small_floors_and_scales_are_allowed_when_asked():
    assert LossScale.dynamic(init=0.25, floor=2.0**-20).start().scale.item() == 0.25
    assert LossScale.constant(2.0**-30).start().inverse().item() == 2.0**30
    assert LossScale.constant(2.0**100).init == 2.0**100  # the default ceiling concerns dynamic scales


# Presets


PRESETS_AS_TEXTS = [
    ("torch", "dynamic(floor=2**-126,ceiling=none)"),
    ("apex", "dynamic(refill=clean,floor=2**-126)"),
    ("paddle", "dynamic(refill=clean+backoff,ceiling=none)"),
    ("fleet", "dynamic(init=32768,interval=1000,hysteresis=2,refill=clean+backoff,ceiling=none)"),
    (
        "deepspeed",
        "dynamic(interval=1000,hysteresis=2,refill=growth,ceiling=none,patience=1,growth_offset=1)",
    ),
    ("megatron", "dynamic(init=2**32,interval=1000,hysteresis=2,refill=growth,ceiling=none)"),
]


def test_presets():
    for system, text in PRESETS_AS_TEXTS:
        assert str(LossScale.like(system)) == text
        assert LossScale.like(system, init=64.0) == dataclasses.replace(LossScale.parse(text), init=64.0)
    assert list(PRESETS) == [system for system, _ in PRESETS_AS_TEXTS]
    with pytest.raises(TypeError):
        PRESETS["mine"] = LossScale.none()


def test_torchs_defaults_are_those_of_the_installed_torch():
    parameters = inspect.signature(torch.amp.GradScaler).parameters
    config = LossScale.like("torch")
    assert parameters["init_scale"].default == config.init
    assert parameters["growth_factor"].default == config.growth
    assert parameters["backoff_factor"].default == config.backoff
    assert parameters["growth_interval"].default == config.interval


# From statistics


def test_from_statistics():
    for largest, margin, scale in [
        (1.0, 1.0, 32768.0),
        (0.5, 1.0, 65536.0),
        (65504.0, 1.0, 0.5),  # 1 · 65504 is not below 65504
        (65503.0, 1.0, 1.0),
        (65504.0 / 1024, 1.0, 512.0),
        (1.0, 2.0, 16384.0),
        (1e-6, 1.0, 2.0**35),
        (3.0e4, 1e3, 2.0**-9),
        (torch.tensor(0.25), 1.0, 131072.0),
    ]:
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
