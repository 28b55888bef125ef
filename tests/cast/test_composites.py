"""Composites of products: torch's own bits where nothing differs, and a policy that reaches inside them."""

import warnings

import pytest
import torch
from torch import Tensor

import mezzo


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


def invertible():
    return data(4, 4) + 2 * torch.eye(4)


counts = torch.tensor([1, 2, 1, 3, 1, 1, 2, 1])
CALLS = {
    **{f"matrix_power {n}": (lambda x, n=n: torch.linalg.matrix_power(x, n), invertible) for n in range(-4, 9)},
    "matrix_power by keyword": (lambda x: torch.linalg.matrix_power(input=x, n=5), invertible),
    "matrix_power of torch": (lambda x: torch.matrix_power(input=x, n=3), invertible),
    "matrix_power of Tensor": (lambda x: x.matrix_power(n=6), invertible),
    "matrix_power of a batch": (lambda x: torch.linalg.matrix_power(x, 5), lambda: data(3, 4, 4)),
    "cov": (torch.cov, lambda: data(3, 8)),
    "cov of one": (lambda x: x.cov(), lambda: data(8)),
    "cov corrected": (lambda x: torch.cov(input=x, correction=0), lambda: data(3, 8)),
    "cov counted": (lambda x: torch.cov(x, fweights=counts), lambda: data(3, 8)),
    "cov weighted": (lambda x: x.cov(aweights=counts / 4), lambda: data(3, 8)),
    "cov both": (lambda x: torch.cov(x, fweights=counts, aweights=counts / 4, correction=2), lambda: data(3, 8)),
    "corrcoef": (torch.corrcoef, lambda: data(3, 8)),
    "corrcoef of one": (lambda x: x.corrcoef(), lambda: data(8)),
    "rmatmul": (lambda x: Tensor.__rmatmul__(x, x * 2), invertible),
}


def nothing():
    return torch.autocast("cpu", enabled=False)


def run(function, x, region):
    x = x.clone().requires_grad_()
    with region:
        out = function(x)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), x)
    return out, gradient


def assert_same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("call", CALLS)
def test_where_nothing_differs_the_bits_are_torch_s_own(call):
    """The operand is FP32, so that torch's two lists agree on all that is inside."""
    function, operand = CALLS[call]
    mine = run(function, operand(), mezzo.autocast("O1,dtype=bfloat16,emulate=false", "cpu"))
    assert_same(mine, run(function, operand(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("call", CALLS)
def test_in_fp32_and_complex_the_bits_are_torch_s_own(call, dtype):
    function, operand = CALLS[call]
    x = operand().to(dtype)
    if dtype.is_complex:
        x = x * (1 + 0.5j)
    policy = "O1,dtype=bfloat16,fp32=matmul+mm,emulate=false"
    with mezzo.autocast(policy, "cpu"):
        out = function(x)
    expected = function(x)
    assert out.dtype == expected.dtype == dtype
    assert torch.equal(torch.view_as_real(out + 0j).nan_to_num(7.0), torch.view_as_real(expected + 0j).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
class TestEmulated:
    """Against the same steps with every rounding written out."""

    @staticmethod
    def region(dtype):
        return mezzo.autocast(f"O1,dtype={str(dtype).removeprefix('torch.')},emulate=true", "cpu")

    @staticmethod
    def product(dtype):
        return lambda a, b: (a.to(dtype).float() @ b.to(dtype).float()).to(dtype)

    def test_a_power_is_rounded_after_each_product(self, dtype):
        product = self.product(dtype)

        def by_hand(x):  # x^5 = x · (x²)²
            square = product(x, x)
            return product(x, product(square, square))

        mine = run(lambda y: torch.linalg.matrix_power(y, 5), invertible(), self.region(dtype))
        assert_same(mine, run(by_hand, invertible(), nothing()))
        x = invertible().to(dtype)
        mine = run(lambda y: torch.linalg.matrix_power(y, 2), x, self.region(dtype))
        assert_same(mine, run(lambda y: product(y, y), x, nothing()))

    def test_a_covariance_is_centred_in_fp32(self, dtype):
        def by_hand(x):
            centred = x - (x.sum(1) / 8).unsqueeze(1)
            return self.product(dtype)(centred, centred.T) / 7

        x = data(3, 8) + 100.0  # what rounding first would lose
        assert_same(run(torch.cov, x, self.region(dtype)), run(by_hand, x, nothing()))

    def test_a_correlation_is_that_covariance_scaled(self, dtype):
        def by_hand(x):
            centred = x - (x.sum(1) / 8).unsqueeze(1)
            c = self.product(dtype)(centred, centred.T) / 7
            deviation = c.diag().sqrt()
            return (c / deviation.view(-1, 1) / deviation.view(1, -1)).clip(-1, 1)

        assert_same(run(torch.corrcoef, data(3, 8), self.region(dtype)), run(by_hand, data(3, 8), nothing()))


def test_a_rule_on_the_product_reaches_inside_and_one_on_the_composite_comes_first():
    x = data(4, 4)
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true,fp32=matmul", "cpu"):
        out = torch.linalg.matrix_power(x, 3)
    assert out.dtype == torch.float32
    assert torch.equal(out, torch.linalg.matrix_power(x, 3))
    for emulate in ("true", "false"):
        with mezzo.autocast(f"O1,dtype=bfloat16,emulate={emulate},low=linalg_matrix_power", "cpu"):
            assert torch.linalg.matrix_power(x, 1).dtype == torch.bfloat16
            assert torch.linalg.matrix_power(x, 3).dtype == torch.bfloat16
        with mezzo.autocast(f"O1,dtype=bfloat16,emulate={emulate},fp32=cov", "cpu"):
            assert torch.equal(torch.cov(x.bfloat16()), torch.cov(x.bfloat16().float()))


def test_wrong_calls_raise_what_torch_raises():
    wrong = [
        lambda: torch.cov(data(2, 3, 4)),
        lambda: torch.cov(torch.ones(2, 3, dtype=torch.bool)),
        lambda: torch.cov(data(2, 8), fweights=-counts),
        lambda: torch.cov(data(2, 3), aweights=counts / 4),
        lambda: torch.linalg.matrix_power(data(2, 3), 1),
        lambda: torch.linalg.matrix_power(data(2, 3), -2),
        lambda: torch.linalg.matrix_power(data(3), 2),
        lambda: torch.linalg.matrix_power(data(2, 3), 3),
    ]
    for call in wrong:
        with pytest.raises(RuntimeError) as theirs:
            call()
        with mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cpu"), pytest.raises(RuntimeError) as mine:
            call()
        assert str(mine.value) == str(theirs.value)


def test_too_few_observations_warn_as_torch_does():
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cpu"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = torch.cov(data(2, 1))
    assert any("degrees of freedom" in str(each.message) for each in caught)
    assert not out.isfinite().any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of intermediate results, read by Dynamo itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
def test_compiled_powers(backend):
    torch.compiler.reset()
    x = invertible()
    compiled = torch.compile(
        lambda y: torch.linalg.matrix_power(y, 5) + y.matrix_power(1), backend=backend, fullgraph=True
    )
    region = mezzo.autocast("O1,dtype=float16,emulate=true", "cpu")
    mine = run(compiled, x, region)
    assert_same(mine, run(lambda y: torch.linalg.matrix_power(y, 5) + y.matrix_power(1), x, region))
