"""Models that tensor parallelism cuts beside ``fully_shard``, and what one process makes of the same batches."""

import contextlib

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo

from .twins import without_ties

CLASSES, WIDTH, LENGTH, BATCH = 12, 8, 8, 4


class Rescaled(nn.Module):
    """A norm without a quotient."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class Attention(nn.Module):
    """Attention over the heads that a rank has."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (-1, 2)).transpose(-3, -2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(-3, -2).flatten(-2))


class Feed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, width, attends):
        super().__init__()
        norm = nn.LayerNorm if attends else Rescaled
        self.attention = Attention(width) if attends else None
        self.norms = nn.ModuleList(norm(width) for _ in range(1 + attends))
        self.feed = Feed(width)

    def forward(self, x):
        if self.attention is not None:
            x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[-1](x))


class Tokens(nn.Module):
    """A small language model."""

    def __init__(self, attends=True, layers=2, checkpoints=False):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Layer(WIDTH, attends) for _ in range(layers))
        self.last = nn.LayerNorm(WIDTH) if attends else Rescaled(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.checkpoints = checkpoints

    def forward(self, index):
        x = self.embed(index)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.last(x))


def tokens(**kwargs):
    torch.manual_seed(1)
    model = Tokens(**kwargs)
    without_ties(model, torch.bfloat16)
    return model


def sparse_tokens():
    """A model of few small integers: no sum of its first step is rounded, in whatever order and even in BF16."""
    torch.manual_seed(2)
    model = Tokens(attends=False, layers=1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.startswith("embed"):
                param.copy_(torch.randint(-2, 3, param.shape) / 2)
            elif param.dim() == 2:  # two in each row
                param.zero_()
                columns = torch.stack([torch.randperm(param.shape[1])[:2] for _ in range(len(param))])
                param.scatter_(1, columns, torch.randint(0, 2, columns.shape) * 2.0 - 1)
            else:
                param.copy_(torch.randint(1, 3, param.shape) / (2 if name.endswith("bias") else 1))
    return model


def plan_of(model, *, loss=False, sequence=True):
    """Return what cuts a model: by head, hidden unit and class.

    Args:
        model: One of :class:`Tokens`.
        loss: Whether logits stay cut, for ``loss_parallel``.
        sequence: Whether norms and what is between blocks have parts of the sequence.
    """
    whole, parts = Replicate(), Shard(1)
    between = parts if sequence else whole
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1) if loss else whole, use_local_output=not loss
        ),
    }
    modules = {"feed": ("up", "down"), "attention": ("query", "key", "value", "out")}
    for number, block in enumerate(model.blocks):
        for name, (*cut, back) in modules.items():
            if getattr(block, name) is None:
                continue
            path = f"blocks.{number}.{name}"
            plan |= {f"{path}.{layer}": ColwiseParallel() for layer in cut}
            plan[f"{path}.{back}"] = RowwiseParallel(output_layouts=between)
            if sequence:
                plan[path] = PrepareModuleInput(input_layouts=parts, desired_input_layouts=whole)
        if sequence:
            plan |= {f"blocks.{number}.norms.{norm}": SequenceParallel() for norm in range(len(block.norms))}
    return plan | ({"last": SequenceParallel()} if sequence else {})


class Meshed:
    """A model on a mesh of two dims, with its session; each row of ranks has its part of a batch.

    Args:
        policy: The policy.
        shape: How many ranks along the data and along the tensors; along 1 of data ``fully_shard`` is left out.
        make: Makes the model.
        optimizer: Makes the optimizer.
        loss: See :func:`plan_of`.
        sequence: See :func:`plan_of`.
        shards: Further arguments of ``mezzo.fully_shard``.
        **kwargs: Of the session.
    """

    def __init__(
        self, policy, shape=(2, 2), *, make=tokens, optimizer=None, loss=False, sequence=True, shards=None, **kwargs
    ):
        self.mesh, self.loss = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")), loss
        self.rank, self.size, model = self.mesh.get_local_rank("data"), shape[0], make()
        self.model, is_tied = model, model.head.weight is model.embed.weight
        parallelize_module(model, self.mesh["tensor"], plan_of(model, loss=loss, sequence=sequence))
        if is_tied:
            model.head.weight = model.embed.weight
        if self.size > 1:
            mezzo.fully_shard(self.model, policy, mesh=self.mesh["data"], **shards or {})
        self.optimizer = (optimizer or sgd)(self.model.parameters())
        self.amp = mezzo.MixedPrecision(self.model, self.optimizer, policy, **kwargs)

    def part(self, tensor):
        return tensor.chunk(self.size)[self.rank]

    def backward(self, number, of_logits=None, times=1.0):
        return backward(self.model, self.amp, *map(self.part, batch(number)), of_logits, cut=self.loss, times=times)

    def step(self, number, of_logits=None):
        self.backward(number, of_logits)
        step = self.amp.step()
        self.amp.zero_grad()
        return step


class Alone(Meshed):
    """The same in one process."""

    def __init__(self, policy, make=tokens, optimizer=None, shards=None, **kwargs):
        self.rank, self.size, self.loss, self.model = 0, 1, False, make()
        self.optimizer = (optimizer or sgd)(self.model.parameters())
        self.amp = mezzo.MixedPrecision(self.model, self.optimizer, policy, **kwargs)


def sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def backward(model, amp, index, labels, of_logits=None, *, cut=False, times=1.0):
    """Run a forward and a backward pass, and return the loss."""
    with loss_parallel() if cut else contextlib.nullcontext():
        with amp.autocast():
            logits = model(index)
            if of_logits is None:
                loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
            else:
                loss = of_logits(logits, labels)
            loss = loss * times
        amp.backward(loss)
    loss = loss.detach()
    return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)


def batch(number):
    """Return tokens, and the next one of each."""
    generator = torch.Generator().manual_seed(number)
    index, labels = (torch.randint(CLASSES, (BATCH, LENGTH), generator=generator) for _ in range(2))
    return index, labels
