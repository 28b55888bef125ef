"""What loss scales, their rule and their state refuse, all problems in one message."""

import math
from contextlib import suppress
from dataclasses import fields

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.errors import PolicyError, StateError
from mezzo.scale import LossScale, ScaleState, next_scale

from ..support.refusals import refused

TEXTS = [
    ("dynamc", "unknown loss scale 'dynamc'", "did you mean 'dynamic'?", "LossScale.dynamic(init=1024)"),
    ("", "unknown loss scale ''", "valid: none, constant, dynamic"),
    ("dynamic(init=1024", "unknown loss scale 'dynamic(init=1024'"),
    ("constant", "a constant scale needs its factor", "LossScale.constant(1024), the text 1024"),
    ("constant(patience=3)", "a constant scale needs its factor"),
    ("constant(big)", "init is 'big'", "a number was expected"),
    ("dynamic(intervall=3)", "unknown field 'intervall'", "did you mean 'interval'?"),
    ("dynamic(1024)", "'1024' is no field", "write  name=value, as init=1024"),
    ("dynamic(init=4,init=8)", "init is given twice"),
    ("dynamic(interval=2.5)", "interval is '2.5'", "a whole number was expected"),
    ("dynamic(ceiling=much)", "ceiling is 'much'", "a number was expected, or none"),
    ("dynamic(floor=none)", "floor is 'none'", "a number was expected"),
    ("dynamic(mode=none)", "unknown field 'mode'"),
    ("dynamic(init=2**9999)", "init is '2**9999'"),
    ("none(interval=3)", "a scale of mode 'none' has no interval", "write  LossScale.none()"),
    ("nan", "init is nan", "a finite number was expected"),
    ("1e400", "init is inf"),
    ("dynamic(refill=clear)", "unknown refill 'clear'", "did you mean 'clean'?"),
    ("dynamic(intervall=3,init=big,growth)", "3 problems", "1. unknown field 'intervall'", "2. init is 'big'",
     "3. 'growth' is no field"),
    (True, "a number was expected"),
    ([], "a number was expected"),
    ({"init": 3}, "a number was expected"),
    (10**5000, "init is a int"),
    *((text, "is too long", "a loss scale's text has at most 1,000")
      for text in ("x" * 1_000_000, "1" * 1_000_000, "dynamic(" + "a=1," * 300_000 + ")", "(" * 1_000_000)),
]  # fmt: skip
FIELDS = [
    ({"growth": 1.0}, "growth is 1.0", "a factor above 1 raises the scale", "write  growth=2"),
    ({"growth": math.inf}, "growth is inf", "a finite number was expected"),
    ({"backoff": 1.0}, "backoff is 1.0", "only a factor between 0 and 1", "write  backoff=0.5"),
    ({"backoff": 0.0}, "backoff is 0.0"),
    ({"backoff": math.nan}, "backoff is nan", "a finite number was expected"),
    ({"interval": 0}, "interval is 0", "it counts steps"),
    ({"interval": 10.0}, "interval is 10.0", "a whole number was expected"),
    ({"interval": 2**31}, "interval is 2147483648", "from 1 to 2**31 - 1"),
    ({"interval": True}, "interval is True", "a whole number was expected"),
    ({"hysteresis": 0}, "hysteresis is 0", "it counts overflows"),
    ({"patience": 0}, "patience is 0", "write  patience=None"),
    ({"growth_offset": -1}, "growth_offset is -1", "from 0"),
    ({"refill": "cleen"}, "unknown refill 'cleen'", "did you mean 'clean'?"),
    ({"refill": None}, "unknown refill None"),
    ({"init": 0}, "init is 0", "a scale is a normal float32 number, from 2**-126"),
    ({"init": -2.0}, "init is -2.0"),
    ({"init": math.nan}, "init is nan"),
    ({"init": "1024"}, "init is '1024'", "a number was expected"),
    ({"init": 1e39, "ceiling": None}, "init is 1e+39"),
    ({"init": 10**400, "ceiling": None}, "init is 1000", "a normal float32 number"),
    ({"init": 2**53 + 1, "ceiling": None}, "init is 9007199254740993", "float64 does not hold it exactly"),
    ({"floor": 1e-40}, "floor is 1e-40"),
    ({"floor": None}, "floor is None", "a number was expected"),
    ({"ceiling": math.inf}, "ceiling is inf", "write  ceiling=None"),
    ({"floor": 8.0, "ceiling": 4.0, "init": 4.0}, "floor 8 is above ceiling 4", "write  ceiling=8"),
    ({"floor": 8.0, "init": 4.0}, "floor 8 is above init 4", "write  floor=4"),
    ({"init": 2.0**32}, "init 2**32 is above ceiling 2**24", "write  ceiling=2**32"),
    ({"growth": 1, "backoff": 2, "interval": 0, "refill": "x", "floor": 4, "init": 2}, "5 problems", "growth is 1",
     "backoff is 2", "interval is 0", "unknown refill 'x'", "floor 4 is above init 2"),
]  # fmt: skip
MODES = [
    ({"mode": "static"}, "unknown mode 'static'", "valid: none, constant, dynamic"),
    ({"mode": "none"}, "a scale of mode 'none' has no init", "write  LossScale.none()"),
    ({"mode": "none", "init": 1.0, "patience": 3}, "has no patience"),
    ({"mode": "constant", "init": 8.0, "interval": 5, "floor": 2.0}, "of mode 'constant' has no interval, floor",
     "write  LossScale.constant(8.0)"),
    *(({"mode": "constant", "init": scale}, "init is") for scale in (0.0, -1.0, math.inf, math.nan, 1e-40, 1e39)),
    *(({field.name: 10**400}, field.name) for field in fields(LossScale)),
]  # fmt: skip
PRESETS = [
    ("pytorch", {}, "unknown system 'pytorch'", "did you mean 'torch'?", 'write  LossScale.like("torch")'),
    ("torch", {"growth_interval": 3}, "unknown field 'growth_interval'", "LossScale.like('torch', …)"),
    ("torch", {"intervall": 3, "inti": 4}, "2 problems", "did you mean 'interval'?", "did you mean 'init'?"),
    ("torch", {"mode": "none"}, "unknown field 'mode'"),
    ("apex", {"init": 2.0**32}, "init 2**32 is above ceiling 2**24"),
]
STATISTICS = [
    ((0.0,), "max_abs_grad is 0.0"),
    ((-1.0,), "max_abs_grad is -1.0"),
    ((math.inf,), "max_abs_grad is inf"),
    ((math.nan,), "max_abs_grad is nan"),
    ((10**400,), "max_abs_grad is 1000"),
    ((1.0, 0.0), "margin is 0.0"),
    ((1.0, math.nan), "margin is nan"),
    ((1e-45,), "a largest gradient of 1e-45 asks for the scale 2**165"),
    ((1e300,), "asks for the scale 2**-981"),
]


