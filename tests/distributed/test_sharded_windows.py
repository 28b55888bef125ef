"""Backward passes and steps of sharded models: several losses, exchanges left out, evaluation, meshes of two dims."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mezzo
from mezzo import StateError, UnsupportedError
from mezzo.cast.model import sharding

from .ranks import on_ranks
from .test_fully_shard import BF16, OPTIMIZERS, batch, in_one_process, net, own_part, same, sharded, train, whole

#: A loss scale that nothing overflows with, for losses with scales of their own.
SCALED = mezzo.Policy.O2("float16", loss_scale=mezzo.LossScale.dynamic(init=64.0), emulate=False)


def loss_of(model, amp, step=0, part=own_part):
    x, y = map(part, batch(step))
    with amp.autocast():
        return (model(x) - y).square().mean()


def refusal(call):
    """The kind and text of the error that a call raises."""
    try:
        call()
    except mezzo.MezzoError as error:
        return type(error), str(error)
    return None, ""


# Windows ---------------------------------------------------------------------------------------------------


def several_losses():
    together, norms = train(*sharded(SCALED, optimizer="sgd", num_losses=2), micro=2, losses=2)
    model, amp = sharded(SCALED, num_losses=2)
    model.set_requires_gradient_sync(False)
    amp.backward(loss_of(model, amp), loss_id=0)
    refused = refusal(lambda: amp.backward(loss_of(model, amp), loss_id=1))
    return together, norms, refused


def test_losses_with_scales_of_their_own_need_an_exchange_between_them():
    for params, norms, (kind, text) in on_ranks(2, several_losses):
        exact, exact_norms = in_one_process("O0", optimizer="sgd", micro=2)
        assert max(float((params[name] - value).abs().max()) for name, value in exact.items()) < 0.02
        assert norms == pytest.approx(exact_norms, rel=0.02)
        assert kind is StateError
        assert "gradients wait to be reduced" in text
        assert "the scale of another loss" in text


def waiting():
    expected = train(*sharded(BF16), steps=1)[0]
    model, amp = sharded(BF16)
    model.set_requires_gradient_sync(False)
    amp.backward(loss_of(model, amp, 5))
    refused = refusal(amp.step)
    amp.zero_grad()  # of what waits, too
    alike = same(expected, train(model, amp, steps=1)[0])
    model, amp = sharded(SCALED)
    amp.backward(loss_of(model, amp))
    amp.step()
    stale = refusal(lambda: amp.backward(loss_of(model, amp)))
    return refused, alike, stale


def test_gradients_that_wait_are_not_left_behind_and_are_cleared():
    for (kind, text), differing, stale in on_ranks(2, waiting):
        assert kind is StateError
        assert "set_requires_gradient_sync(True) before the last amp.backward()" in text
        assert differing == []
        assert stale[0] is StateError
        assert "the last step's gradients are still there" in stale[1]


def evaluated_between():
    """What training makes that is interrupted by forward passes, which leave the root's parameters gathered."""
    expected = train(*sharded(BF16))
    model, amp = sharded(BF16)

    def evaluate():
        with torch.no_grad(), amp.autocast():
            model(batch(9)[0])
        assert len(list(amp.master_params())) == len(amp._core.weights.names())

    found = train(model, amp, between=evaluate)
    evaluate()
    names = {amp._core.weights.name_of(param) for param in amp.master_params()}
    return same(expected[0], found[0]), sorted(names) == sorted(expected[0])


def test_evaluation_between_a_backward_pass_and_its_step_leaves_nothing_stale():
    assert on_ranks(2, evaluated_between) == [([], True)] * 2


def parts_of_a_model(shards):
    """Weights after two optimizers took turns with gradients of their own parameters alone."""
    model = net()
    if shards:
        mezzo.fully_shard(model, "O0")
    blocks = list(model.blocks.parameters())
    others = [param for param in model.parameters() if not any(param is each for each in blocks)]
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in (blocks, others)]
    amp = mezzo.MixedPrecision(model, optimizers, "O0")
    reached = []
    for optimizer in optimizers:
        amp.backward(loss_of(model, amp, part=own_part if shards else lambda tensor: tensor), optimizer)
        reached.append([name for name, param in model.named_parameters() if param.grad is not None])
        amp.step(optimizer)
        amp.zero_grad()
    return whole(model), reached


def test_one_optimizer_of_several_gets_its_gradients_alone():
    expected, expected_reached = parts_of_a_model(shards=False)
    for found, reached in on_ranks(2, parts_of_a_model, True):
        assert reached == expected_reached
        assert max(float((found[name] - value).abs().max()) for name, value in expected.items()) < 1e-6


