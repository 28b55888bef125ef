"""LossScale as a value: defaults, text, presets, statistics."""

import dataclasses
import inspect
import math
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mezzo.scale import LossScale
from mezzo.scale.config import PRESETS

from .test_rules import CONFIGS

# The value


def test_the_defaults_are_those_of_the_design():
    written = (2.0**16, 2.0, 0.5, 2000, 1, "backoff", 2.0**-24, 2.0**24, None, 0)
    assert dataclasses.astuple(LossScale.dynamic()) == ("dynamic", *written)
    signature = inspect.signature(LossScale.dynamic)
    assert tuple(parameter.default for parameter in signature.parameters.values()) == written
    assert LossScale() == LossScale.dynamic()
    assert list(signature.parameters) == [field.name for field in dataclasses.fields(LossScale)][1:]


def test_it_is_a_value():
    assert len({LossScale.constant(1024), LossScale.constant(1024.0), LossScale.none(), LossScale.constant(1)}) == 3
    for scale in (LossScale.none(), LossScale.constant(0.5), LossScale.like("fleet")):
        assert eval(repr(scale)) == pickle.loads(pickle.dumps(scale)) == scale
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossScale.none().init = 2.0


def test_start():
    for config, expected in [
        (LossScale.none(), (1.0, 0)),
        (LossScale.constant(2.0**-30), (2.0**-30, 0)),  # small ones, and the default ceiling is for dynamic scales
        (LossScale.constant(2.0**100), (2.0**100, 0)),
        (LossScale.dynamic(init=0.25, floor=2.0**-20, growth_offset=3), (0.25, -3)),
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


@given(CONFIGS)
def test_text_round_trips(config):
    text = str(config)
    again = LossScale.parse(text)
    assert again == config
    assert str(again) == text == text.strip()
    assert ";" not in text


# Presets


PRESETS_AS_TEXTS = [
    ("torch", "dynamic(floor=2**-126,ceiling=none)"),
    ("apex", "dynamic(refill=clean,floor=2**-126)"),
    ("paddle", "dynamic(refill=clean+backoff,floor=1,ceiling=none)"),
    ("fleet", "dynamic(init=32768,interval=1000,hysteresis=2,refill=clean+backoff,floor=1,ceiling=none)"),
    (
        "deepspeed",
        "dynamic(interval=1000,hysteresis=2,refill=growth,floor=1,ceiling=none,patience=1,growth_offset=1)",
    ),
    ("megatron", "dynamic(init=2**32,interval=1000,hysteresis=2,refill=growth,floor=1,ceiling=none)"),
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


@given(st.floats(1e-30, 1e30), st.floats(1e-3, 1e3))
@example(65504.0, 1.0)  # 1 · 65504 is not below 65504
@example(65504.0 / 1024, 1.0)
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
    assert LossScale.from_statistics(torch.tensor(largest, dtype=torch.float64), margin) == config
