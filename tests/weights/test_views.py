"""FP32 views of low weights: closures, checkpoints, hooks, schedulers, groups that change, edits by little, memory."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import MixedPrecision, prepare
from mezzo.weights import views
from mezzo.weights.views import views_of

from .runs import ByHand, Ours, assert_equal, assert_same_states, both
from .values import BF16, FP16, LOW, Net, same

STYLES = ["five lines", "attach", "adopt"]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def adopted(make=adamw, dtype=BF16, seed=0):
    run = Ours(Net(seed), make, dtype, "adopt")
    return run.model, run.optimizer, run.prepared


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def is_over(optimizer, params):
    """Whether an optimizer's parameters are these objects; what is not need not have memory to be compared."""
    return [*map(id, params_of(optimizer))] == [*map(id, params)]


# Closures and wrappers --------------------------------------------------------------------------------------


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)


def lbfgs_with_search(model):
    return torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")


class SAM(torch.optim.Optimizer):
    """As its best known implementation has it: it climbs, asks the closure again, and returns before it steps."""

    def __init__(self, params, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)

    @torch.no_grad()
    def step(self, closure):
        loss = torch.enable_grad()(closure)()
        shared = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in shared]).norm()
        for p in shared:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (0.05 / norm))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in shared:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        return loss


CLOSURES = {
    "LBFGS": lbfgs,
    "LBFGS, wolfe": lbfgs_with_search,
    "SAM": lambda model: SAM(list(model.parameters())),
    "AdamW": adamw,
}


@pytest.mark.parametrize(
    "name, dtype, style",
    [
        (name, LOW[number // 2 % 2], ("five lines", "adopt")[number % 2])
        for number, name in enumerate([*CLOSURES, *reversed(CLOSURES)])
    ],
    ids=str,
)
def test_closures_see_low_weights_and_optimizers_fp32(name, dtype, style):
    with both(Net(), CLOSURES[name], dtype, style) as (ours, by_hand):
        for number in range(3):

            def closure(number=number):
                """The gradients of the model as it is stored now, in the masters."""
                by_hand.store()
                for _, master in by_hand.pairs:
                    master.grad = None
                (by_hand.model(number) * by_hand.scale).backward()
                for param, master in by_hand.pairs:
                    if param.grad is not None:
                        master.grad, param.grad = param.grad.float() / by_hand.scale, None
                return by_hand.model(number).detach()

            def evaluated(number=number):
                assert {p.dtype for p in ours.model.parameters()} == {dtype}
                assert is_over(ours.optimizer, ours.model.parameters())
                if style == "adopt":
                    ours.optimizer.zero_grad()
                    loss = ours.model(number)
                    loss.backward()
                else:
                    ours.amp.zero_grad()
                    with ours.amp.autocast():
                        loss = ours.model(number)
                    ours.amp.backward(loss)
                return loss

            step = ours.optimizer.step if style == "adopt" else lambda closure: ours.amp.step(closure=closure)
            step(evaluated)
            by_hand.optimizer.step(closure)
            by_hand.store()
            for (label, param), (low, master) in zip(ours.model.named_parameters(), by_hand.pairs, strict=True):
                assert torch.equal(ours.read(param), master), label
                assert torch.equal(param, low), label
        inner = getattr(ours.optimizer, "base_optimizer", ours.optimizer)
        if inner is not ours.optimizer:  # it keeps its state under the model's parameters, too, and in FP32
            trained = [id(param) for param in ours.model.parameters() if param.requires_grad]
            assert [*map(id, inner.state)] == trained
            floating = [each for s in inner.state.values() for each in s.values() if torch.is_tensor(each)]
            assert {each.dtype for each in floating} == {torch.float32}


# Sparse gradients -------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, number, broken=False):
        return (self.table(torch.tensor([number, 3, 3, number + 5])).float() * torch.arange(1.0, 5.0)).sum()


@pytest.mark.parametrize("dtype, style", [(BF16, "five lines"), (FP16, "attach"), (BF16, "adopt")])
def test_sparse_gradients_update_their_rows_in_fp32(dtype, style):
    with both(Words(), lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.05), dtype, style) as runs:
        for number in range(5):
            for each in runs:
                each.step(number)
            assert_equal(*runs)


# Checkpoints ------------------------------------------------------------------------------------------------

RESUMED = {
    "AdamW": adamw,
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
    "SGD": sgd,
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
    "mezzo": lambda model: mezzo.optim.AdamW(model.parameters(), lr=0.05),
}


RESUMING = [(name, LOW[(at + n) % 2], STYLES[(at + n) % 3]) for at, name in enumerate(RESUMED) for n in range(2)]


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name, dtype, style", RESUMING, ids=str)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(name, dtype, style):
    first = Ours(Net(), RESUMED[name], dtype, style)
    try:
        for number in range(3):
            first.step(number)
        session = [] if style == "adopt" else [first.amp]
        states = through_a_file([each.state_dict() for each in (first.model, first.optimizer, *session)])
        for number in range(3, 6):
            first.step(number)
    finally:
        first.end()
    second = Ours(Net(seed=1), RESUMED[name], dtype, style)
    try:
        session = [] if style == "adopt" else [second.amp]
        for part, state in zip((second.model, second.optimizer, *session), states, strict=True):
            part.load_state_dict(state)
        for number in range(3, 6):
            second.step(number)
        assert all(
            same(first.read(one), second.read(two))
            for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True)
        )
        assert_same_states(first.optimizer, second.optimizer)
    finally:
        second.end()


