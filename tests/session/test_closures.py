"""Optimizers that evaluate the loss themselves, against the same loop in plain torch and against a copy kept before."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import MixedPrecision, StateError

from .loops import INF, Syncs, assert_near, assert_same, attached, batch, built, loss_of, network

LEVELS = ["O0,loss_scale=dynamic", "O1,emulate=true", "O2,emulate=true"]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as davda54/sam has it."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        scale = self.param_groups[0]["rho"] / (self._grad_norm() + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self):
        grads = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack(grads), p=2)


class Twice(torch.optim.Optimizer):
    """Evaluates twice, and steps an optimizer inside after each; moves everything before. No no_grad."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)

    def step(self, closure):
        for _ in range(2):
            self.param_groups[0]["evaluations"] = self.param_groups[0].get("evaluations", 0) + 1
            for p in self.param_groups[0]["params"]:
                p.data.mul_(0.9)
                self.state[p].setdefault("seen", torch.zeros(())).add_(1)
            closure()
            self.base_optimizer.step()


OPTIMIZERS = {
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.2, max_iter=4, history_size=5),
    "lbfgs-wolfe": lambda params: torch.optim.LBFGS(params, max_iter=5, line_search_fn="strong_wolfe"),
    "sam": lambda params: SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    "sam-adamw": lambda params: SAM(params, torch.optim.AdamW, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "mezzo's adamw": lambda params: mezzo.optim.AdamW(params, lr=1e-2),
    "twice": lambda params: Twice(params, lr=0.1, momentum=0.9),
}
ASKS_ONCE = ("sgd", "mezzo's adamw")


class Loop:
    """One training loop, under a session or in plain torch; gradients can be spoilt in a chosen evaluation."""

    def __init__(self, name, policy=None, clip=None, **options):
        self.model = network()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.clip = clip
        self.amp = policy and MixedPrecision(self.model, self.optimizer, policy, max_grad_norm=clip, **options)
        self.name, self.evaluations, self.spoil = name, 0, None

    def loss(self, step):
        return loss_of(self.model, step, self.amp)

    def backward(self, loss):
        if self.amp is not None:
            self.amp.backward(loss)
        else:
            loss.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.evaluations == self.spoil:
            self.model[3].weight.grad[0, 0] = INF
        self.evaluations += 1

    def closure(self, step):
        def evaluate():
            self.optimizer.zero_grad()
            loss = self.loss(step)
            self.backward(loss)
            return loss

        return evaluate

    def step(self, step):
        """Take a step on a batch; LBFGS is for a loss that stays the same, and gets one batch throughout."""
        step = 0 if self.name.startswith("lbfgs") else step
        if self.name.startswith("sam"):
            self.backward(self.loss(step))
        if self.amp is None:
            self.optimizer.step(self.closure(step))
            self.optimizer.zero_grad()
            return None
        happened = self.amp.step(closure=self.closure(step))
        self.amp.zero_grad()
        return happened

    def snapshot(self):
        masters = list(self.amp.master_params()) if self.amp else []
        inner = getattr(self.optimizer, "base_optimizer", self.optimizer)
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), inner.state_dict(), masters))


