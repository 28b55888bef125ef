"""O2 and O3 cast at the modules that own low parameters, whatever calls them; a model gives out FP32."""

import copy
import dataclasses
import io
import math
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.cast.model.calls import TakesIn

LOW = ["O2,dtype=bfloat16,emulate=true", "O2,dtype=float16,emulate=true", "O3,dtype=bfloat16,emulate=false"]


@dataclasses.dataclass
class Output:
    states: torch.Tensor
    lengths: torch.Tensor


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.seen = nn.Conv1d(4, 8, 3, padding=1), nn.LayerNorm(8), []

    def forward(self, x, *, lengths=None):
        out = self.conv(x)
        self.seen.append(out.dtype)
        return Output(self.norm(functional.gelu(out).mT), lengths)


class Speech(nn.Module):
    """Called by several methods, as Whisper is by ``generate``."""

    def __init__(self):
        super().__init__()
        self.encoder, self.table = Encoder(), nn.Embedding(10, 8)
        self.rnn, self.head, self.drop = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 10), nn.Dropout(0.0)

    def encode(self, x):
        return self.encoder(x, lengths=torch.tensor([3]))

    def decode(self, states, tokens):
        hidden, _ = self.rnn(states + self.table(tokens))
        return self.head(self.drop(hidden))

    def forward(self, x, tokens):
        return self.decode(self.encode(x).states, tokens)

    def generate(self, x, tokens):
        return self.decode(self.encode(x).states, tokens).argmax(-1)


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 6, generator=generator), torch.randint(10, (2, 6), generator=generator)


