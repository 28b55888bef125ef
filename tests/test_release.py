"""What is released: a wheel of the package alone, with metadata that hold, and it works in an empty environment."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mezzo

from .house import nodes, parsed, sources

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mezzo"
#: Extras for those who work on mezzo; the others are for users, and `all` is these together.
OURS = {"demo", "dev", "docs"}
#: Modules that derive from classes of another library, and the extras that install it.
BRIDGES = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"}


@pytest.fixture(scope="module")
def builders():
    pytest.importorskip("hatchling", reason="needs hatchling")
    wheel = importlib.import_module("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    return wheel, importlib.import_module("hatchling.builders.sdist").SdistBuilder(str(ROOT))


@pytest.fixture(scope="module")
def core(builders):
    return builders[0].metadata.core


def contents(builder):
    return {file.distribution_path for file in builder.recurse_included_files()}


def package(prefix=""):
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"{prefix}mezzo/{path.relative_to(SOURCE).as_posix()}" for path in files}


# The files ----------------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_nothing_else(builders):
    assert contents(builders[0]) == package()


def test_the_package_holds_what_its_pages_and_type_checkers_need(builders):
    others = {name for name in contents(builders[0]) if not name.endswith(".py")}
    assert others == {"mezzo/py.typed", "mezzo/report/page.html.jinja"}


def test_the_source_distribution_holds_what_the_wheel_is_built_from(builders, tmp_path):
    (path,) = builders[1].build(directory=str(tmp_path))
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package("src/") <= names
    assert names - package("src/") == {
        "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"
    }  # fmt: skip


# The metadata -------------------------------------------------------------------------------------------------------


def test_there_is_one_version(builders):
    version = builders[0].metadata.version
    assert version == mezzo.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == version, "the first heading of the changelog is about another version"


def test_the_metadata_hold(core):
    known = importlib.import_module("trove_classifiers").classifiers
    assert set(core.classifiers) <= set(known)
    assert (core.name, core.license_expression, core.readme_content_type) == ("mezzo", "Apache-2.0", "text/markdown")
    assert core.urls == {}, "there is no such place yet"
    module, _, function = core.scripts["mezzo"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert sys.version_info >= tuple(map(int, core.requires_python.removeprefix(">=").split(".")))


def named_extras():
    """Yield each extra that an error of mezzo's tells to install, with the file."""
    for path, text in sources().items():
        for node in nodes(text):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require_extra":
                yield ast.literal_eval(node.args[0]), path


def test_extras_that_errors_name_exist(core):
    named = list(named_extras())
    assert {"report", "lightning"} <= {extra for extra, _ in named}
    assert {requirement for requirement in named if requirement[0] not in core.optional_dependencies} == set()


def test_all_is_every_extra_of_a_user(core):
    extras = {name: set(needed) for name, needed in core.optional_dependencies.items()}
    users = extras.keys() - OURS - {"all"}
    assert extras["all"] == set().union(*(extras[name] for name in users))


def test_importing_needs_no_extra():
    """Whatever is imported where a file begins is a dependency: extras are imported where they are needed.

    A bridge that derives from another library's class is that library's alone, and names the extra when it is imported.
    """
    top = set()
    for path in sources().keys() - {f"integrations/{bridge}.py" for bridge in BRIDGES}:
        for node in parsed(sources()[path]).body:
            if isinstance(node, ast.Import):
                top |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                top.add(node.module.split(".")[0])
    assert top - set(sys.stdlib_module_names) == {"mezzo", "torch", "numpy", "typer", "rich"}


# An empty environment -----------------------------------------------------------------------------------------------


@pytest.mark.slow  # minutes: torch is installed, and trains in it
def test_the_wheel_works_in_an_empty_environment(builders, tmp_path):
    built = tmp_path / "dist"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built], cwd=ROOT, check=True, timeout=300
    )
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == package()

    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONWARNINGS")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*command):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "venv")
    bin_ = tmp_path / "venv" / "bin"
    constraints = ROOT / "constraints.txt"
    installed = subprocess.run(
        [bin_ / "pip", "install", "--quiet", "--constraint", constraints, wheel],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if installed.returncode and "No matching distribution" in installed.stderr:
        pytest.skip("needs a package index, or pip's settings for one")
    assert installed.returncode == 0, installed.stderr
    run(bin_ / "pip", "check")

    facts = json.loads(run(bin_ / "mezzo", "doctor", "--json"))
    assert all("trains as FP32 does" in line for line in facts["verdict"]), facts
    assert facts["machine"]["mezzo"] == mezzo.__version__
    assert facts["packages"].get("lightning") is None
    run(
        bin_ / "python", "-c",
        "import pkgutil, importlib, mezzo; assert 'site-packages' in mezzo.__file__;"
        "[importlib.import_module(each.name) for each in pkgutil.walk_packages(mezzo.__path__, 'mezzo.')"
        f" if each.name != 'mezzo.__main__' and each.name.rpartition('.')[2] not in {BRIDGES}]",
    )  # fmt: skip
    for name, extra in BRIDGES.items():
        bridge = [bin_ / "python", "-c", f"import mezzo.integrations.{name}"]
        refused = subprocess.run(bridge, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert re.search(rf'write  pip install .*"{extra}>=[\d.]+"', refused.stderr)
    resolved = run(bin_ / "pip", "install", "--dry-run", "--constraint", constraints, f"{wheel}[all]")
    assert "Would install" in resolved
    assert re.search(r"Would install .*\blightning-", resolved)
