"""How large the house is: its code lines, room by room.

Lines that hold code, without docstrings and comments. They are printed beside those of the last release, and nothing
bounds them. ``.venv/bin/python tests/house.py`` prints them, and with ``--keep NAME`` keeps them for the next release.
"""

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "mezzo"
#: What the last release had.
KEPT = Path(__file__).parent / "house.json"

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@cache
def sources() -> dict[str, str]:
    """Return the text of each file, by its path inside the package."""
    return {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


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
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - documented)


def rooms() -> Counter[str]:
    """Return the code lines of each room: a folder with all that is in it, or a file beside the folders."""
    found: Counter[str] = Counter()
    for path, text in sources().items():
        room = path.partition("/")[0]
        found[room if room == path else f"{room}/"] += lines_of_code(text)
    return found


def main() -> None:
    """Print the rooms, the largest first, and all of them together."""
    parser = argparse.ArgumentParser(description="Print the lines of code of each room, beside those of a release ago.")
    parser.add_argument("--keep", metavar="NAME", help="keep them, as those of this release")
    options, found = parser.parse_args(), rooms()
    if options.keep:
        KEPT.write_text(json.dumps({"release": options.keep, "rooms": dict(sorted(found.items()))}, indent=1) + "\n")
    kept = json.loads(KEPT.read_text())
    before = Counter(kept["rooms"])
    print(f"{'room':<16}{'code lines':>12}  {kept['release']}")
    for room in sorted(found | before, key=lambda room: -found[room]):
        print(f"{room:<16}{found[room]:>12,}{before[room]:>8,}")
    print(f"{'all of it':<16}{found.total():>12,}{before.total():>8,}   in {len(sources())} files")


if __name__ == "__main__":
    main()
