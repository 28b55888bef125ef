"""What all rooms stand on: the builder of messages and the tree of errors, values as JSON, facts about tensors."""

import json
import math
import pickle
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import register_pytree_node

import mezzo
from mezzo import DistributedError, MezzoError, NumericsError, PolicyError, ScaleCollapsed, StateError, UnsupportedError
from mezzo.cast.casts import cast_floating
from mezzo.compat import paddle
from mezzo.compat import torch as torch_like
from mezzo.compat.apex import frontend
from mezzo.errors import message, nearest, printable, require_extra, shown, some_of
from mezzo.files import jsonable
from mezzo.tensors import Frame, each_tensor, leaves, mapped, mark, moved, tensors

# Errors -------------------------------------------------------------------------------------------------


def test_messages_answer_what_where_why_and_what_to_write():
    text = message("it broke", where="layer.0\nlayer.1", why="because", write="this")
    assert text.splitlines() == [
        "it broke", "  where  layer.0", "         layer.1", "  why    because", "  write  this",
    ]  # fmt: skip
    assert message("only what") == "only what"


def test_errors_are_ours_and_python_s():
    for error, builtin in (
        (PolicyError, ValueError), (UnsupportedError, RuntimeError), (NumericsError, FloatingPointError),
        (ScaleCollapsed, NumericsError), (StateError, RuntimeError), (DistributedError, StateError),
    ):  # fmt: skip
        assert issubclass(error, MezzoError)
        assert issubclass(error, builtin)
        raised = error("what", why="why")
        again = pickle.loads(pickle.dumps(raised))
        assert type(again) is error
        assert str(again) == str(raised) == "what\n  why    why"


def test_several_problems_become_one_error():
    one, two = PolicyError("first", write="a"), StateError("second")
    assert PolicyError.together([one]) is one
    both = PolicyError.together([one, two])
    assert type(both) is PolicyError
    assert str(both) == "2 problems\n1. first\n  write  a\n2. second"
    many = str(PolicyError.together([PolicyError(f"problem {n}") for n in range(1000)]))
    assert many.startswith("1000 problems\n1. problem 0\n")
    assert many.endswith("20. problem 19\nand 980 more")


def test_the_nearest_word_is_suggested_and_long_lists_are_counted():
    assert nearest("O5", ["O0", "O1"]).startswith("did you mean 'O")
    assert nearest("FLOAT16", ["float16"]).startswith("did you mean 'float16'?")
    assert nearest("zzz", ["float16", "bfloat16"]) == "valid: float16, bfloat16"
    assert some_of(list("abc")) == "a, b, c"
    assert some_of(list("abcdefg")) == "a, b, c, d, e and 2 more"
    many = [f"blocks.{number}" for number in range(100)]
    assert nearest("block.99", many).startswith("did you mean 'blocks.99'? valid: blocks.0, blocks.1, ")
    assert nearest("block.99", many).endswith("blocks.19 and 80 more")


#: Colours, a jump of the cursor in one character, a text shown backwards, an invisible join, half a character.
EVIL = "fc\x1b[31m\x9b2J\u202e\u200d\x7f\r\t\ud800"


def test_nothing_reaches_a_terminal_that_is_not_seen():
    spelled = r"fc\x1b[31m\x9b2J\u202e\u200d\x7f\r\t\ud800"
    assert printable(EVIL) == spelled
    assert printable("a\nb") == r"a\nb"
    assert printable("a\nb", keep="\n") == "a\nb"
    assert printable("größer 4 096×3 → ‰") == "größer 4 096×3 → ‰"
    text = message(EVIL, where=EVIL, why=f"{EVIL}\n{EVIL}", write=EVIL)
    assert text.count(spelled) == 5
    assert all(line.isprintable() for line in text.split("\n"))
    assert str(StateError.together([StateError(EVIL), PolicyError(EVIL)])).count(spelled) == 2
    assert some_of([EVIL, "a\nb", "c"], 2) == rf"{spelled}, a\nb and 1 more"
    text.encode()
    text = message("what", where="a\x85  write  rm\u2028  write  rm\x0b  write  rm")  # breaks that make no lines
    assert text.split("\n") == ["what", r"  where  a\x85  write  rm\u2028  write  rm\x0b  write  rm"]


