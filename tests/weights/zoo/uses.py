"""What programs do with weights: tied, sliced, stacked, quantised, adapted, made by others, transformed, compiled."""

import copy

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from .registry import data, indices, made, over, perceptron, registered, squared, weight

USES = {}
program = registered(USES)


# One weight in several places -------------------------------------------------------------------------------


@program
def tied_head():
    """One weight as an embedding, as a product's, and in FP32 in the loss; positions are parameters by themselves."""

    def forward(self, tokens):
        out = self.head(self.norm(self.table(tokens) + self.positions))
        return functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    parts = {"table": nn.Embedding(20, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 20, bias=False)}
    model, tokens = made(forward, positions=weight(5, 8), **parts), indices(20, 3, 5)
    model.head.weight = model.table.weight
    return model, lambda: model(tokens) + 0.01 * model.table.weight.square().sum()


@program
def table_that_is_also_computed_with():
    def forward(self, tokens):
        rows = functional.embedding(tokens, self.table)
        distances = (rows[..., None, :] - self.table).square().sum(-1)  # of each to every row, in FP32
        return (-distances).softmax(-1) @ self.table

    return over(made(forward, table=weight(6, 8)), indices(6, 2, 4))


@program
def regulariser():
    """Sums of all weights, in FP32, in the loss."""
    model, x = perceptron(8, 16, 4), data(5, 8)

    def loss():
        squares = sum(p.square().sum() for p in model.parameters())
        return squared(model(x)) + 1e-2 * squares + 1e-3 * sum(p.abs().sum() for p in model.parameters())

    return model, loss


@program
def orthogonality():
    """A product of a weight with itself."""

    def forward(self, x):
        return (self.w(x)).square().mean() + 0.1 * (self.w.weight @ self.w.weight.mT - torch.eye(6)).norm()

    return over(made(forward, w=nn.Linear(8, 6)), data(5, 8))


@program
def hyper_connections():
    """Weights that mix streams, each used twice: by a product, and by elements."""

    def forward(self, x):
        streams = x[:, None] * torch.ones(3, 1)  # (batch, streams, width)
        for number in range(2):
            mixed = self.mix @ streams
            streams = mixed + self.out[number][:, None] * self.layer(self.into[number] @ streams)[:, None]
            streams = streams * self.mix.sum(-1)[:, None]
        return streams.sum(1)

    return over(made(forward, mix=weight(3, 3), into=weight(2, 3), out=weight(2, 3), layer=nn.Linear(8, 8)), data(4, 8))


@program
def recurrent_depth():
    """One block that runs four times, and its transposed weight."""

    def forward(self, x):
        for _ in range(4):
            x = x + functional.linear(self.w(x).tanh(), self.w.weight.t())
        return x

    return over(made(forward, w=nn.Linear(8, 6)), data(5, 8))


@program
def slices():
    """Parts of a weight, as slimmable and once-for-all networks take them."""

    def forward(self, x):
        hidden = [functional.linear(x[:, :k], self.one[:k, :k], self.bias[:k]).relu() for k in (2, 4, 8)]
        rows, columns = self.two.split(4), self.two.unbind(1)
        wide = sum(functional.linear(h, rows[0][:, : h.shape[1]]) for h in hidden)
        return wide + x[:, :4] * columns[3][:4] + x @ self.two[torch.tensor([0, 2, 4, 6])].mT

    return over(made(forward, one=weight(8, 8), two=weight(8, 8), bias=nn.Parameter(data(8))), data(3, 8))


@program
def stacked_parameters():
    def forward(self, x):
        stacked, joined = torch.stack(list(self.parts)), torch.cat(list(self.parts), dim=1)
        product = torch.bmm(x.expand(3, -1, -1), stacked).mean(0) @ self.parts[0]
        return product + (x @ joined).unflatten(1, (3, 8)).sum(1)

    return over(made(forward, parts=nn.ParameterList([weight(8, 8) for _ in range(3)])), data(4, 8))


@program
def einsum_of_three():
    def forward(self, x, y):
        return torch.einsum("bi,oij,bj->bo", x, self.w, y) + torch.einsum("bi,ir,or->bo", x, self.left, self.right)

    parts = {"w": weight(4, 8, 6), "left": weight(8, 2), "right": weight(4, 2)}
    return over(made(forward, **parts), data(5, 8), data(5, 6))


