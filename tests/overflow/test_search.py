"""locate: the known culprit is found, finite passes give nothing, and nothing is left behind."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import Policy, PolicyError
from mezzo.overflow import locate

FP16 = "O1,dtype=float16,emulate=true"
POLICIES = [
    "O0", *(f"{level},dtype={dtype},emulate=true" for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")),
    "O1,dtype=float16,emulate=true,norms=fp32_math,low=softmax",
]  # fmt: skip


# What is found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["transformer", "conv", "chain"])
def test_a_finite_step_gives_nothing(located, name, policy):
    assert located(name, policy, loss_scale=8.0) is None


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_first_overflow_of_a_forward_pass(make, step, level):
    model, x = make("chain", gain=1e5)
    x = x.half().float()
    wide = (x @ model.first.weight.half().float().T).detach()  # what the products of float16 numbers are
    policy = f"{level},dtype=float16,emulate=true"
    overflow = locate(step(model, policy, x), model, policy=policy)
    assert (overflow.kind, overflow.phase, overflow.module, overflow.op) == ("range", "forward", "first", "linear")
    assert (overflow.tensor.name, overflow.tensor.dtype, overflow.tensor.shape) == ("output", "float16", (2, 5, 8))
    assert overflow.tensor.num_inf == int(wide.half().isinf().sum()) > 0
    assert overflow.tensor.num_nan == 0
    assert overflow.needed == pytest.approx(float(wide.abs().max()), rel=1e-6)
    assert overflow.share == pytest.approx(float(wide.abs().max()) / 65504, rel=1e-6)
    read = {each.name: each for each in overflow.inputs}
    assert list(read) == ["input 0", "first.weight"]
    assert (read["input 0"].dtype, read["first.weight"].dtype) == ("float16", "float16")
    assert read["input 0"].largest == float(x.abs().max())
    assert read["input 0"].smallest == float(x.abs().min())
    assert read["input 0"].share == float(x.abs().max()) / 65504
    assert read["input 0"].headroom == pytest.approx(np.log2(65504 / float(x.abs().max())))
    assert overflow.code == "return self.second(torch.relu(self.first(x)))"
    assert overflow.line.rpartition(":")[0].endswith("conftest.py")


def test_native_arithmetic_gives_the_same_report_as_emulated():
    def found(policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
        with torch.no_grad():
            model[0].weight.mul_(1e5)
        x = torch.randn(3, 8)

        def fn():
            with mezzo.autocast(policy):
                return model(x).square().sum()

        overflow = locate(fn, model, policy=policy)
        return overflow.module, overflow.op, overflow.kind, overflow.tensor, overflow.needed, overflow.cure

    assert found("O1,emulate=true") == found("O1,emulate=false")


@pytest.mark.parametrize("loss_scale", [2.0**25, 2.0**40, 3e7])
@pytest.mark.parametrize("name", ["transformer", "conv", "chain"])
def test_a_gradient_that_overflows_by_the_scale(make, step, name, loss_scale):
    """The oracle is the backward pass itself: at the scale that is named all is finite, at twice that it is not."""
    model, x = make(name)
    model.eval()  # the same masks in each pass
    fn = step(model, FP16, x)
    overflow = locate(fn, model, policy=FP16, loss_scale=loss_scale)
    assert (overflow.kind, overflow.phase, overflow.tensor.dtype) == ("scale", "backward", "float16")
    assert overflow.needed > 65504
    assert overflow.loss_scale == loss_scale
    scale = Policy.parse(FP16).evolve(loss_scale=overflow.cure.split('"')[1]).loss_scale.init

    def is_finite_at(scale):
        gradients = torch.autograd.grad(fn() * scale, list(model.parameters()))
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    assert scale < loss_scale
    assert is_finite_at(scale)
    assert not is_finite_at(2 * scale) or 2 * scale >= loss_scale
    assert locate(fn, model, policy=FP16, loss_scale=scale) is None


def test_the_backward_culprit_and_its_tensor():
    """y = w₂·(w₁·x): the gradient of w₁·x is w₂ times the loss's, that of w₁ another 1000 times as large."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer, value in zip(model, (0.5, 0.25), strict=True):
        nn.init.constant_(layer.weight, value)

    def fn():
        with mezzo.autocast(FP16):
            return model(torch.tensor([[1000.0]])).float().sum()

    # At 2^9 the gradients are 2^9·500 (of the second weight), 2^7 and 2^7·1000: both weights' are too large.
    overflow = locate(fn, model, policy=FP16, loss_scale=2.0**9)
    assert (overflow.module, overflow.op, overflow.tensor.name) == ("1", "linear", "gradient of 1.weight")
    assert overflow.needed == 2**9 * 500
    assert "with 2**7 every gradient is finite" in overflow.cause  # 2^7·500 = 64000
    assert overflow.phase == "backward"
    assert overflow.code == "return model(torch.tensor([[1000.0]])).float().sum()"
    # Frozen, it has no gradient: the first weight's is next.
    model[1].weight.requires_grad_(False)
    overflow = locate(fn, model, policy=FP16, loss_scale=2.0**9)
    assert (overflow.module, overflow.tensor.name, overflow.needed) == ("0", "gradient of 0.weight", 2**7 * 1000)


