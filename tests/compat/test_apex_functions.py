"""Casts at ops of models at O1: apex's lists and promotions, cells, and functions that are cast by name."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo.compat.apex import amp
from mezzo.compat.apex.options import policy_of
from mezzo.policy.ops.lists import APEX

from .programs import initialized, network

pytestmark = pytest.mark.usefixtures("emulating")

HALF, FLOAT = torch.float16, torch.float32


class Calling(nn.Module):
    """Calls a function in its forward pass, where ops are cast."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, call):
        return call()


def o1():
    model = Calling()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    return model


def inside(test):
    """Run a test in the forward pass of a model at O1."""

    @functools.wraps(test)
    def run():
        o1()(test)

    return run


def both(shape):
    return [torch.randn(shape).to(dtype).requires_grad_() for dtype in (HALF, FLOAT)]


@inside
def test_products_are_half_and_their_gradients_have_the_inputs_dtype():
    calls = {
        "linear": lambda x: functional.linear(x, torch.randn(4, 8)),
        "mm": lambda x: x @ torch.randn(8, 3),
        "torch.mm": lambda x: torch.mm(x, torch.randn(8, 3)),
        "x.mm": lambda x: x.mm(torch.randn(8, 3)),
        "matmul": lambda x: torch.matmul(x, torch.randn(8)),
        "bmm": lambda x: torch.bmm(x[None], torch.randn(1, 8, 2)),
        "addmm": lambda x: torch.addmm(torch.randn(2, 3), x, torch.randn(8, 3)),
        "conv1d": lambda x: functional.conv1d(x[None], torch.randn(1, 2, 3)),
        "conv2d": lambda x: functional.conv2d(x[None, None], torch.randn(1, 1, 2, 2)),
        "prelu": lambda x: functional.prelu(x, torch.randn(1)),
        "Linear": nn.Linear(8, 3),
    }
    for name, call in calls.items():
        for x in both((2, 8)):
            out = call(x)
            assert out.dtype == HALF, name
            out.float().sum().backward()
            assert x.grad.dtype == x.dtype, name


@inside
def test_what_overflows_or_sums_is_float():
    calls = {
        "softmax": lambda x: functional.softmax(x, 1), "log_softmax": lambda x: x.log_softmax(1),
        "exp": torch.exp, "log": lambda x: x.abs().log(), "pow": lambda x: x**3, "sum": torch.sum, "prod": torch.prod,
        "cumsum": lambda x: x.cumsum(1), "norm": torch.norm, "std": torch.std, "var": lambda x: x.var(),
        "layer_norm": lambda x: functional.layer_norm(x, (8,)), "group_norm": lambda x: functional.group_norm(x, 2),
        "mse": lambda x: functional.mse_loss(x, torch.zeros_like(x)), "softplus": functional.softplus,
        "cross_entropy": lambda x: functional.cross_entropy(x, torch.zeros(2, dtype=torch.int64)),
        "l1": lambda x: functional.l1_loss(x, x), "interpolate": lambda x: functional.interpolate(x[None], 3),
        "cosine_similarity": lambda x: functional.cosine_similarity(x, x),
        "with logits": lambda x: functional.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    }  # fmt: skip
    for name, call in calls.items():
        for x in both((2, 8)):
            out = call(x)
            assert out.dtype == FLOAT, name
            out.sum().backward()
            assert x.grad.dtype == x.dtype, name


def test_every_op_of_apexs_lists_has_apexs_treatment():
    wanted = {"half list": "low", "float list": "fp32", "promote list": "promote", "ban": "ban"}
    # torch's own promotion of element-wise ops is apex's; composed functions are what their parts are.
    native = "add sub mul div interpolate local_response_norm multilabel_soft_margin_loss normalize softmin"
    policy = policy_of("O1")
    for title, ops in APEX.items():
        for op in ops:
            found = policy.explain(op)
            assert found.treatment in (wanted[title], "native"), op
            assert found.treatment != "native" or op in native.split(), op


@inside
def test_what_is_on_no_list_matches_its_input():
    for call in (functional.relu, functional.max_pool1d, torch.sigmoid, torch.tanh, torch.mean):
        for x in both((2, 8)):
            out = call(x, 2) if call is functional.max_pool1d else call(x)
            assert out.dtype == x.dtype, call


@inside
def test_mixed_pairs_are_promoted():
    half, wide = torch.randn(3).half(), torch.randn(3)
    for call in (torch.add, torch.mul, torch.div, torch.atan2, torch.dot):
        for pair, dtype in (((half, half), HALF), ((half, wide), FLOAT), ((wide, half), FLOAT), ((wide, wide), FLOAT)):
            assert call(*pair).dtype == dtype, call
    for call in (torch.cat, torch.stack):
        assert call([half, half]).dtype == HALF
        assert call([half, wide]).dtype == call((wide, half)).dtype == FLOAT
    assert half.clone().add_(wide).dtype == HALF  # what is written keeps its dtype
    assert half.clone().exp_().dtype == HALF  # an error in apex
    assert wide.clone().mul_(half).dtype == FLOAT
    assert torch.equal(half > wide, half.float() > wide)