def test_texts_and_values_that_are_no_loss_scale_are_refused_in_few_words():
    for text, *words in TEXTS:
        with refused(PolicyError, *words):
            LossScale.parse(text)
    for given_fields, *words in FIELDS:
        with refused(PolicyError, *words):
            LossScale.dynamic(**given_fields)
    for given_fields, *words in MODES:
        with refused(PolicyError, *words):
            LossScale(**given_fields)
    for system, overrides, *words in PRESETS:
        with refused(PolicyError, *words):
            LossScale.like(system, **overrides)
    for arguments, words in STATISTICS:
        with refused(PolicyError, words, "LossScale.dynamic()"):
            LossScale.from_statistics(*arguments)


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2),
    st.text(alphabet="constadymi(),=0123456789*.-+ finge", max_size=30),
    st.sampled_from([10**400, -(10**400), 2**63, 1j, ..., "dynamic", "clean", np.float32(2), np.int64(3)]),
    st.sampled_from([np.array([1, 2]), torch.ones(2), torch.ones(())]),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([field.name for field in fields(LossScale)]), ODD, min_size=1, max_size=3), ODD)
def test_odd_values_are_refused_or_read(given_fields, value):
    for make in (
        lambda: LossScale(**given_fields),
        lambda: LossScale.dynamic(**{name: field for name, field in given_fields.items() if name != "mode"}),
        lambda: LossScale.parse(value),
        lambda: LossScale.like(value),
    ):
        with suppress(PolicyError):  # any other error fails the test
            made = make()
            assert LossScale.parse(str(made)) == made


SAVED = {"scale": 1024.0, "clean_steps": 3, "budget": 1, "floor_overflows": 0}
STATES = [
    ({"scale": None}, "scale is None, not a positive float32 number"),
    *(({"scale": value}, f"scale is {value!r}, not") for value in (0.0, math.inf, math.nan, -1.0, True, 1e39)),
    ({"clean_steps": 1.5}, "clean_steps is 1.5, not a whole number"),
    ({"budget": "2"}, "budget is '2', not a whole number"),
    ({"floor_overflows": 2**60}, "floor_overflows is"),
    ({"growth_tracker": 3}, "'growth_tracker' is none of its fields"),
    ({"budgett": 3, "scale": 0}, "scale is 0, not", "'budgett' is none of its fields"),
]


def test_values_that_are_no_state_are_refused_together_with_missing_and_unknown_keys():
    for change, *words in STATES:
        with refused(StateError, *words, "this is not the state of a loss scale"):
            ScaleState.from_state_dict({**SAVED, **change})
    words = [f"{name} is missing" for name in ("clean_steps", "budget", "floor_overflows")]
    with refused(StateError, *words, "'_growth_tracker' is none", "what state_dict() has returned"):
        ScaleState.from_state_dict({"scale": 2.0, "_growth_tracker": 0})


def test_what_found_inf_cannot_be():
    for found_inf, shown in [
        (True, "found_inf is True"),
        (torch.zeros(2), "found_inf is a torch.float32 tensor of shape (2,)"),
        (torch.tensor([True]), "found_inf is a torch.bool tensor of shape (1,)"),
        (torch.tensor(1), "found_inf is a torch.int64 tensor of shape ()"),
        (torch.tensor(True, device="meta"), "found_inf is a tensor on meta"),
    ]:
        for config in (LossScale.none(), LossScale.constant(1024), LossScale.dynamic()):
            state = config.start()
            words = (
                "0-d bool or floating tensor on cpu, where the scale lives",
                "next_scale(state, torch.tensor(overflow,",
            )
            with refused(PolicyError, shown, *words, parts=[state.scale]):
                next_scale(state, found_inf, config)
