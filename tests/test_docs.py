"""Everything the documentation shows as Python runs, and so does every example."""

import linecache
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

import pages
from mezzo.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), start=1)
]


def test_the_pages_are_found():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "index.md", "nan.md"} <= {page.name for page in PAGES}
    assert SNIPPETS


def test_the_index_lists_every_page_and_no_other():
    listed = re.findall(r"\]\(([\w/-]+\.(?:md|rst))\)", (ROOT / "docs" / "index.md").read_text())
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.[mr][ds]*")}
    assert sorted(listed) == sorted(there - {"index.md"} - {each for each in there if "_build" in each})


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    linecache.cache["snippet"] = len(code), None, code.splitlines(keepends=True), "snippet"  # as a notebook does
    exec(compile(code, "snippet", "exec"), {"__name__": "__snippet__"})


def test_what_the_migration_page_quotes_is_a_line_of_its_programs():
    def bare(code):
        return "".join(re.sub(r"#.*", "", code).split())

    quoted = 0
    for section in (ROOT / "docs" / "migrating.md").read_text().split("\n## ")[1:]:
        programs = bare("\n".join(re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)))
        for table in re.findall(r"^\| what .*?(?=\n\n|\Z)", section, re.DOTALL | re.MULTILINE):
            heading, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
            first = 0 if heading[0] == "what you wrote" else 1  # what else they wrote runs nowhere here
            for code in (code for row in rows for code in re.findall(r"`([^`]+)`", " ".join(row[first:2]))):
                quoted += 1
                assert bare(code) in programs, f"{section.splitlines()[0]}: {code}"
    assert quoted > 40


#: Those for several processes run in tests/distributed.
EXAMPLES = [path for path in sorted(ROOT.glob("examples/*.py")) if "torchrun" not in path.read_text()]
#: Arguments of those that take a minute without.
SMALL = {"allow_list.py": ["16", "1"]}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *SMALL.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    assert "loss" in capsys.readouterr().out


def prose(page):
    """The text of a page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "code", page.read_text(), flags=re.DOTALL)


def anchors(page):
    """The anchors that GitHub and the site give the headings of a page."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose(page)):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def test_anchors_are_spelled_as_on_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Weights, stored `once`\n```\n# no heading\n```\n## Where did it begin?\n")
    assert anchors(page) == {"weights-stored-once", "where-did-it-begin"}


COMMANDS = sorted(
    {
        command
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for code in re.findall(r"^```\w*\n(.*?)^```|`([^`\n]+)`", page.read_text(), re.DOTALL | re.MULTILINE)
        for command in re.findall(r"^(?:torchrun .* -m )?mezzo ([a-z].*)", "\n".join(code), re.MULTILINE)
    }
)


def test_commands_are_found():
    assert {
        "compare --seeds 3 --margin 0.5 --out runs/mine train.py",
        "doctor",
        "explain --policy O2,bf16 train.py",
    } <= {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_pages_name_exist(command):
    words = command.partition("#")[0].split()
    found = typer.main.get_command(app)
    while hasattr(found, "commands") and words:
        found = found.commands.get(words.pop(0))
        assert found is not None, command
    known = {option for param in found.params for option in param.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known | {"--help"}


def test_make_targets_named_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named <= targets
    assert {"demo", "test"} <= named


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_for_the_demo_what_it_needs_and_nothing_twice(tmp_path):
    def installed(target):
        command = ["make", "-n", target, f"VENV={tmp_path}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return re.findall(r"--editable '\.\[(\w+)\]'", done.stdout)

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {re.match(r"[\w-]+", needed)[0] for needed in extras["demo"]} == {
        "scikit-learn", "matplotlib", "plotly", "jinja2", "scipy"
    }  # fmt: skip
    assert (installed("demo"), installed("docs"), installed("test")) == (["demo"], ["docs"], ["dev"])
    (tmp_path / "constraints.txt").touch()
    (tmp_path / ".demo").touch()
    assert (installed("demo"), installed("test")) == ([], ["dev"])
    (tmp_path / ".ready").touch()
    (tmp_path / ".docs").touch()
    assert (installed("demo"), installed("docs"), installed("test"), installed("lint")) == ([], [], [], [])


@pytest.mark.parametrize("page", pages.PAGES)
def test_figures_and_printed_output_are_those_of_results_and_examples(page):
    assert pages.filled(page) == (ROOT / page).read_text(), "run: .venv/bin/python benchmarks/pages.py"


def test_files_and_folders_that_contributing_names_exist():
    text = re.sub(r"<!-- tests -->.*<!-- /tests -->", "", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`((?:[\w.-]+/)*[\w-]+(?:\.py|/))`", text))
    roots = [
        ROOT,
        ROOT / "tests" / "acceptance",
        ROOT / "src" / "mezzo",
        *(path for path in (ROOT / "src" / "mezzo").iterdir() if path.is_dir()),
    ]
    assert {path for path in named if not any((root / path).exists() for root in roots)} == set()


def test_contributing_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = [
        path
        for path in (ROOT / "src" / "mezzo").iterdir()
        if not path.name.startswith("_") and path.suffix in ("", ".py")
    ]
    assert [path.name for path in rooms if f"`{path.name}{'/' if path.is_dir() else ''}`" not in text] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
