"""What tests of weights share: numbers of every size, and what two halves keep of them, computed another way."""

import torch
from torch import nn

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


def kept(values, dtype):
    """What two halves keep: all of it in BF16; in FP16 multiples of 2**-39 below 2**-14, in float64's arithmetic."""
    if dtype == BF16:
        return values.detach().clone()
    coarse = (values.detach().double() * 2.0**39).round() * 2.0**-39
    return torch.where(values.abs() < 2.0**-14, coarse, values.detach().double()).float()


def low_of(values, dtype):
    """What the model computes with: FP16's nearest; BF16's nearest, ties away from zero."""
    if dtype == FP16:
        return values.detach().half()
    return ((values.detach().view(torch.int32) + 0x8000) & -0x10000).view(torch.float32).bfloat16()


def same(one, two):
    """Compare two FP32 tensors bit for bit."""
    return one.dtype == two.dtype and torch.equal(
        one.contiguous().view(torch.int32), two.contiguous().view(torch.int32)
    )


class Net(nn.Module):
    """Weights of several shapes, two of them one tensor, a frozen one, and a buffer; its loss is theirs alone."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second = nn.Linear(7, 5), nn.Linear(7, 5, bias=False)
            self.third, self.frozen = nn.Linear(5, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.arange(5.0) / 7)

    def forward(self, number, broken=False):
        """Return a loss in FP32: of its elements alone, so that any machine computes the same gradients."""
        loss = torch.zeros(())
        for place, param in enumerate(self.parameters()):
            wide = param.float()
            aim = torch.arange(wide.numel()).reshape(wide.shape).mul(0.37 + number + place).sin()
            loss = loss + (wide - aim).square().sum() * 0.5
        if broken:  # a finite loss, whose slope is none
            loss = loss + (self.first.weight.float() * 0).sqrt().sum()
        return loss
