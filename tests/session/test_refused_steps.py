"""What a step refuses, it refuses before anything is written; what cannot be undone is marked."""

import copy

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, PolicyError, StateError, UnsupportedError

NAN, INF = float("nan"), float("inf")
DYNAMIC = "emulate=true,loss_scale=dynamic(init=64)"
POLICIES = ["O0", f"O1,{DYNAMIC}", f"O2,{DYNAMIC}", "O2,dtype=bfloat16,emulate=true"]
OF_TORCH = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),  # 1e-8 is 0 in FP16
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
}
OF_MEZZO = {
    "AdamW": lambda params: mezzo.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: mezzo.optim.SGD(params, lr=0.01, momentum=0.9),
    "Lion": lambda params: mezzo.optim.Lion(params, lr=0.01),
}


class Setup:
    def __init__(self, policy, *kinds, **options):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        parts = [list(layer.parameters()) for layer in self.model] if len(kinds) > 1 else [self.model.parameters()]
        self.optimizers = [kind(part) for kind, part in zip(kinds, parts, strict=True)]
        self.amp = MixedPrecision(self.model, self.optimizers, policy, **options)
        self.backward()
        self.amp.step()
        self.amp.zero_grad()
        self.backward()

    def backward(self):
        with self.amp.autocast():
            loss = self.model(torch.ones(2, 3)).float().square().mean()
        self.amp.backward(loss)

    def facts(self):
        stats = self.amp.stats()
        return copy.deepcopy(
            [
                [p.detach() for p in (*self.model.parameters(), *self.amp.master_params())],
                [optimizer.state_dict()["state"] for optimizer in self.optimizers],
                [scaler.state_dict() for scaler in self.amp._core.scalers],
                [group.window is None for group in self.amp._core.groups],
                [stats.steps, stats.skipped, stats.scale],
            ]
        )


