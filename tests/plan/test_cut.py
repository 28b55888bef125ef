"""The cheapest placement, against all placements, against recurrences, and against the linear relaxation."""

import itertools
import math
import random
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from mezzo.errors import PolicyError, UnsupportedError
from mezzo.plan.cut import Edge, Placement, Problem, cheapest, cost
from mezzo.plan.heuristics import Listed, gray, painted, promoted

from ..support.refusals import refused

INF = math.inf


def exhaustive(problem):
    """Return the least cost of all placements, exactly, and the one with the fewest low ops that has it."""
    best = (INF, 0, None)
    for low in itertools.product((False, True), repeat=len(problem.high)):
        terms = [b if is_low else a for a, b, is_low in zip(problem.high, problem.low, low, strict=True)]
        for edge in problem.tensors:
            wants = {low[consumer] for consumer in edge.consumers}
            terms += [edge.down] if not low[edge.producer] and True in wants else []
            terms += [edge.up] if low[edge.producer] and False in wants else []
        if INF not in terms and (sum(map(Fraction, terms)), sum(low)) < best[:2]:
            best = (sum(map(Fraction, terms)), sum(low), low)
    return best[0], best[2]


def check(problem, *, exactly):
    least, low = exhaustive(problem)
    if low is None:
        with pytest.raises(PolicyError, match=r"forbidden in both precisions|must be low"):
            cheapest(problem)
        return False
    placement = cheapest(problem)
    assert placement.cost == cost(problem, placement.low)
    if exactly:
        assert placement == Placement(low, float(least)), problem
    else:
        assert abs(placement.cost - least) <= 1e-9 * abs(least), problem
    return True


# What the definition says ------------------------------------------------------------------------------


def test_the_cost_is_the_definition():
    problem = Problem((1, 10, 100, 1000), (2, 20, 200, 2000), (Edge(0, (1, 2, 2), 0.25, 0.5), Edge(3, (), 7, 7)))
    rows = {
        (False, False, False, False): 1111,
        (False, True, False, False): 1121.25,
        (False, True, True, False): 1221.25,  # both share the cast
        (True, False, False, False): 1112.5,
        (True, True, False, False): 1122.5,
        (True, True, True, True): 2222,
    }
    assert {low: cost(problem, low) for low in rows} == rows


def test_sums_are_exact():
    problem = Problem((1e16, 1, -1e16), (INF, INF, INF), ())
    assert cost(problem, (False, False, False)) == 1
    assert cheapest(problem) == Placement((False, False, False), 1)


def test_what_is_forbidden_costs_infinitely_much():
    problem = Problem((0, INF), (INF, 0), (Edge(0, (1,), INF, 1),))
    assert cost(problem, (False, True)) == cost(problem, (True, True)) == cost(problem, (False, False)) == INF


PLACED = [
    # high, low, tensors, placement
    ("no ops", (), (), (), ""),
    ("a tie goes to FP32", (1,), (1,), (), "0"),
    ("no tie", (2,), (1,), (), "1"),
    ("negative costs", (-1, -2), (-2, -1), (), "10"),
    ("a cast that costs what it gains", (3, 0), (1, INF), ((0, (1,), 0, 2),), "00"),
    ("a cast that costs less", (3, 0), (1, INF), ((0, (1,), 0, 1),), "10"),
    ("a cast that nobody wants", (3, 0), (1, INF), ((0, (), 9, 9),), "10"),
    ("down is paid once", (0, 2, 2), (INF, 0, 0), ((0, (1, 2), 3, 0),), "011"),
    ("not all that read it need the cast", (0, 9, 0), (INF, 0, 9), ((0, (1, 2), 1, 1),), "010"),
    ("the same upwards", (9, 0, 9), (0, INF, 0), ((0, (1, 2), 1, 1),), "101"),
    ("down is paid for each tensor", (0, 2, 2), (INF, 0, 0), ((0, (1,), 3, 0), (0, (2,), 3, 0)), "000"),
    ("a consumer that stands there twice", (0, 2), (INF, 0), ((0, (1, 1), 2, 0),), "00"),
    ("the same tensor under other costs adds up", (0, 3), (INF, 0), ((0, (1,), 2, 0), (0, (1,), 1, 0)), "00"),
    ("up is paid once", (3, 0, 0), (0, INF, INF), ((0, (1, 2), 0, 2),), "100"),
    ("an op that reads itself", (2, 0), (1, 0), ((0, (0,), 9, 9),), "10"),
    ("through a free op", (0, 5, 1, 5, 0), (INF, 0, 2, 0, INF), tuple((i, (i + 1,), 2, 2) for i in range(4)), "01110"),
    ("around it", (0, 9, 1, 9, 0), (INF, 0, 6, 0, INF), tuple((i, (i + 1,), 2, 2) for i in range(4)), "01010"),
    ("many tensors that must not be cast", (5, 2**59), (3, 2**59 + 2**20), ((0, (1,), INF, INF),) * 40, "00"),
    ("in a ring", (0, 3, 0), (1, 0, 2), ((0, (1,), 1, 1), (1, (2,), 1, 1), (2, (0,), 1, 1)), "010"),
    ("casts for nothing", (0, 1, 0), (0, 0, 0), ((0, (1,), 0, 0), (1, (2,), 0, 0)), "010"),
    ("a forbidden cast drags along", (5, 1, 1), (0, 3, 1), ((0, (1, 2), 1, INF),), "111"),
    ("one byte beside 10^13", (10**13 + 1, 0), (0, INF), ((0, (1,), 0, 10**13),), "10"),
    ("not one byte", (10**13, 0), (0, INF), ((0, (1,), 0, 10**13),), "00"),
    ("the smallest float", (5e-324,), (0,), (), "1"),
    ("the smallest beside a large one", (5e-324, 1e300), (0, INF), (), "10"),
]  # fmt: skip


