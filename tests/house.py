"""How large the house is, room by room, and how often it binds names that say little.

Lines that hold code, without docstrings and comments, are printed beside those of the last release, and nothing bounds
them. The counts of vague names may only fall (``tests/test_house.py``). ``.venv/bin/python tests/house.py`` prints
both; ``--keep NAME`` keeps both for the next release, ``--fall`` keeps the counts of names alone.
"""

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "mezzo"
#: The lines of the last release, and the most bindings that each vague name may have.
KEPT = TESTS / "house.json"

#: Names with so many meanings that a line with one of them says nothing: the noun of what is bound stands in its place.
OVERLOADED = {"each", "found", "place", "kind", "near", "far", "said", "told", "held", "follow", "take", "settle"}
#: Fields and parameters that users write or read; to rename them would change what the pages promise.
PUBLISHED = {
    "numerics/evidence.py": {"kind"},
    "numerics/recorder.py": {"kind"},
    "overflow/diagnose.py": {"kind"},
    "explanation/rows.py": {"kind"},
    "script/inspection.py": {"kind"},
}
#: Names that an interface of somebody else's asks a test to bind, by the path inside ``tests/``; empty where none does.
PUBLISHED_IN_TESTS: dict[str, set[str]] = {}
#: Names that a noun beats in most lines, though not in all. :data:`KEPT` counts them, and they become fewer.
VAGUE = ("given", "kept", "known", "low", "made", "others", "own", "what")
#: A docstring that begins so tells an object what to do. The first line says what a caller gets.
OPENERS = (
    "Be",
    "Say",
    "Give",
    "Have",
    "Let",
    "Tell",
    "Take",
    "Note",
    "Need",
    "Go on",
    "Go over",
    "Know",
    "Look",
    "Ask",
    "Put",
)

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@cache
def sources() -> dict[str, str]:
    """Return the text of each file, by its path inside the package."""
    return {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def sources_of_tests() -> dict[str, str]:
    """Return the text of each file of tests, by its path inside ``tests/``."""
    return {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a file."""
    return ast.parse(source)


@cache
def nodes(source: str) -> list[ast.AST]:
    """Return all that the tree of a file is made of."""
    return list(ast.walk(parsed(source)))


@cache
def lines_of_code(source: str) -> int:
    """Count the lines that hold a token of code which is no docstring."""
    documented = set()
    for node in nodes(source):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    coded = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            coded |= set(range(token.start[0], token.end[0] + 1))
    return len(coded - documented)


def bindings(source: str) -> Iterator[tuple[str, int]]:
    """Yield each name that a file binds, with its line: variables, attributes, parameters, definitions, imports."""
    for node in nodes(source):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
            ):
                yield name, node.lineno
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name, node.lineno


def gestures(source: str) -> Iterator[tuple[str, int]]:
    """Yield the first line of each docstring that opens with one of :data:`OPENERS`, with the line of what it is of."""
    for node in nodes(source):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        if text and text.startswith(tuple(f"{opener} " for opener in OPENERS)):
            yield text.splitlines()[0], getattr(node, "lineno", 1)


def rooms() -> Counter[str]:
    """Return the code lines of each room: a folder with all that is in it, or a file beside the folders."""
    lines: Counter[str] = Counter()
    for path, text in sources().items():
        room = path.partition("/")[0]
        lines[room if room == path else f"{room}/"] += lines_of_code(text)
    return lines


def vague() -> dict[str, int]:
    """Return how many bindings each of :data:`VAGUE` has in the whole package."""
    counts = Counter(name for text in sources().values() for name, _ in bindings(text))
    return {name: counts[name] for name in VAGUE}


def main() -> None:
    """Print the rooms, the largest first, all of them together, and the counts of vague names."""
    parser = argparse.ArgumentParser(description="Print the lines of code of each room, beside those of a release ago.")
    parser.add_argument("--keep", metavar="NAME", help="keep lines and names, as those of this release")
    parser.add_argument("--fall", action="store_true", help="keep the counts of vague names, which have become fewer")
    options, lines, names = parser.parse_args(), rooms(), vague()
    kept = json.loads(KEPT.read_text())
    if options.keep:
        kept = {"release": options.keep, "rooms": dict(sorted(lines.items())), "names": names}
    elif options.fall:
        kept["names"] = names
    if options.keep or options.fall:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    before = Counter(kept["rooms"])
    print(f"{'room':<16}{'code lines':>12}  {kept['release']}")
    for room in sorted(lines | before, key=lambda room: -lines[room]):
        print(f"{room:<16}{lines[room]:>12,}{before[room]:>8,}")
    print(f"{'all of it':<16}{lines.total():>12,}{before.total():>8,}   in {len(sources())} files")
    print("vague names:", ", ".join(f"{name} {count} of {kept['names'][name]}" for name, count in names.items()))


if __name__ == "__main__":
    main()
