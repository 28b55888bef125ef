"""Models that several files here run in several ways, and how their results are compared."""

import dataclasses

import torch
from torch import nn
from torch.nn import functional


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(build):
    torch.manual_seed(0)
    return build()


def assert_same(mine, theirs):
    """Dtypes and bits are the same, of numbers that say something."""
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert a.dtype == b.dtype, number
        assert b.isfinite().all(), number
        assert b.count_nonzero() > 0, number
        assert torch.equal(a, b), f"{number}: {(a - b).abs().max()} of {b.abs().max()}"


def plainly(function, x):
    return function(x)


class Block(nn.Module):
    """A norm, products and exponentials in a method, which ``run`` runs: all kinds of ops that a policy treats."""

    width = 8

    def __init__(self, run=plainly):
        super().__init__()
        self.norm, self.up, self.down, self.run = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), run

    def body(self, x):
        return self.down(functional.gelu(self.up(self.norm(x))).softmax(-1).exp())

    def forward(self, x):
        return x + self.run(self.body, x)


class Looped(nn.Module):
    """One layer, run several times; ``run`` says how each of its turns is run."""

    width = 16

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
    """One weight as an embedding, as two products of a turn, and as the head."""

    width = 16

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


@dataclasses.dataclass
class Output:
    states: torch.Tensor
    lengths: torch.Tensor


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.seen = nn.Conv1d(4, 8, 3, padding=1), nn.LayerNorm(8), []

    def forward(self, x, *, lengths=None):
        out = self.conv(x)
        self.seen.append(out.dtype)
        return Output(self.norm(functional.gelu(out).mT), lengths)


class Speech(nn.Module):
    """Called by several methods, as Whisper is by ``generate``."""

    def __init__(self):
        super().__init__()
        self.encoder, self.table = Encoder(), nn.Embedding(10, 8)
        self.rnn, self.head, self.drop = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 10), nn.Dropout(0.0)

    def encode(self, x):
        return self.encoder(x, lengths=torch.tensor([3]))

    def decode(self, states, tokens):
        hidden, _ = self.rnn(states + self.table(tokens))
        return self.head(self.drop(hidden))

    def forward(self, x, tokens):
        return self.decode(self.encode(x).states, tokens)

    def generate(self, x, tokens):
        return self.decode(self.encode(x).states, tokens).argmax(-1)


def speech_data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 6, generator=generator), torch.randint(10, (2, 6), generator=generator)
