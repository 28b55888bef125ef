"""What happens to gradients on their way between ranks: the smallest and the largest values, and who sees what."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.numerics.traffic import Traffic

from .ranks import on_ranks

SCALE = 4.0
LEAST = 2.0**-24
#: FP16 gradients, scaled, on ranks 0 and 1.
TABLE = torch.tensor([[60000.0, LEAST, 2 * LEAST], [60000.0, LEAST, 3 * LEAST]])
POLICY = f"O2,dtype=float16,loss_scale=constant({SCALE:g}),emulate=true"


class Given(nn.Module):
    """A weight whose scaled gradients are given."""

    def __init__(self, gradient):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(gradient)))
        self.gradient = gradient

    def forward(self):
        return (self.weight.float() * self.gradient / SCALE).sum()


def session(gradient, policy=POLICY, make=None, **options):
    model = Given(gradient)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if make is None else make(model.parameters())
    amp = mezzo.MixedPrecision(model, optimizer, policy, **options)
    return model, DistributedDataParallel(model), amp


def backward(ddp, amp):
    with amp.autocast():
        loss = ddp()
    amp.backward(loss)


def means(gradient, policy):
    """Return the means that an optimizer gets, unscaled, and the same times the scale."""
    _, ddp, amp = session(gradient, policy)
    backward(ddp, amp)
    amp.unscale_()
    (master,) = amp.master_params()
    return master.grad * SCALE, bool(amp.step().skipped)


def table(policies):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {policy: means(TABLE[rank % 2], policy) for policy in policies} | {"ranks": ranks}


@pytest.mark.parametrize("ranks", [2, 4])
def test_fp16_gradients_survive_at_both_ends(ranks):
    """torch's own average makes 0 of the smallest, its sum infinity of the largest."""
    wide = POLICY + ",reduce=float32"
    exact = TABLE.to(torch.float16).double().mean(0)
    for found in on_ranks(ranks, table, [POLICY, wide]):
        summed, is_skipped = found[POLICY]
        assert summed[1:].double().tolist() == exact[1:].tolist()
        assert is_skipped
        assert summed[0] == torch.inf  # an overflow like any other: the loss scale falls
        in_fp32, is_skipped = found[wide]
        assert in_fp32.double().tolist() == exact.tolist()
        assert not is_skipped


def seen(_):
    """Return, by who looks, what is seen of gradients whose mean is (1.5, 3), and what a sum is divided by."""
    rank, found = dist.get_rank(), {}
    gradient = torch.tensor([1.0, 2.0]) * SCALE * (1 + rank)
    model, ddp, amp = session(gradient)
    backward(ddp, amp)
    found["on the wire"] = model.weight.grad.tolist()
    (slope,) = amp.grad(model(), [model.weight])
    found["amp.grad"] = slope.tolist()
    step = amp.step()
    found["step.grad_norm"] = float(step.grad_norm) ** 2
    found["step.scale"] = float(step.scale)
    found["SGD"] = (-next(amp.master_params())).tolist()
    for name, make in (
        ("fused", lambda params: torch.optim.SGD(params, lr=1.0, fused=True)),
        ("mezzo", lambda params: mezzo.optim.SGD(params, lr=1.0)),
    ):
        model, ddp, amp = session(gradient, make=make)
        backward(ddp, amp)
        amp.step()
        found[name] = (-model.weight.detach()).tolist()
    model, ddp, amp = session(gradient)
    backward(ddp, amp)
    amp.unscale_()
    found["hand clipping"] = float(nn.utils.clip_grad_norm_(amp.master_params(), 1e9)) ** 2
    found["unscale_"] = model.weight.grad.tolist()
    model, ddp, amp = session(gradient, max_grad_norm=1.0)
    backward(ddp, amp)
    amp.step()
    found["clipped"] = float(next(amp.master_params()).norm())
    model, ddp, amp = session(gradient, make=lambda params: torch.optim.LBFGS(params, lr=1.0, max_iter=1))

    def closure():
        amp.zero_grad()
        with amp.autocast():
            loss = ddp()
        amp.backward(loss)
        return loss

    amp.step(closure=closure)
    found["closure"] = (-next(amp.master_params())).tolist()
    return found


def test_only_the_wire_sees_the_sum():
    for rank, found in enumerate(on_ranks(2, seen, None)):
        assert found.pop("on the wire") == [12.0, 24.0]  # 2 · SCALE · mean, as FP16 is summed
        assert found.pop("amp.grad") == [1.0 + rank, 2.0 * (1 + rank)]  # a rank's own: nothing was reduced
        assert found.pop("step.grad_norm") == found.pop("hand clipping") == pytest.approx(11.25)
        assert found.pop("step.scale") == SCALE
        assert found.pop("clipped") == pytest.approx(1.0)
        first = found.pop("closure")  # LBFGS begins with a step of length 1 / |g|₁
        assert first == pytest.approx([1.5 / 4.5, 3 / 4.5])
        assert set(map(tuple, found.values())) == {(1.5, 3.0)}, found


