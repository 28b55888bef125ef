"""`MezzoPrecision` in Lightning's Trainer: FP32's losses with low kernels, and all that a Trainer does around them."""

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo.errors import NumericsError, StateError
from mezzo.tensors import dtype_name, tensors
from mezzo.weights import encode

from ..support.products import Products

L = pytest.importorskip("lightning", reason="needs lightning")
from mezzo.integrations.lightning import MezzoPrecision  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulating")

POLICIES = [f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]
OPTIMIZERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=0.01),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.01),
}


def data(rows=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)


class Module(L.LightningModule):
    """A classifier that keeps what it sees."""

    def __init__(self, optimizer="torch", overflow_at=()):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        self.make, self.overflow_at = OPTIMIZERS[optimizer], set(overflow_at)
        self.losses, self.rates, self.seen, self.logged = [], [], Counter(), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        if batch_idx in self.overflow_at:
            scores.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        loss = nn.functional.cross_entropy(scores.float(), y)
        self.seen[f"x {dtype_name(x.dtype)}, loss {dtype_name(loss.dtype)}"] += 1
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1]))

    def on_train_batch_end(self, *_):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.logged.append({k: float(v) for k, v in self.trainer.callback_metrics.items() if k.startswith("mezzo")})

    def configure_optimizers(self):
        return self.make(self.parameters())


class Scheduled(Module):
    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer(policy=None, epochs=2, **options):
    options = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0,
        "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": epochs,
        "plugins": [] if policy is None else [policy if isinstance(policy, MezzoPrecision) else MezzoPrecision(policy)],
    } | options  # fmt: skip
    return L.Trainer(**options)


def fitted(policy=None, optimizer="torch", module=None, **options):
    module = Module(optimizer) if module is None else module
    run = trainer(policy, **options)
    run.fit(module, data())
    return module, run


@pytest.fixture(scope="module")
def fp32():
    return fitted(gradient_clip_val=1.0, accumulate_grad_batches=2)[0].losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_losses_are_fp32s_and_steps_the_trainers(fp32, policy, optimizer):
    plugin = MezzoPrecision(policy)
    module, run = fitted(plugin, optimizer, gradient_clip_val=1.0, accumulate_grad_batches=2)
    assert sum(module.losses[-4:]) == pytest.approx(sum(fp32[-4:]), rel=0.01)
    stats = plugin.state_dict()["stats"]  # after a run that of its end
    assert stats["steps"] == run.global_step == 8
    assert stats["skipped"] == 0
    assert module.seen == {"x float32, loss float32": 16}
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    assert plugin.session is None


@pytest.mark.parametrize("policy", POLICIES)
def test_kernels_run_low(policy):
    """On a device that computes natively; all products of a training step, forward and backward."""
    module = Module()
    products = Products()
    plain = module.training_step
    module.training_step = lambda *args: plain(*args)
    with products:
        fitted(f"{policy},emulate=false", module=module, epochs=1, limit_train_batches=2)
    low = policy.partition("=")[2]
    assert products.dtypes == {low: products.dtypes[low]}
    assert products.dtypes[low] >= 2 * (2 + 3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_of_the_trainers_goes_on_bit_for_bit(tmp_path, policy, optimizer):
    path = tmp_path / "half.ckpt"

    class Saving(L.Callback):
        def on_train_epoch_end(self, run, module):
            if run.current_epoch == 0:
                run.save_checkpoint(path)

    def whole(module):
        return [
            *module.state_dict().values(),
            *tensors(list(module.trainer.optimizers[0].state_dict()["state"].values())),
        ]

    options = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    straight, _ = fitted(policy, module=Scheduled(optimizer, overflow_at=[2]), callbacks=[Saving()], **options)
    module = Scheduled(optimizer, overflow_at=[2])
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1.0)
    run = trainer(policy, **options)
    run.fit(module, data(), ckpt_path=path)
    assert (run.global_step, len(module.losses)) == (8, 8)
    assert module.losses == straight.losses[8:]
    assert module.logged[-1] == straight.logged[-1]
    assert all(map(torch.equal, whole(straight), whole(module)))


