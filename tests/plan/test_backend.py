"""Models compiled under a plan: what ran, op by op, against what was planned, and against torch.autocast's numbers."""

import functools
import logging
import math
from contextlib import closing, nullcontext

import pytest
import torch
from torch import nn

import mezzo
from mezzo.cast.mode import PolicyMode
from mezzo.errors import PolicyError, UnsupportedError

from ..support.processors import has_low_lstm
from ..support.releases import CAPTURES_BEHIND_BREAKS, EAGER_GRAPHS_CHECKPOINT
from .models import (
    CASES,
    GPT,
    Block,
    Case,
    GroupedQueries,
    Island,
    Residual,
    built,
    flat,
    matched,
    planned_run,
    trained,
    watching,
)

#: What each list of torch's own documentation of autocast says, of those that the models use.
LOW = {"linear", "conv2d", "matmul", "bmm", "einsum", "scaled_dot_product_attention", "lstm"}
FP32 = {"softmax", "cross_entropy", "mse_loss", "exp", "log", "pow", "rsqrt", "cumsum", "layer_norm"}


pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo asks inputs for it
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of autograd functions
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # inductor's own imports
]


@pytest.fixture(autouse=True)
def forgotten():
    yield
    torch._dynamo.reset()


def dtypes_differ(plan, calls):
    """Return the ops that ran otherwise than planned, or not at all."""
    return [
        (op.op, op.line, op.dtype, ran)
        for op, ran in matched(plan, calls)
        if ran is None or (ran.gave and str(ran.gave[0]) != f"torch.{op.dtype}")
    ]


def away(one, other):
    return float((one - other).norm() / other.norm().clamp_min(1e-9))


#: Where less memory and less time are other placements.
OTHER = ("grouped queries", "several", "asked", "asked as another", "expanded", "gpt")


@pytest.mark.parametrize(
    "name, objective", [*((name, "time") for name in CASES), *((name, "memory") for name in OTHER)]
)
def test_each_op_runs_as_planned(name, objective):
    case = CASES[name]
    _, _, backend, seen = planned_run(case, objective)
    (plan,), (num_casts,) = backend.plans, seen.casts
    assert dtypes_differ(plan, seen.calls) == []
    if "multi_head_attention_forward" not in {op.op for op in plan.ops}:  # torch's own autocast casts inside of it
        assert num_casts == plan.totals["plan"].casts == len(plan.casts)
    assert {op.op.rpartition("::")[2] for op in plan.ops if op.decided == "left alone"} >= set(case.alone)
    if "rule" not in {op.decided for op in plan.ops} and name not in ("own region", "encoder, fast path"):
        for ran in seen.calls:
            for listed, dtype in ((LOW, torch.bfloat16), (FP32, torch.float32)):
                if ran.name in listed:
                    assert set(ran.read) == {dtype}, ran


@pytest.mark.parametrize("name", CASES)
def test_results_are_no_further_from_fp32_than_autocasts(name):
    case = CASES[name]
    theirs = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    if name == "lstm" and not has_low_lstm():
        theirs = functools.partial(mezzo.autocast, "O1,bf16,lists=device,emulate=true")
    exact, auto = flat(*trained(case)), flat(*trained(case, region=theirs))
    backend = mezzo.compile_backend(case.policy, inner="eager")
    with torch._dynamo.config.patch(allow_rnn=True):
        own = flat(*trained(case, lambda model: torch.compile(model, backend=backend)))
    for ours, theirs, right in zip(own, auto, exact, strict=True):
        # BF16 rounds by half of 2**-8 at most. Autocast keeps what lies between products in FP32 where FP32 flows in;
        # the cheapest placement may round it, a few times more.
        assert away(ours, right) <= 2 * away(theirs, right) + 4 * 2**-8


