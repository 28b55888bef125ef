"""One verdict for all ranks: the same steps skipped, the same scale, the same errors, whichever rank saw the fault."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo

from .ranks import on_ranks

POLICY = "O1,dtype=float16"


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def session_of(model, policy=POLICY, **options):
    return mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, **options)


def averaged(model):
    """What DistributedDataParallel does, without its buckets."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def loss_of(amp, model, seed):
    torch.manual_seed(seed)
    with amp.autocast():
        return model(torch.randn(3, 4)).float().square().mean()


# Which rank saw it ------------------------------------------------------------------------------------------


def a_step_with(fault, guilty):
    """Take a step in which one rank sees a fault, and one without; after it: skipped, scales, who, and the weights."""
    model = model_of()
    amp = session_of(model, max_grad_norm=1.0)
    is_guilty, seen = dist.get_rank() == guilty, []
    for step in range(2):
        loss = loss_of(amp, model, dist.get_rank())
        if fault == "loss" and is_guilty and step == 0:
            loss = loss * math.nan
        if fault == "grad":
            weight = model[0].weight
            scaled = loss * (1e38 if is_guilty and step == 0 else 1)
            amp.grad(scaled, weight, create_graph=True)
        amp.backward(loss)
        averaged(model)
        if fault == "gradient" and is_guilty and step == 0:
            model[2].bias.grad[1] = -torch.inf
        found = amp.step()
        seen.append((bool(found.skipped), float(found.scale), float(found.next_scale), int(found.rank_found)))
        amp.zero_grad()
    return seen, amp.stats().ranks, [param.detach().clone() for param in model.parameters()]


def faults(guilty):
    return {fault: a_step_with(fault, guilty) for fault in ("none", "loss", "grad", "gradient")}


@pytest.mark.parametrize("guilty", [0, 1])
def test_what_one_rank_sees_decides_for_all(guilty):
    one, other = on_ranks(2, faults, guilty)
    high, low = 2.0**16, 2.0**15
    after = {"none": high, "loss": high, "grad": low, "gradient": low}
    for fault, (seen, ranks, weights) in one.items():
        # An overflow in amp.grad alone lowers the scale; the gradients of the step may be finite still.
        first = (fault in ("loss", "gradient"), high, after[fault], -1 if fault == "none" else guilty)
        assert seen == [first, (False, after[fault], after[fault], -1)], fault
        assert ranks == 2
        assert other[fault][0] == seen, fault
        assert all(map(torch.equal, weights, other[fault][2])), fault


# What it costs ----------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Write down the collectives that are called meanwhile, with their bytes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.found.append((func._opname, sum(t.nbytes for t in args[0])))
        return func(*args, **(kwargs or {}))


def collectives_of_a_step():
    found = {}
    for wrap in ("ddp", "fsdp2"):
        model = model_of()
        wrapped = DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model)
        amp = session_of(wrapped, max_grad_norm=1.0, check_ranks=False)
        for _ in range(2):
            loss = loss_of(amp, wrapped, 0)
            amp.backward(loss)
            with Collectives() as counted:
                amp.step()
            amp.zero_grad()
        found[wrap] = counted.found
    return found


def test_a_step_exchanges_a_few_numbers_once_and_twice_where_parameters_are_sharded():
    for found in on_ranks(2, collectives_of_a_step):
        assert [name for name, _ in found["ddp"]] == ["allreduce_"]
        assert found["ddp"][0][1] <= 64
        assert [name for name, _ in found["fsdp2"]] == ["allreduce_"] * 2
        assert found["fsdp2"][0][1] == 8 * 4  # one float64 for each parameter
        assert found["fsdp2"][1][1] <= 64


# Ranks that hold parts of one model -----------------------------------------------------------------------------


def stages():
    """Clip two stages of a pipeline together: this rank holds one layer of two."""
    layers = model_of()
    stage = layers[0] if dist.get_rank() == 0 else layers[2]
    amp = session_of(stage, "O1,dtype=bfloat16", max_grad_norm=0.5, stage_group=dist.group.WORLD)
    for number, param in enumerate(layers.parameters()):
        param.grad = torch.full_like(param, 0.1 * (number + 1))
    whole = torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.5)
    expected = [param.detach() - 0.1 * param.grad for param in stage.parameters()]
    amp.backward(sum((param * 0.1 * (1 + number)).sum() for number, param in numbered(layers, stage)))
    step = amp.step()
    error = max(float((a - b).abs().max()) for a, b in zip(stage.parameters(), expected, strict=True))
    return float(whole), float(step.grad_norm), error


def numbered(layers, stage):
    own = {id(param) for param in stage.parameters()}
    stage.zero_grad()
    return [(number, param) for number, param in enumerate(layers.parameters()) if id(param) in own]


def test_stages_of_a_pipeline_are_clipped_together():
    (_, one, _), (_, other, _) = results = on_ranks(2, stages)
    assert one == other
    for whole, norm, error in results:
        assert norm == pytest.approx(whole, rel=1e-6)
        assert error < 1e-6


# Some ranks of all ----------------------------------------------------------------------------------------------


def one_of_a_pair_fails():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own, model = pairs[dist.get_rank() // 2], model_of()
    amp = session_of(model, process_group=own)
    amp.backward(loss_of(amp, model, 0) * (math.nan if dist.get_rank() == 3 else 1))
    step = amp.step()
    return bool(step.skipped), int(step.rank_found), [dist.get_global_rank(own, rank) for rank in range(2)]


def test_a_rank_is_named_by_its_number_among_those_that_step_together():
    first, _, second, _ = results = on_ranks(4, one_of_a_pair_fails)
    assert results == [first, first, second, second]
    assert first == (False, -1, [0, 1])
    assert second == (True, 1, [2, 3])


# Graphs ---------------------------------------------------------------------------------------------------------


def refused_captures():
    amp = session_of(model_of(), check_ranks=True)
    return [str(problem) for problem in amp._core.agreement.problems_of_capture(torch.device("cpu"))]


def test_a_graph_holds_no_exchange_that_the_host_carries_out():
    for backend, check in on_ranks(2, refused_captures):
        assert backend.startswith("exchanges over gloo cannot be captured")
        assert 'init_process_group("nccl")' in backend
        assert check.startswith("check_ranks=True cannot be captured")
