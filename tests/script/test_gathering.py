"""What a script makes, and when: late optimizers, parts called by themselves, modes, regions, scalers."""

import math
import re
import sys

import pytest
import torch
from torch import nn

from mezzo.script import Program, run

MODEL = "model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))\n"
STEP = "optimizer.zero_grad(); loss = model(x).square().mean(); loss.backward(); optimizer.step()\n"
BF16 = "O1,dtype=bfloat16"


@pytest.fixture
def report(tmp_path, capsys):
    """Run a script that is given as text, and return its report, and the numbers that it printed."""

    def made(text, policy=BF16):
        path = tmp_path / "script.py"
        path.write_text(f"import torch\ntorch.manual_seed(0)\nx = torch.randn(32, 8)\n{text}")
        program = Program(name=str(path))
        ended = program.run() if policy is None else run(program, policy)
        if ended is not None and ended.error is not None:
            raise ended.error
        numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", capsys.readouterr().out)]
        return None if ended is None else ended.report, numbers

    return made


#: An optimizer that is made while gradients accumulate for another one.
LATE = """
a, b = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
for_a = torch.optim.SGD(a.parameters(), lr=0.1)
y = x.sum(1, keepdim=True)
(a(x) - y).square().mean().backward()
for_b = torch.optim.SGD(b.parameters(), lr=0.1)
(b(x) - y).square().mean().backward()
(a(x) - y).square().mean().backward()
for_a.step()
for_b.step()
print(*a.weight.flatten().tolist(), *b.weight.flatten().tolist())
"""


@pytest.mark.parametrize("policy", ["O2,dtype=float16,loss_scale=64", "O3,dtype=bfloat16"])
def test_a_late_optimizer_joins_with_the_gradients_that_others_have(report, policy):
    _, plain = report(LATE, policy=None)
    outcome, low = report(LATE, policy=policy)
    assert low == pytest.approx(plain, abs=0.01)
    assert (outcome.steps, outcome.measured_steps, outcome.optimizers) == (2, 1, ["SGD", "SGD"])
    assert outcome.left_alone == {}


#: Noise on the weights, as adversarial training has it: what puts it there, and what takes it back.
EDITS = {
    "added": ("p.data.add_(e)", "p.data.sub_(e)"),
    "added in no_grad": ("torch.no_grad()(p.add_)(e)", "torch.no_grad()(p.sub_)(e)"),
    "copied back": ("kept[p] = p.data.clone(); p.data.add_(e)", "p.data.copy_(kept[p])"),
    "put back": ("kept[p] = p.data.clone(); p.data.add_(e)", "p.data = kept[p]"),
    "swapped": ("kept[p] = p.data; p.data = p.data + e", "p.data = kept[p]"),
}
NOISY = """
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
noise, kept = {p: 0.02 * torch.randn_like(p) for p in model.parameters()}, {}
for step in range(8):
    for p, e in noise.items() if step in edited else ():
        %s
    optimizer.zero_grad()
    model(x).square().mean().backward()
    %s
print(*model.state_dict()["weight"].flatten().tolist())
"""
UNDONE = "for p, e in noise.items() if step in edited else ():\n        %s"


@pytest.mark.parametrize(
    "edit, steps_inside, dtype",
    [
        ("added", False, "bfloat16"),
        ("copied back", False, "float16"),
        ("put back", False, "bfloat16"),
        ("swapped", False, "float16"),
        ("added in no_grad", True, "bfloat16"),
    ],
)
def test_a_session_that_begins_in_an_edit_trains_from_the_weights_as_they_are_at_the_first_step(
    report, edit, steps_inside, dtype
):
    """What is swapped is known whole; an edit that is undone in place rounds, as it does in 16 bits.

    In place: what the noise was added to lies below 0.5, and what comes of it beside a low half of its own.
    """
    begin, end = EDITS[edit]
    lines = [UNDONE % end, "optimizer.step()"]
    text = NOISY % (begin, "\n    ".join(lines[::-1] if steps_inside else lines))
    _, plain = report(f"edited = [0]\n{text}", policy=None)
    _, low = report(f"edited = [0]\n{text}", policy=f"O2,dtype={dtype}")
    bits, slack = (7, 2e-4) if dtype == "bfloat16" else (10, 3e-5)  # for gradients of low products
    of_noisy = 2.0**-3 if edit.startswith("added") else 0.0
    for value, expected in zip(low, plain, strict=True):
        spacing = 0.0 if edit in ("put back", "swapped") else 2.0 ** (math.frexp(expected)[1] - 1)
        assert abs(value - expected) <= (spacing + of_noisy) * 2.0**-bits + slack


