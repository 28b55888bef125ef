"""Whole models under a policy: in threads, transformed, copied, wrapped and recomputed, as the plain eager run."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import mezzo
from mezzo import StateError

from ..support.tables import pairwise, thinned

KINDS = ["dtype=float16,emulate=true", "dtype=bfloat16,emulate=true", "dtype=bfloat16,emulate=false"]
POLICIES = [f"{level},{kind},loss_scale=128" for level in ("O1", "O2") for kind in KINDS]


class Block(nn.Module):
    """Products, a normalisation, an exponential; a plain method, outside any module's hooks, has most of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def spread(self, x):
        return functional.gelu(self.up(self.norm(x))).softmax(-1).exp()

    def forward(self, x):
        return self.down(self.spread(x))


class Net(nn.Module):
    """Two blocks, or one that runs twice; ``recompute`` says how their plain methods are run."""

    def __init__(self, recompute=lambda function, x: function(x), *, shared=False):
        super().__init__()
        self.one = Block()
        self.two = self.one if shared else Block()
        self.recompute = recompute

    def forward(self, x):
        for block in (self.one, self.two):
            x = x + block.down(self.recompute(block.spread, x))
        return x


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(build):
    torch.manual_seed(0)
    return build()


def session(model, policy):
    return mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def gradients(policy, model, backward=mezzo.MixedPrecision.backward):
    amp, x = session(model, policy), data(4, 8).requires_grad_()
    with amp.autocast():
        loss = model(x).float().square().mean()
    backward(amp, loss)
    return [x.grad, *(p.grad for p in model.parameters())]


def assert_equal(mine, theirs):
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert a.dtype == b.dtype, number
        assert b.isfinite().all(), number
        assert b.count_nonzero() > 0, number
        assert torch.equal(a, b), f"{number}: {(a - b).abs().max()} of {b.abs().max()}"


# Threads and recomputation --------------------------------------------------------------------------


def in_another_thread(amp, loss):
    raised = []

    def run():
        try:
            amp.backward(loss)
        except BaseException as error:  # threading would only print it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert raised == []


@pytest.mark.parametrize("recomputed", ["no", "reentrant", "not reentrant"])
@pytest.mark.parametrize("policy", POLICIES)
def test_backward_from_another_thread(policy, recomputed):
    def recompute(function, x):
        return function(x) if recomputed == "no" else checkpoint(function, x, use_reentrant=recomputed == "reentrant")

    there = gradients(policy, seeded(lambda: Net(recompute)), backward=in_another_thread)
    assert_equal(there, gradients(policy, seeded(Net)))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoints_that_stop_early_or_do_not(policy, early, shared):
    """Four in sequence; an early stop leaves the recomputed function, and its regions, by an exception."""
    runs = []

    def recompute(function, x):
        def noted(y):
            out = function(y)
            runs.append(None)  # not reached where recomputation stops early
            return out

        return checkpoint(noted, checkpoint(torch.relu, x, use_reentrant=False), use_reentrant=False)

    with set_checkpoint_early_stop(early):
        mine = gradients(policy, seeded(lambda: Net(recompute, shared=shared)))
    assert len(runs) == (2 if early else 4)
    assert not torch.is_autocast_enabled("cpu")
    plain = seeded(lambda: Net(lambda function, x: function(torch.relu(x)), shared=shared))
    assert_equal(mine, gradients(policy, plain))


# torch.func -----------------------------------------------------------------------------------------


def functional_loss(model):
    return lambda parameters, x: functional_call(model, parameters, (x,)).float().square().mean()


@pytest.mark.parametrize("lists", ["portable", "device"])
def test_func_grad_of_a_functional_call(lists):
    model, x = seeded(Net), data(4, 8)
    parameters = dict(model.named_parameters())
    handle = mezzo.prepare(model, f"O1,dtype=bfloat16,emulate=false,lists={lists}")
    with handle.autocast():
        mine = grad(functional_loss(model))(parameters, x)
        theirs = torch.autograd.grad(functional_loss(model)(parameters, x), list(parameters.values()))
    assert_equal(mine.values(), theirs)


def test_vmap_of_a_functional_call():
    model, batch = seeded(Block), data(3, 4, 8)
    parameters = dict(model.named_parameters())
    handle = mezzo.prepare(model, "O1,dtype=bfloat16,emulate=false")
    with handle.autocast():
        outputs = vmap(lambda x: functional_call(model, parameters, (x,)))(batch)
        expected = torch.stack([model(x) for x in batch])
        each = vmap(grad(functional_loss(model)), in_dims=(None, 0))(parameters, batch)
        one_by_one = [grad(functional_loss(model))(parameters, x) for x in batch]
    assert outputs.dtype == expected.dtype == torch.bfloat16
    # One batched product adds in another order than three: a unit in the last place of BF16, a few times over.
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(outputs, expected, rtol=0, atol=4 * eps * expected.abs().max().item())
    for name, stacked in each.items():
        wanted = torch.stack([gradient[name] for gradient in one_by_one])
        torch.testing.assert_close(stacked, wanted, rtol=0, atol=8 * eps * wanted.abs().max().item())


