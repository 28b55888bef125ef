"""O2 and O3 cast at the first of the model's modules that is called from outside, whatever the method."""

import copy
import dataclasses
import io
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo

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
        self.seen.append(x.dtype)
        return Output(self.norm(functional.gelu(self.conv(x)).mT), lengths)


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
def test_every_method_has_a_door(policy, in_region):
    model, handle = speech(policy)
    x, tokens = data()
    low = handle.policy.dtype
    with handle.autocast() if in_region else torch.enable_grad():
        whole = model(x, tokens)
        encoded = model.encode(x)
        assert model.encoder.seen == [low, low]
        assert encoded.states.dtype == torch.float32
        assert encoded.lengths.dtype == torch.int64
        decoded = model.decode(encoded.states, tokens)
        assert whole.dtype == decoded.dtype == torch.float32
        assert model.generate(x, tokens).shape == (2, 6)
        assert model.table(tokens).dtype == torch.float32
        outputs, state = model.rnn(encoded.states, torch.zeros(1, 2, 8))  # nested inputs
        assert outputs.dtype == state.dtype == torch.float32
    # Between the methods the numbers are FP32, and inside the model they are not: near, not equal.
    torch.testing.assert_close(whole, decoded, rtol=0, atol=16 * torch.finfo(low).eps)
    model.decode(encoded.states, tokens).sum().backward()
    assert all(p.grad.dtype == low for p in model.rnn.parameters())
    handle.remove()
    assert model.encode(x).states.dtype == torch.float32
    assert model.encoder.seen[-1] == torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("policy", LOW)
def test_calls_from_inside_pass(policy):
    """FP32 inside a low model stays FP32: a door that cast it would change numbers."""
    given = []

    class Leaf(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            given.append(x.dtype)
            return x * self.weight.float()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x, again=True):
            out = self.leaf(x.float())
            assert out.dtype == torch.float32
            return self(out, again=False) if again else out

    model = Outer()
    handle = mezzo.prepare(model, policy)
    model.leaf(torch.ones(4))  # its second hook is there from now on
    given.clear()
    model(torch.ones(4))
    model(torch.ones(4))
    assert given == [torch.float32] * 4
    with pytest.raises(RuntimeError):
        model.leaf(torch.ones(5))
    assert model.leaf(torch.ones(4)).dtype == torch.float32
    assert given[-1] == handle.policy.dtype


@pytest.mark.parametrize("policy", LOW)
def test_a_module_that_calls_itself_is_one_call(policy):
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.inner = nn.Linear(4, 4), []

        def forward(self, x, depth):
            out = self.lin(x)
            self.inner.append(out.dtype)
            return self(out, depth - 1) if depth else out

    model = nn.ModuleDict({"tree": Tree()})
    holder = nn.Module()
    holder.parts, holder.forward = model, lambda x: model["tree"](x, 2)
    handle = mezzo.prepare(holder, policy)
    for _ in range(2):
        assert model["tree"](torch.ones(4), 3).dtype == torch.float32
    assert set(model["tree"].inner) == {handle.policy.dtype}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_inside(reentrant):
    """A block that reads FP32 numbers of its model gets them again when it runs in the backward pass."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.seen = nn.Linear(8, 8), []

        def forward(self, x, table):
            self.seen.append(table.dtype)
            return x + self.lin(x) * (table.sin() / 3).to(x.dtype)

    class Model(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.block, self.again = Block(), again

        def forward(self, x):
            table = torch.linspace(0, 3, 8)
            run = checkpoint if self.again else (lambda block, *args, **_: block(*args))
            return run(self.block, x, table, use_reentrant=reentrant)

    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Model(again)
        mezzo.prepare(model, "O2,dtype=bfloat16,emulate=true")
        x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
        model(x).square().sum().backward()
        assert set(model.block.seen) == {torch.float32}
        assert len(model.block.seen) == 1 + again
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", LOW)
def test_what_is_recomputed_comes_from_outside_again_where_it_did(policy, reentrant):
    """Checkpoints of a training loop's own around parts of a model, and calls of the same parts without."""

    def gradients(part):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 4))
        with mezzo.prepare(model, policy).autocast():
            x = torch.arange(32.0).reshape(4, 8).requires_grad_()
            model(x).float().sum().backward()  # from inside, as far as its parts are concerned
            for module in model:
                x = part(module, x)
            assert x.dtype == torch.float32
            x.square().sum().backward()
        return [param.grad for param in model.parameters()]

    expected = gradients(lambda module, x: module(x))
    found = gradients(lambda module, x: checkpoint(module, x, use_reentrant=reentrant))
    assert all(map(torch.equal, found, expected))


def test_a_part_that_was_called_from_outside_is_recomputed_inside_where_it_was():
    torch.manual_seed(0)
    part = nn.Linear(8, 8)
    seen = []
    part.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = part

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False)

    model = Checkpointed()
    x = torch.randn(2, 8)
    with mezzo.prepare(model, LOW[0]).autocast():
        loss = model(x).sum()
        part(x)
        loss.backward()
    assert seen == [torch.bfloat16] * 3
    assert all(param.grad.dtype == torch.bfloat16 for param in part.parameters())


