"""Low-precision weights without masters: who may train them, and when it is noticed that nobody may."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, UnsupportedError

from ..support.tables import thinned

FOREIGN = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-4),
}
MEZZO = {
    "split": lambda params: mezzo.optim.AdamW(params, lr=1e-4),
    "full": lambda params: mezzo.optim.SGD(params, lr=1e-3, master="full"),
    "stochastic": lambda params: mezzo.optim.Lion(params, lr=1e-4, master=None, rounding="stochastic"),
    "kahan": lambda params: mezzo.optim.Adam(params, lr=1e-4, master=None, rounding="kahan"),
}
FP32_LEVELS = ["O0", "O0,loss_scale=dynamic", "O1,emulate=true", "O1,dtype=bfloat16,emulate=true"]
LOW = [torch.float16, torch.bfloat16]


class Adapted(nn.Module):
    """A base in low precision, and an FP32 adapter beside it, as LoRA has it."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.base = nn.Linear(4, 4).to(dtype).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.adapter(x)


def backward(amp, model):
    with amp.autocast():
        loss = model(torch.ones(2, 4)).float().square().mean() / 64  # whatever the weights, FP16 holds 65536 times this
    amp.backward(loss)


@pytest.mark.parametrize("policy", FP32_LEVELS)
@pytest.mark.parametrize("optimizer", FOREIGN)
@pytest.mark.parametrize("dtype", LOW)
def test_an_optimizer_that_is_not_mezzo_s_is_refused(dtype, optimizer, policy):
    model = nn.Linear(4, 4).to(dtype)
    built = FOREIGN[optimizer](model.parameters())
    with pytest.raises(UnsupportedError, match=r"O2(.|\n)*model\.float\(\)") as error:
        MixedPrecision(model, built, policy)
    assert "weight" in str(error.value)
    assert model.weight.dtype == dtype
    assert not built._optimizer_step_pre_hooks
    MixedPrecision(model, built, f"O2,dtype={str(dtype).removeprefix('torch.')},emulate=true").close()
    MixedPrecision(model.float(), FOREIGN[optimizer](model.parameters()), policy)


def test_the_message():
    model = nn.Linear(4, 4).bfloat16()
    with pytest.raises(UnsupportedError) as error:
        MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=1e-4), "O1,dtype=bfloat16,emulate=true")
    assert str(error.value) == (
        "low-precision weights would train without FP32 masters\n"
        "  where  weight (bfloat16, 4×4) and 1 more, optimizer AdamW\n"
        "  why    O1 keeps none, and bfloat16 swallows updates below 0.0039 of their weight\n"
        '  write  MixedPrecision(model, optimizer, policy="O2,dtype=bfloat16")   # keeps FP32 masters;\n'
        "         or mezzo.optim, which keeps what rounding takes; or model.float() first"
    )


@pytest.mark.parametrize("dtype, optimizer, policy", thinned(LOW, MEZZO, FP32_LEVELS, every=4))
def test_mezzo_s_own_are_welcome(dtype, optimizer, policy):
    """But not to unscale FP16 gradients in FP16 where nothing is kept beside the weight."""
    torch.manual_seed(0)  # weights of which 100 small steps are seen in BF16
    model = Adapted(dtype).requires_grad_(True)
    built = MEZZO[optimizer](model.parameters())
    scaled = policy in ("O0,loss_scale=dynamic", "O1,emulate=true")
    if dtype == torch.float16 and scaled and optimizer in ("stochastic", "kahan"):
        with pytest.raises(UnsupportedError, match="fp16 gradients cannot be unscaled in fp16"):
            MixedPrecision(model, built, policy)
        return
    amp = MixedPrecision(model, built, policy)
    before = model.base.weight.detach().clone()
    for _ in range(100):
        backward(amp, model)
        amp.step()
        amp.zero_grad()
    assert not torch.equal(model.base.weight, before)


@pytest.mark.parametrize("policy", FP32_LEVELS)
@pytest.mark.parametrize("dtype", LOW)
def test_frozen_weights_may_be_low(dtype, policy):
    model = Adapted(dtype)
    amp = MixedPrecision(model, torch.optim.AdamW(model.parameters()), policy)
    backward(amp, model)
    assert not amp.step().skipped


