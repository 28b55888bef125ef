"""next_scale against a plain-Python reference of every field and torch's own kernel; tests/conformance has systems."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.scale import LossScale, ScaleState, next_scale

YES, NO = torch.tensor(True), torch.tensor(False)
steps = st.lists(st.booleans(), min_size=5, max_size=30)
intervals = st.integers(1, 6)


def walk(config: LossScale, pattern: list[bool] | str) -> list[ScaleState]:
    """The state after each step; X is an overflow."""
    state, states = config.start(), []
    for step in pattern:
        state = next_scale(state, YES if step in (True, "X") else NO, config)
        states.append(state)
    return states


factors = st.tuples(st.floats(1.01, 4.0), st.floats(0.1, 0.99))


@given(steps, intervals, factors, st.sampled_from([1.0, 2.0**16, 1e-3, 2.0**126, 3.3e38]))
def test_torch_is_torchs_own_kernel(pattern, interval, factors, init):
    growth, backoff = factors
    config = LossScale.like("torch", init=init, growth=growth, backoff=backoff, interval=interval)
    scale, tracker = torch.full((), init), torch.zeros((), dtype=torch.int32)
    for overflow, state in zip(pattern, walk(config, pattern), strict=True):
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), growth, backoff, interval)
        assert state.scale.item() == scale.item()
        assert state.clean_steps.item() == tracker.item()


# The general rule, as a walk over the history


class Reference:
    """Every field of LossScale, in plain Python; float32 through numpy."""

    def __init__(self, config):
        self.config, self.scale = config, np.float32(config.init)
        self.needed = config.interval + config.growth_offset
        self.run = self.at_floor = 0
        self.left = config.hysteresis

    def update(self, overflow):
        config, events = self.config, set()
        was_at_floor = self.scale <= np.float32(config.floor)
        if overflow:
            self.left, self.run, self.needed = self.left - 1, 0, config.interval + config.growth_offset
            if self.left <= 0:
                events.add("backoff")
                self.scale = np.float32(max(float(self.scale) * config.backoff, config.floor))
        else:
            events.add("clean")
            self.run += 1
            if self.run >= self.needed:
                events.add("growth")
                self.run, self.needed = 0, config.interval
                product = float(self.scale) * config.growth
                with np.errstate(over="ignore"):
                    if config.ceiling is not None:
                        self.scale = np.float32(min(product, config.ceiling))
                    elif np.isfinite(np.float32(product)):
                        self.scale = np.float32(product)
        if events & set(config.refill.split("+")):
            self.left = config.hysteresis
        self.at_floor = self.at_floor + ("backoff" in events) if overflow and was_at_floor else 0


CONFIGS = st.builds(
    LossScale.dynamic,
    init=st.sampled_from([2.0**100, 1.3 * 2.0**-20, 2.0**-20, 65536.0]),
    growth=st.sampled_from([1.1, 2.0, 3.7, 2.0**30]),
    backoff=st.sampled_from([0.5, 0.1, 0.9]),
    interval=intervals,
    hysteresis=st.integers(1, 3),
    refill=st.sampled_from(["backoff", "clean", "growth", "clean+backoff"]),
    floor=st.sampled_from([0.7 * 2.0**-20, 2.0**-126, 2.0**-20]),
    ceiling=st.sampled_from([None, 1.1 * 2.0**100]),
    patience=st.sampled_from([None, 1, 2]),
    growth_offset=st.integers(0, 2),
)


@given(CONFIGS, steps)
def test_every_field_against_the_reference(config, pattern):
    reference = Reference(config)
    for overflow, state in zip(pattern, walk(config, pattern), strict=True):
        reference.update(overflow)
        assert state.scale.item() == float(reference.scale)
        assert state.floor_overflows.item() == reference.at_floor


class DeepSpeeds:
    """``DynamicLossScaler`` of deepspeed/runtime/fp16/loss_scaler.py, line by line."""

    def __init__(self, config, consecutive, raises):
        self.raises, self.scale, self.floor, self.window = raises, config.init, config.floor, config.interval
        self.shift = self.hysteresis = config.hysteresis
        self.now, self.last, self.consecutive = 0, -1, consecutive

    def update(self, overflow):
        if overflow:
            if self.shift == 1 or self.hysteresis == 1:
                if self.scale == self.floor and self.raises:
                    raise FloatingPointError
                self.scale = max(self.scale / 2, self.floor)
            else:
                self.hysteresis -= 1
            self.last = self.now
        else:
            if self.consecutive:
                self.hysteresis = self.shift
            stable = self.now - self.last - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive:
                    self.hysteresis = self.shift
                self.scale *= 2
        self.now += 1


@settings(max_examples=800, deadline=None)
@given(steps, st.integers(1, 4), st.integers(1, 4), st.sampled_from([4.0, 8.0]), st.sampled_from([1.0, 3.0, 4.0]),
       st.booleans(), st.booleans())  # fmt: skip
def test_deepspeed_gives_up_where_deepspeed_does(pattern, interval, hysteresis, init, floor, consecutive, raises):
    """``min_loss_scale``, ``consecutive_hysteresis`` and ``raise_error_at_min_scale`` as they are given."""
    given = {"init": init, "interval": interval, "hysteresis": hysteresis, "floor": floor}
    refill, patience = "clean" if consecutive else "growth", 1 if raises else None
    config = LossScale.like("deepspeed", **given, refill=refill, patience=patience)
    theirs, state = DeepSpeeds(config, consecutive, raises), config.start()
    for overflow in pattern:
        state = next_scale(state, YES if overflow else NO, config)
        try:
            theirs.update(overflow)
        except FloatingPointError:
            assert state.floor_overflows.item() == config.patience
            return
        assert state.scale.item() == theirs.scale
        assert not raises or state.floor_overflows.item() == 0


def test_growth_stops_where_float32_ends():
    """Without a ceiling its last number can be reached, but not infinity."""
    largest, almost = torch.finfo(torch.float32).max, float(np.float32(3.4e38))
    midpoint = 2 - 2.0**-24  # times 2^127: halfway from the largest float32 to 2^128, which rounds up
    for init, ceiling, growth, reached in [
        (2.0**126, None, 2.0, [2.0**127, 2.0**127]),
        (2.0**126, 3.4e38, 2.0, [2.0**127, almost, almost]),
        (2.0**127, None, midpoint, [2.0**127]),
        (2.0**127, None, math.nextafter(midpoint, 1.0), [largest, largest]),
    ]:
        config = LossScale.dynamic(init=init, ceiling=ceiling, interval=1, growth=growth)
        assert [state.scale.item() for state in walk(config, "." * len(reached))] == reached


# Scales that do not move


def test_a_constant_scale_only_counts_overflows_and_none_not_even_them():
    config = LossScale.constant(0.3, patience=2)
    states = walk(config, "XX.XXX")
    assert {state.scale.item() for state in states} == {float(np.float32(0.3))}
    assert [state.floor_overflows.item() for state in states] == [1, 2, 0, 1, 2, 3]
    state = LossScale.none().start()
    assert next_scale(state, YES, LossScale.none()) is state
    assert (state.scale.item(), state.floor_overflows.item()) == (1.0, 0)


# Purity, host syncs, arguments


class Ops(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


SYSTEMS = [
    LossScale.none(),
    LossScale.constant(1024, patience=3),
    LossScale.dynamic(),
    LossScale.dynamic(interval=3, hysteresis=2, refill="clean+backoff", patience=3, growth_offset=1),
    *(LossScale.like(system) for system in ("torch", "apex", "paddle", "fleet", "deepspeed", "megatron")),
]


@pytest.mark.parametrize("config", SYSTEMS, ids=str)
def test_a_step_is_pure_and_read_by_nobody(config):
    for flag in (YES, NO):
        before = config.start()
        saved = before.state_dict()
        with Ops() as ops:
            after = next_scale(before, flag, config)
        assert sum(ops.counts.values()) <= 25
        with ops:
            after.inverse()
        assert ops.counts["aten._local_scalar_dense"] == 0
        assert before.state_dict() == saved
        for name in ("scale", "clean_steps", "budget", "floor_overflows"):
            old, new = getattr(before, name), getattr(after, name)
            assert (old.dtype, old.shape, old.device) == (new.dtype, new.shape, new.device)
    with Ops() as ops:
        assert bool(after.scale > 0)
    assert ops.counts["aten._local_scalar_dense"] == 1  # the counter sees what it is to see
    # On the meta device any read by the host raises.
    state = next_scale(config.start("meta"), torch.empty((), dtype=torch.bool, device="meta"), config)
    assert {state.scale.device.type, state.inverse().device.type, state.budget.device.type} == {"meta"}


def test_floating_flags():
    values = [(0.0, False), (1.0, True), (2.5, True), (math.nan, True), (math.inf, True), (-1.0, True)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for value, is_overflow in values:
            config = LossScale.dynamic(init=4)
            state = next_scale(config.start(), torch.tensor(value, dtype=dtype), config)
            assert state.scale.item() == (2.0 if is_overflow else 4.0), (value, dtype)


def test_it_compiles_in_one_graph():
    config = SYSTEMS[3]
    compiled = torch.compile(lambda s, f: next_scale(s, f, config), backend="eager", fullgraph=True)
    state = plain = config.start()
    for step in "X..XX.....X":
        flag = torch.tensor(step == "X")
        state, plain = compiled(state, flag), next_scale(plain, flag, config)
        assert state.state_dict() == plain.state_dict()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", SYSTEMS[1:4], ids=str)
def test_a_cuda_graph_captures_it(config):
    state, flag = config.start("cuda"), torch.zeros((), device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            next_scale(state, flag, config)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            after = next_scale(state, flag, config)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    flag.fill_(1.0)
    graph.replay()
    assert after.state_dict() == next_scale(config.start(), YES, config).state_dict()
