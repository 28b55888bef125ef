"""Gradients that a program makes, edits, looks at or leaves: plain torch's numbers, or a refusal before any write."""

import contextlib
import itertools
import warnings

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import mezzo
from mezzo import StateError
from mezzo.compat.torch import GradScaler
from mezzo.session.grad_scaler import SessionScaler

from .loops import EVERY, INF, LOW, Syncs, assert_near, assert_same, batch, loss_of, network, session

#: Without a loss scale, and with one.
PLAIN, SCALED = EVERY[::2][:1] + LOW[1::2], [EVERY[1], *LOW[::2]]
MAKES = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "mezzo": lambda params: mezzo.optim.SGD(params, lr=0.1, momentum=0.9),
}


class Loop:
    """A loop of some style over a model: ``amp`` is ``None`` in plain torch."""

    def __init__(self, style, policy, make=MAKES["torch"], unscales=False, **options):
        self.model, self.style, self.unscales = network(), style, unscales
        self.optimizer = make(self.model.parameters())
        self.params = list(self.model.parameters())
        self.amp = None
        if style != "plain":
            begin = mezzo.attach if style == "attach" else mezzo.MixedPrecision
            self.amp = begin(self.model, self.optimizer, policy, **options)

    def losses(self, number):
        x, y = batch(number)
        with contextlib.nullcontext() if self.amp is None else self.amp.autocast():
            out = self.model(x).float()
        return functional.cross_entropy(out, y), out.square().mean()

    def backward(self, loss):
        (self.amp.backward if self.style == "five lines" else torch.Tensor.backward)(loss)
        if self.unscales:
            self.amp.unscale_()

    def step(self):
        (self.amp if self.style == "five lines" else self.optimizer).step()

    def clear(self, how="session"):
        target = self.amp if self.style == "five lines" and how != "optimizer" else self.optimizer
        target.zero_grad(set_to_none=how != "zeros")

    def write(self, gradients):
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient

    def run(self, make, clear="session", steps=4):
        with contextlib.closing(self.amp) if self.amp is not None else contextlib.nullcontext():
            for number in range(steps):
                make(self, number, clear)
                self.step()
                self.clear(clear)
        return [param.detach().clone() for param in self.params]


def apart(one, two):
    """Two tasks' gradients without what is in each other's way (PCGrad)."""
    dot = sum((a * b).sum() for a, b in zip(one, two, strict=True)).clamp(max=0)
    return [a + b - dot / sum((grad * grad).sum() for grad in two) * b for a, b in zip(one, two, strict=True)]


def surgery(loop, number, clear):
    gradients = []
    for task in range(2):
        loop.backward(loop.losses(number)[task])
        gradients.append([param.grad.clone() for param in loop.params])
        loop.clear(clear)
    loop.write(apart(*gradients))


def descent(loop, number, _):
    """Of a Jacobian: the gradients of each loss are asked for, and what they come to is written."""
    loop.write(apart(*(torch.autograd.grad(loss, loop.params) for loss in
                       (loop.losses(number)[0], loop.losses(number)[1]))))  # fmt: skip


def asked_for(loop, number, _):
    ask = torch.autograd.grad if loop.amp is None else loop.amp.grad
    loop.write(apart(*(ask(loop.losses(number)[task], loop.params) for task in range(2))))


def by_hand(loop, number, _):
    generator = torch.Generator().manual_seed(number)
    loop.write([torch.randn(param.shape, generator=generator) for param in loop.params])


def in_place(loop, number, _):
    """Written into what a step has left."""
    if number == 0:
        by_hand(loop, number, _)
    generator = torch.Generator().manual_seed(number)
    for param in loop.params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.copy_(torch.randn(param.shape, generator=generator))


MADE = [surgery, descent, asked_for, by_hand, in_place]


def is_like_plain_torch(make, *args, clear="session", **options):
    weights = Loop(*args, **options).run(make, clear)
    right = Loop("plain", None, *args[2:]).run(make, clear)
    assert_near(weights, right, list(network().parameters()), share=0.02)


