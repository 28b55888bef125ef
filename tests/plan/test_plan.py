"""Plans: what they say, that nothing runs for them, and that they come back from JSON as they were."""

import itertools
import json
import logging
import math
import random
import re
import time

import pytest
import torch
from torch import nn

import mezzo
from mezzo import files
from mezzo.cast.device import Claim, DeviceReport, FormatSupport, decide
from mezzo.cast.device.probing import FORMATS
from mezzo.errors import PolicyError, StateError
from mezzo.plan import Plan, differences, plan

from ..support.refusals import facts, refused
from .models import CASES, GPT, Block, Buffered, Casts, Named, built, planned_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of autograd functions
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo asks inputs for it
]


def of(name, **options):
    case = CASES[name]
    model, args, kwargs = built(case)
    return plan(model, args if args else kwargs, policy=case.policy, **options)


LOGGER = logging.getLogger("tests.plan")


@pytest.fixture(scope="module")
def made():
    return {name: of(name) for name in ("chain", "several", "asked", "own region")}


@pytest.mark.parametrize("name", ["chain", "several", "asked", "own region"])
def test_the_backend_does_what_was_planned(name, made):
    _, _, backend, seen = planned_run(CASES[name])
    (other,), one = backend.plans, made[name]
    assert one.ops == other.ops
    assert one.casts == other.casts
    assert one.totals == other.totals
    assert one.rules == other.rules
    assert seen.casts == [one.totals["plan"].casts]


def test_nothing_runs_and_nothing_changes():
    torch.manual_seed(0)
    model, x = Buffered(), torch.randn(4, 8)
    model.register_forward_hook(lambda *_: None)
    before, state = facts(model, x), torch.get_rng_state()
    first = plan(model, x, policy="O1,bf16")
    assert facts(model, x) == before
    assert torch.equal(torch.get_rng_state(), state)
    with torch.autocast("cpu", torch.bfloat16), mezzo.autocast("O1,bf16"):  # of what is around, nothing is planned for
        assert plan(model, x, policy="O1,bf16") == first


def test_no_clock_decides_a_plan(made, monkeypatch):
    """Nor a file: the same plan where clocks lie, and no folder of a cache is made."""
    for seed in range(3):
        rng, ticks = random.Random(seed), itertools.count()
        for name in ("perf_counter", "process_time", "monotonic", "thread_time"):
            monkeypatch.setattr(time, name, lambda rng=rng, ticks=ticks: next(ticks) * rng.uniform(0.3, 3))
        with monkeypatch.context() as patch:
            patch.setattr(files, "keep", lambda *_: pytest.fail("a file is kept"))
            patch.setattr(files, "kept", lambda *_: pytest.fail("a file is read"))
            assert of("several") == made["several"]


def test_where_products_are_emulated_plans_are_the_same_on_every_processor(monkeypatch):
    plans, model, x = set(), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1)), torch.randn(4, 8)
    for has in ((), ("avx512_bf16",), ("avx512_bf16", "amx_bf16"), ("bf16",)):
        formats = dict.fromkeys(FORMATS, FormatSupport.same_for_all("right", "", claim=Claim(has=has, words="as told")))
        monkeypatch.setitem(decide._reports, "cpu", DeviceReport(device_type="cpu", name="a CPU", formats=formats))
        plans.add(plan(model, x, policy="O1,bf16,emulate=true").to_json())
        native = plan(model, x, policy="O1,bf16,emulate=false")
        assert native.balance.low_speedup == {(): 2, ("avx512_bf16",): 2, ("bf16",): 4}.get(has, 16)
    assert len(plans) == 1