def speech(policy):
    torch.manual_seed(0)
    model = Speech()
    return model, mezzo.prepare(model, policy)


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("in_region", [True, False])
def test_any_method_and_any_part_may_be_called(policy, in_region):
    model, handle = speech(policy)
    x, tokens = data()
    low = handle.policy.dtype
    with handle.autocast() if in_region else torch.enable_grad():
        whole = model(x, tokens)
        assert whole.dtype == torch.float32
        encoded = model.encode(x)
        assert model.encoder.seen == [low, low]
        assert encoded.lengths.dtype == torch.int64
        # The same numbers as from inside, given FP32 between the parts or what they give out.
        for states in (encoded.states, encoded.states.float()):
            assert torch.equal(model.decode(states, tokens).float(), whole)
        assert torch.equal(model.generate(x, tokens), whole.argmax(-1))
        outputs, state = model.rnn(encoded.states.float(), torch.zeros(1, 2, 8))  # nested inputs
        assert outputs.dtype == state.dtype == low
    model.decode(encoded.states, tokens).sum().backward()
    assert all(p.grad.dtype == low for p in model.rnn.parameters())
    handle.remove()
    assert model.encode(x).states.dtype == torch.float32
    assert model.encoder.seen[-1] == torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Leaf(nn.Module):
    """Notes what it is given after its own hooks, by position and by name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *args, **kwargs):
        self.given = args, kwargs
        return self.weight * 1


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_module_with_weights_casts_what_floats_and_hands_on_the_rest(low):
    model = Leaf()
    mezzo.prepare(model, mezzo.Policy.O2(low, emulate=True))
    wide, packed = torch.ones(2), pack_padded_sequence(torch.ones(2, 3, 1), [3, 2], batch_first=True)
    others = [torch.arange(2), torch.ones(2).bool(), torch.ones(2).double(), torch.ones(2).cfloat()]
    assert model(wide, [wide, *others], packed, None, 3, x={"a": (wide, wide.to(low))}, text="x").dtype == torch.float32
    (first, (second, *same), third, *_), kwargs = model.given
    assert first.dtype == second.dtype == third.data.dtype == kwargs["x"]["a"][0].dtype == low
    assert all(a is b for a, b in zip(same, others, strict=True))
    assert (kwargs["x"]["a"][1].dtype, kwargs["text"]) == (low, "x")
    given = (wide.to(low), 3), {"mask": None}
    assert TakesIn(low).enter(model, *given) is None  # where all is right nothing is rebuilt


def test_fp32_that_a_model_makes_meets_modules_as_it_meets_hand_made_casts():
    """A time embedding: 999 and 1000 are one number in BF16, so nothing but what a module takes in may be rounded."""

    class Diffusion(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
            self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 8))

        def forward(self, x, t):
            angles = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
            return self.outer(functional.silu(self.inner(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))))

    torch.manual_seed(0)
    model = Diffusion()
    by_hand = copy.deepcopy(model).bfloat16()
    for module in by_hand.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: tuple(x.bfloat16() for x in args))
    mezzo.prepare(model, "O2,dtype=bfloat16,emulate=false")
    x, t = torch.randn(2, 8), torch.tensor([999.0, 1000.0])
    out, expected = model(x, t), by_hand(x, t)
    assert torch.equal(out, expected.float())
    assert not torch.equal(*(model.time[0](torch.cat([a.sin(), a.cos()], -1)) for a in t[:, None] * torch.ones(8)))
    for each in (out, expected):
        each.float().square().sum().backward()
    for a, b in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("policy", LOW)
def test_weights_in_lists_and_dicts_are_those_of_the_module_that_uses_them(policy):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.ParameterList([nn.Parameter(torch.eye(4)) for _ in range(2)])
            self.named = nn.ParameterDict({"out": nn.Parameter(torch.eye(4))})
            self.parts = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            return sum(x @ weight for weight in self.each) @ self.named["out"]

    model = nn.Sequential(Experts())
    mezzo.prepare(model, policy)
    assert torch.equal(model(torch.ones(2, 4)), torch.full((2, 4), 2.0))


@pytest.mark.parametrize("policy", LOW)
def test_a_module_may_call_itself(policy):
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.inner = nn.Linear(4, 4), []

        def forward(self, x, depth):
            out = self.lin(x)
            self.inner.append(out.dtype)
            return self(out, depth - 1) if depth else out

    model = Tree()
    handle = mezzo.prepare(model, policy)
    assert model(torch.ones(4), 3).dtype == torch.float32
    assert model.inner == [handle.policy.dtype] * 4
    assert torch.overrides._get_current_function_mode_stack() == []


@dataclasses.dataclass
class Cache:
    k: torch.Tensor
    v: torch.Tensor


KINDS = {
    "tuple": (lambda k, v: (k, v), lambda kept: kept),
    "dict": (lambda k, v: {"k": k, "v": v}, lambda kept: (kept["k"], kept["v"])),
    "dataclass": (Cache, lambda kept: (kept.k, kept.v)),
}


class Cached(nn.Module):
    """Attention whose keys and values go from call to call, as in ``generate``."""

    def __init__(self, kind="tuple"):
        super().__init__()
        self.make, self.read = KINDS[kind]
        self.table, self.qkv, self.head = nn.Embedding(11, 16), nn.Linear(16, 48), nn.Linear(16, 11)

    def forward(self, tokens, cache=None):
        q, k, v = self.qkv(self.table(tokens)).chunk(3, -1)
        if cache is not None:
            before, values = self.read(cache[0])
            k, v = torch.cat([before, k], 1), torch.cat([values, v], 1)
        hidden = functional.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.head(hidden), [self.make(k, v)]

    @torch.no_grad()
    def generate(self, tokens, count):
        logits, cache = self(tokens)
        for _ in range(count):
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
            logits, cache = self(tokens[:, -1:], cache)
        return tokens, cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_a_model_gave_out_comes_back_as_it_was(level, kind):
    torch.manual_seed(0)
    model = Cached(kind)
    by_hand = copy.deepcopy(model).bfloat16()
    mezzo.prepare(model, f"{level},dtype=bfloat16,emulate=false")
    tokens = torch.randint(11, (2, 3))
    found, cache = model.generate(tokens, 5)
    assert torch.equal(found, by_hand.generate(tokens, 5)[0])
    assert model.read(cache[0])[0].dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(model.generate(tokens, 5)[0], found)
    with torch.no_grad():
        _, cache = model(tokens)
        model.read(cache[0])[0].zero_()  # a program's own edit counts, and is FP32
        with pytest.raises(RuntimeError, match="dtype"):
            model(tokens[:, :1], cache)


@pytest.mark.parametrize(
    "policy", [*LOW[:2], "O1,dtype=bfloat16,emulate=true", "O1,dtype=float16,emulate=true,low=gelu"]
)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("in_loss", [True, False])
def test_recomputed_parts_run_in_the_region_again(policy, reentrant, in_loss):
    """Bit for bit, under a bare backward pass inside the region or outside of it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lin, self.seen = nn.LayerNorm(8), nn.Linear(8, 8), []

        def forward(self, x, table):
            self.seen.append(table.dtype)
            return x + functional.gelu(self.lin(self.norm(x))).softmax(-1) * table.sin()

    class Model(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.first, self.again = Block(), again
            self.second = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))

        def forward(self, x):
            run = checkpoint if self.again else (lambda block, *args, **_: block(*args))
            x = run(self.first, x, torch.linspace(0, 3, 8), use_reentrant=reentrant)
            return run(self.second, x, use_reentrant=reentrant)

    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Model(again)
        handle = mezzo.prepare(model, f"{policy},fp32_module=second.2")
        x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
        with handle.autocast():
            loss = model(x).float().square().sum()
            if in_loss:
                loss.backward()
        if not in_loss:
            loss.backward()
        assert set(model.first.seen) == {torch.float32}
        assert len(model.first.seen) == 1 + again
        found.append([loss, x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", LOW)
def test_parts_are_recomputed_as_they_were_called(policy, reentrant):
    """Checkpoints of a training loop's own around parts of a model."""

    def gradients(part):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 4))
        with mezzo.prepare(model, policy).autocast():
            x = torch.arange(32.0).reshape(4, 8).requires_grad_()
            model(x).float().sum().backward()
            for module in model:
                x = part(module, x)
            x.square().sum().backward()
        return [param.grad for param in model.parameters()]

    expected = gradients(lambda module, x: module(x))
    found = gradients(lambda module, x: checkpoint(module, x, use_reentrant=reentrant))
    assert all(map(torch.equal, found, expected))


