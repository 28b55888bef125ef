"""The shape of the house: how large it may be, and what is there only once."""

import ast
import json
from collections import defaultdict
from pathlib import Path

import pytest

from . import house
from .house import (
    OVERLOADED,
    PUBLISHED,
    PUBLISHED_IN_TESTS,
    bindings,
    gestures,
    lines_of_code,
    nodes,
    parsed,
    sources,
    sources_of_tests,
)

MOST_LINES = 700
MOST_FILES = 20


def test_what_counts_as_code():
    text = '"""Doc."""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Say.\n\n    More.\n    """\n'
    assert lines_of_code(text) == 4


def test_every_line_is_counted_in_one_room(monkeypatch):
    files = {"one/a.py": "x = 1\n", "one/two/b.py": '"""Doc."""\n\nx = 1\ny = 2\n', "alone.py": "x = 1\n"}
    monkeypatch.setattr(house, "sources", lambda: files)
    assert house.rooms() == {"one/": 3, "alone.py": 1}


def test_no_file_is_long_and_no_folder_full():
    folders = defaultdict(list)
    for path in sources():
        folders[Path(path).parent.as_posix()].append(path)
    assert {path for path, text in sources().items() if text.count("\n") > MOST_LINES} == set()
    assert {folder for folder, files in folders.items() if len(files) > MOST_FILES} == set()


def test_no_class_has_the_name_of_another():
    homes = defaultdict(list)
    for path, text in sources().items():
        for node in nodes(text):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_a_protocol_has_five_methods_at_most():
    large = {
        node.name: len(methods)
        for text in sources().values()
        for node in nodes(text)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
        if len(methods := [part for part in node.body if isinstance(part, ast.FunctionDef)]) > 5
    }
    assert large == {}


def test_which_names_a_file_binds():
    text = "import torch as a\nfrom b import c\n\n\ndef d(e, *f, **g):\n    h.i = j = lambda k: l\n    n: int\n"
    text += "    try:\n        pass\n    except Exception as m:\n        [t for o, (p, *q) in u if (v := o)]\n"
    text += "    match w:\n        case [x, *y]:\n            pass\n        case {'z': Z, **rest}:\n            pass\n"
    assert sorted(name for name, _ in bindings(text)) == [*"Zadefgijkmnopq", "rest", *"vxy"]
    assert dict(bindings(text))["i"] == 6


def test_which_docstrings_open_with_a_gesture():
    text = '"""Say."""\n\n\ndef a():\n    """Say what it is."""\n\n\nclass B:\n    """Return a.\n\n    Say b."""\n\n\n'
    text += 'def c():\n    """Go over the rows."""\n\n\ndef d():\n    """Goad them."""\n'
    assert list(gestures(text)) == [("Say what it is.", 4), ("Go over the rows.", 14)]


@pytest.mark.parametrize(
    "files, published", [(sources, PUBLISHED), (sources_of_tests, PUBLISHED_IN_TESTS)], ids=["src", "tests"]
)
def test_a_name_has_one_meaning(files, published):
    assert [
        f"{path}:{line} {name}"
        for path, text in files().items()
        for name, line in bindings(text)
        if name in OVERLOADED - published.get(path, set())
    ] == []


def test_a_docstring_says_what_a_caller_gets():
    assert [f"{path}:{line} {opening}" for path, text in sources().items() for opening, line in gestures(text)] == []


def test_vague_names_become_fewer():
    """Whoever lowers a count keeps it so: ``.venv/bin/python tests/house.py --fall``."""
    most, counts = json.loads(house.KEPT.read_text())["names"], house.vague()
    assert {name: count for name, count in counts.items() if count > most[name]} == {}


def test_only_a_rooms_door_says_what_is_public():
    offering = {path for path, text in sources().items() if "\n__all__" in text and Path(path).name != "__init__.py"}
    rooms_of_one_file = {"compat/fleet.py", "compat/torch/cuda/amp.py"}
    rooms_of_one_file |= {f"integrations/{name}.py" for name in ("accelerate", "lightning", "transformers")}
    assert offering == rooms_of_one_file


def test_what_a_room_offers_is_in_it():
    missing = {}
    for path, text in sources().items():
        bound, offered = set(), []
        for node in parsed(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                bound.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bound |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
                if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                    offered = ast.literal_eval(node.value)
        if "__getattr__" not in bound and not bound.issuperset(offered):
            missing[path] = sorted(set(offered) - bound)
    assert missing == {}


def test_no_file_reads_private_names_of_another():
    # Which classes of ours have:
    torchs = {"_local_tensor", "_modules", "_parameters", "_values", "_version", "_buffers"}
    torchs |= {"_non_persistent_buffers_set", "_post_accumulate_grad_hooks"}
    torchs |= {"_replace"}  # of named tuples
    private = {path: set(_private_names(text)) for path, text in sources().items()}
    ours = set().union(*private.values()) - torchs
    reads = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, text in sources().items()
        for node in nodes(text)
        if isinstance(node, ast.Attribute) and node.attr in ours - private[path] and not _is_own(node.value)
    ]
    imports = [
        f"{path}:{node.lineno} {alias.name}"
        for path, text in sources().items()
        for node in nodes(text)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mezzo")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert reads + imports == []


def _private_names(source: str):
    for node in nodes(source):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.attr if isinstance(node, ast.Attribute) else node.id]
        else:
            continue
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def _is_own(value: ast.expr) -> bool:
    return ast.unparse(value) in ("self", "cls", "super()")


def test_few_files_read_stack_frames():
    """None looks for a frame of ours or of torch's: for the user's line, and whether a script calls."""
    readers = {path for path, text in sources().items() if "_getframe" in text or "currentframe" in text}
    assert readers == {"script/program.py", "trace/function_calls.py"}


def test_one_file_knows_how_to_write_files_whole():
    calls = {"os.replace(", "os.rename(", "os.fsync("}
    writers = {path for path, text in sources().items() if any(call in text for call in calls)}
    assert writers <= {"files.py"}
