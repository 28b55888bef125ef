"""`attach` in a program for Accelerate: losses like FP32 with low kernels, and all that an Accelerator does besides."""

import copy
from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import mezzo
from mezzo.tensors import tensors

from ..support.products import Products
from .programs import CASES, OPTIMIZERS, assert_alike, batches, dataset, ends, flat, net, overflow

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
from accelerate.tracking import GeneralTracker, on_main_process  # noqa: E402

from mezzo.integrations.accelerate import attach  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulating", "anew")


def forget():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def anew():
    """With no trace of an accelerator of before: all of them share one state."""
    forget()
    yield
    forget()


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

    def __init__(self, policy=None, optimizer=OPTIMIZERS["torch"], *, overflow_at=(), **options):
        self.module, self.tracker = net(), Told()
        self.bare = optimizer(self.module.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.bare, lambda step: 0.9**step)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=self.tracker)
        self.accelerator.init_trackers("test")
        self.amp = attach(self.accelerator, self.module, self.bare, policy, **options) if policy else None
        loader = DataLoader(dataset(), batch_size=8)
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
                    overflow(scores)
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
    forget()
    return Program().epoch().epoch()


@pytest.mark.parametrize("policy, optimizer", CASES[1:3])
def test_losses_are_fp32s_every_step_is_one_and_kernels_are_low(fp32, policy, optimizer):
    program = Program(policy, OPTIMIZERS[optimizer]).epoch().epoch()
    assert sum(program.losses[-4:]) == ends(fp32.losses)
    assert torch.stack(program.norms).tolist() == pytest.approx(torch.stack(fp32.norms).tolist(), rel=0.02)
    assert program.rates == fp32.rates
    stats = program.amp.stats()
    assert (stats.steps, stats.skipped) == (8, 0)
    program.amp.close()
    assert {param.dtype for param in program.module.parameters()} == {torch.float32}
    forget()
    program = Program(f"{policy},emulate=false")  # on a device that computes natively
    with Products() as products:
        program.epoch()
        with torch.no_grad():
            program.model(torch.ones(2, 8))
    assert set(products.dtypes) == {policy.partition("=")[2]}
    assert products.dtypes.total() >= 8 * (2 + 3) + 2


@pytest.mark.parametrize("policy, optimizer", CASES[::3])
def test_save_state_goes_on_bit_for_bit_and_what_is_saved_is_fp32(tmp_path, policy, optimizer):
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
    copied = copy.deepcopy(other.module)
    other.accelerator.save_model(other.model, tmp_path / "whole")
    saved = accelerate.utils.load_state_dict(str(tmp_path / "whole" / "model.safetensors"))
    other.amp.close()
    for name, param in other.module.named_parameters():
        assert torch.equal(saved[name], param)
        assert torch.equal(copied.get_parameter(name), param)


def test_a_skipped_step_writes_nothing_holds_the_scheduler_and_is_logged():
    for policy, optimizer in (("O1,dtype=float16", "torch"), ("O2,dtype=float16", "mezzo")):
        forget()
        program = Program(policy, OPTIMIZERS[optimizer], overflow_at=[2]).epoch()
        assert program.skipped == [False, True, False, False]
        assert program.rates == [0.01 * 0.9**steps for steps in (1, 1, 2, 3)]
        assert [row["mezzo/scale"] for row in program.tracker.values] == [65536.0, 32768.0, 32768.0, 32768.0]
        assert [row["mezzo/skipped"] for row in program.tracker.values] == [0, 1, 1, 1]
        assert bool(program.amp.last_step.skipped) is False


def test_clipping_is_of_unscaled_gradients():
    """By so little that every step is decided by it: SGD's weights are FP32's, within rounding of the gradients."""
    start = flat(net().parameters())
    for way, low in (("norm", "O2,dtype=float16"), ("value", "O1,dtype=float16")):
        moved = []
        for policy in (None, low):
            forget()
            program = Program(policy, partial(torch.optim.SGD, lr=1.0))
            program.epoch(lambda accelerator, params: getattr(accelerator, f"clip_grad_{way}_")(params, 1e-3))  # noqa: B023
            moved.append(flat(program.module.state_dict().values()) - start)
        assert_alike(*reversed(moved))


