"""The TensorBoard adapter, read back with TensorBoard's own reader."""

import sys

import pytest
import torch
from torch import nn

import mezzo
from mezzo import LossScale, MixedPrecision, Policy, PolicyError, UnsupportedError
from mezzo.integrations import TensorBoard

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
)
INF = float("inf")


def session(num_losses=1):
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    policy = Policy.O1(emulate=True, loss_scale=LossScale.dynamic(init=1024.0, interval=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, MixedPrecision(model, optimizer, policy, num_losses=num_losses)


def train(amp, model, spoilt=False, loss_id=0):
    amp.backward((model.weight * torch.tensor([3.0, 4.0])).sum(), loss_id=loss_id)
    if spoilt:
        model.weight.grad.fill_(INF)
    step = amp.step()
    amp.zero_grad()
    return step


def curves(folder):
    """Return every curve as its points."""
    read = event_accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_curves_are_what_the_session_says(tmp_path):
    model, amp = session()
    board = mezzo.integrations.TensorBoard(tmp_path)
    for spoilt in (False, True, False, False, True):
        board.log(amp, train(amp, model, spoilt))
    board.close()
    assert curves(tmp_path) == {
        "mezzo/loss_scale": [(1, 1024.0), (2, 512.0), (3, 512.0), (4, 1024.0), (5, 512.0)],
        "mezzo/skipped_steps": [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0)],
        "mezzo/skip_rate": [(1, 0.0), (2, 0.5), (3, 0.5), (4, 0.0), (5, 0.5)],
        "mezzo/growths": [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0)],
        "mezzo/backoffs": [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0)],
        "mezzo/grad_norm": [(1, 5.0), (2, INF), (3, 5.0), (4, 5.0), (5, INF)],
    }


def test_each_loss_has_its_own_scale(tmp_path):
    model, amp = session(num_losses=2)
    board = TensorBoard(str(tmp_path))
    train(amp, model, spoilt=True, loss_id=1)
    board.log(amp)
    board.close()
    assert curves(tmp_path) == {
        "mezzo/loss_scale_0": [(1, 1024.0)],
        "mezzo/loss_scale_1": [(1, 512.0)],
        "mezzo/growths_0": [(1, 0.0)],
        "mezzo/growths_1": [(1, 0.0)],
        "mezzo/backoffs_0": [(1, 0.0)],
        "mezzo/backoffs_1": [(1, 1.0)],
        "mezzo/skipped_steps": [(1, 1.0)],
        "mezzo/skip_rate": [(1, 1.0)],
    }


def test_a_writer_that_is_given_stays_open_for_the_user_s_own_curves(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    model, amp = session()
    writer = SummaryWriter(str(tmp_path))
    board = TensorBoard(writer)
    assert board.writer is writer
    board.log(amp, train(amp, model))
    board.close()
    assert curves(tmp_path)["mezzo/grad_norm"] == [(1, 5.0)]  # it is in the file already
    writer.add_scalar("loss", 2.0, 1)
    writer.close()
    assert curves(tmp_path)["loss"] == [(1, 2.0)]


@pytest.mark.parametrize("wrong", [None, 3, [], object()])
def test_neither_a_writer_nor_a_folder(wrong):
    with pytest.raises(PolicyError, match=rf"not with a {type(wrong).__name__}\n  write  TensorBoard\("):
        TensorBoard(wrong)


def test_only_sessions_and_their_steps_are_logged(tmp_path):
    model, amp = session()
    board = TensorBoard(tmp_path)
    train(amp, model)
    with pytest.raises(PolicyError, match=r"step is a int, not what amp.step\(\) returned"):
        board.log(amp, 3)
    with pytest.raises(PolicyError, match="a Linear is no session"):
        board.log(model)
    board.close()
    assert curves(tmp_path) == {}


def test_an_absent_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnsupportedError, match=r'needs tensorboard(.|\n)*write  pip install "tensorboard>=2\.16"'):
        TensorBoard(tmp_path)
