"""The policy that a plan exports, in eager programs: dtypes as measured at the kernels, against the plan's."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.plan import plan

from .models import CASES, built

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks inputs for it

#: Models whose programs ask for no dtype: `x.dtype` is another one under a policy than without.
NAMES = (
    "gpt",
    "with a loss",
    "residual",
    "chain",
    "grouped queries",
    "expanded",
    "several",
    "chosen",
    "island",
    "math",
)


def by_place(rows):
    runs = {}
    for module, op, dtypes in rows:
        runs.setdefault((module, op), set()).update(dtypes)
    return runs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_the_policy_gives_the_placement(name, objective):
    case = CASES[name]
    model, args, _ = built(case)
    made = plan(model, args, policy=case.policy, objective=objective)
    explained = mezzo.explain(model, *args, policy=made.policy())
    measured = by_place((row.module, row.op, set(row.returns) - {"int64"}) for row in explained.rows)
    planned = by_place((op.module, op.op, (op.dtype,)) for op in made.ops)
    compared = 0
    for (module, op), dtypes in planned.items():
        if len(dtypes) > 1 or (module, op) not in measured or not measured[module, op]:
            continue
        if any(f"{op} in {module or 'the model itself'}" in text for text in made.unsaid):
            continue
        assert measured[module, op] == dtypes, (module, op, str(made.policy()))
        compared += 1
    assert compared >= len(planned) - 4


def test_what_no_rule_can_say():
    """One module runs an op twice, and each is cheaper in another precision."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = self.a(x).mul(2)  # low: it is read and written low
            z = torch.softmax(y, -1).mul(3)  # FP32: between two that are
            return torch.softmax(z, -1), self.b(y)

    made = plan(Twice(), torch.randn(64, 64), policy="O1,bf16")
    precisions = [op.dtype for op in made.ops if op.op == "mul"]
    assert precisions == ["bfloat16", "float32"]
    assert made.rules == ""  # both follow what they read
    assert made.unsaid == ()

    class Apart(Twice):
        def forward(self, x):
            y = self.a(x).mul(x)  # low, though it reads FP32
            z = torch.softmax(y, -1).mul(x)
            return torch.softmax(z, -1), self.b(y)

    made = plan(Apart(), torch.randn(64, 64), policy="O1,bf16")
    assert [op.dtype for op in made.ops if op.op == "mul"] == ["bfloat16", "float32"]
    (unsaid,) = made.unsaid
    assert "mul in the model itself runs once low and once in FP32" in unsaid
    assert "test_export.py:" in unsaid
    assert "no rule can say that" in made.text()
    assert mezzo.Policy.parse("O1,bf16") == made.policy()


def test_a_number_beside_a_tensor_does_not_widen_it_and_views_get_no_rule():
    class Shared(nn.Linear):
        def __init__(self):
            super().__init__(64, 64)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            y = super().forward(x)  # low, and wanted in FP32 by exp: what else reads that cast needs none
            return y.exp() + (y * self.scale).exp()

    made = plan(Shared(), torch.randn(64, 64), policy="O1,bf16")
    dtypes = {op.op: op.dtype for op in made.ops}
    assert (dtypes["linear"], dtypes["mul"]) == ("bfloat16", "float32")
    assert "fp32=mul" in str(made.policy())
    copied = plan(Copied(64, 64), torch.randn(64, 64), policy="O1,bf16")
    assert {op.op: op.dtype for op in copied.ops}["reshape"] == "float32"
    assert "reshape" not in str(copied.policy())
    assert any(text.startswith("reshape in") for text in copied.unsaid)


class Copied(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y.exp() + y.T.reshape(8, 512).exp().view(64, 64)


def test_rules_stand_behind_the_policys_own():
    made = plan(CASES["chain"].make(), *CASES["chain"].inputs(), policy="O1,bf16,fp32=square+abs")
    exported = made.policy()
    assert exported.explain("square").treatment == exported.explain("abs").treatment == "fp32"
    assert {op.dtype for op in made.ops if op.op in ("square", "abs")} == {"float32"}


def test_alike_modules_share_a_rule():
    class Gate(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.abs()

    class Gates(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Gate(32, 32) for _ in range(4)])

        def forward(self, x):
            for block in self.blocks:
                x = torch.softmax(block(x), -1)
            return x

    model, x = Gates(), torch.randn(32, 32)
    made = plan(model, x, policy="O1,bf16")
    assert {op.dtype for op in made.ops if op.op == "mul"} <= {"bfloat16", "float32"}
    assert made.rules.count("=") <= 2, made.rules
    explained = mezzo.explain(model, x, policy=made.policy())
    for row in explained.rows:
        dtypes = {op.dtype for op in made.ops if (op.op, op.module) == (row.op, row.module)}
        assert set(row.returns) == dtypes, row


def test_a_session_takes_the_exported_policy():
    case = CASES["gpt"]
    model, args, _ = built(case)
    made = plan(model, args, policy=case.policy)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), policy=made.policy())
    with amp.autocast():
        loss = model(*args).float().square().mean()
    amp.backward(loss)
    amp.step()
    assert torch.isfinite(loss)
    amp.close()
