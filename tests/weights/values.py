"""What tests of weights share: numbers of every size, and values on the 16-bit grid, where no cast meets a tie."""

import torch

BF16, FP16 = torch.bfloat16, torch.float16
LOW = [BF16, FP16]


def numbers(dtype, count=4096, seed=0):
    """FP32 values of every size that a low format has, of either sign, with zeros and subnormal ones."""
    generator = torch.Generator().manual_seed(seed)
    least, most = (-30, 15) if dtype == FP16 else (-126, 126)
    powers = torch.randint(least, most, (count,), generator=generator).float()
    values = (1 + torch.rand(count, generator=generator)) * powers.exp2()
    values *= torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    values[:4] = torch.tensor([0.0, -0.0, 1e-41, 65504.0])
    return values


def on_grid(shape, seed=0):
    """FP32 values that BF16 and FP16 have as well."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).clamp(-3, 3).mul(32).round().div(32)


def low_of(values, dtype):
    """What a cast of halves gives: FP16's nearest; BF16's nearest, ties away from zero."""
    if dtype == FP16:
        return values.detach().half()
    return ((values.detach().view(torch.int32) + 0x8000) & -0x10000).view(torch.float32).bfloat16()


def same(one, two):
    """Compare two FP32 tensors bit for bit."""
    return one.dtype == two.dtype and torch.equal(
        one.contiguous().view(torch.int32), two.contiguous().view(torch.int32)
    )
