"""What others have reported of two dims of ranks, planted on four; and what does not go with tensor parallelism.

Each report is named by its thread.
"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.numerics import Recorder
from mezzo.sharded import local

from .ranks import on_ranks, text_of
from .tensor_parallel import Alone, Meshed, batch, plan_of, sgd, sparse_tokens, tokens
from .test_fully_shard import Sharp, same, whole
from .test_tensor_parallel import BF16, FP16, O1, signed

# Reports --------------------------------------------------------------------------------------------------


class Copies(nn.Module):
    """What every rank along the tensors holds whole: a norm's weight, a row-parallel bias, and a router's matrix."""

    def __init__(self):
        super().__init__()
        self.norm, self.router, self.down = nn.LayerNorm(8, eps=0.0), nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.eye(8) if param.dim() == 2 else torch.ones(8))

    def forward(self, x):
        return self.norm(x) + self.down(x) + self.router(x)


def partial_sums(policy):
    """pytorch#190626: partial gradients of 256 and 1/2 on two ranks, of which BF16 holds no sum; return the sums."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    cut = {"norm": SequenceParallel(use_local_output=True), "router": SequenceParallel(use_local_output=True),
           "down": SequenceParallel(use_local_output=True)}  # fmt: skip
    model = mezzo.fully_shard(parallelize_module(Copies(), mesh["tensor"], cut), policy, mesh=mesh["data"])
    amp = mezzo.MixedPrecision(model, sgd(model.parameters()), policy)
    x = torch.tensor([1.0, -1.0]).repeat(4).expand(1, 1, 8)  # what a norm leaves as it is
    with amp.autocast():
        out = model(x)
    amp.backward((out.float() * (0.5 if mesh.get_local_rank("tensor") else 256.0)).sum())
    return {name: param.grad.full_tensor().abs().unique().tolist() for name, param in model.named_parameters()}


def row_parallel(policy):
    """Return the output of a row-parallel layer whose parts are 256.5 and -256, which torch sums in its dtype."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[256.0, 0.5, -256.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
    model = parallelize_module(model, mesh["tensor"], {"0": RowwiseParallel(input_layouts=Replicate())})
    with mezzo.prepare(model, policy).autocast():
        return float(model(torch.ones(1, 8)))


def accumulated(meshed, numbers, waits):
    """Accumulate, and return the gradients of all."""
    for number in numbers:
        if number == numbers[-1]:
            meshed.backward(number, lambda logits, labels: signed(logits, labels) * meshed.size)
        else:
            with waits(number):
                meshed.backward(number, lambda logits, labels: signed(logits, labels) * meshed.size * 2.0**-12)
    step = meshed.amp.step()
    return whole(meshed.model), float(step.grad_norm)


def small_and_large(make):
    """pytorch#170648, #194434: micro-batches whose gradients are 2⁻¹² of the last one's, which 16 bits would lose."""
    meshed = make()
    return accumulated(meshed, (0, 1, 2), lambda _: meshed.amp.no_sync())


def late(make):
    """pytorch#196996: a block that only the last micro-batch of a step runs."""
    meshed = make()
    block, calls = meshed.model.blocks[0], []
    forward = type(block).forward

    def once(x):
        calls.append(1)
        return x if len(calls) == 1 else forward(block, x)

    block.forward = once
    with meshed.amp.no_sync():
        meshed.backward(0, lambda logits, labels: signed(logits, labels) * meshed.size)
    meshed.backward(1, lambda logits, labels: signed(logits, labels) * meshed.size)
    step = meshed.amp.step()
    return whole(meshed.model), float(step.grad_norm)


def unfrozen(make):
    """pytorch#186998: a first pass that finds parameters frozen, which are trained afterwards."""
    meshed = make()
    for block in meshed.model.blocks:
        block.requires_grad_(False)
    meshed.step(0)
    for block in meshed.model.blocks:
        block.requires_grad_(True)
    step = meshed.step(1)
    return whole(meshed.model), float(step.grad_norm)