def test_an_island_computes_in_fp32_and_gives_fp32_to_the_next_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.Linear(2, 2))
    policy = mezzo.Policy.O2("bfloat16", emulate=True).keep_fp32(modules=["1"])
    mezzo.prepare(model, policy)
    seen = []
    for module in (*model[1], model[2]):
        module.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    assert model(torch.ones(3, 4)).dtype == torch.float32
    wide, low = torch.float32, torch.bfloat16
    assert seen == [(wide, wide), (wide, wide), (low, low)]
    x = torch.full((3, 4), 1 + 2**-20)
    assert torch.equal(model[1][1](x), functional.linear(x, model[1][1].weight, model[1][1].bias))
    assert model[1][1](x.bfloat16()).dtype == wide


MAPS = {
    "orthogonal": (lambda layer: parametrizations.orthogonal(layer), lambda layer: layer.weight),
    "spectral norm": (parametrizations.spectral_norm, lambda layer: layer.weight),
    "weight norm": (parametrizations.weight_norm, lambda layer: layer.weight),
    "a map of the program's own": (
        lambda layer: parametrize.register_parametrization(layer, "weight", Squared()), lambda layer: layer.weight,
    ),
    "spectral norm by a hook": (old_spectral_norm, lambda layer: layer.weight),
}  # fmt: skip


class Squared(nn.Module):
    def forward(self, x):
        assert x.dtype == torch.float32
        return x.square()


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("policy", LOW[:2])
def test_a_weight_is_made_in_fp32_and_used_low(kind, policy):
    make, weight = MAPS[kind]
    torch.manual_seed(0)
    plain = nn.Sequential(make(nn.Linear(8, 8, bias=False)), nn.Linear(8, 2))
    model = copy.deepcopy(plain)
    handle = mezzo.prepare(model, policy)
    low = handle.policy.dtype
    stored = {name: t.dtype for name, t in (*model[0].named_parameters(), *model[0].named_buffers())}
    assert set(stored.values()) == {torch.float32}, stored
    seen = []
    model[0].register_forward_hook(
        lambda module, args, out: seen.append((args[0].dtype, weight(module).dtype, out.dtype))
    )
    x = torch.randn(4, 8)
    for each in (model, plain):
        each(x).float().square().sum().backward()
    assert seen == [(low, low, low)]
    assert torch.equal(weight(model[0]).float(), weight(plain[0]).to(low).float())  # one rounding of the exact map
    for mine, theirs in zip(model[0].parameters(), plain[0].parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.1, atol=0.02)
    handle.remove()
    assert torch.equal(model(x), plain(x)) or kind.startswith("spectral")  # whose estimate goes on with each pass


def test_an_exception_leaves_no_region_and_the_next_call_is_right():
    model, _ = speech("O2,dtype=bfloat16,emulate=true")
    x, tokens = data()
    for call in (lambda: model.encoder(x, wrong=1), lambda: model(x, tokens.float()), lambda: model.head(x)):
        with pytest.raises((TypeError, RuntimeError)):
            call()
        assert torch.overrides._get_current_function_mode_stack() == []
        assert model(x, tokens).dtype == torch.float32
        assert model.encoder.seen[-1] == torch.bfloat16


def test_copies_and_pickles_are_plain_fp32_models():
    model, handle = speech("O2,dtype=bfloat16,emulate=true")
    x, _ = data()
    model.encode(x)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert other.encode(x).states.dtype == torch.float32
        assert other.encoder.seen[-1] == torch.float32
        assert other(*data()).dtype == torch.float32
    part = copy.deepcopy(model.encoder)
    assert part(x).states.dtype == torch.float32
    handle.remove()
    assert part(x).states.dtype == torch.float32