def test_small_problems():
    for name, high, low, tensors, expected in PLACED:
        problem = Problem(high, low, tuple(Edge(*tensor) for tensor in tensors))
        placement = cheapest(problem)
        assert placement.low == tuple(digit == "1" for digit in expected), name
        assert placement.cost == float(exhaustive(problem)[0]), name


# Against all placements --------------------------------------------------------------------------------


def costs(numbers, least):
    return st.one_of(numbers, numbers, numbers, st.just(INF)) if least is None else costs(numbers.map(abs), None)


@st.composite
def problems(draw, numbers, most=7):
    size = draw(st.integers(1, most))
    op, one = st.integers(0, size - 1), costs(numbers, None)
    edge = st.builds(Edge, op, st.lists(op, max_size=4).map(tuple), costs(numbers, 0), costs(numbers, 0))
    of_ops = st.lists(one, min_size=size, max_size=size)
    return Problem(draw(of_ops), draw(of_ops), draw(st.lists(edge, max_size=9)))


@given(problems(st.integers(-3, 3)))
def test_of_all_placements_the_least_with_the_fewest_low_ops(problem):
    check(problem, exactly=True)


@given(problems(st.sampled_from([0, 1, 2, 10**13, 10**13 + 1, -(10**13)])))
def test_bytes_beside_terabytes(problem):
    check(problem, exactly=True)


@given(problems(st.floats(-1e9, 1e9)))
def test_floats(problem):
    check(problem, exactly=False)


DRAWS = {
    "ties": lambda chance: chance.randint(-2, 3),
    "bytes": lambda chance: chance.choice((1, 10**6, 10**12)) * chance.randint(0, 9),
    "all sizes": lambda chance: 2 ** chance.randint(0, 50) * chance.choice((-1, 1, 1)) + chance.randint(-1, 1),
    "floats": lambda chance: chance.uniform(-1, 1),
    "ratios of 1e9": lambda chance: chance.choice((1, 1e9)) * chance.uniform(-1, 1),
    "ratios of 1e30": lambda chance: math.exp(chance.uniform(-35, 35)),
}
EXACT = ("ties", "bytes", "all sizes")


def made(chance, size, number, forbidden, most_tensors=2):
    """Return a random problem: graphs of any shape, a cost in so many forbidden."""

    def one(value):
        return INF if chance.random() < forbidden else value

    def op():
        return chance.randrange(size)

    tensors = [
        Edge(
            op(),
            tuple(op() for _ in range(chance.randint(0, 4))),
            one(abs(number(chance))),
            one(abs(number(chance))),
        )
        for _ in range(chance.randint(0, most_tensors * size))
    ]
    high, low = ([one(number(chance)) for _ in range(size)] for _ in range(2))
    return Problem(high, low, tensors)


def test_random_problems():
    chance = random.Random(31)
    for name, number in DRAWS.items():
        outcomes = [check(made(chance, chance.randint(1, 8), number, 0.08), exactly=name in EXACT) for _ in range(60)]
        assert set(outcomes) == {True, False}, "both kinds are to occur"


@pytest.mark.slow
def test_more_random_problems_of_up_to_twelve_ops():
    chance = random.Random(12)
    for name, number in DRAWS.items():
        for _ in range(20):
            check(made(chance, chance.randint(9, 12), number, 0.05), exactly=name in EXACT)