def test_vmap_with_the_device_s_lists_is_torch_s_own():
    """Which leaves the product of a Linear with a bias in FP32."""
    model, batch = seeded(Block), data(3, 4, 8)
    with mezzo.autocast("O1,dtype=bfloat16,emulate=false,lists=device", "cpu"):
        mine = vmap(model)(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = vmap(model)(batch)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # in torch's own decompositions
@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16,emulate=true", "O2,dtype=float16,emulate=true"])
def test_forward_mode(policy):
    model, x = seeded(Block), data(4, 8)
    _, true = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    handle = mezzo.prepare(model, policy)
    with handle.autocast(), forward_ad.dual_level():
        mine = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    eps = torch.finfo(handle.policy.dtype).eps
    torch.testing.assert_close(mine.float(), true, rtol=0, atol=4 * eps * true.abs().max().item())


# Copies ---------------------------------------------------------------------------------------------


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("rule", ["", ",fp32_module=down", ",fp32_param=up.weight"])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_copies_of_a_prepared_model(policy, how, rule):
    """A copy is the plain FP32 model, without hooks and rules, and shares nothing with the model."""
    plain, model = seeded(Block), seeded(Block)
    mezzo.prepare(model, policy + rule)
    model(data(4, 8))  # after a call, when a hook might hold something that cannot be copied
    copied = COPIES[how](model)
    results = []
    for each in (copied, plain):
        x = data(4, 8).requires_grad_()
        loss = each(x).square().mean()
        loss.backward()
        results.append([loss.detach(), x.grad, *(p.grad for p in each.parameters())])
    if "dtype=float16" in policy:  # below 2^-16 halves hold FP16's weights to 2^-40
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)
    else:
        assert_equal(*results)
    assert {p.dtype for p in copied.parameters()} == {torch.float32}
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}


# Wrapped models -------------------------------------------------------------------------------------


def weights_after(policy, wrap, steps=3):
    """Train for some steps; return the gradients and weights of all of them."""
    model = wrap(seeded(Net))
    amp, seen = session(model, policy), []
    for step in range(steps):
        with amp.autocast():
            loss = model(data(4, 8, seed=step)).float().square().mean()
        amp.backward(loss)
        seen += [p.grad.clone() for p in model.parameters()]
        amp.step()
        amp.zero_grad()
    return [*seen, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_a_ddp_model_trains_under_o1_as_it_does_unwrapped(policy, alone):
    wrapped = weights_after(policy, nn.parallel.DistributedDataParallel)
    assert_equal(wrapped, weights_after(policy, lambda model: model))


@pytest.mark.parametrize("policy", POLICIES[3:])
def test_a_converted_model_can_be_wrapped_in_ddp_afterwards(policy, alone):
    def distributed(wrap):
        model = seeded(Net)
        amp, x = session(model, policy), data(4, 8)
        with amp.autocast():
            amp.backward(wrap(model)(x).float().square().mean())
        return [p.grad for p in model.parameters()]

    assert_equal(distributed(nn.parallel.DistributedDataParallel), distributed(lambda model: model))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_conversion_after_ddp_is_refused(level, alone):
    model = nn.parallel.DistributedDataParallel(seeded(Net))
    with pytest.raises(StateError, match=f"{level} cannot convert a model that DistributedDataParallel") as caught:
        session(model, f"{level},dtype=bfloat16")
    assert "prepare first, then DistributedDataParallel(model); or O1" in str(caught.value)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:Dynamo")  # what it cannot trace it runs in Python
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("policy", POLICIES[:3])
def test_a_compiled_model_trains_under_o1_as_it_does_uncompiled(policy):
    torch.compiler.reset()
    compiled = weights_after(policy, lambda model: torch.compile(model, backend="aot_eager"))
    assert_equal(compiled, weights_after(policy, lambda model: model))


# Hugging Face ---------------------------------------------------------------------------------------


# use_cache=False: keys kept in a cache have other strides, hence other kernels, and recomputation switches it off.


def gpt2(transformers):
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def bert(transformers):
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5(transformers):
    # One decoder block: recomputed with reentry, two would sum the encoder's gradients in another order, in any torch.
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=1, num_heads=2,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="needs transformers")


def tokens(step):
    drawn = torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(drawn)
    mask[1, 6:] = 0
    return {"input_ids": drawn, "labels": drawn, "attention_mask": mask}


def trained(policy, model, steps=3):
    """Train on a batch each step, with dropout; return losses, gradients and weights."""
    model.train()
    amp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy)
    torch.manual_seed(0)  # of dropout, whose masks recomputation repeats
    losses, seen = [], []
    for step in range(steps):
        with amp.autocast():
            loss = model(**tokens(step)).loss
        losses.append(loss.detach().float())
        amp.backward(loss)
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert not amp.step().skipped
        amp.zero_grad()
    return [torch.stack(losses), *seen, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("policy, build", thinned(POLICIES, [gpt2, bert, t5], every=2))
def test_hugging_face_models(policy, build, transformers):
    losses, *rest = trained(policy, seeded(lambda: build(transformers)))
    assert losses.isfinite().all()
    assert all(x.isfinite().all() for x in rest)
    exact = trained("O0", seeded(lambda: build(transformers)))[0]
    # The compute dtype's unit roundoff, a few times over: a loss near ln 64 averages many rounded logits.
    eps = torch.finfo(mezzo.Policy.parse(policy).dtype).eps
    torch.testing.assert_close(losses, exact, rtol=4 * eps, atol=0)


@pytest.mark.parametrize("policy, build, reentrant", pairwise(POLICIES, [gpt2, bert, t5], [True, False]))
def test_hugging_face_models_recomputed(policy, build, reentrant, transformers):
    model = seeded(lambda: build(transformers))
    # transformers 5 has renamed the method, and warns of the old name
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    mine, theirs = (trained(policy, each, steps=2) for each in (model, seeded(lambda: build(transformers))))
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert torch.equal(a, b), f"{number}: {(a - b).abs().max()} of {b.abs().max()}"
