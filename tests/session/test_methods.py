"""Calls of an attached model run in its region, not all that its methods do: products are counted by their dtypes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.session.session import engine_of, weights_of

from ..support.products import Products
from .loops import assert_same, attached, batch, built, network

#: A format without emulation, so that products reach the dispatcher in their own dtype; the numbers do not matter here.
POLICIES = ["O1,dtype=bfloat16,emulate=false", "O2,dtype=bfloat16,emulate=false", "O3,dtype=bfloat16,emulate=false"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of autograd functions
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo, of any loss
]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def dtypes(run):
    """The dtypes of the matrix products that something comes to, and what it returns."""
    with Products() as products:
        out = run()
    return set(products.dtypes), out


class Agent(nn.Module):
    """A model whose ``forward`` nobody calls."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.calls = 0

    def get_value(self, x):
        self.calls += 1
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        choice = torch.distributions.Categorical(logits=self.actor(x).float(), validate_args=False)
        action = torch.zeros(len(x), dtype=torch.long) if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.get_value(x)

    def loss(self, x, y):
        return functional.cross_entropy(self.actor(x).float() + self.actor[0](x).float().sum(), y)

    def likeness(self, x):
        features = self.actor[0](x)
        return features @ features.mT

    @property
    def widths(self):
        return [layer.out_features for layer in self.actor[::2]]

    @staticmethod
    def scaled(x):
        return x * 2

    @classmethod
    def made(cls):
        return cls()


