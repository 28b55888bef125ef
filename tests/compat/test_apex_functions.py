"""Casts at ops of models at O1: apex's lists and promotions, cells, and functions that are cast by name."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo.compat.apex import amp
from mezzo.compat.apex.frontend import policy_of
from mezzo.policy.ops.table import APEX

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


def test_every_op_of_apexs_lists_has_apexs_treatment():
    wanted = {"half list": "low", "float list": "fp32", "promote list": "promote", "ban": "ban"}
    # torch's own promotion of element-wise ops is apex's; composed functions are what their parts are.
    native = "add sub mul div interpolate local_response_norm multilabel_soft_margin_loss normalize softmin"
    policy = policy_of("O1")
    for title, ops in APEX.items():
        for op in ops:
            explanation = policy.explain(op)
            assert explanation.treatment in (wanted[title], "native"), op
            assert explanation.treatment != "native" or op in native.split(), op


@inside
def test_the_banned_loss_says_what_to_write():
    with pytest.raises(mezzo.UnsupportedError, match="binary_cross_entropy is banned") as raised:
        functional.binary_cross_entropy(torch.rand(3), torch.ones(3))
    assert "binary_cross_entropy_with_logits" in str(raised.value)
    with amp.disable_casts():
        functional.binary_cross_entropy(torch.rand(3), torch.ones(3))


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
        for decorator, results in expected.items():
            assert made[decorator](half, wide) == results, decorator
        assert made[amp.promote_function](half, half)[:2] == (HALF, HALF)
        with amp.disable_casts():
            for decorator in (amp.half_function, amp.bfloat16_function):
                assert made[decorator](half, wide) == (HALF, FLOAT, FLOAT, FLOAT)

    o1()(body)
    amp.deinitialize()
    assert made[amp.half_function](half, wide) == (HALF, FLOAT, FLOAT, FLOAT)


def test_registered_functions():
    names = ("kernel", "other", "brain", "wide")
    namespace = types.SimpleNamespace(__name__="place", **{name: lambda *xs: xs[0].dtype for name in names})

    class Owner:
        @staticmethod
        def run(x):
            return x.dtype

    class Parent:
        def run(self):
            return self.dtype

    class Heir(Parent):
        pass

    before = dict(vars(namespace))
    plain, softmax = vars(Owner)["run"], functional.softmax
    amp.register_float_function(namespace, "kernel")
    amp.register_half_function(namespace, "other")
    amp.register_bfloat16_function(namespace, "brain")
    amp.register_promote_function(namespace, "wide")
    amp.register_float_function(Owner, "run")
    amp.register_half_function(Heir, "run")
    amp.register_half_function(torch, "softmax")
    amp.register_float_function(torch, "sigmoid")
    x = torch.ones(2, 2)

    def body():
        assert (namespace.kernel(x.half()), namespace.other(x), Owner.run(x.half())) == (FLOAT, HALF, FLOAT)
        assert (namespace.brain(x), namespace.wide(x.half(), x), Heir.run(x)) == (torch.bfloat16, FLOAT, HALF)
        assert functional.softmax is softmax
        assert torch.softmax(x, 0).dtype == x.softmax(0).dtype == functional.softmax(x, 0).dtype == HALF
        assert torch.sigmoid(x.half()).dtype == x.half().sigmoid().dtype == FLOAT

    o1()(body)
    with pytest.raises(mezzo.StateError, match=r"amp\.register_half_function after amp\.initialize"):
        amp.register_half_function(namespace, "kernel")
    amp.deinitialize()
    assert vars(namespace) == before
    assert vars(Owner)["run"] is plain
    assert "run" not in vars(Heir)
    results = o1()(lambda: (namespace.kernel(x.half()), torch.sigmoid(x.half()).dtype))  # nothing of it is remembered
    assert results == (HALF, HALF)


def test_registered_functions_are_of_levels_that_cast_at_ops():
    namespace = types.SimpleNamespace(__name__="place", kernel=lambda x: x.dtype)
    kernel = namespace.kernel
    for level in ("O0", "O3"):
        amp.register_float_function(namespace, "kernel")
        with initialized(network(), opt_level=level):
            assert namespace.kernel is kernel
