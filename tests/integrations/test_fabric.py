"""`MezzoPrecision` in Lightning's Fabric: FP32's losses with low kernels, and all that a program does with it."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mezzo.errors import NumericsError, StateError
from mezzo.tensors import tensors

from ..support.products import Products
from .programs import CASES, OPTIMIZERS, assert_alike, batches, ends, flat, loss_of, net, overflow

L = pytest.importorskip("lightning", reason="needs lightning")
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.strategies.strategy import Strategy  # noqa: E402

from mezzo.integrations.lightning import MezzoPrecision  # noqa: E402
from mezzo.session.session import weights_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulating")


def fabric_of(policy=None, **options):
    """A Fabric with the plugin; without a policy a plain one."""
    plugins = None if policy is None else MezzoPrecision(policy, **options)
    return Fabric(accelerator="cpu", devices=1, plugins=plugins)


class Run:
    """A program of Fabric's own kind: accumulation over two batches, clipping, a scheduler."""

    def __init__(self, policy=None, optimizer="torch", overflow_at=(), apart=False, **options):
        self.fabric, self.overflow_at = fabric_of(policy, **options), overflow_at
        model, self.scheduler = net(), None
        if apart:
            self.model = self.fabric.setup_module(model)
            self.optimizer = self.fabric.setup_optimizers(OPTIMIZERS[optimizer](self.model.parameters()))
        else:
            raw = OPTIMIZERS[optimizer](model.parameters())
            decay = torch.optim.lr_scheduler.LambdaLR(raw, lambda step: 0.9**step)
            self.model, self.optimizer, self.scheduler = self.fabric.setup(model, raw, scheduler=decay)
        self.plugin, self.losses, self.rates, self.dtypes = self.fabric.strategy.precision, [], [], set()

    def train(self, given, every=2):
        for number, (x, y) in enumerate(given, start=1):
            with self.fabric.no_backward_sync(self.model, enabled=number % every != 0):
                scores = self.model(x)
                if number in self.overflow_at:
                    overflow(scores)
                loss = nn.functional.cross_entropy(scores, y)
                self.fabric.backward(loss / every)
            self.losses.append(loss.item())
            self.dtypes.add(scores.dtype)
            if number % every == 0:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0, error_if_nonfinite=False)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.scheduler is not None:
                    self.scheduler.step()
                self.rates.append(self.optimizer.param_groups[0]["lr"])
        return self

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "epoch": 1}

    def whole(self):
        return [*self.model.state_dict().values(), *tensors(list(self.optimizer.state_dict()["state"].values()))]


@pytest.fixture(scope="module")
def fp32():
    return {apart: Run(apart=apart).train(batches(2)).losses for apart in (False, True)}


@pytest.mark.parametrize("policy, optimizer", [("O0", "torch"), *CASES[1:3]])
def test_losses_are_fp32s_and_kernels_are_low(fp32, policy, optimizer):
    apart = policy != "O2,dtype=float16"
    run = Run(policy, optimizer, apart=apart).train(batches(2))
    assert sum(run.losses[-4:]) == ends(fp32[apart])
    stats = run.plugin.session.stats()
    assert (stats.steps, stats.skipped) == (8, 0)
    assert run.dtypes == {torch.float32}
    if policy != "O0":
        run = Run(f"{policy},emulate=false")  # on a device that computes natively
        with Products() as products:
            run.train(batches()[:2])
        assert products.dtypes == {policy.partition("=")[2]: 2 * (2 + 3)}


@pytest.mark.parametrize("policy, optimizer", CASES[::3])
def test_a_saved_run_goes_on_bit_for_bit(tmp_path, policy, optimizer):
    given, path = batches(2), tmp_path / "half.ckpt"
    straight = Run(policy, optimizer, overflow_at=[3]).train(given[:8])
    straight.fabric.save(path, straight.state())
    straight.train(given[8:])
    again = Run(policy, optimizer, overflow_at=[3])
    with torch.no_grad():
        for param in again.model.parameters():
            param.add_(1.0)
    state = again.state() | {"epoch": 0}
    assert again.fabric.load(path, state) == {}
    again.train(given[8:])
    assert state["epoch"] == 1
    assert (again.losses, again.rates) == (straight.losses[8:], straight.rates[4:])
    assert again.plugin.metrics() == straight.plugin.metrics()
    assert all(map(torch.equal, straight.whole(), again.whole()))
    saved = torch.load(path, weights_only=True)["model"]
    net().load_state_dict(saved)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_what_plain_fabric_saved_is_loaded_and_the_other_way_round(tmp_path):
    plain = Run().train(batches()[:4])
    plain.fabric.save(tmp_path / "plain.ckpt", plain.state())
    ours = Run("O2,dtype=bfloat16")
    ours.fabric.load(tmp_path / "plain.ckpt", ours.state())
    loaded = ours.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in plain.model.state_dict().items())
    ours.train(batches()[4:8])
    ours.fabric.save(tmp_path / "ours.ckpt", ours.state())
    assert plain.fabric.load(tmp_path / "ours.ckpt", plain.state()) == {}
    plain.train(batches()[4:6])
    ours.plugin.teardown()
    plain.fabric.load(tmp_path / "ours.ckpt", {"model": plain.model})
    assert all(map(torch.equal, plain.model.parameters(), ours.model.parameters()))


