"""What models give out is the program's: in the graph where it was, FP32 to whoever reads it, there once.

The oracle is the same program in plain torch.
"""

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.cast.model.outputs import ReadInFP32

from . import models


def seeded(make, *args):
    return models.seeded(lambda: make(*args))


#: One scale of 1: what a pass retains at a tensor is no business of this file's.
POLICIES = [
    f"{level},dtype={dtype},emulate=true,loss_scale=none" for level in ("O1", "O2") for dtype in ("bfloat16", "float16")
]
BITS = {"bfloat16": 8, "float16": 11, "O0": 24}
x = torch.linspace(-1, 1, 32).reshape(4, 8)

Pair = collections.namedtuple("Pair", "features scores")


@dataclasses.dataclass
class Output:
    scores: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Product(torch.autograd.Function):
    """A product whose derivatives are a program's own."""

    @staticmethod
    def forward(ctx, f, w):
        ctx.save_for_backward(f, w)
        return f @ w.to(f.dtype).mT

    @staticmethod
    def backward(ctx, gradient):
        f, w = ctx.saved_tensors
        assert f.dtype == gradient.dtype
        return gradient @ w.to(f.dtype), (gradient.mT @ f).to(w.dtype)


class Net(nn.Module):
    """Gives out its features, and what it makes of them, in one structure or another."""

    def __init__(self, form="tuple"):
        super().__init__()
        self.form, self.a, self.b, self.c = form, nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        f = self.a(x)
        h = self.b(f.tanh())
        y = self.c(h)
        return {
            "tuple": lambda: (f, h, y),
            "reversed": lambda: [y, h, f],
            "twice": lambda: (f, f, y, y),
            "dict": lambda: {"y": y, "parts": {"f": f, "h": h}},
            "named": lambda: Pair(f, y),
            "dataclass": lambda: Output(y, (f, h)),
            "checkpoint": lambda: (f, checkpoint(self.c, f, use_reentrant=False)),
            "function": lambda: (f, Product.apply(f, self.c.weight)),
            "loss": lambda: (y.square().mean(), y),
            "views": lambda: (f.view(8, 8), f.chunk(2, -1)[0], self.c(f.view(8, 8).view(4, 16))),
        }[self.form]()

    def step(self, x):
        return self(x)


def given(output):
    leaves = tree_leaves(output if not isinstance(output, Output) else [output.scores, *output.hidden])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


STYLES = ["attach", "five lines", "a method"]


@contextlib.contextmanager
def session(model, policy, style="attach"):
    """Yield what calls the model."""
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    if style == "five lines":  # whose models give out what they compute, unless the policy says otherwise
        amp = mezzo.MixedPrecision(model, made, f"{policy},output_dtype=float32")

        def call(x):
            with amp.autocast():
                return model(x)

    else:
        amp = mezzo.attach(model, made, policy)
        call = model.step if style == "a method" else model
    try:
        yield call
    finally:
        amp.close()


def slopes(output):
    """The gradients of all that is given out by each of it: of plain torch's graph."""
    distinct = list({id(one): one for one in given(output) if one.dim()}.values())
    loss = sum((one.float() * torch.linspace(-1, 1, one.numel()).view_as(one)).square().sum() for one in given(output))
    return torch.autograd.grad(loss, distinct, allow_unused=True)


def assert_near(actual, true, policy, factor=8.0):
    bits = BITS[mezzo.Policy.parse(policy).dtype.__str__().removeprefix("torch.")]
    assert torch.linalg.vector_norm(actual - true) <= factor * 2.0**-bits * torch.linalg.vector_norm(true)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("style", STYLES)
def test_each_output_is_where_it_is_in_the_graph(policy, style):
    for form in ("tuple", "reversed", "twice", "dict", "named", "dataclass", "checkpoint", "function", "loss", "views"):
        model = seeded(Net, form)
        plain = copy.deepcopy(model)
        true = slopes(plain(x))
        with session(model, policy, style) as call:
            output = call(x)
            assert type(output) is type(plain(x))
            assert {one.dtype for one in given(output)} == {torch.float32}, form
            for mine, its in zip(slopes(output), true, strict=True):
                assert (mine is None) == (its is None), form
                if mine is not None:
                    assert mine.dtype == torch.float32
                    assert_near(mine, its, policy)
            for mine, its in zip(given(output), given(plain(x)), strict=True):
                assert mine.shape == its.shape
                assert_near(mine.detach(), its.detach(), policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("style", STYLES)
def test_what_is_told_to_retain_its_gradient_has_one_and_hooks_are_called(policy, style):
    def run(call):
        f, *_, y = call(x)
        seen = []
        f.register_hook(lambda g: seen.append(g.float()))
        f.retain_grad()
        assert f.grad is None
        (y.square().mean() + 0.1 * f.abs().mean()).backward()
        return [f.grad, *seen]

    for form in ("tuple", "function"):
        model = seeded(Net, form)
        true = run(copy.deepcopy(model))
        with session(model, policy, style) as call:
            results = run(call)
            for mine, its in zip(results, true, strict=True):
                assert mine.dtype == torch.float32
                assert_near(mine, its, policy)


def test_what_others_are_not_made_of_is_a_plain_cast():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.split = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)

        def forward(self, x):
            one, other = self.split(x).chunk(2, -1)  # two outputs of one node
            return self.a(x), self.b(x), one, other.square()

    model = Twins()
    with session(model, POLICIES[0]) as call:
        assert [type(output) for output in call(x)] == [torch.Tensor] * 4
        with torch.no_grad():
            assert [type(output) for output in call(x)] == [torch.Tensor] * 4
    model = Net()
    with session(model, "O1,emulate=true,output_dtype=float16") as call:
        assert [type(output) for output in call(x)] == [torch.Tensor] * 3