@program
def products_of_every_spelling():
    def forward(self, x):
        y = torch.addmm(self.bias, x, self.w) + torch.mm(x, self.w) + x.matmul(self.w) + x @ self.w
        y = y + torch.mv(self.w, self.bias) + torch.tensordot(x, self.w, 1) + torch.inner(x, self.w)
        y = y + torch.baddbmm(self.bias.expand(1, 5, 8), x[None], self.w[None])[0]
        return y + torch.linalg.multi_dot([x, self.w, self.w])

    return over(made(forward, w=weight(8, 8), bias=nn.Parameter(data(8))), data(5, 8))


@program
def idioms_of_dtypes():
    """Programs ask a weight for its dtype, and cast to it or from it."""

    def forward(self, x):
        x = self.one(x.to(self.one.weight.dtype))
        wide = functional.linear(x.float(), self.two.weight.float())
        return wide.type_as(self.two.weight) * x.new_ones(()) + self.two.weight.new_zeros(4) + x @ self.w.to(x.dtype)

    return over(made(forward, one=nn.Linear(8, 8), two=nn.Linear(8, 4), w=weight(8, 4)), data(3, 8))


@program
def constrained_weights():
    """Weights that a forward pass keeps positive, bounded, or sparse."""

    def forward(self, x):
        x = functional.linear(x, functional.softplus(self.one))
        x = functional.linear(x.tanh(), self.two.clamp(-0.1, 0.1))
        return x @ torch.where(self.three.abs() > 0.2, self.three, 0.0) + x @ (self.three * self.mask)

    mask = (data(8, 8) > 0).float()
    return over(made(forward, one=weight(8, 8), two=weight(8, 8), three=weight(8, 8), mask=mask), data(3, 8))


# Embeddings -------------------------------------------------------------------------------------------------


@program
def embeddings():
    def forward(self, tokens):
        return self.head(self.padded(tokens) * self.bounded(tokens) + self.bag(tokens)[:, None])

    parts = {
        "padded": nn.Embedding(12, 8, padding_idx=0),
        "bounded": nn.Embedding(12, 8, max_norm=1.0),
        "bag": nn.EmbeddingBag(12, 8, mode="mean"),
        "head": nn.Linear(8, 3),
    }
    return over(made(forward, **parts), indices(12, 3, 5))


@program
def bags_with_weights():
    def forward(self, tokens, offsets, shares):
        return self.head(self.bag(tokens, offsets, per_sample_weights=shares))

    model = made(forward, bag=nn.EmbeddingBag(12, 8, mode="sum"), head=nn.Linear(8, 3))
    return over(model, indices(12, 10), torch.tensor([0, 4, 7]), data(10))


@program
def frequencies_scale_gradients():
    model = nn.Embedding(12, 8, scale_grad_by_freq=True)
    return over(nn.Sequential(model, nn.Linear(8, 3)), indices(12, 3, 5))


@program
def gradients_that_are_sparse():
    return over(nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Linear(8, 3)), indices(12, 3, 5))


@program
def bilinear():
    def forward(self, x, y):
        return self.form(self.one(x), self.two(y)) + self.form(x, y)

    model = made(forward, one=nn.Linear(6, 6), two=nn.Linear(5, 5), form=nn.Bilinear(6, 5, 4))
    return over(model, data(3, 6), data(3, 5))


# Quantisation, adapters, teachers ---------------------------------------------------------------------------


@program
def quantisation_aware():
    """Weights and activations on eight bits' grid, straight through; by hand, and by torch's own operation."""

    def quantised(w):
        scale = w.detach().abs().amax(dim=1, keepdim=True) / 127
        return w + ((w / scale).round().clamp(-128, 127) * scale - w).detach()

    def forward(self, x):
        x = functional.linear(x, quantised(self.one.weight), self.one.bias).relu()
        x = torch.fake_quantize_per_tensor_affine(x.float(), 0.05, 0, 0, 255)
        scale, zero = self.two.weight.detach().abs().amax(1) / 127, torch.zeros(4, dtype=torch.int32)
        return functional.linear(x, torch.fake_quantize_per_channel_affine(self.two.weight, scale, zero, 0, -128, 127))

    return over(made(forward, one=nn.Linear(8, 16), two=nn.Linear(16, 4)), data(3, 8))


