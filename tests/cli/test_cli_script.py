"""What the five verbs on a script share: its words, their options, and what they refuse."""

import pytest

from ..script.conftest import SCRIPTS

BF16 = "O1,dtype=bfloat16"
PLAIN = SCRIPTS / "plain.py"
VERBS = ("run", "compare", "explain", "inspect", "tune")


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_the_same_options(mezzo, verb):
    code, out, _ = mezzo(verb, "--help")
    assert code == 0
    assert all(
        f" {option} " in out for option in ("--steps", "--out", "--overwrite", "--json", "--full", "--dry", "-m")
    )
    assert "--polic" in out


def test_options_behind_a_script_are_its_own(mezzo):
    code, out, _ = mezzo("explain", "--policy", BF16, SCRIPTS / "untrained.py", "--policy", "O9", "-m")
    assert (code, out) == (4, "__main__ ['--policy', 'O9', '-m'] True\n")


def test_a_module_is_a_script_too(mezzo, tmp_path):
    (tmp_path / "own_training.py").write_text(PLAIN.read_text())
    assert mezzo("explain", "--policy", BF16, "-m", "own_training")[:2] == mezzo("explain", "--policy", BF16, PLAIN)[:2]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "words, message",
    [
        (("absent.py",), "there is no script 'absent.py'"),
        (("digits-cnn",), "there is no script 'digits-cnn'"),
        (("-m", "absent.module"), "there is no module 'absent.module'"),
        (("--policy", "O9", PLAIN), "unknown level 'O9'"),
        (("--steps", "0", PLAIN), "--steps"),
        (("--jsno", PLAIN), "--jsno"),
        ((), "Missing argument"),
    ],
)
def test_bad_words_are_refused_before_anything_runs(mezzo, tmp_path, verb, words, message):
    code, out, err = mezzo(verb, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("verb", ["run", "explain", "inspect", "tune"])
def test_results_that_are_there_are_not_written_over(mezzo, tmp_path, verb):
    kept = tmp_path / "there" / "summary.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    code, out, err = mezzo(verb, "--policy", BF16, "--out", "there", PLAIN)
    assert (code, out) == (2, "")
    assert "there has results already" in err
    assert kept.read_text() == "{}"


@pytest.mark.parametrize("verb", ["compare", "explain", "inspect", "tune"])
def test_what_works_in_one_process_refuses_several(mezzo, monkeypatch, verb):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = mezzo(verb, "--policy", BF16, PLAIN)
    assert (code, out) == (2, "")
    assert f"mezzo {verb} works in one process, and 2 were started" in err