def test_fp32_that_others_are_made_of_stays_it_where_outputs_are_low():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            f = self.a(x).exp()  # FP32
            return f, self.b(f)

    model = Normed()
    with session(model, f"{POLICIES[0]},output_dtype=bfloat16") as call:
        f, y = call(x)
        assert (f.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        assert torch.autograd.grad(y.float().sum(), f)[0].shape == f.shape


# Reading ------------------------------------------------------------------------------------------------


@pytest.fixture
def read():
    """Features of 16 bits that are read in FP32, and their values."""
    model = seeded(Net)
    with session(model, POLICIES[0]) as call:
        f, _, _ = call(x)
        assert type(f) is ReadInFP32
        yield f, f.detach().clone()


def test_whatever_reads_it_computes_in_fp32(read):
    f, values = read
    assert (values.dtype, type(values)) == (torch.float32, torch.Tensor)
    assert torch.equal(values, values.bfloat16().float())  # 16 bits they are
    third, other = values / 3, torch.linspace(0, 1, 16)
    reads = [
        (f / 3, third), (f @ other, values @ other), (other + f, other + values), (f[1:, ::2], values[1:, ::2]),
        (f.T, values.T), (f.data, values), (torch.cat([f, f]), torch.cat([values, values])),
        (torch.stack([f, values]).sum(), values.sum() * 2), (f.softmax(-1), values.softmax(-1)),
        (functional.mse_loss(f, torch.zeros_like(f)), values.square().mean()), (f.view(-1).norm(), values.norm()),
        (torch.from_numpy(f.detach().numpy()), values), (torch.tensor(f.tolist()), values),
        (torch.as_tensor(f.cpu()), values), (pickle.loads(pickle.dumps(f.detach())), values),
        (torch.zeros(4, 16).copy_(f), values), (torch.ones(4, 16).add_(f), values + 1),
        (torch.zeros(4, 4).addmm_(f, values.T), values @ values.T),
        (torch.add(f.detach(), 1, out=torch.empty(4, 16)), values + 1),
        (copy.deepcopy(f.detach()), values), (torch.vmap(lambda row: row * 2)(f.detach()), values * 2),
    ]  # fmt: skip
    for number, (result, expected) in enumerate(reads):
        assert (result.dtype, type(result)) == (torch.float32, torch.Tensor), number
        assert torch.allclose(result, expected, rtol=1e-6, atol=0), number
    assert (f.max().item(), f.sum().item()) == (values.max().item(), values.sum().item())
    assert (f.shape, f.device, f.dim(), len(f), f.requires_grad, f.is_leaf) == ((4, 16), x.device, 2, 4, True, False)
    assert "dtype" not in repr(f)
    assert isinstance(f, torch.Tensor)
    assert torch.frombuffer((torch.from_numpy(f.detach().numpy())).numpy(), dtype=torch.float32)[0] == values[0, 0]
    assert f.data_ptr() != 0
    file = io.BytesIO()
    torch.save(f.detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file), values)


