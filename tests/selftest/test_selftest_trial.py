"""One trial of `mezzo test`: a machine on which all works passes, and each thing that can be wrong is found."""

import itertools

import pytest
import torch
from torch import nn

from mezzo.errors import UnsupportedError
from mezzo.selftest import task, trial
from mezzo.selftest.run import faults
from mezzo.selftest.task import build, digits
from mezzo.selftest.trial import Trial, measured, reference

from ..support.tables import thinned

CPU = torch.device("cpu")
LOW = Trial(level="O2", dtype="bfloat16", optimizer="mezzo")
SCALED = Trial(level="O1", dtype="float16", optimizer="torch")


@pytest.fixture(autouse=True)
def short(monkeypatch, emulating):
    """Few steps, on a processor on which both formats are emulated, which is fast everywhere."""
    for name, number in {"STEPS": 8, "COMPARED": 4, "CHECKPOINT": 5}.items():
        monkeypatch.setattr(trial, name, number)


@pytest.fixture(scope="module")
def data():
    return digits()


def against_fp32(tried, data):
    return measured(tried, data, reference(data))


@pytest.mark.parametrize(
    "level, dtype, optimizer", thinned(["O1", "O2"], ["float16", "bfloat16"], ["torch", "mezzo"], every=2)
)
def test_what_works_passes(data, level, dtype, optimizer):
    found = against_fp32(Trial(level=level, dtype=dtype, optimizer=optimizer), data)
    assert faults(found) == []
    assert (found.skipped, found.resumed, found.notes) == (True, "bit for bit", ())
    assert found.arithmetic == "emulated"
    assert found.low_share == 1.0
    assert (found.backoff, found.next_scale / found.scale) == ((0.5, 0.5) if dtype == "float16" else (None, 1.0))


def test_native_arithmetic_is_counted_at_the_kernels(data, monkeypatch):
    monkeypatch.setattr(Trial, "policy", property(lambda self: f"{self.level},dtype={self.dtype},emulate=false"))
    found = against_fp32(LOW, data)
    assert (found.arithmetic, found.low_share, faults(found)) == ("native", 1.0, [])


def test_the_share_that_ran_low_is_that_of_the_operations(data, monkeypatch):
    """The head alone stays in FP32: its part of all products, forward and twice as many backward, by hand."""
    monkeypatch.setattr(Trial, "policy", property(lambda self: f"{self.level},dtype={self.dtype},fp32_module=head"))
    found = against_fp32(SCALED, data)
    batch, tokens, width = 64, 16, 64
    head = batch * (tokens * width) * 16
    linear = batch * tokens * width * (3 * width + width + 4 * width + 4 * width)
    convolution = batch * tokens * 9 * width  # whose images need no gradient: one product backward
    attention = 2 * batch * tokens * tokens * width
    whole = 3 * (head + linear) + 2 * convolution + 3 * attention
    assert found.low_share == pytest.approx(1 - 3 * head / whole, abs=0.03)
    assert not any("operations" in fault for fault in faults(found))


def test_a_run_that_stays_in_fp32_is_no_success(data, monkeypatch):
    monkeypatch.setattr(Trial, "policy", property(lambda self: f"{self.level},dtype={self.dtype},fp32_module=*"))
    found = against_fp32(SCALED, data)
    assert found.low_share == 0.0
    assert faults(found) == ["only 0 % of its products' operations ran in float16"]


def test_a_wrong_gradient_is_found(data, monkeypatch):
    """A tenth too large, which Adam, who divides by their size, does not let the losses know."""
    fp32 = reference(data)

    def built(seed, device):
        model = build(seed, device)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 1.1 * gradient)
        return model

    monkeypatch.setattr(trial, "build", built)
    found = measured(LOW, data, fp32)
    assert found.gradient_error == pytest.approx(0.1, abs=0.01)
    assert faults(found) == ["its first gradient is 10 % of its norm away from FP32's; rounding explains 3.1 %"]


def test_weights_that_do_not_move_are_found(data, monkeypatch):
    fp32 = reference(data)
    monkeypatch.setattr(trial, "_RATE", 0.0)
    found = measured(LOW, data, fp32)
    (fault,) = faults(found)
    assert fault == f"its last losses are {found.loss:.4g} in the mean, FP32's {found.fp32_loss:.4g}"
    assert found.loss > 1.5 * found.fp32_loss


