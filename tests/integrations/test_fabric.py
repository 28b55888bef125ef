"""`MezzoFabric` in place of Lightning's Fabric: FP32's losses with low kernels, and all that a program does with it."""

import copy
import json
import os
import subprocess
import sys
from csv import DictReader
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mezzo
from mezzo.errors import NumericsError, PolicyError, StateError, UnsupportedError
from mezzo.integrations.trainer_and_fabric import check_gathers
from mezzo.tensors import dtype_name, tensors

from ..support.products import Products

L = pytest.importorskip("lightning", reason="needs lightning")
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.loggers import CSVLogger  # noqa: E402

from mezzo.integrations.lightning import MezzoFabric, MezzoPrecision  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulating")

POLICIES = [f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]
OPTIMIZERS = {
    "torch": partial(torch.optim.AdamW, lr=0.01),
    "mezzo": partial(mezzo.optim.AdamW, lr=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.1, foreach=True),
}
BOTH = ["torch", "mezzo"]
HERE = {"accelerator": "cpu", "devices": 1}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batches(epochs=2):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return [(part, part[:, :4].argmax(1)) for part in x.split(8)] * epochs


class Run:
    """A program of Fabric's own kind: accumulation over two batches, clipping, a scheduler."""

    def __init__(self, fabric, optimizer="torch", overflow_at=(), apart=False):
        self.fabric, self.overflow_at = fabric, overflow_at
        if apart:
            self.model = fabric.setup_module(net())
            self.optimizer = fabric.setup_optimizers(OPTIMIZERS[optimizer](self.model.parameters()))
            self.scheduler = None
        else:
            model = net()
            raw = OPTIMIZERS[optimizer](model.parameters())
            decay = torch.optim.lr_scheduler.LambdaLR(raw, lambda step: 0.9**step)
            self.model, self.optimizer, self.scheduler = fabric.setup(model, raw, scheduler=decay)
        self.losses, self.rates, self.dtypes = [], [], set()

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
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
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
    return {
        (kind, apart): Run(Fabric(**HERE), kind, apart=apart).train(batches()).losses
        for kind in ("torch", "SGD")
        for apart in (False, True)
    }


@pytest.mark.parametrize(
    "policy, optimizer",
    # The second moments of torch's Adam underflow where they are FP16.
    [
        *product(["O0", *POLICIES, "O3,dtype=bfloat16"], BOTH),
        ("O3,dtype=float16", "SGD"),
        ("O3,dtype=float16", "mezzo"),
    ],
)
def test_losses_are_fp32s_and_every_step_is_taken(fp32, policy, optimizer):
    for apart in (False, True):
        run = Run(MezzoFabric(policy, **HERE), optimizer, apart=apart).train(batches())
        reference = fp32["SGD" if optimizer == "SGD" else "torch", apart]
        assert sum(run.losses[-4:]) == pytest.approx(sum(reference[-4:]), rel=0.01)
        stats = run.fabric.session.stats()
        assert (stats.steps, stats.skipped) == (8, 0)
        assert run.dtypes == {"float32"}


@pytest.mark.parametrize("policy", [*POLICIES, "O3,dtype=bfloat16"])
def test_kernels_run_low(policy):
    run, products = Run(MezzoFabric(f"{policy},emulate=false", **HERE)), Products()
    with products:
        run.train(batches()[:2])
    low = policy.partition("=")[2]
    assert products.dtypes == {low: 2 * (2 + 3)}


@pytest.mark.parametrize("optimizer", BOTH)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_run_goes_on_bit_for_bit(tmp_path, policy, optimizer):
    given = batches()
    straight = Run(MezzoFabric(policy, **HERE), optimizer, overflow_at=[3]).train(given[:8])
    straight.fabric.save(tmp_path / "half.ckpt", straight.state() | {"scheduler": straight.scheduler})
    straight.train(given[8:])
    again = Run(MezzoFabric(policy, **HERE), optimizer)
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
    assert again.fabric.session.metrics() == straight.fabric.session.metrics()
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
    plain = Run(Fabric(**HERE)).train(batches()[:4])
    plain.fabric.save(tmp_path / "plain.ckpt", plain.state())
    ours = Run(MezzoFabric("O2,dtype=bfloat16", **HERE))
    ours.fabric.load(tmp_path / "plain.ckpt", ours.state())
    loaded = ours.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in plain.model.state_dict().items())
    ours.train(batches()[4:8])
    ours.fabric.save(tmp_path / "ours.ckpt", ours.state())
    assert set(plain.fabric.load(tmp_path / "ours.ckpt", plain.state())) == {"mezzo"}
    ours.fabric.close()
    assert all(map(torch.equal, plain.model.parameters(), ours.model.parameters()))
    evaluated = Run(MezzoFabric("O1,dtype=float16", **HERE))
    evaluated.fabric.load(tmp_path / "ours.ckpt", {"model": evaluated.model})
    assert evaluated.fabric.session.stats().steps == 0


