"""What models are made of: attention, recurrence, graphs, experts, scans, spectra, convolutions, norms by hand."""

import math

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .registry import data, indices, made, over, registered, squared, weight

ARCHITECTURES = {}
program = registered(ARCHITECTURES)


# Transformers -----------------------------------------------------------------------------------------------


def sinusoids(steps, width):
    """Return timesteps in FP32 as diffusers has them: neighbours of 1,000 are told apart."""
    rates = torch.exp(-math.log(10000.0) * torch.arange(width // 2, dtype=torch.float32) / (width // 2))
    angles = steps.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class DiffusionTransformer(nn.Module):
    """DiT: a block whose norms are shifted, scaled and gated by the timestep (adaLN), not left at zero here."""

    def __init__(self, width=16):
        super().__init__()
        self.width, self.patches, self.positions = width, nn.Linear(4, width), weight(9, width)
        self.steps = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(5, width)
        self.norm, self.modulate = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU("tanh"), nn.Linear(32, width))
        self.head = nn.Linear(width, 4)

    def forward(self, x, steps, labels):
        x = self.patches(x) + self.positions  # (batch, patches, width)
        given = self.steps(sinusoids(steps, self.width)) + self.labels(labels)
        parts = self.modulate(functional.silu(given))[:, None].chunk(6, dim=-1)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = parts
        qkv = self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv)
        x = x + gate * self.out(attended.transpose(1, 2).flatten(2))
        x = x + gate_mlp * self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)
        return self.head(x)


@program
def diffusion_transformer():
    model, noise = DiffusionTransformer(), data(6, 9, 4)
    steps = torch.tensor([0, 1, 499, 500, 998, 999])
    return model, lambda: functional.mse_loss(model(data(6, 9, 4, seed=2), steps, indices(5, 6)).float(), noise)


@program
def timesteps_at_the_door():
    """They come as FP32 numbers, 0 … 1000, of which 16 bits would tell 411 apart."""

    def forward(self, x, steps):
        return self.net(x * self.steps(sinusoids(steps, 8)))

    model = made(forward, steps=nn.Linear(8, 8), net=nn.Linear(8, 8))
    return over(model, data(32, 8), torch.linspace(0, 1000, 32))


