"""Runs that are sick, trained and recorded: what is said of each."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.numerics import Recorder, diagnose

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


@pytest.mark.parametrize(
    "policy, factor, scale", [("O1,dtype=float16,loss_scale=65536", 4.0, "65,536"), ("O2,dtype=float16", 1e6, "512")]
)
def test_where_all_steps_are_skipped_it_is_said_and_nothing_of_formats(policy, factor, scale):
    found = diagnose(trained(f"{policy},emulate=true", factor))
    (alert,) = found.alerts
    assert (alert.level, alert.what) == ("bad", "All recorded steps were skipped.")
    assert alert.where == "gradient of the output of 1.1 (float16)"
    assert f"the last ones at loss scale {scale}:" in alert.why
    assert (found.formats, found.policy) == ((), None)


def test_what_a_scale_skips_until_it_fits_is_no_fault():
    assert diagnose(trained("O1,dtype=float16,emulate=true", 4.0, sick=(3,))).alerts == ()


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
        ("bad", "All recorded steps were skipped."),
        ("warn", "4 activations are infinite or NaN at step 1."),
    ]
