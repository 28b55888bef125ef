"""`MezzoPrecision` in Lightning's Trainer: FP32's losses with low kernels, and all that a Trainer does around them."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mezzo.errors import NumericsError, PolicyError
from mezzo.tensors import tensors

from ..support.products import Products
from .programs import CASES, OPTIMIZERS, assert_alike, batches, dataset, ends, flat, loss_of, net, overflow

L = pytest.importorskip("lightning", reason="needs lightning")
from mezzo.integrations.lightning import ChangePolicy, MezzoPrecision  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulating")


class Module(L.LightningModule):
    """A classifier with a weight of its own, that keeps what it sees."""

    def __init__(self, optimizer="torch", overflow_at=(), interval=None):
        super().__init__()
        self.net, self.gain = net(), nn.Parameter(torch.linspace(0.9, 1.1, 4))
        self.make, self.overflow_at, self.interval = OPTIMIZERS[optimizer], set(overflow_at), interval
        self.losses, self.rates, self.seen, self.logged = [], [], set(), []

    def scores(self, x):
        return self.net(x) * self.gain

    def training_step(self, batch, batch_idx):
        scores = self.scores(batch[0])
        if batch_idx in self.overflow_at:
            overflow(scores)
        loss = loss_of(scores, batch[1])
        self.seen |= {batch[0].dtype, loss.dtype}
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", loss_of(self.scores(batch[0]), batch[1]))

    def on_train_batch_end(self, *_):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.logged.append({k: float(v) for k, v in self.trainer.callback_metrics.items() if k.startswith("mezzo")})

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        if self.interval is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def whole(self):
        """All that a checkpoint is to bring back."""
        states = self.trainer.optimizers[0].state_dict()["state"]
        return [*self.state_dict().values(), *tensors(list(states.values()))]


def loader():
    return DataLoader(dataset(), batch_size=8)


def trainer(policy=None, epochs=1, **options):
    if policy is not None:
        options["plugins"] = [policy if isinstance(policy, MezzoPrecision) else MezzoPrecision(policy)]
    return L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=epochs, **options,
    )  # fmt: skip


def fitted(policy=None, module=None, **options):
    module, path = module or Module(), options.pop("ckpt_path", None)
    run = trainer(policy, **options)
    run.fit(module, loader(), ckpt_path=path)
    return module, run


class Callback(L.Callback):
    """Does something at one of the Trainer's hooks."""

    def __init__(self, **hooks):
        self.__dict__.update(hooks)


ACCUMULATING = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}


@pytest.fixture(scope="module")
def fp32():
    return fitted(epochs=2, **ACCUMULATING)[0].losses


@pytest.mark.parametrize("policy, optimizer", CASES[1:3])
def test_losses_are_fp32s_kernels_are_low_and_steps_are_the_trainers(fp32, policy, optimizer):
    plugin = MezzoPrecision(policy)
    module, run = fitted(plugin, Module(optimizer), epochs=2, **ACCUMULATING)
    assert sum(module.losses[-4:]) == ends(fp32)
    stats = plugin.state_dict()["stats"]  # after a run that of its end
    assert (stats["steps"], stats["skipped"]) == (run.global_step, 0) == (8, 0)
    assert module.seen == {torch.float32}
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    assert plugin.session is None
    with Products() as products:  # on a device that computes natively
        fitted(f"{policy},emulate=false", limit_train_batches=2)
    assert set(products.dtypes) == {policy.partition("=")[2]}
    assert products.dtypes.total() >= 2 * (2 + 3)


