"""What mezzo's functions, classes and modules are called makes no difference to what is said of a pass."""

import inspect
import sys
from contextlib import contextmanager
from types import CodeType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.overflow import locate

POLICIES = (
    "O1,dtype=bfloat16,emulate=true,norms=fp32_math",
    "O1,dtype=float16,emulate=true,low=softmax",
    "O2,dtype=bfloat16,emulate=true,fp32_module=second",
)


class Checkpointed(nn.Module):
    """A weight that is used twice, a recurrent cell, a region of the model's own, checkpoints of both kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.cell = nn.Linear(8, 8), nn.Linear(8, 8), nn.LSTMCell(8, 8)

    def forward(self, x):
        x = self.first(checkpoint(self.first, x, use_reentrant=False))
        with mezzo.autocast("O1,dtype=bfloat16,emulate=true,norms=fp32_math"):
            contexts = {"use_reentrant": False, "context_fn": mezzo.checkpoint_contexts}
            x = checkpoint(lambda y: self.second(y.float()).softmax(-1), x, **contexts)
        return self.cell(x)[0]


def _renamed(code):
    consts = tuple(_renamed(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    name = code.co_name if code.co_name.startswith("__") else "renamed"
    return code.replace(co_name=name, co_qualname=name, co_consts=consts)


@contextmanager
def all_renamed():
    """Rename every function, class and module of mezzo inside the block."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("mezzo.")}
    classes = {
        c for m in modules.values() for c in vars(m).values() if inspect.isclass(c) and c.__module__ == m.__name__
    }
    members = [member for each in (*modules.values(), *classes) for member in vars(each).values()]
    members = [getattr(member, "__func__", getattr(member, "fget", member)) for member in members]
    functions = {
        inner
        for member in members
        for inner in (member, getattr(member, "__wrapped__", None))
        if inspect.isfunction(inner) and inner.__module__ in modules
    }
    nodes = {c._backward_cls for c in classes if issubclass(c, torch.autograd.Function)}
    codes = {function: function.__code__ for function in functions}
    names = {c: c.__name__ for c in classes | nodes}
    assert {"_cast", "cast_floating", "emulate"} <= {code.co_name for code in codes.values()}
    assert {"_FurtherUse", "_FurtherUseBackward"} <= set(names.values())
    try:
        for function, code in codes.items():
            function.__code__ = _renamed(code)
        for each in names:
            each.__name__ = "Renamed"
        for number, module in enumerate(modules.values()):
            module.__name__ = f"mezzo.renamed.number{number}"
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code
        for each, name in names.items():
            each.__name__ = name
        for name, module in modules.items():
            module.__name__ = name


@pytest.mark.parametrize("policy", POLICIES)
def test_renamed_helpers_explain_the_same(policy):
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(4, 8)
    plain = mezzo.explain(model, x, policy)
    assert {cast.by for cast in plain.casts} >= {"policy", "emulation", "model"}
    with all_renamed():
        renamed = mezzo.explain(model, x, policy)
    assert renamed == plain
    assert renamed == plain


@pytest.mark.parametrize("scale, gain", [(2.0**40, 1.0), (1.0, 1e5)])
def test_renamed_helpers_locate_the_same(scale, gain):
    def run(policy):
        torch.manual_seed(0)
        model = Checkpointed()
        x = gain * torch.randn(4, 8)
        prepared = mezzo.prepare(model, policy)

        def fn():
            with prepared.autocast():
                return model(x).float().square().sum()

        return locate(fn, model, loss_scale=scale, policy=policy)

    policy = "O1,dtype=float16,emulate=true"
    plain = run(policy)
    assert plain is not None
    with all_renamed():
        assert run(policy) == plain
