"""Small models, each with something that a placement may get wrong, and what watches the graphs that they become."""

import copy
import re
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._dynamo import register_backend
from torch.fx import GraphModule
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mezzo


class Block(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, -1)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.out(functional.gelu(self.fc(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.position = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithLoss(GPT):
    def forward(self, tokens):
        logits = super().forward(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += x
        return functional.relu(y, inplace=True)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)])

    def forward(self, x):
        x = self.convs[0](x)
        x = torch.log(x.abs() + 1)
        x = self.convs[1](x)
        x = x.square()
        return self.convs[2](x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.lstm(x)[0]))


class GroupedQueries(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, 4, 4).transpose(1, 2)
        kv = self.kv(x).view(batch, tokens, 2, 4).transpose(1, 2)
        kv = kv[:, :, None].expand(batch, 2, 2, tokens, 4).reshape(batch, 4, tokens, 4)
        scores = q @ kv.transpose(-1, -2) / 2
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        mixed = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), kv)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, 16))


class Expanded(nn.Module):
    """A small tensor that is made, repeated by a view, and wanted in the other precision."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = torch.exp(self.a(x[:1])).expand(x.shape[0], 8)
        return self.b(y) + y.sum()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        def inner(y):
            return torch.exp(self.b(y)) * 0.1

        def outer(y):
            return checkpoint(inner, functional.gelu(self.a(y)), use_reentrant=False) + y

        return self.a(checkpoint(outer, x, use_reentrant=False))


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = self.linear(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.seen += 1
        return y - self.mean


class Asked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        wide = y.float().pow(2).mean(-1, keepdim=True)
        y = y * torch.rsqrt(wide + 1e-5).to(y.dtype)
        z = self.b(y).type_as(x)
        return z.to(x.dtype) + x


class AskedAsAnother(nn.Module):
    """The program asks for the dtypes of tensors that a placement makes low."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        wide = torch.softmax(y, -1).type_as(y)
        once = y.float().exp()
        return self.b(wide + x.to(y)) + y.float() * torch.cumsum(y, -1) + once


