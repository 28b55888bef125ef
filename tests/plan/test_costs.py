"""What ops cost, against counts by hand; and placements, against all that there are."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo.plan.balance import DEFAULT_SPEEDUP, TABLE, Balance, balance
from mezzo.plan.costs import Costs
from mezzo.plan.cut import cheapest
from mezzo.plan.graph import capture
from mezzo.plan.planning import planned
from mezzo.policy import Policy

from .models import CASES, built

#: Arithmetic takes no time: what counts is what is moved.
EVEN = Balance(fp32_flops_per_byte=1e30, low_speedup=1.0)
#: The low format multiplies ten times as fast, and products outlast what they move.
SLOW = Balance(fp32_flops_per_byte=0.01, low_speedup=10.0)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of autograd functions
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo asks inputs for it
]


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function, *weights):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([torch.randn(shape) for shape in weights])

    def forward(self, *inputs):
        return self.function(*inputs, *(self.weights[index] for index in range(len(self.weights))))


def counted(model, *inputs, policy="O1,bf16", objective=0.0, fused=False, on=EVEN):
    graph = capture(model, inputs, {}, Policy.parse(policy))
    return Costs(graph, on, objective=objective, fused=fused)


def moved(model, *inputs, is_low, policy="O1,bf16", on=EVEN):
    """Return what a model moves whose sources are FP32, and whose ops are all low or all FP32."""
    account = counted(model, *inputs, policy=policy, on=on)
    low = [op.role != "source" and is_low for op in account.graph.ops]
    totals = account.totals(low)
    return totals.moved_bytes - totals.cast_bytes, totals.cast_bytes, totals.kept_bytes


def test_a_linear_layer():
    """Six rows of 8 to 4: forward reads rows, weight and bias; backward makes gradients of weight and bias."""
    given, weight, bias, out = 6 * 8, 4 * 8, 4, 6 * 4
    forward, backward = given + weight + bias + out, (out + given + weight) + (out + bias)
    ops, casts, kept = moved(nn.Linear(8, 4), torch.randn(6, 8), is_low=True)
    assert ops == 2 * (forward + backward)
    assert casts == 6 * given + 2 * 6 * (weight + bias)  # 4 bytes read and 2 written; gradients of weights come back
    assert kept == 2 * given
    ops, casts, kept = moved(nn.Linear(8, 4), torch.randn(6, 8), is_low=False, policy="O1,bf16,fp32=linear")
    assert (ops, casts, kept) == (4 * (forward + backward), 0, 0)


def test_gradients_of_what_is_read():
    """With a gradient of the rows too: it reads the gradient and the weight."""
    given, weight, bias, out = 6 * 8, 4 * 8, 4, 6 * 4
    without, _, _ = moved(nn.Linear(8, 4), torch.randn(6, 8), is_low=True)
    within, _, kept = moved(nn.Linear(8, 4), torch.randn(6, 8, requires_grad=True), is_low=True)
    assert within - without == 2 * (out + weight + given)
    assert kept == 2 * (given + weight)
    with torch.no_grad():
        alone, casts, kept = moved(nn.Linear(8, 4), torch.randn(6, 8), is_low=True)
    assert (alone, casts, kept) == (2 * (given + weight + bias + out), 6 * (given + weight + bias), 0)


@pytest.mark.parametrize("is_low, size", [(True, 2), (False, 4)])
def test_single_ops(is_low, size):
    """Elements, times the size; of sources gradients are taken where they are weights."""
    many = 5 * 16
    table = {
        # what: a function, what it reads besides the weight, elements moved in forward and backward, bytes of others
        "add": (lambda x, w: x + w, (5, 16), 3 * many, 0),  # its gradient is handed on as it is
        "mul": (lambda x, w: x * w, (5, 16), 3 * many + 3 * many, 0),
        "gelu": (functional.gelu, None, 2 * many + 3 * many, 0),
        "relu": (torch.relu, None, 2 * many + 3 * many, 0),
        "sum": (lambda w: w.sum(-1), None, many + 5, 0),
        "flip": (lambda w: w.flip(0), None, 2 * many + 2 * many, 0),
    }
    for name, (function, other, elements, others) in table.items():
        inputs = () if other is None else (torch.randn(other),)
        policy = f"O1,bf16,low={name}" if is_low else "O1,bf16"
        ops, _, _ = moved(Call(function, (5, 16)), *inputs, is_low=is_low, policy=policy)
        assert ops == size * elements + others, name


def test_a_table_is_read_where_it_is_looked_up():
    """Three rows of a thousand; its gradient is a whole table, and what is cast would be, too."""
    ids = torch.tensor([1, 5, 7])
    with torch.no_grad():
        ops, casts, _ = moved(nn.Embedding(1000, 8), ids, is_low=False)
        assert (ops, casts) == (2 * 4 * 24 + 8 * 3, 0)
        ops, casts, _ = moved(nn.Embedding(1000, 8), ids, is_low=True)
        assert (ops, casts) == (2 * 2 * 24 + 8 * 3, 6 * 8000)
    backward = moved(nn.Embedding(1000, 8), ids, is_low=False)[0] - (2 * 4 * 24 + 8 * 3)
    assert backward >= 4 * (24 + 8000)


def test_layer_norm_computes_what_the_format_does_not_say():
    """It reads and writes rows in its own precision; weights and statistics are small."""
    rows = 64 * 128
    model, x = nn.LayerNorm(128), torch.randn(64, 128, requires_grad=True)
    wide, _, _ = moved(model, x, is_low=False)
    narrow, _, _ = moved(model, x, is_low=True, policy="O1,bf16,low=layer_norm")
    forward_and_backward = 2 * rows + 3 * rows
    assert math.isclose(wide, 4 * forward_and_backward, rel_tol=0.05)
    assert math.isclose(narrow, 2 * forward_and_backward, rel_tol=0.05)


def test_products_take_as_long_as_their_arithmetic():
    """The time of a placement is that of its multiplications where these last longer."""
    multiplications = 6 * 8 * 4
    for policy, flops in (("O1,bf16", 0.1), ("O1,bf16,fp32=linear", 0.01)):
        with torch.no_grad():
            account = counted(nn.Linear(8, 4), torch.randn(6, 8), policy=policy, on=SLOW)
        low = cheapest(account.problem).low[: len(account.graph.ops)]
        totals = account.totals(low)
        assert totals.cost - totals.cast_bytes == pytest.approx(2 * multiplications / flops)
    assert EVEN.work(10, 10**9, low=True) == 10
    assert SLOW.work(10, 1, low=True) == 10
    assert SLOW.work(10, 2, low=False) == 200


def test_a_weight_that_two_read_is_cast_once():
    def both(x, y, w):
        return functional.linear(x, w), functional.linear(y, w)

    account = counted(Call(both, (8, 8)), torch.randn(2, 8), torch.randn(3, 8))
    low = cheapest(account.problem).low[: len(account.graph.ops)]
    assert [crossing.num_elements for crossing in account.casts(low)] == [16, 64, 24]


def test_views_of_a_tensor_share_its_cast():
    """The transposed and the reshaped one are of one memory; a repeated one is cast before it is repeated."""

    def function(x, w):
        y = torch.softmax(x, -1)
        return functional.linear(y.view(8, 8), w), y.t() @ w, y[:1].expand(8, 8) @ w

    account = counted(Call(function, (8, 8)), torch.randn(8, 8))
    low = cheapest(account.problem).low[: len(account.graph.ops)]
    assert sorted(crossing.num_elements for crossing in account.casts(low)) == [8, 64, 64]


def test_comparisons_read_what_there_is():
    class Compared(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return (y > 0).sum(), torch.isnan(y), y.argmax(-1), y.bool()

    account = counted(Compared(8, 8), torch.randn(4, 8))
    low = cheapest(account.problem).low[: len(account.graph.ops)]
    assert [crossing.num_elements for crossing in account.casts(low)] == [32, 64, 8]
    account = counted(Compared(8, 8), torch.randn(4, 8), policy="O1,bf16,fp32=argmax")
    low = cheapest(account.problem).low[: len(account.graph.ops)]
    assert 32 in [crossing.num_elements for crossing in account.casts(low)][3:]


def test_integers_follow_what_there_is():
    """The low copy that a product wants would be cheaper to read, but has ties that the numbers have not."""

    def function(x, w):
        y = torch.softmax(x, -1)
        return functional.linear(y, w), y.argmax(-1)

    account = counted(Call(function, (64, 64)), torch.randn(64, 64))
    low = cheapest(account.problem).low
    assert [low[op.index] for op in account.graph.ops if op.name == "argmax"] == [False]


def test_what_is_written_to_a_buffer_is_cast():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("total", torch.zeros(4, 8))

        def forward(self, x):
            y = super().forward(x)
            self.total.add_(y.detach())
            return y

    account = counted(Counting(), torch.randn(4, 8))
    low = cheapest(account.problem).low[: len(account.graph.ops)]
    assert [crossing.num_elements for crossing in account.casts(low)] == [32, 32, 64, 8]


def test_the_cut_is_the_cheapest_of_all_placements():
    """Every op that may be either, in both precisions: as many placements as there are subsets."""
    names = ["chain", "residual", "asked", "chosen", "in place", "expanded", "buffers", "named", "nested checkpoints"]
    tried = 0
    for name in names:
        case = CASES[name]
        model, args, kwargs = built(case)
        graph = capture(model, args, kwargs, Policy.parse(case.policy))
        for objective, fused in itertools.product((0.0, 0.5, 1.0), (False, True)):
            account = Costs(graph, EVEN, objective=objective, fused=fused)
            cut = cheapest(account.problem).low[: len(graph.ops)]
            free = [op.index for op in graph.ops if op.fixed is None]
            assert len(free) <= 10, name
            costs = []
            for chosen in itertools.product((False, True), repeat=len(free)):
                low = [bool(op.fixed) for op in graph.ops]
                for index, is_low in zip(free, chosen, strict=True):
                    low[index] = is_low
                costs.append(account.totals(low).cost)
            assert account.totals(cut).cost == pytest.approx(min(costs)), (name, objective, fused)
            tried += len(costs)
    assert tried > 500


def test_no_rival_is_cheaper():
    for name in ("gpt", "encoder", "chain", "several", "asked"):
        case = CASES[name]
        model, args, kwargs = built(case)
        graph = capture(model, args, kwargs, Policy.parse(case.policy))
        for objective, fused in itertools.product((0.0, 0.5, 1.0), (False, True)):
            account = Costs(graph, EVEN, objective=objective, fused=fused)
            low = cheapest(account.problem).low[: len(graph.ops)]
            rivals = dict(planned(account, low, objective=objective, name=name).totals)
            own = rivals.pop("plan").cost
            assert math.isfinite(own)
            assert all(own <= rival.cost * (1 + 1e-12) for rival in rivals.values()), (name, objective, fused)
            assert math.isfinite(rivals["torch.autocast"].cost)


# What arithmetic costs ---------------------------------------------------------------------------------------------


def test_the_balance_is_what_data_sheets_say():
    """By hand: TFLOP/s over TB/s of FP32, and by how much the low format is faster."""
    for has, per_byte, speedup in (
        (("sm_70",), 15.7 / 0.9, 125 / 15.7),
        (("sm_80",), 19.5 / 2.039, 16),
        (("sm_87",), 31.2 / 0.6, 125 / 31.2),  # as sm_86
        (("sm_90",), 20, 989 / 67),
        (("sm_103",), 75 / 8, 30),  # as sm_100
        (("avx512_bf16", "amx_bf16"), 20, 16),
        (("avx512_bf16",), 20, 2),
        (("avx512_fp16",), 20, 2),
        (("bf16",), 20, 4),
        ((), 20, DEFAULT_SPEEDUP),
        (("sm_60",), 20, DEFAULT_SPEEDUP),
        (("sm_200",), 20, DEFAULT_SPEEDUP),
        (("xpu",), 20, DEFAULT_SPEEDUP),
    ):
        device = balance(has)
        assert device.fp32_flops_per_byte == pytest.approx(per_byte), has
        assert device.low_speedup == pytest.approx(speedup), has
        emulated = balance(has, emulated=True)
        assert emulated.low_speedup == DEFAULT_SPEEDUP
        assert emulated.fp32_flops_per_byte == device.fp32_flops_per_byte
    for row in TABLE:
        assert row.low >= 2 * row.fp32 * 0.999
        assert row.source
