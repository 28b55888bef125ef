"""What programs ask of a weight as of any tensor: views, edits, other derivatives, hooks, dtypes, algebra."""

import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev, jvp, vmap
from torch.nn import functional

from .registry import data, indices, made, over, perceptron, registered, squared, weight

TENSORS = {}
program = registered(TENSORS)


# Views and parts --------------------------------------------------------------------------------------------


@program
def views():
    def forward(self, x):
        w, places = self.w, torch.arange(8).flip(0)
        square = [
            w.view(4, 2, 8).flatten(0, 1), w.T.contiguous(), w.mT.reshape(8, 8), w.flip(0), w.roll(1, 0), w[None][0],
            w.triu(), torch.tril(w), w.masked_fill(self.mask, 0.0), torch.cat([w[:4], w[4:] * 2]), w[places],
            w.repeat_interleave(2, 0)[::2], w.softmax(-1), w.sigmoid().cumsum(0), torch.kron(self.a, self.b),
            torch.block_diag(w[:4, :4], w[4:, 4:]), w.index_select(0, places), w.gather(1, places.expand(8, 8)),
        ]  # fmt: skip
        y = sum(x @ part for part in square) + torch.bmm(x.expand(3, -1, -1), w.expand(3, 8, 8)).sum(0)
        return y + x[:, :4] @ w.unfold(0, 2, 2).sum(-1) + x * w.diagonal()

    parts = {"w": weight(8, 8), "a": weight(2, 4), "b": weight(4, 2), "mask": data(8, 8) > 0}
    return over(made(forward, **parts), data(5, 8))


@program
def rows():
    def forward(self, tokens):
        flat = tokens.flatten()
        one = self.w.index_select(0, flat) + self.w.take_along_dim(flat[:, None].expand(-1, 8), 0)
        two = self.w[self.w[:, 0] > 0].sum(0) + self.w.take(tokens)[..., None]
        return (
            self.head(self.w[tokens] + torch.cat([self.w[tokens, :4]] * 2, dim=-1) + one.view(3, 5, 8)) + two[..., :3]
        )

    return over(made(forward, w=weight(12, 8), head=nn.Linear(8, 3)), indices(12, 3, 5))


@program
def filters():
    """A convolution's weight: transposed, scaled, as a matrix, and in the layout that oneDNN likes."""

    def forward(self, x):
        w = self.conv.weight
        y = functional.conv2d(x, w.transpose(0, 1).flip(2, 3)) + functional.conv2d(
            x, w * self.scales[:, None, None, None]
        )
        y = y + functional.conv_transpose2d(x, w)[..., 2:-2, 2:-2] + self.conv(x)
        return y + (functional.unfold(x, 3).mT @ w.flatten(1).T).mT.view_as(y)

    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    return over(made(forward, conv=conv, scales=nn.Parameter(data(4))), data(2, 4, 6, 6))


@program
def algebra():
    def forward(self, x):
        w, one = self.w, torch.eye(8)
        y = x @ torch.matrix_exp(w * 0.1) + x @ torch.linalg.solve(w + 3 * one, one) + x @ torch.linalg.qr(w)[0]
        y = y + torch.linalg.svdvals(w).sum() + w.norm() + torch.logdet(w @ w.T + one) + torch.trace(w) + w.det()
        y = y + torch.linalg.cholesky(w @ w.T + one).sum() + torch.einsum("ii->i", w) + torch.outer(x[:, 0], w[0])
        return y + torch.addcmul(x @ w, x, w[:5]) + torch.lerp(w[:5], x, 0.3) + w.sort(0).values[:5] + w.std(0)

    return over(made(forward, w=weight(8, 8)), data(5, 8))


@program
def dtypes_asked_for():
    def forward(self, x):
        widths = (
            self.w.double().sum().float() + self.w.type(torch.bfloat16).float().mean() + self.w.half().float().mean()
        )
        return x.to(self.w) @ self.w + widths + self.w.to(torch.float32) @ x.to(next(self.parameters()).dtype).mT.sum(1)

    return over(made(forward, w=weight(8, 8)), data(5, 8))


# Edits ------------------------------------------------------------------------------------------------------


