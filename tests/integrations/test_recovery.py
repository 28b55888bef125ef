"""What looks for a batch size that fits into memory goes on under every framework, as it does without a session."""

import pytest
import torch

from . import test_transformers
from .programs import CASES, OPTIMIZERS, batches, loss_of, net

pytestmark = [
    pytest.mark.usefixtures("emulating", "anew"),
    pytest.mark.filterwarnings("ignore::Warning:transformers.*"),
]

made = test_transformers.made  # a fixture


def full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fails_once(optimizer, step=1):
    """Have one of an optimizer's steps run out of memory, before it writes."""
    count = iter(range(1, 1000))

    class Failing(type(optimizer)):
        def step(self, *args, **kwargs):
            return full() if next(count) == step else super().step(*args, **kwargs)

    optimizer.__class__ = Failing


# Accelerate -----------------------------------------------------------------------------------------------------------


def found_with(hf, policy, where, optimizer="torch", fails=2):
    """The batch sizes that were tried, and the losses with the last one: a program of Accelerate's documentation."""
    accelerator, sizes, sessions = hf.accelerate.Accelerator(cpu=True), [], []

    @hf.accelerate.utils.find_executable_batch_size(starting_batch_size=16)
    def train(size):
        sizes.append(size)
        accelerator.free_memory()
        model, losses = net(), []
        made = OPTIMIZERS[optimizer](model.parameters())
        if where == "step" and len(sizes) <= fails:
            fails_once(made, 2)
        if policy:
            sessions.append(hf.attach(accelerator, model, made, policy))
        model, made = accelerator.prepare(model, made)
        for x, y in batches():
            losses.append(loss_of(model(x), y))
            if where == "forward" and len(sizes) <= fails and len(losses) == 3:
                full()
            accelerator.backward(losses[-1])
            made.step()
            made.zero_grad()
        return [loss.item() for loss in losses]

    losses = train()
    assert [amp.is_closed for amp in sessions] == [True] * fails * bool(policy) + [False] * bool(policy)
    return sizes, losses, accelerator, sessions


@pytest.mark.parametrize("where", ["forward", "step"])
@pytest.mark.parametrize("policy, optimizer", CASES)
def test_find_executable_batch_size_begins_again_with_free_memory(hf, policy, optimizer, where):
    sizes, losses, accelerator, (*_, amp) = found_with(hf, policy, where, optimizer)
    assert sizes == [16, 14, 12]
    hf.forget()
    assert losses == found_with(hf, policy, where, optimizer, fails=0)[1]  # nothing is left of those that failed
    hf.forget()
    plain = found_with(hf, None, where, optimizer)
    assert plain[0] == sizes
    assert losses[-1] == pytest.approx(plain[1][-1], rel=0.02)
    assert accelerator.clear(1, 2) == [None, None]  # which is free_memory by another name
    assert amp.is_closed
    assert accelerator.scaler is None
    assert not {"free_memory", "log", "autocast"} & vars(accelerator).keys()


# transformers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("policy, optimizer", CASES)
def test_auto_find_batch_size_goes_on_where_a_step_ran_out_of_memory(hf, made, policy, optimizer, step):
    def trained(policy):
        hf.forget()
        trainer = made(auto_find_batch_size=True, num_train_epochs=1)
        trainer.optimizer = OPTIMIZERS[optimizer](trainer.model.parameters())
        fails_once(trainer.optimizer, step)
        trainer = trainer if policy is None else hf.plug(trainer, policy)
        trainer.train()
        return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    trainer, losses = trained(policy)
    plain, expected = trained(None)
    assert trainer._train_batch_size == plain._train_batch_size == 7
    assert losses[-1] == pytest.approx(expected[-1], rel=0.02)
    assert trainer.session is None
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}