def test_the_order_of_ops_and_tensors_changes_nothing():
    chance = random.Random(5)
    for name, number in DRAWS.items():
        for _ in range(8):
            problem = made(chance, 30, number, 0.0)
            order = chance.sample(range(30), 30)  # the op at each new place
            new = {op: index for index, op in enumerate(order)}
            moved = Problem(
                [problem.high[op] for op in order],
                [problem.low[op] for op in order],
                [
                    Edge(new[e.producer], tuple(new[consumer] for consumer in reversed(e.consumers)), e.down, e.up)
                    for e in reversed(problem.tensors)
                ],
            )
            low = cheapest(problem).low
            assert cheapest(moved).low == tuple(low[op] for op in order), name


# Large ones --------------------------------------------------------------------------------------------


def test_a_chain_of_ten_thousand():
    """By recurrence over the chain, in exact integers: the least cost, and of those the fewest low ops."""
    chance, size = random.Random(1), 10_000
    high, low, down, up = ([chance.randint(0, most) for _ in range(size)] for most in (10**13, 10**13, 10**12, 10**12))
    best = {False: (high[0], 0), True: (low[0], 1)}
    for i in range(1, size):
        best = {
            False: (min(best[False], (best[True][0] + up[i - 1], best[True][1])), high[i], 0),
            True: (min(best[True], (best[False][0] + down[i - 1], best[False][1])), low[i], 1),
        }
        best = {is_low: (before[0] + own, before[1] + one) for is_low, (before, own, one) in best.items()}
    problem = Problem(high, low, [Edge(i, (i + 1,), down[i], up[i]) for i in range(size - 1)])
    placement = cheapest(problem)
    least, fewest = min(best.values())
    assert (placement.cost, sum(placement.low)) == (float(least), fewest)


def test_a_star_of_ten_thousand():
    """What one op hands to all others is cast once, or they all stay."""
    chance, size = random.Random(2), 10_000
    high, low = ([0, *(chance.randint(0, 10**12) for _ in range(size - 1))] for _ in range(2))
    gain = sum(max(0, a - b) for a, b in zip(high, low, strict=True))
    consumers = tuple(range(1, size))
    for down, expected in ((gain - 1, sum(map(min, high, low)) + gain - 1), (gain, sum(high)), (gain + 1, sum(high))):
        problem = Problem(high, [INF, *low[1:]], (Edge(0, consumers, down, 0),))
        placement = cheapest(problem)
        assert placement.cost == expected
        assert any(placement.low) == (down < gain)


def relaxed(problem):
    """Return the optimum of the linear relaxation, which is integral."""
    ops, edges = len(problem.high), len(problem.tensors)
    rows, columns, values, row = [], [], [], 0
    for index, edge in enumerate(problem.tensors):
        for consumer in edge.consumers:
            for first, second, paid in (
                (consumer, edge.producer, ops + index),
                (edge.producer, consumer, ops + edges + index),
            ):
                rows += [row] * 3
                columns += [first, second, paid]
                values += [1, -1, -1]
                row += 1
    objective = [b - a for a, b in zip(problem.high, problem.low, strict=True)]
    objective += [edge.down for edge in problem.tensors] + [edge.up for edge in problem.tensors]
    matrix = csr_matrix((values, (rows, columns)), shape=(row, ops + 2 * edges))
    return sum(problem.high) + linprog(objective, A_ub=matrix, b_ub=np.zeros(row), bounds=(0, 1), method="highs-ds").fun


def layered(chance, size, number, cast):
    """Return ops that read up to three of the fifty before them, each op's tensor shared by those that read it."""
    consumers = [[] for _ in range(size)]
    for op in range(1, size):
        for _ in range(chance.randint(1, 3)):
            consumers[chance.randrange(max(0, op - 50), op)].append(op)
    high, low = ([number() for _ in range(size)] for _ in range(2))
    return Problem(
        high, low, [Edge(op, tuple(readers), cast * number(), cast * number()) for op, readers in enumerate(consumers)]
    )


def test_a_network_against_the_linear_relaxation():
    chance = random.Random(3)
    for number, cast in ((lambda: chance.randint(0, 3), 2), (chance.random, 0.5), (chance.random, 3.0)):
        problem = layered(chance, 800, number, cast)
        assert cheapest(problem).cost == pytest.approx(relaxed(problem), rel=1e-9)


def test_a_network_of_ten_thousand_is_no_worse_after_any_single_change():
    chance = random.Random(4)
    problem = layered(chance, 10_000, lambda: chance.randint(0, 10**13), 1)
    placement = cheapest(problem)
    assert 1000 < sum(placement.low) < 9000
    for op in chance.sample(range(10_000), 20):
        other = list(placement.low)
        other[op] = not other[op]
        assert cost(problem, other) >= placement.cost + other[op]  # a tie would stand in FP32


# Against what others do --------------------------------------------------------------------------------


