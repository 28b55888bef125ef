"""`mezzo env` prints the facts of a bug report, as text and as JSON."""

import json

import torch

from mezzo.machine import environment


def test_the_text_pastes_into_an_issue(mezzo):
    code, out, err = mezzo("env")
    assert (code, err) == (0, "")
    assert out == f"{environment()}\n"


def test_json_holds_the_facts_as_well(mezzo):
    code, out, err = mezzo("env", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found == json.loads(json.dumps(environment().to_dict()))
    assert found["machine"]["torch"] == torch.__version__


def test_help_names_the_verbs_that_judge(mezzo):
    _, out, _ = mezzo("env", "--help")
    assert "mezzo doctor" in out
    assert "mezzo test" in out