CALLS = {
    "model.loss(x)": lambda model: model.loss(*batch(0)),
    "get_action_and_value": lambda model: sum(p.float().sum() for p in model.get_action_and_value(batch(0)[0])[1:]),
    "get_value": lambda model: model.get_value(batch(0)[0]).float().mean(),
    "likeness": lambda model: model.likeness(batch(0)[0]).float().mean(),
    "a part": lambda model: model.critic(batch(0)[0]).float().mean(),
    "a layer of a part": lambda model: model.actor[0](batch(0)[0]).float().mean(),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_it_runs_low_forward_and_backward_and_trains(policy):
    for name, call in CALLS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Agent()
        made = sgd(model)
        with attached(model, made, policy) as amp:
            before = [p.detach().clone() for p in model.parameters()]
            forward, loss = dtypes(lambda call=call, model=model: call(model))
            backward, _ = dtypes(loss.backward)
            assert forward | backward == {"bfloat16"}, name
            assert not torch.is_autocast_enabled("cpu")
            made.step()
            assert amp.stats().steps == 1
            assert not all(map(torch.equal, before, model.parameters()))
            with torch.no_grad():  # the parts are called then, and what the method itself does is FP32
                products = {"bfloat16", "float32"} if name == "likeness" else {"bfloat16"}
                assert dtypes(lambda call=call, model=model: call(model.eval()))[0] == products, name
        assert dtypes(lambda call=call, model=model: call(model))[0] == {"float32"}, name


@pytest.mark.parametrize("rule", ["fp32_module=critic", "fp32=linear@critic"])
def test_a_part_that_has_a_rule_follows_it_when_it_is_called_by_itself(rule):
    x, _ = batch(0)
    model = Agent()
    with attached(model, sgd(model), f"{POLICIES[0]},{rule}"):
        assert dtypes(lambda: model.critic(x))[0] == {"float32"}
        assert dtypes(lambda: model.critic[2](model.critic[1](model.critic[0](x))))[0] == {"float32"}
        assert dtypes(lambda: model.actor(x))[0] == {"bfloat16"}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_comes_out_of_the_model_is_fp32_and_what_goes_on_inside_is_not(policy):
    inner = network()
    outer = nn.Sequential(inner, nn.Linear(3, 3))
    with attached(outer, sgd(outer), policy):
        seen = []
        for part in (inner, inner[0]):
            part.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        assert outer(batch(0)[0]).dtype == torch.float32
        assert inner(batch(0)[0]).dtype == torch.float32  # a part that is called by itself
        assert seen == [torch.bfloat16] * 3 + [torch.float32]
    assert "forward" not in vars(inner)
    with attached(*built(), "O1,emulate=true,output_dtype=float16") as amp:
        assert weights_of(amp).models[0](batch(0)[0]).dtype == torch.float16


def test_methods_are_the_models_own():
    """They bind, they see attributes, they are given back; properties and static methods stay what they are."""
    model = Agent()
    before = set(vars(model))
    with attached(model, sgd(model), POLICIES[0]):
        model.get_value(batch(0)[0])
        assert (model.calls, model.widths, model.get_value.__name__) == (1, [16, 3], "get_value")
        assert torch.equal(model.scaled(torch.ones(2)), torch.full((2,), 2.0))
        assert isinstance(model.made(), Agent)
        assert isinstance(model, Agent)
        assert not model.train().eval().training
        assert len(list(model.named_parameters())) == 8
    assert set(vars(model)) == before


@pytest.mark.parametrize(
    "error, policy", list(zip([ValueError("ours"), KeyboardInterrupt(), SystemExit(3)], POLICIES, strict=True))
)
def test_an_exception_leaves_the_region(error, policy):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.raises = nn.Linear(8, 4), True

        def forward(self, x):
            x = self.inner(x)
            if self.raises:
                raise error
            return x

        def loss(self, x):
            return self(x).float().sum()

    def modes():
        torch.autocast_decrement_nesting()
        return torch._C._len_torch_function_stack(), torch.autocast_increment_nesting()

    model = Fails()
    before = modes()
    with attached(model, sgd(model), policy):
        for call in (model, model.loss):
            with pytest.raises(type(error)):
                call(torch.ones(2, 8))
            assert modes() == before
            assert not torch.is_autocast_enabled("cpu")
        model.raises = False
        used, out = dtypes(lambda: model(torch.ones(2, 8)))
        assert (used, out.dtype) == ({"bfloat16"}, torch.float32)


# Methods that are no calls of the model -----------------------------------------------------------------------------


class Stiefel(nn.Module):
    """A manifold of orthogonal matrices, as an optimizer and a model have it."""

    def retr(self, w):
        q, r = torch.linalg.qr(w)
        return q @ torch.diag(r.diagonal().sign())

    def length(self, w):
        return (w.mT @ w).trace()


class Odd(nn.Module):
    """Methods of all kinds around a net and a matrix."""

    def __init__(self):
        super().__init__()
        self.net, self.w, self.man = nn.Linear(8, 8), nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0]), Stiefel()
        self.register_buffer("codes", torch.randn(4, 8))

    def forward(self, x):
        return self.net(x) @ self.w

    def plain(self, x):
        return functional.linear(self.net(x), self.w).detach().numpy()

    @torch.no_grad()
    def predict(self, x):
        return functional.linear(self.net(x), self.w).numpy()

    @torch.inference_mode()
    def inferred(self, x):
        return functional.linear(self.net(x), self.w).numpy()

    @torch.set_grad_enabled(False)
    def switched(self, x):
        return functional.linear(self.net(x), self.w).numpy()

    def predict_inside(self, x):
        with torch.no_grad():
            return self.net(x).numpy()

    def predict_by_forward(self, x):
        with torch.no_grad():
            return self(x).numpy()

    def project(self):
        for _ in range(8):
            with torch.no_grad():
                self.w.copy_(1.5 * self.w - 0.5 * self.w @ self.w.mT @ self.w)

    def distance(self, rows):
        return rows @ rows.mT

    def fit(self, batches):
        for x in batches:
            self.regression(x).backward()

    def regression(self, x):
        return (self.net(x) @ self.w).float().square().mean()

    def steps(self, x):
        yield self.net(x)

    async def later(self, x):
        return self.net(x)


