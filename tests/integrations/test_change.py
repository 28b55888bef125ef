"""``change()`` of Lightning's plugin, for its Trainer and for Fabric: the numbers of the five lines that change."""

import pytest
import torch

from mezzo import MixedPrecision, StateError

from .programs import loss_of, net

pytest.importorskip("lightning", reason="needs lightning")
from lightning.fabric import Fabric

from mezzo.integrations.lightning import MezzoPrecision

from .test_lightning import Callback, Module, loader, trainer

pytestmark = pytest.mark.usefixtures("emulating")
WALKS = (
    ("O1,bf16", "O2,bf16"),
    ("O2,bf16", "O1,fp16,loss_scale=dynamic(init=64)"),
    ("O2,bf16", "O2,bf16,fp32_module=*0"),
)


def by_hand(module, optimizer, before, after, step, data):
    amp = MixedPrecision(module, optimizer, before)
    for number, pair in enumerate(data):
        if number == 4:
            amp.change(after)
        with amp.autocast():
            loss = step(pair)
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
    amp.close()
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("before, after", WALKS)
def test_the_trainers_plugin_changes(before, after):
    plugin = MezzoPrecision(before)

    def change(trainer, module, batch, number):
        if number == 4:
            plugin.change(after)

    module, other = Module("mezzo"), Module("mezzo")
    trainer(plugin, callbacks=[Callback(on_train_batch_start=change)]).fit(module, loader())
    optimizer = other.configure_optimizers()
    theirs = by_hand(other, optimizer, before, after, lambda pair: other.training_step(pair, 0), loader())
    assert all(map(torch.equal, module.parameters(), theirs))


@pytest.mark.parametrize("before, after", WALKS)
def test_fabrics_plugin_changes(before, after):
    plugin = MezzoPrecision(before)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    plain, other = net(), net()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    data = list(loader())
    for number, (x, y) in enumerate(data):
        if number == 4:
            plugin.change(after)
            assert str(plugin.policy) == str(plugin.session.policy)
        fabric.backward(loss_of(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    plugin.teardown()
    made = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    theirs = by_hand(other, made, before, after, lambda pair: loss_of(other(pair[0]).float(), pair[1]), data)
    assert all(map(torch.equal, plain.parameters(), theirs))


def test_a_plugin_without_a_session():
    with pytest.raises(StateError, match="there is no session"):
        MezzoPrecision("O1,bf16").change("O2,bf16")