def test_echoes_are_short():
    long = "x" * 1_000_000
    assert len(shown(long)) < 250
    assert shown(long).endswith("(1,000,002 characters)")
    assert len(message(long, where=f"{long}\nshort", why=long, write=long)) < 10_000
    assert "         short" in message("what", where=f"{long}\nshort")
    assert len(nearest(long, ["float16"])) < 300
    assert shown(10**5000) == "a int"  # of more digits than Python writes

    class Wrong:
        def __repr__(self):
            raise ValueError

    assert shown(Wrong()) == "a Wrong"
    assert shown("\x1b") == r"'\x1b'"


REQUIRES = ["json>={}; extra == 'this'", "re>=99; extra == 'other'", "torch>=99", "gone>=9; extra == 'this'"]


@pytest.mark.parametrize(
    "have, asked, is_old",
    [("2.3.9", "2.4", True), ("2.4.0rc1", "2.4", False), ("10.0", "9.1", False), ("1", "1.0.1", True)],
)
def test_a_package_that_is_too_old_is_named(monkeypatch, have, asked, is_old):
    """As the extra asks for it, by numbers and not by letters; what is not asked for by this extra does not count."""

    def version(name):
        if name not in ("json", "re"):
            raise metadata.PackageNotFoundError(name)
        return {"json": have, "re": "1"}[name]

    monkeypatch.setattr(metadata, "requires", lambda _: [requirement.format(asked) for requirement in REQUIRES])
    monkeypatch.setattr(metadata, "version", version)
    if not is_old:
        require_extra("this", "reading needs json", "json")
        return
    with pytest.raises(UnsupportedError) as caught:
        require_extra("this", "reading needs json", "json")
    assert str(caught.value).split("\n") == [
        "reading needs json",
        f"  why    there is json {have}, and {asked} is the oldest that will do",
        f'  write  pip install "json>={asked}" "gone>=9"',
    ]


def test_without_metadata_no_package_is_too_old(monkeypatch):
    def requires(_):
        raise metadata.PackageNotFoundError("mezzo")

    monkeypatch.setattr(metadata, "requires", requires)
    require_extra("this", "reading needs json", "json")
    with pytest.raises(UnsupportedError, match=r'gone_away(.|\n)*write  pip install "\.\[this\]", in a clone of mezzo'):
        require_extra("this", "reading needs what is gone", "gone_away")


# Values as JSON -----------------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats()
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=9)


def alike(value, read):
    if isinstance(value, float) and not math.isfinite(value):
        return read == str(value)
    if isinstance(value, dict):
        return value.keys() == read.keys() and all(alike(value[key], read[key]) for key in value)
    if isinstance(value, list | tuple):
        return isinstance(read, list) and len(value) == len(read) and all(map(alike, value, read))
    return type(value) is type(read) and value == read


@given(values)
def test_what_is_written_is_strict_json_and_says_the_same(value):
    value = {"ms": (value, math.inf)}
    assert alike(value, json.loads(json.dumps(jsonable(value), allow_nan=False)))


# Tensors ------------------------------------------------------------------------------------------------


def test_what_is_there_already_is_not_copied_and_the_host_waits_for_what_it_reads(monkeypatch):
    number, waits, plain = torch.tensor(2.0), [], torch.Tensor.to
    assert moved(number, torch.device("cpu")) is number
    assert moved(number, torch.device("cpu"), torch.float64).dtype == torch.float64

    def to(tensor, device, dtype, *, non_blocking):
        waits.append((device.type, non_blocking))
        return plain(tensor, device, dtype)

    monkeypatch.setattr(torch.Tensor, "to", to)
    for device in ("cpu", "meta"):
        moved(number, torch.device(device))
    assert waits == [("cpu", False), ("meta", True)]


@dataclass
class Point:
    x: torch.Tensor
    rest: list


class Pair(NamedTuple):
    one: torch.Tensor
    other: object


class Words(tuple):
    """A tuple of a program's own class."""


class Row(list):
    """A list of a program's own class."""