def test_a_placement_passes_through_aot_autograd():
    case = CASES["asked"]
    backend = mezzo.compile_backend(case.policy, inner="aot_eager")
    once = flat(*trained(case, lambda model: torch.compile(model, backend=backend)))
    torch._dynamo.reset()
    again = mezzo.compile_backend(case.policy, inner="eager")
    for one, other in zip(once, flat(*trained(case, lambda model: torch.compile(model, backend=again))), strict=True):
        assert away(one, other) < 2**-8
    assert backend.plans[0].ops == again.plans[0].ops


def test_inductor_compiles_a_plan_of_fused_kernels():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    backend = mezzo.compile_backend("O1,bf16")
    with torch.no_grad():
        own, exact = torch.compile(model, backend=backend)(x), model(x)
    assert backend.plans[0].fused
    assert own.dtype == torch.bfloat16
    assert away(own.float(), exact) < 4 * 2**-8


@pytest.mark.slow
def test_inductor_trains_under_a_plan():
    case = CASES["chain"]
    exact = flat(*trained(case))
    backend = mezzo.compile_backend(case.policy)
    own = flat(*trained(case, lambda model: torch.compile(model, backend=backend)))
    for ours, right in zip(own, exact, strict=True):
        assert away(ours, right) < 4 * 2**-8


def test_a_callable_gets_the_graph_with_its_casts():
    given = []

    def inner(module, inputs):
        given.append(module)
        return module

    model = nn.Linear(8, 8)
    backend = mezzo.compile_backend("O1,bf16", inner=inner)
    out = torch.compile(model, backend=backend)(torch.ones(2, 8))
    assert out.dtype == torch.bfloat16
    assert backend.plans[0].fused
    casts = [node for node in given[0].graph.nodes if node.target == "to"]
    assert [node.args[1] for node in casts] == [torch.bfloat16] * 3


def test_checkpoints_run_again_as_they_ran():
    """Gradients are those of a program without checkpoints, to the bit."""
    from . import models

    case, plain = CASES["checkpoints"], Case(models.Checkpointed, models.rows)
    gradients = []
    for skip in (False, True):
        torch._dynamo.reset()
        backend = mezzo.compile_backend("O1,bf16", inner="eager")
        before = models.checkpoint
        if skip:
            models.checkpoint = lambda function, *args, use_reentrant: function(*args)
        try:
            call = functools.partial(torch.compile, backend=backend)
            gradients.append(flat(*trained(plain if skip else case, call)))
        finally:
            models.checkpoint = before
    for one, other in zip(*gradients, strict=True):
        assert away(one, other) < 2**-7


KEPT = (
    "chain",
    "grouped queries",
    "several",
    "residual",
    "asked",
    "expanded",
    "checkpoints",
    "nested checkpoints",
    "gpt",
)


def test_the_low_format_is_kept_for_the_backward_pass():
    """What torch keeps, counted by its own hooks; weights and inputs in FP32 are there anyway."""
    for name in KEPT:
        if "checkpoints" in name and not EAGER_GRAPHS_CHECKPOINT:
            continue
        case = CASES[name]
        kept = {}
        for objective in ("time", "memory"):
            torch._dynamo.reset()
            backend = mezzo.compile_backend(case.policy, objective, inner="eager")
            model, args, kwargs = built(case)
            compiled = torch.compile(model, backend=backend)
            existing = {
                tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *args)
            }
            saved = {}

            def pack(tensor, existing=existing, saved=saved):
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in existing:
                    saved[memory.data_ptr()] = memory.nbytes(), tensor
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                compiled(*args, **kwargs)
            kept[objective] = sum(size for size, _ in saved.values()), backend.plans[0].totals["plan"].kept_bytes
        (time, time_said), (memory, memory_said) = kept["time"], kept["memory"]
        assert memory <= time, (name, kept)
        assert memory_said <= time_said, (name, kept)
        for real, promised in kept.values():
            assert math.isclose(real, promised, rel_tol=0.05), (name, kept)


# Sizes, breaks, modes --------------------------------------------------------------------------------------------