def test_no_heuristic_is_cheaper():
    chance, strict = random.Random(6), 0
    for _ in range(150):
        size = chance.randint(2, 12)
        lists = chance.choices(["allow", "infer", "clear", "deny", None], weights=(3, 3, 3, 1, 1), k=size)
        graph = Listed(lists, [tuple(chance.choices(range(op), k=min(op, chance.randint(1, 3)))) for op in range(size)])
        high = [INF if colour == "allow" else chance.randint(0, 9) for colour in lists]
        low = [INF if colour in ("deny", None) else chance.randint(0, 9) for colour in lists]
        casts = [
            Edge(op, tuple(readers), chance.randint(0, 9), chance.randint(0, 9))
            for op, readers in enumerate(graph.consumers())
        ]
        problem = Problem(high, low, casts)
        best = cheapest(problem).cost
        for rule in (promoted, gray, painted):
            other = cost(problem, rule(graph))
            assert best <= other, rule.__name__
            strict += best < other
    assert strict > 100


# What is refused ---------------------------------------------------------------------------------------

CONFLICTS = [
    ((0, INF, 0), (0, INF, 0), (), "op 1 is forbidden in both precisions"),
    ((INF, 0), (0, INF), ((0, (1,), 1, INF),), "op 0 must be low, op 1 in FP32", "(0 → 1)"),
    ((0, INF), (INF, 0), ((0, (1,), INF, 1),), "op 1 must be low, op 0 in FP32", "(1 → 0)"),
    ((0, 0, 0, INF, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, INF), ((3, (5,), 1, INF), (7, (5,), INF, 1)),
     "op 3 must be low, op 7 in FP32, and no cast is allowed between them (3 → 5 → 7)", "a finite down or up"),
    ((INF, 0, 0, 0), (0, 0, 0, INF), ((0, (1, 2), 1, INF), (2, (3, 1), 1, INF)), "(0 → 2 → 3)"),
]  # fmt: skip


def test_conflicts_name_their_ops():
    for high, low, tensors, *words in CONFLICTS:
        with refused(PolicyError, *words):
            cheapest(Problem(high, low, [Edge(*tensor) for tensor in tensors]))


REFUSED = [
    (lambda: Problem((1, 2), (1,), ()), "there are 2 high costs and 1 low ones", "each op has one of each"),
    (lambda: Problem((1, math.nan), (1, 2), ()), "high[1] is nan", "a number, or inf"),
    (lambda: Problem((1,), (-INF,), ()), "low[0] is -inf"),
    (lambda: Problem((True,), (1,), ()), "high[0] is True"),
    (lambda: Problem(("1",), (1,), ()), "high[0] is '1'"),
    (lambda: Problem((1,), (None,), ()), "low[0] is None"),
    (lambda: Problem("12", (1, 2), ()), "high is '12'", "a tuple or a list"),
    (lambda: Problem((1,), (1,), None), "tensors is None"),
    (lambda: Problem((1,), (1,), (3,)), "tensors[0] is 3", "it is an Edge"),
    (lambda: Problem((1,), (1,), (Edge(1, (), 1, 1),)), "tensors[0] names op 1", "there are 1 ops"),
    (lambda: Problem((1,), (1,), (Edge(0, (0, 4), 1, 1),)), "tensors[0] names op 4"),
    (lambda: Problem((1e308, 1e308), (0, 0), ()), "more than float64 holds", "in a larger unit"),
    (lambda: Problem((10**400,), (0,), ()), "more than float64 holds"),
    (lambda: Problem((math.nan,), ("x",), (3,)), "3 problems", "1. high[0]", "2. low[0]", "3. tensors[0]"),
    (lambda: Edge(-1, (1,), 1, 1), "producer is -1", "the index of an op"),
    (lambda: Edge(True, (1,), 1, 1), "producer is True"),
    (lambda: Edge(0.0, (1,), 1, 1), "producer is 0.0"),
    (lambda: Edge(0, [1], 1, 1), "consumers are [1]", "a tuple of indices"),
    (lambda: Edge(0, (1, None), 1, 1), "a consumer is None"),
    (lambda: Edge(0, (1,), -1, 1), "down is -1", "a number from 0, or inf"),
    (lambda: Edge(0, (1,), 1, math.nan), "up is nan"),
    (lambda: Edge(0, (1,), 1, False), "up is False"),
    (lambda: Edge(0, (1,), "1", -2), "2 problems", "1. down is '1'", "2. up is -2"),
    (lambda: cost(Problem((1, 2), (1, 2), ()), (True,)), "low is (True,)", "True or False for each of 2 ops"),
    (lambda: cost(Problem((1,), (1,), ()), (1,)), "low is (1,)"),
]  # fmt: skip


def test_what_is_refused():
    for call, *words in REFUSED:
        with refused(PolicyError, *words):
            call()


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse.csgraph", None)
    with refused(UnsupportedError, "the cheapest placement needs scipy", "pip install", "scipy"):
        cheapest(Problem((1,), (0,), ()))
