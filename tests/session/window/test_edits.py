"""Gradients edited while they carry the loss scale are logged, once; nothing else is."""

import logging

import pytest
from torch import nn

import mezzo

from ..loops import backward, session, sgd

POLICIES = {
    "fp32 gradients": "O1,emulate=true",
    "no autocast": "O0,loss_scale=dynamic",
    "fp16 gradients": "O2,emulate=true",
    "constant": "O1,emulate=true,loss_scale=1024",
}
OPTIMIZERS = {"torch": sgd, "mezzo": lambda params: mezzo.optim.SGD(params, lr=0.1, momentum=0.9)}
SAID = "gradients were edited while they still carry the loss scale"
EDITS = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "one": lambda model: model[0].bias.grad.add_(1.0),
}


@pytest.fixture(autouse=True)
def listening(caplog):
    caplog.set_level(logging.INFO, logger="mezzo")


def said(caplog):
    return [record for record in caplog.records if SAID in record.getMessage()]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_edits_are_logged_once_a_session_and_change_nothing_else(policy, optimizer, edit, caplog):
    model, _, amp = session(POLICIES[policy], OPTIMIZERS[optimizer])
    backward(amp, model, 0)
    amp.step()
    amp.zero_grad()
    assert not said(caplog)
    for number in range(3):
        backward(amp, model, number)
        EDITS[edit](model)
        amp.step()
        amp.zero_grad()
    (record,) = said(caplog)
    assert record.levelno == logging.INFO
    assert "max_grad_norm=1.0" in record.getMessage()
    assert "amp.unscale_() before the edit" in record.getMessage()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_edit_before_unscaling_is_logged_and_one_after_it_is_not(policy, optimizer, caplog):
    model, _, amp = session(POLICIES[policy], OPTIMIZERS[optimizer])
    backward(amp, model, 0)
    amp.unscale_()
    nn.utils.clip_grad_norm_(amp.master_params(), 1.0)
    amp.step()
    amp.zero_grad()
    assert not said(caplog)
    backward(amp, model, 1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    amp.unscale_()
    amp.step()
    assert len(said(caplog)) == 1


@pytest.mark.parametrize(
    "policy, options",
    [
        ("O0", {}),
        ("O1,dtype=bfloat16,emulate=true", {}),
        ("O2,dtype=bfloat16,emulate=true", {}),
        ("O1,emulate=true,loss_scale=1", {}),
        ("O1,emulate=true", {"max_grad_norm": 1.0}),
        ("O2,emulate=true", {"max_grad_norm": 1.0}),
    ],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_edits_that_no_scale_spoils_are_the_users_own(policy, options, optimizer, caplog):
    model, _, amp = session(policy, OPTIMIZERS[optimizer], **options)
    for number in range(2):
        backward(amp, model, number)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        amp.step()
        amp.zero_grad()
    assert not said(caplog)


def test_gradients_that_were_replaced_or_cleared_are_no_edits(caplog):
    model, _, amp = session("O1,emulate=true")
    backward(amp, model, 0)
    for param in model.parameters():
        param.grad = param.grad * 0.5
    amp.step()
    amp.zero_grad(set_to_none=False)
    backward(amp, model, 1)
    model[0].weight.grad = None
    amp.step()
    assert not said(caplog)


def test_gradients_accumulated_by_several_backward_passes_are_no_edits(caplog):
    for policy in POLICIES.values():
        model, _, amp = session(policy)
        for number in range(3):
            backward(amp, model, number)
        amp.step()
    assert not said(caplog)