def test_accelerators_own_region():
    program = Program("O1,dtype=bfloat16")
    with program.accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        with program.accelerator.autocast(accelerate.utils.AutocastKwargs(enabled=False)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_lbfgs_evaluates_its_closure_again():
    def trained(policy):
        forget()
        program, losses = Program(policy, partial(torch.optim.LBFGS, lr=0.1, max_iter=3)), []
        x, y = batches()[0]

        def closure():
            program.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(program.model(x), y)
            program.accelerator.backward(loss * 2)
            losses.append(loss.item())
            return loss

        program.optimizer.step(closure)
        return losses

    expected = trained(None)
    assert len(expected) > 2
    assert trained("O0") == expected
    assert trained("O1,dtype=bfloat16") == pytest.approx(expected, rel=0.02)


# Schedulers -------------------------------------------------------------------------------------------------

NAMES = ("accumulates", "splits", "ranks", "with_optimizer", "adjusts")
#: A quarter of all settings, in which any two of them meet.
SETTINGS = [
    dict(zip(NAMES, choices, strict=True)) | {"kind": ("lambda", "cycle")[number % 3 == 0]}
    for number, choices in enumerate(product((1, 2), (False, True), (1, 2), (True, False), (True, False)))
    if (number & 7).bit_count() % 2 and (number >> 2).bit_count() % 2
]
OVERFLOWS = [{0}, {3}, {2, 3, 6}, {11}, {0, 1, 2, 3, 4, 5}]


def rates(optimizer, settings, overflow_at, policy=None):
    """Return the learning rate and whether Accelerate knows of a skip after each call of a scheduler.

    Without a policy Accelerate's own fp16: torch's scaler in its place, with an optimizer whose kernel does not skip.
    """
    forget()
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
    rows = []
    with state_of_ranks(settings["ranks"]):
        for number in range(12):
            with accelerator.accumulate(model):
                output = model(torch.ones(2, 4))
                if number in overflow_at:
                    overflow(output)
                accelerator.backward(output.float().mean() / 64)  # which FP16 holds 65,536 times
                wrapped.step()
                scheduler.step()
                apart.step()
                wrapped.zero_grad()
            skipped = accelerator.optimizer_step_was_skipped
            rows.append((scheduler.get_last_lr(), apart.get_last_lr(), skipped, scheduler.scheduler._step_count))
    return rows


@contextmanager
def state_of_ranks(number):
    """Have Accelerate count so many processes: what its schedulers alone ask for here."""
    shared = accelerate.state.PartialState._shared_state
    before, shared["num_processes"] = shared["num_processes"], number
    try:
        yield
    finally:
        shared["num_processes"] = before


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedulers_move_as_under_accelerates_own_scaler():
    """Whether they step with the optimizer or by themselves, and whether or not its kernel skips by itself."""
    plain = partial(torch.optim.AdamW, lr=0.1, foreach=True)
    kinds = [plain, partial(torch.optim.AdamW, lr=0.1, fused=True), partial(mezzo.optim.AdamW, lr=0.1)]
    for number, settings in enumerate(SETTINGS):
        expected = rates(plain, settings, OVERFLOWS[number % 5])
        result = rates(kinds[number % 3], settings, OVERFLOWS[number % 5], "O1,dtype=float16")
        assert result == expected, (settings, OVERFLOWS[number % 5])
        assert any(skipped for *_, skipped, _ in result)


# Other shapes of programs -----------------------------------------------------------------------------------


def test_after_close_all_is_as_it_was():
    program = Program()
    names, forward = set(vars(program.accelerator)), program.module.forward
    program = Program("O2,dtype=float16").epoch()
    program.amp.close()
    program.amp.close()
    assert set(vars(program.accelerator)) == names
    assert program.accelerator.scaler is None
    assert program.module.forward.__func__ is forward.__func__
    assert not any(module._forward_pre_hooks or module._state_dict_hooks for module in program.module.modules())
    program.accelerator.backward(program.model(torch.ones(2, 8)).sum())
    before = program.module[0].weight.detach().clone()
    program.optimizer.step()
    assert not torch.equal(program.module[0].weight, before)
    assert "mezzo/scale" not in (program.accelerator.log({"loss": 1.0}), program.tracker.values[-1])[1]


def test_models_are_placed_before_the_session_is_made():
    class Placed(nn.Linear):
        def to(self, device):
            placements.append((device, self.weight.dtype))
            return super().to(device)

    for places in (True, False):
        placements, model = [], Placed(2, 1)
        accelerator = accelerate.Accelerator(cpu=True, device_placement=places)
        amp = attach(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), "O2,dtype=bfloat16")
        assert placements == [(accelerator.device, torch.float32)] * places
        amp.close()
