"""What strangers send for a policy: a PolicyError, short, quick and fit for a terminal, whatever it is."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo import LossScale, Policy, PolicyError, Rule

ODD = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4),
        st.just(0).map(lambda _: 10**5000), st.sampled_from([10**400, -(10**400), 2**63, 1j, ..., "dynamic", "O1"]),
        st.sampled_from([np.float32(2), np.float64(2), np.int64(3), np.array([1, 2]), torch.ones(2), torch.float16]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip


def refused(make):
    """Call what may work, or raise a short PolicyError that a terminal can show; nothing else."""
    try:
        make()
    except PolicyError as error:
        text = str(error)
        assert len(text) < 10_000
        assert all(line.isprintable() for line in text.replace("\xa0", " ").split("\n"))


FIELD_NAMES = [field.name for field in dataclasses.fields(Policy)]


@given(st.dictionaries(st.sampled_from(FIELD_NAMES), ODD, min_size=1, max_size=3), ODD, ODD)
def test_odd_values_are_refused(fields, one, other):
    refused(lambda: Policy.O2().evolve(**fields))
    refused(lambda: Policy.of(one))
    refused(lambda: Policy.parse(one))
    refused(lambda: Rule(one, op=other))
    refused(lambda: Rule("fp32", module=one, reason=other))
    refused(lambda: Policy.O1().low(one))
    refused(lambda: Policy.O1().explain(one))


@given(st.text(alphabet="O12,=+.*?[]()@;_ abcdefhlmnoprstwx\"'\\\n\x1b", max_size=60))
def test_odd_texts_are_refused(text):
    refused(lambda: Policy.parse(text))
    refused(lambda: Policy.parse(f"O1,{text}"))
    refused(lambda: LossScale.parse(text))
    refused(lambda: LossScale.parse(f"dynamic({text})"))


WORDS = [
    "O1", "O2", ",", "\n", "\r\n", "#", "=", "+", "@", "dtype", "bf16", "fp32", "low", "softmax", "fp32_module", "head",
    "(", ")", "loss_scale", "dynamic", "9" * 500, "master_weights", "keep_fp32", "autocast", "true", "\x00", "…",
]  # fmt: skip


@given(st.one_of(st.binary(max_size=60), st.lists(st.sampled_from(WORDS), max_size=25).map("".join)))
def test_odd_files_are_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "odd.policy"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(lambda: Policy.load(path))


@pytest.mark.parametrize(
    "text",
    [
        "O1,dtype=" + "x" * 90_000,
        "O1," + "a," * 45_000,
        "O1," + "a=b," * 22_000,
        "O1," + "dtype=bfloat16," * 6_000,
        "O1," + "low=softmax,fp32=softmax," * 3_500,
        "O1,low=" + "+".join(f"*a*b*c{n}" for n in range(20_000)),
        "(" * 90_000,
        "x" * 1_000_000,
        "O1,loss_scale=dynamic(" + "init=1," * 12_000 + ")",
    ],
    ids=lambda text: text[:20],
)
def test_long_texts_are_refused_in_few_words(text):
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    assert len(str(caught.value)) < 10_000


def test_a_policy_has_no_more_rules_than_its_text_can_hold():
    policy = Policy.O1().keep_fp32(modules=[f"blocks.{n}.attention.projection" for n in range(2_500)])
    assert Policy.parse(str(policy)) == policy
    with pytest.raises(PolicyError, match=r"5,000 rules are too many\n  why    their text has [0-9,]+ characters"):
        Policy.O1().keep_fp32(modules=[f"blocks.{n}.attention.projection" for n in range(5_000)])


@pytest.mark.parametrize(
    "content, why",
    [
        ("O1\n" + "(" * 90_000, "line 2: a bracket is not closed"),
        ("x" * 1_000_001, "more than 1,000,000 bytes"),
        ("O1\n" + "\n".join(f"a{n}=1" for n in range(20_000)), "line 21: unknown policy key 'a19'"),
        ("O1\nloss_scale=" + "9" * 400, "line 2: init is inf"),
        ("x" * 100_000, "unknown level"),
        ("O1\n" + "low=exp\n" * 20_000, "is too long"),
    ],
    ids=["brackets", "long", "keys", "number", "text", "lines"],
)
def test_hostile_files_are_refused_in_few_words(tmp_path, content, why):
    path = tmp_path / "mine.policy"
    path.write_text(content)
    with pytest.raises(PolicyError, match=why) as caught:
        Policy.load(path)
    assert len(str(caught.value)) < 10_000


def test_policies_are_read_from_and_written_to_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.policy")
    with pytest.raises(PolicyError, match="this is a pipe"):
        Policy.load(tmp_path / "pipe.policy")
    with pytest.raises(PolicyError, match="this is a pipe"):
        Policy.O1().save(tmp_path / "pipe.policy")
    policy = Policy.O1(rules=[Rule("fp32", op="exp", reason="a\ud800\x1b[31m")])
    policy.save(tmp_path / "half.policy")
    assert (tmp_path / "half.policy").read_text().endswith("fp32=exp   # a\\ud800\\x1b[31m\n")
    with pytest.raises(PolicyError, match=r"(?s)cannot be written to .*at most 1,000,000"):
        Policy.O1(rules=[Rule("fp32", op="exp", reason="a" * 1_000_000)]).save(tmp_path / "long.policy")
    assert sorted(os.listdir(tmp_path)) == ["half.policy", "pipe.policy"]
    with pytest.raises(PolicyError, match="null byte"):
        Policy.load("a\0.policy")