@inside
def test_the_banned_loss_says_what_to_write():
    with pytest.raises(mezzo.UnsupportedError, match="binary_cross_entropy is banned") as raised:
        functional.binary_cross_entropy(torch.rand(3), torch.ones(3))
    assert "binary_cross_entropy_with_logits" in str(raised.value)
    with amp.disable_casts():
        functional.binary_cross_entropy(torch.rand(3), torch.ones(3))


@inside
def test_cells_and_recurrent_layers_are_half():
    x = torch.randn(5, 2, 4)
    for cell in (nn.RNNCell(4, 3), nn.LSTMCell(4, 3), nn.GRUCell(4, 3)):
        for given in (x[0], x[0].half()):
            given = given.clone().requires_grad_()
            out = cell(given)
            out = out[0] if isinstance(out, tuple) else out
            assert out.dtype == HALF
            out.float().sum().backward()
            assert given.grad.dtype == given.dtype
            assert all(param.grad.dtype == FLOAT for param in cell.parameters())
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        for options in ({}, {"bidirectional": True}, {"num_layers": 2, "bias": False}):
            assert kind(4, 3, **options)(x)[0].dtype == HALF


def test_decorated_functions():
    def dtypes(x, y):
        return x.dtype, y.dtype, (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, torch.exp(torch.ones(1)).dtype

    half, wide = torch.ones(2).half(), torch.ones(2)
    expected = {
        amp.half_function: (HALF,) * 4,
        amp.bfloat16_function: (torch.bfloat16,) * 4,
        amp.float_function: (FLOAT,) * 4,
        amp.promote_function: (FLOAT, FLOAT, HALF, FLOAT),
    }
    made = {decorator: decorator(dtypes) for decorator in expected}
    assert all(function(half, wide) == (HALF, FLOAT, FLOAT, FLOAT) for function in made.values())

    def body():
        assert dtypes(half, wide) == (HALF, FLOAT, HALF, FLOAT)
        for decorator, found in expected.items():
            assert made[decorator](half, wide) == found, decorator
        assert made[amp.promote_function](half, half)[:2] == (HALF, HALF)
        with amp.disable_casts():
            for decorator in (amp.half_function, amp.bfloat16_function):
                assert made[decorator](half, wide) == (HALF, FLOAT, FLOAT, FLOAT)

    o1()(body)
    amp.deinitialize()
    assert made[amp.half_function](half, wide) == (HALF, FLOAT, FLOAT, FLOAT)


def test_registered_functions():
    names = ("kernel", "other", "brain", "wide")
    place = types.SimpleNamespace(__name__="place", **{name: lambda *xs: xs[0].dtype for name in names})

    class Owner:
        @staticmethod
        def run(x):
            return x.dtype

    class Parent:
        def run(self):
            return self.dtype

    class Heir(Parent):
        pass

    before = dict(vars(place))
    plain, softmax = vars(Owner)["run"], functional.softmax
    amp.register_float_function(place, "kernel")
    amp.register_half_function(place, "other")
    amp.register_bfloat16_function(place, "brain")
    amp.register_promote_function(place, "wide")
    amp.register_float_function(Owner, "run")
    amp.register_half_function(Heir, "run")
    amp.register_half_function(torch, "softmax")
    amp.register_float_function(torch, "sigmoid")
    x = torch.ones(2, 2)

    def body():
        assert (place.kernel(x.half()), place.other(x), Owner.run(x.half())) == (FLOAT, HALF, FLOAT)
        assert (place.brain(x), place.wide(x.half(), x), Heir.run(x)) == (torch.bfloat16, FLOAT, HALF)
        assert functional.softmax is softmax
        assert torch.softmax(x, 0).dtype == x.softmax(0).dtype == functional.softmax(x, 0).dtype == HALF
        assert torch.sigmoid(x.half()).dtype == x.half().sigmoid().dtype == FLOAT

    o1()(body)
    with pytest.raises(mezzo.StateError, match=r"amp\.register_half_function after amp\.initialize"):
        amp.register_half_function(place, "kernel")
    amp.deinitialize()
    assert vars(place) == before
    assert vars(Owner)["run"] is plain
    assert "run" not in vars(Heir)
    found = o1()(lambda: (place.kernel(x.half()), torch.sigmoid(x.half()).dtype))  # nothing of it is remembered
    assert found == (HALF, HALF)


def test_registered_functions_are_of_o1():
    place = types.SimpleNamespace(__name__="place", kernel=lambda x: x.dtype)
    kernel = place.kernel
    for level in ("O0", "O2", "O3"):
        amp.register_float_function(place, "kernel")
        with initialized(network(), opt_level=level):
            assert place.kernel is kernel
