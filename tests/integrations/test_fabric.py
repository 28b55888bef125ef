"""`MezzoPrecision` in Lightning's Fabric: FP32's losses with low kernels, and all that a program does with it."""

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mezzo
from mezzo.errors import NumericsError, StateError
from mezzo.tensors import dtype_name, tensors

from ..support.products import Products

L = pytest.importorskip("lightning", reason="needs lightning")
from lightning.fabric import Fabric  # noqa: E402

from mezzo.integrations.lightning import MezzoPrecision  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulating")

POLICIES = [f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]
OPTIMIZERS = {"torch": partial(torch.optim.AdamW, lr=0.01), "mezzo": partial(mezzo.optim.AdamW, lr=0.01)}


def fabric_of(policy=None, **options):
    """A Fabric with the plugin; without a policy a plain one."""
    plugins = None if policy is None else MezzoPrecision(policy, **options)
    return Fabric(accelerator="cpu", devices=1, plugins=plugins)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batches(epochs=2):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return [(part, part[:, :4].argmax(1)) for part in x.split(8)] * epochs


class Run:
    """A program of Fabric's own kind: accumulation over two batches, clipping, a scheduler."""

    def __init__(self, policy=None, optimizer="torch", overflow_at=(), apart=False, **options):
        self.fabric, self.overflow_at = fabric_of(policy, **options), overflow_at
        if apart:
            self.model = self.fabric.setup_module(net())
            self.optimizer = self.fabric.setup_optimizers(OPTIMIZERS[optimizer](self.model.parameters()))
            self.scheduler = None
        else:
            model = net()
            raw = OPTIMIZERS[optimizer](model.parameters())
            decay = torch.optim.lr_scheduler.LambdaLR(raw, lambda step: 0.9**step)
            self.model, self.optimizer, self.scheduler = self.fabric.setup(model, raw, scheduler=decay)
        self.plugin, self.losses, self.rates, self.dtypes = self.fabric.strategy.precision, [], [], set()

    def train(self, given, every=2):
        for number, (x, y) in enumerate(given, start=1):
            with self.fabric.no_backward_sync(self.model, enabled=number % every != 0):
                scores = self.model(x)
                if number in self.overflow_at:
                    scores.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
                loss = nn.functional.cross_entropy(scores, y)
                self.fabric.backward(loss / every)
            self.losses.append(loss.item())
            self.dtypes.add(dtype_name(scores.dtype))
            if number % every == 0:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0, error_if_nonfinite=False)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.scheduler is not None:
                    self.scheduler.step()
                self.rates.append(self.optimizer.param_groups[0]["lr"])
        return self

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "epoch": 1}


@pytest.fixture(scope="module")
def fp32():
    return {apart: Run(apart=apart).train(batches()).losses for apart in (False, True)}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["O0", *POLICIES])
def test_losses_are_fp32s_and_every_step_is_taken(fp32, policy, optimizer, apart):
    run = Run(policy, optimizer, apart=apart).train(batches())
    assert sum(run.losses[-4:]) == pytest.approx(sum(fp32[apart][-4:]), rel=1e-5 if policy == "O0" else 0.01)
    stats = run.plugin.session.stats()
    assert (stats.steps, stats.skipped) == (8, 0)
    assert run.dtypes == {"float32"}