class Bag(dict):
    """A dict of a program's own class."""


class Registered:
    def __init__(self, inner):
        self.inner = inner


register_pytree_node(Registered, lambda registered: ([registered.inner], None), lambda items, _: Registered(*items))

#: Each makes a container of two items, and says the paths to them.
CONTAINERS = {
    "tuple": (lambda one, other: (one, other), "[0]", "[1]"),
    "list": (lambda one, other: [one, other], "[0]", "[1]"),
    "dict": (lambda one, other: {"a": one, 2: other}, "['a']", "[2]"),
    "ordered": (lambda one, other: OrderedDict(b=one, a=other), "['b']", "['a']"),
    "named": (Pair, "[0]", "[1]"),
    "dataclass": (Point, ".x", ".rest"),
    "own tuple": (lambda one, other: Words((one, other)), "[0]", "[1]"),
    "own list": (lambda one, other: Row([one, other]), "[0]", "[1]"),
    "own dict": (lambda one, other: Bag(a=one, b=other), "['a']", "['b']"),
    "mapping": (lambda one, other: UserDict(a=one, b=other), "['a']", "['b']"),
    "registered": (lambda one, other: Registered([one, other]), "[0][0]", "[0][1]"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_are_found_and_changed_in_every_container(name):
    """Iteration, paths, change and frames say the same of each kind, alone and inside of another."""
    make, first, second = CONTAINERS[name]
    one, other = torch.ones(2), torch.zeros(3)
    for value, ends in ((make(one, other), ("", "")), (make(one, [other, "text", None]), ("", "[0]"))):
        assert list(map(id, tensors(value))) == [id(one), id(other)]
        assert [path for path, _ in each_tensor(value)] == [first + ends[0], second + ends[1]]
        for made in (mapped(value, lambda tensor: tensor + 1), Frame(value).filled([one + 1, other + 1])):
            assert type(made) is type(value)
            assert made is not value
            assert [tensor.tolist() for tensor in tensors(made)] == [[2, 2], [1, 1, 1]]
            assert [path for path, _ in leaves(made)] == [path for path, _ in leaves(value)]
        assert list(map(id, tensors(value))) == [id(one), id(other)]  # what was given is as it was


def test_a_containers_other_items_stay_the_same_objects():
    opaque, batch = object(), Bag(x=torch.ones(1), note="text")
    assert list(tensors([opaque, Point, "text", 3, None])) == []
    assert mapped((opaque, Point), lambda leaf: leaf)[0] is opaque
    assert mapped(batch, lambda leaf: leaf) is batch  # an object of a program's own, in which nothing is another
    assert mapped([torch.ones(1), 3], str, int) == [torch.ones(1), "3"]
    assert [(path, leaf) for path, leaf in leaves({"a": [], "b": (1,)})] == [("['a']", []), ("['b'][0]", 1)]
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    assert cast_floating(packed, torch.bfloat16).data.dtype == torch.bfloat16
    assert cast_floating(packed, torch.bfloat16).batch_sizes is packed.batch_sizes


def test_marks_tell_writing_and_other_memory():
    weight = torch.zeros(3)
    before = mark(weight)
    weight.add_(1)
    written = mark(weight)
    weight.data = torch.ones(3)
    assert len({before, written, mark(weight)}) == 3
    with torch.inference_mode():
        made = torch.zeros(3)
    assert mark(made) == (-1, made.data_ptr())
    sparse = torch.eye(2).to_sparse()
    assert mark(sparse) == (sparse._version, 0)


def test_words_for_a_dtype_are_known_wherever_one_stands():
    for word in ("bf16", "BF16", "torch.bfloat16", torch.bfloat16):
        assert [half.dtype for half in mezzo.weights.encode(torch.ones(3), word)] == [torch.bfloat16, torch.int16]
        for region in (torch_like.autocast("cpu", dtype=word), paddle.auto_cast(dtype=word)):
            with region:
                assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
        assert frontend.policy_of("O2", word).dtype == torch.bfloat16
        assert frontend.policy_of("O2", cast_model_outputs=word).output_dtype == torch.bfloat16
