"""O3 casts at the modules that own low parameters, whatever calls them; a model gives out FP32."""

import collections
import copy
import dataclasses
import io
import math
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence

import mezzo
from mezzo.weights.stepping import in_memory

from .models import Block, Speech, assert_same, data, seeded, speech_data

LOW = ["O3,dtype=bfloat16,emulate=true", "O3,dtype=float16,emulate=true", "O3,dtype=bfloat16,emulate=false"]
HALVES = ["O2,dtype=bfloat16,emulate=true", "O2,dtype=float16,emulate=true"]


def speech(policy):
    model = seeded(Speech)
    return model, mezzo.prepare(model, policy)


def no_mode_is_left():
    return torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("in_region", [True, False])
def test_any_method_and_any_part_may_be_called(policy, in_region):
    model, handle = speech(policy)
    x, tokens = speech_data()
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


# What is cast -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    pixels: torch.Tensor
    labels: torch.Tensor
    name: str = "batch"


Pair = collections.namedtuple("Pair", "left right")


class Echo(nn.Module):
    """Returns what it is given, after noting it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return {"args": args, **kwargs}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_inputs_and_outputs_are_cast_through_nested_containers(low):
    """What has no such dtype is handed on, the same object; what the caller holds stays as it was."""
    model = Echo()
    mezzo.prepare(model, mezzo.Policy.O3(low, emulate=True))
    value, labels = torch.ones(2), torch.arange(2)
    others = [labels, torch.ones(2).bool(), torch.ones(2).double(), torch.ones(2).cfloat(), value.to(low), None, 3]
    mine = {"x": value, "user": collections.UserDict(y=value), "data": Batch(value, labels)}
    packed = pack_padded_sequence(torch.ones(2, 3, 1), [3, 2], batch_first=True)
    ordered = collections.OrderedDict(a=value)
    out = model([value, (value, *others)], Pair(value, None), ordered, mine, packed=packed, text="unchanged")
    (listed, pair, ordered, given), kwargs = model.seen
    assert all(a is b for a, b in zip(listed[1][1:], others, strict=True))
    assert (type(pair), type(ordered), kwargs["text"]) == (Pair, collections.OrderedDict, "unchanged")
    assert (type(given["user"]), type(given["data"]), given["data"].name) == (collections.UserDict, Batch, "batch")
    assert given["data"].labels is labels
    every = (listed[0], listed[1][0], pair.left, ordered["a"], given["x"], given["user"]["y"], given["data"].pixels)
    assert all(tensor is every[0] and tensor.dtype == low for tensor in every)  # one tensor is cast once
    assert kwargs["packed"].data.dtype == low
    assert out["args"][0][0].dtype == out["args"][3]["data"].pixels.dtype == out["packed"].data.dtype == torch.float32
    assert out["args"][0][1][3].dtype == torch.float64
    assert value.dtype == mine["user"]["y"].dtype == mine["data"].pixels.dtype == torch.float32


class Diffusion(nn.Module):
    """Makes a time embedding: 999 and 1000 are one number in BF16."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 8))

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        return self.outer(functional.silu(self.inner(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))))


def test_fp32_that_a_model_makes_meets_modules_as_it_meets_hand_made_casts():
    """Nothing but what a module takes in may be rounded."""
    model = seeded(Diffusion)
    by_hand = copy.deepcopy(model).bfloat16()
    for module in by_hand.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: tuple(x.bfloat16() for x in args))
    mezzo.prepare(model, "O3,dtype=bfloat16,emulate=false")
    x, t = data(2, 8), torch.tensor([999.0, 1000.0])
    out, expected = model(x, t), by_hand(x, t)
    assert torch.equal(out, expected.float())
    for output in (out, expected):
        output.float().square().sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in by_hand.parameters()])