# The optimizer sees the true gradients ------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_trajectories_are_plain_torch_s_bit_for_bit(name):
    for policy, clip in (("O0", 0.1), ("O0,loss_scale=dynamic", None), ("O0,loss_scale=1024", 0.1)):
        mine, plain = Loop(name, policy, clip), Loop(name, clip=clip)
        for step in range(3):
            mine.step(step)
            plain.step(step)
        assert mine.evaluations == plain.evaluations
        assert_same(mine.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize("policy", LEVELS)
def test_each_evaluation_sees_unscaled_fp32_gradients(policy):
    loop = Loop("lbfgs", policy)
    seen = []
    gather = loop.optimizer._gather_flat_grad
    loop.optimizer._gather_flat_grad = lambda: seen.append(gather()) or seen[-1]
    loop.step(0)
    plain = network()
    loss_of(plain, 0).backward()
    true = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert len(seen) == 4
    assert seen[0].dtype == torch.float32
    # FP16 has 11 bits, and a few roundings follow one another.
    assert torch.linalg.vector_norm(seen[0] - true) < 2**-9 * torch.linalg.vector_norm(true)


@pytest.mark.parametrize("policy", LEVELS)
def test_a_closure_may_accumulate_clear_with_the_session_and_clip_by_itself(policy):
    whole, parts = Loop("lbfgs", policy, clip=0.1), Loop("lbfgs", policy)

    def closure():
        parts.amp.zero_grad()
        for _ in range(2):
            loss = parts.loss(0)
            parts.amp.backward(loss / 2)
        parts.amp.unscale_()
        nn.utils.clip_grad_norm_(parts.amp.master_params(), 0.1)
        return loss

    whole.step(0)
    parts.amp.step(closure=closure)
    for a, b in zip(whole.amp.master_params(), parts.amp.master_params(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 if policy.startswith("O0") else 2e-3)


# Overflows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, policy",
    [*((name, LEVELS[2]) for name in OPTIMIZERS), ("lbfgs-wolfe", LEVELS[0]), ("sam", LEVELS[1]), ("sgd", LEVELS[1])],
)
def test_an_overflow_puts_everything_back_and_halves_the_scale_once(name, policy):
    """In a first or a later evaluation, in a first step or a later one."""
    for steps, late in ((2, False), (0, True), (2, True)):
        loop = Loop(name, policy)
        for step in range(steps):
            assert not loop.step(step).skipped
        before = loop.snapshot()
        loop.spoil = loop.evaluations + (late and name not in ASKS_ONCE)
        step = loop.step(2)
        assert bool(step.skipped)
        assert (step.scale.item(), step.next_scale.item()) == (65536.0, 32768.0)
        assert loop.evaluations == loop.spoil + 1  # the optimizer is not asked for more
        assert_same(before, loop.snapshot())
        assert loop.optimizer.param_groups[0].get("evaluations", 0) == (2 * steps if name == "twice" else 0)
        assert loop.amp.stats().skipped == loop.amp.stats().backoffs == 1
        assert not loop.step(3).skipped
        assert loop.amp.stats().steps == steps + 2


# Costs and mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, evaluations", [("sgd", 1), ("sam", 2)])
def test_one_host_sync_for_each_evaluation(name, evaluations):
    for policy in ("O0", *LEVELS):
        loop = Loop(name, policy, 1.0)
        loop.step(0)
        with Syncs() as syncs:
            loop.step(1)
        assert syncs.count == evaluations, policy


@pytest.mark.parametrize("name, policy", list(zip(["lbfgs", "sam", "mezzo's adamw"], LEVELS, strict=True)))
def test_what_a_closure_raises_reaches_the_caller_and_changes_nothing(name, policy):
    for after_backward in (False, True):
        loop = Loop(name, policy)
        loop.step(0)
        before = loop.snapshot()
        calls = 0

        def closure(loop=loop, after_backward=after_backward):
            nonlocal calls
            calls += 1
            fails = calls == (2 if name == "lbfgs" else 1)
            if fails and not after_backward:
                raise ZeroDivisionError
            loss = loop.closure(0 if name == "lbfgs" else 1)()
            if fails:
                raise ZeroDivisionError
            return loss

        if name == "sam":
            loop.backward(loop.loss(1))
        with pytest.raises(ZeroDivisionError):
            loop.amp.step(closure=closure)
        assert_same(before, loop.snapshot())
        if after_backward:
            with pytest.raises(StateError, match="the last step's gradients are still there"):
                loop.backward(loop.loss(1))
        loop.amp.zero_grad()
        assert not loop.step(1).skipped


# In loops by calls of their own -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, policy",
    [("sgd", "O0"), ("sgd", LEVELS[1]), ("mezzo's adamw", LEVELS[2]), ("lbfgs", LEVELS[0]), ("lbfgs", LEVELS[2])]
    + [("sam", policy) for policy in LEVELS],
)
def test_an_attached_optimizer_takes_closures_as_in_plain_torch(name, policy):
    """SAM's by two calls of its own besides, as the well-known class has them."""
    for by_hand in (False, True)[: 1 + (name == "sam")]:
        ends = []
        for own in (True, False):
            model, made = built(OPTIMIZERS[name])
            losses = []
            with attached(model, made, policy) if own else torch.enable_grad():
                for number in range(3):

                    def closure(number=number, model=model, made=made):
                        if name != "sam":
                            made.zero_grad()
                        loss = functional.cross_entropy(model(batch(number)[0]).float(), batch(number)[1])
                        loss.backward()
                        return loss

                    if name == "sam":
                        closure()
                    if by_hand:
                        made.first_step(zero_grad=True)
                        losses.append(closure())
                        made.second_step(zero_grad=True)
                    else:
                        losses.append(made.step(closure))
                        made.zero_grad()
                ends.append([v.clone() for v in model.state_dict().values()])
            assert name == "sam" or all(loss.requires_grad for loss in losses)
        if policy.startswith("O0") and name != "mezzo's adamw":
            assert_same(*ends)
        assert_near(*ends, list(network().parameters()), share=0.35)


@pytest.mark.parametrize("policy", LEVELS)
def test_an_overflow_before_a_second_step_by_hand_is_skipped(policy):
    model, made = built(OPTIMIZERS["sam"])
    with attached(model, made, policy) as amp:
        for number in range(2):
            loss_of(model, number).backward()
            before = [value.clone() for value in model.state_dict().values()]
            made.first_step(zero_grad=True)
            loss_of(model, number).backward()
            if number:
                model[3].weight.grad[0, 0] = INF
            made.second_step(zero_grad=True)
        assert (amp.stats().steps, amp.stats().skipped) == (2, 1)
        assert_same(before, list(model.state_dict().values()))
