"""A script under a schedule: the policy changes between two of its steps, and a checkpoint goes on in its own part."""

import re

import pytest
import torch

import mezzo
from mezzo import PolicyError, Schedule
from mezzo.script import Program, run

SCHEDULE = "O1,fp16,emulate=true,loss_scale=dynamic(init=64,interval=2)@0; O2,bf16,emulate=true,low=softmax@3"
TRAINED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Softmax(-1), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
STEPS = """
for step in range({begin}, {end}):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - x[:, :4]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
KEPT = "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, PATH)\n"
RESUMED = """
states = torch.load(PATH)
model.load_state_dict(states["model"]); optimizer.load_state_dict(states["optimizer"])
"""


@pytest.fixture
def ended(tmp_path):
    """Run a script that is given as text under a schedule: its report, and the values that it saved last."""

    def outcome(text, policy=SCHEDULE, name="last", **options):
        path = tmp_path / "script.py"
        path.write_text(text.replace("PATH", repr(str(tmp_path / f"{name}.pt"))))
        result = run(Program(name=str(path)), policy, **options)
        if result.error is not None:
            raise result.error
        saved = tmp_path / f"{name}.pt"
        return result.report, torch.load(saved, weights_only=False) if saved.exists() else None

    return outcome


def assert_same(one, two):
    assert {key: value.dtype for key, value in one.items()} == {key: value.dtype for key, value in two.items()}
    assert [key for key in one if not torch.equal(one[key], two[key])] == []


def by_hand(changes, steps, begin=TRAINED):
    """Train what the script trains in a loop of the test's own, and change at the steps that are given."""
    names = {}
    exec(begin, names)  # the program of this file
    model, optimizer = names["model"], names["optimizer"]
    amp = mezzo.attach(model, optimizer, changes[0])
    for step in range(steps):
        if step in changes:
            amp.change(changes[step])
        exec(STEPS.format(begin=step, end=step + 1), names)
    values, stats = model.state_dict(), amp.stats()
    amp.detach()
    return values, stats


def test_a_run_under_a_schedule_is_the_loop_that_changes_by_hand(ended):
    parts = dict(Schedule.of(SCHEDULE).parts)
    report, states = ended(TRAINED + STEPS.format(begin=0, end=7) + KEPT)
    values, stats = by_hand(parts, 7)
    assert_same(states["model"], values)
    assert (report.steps, report.changes) == (7, [(3, str(parts[3]))])
    assert states["optimizer"]["mezzo"]["stats"] == vars_of(stats)
    assert states["optimizer"]["mezzo"]["policy"] == str(parts[3])
    assert report.policy == str(Schedule.of(SCHEDULE))
    assert f"  changed      to {parts[3]} after 3 steps" in report.lines
    assert report.alarm == ""
    plain, _ = by_hand({0: parts[0]}, 7)
    assert any(not torch.equal(plain[name], values[name]) for name in plain)


def vars_of(stats):
    return {name: getattr(stats, name) for name in stats.__dataclass_fields__}


@pytest.mark.parametrize("saved_after", [2, 3, 5])
def test_a_script_that_resumes_goes_on_in_the_part_of_its_checkpoint(ended, saved_after):
    _, whole = ended(TRAINED + STEPS.format(begin=0, end=7) + KEPT, name="whole")
    ended(TRAINED + STEPS.format(begin=0, end=saved_after) + KEPT)
    report, states = ended(TRAINED + RESUMED + STEPS.format(begin=saved_after, end=7) + KEPT)
    assert_same(states["model"], whole["model"])
    assert states["optimizer"]["mezzo"]["stats"] == whole["optimizer"]["mezzo"]["stats"]
    assert report.steps == 7 - saved_after
    assert [step for step, _ in report.changes] == [3 if saved_after < 3 else 0]


