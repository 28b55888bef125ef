"""Torch's own layers and mechanisms under a policy, against the same arithmetic with every cast written by hand."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

import mezzo

KINDS = ["dtype=float16,emulate=true", "dtype=bfloat16,emulate=true", "dtype=bfloat16,emulate=false"]
POLICIES = [f"{level},{kind},loss_scale=128" for level in ("O1", "O2") for kind in KINDS]


class Hand:
    """What a policy means for each kind of op, as casts: the reference, which shares no code with mezzo.

    Each use of a parameter is a cast of its own, so that the gradients of several meet in FP32.
    """

    def __init__(self, policy):
        parsed = mezzo.Policy.parse(policy)
        self.converts, self.dtype, self.emulate = parsed.level == "O2", parsed.dtype, parsed.emulate

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
        """Compute in FP32 under O1; O2 stores low precision and casts no op."""
        return function(x if self.converts else x.float(), *others, **options)

    def linear(self, module, x):
        return self.low(functional.linear, x, module.weight, module.bias)


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(build):
    torch.manual_seed(0)
    return build()


def first(output):
    """Reduce what a model returns to one tensor, every floating part of which carries gradients."""
    leaves = pytree.tree_leaves(output, is_leaf=lambda x: isinstance(x, PackedSequence))
    return torch.cat([(x.data if isinstance(x, PackedSequence) else x).float().reshape(-1) for x in leaves])


def gradients(policy, model, *inputs, run=None):
    """Train one step in a session; ``run`` is what happens inside the region, the model itself unless given."""
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    inputs = [x.clone().requires_grad_() for x in inputs]
    with amp.autocast():
        loss = first((run or (lambda m, *xs: m(*xs)))(model, *inputs)).square().mean()
    amp.backward(loss)
    return [loss.detach(), *(x.grad for x in inputs), *(p.grad for p in model.parameters())]


def by_hand(policy, model, *inputs, run):
    """The same step with casts by hand; ``run(hand, model, *inputs)`` spells out the arithmetic."""
    hand = Hand(policy)
    makers = [part for part in model.modules() if isinstance(part, ParametrizationList)]
    made = [[tensor.data for tensor in stored(part)] for part in makers]
    model = model.to(hand.dtype) if hand.converts else model
    for part, values in zip(makers, made, strict=True):  # of which a weight is made, in FP32
        for tensor, wide in zip(stored(part), values, strict=True):
            tensor.data = wide
    owns = any(param.requires_grad for param in model.parameters(recurse=False))
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = run(hand, model, *(x.to(hand.dtype) if hand.converts and owns else x for x in inputs))
    loss = first(output).square().mean()
    (loss * 128).backward()
    # Of leaves that no optimizer has the session takes the scale away.
    return [loss.detach(), *(x.grad / 128 for x in inputs), *(p.grad for p in model.parameters())]


def stored(part):
    return [*part.parameters(), *part.buffers()]


def assert_equal(mine, theirs):
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert a.dtype == b.dtype, number
        assert b.isfinite().all(), number
        assert b.count_nonzero() > 0, number
        assert torch.equal(a, b), f"{number}: {(a - b).abs().max()} of {b.abs().max()}"


# Attention ------------------------------------------------------------------------------------------


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
    return out.view(tokens, batch, width).transpose(1, 0), weights


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_multihead_attention(policy, need_weights):
    class Attends(nn.MultiheadAttention):
        def forward(self, x):
            return [y for y in super().forward(x, x, x, need_weights=need_weights) if y is not None]

    def theirs(hand, model, x):
        return [y for y in attention(hand, model, x, need_weights) if y is not None]

    def build():
        return seeded(lambda: Attends(8, 2, batch_first=True))

    x = data(2, 5, 8)
    assert_equal(gradients(policy, build(), x), by_hand(policy, build(), x, run=theirs))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = seeded(lambda: nn.TransformerEncoder(layer, 2))
    for p in model.parameters():  # the layers are copies of one: make them differ, and the biases non-zero
        nn.init.normal_(p, std=0.3)
    return model


def encoded(hand, model, x):
    def norm(module, y):
        given = y.to(hand.dtype) if hand.converts else y
        return hand.wide(functional.layer_norm, given, (8,), module.weight, module.bias)

    for layer in model.layers:
        x = norm(layer.norm1, x + attention(hand, layer.self_attn, x, need_weights=False)[0])
        x = norm(layer.norm2, x + hand.linear(layer.linear2, functional.relu(hand.linear(layer.linear1, x))))
    return x


@pytest.mark.parametrize("policy", POLICIES)
def test_transformer_encoder(policy):
    x = data(2, 5, 8)
    assert_equal(gradients(policy, seeded(encoder), x), by_hand(policy, seeded(encoder), x, run=encoded))


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_evaluated_encoder_gives_what_the_trained_one_does(policy, without):
    """Its fused fast path must not leave the policy's precision."""
    model, x = seeded(encoder), data(2, 5, 8)
    handle = mezzo.prepare(model, policy)
    with handle.autocast():
        expected = model(x)
        model.eval()
        with without():
            out = model(x)
    assert out.dtype == expected.dtype
    # normalised values up to 4; the fused kernel rounds in other places: a few units in the last place of the dtype
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=16 * torch.finfo(handle.policy.dtype).eps)