@pytest.fixture
def odd():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Odd()
    return model, batch(0)[0]


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_methods_without_gradients_give_fp32(odd, policy):
    model, x = odd
    true = {name: getattr(model, name)(x) for name in ("predict", "inferred", "switched", "predict_by_forward")}
    with attached(model, sgd(model), policy):
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                for name, expected in true.items():
                    used, output = dtypes(lambda name=name: getattr(model, name)(x))
                    assert output.dtype == expected.dtype
                    assert abs(output - expected).max() < 0.05
                    own = {"float32"} if name != "predict_by_forward" else set()
                    assert name == "inferred" or used == {"bfloat16"} | own, name  # in which products are not counted
                assert model.predict_inside(x).dtype == expected.dtype
        with torch.no_grad():
            used, output = dtypes(lambda: model.plain(x))
        assert (used, output.dtype) == ({"bfloat16", "float32"}, expected.dtype)


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_methods_that_are_given_nothing_or_what_the_model_has_are_fp32(odd, policy):
    model, x = odd
    with attached(model, sgd(model), policy):
        calls = {
            "nothing": lambda: model.project(),
            "a parameter": lambda: model.distance(model.w),
            "a view of one": lambda: model.distance(model.w[:4].mT),
            "one by name": lambda: model.distance(rows=model.net.weight),
            "a buffer": lambda: model.distance(model.codes),
            "a buffer's view": lambda: model.distance(model.codes[1:]),
            "of a part": lambda: model.man.length(model.w),
        }
        for name, call in calls.items():
            assert dtypes(call)[0] == {"float32"}, name
        assert torch.allclose(model.w @ model.w.mT, torch.eye(8), atol=1e-6)
        assert dtypes(lambda: model.distance(x))[0] == {"bfloat16"}
        assert dtypes(lambda: model.distance(rows=[x, model.w][0]))[0] == {"bfloat16"}
        model.codes = torch.randn(4, 8)  # which stands in the place of another one
        assert dtypes(lambda: model.distance(model.codes))[0] == {"float32"}


def test_what_methods_call_in_turn_are_calls_of_modules(odd):
    model, x = odd
    with attached(model, sgd(model), POLICIES[0]) as amp:
        used, _ = dtypes(
            lambda: model.fit(iter([x, x]))
        )  # given no tensor: products of its own are FP32, of modules low
        assert used == {"bfloat16", "float32"}
        assert engine_of(amp).windows[0].now.passes == 2
        (given,) = model.steps(x)
        assert given.dtype == torch.float32
        with pytest.raises(StopIteration) as returned:
            model.later(x).send(None)
        assert returned.value.value.dtype == torch.float32
        assert model.forward(x).dtype == torch.float32  # by its name
        assert dtypes(lambda: model.forward(x))[0] == {"bfloat16"}


def test_what_an_optimizer_calls_while_it_steps_is_no_call_but_for_its_closure(odd):
    class Riemannian(torch.optim.SGD):
        """As geoopt's: retracts after a step, and looks at its model."""

        def step(self, closure=None):
            loss = super().step(closure)
            with torch.no_grad():
                model.w.copy_(model.man.retr(model.w))
            with torch.enable_grad():
                self.seen = dtypes(lambda: (model(x), model.distance(x)))[0]
            return loss

    model, x = odd
    made = Riemannian(model.parameters(), lr=0.1)
    with attached(model, made, POLICIES[0]):
        for _ in range(3):
            made.zero_grad()
            model(x).square().mean().backward()
            made.step()
            assert torch.allclose(model.w @ model.w.mT, torch.eye(8), atol=1e-6)
            assert made.seen == {"float32"}

        def closure():
            made.zero_grad()
            used, loss = dtypes(lambda: model.regression(x))
            assert used == {"bfloat16"}
            loss.backward()
            return loss

        made.step(closure)


