"""Weights that one step uses several times: the same gradients, bit for bit, in eager, compiled and recomputed."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo

from ..support.tables import pairwise

POLICIES = [
    "O1,dtype=bfloat16,emulate=true",
    "O1,dtype=float16,emulate=true,loss_scale=16",
    "O1,dtype=bfloat16,emulate=true,low=gelu,fp32=linear",
    "O1,dtype=float16,emulate=true,loss_scale=16,fp32_math=matmul,low=softmax",
]


def plainly(function, x):
    return function(x)


class Looped(nn.Module):
    """One layer, run several times; ``run`` says how each of its turns is run."""

    def __init__(self, run=plainly, turns=4):
        super().__init__()
        self.layer, self.mix, self.run, self.turns = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16)), run, turns

    def turn(self, x):
        return (functional.gelu(self.layer(x)) @ self.mix).softmax(-1)

    def forward(self, x):
        for _ in range(self.turns):
            x = x + self.run(self.turn, x)
        return x


class Tied(nn.Module):
    """One weight as an embedding in FP32, as two products of a turn, and as the head."""

    def __init__(self, run=plainly, turns=2):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.up.weight = self.head.weight = self.embed.weight
        self.run, self.turns = run, turns

    def turn(self, x):
        return functional.gelu(self.up(x)).softmax(-1)

    def forward(self, x):
        x = x + self.embed(x.argmax(-1))
        for _ in range(self.turns):
            x = x + self.run(self.turn, x)
        return self.head(x)


def data():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def gradients(policy, build, *, micro_batches=1, wrap=lambda model: model, inside=False, backward=None):
    """Train some micro-batches; with ``inside`` what is wrapped enters the region by itself."""
    torch.manual_seed(0)
    model = build()
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)

    def in_region(x):
        with mezzo.autocast(policy, "cpu"):
            return model(x)

    run, x = wrap(in_region if inside else model), data().requires_grad_()
    for number in range(micro_batches):
        if inside:
            loss = run(x * (number + 1)).float().square().mean()
        else:
            with amp.autocast():
                loss = run(x * (number + 1)).float().square().mean()
        (backward or mezzo.MixedPrecision.backward)(amp, loss)
    return [x.grad, *(p.grad for p in model.parameters())]


def assert_equal(mine, theirs):
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert b.isfinite().all(), number
        assert b.count_nonzero() > 0, number
        assert torch.equal(a, b), f"{number}: {(a - b).abs().max()} of {b.abs().max()}"


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the input, read by Dynamo itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize(
    "policy, build, backend, where", pairwise(POLICIES, [Looped, Tied], ["eager", "aot_eager"], ["outside", "inside"])
)
def test_compiled(policy, build, backend, where):
    torch.compiler.reset()
    compiled = gradients(
        policy, build, micro_batches=2, inside=where == "inside",
        wrap=lambda run: torch.compile(run, backend=backend, fullgraph=True),
    )  # fmt: skip
    assert_equal(compiled, gradients(policy, build, micro_batches=2))


# All but checkpoints with reentry around some of a weight's uses, whose gradients are added in another order: below.
RECOMPUTED = [
    (build, what, reentrant)
    for build in (Looped, Tied)
    for what in ("turns", "whole")
    for reentrant in (True, False)
    if (build, what, reentrant) != (Tied, "turns", True)
]


@pytest.mark.parametrize("build, what, reentrant", RECOMPUTED)
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed(policy, build, what, reentrant):
    def recompute(function, x):
        return checkpoint(function, x, use_reentrant=reentrant)

    def wrapped(model):
        return lambda x: recompute(model, x)

    micro_batches = 1 if reentrant else 2
    if what == "whole":
        mine = gradients(policy, build, micro_batches=micro_batches, wrap=wrapped)
    else:
        mine = gradients(policy, lambda: build(recompute), micro_batches=micro_batches)
    assert_equal(mine, gradients(policy, build, micro_batches=micro_batches))


@pytest.mark.parametrize("build", [Looped, Tied])
@pytest.mark.parametrize("policy", POLICIES)
def test_backward_from_another_thread(policy, build):
    def there(amp, loss):
        thread = threading.Thread(target=amp.backward, args=(loss,))
        thread.start()
        thread.join()

    mine = gradients(policy, build, micro_batches=2, backward=there)
    assert_equal(mine, gradients(policy, build, micro_batches=2))


class Separate(Looped):
    """The same turns with a copy of the weights for each."""

    def __init__(self, turns=4):
        super().__init__(turns=turns)
        self.copies = nn.ModuleList(nn.Linear(16, 16) for _ in range(turns))
        self.mixes = nn.ParameterList(self.mix.detach().clone() for _ in range(turns))
        for copy in self.copies:
            copy.load_state_dict(self.layer.state_dict())

    def forward(self, x):
        for layer, mix in zip(self.copies, self.mixes, strict=True):
            x = x + (functional.gelu(layer(x)) @ mix).softmax(-1)
        return x

    def summed(self):
        """Add the copies' gradients in FP32, the last turn's first, as torch does."""
        found = []
        for params in ([c.weight for c in self.copies], [c.bias for c in self.copies], list(self.mixes)):
            total = params[-1].grad.clone()
            for param in params[-2::-1]:
                total += param.grad
            found.append(total)
        return found


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradients_of_all_uses_meet_in_fp32(policy):
    built = []

    def separate():
        built.append(Separate())
        return built[0]

    def shared():
        model = Looped()
        model.load_state_dict(built[0].state_dict(), strict=False)
        return model

    x, *_ = gradients(policy, separate)
    mine_x, mine_mix, *mine = gradients(policy, shared)
    assert_equal([mine_x, *mine, mine_mix], [x, *built[0].summed()])


class Pairs(nn.Module):
    """Checkpoints that each use one weight twice."""

    def __init__(self, run=plainly):
        super().__init__()
        self.layer, self.run = nn.Linear(32, 32), run

    def pair(self, x):
        for _ in range(2):
            x = x + functional.gelu(self.layer(x))
        return x

    def forward(self, x):
        return self.run(self.pair, self.run(self.pair, x))


def test_a_reentrant_checkpoint_adds_its_own_gradients_first_in_plain_torch_too():
    """(a + b) + (c + d) for ((a + b) + c) + d: why WeightCasts promises the same bits except there."""

    def run(policy, reentrant):
        torch.manual_seed(0)
        how = plainly if reentrant is None else lambda f, x: checkpoint(f, x, use_reentrant=reentrant)
        model = Pairs(how)
        amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        x = torch.randn(64, 32).requires_grad_()
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        return model.layer.weight.grad

    assert torch.equal(run("O0", False), run("O0", None))
    assert not torch.equal(run("O0", True), run("O0", None))
    for policy in POLICIES:
        plain = run(policy, None)
        assert torch.equal(run(policy, False), plain)
        # four terms and three additions, each off by half a unit in the last place of FP32
        assert (run(policy, True) - plain).abs().max() <= 3 * 2**-23 * plain.abs().max()
