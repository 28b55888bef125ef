"""What a run is told to have come to: why nothing ran low, what was left alone and why, what is no alarm."""

import pytest

from mezzo.script import Program, run

from ..support.releases import torchscript

BF16 = "O1,dtype=bfloat16"
O2 = "O2,dtype=bfloat16"

LINEAR = "model = torch.nn.Linear(8, 1)\n"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
STEP = "optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()\n"


@pytest.fixture
def ran(tmp_path):
    """Run a script that is given as text, and return its report."""

    def made(text, policy=BF16, **options):
        path = tmp_path / "script.py"
        path.write_text(f"import torch\ntorch.manual_seed(0)\nx = torch.randn(32, 8)\n{text}")
        ended = run(Program(name=str(path)), policy, **options)
        if ended.error is not None:
            raise ended.error
        return ended.report

    return made


BY_HAND = LINEAR + (
    "for _ in range(3):\n    model(x).square().mean().backward()\n    with torch.no_grad():\n"
    "        for p in model.parameters():\n            p -= 0.1 * p.grad; p.grad = None\n"
)
NO_OPTIMIZER = "the script made no optimizer, so there was no step, and nothing was to train in low precision"
WHY_NOT = {
    "updates by hand": (BY_HAND, BF16, NO_OPTIMIZER, "torch.optim.…(model.parameters()) and optimizer.step(); or,"),
    "inference": (LINEAR + "model(x)\n", BF16, NO_OPTIMIZER, "without training, with mezzo.autocast(policy): …"),
    "nothing at all": ("", O2, NO_OPTIMIZER, "optimizer.step()"),
    "an optimizer of nobody's tensors": (
        "w = torch.ones(8, requires_grad=True)\noptimizer = torch.optim.SGD([w], lr=0.1)\n(x @ w).sum().backward()\n"
        "optimizer.step()\n",
        BF16, "no module holds what the script's optimizers update", "an nn.Module that has these tensors",
    ),
    "no step": (
        LINEAR + SGD + "with torch.no_grad():\n    model(x)\n",
        BF16, "no optimizer of the script took a step", "until loss.backward() and optimizer.step()",
    ),
    "left alone": (
        "model = torch.jit.script(torch.nn.Linear(8, 1))\n" + SGD + STEP,
        BF16, "what the script trains was left alone", "what is said about it under left alone",
    ),
    "rules": (
        LINEAR + SGD + STEP, f"{BF16},fp32=linear+addmm+mm+matmul",
        "its matrix products, if there are any, stayed in FP32", "mezzo explain",
    ),
}  # fmt: skip


@torchscript
def test_a_run_in_which_nothing_ran_low_says_why_and_what_to_do(ran):
    for name, (text, policy, why, write) in WHY_NOT.items():
        report = ran(text, policy)
        assert report.alarm == f"nothing ran in low precision: {why}", name
        first, second, *_ = report.lines
        assert first.endswith(f"under {policy}: nothing ran in low precision: {why}"), name
        assert second.startswith("  write        "), name
        assert write in second, name
        assert report.to_dict()["alarm"] == report.alarm, name
    # A pass without a step is an alarm though it ran low.
    report = ran(LINEAR + SGD + "model(x).sum().backward()\n")
    assert (report.alarm, report.low_share) == ("no optimizer of the script took a step", 1.0)


def test_a_run_that_skips_most_of_its_steps_is_an_alarm(ran):
    step = STEP.replace("model(x)", "(model(x) * (inf if number > 1 else 1))")
    report = ran(f"from math import inf\n{LINEAR}{SGD}for number in range(5):\n    {step}", "O1,fp16")
    assert (report.alarm, report.steps, report.skipped) == ("3 of 5 steps were skipped", 5, 3)


def test_options_of_the_session_reach_it(ran, capsys):
    text = f"{LINEAR}before = model.bias.item()\n{SGD}{STEP}print(abs(model.bias.item() - before))\n"
    for norm, moves in ((None, True), (1e-9, False)):
        ran(text, "O0", max_grad_norm=norm)
        assert (float(capsys.readouterr().out) > 1e-6) == moves


def test_a_run_in_fp32_that_was_asked_for_is_no_alarm(ran):
    for policy in ("O0", "O0,loss_scale=constant(1024)"):
        report = ran(LINEAR + SGD + STEP, policy)
        assert (report.alarm, report.low_share, report.steps) == ("", 0.0, 1)
        assert report.lines[0].endswith(f"under {policy}: all of it is FP32, as {policy} says")
        assert ran("", policy).alarm == ""


SCRIPTED = (
    "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.a, self.b = {a}, torch.nn.Linear(8, 1)\n"
    "    def forward(self, x):\n        return self.b(self.a(x))\n"
    "model = {model}\n" + SGD + "for _ in range(2):\n    " + STEP + "print(float(model.b.bias.detach()))\n"
)
COMPILED = "torch.jit has compiled a module of the model"
OWN_SESSION = (
    f"import mezzo\n{LINEAR}{SGD}amp = mezzo.MixedPrecision(model, optimizer, 'O1,dtype=bfloat16')\n"
    "with amp.autocast():\n    loss = model(x).square().mean()\namp.backward(loss)\namp.step()\n"
)
LEFT_ALONE = {
    "a scripted model": (
        SCRIPTED.format(a="torch.nn.Linear(8, 8)", model="torch.jit.script(Net())"), BF16,
        "SGD over ", COMPILED, "torch.compile(model)",
    ),
    "a scripted part": (
        SCRIPTED.format(a="torch.jit.script(torch.nn.Linear(8, 8))", model="Net()"), O2,
        "SGD over ", COMPILED, "where  a\n",
    ),
    "a traced model": (
        SCRIPTED.format(a="torch.nn.Linear(8, 8)", model="torch.jit.trace(Net(), x)"), BF16,
        "SGD over ", COMPILED, "hooks and casts of Python do not reach TorchScript",
    ),
    "a session of the script's own": (
        OWN_SESSION, BF16, "SGD over Linear", "the optimizer belongs to a session already", "",
    ),
    "a policy that the model has no place for": (
        LINEAR + SGD + STEP, f"{O2},fp32_module=heads", "SGD over Linear", "the module glob 'heads' matches no", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
@torchscript
def test_what_is_left_alone_is_named_with_the_reason_and_trains_as_it_does_by_itself(ran, name, capsys):
    text, policy, what, why, besides = LEFT_ALONE[name]
    report = ran(text, policy)
    printed = capsys.readouterr().out
    left_alone = {key: value for key, value in report.left_alone.items() if key.startswith(what)}
    assert len(left_alone) == 1
    assert next(iter(left_alone.values())).startswith(why)
    assert besides in next(iter(left_alone.values()))
    ran(text, "O0")
    assert printed == capsys.readouterr().out