@pytest.mark.parametrize("policy", ["O1,bf16,lists=device", "O1,bf16,emulate=true", "O2,bf16,lists=device"])
@pytest.mark.parametrize("closes", [False, True])
def test_a_method_that_trains_reads_the_weights_of_each_step(policy, closes):
    """A region as long as a loop keeps casts of weights as long."""

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 3)

        def fit(self, x, optimizer):
            losses = []

            def closure():
                optimizer.zero_grad()
                losses.append(self.net(x).float().square().mean())
                losses[-1].backward()
                return losses[-1]

            for _ in range(4):
                optimizer.step(closure) if closes else closure() and optimizer.step()
            return torch.stack(losses).detach()

    def make(params):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=2) if closes else torch.optim.SGD(params, lr=0.5)

    x, model = batch(0)[0], Regressor()
    plain = copy.deepcopy(model)
    true = plain.fit(x, make(plain.parameters()))
    made = make(model.parameters())
    with attached(model, made, policy):
        losses = model.fit(x, made)
    assert torch.allclose(losses, true, rtol=0.05)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_method_is_recomputed_as_it_ran(odd, reentrant):
    model, x = odd
    grads = []
    for again in (False, True):
        with attached(model, sgd(model), POLICIES[0]):
            run = (lambda m, x: checkpoint(m, x, use_reentrant=reentrant)) if again else (lambda m, x: m(x))
            used, _ = dtypes(lambda run=run: run(model, x.requires_grad_()).square().mean().backward())
            assert used == {"bfloat16"}
            grads.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
            checkpoint(model.regression, x, use_reentrant=reentrant).backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            model.zero_grad()
    assert_same(*grads)


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_parts_of_what_is_compiled_anew_between_two_passes_of_a_step_are_parts():
    """torch breaks the graph at a 16-bit weight with an FP32 gradient, so that Python calls the parts."""

    class Steps(nn.Module):
        """A residual network that counts its passes; compiled, it is compiled anew when its counter becomes FP32."""

        def __init__(self):
            super().__init__()
            self.first, self.parts = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            x = self.first(x)
            for part in self.parts:
                x = x + part(x)
            return x

    outputs = []
    for compiles in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Steps()
        with attached(model, sgd(model), POLICIES[1]):
            run = torch.compile(model, backend="eager") if compiles else model
            passes = []
            for x in torch.randn(3, 4, 8).unbind():
                passes.append(run(x))
                passes[-1].square().mean().backward()
        outputs.append(passes)
    assert_same(*outputs)


@pytest.mark.parametrize(
    "policy", ["O1,emulate=true,loss_scale=1024", pytest.param("O2,loss_scale=1024", marks=pytest.mark.slow)]
)
def test_a_compiled_step_with_its_backward_pass_is_the_eager_one(policy):
    """The graph ends before the pass, without a word of Dynamo's about what stands there."""
    ends = []
    for compiles in (True, False):
        model, made = built()

        def evaluate(x, y, model=model):
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        with attached(model, made, policy):
            run = torch.compile(evaluate, backend="eager") if compiles else evaluate
            for number in range(2):
                made.zero_grad()
                run(*batch(number))
                made.step()
            ends.append([p.detach().clone() for p in model.parameters()])
    assert_same(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [",fp32_module=inner", ""])
def test_parts_without_autocast_are_that_in_compiled_code_too(rule):
    """Parts are called where autocast is off; the second by the model itself."""

    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x):
            x = self.inner(self.first(x))
            with torch.autocast("cpu", enabled=False):
                return self.last(x.float())

    torch.compiler.reset()
    model = Island()
    with attached(model, sgd(model), f"O1,dtype=bfloat16,emulate=true{rule}"), torch.no_grad():
        x = torch.randn(4, 8)
        compiled = torch.compile(lambda x: model(x).softmax(-1), backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(x), model(x).softmax(-1))
        part = torch.compile(model.inner, backend="eager")
        assert torch.equal(part(x), model.inner(x))


class Recomputed(nn.Module):
    """Layers of which the last is recomputed for the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant

    def forward(self, x):
        x = self.first(x)
        return self.last(x) if self.reentrant is None else checkpoint(self.last, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_of_a_part_are_recomputed_as_they_ran(reentrant):
    """A hook that computes, and was put on a part of the model after it was attached."""
    turn, x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.randn(4, 8)
    runs = []
    for setting in (None, reentrant):
        model = Recomputed(setting)
        with attached(model, sgd(model), "O1,dtype=float16,emulate=true,loss_scale=none"):
            seen = []
            for _ in range(2):
                model.zero_grad()
                model(x).square().sum().backward()
                seen.append([param.grad.clone() for param in model.parameters()])
                if len(seen) == 1:
                    model.last.register_forward_pre_hook(lambda module, args: ((args[0] @ turn).exp().sin(),))
        runs.append(seen)
    for plain, again in zip(*runs, strict=True):
        assert all(map(torch.equal, plain, again))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_enters_one_region_and_a_part_that_is_recomputed_no_other(reentrant, monkeypatch):
    entered, enter = [], mezzo.autocast.__enter__
    monkeypatch.setattr(mezzo.autocast, "__enter__", lambda self: entered.append(self) or enter(self))
    model = Recomputed(reentrant)
    with attached(model, sgd(model), "O1,dtype=bfloat16,emulate=true"):
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()  # which brings the region's differences back by itself
        assert len(entered) == 1
