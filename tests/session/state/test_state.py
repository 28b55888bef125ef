"""A session's state: what is loaded under the same policy continues bit for bit."""

import copy

import pytest
import torch
from torch import nn

from mezzo import MixedPrecision, NumericsError, ScaleCollapsed, StateError
from mezzo.session.window.window import Window

from ...support.tables import thinned
from .runs import OPTIMIZERS, ORDERS, POLICIES, Run, linear, one_step, through_a_file


@pytest.mark.parametrize("policy, optimizer", thinned(POLICIES, OPTIMIZERS, every=2))
def test_ten_steps_after_loading_are_the_same_in_whatever_order(policy, optimizer, bits):
    run = Run(policy, optimizer)
    run.train(range(4))
    saved, before = through_a_file(run.saved()), bits(copy.deepcopy(run.everything()))
    run.train(range(4, 14))
    stats = [run.amp.stats(loss_id) for loss_id in (0, 1)]
    assert stats[0].steps == 14
    if "fp16" in policy:
        assert stats[0].skipped >= 2
    for order in ORDERS:
        again = Run(policy, optimizer, seed=1)
        again.load(saved, order)
        assert bits(again.everything()) == before
        if order in (ORDERS[0], ORDERS[-1]):
            again.train(range(4, 14))
            assert bits(again.everything()) == bits(run.everything())
            assert [again.amp.stats(loss_id) for loss_id in (0, 1)] == stats


def two_micro_batches(run):
    run.backward(100)
    run.backward(101)


def set_aside(run):
    run.backward(100, 0)
    run.backward(101, 1)
    run.backward(102, 0)


def set_aside_with_an_overflow(run):
    run.backward(104, 0)
    run.backward(101, 1)


def unscaled(run):
    run.backward(100)
    run.amp.unscale_()


def unscaled_edited_and_more(run):
    two_micro_batches(run)
    run.amp.unscale_()
    with torch.no_grad():
        for param in run.amp.master_params():
            param.grad.clamp_(-1e-2, 1e-2)
    run.backward(102)


def one_optimizer_has_stepped(run):
    """The other's gradients carry a scale that is not the current one, though it may have the same value."""
    run.backward(100, 1)
    run.amp.step(run.one)


def both_carry_an_old_scale(run):
    run.backward(100, 1)
    run.amp.step(run.one)
    for param in run.trunk.parameters():
        param.grad = None
    run.backward(101, 1)


def a_gradient_on_the_way(run):
    """``grad`` overflowed, which the next step's scale has to hear of."""
    first, second = run.losses(103)
    run.amp.grad(first * 1e36, run.trunk.norm.weight, retain_graph=True)
    run.amp.backward(second)


WINDOWS = [
    two_micro_batches, set_aside, set_aside_with_an_overflow, unscaled, unscaled_edited_and_more,
    one_optimizer_has_stepped, both_carry_an_old_scale, a_gradient_on_the_way,
]  # fmt: skip


@pytest.mark.parametrize("policy, open_window", thinned(POLICIES, WINDOWS, every=2))
def test_a_window_continues_where_it_was_saved(policy, open_window, bits):
    """In two orders of loading, other ones for the next window; each policy meets all of them."""
    first = WINDOWS.index(open_window) % 3
    check_window(policy, open_window, bits, (ORDERS[first], ORDERS[5 - first]))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_any_window_continues_in_whatever_order_its_state_is_loaded(policy, bits):
    for open_window in WINDOWS:
        check_window(policy, open_window, bits, ORDERS)


def check_window(policy, open_window, bits, orders):
    run = Run(policy, restore_buffers=True)
    run.train(range(3))
    open_window(run)
    before = bits(run.everything())
    saved = through_a_file(run.saved())
    assert bits(run.everything()) == before  # saving changes nothing

    def finish(each):
        if open_window in (one_optimizer_has_stepped, set_aside):
            each.one.zero_grad()  # what it left, or what is set aside as well
        if open_window not in (unscaled, a_gradient_on_the_way):
            each.backward(200, 1)
        each.amp.step()
        each.amp.zero_grad()
        each.train(range(3, 8))

    finish(run)
    expected = bits(run.everything())
    for order in orders:
        again = Run(policy, seed=1, restore_buffers=True)
        again.load(saved, order)
        assert bits(again.everything()) == before, (open_window.__name__, order)
        finish(again)
        assert bits(again.everything()) == expected, (open_window.__name__, order)