def test_a_mode_of_the_scripts_own_is_not_disturbed(report):
    """Products are counted from the first step that begins outside of the script's own mode."""
    outcome, numbers = report(
        "from torch.utils.flop_counter import FlopCounterMode\n"
        f"{MODEL}optimizer = torch.optim.SGD(model.parameters())\n"
        f"with FlopCounterMode(display=False) as counter:\n    {STEP}"
        f"print(counter.get_total_flops())\nfor _ in range(5):\n    {STEP}"
    )
    forward = 2 * 32 * (8 * 16 + 16)
    assert numbers == [forward + forward + 2 * 32 * 16]  # and backward: weights, and what the first layer returned
    assert (outcome.measured_steps, outcome.low_share) == (3, 1.0)


def test_regions_of_the_script(report):
    begin = f"{MODEL}optimizer = torch.optim.SGD(model.parameters())\n"
    outcome, (low,) = report(
        f"{begin}region = torch.autocast('cpu', dtype=torch.float16)\n"
        f"for _ in range(3):\n    with region:\n        {STEP}        product = x @ x.t()\n"
        "print(int(product.dtype == torch.bfloat16))"  # the policy's format, and not the script's
    )
    assert (outcome.intercepted["torch.autocast"], low) == (3, 1)
    outcome, (is_fp32,) = report(
        f"{begin}with torch.autocast('cpu', enabled=False):\n    {STEP}    product = x @ x.t()\n"
        "print(int(product.dtype == torch.float32))"
    )
    assert "torch.autocast" not in outcome.intercepted
    assert is_fp32 == 1


def test_when_a_session_begins_and_ends(report):
    text = f"{MODEL}optimizer = torch.optim.SGD(model.parameters())\nwith torch.no_grad():\n    model(x)\n"
    outcome, _ = report(text)  # a forward pass without gradients begins nothing
    assert (outcome.steps, outcome.models) == (0, [])
    outcome, _ = report(
        f"for _ in range(2):\n    {MODEL}    optimizer = torch.optim.SGD(model.parameters())\n    {STEP}"
    )
    assert outcome.models == ["Sequential", "Sequential"]  # one that is gone leaves the session
    assert (outcome.steps, outcome.left_alone) == (2, {})
    text = (
        f"import copy\n{MODEL}model.lock = (each for each in ())\noptimizer = torch.optim.SGD(model.parameters())\n"
        f"try:\n    copy.deepcopy(model)\nexcept TypeError as error:\n    kept = error\n{STEP}"
    )
    assert report(text)[0].steps == 1  # beside the half of a copy that failed


def test_checkpointing_of_torchs_own_gets_torchs_own_regions(report):
    text = (
        "from torch.utils.checkpoint import checkpoint\n"
        f"{MODEL}optimizer = torch.optim.SGD(model.parameters())\nfor _ in range(2):\n"
        "    with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "        loss = checkpoint(model, x, use_reentrant=False).square().mean()\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\nprint(loss.item())\n"
    )
    outcome, low = report(text)
    assert outcome.low_share == 1.0
    assert low == pytest.approx(report(text, policy=None)[1], rel=0.02)


def test_a_scaler_tells_the_sessions_scale_and_unscales_by_it(report):
    outcome, (before, norm, after) = report(
        f"{MODEL}optimizer = torch.optim.SGD(model.parameters())\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=4.0)\nprint(scaler.get_scale())\n"
        "scaler.scale(model(x).square().mean()).backward()\nscaler.unscale_(optimizer)\n"
        "print(model[0].weight.grad.norm().item())\n"
        "scaler.step(optimizer)\nscaler.update()\nprint(scaler.get_scale())\n",
        policy="O1,dtype=float16,loss_scale=dynamic(init=1024)",
    )
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model(x).square().mean().backward()
    assert norm == pytest.approx(float(model[0].weight.grad.norm()), rel=0.01)
    assert (before, after, outcome.scale) == (4.0, 1024.0, 1024.0)


