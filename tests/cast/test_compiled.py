"""torch.compile with a region outside or inside of it: what it computes is what eager code does, bit for bit."""

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import mezzo
from mezzo import Policy

from ..support.products import Products
from .models import Block, Speech, Tied, assert_same, data, seeded, speech_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of autograd functions
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # which Dynamo looks at, unless warnings are errors
    pytest.mark.filterwarnings("ignore:Dynamo"),  # what it cannot trace it runs in Python
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # inductor's own imports
]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


def mixed():
    return seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)))


def results(function, model, x):
    """Return the output, and the gradients of a loss of it."""
    model.zero_grad()
    out = function(x)
    out.float().square().sum().backward()
    return [out.detach(), *(param.grad for param in model.parameters())]


def test_a_region_made_inside_a_whole_graph():
    """Layers in the graph know the region around them, whatever the loss scale."""
    model, x, counter = mixed(), data(4, 8), CompileCounterWithBackend("eager")
    policy = "O2,dtype=float16,emulate=true,loss_scale=dynamic(init=64)"
    region = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy).autocast

    def run(x):
        with region():
            return model(x).softmax(-1)

    eager = results(run, model, x)
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for _ in range(2):
        assert_same(results(compiled, model, x), eager)
    assert counter.frame_count == 1


WHOLE_GRAPH = [
    ("O1,dtype=float16,emulate=true", "inside", "aot_eager"),
    ("O1,dtype=bfloat16,low=softmax,fp32=gelu", "outside", "eager"),
    # Inductor's first compilation takes ten seconds where it has kept none yet.
    pytest.param("O1,dtype=float16,emulate=true", "outside", "inductor", marks=pytest.mark.slow),
    pytest.param("O1,dtype=bfloat16,low=softmax,fp32=gelu", "inside", "inductor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("policy, where, backend", WHOLE_GRAPH)
def test_one_graph_with_the_region_outside_or_inside(policy, where, backend):
    model, x, counter = seeded(Block), data(4, 8), CompileCounterWithBackend(backend)

    def inside(y):
        with mezzo.autocast(policy, "cpu"):
            return model(y)

    compiled = torch.compile(model if where == "outside" else inside, backend=counter, fullgraph=True)
    with mezzo.autocast(policy, "cpu"):
        expected, out = model(x), compiled(x)
    assert counter.frame_count == 1
    assert out.dtype == expected.dtype
    # inductor fuses: 4 units in the last place of the compute dtype, at values up to 4
    slack = 16 * torch.finfo(Policy.parse(policy).dtype).eps if backend == "inductor" else 0
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=slack)


SESSIONS = [
    (Block, "O2,dtype=float16,emulate=false,loss_scale=128", "eager"),
    (Tied, "O1,dtype=bfloat16,emulate=true,low=gelu,fp32=linear", "aot_eager"),
]


@pytest.mark.parametrize("build, policy, backend", SESSIONS)
def test_compiled_models_have_the_gradients_of_eager_ones(build, policy, backend):
    """Of two micro-batches, those of a weight that is used several times too."""

    def gradients(wrap):
        model = seeded(build)
        amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        run, x = wrap(model), data(8, build.width).requires_grad_()
        for number in (1, 2):
            with amp.autocast():
                loss = run(x * number).float().square().mean()
            amp.backward(loss)
        return [x.grad, *(p.grad for p in model.parameters())]

    assert_same(gradients(lambda model: torch.compile(model, backend=backend)), gradients(lambda model: model))


#: Where layers enter regions of their own, or the model's outputs are cast.
BREAKING = [
    "O1,dtype=float16,emulate=true,norms=fp32_math,low=gelu",
    "O1,dtype=bfloat16,emulate=false,output_dtype=bfloat16,lists=device",
    "O1,dtype=bfloat16,emulate=true,fp32_module=3",
]


@torch.compiler.disable
def break_the_graph():
    pass


class Followed(contextlib.AbstractContextManager):
    """A context that torch.compile follows, and cannot leave to Python when the graph breaks inside it."""

    def __exit__(self, *exception):
        pass


@pytest.mark.parametrize("policy, around", [(BREAKING[0], False), (BREAKING[1], True)])
def test_where_torch_leaves_a_function_to_python_it_computes_what_uncompiled_code_does(policy, around):
    model, x = mixed(), data(4, 8)
    handle = mezzo.prepare(model, policy)
    nothing = contextlib.nullcontext
    outside, inside = (handle.autocast, nothing) if around else (nothing, handle.autocast)

    def run(x):
        with inside():
            y = model(x)
            with Followed():
                y = y.float().tanh()  # methods that C defines: torch 2.13 guards none of them as an argument
                break_the_graph()
                return (y.softmax(-1) + (y @ y.t()).sum() / 64).float()

    def within(function):
        def call(x):
            with outside():
                return function(x)

        return results(call, model, x)

    expected, compiled = within(run), torch.compile(run, backend="eager")
    for _ in range(2):  # compiled, and what was compiled
        assert_same(within(compiled), expected)


def in_a_loop(model, region):
    def run(x):
        with region():
            for layer in model:
                x = layer(x)
            return x.softmax(-1)

    return run


@pytest.mark.slow
def test_policies_one_after_the_other_in_one_process():
    """More than torch compiles of one function: what it then runs again is to be left and entered as before."""
    x = data(4, 8)
    with torch._dynamo.config.patch(recompile_limit=1):
        for policy in BREAKING[1:]:
            model = mixed()
            run = in_a_loop(model, mezzo.prepare(model, policy).autocast)
            expected, compiled = results(run, model, x), torch.compile(run, backend="eager")
            for _ in range(2):
                for a, b in zip(results(compiled, model, x), expected, strict=True):
                    assert a.dtype == b.dtype, policy
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=policy)
                assert not torch.is_autocast_enabled("cpu")
                assert torch.overrides._get_current_function_mode_stack() == []


