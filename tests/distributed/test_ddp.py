"""DistributedDataParallel under every policy: ranks stay equal, train as one process does, O2 as O1 bit for bit."""

import hashlib
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import mezzo

from .ranks import on_ranks, text_of
from .twins import without_ties

BF16 = "O2,dtype=bfloat16,emulate=true,low_param=*params.*"
FP16 = "O2,dtype=float16,loss_scale=constant(4),emulate=true,low_param=*params.*"
O3 = "O3,dtype=bfloat16,emulate=true"

# Training, against one process ------------------------------------------------------------------------------

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
POLICIES = [f"{level},dtype={dtype},emulate=true" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]
#: Which of three micro-batches are in no_sync().
PAUSED = {"one": [False], "no_sync": [True, True, False], "synced": [False] * 3, "mixed": [False, True, False]}
#: Each value of each option with each of another.
CROSS = [
    (POLICIES[2], "adamw", "plain", "no_sync"),
    (POLICIES[2], "mezzo", "views", "mixed"),
    (POLICIES[2], "fused", "unused", "synced"),
    (POLICIES[2], "sgd", "static", "one"),
    (POLICIES[3], "mezzo", "unused", "no_sync"),
    (POLICIES[3], "sgd", "views", "mixed"),
    (POLICIES[1], "fused", "plain", "mixed"),
    (POLICIES[0], "mezzo", "static", "synced"),
]
ORDERS = ("session, wrapper", "wrapper, session", "prepare, wrapper, session")


class Net(nn.Module):
    """A net with a norm, and a layer that only the first micro-batch of a step leaves out."""

    def __init__(self, unused):
        super().__init__()
        self.inner = nn.Linear(6, 48)
        self.norm = nn.BatchNorm1d(48)
        self.side = nn.Linear(48, 48) if unused else None
        self.outer = nn.Linear(48, 3)

    def forward(self, x, with_side):
        x = torch.relu(self.norm(self.inner(x)))
        return self.outer(x if self.side is None or not with_side else x + self.side(x))


def trained(policy, optimizer, wrapped, paused, steps, ranks, order=ORDERS[0], seed=0):
    """Train on this rank's part of each batch, or alone on all of it, and return what came of it."""
    torch.manual_seed(seed)
    model = Net(unused=wrapped == "unused").eval()  # whose norm is not of the batch, of which ranks see parts
    handle = mezzo.prepare(model, policy) if order.startswith("prepare") else None
    run = DistributedDataParallel(model, **WRAPPED[wrapped]) if ranks > 1 and order != ORDERS[0] else model
    amp = mezzo.MixedPrecision(run, OPTIMIZERS[optimizer](model.parameters()), policy, max_grad_norm=1.0)
    run = DistributedDataParallel(model, **WRAPPED[wrapped]) if ranks > 1 and order == ORDERS[0] else run
    rank, norms, skipped = dist.get_rank() if ranks > 1 else 0, [], []
    dtype = mezzo.Policy.parse(policy).dtype
    without_ties(model, dtype)
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
        without_ties(model, dtype)
    scale = amp.loss_scale
    amp.close()  # which gives every weight in FP32, but for models that were prepared before
    if handle is not None:
        handle.remove()
    values = [*model.state_dict().values(), scale]
    bits = b"".join(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for value in values)
    return norms, skipped, hashlib.sha256(bits).hexdigest()


def crossed():
    return [trained(*case, 2, 2) for case in CROSS]


def test_ranks_stay_equal_and_train_as_one_process_does(ranks):
    for case, *results in zip(CROSS, *(rank["crossed"] for rank in ranks), strict=True):
        assert results == [results[0]] * 2, case
        # Gradients are rounded to their dtype, each a little differently: the first step, before weights differ too.
        (norm, *_), (skipped, *_), _ = results[0]
        (expected, *_), *_ = trained(*case, 1, 1)
        assert not skipped, case
        assert norm == pytest.approx(expected, rel=1e-3), case


def as_o1():
    """Return the cases in which O2 is not O1 in a bit; the first step has micro-batches that leave a layer out."""
    cases = [case for case in CROSS if case[0].startswith("O2")]
    return [case for case in cases if trained(*case, 2, 2) != trained(f"O1{case[0][2:]}", *case[1:], 2, 2)]


def orders():
    """Return what each order comes to; also where each rank has initialised its model by itself."""
    ends = {}
    for policy, optimizer in ((POLICIES[0], "sgd"), (POLICIES[3], "adamw"), (POLICIES[3], "mezzo")):
        for seed, order in ((0, ORDERS[0]), (dist.get_rank(), ORDERS[0]), (dist.get_rank(), ORDERS[2])):
            words = trained(policy, optimizer, "plain", "one", 2, 2, order, seed)
            ends.setdefault((policy, optimizer), set()).add(words[-1])
    ends[POLICIES[0], "sgd"].add(trained(POLICIES[0], "sgd", "plain", "one", 2, 2, ORDERS[1])[-1])
    return ends


