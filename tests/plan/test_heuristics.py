"""What other systems do, held against their own tests and against each other."""

import random

from hypothesis import given
from hypothesis import strategies as st

from mezzo.errors import PolicyError
from mezzo.plan.heuristics import Listed, gray, painted, promoted

from ..support.refusals import refused
from .worked import PADDLE_GRAY, PADDLE_PROMOTED, TENSORFLOW

ALL = (promoted, gray, painted)


def casts(graph, low):
    """Count casts: an op's tensor is cast once for each direction in which a consumer wants it."""
    wanted = {(producer, low[op]) for op, producers in enumerate(graph.inputs) for producer in producers}
    return sum(low[producer] != is_low for producer, is_low in wanted)


def agrees(example, rule):
    low = rule(example.graph)
    names = {op for op, is_low in zip(example.ops, low, strict=True) if is_low}
    assert set(example.low) <= names, example.name
    assert not names & set(example.high), example.name
    assert example.casts in (None, casts(example.graph, low)), example.name


def test_painting_gives_what_tensorflows_tests_expect():
    for example in TENSORFLOW:
        agrees(example, painted)


def test_gray_ops_follow_as_paddles_tests_expect():
    for example in PADDLE_GRAY:
        agrees(example, gray)


def test_promotion_gives_what_paddles_tests_expect():
    for example in PADDLE_PROMOTED:
        agrees(example, promoted)


ROWS = [
    # lists, inputs, and which ops run low: promoted, gray, painted
    ("no ops", (), (), "", "", ""),
    ("nothing is allowed", ("clear", "infer"), ((), (0,)), "", "", ""),
    ("a denied op after an allowed one", ("allow", "deny"), ((), (0,)), "0", "0", "0"),
    ("black wins over white", ("allow", "deny", "infer"), ((), (), (0, 1)), "0", "0", "0"),
    ("black wins in either order", ("deny", "allow", "infer"), ((), (), (0, 1)), "1", "1", "1"),
    ("a source among the inputs", (None, "allow", "infer"), ((), (0,), (1, 0)), "1", "12", "1"),
    ("a gray op without a mark is not black", ("infer", "allow", "infer"), ((), (), (0, 1)), "1", "12", "1"),
    ("an op on no list", ("allow", None, "infer"), ((), (0,), (1,)), "012", "0", "0"),
    ("an op on no list is black, a source is not", ("allow", None, "infer", None, "infer"),
     ((), (0,), (0, 1), (), (0, 3)), "012", "04", "0"),
    ("clear before allowed", ("clear", "clear", "allow"), ((), (0,), (1,)), "2", "2", "012"),
    ("inferred before allowed", ("infer", "allow"), ((), (0,)), "1", "1", "1"),
    ("inferred between allowed", ("allow", "infer", "clear", "infer", "allow"), ((), (0,), (1,), (2,), (3,)),
     "01234", "01234", "01234"),
    ("between allowed, but denied before", ("deny", "allow", "infer", "allow"), ((), (), (0, 1), (2,)),
     "13", "13", "13"),
    ("denial runs through clear ops to inferred ones only", ("deny", "clear", "infer", "clear", "allow"),
     ((), (0,), (1,), (2,), (3,)), "4", "4", "34"),
    ("denial stops where no inferred op follows", ("deny", "clear", "allow"), ((), (0,), (1,)), "2", "2", "12"),
    ("clear ops beside each other, over a shared input", ("clear", "allow", "clear", "clear"), ((), (0,), (0,), (2,)),
     "1", "1", "0123"),
    ("an inferred op stops the paint of clear ones", ("allow", "infer", "clear"), ((), (0,), (1,)), "012", "012", "0"),
    ("an allowed op carries no denial", ("deny", "allow", "infer", "clear", "allow"), ((), (0,), (1,), (2,), (3,)),
     "1234", "1234", "1234"),
]  # fmt: skip


def test_small_graphs():
    for name, lists, inputs, *expected in ROWS:
        graph = Listed(lists, inputs)
        for rule, ops in zip(ALL, expected, strict=True):
            low = {op for op, is_low in enumerate(rule(graph)) if is_low}
            assert low == {int(digit) for digit in ops}, f"{name}: {rule.__name__}"


@st.composite
def graphs(draw):
    lists = draw(st.lists(st.sampled_from(["allow", "infer", "clear", "deny", None]), min_size=1, max_size=12))
    inputs = [tuple(draw(st.lists(st.integers(0, op - 1), max_size=3))) if op else () for op in range(len(lists))]
    return Listed(lists, inputs)


@given(graphs())
def test_all_follow_the_lists(graph):
    for rule in ALL:
        low = rule(graph)
        for op, colour in enumerate(graph.lists):
            assert low[op] or colour != "allow"
            assert not low[op] or colour != "deny"
            assert not low[op] or colour is not None or (rule is promoted and graph.inputs[op])


@given(graphs(), st.randoms(use_true_random=False))
def test_painting_asks_for_no_order(graph, chance):
    order = list(range(len(graph.lists)))
    chance.shuffle(order)  # the op at each new place
    position = {op: new for new, op in enumerate(order)}
    moved = Listed(
        [graph.lists[op] for op in order], [tuple(position[maker] for maker in graph.inputs[op]) for op in order]
    )
    assert painted(moved) == tuple(painted(graph)[op] for op in order)


def test_long_chains_do_not_recurse():
    size = 20_000
    lists = ["allow", *["clear"] * (size - 1)]
    graph = Listed(lists, [(), *((op,) for op in range(size - 1))])
    assert all(all(rule(graph)) for rule in ALL)


REFUSED = [
    (lambda: Listed(("allow",), ()), "there are 1 lists and inputs of 0 ops", "each op has one of each"),
    (lambda: Listed(("alow",), ((),)), "unknown list 'alow'", "did you mean 'allow'?"),
    (lambda: Listed((["allow"],), ((),)), "unknown list ['allow']"),
    (lambda: Listed("allow", ((),)), "lists is 'allow'", "a tuple or a list"),
    (lambda: Listed(("allow",), None), "inputs is None"),
    (lambda: Listed(("allow",), (0,)), "inputs[0] are 0", "they are a tuple of indices of the 1 ops"),
    (lambda: Listed(("allow", "infer"), ((), (2,))), "inputs[1] are (2,)", "the 2 ops"),
    (lambda: Listed(("allow", "infer"), ((), (-1,))), "inputs[1] are (-1,)"),
    (lambda: Listed(("allow", "infer"), ((), (True,))), "inputs[1] are (True,)"),
    (
        lambda: Listed(("alow", "infer"), ((), (0.0,))),
        "2 problems",
        "1. unknown list 'alow'",
        "2. inputs[1] are (0.0,)",
    ),
    (lambda: promoted(Listed(("allow", "infer"), ((1,), ()))), "op 0 reads what op 1 makes", "in topological order"),
    (lambda: gray(Listed(("allow", "infer"), ((), (1,)))), "op 1 reads what op 1 makes", "in topological order"),
]


def test_what_is_refused():
    for call, *words in REFUSED:
        with refused(PolicyError, *words):
            call()


def test_random_graphs_differ_between_the_three():
    """The comparison would say nothing if the rules were one."""
    chance, seen = random.Random(1), set()
    for _ in range(200):
        size = chance.randint(2, 10)
        lists = chance.choices(["allow", "infer", "clear", "deny", None], k=size)
        graph = Listed(lists, [tuple(chance.choices(range(op), k=min(op, 2))) for op in range(size)])
        seen.add(len({rule(graph) for rule in ALL}))
    assert seen == {1, 2, 3}
