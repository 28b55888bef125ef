"""Whatever of an attached model is called from outside runs in its region: products are counted by their dtypes."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo

from .loops import assert_same, attached, batch, built, network

#: A format without emulation, so that products reach the dispatcher in their own dtype; the numbers do not matter here.
POLICIES = ["O1,dtype=bfloat16,emulate=false", "O2,dtype=bfloat16,emulate=false", "O3,dtype=bfloat16,emulate=false"]
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Products(TorchDispatchMode):
    """The dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.dtypes.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


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
    "get_action_and_value": lambda model: sum(
        part.float().sum() for part in model.get_action_and_value(batch(0)[0])[1:]
    ),
    "get_value": lambda model: model.get_value(batch(0)[0]).float().mean(),
    "a part": lambda model: model.critic(batch(0)[0]).float().mean(),
    "a layer of a part": lambda model: model.actor[0](batch(0)[0]).float().mean(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_runs_low_forward_and_backward_and_trains(policy, call):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Agent()
    run = CALLS[call]
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, made, policy) as amp:
        before = [p.detach().clone() for p in model.parameters()]
        with Products() as products:
            loss = run(model)
            forward = len(products.dtypes)
            loss.backward()
        assert forward >= 1
        assert set(products.dtypes) == {torch.bfloat16}
        assert not torch.is_autocast_enabled("cpu")
        made.step()
        assert amp.stats().steps == 1
        assert not all(map(torch.equal, before, model.parameters()))
        with torch.no_grad(), Products() as evaluated:
            run(model.eval())
        assert set(evaluated.dtypes) == {torch.bfloat16}
    with Products() as products:
        run(model)
    assert set(products.dtypes) == {torch.float32}


@pytest.mark.parametrize("rule", ["fp32_module=critic", "fp32=linear@critic"])
def test_a_part_that_has_a_rule_follows_it_when_it_is_called_by_itself(rule):
    x, _ = batch(0)
    model = Agent()
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), f"{POLICIES[0]},{rule}"), Products() as products:
        model.critic(x)
        model.critic[2](model.critic[1](model.critic[0](x)))
        assert set(products.dtypes) == {torch.float32}
        products.dtypes.clear()
        model.actor(x)
        assert set(products.dtypes) == {torch.bfloat16}


def test_batch_norm_with_low_weights_may_be_called_by_itself():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    x, _ = batch(0)
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), "O3,dtype=bfloat16,emulate=false"):
        whole = model(x)
        assert torch.equal(model[1](model[0](x)), whole)


@pytest.mark.parametrize("policy", POLICIES)
def test_keys_and_values_that_the_model_gave_out_come_back_as_they_were(policy):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x, cache=None):
            q, k, v = self.qkv(x).chunk(3, -1)
            if cache is not None:
                k, v = torch.cat([cache[0], k]), torch.cat([cache[1], v])
            return functional.scaled_dot_product_attention(q[None], k[None], v[None])[0], (k, v)

    model = Cached()
    x, _ = batch(0)
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), policy), torch.no_grad():
        whole, _ = model(x)
        _, cache = model(x[:-2])
        assert cache[0].dtype == torch.float32
        _, cache = model(x[-2:-1], cache)
        last, _ = model(x[-1:], cache)
        torch.testing.assert_close(last, whole[-1:], rtol=0.02, atol=0.01)


def test_products_of_a_method_itself_run_low():
    model = Agent()
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), POLICIES[0]), Products() as products:
        assert model.likeness(batch(0)[0]).dtype == torch.float32
    assert products.dtypes == [torch.bfloat16] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_what_comes_out_of_the_model_is_fp32_and_what_goes_on_inside_is_not(policy):
    model, made = built()
    with attached(model, made, policy):
        inside = []
        model[0].register_forward_hook(lambda _, __, out: inside.append(out.dtype))
        assert model(batch(0)[0]).dtype == torch.float32
        assert inside == [torch.bfloat16]
    with attached(*built(), "O1,emulate=true,output_dtype=float16") as amp:
        assert amp.weights.models[0](batch(0)[0]).dtype == torch.float16


def test_methods_are_the_models_own():
    """They bind, they see attributes, they are given back; properties and static methods stay what they are."""
    model = Agent()
    before = set(vars(model))
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, made, POLICIES[0]):
        model.get_value(batch(0)[0])
        assert model.calls == 1
        assert model.widths == [16, 3]
        assert torch.equal(model.scaled(torch.ones(2)), torch.full((2,), 2.0))
        assert isinstance(model.made(), Agent)
        assert isinstance(model, Agent)
        assert model.get_value.__name__ == "get_value"
        assert not model.train().eval().training
        assert len(list(model.named_parameters())) == 8
    assert set(vars(model)) == before