def same(one, other):
    pairs = zip(*(torch.utils._pytree.tree_leaves(each) for each in (one, other)), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


WRONG = {
    "lr nan": ("lr", NAN),
    "lr inf": ("lr", INF),
    "lr tensor": ("lr", torch.tensor(NAN)),
    "weight_decay": ("weight_decay", NAN),
    "momentum": ("momentum", INF),
    "betas": ("betas", (0.9, NAN)),
    "eps": ("eps", NAN),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_that_are_not_finite_are_refused_before_anything_is_written(policy, wrong):
    key, value = WRONG[wrong]
    for kind in (*OF_TORCH.values(), *OF_MEZZO.values()):
        setup = Setup(policy, kind)
        (optimizer,) = setup.optimizers
        (group,) = optimizer.param_groups
        if key not in group:
            continue
        before, right = setup.facts(), group[key]
        group[key] = value
        with pytest.raises(PolicyError, match=rf"{key} (is|are) (.|\n)*group 0"):
            setup.amp.step()
        assert same(setup.facts(), before)
        group[key] = right
        assert not setup.amp.step().skipped
        assert setup.amp.stats().steps == 2


@pytest.mark.parametrize("kinds", [("mezzo", "mezzo"), ("torch", "mezzo"), ("mezzo", "torch"), ("torch", "torch")])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_second_of_two_optimizers_refuses_stops_the_first_too(policy, kinds):
    table = {"torch": OF_TORCH["AdamW"], "mezzo": OF_MEZZO["AdamW"]}
    setup = Setup(policy, *(table[kind] for kind in kinds), max_grad_norm=0.1)
    before = setup.facts()
    setup.optimizers[1].param_groups[0]["lr"] = NAN
    with pytest.raises(PolicyError, match="lr is nan"):
        setup.amp.step()
    assert same(setup.facts(), before)
    setup.optimizers[1].param_groups[0]["lr"] = 0.01
    setup.amp.step()
    assert setup.amp.stats().steps == 2


def test_a_sparse_gradient_leaves_the_first_optimizer_where_it_was():
    setup = Setup("O0", OF_MEZZO["SGD"], OF_MEZZO["AdamW"])
    before = setup.facts()
    weight = setup.model[1].weight
    weight.grad = weight.grad.to_sparse()
    with pytest.raises(UnsupportedError, match="cannot use a sparse gradient"):
        setup.amp.step()
    assert same(setup.facts(), before)


def raising(error, *, writes=True):
    class Raising(torch.optim.SGD):
        armed = False

        @torch.no_grad()
        def step(self, closure=None):
            if self.armed:
                if writes:
                    self.param_groups[0]["params"][0].add_(1.0)
                raise error
            return super().step(closure)

    return lambda params: Raising(params, lr=0.01)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", [0, 1])
def test_an_interrupt_inside_another_librarys_optimizer_is_marked(policy, where):
    kinds = [OF_MEZZO["SGD"], OF_MEZZO["SGD"]]
    kinds[where] = raising(KeyboardInterrupt())
    setup = Setup(policy, *kinds)
    saved = copy.deepcopy([setup.model.state_dict(), [o.state_dict() for o in setup.optimizers]])
    setup.amp.zero_grad()
    saved.append(copy.deepcopy(setup.amp.state_dict()))
    setup.backward()
    setup.optimizers[where].armed = True
    with pytest.raises(KeyboardInterrupt):
        setup.amp.step()
    setup.optimizers[where].armed = False
    for call in (setup.amp.step, setup.amp.zero_grad, setup.amp.state_dict, setup.amp.autocast, setup.amp.unscale_):
        with pytest.raises(StateError, match=r"interrupted half-way\n(.|\n)*Raising\.step\(\)(.|\n)*load_state_dict"):
            call()
    setup.model.load_state_dict(saved[0])
    for optimizer, state in zip(setup.optimizers, saved[1], strict=True):
        optimizer.load_state_dict(state)
    setup.amp.load_state_dict(saved[2])
    setup.backward()
    assert not setup.amp.step().skipped


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_after_something_was_written_is_marked_and_one_before_is_the_users(policy):
    for kinds in ([OF_MEZZO["SGD"], raising(RuntimeError("no"))], [raising(RuntimeError("no")), OF_MEZZO["SGD"]]):
        setup = Setup(policy, *kinds)
        next(optimizer for optimizer in setup.optimizers if hasattr(optimizer, "armed")).armed = True
        with pytest.raises(RuntimeError, match="no"):
            setup.amp.step()
        with pytest.raises(StateError, match="interrupted half-way"):
            setup.amp.step()
    setup = Setup(policy, raising(RuntimeError("no"), writes=False), OF_MEZZO["SGD"])
    setup.optimizers[0].armed = True
    with pytest.raises(RuntimeError, match="no"):
        setup.amp.step()
    setup.optimizers[0].armed = False
    setup.amp.zero_grad()
    setup.backward()
    assert not setup.amp.step().skipped


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [*OF_TORCH, "mezzo"])
def test_a_step_behind_which_a_hook_raises_is_whole_and_counted(policy, kind):
    setup, other = (Setup(policy, OF_TORCH.get(kind, OF_MEZZO["AdamW"])) for _ in range(2))
    hook = setup.optimizers[0].register_step_post_hook(boom)
    with pytest.raises(RuntimeError, match="no"):
        setup.amp.step()
    hook.remove()
    other.amp.step()
    assert same(setup.facts(), other.facts())
    for each in (setup, other):
        each.amp.zero_grad()
        each.backward()
        each.amp.step()
    assert same(setup.facts(), other.facts())


def boom(*_):
    raise RuntimeError("no")


@pytest.mark.parametrize("wrong", [NAN, -1.0, 0, True, "1", [1.0]])
def test_a_norm_set_later_is_checked(wrong):
    setup = Setup("O0", OF_TORCH["SGD"], max_grad_norm=0.5)
    with pytest.raises(PolicyError, match=r"max_grad_norm is (.|\n)*a norm to clip to is positive"):
        setup.amp.max_grad_norm = wrong
    assert setup.amp.max_grad_norm == 0.5
    for right in (None, INF, 2.0, 1):
        setup.amp.max_grad_norm = right
        assert setup.amp.max_grad_norm == right


def test_other_options_set_later_are_checked():
    setup = Setup("O0", OF_TORCH["SGD"])
    with pytest.raises(PolicyError, match="unknown on_overflow 'rise'"):
        setup.amp.on_overflow = "rise"
    with pytest.raises(PolicyError, match="cannot become"):
        setup.amp.on_overflow = "explain"
    setup.amp.on_overflow = "raise"
    assert setup.amp.on_overflow == "raise"
    with pytest.raises(AttributeError, match="policy"):
        setup.amp.policy = "O1"


@pytest.mark.parametrize("policy", [*POLICIES, "O3,emulate=true"])
def test_empty_parameters_train_with_the_others(policy):
    fitting = [kind for name, kind in OF_TORCH.items() if (policy[:2], name) != ("O3", "SGD fused")]
    for kind in (*fitting, *OF_MEZZO.values()):
        model = nn.Linear(3, 2)
        model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
        optimizer = kind(model.parameters())
        amp = MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)
        for number in range(3):
            with amp.autocast():
                loss = model(torch.ones(2, 3)).float().square().mean() + model.nothing.float().sum()
            amp.backward(loss)
            if number == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            if number == 2:
                amp.unscale_()
            assert torch.isfinite(amp.step().grad_norm)
            amp.zero_grad()
        saved = [amp.state_dict(), optimizer.state_dict(), copy.deepcopy(model.state_dict())]
        optimizer.load_state_dict(saved[1])
        amp.load_state_dict(saved[0])
        model.load_state_dict(saved[2])