def test_a_skipped_step_writes_nothing_holds_the_scheduler_and_is_logged(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    run = Run(MezzoFabric("O1,dtype=float16", loggers=logger, **HERE), overflow_at=[3])
    run.train(batches()[:2])
    before = [param.clone() for param in run.model.parameters()]
    run.fabric.log("loss", 1.0, 0)
    run.overflow_at = [1]
    run.train(batches()[:2])
    assert all(map(torch.equal, before, run.model.parameters()))
    assert run.fabric.session.last_step.skipped
    run.overflow_at = []
    run.train(batches()[:2])
    run.fabric.log_dict({"loss": 2.0}, 1)
    assert run.rates == pytest.approx([0.009, 0.009, 0.0081])
    assert set(run.scheduler.state_dict()) == set(torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), lambda _: 1.0
    ).state_dict())  # fmt: skip
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(DictReader(file))
    assert [(row["loss"], row["mezzo/scale"], row["mezzo/skipped"]) for row in rows] == [
        ("1.0", "65536.0", "0"), ("2.0", "32768.0", "1"),
    ]  # fmt: skip


def test_schedulers_go_on_where_they_are_not_held():
    run = Run(MezzoFabric("O1,dtype=float16", hold_schedulers=False, **HERE), overflow_at=[1])
    assert run.train(batches()[:4]).rates == pytest.approx([0.009, 0.0081])


def test_an_overflow_is_explained_in_the_log(tmp_path, caplog):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    run = Run(MezzoFabric("O1,dtype=float16", on_overflow="explain", loggers=logger, **HERE))
    run.train([(x * 1e5, y) for x, y in batches()[:2]])
    run.fabric.log("loss", 1.0, 3)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        (text,) = [row["mezzo/overflow"] for row in DictReader(file) if row["mezzo/overflow"]]
    assert "forward pass of 0 linear" in text
    assert text in caplog.text
    assert "mezzo/overflow" not in run.fabric.session.metrics()


def test_an_overflow_can_be_an_error():
    run = Run(MezzoFabric("O1,dtype=float16", on_overflow="raise", **HERE), overflow_at=[1])
    with pytest.raises(NumericsError):
        run.train(batches()[:2])
    run = Run(MezzoFabric("O1,dtype=float16", **HERE), overflow_at=[1])
    run.fabric.clip_gradients = lambda *args, **kwargs: MezzoFabric.clip_gradients(
        run.fabric, *args, error_if_nonfinite=True, **kwargs
    )
    with pytest.raises(RuntimeError, match="non-finite"):
        run.train(batches()[:2])


@pytest.mark.parametrize("clips", [{"max_norm": 1e-3}, {"clip_val": 1e-4}])
@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=float16"])
def test_clipping_is_of_unscaled_gradients(policy, clips):
    def moved(fabric):
        model = net()
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        x, y = batches()[0]
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        norm = fabric.clip_gradients(model, optimizer, **clips)
        optimizer.step()
        weights = [*model.state_dict().values()]
        return nn.utils.parameters_to_vector(weights) - start, norm

    (found, norm), (expected, reference) = moved(MezzoFabric(policy, **HERE)), moved(Fabric(**HERE))
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

    fabric = MezzoFabric(policy, **HERE)
    assert trained(fabric) == pytest.approx(trained(Fabric(**HERE)), rel=1e-6 if policy == "O0" else 0.02)
    assert (fabric.session.stats().steps, fabric.session.stats().skipped) == (12, 0)


def test_the_region_by_itself():
    fabric = MezzoFabric("O1,dtype=bfloat16", **HERE)
    x = torch.ones(2, 8)
    with fabric.autocast():
        assert (x @ x.T).dtype == torch.bfloat16
    model = fabric.setup_module(net())
    with fabric.autocast():
        assert (x @ x.T).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32
    assert fabric.session is None
    fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with fabric.autocast():
        assert (x @ x.T).dtype == torch.bfloat16
    assert fabric.session is not None


def test_a_model_without_an_optimizer_and_an_optimizer_that_comes_later():
    fabric = MezzoFabric("O2,dtype=bfloat16", **HERE)
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
    assert fabric.session.stats().steps == 3


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

    assert trained(MezzoFabric("O0", **HERE)) == trained(Fabric(**HERE))
    assert trained(MezzoFabric("O1,dtype=bfloat16", **HERE)) == pytest.approx(trained(Fabric(**HERE)), rel=0.02)


