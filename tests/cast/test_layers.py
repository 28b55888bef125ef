"""Torch's own layers and mechanisms under a policy, against the same arithmetic with every cast written by hand."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

import mezzo

from .models import assert_same, data, seeded

KINDS = ["O1,dtype=float16,emulate=true", "O1,dtype=bfloat16,emulate=false", "O2,dtype=bfloat16,emulate=true"]
POLICIES = [f"{policy},loss_scale=128" for policy in KINDS]

pytestmark = pytest.mark.parametrize("policy", POLICIES)


class Hand:
    """What a policy means for each kind of op, as casts: the reference, which shares no code with mezzo.

    Each use of a parameter is a cast of its own, so that the gradients of several meet in FP32.
    """

    def __init__(self, policy):
        parsed = mezzo.Policy.parse(policy)
        self.dtype, self.emulate = parsed.dtype, parsed.emulate

    def low(self, function, *operands, **options):
        """Round the operands, compute, round the result: in the low precision itself, or in FP32."""
        inside = torch.float32 if self.emulate else self.dtype
        operands = [None if x is None else x.to(self.dtype).to(inside) for x in operands]
        return self.round(function(*operands, **options))

    def round(self, value):
        if isinstance(value, tuple):
            return tuple(self.round(item) for item in value)
        return value.to(self.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def wide(self, function, x, *others, **options):
        """Compute in FP32."""
        return function(x.float(), *others, **options)

    def linear(self, module, x):
        return self.low(functional.linear, x, module.weight, module.bias)


def first(output):
    """Reduce what a model returns to one tensor, every floating part of which carries gradients."""
    leaves = pytree.tree_leaves(output, is_leaf=lambda x: isinstance(x, PackedSequence))
    return torch.cat([(x.data if isinstance(x, PackedSequence) else x).float().reshape(-1) for x in leaves])


def gradients(policy, model, x, run):
    """Train one step in a session; ``run`` is what happens inside the region."""
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    x = x.clone().requires_grad_()
    with amp.autocast():
        loss = first(run(model, x)).square().mean()
    amp.backward(loss)
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


def by_hand(policy, model, x, run):
    """The same step with casts by hand; ``run(hand, model, x)`` spells out the arithmetic."""
    hand = Hand(policy)
    x = x.clone().requires_grad_()
    loss = first(run(hand, model, x)).square().mean()
    (loss * 128).backward()
    # Of leaves that no optimizer has the session takes the scale away.
    return [loss.detach(), x.grad / 128, *(p.grad for p in model.parameters())]


def assert_matches(policy, build, x, theirs, run=lambda model, x: model(x)):
    assert_same(gradients(policy, seeded(build), x, run), by_hand(policy, seeded(build), x, theirs))


# Attention ----------------------------------------------------------------------------------------------


def attention(hand, module, x, need_weights):
    """nn.MultiheadAttention on one batch-first sequence that attends to itself, with its weights or without."""
    batch, tokens, width = x.shape
    heads, size = module.num_heads, width // module.num_heads
    packed = hand.low(functional.linear, x.transpose(0, 1), module.in_proj_weight, module.in_proj_bias)
    packed = packed.unflatten(-1, (3, width)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    q, k, v = (y.view(tokens, batch * heads, size).transpose(0, 1) for y in packed)  # (batch·heads, tokens, size)
    weights = None
    if need_weights:
        scores = hand.low(torch.bmm, q * math.sqrt(1.0 / size), k.transpose(-2, -1))
        weights = hand.wide(functional.softmax, scores, dim=-1)
        mixed = hand.low(torch.bmm, weights, v).transpose(0, 1)
        weights = weights.view(batch, heads, tokens, tokens).mean(1)
    else:
        q, k, v = (y.view(batch, heads, tokens, size) for y in (q, k, v))
        mixed = hand.low(functional.scaled_dot_product_attention, q, k, v).permute(2, 0, 1, 3)
    out = hand.linear(module.out_proj, mixed.contiguous().view(tokens * batch, width))
    return [y for y in (out.view(tokens, batch, width).transpose(1, 0), weights) if y is not None]


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(policy, need_weights):
    class Attends(nn.MultiheadAttention):
        def forward(self, x):
            return [y for y in super().forward(x, x, x, need_weights=need_weights) if y is not None]

    assert_matches(
        policy, lambda: Attends(8, 2, batch_first=True), data(2, 5, 8),
        lambda hand, model, x: attention(hand, model, x, need_weights),
    )  # fmt: skip


def encoder():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    for p in model.parameters():  # the layers are copies of one: make them differ, and the biases non-zero
        nn.init.normal_(p, std=0.3)
    return model


def encoded(hand, model, x):
    def norm(module, y):
        return hand.wide(functional.layer_norm, y, (8,), module.weight, module.bias)

    for layer in model.layers:
        x = norm(layer.norm1, x + attention(hand, layer.self_attn, x, need_weights=False)[0])
        x = norm(layer.norm2, x + hand.linear(layer.linear2, functional.relu(hand.linear(layer.linear1, x))))
    return x


def test_a_transformer_encoder_trains_and_is_evaluated(policy):
    """The fused fast path of evaluation must not leave the policy's precision."""
    x = data(2, 5, 8)
    assert_matches(policy, encoder, x, encoded)
    model = seeded(encoder)
    handle = mezzo.prepare(model, policy)
    with handle.autocast():
        expected = model(x)
        model.eval()
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                out = model(x)
            assert out.dtype == expected.dtype
            # normalised values up to 4; the fused kernel rounds in other places: some units in the last place
            slack = 16 * torch.finfo(handle.policy.dtype).eps
            torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=slack)


