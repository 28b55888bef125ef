"""Models over halves under torch.func and torch.compile, beside the same in plain torch."""

import pytest
import torch
from torch import nn

from mezzo.weights.models import store

from .values import BF16, on_grid

#: What torch says of itself while it compiles, exports and differentiates.
compiles = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Attempted to insert a get_attr Node")


def assert_same_values(one, two):
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


def mlp(seed=0):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    for number, param in enumerate(model.parameters()):
        param.data = on_grid(param.shape, 10 * seed + number)
    return model


def halved(model):
    """Store weights in halves, and add no region: whoever casts is torch."""
    names = {param: name for name, param in model.named_parameters() if param.ndim > 1}
    store(dict.fromkeys(names, BF16), names)
    return model


def mlps():
    return mlp(), halved(mlp())


def called(model):
    return lambda params, x: torch.func.functional_call(model, params, (x,))


FUNCTIONS = {
    "functional_call": lambda f, params, x: f(params, x),
    "grad": lambda f, params, x: torch.func.grad(lambda p: f(p, x).square().sum())(params),
    "per sample": lambda f, params, x: torch.vmap(
        torch.func.grad(lambda p, x: f(p, x).square().sum()), in_dims=(None, 0))(params, x),
    "jvp": lambda f, params, x: torch.func.jvp(
        lambda p: f(p, x), (params,), ({k: torch.ones_like(v) for k, v in params.items()},)),
    "jacrev": lambda f, params, x: torch.func.jacrev(lambda p: f(p, x))(params),
    "jacfwd": lambda f, params, x: torch.func.jacfwd(lambda p: f(p, x))(params),
    "vjp": lambda f, params, x: torch.func.vjp(lambda p: f(p, x), params)[1](torch.ones(5, 4)),
    "linearize": lambda f, params, x: torch.func.linearize(lambda p: f(p, x), params)[1](
        {k: torch.ones_like(v) for k, v in params.items()}),
    "functionalize": lambda f, params, x: torch.func.functionalize(f)(params, x),
    "hessian": lambda f, params, x: torch.func.hessian(lambda b: f({**params, "2.bias": b}, x).square().sum())(
        params["2.bias"]),
}  # fmt: skip


@compiles
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("in_region", [False, True])
def test_transforms_of_torch_func_compute_what_they_do_of_plain_parameters(name, in_region):
    seen = []
    for model in mlps():
        params = {k: v.detach() for k, v in model.named_parameters()}
        with torch.autocast("cpu", dtype=BF16, enabled=in_region):
            seen.append(FUNCTIONS[name](called(model), params, on_grid((5, 6), 9)))
    torch.testing.assert_close(*seen, rtol=0, atol=0)


def test_ensembles_are_stacked_and_mapped_over():
    seen = []
    for is_prepared in (False, True):
        models = [mlp(seed) for seed in range(3)]
        for model in models if is_prepared else ():
            halved(model)
        params, buffers = torch.func.stack_module_state(models)
        base = mlp()
        call = torch.vmap(
            lambda p, b, x, base=base: torch.func.functional_call(base, (p, b), (x,)), in_dims=(0, 0, None)
        )
        out = call(params, buffers, on_grid((5, 6), 9))
        gradients = torch.autograd.grad(out.square().sum(), list(params.values()))
        seen.append((out, gradients))
    torch.testing.assert_close(*seen, rtol=0, atol=0)


@compiles
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("in_region", [False, True])
def test_compiled_models_compute_and_train(backend, in_region):
    torch._dynamo.reset()
    seen = []
    for model in mlps():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        out = []
        for number in range(2):
            with torch.autocast("cpu", dtype=BF16, enabled=in_region):
                y = compiled(on_grid((5, 6), number))
            out.append(y)
            optimizer.zero_grad()
            y.float().sum().backward()
            optimizer.step()
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(param.clone().bfloat16())  # no ties: then both cast alike
        seen.append((out, list(model.parameters())))
    tolerance = {"rtol": 0, "atol": 0} if backend != "inductor" else {}
    for one, two in zip(seen[0][0], seen[1][0], strict=True):
        torch.testing.assert_close(one, two, **tolerance)
    for one, two in zip(seen[0][1], seen[1][1], strict=True):
        torch.testing.assert_close(one.detach().clone(), two.detach().clone(), **tolerance)


@compiles
def test_a_compiled_step_of_an_optimizer_writes_both_halves():
    torch._dynamo.reset()
    seen = []
    for model in mlps():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for number in range(2):
            optimizer.zero_grad()
            model(on_grid((5, 6), number)).square().sum().backward()
            step()
        seen.append(model)
    assert_same_values(*seen)
