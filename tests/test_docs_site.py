"""The site builds without a warning, needs no network to be read, leads nowhere in vain, and has every public name."""

import importlib
import zlib
from html.parser import HTMLParser
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


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.add(found["href"])
        elif tag in ("script", "img", "link", "source", "iframe"):
            self.loaded |= {found[name] for name in ("src", "href") if found.get(name)}


def is_elsewhere(link):
    return link.startswith(("http:", "https:", "//", "mailto:"))


def dead_links(folder):
    """Links and pictures of the site that lead to no file, or to no anchor in it."""
    pages = {path: Page(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in sorted(page.links | page.loaded):
            name, _, anchor = link.partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            known = is_elsewhere(link) or (target.is_file() and (not anchor or anchor in pages[target].anchors))
            if not known:
                yield path.relative_to(folder).as_posix(), link


def documented(folder):
    """The names that the site's inventory has."""
    packed = (folder / "objects.inv").read_bytes().split(b"\n", 4)[4]
    kinds = {"py:class", "py:exception", "py:function", "py:method", "py:property", "py:data", "py:attribute"}
    entries = [line.split(" ") for line in zlib.decompress(packed).decode().splitlines()]
    return {entry[0] for entry in entries if entry[1] in kinds}


def named(name):
    """What a dotted name means; None for a field that only instances have."""
    found, path, *parts = mezzo, *name.split(".")
    for part in parts:  # a package's function may have the name of the file that it is in
        path = f"{path}.{part}"
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
        except ImportError:
            return None
    return found


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

    told = tmp_path / "warnings"
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-w", str(told), "-d", str(tmp_path / "doctrees")]
    return main([*options, str(ROOT / "docs"), str(tmp_path / "html")]), told.read_text()


@pytest.mark.skipif(find_spec("furo") is None or find_spec("myst_parser") is None, reason="needs the extra docs")
def test_the_site(tmp_path):
    assert on_ranks(1, built, tmp_path, timeout=300, backend=None) == [(0, "")]

    folder = tmp_path / "html"
    assert [*dead_links(folder)] == []
    loaded = {each for path in folder.rglob("*.html") for each in Page(path).loaded}
    assert {each for each in loaded if is_elsewhere(each)} == set()

    names = documented(folder)
    assert {name for name in names if any(part.startswith("_") for part in name.split("."))} == set()
    meant = [named(name) for name in names]
    assert [name for name, value in public() if not any(value is each for each in meant)] == []