def test_sizes_that_vary_keep_the_placement(caplog):
    caplog.set_level(logging.INFO, "mezzo.plan.backend")
    backend = mezzo.compile_backend("O1,bf16", inner="mezzo_tests_watched")
    model = torch.compile(GroupedQueries(), backend=backend)
    with watching() as seen:
        for tokens in (5, 6, 7, 9):
            model(torch.randn(2, tokens, 16)).sum().backward()
    first, second = backend.plans
    assert (first.is_dynamic, second.is_dynamic) == (False, True)
    assert [op.dtype for op in first.ops] == [op.dtype for op in second.ops]
    assert seen.casts == [first.totals["plan"].casts] * 4
    assert "its placement is kept" in caplog.text
    assert "sizes vary, and costs are those of the first call" in " ".join(second.text().split())


def test_a_size_that_is_marked_dynamic():
    backend = mezzo.compile_backend("O1,bf16", inner="mezzo_tests_watched")
    model = torch.compile(GPT(), backend=backend, fullgraph=True)
    with watching() as seen:
        for tokens in (5, 6, 7):
            given = torch.randint(17, (2, tokens))
            torch._dynamo.mark_dynamic(given, 1)
            model(given).sum().backward()
    (plan,) = backend.plans
    assert plan.is_dynamic
    assert seen.casts == [plan.totals["plan"].casts] * 3
    static = planned_run(CASES["gpt"])[2].plans[0]
    assert [(op.op, op.dtype) for op in plan.ops] == [(op.op, op.dtype) for op in static.ops]


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.island, self.last = Island(), nn.Linear(2, 2)

    def forward(self, x):
        y = self.island.body(x)
        torch._dynamo.graph_break()
        y = self.island.head(y)
        torch._dynamo.graph_break()
        return self.last(torch.relu(y))


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(torch.relu(x))


class Looped(nn.Module):
    """A loop with breaks inside, which torch.compile leaves to Python."""

    def __init__(self):
        super().__init__()
        self.halves, self.last = nn.ModuleList([Half(), Half()]), nn.Linear(8, 8)

    def forward(self, x):
        for half in self.halves:
            x = half(x)
        return self.last(x)


def decisions(plans):
    return [(op.op, op.module, op.dtype) for plan in plans for op in plan.ops]


def test_rules_on_modules_hold_after_a_graph_break():
    backend = mezzo.compile_backend("O1,bf16,fp32_module=island.head", inner="mezzo_tests_watched")
    with watching() as seen:
        torch.compile(Broken(), backend=backend)(torch.randn(4, 8))
    assert [(op, module) for op, module, dtype in decisions(backend.plans) if dtype == "float32"] == [
        ("linear", "island.head.0"), ("tanh", "island.head.1"), ("linear", "island.head.2"),
    ]  # fmt: skip
    assert decisions(backend.plans)[-1] == ("linear", "last", "bfloat16")
    assert seen.casts == [plan.totals["plan"].casts for plan in backend.plans]


def test_what_is_left_to_python_is_the_regions():
    """Modules are found where the model's own function was never captured."""
    torch.manual_seed(0)
    model, policy = Looped(), "O1,bf16,fp32_module=halves.1.b"
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.05), policy=policy)
    backend = mezzo.compile_backend(policy, inner="mezzo_tests_watched")
    compiled = torch.compile(model, backend=backend)
    with watching() as seen, amp.autocast():
        out = compiled(torch.randn(4, 8))
    assert out.dtype == torch.bfloat16
    linear = {module: dtype for op, module, dtype in decisions(backend.plans) if op == "linear"}
    assert linear.pop("halves.1.b", None) == ("float32" if CAPTURES_BEHIND_BREAKS else None)
    assert set(linear.values()) == {"bfloat16"}
    assert all(set(ran.read) in ({torch.bfloat16}, {torch.float32}) for ran in seen.calls if ran.name == "linear")
    assert [ran.read[0] for ran in seen.calls if ran.name == "linear"].count(torch.float32) == CAPTURES_BEHIND_BREAKS


