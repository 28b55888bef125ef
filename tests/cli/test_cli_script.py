"""Verbs on a script as it is: what its words mean, and what each verb makes of one."""

import json

import pytest

from ..script.conftest import SCRIPTS

BF16 = "O1,dtype=bfloat16"
PLAIN = SCRIPTS / "plain.py"

# The words ------------------------------------------------------------------------------------------------------


def test_options_behind_a_script_are_its_own_and_those_behind_a_recipe_mezzos(mezzo):
    code, out, _ = mezzo("explain", "--policy", BF16, SCRIPTS / "untrained.py", "--policy", "O9", "-m")
    assert (code, out) == (4, "__main__ ['--policy', 'O9', '-m'] True\n")
    code, out, err = mezzo("explain", "digits-cnn", "--policy", "O9")
    assert (code, out) == (2, "")
    assert "unknown level 'O9'" in err


def test_a_module_is_a_script_too(mezzo, tmp_path):
    (tmp_path / "own_training.py").write_text(PLAIN.read_text())
    assert mezzo("explain", "--policy", BF16, "-m", "own_training")[:2] == mezzo("explain", "--policy", BF16, PLAIN)[:2]


@pytest.mark.parametrize(
    "words, message",
    [
        (("absent.py",), "there is no script 'absent.py'"),
        (("absent",), "unknown recipe 'absent'"),
        (("digits-cnn", "train.py"), "digits-cnn takes no arguments: train.py"),
        (("docs-lm",), "docs-lm is a recipe, and there is a file of that name"),
    ],
)
@pytest.mark.parametrize("verb", ["explain"])
def test_what_is_neither_recipe_nor_script_is_refused(mezzo, tmp_path, verb, words, message):
    (tmp_path / "docs-lm").touch()
    code, out, err = mezzo(verb, *words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("words", [("explain", "--against", "O2"), ("explain", "--html", "page.html")])
def test_options_that_only_a_recipe_has_are_refused(mezzo, tmp_path, words):
    code, out, err = mezzo(*words, PLAIN)
    assert (code, out) == (2, "")
    assert f"{words[1]}: not for a script" in err
    assert [*tmp_path.iterdir()] == []


# explain --------------------------------------------------------------------------------------------------------


def test_explaining_a_script_is_a_dry_run(mezzo):
    explained = mezzo("explain", "--policy", BF16, PLAIN)
    assert explained == mezzo("run", "--dry", "--policy", BF16, PLAIN)
    assert explained[0] == 0
    assert "run in BF16" in explained[1]


def test_every_row_of_a_script_can_be_asked_for(mezzo):
    few, full = (mezzo("explain", *words, "--policy", BF16, PLAIN)[1] for words in ((), ("--full",)))
    assert len(full.splitlines()) > len(few.splitlines())


def test_json_of_a_script_has_each_of_its_models(mezzo):
    code, out, _ = mezzo("explain", "--json", "--policy", BF16, SCRIPTS / "gan.py")
    assert code == 0
    found = json.loads(out)
    assert [each["model"] for each in found["models"]] == ["Sequential", "Sequential"]
    assert found["left_alone"] == {}