@pytest.mark.parametrize("policy", ["O2,dtype=float16", "O2,dtype=bfloat16", "O3,dtype=bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_in_a_checkpoint_are_fp32(tmp_path, policy, optimizer):
    """Those of the run's end, bit for bit, for plain torch; and of those that the module itself has, too."""

    class Saving(L.Callback):
        def on_train_end(self, run, module):
            run.save_checkpoint(tmp_path / "whole.ckpt")
            run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            assert {param.dtype for param in module.parameters()} != {torch.float32}

    class Direct(Module):
        def __init__(self, *args):
            super().__init__(*args)
            self.gain = nn.Parameter(torch.ones(8))

        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0] * self.gain, batch[1]), batch_idx)

    module, _ = fitted(policy, module=Direct(optimizer), callbacks=[Saving()])
    for name in ("whole", "weights"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        plain = Direct(optimizer)
        plain.load_state_dict(saved)
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
        assert all(map(torch.equal, plain.parameters(), module.parameters()))
    rounded = [param.bfloat16().float() for param in module.parameters()]
    assert all(map(torch.equal, module.parameters(), rounded)) == policy.startswith("O3")


def test_a_checkpoint_after_the_run_has_its_state(tmp_path):
    module, run = fitted("O2,dtype=float16", module=Module(overflow_at=[1]))
    run.save_checkpoint(tmp_path / "end.ckpt")
    further = Module()
    again = trainer("O2,dtype=float16", epochs=3)
    again.fit(further, data(), ckpt_path=tmp_path / "end.ckpt")
    straight, _ = fitted("O2,dtype=float16", module=Module(overflow_at=[1]), epochs=2)
    assert all(map(torch.equal, straight.parameters(), module.parameters()))
    assert further.logged[0]["mezzo/skipped"] == 2.0
    assert torch.load(tmp_path / "end.ckpt", weights_only=True)["MezzoPrecision"]


def test_a_skipped_step_writes_nothing_holds_the_scheduler_and_is_logged():
    module, _ = fitted("O1,dtype=float16", module=Scheduled(overflow_at=[2]), epochs=1)
    assert module.rates == [0.01 * 0.5**steps for steps in (1, 2, 2, 3, 4, 5, 6, 7)]
    assert [each["mezzo/scale"] for each in module.logged] == [65536.0] * 2 + [32768.0] * 6
    assert [each["mezzo/skipped"] for each in module.logged] == [0.0] * 2 + [1.0] * 6


def test_schedulers_go_on_where_they_are_not_held():
    plugin = MezzoPrecision("O1,dtype=float16", hold_schedulers=False)
    module, _ = fitted(plugin, module=Scheduled(overflow_at=[2]), epochs=1)
    assert module.rates == [0.01 * 0.5**steps for steps in range(1, 9)]


def test_a_scheduler_of_epochs_does_not_wait():
    class Epochs(Module):
        def configure_optimizers(self):
            optimizer = self.make(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]

    module, _ = fitted("O1,dtype=float16", module=Epochs(overflow_at=[7]))
    assert module.rates[8] == 0.005


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=float16"])
def test_clipping_is_of_unscaled_gradients(policy, optimizer, algorithm):
    """By so little that every step is decided by it: SGD's weights are FP32's, within rounding of the gradients."""

    class Plain(Module):
        def configure_optimizers(self):
            kind = (
                mezzo.optim.SGD
                if optimizer == "mezzo" and self.trainer.precision_plugin.__class__ is MezzoPrecision
                else torch.optim.SGD
            )
            return kind(self.parameters(), lr=1.0)

    options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm, "epochs": 1}
    reference, _ = fitted(module=Plain(), **options)
    module, _ = fitted(policy, module=Plain(), **options)
    start = nn.utils.parameters_to_vector(Plain().parameters())
    moved, expected = (nn.utils.parameters_to_vector(each.parameters()) - start for each in (module, reference))
    assert (moved - expected).norm() < 0.02 * expected.norm()


