"""Steps, forward passes and copies of a plain loop while it is attached."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel

import mezzo

from ..loops import Syncs, batch, network
from .loops import CLIPPING, OPTIMIZERS, POLICIES, attached, build, ends, loss_of, spoil, train

# Closures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O0", "O1", "O1, bfloat16", "O2", "O2, bfloat16"])
def test_lbfgs_is_that_of_the_session(policy, bits):
    found = []
    for own in (True, False):
        model = network()
        built = torch.optim.LBFGS(model.parameters(), max_iter=3)
        amp = (mezzo.attach if own else mezzo.MixedPrecision)(model, built, POLICIES[policy])
        losses = []
        for number in range(2):

            def closure(model=model, built=built, amp=amp, own=own, number=number):
                built.zero_grad()
                loss = loss_of(model, number, None if own else amp)
                loss.backward() if own else amp.backward(loss)
                return loss

            losses.append(built.step(closure) if own else amp.step(closure=closure))
        found.append(([p.detach().clone() for p in amp.master_params()], amp.loss_scale, amp.stats()))
        assert not own or all(isinstance(loss, torch.Tensor) for loss in losses)
        amp.close()
    assert bits(found[0]) == bits(found[1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_closure_that_is_evaluated_once_costs_nothing_besides(optimizer, bits):
    found = []
    for closes in (True, False):
        model, built = build(optimizer)
        with attached(model, built, POLICIES["O2"]) as amp:
            for number in range(3):
                seen = []

                def closure(model=model, built=built, number=number, seen=seen):
                    seen.append(torch.is_grad_enabled())
                    built.zero_grad()
                    loss = loss_of(model, number)
                    loss.backward()
                    if number == 1:
                        spoil(model)
                    return loss

                if closes:
                    with torch.no_grad():
                        assert built.step(closure).shape == ()
                    assert seen == [True]
                else:
                    closure()
                    built.step()
            found.append(ends(amp, built))
    assert bits(found[0]) == bits(found[1])


class Sharp(torch.optim.Optimizer):
    """SAM: the gradient of a second pass, some way up the first one."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in params]))
        self.up = [(p, p.grad * (0.05 / norm)) for p in params]
        for param, up in self.up:
            param.add_(up)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for param, up in self.up:
            param.sub_(up)
        self.inner.step()

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


