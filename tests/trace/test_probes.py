"""What is measured at kernels, against NumPy in float64; and nothing waits for the device before the end."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mezzo.trace.probes import Difference, Distinct, Largest, Ratio, RoundedIntegers, Total, lost_integers
from mezzo.trace.recording import PassRecorder
from mezzo.trace.table import KernelRecord


def measured(run, *probes):
    """Run something under probes; the probes of each kernel that has some, in their order."""
    recorder = PassRecorder(probes=probes)
    with recorder.watching():
        run()
    assert not any(record.probes for record in recorder.recorded.kernels)
    return [record.probes for record in recorder.table().kernels if record.probes]


def of(name):
    return lambda record: record.name == name


def test_integers_that_a_cast_rounds():
    for values in (
        torch.arange(300.0), torch.arange(300), torch.arange(256.0), torch.tensor([0.5, 299.0]),
        torch.tensor([-5000.0]),
        torch.tensor([torch.nan, 299.0]), torch.tensor([torch.inf]), torch.tensor([2.0**30 + 2**10]), torch.zeros(0),
        torch.arange(300.0, dtype=torch.float64), torch.tensor([2**52 + 2]),
    ):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float16):
            wide, low = values.double().numpy(), values.to(dtype).double().numpy()
            high = 1 / torch.finfo(values.dtype).eps if values.is_floating_point() else 2.0**53
            largest, is_whole = np.abs(wide).max(initial=0.0), (wide == np.trunc(wide)).all()
            is_lost = 2 / torch.finfo(dtype).eps < largest <= high and is_whole and (low != wide).any()
            lost = lost_integers(values, dtype)
            assert (lost is not None) == is_lost
            if is_lost:
                assert (lost.largest, lost.num_changed, lost.num_all) == (largest, (low != wide).sum(), wide.size)
            results = measured(lambda x=values, to=dtype: x.to(to), RoundedIntegers())
            assert [probes["integers"] for probes in results if probes["integers"]] == [lost] * int(is_lost)
    assert measured(lambda: torch.arange(300.0).double(), RoundedIntegers()) == []


def test_the_largest_of_what_is_read():
    x = torch.tensor([0.0, -3.0, 0.25, torch.inf, torch.nan, -torch.inf])
    for run in (lambda: x * 1.0, lambda: x.half().mul(1.0)):
        assert measured(run, Largest(of("mul"))) == [{"largest": 3.0}]
    assert measured(lambda: torch.full((2,), torch.inf) * 1.0, Largest(of("mul"))) == [{"largest": 0.0}]
    assert measured(lambda: torch.zeros(0) * 1.0, Largest(of("mul"))) == []


def test_sums_of_what_an_addition_reads_before_it_writes():
    generator = np.random.default_rng(0)
    x, y = (torch.from_numpy(generator.standard_normal(100)).bfloat16() for _ in range(2))
    wide = [terms.double().numpy() for terms in (x, y)]
    for run in (lambda: x + y, lambda: x.clone().add_(y)):
        (probes,) = measured(run, Total(of("add")))
        assert probes["total"].terms == pytest.approx([terms.sum() for terms in wide])
        assert probes["total"].magnitudes == pytest.approx([np.abs(terms).sum() for terms in wide])
        assert probes["total"].result == pytest.approx((x + y).double().numpy().sum())
    (probes,) = measured(lambda: x + 1.0, Total(of("add")))
    assert len(probes["total"].terms) == 1


def test_positions_that_fall_together():
    (probes,) = measured(lambda: torch.arange(512, dtype=torch.bfloat16), Distinct(of("arange")))
    exact = np.arange(512.0)
    ours = torch.arange(512).bfloat16().double().numpy()
    assert probes["distinct"] == (len(np.unique(ours)), 512, np.abs(exact - ours).max(), 1.0, 512)
    (probes,) = measured(lambda: torch.linspace(-1, 1, 640, dtype=torch.bfloat16), Distinct(of("linspace")))
    assert (probes["distinct"].exact, probes["distinct"].num_all) == (640, 640)
    assert probes["distinct"].step == pytest.approx(2 / 639)
    assert probes["distinct"].result < 640
    assert measured(lambda: torch.arange(2**16 + 1, dtype=torch.bfloat16), Distinct(of("arange"))) == []


def test_a_ratio_against_operands_before_they_were_rounded():
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((6, 8)), generator.standard_normal((5, 8)) * np.array([[1], [1e-3], [1], [1], [1]])
    low = [torch.from_numpy(values).float().bfloat16() for values in (a, b)]

    def expected(x, y, out):
        right = x @ y.T
        signal, noise = np.square(right), np.square(out - right)
        return [
            10 * np.log10(s / n)
            for s, n in ((signal.sum(), noise.sum()), *zip(signal.sum(0), noise.sum(0), strict=True))
        ]

    out = (low[0] @ low[1].mT).double().numpy()
    wide = [torch.from_numpy(values).float() for values in (a, b)]
    (rounded,) = measured(lambda: low[0] @ low[1].mT, Ratio(of("mm")))
    (cast,) = measured(lambda: wide[0].bfloat16() @ wide[1].bfloat16().mT, Ratio(of("mm")))
    for probes, operands in ((rounded, low), (cast, wide)):
        ratios = expected(*(values.double().numpy() for values in operands), out)
        assert [probes["ratio"].whole, *probes["ratio"].entries] == pytest.approx(ratios, rel=1e-6)
    (many,) = measured(lambda: low[0].float() @ torch.ones(8, 2**12 + 1), Ratio(of("mm")))
    assert (len(many["ratio"].entries), many["ratio"].whole > 100) == (0, True)
    (exact,) = measured(lambda: low[0] + low[0], Ratio(of("add")))
    assert exact["ratio"].whole == math.inf

    def written():
        x = wide[0].clone()
        y = x.bfloat16()
        x.zero_()  # what the cast read is gone
        return y @ low[1].mT

    (probes,) = measured(written, Ratio(of("mm")))
    assert probes == rounded
    assert measured(lambda: low[0].clone().add_(1.0), Ratio(of("add"))) == []


def test_differences_and_what_they_were_before_rounding():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    fields = {
        "varied": (lambda: x * 1.0, x.double().numpy()),
        "swallowed": (lambda: x * 2.0**-12 + 1.0, x.double().numpy() * 2.0**-12 + 1.0),
        "of two tensors": (lambda: x * 2.0**-12 + x.new_ones(8), x.double().numpy() * 2.0**-12 + 1.0),
        "constant": (lambda: x * 0.0 + 1.0, np.ones((6, 8))),
    }
    for name, (make, exact) in fields.items():

        def run(make=make):
            y = make()
            return y[1:, 2:] - y[:-1, 2:]

        (probes,) = measured(run, Difference(of("sub"), lambda record: record.name in ("mul", "add")))
        y = make()
        assert probes["difference"].subtracted == pytest.approx(y[1:, 2:].double().abs().sum().item())
        assert probes["difference"].result == pytest.approx(run().double().abs().sum().item())
        assert probes["difference"].exact == pytest.approx(np.abs(np.diff(exact[:, 2:], axis=0)).sum())
        assert (probes["difference"].result == 0) == (name != "varied")


class Counted:
    """A probe that gives the numbers 1, 2, … one after the other."""

    name, count = "counted", 0

    def begin(self, kernel, args, kwargs):
        self.count += 1
        return self.count

    def wants(self, record: KernelRecord):
        return record.name != "add"

    def measure(self, record, args, kwargs, out, begun) -> Tensor:
        return torch.full((begun,), float(begun), dtype=torch.float64)

    def read(self, numbers):
        return numbers


def test_numbers_come_back_to_their_kernels():
    results = measured(lambda: (torch.ones(2).mul(2.0) + 1).exp(), Counted())
    assert [probes["counted"] for probes in results] == [[n] * int(n) for n in (1.0, 2.0, 4.0)]