def test_what_a_plan_says_of_each_op():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = torch.relu(self.a(x))
            return self.head(y.float()) + torch.fft.rfft(y.float()).real.sum() + y.double().sum()

    planned = plan(Mixed(), torch.randn(4, 8), policy="O1,bf16,fp32_module=head")
    decided = {(op.op, op.module): (op.dtype, op.decided) for op in planned.ops}
    assert decided["linear", "a"] == ("bfloat16", "list")
    assert decided["linear", "head"] == ("float32", "rule")
    assert decided["relu", ""] == ("bfloat16", "cut")
    assert decided["float", ""] == ("float32", "program")
    assert decided["double", ""] == ("float64", "left alone")
    assert all(op.reason for op in planned.ops)
    assert all("test_plan.py:" in op.line for op in planned.ops)
    assert [planned.ops[index].op for index in planned.ops[1].reads] == ["linear"]
    assert (planned.ops[-1].dtype, planned.ops[-1].decided) == ("float32", "left alone")
    assert "left alone" in planned.text()


def test_casts_are_named(made):
    casts = made["chain"].casts
    assert len(casts) == made["chain"].totals["plan"].casts
    assert sum(cast.num_bytes for cast in casts) == made["chain"].totals["plan"].cast_bytes
    by_name = {cast.tensor: cast for cast in casts}
    weight = by_name["convs.0.weight"]
    assert (weight.module, weight.is_source, weight.given, weight.wanted) == ("convs.0", True, "float32", "bfloat16")
    assert weight.readers == ("conv2d@convs.0",)
    assert weight.num_bytes == 4 * 4 * 9 * 6 * 2  # and the gradient's
    assert (by_name["x"].is_source, by_name["x"].num_bytes) == (True, 2 * 4 * 36 * 6)  # which takes no gradient
    assert not by_name["log"].is_source
    assert "models.py:" in by_name["log"].line


def test_an_objective_between():
    class Wide(nn.Linear):
        def forward(self, x):
            return torch.exp(super().forward(x)).mul(2).sum(-1)

    costs = {}
    for objective in ("time", 0, 0.25, 1, "memory"):
        made = plan(Wide(8, 8), torch.randn(4, 8), policy="O1,bf16", objective=objective)
        own = made.totals["plan"]
        share = {"time": 0, "memory": 1}.get(objective, objective)
        assert made.objective == share
        costs[objective] = own
        if share == 1:
            assert math.isclose(own.cost, own.kept_bytes, rel_tol=1e-3)  # time decides between what is equal
    assert costs["time"] == costs[0]
    assert costs["memory"] == costs[1]


def test_nothing_is_rounded_to_be_added_up():
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - 1) + x.mean(-1, keepdim=True) * torch.dot(x[0], x[1])

    for objective in ("time", "memory"):
        made = plan(Centred(64, 64), torch.randn(64, 64), policy="O1,bf16", objective=objective)
        dtypes = {op.op: op.dtype for op in made.ops}
        assert (dtypes["linear"], dtypes["mean"], dtypes["dot"]) == ("bfloat16", "float32", "float32")


def test_the_verdict_is_what_the_totals_say(made):
    for planned in made.values():
        first, *_ = planned.text(width=None).splitlines()
        own, other = planned.totals["plan"], planned.totals["torch.autocast"]
        fewer = other.casts - own.casts
        if own == other:
            assert "torch.autocast's placement is the cheapest" in first
        elif fewer:
            assert f"{abs(fewer)} cast" in first
            assert ("fewer" if fewer > 0 else "more") in first
        else:
            assert "as many casts" in first
    assert "Paddle" in made["chain"].text()
    assert "TensorFlow" in made["chain"].text()


@pytest.mark.parametrize("name", ["chain", "residual", "island"])
def test_autocasts_casts_are_those_of_torch(name):
    """Counted in an eager program under torch.autocast, where no op promotes by itself."""
    case = CASES[name]
    model, args, _ = built(case)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        model(*args)
    assert plan(model, args, policy="O1,bf16,lists=device").totals["torch.autocast"].casts == casts.count


