"""The root command: help, version, exit codes a shell can read; what the five verbs on a script share."""

import re

import pytest
import typer.main

import mezzo
from mezzo import MezzoError, NumericsError, PolicyError, StateError, UnsupportedError
from mezzo.cli import app, main

from ..script.conftest import SCRIPTS


def run(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    captured = capsys.readouterr()
    return stopped.value.code, captured.out, captured.err


def test_help_leads_with_examples(capsys):
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert out.index("mezzo compare train.py") < out.index("Commands")


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"mezzo {mezzo.__version__}\n", "")


def test_each_error_has_its_exit_code(capsys, monkeypatch):
    codes = {PolicyError: 2, UnsupportedError: 3, NumericsError: 4, StateError: 1, MezzoError: 1}
    for error, code in codes.items():

        def fail(*_, error=error, **__):
            raise error("the fault", write="the cure")

        monkeypatch.setattr("mezzo.cli.app", fail)
        assert run(capsys, "doctor") == (code, "", "mezzo: the fault\n  write  the cure\n")


def test_an_example_in_a_help_is_one_line_of_a_terminal_of_80_columns():
    def commands(group):
        for command in group.commands.values():
            yield command
            yield from commands(command) if hasattr(command, "commands") else ()

    root = typer.main.get_command(app)
    paragraphs = [part for command in (root, *commands(root)) for part in (command.help or "").split("\n\n")]
    lines = [re.sub(r"\[/?bold\]", "", line).strip() for part in paragraphs for line in part.splitlines()]
    examples = [line for line in lines if re.match(r"(mezzo|torchrun) \S+ +\S", line) and not line.endswith((",", "."))]
    assert len(examples) > 30
    assert [line for line in examples if len(line) > 78] == []


# What the six verbs on a script share ------------------------------------------------------------------

BF16 = "O1,dtype=bfloat16"
PLAIN = SCRIPTS / "plain.py"
VERBS = ("run", "compare", "explain", "inspect", "tune", "plan")


def test_each_verb_has_the_same_options_and_its_help_leads_with_examples(mezzo):
    for verb in VERBS:
        code, out, _ = mezzo(verb, "--help")
        assert code == 0
        options = ("--steps", "--out", "--overwrite", "--json", "--full", "-m")
        assert all(f" {option} " in out for option in options), verb
        assert (" --dry " in out) == (verb != "explain")  # where it would do nothing
        assert "--polic" in out
        assert out.index(f"mezzo {verb} ") < out.index("--steps")
    for table, example in (("formats", "mezzo show formats fp16"), ("ops", "mezzo show ops softmax")):
        out = mezzo("show", table, "--help")[1]
        assert out.index(example) < out.index("--json")


def test_dry_explains_the_first_step_and_does_nothing_else(mezzo, tmp_path):
    """Of each verb, with the same words."""
    words = "--policy", BF16, "--dry"
    plain = mezzo("explain", *words[:2], PLAIN, "checkpoint.pt")
    assert plain[0] == 0
    assert "run in BF16" in plain[1]
    assert "accuracy" not in plain[1]
    for verb in ("run", "inspect", "tune"):
        assert mezzo(verb, *words, PLAIN, "checkpoint.pt")[:2] == plain[:2], verb
    assert [*tmp_path.iterdir()] == []
