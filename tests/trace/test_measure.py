"""Ranges and operands against plain arithmetic."""

import math

import pytest
import torch

from mezzo.trace.measure import has_literal, is_finite, largest_in, needed, operands, range_of

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_range(dtype):
    values = torch.tensor([[0.0, -3.0, 0.25], [torch.inf, torch.nan, -torch.inf]], dtype=dtype)
    found = range_of(values, "x")
    limit = torch.finfo(dtype).max
    assert (found.name, found.dtype, found.shape) == ("x", str(dtype).removeprefix("torch."), (2, 3))
    assert (found.smallest, found.largest) == (0.25, 3.0)
    assert (found.num_zeros, found.num_inf, found.num_nan) == (1, 2, 1)
    assert found.share == 3.0 / limit
    assert found.headroom == math.log2(limit / 3.0)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [torch.nan]])
def test_a_range_without_numbers(values):
    found = range_of(torch.tensor(values), "x")
    assert (found.smallest, found.largest, found.share, found.headroom) == (None, 0.0, 0.0, None)
    assert (found.num_zeros, found.num_nan) == (values.count(0.0), len(values) - values.count(0.0))


def test_other_kinds_of_numbers():
    complex_ = torch.tensor([3 + 4j, complex(torch.inf, 0.0)])
    assert (range_of(complex_, "z").largest, range_of(complex_, "z").num_inf) == (4.0, 1)  # of the real parts
    eight_bits = torch.tensor([448.0, 0.5]).to(torch.float8_e4m3fn)
    assert (range_of(eight_bits, "w").largest, range_of(eight_bits, "w").share) == (448.0, 1.0)
    sparse = torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse()
    assert (range_of(sparse, "s").largest, range_of(sparse, "s").num_zeros) == (2.0, 0)


@pytest.mark.parametrize(
    "tensor, finite",
    [
        (torch.ones(2), True),
        (torch.empty(0), True),
        (torch.tensor([1.0, torch.nan]), False),
        (torch.tensor([1.0, -torch.inf]), False),
        (torch.tensor(complex(0.0, torch.inf)), False),
        (torch.tensor([1.0, torch.nan]).to(torch.float8_e5m2), False),
        (torch.tensor([1.0, torch.inf]).to_sparse(), False),
        (torch.tensor([2**40]), True),
        (torch.full((2,), torch.nan, device="meta"), True),
    ],
)
def test_finiteness(tensor, finite):
    assert is_finite(tensor) == finite


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_rows():
    assert not is_finite(torch.tensor([[1.0, torch.inf]]).to_sparse_csr())


def names(kernel, *args, **kwargs):
    return [each.name for each in operands(kernel, args, kwargs)]


def test_what_a_kernel_reads():
    x, y = torch.ones(2), torch.zeros(2)
    assert names(aten.add.Tensor, x, y) == ["self", "other"]
    assert names(aten.add.Tensor, x, other=y) == ["self", "other"]
    assert names(aten.cat.default, [x, y]) == ["tensors[0]", "tensors[1]"]
    assert names(aten.where.self, x > 0, x, y) == ["self", "other"]  # a condition has no fractions
    assert names(aten.add.out, x, y, out=x) == ["self", "other"]
    assert names(aten.copy_.default, x, y) == ["src"]
    assert names(aten.fill_.Scalar, x, 1.0) == []
    assert names(aten.mul_.Tensor, x, y) == ["self", "other"]


def test_what_is_written_is_copied_before():
    x, y = torch.ones(2), torch.zeros(2)
    read = operands(aten.mul_.Tensor, (x, y), {})
    aten.mul_.Tensor(x, y)
    assert read[0].tensor.tolist() == [1.0, 1.0]
    assert read[0].argument is x
    assert read[1].tensor is read[1].argument is y


def test_literals():
    assert has_literal((torch.ones(2), -torch.inf), {})
    assert has_literal((torch.ones(2),), {"value": torch.nan})
    assert not has_literal((torch.ones(2), 1e300, 3, None), {"alpha": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_in_a_wider_format(dtype):
    x = torch.tensor([300.0, -400.0], dtype=torch.float16)
    for kernel, args, largest in (
        (aten.mul.Tensor, (x, x), 160000.0),
        (aten.mul_.Tensor, (x.clone(), x), 160000.0),
        (aten.sum.dim_IntList, (torch.full((300,), 300.0, dtype=torch.float16), [0]), 90000.0),
        (aten.dot.default, (x, x), 250000.0),
    ):
        read = operands(kernel, args, {})
        kernel(*args)
        assert largest_in(dtype, kernel, args, {}, read, 0) == largest
    assert x.tolist() == [300.0, -400.0]


def test_the_format_that_holds_a_result():
    for number, dtype, wanted in (
        (300.0, torch.float16, (9e4, torch.float32)),
        (1e30, torch.float32, (1e60, torch.float64)),
        (1e200, torch.float64, (None, None)),
        (1e30, torch.bfloat16, (1e60, torch.float64)),
        (3.0, torch.float16, (9.0, torch.float32)),
    ):
        x = torch.tensor([number], dtype=dtype)
        args = (x, x)
        magnitude, holds = needed(dtype, aten.mul.Tensor, args, {}, operands(aten.mul.Tensor, args, {}), 0)
        assert holds == wanted[1]
        assert magnitude == (wanted[0] and pytest.approx(wanted[0], rel=0.01))
    zero = (torch.zeros(1),)
    assert needed(torch.float32, aten.log.default, zero, {}, operands(aten.log.default, zero, {}), 0) == (
        math.inf,
        None,
    )
    root = (torch.tensor([-1 + 0j]), torch.tensor([0j]))
    assert needed(torch.complex64, aten.div.Tensor, root, {}, operands(aten.div.Tensor, root, {}), 0)[1] is None


def test_kernels_that_have_no_wider_form():
    x = torch.ones(2, dtype=torch.float16)
    state = torch.get_rng_state()
    assert largest_in(torch.float32, aten.native_dropout.default, (x, 0.5, True), {}, [], 0) is None
    assert torch.equal(state, torch.get_rng_state())
    assert largest_in(torch.float32, aten.add.out, (x, x), {"out": x}, [], 0) is None
    assert largest_in(torch.float32, aten.mm.default, (x, x), {}, [], 0) is None  # it raises
    assert largest_in(torch.float32, aten.add.Tensor, (x, x), {}, [], 1) is None


@torch.library.custom_op("mezzo_tests::half_only", mutates_args=())
def half_only(x: torch.Tensor, refusal: str) -> torch.Tensor:
    if x.dtype != torch.float16:
        raise {"assert": AssertionError, "table": KeyError, "torch": NotImplementedError}[refusal](x.dtype)
    return x * x


@pytest.mark.parametrize("refusal", ["assert", "table", "torch"])
def test_a_user_s_kernel_refuses_a_wider_format_in_its_own_way(refusal):
    x = torch.tensor([300.0], dtype=torch.float16)
    kernel = torch.ops.mezzo_tests.half_only.default
    assert largest_in(torch.float16, kernel, (x, refusal), {}, [], 0) == math.inf
    assert largest_in(torch.float32, kernel, (x, refusal), {}, [], 0) is None
    assert needed(x.dtype, kernel, (x, refusal), {}, operands(kernel, (x, refusal), {}), 0) == (None, None)


def test_an_interrupt_is_no_refusal():
    class Interrupted:
        tags, _schema = (), torch.ops.aten.abs.default._schema

        def __call__(self, x):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        largest_in(torch.float32, Interrupted(), (torch.ones(1),), {}, [], 0)