def test_pictures(made):
    planned = made["own region"]
    drawn = planned.dot()
    assert drawn.count(" [label=") == len(planned.ops)
    assert drawn.count("->") == sum(len(op.reads) for op in planned.ops)
    casts = sum(planned.ops[maker].dtype != op.dtype for op in planned.ops for maker in op.reads)
    assert drawn.count("label=cast") == casts
    full = planned.text(full=True, width=None)
    assert all(f"{op.op} {op.module}".strip() in full for op in planned.ops)
    double = of("parts").text(full=True, width=None).split("FP32   BF16")[-1]
    assert "double │" in double  # which is not low


def test_plans_come_back_from_json(made):
    for planned in made.values():
        again = Plan.from_json(planned.to_json())
        assert again == planned
        assert again.text(full=True) == planned.text(full=True)
        assert again.policy() == planned.policy()
    infinite = [plan for plan in made.values() if any(math.isinf(total.cost) for total in plan.totals.values())]
    assert all(json.loads(planned.to_json()) for planned in infinite)


def without(name):
    def cut(data):
        del data[name]

    return cut


def set_to(name, value):
    return lambda data: data.update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        without("ops"), without("totals"), without("base"), set_to("more", 1), set_to("base", "O9"),
        set_to("ops", [{"op": "linear"}]), set_to("casts", 3), set_to("rules", "nonsense"), set_to("totals", []),
        set_to("balance", {"bytes_per_s": 1}),
    ],
)  # fmt: skip
def test_what_is_no_plan(change, made):
    data = json.loads(made["chain"].to_json())
    change(data)
    with refused(StateError, "this text is no plan", "plan.to_json()"):
        Plan.from_json(json.dumps(data))


def test_texts_that_are_no_json():
    for text in ("", "[]", "3", "null", "{", '"text"'):
        with refused(StateError, "this text is no plan"):
            Plan.from_json(text)


def test_a_plan_of_another_torch_says_so(made, caplog):
    data = json.loads(made["chain"].to_json()) | {"torch": "1.0"}
    caplog.set_level(logging.WARNING)
    Plan.from_json(json.dumps(data))
    assert "made with torch 1.0" in caplog.text


def test_differences():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    planned = plan(Block(), x, policy="O1,bf16")
    assert differences(planned, Block(), x) == ()
    assert differences(planned, Block(), torch.randn(2, 6, 16)) == (
        "inputs: planned for float32 (2, 5, 16), and there is float32 (2, 6, 16)",
    )
    (only,) = differences(planned, Block(), x.bfloat16())
    assert "bfloat16" in only
    other = Block()
    other.out = nn.Linear(64, 16, bias=False)
    (only,) = differences(planned, other, x)
    assert only.startswith("parameters")
    assert [line.partition(":")[0] for line in differences(planned, GPT(), torch.ones(2, 5, dtype=torch.int64))] == [
        "model", "parameters", "inputs",
    ]  # fmt: skip


def test_sizes_are_those_of_the_inputs():
    """Whatever a plan before was for: Dynamo takes a size for one that varies where it was another one."""
    for tokens in (5, 6):
        assert not plan(Block(), torch.randn(2, tokens, 16), policy="O1,bf16").is_dynamic


def test_what_a_model_logs_is_no_op():
    class Talks(nn.Linear):
        def forward(self, x):
            LOGGER.warning("deprecated")
            return super().forward(x)

    (op,) = plan(Talks(8, 8), torch.randn(4, 8), policy="O1,bf16").ops
    assert op.op == "linear"


def test_composites_without_products_need_no_emulation():
    class Near(nn.Linear):
        def forward(self, x):
            return nn.functional.normalize(super().forward(x), dim=-1)

    native, emulated = (
        plan(Near(8, 8), torch.ones(4, 8), policy=f"O1,bf16,emulate={emulate}") for emulate in (False, True)
    )
    assert emulated.ops == native.ops
    assert [op.reason for op in native.ops if op.op == "normalize"] == ["torch's own autocast casts what it is made of"]