@pytest.mark.parametrize("policy", PLAIN)
@pytest.mark.parametrize("make", MADE)
def test_without_a_scale_they_are_taken(make, policy):
    for clear, optimizer in (("session", "torch"), ("zeros", "fused"), ("optimizer", "mezzo"), ("session", "mezzo")):
        is_like_plain_torch(make, "five lines", policy, MAKES[optimizer], clear=clear)


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("make", MADE)
def test_attached_they_are_taken_as_they_are(make, policy):
    for clear, optimizer in (("session", "torch"), ("zeros", "mezzo")):
        is_like_plain_torch(make, "attach", policy, MAKES[optimizer], clear=clear)


@pytest.mark.parametrize("policy", SCALED)
@pytest.mark.parametrize("make, clear", [(surgery, "session"), (surgery, "zeros"), *((m, "session") for m in
                                         (descent, by_hand, in_place))])  # fmt: skip
def test_of_the_five_lines_a_scale_refuses_those_that_it_may_be_in(make, clear, policy):
    loop = Loop("five lines", policy)
    before = [param.detach().clone() for param in loop.params]
    make(loop, 0, clear)
    kept = [param.grad.clone() for param in loop.params]
    for call in (loop.amp.step, loop.amp.unscale_):
        with pytest.raises(StateError, match=r"before backward\(\)") as caught:
            call()
        for word in ("0.weight", "amp.unscale_()", "amp.grad(", "mezzo.attach(", "bfloat16"):
            assert word in str(caught.value)
    assert_same(before, [param.detach() for param in loop.params])
    assert_same(kept, [param.grad for param in loop.params])
    loop.clear()
    loop.backward(loop.losses(0)[0])
    assert not loop.amp.step().skipped


@pytest.mark.parametrize("policy", SCALED)
def test_of_the_five_lines_those_that_the_session_has_given_out_plain_are_taken(policy):
    for optimizer, clear in itertools.product(("torch", "mezzo"), ("session", "zeros", "optimizer")):
        is_like_plain_torch(surgery, "five lines", policy, MAKES[optimizer], clear=clear, unscales=True)
    is_like_plain_torch(asked_for, "five lines", policy, MAKES["mezzo"])


@pytest.mark.parametrize("policy", SCALED)
def test_copies_of_scaled_gradients_are_not_added_to(policy):
    loop = Loop("five lines", policy)
    loop.backward(loop.losses(0)[0])
    copies = [param.grad.clone() for param in loop.params]
    loop.clear()
    loop.write(copies)
    with pytest.raises(StateError, match="cleared while they did"):
        loop.backward(loop.losses(0)[1])
    loop.clear()
    loop.write([torch.zeros_like(param) for param in loop.params])  # those of a fresh run are added to
    loop.clear()
    loop.backward(loop.losses(0)[1])
    loop.amp.step()


@pytest.mark.parametrize("policy", ["O0", LOW[1]])
def test_neither_the_last_steps_nor_zeros_are_a_programs(policy):
    model, _, amp = session(policy)
    amp.backward(loss_of(model, 0, amp))
    amp.step()
    for clear in (lambda: None, lambda: amp.zero_grad(set_to_none=False), amp.zero_grad):
        clear()
        with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
            amp.step()
    amp.backward(loss_of(model, 1, amp))
    amp.step()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(StateError, match="the last step's gradients are still there"):
        amp.step()


# A program's code in a step -------------------------------------------------------------------------------------------


def clipped_by_a_hook(make):
    def made(params):
        params = list(params)
        optimizer = make(params)
        optimizer.seen = []

        def clip(*_):
            optimizer.seen.append([param.grad.dtype for param in params])
            clip_grad_norm_(params, 0.05)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    return made


def normed_by_its_class(make):
    def made(params):
        plain = make(params)

        class Normed(type(plain)):
            def step(self, closure=None):
                for param in self.param_groups[0]["params"]:
                    param.grad = param.grad / param.grad.norm()
                return super().step(closure)

        plain.__class__ = Normed
        return plain

    return made