def test_a_skipped_step_that_writes_is_found(data, monkeypatch):
    plain = trial._loss

    def loss(model, data, number, *, infinite_gradient=False):
        if infinite_gradient:
            with torch.no_grad():
                model.norm1.bias[3] += 2.0**-10
        return plain(model, data, number, infinite_gradient=infinite_gradient)

    fp32 = reference(data)
    monkeypatch.setattr(trial, "_loss", loss)
    assert "a step with infinite gradients was not skipped, or wrote something" in faults(measured(SCALED, data, fp32))


@pytest.mark.parametrize("part", ["weight", "moment", "learning rate"])
def test_a_state_that_is_not_all_there_is_found(data, monkeypatch, part):
    """One number of the checkpoint is another than it was."""
    load = trial.load

    def damaged(path, **options):
        saved = load(path, **options)
        match part:
            case "weight":
                saved["model"]["head.bias"][0] += 0.125
            case "moment":
                next(iter(saved["optimizer"]["state"].values()))["exp_avg"].view(-1)[0] += 1.0
            case "learning rate":
                saved["optimizer"]["param_groups"][0]["lr"] = 1e-3
        return saved

    monkeypatch.setattr(trial, "load", damaged)
    found = against_fp32(Trial(level="O1", dtype="bfloat16", optimizer="mezzo"), data)
    assert found.resumed == "otherwise"
    assert faults(found) == ["a run that is resumed from its checkpoint goes on otherwise"]


def test_a_device_that_does_not_repeat_itself_is_not_blamed_on_the_checkpoint(data, monkeypatch):
    plain, noise = trial._resumed, itertools.count(1)

    def resumed(*arguments):
        first, *rest = plain(*arguments)
        return [first + next(noise), *rest]

    monkeypatch.setattr(trial, "_resumed", resumed)
    found = against_fp32(LOW, data)
    assert (found.resumed, faults(found)) == ("not repeatable", [])


def test_a_step_that_overflows_by_itself_is_taken_again(data, monkeypatch):
    """At this scale FP16's gradients are infinite: without the steps that are skipped no loss would be FP32's."""
    policy = property(lambda self: f"{self.level},dtype={self.dtype},loss_scale=dynamic(init=16777216)")
    monkeypatch.setattr(Trial, "policy", policy)
    found = against_fp32(SCALED, data)
    assert faults(found) == []
    assert found.scale < 2**24


def test_what_mezzo_warns_of_is_kept(data, monkeypatch):
    plain = trial._loss

    def loss(*arguments, **options):
        trial.logging.getLogger("mezzo.step.executors.choose").warning("no compiler on %s", "cpu")
        return plain(*arguments, **options)

    monkeypatch.setattr(trial, "_loss", loss)
    assert against_fp32(LOW, data).notes == ("no compiler on cpu",)
    assert trial.logging.getLogger("mezzo").handlers == []


def test_a_device_that_cannot_do_it_says_so(data, monkeypatch):
    def refused(*arguments, **options):
        raise UnsupportedError("no bfloat16 here")

    monkeypatch.setattr(trial, "MixedPrecision", refused)
    with pytest.raises(UnsupportedError, match="no bfloat16 here"):
        measured(LOW, data, reference(data))


# The task -----------------------------------------------------------------------------------------------------------


def test_without_scikit_learn_digits_are_made(monkeypatch):
    def absent():
        raise UnsupportedError("the recipe digits-cnn needs scikit-learn")

    monkeypatch.setattr(task, "load", absent)
    made = digits()
    assert (made.source, made.images.shape, made.images.dtype) == ("made digits", (1200, 1, 8, 8), torch.float32)
    assert torch.equal(made.images, digits().images), "they are the same in every process"
    assert made.labels.bincount(minlength=10).min() > 80
    assert faults(against_fp32(LOW, made)) == []


def test_a_batch_is_the_same_whenever_it_is_asked_for(data):
    images, labels = data.batch(3)
    assert (images.shape, labels.shape) == ((64, 1, 8, 8), (64,))
    assert torch.equal(images, data.batch(3)[0])
    assert not torch.equal(images, data.batch(4)[0])


def test_the_network_is_its_seeds_and_no_global_stream_moves():
    before = torch.get_rng_state()
    one, same, other = build(0, CPU), build(0, CPU), build(1, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [nn.utils.parameters_to_vector(each.parameters()) for each in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
