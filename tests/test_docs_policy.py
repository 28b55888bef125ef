"""The page of the policy language: what its tables write is read, and means what stands beside it."""

import re
from pathlib import Path

import pytest

from mezzo import LossScale, Policy, Rule
from mezzo.policy.fields import FIELDS, WORDS
from mezzo.policy.ops import TREATMENTS
from mezzo.policy.rules import RULE_KEYS
from vocabulary import TREATED

PAGE = (Path(__file__).parents[1] / "docs" / "policy.md").read_text()
KEYS = re.findall(r"^\| `(\w+=[^`]+)` \| [^|]+ \| `([^`]+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("text, builder", KEYS)
def test_keys_of_rules_mean_what_stands_beside_them(text, builder):
    made = eval(builder, {"policy": Policy.O2(), "Rule": Rule})
    rules = (made,) if isinstance(made, Rule) else made.rules
    assert Policy.parse(f"O2,{text}").rules == rules


def test_every_key_and_treatment_is_on_the_page():
    assert len(KEYS) == 4
    assert {text.partition("=")[0] for text, _ in KEYS} <= {*RULE_KEYS}
    named = set(re.findall(r"`(\w+)", PAGE))
    assert set(TREATED) == set(TREATMENTS) <= named
    assert {"low_module", "fp32_module", "fp32_param"} <= named & {*RULE_KEYS}
    assert {"dtype", *FIELDS} <= named


@pytest.mark.parametrize("name", WORDS)
def test_words_of_the_table_are_read(name):
    row = re.search(rf"^\| `{name}` \| ([^|]+) \|", PAGE, re.MULTILINE)
    if row is None:
        assert name == "level"
        return
    words = re.findall(r"`(\w+)`", row[1])
    assert {WORDS[name][word] for word in words} == set(WORDS[name].values())


@pytest.mark.parametrize("text", re.findall(r"`((?:none|constant|dynamic)(?:\([^`…]*\))?)`", PAGE))
def test_texts_of_loss_scales_are_read(text):
    assert isinstance(LossScale.parse(text), LossScale)