def test_what_is_made_like_a_tensor_has_its_dtype():
    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.a(x)
            shifted = torch.zeros_like(y)
            shifted[1:] = y[:-1]
            return self.b(shifted) + x.new_ones(8)

    planned = plan(Filled(), torch.randn(4, 8), policy="O1,bf16")
    assert [(op.op, op.dtype) for op in planned.ops if op.op not in ("linear", "add")] == [
        ("zeros_like", "bfloat16"), ("new_ones", "float32")
    ]  # fmt: skip
    assert (
        planned.totals["plan"].casts == planned.totals["torch.autocast"].casts == 6
    )  # weights, biases, x, and for the sum
    assert planned.unsaid == ()


def test_whole_numbers_are_no_ops():
    class Buckets(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.a = nn.Embedding(4, 8), nn.Linear(8, 8)

        def forward(self, x):
            bucket = (x.float().sum(-1) * 0).long()
            return self.a(self.table(torch.where(bucket > 2, bucket.sub(1), bucket)))

    planned = plan(Buckets(), torch.randn(4, 8), policy="O1,bf16")
    assert [op.op for op in planned.ops] == ["float", "sum", "mul", "long", "embedding", "linear"]
    assert planned.ops[4].decided == "cut"  # though its indices come of FP32 that is asked for


def test_what_is_printed_is_short_for_many_modules():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = self.a(x).mul(x).mul(x)  # low
            return torch.softmax(torch.softmax(y, -1).mul(x).mul(x), -1), self.b(y)

    class Gates(nn.Module):
        def __init__(self):
            super().__init__()
            self.gates = nn.ModuleList(Gate() for _ in range(6))

        def forward(self, x):
            return [gate(x) for gate in self.gates]

    made = plan(Gates(), torch.randn(64, 64), policy="O1,bf16")
    text = made.text()
    assert len(made.unsaid) == 6
    assert text.count("no rule can say that mul in gates.") == 4
    assert "nor what 2 more texts of plan.unsaid say" in text
    assert made.text(full=True).count("no rule can say that mul in gates.") == 6
    assert re.search(r"mul ×2 +gates\.\{0\.\.5\} ×6 +BF16", text)  # two in each, in one row


def test_inputs_by_name():
    given = {"x": torch.randn(4, 8), "scale": torch.rand(8)}
    planned = plan(Named(), given, policy="O1,bf16")
    assert planned.inputs == ("float32 (4, 8)", "float32 (8,)")
    assert [op.op for op in planned.ops] == ["linear", "mul"]


def test_a_module_of_another_kind_is_refused():
    for model in (torch.relu, None, "model", Block):
        with refused(PolicyError, "a model must be an nn.Module"):
            plan(model, torch.ones(2), policy="O1,bf16")


class Sigmoids(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.b(torch.sigmoid(self.a(x)).mul(2).add(1))


def test_fused_kernels_cost_what_lies_between():
    """What is made and read between products is neither written nor read, and no cast there is a kernel."""
    x = torch.randn(64, 64)
    with torch.no_grad():
        single = plan(Sigmoids(), x, policy="O1,bf16").totals["plan"]
        fused = plan(Sigmoids(), x, policy="O1,bf16", fused=True).totals["plan"]
    many = 64 * 64
    products = 2 * (2 * (2 * many + 64 + many))  # each reads two and a bias, and writes one
    assert single.moved_bytes == products + single.cast_bytes + 3 * 2 * 2 * many
    assert fused.moved_bytes == products + fused.cast_bytes + 2 * 2 * many  # the cluster reads one, and writes one


def test_a_region_of_the_programs_own_is_left_alone(made):
    own = [op for op in made["own region"].ops if op.decided == "left alone"]
    assert [(op.op, op.dtype) for op in own] == [("linear", "float32"), ("mul", "float32")]
    assert all("own autocast" in op.reason for op in own)


def test_numbers_are_drawn_as_without_a_policy():
    class Noisy(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y + torch.randn_like(y)

    planned = plan(Noisy(8, 8), torch.randn(4, 8), policy="O1,bf16")
    (drawn,) = [op for op in planned.ops if op.op == "randn_like"]
    assert (drawn.dtype, drawn.decided) == ("float32", "left alone")
