"""`attach` in a program for Accelerate: losses like FP32 with low kernels, and all that an Accelerator does besides."""

import copy
import importlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo.errors import PolicyError, StateError, UnsupportedError
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


@pytest.mark.parametrize("policy", ["O0", "O2,dtype=bfloat16"])
def test_a_checkpoint_of_a_plain_program_goes_on_under_a_policy_and_back(tmp_path, policy):
    plain = Program().epoch()
    plain.accelerator.save_state(tmp_path / "plain")
    plain.epoch()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    other = Program(policy)
    other.accelerator.load_state(str(tmp_path / "plain"))
    assert other.accelerator.scaler is not None
    other.epoch()
    assert other.rates == plain.rates[4:]
    assert other.losses == pytest.approx(plain.losses[8:], rel=0 if policy == "O0" else 0.02)
    other.accelerator.save_state(tmp_path / "back")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    back = Program()
    back.accelerator.load_state(tmp_path / "back")
    assert all(map(torch.equal, back.module.state_dict().values(), other.module.state_dict().values()))


@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=float16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_writes_nothing_holds_the_scheduler_and_is_logged(policy, optimizer):
    program = Program(policy, OPTIMIZERS[optimizer], overflow_at=[2]).epoch()
    assert program.skipped == [False, True, False, False]
    assert program.rates == [0.01 * 0.9**steps for steps in (1, 1, 2, 3)]
    assert [each["mezzo/scale"] for each in program.told.values] == [65536.0, 32768.0, 32768.0, 32768.0]
    assert [each["mezzo/skipped"] for each in program.told.values] == [0, 1, 1, 1]
    assert bool(program.amp.last_step.skipped) is False


def test_schedulers_go_on_where_they_are_not_held():
    program = Program("O1,dtype=float16", overflow_at=[2], hold_schedulers=False).epoch()
    assert program.rates == [0.01 * 0.9**steps for steps in (1, 2, 3, 4)]
    assert program.amp.stats().skipped == 1


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


def test_an_overflow_is_explained_to_the_trackers():
    program = Program("O1,dtype=float16", on_overflow="explain")
    with torch.no_grad():
        program.module[0].weight.mul_(1e6)
    program.epoch()
    (told, *_) = (each["mezzo/overflow"] for each in program.told.values if "mezzo/overflow" in each)
    assert "0" in told
    assert "mezzo/overflow" not in program.amp.metrics()


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


@pytest.mark.slow  # two processes that import Accelerate, and train four times
def test_two_ranks_step_together(tmp_path):
    """An overflow on one is both's; weights are equal bit for bit, sharded too, and a checkpoint goes on so."""
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
        assert found["model"] == ("FSDPSequential" if "sharded" in policy else "DistributedDataParallel")
        computes = "float32" if "O0" in policy else re.search("float16|bfloat16", policy)[0]
        assert found["seen"] == [f"torch.{computes}"], policy  # what the second product reads
        assert sum(found["losses"][-4:]) == pytest.approx(sum(first["O0"]["losses"][-4:]), rel=0.02), policy


# Refusals -----------------------------------------------------------------------------------------------------------


def model_and_optimizer():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_precision_set_besides_is_refused():
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = model_and_optimizer()
    with pytest.raises(PolicyError, match=r'mixed_precision="bf16" besides(.|\n)*write  Accelerator\(\) without'):
        attach(accelerator, model, optimizer, "O1")
    assert (vars(optimizer).get("step"), vars(model).get("forward")) == (None, None)


@pytest.mark.parametrize(
    "kind, write",
    [("DEEPSPEED", "in its own configuration"), ("MEGATRON_LM", "torchrun")],
)
def test_what_owns_the_step_is_refused(monkeypatch, kind, write):
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType(kind))
    with pytest.raises(UnsupportedError, match=rf"Accelerate runs with {kind}(.|\n)*write  .*{write}"):
        attach(accelerator, *model_and_optimizer(), "O1")