def test_what_writes_in_place_writes_into_it(read):
    f, values = read
    with torch.no_grad():
        f[0] = 2.0
        f.mul_(0.5)
        f += 1
    values[0] = 2.0
    assert torch.equal(f.detach(), (values * 0.5 + 1).bfloat16().float())


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_criterion_reads_it():
    model = seeded(Net)
    with session(model, POLICIES[0]) as call:
        compiled = torch.compile(lambda f, y: (f / 3).square().mean() + y.square().mean(), backend="eager")
        f, _, y = call(x)
        loss = compiled(f, y)
        assert loss.dtype == torch.float32
        assert torch.allclose(loss, (f.detach() / 3).square().mean() + y.detach().square().mean(), rtol=1e-6)
        assert torch.autograd.grad(loss, f)[0].shape == f.shape


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_it_goes_back_into_the_model_as_it_came_out(policy):
    """A head that is called by itself, a cell whose state comes back, a feature of one pass in the next one's loss."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 3)

        def forward(self, x, h):
            h = self.cell(x, h)
            return h, self.head(h)

    def run(model):
        h, total = torch.zeros(4, 16), 0.0
        for _ in range(3):
            h, y = model(x, h)
            total = total + y.square().mean() + model.head(h).square().mean()
        total.backward()
        return [param.grad for param in model.parameters()]

    model = seeded(Cell)
    true = run(copy.deepcopy(model))
    with session(model, policy):
        for mine, its in zip(run(model), true, strict=True):
            assert_near(mine, its, policy, factor=16)


# Memory -------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes that lay at once in what operations have made."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage._cdata)
        return out

    def free(self, key):
        self.now -= self.live.pop(key)


class Speaker(nn.Module):
    """A language model that computes its loss, as those of transformers; nearly all it makes is logits."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 4096, bias=False)

    def forward(self, tokens):
        logits = self.head(self.body(self.table(tokens)).tanh())
        return {"loss": functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()), "logits": logits}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_logits_beside_the_loss_are_fp32_to_the_reader_and_take_no_more_than_in_plain_autocast(level):
    tokens = torch.arange(64).reshape(1, 64) % 13

    def peak(model, context):
        for _ in range(2):
            with Peak() as memory:
                with context:
                    output = model(tokens)
                output["loss"].backward()
            model.zero_grad()
        return memory.most, output["logits"]

    model = seeded(Speaker)
    plain, logits = peak(copy.deepcopy(model), torch.autocast("cpu", torch.bfloat16))
    assert logits.dtype == torch.bfloat16
    with session(model, f"{level},bf16,emulate=false"):
        mine, logits = peak(model, contextlib.nullcontext())
    assert logits.dtype == torch.float32
    weights = 4096 * 8 * 4  # of which this counts an alias
    assert mine <= 1.01 * plain + weights


# Pins, and what a module holds ---------------------------------------------------------------------------


@mezzo.fp32
def squared_error(z, target):
    return ((z - target) ** 2).sum()


@pytest.mark.parametrize("policy", ["O1,fp16,emulate=true", "O2,fp16,emulate=true", "O3,fp16,emulate=true"])
def test_what_a_pinned_function_returns_is_fp32(policy):
    class Crit(nn.Module):
        def __init__(self, off=False):
            super().__init__()
            self.l, self.off = nn.Linear(8, 8), off

        def forward(self, x):
            z = self.l(x)
            with torch.autocast("cpu", enabled=False) if self.off else contextlib.nullcontext():
                return squared_error(z.half(), torch.full_like(z, 100.0).half())

    for off in (False, True):
        model = seeded(Crit, off)
        with session(model, policy):
            loss = model(x)
            assert loss.dtype == torch.float32
            assert 2e5 < loss.item() < 5e5
    assert squared_error(x.half(), x.half() + 100).dtype == torch.float32
    assert float(squared_error(torch.zeros(64).bfloat16(), torch.full((64,), 100.0))) == 640_000


class Keeps(nn.Module):
    """Puts what it computes in the places of what it has."""

    def __init__(self):
        super().__init__()
        self.l, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("codes", torch.zeros(8, dtype=torch.long))
        self.register_buffer("low", torch.zeros(8, dtype=torch.bfloat16))

    def forward(self, x):
        y = self.l(x)
        self.running = y.detach().mean(0)
        self.low = y.detach().float().mean(0)
        self.codes = y.argmax(-1)
        return self.out(y)

    def merged(self, x):
        self.out.weight = nn.Parameter(self.out.weight @ self.l.weight)
        return self.out(x)

    def fuse(self):
        self.out.weight = nn.Parameter(self.out.weight @ self.l.weight)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("style", STYLES[:2])
@pytest.mark.filterwarnings("ignore")
def test_no_call_changes_the_dtype_of_what_a_module_holds(policy, style):
    for compiles in (False, True) if (style, policy) == ("attach", POLICIES[0]) else (False,):
        torch.compiler.reset()
        model = seeded(Keeps)
        if policy.startswith("O2"):
            model.float()  # as buffers are then
        plain = copy.deepcopy(model)
        before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        plain(x), plain.merged(x), plain.fuse()
        with session(model, policy, style) as call:
            run = torch.compile(model, backend="eager") if compiles else call
            run(x)
            assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
            if style == "attach":
                model.merged(x)
                weight = model.out.weight.detach().clone()
                model.fuse()
                assert torch.allclose(model.out.weight, weight @ model.l.weight.detach(), rtol=1e-6, atol=1e-6)
                assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
                assert_near(model.out.weight.detach(), plain.out.weight.detach(), policy)
                assert model.out.weight in set(model.parameters())
        assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before


def test_outside_of_regions_a_program_says_what_a_dtype_is_to_be():
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    gc.collect()  # of what tests have left
    mezzo.prepare(Keeps(), POLICIES[0]).remove()
    before, model, other = len(hooks), Keeps(), Keeps()
    with session(model, POLICIES[0]):
        model.running = model.running.bfloat16()
        assert model.running.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            other.running = other.running.bfloat16()  # of no session
        assert other.running.dtype == torch.bfloat16
        assert len(hooks) == 1
        handle = mezzo.prepare(other, POLICIES[2])
        assert len(hooks) == 1  # for all of them
    handle.remove()
    assert len(hooks) == before