def test_no_python_of_a_region_runs_inside(monkeypatch):
    policy = "O1,bf16,emulate=true,low=softmax"  # a region with a mode of its own, on every device
    compiled = torch.compile(Block(), backend=mezzo.compile_backend(policy, inner="eager"))
    x = torch.randn(8, 5, 16)
    with mezzo.autocast(policy, "cpu"):
        compiled(x)
        asked = []
        monkeypatch.setattr(
            PolicyMode,
            "__torch_function__",
            lambda mode, func, types, args=(), kwargs=None: asked.append(func) or func(*args, **(kwargs or {})),
        )
        compiled(x)
        assert asked == []
        torch.exp(x)  # the mode is still around
    assert asked == [torch.exp]


def test_train_eval_and_no_grad_are_planned_each():
    model = Residual()
    backend = mezzo.compile_backend("O1,bf16", inner="mezzo_tests_watched")
    compiled, x = torch.compile(model, backend=backend), torch.randn(2, 4, 6, 6)
    with watching() as seen:
        compiled(x).sum().backward()
        model.eval()
        compiled(x)
        with torch.no_grad():
            compiled(x)
        model.train()
        compiled(x)
    moved = [plan.totals["plan"].moved_bytes for plan in backend.plans]
    kept = [plan.totals["plan"].kept_bytes for plan in backend.plans]
    assert len(moved) == 3
    assert moved[2] < moved[1]
    assert kept[2] == 0 < kept[0]
    assert len(seen.casts) == 4


# Inside of a session ---------------------------------------------------------------------------------------------


