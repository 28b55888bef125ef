"""tune: what sixteen bits do not hold is pinned from the start where a rule cures it, seen by a gradient or not."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo.numerics import tune

pytestmark = pytest.mark.usefixtures("emulating")

SIZE = 128
NUMERIC = {"sum by hand", "positions", "basis", "criterion", "forward derivative", "codes"}


class Bank(nn.Module):
    """The spectrum of a signal by a product with cosines, in mel-like bands: nothing here trains."""

    def __init__(self):
        super().__init__()
        times, bins = torch.arange(float(SIZE)), torch.arange(SIZE / 2 + 1)
        self.register_buffer("cosines", torch.cos(2 * math.pi / SIZE * torch.outer(times, bins)))

    def forward(self, x):
        return x @ self.cosines


class Spectra(nn.Module):
    """The logarithm of a spectrum, and a layer that trains: the gradients of low noise look like any others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bank, self.head = Bank(), nn.Linear(SIZE // 2 + 1, 4)

    def forward(self, x):
        return self.head(self.bank(x).abs().clamp_min(1e-5).log())


class Digits(nn.Module):
    """Digits of base 8 as one number, by a product."""

    def __init__(self):
        super().__init__()
        self.register_buffer("powers", torch.tensor([1.0, 8.0, 64.0, 512.0]))

    def forward(self, digits):
        return functional.linear(digits, self.powers[None])[:, 0].long()


class Tokens(nn.Module):
    """An embedding of codes; another code is another row, whose gradient is as large."""

    def __init__(self, codes):
        super().__init__()
        torch.manual_seed(0)
        self.codes, self.embed, self.head = codes, nn.Embedding(5000, 16), nn.Linear(16, 4)

    def forward(self, digits):
        return self.head(self.embed(self.codes(digits)))


class ByIntegers(nn.Module):
    """The same number in integers."""

    def forward(self, digits):
        return (digits.long() * torch.tensor([1, 8, 64, 512])).sum(-1)


def tones():
    generator, times = torch.Generator().manual_seed(1), torch.arange(float(SIZE))
    loud = torch.stack([torch.cos(2 * math.pi / SIZE * 20 * times + k) for k in range(8)])
    return loud + 1e-4 * torch.randn(8, SIZE, generator=generator), torch.arange(8) % 4


def digits():
    rows = torch.randint(0, 8, (64, 4), generator=torch.Generator().manual_seed(0)).float()
    rows[0] = 7.0
    return rows, torch.arange(64) % 4


def noise():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


def loss_fn(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def found_by_explain(model, x, policy):
    explanation = mezzo.explain(model, x, policy=policy)
    return [finding for finding in explanation.findings if finding.kind in NUMERIC]


@pytest.mark.parametrize(
    "build, make, rule, op",
    [
        (Spectra, tones, "fp32_module=bank", "matmul in bank"),
        (lambda: Tokens(Digits()), digits, "fp32_module=codes", "linear in codes"),
    ],
    ids=["a filter bank", "codes by a product"],
)
def test_what_explain_names_and_a_rule_cures_is_pinned(build, make, rule, op):
    model, batch = build(), make()
    (finding,) = found_by_explain(model, batch[0], "O1,dtype=bfloat16")
    assert finding.rule == rule
    assert finding.text.endswith(f"the text {rule}")
    tuning = tune(model, loss_fn, [batch], dtype="bfloat16", steps=1)
    (own,) = [policy_rule for policy_rule in tuning.policy.rules if policy_rule.treatment == "fp32"]
    assert str(own) == rule
    assert own.reason == f"named by explain: {finding.text}"
    after = mezzo.explain(
        model, batch[0], policy=tuning.policy, loss=lambda out: functional.cross_entropy(out, batch[1])
    )
    assert {row.kind for row in after.findings} == {"FP32 product"}  # the pin itself, and nothing that idles
    assert str(tuning).count("named by explain") == 1
    pins = {pin.name: pin for pin in tuning.evidence.pins}
    assert pins[op].reason == own.reason
    assert (pins[op].without_db, pins[op].with_db) == (tuning.evidence.start.sqnr_db, tuning.evidence.result.sqnr_db)
    assert all(pin.modules == (rule.partition("=")[2],) for pin in pins.values())


def test_it_stays_pinned_beside_what_the_gradients_need():
    class Both(Spectra):
        def forward(self, x):
            y = super().forward(x)
            return y + ((y * 0 + 12.0).exp() * 1e-5)

    tuning = tune(Both(), loss_fn, [tones()], dtype="float16", steps=1)
    assert {str(rule) for rule in tuning.policy.rules if rule.treatment == "fp32"} == {"fp32=exp", "fp32_module=bank"}
    assert found_by_explain(Both(), tones()[0], tuning.policy) == []


def test_a_loss_that_is_noise_is_pinned_though_its_gradients_are_right():
    def small_logarithms(model, batch):
        return 1000 * (1 + 1e-3 * model(batch[0]).float().abs()).log().mean()

    def relative_error(policy):
        with mezzo.autocast(policy):
            return abs(small_logarithms(model, noise()).item() / exact - 1)

    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    exact = small_logarithms(model, noise()).item()
    tuning = tune(model, small_logarithms, [noise()], dtype="bfloat16", steps=1)
    assert not tuning.evidence.start.is_fault
    assert [str(rule) for rule in tuning.policy.rules if rule.treatment == "fp32"] == ["fp32=log"]
    assert relative_error(tuning.policy) < 0.05
    assert relative_error(mezzo.Policy.O1("bfloat16").evolve(rules=(mezzo.Rule("low", op="log"),))) > 0.5


def test_what_a_gradient_shows_in_the_models_own_forward_is_pinned_and_not_told():
    class Whole(Spectra):
        def forward(self, x):
            return self.head((x @ self.bank.cosines).abs().clamp_min(1e-5).log())

    tuning = tune(Whole(), loss_fn, [tones()], dtype="bfloat16", steps=1)
    assert [str(rule) for rule in tuning.policy.rules if rule.treatment == "fp32"] == ["fp32=matmul"]
    assert tuning.evidence.uncured == ()
    assert found_by_explain(Whole(), tones()[0], tuning.policy) == []


def test_what_no_rule_cures_is_told():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            y = self.head(x)
            return y + torch.arange(512, dtype=y.dtype).mean() * 1e-3

    tuning = tune(Positions(), loss_fn, [noise()], dtype="bfloat16", steps=1)
    assert tuning.evidence.pins == ()
    (left,) = tuning.evidence.uncured
    assert "385 of 512 positions are different in BF16" in left
    text = " ".join(str(tuning).split())
    assert f"left explain still finds in {left}" in text


def test_a_rule_of_the_users_own_is_kept_against_what_is_named():
    with pytest.raises(mezzo.NumericsError) as refusal:
        tune(Spectra(), loss_fn, [tones()], policy="O1,dtype=bfloat16,low_module=bank", steps=1)
    assert "no op of torch's, or a rule that is kept: low_module=bank" in str(refusal.value)


@pytest.mark.parametrize(
    "build, make",
    [
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), noise),
        (lambda: Tokens(ByIntegers()), digits),
    ],
    ids=["layers", "codes of integers"],
)
def test_right_programs_are_given_no_pin(build, make):
    torch.manual_seed(0)
    tuning = tune(build(), loss_fn, [make()], dtype="bfloat16", steps=1)
    assert [rule for rule in tuning.policy.rules if rule.treatment == "fp32"] == []
    assert tuning.evidence.pins == ()
