"""Recorders on several ranks: what each counts, added up, is what one rank with the whole batch counts."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mezzo import MixedPrecision
from mezzo.numerics import KINDS, Recorder

from .ranks import on_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batch():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def counts_of(recorder):
    return {
        (tensor_kind, tensor.path.replace("module.", "")): (tensor.dtype, tensor.histogram.numbers, tensor.swallowed)
        for tensor_kind in KINDS
        for tensor in recorder.evidence.tensors(tensor_kind)
    }


def recorded(how, in_session):
    model, x = net(), batch()
    if how != "alone":
        x = x.chunk(dist.get_world_size())[dist.get_rank()]
    if how == "ddp":
        model = DistributedDataParallel(model)
    elif how == "fully_shard":
        for module in (model[0], model[2], model):
            fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    amp = MixedPrecision(model, optimizer, "O0") if in_session else None
    reduced = []
    all_reduce = dist.all_reduce
    with Recorder(model, optimizer, every=2) as recorder:
        for _ in range(2):
            # A sum that the mean over ranks makes a mean, in powers of two.
            loss = model(x).square().sum() * (1.0 if how == "alone" else dist.get_world_size())
            amp.backward(loss) if amp else loss.backward()
            dist.all_reduce = lambda tensor, *args, **kwargs: (
                reduced.append(tensor.dtype) or all_reduce(tensor, *args, **kwargs)
            )
            try:
                amp.step() if amp else optimizer.step()
                recorder.step()
            finally:
                dist.all_reduce = all_reduce
            optimizer.zero_grad()
    return counts_of(recorder), reduced.count(torch.int64)


@pytest.mark.parametrize("in_session", [False, True])
@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
def test_counts_of_ranks_are_added_up(how, in_session):
    expected, _ = recorded("alone", in_session)
    for counts, reductions in on_ranks(2, recorded, how, in_session):
        assert reductions == 1  # of two steps one is recorded
        assert counts.keys() == expected.keys()
        for key, (dtype, numbers, swallowed) in expected.items():
            assert counts[key][0] == dtype, key
            assert sum(counts[key][1][:-1]) == sum(numbers[:-1]), key
            if key[0] in ("weights", "activations"):  # gradients are sums in another order
                assert counts[key][1:] == (numbers, swallowed), key
            elif key[0] == "updates":
                assert counts[key][2].with_gradient == swallowed.with_gradient, key


def operands(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32))
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).exp2().pow(9)
    if wrap:
        model, x = DistributedDataParallel(model), x.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    amp = MixedPrecision(model, optimizer, "O1,bf16,mxfp8_module=*0,emulate=true")
    with Recorder(model, optimizer, every=1) as recorder:
        with amp.autocast():
            loss = model(x).float().sum()
        amp.backward(loss)
        amp.step()
    (step,) = recorder.evidence.steps
    names = {(operand.module.removeprefix("module."), operand.role) for operand in step.operands}
    return names, {
        (operand.module.removeprefix("module."), operand.role): (operand.elements, operand.saturated, operand.flushed)
        for operand in step.operands
        if operand.role != "weight"  # which every rank quantises
    }


def test_what_operands_of_ranks_lose_is_added_up():
    names, expected = operands(wrap=False)
    assert expected["0", "activation"][2] > 0, (names, expected)
    for losses in on_ranks(2, operands, True):
        assert losses == (names, expected)


def recorded_by_some(in_session):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    amp = MixedPrecision(model, optimizer, "O0") if in_session else None
    records = dist.get_rank() == 0
    recorder = Recorder(model, optimizer, every=1) if records else None
    x = batch().chunk(dist.get_world_size())[dist.get_rank()]
    with recorder or contextlib.nullcontext():
        for _ in range(3):
            loss = model(x).square().sum()
            amp.backward(loss) if amp else loss.backward()
            amp.step() if amp else optimizer.step()
            if recorder is not None:
                recorder.step()
            optimizer.zero_grad()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    return weights.tolist(), counts_of(recorder) if records else None


@pytest.mark.parametrize("in_session", [False, True])
def test_a_rank_that_records_by_itself_waits_for_nobody(in_session):
    (weights, counts), (others, _) = on_ranks(2, recorded_by_some, in_session)
    assert weights == others
    assert sum(counts["activations", "0.output"][1][:-1]) == 4 * 16  # its own half of the batch


def recorded_twins(in_session):
    """Two models of one class, whose recorders begin in another order on each rank."""
    models = [net(), net()]
    with torch.no_grad():
        models[1][0].weight.mul_(8.0)
    models = [DistributedDataParallel(model) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
    amps = [MixedPrecision(*pair, "O0") if in_session else None for pair in zip(models, optimizers, strict=True)]
    recorders = [Recorder(*pair, every=1) for pair in zip(models, optimizers, strict=True)]
    store, keys = dist.group.WORLD.get_group_store(), []
    x = batch().chunk(dist.get_world_size())[dist.get_rank()]
    with contextlib.ExitStack() as opened:
        for recorder in recorders if dist.get_rank() == 0 else reversed(recorders):
            opened.enter_context(recorder)
        for step in range(4):
            for number, (model, optimizer, amp) in enumerate(zip(models, optimizers, amps, strict=True)):
                if number == 1 and step % 2:  # which steps half as often
                    continue
                loss = model(x).square().sum()
                amp.backward(loss) if amp else loss.backward()
                amp.step() if amp else optimizer.step()
                recorders[number].step()
                optimizer.zero_grad()
            dist.barrier()
            keys.append(store.num_keys())
    return [recorder.evidence.histogram("activations", step=1).numbers[:-1] for recorder in recorders], keys


@pytest.mark.parametrize("in_session", [False, True])
def test_recorders_alike_find_their_own_on_other_ranks_and_the_store_does_not_grow(in_session):
    (first, keys), (second, _) = on_ranks(2, recorded_twins, in_session)
    assert first == second  # both have the counts of both ranks
    assert first[0] != first[1]
    assert sum(first[0]) == sum(first[1]) == 8 * (16 + 16 + 4 + 4 + 4)
    assert len(set(keys)) == 1


def recorded_until(in_session):
    """One rank stops recording while the other one goes on."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    amp = MixedPrecision(model, optimizer, "O0") if in_session else None
    x = batch().chunk(dist.get_world_size())[dist.get_rank()]
    recorder = Recorder(model, optimizer, every=2)
    opened = contextlib.ExitStack()
    opened.enter_context(recorder)
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            opened.close()
        loss = model(x).square().sum()
        amp.backward(loss) if amp else loss.backward()
        amp.step() if amp else optimizer.step()
        if step < 2 or dist.get_rank() == 1:
            recorder.step()
        optimizer.zero_grad()
    opened.close()
    return {step.step: recorder.histogram("activations", step=step.step).total for step in recorder.evidence.steps}


@pytest.mark.parametrize("in_session", [False, True])
def test_a_rank_that_has_ended_is_not_waited_for(in_session):
    first, second = on_ranks(2, recorded_until, in_session, timeout=100)
    assert first.keys() == {1}
    assert second.keys() == {1, 3}
    assert second[1] == first[1] == 2 * second[3]