@program
def edits():
    """Clipped, filled, scaled and shifted, before it is used; all that is not on the grid of 16 bits stays."""

    def forward(self, x):
        with torch.no_grad():
            self.w.clamp_(-0.3, 0.3)
            self.w.data[0] = 0.1
            self.w.data.view(-1)[3:7].mul_(2)
            self.w[1].add_(1e-3)
            self.w.data.copy_(self.w * 1.001)
            self.w.index_fill_(0, torch.tensor([2]), 0.3).masked_fill_(self.w < -0.2, -0.2)
            self.w.data.T[2].neg_()
            torch._foreach_mul_([self.w, self.v], 0.99)
            self.old.copy_(self.w).lerp_(self.v, 0.1).addmm_(self.w, self.v, alpha=0.1)
        self.v.data = self.v.data * 0.5
        return x @ self.w + x @ self.v + x @ self.old

    return over(made(forward, w=weight(8, 8), v=weight(8, 8), old=torch.zeros(8, 8)), data(5, 8))


@program
def edits_between_uses():
    def forward(self, x):
        x = self.w(x)
        with torch.no_grad():
            self.w.weight.mul_(0.7071)  # 0.7 would put two of 64 on ties
        return self.w(x)

    return over(made(forward, w=nn.Linear(8, 8)), data(5, 8))


# Derivatives ------------------------------------------------------------------------------------------------


@program
def forward_derivatives():
    model, x = perceptron(6, 8, 2), data(4, 6)

    def loss():
        params = dict(model.named_parameters())
        aside = {name: data(*p.shape) for name, p in params.items()}
        out, slope = jvp(lambda params: functional_call(model, params, (x,)).float(), (params,), (aside,))
        return out.square().mean(), slope

    return model, loss


@program
def jacobians():
    model, x = perceptron(6, 8, 2), data(4, 6)

    def loss():
        params = {name: p.detach() for name, p in model.named_parameters()}
        slopes = jacrev(lambda params: functional_call(model, params, (x,)).float())(params)
        curves = hessian(lambda w: squared(functional_call(model, {"0.weight": w}, (x,))))(params["0.weight"])
        return squared(model(x)), *slopes.values(), curves

    return model, loss


@program
def layers_that_are_mapped():
    """Three weights in one parameter, each for a part of the batch."""

    def forward(self, x):
        return vmap(lambda w, y: torch.tanh(y @ w))(self.w, x) + vmap(lambda w: functional.linear(x[0], w.T))(self.w)

    return over(made(forward, w=weight(3, 8, 8)), data(3, 5, 8))


@program
def hooks_and_saved_tensors():
    model, x = perceptron(6, 8, 2), data(4, 6)
    for param in model.parameters():
        param.register_hook(lambda gradient: gradient * 2 + 1e-3)

    def loss():
        with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            return squared(model(x)) + (model[0].weight.square() * model[0].weight.exp()).sum()

    return model, loss


@program
def slopes_of_a_weight_in_the_loss():
    def forward(self, x):
        square = self.w(x).square().sum()
        (slope,) = torch.autograd.grad(square, self.w.weight, create_graph=True)
        return square * 0.1 + (x @ slope.T).square().mean() * 1e-4

    model = made(forward, w=nn.Linear(8, 8))
    return model, lambda: model(data(5, 8))


@program
def functions_of_ones_own():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.to(x.dtype)

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            return gradient @ w.T.to(gradient.dtype), x.float().T @ gradient.float()

    class Wide(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            return gradient @ w.T, x.T @ gradient

    def forward(self, x):
        return Wide.apply(Product.apply(self.one(x), self.two), self.three)

    return over(made(forward, one=nn.Linear(8, 8), two=weight(8, 8), three=weight(8, 8)), data(5, 8))


# Regions in regions -----------------------------------------------------------------------------------------


@program
def regions_of_torch():
    def forward(self, x):
        x = self.one(x)
        with torch.autocast("cpu", enabled=False):
            x = self.two(x.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.three(x)
        return self.four(x)

    return over(made(forward, **{name: nn.Linear(8, 8) for name in ("one", "two", "three", "four")}), data(5, 8))


@program
def inference_inside():
    model, x = perceptron(6, 8, 2), data(4, 6)

    def loss():
        with torch.inference_mode():
            aim = model(x).float() + model[0].weight.sum()
        return (model(x).float() - aim.clone() + 1).square().mean() + model[0].weight.sum()

    return model, loss