def test_torch_s_distributed_checkpoint_may_let_an_optimizer_make_its_state():
    """By a step with gradients and learning rates of zero, which no loss was scaled for."""
    run = Run(MezzoFabric("O1,dtype=float16", **HERE))
    run.model(torch.ones(1, 8))
    before = [param.clone() for param in run.model.parameters()]
    state = get_optimizer_state_dict(run.model.module, run.optimizer.optimizer)["state"]
    assert set(state) == {name for name, _ in run.model.module.named_parameters()}
    assert all(map(torch.equal, before, run.model.parameters()))
    next(run.model.parameters()).grad = torch.ones(32, 8)
    with pytest.raises(StateError, match="made by a backward pass whose loss was not scaled"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.train(batches()[:2])
    assert run.fabric.session.stats().steps == 1


def test_parameters_of_no_model_train_too():
    """A criterion's; they stay FP32."""
    fabric, model = MezzoFabric("O2,dtype=float16", **HERE), net()
    margin = nn.Parameter(torch.ones(4))
    model, optimizer = fabric.setup(model, torch.optim.SGD([*model.parameters(), margin], lr=0.1))
    x, y = batches()[0]
    fabric.backward(nn.functional.cross_entropy(model(x) * margin, y))
    optimizer.step()
    assert not torch.equal(margin, torch.ones(4))
    assert margin.dtype == torch.float32


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


def test_a_module_of_lightnings(tmp_path):
    losses = {}
    for policy in (None, "O1,dtype=float16", "O2,dtype=bfloat16"):
        fabric = Fabric(**HERE) if policy is None else MezzoFabric(policy, **HERE)
        module = Module()
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
    fabric.close()
    assert all(torch.equal(kept[name], tensor) for name, tensor in module.named_parameters())


def test_closed_it_trains_in_fp32_as_fabric_does():
    run = Run(MezzoFabric("O2,dtype=float16", **HERE), overflow_at=[1]).train(batches()[:4])
    masters = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.fabric.close()
    run.fabric.close()
    assert run.fabric.session is None
    assert type(run.scheduler) is torch.optim.lr_scheduler.LambdaLR
    assert all(torch.equal(masters[name], param) for name, param in run.model.module.named_parameters())
    assert not any(module._forward_pre_hooks for module in run.model.modules())
    products = Products()
    run.overflow_at = []
    with products:
        run.train(batches()[4:8])
    assert set(products.dtypes) == {"float32"}
    assert any(not torch.equal(masters[name], param) for name, param in run.model.module.named_parameters())
    assert Run(run.fabric).train(batches()[:2]).losses == Run(Fabric(**HERE)).train(batches()[:2]).losses


@pytest.mark.parametrize(
    "policy, kind", [("O1", "torch"), ("O2", "torch"), ("O2,dtype=bfloat16", "mezzo"), ("O3", "SGD")]
)
def test_copies_are_plain_fp32_models(policy, kind, tmp_path):
    fabric = MezzoFabric(policy, **HERE)
    run = Run(fabric, kind)
    kept = {name: tensor.clone() for name, tensor in net().state_dict().items()}
    for _ in range(2):  # before the session, and under it
        for original in (run.model, run.model.module):
            copied = copy.deepcopy(original)
            assert not any(module._forward_pre_hooks or "__deepcopy__" in vars(module) for module in copied.modules())
            assert all(torch.equal(value, kept[name]) for name, value in copied.named_parameters())
            assert copied(batches()[0][0]).dtype == torch.float32
        torch.save(run.model.module, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert all(torch.equal(value, kept[name]) for name, value in loaded.named_parameters())
        copy.deepcopy(run.optimizer)  # which shares hooks with what it wraps
        run.train(batches()[:2])
        kept = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    assert fabric.session.stats().steps == 2
    fabric.close()
    assert "__deepcopy__" not in vars(run.model.module)


def test_a_module_of_lightnings_is_copied_with_its_fabric():
    fabric, module = MezzoFabric("O2,dtype=bfloat16", **HERE), Module()
    model, _ = fabric.setup(module, module.configure_optimizers())
    fabric.backward(model.training_step(batches()[0], 0))
    copied = copy.deepcopy(module)
    assert {param.dtype for param in copied.parameters()} == {torch.float32}


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16", "O2,dtype=bfloat16", "O3,dtype=bfloat16"])
@pytest.mark.parametrize("kind", BOTH)
def test_averages_are_of_fp32_values(policy, kind):
    fabric = MezzoFabric(policy, **HERE)
    run = Run(fabric, kind)
    averaged = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    seen = []
    for batch in batches():
        run.train([batch], every=1)
        averaged.update_parameters(run.model)
        seen.append(nn.utils.parameters_to_vector(run.model.state_dict().values()).double())
    expected = seen[0]
    for each in seen[1:]:
        expected = 0.9 * expected + 0.1 * each
    found = nn.utils.parameters_to_vector(averaged.module.parameters())
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 16 * torch.finfo(torch.float32).eps * expected.abs().max()


# Refusals -----------------------------------------------------------------------------------------------------------


def test_precision_set_besides_is_refused():
    with pytest.raises(ValueError, match="Received both `precision=16-mixed`"):
        MezzoFabric("O1", precision="16-mixed", **HERE)
    with pytest.raises(ValueError, match="multiple values for Precision"):
        MezzoFabric("O1", plugins=MezzoPrecision("O1"), **HERE)


def test_strategies_that_own_precision_are_refused():
    from lightning.fabric.strategies import DataParallelStrategy, FSDPStrategy

    with pytest.raises(UnsupportedError, match=r'Fabric runs with strategy="dp"[\s\S]*strategy="ddp"'):
        MezzoFabric("O1", strategy=DataParallelStrategy(), **HERE)
    with pytest.raises(TypeError, match="can only work with the `FSDPPrecision` plugin"):
        FSDPStrategy(precision=MezzoFabric("O1", **HERE)._plugin)


def test_the_trainers_plugin_is_refused_in_fabric():
    fabric = Fabric(plugins=MezzoPrecision("O1"), **HERE)
    with pytest.raises(PolicyError, match=r"Fabric tells a plugin of no optimizers[\s\S]*fabric = MezzoFabric\(policy"):
        fabric.setup_module(net())


def test_what_cannot_be_meant():
    with pytest.raises(PolicyError, match="unknown level 'O4'"):
        MezzoFabric("O4", **HERE)
    with pytest.raises(PolicyError, match=r"2 problems[\s\S]*unknown on_overflow 'halt'[\s\S]*hold_schedulers is 1"):
        MezzoFabric("O1", on_overflow="halt", hold_schedulers=1, **HERE)
    fabric = MezzoFabric("O1", **HERE)
    with pytest.raises(StateError, match="a backward pass begins without an optimizer"):
        fabric.backward(torch.ones((), requires_grad=True))
    run = Run(fabric)
    loss = run.model(torch.ones(1, 8)).sum()
    with pytest.raises(PolicyError, match="a backward pass takes one loss here"):
        fabric.backward(loss, torch.ones(()))
    with pytest.raises(PolicyError, match="the state has an entry 'mezzo'"):
        fabric.save("nowhere", {"mezzo": 1})


def test_a_model_that_comes_too_late_stays_as_it_was():
    run = Run(MezzoFabric("O2,dtype=bfloat16", **HERE)).train(batches()[:2])
    other = net()
    with pytest.raises(StateError, match="a model is set up for training after the first forward pass"):
        run.fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    late = run.fabric.setup_module(other)
    with pytest.raises(PolicyError):
        run.fabric.setup_optimizers(torch.optim.SGD(late.parameters(), lr=0.1))
    run.train(batches()[:2])
    failing = MezzoFabric("O2,dtype=bfloat16", **HERE)
    with pytest.raises(ValueError, match="passed only once"):
        failing.setup(run.model)
    double = net().double()
    with pytest.raises(UnsupportedError):
        failing.setup(double, torch.optim.SGD(double.parameters(), lr=0.1))
    assert {param.dtype for param in double.parameters()} == {torch.float64}


@pytest.mark.slow  # two processes that import Lightning, and train sixteen times
def test_two_ranks_step_together(tmp_path):
    """In DDP and with shards: an overflow on one is both's; weights are equal bit for bit; a saved run goes on."""
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
        assert sum(found["losses"][-4:]) == pytest.approx(sum(first["O0 None"]["losses"][-4:]), rel=0.01), name


def test_remainders_of_shards_are_not_gathered_into_one_file():
    """Refused before the strategy asks for it; elsewhere they are saved as they are."""

    class Gathering:
        _save_distributed_checkpoint = False

    weight = nn.Parameter(torch.ones(4))
    optimizer = mezzo.optim.SGD([weight], lr=0.1)
    check_gathers(Gathering(), [optimizer])
    optimizer.state[weight]["remainder"] = torch.zeros(4, dtype=torch.int16)
    check_gathers(object(), [optimizer])
    with pytest.raises(UnsupportedError, match=r"cannot be gathered into one file[\s\S]*Gathering[\s\S]*a folder"):
        check_gathers(Gathering(), [optimizer])