def clipped(make):
    """pytorch#170862: the norm by which a program's own call clips is that of all ranks."""
    meshed = make()
    meshed.amp.close()
    amp = mezzo.attach(meshed.model, meshed.optimizer, O1)
    norms = []
    for number in range(2):
        meshed.optimizer.zero_grad()
        index, labels = map(meshed.part, batch(number))
        loss = functional.cross_entropy(meshed.model(index).flatten(0, -2), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(meshed.model.parameters(), 0.25)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        meshed.optimizer.step()
    amp.close()
    return whole(meshed.model), norms


def tied():
    """Return a model whose head is its embedding; plans untie them."""
    model = tokens()
    model.head.weight = model.embed.weight
    return model


#: By report: what is done, and to which model under which policy.
REPORTS = {
    "small": (small_and_large, BF16, sparse_tokens),
    "late": (late, BF16, sparse_tokens),
    "unfrozen": (unfrozen, BF16, tokens),
    "one in FP32": (lambda make: trained(make), f"{BF16},fp32_param=blocks.0.feed.up.weight", tokens),
    "clipped": (clipped, O1, tokens),
    "twice in a step": (lambda make: sharp(make), BF16, tokens),
    "O3": (lambda make: trained(make), "O3,dtype=float16,emulate=false", tokens),
    "kept gathered": (lambda make: trained(lambda: make(shards={"reshard_after_forward": False})), FP16, tokens),
    "tied": (lambda make: trained(make), BF16, tied),
    "checkpoints": (lambda make: trained(make), BF16, lambda: tokens(checkpoints=True)),
}


def trained(make):
    meshed = make()
    norms = [float(meshed.step(number).grad_norm) for number in range(2)]
    return whole(meshed.model), norms


def sharp(make):
    """A closure that runs twice in a step."""
    meshed = make(optimizer=lambda params: Sharp(params, lr=0.1))

    def closure():
        meshed.amp.zero_grad()
        return meshed.backward(0)

    step = meshed.amp.step(closure=closure)
    return whole(meshed.model), float(step.grad_norm)


def reports():
    results = {}
    for name, (do, policy, make_model) in REPORTS.items():
        results[name] = do(
            lambda policy=policy, make_model=make_model, **kwargs: Meshed(policy, make=make_model, **kwargs)
        )
    return results


# One verdict ----------------------------------------------------------------------------------------------

SPOILED = {"a loss": 3, "a copy": 1, "a shard": 2}


def verdicts():
    """What all make of an infinity that one rank finds: in its loss, its copy of a gradient, or its shard."""
    results = {}
    for where, rank in SPOILED.items():
        meshed, is_here = Meshed("O1,dtype=float16,emulate=false", loss=True), dist.get_rank() == rank
        before = whole(meshed.model)
        meshed.backward(0, times=float("inf") if is_here and where == "a loss" else 1.0)
        if is_here and where != "a loss":
            local((meshed.model.last if where == "a copy" else meshed.model.head).weight.grad).view(-1)[0] = torch.nan
        step = meshed.amp.step()
        results[where] = bool(step.skipped), float(step.next_scale), same(before, whole(meshed.model))
    return results


def exchanges():
    """What a step exchanges: of each call the operation, how many numbers, and among how many ranks."""
    meshed, calls, plain = Meshed(O1, loss=True, max_grad_norm=1.0), [], dist.all_reduce

    def counting(numbers, op, group):
        calls.append((str(op), numbers.numel(), group.size()))
        return plain(numbers, op=op, group=group)

    meshed.backward(0)
    with patch.object(dist, "all_reduce", counting):
        meshed.amp.step()
    return calls, len([*meshed.model.parameters()])


def recorded(meshed, has_session=True):
    """Return what a recorder counts of parameters, their gradients and what the hidden units give, by path."""
    if not has_session:
        meshed.amp.close()
    kinds = "weights", "weight_gradients", "activations"
    with Recorder(meshed.model, meshed.optimizer, every=1, kinds=kinds) as recorder:
        if has_session:
            meshed.step(0)
        else:
            index, labels = map(meshed.part, batch(0))
            functional.cross_entropy(meshed.model(index).flatten(0, -2), labels.flatten()).backward()
            meshed.optimizer.step()
            recorder.step()
    (step,) = recorder.evidence.steps
    counts = {(tensor.kind, tensor.module, tensor.name): str(tensor.histogram) for tensor in step.tensors}
    return {key: text for key, text in counts.items() if key[0] != "activations" or key[1].endswith(".up")}


def penalties():
    """Gradients inside of a loss, of logits that lie in parts, under a loss scale."""
    meshed = Meshed(
        "O1,dtype=float16,emulate=false", shape=(1, 4), make=lambda: tokens(layers=1, attends=False), loss=True
    )
    index, _ = batch(0)
    with meshed.amp.autocast():
        logits = meshed.model(index)
        total = logits.float().square().mean()
        (gradient,) = meshed.amp.grad(total, [logits], create_graph=False, retain_graph=True)
    meshed.amp.backward(total)
    step = meshed.amp.step()
    return bool(step.skipped), same(
        {"": gradient.full_tensor()}, {"": logits.detach().full_tensor() * 2 / logits.numel()}
    )


# Refused --------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.up, self.down, self.last = (
            nn.Linear(16, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 16),
        )

    def forward(self, x):
        return self.last(self.down(torch.relu(self.up(self.first(x)))))