@pytest.mark.parametrize("error", [ValueError("ours"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("policy", POLICIES)
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

    model = Fails()
    modes, nesting = torch._C._len_torch_function_stack(), torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), policy):
        for call in (model, model.loss):
            with pytest.raises(type(error)):
                call(torch.ones(2, 8))
            assert torch._C._len_torch_function_stack() == modes
            assert torch.autocast_increment_nesting() == nesting
            torch.autocast_decrement_nesting()
            assert not torch.is_autocast_enabled("cpu")
        model.raises = False
        with Products() as products:
            assert model(torch.ones(2, 8)).dtype == torch.float32
        assert products.dtypes == [torch.bfloat16]


def test_a_part_that_is_called_by_itself_returns_fp32_and_inside_of_its_model_it_does_not():
    for policy in POLICIES:
        inner = network()
        outer = nn.Sequential(inner, nn.Linear(3, 3))
        made = torch.optim.SGD(outer.parameters(), lr=0.1)
        with attached(outer, made, policy):
            seen = []
            inner.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.dtype))
            assert outer(batch(0)[0]).dtype == torch.float32
            assert inner(batch(0)[0]).dtype == torch.float32
            assert seen == [torch.bfloat16, torch.float32], policy
        assert "forward" not in vars(inner)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_program_may_have_regions_of_its_own(policy):
    """``torch.autocast`` inside, disabled ones too, and mezzo's."""
    model, made = built()
    with attached(model, made, policy):
        for region in (torch.autocast("cpu", torch.bfloat16), mezzo.autocast(policy), contextlib.nullcontext()):
            with region, Products() as products:
                model(batch(0)[0])
            assert set(products.dtypes) == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
def test_a_compiled_model_runs_low_too():
    for compiles_first in (True, False):
        ends = []
        for compiles in (True, False):
            model, made = built()
            run = torch.compile(model, backend="eager") if compiles and compiles_first else model
            with attached(run, made, "O1,emulate=true,loss_scale=dynamic(init=1024)") as amp:
                if compiles and not compiles_first:
                    run = torch.compile(model, backend="eager", fullgraph=True)
                out = run(batch(0)[0])
                assert out.dtype == torch.float32
                functional.cross_entropy(out, batch(0)[1]).backward()
                made.step()
                assert amp.stats().steps == 1
                ends.append([p.detach().clone() for p in model.parameters()])
        assert_same(*ends)


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", POLICIES)
def test_parts_of_what_is_compiled_anew_between_two_passes_of_a_step_are_parts(policy):
    """torch breaks the graph at a 16-bit weight with an FP32 gradient, so that Python calls the parts."""
    outputs = []
    for compiles in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Steps()
        with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), policy):
            run = torch.compile(model, backend="eager") if compiles else model
            found = []
            for x in torch.randn(3, 4, 8).unbind():
                found.append(run(x))
                found[-1].square().mean().backward()
        outputs.append(found)
    for plain, compiled in zip(*outputs, strict=True):
        assert torch.equal(plain, compiled)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo, of any loss
@pytest.mark.parametrize("policy", ["O0,loss_scale=1024", "O2,dtype=float16,loss_scale=1024"])
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


class Island(nn.Module):
    """Parts of it are called where autocast is off; the second by the model itself."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x):
        x = self.inner(self.first(x))
        with torch.autocast("cpu", enabled=False):
            return self.last(x.float())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("rule", ["", ",fp32_module=inner"])
def test_parts_without_autocast_are_that_in_compiled_code_too(rule):
    torch.compiler.reset()
    model = Island()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, made, f"O1,dtype=bfloat16,emulate=true{rule}"), torch.no_grad():
        x = torch.randn(4, 8)
        compiled = torch.compile(lambda x: model(x).softmax(-1), backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(x), model(x).softmax(-1))
        part = torch.compile(model.inner, backend="eager")
        assert torch.equal(part(x), model.inner(x))


class Scaled(torch.autograd.Function):
    """A function whose gradient is computed by hand, with an FP32 matrix of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        twice = 2 * torch.eye(len(gradient))
        return twice @ gradient


@pytest.mark.parametrize("begins", [mezzo.MixedPrecision, mezzo.attach])
def test_torchs_errors_about_dtypes_in_a_backward_pass_are_explained(begins):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda module, args, output: Scaled.apply(output))
    amp = begins(model, torch.optim.SGD(model.parameters(), lr=0.1), POLICIES[1])
    try:
        with amp.autocast():
            loss = model(batch(0)[0]).sum()
        with pytest.raises(RuntimeError) as error:
            loss.backward() if begins is mezzo.attach else amp.backward(loss)
        (note,) = error.value.__notes__
        assert "twice is float32 [" in note
        assert "gradient is bfloat16 [" in note
        assert note.endswith("write  twice.to(gradient.dtype)")
    finally:
        amp.close()
