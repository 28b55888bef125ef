"""`mezzo.fully_shard` and sessions over what it shards, against one process with the same global batch."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.sharded import local
from mezzo.tensors import tensors
from mezzo.weights import Halves

from .ranks import on_ranks
from .twins import without_ties

BF16 = "O2,dtype=bfloat16,emulate=false"
FP16 = "O2,dtype=float16,emulate=false"
O1 = "O1,dtype=bfloat16,emulate=false"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return x * self.scale


class Net(nn.Module):
    """Widths that no number of ranks divides, and layers of one row, of which one rank has nothing."""

    def __init__(self, norm=False, checkpoints=False):
        super().__init__()
        self.first, self.scaled = nn.Linear(3, 5), Scaled(5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(5) for _ in range(1 + norm))
        self.head = nn.Linear(5, 1)
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.scaled(self.norm(self.first(x)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def net(**kwargs):
    torch.manual_seed(1)
    return Net(**kwargs)


def batch(step, size=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)


def own_part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def whole(model):
    """The model's parameters by name, gathered from all ranks."""
    named = model.named_parameters()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in named}


def own(model):
    """The model's parameters by name, as this rank has them."""
    return {name: local(param).detach().clone() for name, param in model.named_parameters()}


def same(one, other):
    """Names of what differs in a bit."""
    return sorted(name for name in one | other if not torch.equal(one[name], other[name]))


class Sharp(torch.optim.SGD):
    """Steps with the gradients of weights that were moved uphill, as sharpness-aware minimisation does."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        params = [param for param in self.param_groups[0]["params"] if param.grad is not None]
        uphill = [0.1 * param.grad for param in params]
        shards = [here for here in map(local, params) if isinstance(here, Halves)]
        for here in shards:  # as while a step of torch's optimizers
            here.widen()
        for param, by in zip(params, uphill, strict=True):
            param.add_(by)
        with torch.enable_grad():
            closure()
        for param, by in zip(params, uphill, strict=True):
            param.sub_(by)
        super().step()
        for here in shards:
            here.cell.is_lent = True
            here.store_lent()


OPTIMIZERS = {
    "sharp": lambda params: Sharp(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.01),
}


def sharded(policy, model=None, optimizer="adamw", **kwargs):
    """A session over a model that is sharded in a policy's dtypes."""
    model = mezzo.fully_shard(net() if model is None else model, policy)
    return model, mezzo.MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), policy, **kwargs)


def train(model, amp, steps=3, micro=1, syncs=True, part=own_part):
    """Train, and return the norms of all gradients."""
    norms = []
    for step in range(steps):
        for number in range(micro):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(syncs or number == micro - 1)
            x, y = map(part, batch(step * micro + number))
            with amp.autocast():
                loss = (model(x) - y).square().mean() / micro
            amp.backward(loss)
        norms.append(float(amp.step().grad_norm))
        amp.zero_grad()
    return norms


def in_one_process(policy, make=net, optimizer="adamw", **kwargs):
    """The same training of the whole batch."""
    model = make()
    amp = mezzo.MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), policy)
    norms = train(model, amp, part=lambda tensor: tensor, **kwargs)
    return whole(model), norms


# FP32: what one process makes of the whole batch ----------------------------------------------------------


def in_fp32():
    model, amp = sharded("O0", max_grad_norm=3.0)
    norms = train(model, amp, steps=4)
    return whole(model), norms


def test_fp32_is_what_one_process_makes_of_the_whole_batch(of_two):
    for params, norms in (rank["fp32"] for rank in of_two):
        model, expected = net(), []
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for step in range(4):
            x, y = batch(step)
            (model(x) - y).square().mean().backward()
            expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 3.0)))
            optimizer.step()
            optimizer.zero_grad()
        assert max(float((params[key] - value).abs().max()) for key, value in whole(model).items()) <= 1e-6
        assert norms == pytest.approx(expected, rel=1e-5)
        assert min(norms) < 3 < max(norms)