#: Trains some steps, from a checkpoint where there is one, and leaves another; prints the scale and a weight.
RESUMED = """
import os
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler('cpu', init_scale=64.0)
if os.path.exists({path!r}):
    saved = torch.load({path!r})
    model.load_state_dict(saved['model'])
    {load}
print(scaler.get_scale())
for step in range({steps}):
    optimizer.zero_grad()
    with torch.autocast('cpu', dtype=torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict()), {path!r})
print(scaler.get_scale(), *model[0].weight[0].tolist())
"""
GROWS = "O1,dtype=float16,loss_scale=dynamic(init=1024,interval=5)"


@pytest.mark.parametrize("scaler, optimizer", [(True, True), (True, False), (False, True)])
def test_a_script_that_resumes_goes_on_bit_for_bit_with_the_scale_and_its_clean_steps(
    report, tmp_path, scaler, optimizer
):
    def trained(steps, name):
        load = "saved['optimizer'].pop('mezzo')\n    " if not optimizer else ""
        load += "optimizer.load_state_dict(saved['optimizer'])\n    "
        load += "scaler.load_state_dict(saved['scaler'])" if scaler else ""
        return report(MODEL + RESUMED.format(path=str(tmp_path / name), load=load, steps=steps), policy=GROWS)

    (straight, expected), (first, halfway), (second, resumed) = (
        trained(steps, name) for steps, name in ((13, "straight.pt"), (8, "two.pt"), (5, "two.pt"))
    )
    assert (halfway[1], resumed[0]) == (2048.0, 2048.0 if scaler else 64.0)
    assert resumed[1:] == expected[1:]
    assert resumed[1] == 4096.0  # after 10 clean steps, and not before
    assert (straight.steps, first.steps, second.steps) == (13, 8, 5)
    assert second.left_alone == {}


def test_a_model_that_is_saved_whole_is_a_plain_fp32_model(report):
    """The script compares with what its own state dict holds; a file would name mezzo if it held anything of it."""
    outcome, numbers = report(
        f"import io\n{MODEL}optimizer = torch.optim.AdamW(model.parameters())\n"
        f"for number in range(3):\n    {STEP}"
        "    for saved in (model, model[0], {'model': model, 'epoch': number}, torch.nn.ModuleList([model])):\n"
        "        file = io.BytesIO(); torch.save(saved, file); file.seek(0)\n"
        "        loaded = torch.load(file, weights_only=False)\n"
        "        loaded, saved = (loaded['model'], model) if isinstance(saved, dict) else (loaded, saved)\n"
        "        pairs = zip(saved.state_dict().values(), loaded.state_dict().values(), strict=True)\n"
        "        print(int(all(torch.equal(*pair) for pair in pairs)), int(b'mezzo' in file.getvalue()))\n",
        policy="O2,dtype=bfloat16",
    )
    assert numbers == [1, 0] * 12
    assert (outcome.steps, outcome.left_alone) == (3, {})


#: A backbone that thaws: its parameters come into an optimizer which has stepped already.
THAWS = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(8, 16).requires_grad_(False), torch.nn.Linear(16, 1)
    def forward(self, x):
        with torch.set_grad_enabled(self.backbone.weight.requires_grad):
            features = self.backbone(x)
        return self.head(features)
model = Net()
optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
for number in range(6):
    if number == 3:
        model.backbone.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 1e-3})
    optimizer.zero_grad(); (model(x) - x.sum(1, keepdim=True)).square().mean().backward(); optimizer.step()
print(*(float(state["step"]) for state in optimizer.state.values()))
print(*model.state_dict()["backbone.weight"].flatten().tolist(), *model.state_dict()["head.weight"].flatten().tolist())
"""


@pytest.mark.parametrize("policy", [BF16, "O2,dtype=float16,loss_scale=64"])
def test_parameters_that_thaw_join_before_a_step_and_no_step_is_lost(report, policy):
    _, plain = report(THAWS, policy=None)
    outcome, low = report(THAWS, policy=policy)
    assert outcome.steps == 6
    assert low[:4] == plain[:4] == [6, 6, 3, 3]
    assert low[4:] == pytest.approx(plain[4:], abs=0.01)


def test_the_loss_scale_goes_on_where_parameters_thaw_and_begins_anew_with_a_new_model(report):
    outcome, _ = report(THAWS, policy="O1,dtype=float16,loss_scale=dynamic(init=64,interval=2)")
    assert (outcome.scale, outcome.highest_scale, outcome.skipped) == (
        512,
        512,
        0,
    )  # it has doubled after steps 2, 4 and 6
    again = THAWS + THAWS.replace("thaw", "thaw again")
    outcome, _ = report(again, policy="O1,dtype=float16,loss_scale=dynamic(init=64,interval=2)")
    assert (outcome.scale, outcome.steps) == (512, 12)


#: An optimizer that is new when another model's forward pass has begun what it trains on.
CHAINED = """
first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
a = torch.optim.SGD(first.parameters(), lr=0.1)
first(x).square().mean().backward(); a.step(); a.zero_grad()
b = torch.optim.SGD(second.parameters(), lr=0.1)
for _ in range(3):
    (second(first(x)) - x.sum(1, keepdim=True)).square().mean().backward()
    for each in (a, b):
        each.step(); each.zero_grad()