class Chains(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        y.mul_(2).add_(x).clamp_(-3, 3)
        z = y[:, :4]
        z += 1
        y[:, 4:] = 0.5
        return self.b(y)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        one, two = y.chunk(2, -1)
        low, high = torch.aminmax(y, dim=-1, keepdim=True)
        best, places = y.topk(4, -1)
        three, four = torch.split(torch.exp(y), 4, -1)
        return self.b(one * two) + best + three / four + (high - low), places


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        y = torch.where(y > 0, y, x * 0.1)
        y = functional.leaky_relu(y)
        y = torch.cat([y, torch.softmax(x, -1)], 0)
        return functional.mse_loss(self.b(y), torch.cat([x, x], 0))


class Island(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.head(functional.silu(self.body(x)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(Doubled.apply(self.a(x)))


@torch.library.custom_op("mezzo_tests_plan::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@tripled.register_fake
def _(x):
    return torch.empty_like(x)


tripled.register_autograd(lambda ctx, gradient: gradient * 3)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(tripled(self.a(x)))


class OwnRegion(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = functional.relu(self.a(x))
        with torch.autocast("cpu", enabled=False):
            y = self.b(y.float()) * 2
        return self.c(y)


class Parts(nn.Module):
    """With integers, float64, and complex numbers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        order = y.argsort(-1).float().double() / 8
        waves = torch.fft.rfft(y.float(), dim=-1)
        back = torch.fft.irfft(waves * 0.5, n=8, dim=-1)
        return self.b(back + y) + order.to(x.dtype)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, *, scale, mask=None):
        y = self.a(x) * scale
        return y if mask is None else y.masked_fill(mask, -1.0)


def _encoder():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


@dataclass
class Case:
    make: object
    inputs: object = lambda: (torch.randn(4, 8),)
    kwargs: object = dict
    policy: str = "O1,bf16"
    trains: bool = True
    #: Names of ops that must be left alone.
    alone: tuple = ()
    grad: bool = True


def images():
    return (torch.randn(2, 4, 6, 6),)


def rows():
    return (torch.randn(2, 5, 16),)


def tokens():
    return (torch.randint(17, (2, 6)),)


CASES = {
    "gpt": Case(GPT, tokens),
    "gpt, no grad": Case(GPT, tokens, grad=False),
    "with a loss": Case(WithLoss, tokens),
    "residual": Case(Residual, images),
    "residual, eval": Case(Residual, images, trains=False),
    "chain": Case(Chain, images),
    "encoder": Case(_encoder, rows),
    "encoder, eval": Case(_encoder, rows, trains=False),
    "encoder, fast path": Case(_encoder, rows, trains=False, grad=False),
    "lstm": Case(Recurrent, lambda: (torch.randn(2, 4, 8),)),
    "grouped queries": Case(GroupedQueries, rows),
    "expanded": Case(Expanded),
    "checkpoints": Case(Checkpointed, rows),
    "nested checkpoints": Case(Nested),
    "buffers": Case(Buffered),
    "asked": Case(Asked),
    "asked as another": Case(AskedAsAnother),
    "in place": Case(Chains),
    "several": Case(Several),
    "chosen": Case(Chosen),
    "island": Case(Island, policy="O1,bf16,fp32_module=head"),
    "function": Case(Foreign),
    "custom op": Case(Custom, alone=("tripled",)),
    "own region": Case(OwnRegion),
    "parts": Case(Parts),
    "named": Case(Named, kwargs=lambda: {"scale": torch.rand(8), "mask": torch.rand(4, 8) > 0.5}),
    "math": Case(Block, rows, policy="O1,bf16,fp32_math=gelu+add"),
}  # fmt: skip


def built(case, seed=0):
    """Return a model, its arguments and keywords: the same each time."""
    torch.manual_seed(seed)
    model = case.make().train(case.trains)
    torch.manual_seed(seed + 1)
    return model, case.inputs(), case.kwargs()


def first(result):
    return result[0] if isinstance(result, tuple) else result


# What watches ----------------------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Count kernels that convert FP32 to a low format, or back."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += {args[0].dtype, out.dtype} == {torch.float32, torch.bfloat16}
        return out


@dataclass
class Ran:
    """A call as it ran: its node's name, the program's line, and dtypes of the floating tensors it read and gave."""

    name: str
    line: str
    read: tuple
    gave: tuple


@dataclass
class Watched:
    calls: list = field(default_factory=list)
    graphs: list = field(default_factory=list)
    casts: list = field(default_factory=list)
    kept: list = field(default_factory=list)


WATCHED = [Watched()]


@contextmanager
def watching():
    """Keep what graphs do that are compiled with ``inner="mezzo_tests_watched"``."""
    WATCHED.append(Watched())
    try:
        yield WATCHED[-1]
    finally:
        WATCHED.pop()


def _floats(value):
    if isinstance(value, torch.Tensor):
        return (value.dtype,) if value.is_floating_point() else ()
    if isinstance(value, tuple | list):
        return tuple(dtype for part in value for dtype in _floats(part))
    return ()


def _teller(name, line):
    def record(read, gave):
        WATCHED[-1].calls.append(Ran(name, line, read, _floats(gave)))

    return record


def _read(*values):
    return _floats(values)


def _line(node):
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    users = [f"{file}:{line}" for file, line in lines if "/torch/" not in file and "/mezzo/" not in file]
    return users[-1] if users else ""


def _name(node):
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return target.partition(".")[0].strip("_")


def watch(module):
    """Record what each call of a graph, and of the graphs inside it, reads and returns."""
    for graph_module in module.modules():
        if not isinstance(graph_module, GraphModule):
            continue
        for node in list(graph_module.graph.nodes):
            if node.op not in ("call_function", "call_method") or "autocast" in str(node.target):
                continue
            name, line = _name(node), _line(node)
            given = list(node.all_input_nodes)
            with graph_module.graph.inserting_before(node):
                read = graph_module.graph.call_function(_read, tuple(given))
            with graph_module.graph.inserting_after(node):
                graph_module.graph.call_function(_teller(name, line), (read, node))
        graph_module.recompile()


@register_backend(name="mezzo_tests_watched")
def watched(module, inputs):
    """Run a graph as it is, and keep what it does."""
    WATCHED[-1].graphs.append(module)
    plain = copy.deepcopy(module)
    watch(plain)

    def run(*args):
        with Casts() as casts:
            out = plain(*args)
        WATCHED[-1].casts.append(casts.count)
        return out

    return run


def planned_run(case, objective="time", policy=None):
    """Run a model compiled under a plan; return what it gave, what was planned, and what ran."""
    torch._dynamo.reset()
    model, args, kwargs = built(case)
    backend = mezzo.compile_backend(policy or case.policy, objective, inner="mezzo_tests_watched")
    rnn = torch._dynamo.config.patch(allow_rnn=True)
    with watching() as seen, torch.set_grad_enabled(case.grad), rnn:
        out = torch.compile(model, backend=backend)(*args, **kwargs)
    return model, out, backend, seen


def matched(plan, calls):
    """Return pairs of an op of a plan and the call that was it, in order; None where there is no such call."""
    pairs, left = [], list(calls)
    for op in plan.ops:
        index = next((i for i, call in enumerate(left) if call.line == op.line and _alike(call.name, op.op)), None)
        pairs.append((op, None if index is None else left[index]))
        if index is not None:
            del left[: index + 1]
    return pairs


#: What Dynamo's graph calls ops that plans call otherwise.
_ALSO = {"truediv": "div", "type_as": "to"}


def _alike(ran, planned):
    one, other = ran, planned.rpartition("::")[2].strip("_")
    return one == other or _ALSO.get(one, one) == _ALSO.get(other, other)


def flat(model, out):
    """Return what a model gave, and its gradients, as one vector each."""
    outs = [tensor.detach().float().flatten() for tensor in _tensors(out) if tensor.is_floating_point()]
    gradients = [tensor.grad.float().flatten() for tensor in model.parameters() if tensor.grad is not None]
    return torch.cat(outs), torch.cat(gradients) if gradients else torch.zeros(1)


def _tensors(value):
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in _tensors(part)]


def trained(case, call=None, region=nullcontext):
    """Run a model once, forward and, where it has gradients, backward; return it and what it gave."""
    model, args, kwargs = built(case)
    with torch.set_grad_enabled(case.grad), region():
        out = (call(model) if call else model)(*args, **kwargs)
    if case.grad:
        sum(tensor.float().square().mean() for tensor in _tensors(out) if tensor.requires_grad).backward()
    return model, out