def test_a_scale_goes_on_in_a_part_that_has_one(ended):
    """A state is loaded under its own part: under the first one, which has no scale, it would begin anew."""
    schedule = "O1,bf16,emulate=true@0; O1,fp16,emulate=true,loss_scale=dynamic(init=64,interval=2)@1"
    _, whole = ended(TRAINED + STEPS.format(begin=0, end=8) + KEPT, schedule, name="whole")
    assert whole["optimizer"]["mezzo"]["loss_scale"]["scale"] == 64 * 2**3
    ended(TRAINED + STEPS.format(begin=0, end=5) + KEPT, schedule)
    _, states = ended(TRAINED + RESUMED + STEPS.format(begin=5, end=8) + KEPT, schedule)
    assert states["optimizer"]["mezzo"]["loss_scale"] == whole["optimizer"]["mezzo"]["loss_scale"]
    # A state that is loaded once the session has begun, too.
    late = TRAINED + STEPS.format(begin=0, end=1) + RESUMED + STEPS.format(begin=5, end=8) + KEPT
    ended(TRAINED + STEPS.format(begin=0, end=5) + KEPT, schedule)
    _, states = ended(late, schedule)
    assert states["optimizer"]["mezzo"]["loss_scale"] == whole["optimizer"]["mezzo"]["loss_scale"]


TWO = """
import torch
torch.manual_seed(0)
one, two = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)
first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (one, two))
x = torch.randn(16, 8)
for step in range(4):
    loss = (two(one(x)) - x).square().mean()
    loss.backward()
    first.step()  # while gradients of the other wait for its step
    print("first", one(x).grad_fn is not None)
    second.step()
    first.zero_grad(); second.zero_grad()
torch.save({"one": one.state_dict()}, PATH)
"""


def test_a_change_waits_while_gradients_of_another_optimizer_do(ended):
    report, _ = ended(TWO, "O1,bf16,emulate=true@0; O2,bf16,emulate=true@3")
    assert (report.steps, report.changes) == (8, [(4, "O2,dtype=bfloat16,emulate=true")])


THAWED = """
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
""" + STEPS.format(begin=0, end=2) + """
model[0].requires_grad_(True)
optimizer.add_param_group({"params": list(model[0].parameters())})
""" + STEPS.format(begin=2, end=5) + KEPT  # fmt: skip


def test_steps_are_counted_on_where_a_session_begins_anew(ended):
    report, states = ended(TRAINED + THAWED)
    assert (report.steps, [step for step, _ in report.changes]) == (5, [3])
    assert states["optimizer"]["mezzo"]["stats"]["steps"] == 5
    # With another model and optimizer, too: of the script's steps there is one count.
    report, states = ended(TRAINED + STEPS.format(begin=0, end=2) + TRAINED + STEPS.format(begin=2, end=5) + KEPT)
    assert (report.steps, [step for step, _ in report.changes]) == (5, [3])
    assert states["optimizer"]["mezzo"]["stats"]["steps"] == 5


def test_a_part_that_is_refused_is_left_alone_and_alarms(ended):
    steps = TRAINED + STEPS.format(begin=0, end=4) + KEPT
    first, impossible = "O1,bf16,emulate=true", "O1,bf16,emulate=true,fp32_module=no.such"
    report, states = ended(steps, f"{first}@0; {impossible}@2")
    assert states["optimizer"]["mezzo"]["policy"] == "O1,dtype=bfloat16,emulate=true"
    assert (report.steps, report.changes, report.refusals) == (4, [], 1)
    assert "1 part of the schedule was refused" in report.alarm
    (why,) = report.left_alone.values()
    assert re.search("no.such", why)
    assert next(iter(report.left_alone)).endswith("from step 3 on")
    assert_same(states["model"], ended(steps, first)[1]["model"])


def test_weights_that_cannot_become_16_bits_stay_fp32_and_the_rest_of_the_part_holds(ended):
    report, states = ended(
        TRAINED + STEPS.format(begin=0, end=4) + KEPT, "O1,bf16,emulate=true@0; O3,bf16,low=softmax@2"
    )
    assert states["optimizer"]["mezzo"]["policy"] == "O1,dtype=bfloat16,low=softmax"
    assert report.changes == [(2, "O1,dtype=bfloat16,low=softmax")]
    assert [*report.left_alone] == ["weights from step 3 on, stored in FP32"]


def test_fp32_until_a_step_is_told(ended):
    report, _ = ended(TRAINED + STEPS.format(begin=0, end=8), "O0@0; O1,bf16,emulate=true@7")
    assert "all of it is FP32, as O0 says until step 7" in report.lines[0]
    assert report.alarm == ""


def test_on_several_ranks_weights_of_16_bits_alone_are_refused_before_the_script_starts(ended, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PolicyError, match="weights cannot become, or have been, 16 bits alone"):
        ended("raise SystemExit", "O1,bf16@0; O3,bf16@5")
