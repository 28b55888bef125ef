"""What tests of sessions share: a small classifier, its batches and loops, and what is compared and counted."""

import contextlib
import copy
import io

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import LossScale, MixedPrecision, Policy
from mezzo.session.session import weights_of

INF, NAN = float("inf"), float("nan")

FP32 = ("O0", "O0,loss_scale=dynamic(init=1024)")
#: Every level and format; where FP16 is scaled, a scale that the small losses here do not overflow with.
LOW = (
    "O1,emulate=true,loss_scale=dynamic(init=1024)",
    "O1,dtype=bfloat16,emulate=true",
    "O2,emulate=true,loss_scale=dynamic(init=1024)",
    "O2,dtype=bfloat16,emulate=true",
)
EVERY = (*FP32, *LOW)
O3 = ("O3,emulate=true", "O3,dtype=bfloat16,emulate=true")

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=1e-2, eps=1e-4),
}


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def loss_of(model, number, amp=None):
    """The loss of a batch, in a session's region where one is given."""
    x, y = batch(number)
    with contextlib.nullcontext() if amp is None else amp.autocast():
        out = model(x)
    return functional.cross_entropy(out.float(), y)


def built(optimizer="SGD", model=None):
    model = network() if model is None else model
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return model, make(model.parameters())


def session(policy, optimizer="SGD", **options):
    model, made = built(optimizer)
    return model, made, MixedPrecision(model, made, policy, **options)


@contextlib.contextmanager
def attached(*args, **options):
    amp = mezzo.attach(*args, **options)
    try:
        yield amp
    finally:
        amp.detach()


def backward(amp, model, number, *, spoilt=False):
    amp.backward(loss_of(model, number, amp))
    if spoilt:
        spoil(model)


def spoil(model, value=INF, which=0):
    [p for p in model.parameters() if p.grad is not None][which].grad.fill_(value)


def poisoned(output):
    """A finite loss whose gradients overflow in part."""
    factors = torch.ones_like(output)
    factors[::2] = INF
    output.register_hook(lambda gradient: gradient * factors)
    return output.sum()


def train(amp, model, number, *, spoilt=False, micro_batches=1):
    """One step in the five lines."""
    for part in range(micro_batches):
        backward(amp, model, number * micro_batches + part, spoilt=spoilt)
    step = amp.step()
    amp.zero_grad()
    return step


def train_plainly(model, optimizer, number, *, spoilt=False, micro_batches=1, edit=None):
    """One step as plain PyTorch has it."""
    for part in range(micro_batches):
        loss_of(model, number * micro_batches + part).backward()
    if spoilt:
        spoil(model)
    if edit is not None:
        edit(model)
    optimizer.step()
    optimizer.zero_grad()


def weights(amp):
    """The values that optimizers update, exactly."""
    return [value.detach().clone() for model in weights_of(amp).models for value in model.state_dict().values()]


def facts(model, *optimizers, amp=None):
    """All that a run has come to: weights, what optimizers keep of them, the scale, the account."""
    states = [{k: v for k, v in o.state_dict().items() if k != "mezzo"} for o in optimizers]
    rest = [] if amp is None else [weights(amp), float(amp.loss_scale), amp.stats()]
    return copy.deepcopy([dict(model.state_dict()), states, *rest])


def on_disk(*parts):
    """What a program writes to a file of these parts' states, and reads from it."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(one, two):
    """Compare the leaves of nested containers, tensors bit for bit."""
    flat_one, flat_two = (torch.utils._pytree.tree_leaves(value) for value in (one, two))
    assert len(flat_one) == len(flat_two)
    for a, b in zip(flat_one, flat_two, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def assert_near(mine, theirs, start, share=0.05):
    """Weights moved as other weights did, but for a share of the way."""
    ours, true, first = (torch.cat([t.detach().flatten().float() for t in values]) for values in (mine, theirs, start))
    assert torch.linalg.vector_norm(ours - true) < share * torch.linalg.vector_norm(true - first)


class Syncs(TorchDispatchMode):
    """Count what on a GPU would wait for the device: conversions of tensors to Python values."""

    WAITS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    )
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.WAITS
        return func(*args, **(kwargs or {}))


class Weights(nn.Module):
    """Parameters whose gradients are whatever a linear loss says: d(c·w)/dw = c."""

    def __init__(self, *shapes, value=0.0):
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.full((shape,), value)) for shape in shapes)

    def loss(self, *coefficients):
        return sum((w.float() * c).sum() for w, c in zip(self.vectors, coefficients, strict=True))


def over(model, policy, *groups, lr=1.0, **options):
    """A session over a model of :class:`Weights` with SGD; several optimizers where several lists of them are given."""
    lists = groups or (list(model.parameters()),)
    optimizers = [torch.optim.SGD(values, lr=lr) for values in lists]
    return optimizers, MixedPrecision(model, optimizers, policy, **options)


def counted(rules="none", *, level="O0", params=1, **options):
    """A session over parameters whose gradients are all ones, for what is counted of its steps."""
    model = Weights(*[2] * params)
    policy = Policy.parse(level).evolve(loss_scale=rules if isinstance(rules, LossScale) else LossScale.parse(rules))
    return model, over(model, policy, **options)[1]


def iterate(model, amp, event=".", poison=INF):
    """One step: clean, with an overflow (X), or with a loss that is not finite itself (F)."""
    loss = model.loss(*[1.0] * len(model.vectors))
    amp.backward(loss * poison if event == "F" else loss)
    if event == "X":
        model.vectors[0].grad[0] = poison
    try:
        return amp.step()
    finally:
        amp.zero_grad()


def _names_in(owner, *, below=False):
    functions = {(owner, name): value for name, value in vars(owner).items() if callable(value)}
    for subclass in owner.__subclasses__() if below else ():
        functions |= _names_in(subclass, below=True)
    return functions


def bound_names():
    """What stands under the names of torch's that sessions bind, and beside them."""
    owners = (torch.autograd, nn.utils, nn.utils.clip_grad, swa_utils, torch.amp, torch.amp.GradScaler,
              swa_utils.AveragedModel, lr_scheduler.ReduceLROnPlateau, torch.optim.Optimizer, torch.Tensor,
              nn.Module)  # fmt: skip
    functions = _names_in(lr_scheduler.LRScheduler, below=True)
    for owner in owners:
        functions |= _names_in(owner)
    return functions
