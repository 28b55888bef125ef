"""Swallowed updates against the definition in float64, ties and edges included."""

import math

import pytest
import torch

from mezzo import formats
from mezzo.numerics import moves

COUNT = 2000


def swallowed_by_definition(weight, update, target):
    """round(w + Δw) == w in float64, where sums are exact as far as a rounding to any of the formats can tell."""
    before = target.round(weight.double())
    return int(((update != 0) & (target.round(before + update.double()) == before)).sum())


def cases():
    generator = torch.Generator().manual_seed(0)

    def integers(low, high):
        return torch.randint(low, high, (COUNT,), generator=generator)

    def any_bits():
        return integers(-(2**31), 2**31).to(torch.int32).view(torch.float32)

    yield torch.randn(COUNT, generator=generator), torch.ldexp(any_bits().sign(), integers(-30, 2))
    yield any_bits(), any_bits()
    for target in formats.FORMATS.values():
        weight = target.round(any_bits())
        half = torch.ldexp(any_bits().sign(), torch.frexp(weight)[1] - 1 + integers(-13, 1))
        for update in (half, torch.nextafter(half, torch.zeros(())), torch.nextafter(half, half * 2)):
            yield weight, update
            yield torch.exp2(integers(-149, 128).double()).float(), update
        small = integers(0, 4 << target.mantissa_bits).float() * target.smallest_subnormal
        yield small, integers(-9, 10).float() * target.smallest_subnormal / 4
        last = torch.full((COUNT,), target.max) * any_bits().sign()
        yield last, integers(-9, 10).float() * target.spacing(target.max) / 8
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        448.0,
        -464.0,
        57344.0,
        65504.0,
        65520.0,
        3.4e38,
        1.0,
        2.0**-25,
    ]
    special = torch.tensor([*special, 2.0**-149, 2.0**-133, -15.99, 16.0])
    yield tuple(each.reshape(-1) for each in torch.meshgrid(special, special, indexing="ij"))


def by_each(weight, update):
    """What special values do, one by one: a sum over them would hide two faults that cancel out."""
    several = weight.numel() < COUNT
    return zip(weight.split(1), update.split(1), strict=True) if several else [(weight, update)]


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_swallowed_updates_are_those_of_the_definition(wide):
    targets = list(formats.FORMATS.values())
    for number, pair in enumerate(cases()):
        for weight, update in by_each(*pair):
            gradient = update.roll(1).bfloat16()
            row = torch.zeros(moves.FIELDS + len(targets), dtype=torch.int64)
            moves.count_moves([moves.Move(weight.to(wide), update.to(wide), gradient, row)], targets)
            moving = update != 0
            assert row[: moves.FIELDS].tolist() == [
                int(moving.sum()),
                int((moving & (weight.double().abs() >= 2048 * update.double().abs())).sum()),
                int((gradient != 0).sum()),
                int(((gradient != 0) & ~moving).sum()),
            ], number
            expected = [swallowed_by_definition(weight, update, target) for target in targets]
            assert row[moves.FIELDS :].tolist() == expected, (number, weight, update)


def test_small_and_large_tensors_are_counted_alike_together_and_each_alone():
    generator = torch.Generator().manual_seed(1)
    targets = [formats.FP16, formats.BF16, formats.E4M3]
    sizes = (3, 40, 100_001, 0, 7)
    weights, updates = ([torch.randn(size, generator=generator) for size in sizes] for _ in range(2))
    gradients = [None, updates[1].to(torch.float8_e5m2), updates[2].half(), updates[3], updates[4].double()]
    together, alone = torch.zeros(2, len(sizes), moves.FIELDS + 3, dtype=torch.int64)
    given = list(zip(weights, updates, gradients, strict=True))
    rows = zip(given, together, strict=True)
    moves.count_moves([moves.Move(w, u * 1e-3, g, row) for (w, u, g), row in rows], targets)
    for (weight, update, gradient), row in zip(given, alone, strict=True):
        moves.count_moves([moves.Move(weight, update * 1e-3, gradient, row)], targets)
    assert together.tolist() == alone.tolist()
    assert together[2][0] == 100_001