@program
def ternary():
    """BitNet: a weight is its signs, times one number."""

    def forward(self, x):
        scale = self.w.abs().mean()
        return functional.linear(x, self.w + ((self.w / scale).round().clamp(-1, 1) * scale - self.w).detach())

    return over(made(forward, w=weight(4, 8)), data(3, 8))


@program
def low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.a, self.b = base.requires_grad_(False), weight(2, 8), weight(8, 2)

        def forward(self, x):
            return self.base(x) + 0.5 * (x @ self.a.T @ self.b.T)

    return over(nn.Sequential(Adapted(nn.Linear(8, 8)), nn.GELU(), Adapted(nn.Linear(8, 8))), data(3, 8))


@program
def adapters_by_direction():
    """DoRA: the length of each row of a frozen weight, and of what is added to it."""

    def forward(self, x):
        whole = self.base.weight + self.b @ self.a
        return self.base(x) + functional.linear(x, whole) * (self.length / whole.norm(dim=1)).to(x.dtype)

    base = nn.Linear(8, 8).requires_grad_(False)
    length = nn.Parameter(base.weight.norm(dim=1).detach())
    return over(made(forward, base=base, a=weight(2, 8), b=weight(8, 2), length=length), data(3, 8))


@program
def teacher_and_student():
    def forward(self, x):
        with torch.no_grad():
            aim = (self.teacher(x) / 2).softmax(-1)
        return functional.kl_div((self.student(x) / 2).log_softmax(-1), aim, reduction="batchmean")

    teacher = perceptron(8, 16, 4).requires_grad_(False).eval()
    model = made(forward, teacher=teacher, student=perceptron(8, 6, 4))
    return model, lambda: model(data(3, 8))


@program
def teacher_that_follows():
    """BYOL: its weights move by four thousandths, by operations on ``.data`` and under ``no_grad``."""

    def forward(self, x, y):
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data = mine.data * 0.996 + theirs.data * 0.004
            with torch.no_grad():
                mine.lerp_(theirs, 0.004)
        with torch.no_grad():
            aim = self.teacher(y)
        return 2 - 2 * functional.cosine_similarity(self.predict(self.student(x)), aim, dim=-1).mean()

    student, teacher = perceptron(8, 16, 4), perceptron(8, 16, 4).requires_grad_(False)
    model = made(forward, student=student, teacher=teacher, predict=perceptron(4, 8, 4))
    return model, lambda: model(data(3, 8), data(3, 8, seed=2))


@program
def copies_on_the_way():
    """A deep copy, a state dict and a clone, in the middle of a pass."""
    model, x = perceptron(8, 16, 4), data(3, 8)

    def loss():
        twin = copy.deepcopy(model)
        twin.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        with torch.no_grad():
            aim = twin(x).float()
        return (model(x).float() - aim).square().mean() + model[0].weight.clone().sum(), *twin.state_dict().values()

    return model, loss


@program
def prompts():
    """Rows that stand before what a frozen model reads."""

    def forward(self, tokens):
        x = torch.cat([self.prompts.expand(len(tokens), -1, -1), self.table(tokens)], dim=1)
        return self.head(self.rnn(x)[0][:, -1])

    table, rnn = nn.Embedding(12, 8).requires_grad_(False), nn.GRU(8, 8, batch_first=True).requires_grad_(False)
    return over(made(forward, prompts=weight(3, 8), table=table, rnn=rnn, head=nn.Linear(8, 3)), indices(12, 2, 4))


# Weights that are made --------------------------------------------------------------------------------------


@program
def hypernetwork():
    """A net makes the weights of another, which ``functional_call`` puts in."""
    target = perceptron(4, 6, 2).requires_grad_(False)
    shapes = {name: p.shape for name, p in target.named_parameters()}

    def forward(self, x, context):
        made = self.maker(context).split([shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), made, strict=True)}
        return functional_call(self.target, weights, (x,)) + self.target(x)

    maker = perceptron(5, 8, sum(shape.numel() for shape in shapes.values()))
    return over(made(forward, maker=maker, target=target), data(3, 4), data(5))