def test_hooks_see_unscaled_gradients():
    norms = {}

    class Looking(L.Callback):
        def on_before_optimizer_step(self, run, module, optimizer):
            norm = torch.stack([param.grad.float().norm() for param in module.parameters()]).norm()
            norms.setdefault(type(run.precision_plugin).__name__, []).append(float(norm))

    for policy in (None, "O1,dtype=float16", "O2,dtype=float16"):
        fitted(policy, epochs=1, callbacks=[Looking()], limit_train_batches=3)
    expected, found = norms["Precision"], norms["MezzoPrecision"]
    assert found == pytest.approx(expected * 2, rel=0.01)


class Manual(Module):
    """Two optimizers in Lightning's own order: each clears its gradients before its loss; the first's reaches both."""

    def __init__(self, toggles=False):
        super().__init__()
        self.automatic_optimization, self.toggles = False, toggles
        self.other = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            scores = self.net(batch[0])
            loss = nn.functional.cross_entropy(
                self.other(scores if optimizer is first else scores.detach()).float(), batch[1]
            )
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self):
        return self.make(self.net.parameters()), self.make(self.other.parameters())


@pytest.mark.parametrize(
    "policy, toggles",
    [*((each, False) for each in ("O0", *POLICIES)), ("O1,dtype=float16", True), ("O2,dtype=float16", True)],
)
def test_manual_optimization_with_two_optimizers(policy, toggles):
    reference, run = fitted(module=Manual(toggles))
    module, low = fitted(policy, module=Manual(toggles))
    assert low.global_step == run.global_step == 32
    assert module.losses == pytest.approx(reference.losses, rel=1e-6 if policy == "O0" else 0.02)


class ByHand:
    """FP32 weights kept by hand beside a module in BF16: each pass rounds them, and its gradients are theirs."""

    def __init__(self, module):
        self.module = module
        self.values = {name: nn.Parameter(param.detach().clone()) for name, param in module.named_parameters()}
        self.prepared = mezzo.prepare(module, "O2,dtype=bfloat16")
        self.prepared.halves.drop()

    def of(self, module):
        """Return the FP32 weights of a part of the module."""
        mine = set(module.parameters())
        return [self.values[name] for name, param in self.module.named_parameters() if param in mine]

    def backward(self, loss_of):
        params = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in self.values.items():
                params[name].copy_(encode(value, torch.bfloat16)[0])
        with self.prepared.autocast():
            loss = loss_of()
        loss.backward()
        for name, param in params.items():
            self.values[name].grad = None if param.grad is None else param.grad.float()
            param.grad = None

    def check(self, module):
        """Require the very weights of a module that was trained."""
        assert all(torch.equal(param, self.values[name]) for name, param in module.named_parameters())


def batches_of(epochs):
    for epoch in range(epochs):
        for batch in data():
            yield epoch, batch


def test_optimizers_that_are_toggled_at_o2_train_as_fp32_weights_kept_by_hand_bit_for_bit():
    module, _ = fitted("O2,dtype=bfloat16", module=Manual(toggles=True))
    hand = ByHand(Manual())
    parts = hand.module.net, hand.module.other
    optimizers = [OPTIMIZERS["torch"](hand.of(part)) for part in parts]
    for _, (x, y) in batches_of(2):
        for number, optimizer in enumerate(optimizers):

            def loss_of(x=x, y=y, is_first=number == 0):
                scores = parts[0](x)
                return nn.functional.cross_entropy(parts[1](scores if is_first else scores.detach()).float(), y)

            parts[1 - number].requires_grad_(False)
            hand.backward(loss_of)
            parts[1 - number].requires_grad_(True)
            nn.utils.clip_grad_norm_(hand.of(parts[number]), 1.0)
            optimizer.step()
    hand.check(module)


