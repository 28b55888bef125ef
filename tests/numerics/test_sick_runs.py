"""Runs that are sick, trained and recorded: what is said of each, and that what it says to write cures it."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.numerics import Recorder, diagnose
from mezzo.policy import Policy

pytestmark = pytest.mark.usefixtures("emulating")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    )


def trained(policy, factor, steps=8, sick=(), **options):
    """A run whose gradient at the output is ``factor``; at some steps a thousand times that."""
    model = network()
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-9), policy)
    with Recorder(model, every=1, keep=None, **options) as recorder:
        for step in range(1, steps + 1):
            with amp.autocast():
                loss = model(torch.ones(1, 16)).float().sum() * factor * (1000 if step in sick else 1)
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
    amp.close()
    return recorder.evidence


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_constant_scale_that_is_too_high_is_told_from_one_that_fits(level):
    found = diagnose(trained(f"{level},dtype=float16,loss_scale=65536,emulate=true", 4.0))
    (alert,) = found.alerts
    assert (alert.level, alert.what) == ("bad", "All 8 recorded steps were skipped.")
    assert alert.where == "gradient of the output of 1.1 (float16), the first at step 1"
    assert "at loss scale 65,536" in alert.why
    assert alert.write == f'MixedPrecision(model, optimizer, "{found.policy}")'
    assert "loss_scale=dynamic(init=32768)" in str(found.policy)
    cured = trained(found.policy, 4.0)
    assert diagnose(cured).alerts == ()
    assert not cured.steps[-1].skipped


@pytest.mark.parametrize(
    "kinds, where",
    [("weight_gradients", "gradient of 1.1.weight (float32), the first at step 1"), ("weights", "step 1")],
)
def test_the_first_gradient_backward_is_named_as_far_as_it_was_recorded(kinds, where):
    policy = "O1,dtype=float16,loss_scale=2**20,emulate=true"
    (alert,) = diagnose(trained(policy, 1.0, steps=2, kinds=(kinds,))).alerts
    assert alert.where == where
    assert "at loss scale 1,048,576" in alert.why


def test_where_some_steps_are_taken_the_constant_scale_that_fits_those_is_said():
    policy = "O1,dtype=float16,loss_scale=4096,emulate=true"
    evidence = trained(policy, 4.0, sick=(3,))
    found = diagnose(evidence)
    (alert,) = found.alerts
    assert (alert.level, alert.what) == ("warn", "1 of 8 recorded steps were skipped.")
    largest = max(
        tensor.histogram.max_abs
        for step in evidence.steps
        for tensor in step.tensors
        if not step.skipped and tensor.kind.endswith("gradients")
    )
    assert f"gradients reach {largest:.4g}, in the skipped ones more than 15.99" in alert.why
    assert "loss_scale=dynamic(init=2048)" in alert.write
    # What a dynamic scale skips until it fits is no fault: only where it fits is there nothing to say.
    assert diagnose(trained(found.policy, 4.0, sick=(3,))).alerts == ()


def test_a_scale_that_skips_again_and_again_is_told_which_constant_one_fits():
    policy = "O1,dtype=float16,loss_scale=dynamic(init=8192,interval=1),emulate=true"
    (alert,) = diagnose(trained(policy, 4.0, steps=9)).alerts
    assert (alert.level, alert.what) == ("warn", "4 of 9 recorded steps were skipped.")
    assert alert.why.endswith("the highest constant scale that fits them is loss_scale=8192.")
    cured = trained("O1,dtype=float16,loss_scale=8192,emulate=true", 4.0)
    assert diagnose(cured).alerts == ()


@pytest.mark.parametrize("scale", ["none", "1", "dynamic(init=2)"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_where_gradients_are_not_finite_by_themselves_locate_is_what_to_write(level, scale):
    policy = f"{level},dtype=float16,loss_scale={scale},emulate=true"
    found = diagnose(trained(policy, 1e6))
    (alert,) = found.alerts
    assert alert.level == "bad"
    assert "Gradients are not finite although the loss scale is 1: no lower scale cures that" in alert.why
    assert alert.write.startswith("mezzo.overflow.locate(")
    assert found.policy == Policy.parse(f"{level},dtype=bfloat16,emulate=true")
    assert diagnose(trained(found.policy, 1e6)).alerts == ()
    model = network()

    def loss_fn(model, batch):
        with mezzo.autocast(Policy.parse(policy)):
            return model(batch).float().sum() * 1e6

    names = {"model": model, "loss_fn": loss_fn, "batch": torch.ones(1, 16), "mezzo": mezzo}
    if level == "O1":
        assert eval(alert.write, names).phase == "backward"


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_scale():
    found = diagnose(trained("O1,dtype=float16,emulate=true", float("inf")))
    (alert,) = found.alerts
    assert "not the loss, or its gradient, at loss scale 65,536: no lower scale cures that" in alert.why
    assert "loss_scale=65536, policy=" in alert.write


def plain(dtype, factor, steps=3):
    """A loop that steps whatever the gradients are."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Recorder(model, optimizer, every=1) as recorder:
        for _ in range(steps):
            with torch.autocast("cpu", dtype=dtype):
                loss = model(torch.ones(1, 16)).float().sum() * factor
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    return recorder.evidence