def test_a_loss_in_float16():
    """It is widened before it is multiplied with the scale, as in a session; its gradient is not."""
    model = nn.Linear(1, 1)
    overflow = locate(lambda: model(torch.ones(1, 1)).sum().half(), model, loss_scale=2.0**17)
    assert (overflow.kind, overflow.tensor.dtype, overflow.needed) == ("scale", "float16", 2.0**17)
    assert overflow.inputs[0].dtype == "float32"
    assert "with 2**15 every gradient is finite" in overflow.cause


def test_a_gradient_that_grows_without_any_scale():
    """A scale below 1 would make it finite, and would be no cure: the gradient itself has no bound."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1e-30)

    def fn():
        return (model(torch.ones(1, 1)) * 1e20 * 1e20).sum()

    assert bool(fn().isfinite())
    overflow = locate(fn, model)
    assert (overflow.kind, overflow.phase, overflow.op) == ("unbounded", "backward", "mul")
    assert locate(fn, model, loss_scale=2.0).kind == "unbounded"


def test_the_gradient_of_an_argument():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.mul(self.low(x), self.high(x) * 1000)

    model, x = Model(), torch.ones(2, 4)

    def fn():
        with mezzo.autocast(FP16):
            return model(x).float().sum()

    overflow = locate(fn, model, policy=FP16, loss_scale=2.0**12)
    assert (overflow.op, overflow.phase, overflow.module) == ("mul", "backward", "")
    assert overflow.tensor.name == "gradient of input 0"


def test_gradients_that_meet():
    model = nn.Linear(8, 8, bias=False)

    def fn():
        with mezzo.autocast(FP16):
            y = model(torch.ones(2, 8))
            return (y + y).sum()

    overflow = locate(fn, model, policy=FP16, loss_scale=2.0**15)
    assert (overflow.tensor.name, overflow.needed) == ("sum of gradients", 2.0**16)


def test_without_a_policy_the_same_culprit_is_found(located, make, step):
    model, x = make("transformer", gain=400.0)
    alone = locate(step(model, FP16, x), model)
    known = located("transformer", FP16, gain=400.0)
    assert alone == known


# What is not to blame ---------------------------------------------------------------------------------


def test_a_mask_is_not_blamed_for_another_overflow(located):
    overflow = located("transformer", FP16, gain=400.0)
    assert (overflow.module, overflow.op, overflow.tensor.name) == ("blocks.1.attn", "matmul", "output")
    assert overflow.code == "scores = (q * self.gain) @ (k * self.gain).transpose(-1, -2)  # (batch, tokens, tokens)"


@pytest.mark.parametrize("given", ["buffer", "argument", "logarithm", "sum"])
def test_masks_of_other_kinds(given):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)
            self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))

        def forward(self, x, mask=None):
            scores = self.layer(x)
            match given:
                case "buffer":
                    scores = scores + self.mask
                case "argument":
                    scores = scores + mask
                case "logarithm":
                    scores = scores + torch.ones(5, 5).tril().log()
                case "sum":  # beyond float16's range, and so -inf
                    scores = scores.half() + torch.full((5, 5), -60000.0).triu(1).half() * 2
            return scores.softmax(-1)

    model, x = Masked(), torch.randn(2, 5, 5)
    mask = torch.full((5, 5), float("-inf")).triu(1)

    def fn(value=0.0):
        with mezzo.autocast(FP16):
            return (model(x + value, mask) ** 2).sum()

    assert locate(fn, model, policy=FP16) is None
    overflow = locate(lambda: fn(1e5), model, policy=FP16)
    assert (overflow.op, overflow.tensor.name) == ("linear", "input 0 cast to float16")


def test_fused_attention_with_a_mask():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            mask = torch.full((5, 5), float("-inf")).triu(1)
            return self.mha(x, x, x, attn_mask=mask, need_weights=False)[0]

    model, x = Fused(), torch.randn(2, 5, 8)
    assert locate(lambda: model(x).sum(), model) is None


def test_an_infinity_that_leads_nowhere(make, step):
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return y, (y * 0).log()

    model, x = Auxiliary(), torch.randn(2, 4)
    assert locate(lambda: model(x)[0].sum(), model) is None
    assert locate(lambda: model(x)[1].sum(), model).op == "log"


def test_masked_logits_beside_the_loss():
    model, x, y = nn.Linear(4, 4), torch.randn(2, 4), torch.tensor([0, 1])

    def fn():
        logits = model(x).masked_fill(torch.tensor([False, False, False, True]), float("-inf"))
        return functional.cross_entropy(logits, y), logits

    assert locate(fn, model) is None


def test_an_infinity_in_front_of_where_spoils_only_the_gradient():
    """The loss is finite; 0·inf in the gradient of exp is NaN: the overflow is that of exp, forward."""

    class Tricked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x) + 200
            return torch.where(y > 50, y, y.exp())

    model, x = Tricked(), torch.randn(2, 4)
    assert bool(model(x).isfinite().all())
    overflow = locate(lambda: model(x).mean(), model)
    assert (overflow.op, overflow.phase, overflow.kind) == ("exp", "forward", "unbounded")
    assert overflow.cure == "x.clamp(max=80).exp()"


# How models are built ---------------------------------------------------------------------------------


def test_two_models_are_told_apart_by_number(make):
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with torch.no_grad():
        second[0].weight.fill_(6e4)
    x = torch.randn(2, 4)

    def fn():
        with mezzo.autocast(FP16):
            return (second(first(x)) ** 2).sum()

    overflow = locate(fn, [first, second], policy=FP16)
    assert (overflow.module, overflow.op) == ("1.0", "linear")
    # Rules have no numbers: "0" is a module of each.
    assert overflow.cure == 'policy = policy.keep_fp32(modules=["0"])   # the text fp32_module=0'
    with torch.no_grad():
        second[0].weight[0, 0] = torch.nan
    assert locate(fn, [first, second]).tensor.name == "1.0.weight"


def test_a_module_that_two_models_share_belongs_to_the_first():
    shared = nn.Linear(2, 2)
    nn.init.constant_(shared.weight, torch.nan)
    first, second = nn.Sequential(shared), nn.Sequential(nn.ReLU(), shared)
    overflow = locate(lambda: second(torch.ones(1, 2)).sum(), [first, second])
    assert (overflow.module, overflow.tensor.name) == ("0.0", "0.0.weight")


def test_a_shared_module_is_called_by_its_first_path():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = self.one

        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    model, x = Shared(), torch.ones(2, 4)
    nn.init.constant_(model.one.weight, 100.0)

    def fn():
        with mezzo.autocast(FP16):
            return model(x).float().mean()

    # 4·100 in the first of its two calls, 4·100·400 in the second.
    overflow = locate(fn, model, policy=FP16)
    assert (overflow.module, overflow.op) == ("one", "linear")
    assert overflow.needed == pytest.approx(160000, rel=0.01)


@dataclass
class Output:
    logits: torch.Tensor
    aux: tuple


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass"])
def test_structured_outputs_and_tensors_in_place_of_a_loss(kind):
    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            logits = self.layer(x)
            parts = logits, (logits.argmax(-1), logits.sqrt())
            return {"dict": {"logits": parts[0], "aux": parts[1]}, "tuple": parts, "dataclass": Output(*parts)}[kind]

    model = Structured()
    nn.init.ones_(model.layer.weight)
    nn.init.zeros_(model.layer.bias)
    assert locate(lambda: model(-torch.ones(2, 4)), model).op == "sqrt"
    assert locate(lambda: model(torch.ones(2, 4)), model) is None


def test_in_place_ops(make):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            y.mul_(1e5)
            return y.float()

    torch.manual_seed(0)
    model, x = InPlace(), torch.ones(2, 4)

    def fn():
        with mezzo.autocast(FP16):
            return model(x).mean()

    with mezzo.autocast(FP16), torch.no_grad():
        before = model.layer(x)
    overflow = locate(fn, model, policy=FP16)
    assert (overflow.op, overflow.kind) == ("mul_", "range")
    assert overflow.inputs[0].largest == float(before.abs().max())  # as it was before
    assert overflow.needed == pytest.approx(float(before.abs().max()) * 1e5)


def test_code_outside_of_any_module_is_named_as_it_was_written():
    """There the region lies above the trace, and takes functions apart before the trace sees them."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def fn(factor):
        with mezzo.autocast(FP16):
            y = model(x) * factor
            return (y @ y.T).square().sum()

    torch.manual_seed(0)
    overflow = locate(lambda: fn(1e4), model, policy=FP16)
    assert (overflow.module, overflow.op, overflow.tensor.name) == ("(loss)", "matmul", "output")
    assert overflow.cure == 'policy = policy.fp32("matmul")   # the text fp32=matmul'
    overflow = locate(lambda: fn(1.0), model, policy=FP16, loss_scale=2.0**30)
    assert (overflow.op, overflow.phase, overflow.tensor.name) == ("square", "backward", "gradient of input 0")