def test_layers_that_thaw_late_at_o2_train_as_fp32_weights_kept_by_hand_bit_for_bit():
    class Thaws(L.pytorch.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.02)

    class Frozen(Module):
        def configure_optimizers(self):
            return self.make([param for param in self.parameters() if param.requires_grad])

    module, _ = fitted("O2,dtype=bfloat16", module=Frozen(), callbacks=[Thaws()])
    hand = ByHand(Frozen())
    net = hand.module.net
    optimizer = OPTIMIZERS["torch"](hand.of(net[1:]))
    net[0].requires_grad_(False)
    for step, (epoch, (x, y)) in enumerate(batches_of(2)):
        if epoch == 1 and step == len(data()):
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": hand.of(net[0]), "lr": 0.02})
        hand.backward(lambda x=x, y=y: nn.functional.cross_entropy(net(x).float(), y))
        optimizer.step()
    hand.check(module)


@pytest.mark.skipif(not hasattr(L.pytorch.callbacks, "WeightAveraging"), reason="Lightning 2.6 has it")
def test_an_average_at_o2_is_that_of_fp32_weights_kept_by_hand_bit_for_bit():
    def mean(old, new, _):
        return 0.95 * old + 0.05 * new

    average = L.pytorch.callbacks.WeightAveraging(avg_fn=mean)
    module, _ = fitted("O2,dtype=bfloat16", callbacks=[average])
    hand = ByHand(Module())
    optimizer, expected = OPTIMIZERS["torch"](hand.values.values()), {}
    for _, (x, y) in batches_of(2):
        hand.backward(lambda x=x, y=y: nn.functional.cross_entropy(hand.module.net(x).float(), y))
        optimizer.step()
        for name, value in hand.values.items():
            expected[name] = mean(expected[name], value.detach(), 0) if name in expected else value.detach().clone()
    for name, param in average._average_model.module.named_parameters():
        assert torch.equal(param, expected[name])
    for name, param in module.named_parameters():  # which the callback writes to BF16 weights at the end
        torch.testing.assert_close(param, expected[name], rtol=2.0**-7, atol=0)


def test_parameters_of_the_module_itself_are_fp32_in_checkpoints_and_copies(tmp_path):
    class Scaled(Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.linspace(0.9, 1.1, 4))

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy((self.net(batch[0]) * self.gain).float(), batch[1])
            self.losses.append(loss.item())
            return loss

    class Saves(L.Callback):
        def on_train_end(self, trainer, pl_module):
            assert pl_module.gain.dtype == torch.bfloat16
            trainer.save_checkpoint(tmp_path / "end.ckpt")
            self.copied = copy.deepcopy(pl_module)
            with pytest.raises(StateError, match="another model"):
                pl_module.load_state_dict(pl_module.state_dict() | {"net.3.bias": torch.ones(5)})

    saves = Saves()
    module, _ = fitted("O2,dtype=bfloat16", module=Scaled(), callbacks=[saves])
    saved = torch.load(tmp_path / "end.ckpt", weights_only=False)["state_dict"]
    assert not torch.equal(module.gain, module.gain.bfloat16())
    for name, param in module.named_parameters():
        assert torch.equal(saved[name], param)
        assert torch.equal(saves.copied.get_parameter(name), param)


@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=float16"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_gradients_are_plain_as_soon_as_a_pass_ends(policy, is_ours):
    """Those of the optimizer's parameters, of others of the module, and of a tensor that is none of its."""

    class Partly(Module):
        def __init__(self):
            super().__init__()
            self.probe = torch.zeros(8, requires_grad=True)  # no parameter
            self.left_out = nn.Linear(4, 4)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self.left_out(self.net(x + self.probe)).float(), y)

        def on_after_backward(self):
            self.norms = [each.grad.double().norm().item() for each in (self.probe, *self.parameters())]

        def configure_optimizers(self):
            kind = mezzo.optim.SGD if is_ours else torch.optim.SGD
            return kind(self.net.parameters(), lr=0.1)

    reference, _ = fitted(module=Partly(), epochs=1, limit_train_batches=1)
    module, _ = fitted(policy, module=Partly(), epochs=1, limit_train_batches=1)
    assert module.norms == pytest.approx(reference.norms, rel=0.01)


def test_a_backward_pass_of_the_modules_own():
    class Own(Module):
        def backward(self, loss, *args):
            assert not args
            loss.backward(retain_graph=True)

    assert fitted("O2,dtype=float16", module=Own())[0].losses == fitted("O2,dtype=float16")[0].losses


