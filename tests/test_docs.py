"""The documentation: what it shows as Python runs, links and commands lead somewhere, tables are true, it is short."""

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
from mezzo import LossScale, Policy, Rule
from mezzo.cli import app
from mezzo.policy.fields import FIELDS, WORDS
from mezzo.policy.ops import TREATMENTS
from mezzo.policy.rules import RULE_KEYS

ROOT = Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS])
SNIPPETS = {
    f"{page.name}-{number}": code
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), start=1)
}


def test_the_pages_are_found_and_short():
    assert len(SNIPPETS) > 20
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 200
    assert len((ROOT / "CHANGELOG.md").read_text().split()) <= 1_000
    assert len(DOCS) <= 20
    assert sum(len(page.read_text().split()) for page in DOCS) <= 16_600


def test_the_index_lists_every_page_and_no_other():
    listed = re.findall(r"\]\(([\w/-]+\.(?:md|rst))\)", (ROOT / "docs" / "index.md").read_text())
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.[mr][ds]*")}
    assert sorted(listed) == sorted(there - {"index.md"} - {page for page in there if "_build" in page})


@pytest.mark.parametrize("code", SNIPPETS.values(), ids=SNIPPETS)
def test_snippets_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    linecache.cache["snippet"] = len(code), None, code.splitlines(keepends=True), "snippet"  # as a notebook does
    exec(compile(code, "snippet", "exec"), {"__name__": "__snippet__"})


#: Those for several processes run in tests/distributed.
EXAMPLES = [path for path in sorted(ROOT.glob("examples/*.py")) if "torchrun" not in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = {"allow_list.py": ["16", "1"], "plan_casts.py": ["aot_eager"]}  # they take a minute without
    arguments = [str(path), *quick.get(path.name, [])]
    if "torch.compile" in path.read_text():  # whose guards read __main__, and keep the first one that a process has had
        ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        printed = ran.stdout
    else:
        monkeypatch.setattr(sys, "argv", arguments)
        runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr().out
    assert "loss" in printed


def anchors(text):
    """The anchors that GitHub and the site give the headings of a page."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_relative_links_lead_somewhere():
    assert anchors("# Stored `once`, so\n```\n# no heading\n```\n## Where?\n") == {"stored-once-so", "where"}
    dead = []
    for page in PAGES:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "code", page.read_text(), flags=re.DOTALL)
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose):
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                dead.append(f"{page.name} links to {path}#{anchor}")
    for path in ROOT.glob("src/**/*.py"):
        named = re.findall(r"docs/\w+\.md", path.read_text())
        dead += [f"{path.name} names {path_}" for path_ in named if not (ROOT / path_).exists()]
    assert dead == []


def test_commands_that_pages_name_exist():
    commands = {
        command
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for code in re.findall(r"^```\w*\n(.*?)^```|`([^`\n]+)`", page.read_text(), re.DOTALL | re.MULTILINE)
        for command in re.findall(r"^(?:torchrun .* -m )?mezzo ([a-z].*)", "\n".join(code), re.MULTILINE)
    }
    assert {"compare --seeds 3 --margin 0.5 --out runs/mine train.py", "doctor"} <= commands
    for text in commands:
        words = text.partition("#")[0].split()
        command = typer.main.get_command(app)
        while hasattr(command, "commands") and words:
            command = command.commands.get(words.pop(0))
            assert command is not None, text
        known = {option for param in command.params for option in param.opts} | {"--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, text


def test_make_targets_that_pages_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    assert {"demo", "test"} <= set(re.findall(r"(?:^|`)make ([a-z-]+)", pages, re.MULTILINE)) <= targets


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_for_the_demo_what_it_needs_and_nothing_twice(tmp_path):
    def installed(target):
        command = ["make", "-n", target, f"VENV={tmp_path}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return re.findall(r"--editable '\.\[(\w+)\]'", done.stdout)

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {re.match(r"[\w-]+", requirement)[0] for requirement in extras["demo"]}
    assert needed == {"scikit-learn", "matplotlib", "plotly", "jinja2", "scipy"}
    assert [installed(target) for target in ("demo", "docs", "test")] == [["demo"], ["docs"], ["dev"]]
    for done in ("constraints.txt", ".demo"):
        (tmp_path / done).touch()
    assert [installed(target) for target in ("demo", "test")] == [[], ["dev"]]
    for done in (".ready", ".docs"):
        (tmp_path / done).touch()
    assert [installed(target) for target in ("demo", "docs", "test", "lint")] == [[], [], [], []]


@pytest.mark.parametrize("page", pages.PAGES)
def test_figures_and_printed_output_are_those_of_results_and_examples(page):
    assert pages.filled(page) == (ROOT / page).read_text(), "run: .venv/bin/python benchmarks/pages.py"


def test_contributing_names_every_room_and_files_that_exist():
    text, source = (ROOT / "CONTRIBUTING.md").read_text(), ROOT / "src" / "mezzo"
    rooms = [path for path in source.iterdir() if path.is_dir() and not path.name.startswith("_")]
    assert [path.name for path in rooms if f"`{path.name}/" not in text] == []
    named = set(re.findall(r"`((?:[\w.-]+/)*[\w-]+(?:\.py|/))`", text))
    roots = [ROOT, ROOT / "tests" / "acceptance", source, *rooms]
    assert {name for name in named if not any((root / name).exists() for root in roots)} == set()


def test_what_the_page_of_the_policy_language_writes_is_read_and_means_what_stands_beside_it():
    page = (ROOT / "docs" / "policy.md").read_text()
    keys = re.findall(r"^\| `(\w+=[^`]+)` \| [^|]+ \| `([^`]+)` \|$", page, re.MULTILINE)
    assert len(keys) == 5
    for text, builder in keys:
        made = eval(builder, {"policy": Policy.O2(), "Rule": Rule})
        rules = (made,) if isinstance(made, Rule) else made.rules
        assert Policy.parse(f"O2,{text}").rules == rules, text
    written = {"low_module", "fp32_module", "fp32_param", *(text.partition("=")[0] for text, _ in keys)}
    assert written <= {*RULE_KEYS}
    assert {*TREATMENTS, *written, "dtype", *FIELDS} <= set(re.findall(r"`(\w+)", page))
    for name in set(WORDS) - {"level"}:
        words = re.findall(r"`([\w+]+)`", re.search(rf"^\| `{name}` \| ([^|]+) \|", page, re.MULTILINE)[1])
        assert {WORDS[name][word] for word in words} == set(WORDS[name].values()), name
    for text in re.findall(r"`((?:none|constant|dynamic)(?:\([^`…]*\))?)`", page):
        assert isinstance(LossScale.parse(text), LossScale), text
