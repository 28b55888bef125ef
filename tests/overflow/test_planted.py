"""A NaN in one kernel of a model that nobody has seen, forward, computed again or backward, is found at that kernel.

Models, policies and kernels are drawn. A pass without a search tells in which module each kernel runs, and another one
whether the NaN reaches the loss or a gradient.
"""

import math
import random
from contextlib import nullcontext
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.overflow import locate

WIDTH = 32  # a block of MXFP8
#: What a search runs itself to look at numbers; casts, which are blamed with what they cast; memory and views.
NOT_PLANTED = ("abs", "clone", "detach", "_to_copy", "copy_", "new_empty_strided", "empty_like", "_unsafe_view")
POLICIES = (None, "O1,bf16,emulate=true", "O1,fp16,emulate=true,norms=fp32_math", "O1,bf16,mxfp8=linear,emulate=true")


def scaled(x):
    return x.mul_(0.5) if x._base is None and x.grad_fn is not None else x * 0.5


def turned(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def mixed(x):
    return torch.cat([x[..., WIDTH // 2 :].sin(), x[..., : WIDTH // 2]], -1)


def scores(x):
    return (x @ x.transpose(-1, -2) / WIDTH).softmax(-1) @ x


PLAIN = (torch.tanh, torch.sigmoid, functional.gelu, functional.silu, torch.cos, scaled, turned, mixed, scores)


class Own(nn.Module):
    """A weight of its own, and a few functions behind it."""

    def __init__(self, functions):
        super().__init__()
        self.linear, self.functions = nn.Linear(WIDTH, WIDTH), functions

    def forward(self, x):
        for function in self.functions:
            x = function(self.linear(x))
        return x


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Again(nn.Module):
    """Computed once more in the backward pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def drawn(dice, depth=2):
    layer = dice.choice(["own", "residual", "again", "chain"] if depth else ["own"])
    if layer == "own":
        return Own(dice.choices(PLAIN, k=dice.randint(1, 2)))
    if layer == "chain":
        return nn.Sequential(*(drawn(dice, depth - 1) for _ in range(dice.randint(2, 3))))
    return (Residual if layer == "residual" else Again)(drawn(dice, depth - 1))


class Planter(TorchDispatchMode):
    """Notes each kernel with the module that runs it, and writes NaN into the result of one of them.

    It is around a search, so that the search takes the NaN for the kernel's own.
    """

    def __init__(self, model, at=None):
        super().__init__()
        self.at, self.seen, self.running, self.gradient_of = at, [], ["(loss)"], "(loss)"
        self.is_on, self.is_backward, self._hooks = True, False, []
        for path, module in model.named_modules():
            self._hooks += (
                module.register_forward_pre_hook(partial(self._entered, path)),
                module.register_forward_hook(self._left, always_call=True),
            )

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()

    def end_forward(self, loss):
        """Look away until the gradient of the loss is there: what a search multiplies the loss with is its own."""
        self.is_on, self.is_backward = False, True
        loss.register_hook(lambda _: setattr(self, "is_on", True))

    def _entered(self, path, module, args):
        self._made(args[0], self.running[-1])
        self.running.append(path)

    def _left(self, module, args, out):
        self._made(out, self.running.pop())

    def _made(self, tensor, path):
        """Learn which module made a tensor: of those that hand it on the innermost."""
        if tensor is None or not tensor.requires_grad or getattr(tensor, "made_at", None) == tensor._version:
            return
        tensor.made_at = tensor._version
        tensor.register_hook(lambda _: setattr(self, "gradient_of", path))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        first = out[0] if isinstance(out, tuple) else out
        if (
            not self.is_on
            or name in NOT_PLANTED
            or func.is_view
            or not isinstance(first, torch.Tensor)
            or not first.is_floating_point()
        ):
            return out
        is_gradient = self.is_backward and len(self.running) == 1
        location = ("backward", self.gradient_of) if is_gradient else ("forward", self.running[-1])
        if len(self.seen) == self.at:
            first.as_strided((1,), (1,)).fill_(math.nan)
        self.seen.append((func._schema.name, *location))
        return out


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_a_nan_in_a_random_kernel_of_a_random_model(seed):
    dice = random.Random(seed)
    torch.manual_seed(seed)
    model, x = drawn(dice), torch.randn(2, 3, WIDTH)
    policy = dice.choice(POLICIES)

    def run(at, step):
        """Run a step under a planter, and return what it saw and what the step returned."""
        with Planter(model, at) as planter:

            def forward():
                with nullcontext() if policy is None else mezzo.autocast(policy):
                    loss = model(x).float().square().mean()
                planter.end_forward(loss)
                return loss

            return planter.seen, step(forward)

    def plain(forward):
        model.zero_grad()
        loss = forward()
        loss.backward() if policy is None else mezzo.autocast(policy).run_backward([loss])
        return all(bool(tensor.isfinite().all()) for tensor in (loss, *(p.grad for p in model.parameters())))

    kernels, is_finite = run(None, plain)
    assert is_finite
    at = dice.randrange(len(kernels))
    again, is_finite = run(at, plain)
    assert again == kernels
    model.zero_grad()
    _, overflow = run(at, lambda forward: locate(forward, model, policy=policy))
    assert (overflow is None) == is_finite
    if overflow is not None:
        kernel, phase, module = kernels[at]
        assert (overflow.kernel, overflow.phase, overflow.tensor.num_nan) == (kernel, phase, 1)
        if overflow.tensor.name != "sum of gradients":  # what autograd adds up by itself belongs to no module
            assert overflow.module == module
