"""locate: the known culprit is found, finite passes give nothing, and nothing is left behind: bit for bit."""

import random
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import Policy
from mezzo.overflow import locate

from ..support.refusals import bits, facts

FP16 = "O1,dtype=float16,emulate=true"


@pytest.mark.parametrize("level", ["O1", "O3"])
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
    read = {read.name: read for read in overflow.inputs}
    assert list(read) == ["input 0", "first.weight"]
    assert (read["input 0"].dtype, read["first.weight"].dtype) == ("float16", "float16")
    assert read["input 0"].largest == float(x.abs().max())
    assert read["input 0"].smallest == float(x.abs().min())
    assert read["input 0"].share == float(x.abs().max()) / 65504
    assert read["input 0"].headroom == pytest.approx(np.log2(65504 / float(x.abs().max())))
    assert overflow.code == "return self.second(torch.relu(self.first(x)))"
    assert overflow.line.rpartition(":")[0].endswith("conftest.py")


@pytest.mark.parametrize("name, loss_scale", [("transformer", 2.0**25), ("conv", 2.0**40), ("chain", 3e7)])
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
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    for layer, value in zip(model, (0.5, 0.25), strict=True):
        nn.init.zeros_(layer.weight).data[0, 0] = value  # beside zeros: what contracts nothing is no product

    def fn():
        with mezzo.autocast(FP16):
            return model(torch.tensor([[1000.0, 0.0]])).float().sum()

    # At 2^9 the gradients are 2^9·500 (of the second weight), 2^7 and 2^7·1000: both weights' are too large.
    overflow = locate(fn, model, policy=FP16, loss_scale=2.0**9)
    assert (overflow.module, overflow.op, overflow.tensor.name) == ("1", "linear", "gradient of 1.weight")
    assert overflow.needed == 2**9 * 500
    assert "with 2**7 every gradient is finite" in overflow.cause  # 2^7·500 = 64000
    assert overflow.phase == "backward"
    assert overflow.code == "return model(torch.tensor([[1000.0, 0.0]])).float().sum()"
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


# What is not to blame ---------------------------------------------------------------------------------


def test_masks_of_other_kinds():
    triangle = torch.full((5, 5), float("-inf")).triu(1)

    class Masked(nn.Module):
        def __init__(self, given):
            super().__init__()
            self.layer, self.given = nn.Linear(5, 5), given
            self.register_buffer("mask", triangle)

        def forward(self, x, mask=None):
            scores = self.layer(x)
            match self.given:
                case "buffer":
                    scores = scores + self.mask
                case "argument":
                    scores = scores + mask
                case "logarithm":
                    scores = scores + torch.ones(5, 5).tril().log()
                case "sum":  # beyond float16's range, and so -inf
                    scores = scores.half() + torch.full((5, 5), -60000.0).triu(1).half() * 2
                case "fused":
                    return functional.scaled_dot_product_attention(scores, scores, scores, mask)
            return scores.softmax(-1)

    for given in ("buffer", "argument", "logarithm", "sum", "fused"):
        model, x = Masked(given), torch.randn(2, 5, 5)

        def fn(value=0.0, model=model, x=x):
            with mezzo.autocast(FP16):
                return (model(x + value, triangle) ** 2).sum()

        assert locate(fn, model, policy=FP16) is None, given
        with torch.no_grad():  # where gradients are off it runs as well
            overflow = locate(lambda: fn(1e5), model, policy=FP16)
        assert torch.is_grad_enabled()
        assert (overflow.op, overflow.tensor.name) == ("linear", "input 0 cast to float16"), given


@dataclass
class Output:
    logits: torch.Tensor
    aux: tuple