def test_threads_may_call_a_model_at_once():
    model, _ = speech("O2,dtype=bfloat16,emulate=true")
    x, tokens = data()
    expected = model(x, tokens), model.encode(x).states
    at_once, found = threading.Barrier(2), []

    def wait(*_):
        at_once.wait(10)

    hook = model.rnn.register_forward_pre_hook(wait)

    def encode():
        at_once.wait(10)  # the other thread is in the model now
        found.append(model.encode(x).states)

    thread = threading.Thread(target=encode)
    thread.start()
    found.append(model(x, tokens))
    thread.join()
    hook.remove()
    assert any(torch.equal(each, expected[0]) for each in found)
    assert any(torch.equal(each, expected[1]) for each in found)
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("policy", LOW)
def test_models_of_one_session_may_share_a_module(policy):
    shared = nn.Linear(4, 4)
    first, second = nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), shared)
    outputs = []
    shared.register_forward_hook(lambda _m, _a, out: outputs.append(out.dtype))
    params = list(dict.fromkeys([*first.parameters(), *second.parameters()]))
    amp = mezzo.MixedPrecision([first, second], torch.optim.SGD(params, lr=0.1), policy)
    for model in (first, second, first):
        assert model(torch.ones(2, 4)).dtype == torch.float32
    assert outputs == [amp.policy.dtype] * 3
    amp.close()
    assert not any(m._forward_pre_hooks for m in second.modules())


@pytest.mark.parametrize("policy", LOW)
def test_gradients_of_each_sample_by_vmap_and_functional_call(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    handle = mezzo.prepare(model, policy)
    x = torch.randn(5, 8)
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params, row):
        return functional_call(model, params, (row[None],)).square().mean()

    together = vmap(grad(loss), in_dims=(None, 0))(params, x)
    single = [grad(loss)(params, row) for row in x]
    for name, gradients in together.items():
        assert gradients.dtype == handle.policy.dtype
        for mine, alone in zip(gradients, single, strict=True):
            torch.testing.assert_close(mine, alone[name], rtol=0.05, atol=0.02)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what goes through a hook, read by Dynamo itself
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled_models_and_methods(fullgraph):
    if fullgraph and torch.__version__ < (2, 12):
        pytest.skip("needs torch 2.12, whose graphs hold copy.copy: this model returns a dataclass, which is copied")
    torch.compiler.reset()
    model, _ = speech("O2,dtype=bfloat16,emulate=false")
    x, tokens = data()
    model.rnn = nn.Identity()
    model.decode = lambda states, tokens: model.head(states + model.table(tokens))
    eager = model(x, tokens), model.encode(x).states, model.head(torch.ones(2, 8))
    compiled = [torch.compile(f, backend="eager", fullgraph=fullgraph) for f in (model, model.encode, model.head)]
    for _ in range(2):
        found = compiled[0](x, tokens), compiled[1](x).states, compiled[2](torch.ones(2, 8))
        for a, b in zip(found, eager, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
    # A block that is compiled by itself is called from inside and from outside.
    model.encoder.compile(backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        assert torch.equal(model(x, tokens), eager[0])
        assert torch.equal(model.encode(x).states, eager[1])


def test_hooks_of_the_program_may_come_before_and_after():
    model, _ = speech("O2,dtype=bfloat16,emulate=true")
    other = Speech()
    other.head.register_forward_pre_hook(lambda _m, args: (args[0].float(),))  # whatever it makes is cast after it
    mezzo.prepare(other, "O2,dtype=bfloat16,emulate=true")
    assert other(*data()).dtype == torch.float32
    order = []
    model.head.register_forward_pre_hook(lambda _m, args: order.append(args[0].dtype))
    model.head.register_forward_hook(lambda _m, _a, out: order.append(out.dtype))
    model.encoder.register_forward_pre_hook(lambda _m, _a, kwargs: order.append(set(kwargs)), with_kwargs=True)
    model.head(torch.ones(2, 8))
    model.encode(data()[0])
    assert order == [torch.bfloat16, torch.bfloat16, {"lengths"}]


@pytest.mark.parametrize("policy, hooks", [("O0", 0), ("O1,dtype=bfloat16,lists=device,emulate=false", 0), (LOW[0], 1)])
def test_a_policy_that_changes_nothing_hooks_nothing(policy, hooks):
    model = Speech()
    mezzo.prepare(model, policy)
    assert bool([m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]) == bool(hooks)
