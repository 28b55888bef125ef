"""Tensor parallelism beside ``mezzo.fully_shard``: meshes of two dims against one process."""

import pytest
import torch

from mezzo import optim

from .ranks import on_ranks
from .tensor_parallel import Alone, Meshed, sparse_tokens
from .test_fully_shard import same, whole

BF16 = "O2,dtype=bfloat16,emulate=false"
O1 = "O1,dtype=bfloat16,emulate=false"
FP16 = "O2,dtype=float16,emulate=false"
EMULATED = "O2,dtype=float16,emulate=true"

# What is exact --------------------------------------------------------------------------------------------

EXACT = ("O0", O1, BF16, "O1,dtype=float16,emulate=false,loss_scale=64", "O2,dtype=float16,emulate=true,loss_scale=64")
#: By name: ranks along data and along tensors, and whether norms have parts of the sequence.
CUTS = {"both": ((2, 2), True), "whole sequence": ((2, 2), False), "tensors": ((1, 4), True)}
STEPS = {
    "adamw": lambda params: optim.AdamW(params, lr=0.125),
    "sgd": lambda params: optim.SGD(params, lr=0.125, momentum=0.5),
}


def signed(logits, labels):
    """Logits of one token in each row, some of them with a sign; on each row of ranks as often as there are rows."""
    factors = (labels[:, :1, None] + torch.arange(logits.shape[-1])) % 5 % 3 - 1.0
    return (logits[:, :1] * factors).float().sum()


def exactly(meshed):
    """Take the first step, which rounds nothing before the update; return weights, moments and the norm."""
    step = meshed.step(0, lambda logits, labels: signed(logits, labels) * meshed.size)
    states = {
        f"{name}, {kept}": (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, param in meshed.model.named_parameters()
        for kept, value in meshed.optimizer.state[param].items()
        if kept != "step"
    }
    return whole(meshed.model) | states, float(step.grad_norm)


def exact():
    return {
        (cut, policy, name): exactly(
            Meshed(policy, shape, make=sparse_tokens, optimizer=STEPS[name], sequence=sequence)
        )
        for cut, (shape, sequence) in CUTS.items()
        for policy in EXACT
        for name in (STEPS if policy in ("O0", BF16) and cut == "both" else ("adamw",))
    }


# Training -------------------------------------------------------------------------------------------------

TRAINED = [(policy, cut) for policy in ("O0", O1, BF16, FP16) for cut in (False, True)] + [(EMULATED, True)]


def trained(meshed, steps=2):
    losses, norms = [], []
    for number in range(steps):
        losses.append(meshed.backward(number))
        norms.append(float(meshed.amp.step().grad_norm))
        meshed.amp.zero_grad()
    return whole(meshed.model), losses, norms


def training():
    return {(policy, cut): trained(Meshed(policy, loss=cut, sequence=cut)) for policy, cut in TRAINED}


# Everything, in one call of four ranks --------------------------------------------------------------------


def everything():
    return {"exact": exact(), "training": training()}


@pytest.fixture(scope="module")
def of_four():
    """What :func:`everything` returns on each of four ranks; rank = 2 · its part of the data + its part of tensors."""
    return on_ranks(4, everything)


def test_a_step_of_exact_sums_is_that_of_one_process_bit_for_bit(of_four):
    for policy in EXACT:
        for name in STEPS:
            expected, norm = exactly(Alone(policy, make=sparse_tokens, optimizer=STEPS[name]))
            assert any(bool(value.any()) for value in expected.values())
            for rank in of_four:
                for cut in CUTS:
                    if (result := rank["exact"].get((cut, policy, name))) is not None:
                        assert same(result[0], expected) == [], (policy, name, cut)
                        assert result[1] == pytest.approx(norm, rel=1e-6), (policy, name, cut)


def test_all_levels_and_formats_are_exact_here():
    """So that the test above compares sums and not how they are rounded."""
    expected, norm = exactly(Alone("O0", make=sparse_tokens, optimizer=STEPS["sgd"]))
    for policy in EXACT:
        params, norms = exactly(Alone(policy, make=sparse_tokens, optimizer=STEPS["sgd"]))
        assert same(params, expected) == [], policy
        assert norms == norm


def test_training_is_that_of_one_process_with_losses_whole_and_in_parts(of_four):
    for (policy, cut), limit in zip(TRAINED, [1e-5, 1e-5, 0.02, 0.02, 0.02, 0.02, 0.003, 0.003, 0.003], strict=True):
        expected, losses, norms = trained(Alone("O0"))
        results = [rank["training"][policy, cut] for rank in of_four]
        for params, _, own_norms in results:
            assert same(params, results[0][0]) == []
            worst = max(float((params[name] - value).abs().max()) for name, value in expected.items())
            assert worst < limit, (policy, cut, worst)
            assert own_norms == pytest.approx(norms, rel=limit), (policy, cut)
        # Each row of ranks has its own part of a batch, and a rank of it the loss of all.
        means = [(first + second) / 2 for first, second in zip(results[0][1], results[2][1], strict=True)]
        assert means == pytest.approx(losses, rel=limit), (policy, cut)
        assert results[0][1] == results[1][1]


def test_o2_is_o1_bit_for_bit(of_four):
    for rank in of_four:
        for cut in (False, True):
            (params, losses, norms), (others, their_losses, their_norms) = (
                rank["training"][policy, cut] for policy in (O1, BF16)
            )
            assert same(params, others) == []
            assert (losses, norms) == (their_losses, their_norms)
