"""Rounding on bit patterns against torch's own casts, and random bits against statistics."""

import math

import pytest
import torch

from mezzo.step.rounding import keys, nearest, noise, stochastic

BF16, FP16 = torch.bfloat16, torch.float16
SPECIAL = [0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 2.0**-25, 3 * 2.0**-25, -(2.0**-25), 65519.9, 65520.0, -7e4]
SPECIAL += [3.3961776e38, 3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-14 - 2.0**-26]


def log_uniform(count=1_000_000):
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    values = bits.view(torch.float32)
    return torch.cat([torch.tensor(SPECIAL), values[~values.isnan()]])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_nearest_is_torch_s_cast(dtype):
    w = log_uniform()
    assert torch.equal(nearest(w, dtype).to(dtype).view(torch.int16), w.to(dtype).view(torch.int16))
    fits = w.to(dtype).isfinite()
    assert torch.equal(nearest(w, dtype)[fits], w.to(dtype)[fits].float())  # on the grid already, before any cast
    assert nearest(torch.tensor(math.nan), dtype).isnan()


def test_stochastic_rounding_takes_one_of_the_two_neighbours_with_the_right_odds():
    w = log_uniform(2000).clamp(-3e38, 3e38)
    every = torch.arange(0, 1 << 16, 1 << 6, dtype=torch.int32) + 32  # 1024 of the 65536 draws, spread evenly
    rounded = stochastic(w.expand(len(every), -1), every[:, None].expand(-1, len(w)))
    assert torch.equal(rounded, rounded.bfloat16().float())
    spacing = torch.exp2((w.double().frexp().exponent - 8).clamp(min=-133).double())
    assert ((rounded.double() - w).abs() < spacing).all()
    assert ((rounded.double().mean(0) - w).abs() <= spacing / 1024).all()
    on_grid = w.bfloat16().float() == w
    assert torch.equal(rounded[:, on_grid], w[on_grid].expand(len(every), -1))


def test_stochastic_rounding_keeps_infinities_and_nan():
    bits = torch.full((3,), 0xFFFF, dtype=torch.int32)
    rounded = stochastic(torch.tensor([math.inf, -math.inf, math.nan]), bits)
    assert rounded[:2].tolist() == [math.inf, -math.inf]
    assert rounded[2].isnan()


def test_noise_is_the_mixer_it_says_it_is():
    def mixer(x):  # lowbias32, in Python integers
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    index = torch.tensor([0, 1, 2, 1000, 2**31 - 1, -1], dtype=torch.int32)
    for key, slot in ((0, 0), (12345, 0), (-7, 2)):
        expected = [mixer((i + key + slot * 0x9E3779B9) % 2**32) for i in index.tolist()]
        assert [n % 2**32 for n in noise(index, torch.tensor(key, dtype=torch.int32), slot).tolist()] == expected


def test_noise_is_even_and_uncorrelated_between_neighbours_slots_and_steps():
    index = torch.arange(200_000, dtype=torch.int32)
    steps = [keys(torch.tensor(step), 2) for step in (1, 2)]
    draws = [noise(index, key, slot) & 0xFFFF for key in (*steps[0], *steps[1]) for slot in (0, 1)]
    uniform = [draw.double() / 65536 for draw in draws]
    for one in uniform:
        assert abs(one.mean() - 0.5) < 5 * (1 / 12 / len(index)) ** 0.5
        assert abs(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1]) < 5 / len(index) ** 0.5
    others = torch.corrcoef(torch.stack(uniform)) - torch.eye(len(uniform))
    assert others.abs().max() < 5 / len(index) ** 0.5


def test_keys_differ_by_parameter_step_and_seed_and_by_nothing_else():
    made = [keys(torch.tensor(step), 50, seed) for step in range(1, 20) for seed in (0, 1, 12345678901)]
    assert len(torch.cat(made).unique()) == 50 * len(made)
    assert torch.equal(keys(torch.tensor(7), 5), keys(torch.tensor(7), 50)[:5])
