"""The root command: help, version, and exit codes a shell can read."""

import itertools
import re
from pathlib import Path

import pytest
import typer.main

import mezzo
from mezzo import MezzoError, NumericsError, PolicyError, StateError, UnsupportedError
from mezzo.cli import app, main


def run(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    captured = capsys.readouterr()
    return stopped.value.code, captured.out, captured.err


def test_help_leads_with_examples(capsys):
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert out.index("mezzo compare train.py") < out.index("Commands")


def test_pages_that_help_and_docstring_name_exist(capsys):
    docs = Path(__file__).parents[2]
    for text in (run(capsys, "--help")[1], mezzo.__doc__):
        named = re.findall(r"docs/\w+\.md", text)
        assert "docs/nan.md" in named
        assert all((docs / name).is_file() for name in named)


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"mezzo {mezzo.__version__}\n", "")


def test_help_is_folded_where_the_terminal_ends_and_nowhere_else(capsys, monkeypatch):
    """The sources' own line ends would leave every second line half empty."""
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = run(capsys, "explain", "--help")
    lines = [line.strip() for line in out.splitlines()]
    (first,) = [number for number, line in enumerate(lines) if line.startswith("The answer comes first")]
    for line, after in itertools.pairwise(lines[first : lines.index("", first)]):
        assert len(f"{line} {after.split()[0]}") > 96


@pytest.mark.parametrize("words", [("comprae",), ("doctor", "--jsno")])
def test_usage_errors_exit_with_2_and_name_the_word(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert words[-1] in err


@pytest.mark.parametrize(
    "error, code", [(PolicyError, 2), (UnsupportedError, 3), (NumericsError, 4), (StateError, 1), (MezzoError, 1)]
)
def test_each_error_has_its_exit_code(capsys, monkeypatch, error, code):
    def fail(*_, **__):
        raise error("the fault", write="the cure")

    monkeypatch.setattr("mezzo.cli.app", fail)
    assert run(capsys, "doctor") == (code, "", "mezzo: the fault\n  write  the cure\n")
    assert callable(app)


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