@pytest.mark.parametrize("policy, optimizer", [CASES[0], CASES[2], ("O3,dtype=bfloat16", "torch")])
def test_a_checkpoint_holds_what_is_stored_and_goes_on_bit_for_bit(tmp_path, policy, optimizer):
    def saves(run, module):
        if run.current_epoch == 0:
            run.save_checkpoint(tmp_path / "half.ckpt")
            run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            kept.update({name: value.clone() for name, value in module.state_dict().items()})

    kept, made = {}, {"optimizer": optimizer, "overflow_at": [2], "interval": "step"}
    options = {"epochs": 2, **ACCUMULATING}
    plugins = [MezzoPrecision(policy) for _ in range(2)]
    straight, _ = fitted(plugins[0], Module(**made), callbacks=[Callback(on_train_epoch_end=saves)], **options)
    module = Module(**made)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1.0)
    _, run = fitted(plugins[1], module, ckpt_path=tmp_path / "half.ckpt", **options)
    assert (run.global_step, len(module.losses)) == (8, 8)
    assert module.losses == straight.losses[8:]
    first, second = (plugin.state_dict()["stats"] for plugin in plugins)
    assert first == second
    assert first["skipped"] == 2
    assert all(map(torch.equal, straight.whole(), module.whole()))
    for name in ("half", "weights"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        dtype = torch.bfloat16 if policy.startswith("O3") else torch.float32
        assert {tensor.dtype for tensor in saved.values()} == {dtype}
        assert all(torch.equal(saved[name], value) for name, value in kept.items())


def test_a_checkpoint_after_the_run_has_its_state(tmp_path):
    _, run = fitted("O2,dtype=float16", Module(overflow_at=[1]))
    run.save_checkpoint(tmp_path / "end.ckpt")
    further, _ = fitted("O2,dtype=float16", epochs=2, ckpt_path=tmp_path / "end.ckpt")
    assert further.logged[0] == {"mezzo/skipped": 1.0, "mezzo/scale": 32768.0}


def test_a_skipped_step_is_logged_and_holds_the_schedulers_of_steps():
    module, _ = fitted("O1,dtype=float16", Module(overflow_at=[2], interval="step"))
    assert module.rates == [0.01 * 0.5**steps for steps in (1, 2, 2, 3, 4, 5, 6, 7)]
    assert [row["mezzo/scale"] for row in module.logged] == [65536.0] * 2 + [32768.0] * 6
    assert [row["mezzo/skipped"] for row in module.logged] == [0.0] * 2 + [1.0] * 6
    plugin = MezzoPrecision("O1,dtype=float16", hold_schedulers=False)
    module, _ = fitted(plugin, Module(overflow_at=[2], interval="step"))
    assert module.rates == [0.01 * 0.5**steps for steps in range(1, 9)]
    module, _ = fitted("O1,dtype=float16", Module(overflow_at=[7], interval="epoch"), epochs=2)
    assert module.rates[8] == 0.005


class Plain(Module):
    """Steps as far as its gradients are large, with a layer and an input that no optimizer has."""

    def __init__(self):
        super().__init__()
        self.probe, self.left_out = torch.zeros(8, requires_grad=True), nn.Linear(4, 4)

    def scores(self, x):
        return self.left_out(self.net(x + self.probe) * self.gain)

    def on_after_backward(self):
        self.norms = [param.grad.double().norm().item() for param in (self.probe, *self.parameters())]

    def on_before_optimizer_step(self, optimizer):
        self.clipped = flat(param.grad for param in self.net.parameters()).norm().item()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 2.0**-14  # below what FP16 holds without a scale

    def configure_optimizers(self):
        return torch.optim.SGD([*self.net.parameters(), self.gain], lr=1e5)


def test_gradients_are_plain_as_soon_as_a_pass_ends_and_clipped_so():
    """By so little that every step is decided by it: SGD's weights are FP32's, within rounding of the gradients."""
    start = flat(Plain().net.parameters())
    for policy, algorithm in (("O1,dtype=float16", "norm"), ("O2,dtype=float16", "value")):
        options = {"gradient_clip_val": 1e-8, "gradient_clip_algorithm": algorithm, "limit_train_batches": 3}
        reference, _ = fitted(module=Plain(), **options)
        module, _ = fitted(policy, Plain(), **options)
        assert module.norms == pytest.approx(reference.norms, rel=0.01)
        assert module.clipped == pytest.approx(reference.clipped, rel=0.01)
        assert_alike(flat(module.net.parameters()) - start, flat(reference.net.parameters()) - start)


# Several optimizers, layers that thaw, averages -------------------------------------------------------------


class Manual(Module):
    """Two optimizers in Lightning's own order: each clears its gradients before its loss; the first's reaches both."""

    def __init__(self, toggles=False):
        super().__init__()
        self.automatic_optimization, self.toggles = False, toggles

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            hidden = self.net[:3](batch[0])
            loss = loss_of(self.net[3](hidden if number == 0 else hidden.detach()), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self):
        return self.make(self.net[:3].parameters()), self.make(self.net[3].parameters())


@pytest.mark.parametrize("policy, toggles", [("O1,dtype=float16", False), ("O2,dtype=float16", True)])
def test_manual_optimization_with_two_optimizers(policy, toggles):
    reference, run = fitted(module=Manual(toggles))
    module, low = fitted(policy, Manual(toggles))
    assert low.global_step == run.global_step == 16
    assert module.losses == pytest.approx(reference.losses, rel=0.02)


def test_layers_that_thaw_late_and_averages_at_o2_are_near_those_of_fp32():
    class Thaws(L.pytorch.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.02)

    class Frozen(Module):
        def configure_optimizers(self):
            return self.make([param for param in self.parameters() if param.requires_grad])

    def mean(old, new, _=0):
        return 0.95 * old + 0.05 * new

    def trained(policy, averages):
        callbacks = [Thaws()]
        if averages:
            callbacks.append(L.pytorch.callbacks.WeightAveraging(avg_fn=mean))
        module, _ = fitted(policy, Frozen(), epochs=2, callbacks=callbacks)
        return flat((callbacks[1]._average_model.module if averages else module).net.parameters())

    start = flat(Frozen().net.parameters())
    for averages in (False, True)[: 1 + hasattr(L.pytorch.callbacks, "WeightAveraging")]:  # Lightning 2.6 has it
        expected = trained(None, averages) - start
        assert expected[:256].norm() > 0.01  # the layer that thaws
        assert_alike(trained("O2,dtype=bfloat16", averages) - start, expected, rel=0.1)


def test_a_copy_that_is_made_while_it_trains_is_a_plain_fp32_module():
    def copies(run, module, *_):
        assert module.net[0].weight.hi.dtype == torch.bfloat16
        kept[:] = copy.deepcopy(module), {name: value.clone() for name, value in module.state_dict().items()}

    kept = []
    module, _ = fitted("O2,dtype=bfloat16", Module(interval="step"), callbacks=[Callback(on_train_batch_end=copies)])
    copied, expected = kept
    assert not torch.equal(module.net[0].weight, module.net[0].weight.bfloat16())
    for variant in (copied, module):
        assert all(torch.equal(value, expected[name]) for name, value in variant.named_parameters())
    assert not {"__deepcopy__", "_mezzo_prepared"} & vars(copied).keys()
    assert copied.net(batches()[0][0]).dtype == torch.float32


# Closures and passes ----------------------------------------------------------------------------------------


def test_lbfgs_evaluates_its_closure_again_and_other_optimizers_do_not():
    class Searching(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    class Foreign(torch.optim.SGD):
        """Of no library that is known here."""

    Foreign.__module__ = "elsewhere"

    class Closing(Module):
        def configure_optimizers(self):
            return Foreign(self.parameters(), lr=0.1)

    reference, _ = fitted(module=Searching(), limit_train_batches=2)
    module, _ = fitted("O1,dtype=bfloat16", Searching(), limit_train_batches=2)
    assert len(module.losses) == len(reference.losses) > 2
    assert module.losses == pytest.approx(reference.losses, rel=0.05)
    module, _ = fitted("O2,dtype=float16", Closing(overflow_at=[1]))
    assert len(module.losses) == 8
    assert [row["mezzo/skipped"] for row in module.logged] == [0.0] + [1.0] * 7


def test_batches_without_a_loss_and_a_backward_pass_of_the_modules_own():
    class Sometimes(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

        def backward(self, loss, *args):
            assert not args
            loss.backward(retain_graph=True)

    reference, _ = fitted(module=Sometimes(), accumulate_grad_batches=2)
    module, _ = fitted("O0", Sometimes(), accumulate_grad_batches=2)
    assert module.losses == reference.losses
    assert len(fitted("O2,dtype=float16", Sometimes())[0].losses) == 7


def test_an_overflow_is_explained_in_pythons_log_or_ends_the_run(caplog):
    class Overflowing(Module):
        def scores(self, x):
            return super().scores(x * 1e5 if len(self.losses) == 1 else x)

    policy = "O1,dtype=float16,fp32=mul"
    module, _ = fitted(MezzoPrecision(policy, on_overflow="locate"), Overflowing(), limit_train_batches=3)
    plain, _ = fitted(policy, Overflowing(), limit_train_batches=3)
    assert module.logged == plain.logged
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    assert "net.0" in caplog.text
    plugin = MezzoPrecision("O1,dtype=float16", on_overflow="raise")
    with pytest.raises(NumericsError):
        fitted(plugin, Module(overflow_at=[1]))
    assert plugin.session is None


# Other runs of the Trainer ----------------------------------------------------------------------------------


def test_validation_and_a_second_run():
    plugin, module, seen = MezzoPrecision("O1,dtype=bfloat16"), Module(), set()
    module.net[0].register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    run = trainer(plugin)
    run.validate(module, loader(), verbose=False)
    assert seen == {torch.bfloat16}
    before = float(run.callback_metrics["val"])
    run.fit(module, loader(), loader())
    after = float(run.callback_metrics["val"])
    assert after < 0.9 * before
    (again,) = run.validate(module, loader(), verbose=False)
    assert again["val"] == pytest.approx(after, rel=0.02)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())
    assert run.global_step == 16


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16", "O2,dtype=float16", "O3,dtype=bfloat16"])
def test_steps_without_training_see_and_give_fp32(policy):
    """What the module computes by itself is FP32, and its parts are called in the policy's region."""

    class Evaluated(Module):
        def forward(self, x):
            return self.net(x)

        def validation_step(self, batch, batch_idx):
            inner, whole = self.net(batch[0]), self(batch[0])
            self.given |= {inner.dtype, whole.dtype, (inner @ inner.mT).dtype}
            self.values.append(whole.numpy())
            self.log("val", loss_of(whole * self.gain, batch[1]))

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

    torch.manual_seed(0)
    module = Evaluated()
    plain, low = copy.deepcopy(module), set()
    runs = {}
    for name, variant in (("", plain), (policy, module)):
        variant.given, variant.values = set(), []
        variant.net[0].register_forward_hook(lambda _, __, output: low.add(output.dtype))
        run = trainer(name or None)
        run.fit(variant, loader(), loader())
        losses = [run.callback_metrics["val"], *run.validate(variant, loader(), verbose=False)]
        losses += run.test(variant, loader(), verbose=False)
        runs[name] = torch.cat(run.predict(variant, loader()))
        assert [float(one if isinstance(one, torch.Tensor) else one["val"]) for one in losses] == pytest.approx(
            [float(losses[0])] * 3, rel=0.01
        )
    assert module.given == {torch.float32}
    assert {value.dtype.name for value in module.values} == {"float32"}
    assert low == {torch.float32, getattr(torch, policy.partition("=")[2])}
    assert runs[policy].dtype == torch.float32
    assert torch.allclose(runs[policy], runs[""], atol=0.1)
    assert "forward" not in vars(module)


def test_a_run_that_fails_leaves_an_fp32_module():
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("no more data")
            return super().training_step(batch, batch_idx)

    module, plugin = Failing(), MezzoPrecision("O2,dtype=float16")
    with pytest.raises(RuntimeError, match="no more data"):
        fitted(plugin, module)
    assert plugin.session is None
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert "_mezzo_prepared" not in vars(module)


def test_the_door_of_the_module_itself_casts_nothing():
    """As the wrapper of `strategy="ddp"` calls it, with `training_step` in place of `forward`."""
    plugin, module, x, given = MezzoPrecision("O3,dtype=bfloat16"), Module(), torch.randn(2, 8), []
    plugin.convert_module(module)
    assert module.net[0].weight.dtype == torch.bfloat16
    module.forward = lambda batch: given.append(batch.dtype) or module.net(batch)
    assert module(x).dtype == torch.float32
    assert given == [torch.float32]
    plugin.teardown()
    assert module.net[0].weight.dtype == torch.float32


@pytest.mark.parametrize("policy, optimizer", CASES)
def test_metrics_are_attributes_as_in_any_module(policy, optimizer):
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics")

    class Measured(Module):
        def __init__(self, optimizer):
            super().__init__(optimizer)
            self.mse = torchmetrics.MeanSquaredError()
            self.scores_of = torchmetrics.MetricCollection(
                {"accuracy": torchmetrics.Accuracy("multiclass", num_classes=4)}
            )
            self.kept = []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            scores = self.scores(batch[0]).detach().float()
            self.mse(scores, nn.functional.one_hot(batch[1], 4).float())
            self.scores_of(scores, batch[1])
            self.log("mse", self.mse)
            return loss

        def on_train_epoch_end(self):
            self.kept += [self.mse.compute().item(), self.scores_of.compute()["accuracy"].item()]
            self.scores_of.reset()

    plain, _ = fitted(None, Measured(optimizer), epochs=2)
    module, _ = fitted(policy, Measured(optimizer), epochs=2)
    assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=0.02)
    assert module.kept == pytest.approx(plain.kept, rel=0.05)


SCHEDULE = "O1,bf16@0; O2,fp16@8"


def test_a_schedule_changes_the_policy_and_resumes_in_the_part_of_its_checkpoint(tmp_path):
    """Against runs of one policy, each from the other's checkpoint; with a skipped step in each part."""

    def saves(run, module):
        run.save_checkpoint(tmp_path / f"{run.current_epoch}.ckpt")

    def under(*callbacks, **options):
        return fitted(MezzoPrecision(), Module(overflow_at=[1]), callbacks=[*callbacks], **options)[0]

    straight = under(ChangePolicy(SCHEDULE), Callback(on_train_epoch_end=saves), epochs=3)
    first, run = fitted("O1,bf16", Module(overflow_at=[1]))
    run.save_checkpoint(tmp_path / "first.ckpt")
    second, _ = fitted("O2,fp16", Module(overflow_at=[1]), epochs=3, ckpt_path=tmp_path / "first.ckpt")
    assert straight.losses == first.losses + second.losses
    scales = [logged["mezzo/scale"] for logged in straight.logged]
    assert scales == [1.0] * 7 + [65536.0] * 2 + [32768.0] * 8 + [16384.0] * 7
    assert all(map(torch.equal, straight.whole(), second.whole()))
    for epoch in range(2):  # a state that was saved as the second part began, and one from within
        resumed = under(ChangePolicy(SCHEDULE), epochs=3, ckpt_path=tmp_path / f"{epoch}.ckpt")
        assert resumed.losses == straight.losses[8 * (epoch + 1) :]
        assert all(map(torch.equal, straight.whole(), resumed.whole()))


class StepsInside(Module):
    """Steps inside of ``training_step``, where no policy can change."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.policies = False, []

    def training_step(self, batch, batch_idx):
        self.policies.append(str(self.trainer.precision_plugin.policy))
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def test_a_schedule_of_steps_inside_of_training_step():
    plugin = MezzoPrecision("O3,bf16")
    module, _ = fitted(plugin, StepsInside(), callbacks=[ChangePolicy("O1,bf16@0; O2,bf16@3")], limit_train_batches=5)
    assert module.policies == ["O1,dtype=bfloat16"] * 3 + ["O2,dtype=bfloat16"] * 2
    module, _ = fitted(plugin, StepsInside(), limit_train_batches=5)  # another run with the plugin has no schedule
    assert module.policies == ["O2,dtype=bfloat16"] * 5


def test_a_schedule_without_the_plugin_is_refused():
    for value in ("O1,bf16; O2,fp16", 5):
        with pytest.raises(PolicyError):
            ChangePolicy(value)
    with pytest.raises(PolicyError, match="the Trainer's precision is Precision"):
        fitted(None, callbacks=[ChangePolicy(SCHEDULE)])