def test_a_closure_is_evaluated_once_whatever_the_optimizer():
    class Foreign(torch.optim.SGD):
        """Of no library that is known here."""

    Foreign.__module__ = "elsewhere"

    class Closing(Module):
        def configure_optimizers(self):
            return Foreign(self.parameters(), lr=0.1)

    module, _ = fitted("O2,dtype=float16", module=Closing(overflow_at=[1]), epochs=1)
    assert len(module.losses) == 8
    assert [each["mezzo/skipped"] for each in module.logged] == [0.0] + [1.0] * 7


def test_a_step_without_a_loss_steps_nothing():
    class Sometimes(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    module, _ = fitted("O2,dtype=float16", module=Sometimes(), epochs=1)
    assert len(module.losses) == 7


def test_what_was_accumulated_before_a_batch_without_a_loss_is_stepped():
    class Sometimes(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    options = {"accumulate_grad_batches": 2, "epochs": 1}
    reference, _ = fitted(module=Sometimes(), **options)
    module, _ = fitted("O0", module=Sometimes(), **options)
    assert module.losses == reference.losses
    assert all(map(torch.equal, module.parameters(), reference.parameters()))


@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=bfloat16"])
def test_averaged_weights_and_their_statistics(policy):
    """Lightning's average ends with an epoch of forward passes alone, and a step of the optimizer after them.

    No bias before the norm, whose gradient is rounding alone: Adam makes whole steps of it.
    """

    class Normed(Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    def averaged(policy):
        average = L.pytorch.callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=2)
        module, _ = fitted(policy, module=Normed(), epochs=4, callbacks=[average])
        return nn.utils.parameters_to_vector(module.parameters()), module.net[1].running_var

    for found, expected in zip(averaged(policy), averaged(None), strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.skipif(not hasattr(L.pytorch.callbacks, "WeightAveraging"), reason="Lightning 2.6 has it")
@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=float16"])
def test_an_average_of_every_step_is_written_at_the_end(policy):
    def averaged(policy):
        average = L.pytorch.callbacks.WeightAveraging(avg_fn=lambda old, new, _: 0.95 * old + 0.05 * new)
        module, _ = fitted(policy, callbacks=[average])
        weights = [nn.utils.parameters_to_vector(each.parameters()) for each in (module, average._average_model.module)]
        assert torch.equal(*weights) or policy.startswith("O2")  # there what the callback writes is rounded
        return weights[1]

    found, expected = averaged(policy), averaged(None)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16", "O2,dtype=bfloat16"])
def test_a_copy_that_is_made_while_it_trains_is_a_plain_fp32_module(policy):
    class Copies(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            self.copied = copy.deepcopy(pl_module)
            self.expected = {name: value.clone() for name, value in pl_module.state_dict().items()}

    copies = Copies()
    fitted(policy, module=Scheduled(), epochs=1, callbacks=[copies])
    assert all(torch.equal(value, copies.expected[name]) for name, value in copies.copied.named_parameters())
    assert "__deepcopy__" not in vars(copies.copied)
    assert copies.copied.net(data().dataset[:2][0]).dtype == torch.float32


@pytest.mark.parametrize("policy, within", [("O0", 0.0), ("O1,dtype=bfloat16", 0.02)])
def test_lbfgs_evaluates_its_closure_again(policy, within):
    class Closing(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    module, _ = fitted(policy, module=Closing(), epochs=1, limit_train_batches=2)
    reference, _ = fitted(module=Closing(), epochs=1, limit_train_batches=2)
    assert len(module.losses) == len(reference.losses) > 2
    assert module.losses == pytest.approx(reference.losses, rel=within, abs=0.0)


class Overflowing(Module):
    """A network whose second layer overflows in the forward pass, in one batch; with a weight of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gain = nn.Parameter(torch.ones(8))

    def training_step(self, batch, batch_idx):
        x = batch[0] * self.gain
        return super().training_step((x * 1e5 if batch_idx == 1 else x, batch[1]), batch_idx)


def test_an_overflow_is_explained_in_pythons_log(caplog):
    policy = "O1,dtype=float16,fp32=mul"
    module, _ = fitted(MezzoPrecision(policy, on_overflow="explain"), module=Overflowing(), epochs=1)
    plain, _ = fitted(policy, module=Overflowing(), epochs=1)
    assert module.logged == plain.logged
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    assert "net.0" in caplog.text


def test_an_overflow_can_end_the_run():
    plugin = MezzoPrecision("O1,dtype=float16", on_overflow="raise")
    with pytest.raises(NumericsError):
        fitted(plugin, module=Module(overflow_at=[1]))
    assert plugin.session is None


def test_validation_and_a_second_run():
    plugin = MezzoPrecision("O2,dtype=bfloat16")
    module = Module()
    run = trainer(plugin)
    run.validate(module, data(), verbose=False)
    before = float(run.callback_metrics["val"])
    run.fit(module, data(), data())
    after = float(run.callback_metrics["val"])
    assert after < 0.8 * before
    (again,) = run.validate(module, data(), verbose=False)
    assert again["val"] == pytest.approx(after, rel=0.02)
    run.fit_loop.max_epochs = 3
    run.fit(module, data())
    assert run.global_step == 24
    copied = copy.deepcopy(module.net)
    assert not any(each._forward_pre_hooks for each in copied.modules())


def test_a_run_that_fails_leaves_an_fp32_module():
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("no more data")
            return super().training_step(batch, batch_idx)

    module, plugin = Failing(), MezzoPrecision("O2,dtype=float16")
    run = trainer(plugin)
    with pytest.raises(RuntimeError, match="no more data"):
        run.fit(module, data())
    assert plugin.session is None
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    assert not any(each._forward_pre_hooks for each in module.modules())


def test_the_door_of_the_module_itself_casts_nothing():
    """As the wrapper of `strategy="ddp"` calls it, with `training_step` in place of `forward`."""
    plugin, module, x = MezzoPrecision("O2,dtype=bfloat16"), Module(), torch.randn(2, 8)
    plugin.convert_module(module)
    assert module.net[0].weight.dtype == torch.bfloat16
    given = []

    def forward(batch):
        given.append(batch.dtype)
        return module.net(batch)

    module.forward = forward
    assert module(x).dtype == torch.float32
    assert given == [torch.float32]
    plugin.teardown()
    assert module.net[0].weight.dtype == torch.float32


def ranks(program, folder):
    """Run a program that starts its ranks, and return what both have found."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program), folder], env=environment, cwd=folder, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow  # two processes that import Lightning, and train four times
def test_two_ranks_step_together(tmp_path):
    """An overflow on one is both's; batches and losses are FP32 there as well; weights are equal bit for bit."""
    first, second = ranks("lightning_ranks.py", tmp_path)
    for policy, found in first.items():
        assert found["weights"] == second[policy]["weights"], policy
        assert found["seen"] == second[policy]["seen"] == {"x float32, loss float32": 16}, policy
        assert (found["steps"], found["skipped"]) == (8, 1.0), policy
        assert sum(found["losses"][-4:]) == pytest.approx(sum(first["O0"]["losses"][-4:]), rel=0.01), policy


@pytest.mark.slow  # two processes that import Lightning, and train ten times
def test_two_ranks_of_a_model_in_shards(tmp_path):
    """Gathered in the policy's dtype; an overflow on one is both's; the Trainer's checkpoints go on bit for bit."""
    first, second = ranks("lightning_shards.py", tmp_path)
    for name, found in first.items():
        assert found["weights"] == second[name]["weights"], name
        assert found["resumed"] == found["weights"], name
        assert found["resumed_losses"] == found["losses"][8:], name
        assert found["resumed_logged"][-1] == found["logged"][-1], name
        assert (found["steps"], found["logged"][-1]["mezzo/skipped"]) == (8, 1.0), name
        expected = name.partition("=")[2].partition(" ")[0] if name.startswith("O2") else "float32"
        assert found["gathered"] == [expected], name
        reference = first["O0 torch torch False"]["losses"]
        assert sum(found["losses"][-4:]) == pytest.approx(sum(reference[-4:]), rel=0.01), name
