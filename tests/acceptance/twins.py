"""A sequence under O2 once more, under O1: weights in halves are what FP32 parameters are, to the bit.

The gradients of these sequences depend on no weight, so that no cast of a tie comes between the two.
"""

import functools
import sys
from dataclasses import replace

import numpy as np
from hypothesis import stateful

from .drivers import DRIVERS

#: How far weights in FP16 halves may be off: 2⁻⁴⁰ each time that they are written.
OFF = {"bfloat16": 0.0, "float16": 2.0**-34}
#: Styles that take minutes, or in which a rank would wait for the other.
ALONE = ("planned", "planned attach", "two ranks")


def rule(**strategies):
    """As :func:`hypothesis.stateful.rule`; what is called is noted down, with what weights are then."""

    def decorate(function):
        @functools.wraps(function)
        def noted(machine, *args, **kwargs):
            if machine.tape is None or machine.is_inside:
                return function(machine, *args, **kwargs)
            machine.is_inside = True
            try:
                result = function(machine, *args, **kwargs)
            finally:
                machine.is_inside = False
            machine.tape.append((function, args, kwargs, machine.values()))
            return result

        return stateful.rule(**strategies)(noted)

    return decorate


class Twins(stateful.RuleBasedStateMachine):
    """A machine whose sequences under O2 are run again under O1, when they are over.

    The twin's level is called O2 as well, so that rules that ask whether the level is another one do what they did.
    """

    tape, is_inside = None, False
    #: How far weights may be off, by all dtypes that they have been stored in.
    off = 0.0

    def record_tape(self, config, seed):
        """Record the calls from now on, if there is a twin to compare with.

        Moments that are rounded at random are rounded by where their weights stand among those of their kind.
        """
        plain, self.begun = replace(config, level="O1"), (replace(config, is_twin=True), seed)
        self.off = OFF[config.dtype]
        has_twin = config.level == "O2" and DRIVERS[config.style].suited(plain) == plain
        if has_twin and config.state_dtype == "float32" and config.style not in ALONE:
            self.tape = []

    def values(self):
        """All weights and moments."""
        return {name: (self.subject.exact(name), self.subject.states(name)) for name in self.subject.names}

    def teardown(self):
        """Run the twin."""
        tape, self.tape = self.tape, None
        if not tape or sys.exc_info()[0] is not None:
            return
        twin = type(self)()
        twin.begin(*self.begun)
        twin.tape = None
        for function, args, kwargs, values in tape:
            function(twin, *args, **kwargs)
            twin.agrees()
            assert_same(twin.values(), values, self.off, function.__name__)


def assert_same(twin, values, off, call):
    """Hold what a sequence has come to against its twin's."""
    for name, (exact, (moments, count)) in values.items():
        theirs, (its, number) = twin[name]
        assert np.all(np.abs(exact - theirs) <= off), f"{name} after {call}: {exact}, and plainly {theirs}"
        assert count == number, f"{name} after {call}: {count} updates, and plainly {number}"
        for key, moment in moments.items():
            is_close = np.abs(moment - its[key]) <= 16 * off
            assert (is_close | (moment == its[key])).all(), (
                f"{name}.{key} after {call}: {moment}, and plainly {its[key]}"
            )