def test_a_load_that_raises_leaves_groups_and_state_as_they_were():
    model, optimizer, _ = adopted()
    model(0).backward()
    optimizer.step()
    before, keys = through_a_file(optimizer.state_dict()), list(optimizer.state)
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="size of optimizer's group"):  # torch's own words
        optimizer.load_state_dict(wrong)
    assert is_over(optimizer, model.parameters())
    assert all(one is two for one, two in zip(optimizer.state, keys, strict=True))
    optimizer.load_state_dict(before)
    optimizer.step()
    assert is_over(optimizer, model.parameters())


def test_a_model_and_optimizer_saved_by_torch_distributed_checkpoint_s_names_hold_fp32():
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer, _ = adopted()
    for number in range(2):
        model(number).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = through_a_file(get_state_dict(model, optimizer))
    other, theirs, _ = adopted(seed=1)
    set_state_dict(other, theirs, model_state_dict=saved[0], optim_state_dict=saved[1])
    for each, own in ((model, optimizer), (other, theirs)):
        each(2).backward()
        own.step()
    assert all(
        same(one, two) for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    assert_same_states(optimizer, theirs)


# What stands in param_groups --------------------------------------------------------------------------------


class Broken(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.seen = [(p.dtype, p.grad is None or p.grad.dtype) for p in params_of(self)]
        raise ArithmeticError("in the middle")


def test_a_step_that_raises_leaves_groups_and_state_as_they_were():
    model = Net()
    optimizer = Broken(model.parameters(), lr=0.05, momentum=0.9)
    prepared = prepare(model, "O2,dtype=bfloat16")
    prepared.adopt(optimizer)
    model(0).backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert is_over(optimizer, model.parameters())
    assert [*map(id, optimizer.state)] == [id(p) for p in model.parameters() if p.requires_grad]
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}
    assert not views_of(optimizer).is_open


def test_hooks_of_a_program_see_the_models_parameters_before_and_after_a_step():
    model = Net()
    optimizer, seen = adamw(model), []

    def look(one, *_):
        owned = [p is q for p, q in zip(params_of(one), model.parameters(), strict=True)]
        seen.append((all(owned), {p.dtype for p in params_of(one)}))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    prepare(model, "O2,dtype=bfloat16").adopt(optimizer)
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for number in range(2):
        model(number).backward()
        optimizer.step()
    assert seen == [(True, {BF16})] * 8


@pytest.mark.parametrize("dtype, style", [(FP16, "five lines"), (BF16, "attach"), (FP16, "adopt")])
@pytest.mark.parametrize("early", [True, False])
def test_parameters_that_join_and_thaw_late_and_schedulers_go_on_from_fp32_values(dtype, style, early):
    """Schedulers that were made before the optimizer was adopted, or after it."""
    net, schedulers = Net(), []
    net.third.requires_grad_(False)

    def schedule(optimizer):
        schedulers.append(lr_scheduler.StepLR(optimizer, 2, gamma=0.5))

    def make(model):
        optimizer = torch.optim.AdamW([*model.first.parameters(), *model.third.parameters()], lr=0.05, foreach=False)
        if early:
            schedule(optimizer)
        return optimizer

    with both(net, make, dtype, style) as (ours, by_hand):
        for each in () if early else (ours, by_hand):
            schedule(each.optimizer)
        for number in range(6):
            if number == 2:
                for model in (ours.model, by_hand.model, by_hand.masters):
                    model.third.requires_grad_(True)
            if number == 4:
                for scheduler, model in zip(schedulers, (ours.model, by_hand.masters), strict=True):
                    model.frozen.requires_grad_(True)
                    scheduler.optimizer.add_param_group({"params": list(model.frozen.parameters()), "lr": 0.01})
                    scheduler.base_lrs.append(0.01)
                by_hand.model.frozen.requires_grad_(True)
            for each, scheduler in zip((ours, by_hand), schedulers, strict=True):
                each.step(number)
                scheduler.step()  # warns where it does not see the step before
            assert_equal(ours, by_hand)
        assert ours.optimizer.param_groups[0]["lr"] == by_hand.optimizer.param_groups[0]["lr"] == 0.05 / 8


def test_gradients_that_come_and_go_are_stepped_with_where_they_are():
    model, optimizer, prepared = adopted(sgd)
    by_hand = ByHand(Net(), sgd, BF16)
    for number in range(6):
        for param, (_, master) in zip(model.parameters(), by_hand.pairs, strict=True):
            is_there = param.requires_grad and (number % 2 == 0 or param.ndim == 1)
            param.grad = torch.full_like(param, 0.3) if is_there else None
            master.grad = param.grad.float() if is_there else None
        optimizer.step()
        by_hand.optimizer.step()
        for param, (_, master) in zip(model.parameters(), by_hand.pairs, strict=True):
            assert same(prepared.halves.read(param), master.detach())


def test_state_that_was_made_low_is_widened_and_stays_so():
    model = Net().bfloat16()
    values = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    prepare(model, "O2,dtype=bfloat16").adopt(optimizer)
    masters = [nn.Parameter(value.clone()) for value in values]
    theirs = torch.optim.Adagrad(masters, lr=0.1, initial_accumulator_value=float(torch.tensor(0.1).bfloat16()))
    for _ in range(3):
        for param, master in zip(model.parameters(), masters, strict=True):
            param.grad = torch.full_like(param, 0.3)
            master.grad = param.grad.float()
        optimizer.step()
        theirs.step()
    assert_same_states(optimizer, theirs)
    assert {state["sum"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert all(
        same(v, m.detach())
        for v, m in zip(map(model.state_dict().get, dict(model.named_parameters())), masters, strict=True)
    )


def test_a_left_optimizer_is_as_it_was_built_with_its_state():
    model, optimizer, prepared = adopted()
    plain = vars(adamw(Net())).keys()
    model(0).backward()
    optimizer.step()
    prepared.remove()
    assert vars(optimizer).keys() - plain <= {"_opt_called"}
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert is_over(optimizer, model.parameters())
    state = optimizer.state_dict()["state"].values()
    assert {state["exp_avg"].dtype for state in state} == {torch.float32}
    optimizer.zero_grad()
    model(1).backward()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    optimizer.zero_grad()
    again = prepare(model, "O2,dtype=bfloat16,emulate=true")
    again.adopt(optimizer)
    trained = [param for param in params_of(optimizer) if param.requires_grad]
    before = [again.halves.read(param).clone() for param in trained]
    model(2).backward()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert not any(same(again.halves.read(param), value) for param, value in zip(trained, before, strict=True))


# Edits by little --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adamw, lambda model: mezzo.optim.AdamW(model.parameters())], ids=["torch", "mezzo"])
def test_edits_by_little_within_fp32_are_kept_and_so_are_those_before_an_error(make):
    model = Net()
    wanted = [p.detach().double() for p in model.parameters()]
    optimizer = make(model)
    amp = MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
    for _ in range(50):
        with amp.fp32(optimizer), torch.no_grad():
            for param in params_of(optimizer):
                param.mul_(1 - 1e-4)
    assert is_over(optimizer, model.parameters())
    (halves,) = amp.weights.halves()
    for param, before in zip(model.parameters(), wanted, strict=True):
        after = before * (1 - 1e-4) ** 50
        assert (halves.read(param).double() - after).abs().max() <= 50 * 2.0**-24 * after.abs().max()

    def edit():
        with amp.fp32(optimizer), torch.no_grad():
            params_of(optimizer)[0].fill_(1.0001)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        edit()
    assert is_over(optimizer, model.parameters())
    assert torch.equal(model.state_dict()["first.weight"], torch.full((5, 7), 1.0001))


# Memory -----------------------------------------------------------------------------------------------------


class Storages(TorchDispatchMode):
    """Counts the bytes of all memory that lives, as of each operation: what was given, and what operations make."""

    def __init__(self, tensors):
        super().__init__()
        self.living, self.peak = {}, 0
        for tensor in tensors:
            self.know(tensor)

    def know(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.living:
            self.living[storage._cdata] = weakref.ref(storage)

    def bytes(self):
        return sum(storage.nbytes() for ref in self.living.values() if (storage := ref()) is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(each, torch.Tensor):
                self.know(each)
        self.peak = max(self.peak, self.bytes())
        return out


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(32, 32)) for _ in range(32))

    def forward(self):
        return sum(p.float().square().sum() for p in self.layers)


@pytest.mark.parametrize("fused", [False, True])
def test_fourteen_bytes_a_parameter_are_kept_and_at_most_eighteen_needed_within_a_step(fused, monkeypatch):
    monkeypatch.setitem(views._PART, "cpu", 4 * 1024)
    model = Many()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=False)
    prepared = prepare(model, "O2,dtype=bfloat16")
    prepared.adopt(optimizer)
    count = sum(p.numel() for p in model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    state = [v for each in optimizer.state.values() for v in each.values()]
    kept_now = [
        *(p.detach() for p in model.parameters()), *map(prepared.halves.rest_of, model.parameters()),
        *(p.grad for p in model.parameters()), *state,
    ]  # fmt: skip
    counted = Storages(kept_now)
    assert counted.bytes() == 14 * count + 4 * len(optimizer.state)  # and the counts of steps
    views_now = views_of(optimizer)._views.values()
    assert sum({v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in views_now}.values()) == 0
    with counted:
        optimizer.step()
    assert 14 * count < counted.peak <= 18 * count


class Remembers(torch.optim.SGD):
    """Has a list of tensors that grows with each step."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.before = []

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.before += [param.clone() for param in group["params"]]
        super().step(closure)


def test_an_optimizer_s_other_lists_are_its_own():
    runs = []
    for converts in (False, True):
        model = Net()
        optimizer = Remembers(model.parameters(), lr=0.1)
        if converts:
            prepare(model, "O2,dtype=bfloat16").adopt(optimizer)
        for _ in range(3):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        runs.append(optimizer.before)
    assert len(runs[0]) == 3 * len(list(model.parameters()))
    assert all(same(one, two) for one, two in zip(*runs, strict=True))
