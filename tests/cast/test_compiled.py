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
from ..support.tables import every_other
from .models import Block, Looped, Speech, Tied, assert_same, data, seeded, speech_data

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


def region_maker(kind, model, policy):
    if kind == "session":
        return mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy).autocast
    handle = mezzo.prepare(model, policy)
    return handle.autocast if kind == "prepared" else lambda: mezzo.autocast(policy)


def results(function, model, x):
    """Return the output, and the gradients of a loss of it."""
    model.zero_grad()
    out = function(x)
    out.float().square().sum().backward()
    return [out.detach(), *(param.grad for param in model.parameters())]


INSIDE = [
    ("O0", "session"),
    ("O1,dtype=bfloat16,emulate=true", "plain"),
    ("O1,dtype=bfloat16,emulate=false,lists=device", "prepared"),
    ("O1,dtype=float16,emulate=true,norms=fp32_math,low=gelu", "session"),
    ("O2,dtype=bfloat16,emulate=false", "session"),
    ("O1,dtype=bfloat16,emulate=true,output_dtype=float32", "plain"),
    ("O2,dtype=bfloat16,emulate=true,autocast=true", "session"),
]


@pytest.mark.parametrize("policy, kind", every_other(INSIDE))
def test_a_region_made_inside_a_whole_graph(policy, kind):
    model, x, counter = mixed(), data(4, 8), CompileCounterWithBackend("eager")
    region = region_maker(kind, model, policy)

    def run(x):
        with region():
            return model(x).softmax(-1)

    eager = results(run, model, x)
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for _ in range(2):
        assert_same(results(compiled, model, x), eager)
    assert counter.frame_count == 1


WHOLE_GRAPH = [
    ("O1,dtype=bfloat16", "outside", "aot_eager"),
    ("O1,dtype=float16,emulate=true", "inside", "aot_eager"),
    ("O1,dtype=bfloat16,lists=device", "inside", "eager"),
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
    (Block, "O1,dtype=float16,emulate=true,loss_scale=128", "aot_eager"),
    (Block, "O1,dtype=bfloat16,emulate=false", "aot_eager"),
    (Block, "O2,dtype=float16,emulate=false,loss_scale=128", "eager"),
    (Looped, "O1,dtype=float16,emulate=true,loss_scale=16,fp32_math=matmul,low=softmax", "aot_eager"),
    (Tied, "O1,dtype=bfloat16,emulate=true,low=gelu,fp32=linear", "aot_eager"),
    (Tied, "O2,dtype=bfloat16,emulate=true", "eager"),
]


@pytest.mark.parametrize("build, policy, backend", every_other(SESSIONS))
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


@pytest.mark.parametrize("policy, around", [*zip(BREAKING, [False, True, False], strict=True)])
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


def test_a_graph_that_has_to_be_whole_is_refused_by_torch_where_layers_enter_regions_of_their_own():
    model = mixed()
    handle = mezzo.prepare(model, BREAKING[2])

    def run(x):
        with handle.autocast():
            return model(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="_enter_region"):
        torch.compile(run, backend="eager", fullgraph=True)(data(4, 8))


def in_a_loop(model, region):
    def run(x):
        with region():
            for layer in model:
                x = layer(x)
            return x.softmax(-1)

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


@pytest.mark.parametrize("program", [in_a_loop, pytest.param(entered_by_hand, marks=pytest.mark.slow)])
def test_policies_one_after_the_other_in_one_process(program):
    """More than torch compiles of one function: what it then runs again is to be left and entered as before."""
    x = data(4, 8)
    with torch._dynamo.config.patch(recompile_limit=2):
        for policy in BREAKING:
            model = mixed()
            run = program(model, mezzo.prepare(model, policy).autocast)
            expected, compiled = results(run, model, x), torch.compile(run, backend="eager")
            for _ in range(2):
                for a, b in zip(results(compiled, model, x), expected, strict=True):
                    assert a.dtype == b.dtype, policy
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=policy)
                assert not torch.is_autocast_enabled("cpu")
                assert torch.overrides._get_current_function_mode_stack() == []


#: Under the first pair no mode and no dtype tells the policies of a model apart.
REPLACED = [
    ("O1,dtype=bfloat16,emulate=false,lists=device", "O1,dtype=bfloat16,emulate=false,lists=device,fp32_module=3"),
    ("O1,dtype=bfloat16,emulate=true", "O1,dtype=bfloat16,emulate=true,low=softmax@3,fp32=gelu@1"),
    ("O2,dtype=bfloat16,emulate=false", "O2,dtype=bfloat16,emulate=false,output_dtype=bfloat16"),
]