def losses(policy, compiles, steps=6):
    """Train a block; return its losses, the backend and what was seen."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 5, 16)
    backend = mezzo.compile_backend(policy, inner="mezzo_tests_watched")
    called = torch.compile(model, backend=backend) if compiles == "before" else model
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.05), policy=policy)
    if compiles == "after":
        called = torch.compile(model, backend=backend)
    losses = []
    with watching() as seen, closing(amp):
        for _ in range(steps):
            with amp.autocast():
                loss = (called(x).float() - 1).square().mean()
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
            losses.append(float(loss.detach()))
    return losses, backend, seen


SESSIONS = (
    ("O1,bf16", "before"), ("O1,bf16,fp32_module=out", "after"), ("O1,fp16,emulate=true", "before"),
    ("O2,bf16", "after"), ("O1,bf16,fp32_math=gelu", "before"),
)  # fmt: skip
OTHER_WAY = tuple((policy, {"before": "after", "after": "before"}[compiles]) for policy, compiles in SESSIONS)


@pytest.mark.parametrize(
    "policy, compiles", [*SESSIONS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_WAY)]
)
def test_a_session_trains_as_without_a_plan(policy, compiles):
    plain, _, _ = losses(policy, "never")
    own, backend, seen = losses(policy, compiles)
    assert own[-1] < own[0]
    assert all(math.isclose(one, other, rel_tol=2**-7) for one, other in zip(own, plain, strict=True))
    for plan in backend.plans:
        is_told = "fp16" in policy or "fp32_module" in policy  # where products give FP32; where hooks have no lines
        assert is_told or dtypes_differ(plan, seen.calls) == []
    if "fp16" not in policy:  # whose products are emulated by casts
        assert seen.casts == [plan.totals["plan"].casts for plan in backend.plans] * 6
    if "fp32_module" in policy:
        planned = [dtype for op, module, dtype in decisions(backend.plans) if module == "out"]
        assert planned == ["float32"] * CAPTURES_BEHIND_BREAKS  # otherwise the region carries the rule out


def test_a_region_around_makes_no_casts_of_its_own():
    for region in (lambda: torch.autocast("cpu", torch.bfloat16), lambda: mezzo.autocast("O1,bf16")):
        torch._dynamo.reset()
        backend = mezzo.compile_backend("O1,bf16", inner="mezzo_tests_watched")
        with watching() as seen, region():
            torch.compile(Block(), backend=backend)(torch.randn(2, 5, 16)).float().sum().backward()
        (plan,) = backend.plans
        assert seen.casts == [plan.totals["plan"].casts]
        assert dtypes_differ(plan, seen.calls) == []


# What is refused -------------------------------------------------------------------------------------------------


class Depends(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x - 1


class Packs(nn.Module):
    def forward(self, x):
        return nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True).data


def compiled_once(policy):
    torch.compile(Block(), backend=mezzo.compile_backend(policy, inner="eager"))(torch.randn(2, 5, 16))


REFUSALS = {
    "O0": (lambda: mezzo.compile_backend("O0"), PolicyError, "O0 casts no op"),
    "O3": (lambda: mezzo.compile_backend("O3,bf16"), PolicyError, "O3 casts no op"),
    "O3, and what casts": (lambda: mezzo.compile_backend("O3,bf16"), PolicyError, "the text O2,dtype=bfloat16"),
    "a wrong level": (lambda: mezzo.compile_backend("O7"), PolicyError, "O7"),
    "a word for an objective": (lambda: mezzo.compile_backend("O1,bf16", "speed"), PolicyError, 'objective="time"'),
    "an objective above 1": (lambda: mezzo.compile_backend("O1,bf16", 1.5), PolicyError, "1.5"),
    "NaN": (lambda: mezzo.compile_backend("O1,bf16", math.nan), PolicyError, "between 0 (time) and 1 (memory)"),
    "a truth value": (lambda: mezzo.compile_backend("O1,bf16", True), PolicyError, "the objective is True"),
    "inner is a number": (lambda: mezzo.compile_backend("O1,bf16", inner=3), PolicyError, 'inner="inductor"'),
    "inner is None": (lambda: mezzo.compile_backend("O1,bf16", inner=None), PolicyError, "inner is None"),
    "inner is unknown": (
        lambda: mezzo.compile_backend("O1,bf16", inner="inductr"), PolicyError, "inductr"),
    "a banned op": (
        lambda: compiled_once("O1,bf16,ban=gelu"), torch._dynamo.exc.BackendCompilerFailed,
        "PolicyError: gelu is banned", "models.py"),
    "no module": (lambda: mezzo.plan.plan(torch.relu, torch.ones(2), policy="O1,bf16"), PolicyError, "nn.Module"),
    "another input": (
        lambda: mezzo.plan.plan(Block(), torch.ones(2, 2, 16), torch.ones(2), policy="O1,bf16"), PolicyError,
        "Block does not take these inputs", "too many positional"),
    "a name it has not": (
        lambda: mezzo.plan.plan(Block(), {"y": torch.ones(2, 2, 16)}, policy="O1,bf16"), PolicyError, "'y'|missing"),
    "a branch on data": (
        lambda: mezzo.plan.plan(Depends(), torch.ones(2), policy="O1,bf16"), UnsupportedError,
        "cannot be captured as one graph", "test_backend.py:", "of each part of the model"),
    "planned with a banned op": (
        lambda: mezzo.plan.plan(Block(), torch.ones(2, 2, 16), policy="O1,bf16,ban=gelu"), PolicyError,
        "gelu is banned", "models.py:"),
    "planned without casts": (
        lambda: mezzo.plan.plan(Block(), torch.ones(2, 2, 16), policy="O0"), PolicyError, "O0 casts no op"),
    "a function that Dynamo skips": (
        lambda: mezzo.plan.plan(Packs(), torch.ones(2, 3, 4), policy="O1,bf16"), UnsupportedError,
        "test_backend.py:", "pack_padded_sequence"),
    "a shape that does not fit": (
        lambda: mezzo.plan.plan(Block(), torch.ones(2, 2, 15), policy="O1,bf16"), PolicyError,
        "Block does not run with these inputs", "models.py:", "normalized_shape", "inputs as it is trained with"),
    "an input that is no tensor": (
        lambda: mezzo.plan.plan(Block(), "text", policy="O1,bf16"), PolicyError, "the inputs are a str"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused(name):
    call, error, *words = REFUSALS[name]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert any(part in text for part in word.split("|")), text


# What casts hold for ---------------------------------------------------------------------------------------------


class Rewritten(nn.Module):
    """A tensor is cast, written to, and wanted again."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = torch.softmax(x, -1)
        first = self.a(y)
        y.mul_(8)
        return first, self.b(y)


