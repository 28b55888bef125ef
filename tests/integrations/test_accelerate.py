"""`attach` in a program for Accelerate: losses like FP32 with low kernels, and all that an Accelerator does besides."""

import copy
import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo.tensors import tensors

from ..support.products import Products

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
from accelerate.tracking import GeneralTracker, on_main_process  # noqa: E402

from mezzo.integrations.accelerate import attach  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulating", "anew")

POLICIES = [f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]
OPTIMIZERS = {"torch": torch.optim.AdamW, "mezzo": mezzo.optim.AdamW}


@pytest.fixture
def anew():
    """With no trace of an accelerator of before: all of them share one state."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Told(GeneralTracker):
    name, requires_logging_directory = "told", False

    @on_main_process
    def __init__(self):
        super().__init__()
        self.values = []

    @property
    def tracker(self):
        return self.values

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **_):
        self.values.append(values)


class Program:
    """A program for Accelerate, to which one line may be added."""

    def __init__(self, policy=None, optimizer=torch.optim.AdamW, *, lr=0.01, overflow_at=(), **options):
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        self.bare = optimizer(self.module.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.bare, lambda step: 0.9**step)
        self.told = Told()
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=self.told)
        self.accelerator.init_trackers("test")
        self.amp = attach(self.accelerator, self.module, self.bare, policy, **options) if policy else None
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)
        prepared = self.accelerator.prepare(self.module, self.bare, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.overflow_at, self.losses, self.norms, self.rates, self.skipped = set(overflow_at), [], [], [], []

    def epoch(self, clip=lambda accelerator, params: accelerator.clip_grad_norm_(params, 1.0)):
        accelerator = self.accelerator
        for number, (x, y) in enumerate(self.loader):
            with accelerator.accumulate(self.model):
                scores = self.model(x)
                assert scores.dtype == torch.float32
                if number in self.overflow_at:
                    scores.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
                loss = nn.functional.cross_entropy(scores, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.norms.append(clip(accelerator, self.model.parameters()))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if accelerator.sync_gradients:
                self.skipped.append(accelerator.optimizer_step_was_skipped)
                self.rates.append(self.scheduler.get_last_lr()[0])
                accelerator.log({"loss": loss.item()})
        return self

    def whole(self):
        return [*self.module.state_dict().values(), *tensors(list(self.bare.state_dict()["state"].values()))]


@pytest.fixture(scope="module")
def fp32():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return Program().epoch().epoch()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_losses_are_fp32s_and_every_step_is_one(fp32, policy, optimizer):
    program = Program(policy, OPTIMIZERS[optimizer]).epoch().epoch()
    assert sum(program.losses[-4:]) == pytest.approx(sum(fp32.losses[-4:]), rel=0.01)
    assert torch.stack(program.norms).tolist() == pytest.approx(torch.stack(fp32.norms).tolist(), rel=0.02)
    assert program.rates == fp32.rates
    stats = program.amp.stats()
    assert (stats.steps, stats.skipped) == (8, 0)
    program.amp.close()
    assert {param.dtype for param in program.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("policy", POLICIES)
def test_kernels_run_low(policy):
    """On a device that computes natively; all products of two training steps and an evaluation."""
    program = Program(f"{policy},emulate=false")
    with Products() as products:
        program.epoch()
        with torch.no_grad():
            program.model(torch.ones(2, 8))
    low = policy.partition("=")[2]
    assert products.dtypes == {low: products.dtypes[low]}
    assert products.dtypes[low] >= 8 * (2 + 3) + 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_save_state_goes_on_bit_for_bit(tmp_path, policy, optimizer):
    straight = Program(policy, OPTIMIZERS[optimizer], overflow_at=[4]).epoch()
    straight.accelerator.save_state(tmp_path)
    straight.epoch()
    other = Program(policy, OPTIMIZERS[optimizer], overflow_at=[4])
    with torch.no_grad():
        for param in other.module.parameters():
            param.add_(1.0)
    other.accelerator.load_state(tmp_path)
    other.epoch()
    assert other.losses == straight.losses[8:]
    assert other.rates == straight.rates[4:]
    assert other.amp.metrics() == straight.amp.metrics()
    assert all(map(torch.equal, straight.whole(), other.whole()))


@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=float16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_writes_nothing_holds_the_scheduler_and_is_logged(policy, optimizer):
    program = Program(policy, OPTIMIZERS[optimizer], overflow_at=[2]).epoch()
    assert program.skipped == [False, True, False, False]
    assert program.rates == [0.01 * 0.9**steps for steps in (1, 1, 2, 3)]
    assert [each["mezzo/scale"] for each in program.told.values] == [65536.0, 32768.0, 32768.0, 32768.0]
    assert [each["mezzo/skipped"] for each in program.told.values] == [0, 1, 1, 1]
    assert bool(program.amp.last_step.skipped) is False


@pytest.mark.parametrize("kind", ["norm", "value"])
@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=float16"])
def test_clipping_is_of_unscaled_gradients(policy, kind):
    """By so little that every step is decided by it: SGD's weights are FP32's, within rounding of the gradients."""

    def clip(accelerator, params):
        return getattr(accelerator, f"clip_grad_{kind}_")(params, 1e-3)

    start = nn.utils.parameters_to_vector(Program().module.parameters())
    moved = []
    for given in (None, policy):
        program = Program(given, torch.optim.SGD, lr=1.0).epoch(clip)
        if program.amp is not None:
            program.amp.close()
        moved.append(nn.utils.parameters_to_vector(program.module.parameters()) - start)
    assert (moved[1] - moved[0]).norm() < 0.02 * moved[0].norm()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_saved_is_fp32(tmp_path, optimizer):
    program = Program("O2,dtype=bfloat16", OPTIMIZERS[optimizer]).epoch()
    copied = copy.deepcopy(program.module)
    program.accelerator.save_model(program.model, tmp_path)
    saved = accelerate.utils.load_state_dict(str(tmp_path / "model.safetensors"))
    assert program.module[0].weight.dtype == torch.bfloat16
    program.amp.close()
    for name, param in program.module.named_parameters():
        assert torch.equal(saved[name], param)
        assert torch.equal(copied.get_parameter(name), param)


def test_accelerators_own_region():
    program = Program("O1,dtype=bfloat16")
    with program.accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        with program.accelerator.autocast(accelerate.utils.AutocastKwargs(enabled=False)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("policy, within", [("O0", 0.0), ("O1,dtype=bfloat16", 0.02)])
def test_lbfgs_evaluates_its_closure_again(policy, within):
    def trained(policy):
        program, losses = Program(policy, partial(torch.optim.LBFGS, max_iter=3), lr=0.1), []
        x, y = next(iter(program.loader))

        def closure():
            program.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(program.model(x), y)
            program.accelerator.backward(loss * 2)
            losses.append(loss.item())
            return loss

        program.optimizer.step(closure)
        return losses

    found, expected = trained(policy), trained(None)
    assert len(found) == len(expected) > 2
    assert found == pytest.approx(expected, rel=within, abs=0.0)


NAMES = ("accumulates", "splits", "ranks", "with_optimizer", "adjusts")
SETTINGS = [
    dict(zip(NAMES, each, strict=True)) | {"kind": ("lambda", "cycle")[number % 2]}
    for number, each in enumerate(product((1, 2), (False, True), (1, 2), (True, False), (True, False)))
]
OVERFLOWS = [{0}, {3}, {2, 3, 6}, {11}, {0, 1, 2, 3, 4, 5}]


def rates(optimizer, settings, overflow_at, policy=None):
    """Return the learning rate and whether Accelerate knows of a skip after each call of a scheduler.

    Without a policy Accelerate's own fp16: torch's scaler in its place, with an optimizer whose kernel does not skip.
    """
    state = accelerate.state.AcceleratorState
    state._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, step_scheduler_with_optimizer=settings["with_optimizer"],
        dataloader_config=accelerate.DataLoaderConfiguration(split_batches=settings["splits"]),
        gradient_accumulation_plugin=accelerate.utils.GradientAccumulationPlugin(
            settings["accumulates"], adjust_scheduler=settings["adjusts"], sync_with_dataloader=False
        ),
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    bare = optimizer(model.parameters())
    if settings["kind"] == "lambda":
        scheduler = torch.optim.lr_scheduler.LambdaLR(bare, lambda step: 0.5**step)
    else:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(bare, max_lr=1.0, total_steps=16, cycle_momentum=False)
    apart = torch.optim.lr_scheduler.LambdaLR(optimizer([nn.Parameter(torch.ones(1))]), lambda step: 0.5**step)
    if policy is None:
        accelerator.scaler = torch.amp.GradScaler("cpu")
    else:
        attach(accelerator, model, bare, policy)
    model, wrapped, scheduler = accelerator.prepare(model, bare, scheduler)
    found = []
    with state_of_ranks(settings["ranks"]):
        for number in range(12):
            with accelerator.accumulate(model):
                output = model(torch.ones(2, 4))
                if number in overflow_at:
                    output.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
                accelerator.backward(output.float().mean() / 64)  # which FP16 holds 65,536 times
                wrapped.step()
                scheduler.step()
                apart.step()
                wrapped.zero_grad()
            skipped = accelerator.optimizer_step_was_skipped
            found.append((scheduler.get_last_lr(), apart.get_last_lr(), skipped, scheduler.scheduler._step_count))
    return found


@contextmanager
def state_of_ranks(number):
    """Have Accelerate count so many processes: what its schedulers alone ask for here."""
    shared = accelerate.state.PartialState._shared_state
    before, shared["num_processes"] = shared["num_processes"], number
    try:
        yield
    finally:
        shared["num_processes"] = before


@pytest.fixture(scope="module")
def plain_rates():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        plain = partial(torch.optim.AdamW, lr=0.1, foreach=True)
        return [rates(plain, settings, OVERFLOWS[number % 5]) for number, settings in enumerate(SETTINGS)]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.AdamW, lr=0.1, foreach=True),
        partial(torch.optim.AdamW, lr=0.1, fused=True),
        partial(mezzo.optim.AdamW, lr=0.1),
    ],
    ids=["torch", "fused", "mezzo"],
)
def test_schedulers_move_as_under_accelerates_own_scaler(plain_rates, optimizer):
    """Whether they step with the optimizer or by themselves, and whether or not its kernel skips by itself."""
    for number, settings in enumerate(SETTINGS):
        found = rates(optimizer, settings, OVERFLOWS[number % 5], "O1,dtype=float16")
        assert found == plain_rates[number], (settings, OVERFLOWS[number % 5])
        assert any(skipped for *_, skipped, _ in found)


def test_gradients_of_what_no_optimizer_has_are_unscaled():
    def gradients(policy):
        torch.manual_seed(0)
        model, probe = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.zeros(4, requires_grad=True)
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        if policy is not None:
            attach(accelerator, model, optimizer, policy)
        model, _ = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(2, 4) + probe).square().mean())
        return [each.grad.float().norm().item() for each in (probe, *model.parameters())]

    assert gradients("O1,dtype=float16") == pytest.approx(gradients(None), rel=0.01)


def test_two_optimizers_of_one_session():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    accelerator = accelerate.Accelerator(cpu=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    before = [each.weight.detach().clone() for each in (first, second)]
    amp = attach(accelerator, [first, second], optimizers, "O1,dtype=float16")
    one, two, *optimizers = accelerator.prepare(first, second, *optimizers)
    accelerator.backward(two(one(torch.ones(3, 4))).mean() / 8)
    optimizers[0].step()
    assert not torch.equal(first.weight, before[0])
    assert torch.equal(second.weight, before[1])
    optimizers[1].step()
    assert not torch.equal(second.weight, before[1])
    amp.close()


@pytest.mark.parametrize("policy", ["O1,dtype=float16,loss_scale=128", "O2,dtype=float16,loss_scale=128"])
def test_gradients_may_be_cleared_before_the_next_loss_only(policy):
    """As a GAN's loop does: the second's loss adds to what the step of the first has left."""

    def trained(policy):
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4), nn.Linear(4, 1)
        accelerator = accelerate.Accelerator(cpu=True)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
        if policy is not None:
            attach(accelerator, [first, second], optimizers, policy)
        one, two, *optimizers = accelerator.prepare(first, second, *optimizers)
        losses, x = [], torch.randn(8, 4)
        for sign in (1, -1) * 3:
            for optimizer in optimizers[::sign]:
                optimizer.zero_grad()
                loss = (two(one(x)) - sign).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert trained(policy) == pytest.approx(trained(None), rel=0.01)


def test_after_close_all_is_as_it_was():
    program = Program()
    names, forward = set(vars(program.accelerator)), program.module.forward
    program = Program("O2,dtype=float16").epoch()
    program.amp.close()
    program.amp.close()
    assert set(vars(program.accelerator)) == names
    assert program.accelerator.scaler is None
    assert program.module.forward.__func__ is forward.__func__
    assert not any(each._forward_pre_hooks or each._state_dict_hooks for each in program.module.modules())
    program.accelerator.backward(program.model(torch.ones(2, 8)).sum())
    before = program.module[0].weight.detach().clone()
    program.optimizer.step()
    assert not torch.equal(program.module[0].weight, before)
    assert "mezzo/scale" not in (program.accelerator.log({"loss": 1.0}), program.told.values[-1])[1]


@pytest.mark.parametrize("places", [True, False])
def test_models_are_placed_before_masters_are_made(places):
    class Told(nn.Linear):
        def to(self, device):
            told.append((device, self.weight.dtype))
            return super().to(device)

    told, model = [], Told(2, 1)
    accelerator = accelerate.Accelerator(cpu=True, device_placement=places)
    amp = attach(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), "O2,dtype=bfloat16")
    assert told == [(accelerator.device, torch.float32)] * places
    amp.close()


@pytest.mark.slow  # two processes that import Accelerate, and train eight times
def test_two_ranks_step_together(tmp_path):
    """An overflow on one is both's; weights are equal bit for bit, and a checkpoint goes on so."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("accelerate_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, program, tmp_path], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    for policy, found in first.items():
        assert found["weights"] == second[policy]["weights"], policy
        assert found["again"] == found["weights"], policy
        assert (found["steps"], found["skipped"]) == (8, 1), policy
        computes = "float32" if "O0" in policy else re.search("float16|bfloat16", policy)[0]
        assert found["seen"] == [f"torch.{computes}"], policy  # what the second product reads
        assert sum(found["losses"][-4:]) == pytest.approx(sum(first["O0"]["losses"][-4:]), rel=0.02), policy