@pytest.mark.parametrize("first, second", every_other(REPLACED))
def test_another_policy_of_a_compiled_model_is_seen(first, second):
    """torch guards no hooks."""
    model, x = mixed(), data(4, 8)
    compiled = torch.compile(model, backend="eager")
    for policy in (first, second):
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
    for text in ("dynamic(init=65536)", "dynamic(init=64,interval=3)", "128.0", "none"):  # a region has no loss scale
        with mezzo.autocast(low, "cpu"):
            assert inside(x, low.evolve(loss_scale=text)).dtype == torch.bfloat16
    assert counter.frame_count == 4


def test_layers_in_a_graph_know_the_region_around_them_whatever_the_loss_scale():
    model = nn.Linear(3, 2)
    for scale in ("64", "dynamic(init=1024,interval=2)"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = mezzo.MixedPrecision(model, optimizer, f"O2,dtype=float16,emulate=true,loss_scale={scale}")

        def run(x):
            with amp.autocast():  # noqa: B023 - called before the next one
                return model(x).float().square().mean()

        assert_same([torch.compile(run, backend="eager")(torch.ones(4, 3))], [run(torch.ones(4, 3))])
        amp.close()


PINNED = [
    ("O1,dtype=bfloat16", ",fp32_module=up"),
    ("O1,dtype=float16,emulate=true", ""),
    ("O2,dtype=float16,emulate=true", ",fp32_module=norm"),
]


@pytest.mark.parametrize("policy, pinned", every_other(PINNED))
def test_new_tensors_compile_nothing_anew(policy, pinned):
    """Each batch is another tensor: nothing compiled may depend on which one it is."""
    model, counter, counts = Block(), CompileCounterWithBackend("eager"), []
    handle = mezzo.prepare(model, policy + pinned)
    compiled = torch.compile(model, backend=counter)
    for _ in range(3):
        with handle.autocast():
            compiled(torch.randn(4, 8)).float().sum().backward()
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

    found = torch.compile(run, backend="eager", fullgraph=True)(data(8, 16))
    assert found.dtype == torch.bfloat16
    assert_same([found], [run(data(8, 16))])


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


def attend(x):
    eye = torch.eye(8).repeat(3, 1)
    out, _ = functional.multi_head_attention_forward(
        x, x * 2, x * 3, 8, 2, eye, None, None, None, False, 0.0, torch.eye(8), None, need_weights=True
    )
    return out


ONE_GRAPH = {
    "mm": lambda x: torch.ops.aten.mm(x[0], x[0].mT), "mm.default": lambda x: torch.ops.aten.mm.default(x[0], x[0].mT),
    "normalize": lambda x: functional.normalize(x, dim=-1), "attention": attend,
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x), "square": lambda x: x @ x,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each == "attention" else ()) for each in ONE_GRAPH]
)
def test_operators_opened_functions_and_recomputed_products_are_traced_into_one_graph(name):
    backend = "aot_eager" if name in ("mm.default", "attention", "square") else "eager"
    compiled, x = torch.compile(ONE_GRAPH[name], backend=backend, fullgraph=True), data(2, 8, 8) / 4

    def run(function):
        leaf = x.clone().requires_grad_()
        with mezzo.autocast("O1,dtype=float16,emulate=true,low=norm+linalg_vector_norm", "cpu"):
            out = function(leaf)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaf)]

    assert_same(run(compiled), run(ONE_GRAPH[name]))


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="needs torch 2.12, whose graphs hold copy.copy")
def test_compiled_models_and_methods():
    model = seeded(Speech)
    mezzo.prepare(model, "O2,dtype=bfloat16,emulate=false")
    x, tokens = speech_data()
    model.rnn = nn.Identity()
    model.decode = lambda states, tokens: model.head(states + model.table(tokens))
    eager = model(x, tokens), model.encode(x).states, model.head(torch.ones(2, 8))
    compiled = [torch.compile(f, backend="eager", fullgraph=True) for f in (model, model.encode, model.head)]
    for _ in range(2):
        assert_same((compiled[0](x, tokens), compiled[1](x).states, compiled[2](torch.ones(2, 8))), eager)
    # A block that is compiled by itself is called from inside and from outside.
    model.encoder.compile(backend="eager", fullgraph=True)
    for _ in range(2):
        assert_same((model(x, tokens), model.encode(x).states), eager[:2])