def wide(policy, shards):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = parallelize_module(Wide(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = mezzo.fully_shard(model, policy, mesh=mesh["data"]) if shards else model
    amp = mezzo.MixedPrecision(model, sgd(model.parameters()), policy)
    with amp.autocast():
        loss = model(torch.linspace(-1, 1, 512).view(32, 16)).float().square().mean()
    amp.backward(loss)
    return float(amp.step().grad_norm)


def wrapped(policy):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(model := tokens(), mesh["tensor"], plan_of(model))
    amp = mezzo.MixedPrecision(model, sgd(model.parameters()), policy)
    wrapper = DistributedDataParallel(model, process_group=mesh["data"].get_group(), init_sync=False)
    with amp.autocast():
        wrapper(batch(0)[0])


def changed():
    """Return what O2 makes of a run that O1 began, and what a change says that tensor parallelism does not go with."""
    meshed, plain = Meshed(O1, loss=True), Meshed(O1, loss=True)
    for session in (meshed, plain):
        session.step(0)
    meshed.amp.change(BF16)
    for session in (meshed, plain):
        session.step(1)
    text = text_of(lambda: meshed.amp.change("O1,bf16,fp8_module=*"))
    return same(whole(meshed.model), whole(plain.model)), text, str(meshed.amp.policy)


def refusals():
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["data"].get_group()
    texts = {
        ("products", shards, policy): text_of(lambda policy=policy, shards=shards: wide(policy, shards))
        for policy in ("O1,bf16,fp8_module=*", "O2,bf16,nvfp4=linear")
        for shards in (False, True)
    }
    texts["wrapper"] = text_of(lambda: wrapped(O1))
    texts["located"] = text_of(lambda: Meshed(O1, shape=(1, 4), make=sparse_tokens, on_overflow="locate"))
    texts["changed"] = changed()
    texts["group"] = text_of(lambda: Meshed(O1, process_group=own))
    text = texts["products", True, "O1,bf16,fp8_module=*"]
    stays_low = text.partition("or low=")[2].partition(" before")[0]
    texts["cured"] = [wide(f"O1,bf16,low={stays_low},fp8_module=*", shards) for shards in (False, True)]
    return texts


def everything():
    outputs = [row_parallel(policy) for policy in (O1, f"{O1},fp32_module=0")]
    sums = {policy: partial_sums(policy) for policy in (O1, BF16)}
    return {
        "sums": sums,
        "outputs": outputs,
        "reports": reports(),
        "verdicts": verdicts(),
        "exchanges": exchanges(),
        "recorded": [
            recorded(Meshed("O0", shape=shape, make=sparse_tokens), has_session=has_session)
            for shape, has_session in (((1, 4), True), ((2, 2), True), ((2, 2), False))
        ],
        "penalties": penalties(),
        "refusals": refusals(),
    }


@pytest.fixture(scope="module")
def of_four():
    """What :func:`everything` returns on each of four ranks."""
    return on_ranks(4, everything)


def test_gradients_of_copies_are_summed_over_ranks_in_fp32(of_four):
    for sums in (sums for rank in of_four for sums in rank["sums"].values()):
        assert sums["norm.weight"] == sums["norm.bias"] == sums["router.bias"] == sums["down.bias"] == [256.5]
        assert sums["router.weight"] == sums["down.weight"] == [256.5]


def test_outputs_of_row_parallel_products_are_summed_in_their_dtype(of_four):
    assert [rank["outputs"] for rank in of_four] == [[0.0, 0.5]] * 4


@pytest.mark.parametrize("name", REPORTS)
def test_what_was_reported_is_not_so_here(of_four, name):
    do, policy, make_model = REPORTS[name]
    params, norm = do(lambda **kwargs: Alone(policy, make=make_model, **kwargs))
    for rank in of_four:
        others, other_norm = rank["reports"][name]
        assert same(others, of_four[0]["reports"][name][0]) == []
        if make_model is sparse_tokens:
            assert same(others, params) == []
        assert max(float((others[key] - value).abs().max()) for key, value in params.items()) < 0.01
        assert other_norm == pytest.approx(norm, rel=1e-6 if make_model is sparse_tokens else 0.01)


def test_what_one_rank_finds_in_any_part_decides_for_all(of_four):
    for rank in of_four:
        scales = {"a loss": 65536.0, "a copy": 32768.0, "a shard": 32768.0}
        assert rank["verdicts"] == {where: (True, scale, []) for where, scale in scales.items()}


def test_a_step_exchanges_one_vector_of_norms_along_each_dim_and_one_of_flags(of_four):
    for calls, count in (rank["exchanges"] for rank in of_four):
        (*norms, flags) = calls
        assert flags == ("RedOpType.MAX", 4, 4)
        assert [(op, size) for op, _, size in norms] == [("RedOpType.SUM", 2)] * 2
        assert max(numbers for _, numbers, _ in norms) <= count


def test_recorders_count_each_number_of_what_is_cut_once(of_four):
    expected = recorded(Alone("O0", make=sparse_tokens))
    assert len(expected) == 17
    for counts in (counts for rank in of_four for counts in rank["recorded"]):
        assert counts == expected


def test_gradients_inside_of_losses_lie_as_logits_do(of_four):
    assert [rank["penalties"] for rank in of_four] == [(False, [])] * 4


def test_what_does_not_go_with_tensor_parallelism_is_refused(of_four):
    for texts in (rank["refusals"] for rank in of_four):
        for key, text in texts.items():
            if key[0] == "products":
                assert text.startswith(
                    "UnsupportedError: products below sixteen bits of weights that tensor parallelism"
                )
                assert "up.weight, down.weight" in text
        assert "DistributedDataParallel around parameters that tensor parallelism has cut" in texts["wrapper"]
        assert "sharded over ranks that are not in the session's process group" in texts["group"]
        assert "tensor parallelism has cut cannot be located in the run" in texts["located"]
        different, text, policy = texts["changed"]
        assert different == []
        assert "products below sixteen bits of weights that tensor parallelism has cut" in text
        assert policy == str(mezzo.Policy.of(BF16))
        assert texts["cured"][0] == pytest.approx(texts["cured"][1], rel=1e-5)