@pytest.mark.parametrize("policy", [*POLICIES, "O3,dtype=bfloat16"])
def test_kernels_run_low(policy):
    run, products = Run(f"{policy},emulate=false"), Products()
    with products:
        run.train(batches()[:2])
    low = policy.partition("=")[2]
    assert products.dtypes == {low: 2 * (2 + 3)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_run_goes_on_bit_for_bit(tmp_path, policy, optimizer):
    given = batches()
    straight = Run(policy, optimizer, overflow_at=[3]).train(given[:8])
    straight.fabric.save(tmp_path / "half.ckpt", straight.state() | {"scheduler": straight.scheduler})
    straight.train(given[8:])
    again = Run(policy, optimizer)
    with torch.no_grad():
        for param in again.model.parameters():
            param.add_(1.0)
    state = again.state() | {"epoch": 0, "scheduler": again.scheduler}
    assert again.fabric.load(tmp_path / "half.ckpt", state) == {}
    again.overflow_at = straight.overflow_at
    again.train(given[8:])
    assert state["epoch"] == 1
    assert again.losses == straight.losses[8:]
    assert again.rates == straight.rates[4:]
    assert again.plugin.metrics() == straight.plugin.metrics()
    pair = [
        [*each.model.state_dict().values(), *tensors(list(each.optimizer.state_dict()["state"].values()))]
        for each in (straight, again)
    ]
    assert all(map(torch.equal, *pair))

    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    plain = net()
    plain.load_state_dict(saved["model"])
    assert {tensor.dtype for tensor in saved["model"].values()} == {torch.float32}


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
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_writes_nothing_and_holds_the_scheduler(optimizer, holds):
    run = Run("O1,dtype=float16", optimizer, hold_schedulers=holds)
    run.train(batches()[:2])
    before = [param.clone() for param in run.model.parameters()]
    assert run.plugin.metrics() == {"mezzo/scale": 65536.0, "mezzo/skipped": 0}
    run.overflow_at = [1]
    run.train(batches()[:2])
    assert all(map(torch.equal, before, run.model.parameters()))
    assert run.plugin.metrics() == {"mezzo/scale": 32768.0, "mezzo/skipped": 1}
    run.overflow_at = []
    run.train(batches()[:2])
    assert run.rates == pytest.approx([0.009, 0.009, 0.0081] if holds else [0.009, 0.0081, 0.00729])


def test_an_overflow_can_be_an_error():
    with pytest.raises(NumericsError):
        Run("O1,dtype=float16", on_overflow="raise", overflow_at=[1]).train(batches()[:2])


@pytest.mark.parametrize("clips", [{"max_norm": 1e-3}, {"clip_val": 1e-4}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, mezzo.optim.SGD])
@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=float16"])
def test_clipping_is_of_unscaled_gradients(policy, optimizer, clips):
    def moved(fabric, kind):
        model = net()
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        model, optimizer = fabric.setup(model, kind(model.parameters(), lr=1.0))
        x, y = batches()[0]
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        norm = fabric.clip_gradients(model, optimizer, **clips)
        optimizer.step()
        weights = [*model.state_dict().values()]
        return nn.utils.parameters_to_vector(weights) - start, norm

    (found, norm), (expected, reference) = moved(fabric_of(policy), optimizer), moved(fabric_of(), torch.optim.SGD)
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert norm == reference if norm is None else float(norm) == pytest.approx(float(reference), rel=0.01)


@pytest.mark.parametrize("clears_first", [True, False])
@pytest.mark.parametrize("policy", ["O0", *POLICIES])
def test_a_gan_with_two_models_and_optimizers(policy, clears_first):
    """The generator's loss reaches the discriminator, whose gradients of it are cleared before its own."""

    def trained(fabric):
        torch.manual_seed(0)
        made, judge = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        for_made, for_judge = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (made, judge))
        made, for_made = fabric.setup(made, for_made)
        judge, for_judge = fabric.setup(judge, for_judge)
        bce, losses = nn.functional.binary_cross_entropy_with_logits, []
        noise = torch.Generator().manual_seed(1)
        for _ in range(6):
            real = torch.randn(16, 2, generator=noise) + 2.0
            fake = made(torch.randn(16, 4, generator=noise))
            for optimizer, pairs in ((for_judge, [(real, 1.0), (fake.detach(), 0.0)]), (for_made, [(fake, 1.0)])):
                if clears_first:
                    optimizer.zero_grad()
                scores = [(judge(each), label) for each, label in pairs]
                loss = sum(bce(score, torch.full_like(score, label)) for score, label in scores)
                fabric.backward(loss)
                optimizer.step()
                if not clears_first:
                    for_judge.zero_grad()
                    for_made.zero_grad()
                losses.append(loss.item())
        return losses

    fabric = fabric_of(policy)
    assert trained(fabric) == pytest.approx(trained(fabric_of()), rel=1e-6 if policy == "O0" else 0.02)
    stats = fabric.strategy.precision.session.stats()
    assert (stats.steps, stats.skipped) == (12, 0)