# Recurrence ---------------------------------------------------------------------------------------------


LAYERS = {"LSTM": ("lstm", 2), "GRU": ("gru", 1), "RNN": ("rnn_tanh", 1)}


@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers(policy, packed):
    def pack(x):
        return pack_padded_sequence(x, [5, 3, 2]) if packed else x

    def theirs(hand, model, x):
        kernel, states = LAYERS[type(model).__name__]
        names = [name for group in model._all_weights for name in group]
        hidden = (torch.zeros(4, 3, 4),) * states

        def run(x, *weights):
            state = tuple(h.to(x.dtype) for h in hidden)
            state = state if states > 1 else state[0]
            if packed:
                given = pack(x)
                rest = (given.data, given.batch_sizes, state, weights, True, 2, 0.0, True, True)
            else:
                rest = (x, state, weights, True, 2, 0.0, True, True, False)
            return getattr(torch._VF, kernel)(*rest)

        return hand.low(run, x, *(getattr(model, name) for name in names))

    for layer in LAYERS:
        build = lambda layer=layer: getattr(nn, layer)(6, 4, num_layers=2, bidirectional=True)  # noqa: E731
        assert_matches(policy, build, data(5, 3, 6), theirs, run=lambda model, y: model(pack(y)))


# The user's own functions -------------------------------------------------------------------------------


def own_function(product, exp, product_back, exp_back):
    class ExpOfProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return exp(product(x, w))

        @staticmethod
        def backward(ctx, gradient):
            x, w = (y.float() for y in ctx.saved_tensors)  # outside autocast the types must agree
            inner = gradient.float() * exp_back(product_back(x, w)).float()
            return product_back(inner, w.mT), product_back(x.mT, inner)

    return ExpOfProduct


@pytest.mark.parametrize("decorated", ["plain", "custom_fwd", "cast_inputs"])
def test_custom_autograd_functions(policy, decorated):
    """With ``custom_fwd`` the backward pass knows the policy, not torch's lists alone; without, it is cast nowhere."""
    mine = own_function(torch.matmul, torch.exp, torch.matmul, torch.exp)
    if decorated != "plain":
        options = {"cast_inputs": torch.float32} if decorated == "cast_inputs" else {}
        mine.forward = staticmethod(torch.amp.custom_fwd(mine.forward, device_type="cpu", **options))
        mine.backward = staticmethod(torch.amp.custom_bwd(mine.backward, device_type="cpu"))

    class Model(nn.Linear):
        def forward(self, x):
            return mine.apply(super().forward(x), self.weight)

    def theirs(hand, model, x):
        def product(a, b):
            return hand.low(torch.matmul, a, b)

        x = hand.linear(model, x)
        if decorated == "cast_inputs":
            return own_function(torch.matmul, torch.exp, torch.matmul, torch.exp).apply(x.float(), model.weight)
        forward = product, lambda y: hand.wide(torch.exp, y)
        inside = decorated == "custom_fwd"
        return own_function(*forward, *(forward if inside else (torch.matmul, torch.exp))).apply(x, model.weight)

    assert_matches(policy, lambda: Model(8, 8), data(4, 8), theirs)