@program
def normed_weights():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 12)), nn.SiLU(),
        parametrizations.spectral_norm(nn.Linear(12, 6)), nn.SiLU(),
        parametrizations.orthogonal(nn.Linear(6, 4)),
    )  # fmt: skip
    return over(model, data(3, 8))


@program
def normed_convolutions():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Conv1d(3, 6, 3)), nn.LeakyReLU(),
        parametrizations.spectral_norm(nn.Conv1d(6, 2, 2)),
    )  # fmt: skip
    return over(model, data(2, 3, 8))


@program
def pruned():
    model = perceptron(8, 16, 4)
    prune.l1_unstructured(model[0], "weight", 0.3)
    return over(model, data(3, 8))


@program
def dropped_weights():
    """AWD-LSTM's kind: some of a cell's weights are left out, for one sequence."""

    def forward(self, xs):
        weights = {"weight_hh": functional.dropout(self.cell.weight_hh, 0.5)}
        state = None
        for x in xs:
            state = functional_call(self.cell, weights, (x, state))
        return state[0]

    return over(made(forward, cell=nn.LSTMCell(6, 8)), data(4, 3, 6))


@program
def bayesian():
    """Weights that are drawn around means."""

    def forward(self, x):
        drawn = self.mean + functional.softplus(self.spread) * torch.randn_like(self.mean)
        return functional.linear(x, drawn)

    return over(made(forward, mean=weight(4, 8), spread=nn.Parameter(data(4, 8) - 3)), data(3, 8))


# Checkpoints, transforms, compilers -------------------------------------------------------------------------


def checkpointed(reentrant):
    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        return self.head(x)

    one, two = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(2))
    return over(made(forward, blocks=nn.ModuleList([one, two]), head=nn.Linear(8, 3)), data(4, 8).requires_grad_())


@program
def checkpoint_that_reenters():
    return checkpointed(True)


@program
def checkpoint_that_does_not():
    return checkpointed(False)


@program
def gradients_of_each_example():
    """Differential privacy's, by vmap over grad over functional_call."""
    model, x, labels = perceptron(8, 12, 3), data(5, 8), indices(3, 5)

    def one(params, example, label):
        return functional.cross_entropy(functional_call(model, params, (example[None],)).float(), label[None])

    def loss():
        params = {name: p.detach() for name, p in model.named_parameters()}
        gradients = vmap(grad(one), in_dims=(None, 0, 0))(params, x, labels)
        return functional.cross_entropy(model(x).float(), labels), *gradients.values()

    return model, loss


@program
def ensemble():
    """Three models that run as one."""
    members = nn.ModuleList([perceptron(6, 8, 2) for _ in range(3)])

    def forward(self, x):
        params, buffers = stack_module_state(list(self.members))
        outputs = vmap(lambda p, b: functional_call(self.members[0], (p, b), (x,)))(params, buffers)
        return outputs.var(0).mean() + sum(member(x).square().mean() for member in self.members), outputs

    model = made(forward, members=members)
    return model, lambda: model(data(4, 6))


@program
def steps_inside():
    """MAML: a step inside the loss, through which gradients flow."""
    model, x = perceptron(6, 8, 2), data(4, 6)

    def loss():
        params = dict(model.named_parameters())
        first = squared(functional_call(model, params, (x,)))
        slopes = torch.autograd.grad(first, [*params.values()], create_graph=True)
        params = {name: p - 0.1 * slope for (name, p), slope in zip(params.items(), slopes, strict=True)}
        return squared(functional_call(model, params, (data(4, 6, seed=2),)))

    return model, loss


def compiled(fullgraph):
    def forward(self, x):
        x = self.norm(self.one(x)).relu()
        if not fullgraph:
            torch._dynamo.graph_break()
        return self.two(x) * self.two.weight.square().mean() + x[:, :4] @ self.w

    model = made(forward, norm=nn.LayerNorm(8), one=nn.Linear(6, 8), two=nn.Linear(8, 3), w=weight(4, 3))
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=fullgraph)
    return over(model, data(4, 6))


@program
def compiled_in_parts():
    return compiled(False)


@program
def compiled_whole():
    return compiled(True)