def test_an_optimizer_inside_of_another_one():
    def closure(model, built):
        built.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    twin = network()
    plain = Sharp(twin.parameters())
    plain.step(lambda: closure(twin, plain))
    model = network()
    built = Sharp(model.parameters())
    with attached(model, built, "O0,loss_scale=dynamic(init=1024)") as amp:
        built.step(lambda: closure(model, built))
        for mine, theirs in zip(amp.master_params(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
        closure(model, built)
        built.first_step()
        closure(model, built)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(mezzo.StateError, match="an optimizer inside of another one steps by itself"):
            built.inner.step()
        assert all(map(torch.equal, before, model.parameters()))
    assert not _global_optimizer_pre_hooks


# Gradients that nobody scaled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
def test_an_optimizer_that_is_not_attached_is_refused_and_told_what_to_write(policy):
    model, built = build()
    with attached(model, built, policy):
        later = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, 0).backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(mezzo.StateError, match="is not attached updates parameters that are") as refused:
            later.step()
        assert "SGD.step(): 0.weight" in str(refused.value)
        assert "amp.add(optimizer)" in str(refused.value)
        assert all(map(torch.equal, before, model.parameters()))
        built.step()
        built.zero_grad()
        later.step()  # without gradients it does nothing
    loss_of(model, 0).backward()
    later.step()


def test_optimizers_beside_the_attached_ones_and_around_them_step():
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    model, built = build()
    other = network()
    beside = torch.optim.SGD(other.parameters(), lr=0.1)
    twin, before = network(), [p.detach().clone() for p in model.parameters()]
    with attached(model, built, "O1,emulate=true"):
        (loss_of(model, 0) + loss_of(other, 0)).backward()
        beside.step()
        Around(built).step()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss_of(twin, 0).backward()
    plain.step()
    for mine, theirs in zip(other.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("policy", ["O1,emulate=true", "O2,dtype=bfloat16,emulate=true"])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_a_scaler_besides_is_refused_and_a_disabled_one_is_not(policy, call):
    model, built = build()
    with attached(model, built, policy) as amp:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(mezzo.StateError, match="a GradScaler scales the loss besides") as refused:
            getattr(scaler, call)(built)
        assert f"GradScaler.{call}(SGD)" in str(refused.value)
        assert "GradScaler(enabled=False)" in str(refused.value)
        assert all(map(torch.equal, before, model.parameters()))
        built.zero_grad()
        off = torch.amp.GradScaler("cpu", enabled=False)
        off.scale(loss_of(model, 0)).backward()
        off.unscale_(built)
        off.step(built)
        off.update()
        assert (amp.stats().steps, amp.stats().skipped) == (1, 0)
        other = network()
        beside = torch.optim.SGD(other.parameters(), lr=0.1)
        scaler.scale(loss_of(other, 0)).backward()
        scaler.step(beside)


@pytest.mark.parametrize("call", [[], ["unscale_"]])
def test_a_scaler_scales_alone_where_the_session_does_not(call):
    ends = []
    for scales in (True, False):
        model, built = build()
        with attached(model, built, "O1,dtype=bfloat16,emulate=true"):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)
            scaler.scale(loss_of(model, 0)).backward()
            for name in call:
                getattr(scaler, name)(built)
            scaler.step(built)
            scaler.update()
        ends.append(list(model.parameters()))
    assert all(map(torch.equal, *ends))


def test_where_no_scale_is_carried_any_optimizer_may_step():
    model, built = build()
    with attached(model, built, "O1,dtype=bfloat16,emulate=true") as amp:
        loss_of(model, 0).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with attached(model, built, "O1,emulate=true") as amp:
        loss_of(model, 0).backward()
        amp.unscale_()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_gradients_that_were_assigned_are_taken_as_they_are():
    for policy in ("O0, scaled", "O1", "O2", "O2, bfloat16"):
        model, built = build()
        with attached(model, built, POLICIES[policy]) as amp:
            before = [p.detach().clone() for p in amp.master_params()]
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.5)
            built.step()
            for was, param in zip(before, amp.master_params(), strict=True):
                torch.testing.assert_close(param.detach(), was - 0.05)
            for param in amp.master_params():
                param.grad = torch.full_like(param, float("inf"))
            before = [p.detach().clone() for p in amp.master_params()]
            built.step()
            assert all(map(torch.equal, before, amp.master_params()))


def test_gradients_from_before_are_added_to():
    model, built = build()
    loss_of(model, 0).backward()
    with attached(model, built, "O0,loss_scale=dynamic(init=1024)") as amp:
        loss_of(model, 1).backward()
        amp.unscale_()
        found = [p.grad.clone() for p in model.parameters()]
        built.step()
    twin = network()
    (loss_of(twin, 0) + loss_of(twin, 1)).backward()
    for mine, param in zip(found, twin.parameters(), strict=True):
        torch.testing.assert_close(mine, param.grad)


@pytest.mark.parametrize("policy", ["O0", "O0, scaled"])
def test_gradients_that_are_never_cleared_add_up_as_in_plain_torch(policy):
    def loop(model, built):
        for number in range(3):
            loss_of(model, number).backward()
            built.step()

    model, built = build()
    with attached(model, built, POLICIES[policy]):
        loop(model, built)
    twin, theirs = build()
    loop(twin, theirs)
    for mine, param in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, param)


def test_a_step_without_gradients_does_nothing():
    model, built = build()
    with attached(model, built, "O2,emulate=true") as amp:
        built.step()
        assert amp.stats().steps == 0
        train(model, built, steps=range(1), spoilt=())
        built.step()
        assert amp.stats().steps == 1


# Schedulers -----------------------------------------------------------------------------------------------------------


