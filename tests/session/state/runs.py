"""Two models, two optimizers and two losses, saved and loaded."""

import copy
import io
import itertools
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

from mezzo import MixedPrecision

DYNAMIC = "dynamic(init=1024,interval=3)"

POLICIES = {
    "O0": "O0",
    "O1 fp16": f"O1,dtype=float16,emulate=true,loss_scale={DYNAMIC}",
    "O1 bf16": "O1,dtype=bfloat16,emulate=true",
    "O2 fp16": f"O2,dtype=float16,emulate=true,loss_scale={DYNAMIC}",
    "O2 bf16": "O2,dtype=bfloat16,emulate=true",
    "O3 fp16": "O3,dtype=float16,emulate=true",
    "O3 bf16": "O3,dtype=bfloat16,emulate=true",
}

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4, fused=True),
}


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6) / 8)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens) + self.table))


class Run:
    """Two models, of which one has tied weights and batch norm, two optimizers and two losses."""

    def __init__(self, policy, optimizer="sgd", *, seed=0, num_losses=2, **options):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.trunk, self.tail = Trunk(), nn.Linear(11, 3)
        self.one, self.two = (
            OPTIMIZERS[optimizer](self.trunk.parameters()),
            OPTIMIZERS[optimizer](self.tail.parameters()),
        )
        policy = POLICIES.get(policy, policy)
        self.amp = MixedPrecision(
            [self.trunk, self.tail], [self.one, self.two], policy, num_losses=num_losses, max_grad_norm=1.0, **options
        )
        self.parts = {"trunk": self.trunk, "tail": self.tail, "one": self.one, "two": self.two, "amp": self.amp}

    def losses(self, number):
        generator = torch.Generator().manual_seed(number)
        tokens, target = (torch.randint(0, n, (8,), generator=generator) for n in (11, 3))
        with self.amp.autocast():
            hidden = self.trunk(tokens)
            first, second = (
                functional.cross_entropy(hidden, tokens),
                functional.cross_entropy(self.tail(hidden), target),
            )
        # Every fifth batch overflows on its way back, while the loss itself stays finite.
        return first * (1e36 if number % 5 == 4 else 1), second

    def backward(self, number, loss_id=None):
        first, second = self.losses(number)
        if loss_id is None:
            self.amp.backward(first + second)
        else:
            self.amp.backward((first, second)[loss_id], loss_id=loss_id)

    def train(self, numbers):
        for number in numbers:
            self.backward(2 * number, 0)
            self.backward(2 * number + 1, 1)
            self.amp.step()
            self.amp.zero_grad()

    def saved(self):
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load(self, saved, order=None):
        saved = copy.deepcopy(saved)  # torch's optimizers go on in the tensors that they load
        for name in order or self.parts:
            self.parts[name].load_state_dict(saved[name])

    def everything(self):
        """What loading may change, and what a refusal may not."""
        tensors = [t for m in (self.trunk, self.tail) for t in m.parameters()] + list(self.amp.master_params())
        return self.saved(), [None if t.grad is None else t.grad for t in tensors]

    def fp32(self):
        """The weights that an optimizer updates, in FP32, by name."""
        names = [
            f"{n}.{name}" for n, model in enumerate((self.trunk, self.tail)) for name, _ in model.named_parameters()
        ]
        return dict(zip(names, self.amp.master_params(), strict=True))


def through_a_file(saved):
    """As the next process reads it."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


#: The orders of loading a model, an optimizer and a session; the second of each kind follows the first.
ORDERS = [
    [
        name
        for kind in order
        for name in {"model": ("trunk", "tail"), "optimizer": ("one", "two"), "amp": ("amp",)}[kind]
    ]
    for order in itertools.permutations(("model", "optimizer", "amp"))
]


def linear(policy, *, width=3, bias=True, num_losses=1, optimizers=1, dtype=None):
    """A small session; returns its parts."""
    torch.manual_seed(0)
    model = nn.Linear(4, width, bias=bias).to(dtype or torch.float32)
    params = list(model.parameters())
    groups = [params] if optimizers == 1 else [params[:1], params[1:]]
    built = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
    amp = MixedPrecision(model, built, POLICIES.get(policy, policy), num_losses=num_losses)
    return SimpleNamespace(model=model, optimizers=built, amp=amp)


def one_step(run, *, finish=True):
    with run.amp.autocast():
        loss = run.model(torch.ones(2, 4)).square().mean()
    run.amp.backward(loss)
    if finish:
        run.amp.step()
        run.amp.zero_grad()