def penalized(shards):
    model = net()
    if shards:
        mezzo.fully_shard(model, "O0")
    amp = mezzo.MixedPrecision(model, OPTIMIZERS["sgd"](model.parameters()), "O0")
    x, _ = batch(0)
    x = (own_part(x) if shards else x).requires_grad_()
    with amp.autocast():
        out = model(x)
    refused = refusal(lambda: amp.grad(out.sum(), x, create_graph=True))
    if shards:
        model.set_reshard_after_backward(False)
    (slope,) = amp.grad(out.sum(), x, create_graph=True)
    if shards:
        model.set_reshard_after_backward(True)
    amp.backward(out.mean() + (slope.norm(dim=1) - 1).square().mean())
    amp.step()
    return whole(model), refused


def test_a_penalty_needs_what_is_gathered_twice():
    expected, (nothing, _) = penalized(shards=False)
    assert nothing is None
    for found, (kind, text) in on_ranks(2, penalized, True):
        assert kind is UnsupportedError
        assert "model.set_reshard_after_backward(False) before amp.grad" in text
        assert max(float((found[name] - value).abs().max()) for name, value in expected.items()) < 1e-6


def struck(where):
    """Which steps were skipped, the scales, and the weights, where an infinity strikes one rank in the second step."""
    model, amp = sharded(SCALED, optimizer="fused")
    skipped, scales = [], []
    for step in range(3):
        x, y = map(own_part, batch(step))
        if (step, where, dist.get_rank()) == (1, "input", 1):
            x[0, 0] = 1e30
        with amp.autocast():
            loss = (model(x) - y).square().mean()
        amp.backward(loss)
        if (step, where, dist.get_rank()) == (1, "shard", 1):
            model.blocks[0].up.weight.grad.to_local()[0, 0] = torch.inf
        found = amp.step()
        skipped.append(bool(found.skipped))
        scales.append(float(found.next_scale))
        amp.zero_grad()
    return skipped, scales, whole(model)


def struck_everywhere():
    return {where: struck(where) for where in ("shard", "input")}


def test_an_infinity_in_one_part_of_one_rank_skips_the_step_of_all():
    first, second = on_ranks(2, struck_everywhere)
    for where in ("shard", "input"):
        (skipped, scales, params), (others, other_scales, other_params) = first[where], second[where]
        assert skipped == others == [False, True, False], where
        assert scales == other_scales, where
        assert same(params, other_params) == []
    assert first["shard"][1] == [64.0, 32.0, 32.0]


# Frozen parameters ------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(base):
    model = net().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LowRank(block.up.to(base)), LowRank(block.down.to(base))
    return model


def adapters_trained():
    found = {}
    for policy in ("O0", "O1,dtype=bfloat16,emulate=false", BF16):
        for base in (torch.float32, torch.bfloat16) if policy != "O0" else (torch.float32,):
            model = mezzo.fully_shard(adapted(base), policy)
            params = [param for param in model.parameters() if param.requires_grad]
            amp = mezzo.MixedPrecision(model, torch.optim.SGD(params, lr=0.1), policy)
            frozen = {name: value for name, value in whole(model).items() if "base" in name or "up" not in name}
            after = train(model, amp, steps=2)[0]
            kept = [name for name, value in frozen.items() if "down.weight" not in name and "up.up" not in name]
            found[policy, str(base)] = after, same({n: frozen[n] for n in kept}, {n: after[n] for n in kept})
    return found


@pytest.mark.slow
def test_adapters_train_beside_frozen_weights_of_any_dtype():
    for found in on_ranks(2, adapters_trained):
        exact, _ = found["O0", "torch.float32"]
        for case, (params, changed) in found.items():
            assert changed == [], case
            assert max(float((params[n].float() - value).abs().max()) for n, value in exact.items()) < 0.02, case


