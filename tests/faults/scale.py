"""Faults of ``scale/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "scale/rules.py",
        (
            "scale: it grows a step late",
            "grows = clean_steps >= config.interval",
            "grows = clean_steps > config.interval",
            "tests/scale/test_rules.py",
            "not torch's rule",
        ),
        (
            "scale: it backs off with budget left",
            "backs_off = found & (budget == 0)",
            "backs_off = found & (budget <= 1)",
            "tests/scale/test_rules.py",
            "hysteresis would be one less",
        ),
        (
            "scale: no offset after an overflow",
            "_chosen(found, -config.growth_offset, clean_steps + 1)",
            "_chosen(found, 0, clean_steps + 1)",
            "tests/scale/test_rules.py",
            "DeepSpeed's rule would grow a step early",
        ),
        (
            "scale: an overflow keeps its clean steps",
            "_chosen(found, -config.growth_offset, clean_steps + 1)",
            "clean_steps + 1",
            "tests/scale/test_rules.py",
            "the scale would grow right after it backed off",
        ),
        (
            "scale: no ceiling",
            "higher = _at_most(higher, config.ceiling)",
            "pass",
            "tests/scale/test_rules.py",
            "the scale would grow until gradients overflow",
        ),
        (
            "scale: it backs off below the floor",
            "_at_least(scale * config.backoff, config.floor), scale",
            "scale * config.backoff, scale",
            "tests/scale/test_rules.py",
            "torch's scale sinks to zero so, and its inverse is infinite",
        ),
        (
            "scale: it grows to infinity",
            "higher = _chosen(higher < ROUNDS_TO_INFINITY, higher, scale)",
            "pass",
            "tests/scale/test_rules.py",
            "no step would ever be taken again",
        ),
        (
            "scale: the budget comes back at every event",
            'config.refill.split("+")',
            "events",
            "tests/scale/test_rules.py",
            "hysteresis would be one for all systems",
        ),
        (
            "scale: patience counts above the floor",
            "stuck = found & (scale <= as_float32(config.floor))",
            "stuck = found",
            "tests/scale/test_rules.py",
            "ScaleCollapsed would end healthy runs",
        ),
    ),
    *in_file(
        "scale/scaler.py",
        (
            "scale: a held step moves it",
            "after = before if held else next_scale_on_host(before, overflowed, self.config)",
            "after = next_scale_on_host(before, overflowed, self.config)",
            "tests/scale/test_scaler.py",
            "a batch of NaN would count as a clean step",
        ),
        (
            "scale: what was found is told twice",
            "told, self._told = self._told, []",
            "told = self._told",
            "tests/scale/test_scaler.py",
            "one overflow would halve the scale at each step after it",
        ),
        (
            "scale: another scale keeps what was found",
            "self.state, self.in_graph, self._told = state, in_graph, []",
            "self.state, self.in_graph = state, in_graph",
            "tests/scale/test_scaler.py",
            "a scale that a user sets would move at once",
        ),
        (
            "scale: all optimizers have to overflow",
            "return reduce(or_, map(and_, flags, map(counts, holds))), reduce(and_, holds)",
            "return reduce(and_, map(and_, flags, map(counts, holds))), reduce(and_, holds)",
            "tests/scale/test_scaler.py",
            "of two optimizers one could overflow for ever",
        ),
        (
            "scale: a loss overflows as it is scaled",
            "wide = loss.float() if loss.dtype in LOW else loss",
            "wide = loss",
            "tests/scale/test_scaler.py",
            "an FP16 loss times 65536 is infinite: no step would ever be taken",
        ),
    ),
    *in_file(
        "scale/config.py",
        (
            "scale: statistics at the limit",
            ">= limit:",
            "> limit:",
            "tests/scale/test_loss_scale.py",
            "the largest gradient would be infinite",
        ),
    ),
    *in_file(
        "scale/state.py",
        (
            "scale: the inverse is rounded twice",
            "return scale.double().reciprocal().float()",
            "return (1000 * scale).reciprocal() * 1000",
            "tests/scale/test_scaler.py",
            "unscaled gradients would be off by a unit in the last place",
        ),
        (
            "scale: an infinite scale is loaded",
            "2.0**-149 <= value <= torch.finfo(torch.float32).max",
            "2.0**-149 <= value",
            "tests/scale/test_refusals.py",
            "every step after a damaged checkpoint would be skipped",
        ),
    ),
)
