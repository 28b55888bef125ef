"""Schedules: their text, which part a step has, and what they refuse."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo import Policy, PolicyError, Schedule

POLICIES = (
    "O0", "O1,bf16", "O2,fp16,loss_scale=dynamic(init=64,floor=2)", "O1,low=linear@0", "O1,bf16,nvfp4_module=blocks.*",
    "O2,bf16,fp32_module=a[;]b+head[@]7", "O3,bf16", "fp8_module=*",
)  # fmt: skip


@st.composite
def parts(draw):
    """Steps that rise from 0, and policies."""
    gaps = draw(st.lists(st.integers(1, 10**6), max_size=4))
    steps = [sum(gaps[:count]) for count in range(len(gaps) + 1)]
    return [(step, Policy.of(draw(st.sampled_from(POLICIES)))) for step in steps]


@given(parts(), st.integers(0, 5 * 10**6))
def test_a_text_reads_back_and_each_step_has_the_last_part_that_has_begun(pairs, steps):
    schedule = Schedule(pairs)
    assert Schedule.of(str(schedule)) == schedule == Schedule.of(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(schedule) == hash(Schedule(tuple(pairs)))
    assert schedule.policies == tuple(policy for _, policy in pairs)
    begun = [policy for step, policy in pairs if step <= steps]
    assert schedule.at(steps) == begun[-1]
    for step, policy in pairs:
        assert schedule.at(step) == policy


def test_the_text_of_the_pages():
    schedule = Schedule.of("fp8_module=*@0; O1,bf16@900")
    assert schedule.parts == ((0, Policy.O1().fp8(modules=["*"])), (900, Policy.O1("bf16")))
    assert [schedule.at(step) == Policy.O1("bf16") for step in (0, 899, 900, 10**9)] == [False, False, True, True]
    assert Schedule.of(" fp8_module=*@0 ;O1,bf16 @ 900; ") == schedule


def test_what_is_one_policy_is_a_schedule_of_one_part(tmp_path):
    policy = Policy.O1("bf16")
    path = tmp_path / "mine.policy"
    policy.save(path)
    for value in (policy, "O1,bf16", "bf16", torch.bfloat16, path, str(path), "O1,bf16@0", f"{path}@0"):
        assert Schedule.of(value).parts == ((0, policy),)
    assert str(Schedule.of("O1,bf16@0")) == str(policy)
    # What stands behind a rule's @ is its module where the text is a policy's, and the last of both is a step.
    assert Schedule.of("low=linear@0").at(0).rules[0].module == "0"
    assert Schedule.of("low=linear@0@0; O1@5").at(0).rules[0].module == "0"
    assert Schedule.of("low=linear@0; O1@5").at(0).rules[0].module is None
    assert Schedule.of(f"{path}@0; O1@5").at(0) == policy


@pytest.mark.parametrize(
    "value, words",
    [
        ("O1,bf16; O2,fp16", ("no part of", "write  O1,bf16@0; O2,fp16@900;", "or mezzo compare")),
        ("O1,bf16@0; O2,fp16", ("part 2: 'O2,fp16' has no step", "write  O2,fp16@0 for the first part")),
        ("O1,bf17@0; O4@7", ("2 problems", "part 1: policy 'O1,bf17'", "part 2: policy 'O4': unknown level 'O4'")),
        ("O1,bf16@900", ("the first part begins with step 900", "write  O1,dtype=bfloat16@0")),
        ("low=linear@3; O1@5", ("begins with step 3", "low=linear@3@0", "low=linear@0; O1,dtype=float16@2")),
        ("O1@0; O2@5; O1@5", ("step 5 does not stand behind a smaller one", "fp8_module=*@0")),
        ("O1@0; O2@-5", ("part 2: 'O2@-5' has no step",)),
        ("O1@0; O2@1.5", ("part 2: 'O2@1.5' has no step",)),
        ("O9", ("unknown level 'O9'",)),
        ("", ("there is no level",)),
        (";", ("unknown level",)),
        (None, ("a policy cannot be made from NoneType",)),
    ],
)
def test_texts_that_are_none(value, words):
    with pytest.raises(PolicyError) as caught:
        Schedule.of(value)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("pairs", [(), None, "O1", [(0,)], [(0.0, "O1")], [(True, "O1")], [(0, "O9")], [(0, "O1"), 5]])
def test_parts_that_are_none(pairs):
    with pytest.raises(PolicyError):
        Schedule(pairs)


def test_where_one_policy_is_asked_for_a_schedule_is_refused_in_a_sentence():
    for ask in (Policy.of, Policy.parse):
        with pytest.raises(PolicyError, match=r"^policy 'bf16@0; O1@5' is a schedule\n.*one policy is asked for here"):
            ask("bf16@0; O1@5")