def test_with_the_device_s_lists_an_evaluated_encoder_is_torch_s_own():
    """Torch takes its fused path under CPU autocast, and returns BF16 from it."""
    model, x = seeded(encoder).eval(), data(2, 5, 8)
    with torch.no_grad(), mezzo.autocast("O1,dtype=bfloat16,emulate=false,lists=device", "cpu"):
        mine = model(x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = model(x)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("options", ["causal", "masked", "scaled"])
@pytest.mark.parametrize("policy", POLICIES)
def test_scaled_dot_product_attention(policy, options):
    mask = data(5, 5, seed=9)

    class Attends(nn.Linear):
        def forward(self, x):
            q, k, v = functional.linear(x, self.weight, self.bias).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            arguments = {"causal": {"is_causal": True}, "masked": {"attn_mask": mask.to(q.dtype)}}
            return functional.scaled_dot_product_attention(q, k, v, **arguments.get(options, {"scale": 0.25}))

    def theirs(hand, model, x):
        q, k, v = hand.linear(model, x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attend = functional.scaled_dot_product_attention
        if options == "masked":
            return hand.low(attend, q, k, v, mask)
        return hand.low(attend, q, k, v, **({"is_causal": True} if options == "causal" else {"scale": 0.25}))

    x = data(2, 5, 8)
    mine = gradients(policy, seeded(lambda: Attends(8, 24)), x)
    assert_equal(mine, by_hand(policy, seeded(lambda: Attends(8, 24)), x, run=theirs))


# Recurrence -----------------------------------------------------------------------------------------

LAYERS = {"LSTM": ("lstm", 2), "GRU": ("gru", 1), "RNN": ("rnn_tanh", 1)}
CELLS = {"LSTMCell": ("lstm_cell", 2), "GRUCell": ("gru_cell", 1), "RNNCell": ("rnn_tanh_cell", 1)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_recurrent_layers(policy, layer, packed):
    kernel, states = LAYERS[layer]

    def build():
        return seeded(lambda: getattr(nn, layer)(6, 4, num_layers=2, bidirectional=True))

    def pack(x):
        return pack_padded_sequence(x, [5, 3, 2])

    def theirs(hand, model, x):
        names = [name for group in model._all_weights for name in group]
        hidden = (torch.zeros(4, 3, 4),) * states

        def run(x, *weights):
            state = tuple(h.to(x.dtype) for h in hidden)
            state = state if states > 1 else state[0]
            if packed:
                sequence = pack(x)
                return getattr(torch._VF, kernel)(
                    sequence.data, sequence.batch_sizes, state, weights, True, 2, 0.0, True, True
                )
            return getattr(torch._VF, kernel)(x, state, weights, True, 2, 0.0, True, True, False)

        return hand.low(run, x, *(getattr(model, name) for name in names))

    x = data(5, 3, 6)
    mine = gradients(policy, build(), x, run=lambda model, y: model(pack(y) if packed else y))
    assert_equal(mine, by_hand(policy, build(), x, run=theirs))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_recurrent_cells(policy, cell):
    kernel, states = CELLS[cell]

    def build():
        return seeded(lambda: getattr(nn, cell)(6, 4))

    def mine(model, x):
        state = None
        for step in x:
            state = model(step, state)
        return state

    def theirs(hand, model, x):
        state = (torch.zeros(3, 4),) * states
        weights = (model.weight_ih, model.weight_hh, model.bias_ih, model.bias_hh)

        def run(step, *operands):
            h = operands[:states] if states > 1 else operands[0]
            return getattr(torch._VF, kernel)(step, h, *operands[states:])

        for step in x:
            out = hand.low(run, step, *state, *weights)
            state = out if states > 1 else (out,)
        return state

    x = data(3, 3, 6)
    assert_equal(gradients(policy, build(), x, run=mine), by_hand(policy, build(), x, run=theirs))


# Weights that are computed --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_weight_norm(policy):
    def build():
        return seeded(lambda: parametrizations.weight_norm(nn.Linear(8, 6)))

    def theirs(hand, model, x):
        stored = model.parametrizations.weight
        return hand.low(functional.linear, x, torch._weight_norm(stored.original1, stored.original0, 0), model.bias)

    x = data(4, 8)
    assert_equal(gradients(policy, build(), x), by_hand(policy, build(), x, run=theirs))


@pytest.mark.parametrize("policy", POLICIES)
def test_spectral_norm(policy):
    def build():
        return seeded(lambda: parametrizations.spectral_norm(nn.Linear(8, 6)))

    def theirs(hand, model, x):
        stored = model.parametrizations.weight
        weight, u, v = stored.original, stored[0]._u, stored[0]._v
        product_of = (lambda function, *operands: function(*operands)) if hand.converts else hand.low

        def normalized(y, like):
            return (y / hand.wide(torch.norm, y, 2, 0, keepdim=True).clamp_min(stored[0].eps)).to(like.dtype)

        with torch.no_grad():
            u = normalized(product_of(torch.mv, weight, v), u)
            v = normalized(product_of(torch.mv, weight.mT, u), v)
        product = product_of(torch.mv, weight, v)
        sigma = torch.vdot(u, product.to(u.dtype))  # mixed types: the widest
        return hand.low(functional.linear, x, weight / sigma, model.bias)

    x = data(4, 8)
    assert_equal(gradients(policy, build(), x), by_hand(policy, build(), x, run=theirs))


# Written in place, and into what the caller gives ---------------------------------------------------


class WritesInPlace(nn.Linear):
    """In-place variants compute in the dtype of what they write to, whatever the policy says of the op."""

    def forward(self, x):
        return self.after(super().forward(x), x)

    def after(self, y, x):
        y = functional.relu((y * 1.0).mul_(0.5).add_(x), inplace=True)
        scores = (y * 0.5).sub_(1.0).exp_()
        total = torch.zeros(x.shape[0], x.shape[0], dtype=x.dtype).addmm_(x, x.mT)
        return y, scores, total, nn.functional.dropout(total * 2, 0.5, training=False, inplace=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_in_place_variants(policy):
    x = data(4, 8)
    mine = gradients(policy, seeded(lambda: WritesInPlace(8, 8)), x)
    theirs = by_hand(
        policy, seeded(lambda: WritesInPlace(8, 8)), x, run=lambda hand, model, x: model.after(hand.linear(model, x), x)
    )
    assert_equal(mine, theirs)


WITH_OUT = {
    "mm": (torch.mm, 2), "matmul": (torch.matmul, 2), "addmm": (torch.addmm, 3), "exp": (torch.exp, 1),
    "softmax": (lambda x, out: torch.softmax(x, -1, out=out), 1), "cat": (lambda *x, out: torch.cat(x, out=out), 1),
    "cumsum": (lambda x, out: torch.cumsum(x, 0, out=out), 1), "pow": (lambda x, out: torch.pow(x, 2, out=out), 1),
    "addcmul": (torch.addcmul, 3), "log_softmax": (lambda x, out: torch.log_softmax(x, -1, out=out), 1),
}  # fmt: skip


@pytest.mark.parametrize("op", WITH_OUT)
@pytest.mark.parametrize("policy", POLICIES)
def test_out_variants(policy, op):
    function, count = WITH_OUT[op]
    hand = Hand(policy)
    operands = [data(4, 4, seed=seed).to(hand.dtype if hand.converts else torch.float32) for seed in range(count)]
    mine, theirs = torch.zeros_like(operands[0]), torch.zeros_like(operands[0])
    with mezzo.autocast(policy, "cpu"):
        assert function(*operands, out=mine) is mine
    function(*operands, out=theirs)
    assert theirs.count_nonzero() > 0
    assert torch.equal(mine, theirs)


# The user's own functions ---------------------------------------------------------------------------


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
@pytest.mark.parametrize("policy", POLICIES)
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
        if decorated == "cast_inputs" and not hand.converts:
            return own_function(torch.matmul, torch.exp, torch.matmul, torch.exp).apply(x.float(), model.weight)
        forward = product, lambda y: hand.wide(torch.exp, y)
        inside = decorated == "custom_fwd" and not hand.converts
        return own_function(*forward, *(forward if inside else (torch.matmul, torch.exp))).apply(x, model.weight)

    x = data(4, 8)
    made = gradients(policy, seeded(lambda: Model(8, 8)), x)
    assert_equal(made, by_hand(policy, seeded(lambda: Model(8, 8)), x, run=theirs))


SEEN = []


@torch.library.custom_op("mezzo_layers::product", mutates_args=())
def registered_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply, and note in what precision."""
    SEEN.append((a.dtype, b.dtype))
    return (a @ b).exp()


def product_backward(ctx, gradient):
    a, b, out = ctx.saved_tensors
    inner = gradient * out
    return (inner.float() @ b.float().mT).to(a.dtype), (a.float().mT @ inner.float()).to(b.dtype)


registered_product.register_autograd(
    product_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output)
)
registered_product.register_autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("policy", POLICIES)
def test_custom_ops_with_an_autocast_rule_of_their_own(policy):
    """The rule is torch.library's: it acts where the policy autocasts, and nothing inside the op is treated."""

    class Model(nn.Linear):
        def forward(self, x):
            return registered_product(super().forward(x), self.weight)

    def theirs(hand, model, x):
        x = hand.linear(model, x)
        cast = (lambda y: y) if hand.converts else (lambda y: y.bfloat16())
        return registered_product(cast(x), cast(model.weight))

    x = data(4, 8)
    SEEN.clear()
    mine = gradients(policy, seeded(lambda: Model(8, 8)), x)
    (dtypes,) = SEEN
    assert_equal(mine, by_hand(policy, seeded(lambda: Model(8, 8)), x, run=theirs))
    assert set(dtypes) == {Hand(policy).dtype if Hand(policy).converts else torch.bfloat16}
