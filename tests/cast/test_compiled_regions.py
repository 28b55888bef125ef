"""Regions that are made inside a compiled function: the session's, a prepared model's, a plain one."""

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import mezzo

from ..support.tables import thinned

POLICIES = [
    "O0",
    "O1,dtype=bfloat16,emulate=true",
    "O1,dtype=bfloat16,emulate=false,lists=device",
    "O1,dtype=float16,emulate=true,norms=fp32_math,low=gelu",
    "O2,dtype=bfloat16,emulate=false",
    "O2,dtype=float16,emulate=true",
    "O3,dtype=bfloat16,emulate=true",
    "O1,dtype=bfloat16,emulate=true,output_dtype=float32",
    "O2,dtype=bfloat16,emulate=true,autocast=true",
]


def region_maker(kind, model, policy):
    if kind == "session":
        return mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy).autocast
    handle = mezzo.prepare(model, policy)
    return handle.autocast if kind == "prepared" else lambda: mezzo.autocast(policy)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("policy, kind", thinned(POLICIES, ["session", "prepared", "plain"], every=4))
def test_a_region_made_inside_a_whole_graph(policy, kind):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    region, x = region_maker(kind, model, policy), torch.randn(4, 8)

    def run(x):
        with region():
            return model(x).softmax(-1)

    def results(function):
        out = function(x)
        out.float().square().sum().backward()
        found = [out, *(param.grad for param in model.parameters())]
        model.zero_grad()
        return found

    eager = results(run)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for a, b in zip(results(compiled), eager, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    before = counters["stats"]["unique_graphs"]
    results(compiled)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("scale", ["64", "dynamic(init=1024,interval=2)", "none"])
def test_layers_in_a_graph_know_the_region_around_them_whatever_the_loss_scale(scale):
    torch.compiler.reset()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.MixedPrecision(model, optimizer, f"O2,dtype=float16,emulate=true,loss_scale={scale}")

    def run(x):
        with amp.autocast():
            return model(x).float().square().mean()

    out = torch.compile(run, backend="eager")(torch.ones(4, 3))
    assert out.shape == ()
    assert torch.equal(out, run(torch.ones(4, 3)))


#: Where layers enter regions of their own, or the model's outputs are cast.
BREAKING = [
    "O1,dtype=float16,emulate=true,norms=fp32_math,low=gelu",
    "O1,dtype=bfloat16,emulate=true,output_dtype=float32",
    "O1,dtype=bfloat16,emulate=false,output_dtype=bfloat16,lists=device",
    "O1,dtype=bfloat16,emulate=true,fp32_module=3",
    "O2,dtype=bfloat16,emulate=true,autocast=true",
    "O3,dtype=float16,emulate=false,autocast=true",
    "O1,dtype=bfloat16,emulate=false,lists=device,fp32_module=0",
    "O2,dtype=float16,emulate=true,fp32_module=3",
]


@torch.compiler.disable
def break_the_graph():
    pass


class Block(contextlib.AbstractContextManager):
    """A context that torch.compile follows, and cannot leave to Python when the graph breaks inside it."""

    def __exit__(self, *exception):
        pass


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo hides, unless warnings are errors
@pytest.mark.parametrize("policy, place", thinned(BREAKING, ["inside", "around"], every=3))
def test_where_torch_leaves_a_function_to_python_it_computes_what_uncompiled_code_does(policy, place):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    handle, x = mezzo.prepare(model, policy), torch.randn(4, 8)
    around, inside = (handle.autocast, contextlib.nullcontext) if place == "around" else (
        contextlib.nullcontext, handle.autocast
    )  # fmt: skip

    def run(x):
        with inside():
            y = model(x)
            with Block():
                y = y.float().tanh()  # methods that C defines: torch 2.13 guards none of them as an argument
                break_the_graph()
                return (y.softmax(-1) + (y @ y.t()).sum()).float().square().mean()

    def results(function):
        model.zero_grad()
        with around():
            out = function(x)
        out.backward()
        return [out.detach(), *(param.grad for param in model.parameters())]

    expected, compiled = results(run), torch.compile(run, backend="eager")
    for _ in range(2):  # compiled, and what was compiled
        for a, b in zip(results(compiled), expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("policy", [BREAKING[3], BREAKING[6]])
def test_a_graph_that_has_to_be_whole_is_refused_by_torch_where_layers_enter_regions_of_their_own(policy):
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    handle = mezzo.prepare(model, policy)

    def run(x):
        with handle.autocast():
            return model(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="_enter_region"):
        torch.compile(run, backend="eager", fullgraph=True)(torch.randn(4, 8))


def in_a_loop(model, region):
    def run(x):
        with region():
            for layer in model:
                x = layer(x)
            return x.softmax(-1)

    return run


def left_by_exceptions(model, region):
    def run(x):
        try:
            with region():
                y = model(x)
                raise KeyError
        except KeyError:
            z = y.float() @ y.float().t() + x @ x.t()
        with region(), contextlib.ExitStack() as stack:
            stack.enter_context(region())
            break_the_graph()
            return z.float() @ model(x).float()

    return run


def entered_by_hand(model, region):
    def run(x):
        inside = region()
        inside.__enter__()
        y = model(x)
        z = (y.float() @ y.float().t()).softmax(-1)
        break_the_graph()
        z = z.float() @ model(x.tanh()).float()
        inside.__exit__(None, None, None)
        return z @ z.t() + x @ x.t()

    return run


def behind_a_function(model, region):
    def piece(x):
        y = model(x)
        break_the_graph()
        return (y.float() @ y.float().t()).softmax(-1)

    def run(x):
        with region(), region():
            y = piece(x)
        return y.float() @ y.float().t()

    return run


SLOWER = (left_by_exceptions, entered_by_hand, behind_a_function)
PROGRAMS = [in_a_loop, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOWER)]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo hides, unless warnings are errors
@pytest.mark.parametrize("program", PROGRAMS)
def test_policies_one_after_the_other_in_one_process(program):
    """More than torch compiles of one function: what it then runs again is to be left and entered as before."""
    torch.compiler.reset()
    x = torch.randn(4, 8)
    with torch._dynamo.config.patch(recompile_limit=2):
        for policy in BREAKING:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
            run = program(model, mezzo.prepare(model, policy).autocast)

            def results(function):
                model.zero_grad()  # noqa: B023 - called before the next one
                out = function(x)
                out.float().square().sum().backward()
                return [out.detach(), *(param.grad for param in model.parameters())]  # noqa: B023

            expected, compiled = results(run), torch.compile(run, backend="eager")
            for _ in range(2):
                for a, b in zip(results(compiled), expected, strict=True):
                    assert a.dtype == b.dtype, policy
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=policy)
                assert not torch.is_autocast_enabled("cpu")
                assert torch.overrides._get_current_function_mode_stack() == []


