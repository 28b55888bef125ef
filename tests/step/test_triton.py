"""Triton's kernels under its interpreter on the CPU, compiled for Hopper without one, and natively where there is one.

The oracle is the pure function, run with IEEE roots: torch's own are off by one unit in the last place on some CPUs.
"""

import dataclasses
import functools
import importlib
import itertools
import math
import subprocess
import sys

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import UnsupportedError
from mezzo.optim import executors, optimizer
from mezzo.step.kernels import Blocked, emit
from mezzo.step.kernels import triton as tables
from mezzo.step.kernels.triton import Triton
from mezzo.step.passes import advance, judge, updated
from mezzo.step.rounding import keys, noise
from mezzo.step.storage import FULL, KAHAN, PLAIN, PLANES, SPLIT, STOCHASTIC
from mezzo.step.update import rule

from . import test_executors as contract
from .test_executors import (
    BF16,
    CASES,
    FP16,
    FP32,
    cohort_of,
    gradients_of,
    random,
    same_bits,
    take,
    tensors_of,
)

triton = pytest.importorskip("triton", reason="needs Triton")

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [(2500,), (3, 5), (1024,), ()]  # whole blocks with and without a rest, and short ones
RULES = [
    "adamw",
    "adamw amsgrad",
    "adam",
    "adam amsgrad maximize",
    "sgd maximize",
    "sgd momentum",
    "sgd momentum nesterov maximize",
]
RULES += ["lion", "lion maximize"]
STORAGES = [("split", "nearest"), ("full", "nearest"), *((None, each) for each in ("nearest", "stochastic", "kahan"))]


@pytest.fixture
def interpreted(monkeypatch):
    """Let kernels made here run in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    language = importlib.import_module("triton.language")
    # If torch has imported Triton before, functions of its library are not the interpreter's.
    monkeypatch.setattr(language, "sum", triton.jit(language.sum.fn))
    # The interpreter patches what the compiler uses too, and does not put all of it back.
    before = [(module, dict(vars(module))) for module in (language, language.core, language.math, language.standard)]
    with numpy.errstate(all="ignore"):  # infinities are part of the arithmetic
        yield
    for module, names in before:
        vars(module).update(names)


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=CUDA)])
def device(request):
    """Where kernels run: interpreted on the CPU, or compiled."""
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels launched."""
    found = []

    def counted(run):
        @functools.wraps(run)
        def launch(kernel, *args, **kwargs):
            found.append(kernel.fn.__name__)
            return run(kernel, *args, **kwargs)

        return launch

    for kind in (triton.runtime.jit.JITFunction, triton.runtime.interpreter.InterpretedFunction):
        monkeypatch.setattr(kind, "run", counted(kind.run))
    return found


@pytest.fixture
def uploads(monkeypatch):
    found, upload = [], tables._uploaded
    monkeypatch.setattr(tables, "_uploaded", lambda table, device: found.append(table) or upload(table, device))
    return found


