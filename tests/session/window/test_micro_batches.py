"""Several backward passes before a step, what users clear between them, and `unscale_`."""

import pytest
import torch

from mezzo import StateError

from .weights import EVERY_STEP, Weights, gradients, session, set_scales


def test_what_a_user_clears_is_cleared_beside_as_well():
    """optimizer.zero_grad() and model.zero_grad() know nothing of what was set aside."""
    for clear in (lambda m, o: o.zero_grad(), lambda m, o: m.zero_grad()):
        for policy in (f"O0,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"):
            model = Weights(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            amp = session(model, policy, optimizers=[optimizer], num_losses=2)
            for again in ((0,), (1,), (1, 0), (0, 1)):
                with torch.no_grad():
                    next(amp.master_params()).zero_()
                amp.backward(model.loss(torch.full((2,), 100.0)).float(), loss_id=0)
                amp.backward(model.loss(torch.full((2,), 10.0)).float(), loss_id=1)
                clear(model, optimizer)
                for loss_id in again:
                    amp.backward(model.loss(torch.ones(2)).float(), loss_id=loss_id)
                amp.step()
                assert next(amp.master_params()).tolist() == [-float(len(again))] * 2
                amp.zero_grad()


@pytest.mark.parametrize("clear", [lambda m, o: o.zero_grad(), lambda m, o: m.zero_grad()])
@pytest.mark.parametrize("policy", ["O2,emulate=true", "O2,dtype=bfloat16,emulate=true", "O1,emulate=true"])
def test_what_a_user_clears_is_cleared_in_the_masters_as_well(policy, clear):
    """Earlier micro-batches are summed there, where model.zero_grad() does not reach."""
    for batches in (1, 2, 3):
        for later in (0, 1, 2):
            model = Weights(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            amp = session(model, policy, optimizers=[optimizer])
            for _ in range(batches):
                amp.backward(model.loss(torch.full((2,), 0.25)).float())
            clear(model, optimizer)
            for _ in range(later):
                amp.backward(model.loss(torch.full((2,), 0.5)).float())
            if later:
                amp.step()
                assert next(amp.master_params()).tolist() == [-0.5 * later] * 2
            else:
                with pytest.raises(StateError, match="no parameter has a gradient"):
                    amp.step()


@pytest.mark.parametrize("policy", ["O0", "O2,dtype=bfloat16,emulate=true"])
def test_a_micro_batch_that_leaves_a_parameter_alone_does_not_clear_it(policy):
    model = Weights(2, 2)
    amp = session(model, policy)
    amp.backward(model.loss(1, 1).float())
    for _ in range(2):
        amp.backward((model.each[0] * 2).sum().float())
    amp.step()
    assert [p.tolist() for p in amp.master_params()] == [[-5.0, -5.0], [-1.0, -1.0]]


@pytest.mark.parametrize("policy", [f"O0,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"])
def test_one_parameter_alone_is_cleared(policy):
    """The others keep what was set aside of them."""
    for clear in (lambda p: setattr(p, "grad", None), lambda p: p.grad.zero_()):
        model = Weights(2, 3, 2)
        amp = session(model, policy, num_losses=2)
        for loss_id in (0, 1):
            amp.backward(model.loss(1.0, 2.0, 4.0).float(), loss_id=loss_id)
        clear(model.each[1])
        amp.backward(model.loss(1.0, 2.0, 4.0).float(), loss_id=0)
        amp.step()
        assert [p.tolist() for p in amp.master_params()] == [[-3.0] * 2, [-2.0] * 3, [-12.0] * 2]


def test_a_loss_that_leaves_a_parameter_alone_does_not_clear_it():
    model = Weights(2, 2)
    amp = session(model, num_losses=2)
    amp.backward(model.loss(torch.ones(2), torch.ones(2)), loss_id=0)
    amp.backward((model.each[0] * 2).sum(), loss_id=1)
    amp.backward((model.each[0] * 4).sum(), loss_id=0)
    amp.step()
    assert [p.tolist() for p in amp.master_params()] == [[-7.0, -7.0], [-1.0, -1.0]]


@pytest.mark.parametrize(
    "policy", [f"O0,{EVERY_STEP}", f"O1,emulate=true,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"]
)
@pytest.mark.parametrize("pattern", ["0u", "01u", "0u1", "0u0", "0u1u0", "u0u1"])
def test_unscale_shows_the_sum_and_further_passes_add_to_it(policy, pattern):
    model = Weights(3)
    amp = session(model, policy, num_losses=2)
    set_scales(amp, 64.0, 4096.0)
    total = torch.zeros(3)
    for number, call in enumerate(pattern):
        if call == "u" and number == 0:
            with pytest.raises(StateError, match=r"unscale_\(\) before backward\(\)"):
                amp.unscale_()
        elif call == "u":
            amp.unscale_()
            (shown,) = gradients(amp)
            assert shown.dtype == torch.float32
            assert torch.equal(shown, total)
        else:
            c = torch.tensor([1.0, 0.5, 2.0]) * (number + 1)
            amp.backward(model.loss(c).float(), loss_id=int(call))
            total += c
    step = amp.step()
    assert torch.equal(next(amp.master_params()).detach(), -total)
    assert step.grad_norm.item() == pytest.approx(total.norm().item(), rel=1e-6)
    took_part = sorted(set(map(int, pattern.replace("u", ""))))
    assert step.next_scale.flatten().tolist() == [(128.0, 8192.0)[i] for i in took_part]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", [f"O0,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"])
def test_edits_after_unscale_are_honoured(policy, fused):
    model = Weights(2)
    amp = session(model, policy, optimizers=[torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)])
    amp.backward(model.loss(torch.tensor([3.0, 4.0])).float())
    amp.unscale_()
    amp.unscale_()  # says the same
    next(amp.master_params()).grad.mul_(0.5)
    step = amp.step()
    assert step.grad_norm.item() == 2.5
    assert next(amp.master_params()).tolist() == [-1.5, -2.0]
    assert amp.loss_scale.item() == 512.0


@pytest.mark.parametrize("poison, scale", [(False, 512.0), (True, 128.0)])
def test_an_overflow_found_by_unscale_counts_once_whatever_is_edited(poison, scale):
    """Repaired gradients are used; a broken edit skips the step, and says nothing of the scale."""
    model = Weights(2)
    amp = session(model)
    amp.backward(model.loss(torch.ones(2)))
    if poison:
        model.each[0].grad[0] = float("inf")
    amp.unscale_()
    if poison:
        torch.nan_to_num_(model.each[0].grad, posinf=0.0)
    else:
        model.each[0].grad[0] = float("inf")
    assert bool(amp.step().skipped) != poison
    assert amp.loss_scale.item() == scale


def test_gradients_that_no_backward_pass_made_are_refused():
    model = Weights(2, 2)
    model.each[1].requires_grad_(False)
    amp = session(model)
    amp.backward((torch.ones(2, requires_grad=True) * 1).sum() + model.each[0].sum() * 0)
    model.zero_grad()
    amp.unscale_()
    model.each[0].grad = torch.ones(2)
    with pytest.raises(StateError, match=r"gradients that no amp.backward\(\) made"):
        amp.step()
    assert not model.each[0].any()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("policy", [f"O0,{EVERY_STEP}", "O0", "O0,loss_scale=64"])
def test_a_second_derivative_may_be_taken_of_gradients(policy):
    """create_graph=True leaves gradients that require a gradient themselves."""
    model = Weights(2)
    amp = session(model, policy, num_losses=2)
    with torch.no_grad():
        model.each[0].fill_(3.0)
    amp.backward(model.each[0].square().sum(), create_graph=True)
    amp.backward(model.each[0].sum(), loss_id=1)
    amp.step()
    assert model.each[0].tolist() == [3.0 - 7.0] * 2
    amp.zero_grad()