SCHEDULERS = {
    "StepLR": lambda built: StepLR(built, 1, gamma=0.5),
    "chained": lambda built: ChainedScheduler([StepLR(built, 1, gamma=0.5), ConstantLR(built, 1.0, 1)]),
    "sequence": lambda built: SequentialLR(built, [StepLR(built, 1, gamma=0.5), StepLR(built, 1)], [100]),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("early", [True, False])
def test_every_scheduler_waits(kind, early):
    model, built = build()
    scheduler = SCHEDULERS[kind](built) if early else None
    with attached(model, built, "O1,emulate=true"):
        scheduler = scheduler or SCHEDULERS[kind](built)
        for number, rate in enumerate([0.05, 0.05, 0.025]):
            train(model, built, steps=[number], schedulers=[scheduler])
            assert built.param_groups[0]["lr"] == pytest.approx(rate)


def test_two_schedulers_and_one_of_a_class_that_was_made_later():
    class Halves(LRScheduler):
        def get_lr(self):
            return [group["lr"] * 0.5 ** (self.last_epoch > 0) for group in self.optimizer.param_groups]

    model, built = build()
    with attached(model, built, "O1,emulate=true"):

        class Later(Halves):
            def step(self, *args):
                super().step(*args)

        schedulers = [Later(built), Halves(built), ReduceLROnPlateau(built)]
        for number, epoch in enumerate([1, 1, 2]):
            train(model, built, steps=[number], schedulers=schedulers[:2])
            schedulers[2].step(1.0)
            assert [each.last_epoch for each in schedulers] == [epoch] * 3
        step = Later.step
    assert Later.step is not step


def test_one_that_is_made_after_a_skipped_step_begins():
    model, built = build()
    with attached(model, built, "O1,emulate=true"):
        train(model, built, steps=range(1), spoilt=(0,))
        scheduler = StepLR(built, 1, gamma=0.5)
        assert scheduler.last_epoch == 0
        train(model, built, steps=range(1), spoilt=(), schedulers=[scheduler])
        assert scheduler.last_epoch == 1


def test_many_steps_between_two_of_a_scheduler():
    weight = nn.Linear(1, 1, bias=False)
    built = torch.optim.SGD(weight.parameters(), lr=0.0)
    scheduler = StepLR(built, 1)
    with attached(weight, built, "O0,loss_scale=dynamic(init=8,patience=1000)"):
        for spoils, epoch in ((False, 1), (True, 1)):
            for _ in range(130):
                weight(torch.ones(1, 1)).sum().backward()
                if spoils:
                    weight.weight.grad.fill_(float("nan"))
                built.step()
                built.zero_grad()
            scheduler.step()
            assert scheduler.last_epoch == epoch


def test_host_syncs_of_a_step():
    for hold, syncs in ((True, 1), (False, 0)):
        model, built = build("fused")
        schedulers = [StepLR(built, 1), StepLR(built, 1)]
        with attached(model, built, "O2,emulate=true", hold_schedulers=hold):
            train(model, built, schedulers=schedulers)
            with Syncs() as before:
                train(model, built, steps=range(1), spoilt=(), clip=CLIPPING["norm"])
            with Syncs() as waiting:
                train(model, built, steps=range(1), spoilt=(), clip=CLIPPING["norm"], schedulers=schedulers)
            assert before.count == 0
            assert waiting.count == syncs  # one for two schedulers, and for the step before, of which none was told


# Forward passes -------------------------------------------------------------------------------------------------------


def seen_inside(model, *args):
    """The dtype that a product has inside of a model's forward pass, and what it returns."""
    found = []
    hook = next(m for m in model.modules() if isinstance(m, nn.Linear)).register_forward_hook(
        lambda _, __, out: found.append(out.dtype)
    )
    out = model(*args)
    hook.remove()
    return found, out.dtype


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.inner, self.error = nn.Linear(4, 4), error

    def forward(self, x):
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("ours"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("policy", ["O1", "O2", "O2, keeping", "O3,dtype=bfloat16"])
def test_an_exception_leaves_the_region(error, policy):
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module("inner", Fails(error))
    if policy.startswith("O1"):
        policy = mezzo.Policy.parse("O1").keep_fp32(modules=["inner"])
    elif policy == "O2, keeping":
        policy = mezzo.Policy.parse("O2").keep_fp32(modules=["inner"])
    policy = mezzo.Policy.of(policy).evolve(emulate=True)
    modes, nesting = torch._C._len_torch_function_stack(), torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), policy):
        for _ in range(2):
            with pytest.raises(type(error)):
                model(torch.ones(2, 4))
            assert torch._C._len_torch_function_stack() == modes
            assert torch.autocast_increment_nesting() == nesting
            torch.autocast_decrement_nesting()
            assert not torch.is_autocast_enabled("cpu")
        model.inner.error = None
        assert seen_inside(model, torch.ones(2, 4)) == ([policy.dtype], torch.float32)