def test_another_policy_of_a_compiled_model_is_seen():
    """torch guards no hooks, and neither mode nor dtype tells these two policies of a model apart."""
    model, x = mixed(), data(4, 8)
    compiled = torch.compile(model, backend="eager")
    for rule in ("", ",fp32_module=3"):
        policy = f"O1,dtype=bfloat16,emulate=false,lists=device{rule}"
        handle = mezzo.prepare(model, policy)
        with handle.autocast(), torch.no_grad():
            assert_same([compiled(x)], [model(x)])
        handle.remove()
    assert compiled(x).dtype == torch.float32


def test_an_equal_policy_compiles_nothing_new_and_another_one_does():
    """Inside compiled code it is read anew."""
    x, counter, low = data(4, 8), CompileCounterWithBackend("eager"), Policy.O1("bfloat16", emulate=True).low("exp")
    outside = torch.compile(torch.exp, backend=counter, fullgraph=True)

    @torch.compile(backend=counter, fullgraph=True)
    def inside(y, policy):
        with mezzo.autocast(policy, "cpu"):
            return torch.exp(y)

    for at, function in enumerate((lambda policy: inside(x, policy), lambda policy: outside(x))):
        seen = []
        for policy in (low, Policy.parse(str(low)), low.fp32("exp"), low):
            with mezzo.autocast(policy, "cpu"):
                seen.append((function(policy).dtype, counter.frame_count - 2 * at))
        assert seen == [(torch.bfloat16, 1), (torch.bfloat16, 1), (torch.float32, 2), (torch.bfloat16, 2)]
    for text in ("dynamic(init=64,interval=3)", "none"):  # a region has no loss scale
        with mezzo.autocast(low, "cpu"):
            assert inside(x, low.evolve(loss_scale=text)).dtype == torch.bfloat16
    assert counter.frame_count == 4


