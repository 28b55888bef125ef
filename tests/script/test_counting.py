"""What of a script's work is counted, from its first call on: what ran under the policy, and nothing else."""

import re

import pytest

from mezzo.script import Program, run

BF16 = "O1,bf16,emulate=true"
NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 1, bias=False)
    def forward(self, x):
        seen.append((x @ self.first.weight.t()).dtype)
        return self.last(torch.tanh(x @ self.first.weight.t()))
    def loss(self, x):
        return self.forward(x).square().mean()
    def penalty(self):
        seen.append((self.last.weight @ self.first.weight).dtype)
        return 0.0
class Derived(Net):
    def forward(self, x):
        return 2 * super().forward(x)
seen = []
"""


@pytest.fixture
def ran(tmp_path, capsys):
    """Run a script that is given as text, and return its report and the words that it printed."""

    def made(text, policy=BF16):
        path = tmp_path / "script.py"
        path.write_text(f"import torch\ntorch.manual_seed(0)\nx = torch.randn(32, 8)\n{text}")
        ended = run(Program(name=str(path)), policy)
        if ended.error is not None:
            raise ended.error
        return ended.report, capsys.readouterr().out.split()

    return made


def steps(call, times=5, model="model = Net()", optimizer="torch.optim.SGD(model.parameters(), lr=0.1)"):
    body = f"    optimizer.zero_grad(); ({call}).square().mean().backward(); optimizer.step()\n"
    return f"{NET}{model}\noptimizer = {optimizer}\nfor _ in range({times}):\n{body}"


# From the first call on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, model",
    [
        ("model(x)", "model = Net()"),
        ("model.forward(x)", "model = Net()"),
        ("model.forward(x=x)", "model = Net()"),
        ("model.forward(x)", "model = Derived()"),
        ("model.loss(x)", "model = Derived()"),
        ("model.first.forward(x)", "model = torch.nn.Module(); model.first = torch.nn.Linear(8, 1)"),
        ("model.inner.forward(x)", "model = torch.nn.Module(); model.inner = Net()"),
    ],
)
def test_the_first_direct_call_of_a_model_runs_in_its_region(ran, call, model):
    counted, words = ran(steps(call, model=model) + "print(*{*seen})")
    assert (counted.steps, counted.low_share) == (5, 1.0)
    assert words in (["torch.bfloat16"], [])


def test_a_call_without_tensors_begins_nothing(ran):
    text = (
        f"{NET}model = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nmodel.penalty()\nprint(*seen)\n"
    )
    counted, words = ran(text)
    assert (counted.models, words) == ([], ["torch.float32"])


def test_what_waits_for_a_first_call_is_gone_after_it(ran):
    names = "torch.nn.Module.__call__, torch.nn.Linear.forward, Net.forward, Net.loss"
    text = NET + f"before = {names}\nmodel = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    text += f"print(sum(a is b for a, b in zip(before, ({names}))))\nmodel.loss(x)\n"
    text += f"print(sum(a is b for a, b in zip(before, ({names}))))\n"
    assert ran(text)[1] == ["0", "4"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_is_scripted_and_traced_while_its_optimizer_waits(ran):
    """TorchScript reads the source of methods, and the names of the file that they stand in."""
    model = (
        "from torch.nn import functional as F\n"
        "class Other(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.last = torch.nn.Linear(8, 1)\n    def forward(self, x):\n        return F.relu(self.last(x))\n"
    )
    text = (
        f"{model}model = Other()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "made = torch.jit.script(model), torch.jit.trace(model, x)\nwith torch.no_grad():\n"
        "    print(*(float((each(x) - model(x)).abs().max()) for each in made))\n"
    )
    counted, words = ran(text)
    assert (words, counted.models) == (["0.0", "0.0"], [])


# What is counted ---------------------------------------------------------------------------------------------

#: Products in 16 bits of an optimizer's own, as Muon's.
ORTHOGONAL = """
class Orthogonal(torch.optim.SGD):
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                low = p.grad.bfloat16()
                p.grad.copy_(low @ low.t() @ low)
        super().step()
        return loss
"""


@pytest.mark.parametrize("policy, share", [(BF16, 1.0), (f"{BF16},fp32=linear+matmul", 0.0)])
@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizers_own_products_are_not_the_policys(ran, policy, share, closure):
    text = steps("model(x)", optimizer="Orthogonal(model.parameters(), lr=0.1)", model=f"{ORTHOGONAL}\nmodel = Net()")
    if closure:
        text = re.sub(r"for _ in .*\n.*\n", "", text) + (
            "def closure():\n    optimizer.zero_grad(); loss = model(x).square().mean(); loss.backward(); return loss\n"
            "for _ in range(5):\n    optimizer.step(closure)\n"
        )
    counted, _ = ran(text, policy)
    assert (counted.steps, counted.low_share) == (5, share)
    assert sum(counted.flops.values()) == counted.measured_steps * 2 * 32 * (3 * 8 * 16 + 3 * 16)
    assert bool(counted.alarm) == (share == 0.0)


def test_optimizers_of_single_parameters_that_step_after_one_pass_are_one_measured_step(ran):
    text = f"{NET}model = Net()\noptimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()] * 4\n"
    text += "for _ in range(3):\n    model(x).square().mean().backward()\n"
    text += "    for each in optimizers:\n        each.step()\n    model.zero_grad()\n"
    counted, _ = ran(text)
    assert (counted.steps, counted.measured_steps, counted.low_share) == (24, 2, 1.0)


REFUSED = "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).double()\nx = x.double()"


@pytest.mark.parametrize("first", ["", "step(torch.nn.Linear(8, 1))\n"])
def test_nothing_counts_where_a_session_was_refused(ran, first):
    text = (
        "from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes\n"
        "def step(model, rows=x):\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(3):\n        model(rows).square().mean().backward(); optimizer.step()\n"
        f"{first}{REFUSED}\nstep(model, x)\nprint(len(modes()), torch.nn.Linear.forward.__module__)\n"
    )
    counted, words = ran(text)
    assert words == ["0", "torch.nn.modules.linear"]
    assert len(counted.left_alone) == 1
    assert counted.measured_steps == (2 if first else 0)


# Positions, and compiled models -------------------------------------------------------------------------------


def test_more_positions_than_the_format_has_integers_are_told_once(ran):
    def made(count):
        last = "self.last(torch.tanh(x @ self.first.weight.t()))"
        places = f"y = {last}; return y + torch.arange({count}, dtype=y.dtype).sum()"
        return steps("model(x)", times=3).replace(f"return {last}", places)

    report, _ = ran(made(512))
    ((where, what),) = report.positions.items()
    assert what == "512 in BF16, which has 256 integers: make them in FP32"
    assert re.search(r"script\.py:\d+$", where)
    assert [line for line in report.lines if line.startswith("  positions")] == [f"  positions    {what} ({where})"]
    assert ran(made(256))[0].positions == {}
    assert ran(made(512), BF16.replace("bf16", "fp16"))[0].positions == {}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_runs_compiled_once_its_first_steps_are_counted(ran):
    backend = "graphs = []\ndef backend(graph, inputs):\n    graphs.append(graph)\n    return graph.forward\n"
    text = steps("model(x)", times=8, model=f"{backend}model = Net()\nmodel.compile(backend=backend)")
    report, words = ran(
        text.replace("        seen.append((x @ self.first.weight.t()).dtype)\n", "") + "print(len(graphs) > 0)\n"
    )
    assert words == ["True"]
    assert report.measured_steps == 3
    assert report.low_share == 1.0