@pytest.mark.parametrize("holds", [True, False])
def test_a_skipped_step_writes_nothing_and_holds_the_scheduler(holds):
    run = Run("O1,dtype=float16", "mezzo", hold_schedulers=holds).train(batches()[:2])
    before = flat(run.model.parameters())
    assert run.plugin.metrics() == {"mezzo/scale": 65536.0, "mezzo/skipped": 0}
    run.overflow_at = [1]
    run.train(batches()[:2])
    assert torch.equal(before, flat(run.model.parameters()))
    assert run.plugin.metrics() == {"mezzo/scale": 32768.0, "mezzo/skipped": 1}
    run.overflow_at = []
    run.train(batches()[:2])
    assert run.rates == pytest.approx([0.009, 0.009, 0.0081] if holds else [0.009, 0.0081, 0.00729])
    with pytest.raises(NumericsError):
        Run("O1,dtype=float16", on_overflow="raise", overflow_at=[1]).train(batches()[:2])


def test_gradients_are_plain_and_clipped_so_and_those_of_what_no_optimizer_has():
    def moved(fabric, clips):
        model, probe = net(), torch.zeros(8, requires_grad=True)
        start, (x, y) = flat(model.parameters()), batches()[0]
        model, optimizer = fabric.setup(model, torch.optim.SGD(model[:3].parameters(), lr=1.0))
        fabric.backward(nn.functional.cross_entropy(model(x + probe), y))
        norms = [param.grad.float().norm().item() for param in (probe, *model.parameters())]
        norm = fabric.clip_gradients(model, optimizer, **clips)
        optimizer.step()
        return flat(model.state_dict().values()) - start, [*norms, *([] if norm is None else [float(norm)])]

    for clips, policy in (({"max_norm": 1e-3}, "O1,dtype=float16"), ({"clip_val": 1e-4}, "O2,dtype=float16")):
        expected, reference = moved(fabric_of(), clips)
        weights, norms = moved(fabric_of(policy), clips)
        assert_alike(weights, expected)
        assert norms == pytest.approx(reference, rel=0.01)


def test_a_gan_with_two_models_and_optimizers():
    """The generator's loss reaches the discriminator, whose gradients of it are cleared before its own."""

    def trained(fabric, clears_first):
        torch.manual_seed(0)
        made, judge = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        for_made, for_judge = (torch.optim.SGD(module.parameters(), lr=0.05) for module in (made, judge))
        made, for_made = fabric.setup(made, for_made)
        judge, for_judge = fabric.setup(judge, for_judge)
        bce, losses = nn.functional.binary_cross_entropy_with_logits, []
        noise = torch.Generator().manual_seed(1)
        for _ in range(4):
            real = torch.randn(16, 2, generator=noise) + 2.0
            fake = made(torch.randn(16, 4, generator=noise))
            for optimizer, pairs in ((for_judge, [(real, 1.0), (fake.detach(), 0.0)]), (for_made, [(fake, 1.0)])):
                if clears_first:
                    optimizer.zero_grad()
                scores = [(judge(batch), label) for batch, label in pairs]
                loss = sum(bce(score, torch.full_like(score, label)) for score, label in scores)
                fabric.backward(loss)
                optimizer.step()
                if not clears_first:
                    for_judge.zero_grad()
                    for_made.zero_grad()
                losses.append(loss.item())
        return losses

    for clears_first, policy in ((True, "O1,dtype=float16"), (False, "O2,dtype=bfloat16")):
        fabric = fabric_of(policy)
        assert trained(fabric, clears_first) == pytest.approx(trained(fabric_of(), clears_first), rel=0.02)
        stats = fabric.strategy.precision.session.stats()
        assert (stats.steps, stats.skipped) == (8, 0)