def test_gradients_that_reach_the_weights_are_found_where_they_begin():
    found = diagnose(plain(torch.float16, 1e6))
    (alert,) = found.alerts
    assert alert.level == "bad"
    assert alert.what.endswith("gradients are infinite or NaN at step 1.")
    assert alert.where.startswith("gradient of the output of 1.1 (float16), and ")
    assert "the step was taken all the same" in alert.why
    assert alert.write.startswith('MixedPrecision(model, optimizer, "O1,dtype=float16")')
    assert trained("O1,dtype=float16", 1e6).steps[-1].skipped
    assert diagnose(plain(torch.bfloat16, 1e6)).alerts == ()


def test_a_gradient_that_is_made_within_the_model_is_named_there():
    class Rooted(nn.Module):
        def forward(self, x):
            return (x - x.detach()).abs().sqrt()  # 0, whose root has no derivative

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(Rooted(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer, every=1) as recorder:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        recorder.step()
    (alert,) = diagnose(recorder.evidence).alerts
    assert alert.where.startswith("gradient of the output of 1 (float32), and ")
    assert "whatever the format" in alert.why
    assert 'on_overflow="explain"' in alert.write


def test_a_mask_in_an_early_step_does_not_hide_what_spoils_a_later_one():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(4, 4)
            self.mask = nn.Identity()

        def forward(self, x):
            scores = self.scores(x)
            return self.mask(scores.masked_fill(torch.eye(4, dtype=torch.bool), float("-inf"))).softmax(-1)

    def run(policy, spoil):
        torch.manual_seed(0)
        model = Masked()
        amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-9), policy)
        with Recorder(model, every=1) as recorder:
            for step in range(3):
                if spoil and step == 2:
                    model.scores.bias.data[0] = float("nan")
                with amp.autocast():
                    loss = model(torch.ones(4, 4)).float().square().sum()
                amp.backward(loss)
                amp.step()
                amp.zero_grad()
        amp.close()
        return diagnose(recorder.evidence)

    assert [alert.level for alert in run("O0", False).alerts] == ["warn"]
    found = run("O0", True).alerts[0]
    assert (found.level, found.what) == ("bad", "1 weights are infinite or NaN at step 3.")
    # Where steps are skipped for the sake of the scale, infinities of the mask are not why.
    found = run("O1,dtype=float16,loss_scale=2**22,emulate=true", False)
    assert [(alert.level, alert.what) for alert in found.alerts] == [
        ("bad", "All 3 recorded steps were skipped."),
        ("warn", "4 activations are infinite or NaN at step 1."),
    ]
    assert found.policy == Policy.parse("O1,dtype=float16,emulate=true")
