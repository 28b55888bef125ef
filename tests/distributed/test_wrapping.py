"""Which modules `fully_shard` gathers by themselves, in which dtype, and which choices are refused."""

import torch
from torch import nn

from mezzo import Policy
from mezzo.cast.model.checks import wanted_storage
from mezzo.distributed.sharding import modules_to_wrap, plan_units

BF16, FP32 = torch.bfloat16, torch.float32
O2 = Policy.O2("bfloat16")
LOW = Policy.O3("bfloat16", keep_batchnorm_fp32=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.BatchNorm1d(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.few = nn.ModuleList([nn.Linear(4, 4)])
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def forward(self, x):
        for layer in (*self.few, *self.blocks):
            x = layer(x)
        return self.head(x * self.scale)


def paths(model, wrap):
    modules = modules_to_wrap(model, wrap)
    return {path for path, module in model.named_modules() if module in modules}


def plan(model, policy, wrap):
    units = plan_units(model, wanted_storage(model, policy).plain, policy.param_dtype, modules_to_wrap(model, wrap))
    return [(unit.path, unit.dtype) for unit in units]


def test_modules_are_chosen_by_class_or_by_themselves():
    model = Net()
    both = {"blocks.0", "blocks.1"}
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    for wrap, expected in [
        (None, both),
        (Block, both),
        ([Block], both),
        (nn.Linear, linears),
        ((nn.ReLU, nn.BatchNorm1d), {"blocks.0.norm", "blocks.1.norm"}),  # which have parameters, the others none
        ([], set()),
    ]:
        assert paths(model, wrap) == expected, wrap


def test_what_is_stored_in_another_dtype_is_gathered_apart():
    model = Net()
    norms = [("blocks.0.norm", FP32), ("blocks.1.norm", FP32)]
    for policy, wrap, expected in [
        (LOW, (), [*norms, ("", BF16)]),
        (LOW, None, [norms[0], ("blocks.0", BF16), norms[1], ("blocks.1", BF16), ("", BF16)]),
        (Policy.O3("bfloat16"), (), [("", BF16)]),
        (O2.keep_fp32(modules="head"), None, [("blocks.0", FP32), ("blocks.1", FP32), ("", FP32)]),  # bytes of both
        (Policy.O0(), None, [("blocks.0", FP32), ("blocks.1", FP32), ("", FP32)]),
        (Policy.O1("float16"), (), [("", FP32)]),
        (LOW.keep_fp32(modules="head"), (), [*norms, ("head", FP32), ("", BF16)]),  # one unit for both of its layers
        (
            LOW.keep_fp32(modules="head"),
            nn.Sequential,
            [*norms, ("head", FP32), ("", BF16)],
        ),
        (LOW.keep_fp32(params="head.0.*"), (), [*norms, ("head.0", FP32), ("", BF16)]),
        (LOW.keep_fp32(modules="blocks.*"), (), [("blocks.0", FP32), ("blocks.1", FP32), ("", BF16)]),
        # The model's own parameter in FP32: what is low is gathered apart then, as large as it can be.
        (
            LOW.keep_fp32(params="scale"),
            (),
            [("few.0", BF16)]
            + [(f"blocks.{i}.{name}", BF16) for i in range(2) for name in ("up", "down")]
            + [("head", BF16), ("", FP32)],
        ),
    ]:
        assert plan(model, policy, wrap) == expected, (str(policy), wrap)
