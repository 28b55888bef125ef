"""DistributedDataParallel under every policy: ranks stay equal, and train as one process does on the whole batch."""

import hashlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo

from .ranks import on_ranks

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=1e-2),
}
WRAPPED = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}
POLICIES = [
    f"{level},dtype={dtype}{reduce},emulate=true"
    for level, dtype, reduce in (
        *itertools.product(("O1", "O2"), ("float16", "bfloat16"), ("",)),
        *itertools.product(("O2",), ("float16", "bfloat16"), (",reduce=float32",)),
        *itertools.product(("O1", "O2"), ("bfloat16",), (",reduce=bfloat16",)),
    )
]
#: Which of three micro-batches are in no_sync().
PAUSED = {"one": [False], "no_sync": [True, True, False], "synced": [False] * 3, "mixed": [False, True, False]}
MATRIX = [
    case
    for case in itertools.product(POLICIES, OPTIMIZERS, WRAPPED, PAUSED)
    if case[2:] != ("static", "no_sync")  # torch itself cannot begin a static graph so
    and (case[0].startswith("O2") or case[1] in ("fused", "mezzo"))
]
#: Each value of each option with each of another: the rest is slow.
CROSS = [
    ("O2,dtype=float16,emulate=true", "adamw", "plain", "no_sync"),
    ("O2,dtype=float16,emulate=true", "mezzo", "views", "mixed"),
    ("O2,dtype=float16,emulate=true", "fused", "unused", "synced"),
    ("O2,dtype=float16,emulate=true", "sgd", "static", "one"),
    ("O2,dtype=bfloat16,emulate=true", "mezzo", "unused", "no_sync"),
    ("O2,dtype=bfloat16,emulate=true", "sgd", "views", "mixed"),
    ("O2,dtype=float16,reduce=float32,emulate=true", "mezzo", "views", "no_sync"),
    ("O2,dtype=bfloat16,reduce=float32,emulate=true", "fused", "static", "synced"),
    ("O2,dtype=bfloat16,reduce=bfloat16,emulate=true", "adamw", "unused", "mixed"),
    ("O1,dtype=bfloat16,reduce=bfloat16,emulate=true", "sgd", "plain", "mixed"),
    ("O1,dtype=float16,emulate=true", "mezzo", "static", "synced"),
]


class Net(nn.Module):
    """A net whose norm stays FP32 under O2, with a layer that only the first micro-batch of a step leaves out."""

    def __init__(self, unused):
        super().__init__()
        self.inner = nn.Linear(6, 48)
        self.norm = nn.BatchNorm1d(48)
        self.side = nn.Linear(48, 48) if unused else None
        self.outer = nn.Linear(48, 3)

    def forward(self, x, with_side):
        x = torch.relu(self.norm(self.inner(x)).to(self.outer.weight.dtype))
        return self.outer(x if self.side is None or not with_side else x + self.side(x))


def trained(policy, optimizer, wrapped, paused, steps, ranks):
    """Train on this rank's part of each batch, or alone on all of it, and return what came of it."""
    torch.manual_seed(0)
    model = Net(unused=wrapped == "unused").eval()  # whose norm is not of the batch, of which ranks see parts
    amp = mezzo.MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), policy, max_grad_norm=1.0)
    run = model if ranks == 1 else DistributedDataParallel(model, **WRAPPED[wrapped])
    rank, norms, skipped = dist.get_rank() if ranks > 1 else 0, [], []
    for number in range(steps):
        make = torch.Generator().manual_seed(number)
        for part, is_paused in enumerate(PAUSED[paused]):
            x, y = torch.randn(32, 6, generator=make)[rank::ranks], torch.randn(32, 3, generator=make)[rank::ranks]
            with amp.no_sync() if is_paused else amp.autocast(), amp.autocast():
                loss = (run(x, part > 0) - y).float().square().mean() / 64
            amp.backward(loss)
        step = amp.step()
        norms.append(float(step.grad_norm))
        skipped.append(bool(step.skipped))
        amp.zero_grad(set_to_none=number % 2 == 0)
    values = [*model.state_dict().values(), *amp.state_dict()["masters"].values(), amp.loss_scale]
    bits = b"".join(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for value in values)
    return norms, skipped, hashlib.sha256(bits).hexdigest()


def all_trained(cases, steps):
    return [attempted(*case, steps, dist.get_world_size()) for case in cases]


def attempted(*case):
    try:
        return trained(*case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "cases, steps, ranks",
    [
        (CROSS, 3, 2),
        pytest.param(MATRIX, 20, 2, marks=pytest.mark.slow),
        pytest.param(CROSS, 20, 4, marks=pytest.mark.slow),
    ],
    ids=["cross", "matrix", "four ranks"],
)
def test_ranks_stay_equal_and_train_as_one_process_does(cases, steps, ranks):
    found = on_ranks(ranks, all_trained, cases, steps, timeout=1200)
    wrong = []
    for case, *each in zip(cases, *found, strict=True):
        if each != [each[0]] * ranks or isinstance(each[0], str):
            wrong.append((case, each))
            continue
        # Gradients are rounded to their dtype, each a little differently: the first step, before weights differ too.
        (norm, *_), (skipped, *_), _ = each[0]
        (expected, *_), *_ = trained(*case, 1, 1)
        if skipped or abs(norm - expected) > 1e-3 * expected:
            wrong.append((case, norm, expected))
    assert wrong == []