def trained(loop, number, _):
    loop.backward(loop.losses(number)[0])


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("style", ["five lines", "attach"])
@pytest.mark.parametrize("wraps", [clipped_by_a_hook, normed_by_its_class])
def test_code_in_a_step_sees_gradients_without_the_scale_and_what_it_writes_counts(wraps, style, policy):
    for make in MAKES.values():
        is_like_plain_torch(trained, style, policy, wraps(make))
    if wraps is clipped_by_a_hook and "bfloat16" not in policy:
        loop = Loop(style, policy, wraps(MAKES["mezzo"]))
        loop.run(trained, steps=1)
        assert set(loop.optimizer.seen[0]) == {torch.float32}


@pytest.mark.parametrize("style", ["five lines", "attach"])
def test_it_sees_clipped_gradients_and_a_skipped_step_writes_nothing(style):
    for make in MAKES.values():
        norms = []
        loop = Loop(style, LOW[2], make, max_grad_norm=0.05)
        loop.optimizer.register_step_pre_hook(
            lambda *_, params=loop.params, norms=norms: norms.append(float(clip_grad_norm_(params, INF)))
        )
        with contextlib.closing(loop.amp):
            trained(loop, 0, None)
            loop.step()
            assert norms == [pytest.approx(0.05, rel=1e-3)]
            loop.clear()
            before = [param.detach().clone() for param in loop.params]
            trained(loop, 1, None)
            loop.params[0].grad[0] = INF
            loop.step()
            assert_same(before, [param.detach() for param in loop.params])


def test_without_such_code_a_step_reads_gradients_once():
    """What its kernel unscales stays as it is."""
    loop = Loop("five lines", LOW[2], MAKES["mezzo"])
    trained(loop, 0, None)
    kept = [param.grad.clone() for param in loop.params]
    loop.step()
    assert_same(kept, [param.grad for param in loop.params])


# What a skipped step leaves -------------------------------------------------------------------------------------------


def cleared_where_it_was_taken(style, policy, make, zeros, steps=12, bad=(2, 3, 7)):
    """A loop that clears only after steps that have moved weights; plain torch leaves the bad batches out."""
    loop = Loop("plain" if style == "scaler" else style, policy, make)
    scaler = GradScaler("cpu", init_scale=256.0, enabled=style == "scaler")
    taken = 0
    with contextlib.closing(loop.amp) if loop.amp is not None else contextlib.nullcontext():
        for number in range(steps):
            if style == "plain" and number in bad:
                continue
            before = loop.params[0].detach().clone()
            scaler.scale(loop.losses(number)[0]).backward()
            if number in bad:
                loop.params[0].grad[0] = INF
            scaler.step(loop.optimizer)
            scaler.update()
            if not torch.equal(before, loop.params[0]):
                taken += 1
                loop.optimizer.zero_grad(set_to_none=not zeros)
    return taken, [param.detach().clone() for param in loop.params]


@pytest.mark.parametrize("style, policy", [("scaler", None), *(("attach", policy) for policy in EVERY)])
def test_it_is_dropped_by_the_next_pass(style, policy):
    for name, zeros in (("torch", False), ("fused", True), ("mezzo", False)):
        taken, weights = cleared_where_it_was_taken(style, policy, MAKES[name], zeros)
        _, right = cleared_where_it_was_taken("plain", None, MAKES[name], zeros)
        assert taken == 9
        assert_near(weights, right, list(network().parameters()), share=0.02)


def test_what_a_step_has_taken_is_added_to_and_nothing_waits_for_the_device():
    make, ends = MAKES["mezzo"], []
    for style in ("plain", "attach"):
        loop = Loop(style, EVERY[1], make)
        with contextlib.closing(loop.amp) if loop.amp is not None else contextlib.nullcontext():
            for number in range(4):
                with Syncs() as syncs:
                    trained(loop, number, None)
                    loop.step()
                assert syncs.count == 0
        ends.append([param.detach().clone() for param in loop.params])
    assert_same(*ends)


# What a step is given -------------------------------------------------------------------------------------------------


class Asks(torch.optim.SGD):
    """Its step takes more than a closure, and returns what it was given."""

    def step(self, closure=None, bs=1, *, name=""):
        loss = None if closure is None else closure()
        super().step()
        return loss, bs, name