@pytest.mark.parametrize("policy", ["O3,emulate=true", "O3,dtype=bfloat16,emulate=true"])
def test_o3_asks_for_it(policy):
    model = nn.Linear(4, 4).to(mezzo.Policy.of(policy).dtype)
    MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_a_rule_that_stores_a_parameter_low_does_not_keep_its_updates_either():
    model = nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match="no rule that stores them low"):
        MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,dtype=bfloat16,low_param=weight")
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("late", ["thawed", "added"])
@pytest.mark.parametrize("dtype", LOW)
def test_those_that_come_later_are_refused_before_their_first_gradient(dtype, late):
    model = Adapted(dtype)
    optimizer = torch.optim.AdamW((model if late == "thawed" else model.adapter).parameters())
    amp = MixedPrecision(model, optimizer, "O1,emulate=true")
    backward(amp, model)
    amp.step()
    amp.zero_grad()
    model.base.requires_grad_(True)
    if late == "added":
        optimizer.add_param_group({"params": list(model.base.parameters())})
    with pytest.raises(UnsupportedError, match=r"base\.weight(.|\n)*O2(.|\n)*model\.float\(\)"):
        backward(amp, model)
    assert all(p.grad is None for p in model.parameters())
    model.base.requires_grad_(False)
    backward(amp, model)
    assert not amp.step().skipped


@pytest.mark.parametrize("moment", ["before the forward pass", "after the backward pass", "frozen, cast and thawed"])
@pytest.mark.parametrize("optimizer", FOREIGN)
@pytest.mark.parametrize("dtype", LOW)
def test_those_that_are_cast_in_mid_run_are_refused_before_anything_is_written(dtype, optimizer, moment):
    """``model.half()`` replaces the data of parameters: only their gradients tell."""
    for policy in ("O0,loss_scale=dynamic", "O1,dtype=bfloat16,emulate=true"):
        model = Adapted(torch.float32)
        optimizer_ = FOREIGN[optimizer](model.parameters())
        amp = MixedPrecision(model, optimizer_, policy)
        model.base.requires_grad_("frozen" not in moment)
        backward(amp, model)
        if moment.startswith("after"):
            model.base.to(dtype)
        else:
            amp.step()
            amp.zero_grad()
            model.base.to(dtype).requires_grad_(True)
            backward(amp, model)
        weights = [p.clone() for p in model.parameters()]
        steps = amp.stats().steps
        with pytest.raises(UnsupportedError, match=r"base\.weight(.|\n)*O2(.|\n)*model\.float\(\)"):
            amp.step()
        assert amp.stats().steps == steps
        assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
        model.float()
        amp.zero_grad()
        backward(amp, model)
        assert not amp.step().skipped
        assert not torch.equal(model.adapter.weight, weights[2])


@pytest.mark.parametrize("dtype", LOW)
def test_a_cast_in_mid_run_is_refused_from_within_a_closure_too(dtype):
    model = Adapted(torch.float32)
    model.base.requires_grad_(True)
    amp = MixedPrecision(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2), "O1,emulate=true")
    model.base.to(dtype)
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"base\.weight(.|\n)*model\.float\(\)"):
        amp.step(closure=lambda: (amp.zero_grad(), backward(amp, model)))
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))


def test_fp16_under_a_scale_is_unscaled_in_fp32_where_mezzo_keeps_the_other_half():
    """Gradients that FP16 would flush: unscaled by hand in float64, they are what ``unscale_`` shows."""
    model = nn.Linear(4, 4).half()
    amp = MixedPrecision(model, mezzo.optim.SGD(model.parameters(), lr=1.0), "O1,emulate=true,loss_scale=65536")
    with amp.autocast():
        loss = model(torch.full((1, 4), 2.0**-10)).float().sum() * 2.0**-16
    amp.backward(loss)
    scaled = model.weight.grad.double()
    amp.unscale_()
    assert model.weight.grad.dtype == torch.float32
    assert torch.equal(model.weight.grad.double(), scaled / 65536)
    assert 0 < model.weight.grad.max() < 2.0**-25  # nothing that FP16 holds