@pytest.mark.parametrize("policy", ["O1 fp16", "O2 fp16", "O2 bf16"])
def test_sparse_gradients_in_a_window(policy, bits):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, MixedPrecision(model, optimizer, POLICIES[policy])

    def backward(model, amp, number):
        with amp.autocast():
            loss = model(torch.arange(number, number + 3)).square().mean()
        amp.backward(loss)

    model, optimizer, amp = build()
    backward(model, amp, 1)
    saved = through_a_file([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    again = build()
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    for each, session in ((model, amp), (again[0], again[2])):
        backward(each, session, 3)
        session.step()
    assert bits(model.state_dict()) == bits(again[0].state_dict())
    assert bits(amp.state_dict()) == bits(again[2].state_dict())


def test_batch_norm_is_put_back_to_before_the_window_it_was_saved_in(bits):
    run = Run("O1 fp16", restore_buffers=True)
    before = bits(run.trunk.norm.state_dict())
    run.backward(100)
    saved = through_a_file(run.saved())
    assert bits(run.trunk.norm.state_dict()) != before
    again = Run("O1 fp16", seed=1, restore_buffers=True)
    again.load(saved)
    again.backward(104)  # overflows
    assert again.amp.step().skipped
    assert bits(again.trunk.norm.state_dict()) == before


def test_loading_goes_back_in_time_within_one_session(bits):
    """As after a divergence: nothing of what happened since may stay."""
    run = Run("O2 fp16", restore_buffers=True)
    run.train(range(2))
    two_micro_batches(run)
    saved, before = through_a_file(run.saved()), bits(run.everything())
    run.amp.step()
    run.amp.zero_grad()
    run.train(range(2, 9))
    run.losses(0)
    run.amp.grad(run.losses(4)[0] * 1e36, run.trunk.norm.weight)
    run.load(saved)
    assert bits(run.everything()) == before


def test_a_state_shares_no_memory_with_the_session(bits):
    run = Run("O2 fp16", restore_buffers=True)
    set_aside(run)
    state = run.amp.state_dict()
    before = bits(state)
    again = Run("O2 fp16", seed=1, restore_buffers=True)
    again.amp.load_state_dict(state)
    for each in (run, again):
        each.backward(5, 0)
        each.amp.step()
        each.amp.zero_grad()
        each.train(range(3))
    assert bits(state) == before


def test_every_field_of_a_window_is_saved():
    saved = Window().state_dict(name_of=lambda tensor: "", number_of=lambda scale: 0)
    named = {"unscaled_sums": "aside", "new_gradients": "beside"}  # as states have called them from the first
    # What sessions behind the call styles of older systems note, whose states hold scales, and no window.
    noted = {"is_found", "overflowed", "judged_losses"}
    assert saved.keys() == {named.get(field, field) for field in vars(Window()) if field not in noted}


def test_an_edited_weight_is_not_overwritten():
    """The FP32 weights come with the model; what its user did to them since stays."""
    run, other = linear("O1 fp16"), linear("O2 fp16")
    other.model.load_state_dict(run.model.state_dict())
    with torch.no_grad():
        other.model.weight[0, 0] = 5.0
    other.amp.load_state_dict(run.amp.state_dict())
    assert other.model.weight[0, 0] == 5.0
    assert next(other.amp.master_params())[0, 0] == 5.0


@pytest.mark.parametrize("state", [{"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}, None])
def test_a_loaded_scale_knows_nothing_of_overflows_before(state):
    run = linear("O1 fp16")
    state = run.amp.state_dict() if state is None else state
    with run.amp.autocast():
        loss = run.model(torch.ones(1, 4)).float().sum()
    run.amp.grad(loss * 1e38, run.model.bias)
    run.amp.load_state_dict(state)
    before = float(run.amp.loss_scale)
    one_step(run)
    assert float(run.amp.loss_scale) == before


def test_parameters_of_no_model_are_refused_where_they_would_be_lost():
    for policy, dtype, window, refused in (
        ("O1 fp16", torch.float32, False, False),
        ("O1 fp16", torch.float32, True, True),
        ("O2 fp16", torch.float32, False, False),
        ("O2 fp16", torch.float16, False, True),
    ):
        run = linear(policy)
        run.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(5, dtype=dtype))]})
        one_step(run, finish=not window)
        if not refused:
            run.amp.load_state_dict(run.amp.state_dict())
            continue
        with pytest.raises(StateError, match=r"belong to no model of the session\n  where  float32 \[5\]\n"):
            run.amp.state_dict()


@pytest.mark.parametrize("error, poison", [(ScaleCollapsed, "gradients"), (NumericsError, "loss")])
def test_patience_goes_on_counting(error, poison):
    state = None
    for _ in range(3):  # a process for each step
        run = linear("O1,emulate=true,loss_scale=dynamic(init=1,patience=3)")
        if state is not None:
            run.amp.load_state_dict(state)
        with run.amp.autocast():
            loss = run.model(torch.ones(1, 4)).float().sum()
        run.amp.backward(loss * float("inf") if poison == "loss" else loss)
        if poison == "gradients":
            run.model.weight.grad.fill_(float("inf"))
        run.amp.step()
        state = through_a_file(run.amp.state_dict())
    with pytest.raises(error, match="3 overflows in a row" if poison == "gradients" else "for 3 steps in a row"):
        run.amp.step()


def test_gradients_that_a_step_left_are_refused_after_loading_too():
    run = Run("O1 fp16")
    one_optimizer_has_stepped(run)
    again = Run("O1 fp16", seed=1)
    again.load(through_a_file(run.saved()))
    for each in (run, again):
        with pytest.raises(StateError, match="the last step's gradients are still there"):
            each.backward(0, 0)


def test_edits_of_scaled_gradients_are_noticed_after_loading_too(caplog):
    caplog.set_level("INFO", logger="mezzo")
    run = Run("O1 fp16")
    run.backward(100)
    again = Run("O1 fp16", seed=1)
    again.load(through_a_file(run.saved()))
    nn.utils.clip_grad_norm_([*again.trunk.parameters(), *again.tail.parameters()], 1.0)
    again.amp.max_grad_norm = None
    again.amp.step()
    assert "gradients were edited while they still carry the loss scale" in caplog.text
