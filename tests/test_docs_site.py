"""The site builds without a warning, needs no network to be read, leads nowhere in vain, and has every public name."""

import html
import importlib
import re
import zlib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import mezzo

from .distributed.ranks import on_ranks

ROOT = Path(__file__).parents[1]
#: What has public names beside ``mezzo`` itself; other rooms are reached through these.
MODULES = (
    *("formats", "numerics", "optim", "overflow", "scale", "explanation"),
    *(f"integrations.{name}" for name in ("accelerate", "lightning", "transformers") if find_spec(name)),
    *("script", "compat.torch", "compat.apex", "compat.paddle", "compat.fleet"),
)


def dead_links(folder):
    """Links that lead to no file, or to no anchor in it, and whatever a page loads from elsewhere."""
    texts = {path: html.unescape(path.read_text()) for path in folder.rglob("*.html")}
    anchors = {path: {*re.findall(r' (?:id|name)="([^"]+)"', text)} for path, text in texts.items()}
    for path, text in texts.items():
        loaded = {*re.findall(r'<(?:script|img|link|source|iframe)\b[^>]*? (?:src|href)="([^"]+)"', text)}
        links = {*re.findall(r'<a\b[^>]*? href="((?!https?:|//|mailto:)[^"]+)"', text)}
        for link in sorted(loaded | links):
            name, _, anchor = link.partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            if not target.is_file() or (anchor and anchor not in anchors[target]):
                yield path.name, link


def documented(packed):
    """The names that the site's inventory has."""
    entries = [line.split(" ") for line in zlib.decompress(packed).decode().splitlines()]
    return {name for name, domain, *_ in entries if domain.startswith("py:") and domain != "py:module"}


def named(name):
    """What a dotted name means; None for a field that only instances have."""
    value, path, *parts = mezzo, *name.split(".")
    for part in parts:  # a package's function may have the name of the file that it is in
        path = f"{path}.{part}"
        try:
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(path)
        except ImportError:
            return None
    return value


def public():
    """Every public name, and what it means."""
    for module in (mezzo, *(importlib.import_module(f"mezzo.{name}") for name in MODULES)):
        for name in module.__all__:
            value = getattr(module, name)
            is_torchs = (getattr(value, "__module__", None) or "").startswith("torch.")
            if not isinstance(value, ModuleType) and name != "__version__" and not is_torchs:
                yield f"{module.__name__}.{name}", value


def built(tmp_path):
    """The exit code of ``make docs``, and its warnings, in a process that has imported mezzo."""
    from sphinx.cmd.build import main

    warnings_file = tmp_path / "warnings"
    options = [
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "-w",
        str(warnings_file),
        "-d",
        str(tmp_path / "doctrees"),
    ]
    return main([*options, str(ROOT / "docs"), str(tmp_path / "html")]), warnings_file.read_text()


@pytest.mark.skipif(find_spec("furo") is None or find_spec("myst_parser") is None, reason="needs the extra docs")
@pytest.mark.slow  # Sphinx reads all of mezzo
def test_the_site(tmp_path):
    assert on_ranks(1, built, tmp_path, timeout=300, backend=None) == [(0, "")]
    folder = tmp_path / "html"
    assert [*dead_links(folder)] == []
    names = documented((folder / "objects.inv").read_bytes().split(b"\n", 4)[4])
    assert {name for name in names if any(part.startswith("_") for part in name.split("."))} == set()
    meant = {id(named(name)) for name in names}
    assert [name for name, value in public() if id(value) not in meant] == []