def test_gradients_of_what_no_optimizer_has_are_unscaled():
    def gradients(fabric):
        model, probe = net(), torch.zeros(8, requires_grad=True)
        model, _ = fabric.setup(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
        x, y = batches()[0]
        fabric.backward(nn.functional.cross_entropy(model(x + probe), y))
        return [each.grad.float().norm().item() for each in (probe, *model.parameters())]

    assert gradients(fabric_of("O1,dtype=float16")) == pytest.approx(gradients(fabric_of()), rel=0.01)


def test_the_region_by_itself():
    fabric, x = fabric_of("O1,dtype=bfloat16"), torch.ones(2, 8)
    with fabric.autocast():
        assert (x @ x.T).dtype == torch.bfloat16
    model = fabric.setup_module(net())
    with fabric.autocast():
        assert (x @ x.T).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32
    assert fabric.strategy.precision.session is None
    fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
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


def test_a_closure_is_evaluated_as_often_as_in_fp32():
    def trained(fabric):
        model = net()
        model, optimizer = fabric.setup(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
        x, y = batches()[0]
        losses = []

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
        return losses

    assert trained(fabric_of("O0")) == trained(fabric_of())
    assert trained(fabric_of("O1,dtype=bfloat16")) == pytest.approx(trained(fabric_of()), rel=0.02)


class Module(L.LightningModule):
    """Modules of Lightning's are driven by hand: its own parameter, and a step that is no forward pass."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.gain = nn.Parameter(torch.ones(8))
        self.seen = set()

    def training_step(self, batch, batch_idx):
        self.seen.add(dtype_name(batch[0].dtype))
        return nn.functional.cross_entropy(self.net(batch[0] * self.gain).float(), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_a_module_of_lightnings():
    losses = {}
    for policy in (None, "O1,dtype=float16", "O2,dtype=bfloat16"):
        fabric, module = fabric_of(policy), Module()
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        found = []
        for number, batch in enumerate(batches()):
            with fabric.autocast():
                loss = model.training_step(batch, number)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses[policy] = sum(found[-4:])
        assert module.seen == {"float32"}
    assert losses == pytest.approx(dict.fromkeys(losses, losses[None]), rel=0.01)
    assert module.gain.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    kept = model.state_dict()
    fabric.strategy.precision.teardown()
    assert all(torch.equal(kept[name], tensor) for name, tensor in module.named_parameters())


@pytest.mark.parametrize("kind", ["marked", "Lightning's"])
def test_steps_that_are_no_forward_pass_run_low_and_return_fp32(kind):
    """On one device Fabric calls them on the model itself, and asks for no region."""

    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    fabric, module = fabric_of("O1,dtype=bfloat16"), Marked() if kind == "marked" else Module()
    model, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    if kind == "marked":
        model.mark_forward_method("training_step")
    seen = []
    module.net[0].register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    assert model.training_step(batches()[0], 0).dtype == torch.float32
    assert seen == [torch.bfloat16]


def test_torn_down_it_trains_in_fp32_as_fabric_does():
    run = Run("O2,dtype=float16", overflow_at=[1]).train(batches()[:4])
    kept = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.plugin.teardown()
    run.plugin.teardown()
    assert run.plugin.session is None
    assert all(torch.equal(kept[name], param) for name, param in run.model.module.named_parameters())
    assert not any(module._forward_pre_hooks for module in run.model.modules())
    run.overflow_at = []
    with Products() as products:
        run.train(batches()[4:8])
    assert set(products.dtypes) == {"float32"}
    assert any(not torch.equal(kept[name], param) for name, param in run.model.module.named_parameters())


@pytest.mark.parametrize("policy, kind", [("O1", "torch"), ("O2", "torch"), ("O2,dtype=bfloat16", "mezzo")])
def test_copies_are_plain_fp32_models(policy, kind, tmp_path):
    run = Run(policy, kind)
    kept = {name: tensor.clone() for name, tensor in net().state_dict().items()}
    for _ in range(2):
        copied = copy.deepcopy(run.model.module)
        assert not any(module._forward_pre_hooks or "__deepcopy__" in vars(module) for module in copied.modules())
        assert all(torch.equal(value, kept[name]) for name, value in copied.named_parameters())
        assert copied(batches()[0][0]).dtype == torch.float32
        torch.save(run.model.module, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert all(torch.equal(value, kept[name]) for name, value in loaded.named_parameters())
        run.train(batches()[:2])
        kept = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16", "O2,dtype=bfloat16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_averages_are_of_fp32_values(policy, kind):
    run = Run(policy, kind)
    averaged = AveragedModel(run.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    seen = []
    for batch in batches():
        run.train([batch], every=1)
        averaged.update_parameters(run.model.module)
        seen.append(nn.utils.parameters_to_vector(run.model.state_dict().values()).double())
    expected = seen[0]
    for each in seen[1:]:
        expected = 0.9 * expected + 0.1 * each
    found = nn.utils.parameters_to_vector(averaged.module.parameters())
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 16 * torch.finfo(torch.float32).eps * expected.abs().max()


@pytest.mark.slow  # two processes that import Lightning, and train ten times
def test_two_ranks_step_together(tmp_path):
    """An overflow on one is both's; weights are equal bit for bit; a saved run goes on."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("fabric_ranks.py")
    done = subprocess.run(
        [sys.executable, program, tmp_path], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    for name, found in first.items():
        assert found["weights"] == second[name]["weights"], name
        assert (found["steps"], found["skipped"]) == (8, 1), name
        assert found["resumed"] == found["weights"], name
        assert found["metrics"][0] == found["metrics"][1], name
        assert sum(found["losses"][-4:]) == pytest.approx(sum(first["O0"]["losses"][-4:]), rel=0.01), name