def travelled(_):
    """Return the dtype and bytes of what travels for 100 weights, by policy."""
    found = {}
    for level, dtype, reduce in BYTES:
        policy = f"{level},dtype={dtype},reduce={reduce},emulate=true"
        _, ddp, amp = session(torch.ones(100), policy)
        with Traffic() as traffic:
            backward(ddp, amp)
        found[level, dtype, reduce] = [(each.dtype, each.whole_bytes) for each in traffic.collectives]
    return found


#: By policy: what 100 gradients travel in.
BYTES = {
    ("O1", "float16", "param"): torch.float32,
    ("O1", "float16", "bfloat16"): torch.bfloat16,
    ("O1", "bfloat16", "float32"): torch.float32,
    ("O2", "float16", "param"): torch.float16,
    ("O2", "float16", "float32"): torch.float32,
    ("O2", "bfloat16", "param"): torch.bfloat16,
    ("O2", "bfloat16", "float32"): torch.float32,
    ("O2", "bfloat16", "bfloat16"): torch.bfloat16,
}


def test_gradients_travel_in_what_the_policy_says():
    expected = {case: [(dtype, 100 * dtype.itemsize)] for case, dtype in BYTES.items()}
    assert on_ranks(2, travelled, None) == [expected] * 2


def accumulated(_):
    """Return sums of small gradients under each way to accumulate: means over ranks of what ranks have."""
    rank, found = dist.get_rank(), {}
    for policy in (POLICY, POLICY + ",reduce=float32", "O2,dtype=bfloat16,emulate=true"):
        for paused in ([False] * 3, [True, True, False], [False, True, False], [True, False, True, False]):
            model, ddp, amp = session(torch.full((2,), 5 * LEAST * (1 + 2 * rank)), policy)
            for pauses in paused:
                with amp.no_sync() if pauses else amp.autocast():
                    backward(ddp, amp)
            amp.unscale_()
            found[policy, len(paused), sum(paused)] = (model.weight.grad / (10 * LEAST / SCALE) / len(paused)).tolist()
    return found


def test_accumulated_gradients_are_means_over_ranks():
    for found in on_ranks(2, accumulated, None):
        assert {key: value for key, value in found.items() if value != [1.0, 1.0]} == {}


def resumed(_):
    """Return weights after a step that was saved and loaded in mid-window, after each of its backward passes."""
    found, x = {}, torch.full((2,), SCALE * (1 + dist.get_rank()))
    for at in range(3):
        model, ddp, amp = session(x)
        for number in range(3):
            backward(ddp, amp)
            if number == at:
                states = [each.state_dict() for each in (model, *amp._core.optimizers, amp)]
                model, ddp, amp = session(x)
                for each, state in zip((model, *amp._core.optimizers, amp), states, strict=True):
                    each.load_state_dict(state)
        amp.step()
        found[at] = next(amp.master_params()).tolist()
    return found


def test_a_window_that_was_saved_knows_that_its_gradients_are_sums():
    assert on_ranks(2, resumed, None) == [{at: [-4.5, -4.5] for at in range(3)}] * 2


def hooked(_):
    """Return what a user's own hook leaves to sessions, and what these log."""
    found, records = {}, []
    logging.getLogger("mezzo").addHandler(handler := logging.Handler())
    logging.getLogger("mezzo").setLevel(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    for name, policy in (("param", POLICY), ("float32", POLICY + ",reduce=float32")):
        model, ddp, amp = session(torch.tensor([8.0, 4.0]) * (1 + dist.get_rank()), policy)
        ddp.register_comm_hook(None, allreduce_hook)
        for _ in range(2):
            for pauses in (True, False):
                with amp.no_sync() if pauses else amp.autocast():
                    backward(ddp, amp)
            amp.unscale_()
            found[name] = model.weight.grad.tolist()
            amp.step()
            amp.zero_grad()
    # Once torch has one of ours, it takes no other; after the session that one averages as torch does.
    model = Given(torch.tensor([1.0 + 2.0**-9, 3.0]) * SCALE)
    ddp = DistributedDataParallel(model)
    for name in ("first", "second"):
        amp = mezzo.MixedPrecision(ddp, torch.optim.SGD(ddp.parameters(), lr=1.0), "O1,reduce=bfloat16,emulate=true")
        backward(ddp, amp)
        amp.unscale_()
        found[name] = model.weight.grad.tolist()
        amp.zero_grad()
        amp.close()
        ddp().backward()
        found["after " + name] = model.weight.grad.tolist()
        model.weight.grad = None
    return found, records


def test_a_hook_of_the_users_wins_and_the_next_session_takes_over_ours():
    for found, records in on_ranks(2, hooked, None):
        exact, rounded = [1.0 + 2.0**-9, 3.0], [1.0, 3.0]
        assert found == {
            "param": [6.0, 3.0], "float32": [6.0, 3.0], "first": rounded, "after first": exact, "second": rounded,
            "after second": exact,
        }  # fmt: skip
        told = [record for record in records if "communication hook" in record]
        assert [record.count("reduce=float32 has no effect") for record in told] == [0, 1]