def test_inside_a_module_with_a_region_of_its_own():
    class Product(nn.Module):
        def forward(self, a, b):
            return a @ b

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.product = nn.Linear(4, 4, bias=False), Product()

        def forward(self, x):
            return self.product(torch.full((2, 4), 1e3), self.layer(x))

    torch.manual_seed(0)
    policy = f"{FP16},low=softmax@product"
    model = Model()
    prepared = mezzo.prepare(model, policy)

    def fn():
        with prepared.autocast():
            return model(torch.ones(4, 4)).float().sum()

    overflow = locate(fn, model, policy=policy, loss_scale=2.0**8)
    assert (overflow.module, overflow.op, overflow.tensor.name) == ("product", "matmul", "gradient of input 1")


def test_backward_passes_inside_of_emulated_ones():
    """Emulation differentiates what it knows no rule for by running it again, within its own backward pass."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)
            self.head = nn.Linear(4, 1)
            nn.init.constant_(self.head.weight, 100.0)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    torch.manual_seed(0)
    model, x = Recurrent(), torch.ones(8, 8, 4)

    def fn():
        with mezzo.autocast(FP16):
            return model(x).float().mean()

    for parameter in model.head.parameters():
        parameter.requires_grad_(False)
    overflow = locate(fn, model, policy=FP16, loss_scale=2.0**14)
    assert (overflow.module, overflow.op, overflow.kind) == ("lstm", "lstm", "scale")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(make, step, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(2, 8, requires_grad=True)
    fn = step(model, FP16, x)
    assert locate(fn, model, policy=FP16) is None
    overflow = locate(lambda: fn() * 1e-3, model, policy=FP16, loss_scale=2.0**40)
    assert (overflow.kind, overflow.phase) == ("scale", "backward")
    assert x.grad is None
    with torch.no_grad():
        model.inner[2].weight.mul_(1e6)
    overflow = locate(fn, model, policy=FP16)
    assert (overflow.module, overflow.phase) == ("inner.2", "forward")


def test_gradients_inside_a_reentrant_checkpoint():
    """They are no part of the graph outside, and only a parameter's is too large."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=True)

    model, x = Scaled(), torch.full((1, 1), 1e3, requires_grad=True)

    def fn():
        with mezzo.autocast(FP16):
            return model(x).float().sum()

    overflow = locate(fn, model, policy=FP16, loss_scale=2.0**10)
    assert (overflow.module, overflow.kind, overflow.tensor.name) == ("layer", "scale", "gradient of layer.weight")
    assert overflow.needed == 2**10 * 1000
    assert model.layer.weight.grad is x.grad is None