@pytest.mark.parametrize("version, why", [(1, "flat pieces"), (2, "after the optimizer was built")])
def test_accelerates_own_sharding_is_refused_by_its_version(monkeypatch, version, why):
    accelerator = accelerate.Accelerator(cpu=True)  # where Accelerate shards on accelerators alone
    monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType.FSDP)
    accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=version)
    with pytest.raises(
        UnsupportedError, match=rf"shards with FSDP{version}\n.*\n.*{why}.*\n  write  mezzo.fully_shard"
    ):
        attach(accelerator, *model_and_optimizer(), "O1")


@pytest.mark.parametrize("name", ["save", "load"])
def test_a_sharded_model_is_prepared_as_it_is_and_has_a_checkpoint_of_its_own(alone, tmp_path, name):
    model = nn.Linear(2, 1)
    mezzo.fully_shard(model, "O2,dtype=bfloat16")
    accelerator, optimizer = accelerate.Accelerator(cpu=True), torch.optim.SGD(model.parameters(), lr=0.1)
    names = set(vars(accelerator))
    amp = attach(accelerator, model, optimizer, "O2,dtype=bfloat16")
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert prepared is model
    accelerator.backward(model(torch.ones(2, 2)).sum())
    optimizer.step()
    assert amp.stats().steps == 1
    with pytest.raises(UnsupportedError, match=rf"accelerator.{name}_state(.|\n)*checkpoint.{name}\(.*amp.stateful"):
        getattr(accelerator, f"{name}_state")(tmp_path)
    assert list(tmp_path.iterdir()) == []
    amp.close()
    assert set(vars(accelerator)) == names


def test_the_order_is_checked():
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = model_and_optimizer()
    with pytest.raises(PolicyError, match=r"prepared before it was attached(.|\n)*write  attach\(accelerator, model"):
        attach(accelerator, model, accelerator.prepare(optimizer), "O1")
    attach(accelerator, *model_and_optimizer(), "O1")
    with pytest.raises(PolicyError, match="the accelerator has a session already"):
        attach(accelerator, model, optimizer, "O1")


def test_an_optimizer_that_is_not_attached_cannot_step():
    accelerator = accelerate.Accelerator(cpu=True)
    attach(accelerator, *model_and_optimizer(), "O1")
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(StateError, match="an optimizer was prepared that is not attached"):
        optimizer.step()


def test_gradients_of_a_plain_backward_are_refused():
    program = Program("O1,dtype=float16")
    program.model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(StateError, match=r"whose loss was not scaled(.|\n)*write  accelerator\.backward\(loss\)"):
        program.optimizer.step()


def test_what_cannot_be_meant():
    accelerator = accelerate.Accelerator(cpu=True)
    for arguments, what in (({"policy": "O4"}, "unknown level 'O4'"), ({"hold_schedulers": 1}, "hold_schedulers is 1")):
        with pytest.raises(PolicyError, match=what):
            attach(accelerator, *model_and_optimizer(), **arguments)
    model, optimizer = model_and_optimizer()
    with pytest.raises(PolicyError, match="the model and the optimizer stand in each other's place"):
        attach(accelerator, optimizer, model, "O1")
    prepared = mezzo.prepare(model, "O1")
    with pytest.raises(PolicyError, match="a prepared model cannot be attached"):
        attach(accelerator, prepared, optimizer, "O1")
    with pytest.raises(PolicyError, match=r"the accelerator is Linear\("):
        attach(nn.Linear(1, 1), *model_and_optimizer())
    assert accelerator.scaler is None


def test_an_absent_accelerate_is_named(monkeypatch):
    for name in [name for name in sys.modules if name == "accelerate" or name.startswith("accelerate.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "mezzo.integrations.accelerate")
    with pytest.raises(UnsupportedError, match=r'pip install "accelerate>=1\.0"'):
        importlib.import_module("mezzo.integrations.accelerate")
