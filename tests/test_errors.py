"""The builder of messages, and the tree."""

import pickle

import pytest

from mezzo import MezzoError, NumericsError, PolicyError, StateError, UnsupportedError
from mezzo.errors import message, nearest, some_of


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