def test_what_leads_nowhere_and_outputs_of_every_kind():
    model, x, y = nn.Linear(4, 4), torch.randn(2, 4), torch.tensor([0, 1])

    def fn():  # masked logits beside the loss
        logits = model(x).masked_fill(torch.tensor([False, False, False, True]), float("-inf"))
        return functional.cross_entropy(logits, y), logits

    assert locate(fn, model) is None
    kinds = (lambda *parts: {"logits": parts[0], "aux": parts[1]}, lambda *parts: parts, Output)

    class Structured(nn.Module):
        def __init__(self, container):
            super().__init__()
            self.layer, self.container = nn.Linear(4, 4), container
            nn.init.ones_(self.layer.weight)
            nn.init.zeros_(self.layer.bias)

        def forward(self, x):
            logits = self.layer(x)
            return self.container(logits, (logits.argmax(-1), logits.sqrt()))

    for container in kinds:
        model = Structured(container)
        assert locate(lambda: model(-torch.ones(2, 4)), model).op == "sqrt"  # noqa: B023 - called at once
        assert locate(lambda: model(torch.ones(2, 4)), model) is None  # noqa: B023
    pair = Structured(kinds[1])
    assert locate(lambda: pair(-torch.ones(2, 4))[0].sum(), pair) is None  # of what the loss does not read


def test_in_place_ops():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def fn():
        with mezzo.autocast(FP16):
            return model(x).mul_(1e5).float().mean()

    with mezzo.autocast(FP16), torch.no_grad():
        before = model(x)
    overflow = locate(fn, model, policy=FP16)
    assert (overflow.op, overflow.kind) == ("mul_", "range")
    assert overflow.inputs[0].largest == float(before.abs().max())  # as it was before
    assert overflow.needed == pytest.approx(float(before.abs().max()) * 1e5)


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


def test_a_loss_without_a_graph_is_still_checked():
    model = nn.Linear(2, 2).requires_grad_(False)
    assert locate(lambda: model(torch.ones(1, 2)).sum(), model) is None
    assert locate(lambda: (model(torch.ones(1, 2)) * 0).log().sum(), model).op == "log"


# Nothing is left behind -------------------------------------------------------------------------------


def everything(model, x):
    modes = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    return (
        facts(model, x),
        [(id(p.grad), p._version) for p in (*model.parameters(), x)],
        [module.training for module in model.modules()],
        bits([torch.get_rng_state()]),
        (random.getstate(), str(np.random.get_state())),
        (*map(list, modes), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
    )


@pytest.mark.parametrize("policy", [FP16, "O2,dtype=float16,emulate=true"])
def test_everything_is_as_it_was(make, policy):
    model, x = make("conv")
    prepared = mezzo.prepare(model, policy)
    x.requires_grad_()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    x.grad = torch.ones_like(x)
    model.drop.eval()
    before = everything(model, x)

    def fn(ending):
        with prepared.autocast():
            if ending == "model raises":
                model.conv(torch.ones(1))
            output = model(x * (torch.rand(()) + random.random() + float(np.random.rand())))
        if ending == "fn raises":
            raise KeyError("the user's own error")
        loss = output.float().square().sum()
        return loss.log() * torch.inf if ending == "forward" else loss

    for ending in ("finite", "forward", "backward", "fn raises", "model raises"):
        raises = pytest.raises((KeyError, RuntimeError)) if ending.endswith("raises") else nullcontext()
        with raises:
            scale = 2.0**127 if ending == "backward" else 1.0
            overflow = locate(lambda: fn(ending), model, policy=policy, loss_scale=scale)  # noqa: B023 - called at once
            assert (overflow is None) == (ending == "finite"), ending
        assert everything(model, x) == before, ending


def test_hooks_that_run_after_accumulation_do_not_run():
    model, stepped = nn.Linear(2, 2), []
    hook = model.weight.register_post_accumulate_grad_hook(stepped.append)
    assert locate(lambda: model(torch.ones(1, 2)).sum(), model) is None
    assert not stepped
    model(torch.ones(1, 2)).sum().backward()
    assert len(stepped) == 1  # it is there again
    hook.remove()


def test_a_distributed_model_reduces_nothing(alone):
    model, reduced = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), []

    def hook(state, bucket):
        reduced.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    overflow = locate(lambda: (model(torch.ones(1, 2)) * 0).sum().sqrt(), model)
    assert (overflow.kind, overflow.op) == ("zero", "sqrt")
    assert not reduced
    model(torch.ones(1, 2)).sum().backward()
    assert reduced