def test_only_the_outermost_model_returns_fp32():
    inner = nn.Linear(4, 4)
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    optimizers = torch.optim.SGD(outer.parameters(), lr=0.1)
    with attached([outer, inner], optimizers, POLICIES["O1"]):
        found, out = seen_inside(outer, torch.ones(2, 4))
        assert (found, out) == ([torch.float16], torch.float32)
        assert inner(torch.ones(2, 4)).dtype == torch.float32


def test_an_output_dtype_of_the_policy_is_kept_and_evaluation_runs_low_too():
    model, built = build()
    with attached(model, built, "O1,emulate=true,output_dtype=float16"), torch.no_grad():
        assert seen_inside(model.eval(), batch(0)[0]) == ([torch.float16], torch.float16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
def test_a_compiled_model():
    for compiles_first in (True, False):
        model = network()
        compiled = torch.compile(model, backend="eager")
        built = torch.optim.SGD(model.parameters(), lr=0.1)
        with attached(compiled if compiles_first else model, built, POLICIES["O1"]) as amp:
            compiled = compiled if compiles_first else torch.compile(model, backend="eager", fullgraph=True)
            out = compiled(batch(0)[0])
            assert out.dtype == torch.float32
            assert not torch.equal(out, network()(batch(0)[0]))  # it ran low
            functional.cross_entropy(out, batch(0)[1]).backward()
            built.step()
            assert amp.stats().steps == 1


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_is_a_plain_model(policy, caplog):
    model, built = build()
    with attached(model, built, POLICIES[policy]) as amp:
        train(model, built, spoilt=())
        for source in (model, nn.ModuleList([model])):
            twin = copy.deepcopy(source)
            twin = twin if source is model else twin[0]
            exact = [p.detach().float() for p in amp.master_params()]
            assert all(map(torch.equal, exact, twin.parameters()))
            assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float32 for p in twin.parameters())
            assert vars(twin).keys() == vars(network()).keys()
            for module in twin.modules():
                hooks = {name: kept for name, kept in vars(module).items() if name.endswith("hooks") and kept}
                assert hooks == {}
            assert (twin(batch(0)[0]) - network()(batch(0)[0])).dtype == torch.float32
            theirs = OPTIMIZERS["SGD"](twin.parameters())
            train(twin, theirs, spoilt=())
            mezzo.MixedPrecision(twin, theirs, "O2,emulate=true").close()
        train(model, built, spoilt=())  # and the model itself goes on
    assert not caplog.records


def test_a_copy_keeps_hooks_of_the_users():
    model, built = build()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with attached(model, built, "O2,emulate=true"):
        copy.deepcopy(model)(batch(0)[0])
    assert calls == [1]


def test_an_average_of_weights_is_one_of_fp32_values():
    model, built = build()
    seen = []
    with attached(model, built, "O2,dtype=bfloat16"):
        averaged = AveragedModel(model)
        low = AveragedModel(nn.Linear(3, 3).bfloat16())  # one that is stored low reads what is stored
        assert {p.dtype for p in averaged.parameters()} == {torch.float32}
        for number in range(4):
            train(model, built, steps=[number], spoilt=())
            averaged.update_parameters(model)
            low.update_parameters(nn.Linear(3, 3).bfloat16())
            seen.append(nn.utils.parameters_to_vector(model.state_dict().values()).double())
    assert torch.allclose(
        nn.utils.parameters_to_vector(averaged.parameters()).double(), sum(seen) / 4, rtol=0, atol=1e-6
    )


def test_averages_are_torch_s_own_again_where_a_session_ends_or_is_forgotten():
    gc.collect()  # sessions of other tests
    plain = AveragedModel.update_parameters
    model, built = build()
    with attached(model, built, "O2,dtype=bfloat16"):
        assert AveragedModel.update_parameters is not plain
    assert AveragedModel.update_parameters is plain
    amp = mezzo.attach(model, built, "O2,dtype=bfloat16")
    assert AveragedModel.update_parameters is not plain
    del amp, model, built
    gc.collect()
    assert AveragedModel.update_parameters is plain