# O2 is O1 -------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Weights that products read, and such as others read in FP32: a table of rows, a norm by hand, a tied head."""

    def __init__(self, tied=False, frozen=False, checkpoints=False):
        super().__init__()
        self.table = nn.Embedding(9, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.own = nn.Parameter(torch.linspace(-1, 1, 25).view(5, 5) + 0.01)
        self.one, self.head = nn.Linear(5, 1), nn.Linear(5, 9, bias=False)
        self.checkpoints = checkpoints
        if tied:
            self.head.weight = self.table.weight
        if frozen:
            self.blocks[0].up.weight.requires_grad_(False)

    def forward(self, index):
        x = self.table(index)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        x = x @ self.own.t() + nn.functional.normalize(x) @ nn.functional.normalize(self.own)
        return self.head(x) + self.one(x) * self.own.to(torch.bfloat16).mul_(2).float().sum()


def twin(level, dtype="bfloat16", emulate="false", optimizer="adamw", model=(), shard="mezzo", micro=1, clip=None,
         compiled=False, **kwargs):  # fmt: skip
    """Train under a level; return losses, norms, an evaluation outside of regions, and this rank's values."""
    policy = f"{level},dtype={dtype},emulate={emulate}" + ",loss_scale=64" * (dtype == "float16")
    torch.manual_seed(0)
    net = Mixed(**dict.fromkeys(model, True))
    if compiled:
        for block in net.blocks:
            block.compile(backend="aot_eager")
    without_ties(net, getattr(torch, dtype))
    if shard == "mezzo":
        mezzo.fully_shard(net, policy, **kwargs)
    else:
        handle = mezzo.prepare(net, policy) if shard == "prepared" else None
        for module in (*net.blocks, net):
            fully_shard(module, **kwargs)
    step_of = OPTIMIZERS[optimizer](net.parameters())
    amp = mezzo.MixedPrecision(handle if shard == "prepared" else net, step_of, policy, max_grad_norm=clip)
    numbers = []
    for step in range(2):

        def backward(step=step):
            """Go through all micro-batches, and return the last loss."""
            amp.zero_grad()
            for number in range(micro):
                make = torch.Generator().manual_seed(10 * step + number)
                index = own_part(torch.randint(0, 9, (8, 6), generator=make))
                with amp.no_sync() if number < micro - 1 else contextlib.nullcontext(), amp.autocast():
                    loss = nn.functional.cross_entropy(net(index).flatten(0, 1), index.flatten()) / micro
                amp.backward(loss)
                numbers.append(loss.item())
            return loss

        if optimizer == "sharp":
            amp.step(closure=backward)
        else:
            backward()
            numbers.append(float(amp.step().grad_norm))
        with torch.no_grad():  # what is written to a state dict is written to the model
            for value in net.state_dict().values():
                local(value).mul_(1.01)
        without_ties(net, getattr(torch, dtype))
    with torch.no_grad():
        numbers.append(float(net(torch.arange(9)).sum()))
    for unit in (module for module in net.modules() if isinstance(module, FSDPModule)):
        unit.reshard()
    count = sum(isinstance(local(param), Halves) for param in net.parameters())
    values = own(net)
    amp.close()
    if shard == "prepared":
        handle.remove()
    left = same(values, own(net)) + [name for name, param in net.named_parameters() if type(local(param)) is not Tensor]
    return numbers, values, count, left


LOW_FIRST = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TWINS = {
    "plain": {},
    "native": {"emulate": "true", "optimizer": "foreach"},
    "fp16": {"dtype": "float16", "optimizer": "fused", "emulate": "true"},
    "sgd": {"optimizer": "sgd", "clip": 0.1},
    "mezzo's": {"optimizer": "mezzo", "micro": 2},
    "no_sync": {"optimizer": "adagrad", "micro": 2, "emulate": "true"},
    "tied, frozen": {"model": ("tied", "frozen")},
    "recomputed": {"model": ("checkpoints",), "optimizer": "foreach"},
    "closure": {"optimizer": "sharp"},
    "torch's": {"shard": "torch"},
    "prepared": {"shard": "prepared", "optimizer": "mezzo"},
    "kept gathered": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "compiled": {"compiled": True},
}


def twins():
    pairs = {}
    for name, options in TWINS.items():
        one, values, none, _ = twin("O1", **options)
        two, others, count, left = twin("O2", **options)
        pairs[name] = {"numbers": (one, two), "values": same(values, others), "halves": (none, count), "left": left}
    return pairs


def test_o2_is_o1_bit_for_bit(of_two):
    for pairs in (rank["twins"] for rank in of_two):
        for name, pair in pairs.items():
            one, two = pair["numbers"]
            assert one == two, name
            assert pair["values"] == pair["left"] == [], name
            assert pair["halves"] == (0, 6 if name.startswith("tied") else 7), name


# What policies say of modules and parameters, against a session in one process ------------------------------


def with_norm():
    return net(norm=True)


def seen_dtypes(model, amp):
    """The dtypes in and out of some modules, and of what they read."""
    seen = {}

    def look(name):
        def hook(module, args, output):
            own = next(module.parameters(recurse=False))
            seen[name] = tuple(str(t.dtype).removeprefix("torch.") for t in (args[0], own, output))

        return hook

    names = ("first", "scaled", "norm", "blocks.0.norm", "blocks.1.up", "head")
    modules = {name: model.get_submodule(name) for name in names}
    hooks = [
        m.register_forward_hook(look(n)) for n, m in modules.items() if next(m.parameters(False), None) is not None
    ]
    with amp.autocast():
        out = model(batch(0)[0])
    for hook in hooks:
        hook.remove()
    return seen, str(out.dtype)


POLICIES = [
    "O0",
    O1,
    "O1,dtype=bfloat16,emulate=false,fp32_param=scaled.scale+head.*",
    BF16,
    FP16,
    f"{BF16},fp32_module=head+blocks.0",
    f"{BF16},fp32_param=scaled.scale",
    "O3,dtype=bfloat16,emulate=false",
]


def dtypes_of_all():
    dtypes = {}
    for policy in POLICIES:
        model = mezzo.fully_shard(with_norm(), policy)
        dtypes[policy] = seen_dtypes(model, mezzo.prepare(model, policy))
    return dtypes


def test_modules_compute_in_the_dtypes_that_they_have_in_one_process(of_two):
    for rank in of_two:
        for policy in POLICIES:
            model = with_norm()
            assert rank["dtypes"][policy] == seen_dtypes(model, mezzo.prepare(model, policy)), policy


# Orders: what is made when -------------------------------------------------------------------------------


ORDERS = (
    "fully_shard",
    "fully_shard on the meta device",
    "fully_shard, prepare",
    "prepare, fully_shard",
    "prepare, torch's",
)


def in_order(policy, optimizer, order):
    """A session, and the handle of a model that was prepared before it."""
    handle = None
    with torch.device("meta" if "meta" in order else "cpu"):
        model = net()
    if order.startswith("prepare"):
        handle = mezzo.prepare(model, policy)
    if order.endswith("torch's"):
        for module in (*model.blocks, model):
            fully_shard(module)
    else:
        mezzo.fully_shard(model, policy)
    if order.endswith("prepare"):
        handle = mezzo.prepare(model, policy)
    if "meta" in order:
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.zeros_(param)  # whatever was in that memory, beyond BF16's range by chance, is no weight
    params = model.parameters()
    optimizer = mezzo.optim.SGD(params, lr=0.1) if optimizer == "mezzo" else OPTIMIZERS[optimizer](params)
    amp = mezzo.MixedPrecision(handle or model, optimizer, policy)
    if "meta" in order:
        set_model_state_dict(model, net().state_dict(), options=StateDictOptions(full_state_dict=True))
    return model, amp, handle


def orders():
    """Distances of what each order trains from what the first does; and what closing changes, which gives FP32 back."""
    wrong = []
    for policy, optimizer, some in ((BF16, "mezzo", ORDERS), (BF16, "sgd", ORDERS[:3]), (O1, "sgd", ORDERS[:4:3])):
        expected = None
        for order in some:
            model, amp, handle = in_order(policy, optimizer, order)
            train(model, amp, steps=2)
            rounded = own(model)
            amp.close()
            if handle is not None:
                handle.remove()
            left = own(model)
            expected = left if expected is None else expected
            wrong += [(policy, optimizer, order, name) for name in same(expected, left)]
            wrong += [(policy, optimizer, order)] * ({v.dtype for v in left.values()} != {torch.float32})
            kept = {name: value.to(rounded[name].dtype) for name, value in left.items()}
            wrong += [(policy, optimizer, order, name) for name in same(rounded, kept)]
    return wrong


def test_every_order_trains_alike_and_is_undone(of_two):
    assert [rank["orders"] for rank in of_two] == [[], []]


# Bytes on the wire ---------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts what a rank gathers and reduces: its kind, the bytes of all ranks' parts together, and the dtype."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(tensor_type.__module__.startswith("torch.distributed") for tensor_type in types):
            return NotImplemented  # a DTensor's operations come one by one
        out = func(*args, **(kwargs or {}))
        name = func._opname.replace("_base", "").replace("_", "")
        if func.namespace in ("c10d", "_c10d_functional") and name.startswith(("allgather", "reducescatter")):
            sides = [list(tensors(side)) for side in (*args, out)]
            size = max(sum(tensor.nbytes for tensor in side) for side in sides)
            self.calls.append((name[:9], size, next(tensor for side in sides for tensor in side).dtype))
        return out


def sent():
    """What a step gathers and reduces, by policy: the bytes, the dtypes, and the bytes that are expected."""
    sizes = {}
    for policy in ("O0", O1, BF16):
        model, amp = sharded(policy)
        train(model, amp, steps=1)
        with Collectives() as collectives:
            train(model, amp, steps=1)
        for collective in ("allgather", "reducesca"):
            there = [call for call in collectives.calls if call[0] == collective]
            sizes[policy, collective] = sum(call[1] for call in there), sorted({str(call[2]) for call in there})
        expected = 0
        for name, param in model.named_parameters():
            rows = -(-param.shape[0] // 2) * 2
            size = rows * param[0].numel() * (2 if isinstance(local(param), Halves) else 4)
            expected += size * (2 if name.startswith("blocks") else 1)  # which are gathered again to go back through
        sizes[policy, "expected"] = expected
    return sizes


def test_o2_gathers_high_halves_alone_and_reduces_in_fp32(of_two):
    for sizes in (rank["sent"] for rank in of_two):
        for policy in ("O0", O1):
            assert sizes[policy, "allgather"] == (sizes[policy, "expected"], ["torch.float32"])
        assert sizes[BF16, "allgather"] == (sizes[BF16, "expected"], ["torch.uint8"])  # beside small ones in FP32
        assert sizes[BF16, "expected"] < 0.7 * sizes[O1, "expected"]
        reduced = sizes["O0", "reducesca"]
        assert sizes[O1, "reducesca"] == sizes[BF16, "reducesca"] == (reduced[0], ["torch.float32"])


# All of them, in one launch -------------------------------------------------------------------------------


def everything():
    return {
        "fp32": in_fp32(),
        "twins": twins(),
        "dtypes": dtypes_of_all(),
        "orders": orders(),
        "sent": sent(),
    }


@pytest.fixture(scope="module")
def of_two():
    """What :func:`everything` returns on each of two ranks."""
    return on_ranks(2, everything)