def test_modules_kept_in_fp32_get_fp32_from_outside():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.BatchNorm1d(2))
    seen = []
    model[1][1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    mezzo.prepare(model, mezzo.Policy.O2("bfloat16", emulate=True).keep_fp32(modules=["1"]))
    x = torch.full((3, 4), 1 + 2**-20)
    exact = functional.linear(x, model[1][1].weight, model[1][1].bias)
    assert torch.equal(model[1][1](x), exact)
    assert seen == [torch.float32]
    assert model[1](x).dtype == model[2](x[:, :2]).dtype == model[0](x).dtype == torch.float32


def test_an_exception_leaves_the_model_outside():
    model, _ = speech("O2,dtype=bfloat16,emulate=true")
    x, tokens = data()
    for call in (lambda: model.encoder(x, wrong=1), lambda: model(x, tokens.float()), lambda: model.head(x)):
        with pytest.raises((TypeError, RuntimeError)):
            call()
        assert model.encode(x).states.dtype == torch.float32
        assert model.encoder.seen[-1] == torch.bfloat16


def test_an_interrupt_in_a_forward_pass_is_over_by_the_next_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2,dtype=bfloat16,emulate=true")

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), amp.autocast():
        model(torch.ones(2, 4))
    hook.remove()
    amp.zero_grad()
    assert model[0](torch.ones(2, 4)).dtype == torch.float32


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


def test_threads_come_in_by_doors_of_their_own():
    model, _ = speech("O2,dtype=bfloat16,emulate=true")
    x, tokens = data()
    at_once, found = threading.Barrier(2), []

    def wait(*_):
        at_once.wait(10)

    model.rnn.register_forward_pre_hook(wait)

    def encode():
        at_once.wait(10)  # the other thread is in the model now
        found.append(model.encode(x).states.dtype)

    thread = threading.Thread(target=encode)
    thread.start()
    model(x, tokens)
    thread.join()
    assert found == [torch.float32]
    assert model.encoder.seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("policy", LOW)
def test_models_of_one_session_may_share_a_module(policy):
    shared = nn.Linear(4, 4)
    first, second = nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), shared)
    outputs = []
    shared.register_forward_hook(lambda _m, _a, out: outputs.append(out.dtype))
    params = list(dict.fromkeys([*first.parameters(), *second.parameters()]))
    amp = mezzo.MixedPrecision([first, second], torch.optim.SGD(params, lr=0.1), policy)
    inputs = []
    first[1].register_forward_pre_hook(lambda _m, args: inputs.append(args[0].dtype))
    for model in (first, second, first):
        assert model(torch.ones(2, 4)).dtype == torch.float32
    assert shared(torch.ones(2, 4)).dtype == torch.float32
    assert set(inputs) == {amp.policy.dtype}
    assert outputs[:3] == [amp.policy.dtype] * 3
    amp.close()
    assert not any(m._forward_pre_hooks for m in second.modules())


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
            assert a.dtype == torch.float32
            assert torch.equal(a, b)
    # A block that is compiled by itself is called from inside and from outside.
    model.encoder.compile(backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        assert torch.equal(model(x, tokens), eager[0])
        assert torch.equal(model.encode(x).states, eager[1])


def test_hooks_of_the_user_s_stay_inside_the_door():
    model, _ = speech("O2,dtype=bfloat16,emulate=true")
    order = []
    model.head.register_forward_pre_hook(lambda _m, args: order.append(args[0].dtype))
    model.head.register_forward_hook(lambda _m, _a, out: order.append(out.dtype))
    model.encoder.register_forward_pre_hook(lambda _m, _a, kwargs: order.append(set(kwargs)), with_kwargs=True)
    model.head(torch.ones(2, 8))
    model.encode(data()[0])
    assert order[0] == torch.bfloat16
    assert order[-1] == {"lengths"}


def test_policies_without_low_weights_hook_nothing():
    model = Speech()
    mezzo.prepare(model, "O1,dtype=bfloat16,emulate=true")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_region_that_holds_inside_leaves_nothing_to_the_model_s_own_boundaries():
    model, _ = speech("O2,dtype=bfloat16,emulate=true,fp32_module=head")
    x, tokens = data()
    outside = model(x, tokens)
    region = mezzo.autocast("O1,dtype=bfloat16,emulate=true,promote=layer_norm", "cpu").region
    for holds, dtype, out in ((False, torch.bfloat16, torch.float32), (True, torch.float32, torch.bfloat16)):
        model.encoder.seen.clear()
        with mezzo.autocast.of(dataclasses.replace(region, holds_inside=holds)):
            found = model(x, tokens)
            alone = model.head(torch.ones(2, 8))  # a rule of the model's keeps it in FP32
        assert (model.encoder.seen[0], found.dtype) == (dtype, out)
        assert alone.dtype == (torch.bfloat16 if holds else torch.float32)
    assert torch.equal(model(x, tokens), outside)