class Ieee(TorchDispatchMode):
    """Correctly rounded roots: a root in float64 rounds to FP32 as the exact one does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_root = func is torch.ops.aten.sqrt.default and type(args[0]) is torch.Tensor  # not one that is traced
        if is_root and args[0].dtype == FP32:
            return args[0].double().sqrt().float()
        return func(*args, **(kwargs or {}))


def moved(cohort, device):
    """A copy of a cohort, on another device or not."""

    def to(tensor):
        return None if tensor is None else torch.empty_like(tensor, device=device).copy_(tensor)

    return dataclasses.replace(
        cohort,
        hypers={name: to(value) for name, value in cohort.hypers.items()},
        step=to(cohort.step),
        weights=[to(weight) for weight in cohort.weights],
        extras=[to(extra) for extra in cohort.extras],
        states=[tuple(to(state) for state in states) for states in cohort.states],
    )


def made(device, *args, **kwargs):
    return moved(cohort_of(Triton(), *args, **kwargs), device)


def pure_step(cohort, gradients, check):
    """What every executor is measured against, predicated like this one."""
    seeds = keys(cohort.step, len(gradients), cohort.seed)
    for index, gradient in enumerate(gradients):
        parts = cohort.storage.parts(cohort.weights[index], cohort.extras[index])
        scalars = cohort.rule.scalars(cohort.hypers, cohort.step)
        order = torch.arange(gradient.numel(), dtype=torch.int32, device=gradient.device).view(gradient.shape)
        with Ieee():
            values, new = updated(
                cohort.rule, cohort.storage, gradient, parts, cohort.states[index], scalars, check.multiplier,
                lambda slot, order=order, key=seeds[index]: noise(order, key, slot),
            )  # fmt: skip
        for target, value in zip((*parts, *cohort.states[index]), (*values, *new), strict=True):
            target.copy_(value)


def step(executor, cohort, update, gradients, **kwargs):
    inverse = torch.tensor(1 / 1024, device=cohort.step.device)
    before = [gradient.clone() for gradient in gradients]
    check = judge(executor.norms(gradients), inverse, **kwargs)
    advance([cohort.step], check.found_inf)
    update(gradients, check)
    assert same_bits(gradients, before)
    return check


def on(device, tensors):
    return [tensor.to(device) for tensor in tensors]


def assert_same_but_for_nan(mine, theirs):
    """Bits are equal wherever a weight is a number, and NaN is NaN."""
    for index, (one, other) in enumerate(zip(mine.weights, theirs.weights, strict=True)):
        assert torch.equal(one.isnan(), other.isnan())
        keep = ~one.isnan()
        pairs = [(one, other), *zip(mine.states[index], theirs.states[index], strict=True)]
        pairs += [(mine.extras[index], theirs.extras[index])] if mine.extras[index] is not None else []
        for a, b in pairs:
            assert same_bits([a[keep]], [b[keep]])


def check_bits(device, name, master, rounding, dtype, gradient_dtype, state_dtype):
    special = torch.cat([torch.tensor([*CASES[:9], math.inf, -math.inf, math.nan]), random((2500,), 7, 0.1)])
    weights = [special, *(random(shape, seed, 0.1) for seed, shape in enumerate(SHAPES))]
    mine = made(device, name, master, dtype, state_dtype=state_dtype, rounding=rounding, weights=weights)
    if dtype == FP32:
        assert mine.storage is PLAIN
    theirs, executor = moved(mine, device), Triton()
    update = executor.prepare(mine)
    for number in range(2):
        gradients = on(device, gradients_of(mine, number, gradient_dtype))
        gradients[0][:3] = gradients[0][20:40] = 0.0
        check = step(executor, mine, update, gradients, max_norm=1.0)
        advance([theirs.step], check.found_inf)
        pure_step(theirs, gradients, check)
        assert_same_but_for_nan(mine, theirs)
    assert mine.weights[0].isnan().any()


#: Every rule with every storage, dtypes by turns.
PAIRED = [
    (name, *kept, (BF16, FP16)[i % 2], ((BF16, FP16)[i % 2], FP32)[i // 2 % 2], (FP32, BF16)[i // 4 % 2])
    for i, (name, kept) in enumerate(itertools.product(RULES, STORAGES))
]
PAIRED += [
    (name, "split", "nearest", FP32, gradient, FP32)
    for name, gradient in zip(RULES, [FP32, BF16, FP16] * 3, strict=True)
]
ALL = [
    case
    for name, kept, dtype, state in itertools.product(RULES, STORAGES, (BF16, FP16), (FP32, BF16))
    for gradient in {dtype, FP32, BF16}
    if (case := (name, *kept, dtype, gradient, state)) not in PAIRED
]


def named(case):
    return " ".join(map(str, case)).replace("torch.", "")


@pytest.mark.parametrize("case", PAIRED, ids=named)
def test_two_steps_are_the_pure_function_bit_for_bit(device, case):
    check_bits(device, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=named)
def test_two_steps_are_the_pure_function_bit_for_bit_in_every_combination(device, case):
    check_bits(device, *case)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["adamw", "adam amsgrad maximize", "sgd momentum nesterov", "lion"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_eight_clipped_scaled_steps_are_torch_s(monkeypatch, name, dtype):
    monkeypatch.setitem(contract.EXECUTORS, "triton", Triton)
    contract.check_against_torch("triton", name, "split", dtype, dtype, [(2500,), (3, 5), ()])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_random_bits_are_every_executor_s(rounding):
    """Stochastic weights with FP32 moments, and split ones with BF16 moments."""
    master, state = (None, FP32) if rounding == "stochastic" else ("split", BF16)
    mine, theirs = (
        cohort_of(Triton(), "lion", master, BF16, SHAPES, state_dtype=state, rounding=rounding) for _ in range(2)
    )
    updates = Triton().prepare(mine), Blocked().prepare(theirs)
    for number in range(2):
        gradients = gradients_of(mine, number, BF16)
        take(Triton(), mine, updates[0], gradients)
        take(Triton(), theirs, updates[1], gradients)
    assert same_bits(tensors_of(mine), tensors_of(theirs))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("state", [FP32, BF16])
def test_a_skipped_step_writes_nothing(device, bad, state):
    cohort, executor = made(device, "adamw", "split", BF16, SHAPES, state_dtype=state), Triton()
    odd = torch.zeros(6, 10, dtype=BF16, device=device)[:, :5]  # updated by torch's operations
    cohort = dataclasses.replace(
        cohort,
        weights=[*cohort.weights, odd],
        extras=[*cohort.extras, torch.zeros(6, 5, dtype=torch.int16, device=device)],
        states=[*cohort.states, tuple(torch.zeros(6, 5, dtype=state, device=device) for _ in range(2))],
    )
    update = executor.prepare(cohort)
    step(executor, cohort, update, on(device, gradients_of(cohort, 0, BF16)))
    before = [tensor.clone() for tensor in tensors_of(cohort)]
    gradients = on(device, gradients_of(cohort, 1, BF16))
    gradients[1][2, 3] = bad
    assert step(executor, cohort, update, gradients).found_inf
    assert same_bits(tensors_of(cohort), before)
    assert not step(executor, cohort, update, on(device, gradients_of(cohort, 2, BF16))).found_inf
    assert cohort.step == 2
    assert not any(same_bits([one], [other]) for one, other in zip(cohort.weights, before, strict=False))


LAYOUTS = {
    "channels last": lambda: random((4, 20, 3, 9), 0).to(memory_format=torch.channels_last),
    "transposed": lambda: random((40, 30), 0).t(),
    "empty": lambda: random((0, 3), 0),
    "gaps": lambda: random((40, 60), 0)[:, ::2],
    "not at 16 bytes": lambda: random((2001,), 0)[1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_weight_and_gradient(device, layout):
    weight = LAYOUTS[layout]()
    mine = made(device, "adamw", "split", BF16, weights=[weight, weight.clone()])
    holder = LAYOUTS[layout]().to(device, BF16)  # torch keeps gaps in no copy
    if layout in ("gaps", "not at 16 bytes"):
        base = torch.zeros(40, 60, dtype=BF16, device=device) if layout == "gaps" else holder.new_zeros(2001)
        holder = base[:, ::2] if layout == "gaps" else base[1:]
        mine.weights[0] = holder.copy_(mine.weights[0])
    theirs, executor = moved(mine, device), Triton()
    update = executor.prepare(mine)
    for number in range(2):
        gradients = [random(weight.shape, number + 9 * i).to(device, BF16).contiguous() for i in range(2)]
        if number:  # laid out as the weight is, this time
            gradients = [torch.empty_like(weight, dtype=BF16, device=device).copy_(each) for each in gradients]
        with Ieee():  # weights with gaps are updated by torch's operations
            check = step(executor, mine, update, gradients)
        advance([theirs.step], check.found_inf)
        pure_step(theirs, gradients, check)
    assert mine.weights[0].stride() == holder.stride()
    assert_same_but_for_nan(mine, theirs)


def test_states_that_lie_otherwise_than_their_weight_are_updated_too(device):
    mine = made(device, "adamw", "split", BF16, [(5,), (40, 30)], state_dtype=BF16)
    mine.states[1] = tuple(torch.zeros(30, 40, dtype=BF16, device=device).t() for _ in range(2))
    theirs, executor = moved(mine, device), Triton()
    gradients = on(device, gradients_of(mine, 0, BF16))
    with Ieee():
        check = step(executor, mine, executor.prepare(mine), gradients)
    advance([theirs.step], check.found_inf)
    pure_step(theirs, gradients, check)
    assert_same_but_for_nan(mine, theirs)


NORMED = [((1 << 14) + 3,), (0, 3), (7, 5), (), (5000,)]


@pytest.mark.parametrize("dtypes", [[FP32] * 5, [BF16] * 5, [BF16, FP32, FP16, BF16, torch.float64]], ids=str)
def test_norms_are_those_of_each_gradient(device, dtypes):
    gradients = [random(shape, i, 100.0).to(dtype) for i, (shape, dtype) in enumerate(zip(NORMED, dtypes, strict=True))]
    gradients[2] = gradients[2].t()
    gradients.append(random((30, 40), 1)[:, ::2].to(BF16))
    wanted = torch.stack([gradient.double().norm() for gradient in gradients])
    found = Triton().norms(on(device, gradients))
    assert found.dtype == FP32
    # squares and sums: a tree of at most 14 + 2 additions of positive numbers
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=17 * 2.0**-24, atol=0)
    assert same_bits([Triton().norms(on(device, gradients))], [found])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_norms_of_what_is_not_finite_are_not(device, bad, dtype):
    gradients = [torch.ones(2000, dtype=dtype, device=device) for _ in range(2)]
    gradients[1][1999] = bad
    found = Triton().norms(gradients)
    assert found.isfinite().tolist() == [True, False]


def test_a_finite_gradient_beyond_the_root_of_the_largest_number_counts_as_infinite(device):
    assert Triton().norms([torch.full((3,), 2e19, device=device)]).isinf().all()


def test_without_gradients_there_are_no_norms():
    assert Triton().norms([]).shape == (0,)


@pytest.mark.parametrize("count", [1, 40])
def test_launches_do_not_depend_on_the_number_of_tensors(device, launches, count):
    cohort, executor = made(device, "adamw", "split", BF16, [(20,)] * count), Triton()
    update = executor.prepare(cohort)
    step(executor, cohort, update, on(device, gradients_of(cohort, 0, BF16)))
    assert launches == ["squares", "roots", "adamw_split"]
    launches.clear()
    mixed = [gradient.to((BF16, FP32)[i % 2]) for i, gradient in enumerate(gradients_of(cohort, 1, BF16))]
    step(executor, cohort, update, on(device, mixed))
    assert launches == ["squares", *["squares"] * (count > 1), "roots", *["adamw_split"] * min(count, 2)]


class Kernels(TorchDispatchMode):
    """Counts operations that would launch something."""

    def __init__(self):
        self.count = 0
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket not in (torch.ops.aten.detach, torch.ops.aten.view)
        return func(*args, **(kwargs or {}))


def test_torch_s_operations_around_them_do_not_either(device):
    counts = []
    for number in (1, 40):
        cohort, executor = made(device, "adamw", "split", BF16, [(20,)] * number, state_dtype=BF16), Triton()
        update = executor.prepare(cohort)
        gradients = on(device, gradients_of(cohort, 0, BF16))
        step(executor, cohort, update, gradients)
        check = judge(executor.norms(gradients), torch.ones((), device=device))
        with Kernels() as kernels:
            executor.norms(gradients)
            update(gradients, check)
        counts.append(kernels.count)
    assert counts[0] == counts[1]


def test_addresses_are_uploaded_when_they_have_changed(device, uploads):
    cohort, executor = made(device, "adamw", "split", BF16, SHAPES), Triton()
    update = executor.prepare(cohort)
    gradients = on(device, gradients_of(cohort, 0, BF16))
    step(executor, cohort, update, gradients)
    uploads.clear()
    for _ in range(3):
        step(executor, cohort, update, gradients)
    assert not uploads
    gradients[1] = gradients[1].clone()
    step(executor, cohort, update, gradients)
    assert len(uploads) == 2  # one for each pass
    before = [weight.clone() for weight in cohort.weights]
    for weight in cohort.weights:
        weight.data = weight.data.clone()
    uploads.clear()
    step(executor, cohort, update, gradients)
    assert len(uploads) == 2  # rows and chunks
    assert not any(same_bits([one], [other]) for one, other in zip(before, cohort.weights, strict=True))


def test_old_tables_of_norms_are_forgotten(device):
    executor = Triton()
    for length in range(1, tables.REMEMBERED + 3):
        ones = [torch.ones(length, device=device)]
        assert executor.norms(ones).item() == pytest.approx(length**0.5)
    assert len(executor._known) == tables.REMEMBERED


@pytest.mark.usefixtures("interpreted")
def test_while_a_graph_is_captured_moved_gradients_come_from_a_reserve(monkeypatch, uploads):
    """As if captured: uploads are recorded, and the tables that a graph will read are kept."""
    cohort, executor = cohort_of(Triton(), "adamw", "split", BF16, [(20,), (3, 5)]), Triton()
    update = executor.prepare(cohort)
    gradients = gradients_of(cohort, 0, BF16)
    take(executor, cohort, update, gradients)
    uploads.clear()
    capturing = True
    monkeypatch.setattr(tables, "_is_capturing", lambda device: capturing)
    take(executor, cohort, update, gradients)
    kept = list(executor._kept)
    assert sum(each is update.addresses.table for each in kept) == 1
    assert any(each[0] is update.rows for each in kept if isinstance(each, tuple))
    theirs = moved(cohort, "cpu")
    elsewhere = [gradient.clone() for gradient in gradients]
    check = take(executor, cohort, update, elsewhere)
    advance([theirs.step], check.found_inf)
    pure_step(theirs, elsewhere, check)
    assert_same_but_for_nan(cohort, theirs)
    assert not uploads
    addresses = torch.tensor([gradient.data_ptr() for gradient in elsewhere])
    fresh = [pair for pair in executor._kept[len(kept) :] if len(pair) == 2 and torch.is_tensor(pair[1])]
    recorded = [pair for pair in fresh if all(torch.equal(each, addresses) for each in pair)]
    assert len(recorded) == 2  # one for each pass, in host and device memory
    for _ in range(tables.RESERVE - 1):
        take(executor, cohort, update, [gradient.clone() for gradient in gradients_of(cohort, 1, BF16)])
    with pytest.raises(
        UnsupportedError, match=r"(?s)cannot be captured.*lay elsewhere 4 times.*write  as many such steps"
    ):
        take(executor, cohort, update, [gradient.clone() for gradient in gradients])
    capturing = False
    take(executor, cohort, update, elsewhere)  # what was recorded has not happened: uploaded after all
    assert len(uploads) == 2


def alike_steps(executor, cohort, update, count):
    """Steps with gradients that lie elsewhere each time, all of them alive until the last."""
    sets = [gradients_of(cohort, number, BF16) for number in range(count)]
    for gradients in sets:
        take(executor, cohort, update, gradients)


@pytest.mark.usefixtures("interpreted")
def test_the_reserve_follows_what_rehearsals_take(monkeypatch):
    """Nine alike steps in a graph, after one rehearsal of them; then a second graph, after another one."""
    cohort, executor = cohort_of(Triton(), "adamw", "split", BF16, [(20,), (3, 5)]), Triton()
    update, theirs = executor.prepare(cohort), moved(cohort, "cpu")
    for capturing in (False, True, False, True):
        monkeypatch.setattr(tables, "_is_capturing", lambda device, capturing=capturing: capturing)
        alike_steps(executor, cohort, update, 9)
    assert len(executor._kept) > 4 * 9
    with pytest.raises(UnsupportedError, match=r"(?s)lay elsewhere 32 times.*at most 64 in it"):
        alike_steps(executor, moved(cohort, "cpu"), lambda gradients, check: None, 33)
    monkeypatch.setattr(tables, "_is_capturing", lambda device: False)
    other = Triton()
    alike = other.prepare(theirs)
    for _ in range(4):
        alike_steps(other, theirs, alike, 9)
    assert cohort.step == 36
    assert same_bits(tensors_of(cohort), tensors_of(theirs))


def test_the_reserve_is_bounded(device):
    addresses, ones = tables._Addresses(3, device, []), [torch.ones(2, device=device) for _ in range(3)]
    sizes = set()
    for _ in range(200):
        addresses.of(ones)
        sizes.add(len(addresses.reserve))
    assert sizes == {4, 8, 16, 32, 64}
    assert all(host.shape == table.shape == (3,) for host, table in addresses.reserve)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("master, rounding", [("split", "nearest"), (None, "stochastic")])
@pytest.mark.parametrize("default", ["meta", torch.bfloat16, torch.float64], ids=str)
def test_torch_s_defaults_change_nothing(monkeypatch, default, master, rounding):
    """Not a default device, on which no table could be pinned; and not a default dtype."""
    gaps = torch.zeros(6, 10, dtype=BF16)[:, :5]  # updated by torch's operations
    shapes = [(2500,), (3, 5)]
    mine = cohort_of(Triton(), "lion", master, BF16, shapes, state_dtype=BF16, rounding=rounding)
    extra = torch.zeros(6, 5, dtype=torch.int16) if master == "split" else None
    mine = dataclasses.replace(
        mine,
        weights=[*mine.weights, gaps],
        extras=[*mine.extras, extra],
        states=[*mine.states, (torch.zeros(6, 5, dtype=BF16),)],
    )
    theirs, executor = moved(mine, "cpu"), Triton()
    gradients, inverse = gradients_of(mine, 0, BF16), torch.tensor(1 / 1024)
    check = judge(executor.norms(gradients), inverse, max_norm=1.0)
    advance([mine.step, theirs.step], check.found_inf)
    pure_step(theirs, gradients, check)
    monkeypatch.setattr(emit, "update_source", emit.update_source.__wrapped__)  # traced anew
    before = torch.get_default_dtype()
    try:
        if default != "meta":
            torch.set_default_dtype(default)
        with torch.device("meta" if default == "meta" else "cpu"):
            executor = Triton()
            norms = executor.norms(gradients)
            assert norms.dtype == executor.norms([]).dtype == FP32
            assert executor.norms([]).device == norms.device
            executor.prepare(mine)(gradients, check)
            executor.require(torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert same_bits([norms], [check.norms])
    assert_same_but_for_nan(mine, theirs)


@pytest.mark.usefixtures("interpreted")
def test_tables_of_other_tensors_cannot_be_made_while_a_graph_is_captured(monkeypatch):
    cohort, executor = cohort_of(Triton(), "adamw", "split", BF16, [(20,), (3, 5)]), Triton()
    update = executor.prepare(cohort)
    gradients = gradients_of(cohort, 0, BF16)
    check = take(executor, cohort, update, gradients)
    before = [tensor.clone() for tensor in tensors_of(cohort)]
    monkeypatch.setattr(tables, "_is_capturing", lambda device: True)
    with pytest.raises(UnsupportedError, match=r"(?s)cannot be captured.*gradients of other shapes, on cpu"):
        executor.norms(gradients[:1])
    with pytest.raises(UnsupportedError, match="weights or states that were given other memory"):
        update([gradient.float() for gradient in gradients], check)
    with pytest.raises(UnsupportedError, match="weights or states"):
        executor.prepare(cohort)(gradients, check)
    assert same_bits(tensors_of(cohort), before)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(30, 40), torch.nn.Linear(40, 30)


def test_an_optimizer_takes_a_launch_for_each_group(device, launches, monkeypatch):
    torch.manual_seed(0)
    nets = [Net().to(device, BF16) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    kinds = []
    for net, executor in zip(nets, (Triton, Blocked), strict=True):
        monkeypatch.setattr(optimizer, "executor_for", lambda *_, executor=executor: executor())
        groups = [{"params": net.first.parameters()}, {"params": net.second.parameters(), "lr": 0.5}]
        kinds.append(mezzo.optim.AdamW(groups, lr=0.1, state_dtype="bfloat16"))
        for number in range(3):
            for seed, param in enumerate(net.parameters()):
                param.grad = random(param.shape, 10 * number + seed).to(device, BF16)
            with Ieee():
                kinds[-1].step()
    assert launches == ["adamw_split"] * 6
    assert same_bits(nets[0].state_dict().values(), nets[1].state_dict().values())
    saved = [kind.state_dict()["state"] for kind in kinds]
    for one, other in zip(saved[0].values(), saved[1].values(), strict=True):
        assert same_bits(one.values(), other.values())
        assert one["remainder"].dtype == torch.int16


# Source ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [SPLIT, FULL, PLAIN, STOCHASTIC, KAHAN, PLANES], ids=lambda kept: kept.name)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_storage_can_be_written_in_triton(kept, dtype):
    parts = kept.parts(*kept.make(torch.ones(2), dtype, None))
    source = emit.update_source(rule("lion"), kept, (dtype, *(part.dtype for part in parts), FP32))
    compile(source, "", "exec")
    assert source.count("tl.store(") == len(parts) + 1


def test_kernels_are_named_for_profilers():
    assert emit.update_name(rule("adam", "maximize", "amsgrad"), SPLIT) == "adam_amsgrad_maximize_split"


@pytest.mark.parametrize("wrong", [lambda w: w.erf(), lambda w: torch.add(w, w, alpha=2), lambda w: w.half() * 2])
def test_an_operation_without_triton_is_refused_by_name(wrong):
    odd = dataclasses.replace(
        rule("sgd"), name="odd", apply=lambda gradient, weight, states, numbers: (wrong(gradient).float(), ())
    )
    with pytest.raises(UnsupportedError, match=r"(?s)no Triton for aten\.(erf|add|mul).*rule odd.*write  the compiled"):
        emit.update_source(odd, PLAIN, (FP32, FP32))


UPDATED = {"addresses": "*i64", "rows": "*i64", "chunks": "*i32", "keys": "*i32", "found_inf": "*i1"}
UPDATED |= {"scalars": "*fp32", "multiplier": "*fp32"}


def native(kernel, arguments, **constants):
    """Compile for sm_90, which takes no GPU."""
    compiler, backends = (importlib.import_module(f"triton.{each}") for each in ("compiler", "backends.compiler"))
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = backends.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=dict(tables._OPTIONS)).asm["ptx"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler for Linux")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_hopper_code_that_rounds_at_random_keeps_subnormals(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    source = emit.update_source(rule("sgd"), STOCHASTIC, (dtype, dtype))
    code = native(emit.jitted(source, "sgd_stochastic"), UPDATED, BLOCK=tables.BLOCK)
    assert dtype == BF16 or "cvt.rmi.f32.f32" in code
    assert not any(each in code for each in ("fma.", "mad.f", "approx", ".ftz", "div.full"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler for Linux")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_hopper_code_moves_vectors_and_rounds_as_ieee_says(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    source = emit.update_source(rule("adamw"), SPLIT, (dtype, dtype, torch.int16, FP32, FP32))
    code = native(emit.jitted(source, "adamw_split"), UPDATED, BLOCK=tables.BLOCK)
    whole = code.split("bra.uni")[0]  # blocks without a mask
    counts = {each: whole.count(each) for each in ("ld.global.v4.b32", "ld.global.v2.b32", "st.global.v4.b32")}
    assert counts == {"ld.global.v4.b32": 2, "ld.global.v2.b32": 3, "st.global.v4.b32": 2}
    assert "div.rn.f32" in code
    assert "sqrt.rn.f32" in code
    assert not any(each in code for each in ("fma.", "mad.f", "approx", ".ftz", "div.full"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler for Linux")
def test_hopper_code_of_pass_1_moves_vectors(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    squares, roots = (emit.jitted(emit.norm_source(), name) for name in ("squares", "roots"))
    arguments = {"addresses": "*i64", "lengths": "*i64", "chunks": "*i32", "partials": "*fp32"}
    sizes = {"CHUNK": tables.CHUNK, "BLOCK": tables.NORM_BLOCK}
    for dtype in (BF16, FP32):
        constants = {"TYPE": emit.element_type(dtype), "BITS": dtype == BF16, **sizes}
        assert "ld.global.v4.b32" in native(squares, arguments, **constants)
    arguments = {"partials": "*fp32", "spans": "*i32", "norms": "*fp32"}
    assert "sqrt.rn.f32" in native(roots, arguments, BLOCK=tables.ROOT_BLOCK)


# Which executor, and what it costs to import ----------------------------------------------------------------


@pytest.mark.parametrize("built, found, triton_s", [("13.0", True, True), ("13.0", False, False), (None, True, False)])
def test_cuda_devices_take_triton_where_it_is(monkeypatch, built, found, triton_s):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: found or None)
    monkeypatch.setattr(executors, "_compiled", lambda *_: None)
    monkeypatch.setattr(Triton, "require", lambda self, device: None)
    monkeypatch.setattr(tables, "_is_capturing", lambda device: False)
    executors._has_triton.cache_clear()
    executors._triton.cache_clear()
    try:
        assert isinstance(executors.executor_for(torch.device("cuda"), 10), Triton) is triton_s
        assert isinstance(executors.executor_for(torch.device("cpu"), 10), Blocked)
        assert executors.executor_for(torch.device("xpu"), 10) is None
    finally:
        executors._has_triton.cache_clear()
        executors._triton.cache_clear()


def test_triton_is_tried_where_it_is_to_run(device, launches):
    executor = Triton()
    executor.require(device)
    assert launches == ["squares", "roots"]
    assert not executor._known


FAILURES = [
    (RuntimeError("\nFailed to find C compiler. Please specify\nmore"), "why    Failed to find C compiler"),
    (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), r"why    Command '\['/usr/bin/gcc', 'main.c'\]'"),
    (AssertionError(), "why    AssertionError"),
]


@pytest.mark.parametrize("failure, why", FAILURES, ids=["no compiler", "no Python.h", "no libcuda"])
def test_triton_without_what_it_builds_launchers_with_is_refused(monkeypatch, failure, why):
    def launch(*_, **__):
        raise failure

    monkeypatch.setattr(emit, "jitted", lambda *_: {(1,): launch})
    with pytest.raises(
        UnsupportedError, match=rf"(?s)Triton cannot launch.*on cpu.*{why}.*apt install gcc python3-dev"
    ):
        Triton().require(torch.device("cpu"))


def test_memory_that_runs_out_does_not_count_as_a_missing_compiler(monkeypatch):
    def launch(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(emit, "jitted", lambda *_: {(1,): launch})
    with pytest.raises(torch.OutOfMemoryError):
        Triton().require(torch.device("cpu"))


@pytest.mark.parametrize("current, captured", [(1, True), (0, True), (1, False)])
def test_whether_a_graph_is_captured_is_asked_on_the_tensors_device(monkeypatch, current, captured):
    """As if there were two devices, of which another is the current one."""
    now, capturing = [current], {0: captured, 1: not captured}

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, now[0] = now[0], self.device.index

        def __exit__(self, *_):
            now[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[now[0]])
    assert tables._is_capturing(torch.device("cuda", 0)) is captured
    assert now == [current]


def test_the_executor_s_modules_import_triton_only_for_a_kernel():
    code = "import sys, mezzo.step.kernels.triton; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# On a GPU alone ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_syncs():
    """Let a sync raise, once what happens only once has happened."""

    def begin():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("state", [FP32, BF16])
def test_a_step_makes_no_host_sync(no_syncs, state):
    cohort, executor = made("cuda", "adamw", "split", BF16, SHAPES, state_dtype=state), Triton()
    update, inverse = executor.prepare(cohort), torch.tensor(1 / 1024, device="cuda")
    sets = [on("cuda", gradients_of(cohort, number, BF16)) for number in range(4)]  # each lies elsewhere
    for number in (0, 0, 1, 2, 3):
        check = judge(executor.norms(sets[number]), inverse, max_norm=1.0)
        advance([cohort.step], check.found_inf)
        update(sets[number], check)
        if number == 0:
            no_syncs()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_profiler_counts_the_same_kernels_for_one_tensor_and_for_many():
    counts = []
    for number in (1, 200):
        cohort, executor = made("cuda", "adamw", "split", BF16, [(3000,)] * number), Triton()
        update, gradients = executor.prepare(cohort), on("cuda", gradients_of(cohort, 0, BF16))
        step(executor, cohort, update, gradients)
        check = judge(executor.norms(gradients), torch.ones((), device="cuda"))
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            executor.norms(gradients)
            update(gradients, check)
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        counts.append((len(names), [names.count(each) for each in ("squares", "roots", "adamw_split")]))
    assert counts[0] == counts[1]
    assert counts[0][1] == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["as before", "elsewhere"])
def test_a_captured_step_replays_what_the_eager_one_does(where):
    mine = made("cuda", "adamw", "split", BF16, SHAPES, state_dtype=BF16)
    theirs, executor, inverse = moved(mine, "cuda"), Triton(), torch.tensor(1 / 1024, device="cuda")
    updates = executor.prepare(mine), executor.prepare(theirs)

    def run(cohort, update, gradients):
        check = judge(executor.norms(gradients), inverse, max_norm=1.0)
        advance([cohort.step], check.found_inf)
        update(gradients, check)

    static = on("cuda", gradients_of(mine, 0, BF16))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(mine, updates[0], static)
    torch.cuda.current_stream().wait_stream(stream)
    run(theirs, updates[1], static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gradients = static if where == "as before" else [gradient * 1 for gradient in static]
        run(mine, updates[0], gradients)
    for number in range(1, 5):
        fresh = on("cuda", gradients_of(mine, number, BF16))
        if number == 3:
            fresh[0][7] = math.inf
        for tensor, value in zip(static, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        run(theirs, updates[1], fresh)  # which lie elsewhere each time
        assert same_bits(on("cpu", tensors_of(mine)), on("cpu", tensors_of(theirs)))
    run(mine, updates[0], static)
    run(theirs, updates[1], static)
    assert same_bits(on("cpu", tensors_of(mine)), on("cpu", tensors_of(theirs)))
    assert mine.step == 5
