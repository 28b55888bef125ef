"""How a session finds DistributedDataParallel, whatever is wrapped, compiled, copied, paused or raises around it."""

import copy
import inspect
import io
import logging
import random
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.numerics.traffic import Traffic

from .ranks import on_ranks

BF16 = "O2,dtype=bfloat16,emulate=true"
FP16 = "O2,dtype=float16,loss_scale=constant(4),emulate=true"


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


def backward(amp, run, x=None, **options):
    with amp.autocast():
        loss = run(of_rank() if x is None else x)
    amp.backward(loss, **options)


def unscaled(amp, model):
    amp.unscale_()
    return {name: None if p.grad is None else p.grad.tolist() for name, p in model.params.items()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


@contextmanager
def logged():
    records, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("mezzo").addHandler(handler)
    yield records
    logging.getLogger("mezzo").removeHandler(handler)


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# What is refused ------------------------------------------------------------------------------------------


SUBJECTS = {"ddp": lambda ddp: ddp, "module": lambda ddp: ddp.module}
#: What torch.compile takes seconds for.
COMPILED_SUBJECTS = {
    "compiled": lambda ddp: torch.compile(ddp, backend="eager"),
    "compiled module": lambda ddp: torch.compile(ddp.module, backend="eager"),
}


def refused_compiled():
    return refused(COMPILED_SUBJECTS)


def refused(subjects=SUBJECTS):
    found = {}
    for name, subject in subjects.items():
        model = Scaled()
        ddp, optimizer = DistributedDataParallel(model), sgd(model)
        wrapped = subject(ddp)
        for policy in (BF16, "O3,dtype=bfloat16,emulate=true"):
            found[name, policy] = error_of(lambda w=wrapped, p=policy, o=optimizer: mezzo.MixedPrecision(w, o, p))
        dtypes = {param.dtype for param in model.parameters()}
        ddp(of_rank()).backward()
        found[name, "after"] = dtypes == {torch.float32} and model.params["weight"].grad.tolist() == [1.5, 1.5]
        model.zero_grad()
        del ddp, wrapped
        found[name, "unwrapped"] = error_of(lambda m=model, o=optimizer: mezzo.MixedPrecision(m, o, BF16))
    return found


# Finding --------------------------------------------------------------------------------------------------


def ddp_then_compiled(model):
    return torch.compile(DistributedDataParallel(model), backend="eager")


def compiled_then_ddp(model):
    return DistributedDataParallel(torch.compile(model, backend="eager", fullgraph=True))


def inside_another(model):
    return DistributedDataParallel(nn.Sequential(model))


def copied_and_wrapped(model):
    old = DistributedDataParallel(model)
    old.hook = copy.deepcopy(old)  # of a wrapper: its hooks watch nothing
    return DistributedDataParallel(copy.deepcopy(model)) and old


def accumulated_compiled():
    return accumulated((ddp_then_compiled, compiled_then_ddp))


def accumulated(orders=(DistributedDataParallel, inside_another, copied_and_wrapped)):
    """Return gradients after three micro-batches, of which the second is the first to be exchanged."""
    found = {}
    for order in orders:
        for policy in (BF16, FP16):
            model = Scaled()
            amp = mezzo.MixedPrecision(model, sgd(model), policy)
            run = order(model)
            with amp.no_sync():
                backward(amp, run)
            backward(amp, run)
            with torch.no_grad(), amp.autocast():
                run(of_rank())  # a pass that asks for nothing changes nothing
            backward(amp, run)
            found[order.__name__, policy] = unscaled(amp, model)["weight"]
    return found


def paused():
    """Return the wrapper's flag inside ``no_sync``, nested, left by an error, and after."""
    model = Scaled()
    amp = mezzo.MixedPrecision(model, sgd(model), BF16)
    ddp, flags = DistributedDataParallel(model), []
    try:
        with amp.no_sync():
            with amp.no_sync():
                backward(amp, ddp)
            flags.append(ddp.require_backward_grad_sync)
            raise ValueError
    except ValueError:
        flags.append(ddp.require_backward_grad_sync)
    with ddp.no_sync(), amp.no_sync():
        backward(amp, ddp)
    backward(amp, ddp)
    flags.append(unscaled(amp, model)["weight"])
    amp.close()
    flags.append(error_of(lambda: amp.no_sync().__enter__()))
    with logged() as records:
        ddp(of_rank())
    return flags, [record.splitlines()[0] for record in records]


def sharded():
    """Return whether modules that FSDP2 shards exchange in ``no_sync`` and after, and all gradients in the end."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    for param in model.parameters():
        nn.init.ones_(param)
    mezzo.fully_shard(model, "O1,dtype=bfloat16,emulate=true", wrap=nn.Linear)
    amp = mezzo.MixedPrecision(model, sgd(model), "O1,dtype=bfloat16,emulate=true")
    x, counts = torch.full((1, 4), 1.0 + dist.get_rank()), []
    for pauses in (True, True, False):
        with amp.no_sync() if pauses else nullcontext(), Traffic() as traffic:
            backward(amp, lambda x: model(x).float().sum(), x)
        counts.append(sum(each.kind == "reduce-scatter" for each in traffic.collectives))
    amp.unscale_()
    return counts, model[1].weight.grad.full_tensor().tolist()


def pickled():
    """Return whether a model, and a wrapper, are written and read while a session has them."""
    model = Scaled()
    amp = mezzo.MixedPrecision(model, sgd(model), BF16)
    ddp = DistributedDataParallel(model)
    backward(amp, ddp)
    for subject in (model, ddp):
        file = io.BytesIO()
        torch.save(subject, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        again(of_rank()).backward()
    return unscaled(amp, model)["weight"]


# Several ----------------------------------------------------------------------------------------------------


def several():
    """Return the gradients of parameters that are wrapped together, apart, or not at all."""
    found = {}
    model = Scaled("one", "two")
    halves = [torch.optim.SGD([param], lr=1.0) for param in model.params.values()]
    amp = mezzo.MixedPrecision(model, halves, FP16)
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        backward(amp, ddp)
    found["two optimizers"] = unscaled(amp, model)

    model = Scaled("inside", "outside")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["params.outside"])
    amp = mezzo.MixedPrecision(model, sgd(model), FP16)
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        backward(amp, ddp)
    found["a parameter outside"] = unscaled(amp, model)

    nets = [Scaled(), Scaled()]
    amp = mezzo.MixedPrecision(nets, torch.optim.SGD([p for net in nets for p in net.parameters()], lr=1.0), FP16)
    wrapped = [DistributedDataParallel(net) for net in nets]
    with wrapped[1].no_sync():  # one waits for the second pass, the other does not
        backward(amp, lambda x: wrapped[0](x) + wrapped[1](x))
    backward(amp, lambda x: wrapped[0](x) + wrapped[1](x))
    amp.unscale_()
    found["two wrappers"] = {n: net.params["weight"].grad.tolist() for n, net in zip("ab", nets, strict=True)}

    nets = [Scaled(), Scaled()]
    amp = mezzo.MixedPrecision(nets, list(map(sgd, nets)), FP16)
    wrapped = [DistributedDataParallel(net) for net in nets]
    for run in (*wrapped, *wrapped):  # each loss opens the windows of both optimizers, and is of one of the nets
        backward(amp, run)
    amp.unscale_()
    found["two nets"] = {n: net.params["weight"].grad.tolist() for n, net in zip("ab", nets, strict=True)}
    return found


def seldom_used():
    """Return gradients where one parameter is used on one rank alone, in a paused pass, and another nowhere."""
    found = {}
    for policy in (BF16, FP16, BF16 + ",reduce=float32", FP16 + ",reduce=float32"):
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
                found[policy, views, number] = unscaled(amp, model)
                amp.step()
                amp.zero_grad()
    return found


# What goes wrong -----------------------------------------------------------------------------------------


def unreduced():
    """Return what is said of gradients that no wrapper reduces, or cannot reduce any more."""
    found = {}
    for policy in (BF16, FP16):
        model = Scaled()
        amp = mezzo.MixedPrecision(model, sgd(model), policy)
        ddp = DistributedDataParallel(model)
        with logged() as records:
            for _ in range(2):
                backward(amp, ddp)
                with amp.no_sync():
                    backward(amp, ddp)
                amp.step()
                amp.zero_grad()
        found[policy] = [record.splitlines()[0] for record in records], model.params["weight"].tolist()

    model = Scaled()
    amp = mezzo.MixedPrecision(
        model, sgd(model), "O2,dtype=float16,loss_scale=dynamic(init=16),emulate=true", num_losses=2
    )
    ddp = DistributedDataParallel(model)
    with amp.no_sync():
        backward(amp, ddp)
        found["two scales"] = error_of(lambda: backward(amp, ddp, loss_id=1))
    backward(amp, ddp)  # the same scale goes on
    found["goes on"] = unscaled(amp, model)["weight"]
    return found


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the backward pass")


def failing():
    """Return what earlier gradients are after a backward pass that raises, and what a step makes of them."""
    found = {}
    for policy in (BF16, FP16):
        model = Scaled()
        amp = mezzo.MixedPrecision(model, sgd(model), policy)
        ddp = DistributedDataParallel(model)
        backward(amp, ddp)
        found[policy, "error"] = error_of(lambda a=amp, d=ddp: backward(a, lambda x: Failing.apply(d(x))))
        amp.step()
        found[policy] = next(amp.master_params()).tolist()
    return found


def skipped_statistics():
    """Return batch norm's statistics on this rank after a skipped step and the next forward pass."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    amp = mezzo.MixedPrecision(model, sgd(model), "O1,dtype=float16,emulate=true", restore_buffers=True)
    ddp = DistributedDataParallel(model)
    x = torch.arange(8.0).view(4, 2) * (1 + dist.get_rank())
    with amp.autocast():
        loss = ddp(x).float().mean() * float("inf")
    amp.backward(loss)
    step = amp.step()
    amp.zero_grad()
    restored = {name: value.tolist() for name, value in model[1].named_buffers()}
    model.eval()
    with amp.autocast(), torch.no_grad():
        ddp(x)  # begins with what rank 0 has
    return bool(step.skipped), restored, {name: value.tolist() for name, value in model[1].named_buffers()}


def on_this_rank(names):
    return {name: globals()[name]() for name in names}


def sequences(count=12):
    """Return what is wrong with sums after random backward passes of two nets, some of them paused."""
    wrong = []
    for seed in range(count):
        draw = random.Random(seed)
        policy = draw.choice([BF16, FP16, BF16 + ",reduce=float32", FP16 + ",reduce=float32"])
        nets = [Scaled(), Scaled()]
        kind, params = draw.choice([torch.optim.SGD, mezzo.optim.SGD]), [list(net.parameters()) for net in nets]
        amp = mezzo.MixedPrecision(
            nets, [kind(each, lr=1.0) for each in draw.choice([params, [[*params[0], *params[1]]]])], policy
        )
        wrapped, total, passes = [DistributedDataParallel(net) for net in nets], [0.0, 0.0], []
        for _ in range(draw.randrange(1, 7)):
            passes.append(([draw.choice([True, None, False]) for _ in nets], draw.randrange(1, 4)))
        passes.append(([False, False], 1))  # the last reduces all
        for paused, size in passes:
            losses = []
            for place, is_paused in enumerate(paused):
                if is_paused is not None:
                    total[place] += 1.5 * size
                    with wrapped[place].no_sync() if is_paused else amp.autocast(), amp.autocast():
                        losses.append(wrapped[place](of_rank(size)))
            if losses:
                amp.backward(sum(losses))
        amp.unscale_()
        found = [net.params["weight"].grad.tolist() for net in nets]
        if found != [[each] * 2 for each in total]:
            wrong.append((seed, policy, passes, found, total))
    return wrong


def many_sequences():
    return sequences(400)


NAMES = (
    "sequences",
    "seldom_used",
    "refused",
    "accumulated",
    "paused",
    "sharded",
    "pickled",
    "several",
    "unreduced",
    "failing",
    "skipped_statistics",
)


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(2, on_this_rank, NAMES)


def require_refused(ranks, function):
    for found in ranks:
        for (name, policy), result in found[function].items():
            if policy == "after":
                assert result is True, name
            elif policy == "unwrapped":
                assert result == "none", name
            else:
                assert "StateError: O" in result, (name, policy, result)
                assert "DistributedDataParallel" in result, (name, policy, result)


def require_accumulated(ranks, function):
    for found in ranks:
        assert {key: value for key, value in found[function].items() if value != [4.5, 4.5]} == {}


def test_models_that_are_wrapped_already_are_refused_and_stay_as_they_are(ranks):
    require_refused(ranks, "refused")


def test_the_wrapper_is_found_in_every_order(ranks):
    require_accumulated(ranks, "accumulated")


@pytest.mark.slow
def test_so_it_is_where_models_are_compiled():
    ranks = on_ranks(2, on_this_rank, ("refused_compiled", "accumulated_compiled"), timeout=600)
    require_refused(ranks, "refused_compiled")
    require_accumulated(ranks, "accumulated_compiled")


def test_any_backward_passes_are_means_once_the_last_has_reduced(ranks):
    assert [found["sequences"] for found in ranks] == [[], []]


@pytest.mark.slow
def test_many_backward_passes_are_means_once_the_last_has_reduced():
    assert on_ranks(2, many_sequences, timeout=600) == [[], []]


def test_no_sync_is_nested_left_and_closed(ranks):
    for found in ranks:
        flags, told = found["paused"]
        assert flags[:3] == [False, True, [4.5, 4.5]]
        assert flags[3].startswith("StateError: no_sync() after close()")
        assert told == ["DistributedDataParallel reduces no gradient any more"]


def test_no_sync_is_that_of_fsdp2_as_well(ranks):
    for found in ranks:
        counts, gradient = found["sharded"]
        assert (counts, gradient) == ([0, 0, 2], [[3 * 4 * 1.5] * 4] * 2)


def test_models_and_wrappers_are_written_and_read_within_a_session(ranks):
    assert [found["pickled"] for found in ranks] == [[1.5, 1.5]] * 2


def test_what_is_wrapped_whole_is_summed_and_all_else_averaged(ranks):
    for rank, found in enumerate(ranks):
        several, own = found["several"], [2.0 * (1 + rank)] * 2
        assert several["two optimizers"] == {"one": [3.0, 3.0], "two": [3.0, 3.0]}
        assert several["a parameter outside"] == {"inside": [3.0, 3.0], "outside": own}
        assert several["two wrappers"] == several["two nets"] == {"a": [3.0, 3.0], "b": [3.0, 3.0]}


def test_what_only_paused_passes_use_is_reduced_too(ranks):
    for found in ranks:
        for (*case, number), value in found["seldom_used"].items():
            often, seldom = 1.5 * (2 + number), 1.0 * (1 + number)
            assert value == {"often": [often] * 2, "seldom": [seldom] * 2, "never": None}, (case, number)


def test_what_is_not_reduced_is_told_once_or_refused(ranks):
    for rank, found in enumerate(ranks):
        for policy in (BF16, FP16):
            told, weights = found["unreduced"][policy]
            (once,) = (each for each in told if "over ranks" in each)
            assert once == "these gradients were never reduced over ranks, whose weights will differ"
            assert weights == [-2 * (1.5 + 1 + rank)] * 2  # the mean of the first, and this rank's own second
        assert (
            "StateError: gradients that DistributedDataParallel has not reduced yet" in found["unreduced"]["two scales"]
        )
        assert found["unreduced"]["goes on"] == [3.0, 3.0]


def test_a_backward_pass_that_raises_leaves_earlier_gradients(ranks):
    for found in ranks:
        for policy in (BF16, FP16):
            assert found["failing"][policy, "error"] == "ValueError: in the backward pass"
            assert found["failing"][policy] == [-1.5, -1.5]


def test_batch_norm_begins_anew_with_the_first_ranks_statistics_after_a_skipped_step(ranks):
    (skipped, own, after), (_, _, others) = (found["skipped_statistics"] for found in ranks)
    assert skipped
    assert own == {"running_mean": [0.0] * 3, "running_var": [1.0] * 3, "num_batches_tracked": 0}
    assert after == others == own


def test_one_rank_without_a_process_group_has_no_wrappers():
    model = Scaled()
    amp = mezzo.MixedPrecision(model, sgd(model), BF16)
    assert amp._core.weights.wrappers is None
    with amp.no_sync(), amp.autocast():
        amp.backward(model(torch.ones(2)))
    assert unscaled(amp, model) == {"weight": [1.0, 1.0]}


def test_what_torch_names_privately_is_there():
    """The wrapper in whose forward pass we are, its hooks, and what decides whether a backward pass reduces."""
    assert DistributedDataParallel._active_ddp_module is None
    text = inspect.getsource(DistributedDataParallel)
    for name in ("_active_ddp_module = self", "self._comm_hooks", "def _get_ddp_logging_data", "parameters_to_ignore"):
        assert name in text
    assert "if torch.is_grad_enabled() and self.require_backward_grad_sync:" in text