# Meshes of two dimensions -----------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def on_meshes():
    found = {}
    for policy in ("O0", BF16):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = mezzo.fully_shard(net(), policy, mesh=mesh)
        amp = mezzo.MixedPrecision(model, OPTIMIZERS["adamw"](model.parameters()), policy)
        found[policy, "replicas"] = train(model, amp, steps=5)
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        torch.manual_seed(0)
        model = parallelize_module(Wide(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mezzo.fully_shard(model, policy, mesh=mesh["data"])
        amp = mezzo.MixedPrecision(model, OPTIMIZERS["adamw"](model.parameters()), policy)
        rank = mesh.get_local_rank("data")
        found[policy, "tensor"] = train(model, amp, steps=5, part=lambda tensor, rank=rank: tensor.chunk(2)[rank])
    return found


@pytest.mark.slow
def test_replicas_and_tensor_parallel_shards_train_as_one_process_does():
    def wide():
        torch.manual_seed(0)
        return Wide()

    by_rank = on_ranks(4, on_meshes, timeout=120)
    for policy, limit in (("O0", 1e-5), (BF16, 0.03)):
        for way, make in (("replicas", net), ("tensor", wide)):
            exact, norms = in_one_process("O0", make, steps=5)
            for found in by_rank:
                params, theirs = found[policy, way]
                worst = max(float((params[name] - value).abs().max()) for name, value in exact.items())
                assert worst < limit, (policy, way)
                assert theirs == pytest.approx(norms, rel=1e-4 if policy == "O0" else 0.05), (policy, way)
                assert same(params, by_rank[0][policy, way][0]) == []


# What is read of torch's private state -----------------------------------------------------------------------


def test_torch_keeps_what_it_is_asked_for(alone):
    model = mezzo.fully_shard(net(), BF16)
    found = sharding.units(model)
    assert [type(unit).__mro__[1] for unit in found] == [FSDPModule] * 3
    parts = sharding.shards(model)
    assert {part.param for part in parts} == set(model.parameters())
    assert {part.gathered for part in parts} == {torch.bfloat16}
    assert {part.param.dtype for part in parts} == {torch.float32}
    assert sharding.parts_of(found) == {}
    gathered = sharding.gathered(model)
    assert gathered.keys() == {part.param for part in parts}
    assert {tensor.dtype for tensor in gathered.values()} == {torch.bfloat16}
    assert sharding.parts_of(found) == {tensor: part for part, tensor in gathered.items()}
    assert not sharding.has_unreduced(found)
    assert sharding.reshards_after_backward(found)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 3).bfloat16()).sum().backward()
    assert sharding.has_unreduced(found)
    sharding.forget_gradients(found)
    assert not sharding.has_unreduced(found)
    plain = net()
    assert sharding.units(plain) == sharding.shards(plain) == []
    fully_shard(plain.blocks[0])
    assert sharding.units(plain) == [plain.blocks[0]]


# FP16 gradients between ranks --------------------------------------------------------------------------------


class Rows(nn.Module):
    """A weight for each row, whose gradient is what comes in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * x


#: FP16's smallest number, and what two ranks send in units of it: torch divides before the sum or after it, and loses.
SMALLEST = 2.0**-24
SENT = [[1, 1], [1, 2], [3, 0], [1001, 1004]]
FP16 = mezzo.Policy.O2("float16", loss_scale=1024.0, emulate=False)


def means(policy, factor=None, optimizer=torch.optim.SGD):
    """The means of gradients over ranks, in units of the smallest number on the wire: of one pass, and of two."""
    model = mezzo.fully_shard(Rows(), policy)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    amp = mezzo.MixedPrecision(model, optimizer(model.parameters(), lr=0.0), policy)
    ours = torch.tensor([row[dist.get_rank()] for row in SENT]) * SMALLEST
    found = []
    for passes in (1, 2):
        for number in range(passes):
            with amp.no_sync() if number < passes - 1 else contextlib.nullcontext():
                with amp.autocast():
                    out = model(ours.float())
                amp.backward(out.sum() / 1024)
        amp.unscale_()
        found.append((model.weight.grad.full_tensor().float() * 1024 / SMALLEST).flatten().tolist())
        amp.step()
        amp.zero_grad()
    amp.close()
    ((_, group),) = sharding._groups(sharding.units(model))
    return found, group.gradient_divide_factor, group.force_sum_reduction_for_comms


def exact_means():
    return {
        "torch's": means(FP16, optimizer=torch.optim.SGD),
        "mezzo's": means(FP16, optimizer=mezzo.optim.SGD),
        "a user's factor": means(FP16, factor=1.0),
    }


def test_fp16_gradients_are_summed_on_the_wire_and_divided_where_they_are_unscaled():
    expected = [sum(row) / 2 for row in SENT]
    for found in on_ranks(2, exact_means):
        for name in ("torch's", "mezzo's"):
            (once, twice), factor, forced = found[name]
            assert once == pytest.approx(expected), name
            assert twice == pytest.approx([2 * each for each in expected]), name
            assert (factor, forced) == (None, False)
        (once, _), factor, _ = found["a user's factor"]
        assert once == pytest.approx([2 * each for each in expected])  # the sums that were asked for
        assert factor == 1.0
