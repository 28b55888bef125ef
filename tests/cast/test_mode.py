"""How a region sees what is called past Python's own names, and what torch.compile can follow of it."""

import pytest
import torch
from torch.nn import functional

import mezzo

aten = torch.ops.aten


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The operator, an overload of it, the same function of Python's, and the shapes of its operands.
OPERATORS = {
    "mm": (aten.mm, aten.mm.default, torch.mm, [(3, 9), (9, 4)]),
    "matmul": (aten.matmul, aten.matmul.default, torch.matmul, [(3, 9), (9,)]),
    "linear": (aten.linear, aten.linear.default, functional.linear, [(3, 9), (4, 9), (4,)]),
    "addmm": (aten.addmm, aten.addmm.default, torch.addmm, [(4,), (3, 9), (9, 4)]),
    "bmm": (aten.bmm, aten.bmm.default, torch.bmm, [(2, 3, 9), (2, 9, 4)]),
    "conv1d": (aten.conv1d, aten.conv1d.default, functional.conv1d, [(2, 4, 9), (3, 4, 3)]),
    "softmax": (
        lambda x: aten.softmax(x, -1), lambda x: aten.softmax.int(x, -1), lambda x: torch.softmax(x, -1), [(3, 9)]
    ),
    "exp": (aten.exp, aten.exp.default, torch.exp, [(3, 9)]),
    "expm1": (aten.special_expm1, aten.special_expm1.default, torch.special.expm1, [(3, 9)]),
    "layer_norm": (
        lambda x: aten.layer_norm(x, [9]), lambda x: aten.layer_norm.default(x, [9]),
        lambda x: functional.layer_norm(x, (9,)), [(3, 9)],
    ),
    "relu": (aten.relu, aten.relu.default, torch.relu, [(3, 9)]),
    "by keyword": (
        lambda a, b: aten.mm(self=a, mat2=b), lambda a, b: aten.mm.default(self=a, mat2=b), torch.mm, [(3, 9), (9, 4)],
    ),
}  # fmt: skip
POLICIES = [
    "O1,dtype=float16,emulate=true", "O1,dtype=bfloat16,emulate=false",
    "O1,dtype=bfloat16,emulate=true,low=softmax+exp+expm1,fp32=mm+conv1d,fp32_math=layer_norm",
]  # fmt: skip


def run(region, function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    with region:
        out = function(*leaves)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert b.count_nonzero() > 0
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("policy", POLICIES)
def test_operators_of_aten_are_treated_as_what_they_are_called_in_python(policy, name, dtype):
    packet, overload, function, shapes = OPERATORS[name]
    if dtype == torch.float16 and "float16" not in policy.split(",")[1]:
        dtype = torch.float32
    inputs = [data(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    region = mezzo.autocast(policy, "cpu")
    expected = run(region, function, inputs)
    assert_same(run(region, packet, inputs), expected)
    assert_same(run(region, overload, inputs), expected)


def test_operators_of_other_libraries_and_in_place_ones_are_left_alone():
    x = data(3, 9).bfloat16()
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cpu"):
        assert torch.ops.prims.exp(x).dtype == torch.bfloat16
        assert aten.exp_(x.clone()).dtype == torch.bfloat16
        assert aten._softmax(x, -1, False).dtype == torch.bfloat16  # a kernel, which no list of torch's names
        out = torch.empty(3, 3)
        assert aten.mm.out(data(3, 9), data(9, 3), out=out) is out
    assert torch.equal(out, data(3, 9) @ data(9, 3))


def test_without_autocast_operators_are_treated_and_overloads_are_not():
    """Compiled code calls overloads, after the policy has been carried out in it."""
    x = data(4, 4).bfloat16()
    with mezzo.autocast("O2,dtype=bfloat16,emulate=false,fp32=mm", "cpu"):
        assert aten.mm(x, x).dtype == torch.float32
        assert aten.mm.default(x, x).dtype == torch.bfloat16


COMPILED = [
    "O1,dtype=bfloat16,emulate=true,fp32=linear", "O1,dtype=bfloat16,emulate=false,fp32=*,low=linear",
    "O2,dtype=bfloat16,emulate=false,fp32=*,low=linear", "O2,dtype=bfloat16,emulate=true,fp32=linear,low=mm+addmm",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("policy", COMPILED)
def test_what_compiled_code_calls_is_not_treated_a_second_time(policy):
    """Its graph has mm where the model says linear, and the policy has another opinion of mm."""
    torch.compiler.reset()
    inputs = [data(3, 9).bfloat16(), data(4, 9, seed=1).bfloat16()]
    compiled = torch.compile(functional.linear, backend="aot_eager", fullgraph=True)
    region = mezzo.autocast(policy, "cpu")
    assert_same(run(region, compiled, inputs), run(region, functional.linear, inputs))


def attend(x):
    eye = torch.eye(8).repeat(3, 1)
    out, _ = functional.multi_head_attention_forward(
        x, x * 2, x * 3, 8, 2, eye, None, None, None, False, 0.0, torch.eye(8), None, need_weights=True
    )
    return out


ONE_GRAPH = {
    "mm": lambda x: aten.mm(x[0], x[0].mT), "mm.default": lambda x: aten.mm.default(x[0], x[0].mT),
    "normalize": lambda x: functional.normalize(x, dim=-1), "attention": attend,
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x), "tensordot": lambda x: torch.tensordot(x, x, 3),
    "scaled dot product": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "square": lambda x: x @ x,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of intermediate results, read by Dynamo itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize(
    "name, backend",
    [
        pytest.param(name, backend, marks=() if (backend == "eager") is (number % 2 == 1) else pytest.mark.slow)
        for number, name in enumerate(ONE_GRAPH)
        for backend in ("eager", "aot_eager")
    ],
)
def test_operators_opened_functions_and_recomputed_products_are_traced_into_one_graph(name, backend):
    torch.compiler.reset()
    compiled = torch.compile(ONE_GRAPH[name], backend=backend, fullgraph=True)
    region = mezzo.autocast("O1,dtype=float16,emulate=true,low=norm+linalg_vector_norm", "cpu")
    x = data(2, 8, 8) / 4
    assert_same(run(region, compiled, [x]), run(region, ONE_GRAPH[name], [x]))