def test_a_compiled_model_is_searched_as_it_was_written():
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(1) or graph(*args)

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend=backend)
    compiled(torch.ones(2, 4))
    assert len(runs) == 1
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    overflow = locate(lambda: compiled(torch.ones(2, 4)).sum(), compiled)
    assert (overflow.module, overflow.kind) == ("_orig_mod.0", "parameter")
    assert len(runs) == 1


# Errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [lambda: None, [], [nn.Linear(1, 1), 3]])
def test_no_model(model):
    with pytest.raises(PolicyError, match=r"a model must be an nn.Module, not ") as caught:
        locate(lambda: torch.ones(()), model)
    assert "write  mezzo.overflow.locate(fn, model)" in str(caught.value)


@pytest.mark.parametrize("value", [None, 1.0, torch.tensor(1)])
def test_no_loss(value):
    with pytest.raises(PolicyError, match="fn returned no floating tensor") as caught:
        locate(lambda: value, nn.Linear(1, 1))
    assert "write  mezzo.overflow.locate(lambda: criterion(model(x), y), model)" in str(caught.value)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_no_scale(scale):
    with pytest.raises(PolicyError, match=r"the loss scale is .*\n.*a scale is positive and finite"):
        locate(lambda: torch.ones(()), nn.Linear(1, 1), loss_scale=scale)


def test_a_wrong_policy():
    with pytest.raises(PolicyError, match="unknown level 'O9'"):
        locate(lambda: torch.ones(()), nn.Linear(1, 1), policy="O9")


def test_a_loss_without_a_graph_is_still_checked():
    model = nn.Linear(2, 2).requires_grad_(False)
    assert locate(lambda: model(torch.ones(1, 2)).sum(), model) is None
    assert locate(lambda: (model(torch.ones(1, 2)) * 0).log().sum(), model).op == "log"
