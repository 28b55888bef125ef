"""Gradients of weights in halves: 16 bits where that loses nothing, and what memory a step takes."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo.compat.torch import GradScaler
from mezzo.weights import Halves

from .loops import assert_same, attached

FORMATS = [
    f"dtype={dtype},emulate={emulate}"
    for dtype in ("bfloat16", "float16,loss_scale=1024")
    for emulate in ("true", "false")
]


def built(policy):
    """A model whose weights lie on the grid of the policy's format, where no cast has a tie."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.to(mezzo.Policy.parse(policy).dtype))
    return model


def loss_of(model, number=0):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    return functional.cross_entropy(model(x), y)


def made(params):
    return mezzo.optim.AdamW(params, lr=1e-2)


def begun(level, form, optimizer=made):
    model = built(f"{level},{form}")
    built_for = optimizer(model.parameters())
    return model, built_for, mezzo.MixedPrecision(model, built_for, f"{level},{form}")


def once(model, amp, read=loss_of):
    with amp.autocast():
        loss = read(model)
    amp.backward(loss)


def gradients(model):
    return [param.grad for param in model.parameters()]


def wide(model):
    return [gradient.float() for gradient in gradients(model)]


def are_low(model):
    return [gradient.dtype != torch.float32 for gradient in gradients(model)]


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_single_cast_hands_back_has_16_bits_and_is_what_O1_widens(form):
    grads = []
    for level in ("O1", "O2"):
        model, _, amp = begun(level, form)
        for number in range(3):
            once(model, amp, lambda m, n=number: loss_of(m, n))
            assert are_low(model) == [level == "O2", False] * 2
            grads.append(wide(model))
            amp.zero_grad()
    assert_same(grads[:3], grads[3:])


def twice(model):
    return loss_of(model) + loss_of(model, 1)


def with_decay(model):
    return loss_of(model) + sum((param**2).sum() for param in model.parameters())


def two_passes(model, amp):
    once(model, amp)
    once(model, amp, lambda m: loss_of(m, 1))


def unscaled(model, amp):
    once(model, amp)
    amp.unscale_()


#: What else reads a weight, or is done with its gradient; each is done under O1, too.
WIDE = {
    "used twice": lambda model, amp: once(model, amp, twice),
    "read in FP32": lambda model, amp: once(model, amp, with_decay),
    "two passes": two_passes,
    "unscale_": unscaled,
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", WIDE)
def test_other_gradients_are_fp32_and_bit_for_bit_those_of_O1(name, form):
    grads = []
    for level in ("O1", "O2"):
        model, _, amp = begun(level, form)
        WIDE[name](model, amp)
        assert are_low(model) == [False] * 4
        grads.append(gradients(model))
    assert_same(*grads)


@pytest.mark.parametrize("form", FORMATS[::2])
def test_gradients_are_fp32_for_optimizers_that_are_not_mezzos_and_in_loops_of_the_users_own(form):
    model, _, amp = begun("O2", form, lambda params: torch.optim.AdamW(params, fused=True))
    once(model, amp)
    assert are_low(model) == [False] * 4
    model = built(f"O2,{form}")
    with attached(model, made(model.parameters()), f"O2,{form}"):
        loss_of(model).backward()
        assert are_low(model) == [False] * 4
    model = built(f"O2,{form}")
    handle, scaler = mezzo.prepare(model, f"O2,{form}"), GradScaler("cpu")
    with handle.autocast():
        loss = loss_of(model)
    scaler.scale(loss).backward()
    assert are_low(model) == [False] * 4


@pytest.mark.parametrize("form", FORMATS[::2])
def test_gradients_that_are_asked_for_are_as_ever(form):
    """At any place of a window."""
    grads = []
    for level in ("O1", "O2"):
        model, _, amp = begun(level, form)
        weight = model[0].weight
        for number in range(3):
            with amp.autocast():
                grads.append(amp.grad(loss_of(model, 5), [weight])[0])
                asked = loss_of(model, 6)
            grads.append(torch.autograd.grad(asked, weight)[0])
            if number == 0:
                once(model, amp)
            elif number == 1:
                amp.step()
                amp.zero_grad()
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert_same(grads[:4], grads[6:10])  # before the step, after which a weight may lie on a tie


@pytest.mark.parametrize("form", FORMATS[::2])
@pytest.mark.parametrize("ends", ["zero_grad", "skipped", "optimizer"])
def test_after_a_window_all_is_as_it_was(form, ends):
    model, optimizer, amp = begun("O2", form)
    once(model, amp)
    if ends == "skipped":
        model[0].bias.grad[0] = float("inf")
        assert amp.step().skipped
    (optimizer if ends == "optimizer" else amp).zero_grad()
    for param in model.parameters():
        param.grad = torch.ones_like(param)  # FP32, as of any FP32 parameter
        param.grad = None
    loss_of(model).backward()  # outside any region, and of no session's
    assert are_low(model) == [False] * 4
    amp.zero_grad()
    once(model, amp)
    assert are_low(model) == [True, False] * 2
    amp.step()


@pytest.mark.parametrize("form", FORMATS[::2])
def test_a_gradient_that_a_program_assigns_is_what_steps(form):
    ends = []
    for level in ("O1", "O2"):
        model, _, amp = begun(level, form)
        once(model, amp)
        for param in model.parameters():
            param.grad = torch.full_like(param, 1024.0 * 2**-3)
        amp.step()
        ends.append([param.detach().clone() for param in model.parameters()])
    assert_same(*ends)


def alive():
    """Return how many bytes of memory tensors have, this moment."""
    gc.collect()
    tensors = [
        candidate
        for candidate in gc.get_objects()
        if isinstance(candidate, torch.Tensor) and not isinstance(candidate, Halves)
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.filterwarnings("ignore")  # gc finds objects of torch's that warn
@pytest.mark.parametrize(
    "optimizer, most, while_stepping",
    [
        (made, 14, 14),
        (partial(torch.optim.AdamW, foreach=True), 16, 20),
        (partial(torch.optim.AdamW, fused=True), 16, 16),
    ],
    ids=["mezzo", "torch's foreach", "torch's fused, in parts"],
)
def test_bytes_a_parameter(optimizer, most, while_stepping):
    before, counts = alive(), []
    model = nn.Linear(512, 512, bias=False)
    optimizer = optimizer(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: counts.append(alive()))
    amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16")
    for _ in range(3):
        amp.zero_grad()
        once(model, amp, lambda model: model(torch.ones(1, 512)).sum())
        amp.step()
    numel = 512 * 512
    assert (alive() - before) / numel == pytest.approx(most, abs=0.1)
    assert (counts[-1] - before) / numel == pytest.approx(while_stepping, abs=0.1)