def test_a_cast_holds_until_its_tensor_is_written_to():
    torch.manual_seed(0)
    model, x = Rewritten(), torch.randn(4, 8)
    with torch.no_grad():
        exact = model(x)
        own = torch.compile(model, backend=mezzo.compile_backend("O1,bf16", inner="eager"))(x)
    for one, other in zip(own, exact, strict=True):
        assert away(one.float(), other) < 2**-7


def test_emulated_products_compute_in_fp32():
    """What runs reads rounded operands in FP32; what it gives is rounded."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    backend = mezzo.compile_backend("O1,fp16,emulate=true", inner="mezzo_tests_watched")
    x = torch.randn(64, 64)
    with watching() as seen, torch.no_grad():
        out = torch.compile(model, backend=backend)(x)
        first, last = model[0], model[2]
        half = torch.relu(
            nn.functional.linear(x.half().float(), first.weight.half().float(), first.bias.half().float())
        )
        right = nn.functional.linear(half.half().float(), last.weight.half().float(), last.bias.half().float()).half()
    (plan,) = backend.plans
    assert [op.dtype for op in plan.ops] == ["float16"] * 3
    assert "products are emulated here" in plan.text()
    assert {ran.read for ran in seen.calls if ran.name == "linear"} == {(torch.float32,) * 3}
    assert torch.equal(out, right)


@pytest.mark.parametrize("name", ["with a loss", "grouped queries", "math"])
def test_what_emulation_rounds_is_seen_through_views(name):
    case = CASES[name]
    exact, auto = flat(*trained(case)), flat(*trained(case, region=lambda: torch.autocast("cpu", torch.bfloat16)))
    backend = mezzo.compile_backend(f"{case.policy},emulate=true", inner="eager")
    own = flat(*trained(case, lambda model: torch.compile(model, backend=backend)))
    assert backend.plans[0].emulated
    for ran in planned_run(case, policy=f"{case.policy},emulate=true")[3].calls:
        assert ran.name not in FP32 or set(ran.read) == {torch.float32}, ran
    for ours, theirs, right in zip(own, auto, exact, strict=True):
        assert away(ours, right) <= 2 * away(theirs, right) + 4 * 2**-8


def test_a_view_of_a_size_that_varies_is_of_the_cast():
    case = CASES["expanded"]
    model, (x,), _ = built(case)
    torch._dynamo.mark_dynamic(x, 0)
    backend = mezzo.compile_backend(case.policy, inner="mezzo_tests_watched")
    with watching() as seen:
        out = torch.compile(model, backend=backend, fullgraph=True)(x)
    assert backend.plans[0].is_dynamic
    assert dtypes_differ(backend.plans[0], seen.calls) == []
    assert away(out.detach().float(), model(x).detach()) < 4 * 2**-8


def test_running_statistics_are_updated_in_fp32():
    case = CASES["residual"]
    auto, _ = trained(case, region=lambda: torch.autocast("cpu", torch.bfloat16))
    backend = mezzo.compile_backend("O1,bf16,low=batch_norm", inner="eager")
    own, _ = trained(case, lambda model: torch.compile(model, backend=backend))
    assert [op.dtype for op in backend.plans[0].ops if op.op == "batch_norm"] == ["bfloat16"] * 2
    for name, right in auto.named_buffers():
        there = own.get_buffer(name)
        assert there.dtype == right.dtype
        assert torch.allclose(there, right, rtol=2**-7, atol=2**-10), name
    assert auto.norm1.running_mean.abs().max() > 0


def test_a_region_around_does_not_undo_a_rule():
    for region in (lambda: torch.autocast("cpu", torch.bfloat16), lambda: mezzo.autocast("O1,bf16")):
        torch._dynamo.reset()
        backend = mezzo.compile_backend("O1,bf16,fp32=linear", inner="eager")
        with region():
            assert torch.compile(nn.Linear(8, 8), backend=backend)(torch.randn(2, 8)).dtype == torch.float32


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        return self.b(y.float().exp().to(y.dtype))


def test_a_dtype_that_the_program_reads_is_the_regions():
    """As the docstring says: Dynamo makes it a constant of the graph."""
    for around, dtype in ((nullcontext(), "float32"), (mezzo.autocast("O1,bf16"), "bfloat16")):
        torch._dynamo.reset()
        backend = mezzo.compile_backend("O1,bf16", inner="eager")
        with around:
            out = torch.compile(Normed(), backend=backend)(torch.randn(4, 8))
        (asked,) = [op for op in backend.plans[0].ops if op.op == "to"]
        assert (asked.dtype, asked.decided, out.dtype) == (dtype, "program", torch.bfloat16)


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.inner = nn.Linear(8, 8), CASES["lstm"].make()

    def forward(self, x):
        return self.inner(self.a(x))


def test_an_lstm_is_left_to_the_region():
    """Of its module torch.compile captures nothing, unless it is told to."""
    x = torch.randn(2, 4, 8)
    backend = mezzo.compile_backend("O1,bf16", inner="eager")
    assert torch.compile(CASES["lstm"].make(), backend=backend)(x).dtype == torch.float32
    assert backend.plans == []
    with pytest.raises(ValueError, match="does not match weight dtype"):
        torch.compile(Called(), backend=backend)(x)
    with mezzo.autocast("O1,bf16"):
        assert torch.compile(Called(), backend=backend)(x).dtype == torch.bfloat16
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        assert torch.compile(Called(), backend=backend)(x).dtype == torch.bfloat16
    assert [op.op for op in backend.plans[-1].ops] == ["linear", "lstm", "tanh", "linear"]


class WithoutGradients(nn.Linear):
    """A weight is read without gradients first, as by a spectral norm, then with them."""

    def forward(self, x):
        with torch.no_grad():
            length = (self.weight @ x[0]).norm() + self.weight.T.contiguous().float().sum() * 0
        return nn.functional.linear(x, self.weight / length if self.training else self.weight, self.bias)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("policy", ["O1,bf16", "O1,bf16,emulate=true", "O1,bf16,low=div"])
def test_a_cast_made_without_gradients_is_shared_with_its_gradient(policy, trains):
    case = Case(lambda: WithoutGradients(8, 8), trains=trains)
    right = flat(*trained(case))[1]
    backend = mezzo.compile_backend(policy, inner="mezzo_tests_watched")
    with watching() as seen:
        own = flat(*trained(case, lambda model: torch.compile(model, backend=backend, fullgraph=True)))[1]
    assert away(own, right) < 8 * 2**-8
    if "emulate" not in policy:  # which casts too
        assert seen.casts == [backend.plans[0].totals["plan"].casts]


def test_a_spectral_norm_has_gradients():
    def make():
        return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    case = Case(make)
    backend = mezzo.compile_backend("O1,bf16", inner="eager")
    right, own = trained(case)[0], trained(case, lambda model: torch.compile(model, backend=backend))[0]
    for one, other in zip(own.parameters(), right.parameters(), strict=True):
        assert away(one.grad, other.grad) < 8 * 2**-8
