"""What a skipped step does besides: ``on_overflow="explain"`` and ``"raise"``, in both kinds of loops."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, NumericsError
from mezzo.overflow import Changed

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


def backward(amp, model, x, boost):
    with amp.autocast():
        loss = model(x, boost).float().sum()
    amp.backward(loss)


def train(amp, model, x, boost):
    backward(amp, model, x, boost)
    try:
        return amp.step()
    finally:
        amp.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_raises_names_what_is_not_finite_and_the_loop_goes_on(level):
    model, amp = made(level, "raise")
    x = torch.ones(2, 4)
    assert not train(amp, model, x, 1.0).skipped
    before = [p.detach().clone() for p in amp.master_params()]
    with pytest.raises(
        NumericsError, match=r"not finite\n  where  . of 4: body(.|\n)*loss scale 1024; nothing was upd"
    ):
        train(amp, model, x, 1e4)
    assert all(map(torch.equal, before, amp.master_params()))
    assert amp.loss_scale == 512
    with pytest.raises(NumericsError, match="the loss itself is not finite"):
        train(amp, model, x * float("inf"), 1.0)
    assert amp.loss_scale == 512
    assert not train(amp, model, x, 1.0).skipped
    assert (amp.stats().steps, amp.stats().skipped) == (4, 2)


def test_without_a_scale_none_is_blamed():
    model = Net()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O0", on_overflow="raise")
    with pytest.raises(NumericsError, match="why    an overflow; nothing was updated"):
        train(amp, model, torch.ones(2, 4), torch.tensor(3e38))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_explained_step_says_where_it_began(level, caplog):
    model, amp = made(level, "explain")
    x = torch.ones(2, 4)
    assert train(amp, model, x, 1.0).overflow is None
    assert not caplog.records
    step = train(amp, model, x, 1e4)
    assert (step.overflow.phase, step.overflow.op) == ("backward", "mul")
    assert [record.message for record in caplog.records] == [str(step.overflow)]
    assert not train(amp, model, x, 1.0).skipped
    amp.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_only_the_passes_of_the_window_are_run_again():
    model, amp = made("O1", "explain")
    x, y = torch.ones(2, 4), torch.full((2, 4), 0.5)
    backward(amp, model, x, 1e4)
    amp.zero_grad()  # what had overflowed is thrown away
    x.zero_()  # so that it could not be run again
    backward(amp, model, y, 1.0)
    backward(amp, model, y, 1e4)
    step = amp.step()
    assert not isinstance(step.overflow, Changed)
    assert step.overflow.op == "mul"
    amp.zero_grad()
    backward(amp, model, x, 1e4)
    x.fill_(float("nan"))
    assert isinstance(amp.step().overflow, Changed)


def test_loops_by_calls_of_their_own_are_explained_and_ended_too(caplog):
    for reaction in ("explain", "raise"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = mezzo.attach(model, optimizer, POLICY.format("O1"), on_overflow=reaction)
        try:
            model(torch.ones(2, 4), 1e4).sum().backward()
            if reaction == "raise":
                with pytest.raises(NumericsError, match="under the loss scale 1024"):
                    optimizer.step()
            else:
                optimizer.step()
                assert "backward pass of (model) mul" in caplog.records[-1].message
        finally:
            amp.detach()