class Experts(nn.Module):
    """Weights in containers, which are never called, and a call of itself."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(4)) for _ in range(2)])
        self.named, self.inner = nn.ParameterDict({"out": nn.Parameter(torch.eye(4))}), []

    def forward(self, x, depth=1):
        out = sum(x @ weight for weight in self.weights) @ self.named["out"]
        self.inner.append(out.dtype)
        return self(out, depth - 1) if depth else out


@pytest.mark.parametrize("policy", LOW)
def test_weights_in_lists_and_dicts_are_those_of_the_module_that_uses_them(policy):
    model = nn.Sequential(Experts())
    handle = mezzo.prepare(model, policy)
    assert torch.equal(model(torch.ones(2, 4)), torch.full((2, 4), 4.0))
    assert model[0].inner == [handle.policy.dtype] * 2
    assert no_mode_is_left()


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

    def __init__(self, form):
        super().__init__()
        self.make, self.read = KINDS[form]
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


@pytest.mark.parametrize("form", KINDS)
def test_what_a_model_gave_out_comes_back_as_it_was(form):
    model = seeded(lambda: Cached(form))
    by_hand = copy.deepcopy(model).bfloat16()
    mezzo.prepare(model, LOW[2])
    tokens = torch.randint(11, (2, 3))
    generated, cache = model.generate(tokens, 5)
    assert torch.equal(generated, by_hand.generate(tokens, 5)[0])
    assert model.read(cache[0])[0].dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(model.generate(tokens, 5)[0], generated)
    with torch.no_grad():
        _, cache = model(tokens)
        model.read(cache[0])[0].zero_()  # a program's own edit counts, and is FP32
        with pytest.raises(RuntimeError, match="dtype"):
            model(tokens[:, :1], cache)


def test_an_island_computes_in_fp32_and_gives_fp32_to_the_next_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.Linear(2, 2))
    mezzo.prepare(model, mezzo.Policy.O3("bfloat16", emulate=True).keep_fp32(modules=["1"]))
    seen = []
    for module in (*model[1], model[2]):
        module.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    assert model(torch.ones(3, 4)).dtype == torch.float32
    wide, low = torch.float32, torch.bfloat16
    assert seen == [(wide, wide), (wide, wide), (low, low)]
    x = torch.full((3, 4), 1 + 2**-20)
    assert torch.equal(model[1][1](x), functional.linear(x, model[1][1].weight, model[1][1].bias))
    assert model[1][1](x.bfloat16()).dtype == wide


class Squared(nn.Module):
    def forward(self, x):
        assert x.dtype == torch.float32
        return x.square()


def squared(layer):
    parametrize.register_parametrization(layer, "weight", Squared())
    return layer


MAPS = {
    "orthogonal": parametrizations.orthogonal, "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm, "a map of the program's own": squared,
    "spectral norm by a hook": old_spectral_norm,
}  # fmt: skip


@pytest.mark.parametrize("parametrization", MAPS)
@pytest.mark.parametrize("policy", HALVES)
def test_a_weight_is_made_in_fp32_and_used_low(parametrization, policy):
    """Bit for bit as under O1, and after remove() as if nothing had been."""
    plain = seeded(lambda: nn.Sequential(MAPS[parametrization](nn.Linear(8, 8, bias=False)), nn.Linear(8, 2)))
    models, x, runs = [copy.deepcopy(plain) for _ in range(2)], data(4, 8), []
    for model, text in zip(models, (policy, policy.replace("O2", "O1")), strict=True):
        handle = mezzo.prepare(model, text)
        with handle.autocast():
            out = model(x)
        out.float().square().sum().backward()
        runs.append([out, *(p.grad for p in model.parameters())])
        assert model[0].weight.dtype == torch.float32
        handle.remove()
    assert_same(*runs)
    torch.testing.assert_close(models[0](x), models[1](x), rtol=0, atol=0 if "bfloat16" in policy else 2**-20)


# What surrounds a call ----------------------------------------------------------------------------------


def test_an_exception_leaves_no_region_and_the_next_call_is_right():
    for rule in ("", ",fp32_module=head"):
        model, handle = speech(LOW[0] + rule)
        x, tokens = speech_data()
        for call in (lambda: model.encoder(x, wrong=1), lambda: model(x, tokens.float()), lambda: model.head(x)):  # noqa: B023
            with pytest.raises((TypeError, RuntimeError)):
                call()
            assert no_mode_is_left()
            assert model(x, tokens).dtype == torch.float32
            assert model.encoder.seen[-1] == torch.bfloat16
        handle.remove()


def test_threads_may_call_a_model_at_once():
    model, _ = speech(LOW[0] + ",fp32_module=head")
    x, tokens = speech_data()
    expected = model(x, tokens), model.encode(x).states
    at_once, outputs = threading.Barrier(2), []
    hook = model.rnn.register_forward_pre_hook(lambda *_: at_once.wait(10) and None)

    def encode():
        at_once.wait(10)  # the other thread is in the model now
        outputs.append(model.encode(x).states)

    thread = threading.Thread(target=encode)
    thread.start()
    outputs.append(model(x, tokens))
    thread.join()
    hook.remove()
    assert all(any(torch.equal(output, wanted) for output in outputs) for wanted in expected)
    assert no_mode_is_left()


def test_models_of_one_session_may_share_a_module():
    shared, outputs = nn.Linear(4, 4), []
    first, second = nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), shared)
    shared.register_forward_hook(lambda _m, _a, out: outputs.append(out.dtype))
    params = list(dict.fromkeys([*first.parameters(), *second.parameters()]))
    amp = mezzo.MixedPrecision([first, second], torch.optim.SGD(params, lr=0.1), LOW[1])
    for model in (first, second, first):
        assert model(torch.ones(2, 4)).dtype == torch.float32
    assert outputs == [torch.float16] * 3
    amp.close()
    assert not any(m._forward_pre_hooks for m in second.modules())


@pytest.mark.parametrize("policy", [HALVES[0], "O1,dtype=float16,emulate=true"])
def test_gradients_of_each_sample_by_vmap_and_functional_call(policy):
    model, x = seeded(Block), data(3, 4, 8)
    handle = mezzo.prepare(model, policy)
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params, rows):
        return functional_call(model, params, (rows,)).float().square().mean()

    with handle.autocast():
        together = vmap(grad(loss), in_dims=(None, 0))(params, x)
        single = [grad(loss)(params, rows) for rows in x]
        model(x[0]).float().square().mean().backward()
    assert_same(single[0].values(), [param.grad for param in model.parameters()])
    eps = torch.finfo(handle.policy.dtype).eps
    for name, gradients in together.items():
        assert gradients.dtype == params[name].dtype
        wanted = torch.stack([of_sample[name] for of_sample in single])
        # One batched product adds in another order than three: a unit in the last place, a few times over.
        torch.testing.assert_close(gradients, wanted, rtol=0, atol=8 * eps * wanted.abs().max().item())


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16,emulate=true", HALVES[1]])
def test_forward_mode(policy, monkeypatch):
    monkeypatch.setenv("PYTORCH_JIT", "0")  # or torch scripts decompositions that nothing here needs
    model, x = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))), data(4, 8)
    _, true = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    handle = mezzo.prepare(model, policy)
    with handle.autocast(), forward_ad.dual_level():
        mine = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    eps = torch.finfo(handle.policy.dtype).eps
    torch.testing.assert_close(mine.float(), true, rtol=0, atol=4 * eps * true.abs().max().item())


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16,emulate=true,fp32_param=up.weight", *HALVES])
def test_copies_of_a_prepared_model_are_plain_fp32_models(policy):
    """Without hooks and rules, and they share nothing with the model."""

    def results(model):
        x = data(4, 8).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]

    expected, model = results(seeded(Block)), seeded(Block)
    mezzo.prepare(model, policy)
    model(data(4, 8))  # after a call, when a hook might hold something that cannot be copied
    for make in (copy.deepcopy, saved_and_loaded):
        copied = make(model)
        memory = [{t.data_ptr() for t in in_memory(net.parameters())} for net in (model, copied)]
        assert memory[0].isdisjoint(memory[1])
        if "float16" in policy.replace("bfloat16", ""):  # below 2^-16 halves hold FP16's weights to 2^-40
            torch.testing.assert_close(results(copied), expected, rtol=1e-6, atol=1e-9)
        else:
            assert_same(results(copied), expected)
    part = copy.deepcopy(model.down)
    assert part(torch.ones(1, 16)).dtype == part.weight.dtype == torch.float32


def test_hooks_of_the_program_may_come_before_and_after():
    model = Speech()
    model.head.register_forward_pre_hook(lambda _m, args: (args[0].float(),))  # whatever it makes is cast after it
    mezzo.prepare(model, LOW[0])
    assert model(*speech_data()).dtype == torch.float32
    order = []
    model.head.register_forward_pre_hook(lambda _m, args: order.append(args[0].dtype))
    model.head.register_forward_hook(lambda _m, _a, out: order.append(out.dtype))
    model.encoder.register_forward_pre_hook(lambda _m, _a, kwargs: order.append(set(kwargs)), with_kwargs=True)
    model.head(torch.ones(2, 8))
    model.encode(speech_data()[0])
    assert order == [torch.bfloat16, torch.bfloat16, {"lengths"}]


@pytest.mark.parametrize("policy, hooks", [
    ("O0", 0), ("O1,dtype=bfloat16,lists=device,emulate=false", 0), ("O2,dtype=bfloat16,lists=device,emulate=false", 0),
    (LOW[0], 1)])  # fmt: skip
def test_a_policy_that_changes_nothing_hooks_nothing(policy, hooks):
    model = Speech()
    mezzo.prepare(model, policy)
    assert bool([m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]) == bool(hooks)