# Sums, which are exact --------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Each parameter times an input: gradients are the sum of inputs, and exact."""

    def __init__(self, *names):
        super().__init__()
        self.params = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in names or ("weight",)})

    def forward(self, x, *names):
        return sum((self.params[name].float() * x).sum() for name in names or self.params)


def of_rank(number=1.0):
    """Return an input whose mean over two ranks is 1.5 · number."""
    return torch.full((2,), number * (1 + dist.get_rank()))


def backward(amp, run, x=None):
    with amp.autocast():
        loss = run(of_rank() if x is None else x)
    amp.backward(loss)


def unscaled(amp, model):
    amp.unscale_()
    return {name: None if p.grad is None else p.grad.tolist() for name, p in model.params.items()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def inside_another(model):
    return DistributedDataParallel(nn.Sequential(model))


def accumulated(ways=(DistributedDataParallel, inside_another)):
    """Return gradients after three micro-batches, of which the second is the first to be exchanged."""
    gradients = {}
    for way in ways:
        for policy in (BF16, FP16, O3):
            model = Scaled()
            amp = mezzo.MixedPrecision(model, sgd(model), policy)
            run = way(model)
            with amp.no_sync():
                backward(amp, run)
            backward(amp, run)
            with torch.no_grad(), amp.autocast():
                run(of_rank())  # a pass that asks for nothing changes nothing
            backward(amp, run)
            gradients[way.__name__, policy] = unscaled(amp, model)["weight"]
    return gradients


def several():
    """Return the gradients of parameters that are wrapped together, or apart."""
    gradients = {}
    model = Scaled("one", "two")
    halves = [torch.optim.SGD([param], lr=1.0) for param in model.params.values()]
    amp = mezzo.MixedPrecision(model, halves, FP16)
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        backward(amp, ddp)
    gradients["two optimizers"] = unscaled(amp, model)

    nets = [Scaled(), Scaled()]
    amp = mezzo.MixedPrecision(nets, list(map(sgd, nets)), FP16)
    wrapped = [DistributedDataParallel(net) for net in nets]
    for run in (*wrapped, *wrapped):  # each loss opens the windows of both optimizers, and is of one of the nets
        backward(amp, run)
    amp.unscale_()
    gradients["two nets"] = {n: net.params["weight"].grad.tolist() for n, net in zip(("one", "two"), nets, strict=True)}
    return gradients


def seldom_used():
    """Return gradients where one parameter is used on one rank alone, in a paused pass, and another nowhere."""
    gradients = {}
    for policy in (BF16, FP16):
        for views in (False, True):
            model = Scaled("often", "seldom", "never")
            amp = mezzo.MixedPrecision(model, sgd(model), policy)
            ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=views)
            for number in range(2):
                for _ in range(1 + number):
                    with amp.no_sync():
                        names = ["often", "seldom"] if dist.get_rank() == 1 else ["often"]
                        backward(amp, lambda x, ddp=ddp, names=names: ddp(x, *names))
                backward(amp, lambda x, ddp=ddp: ddp(x, "often"))
                gradients[policy, views, number] = unscaled(amp, model)
                amp.step()
                amp.zero_grad()
    return gradients


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the backward pass")


def failing():
    """Return what weights are after a backward pass that raises, and a step with what was there before."""
    outcomes = {}
    for policy in (BF16, FP16):
        model = Scaled()
        amp = mezzo.MixedPrecision(model, sgd(model), policy)
        ddp = DistributedDataParallel(model)
        backward(amp, ddp)
        error = text_of(lambda a=amp, d=ddp: backward(a, lambda x: Failing.apply(d(x))))
        amp.step()
        outcomes[policy] = error, model.state_dict()["params.weight"].tolist()
    return outcomes


def sequences(count=8):
    """Return what is wrong with sums after random backward passes of one net, some of them paused."""
    wrong = []
    for seed in range(count):
        draw = random.Random(seed)
        policy, optimizer_class = draw.choice([BF16, FP16]), draw.choice([torch.optim.SGD, mezzo.optim.SGD])
        model, total = Scaled(), 0.0
        amp = mezzo.MixedPrecision(model, optimizer_class(model.parameters(), lr=1.0), policy)
        ddp = DistributedDataParallel(model)
        passes = [(draw.choice([True, False]), draw.randrange(1, 4)) for _ in range(draw.randrange(1, 7))]
        for is_paused, size in [*passes, (False, 1)]:  # the last one reduces
            total += 1.5 * size
            with ddp.no_sync() if is_paused else amp.autocast():
                backward(amp, ddp, of_rank(size))
        if unscaled(amp, model)["weight"] != [total] * 2:
            wrong.append((seed, policy, passes, unscaled(amp, model), total))
    return wrong


# What torch builds around it --------------------------------------------------------------------------------


def compressed(model, run):
    run.register_comm_hook(None, default_hooks.fp16_compress_hook)  # that for BF16 torch takes over NCCL alone
    return run, torch.optim.AdamW(model.parameters(), lr=1e-2)


def compiled(model, run):
    return torch.compile(run, backend="aot_eager"), torch.optim.AdamW(model.parameters(), lr=1e-2)


