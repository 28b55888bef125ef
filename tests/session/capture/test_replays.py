"""What a captured step returns and tells, and when it is captured anew."""

import pytest
import torch
from torch.nn import functional

from mezzo import LossScale, ScaleCollapsed, optim

from .loops import Loop, batch, batches, both


def test_outputs_are_the_same_tensors_with_the_values_of_the_last_call():
    loop = Loop()
    captured = loop.captured(lambda *data: (loop.train_step(*data), loop.amp.loss_scale, "text", loop.amp.policy))
    first = captured(*batch(0))
    losses = [first[0]["loss"].item()]
    second = captured(*batch(1))
    losses.append(second[0]["loss"].item())
    assert first is second
    assert losses[0] != losses[1] == first[0]["loss"].item()
    assert not first[0]["loss"].requires_grad
    assert first[2:] == ("text", loop.amp.policy)
    for number in range(2, 5):
        captured(*batch(number))
    _, scale, next_scale, _ = first[0]["step"]
    assert (scale.item(), next_scale.item(), first[1].item()) == (2**11, 2**11, 2**11)


def test_a_step_that_is_returned_speaks_of_the_last_call():
    loop = Loop()

    def train_step(x, y, boost):
        with loop.amp.autocast():
            loss = functional.cross_entropy(loop.model(x).float(), y)
        loop.amp.backward(loss * boost)
        step = loop.amp.step()
        loop.amp.zero_grad()
        return step

    captured = loop.captured(train_step)
    told = []
    for data in batches(range(3), bad=(1,)):
        step = captured(*data)
        told.append((step.skipped.item(), step.scale.item(), step.next_scale.item()))
    assert told == [(False, 1024.0, 1024.0), (True, 1024.0, 512.0), (False, 512.0, 512.0)]
    assert step.overflow is None


def test_the_loss_scale_that_was_asked_for_is_not_overwritten():
    loop = Loop()
    captured = loop.captured()
    scales = [loop.amp.loss_scale]
    for data in batches(range(4), bad=(0, 2)):
        captured(*data)
        scales.append(loop.amp.loss_scale)
    assert [scale.item() for scale in scales] == [1024, 512, 512, 256, 256]


def test_an_eager_step_keeps_its_numbers():
    loop = Loop()
    captured = loop.captured()
    captured(*batch(0))
    *_, (_, scale, next_scale, _) = loop.train_step(*batch(1)).values()
    for data in batches(range(2, 5), bad=(2, 3, 4)):
        captured(*data)
    assert (scale.item(), next_scale.item(), loop.amp.loss_scale.item()) == (1024, 1024, 128)


def test_the_accounts_go_on(caplog):
    loop = Loop()
    captured = loop.captured()
    caplog.set_level("INFO", "mezzo")
    for data in batches(range(10), bad=(5,)):
        captured(*data)
    stats = loop.amp.stats()
    assert (stats.steps, stats.skipped, stats.growths, stats.backoffs, stats.scale) == (10, 1, 2, 1, 2048.0)
    assert "loss scale 2048 → 1024 after step 6, which overflowed" in caplog.text


def test_a_collapsed_scale_is_told_by_the_next_call():
    loop = Loop(scale=LossScale.dynamic(init=2.0, patience=2))
    captured = loop.captured()
    for _ in range(3):
        captured(*batch(0, 1e38))
    weights = [param.detach().clone() for param in loop.model.parameters()]
    with pytest.raises(ScaleCollapsed, match=r"2 overflows in a row at its floor, 1(?s:.*)8 of 6|of 6 gradients"):
        captured(*batch(1))
    assert all(torch.equal(p, w) for p, w in zip(loop.model.parameters(), weights, strict=True))


def test_evaluation_between_captured_steps_sees_the_new_weights():
    loop = Loop("O1,dtype=bfloat16,emulate=true")
    captured = loop.captured()
    x = batch(0)[0]

    @torch.no_grad()
    def evaluated():
        with loop.amp.autocast():
            return functional.linear(x, loop.model[0].weight).float()

    for number in range(3):
        before = evaluated()
        captured(*batch(number))
        exact = x.bfloat16().float() @ loop.model[0].weight.detach().bfloat16().float().T
        torch.testing.assert_close(evaluated(), exact.bfloat16().float(), rtol=2**-7, atol=1e-3)
        assert not torch.equal(evaluated(), before)


def test_learning_rates_that_are_tensors_are_followed(bits):
    def make():
        return Loop(make=lambda groups: optim.AdamW(groups, lr=torch.tensor(1e-2)))

    def between(loop, number):
        for group in loop.optimizer.param_groups:
            group["lr"].fill_(0.01 / (number + 1))

    eager, captured, _ = both(make, batches(range(6)), between)
    constant = both(make, batches(range(6)))[1]
    assert bits(eager) == bits(captured) != bits(constant)


class OnDevice(torch.Tensor):
    """A tensor that says it is in another memory than the host's."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("meta")

    @classmethod
    def holding(cls, number):
        return torch.tensor(number).as_subclass(cls)

    def __deepcopy__(self, memo):
        return self.clone().as_subclass(OnDevice)


REPLACED = {
    "a number": ([1e-3], [3, 3]),
    "another tensor": ([OnDevice.holding(1e-3)], [3, 3]),
    "host tensors, each step": ([torch.tensor(1e-3), torch.tensor(2e-3), torch.tensor(3e-3)], [3, 3]),
}


@pytest.mark.parametrize("name", ["lr", "betas"])
@pytest.mark.parametrize("kind", REPLACED)
def test_hyper_parameters_on_the_device_may_be_replaced(kind, name, bits):
    values, replays = REPLACED[kind]

    def put(loop, number, value):
        loop.optimizer.param_groups[1][name] = (0.9, value) if name == "betas" else value

    def make():
        loop = Loop(make=lambda groups: optim.AdamW(groups, lr=1e-2))
        put(loop, 0, OnDevice.holding(1e-2))
        return loop

    def between(loop, number):
        if number >= 2 and values[number - 2 :]:
            put(loop, number, values[number - 2])

    data = batches(range(6))
    eager, captured, loop = both(make, data, between)
    constant = both(make, data)[1]
    assert bits(eager[:1]) == bits(captured[:1]) != bits(constant[:1])
    assert [graph.replays for graph in loop.graphs] == replays


def test_a_hyper_parameter_on_the_device_that_is_written_needs_no_other_graph(bits):
    def make():
        loop = Loop(make=lambda groups: optim.AdamW(groups, lr=1e-2))
        loop.optimizer.param_groups[0]["lr"] = OnDevice.holding(1e-2)
        return loop

    def between(loop, number):
        loop.optimizer.param_groups[0]["lr"].fill_(0.01 / (number + 1))

    eager, captured, loop = both(make, batches(range(6)), between)
    assert bits(eager[:1]) == bits(captured[:1])
    assert [graph.replays for graph in loop.graphs] == [6]


def test_a_scheduler_made_after_the_capture_does_not_warn():
    loop = Loop()
    captured = loop.captured()
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    loop.optimizer._opt_called = False  # the loop's own schedule has seen the rehearsals
    captured(*batch(0))
    schedule.step()  # would warn that no optimizer has stepped
