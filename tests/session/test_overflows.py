"""What a skipped step does besides: infinities of other kinds, ``on_overflow="locate"`` and ``"raise"``."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import LossScale, MixedPrecision, NumericsError, Policy, PolicyError
from mezzo.overflow import Changed

from .loops import FP32, OPTIMIZERS, assert_same, attached, backward, batch, built, facts, session, train
from .loops import weights as exact

POLICY = "{},dtype=float16,emulate=true,loss_scale=dynamic(init=1024)"


class Net(nn.Module):
    """A boost that is too large has the gradient of its factor overflow under a loss scale."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(0.125)

    def forward(self, x, boost):
        return self.head(self.body(x)) * boost


def made(level, reaction):
    model = Net()
    return model, MixedPrecision(
        model, torch.optim.SGD(model.parameters(), lr=0.125), POLICY.format(level), on_overflow=reaction
    )


def passed(amp, model, x, boost):
    with amp.autocast():
        loss = model(x, boost).float().sum()
    amp.backward(loss)


def stepped(amp, model, x, boost):
    passed(amp, model, x, boost)
    try:
        return amp.step()
    finally:
        amp.zero_grad()


# What counts ----------------------------------------------------------------------------------------------------------


def test_an_infinity_that_unscaling_makes_is_found():
    """torch checks before it multiplies by 1/scale, and writes the infinity into the weights."""
    for optimizer in OPTIMIZERS:
        model, _, amp = session(Policy.O1(loss_scale=LossScale.constant(2.0**-126), emulate=True), optimizer)
        before = exact(amp)
        amp.backward(sum(param.float().sum() for param in model.parameters()) * 2.0**3 * 2.0**126)
        assert bool(amp.step().skipped), optimizer
        assert_same(before, exact(amp))


def test_a_finite_gradient_whose_square_is_not_counts_as_an_overflow():
    model, _, amp = session("O0")
    backward(amp, model, 0)
    model[0].weight.grad.fill_(2e19)
    assert bool(amp.step().skipped)


#: Optimizers of torch's beside those of the state machine, and one of a program's own.
TORCHS = {
    "foreach": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, foreach=True),
    "one by one": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, foreach=False),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "state when built": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "of its own": lambda params: Signs(params, lr=2.0**-7),
}


class Signs(torch.optim.Optimizer):
    """No closure, no foreach."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(torch.sign(average * 0.9 + p.grad * 0.1), alpha=group["lr"])
                    average.lerp_(p.grad, 0.01)


@pytest.mark.parametrize("optimizer", TORCHS)
def test_steps_are_plain_torchs_in_fp32_and_skipped_ones_write_nothing(optimizer):
    """Bit for bit, the first step skipped too; under O2 from the gradients that the low weights had."""
    for policy in (*FP32, "O2,dtype=bfloat16,emulate=true", "O2,emulate=true,loss_scale=1024"):
        model, its = built(TORCHS[optimizer])
        amp = MixedPrecision(model, its, policy + ("" if "loss_scale" in policy else ",loss_scale=1"))
        copies = [nn.Parameter(value.clone()) for value in exact(amp)]
        plain = TORCHS[optimizer](copies)
        for number in range(4):
            if number in (0, 2):
                before = facts(model, its)
                assert bool(train(amp, model, number, spoilt=True).skipped)
                assert_same(before[: 1 + (number > 0)], facts(model, its)[: 1 + (number > 0)])  # states may be made
            backward(amp, model, number)
            for theirs, mine in zip(copies, model.parameters(), strict=True):
                theirs.grad = mine.grad.float() / (amp.loss_scale if amp.policy.loss_scale.mode != "none" else 1)
            assert not amp.step().skipped
            amp.zero_grad()
            plain.step()
            assert_same(exact(amp), [p.detach() for p in copies])


def test_o1_on_device_lists_is_torch_amp():
    """Bit for bit the rival's own loop, with its scaler."""
    model, made = built("SGD")
    policy = "O1,dtype=bfloat16,lists=device,emulate=false,loss_scale=dynamic"
    amp = MixedPrecision(model, made, policy, max_grad_norm=1.0)
    plain, theirs = built("SGD")
    scaler = torch.amp.GradScaler("cpu")

    def step(number):
        x, y = batch(number)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = plain(x)
        scaler.scale(functional.cross_entropy(out.float(), y)).backward()
        scaler.unscale_(theirs)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()

    for number in range(5):
        train(amp, model, number)
        step(number)
    assert_same(model.state_dict(), plain.state_dict())


# What users do about it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_raises_names_what_is_not_finite_and_the_loop_goes_on(level):
    model, amp = made(level, "raise")
    x = torch.ones(2, 4)
    assert not stepped(amp, model, x, 1.0).skipped
    before = exact(amp)
    with pytest.raises(
        NumericsError, match=r"not finite\n  where  . of 4: body(.|\n)*loss scale 1024; nothing was upd"
    ):
        stepped(amp, model, x, 1e4)
    assert_same(before, exact(amp))
    assert amp.loss_scale == 512
    with pytest.raises(NumericsError, match="the loss itself is not finite"):
        stepped(amp, model, x * float("inf"), 1.0)
    assert amp.loss_scale == 512
    assert not stepped(amp, model, x, 1.0).skipped
    assert (amp.stats().steps, amp.stats().skipped) == (4, 2)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_located_step_says_where_it_began(level, caplog):
    model, amp = made(level, "locate")
    x = torch.ones(2, 4)
    assert stepped(amp, model, x, 1.0).overflow is None
    assert not caplog.records
    step = stepped(amp, model, x, 1e4)
    assert (step.overflow.phase, step.overflow.op) == ("backward", "mul")
    assert [record.message for record in caplog.records] == [str(step.overflow)]
    assert not stepped(amp, model, x, 1.0).skipped
    amp.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_old_word_for_locating_is_taken():
    (_, new), (_, old) = made("O1", "locate"), made("O1", "explain")
    assert new.on_overflow == old.on_overflow == "locate"
    with pytest.raises(PolicyError, match=r"unknown on_overflow 'explian'\n  why    .*skip, locate, raise"):
        made("O1", "explian")


def test_only_the_passes_of_the_window_are_run_again():
    model, amp = made("O1", "locate")
    x, y = torch.ones(2, 4), torch.full((2, 4), 0.5)
    passed(amp, model, x * 1e38, 1.0)
    amp.zero_grad()  # what had overflowed elsewhere is thrown away
    passed(amp, model, y, 1.0)
    passed(amp, model, y, 1e4)
    step = amp.step()
    assert not isinstance(step.overflow, Changed)
    assert step.overflow.op == "mul"
    amp.zero_grad()
    passed(amp, model, x, 1e4)
    x.fill_(float("nan"))
    assert isinstance(amp.step().overflow, Changed)


def test_loops_by_calls_of_their_own_are_located_and_ended_too(caplog):
    for reaction in ("locate", "raise"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attached(model, optimizer, POLICY.format("O1"), on_overflow=reaction):
            model(torch.ones(2, 4), 1e4).sum().backward()
            if reaction == "raise":
                with pytest.raises(NumericsError, match="under the loss scale 1024"):
                    optimizer.step()
            else:
                optimizer.step()
                assert "backward pass of (model) mul" in caplog.records[-1].message