print(*first.state_dict()["weight"].flatten().tolist(), *second.state_dict()["weight"].flatten().tolist())
"""


def test_a_new_optimizer_over_what_the_old_model_returns_joins_before_that_is_called(report):
    _, plain = report(CHAINED, policy=None)
    outcome, low = report(CHAINED, policy="O2,dtype=bfloat16")
    assert low == pytest.approx(plain, abs=0.02)
    assert (outcome.steps, outcome.left_alone) == (7, {})


#: An optimizer over a part of a model that trains already, made between two steps or while gradients accumulate.
LATE_PART = """
y = x.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
a = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
for number in range(8):
    if number == 4 and not {inside}:
        b = torch.optim.Adam(model[1].parameters(), lr=0.05)
    (model(x) - y).square().mean().backward()
    if number == 4 and {inside}:
        b = torch.optim.Adam(model[1].parameters(), lr=0.05)
    (model(x) - y).square().mean().backward()
    a.step(); a.zero_grad()
    if number < 4:
        model[1].zero_grad()
    else:
        b.step(); b.zero_grad()
print(*model.state_dict()["0.weight"].flatten().tolist(), *model.state_dict()["1.weight"].flatten().tolist())
"""


@pytest.mark.parametrize("policy, inside", [(BF16, True), ("O2,dtype=bfloat16", False)])
def test_an_optimizer_over_a_part_of_what_trains_already_joins(report, policy, inside):
    _, plain = report(LATE_PART.format(inside=inside), policy=None)
    outcome, low = report(LATE_PART.format(inside=inside), policy=policy)
    assert low == pytest.approx(plain, abs=0.01)
    assert (outcome.steps, outcome.optimizers, outcome.models, outcome.left_alone) == (
        12,
        ["SGD", "Adam"],
        ["Sequential"],
        {},
    )


def test_the_loss_scale_goes_on_when_an_optimizer_joins(report):
    for inside in (False, True):
        joins, _ = report(
            LATE_PART.format(inside=inside), policy="O1,dtype=float16,loss_scale=dynamic(init=64,interval=4)"
        )
        assert (joins.scale, joins.lowest_scale, joins.skipped) == (256, 64, 0)  # it has doubled after 4 and 8 rounds


def test_gradients_that_are_left_at_the_end_stay_with_the_weights(report):
    text = (
        f"import sys\n{MODEL}optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{STEP}"
        "optimizer.zero_grad(); model(x).square().mean().backward()\nsys.modules['left'] = model\n"
    )
    report(text, policy=None)
    plain = sys.modules.pop("left")
    outcome, _ = report(text, policy="O2,dtype=bfloat16")
    left = sys.modules.pop("left")
    assert outcome.steps == 1
    for mine, theirs in zip(left.parameters(), plain.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == torch.float32
        assert torch.allclose(mine.grad, theirs.grad, atol=0.01)


def test_an_optimizer_that_is_made_before_lbfgs_evaluates_joins_after_that_step(report):
    text = (
        f"{MODEL}optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)\nother = torch.nn.Linear(8, 1)\n"
        "def closure():\n    optimizer.zero_grad()\n"
        "    loss = (model(x) - 1).square().mean(); loss.backward(); return loss\n"
        "optimizer.step(closure)\nlate = torch.optim.SGD(other.parameters(), lr=0.1)\noptimizer.step(closure)\n"
        "other(x).square().mean().backward(); late.step()\n"
        "print(*model.state_dict()['2.bias'].tolist(), *other.state_dict()['bias'].tolist())\n"
    )
    _, plain = report(text, policy=None)
    outcome, low = report(text, policy="O2,dtype=bfloat16")
    assert low == pytest.approx(plain, abs=0.05)
    assert (outcome.steps, outcome.optimizers, outcome.left_alone) == (3, ["LBFGS", "SGD"], {})