def test_the_region_by_itself_and_a_closure_that_is_evaluated_again():
    fabric, (x, y) = fabric_of("O1,dtype=bfloat16"), batches()[0]
    with fabric.autocast():
        assert (x @ x.T).dtype == torch.bfloat16
    model = fabric.setup_module(net())
    with fabric.autocast():
        assert (x @ x.T).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32
    assert fabric.strategy.precision.session is None

    def trained(fabric, model):
        optimizer = fabric.setup_optimizers(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
        losses = []

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
        return losses

    plain = fabric_of()
    expected = trained(plain, plain.setup_module(net()))
    assert len(expected) > 2
    assert trained(fabric, model) == pytest.approx(expected, rel=0.02)
    with fabric.autocast():
        assert (x @ x.T).dtype == torch.bfloat16


def test_a_model_without_an_optimizer_and_an_optimizer_that_comes_later():
    fabric = fabric_of("O2,dtype=bfloat16")
    teacher, model = fabric.setup_module(net()), fabric.setup_module(net())
    head = fabric.setup_optimizers(torch.optim.SGD(model.module[3].parameters(), lr=0.1))
    x, _ = batches()[0]

    def step(*optimizers):
        fabric.backward((model(x) - teacher(x * 2).detach()).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step(head)
    before = model.module[0].weight.detach().clone()
    body = fabric.setup_optimizers(torch.optim.SGD(model.module[0].parameters(), lr=0.1))
    step(head, body)
    assert not torch.equal(before, model.module[0].weight)
    assert fabric.strategy.precision.session.stats().steps == 3
    late = net()
    with pytest.raises(StateError, match="a model is set up for training after the first step"):
        fabric.setup(late, torch.optim.SGD(late.parameters(), lr=0.1))


def test_what_tells_the_plugin_of_optimizers_ends_with_it():
    """Of two plugins each is told of its own, the first to end leaves the other's, and the last puts torch's back."""
    gc.collect()  # what other tests have left
    plain = vars(Strategy)["setup_optimizer"]
    fabrics = [fabric_of("O1,dtype=bfloat16") for _ in range(2)]
    models = [fabric.setup_module(net()) for fabric in fabrics]
    assert vars(Strategy)["setup_optimizer"] is not plain
    fabrics[0].strategy.precision.teardown()
    optimizer = fabrics[1].setup_optimizers(torch.optim.SGD(models[1].parameters(), lr=0.1))
    assert fabrics[0].strategy.precision.session is None
    assert weights_of(fabrics[1].strategy.precision.session).optimizers == [optimizer.optimizer]
    del fabrics, models, optimizer  # without a teardown
    gc.collect()
    assert vars(Strategy)["setup_optimizer"] is plain


class Marked(nn.Module):
    """A module whose step is no forward pass, and which has a weight of its own."""

    def __init__(self):
        super().__init__()
        self.net, self.gain, self.seen = net(), nn.Parameter(torch.ones(8)), set()
        self.net[0].register_forward_hook(lambda _, __, out: self.seen.add(out.dtype))

    def training_step(self, batch, batch_idx):
        return loss_of(self.net(batch[0] * self.gain), batch[1])


class Module(Marked, L.LightningModule):
    """The same, of Lightning's, driven by hand."""


@pytest.mark.parametrize("module_class", [Marked, Module])
def test_steps_that_are_no_forward_pass_run_low_and_return_fp32(module_class):
    """On one device Fabric calls them on the model itself, and asks for no region."""
    losses = {}
    for policy in (None, "O1,dtype=bfloat16", "O2,dtype=bfloat16"):
        fabric, module = fabric_of(policy), module_class()
        model, optimizer = fabric.setup(module, OPTIMIZERS["torch"](module.parameters()))
        if module_class is Marked:
            model.mark_forward_method("training_step")
        history = []
        for number, batch in enumerate(batches(2)):
            loss = model.training_step(batch, number)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())
        losses[policy] = sum(history[-4:])
        assert loss.dtype == torch.float32
        assert module.seen == {torch.bfloat16 if policy else torch.float32}
    assert losses == pytest.approx(dict.fromkeys(losses, losses[None]), rel=0.01)
    assert module.net[0].weight.hi.dtype == torch.bfloat16
    kept = model.state_dict()
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    fabric.strategy.precision.teardown()
    assert all(torch.equal(kept[name], tensor) for name, tensor in module.named_parameters())


def test_copies_and_averages_are_of_fp32_values(tmp_path):
    run = Run("O2,dtype=bfloat16", "mezzo")
    averaged, seen = AveragedModel(run.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)), []
    for batch in batches():
        run.train([batch], every=1)
        averaged.update_parameters(run.model.module)
        seen.append(flat(run.model.state_dict().values()).double())
    expected = seen[0]
    for weights in seen[1:]:
        expected = 0.9 * expected + 0.1 * weights
    result = flat(averaged.module.parameters())
    assert (result - expected).abs().max() < 16 * torch.finfo(torch.float32).eps * expected.abs().max()
    torch.save(run.model.module, tmp_path / "model.pt")
    for copied in (copy.deepcopy(run.model.module), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert not any(module._forward_pre_hooks or "__deepcopy__" in vars(module) for module in copied.modules())
        assert torch.equal(flat(copied.parameters()).double(), seen[-1])
        assert copied(batches()[0][0]).dtype == torch.float32