class Causal(nn.Module):
    """A language model that computes its loss inside ``forward``; ``attend`` takes queries, keys and values by head."""

    def __init__(self, attend, width=16, heads=2):
        super().__init__()
        self.attend, self.heads = attend, heads
        self.table, self.norm, self.last = nn.Embedding(20, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        self.head = nn.Linear(width, 20, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(*qkv).transpose(1, 2).flatten(2))  # (batch, tokens, width)
        x = x + self.down(functional.gelu(self.up(self.last(x))))
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def causal(attend):
    model, tokens = Causal(attend), indices(20, 3, 7)
    return model, lambda: model(tokens)


@program
def attention_of_torch():
    return causal(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@program
def attention_by_einsum():
    def attend(q, k, v):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)

    return causal(attend)


@program
def attention_with_alibi():
    """Biases by distance, and a softmax that is written out."""

    def attend(q, k, v):
        places = torch.arange(q.shape[2])
        slopes = torch.tensor([2.0**-4, 2.0**-8])[:, None, None]
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + slopes * (places[None, :] - places[:, None])
        scores = scores.masked_fill(places[None, :] > places[:, None], -math.inf)
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        return (powers / powers.sum(-1, keepdim=True)) @ v

    return causal(attend)


@program
def attention_that_is_linear():
    """Running sums of keys and values stand for the softmax (Katharopoulos et al. 2020)."""

    def attend(q, k, v):
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        sums = (k[..., :, None] * v[..., None, :]).cumsum(2)  # (batch, heads, tokens, key, value)
        norm = (q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-6
        return torch.einsum("bhtk,bhtkv->bhtv", q, sums) / norm

    return causal(attend)


def angles_of(x):
    """Return the angles of rotary positions, in FP32."""
    rates = 10000.0 ** -(torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    return torch.arange(x.shape[-2]).float()[:, None] * rates


@program
def attention_with_rotary_positions():
    def turned(x):
        angles = angles_of(x).repeat(1, 2)
        one, two = x.chunk(2, dim=-1)
        return x * angles.cos().to(x.dtype) + torch.cat([-two, one], dim=-1) * angles.sin().to(x.dtype)

    return causal(lambda q, k, v: functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))


@program
def attention_with_rotary_complex_numbers():
    """As LLaMA's own code has it."""

    def turned(x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        turns = torch.polar(torch.ones(x.shape[-2], x.shape[-1] // 2), angles_of(x))
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)

    return causal(lambda q, k, v: functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))


@program
def multihead_attention():
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), data(3, 5, 16)
    hidden = torch.arange(5)[None, :] >= torch.tensor([5, 3, 4])[:, None]

    def loss():
        out, shares = model(x, x, x, key_padding_mask=hidden)
        return squared(out) + squared(shares)

    return model, loss


@program
def multihead_attention_across():
    """Keys and values of other widths, so three projections that are parameters of their own."""
    model = nn.MultiheadAttention(16, 2, kdim=8, vdim=12, batch_first=True, add_bias_kv=True)
    return model, lambda: squared(model(data(3, 5, 16), data(3, 4, 8), data(3, 4, 12), need_weights=False)[0])


@program
def encoder():
    """In training, and in evaluation on torch's fast path, whose output is compared as well."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), data(3, 5, 16)

    def loss():
        error = squared(model.train()(x))
        with torch.no_grad():
            seen = model.eval()(x)
        return error, seen

    return model, loss


@program
def encoder_and_decoder():
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return model, lambda: squared(model(data(2, 5, 16), data(2, 4, 16), tgt_mask=mask, tgt_is_causal=True))


@program
def windows_with_relative_positions():
    """Swin: biases of pairs are rows of a table that many pairs share."""
    pairs = torch.arange(5)[:, None] - torch.arange(5)[None, :] + 4

    def forward(self, x):
        q, k, v = functional.linear(x, self.qkv).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        bias = self.table[pairs.flatten()].view(5, 5, 2).permute(2, 0, 1)
        shares = (q * 8**-0.5 @ k.transpose(-2, -1) + bias).softmax(-1)
        return (shares @ v).transpose(1, 2).flatten(2) @ self.out

    return over(made(forward, qkv=weight(48, 16), table=weight(9, 2), out=weight(16, 16)), data(3, 5, 16))


# Recurrence -------------------------------------------------------------------------------------------------


@program
def lstm():
    model = nn.LSTM(8, 12, 2, batch_first=True, bidirectional=True)
    return model, lambda: squared(model(data(3, 5, 8))[0])


@program
def lstm_with_projections():
    model = nn.LSTM(8, 12, batch_first=True, proj_size=6)
    return model, lambda: squared(model(data(3, 5, 8))[0])


@program
def gru():
    model = nn.GRU(8, 12, batch_first=True)
    return model, lambda: squared(model(data(3, 5, 8))[0])


@program
def rnn():
    model = nn.RNN(8, 12, nonlinearity="relu", batch_first=True)
    return model, lambda: squared(model(data(3, 5, 8))[1])


@program
def cells_in_a_loop():
    def forward(self, xs):
        state, hidden, last = None, torch.zeros(3, 8), torch.zeros(3, 8)
        for x in xs:
            state = self.one(x, state)
            hidden = self.two(state[0], hidden)
            last = self.three(hidden, last)
        return last

    return over(made(forward, one=nn.LSTMCell(8, 12), two=nn.GRUCell(12, 8), three=nn.RNNCell(8, 8)), data(4, 3, 8))


@program
def packed_sequences():
    def forward(self, tokens, lengths):
        out, _ = self.rnn(pack_padded_sequence(self.table(tokens), lengths))
        return self.head(pad_packed_sequence(out)[0])

    model = made(forward, table=nn.Embedding(20, 8, padding_idx=0), rnn=nn.LSTM(8, 6), head=nn.Linear(6, 3))
    return over(model, indices(20, 5, 3), torch.tensor([5, 3, 2]))


class Fire(torch.autograd.Function):
    """A step, whose slope is made up."""

    @staticmethod
    def forward(ctx, potential):
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (potential,) = ctx.saved_tensors
        return gradient / (1 + 10 * potential.abs()) ** 2


@program
def spiking_cells():
    def forward(self, xs):
        potential, total = torch.zeros(3, 16), 0
        for x in xs:
            potential = self.decay * potential + self.one(x)
            fired = Fire.apply(potential - 0.25)
            potential = potential - fired * 0.25
            total = total + self.two(fired)
        return total

    decay = nn.Parameter(torch.full((16,), 0.9))
    return over(made(forward, one=nn.Linear(8, 16), two=nn.Linear(16, 4), decay=decay), data(5, 3, 8))


@program
def selective_scan():
    """Mamba's block, its recurrence as running sums of logarithms."""

    def forward(self, x):
        x, gate = self.project(x).chunk(2, dim=-1)  # (batch, time, width)
        x = functional.silu(self.conv(x.mT)[..., : x.shape[1]].mT)
        step, into, out = self.select(x).split([1, 4, 4], dim=-1)
        step = functional.softplus(self.step(step))[..., None]
        logs = (step * -self.log_rates.float().exp()).cumsum(1)  # (batch, time, width, states)
        scanned = (step * into[:, :, None] * x[..., None] * (-logs).exp()).cumsum(1) * logs.exp()
        y = (scanned * out[:, :, None]).sum(-1) + x * self.skip
        return self.out(y * functional.silu(gate))

    model = made(
        forward,
        project=nn.Linear(8, 16), conv=nn.Conv1d(8, 8, 3, padding=2, groups=8), select=nn.Linear(8, 9, bias=False),
        step=nn.Linear(1, 8), log_rates=nn.Parameter(torch.arange(1.0, 5).log().repeat(8, 1)),
        skip=nn.Parameter(torch.ones(8)), out=nn.Linear(8, 8),
    )  # fmt: skip
    return over(model, data(2, 5, 8))


@program
def scan_by_steps():
    """S4's and RWKV's kind of loop: a state times a parameter, each step."""

    def forward(self, xs):
        state, out = torch.zeros(3, 6, 4), []
        for x in xs:
            state = state * (-self.a.exp()).exp() + x[..., None] * self.b
            out.append(torch.einsum("bds,ds->bd", state, self.c))
        return torch.stack(out)

    return over(made(forward, a=weight(6, 4), b=weight(6, 4), c=weight(6, 4)), data(5, 3, 6))


# Graphs and experts -----------------------------------------------------------------------------------------

SOURCES, TARGETS = indices(7, 2, 20)


@program
def graph_convolution():
    def forward(self, x):
        for layer in (self.one, self.two):
            sent = layer(x)
            x = torch.zeros(7, sent.shape[1], dtype=sent.dtype).index_add(0, TARGETS, sent[SOURCES]).relu() + sent
        return x

    return over(made(forward, one=nn.Linear(8, 16), two=nn.Linear(16, 4)), data(7, 8))


@program
def graph_attention():
    """A softmax over each node's edges, by ``scatter_reduce`` and ``scatter_add``."""

    def forward(self, nodes):
        x = nodes @ self.w
        one, two = (x @ self.score.T).unbind(-1)
        scores = functional.leaky_relu(one[SOURCES] + two[TARGETS], 0.2)
        most = torch.full((7,), -torch.inf, dtype=scores.dtype).scatter_reduce(0, TARGETS, scores, "amax")
        powers = (scores - most[TARGETS]).exp()
        sums = torch.zeros(7, dtype=powers.dtype).scatter_add(0, TARGETS, powers)
        sent = (powers / sums[TARGETS])[:, None] * x[SOURCES]
        return torch.zeros(7, 8, dtype=sent.dtype).scatter_add(0, TARGETS[:, None].expand(-1, 8), sent)

    return over(made(forward, w=weight(8, 8), score=weight(2, 8)), data(7, 8))


def experts(dispatch):
    def forward(self, x):
        return dispatch(self, x, *self.router(x).softmax(-1).topk(2, dim=-1))

    return over(made(forward, router=nn.Linear(8, 3), up=weight(3, 8, 16), down=weight(3, 16, 8)), data(6, 8))


@program
def experts_by_einsum():
    def dispatch(self, x, shares, chosen):
        gates = torch.zeros(len(x), 3, dtype=shares.dtype).scatter(1, chosen, shares)
        hidden = functional.silu(torch.einsum("td,edf->tef", x, self.up))
        return torch.einsum("tef,efd,te->td", hidden, self.down, gates)

    return experts(dispatch)


@program
def experts_by_index():
    def dispatch(self, x, shares, chosen):
        out = torch.zeros_like(x)
        for expert in range(3):
            rows, choice = (chosen == expert).nonzero(as_tuple=True)
            hidden = functional.silu(x[rows] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, rows, (hidden * shares[rows, choice, None]).to(out.dtype))
        return out

    return experts(dispatch)


# Spectra ----------------------------------------------------------------------------------------------------


@program
def fourier_operator():
    """Its complex weights are real ones, read as pairs."""

    def forward(self, x):
        x = self.lift(x).mT  # (batch, channels, places)
        spectrum = torch.einsum("bim,iom->bom", torch.fft.rfft(x.float())[..., :4], torch.view_as_complex(self.modes))
        return self.head(functional.gelu(torch.fft.irfft(spectrum, n=x.shape[-1]) + self.mix(x)).mT)

    model = made(forward, lift=nn.Linear(2, 6), mix=nn.Conv1d(6, 6, 1), modes=weight(6, 6, 4, 2), head=nn.Linear(6, 1))
    return over(model, data(2, 16, 2))


@program
def complex_parameters():
    """A parameter that is complex stays so, beside one that is stored in halves."""

    def forward(self, x):
        return (torch.fft.fft(functional.linear(x, self.w).float(), norm="ortho") @ self.spectrum).abs()

    spectrum = nn.Parameter(torch.complex(data(4, 4), data(4, 4, seed=2)) / 4)
    return over(made(forward, spectrum=spectrum, w=weight(4, 4)), data(3, 4))


@program
def magnitude_and_phase():
    """Complex numbers that are made of parameters."""

    def forward(self, x):
        turn = torch.polar(torch.ones(4, 4), self.phase)
        filters = torch.complex(self.real, self.imaginary) * turn
        return torch.fft.ifft(torch.fft.fft((x @ self.w).float()) @ filters).real

    parts = {name: weight(4, 4) for name in ("real", "imaginary", "phase", "w")}
    return over(made(forward, **parts), data(3, 4))


# Convolutions -----------------------------------------------------------------------------------------------


@program
def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1),
        nn.ConvTranspose2d(4, 6, 2, stride=2), nn.GroupNorm(2, 6), nn.Upsample(scale_factor=2),
        nn.Conv2d(6, 4, 3, groups=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(16, 3),
    )  # fmt: skip
    return model, lambda: functional.cross_entropy(model(data(4, 3, 9, 9)).float(), torch.tensor([0, 1, 2, 0]))


@program
def waves():
    """WaveNet's gated convolutions in one dimension."""

    def forward(self, x):
        for conv in self.convs:
            one, two = conv(x)[..., : x.shape[-1]].chunk(2, dim=1)
            x = x + one.tanh() * two.sigmoid()
        return x

    convs = nn.ModuleList([nn.Conv1d(4, 8, 2, dilation=dilation, padding=dilation) for dilation in (1, 2, 4)])
    return over(made(forward, convs=convs), data(2, 4, 12))


@program
def volumes():
    norm = nn.InstanceNorm3d(4, affine=True)
    return over(nn.Sequential(nn.Conv3d(1, 4, 2), norm, nn.PReLU(4), nn.ConvTranspose3d(4, 2, 2)), data(2, 1, 4, 4, 4))


@program
def weight_standardised_convolution():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
            return self._conv_forward(x, (self.weight - mean) * (variance + 1e-5).rsqrt(), self.bias)

    model = nn.Sequential(Standardised(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), Standardised(8, 4, 3))
    return over(model, data(2, 3, 7, 7))


@program
def spatial_transformer():
    def forward(self, images):
        turns = self.where(images.flatten(1)).view(3, 2, 3)
        grid = functional.affine_grid(turns, (3, 1, 6, 6), align_corners=False)
        return self.what(functional.grid_sample(images, grid, align_corners=False))

    return over(made(forward, where=nn.Linear(16, 6), what=nn.Conv2d(1, 2, 3)), data(3, 1, 4, 4))


class Detector(nn.Module):
    """YOLO's head: classes by binary cross-entropy over many empty places, boxes by expected distances (DFL)."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.boxes, self.classes = nn.Conv2d(8, 4 * 8, 1), nn.Conv2d(8, 20, 1)
        self.register_buffer("bins", torch.arange(8.0))
        nn.init.constant_(self.classes.bias, math.log(5 / 20 / (640 / 8) ** 2))

    def forward(self, images, aims, boxes):
        x = self.body(images)
        scores = self.classes(x).flatten(2).mT  # (batch, places, classes)
        entropy = functional.binary_cross_entropy_with_logits(scores, aims.to(scores.dtype), reduction="none")
        sides = self.boxes(x).flatten(2).mT.unflatten(-1, (4, 8)).softmax(-1).matmul(self.bins)
        is_there = aims.amax(-1) > 0
        return entropy.sum() / max(aims.sum(), 1) + functional.smooth_l1_loss(sides[is_there].float(), boxes[is_there])


@program
def detection_head():
    model, aims = Detector(), torch.zeros(2, 36, 20)
    aims[0, 3, 7], aims[1, 30, 2] = 0.8, 0.3
    return model, lambda: model(data(2, 3, 12, 12), aims, data(2, 36, 4).abs())


# Norms by hand ----------------------------------------------------------------------------------------------


def normed(norm, **params):
    """Return a residual network around a norm that is written out."""

    def forward(self, x):
        for _ in range(2):
            x = x + self.down(functional.silu(self.up(norm(self, x))))
        return norm(self, x).tanh()

    params = {name: nn.Parameter(value) for name, value in params.items()}
    return over(made(forward, up=nn.Linear(8, 16), down=nn.Linear(16, 8), **params), data(4, 8))


@program
def rms_norm_by_hand():
    def norm(self, x):
        wide = x.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return normed(norm, scale=torch.ones(8))


@program
def layer_norm_by_hand():
    def norm(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-5).sqrt() * self.scale + self.shift

    return normed(norm, scale=torch.ones(8), shift=torch.zeros(8))


@program
def group_norm_by_hand():
    """Its scale has two dimensions, so it is stored in halves and read in FP32."""

    def norm(self, x):
        parts = x.unflatten(-1, (2, 4))
        parts = (parts - parts.mean(-1, keepdim=True)) / (parts.std(-1, keepdim=True) + 1e-5)
        return (parts * self.scale).flatten(-2)

    return normed(norm, scale=torch.ones(2, 4) + data(2, 4) / 8)


@program
def norms_of_weights():
    """nGPT: each use normalises the weight anew."""

    def norm(self, x):
        return functional.linear(functional.normalize(x, dim=-1), functional.normalize(self.turn, dim=-1)) * self.scale

    return normed(norm, turn=torch.randn(8, 8), scale=torch.ones(8))
