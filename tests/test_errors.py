"""The builder of messages, and the tree."""

import pickle
from importlib import metadata

import pytest

from mezzo import DistributedError, MezzoError, NumericsError, PolicyError, StateError, UnsupportedError
from mezzo.errors import message, nearest, printable, require_extra, shown, some_of


def test_messages_answer_what_where_why_and_what_to_write():
    text = message("it broke", where="layer.0\nlayer.1", why="because", write="this")
    assert text.splitlines() == [
        "it broke", "  where  layer.0", "         layer.1", "  why    because", "  write  this",
    ]  # fmt: skip
    assert message("only what") == "only what"


@pytest.mark.parametrize(
    "error, builtin",
    [
        (PolicyError, ValueError),
        (UnsupportedError, RuntimeError),
        (NumericsError, FloatingPointError),
        (StateError, RuntimeError),
        (DistributedError, RuntimeError),
    ],
)
def test_errors_are_ours_and_python_s(error, builtin):
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


@pytest.mark.parametrize(
    "word, words, says",
    [
        ("O5", ["O0", "O1"], "did you mean 'O"),
        ("FLOAT16", ["float16"], "did you mean 'float16'?"),
        ("zzz", ["float16", "bfloat16"], "valid: float16, bfloat16"),
    ],
)
def test_the_nearest_word_is_suggested(word, words, says):
    assert nearest(word, words).startswith(says)


def test_long_lists_are_counted():
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
    assert text.isprintable() is False  # for its line breaks alone
    assert all(line.isprintable() for line in text.split("\n"))
    assert str(StateError.together([StateError(EVIL), PolicyError(EVIL)])).count(spelled) == 2
    assert some_of([EVIL, "a\nb", "c"], 2) == rf"{spelled}, a\nb and 1 more"
    text.encode()


def test_line_breaks_of_other_kinds_make_no_lines():
    text = message("what", where="a\x85  write  rm\u2028  write  rm\x0b  write  rm")
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
    many = str(PolicyError.together([PolicyError(f"problem {n}") for n in range(1000)]))
    assert many.startswith("1000 problems\n1. problem 0\n")
    assert many.endswith("20. problem 19\nand 980 more")


@pytest.mark.parametrize(
    "have, asked, is_old",
    [
        ("2.3.9", "2.4", True),
        ("2.4", "2.4", False),
        ("2.4.0rc1", "2.4", False),
        ("10.0", "9.1", False),
        ("1", "1.0.1", True),
    ],
)
def test_a_package_that_is_too_old_is_named(monkeypatch, have, asked, is_old):
    """As the extra asks for it, by numbers and not by letters; what is not asked for by this extra does not count."""
    requires = [f"json>={asked}; extra == 'this'", "re>=99; extra == 'other'", "torch>=99", "gone>=9; extra == 'this'"]
    versions = {"json": have, "re": "1"}
    monkeypatch.setattr(metadata, "requires", lambda _: requires)

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

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