#: Under the first two no mode and no dtype tells the policies of a model apart.
REPLACED = [
    ("O1,dtype=bfloat16,emulate=false,lists=device", "O1,dtype=bfloat16,emulate=false,lists=device,fp32_module=3"),
    ("O1,dtype=bfloat16,emulate=false,lists=device,fp32_module=3", "O1,dtype=bfloat16,emulate=false,lists=device"),
    ("O1,dtype=bfloat16,emulate=true", "O1,dtype=bfloat16,emulate=true,low=softmax@3,fp32=gelu@1"),
    ("O2,dtype=bfloat16,emulate=false", "O2,dtype=bfloat16,emulate=false,output_dtype=bfloat16"),
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("first, second", REPLACED)
def test_another_policy_of_a_compiled_model_is_seen(first, second):
    """torch guards no hooks."""
    torch.compiler.reset()
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)), torch.randn(4, 8)
    compiled = torch.compile(model, backend="eager")
    for policy in (first, second):
        handle = mezzo.prepare(model, policy)
        with handle.autocast(), torch.no_grad():
            expected, found = model(x), compiled(x)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        handle.remove()
    assert compiled(x).dtype == torch.float32


def compiled_product():
    """A compiled function of a batch of 8 columns and a policy."""
    weight = torch.randn(8, 8)

    def run(x, policy):
        with mezzo.autocast(policy):
            return x @ weight

    return torch.compile(run, backend="eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
def test_an_equal_policy_compiles_nothing_new_and_another_one_does():
    torch.compiler.reset()
    x, compiled = torch.randn(4, 8), compiled_product()
    assert compiled(x, mezzo.Policy.O1("bfloat16", emulate=True)).dtype == torch.bfloat16
    before = counters["stats"]["unique_graphs"]
    compiled(x, mezzo.Policy.O1("bfloat16", emulate=True))
    assert counters["stats"]["unique_graphs"] == before
    assert compiled(x, mezzo.Policy.O1("bfloat16", emulate=True).fp32("matmul")).dtype == torch.float32
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
def test_policies_of_several_loss_scales_in_one_process():
    torch.compiler.reset()
    x, compiled = torch.randn(4, 8), compiled_product()
    before = counters["stats"]["unique_graphs"]
    for text in ("dynamic(init=65536)", "dynamic(init=64,interval=3)", "128.0", "none"):  # whose numbers differ
        for dtype in (torch.float16, torch.bfloat16):
            assert compiled(x, mezzo.Policy.O1(dtype, emulate=True, loss_scale=text)).dtype == dtype
    assert counters["stats"]["unique_graphs"] == before + 2  # a region has no loss scale


def test_the_text_of_a_region_is_the_policy_without_its_loss_scale():
    policy = mezzo.Policy.parse("O2,dtype=float16,loss_scale=128.0,norms=fp32_math,low=gelu")
    assert policy.region_text() == "O2,dtype=float16,norms=fp32_math,low=gelu"
    assert mezzo.Policy.parse(policy.region_text()) == policy.evolve(loss_scale="dynamic")