def in_parts(is_view):
    """Each rank updates a part; the buckets in which the others come are where parameters lie from then on."""

    def build(model, run):
        from torch.distributed.optim import ZeroRedundancyOptimizer  # whose import warns

        kwargs = {"parameters_as_bucket_view": is_view, "lr": 1e-2}
        return run, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **kwargs)

    return build


BUILT = {"compressed": compressed, "compiled": compiled, "ZeRO": in_parts(False),
         "ZeRO, views": in_parts(True)}  # fmt: skip


def built(level, name):
    torch.manual_seed(dist.get_rank())  # what rank 0 has is what all begin with
    model, policy = Net(unused=False).eval(), f"{level},dtype=bfloat16,emulate=true"
    without_ties(model, torch.bfloat16)
    handle = mezzo.prepare(model, policy)
    run, optimizer = BUILT[name](model, DistributedDataParallel(model))
    amp = mezzo.MixedPrecision(handle, optimizer, policy)
    norms = []
    for number in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        with amp.autocast():
            loss = run(x, False).float().square().mean()
        amp.backward(loss)
        norms.append(float(amp.step().grad_norm))
        amp.zero_grad()
        without_ties(model, torch.bfloat16)
    return norms, [param.detach().clone().tolist() for param in model.parameters()]


def built_around():
    """Return what trains otherwise under O2 than under O1, and the weights of each way under O2."""
    pairs = {name: (built("O1", name), built("O2", name)) for name in BUILT}
    return [name for name, (one, two) in pairs.items() if one != two], {name: two for name, (_, two) in pairs.items()}


# Conversion after a wrapper ---------------------------------------------------------------------------------

SUBJECTS = {"ddp": lambda ddp: ddp, "module": lambda ddp: ddp.module}


def refused():
    """Return what is said of models that are wrapped already, and whether they are as they were."""
    outcomes = {}
    for name, subject in SUBJECTS.items():
        model = Scaled()
        ddp, optimizer = DistributedDataParallel(model), sgd(model)
        wrapped = subject(ddp)
        for policy in (BF16, O3):
            outcomes[name, policy] = text_of(lambda w=wrapped, p=policy, o=optimizer: mezzo.MixedPrecision(w, o, p))
        dtypes = {param.dtype for param in model.parameters()}
        ddp(of_rank()).backward()
        outcomes[name, "after"] = dtypes == {torch.float32} and model.params["weight"].grad.tolist() == [1.5, 1.5]
        model.zero_grad()
        del ddp, wrapped
        outcomes[name, "unwrapped"] = text_of(lambda m=model, o=optimizer: mezzo.MixedPrecision(m, o, BF16))
    return outcomes


def on_this_rank(names):
    return {name: globals()[name]() for name in names}


NAMES = (
    "crossed",
    "as_o1",
    "orders",
    "accumulated",
    "several",
    "seldom_used",
    "failing",
    "sequences",
    "refused",
    "built_around",
)


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(2, on_this_rank, NAMES)


def test_o2_is_o1_bit_for_bit(ranks):
    assert [rank["as_o1"] for rank in ranks] == [[], []]


def test_what_torch_builds_around_trains_alike_on_all_ranks(ranks):
    (wrong, first), (_, second) = (rank["built_around"] for rank in ranks)
    assert wrong == []
    assert first == second


def test_every_order_trains_the_same(ranks):
    first, second = (rank["orders"] for rank in ranks)
    assert [case for case in first if len(first[case] | second[case]) > 1] == []


def test_the_wrapper_is_found_however_the_model_is_wrapped(ranks):
    for rank in ranks:
        assert {key: value for key, value in rank["accumulated"].items() if value != [4.5, 4.5]} == {}


def test_any_backward_passes_are_means_once_the_last_has_reduced(ranks):
    assert [rank["sequences"] for rank in ranks] == [[], []]


def test_several_optimizers_and_several_wrappers(ranks):
    for rank in ranks:
        for way in ("two optimizers", "two nets"):
            assert rank["several"][way] == {"one": [3.0, 3.0], "two": [3.0, 3.0]}, way


def test_what_only_paused_passes_use_is_reduced_too(ranks):
    for rank in ranks:
        for (*case, number), value in rank["seldom_used"].items():
            often, seldom = 1.5 * (2 + number), 1.0 * (1 + number)
            assert value == {"often": [often] * 2, "seldom": [seldom] * 2, "never": None}, (case, number)


def test_a_backward_pass_that_raises_leaves_earlier_gradients(ranks):
    for rank in ranks:
        assert rank["failing"] == dict.fromkeys((BF16, FP16), ("ValueError: in the backward pass", [-1.5, -1.5]))


def test_models_that_are_wrapped_already_are_refused_and_stay_as_they_are(ranks):
    for rank in ranks:
        for (name, policy), result in rank["refused"].items():
            if policy in ("after", "unwrapped"):
                assert result == {"after": True, "unwrapped": ""}[policy], name
            else:
                assert result.startswith(f"StateError: {policy[:2]} cannot convert"), (name, policy, result)
                assert "DistributedDataParallel" in result, (name, policy, result)