@pytest.mark.parametrize(
    "policy",
    [
        "O2,dtype=float16,emulate=true,fp32_module=norm",
        "O1,dtype=bfloat16,emulate=true,fp32_param=*.weight",
        "O1,dtype=bfloat16,fp8_param=*weight",
    ],
)
def test_new_tensors_compile_nothing_anew(policy):
    """Each batch is another tensor: nothing compiled may depend on which one it is."""
    model, counter, counts, batches = Block(), CompileCounterWithBackend("eager"), [], torch.randn(3, 4, 8).unbind()
    model.register_buffer("weight", torch.ones(8))  # of which there is no product
    handle = mezzo.prepare(model, policy)
    compiled = torch.compile(model, backend=counter)
    for batch in batches:  # all of them live, so that no number of an object comes twice
        with handle.autocast():
            compiled(batch).float().sum().backward()
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * 3


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16,fp32=linear", "O1,dtype=float16,emulate=true"])
def test_compiled_code_differentiates_products_in_the_precision_they_have_in_eager(policy):
    """torch.compile would trace their gradients under the autocast around the call."""
    weight = torch.randn(16, 16, requires_grad=True)
    compiled = torch.compile(lambda y: functional.linear(y, weight), backend="aot_eager")
    with mezzo.autocast(policy, "cpu"):
        loss = compiled(data(8, 16)).float().square().sum()
    with Products() as products:
        loss.backward()
    assert set(products.dtypes) == {"float32"}


def test_a_region_may_be_entered_for_the_first_time_while_torch_compile_traces():
    policy = "O1,dtype=bfloat16,emulate=true,fp32=tanh,low=softplus"  # in no other test

    def run(y):
        with mezzo.autocast(policy, "cpu"):
            return functional.softplus(torch.tanh(y) @ y.mT)

    output = torch.compile(run, backend="eager", fullgraph=True)(data(8, 16))
    assert output.dtype == torch.bfloat16
    assert_same([output], [run(data(8, 16))])


@pytest.mark.parametrize(
    "policy",
    ["O1,dtype=bfloat16,emulate=false,fp32=*,low=linear", "O2,dtype=bfloat16,emulate=true,fp32=linear,low=mm+addmm"],
)
def test_what_compiled_code_calls_is_not_treated_a_second_time(policy):
    """Its graph has mm where the model says linear, and the policy has another opinion of mm."""
    compiled = torch.compile(functional.linear, backend="aot_eager", fullgraph=True)
    leaves = [data(3, 9).bfloat16().requires_grad_(), data(4, 9, seed=2).bfloat16().requires_grad_()]

    def run(function):
        with mezzo.autocast(policy, "cpu"):
            out = function(*leaves)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    assert_same(run(compiled), run(functional.linear))


ONE_GRAPH = {
    "mm.default": lambda x: torch.ops.aten.mm.default(x[0], x[0].mT),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
}


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_operators_opened_functions_and_recomputed_products_are_traced_into_one_graph(name):
    backend = "aot_eager" if name == "mm.default" else "eager"
    compiled, x = torch.compile(ONE_GRAPH[name], backend=backend, fullgraph=True), data(2, 8, 8) / 4

    def run(function):
        leaf = x.clone().requires_grad_()
        with mezzo.autocast("O1,dtype=float16,emulate=true,low=norm+linalg_vector_norm", "cpu"):
            out = function(leaf)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaf)]

    assert_same(run(compiled), run(ONE_GRAPH[name]))


needs_copies = pytest.mark.skipif(torch.__version__ < (2, 12), reason="needs torch 2.12, whose graphs hold copy.copy")


@needs_copies
def test_a_block_that_is_compiled_by_itself_is_called_from_inside_and_from_outside():
    model = seeded(Speech)
    mezzo.prepare(model, "O2,dtype=bfloat16,emulate=false")
    x, tokens = speech_data()
    eager = model(x, tokens), model.encode(x).states
    model.encoder.compile(backend="eager", fullgraph=True)
    assert_same((model(x, tokens), model.encode(x).states), eager)


@pytest.mark.slow
@needs_copies
def test_a_model_of_several_parts_and_its_methods_are_compiled_whole():
    model = seeded(Speech)
    mezzo.prepare(model, "O2,dtype=bfloat16,emulate=false")
    x, tokens = speech_data()
    model.rnn = nn.Identity()
    model.decode = lambda states, tokens: model.head(states + model.table(tokens))
    eager = model(x, tokens), model.encode(x).states, model.head(torch.ones(2, 8))
    compiled = [torch.compile(f, backend="eager", fullgraph=True) for f in (model, model.encode, model.head)]
    for _ in range(2):
        assert_same((compiled[0](x, tokens), compiled[1](x).states, compiled[2](torch.ones(2, 8))), eager)
