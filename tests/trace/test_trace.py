"""One watched pass: where each kernel belongs, what tensors are called, how numbers lie; and nothing is left behind."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.cast.casts import WeightCasts
from mezzo.trace.function_calls import LOSS, doing_now
from mezzo.trace.measure import Names, edges, has_literal, is_finite, needed, operands, range_of, widened
from mezzo.trace.recording import KernelTeller, PassRecorder
from mezzo.trace.sandbox import leaves_of, untouched
from mezzo.trace.table import flops_by_format, low_share

aten = torch.ops.aten


# Where a pass is ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.body = nn.Linear(4, 4, bias=False), nn.Sequential(nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        return self.body(checkpoint(lambda y: self.first(y).sigmoid(), x, use_reentrant=False)).exp()


def test_each_kernel_belongs_to_the_module_that_runs_or_whose_backward_pass_runs():
    model, recorder = Net(), PassRecorder()
    with recorder.hooked([model]):
        with recorder.watching():
            loss = model(torch.ones(3, 4)).sum()
        with recorder.watching(backward=True):
            loss.backward()
    table = recorder.table()
    names = [
        (record.kernel._schema.name.removeprefix("aten::"), record.module, record.phase) for record in table.kernels
    ]
    forward = [entry[:2] for entry in names if entry[2] == "forward"]
    assert [entry for entry in forward if entry[0] in ("mm", "addmm", "tanh", "exp", "sum")] == [
        ("mm", "first"), ("tanh", "body.0"), ("addmm", "body.1"), ("exp", ""), ("sum", LOSS),
    ]  # fmt: skip
    products = [entry for entry in names if entry[2] != "forward" and entry[0] in ("mm", "tanh_backward")]
    # What a checkpoint recomputes is no gradient.
    assert products == [
        ("mm", "body.1", "backward"), ("mm", "body.1", "backward"), ("tanh_backward", "body.0", "backward"),
        ("mm", "first", "recomputed"), ("mm", "first", "backward"),
    ]  # fmt: skip
    assert table.modules_run == {"", "first", "body", "body.0", "body.1"}
    assert table.calls[0].line.rpartition(":")[0] == __file__
    assert doing_now() == ("other", ())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_names_are_those_of_what_is_viewed_or_cast():
    model, given = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.ones(2, 4)
    names, casts = Names([model]), WeightCasts()
    names.put_inputs("", (given,), {"mask": torch.ones(1)})
    weight, mean = model[0].weight, model[1].running_mean
    used = [casts.cast(weight, torch.bfloat16) for _ in range(2)]  # another use of one cast
    for tensor in (weight, weight.T, weight.bfloat16(), weight[:2].view(-1), *used, used[1].mT):
        assert names.of(tensor)[:2] == ("parameter", "0.weight")
    assert names.of(mean[1:])[:2] == ("buffer", "1.running_mean")
    assert names.of(given[0])[:2] == ("input", "input 0")
    assert names.of(weight * 2) is None
    assert names.was_finite(mean)
    product = used[1] @ (other := torch.ones(4, 4).bfloat16().requires_grad_())
    edge_names = [names.of_edge(edge, edges((other,), {})) for edge in product.grad_fn.next_functions]
    assert edge_names == ["0.weight", "input 0"]


def test_the_rotation_of_an_operand_is_no_product_of_the_model():
    layer = nn.Linear(32, 64, bias=False)
    handle = mezzo.prepare(layer, "O1,dtype=bfloat16,nvfp4_param=weight,nvfp4_tricks=rht")
    with KernelTeller((kernels := []).append):
        with handle.autocast():
            loss = layer(torch.ones(16, 32)).sum()
        loss.backward()
    # The input needs no gradient: the output and the weight's gradient, and neither of the two rotations.
    assert flops_by_format(kernels) == {"emulated": 2 * 2 * 16 * 32 * 64}


def test_operations_of_products_are_counted_by_the_format_that_they_read():
    model, x = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)), torch.ones(2, 8)
    first, second = 2 * 2 * 8 * 16, 2 * 2 * 16 * 4
    for policy, low in (
        ("O1,dtype=bfloat16,emulate=true", "emulated"),
        ("O1,dtype=bfloat16,emulate=false", "bfloat16"),
    ):
        handle = mezzo.prepare(model, f"{policy},fp32_module=1")
        with KernelTeller((kernels := []).append):
            with handle.autocast():
                loss = model(x).sum()
            loss.backward()
        handle.remove()
        model.zero_grad()
        # The first layer's input needs no gradient: one product of the backward pass, of the second layer two.
        assert flops_by_format(kernels) == {low: 2 * first, "float32": 3 * second}
        assert low_share(flops_by_format(kernels), [torch.bfloat16]) == 2 * first / (2 * first + 3 * second)


def test_a_pass_in_the_sandbox_leaves_everything_as_it_was():
    """Random states, buffers, gradients and the hooks that run on gradients; after an exception too."""
    model, stepped = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), []
    model(torch.randn(8, 4)).sum().backward()
    model[0].weight.register_post_accumulate_grad_hook(stepped.append)
    kept, before = model[0].weight.grad, {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    def run():
        with torch.no_grad(), untouched([model]):
            assert model[0].weight.grad is None
            loss = model(torch.randn(8, 4)).sum() * (random.random() + np.random.rand())
            assert {*leaves_of([loss])} == {*model.parameters()}
            loss.backward()
            assert model[0].weight.grad is not None
            model[1].running_mean = None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert stepped == []
    assert model[0].weight.grad is kept
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]
    model(torch.randn(8, 4)).sum().backward()
    assert len(stepped) == 1


# Numbers ------------------------------------------------------------------------------------------------


def test_a_range():
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        values = torch.tensor([[0.0, -3.0, 0.25], [torch.inf, torch.nan, -torch.inf]], dtype=dtype)
        measured, limit = range_of(values, "x"), torch.finfo(dtype).max
        assert (measured.name, measured.dtype, measured.shape) == ("x", str(dtype).removeprefix("torch."), (2, 3))
        assert (measured.smallest, measured.largest) == (0.25, 3.0)
        assert (measured.num_zeros, measured.num_inf, measured.num_nan) == (1, 2, 1)
        assert (measured.share, measured.headroom) == (3.0 / limit, math.log2(limit / 3.0))
    for values in ([], [0.0, 0.0], [torch.nan]):
        measured = range_of(torch.tensor(values), "x")
        assert (measured.smallest, measured.largest, measured.share, measured.headroom) == (None, 0.0, 0.0, None)
        assert (measured.num_zeros, measured.num_nan) == (values.count(0.0), len(values) - values.count(0.0))
    complex_ = torch.tensor([3 + 4j, complex(torch.inf, 0.0)])
    assert (range_of(complex_, "z").largest, range_of(complex_, "z").num_inf) == (4.0, 1)  # of the real parts
    eight_bits = torch.tensor([448.0, 0.5]).to(torch.float8_e4m3fn)
    assert (range_of(eight_bits, "w").largest, range_of(eight_bits, "w").share) == (448.0, 1.0)
    sparse = torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse()
    assert (range_of(sparse, "s").largest, range_of(sparse, "s").num_zeros) == (2.0, 0)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_finiteness():
    finite = [torch.ones(2), torch.empty(0), torch.tensor([2**40]), torch.full((2,), torch.nan, device="meta")]
    wrong = [torch.tensor([1.0, torch.nan]), torch.tensor([1.0, -torch.inf]), torch.tensor(complex(0.0, torch.inf))]
    wrong += [wrong[0].to(torch.float8_e5m2), wrong[1].to_sparse(), wrong[1][None].to_sparse_csr()]
    assert [is_finite(tensor) for tensor in (*finite, *wrong)] == [True] * len(finite) + [False] * len(wrong)
    assert has_literal((torch.ones(2), -torch.inf), {})
    assert has_literal((torch.ones(2),), {"value": torch.nan})
    assert not has_literal((torch.ones(2), 1e300, 3, None), {"alpha": 1})


def test_what_a_kernel_reads():
    """What it writes to is copied before."""
    x, y = torch.ones(2), torch.zeros(2)
    for kernel, args, kwargs, names in (
        (aten.add.Tensor, (x, y), {}, ["self", "other"]),
        (aten.add.Tensor, (x,), {"other": y}, ["self", "other"]),
        (aten.cat.default, ([x, y],), {}, ["tensors[0]", "tensors[1]"]),
        (aten.where.self, (x > 0, x, y), {}, ["self", "other"]),  # a condition has no fractions
        (aten.add.out, (x, y), {"out": x}, ["self", "other"]),
        (aten.copy_.default, (x, y), {}, ["src"]),
        (aten.fill_.Scalar, (x, 1.0), {}, []),
        (aten.mul_.Tensor, (x, y), {}, ["self", "other"]),
    ):
        read = operands(kernel, args, kwargs)
        assert [operand.name for operand in read] == names
    aten.mul_.Tensor(x, y)
    assert read[0].tensor.tolist() == [1.0, 1.0]
    assert read[0].argument is x
    assert read[1].tensor is read[1].argument is y


def test_a_kernel_in_a_wider_format():
    x = torch.tensor([300.0, -400.0], dtype=torch.float16)
    for kernel, args, largest in (
        (aten.mul.Tensor, (x, x), 160000.0),
        (aten.mul_.Tensor, (x.clone(), x), 160000.0),
        (aten.sum.dim_IntList, (torch.full((300,), 300.0, dtype=torch.float16), [0]), 90000.0),
        (aten.dot.default, (x, x), 250000.0),
    ):
        read = operands(kernel, args, {})
        kernel(*args)
        assert needed(torch.float16, kernel, args, {}, read, 0) == (largest, torch.float32)
        assert needed(torch.float32, kernel, args, {}, read, 0) == (largest, torch.float64)
    state = torch.get_rng_state()
    for kernel, args, kwargs, position in (
        (aten.native_dropout.default, (x, 0.5, True), {}, 0), (aten.add.out, (x, x), {"out": x}, 0),
        (aten.mm.default, (x, x), {}, 0), (aten.add.Tensor, (x, x), {}, 1),
    ):  # fmt: skip
        assert needed(torch.float16, kernel, args, kwargs, [], position) == (None, None)
    assert torch.equal(state, torch.get_rng_state())
    assert x.tolist() == [300.0, -400.0]


def test_the_format_that_holds_a_result():
    for number, dtype, magnitude, holds in (
        (300.0, torch.float16, 9e4, torch.float32), (1e30, torch.float32, 1e60, torch.float64),
        (1e200, torch.float64, None, None), (1e30, torch.bfloat16, 1e60, torch.float64),
        (3.0, torch.float16, 9.0, torch.float32),
    ):  # fmt: skip
        x = torch.tensor([number], dtype=dtype)
        largest, wider = needed(dtype, aten.mul.Tensor, (x, x), {}, operands(aten.mul.Tensor, (x, x), {}), 0)
        assert wider == holds
        assert largest == (magnitude and pytest.approx(magnitude, rel=0.01))
    zero = (torch.zeros(1),)
    read = operands(aten.log.default, zero, {})
    assert needed(torch.float32, aten.log.default, zero, {}, read, 0) == (math.inf, None)


@torch.library.custom_op("mezzo_tests::half_only", mutates_args=())
def half_only(x: torch.Tensor, refusal: str) -> torch.Tensor:
    if x.dtype != torch.float16:
        raise {"assert": AssertionError, "table": KeyError, "torch": NotImplementedError}[refusal](x.dtype)
    return x * x


def test_a_user_s_kernel_refuses_a_wider_format_in_its_own_way():
    x, kernel = torch.tensor([300.0], dtype=torch.float16), torch.ops.mezzo_tests.half_only.default
    for refusal in ("assert", "table", "torch"):
        assert [result.tolist() for result in widened(torch.float16, kernel, (x, refusal), {})] == [[math.inf]]
        assert widened(torch.float32, kernel, (x, refusal), {}) is None
        read = operands(kernel, (x, refusal), {})
        assert needed(x.dtype, kernel, (x, refusal), {}, read, 0) == (None, None)