@pytest.mark.parametrize("style", ["plain", "attach", "scaler"])
def test_a_step_hands_on_what_it_is_given(style):
    loop = Loop("plain" if style == "scaler" else style, LOW[0], lambda params: Asks(params, lr=0.1))
    scaler = GradScaler("cpu", init_scale=256.0, enabled=style == "scaler")
    seen, call = (
        [],
        (lambda *a, **k: scaler.step(loop.optimizer, *a, **k)) if style == "scaler" else loop.optimizer.step,
    )

    def closure():
        loop.optimizer.zero_grad()
        loss = loop.losses(0)[0]
        scaler.scale(loss).backward()
        seen.append(loss)
        return loss

    with contextlib.closing(loop.amp) if loop.amp is not None else contextlib.nullcontext():
        for args, kwargs in (((), {"bs": 2}), ((None, 3), {}), ((), {"closure": None, "name": "x"})):
            closure()
            assert call(*args, **kwargs) == (None, kwargs.get("bs", 3 if args else 1), kwargs.get("name", ""))
            scaler.update()
        if style == "plain":
            assert call(closure, bs=2) == (seen[-1], 2, "")
        else:  # what the closure returns first
            assert call(closure, bs=2) is seen[-1]
            scaler.update()
            assert call(bs=2, closure=closure) is seen[-1]


# Hooks in a pass ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("style", ["five lines", "attach", "scaler"])
@pytest.mark.parametrize("method", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_modules_are_warned_of_once_by_name(method, style, policy):
    loop = Loop("attach" if style == "scaler" else style, policy)
    scaler = SessionScaler(loop.amp) if style == "scaler" else None
    getattr(loop.model[3], method)(lambda *_: None)
    with contextlib.closing(loop.amp), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            loss = loop.losses(number)[0]
            scaler.scale(loss).backward() if scaler else loop.backward(loss)
            loop.clear()
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (policy in SCALED)
    for words in ("hooks of modules see gradients that carry the loss scale\n  where  3\n", "amp.loss_scale"):
        assert all(words in text for text in texts)


def test_no_other_module_is_warned_of():
    loop = Loop("attach", LOW[0])
    beside = torch.nn.Linear(8, 3)
    beside.register_full_backward_hook(lambda *_: None)
    with contextlib.closing(loop.amp):
        beside(batch(0)[0].requires_grad_()).sum().backward()  # a pass of its own
        trained(loop, 0, None)


def in_the_pass(style, policy, clips, micro_batches=1):
    """Optimizers of one parameter each, which hooks step once its gradient is accumulated."""
    model, seen = network(), []
    optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}
    amp = mezzo.attach(model, list(optimizers.values()), policy) if style == "attach" else None

    def step(param):
        seen.append(param.grad.clone())
        if clips:
            clip_grad_norm_(param, 0.01)
        if len(seen) > len(optimizers) * (micro_batches - 1):
            optimizers[param].step()
            optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    with contextlib.closing(amp) if amp is not None else contextlib.nullcontext():
        for number in range(3):
            loss_of(model, number, amp).backward()
            assert micro_batches > 1 or all(param.grad is None for param in optimizers)
        return seen, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("clips, micro_batches", [(False, 1), (True, 1), (False, 2)])
def test_hooks_that_step_see_gradients_without_the_scale_and_are_not_warned_of(clips, micro_batches, policy):
    right, ends = in_the_pass("plain", None, clips, micro_batches)
    seen, weights = in_the_pass("attach", policy, clips, micro_batches)
    for mine, theirs in zip(seen[:4], right[:4], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=2e-3)
    assert_near(weights, ends, list(network().parameters()), share=0.02)


@pytest.mark.parametrize("policy", [EVERY[1], LOW[0], LOW[2]])
def test_an_overflow_that_they_meet_is_skipped(policy):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.closing(mezzo.attach(model, optimizer, policy)) as amp:
        seen = []
        model[3].bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
        before = [param.detach().clone() for param in model.parameters()]
        (loss_of(model, 0, amp) * torch.tensor(3e38)).backward()
        optimizer.step()
        assert amp.last_step.skipped
        assert_same(before, [param.detach() for param in model.parameters()])
        optimizer.zero_grad()
        loss_of(model, 0, amp).backward()
        optimizer.step()
        assert not amp.last_step.skipped
        torch.testing.assert_close(seen[1], model[3].bias.grad)
