"""The cross entropy of a linear layer in chunks of rows: what the two calls compute, and torch's own function."""

import contextlib
import functools
import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import mezzo
from mezzo.dispatch import is_transformed

POLICIES = ("O0", "O1,bf16,emulate=true", "O1,fp16,emulate=true", "O2,bf16,emulate=true", "O2,fp16,emulate=true")
#: torch's own function, and what makes it use chunks; older releases have neither.
TORCHS = getattr(functional, "linear_cross_entropy", None)
OPTIONS = getattr(nn, "LinearCrossEntropyOptions", None)
has_torchs = pytest.mark.skipif(TORCHS is None or OPTIONS is None, reason="this torch has no linear_cross_entropy")


@contextlib.contextmanager
def seeded(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class Model(nn.Module):
    """A layer and a head; ``loss`` is given the hidden rows, the head and the targets."""

    def __init__(self, loss, width=16, classes=24, *, bias=True):
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(width, width), nn.Linear(width, classes, bias=bias), loss

    def forward(self, x, target):
        self.hidden = torch.relu(self.body(x))
        if self.hidden.requires_grad and not is_transformed():
            self.hidden.retain_grad()
        return self.loss(self.hidden, self.head, target)


def two_calls(hidden, head, target, **options):
    logits = functional.linear(hidden, head.weight, head.bias)
    if target.is_floating_point():
        return functional.cross_entropy(logits.flatten(0, -2), target.flatten(0, -2), **options)
    loss = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


def chunked(hidden, head, target, *, rows=32, **options):
    return mezzo.linear_cross_entropy(hidden, head.weight, target, linear_bias=head.bias, rows=rows, **options)


def by_torch(hidden, head, target, *, rows=32, **options):
    how = OPTIONS(batch_chunk_size=rows, chunking_method=None)
    return TORCHS(hidden, head.weight, target, linear_bias=head.bias, options=how, **options)


def targets(*shape, classes=24):
    with seeded(3):
        return torch.randint(classes, shape)


def trained(policy, loss, target, *, model=None, scale=None):
    """Return the losses, and the gradients of the hidden rows, the head's weight and bias and the body's weight."""
    with seeded(1):
        model = model or Model(loss)
        x = torch.randn(*target.shape[: target.dim() - target.is_floating_point()], 16)
    model = mezzo.prepare(model, policy).model
    with mezzo.autocast(policy, "cpu"):
        value = model(x, target)
    start = torch.ones_like(value) if scale is None else torch.full_like(value, scale)
    value.backward(start)
    parameters = (model.head.weight, model.head.bias, model.body.weight)
    return value.detach(), model.hidden.grad, *(None if p is None else p.grad for p in parameters)


def assert_alike(ours, theirs, dtype, *, exact):
    """Losses, and gradients of the rows, agree in their bits where no sum is cut; weights' to 16 bits of each chunk."""
    assert [x.dtype for x in ours if x is not None] == [x.dtype for x in theirs if x is not None]
    if exact:
        assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0, equal_nan=True)
    spacing = torch.finfo(dtype).eps
    for a, b in zip(ours[1:2], theirs[1:2], strict=True):
        torch.testing.assert_close(a, b, rtol=spacing, atol=4 * spacing * b.abs().max().item())
    for a, b in zip(ours[2:], theirs[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=max(4 * spacing * b.abs().max().item(), 1e-9))


def dtype_of(policy):
    return torch.float32 if policy == "O0" else mezzo.Policy.of(policy).dtype


CASES = {
    "mean": (targets(70), {}),
    "sum": (targets(70), {"reduction": "sum"}),
    "each row": (targets(70), {"reduction": "none"}),
    "one row more": (targets(33), {"reduction": "none"}),
    "one chunk": (targets(32), {}),
    "ignored": (targets(70).where(torch.arange(70) % 3 > 0, 7), {"ignore_index": 7}),
    "ignored by default": (targets(70).where(torch.arange(70) > 40, -100), {"reduction": "none"}),
    "all ignored": (torch.full((70,), -100), {}),
    "weights": (targets(70).where(torch.arange(70) % 5 > 0, -100), {"weight": torch.arange(1.0, 25)}),
    "smoothing": (targets(70), {"label_smoothing": 0.1, "weight": torch.arange(1.0, 25)}),
    "sequences": (targets(5, 14), {"reduction": "none"}),
    "probabilities": (torch.softmax(torch.sin(torch.arange(70.0 * 24)).view(70, 24), -1), {}),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_two_calls_do(name, policy):
    target, options = CASES[name]
    ours, theirs = (trained(policy, functools.partial(f, **options), target) for f in (chunked, two_calls))
    assert math.isnan(ours[0].sum()) == (name == "all ignored")
    exact = options.get("reduction") == "none"
    assert_alike(ours, theirs, dtype_of(policy), exact=exact)


def test_a_single_row_and_rows_of_another_layout():
    with seeded(1):
        head, hidden = nn.Linear(16, 24), torch.randn(16, 70)
    assert torch.equal(
        chunked(hidden[:, 0], head, torch.tensor(3)), functional.cross_entropy(head(hidden[:, 0]), torch.tensor(3))
    )
    torch.testing.assert_close(chunked(hidden.mT, head, targets(70)), two_calls(hidden.mT, head, targets(70)))
    with torch.no_grad():
        torch.testing.assert_close(chunked(hidden.mT, head, targets(70)), two_calls(hidden.mT, head, targets(70)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_and_gradients_are_those_of_rounded_operands_in_float64(dtype):
    policy = mezzo.Policy.O1(dtype, emulate=True)
    target = targets(70)
    with seeded(1):
        model, x = Model(functools.partial(chunked, reduction="none")), torch.randn(70, 16)
    for value in (x, *model.parameters()):  # sums of which FP32 holds
        value.data = value.data.mul(16).round() / 16
    with mezzo.autocast(policy, "cpu"):
        loss = model(x, target)
    loss.sum().backward()

    def rounded(x):
        return x.detach().to(dtype).double()

    hidden = rounded(rounded(x) @ rounded(model.body.weight).mT + rounded(model.body.bias)).relu()
    weight, bias = rounded(model.head.weight), rounded(model.head.bias)
    logits = rounded(hidden @ weight.mT + bias)
    wanted = functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss.detach().double(), wanted, rtol=1e-6, atol=1e-6)
    gradient = rounded(torch.softmax(logits, -1) - functional.one_hot(target, 24))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(model.hidden.grad.double(), gradient @ weight, rtol=eps, atol=eps / 4)
    torch.testing.assert_close(model.head.weight.grad.double(), gradient.mT @ hidden, rtol=0, atol=4 * eps)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_o1_and_o2_give_the_same_bits(dtype):
    of_levels = [trained(f"{level},{dtype},emulate=true", chunked, targets(70)) for level in ("O1", "O2")]
    assert all(torch.equal(a, b) for a, b in zip(*of_levels, strict=True))


class Tied(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.embed, self.body, self.loss = nn.Embedding(24, 16), nn.Linear(16, 16), loss

    def forward(self, tokens, target):
        return self.loss(self.body(self.embed(tokens)), self.embed, target)


def test_a_head_that_is_an_embedding_gets_both_gradients():
    for policy in POLICIES:
        gradients = []
        for loss in (mezzo.linear_cross_entropy, lambda hidden, weight, target, rows: functional.cross_entropy(
            functional.linear(hidden, weight), target
        )):  # fmt: skip
            with seeded(2):
                model = Tied(lambda hidden, embed, target, loss=loss: loss(hidden, embed.weight, target, rows=32))
            model = mezzo.prepare(model, policy).model
            with mezzo.autocast(policy, "cpu"):
                value = model(targets(70), targets(70).flip(0))
            value.backward()
            gradients.append(model.embed.weight.grad)
        assert gradients[0].dtype == torch.float32
        spacing = torch.finfo(dtype_of(policy)).eps
        torch.testing.assert_close(*gradients, rtol=0, atol=4 * spacing * gradients[1].abs().max().item())


def test_what_is_frozen_has_no_gradient():
    for frozen, policy in itertools.product(("head.weight", "body.weight"), POLICIES):
        model = Model(chunked)
        model.get_parameter(frozen).requires_grad_(False)
        trained(policy, chunked, targets(70), model=model)
        assert [name for name, param in model.named_parameters() if param.grad is None] == [frozen]


# What autograd asks ---------------------------------------------------------------------------------------


def test_a_graph_serves_twice_and_is_differentiated_twice():
    for policy in ("O0", "O1,bf16,emulate=true"):
        second = []
        for loss in (chunked, two_calls):
            with seeded(1):
                model, x = Model(loss), torch.randn(70, 16)
            with mezzo.autocast(policy, "cpu"):
                value = model(x, targets(70))
            value.backward(retain_graph=True)
            first = model.head.weight.grad.clone()
            value.backward(retain_graph=True)
            torch.testing.assert_close(model.head.weight.grad, 2 * first)
            with mezzo.autocast(policy, "cpu"):
                (gradient,) = torch.autograd.grad(value, model.head.bias, create_graph=True)
                penalty = gradient.square().sum()
            second.append(torch.autograd.grad(penalty, model.body.weight)[0])
        spacing = torch.finfo(dtype_of(policy)).eps
        torch.testing.assert_close(*second, rtol=0, atol=4 * spacing * second[1].abs().max().item())


def test_under_torch_func_it_is_the_two_calls():
    model, x, target = Model(chunked), torch.randn(70, 16), targets(70)
    parameters = {name: param.detach() for name, param in model.named_parameters()}

    def loss_of(parameters, loss):
        model.loss = loss
        return functional_call(model, parameters, (x, target))

    ours, theirs = (grad(loss_of)(parameters, loss) for loss in (chunked, two_calls))
    assert all(torch.equal(ours[name], theirs[name]) for name in parameters)


def test_a_loss_scale_reaches_gradients_that_fp16_would_flush():
    """Each row's gradient is below 2⁻²⁴, which a scale of 2¹⁶ lifts, as for the two calls."""
    target, policy = targets(64), "O1,fp16,emulate=true"
    weight = torch.full((24,), 2.0**-24)
    losses = [functools.partial(f, weight=weight, reduction="sum") for f in (chunked, two_calls)]
    ours, theirs = (trained(policy, loss, target, scale=2.0**16) for loss in losses)
    assert torch.equal(ours[1], theirs[1])
    assert (ours[1] != 0).float().mean() > 0.99
    unscaled, _ = (trained(policy, loss, target) for loss in losses)
    assert (unscaled[1] == 0).float().mean() > 0.5


@has_torchs
def test_torchs_own_chunks_lose_what_a_loss_scale_saves():
    """The reason for mezzo's: it holds until torch's kernel makes its gradients in the backward pass."""
    with seeded(1):
        head, hidden = nn.Linear(16, 24).half(), torch.randn(64, 16).half().requires_grad_()
    head.weight.requires_grad_(False)
    loss = by_torch(hidden, head, targets(64), weight=torch.full((24,), 2.0**-24).half(), reduction="sum")
    loss.float().mul(2.0**16).backward()
    lost = ~hidden.grad.isfinite() | (hidden.grad == 0)
    assert loss.dtype == torch.float16
    assert lost.float().mean() > 0.2


# Memory ---------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that a kernel returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        sizes = (x.untyped_storage().nbytes() for x in tree_iter(out) if isinstance(x, torch.Tensor))
        self.largest = max(self.largest, *sizes, 0)
        return out


def by_torchs_choice(hidden, head, target):
    return TORCHS(hidden, head.weight, target, linear_bias=head.bias, options=OPTIONS())


@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_than_a_chunk_of_logits_is_alive(policy):
    classes, rows, count = 4000, 64, 1024
    largest = []
    for loss in (two_calls, functools.partial(chunked, rows=rows), *([by_torchs_choice] if OPTIONS else [])):
        with seeded(1):
            model, x = Model(loss, classes=classes), torch.randn(count, 16)
        model = mezzo.prepare(model, policy).model
        with Largest() as seen:
            with mezzo.autocast(policy, "cpu"):
                value = model(x, targets(count, classes=classes))
            value.backward()
        largest.append(seen.largest)
    assert largest[0] >= 4 * count * classes
    assert max(largest[1:]) <= 4 * rows * classes


# Compiled code --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute", "ignore:Dynamo")
def test_compiled_code_is_one_graph_and_keeps_no_logits():
    for policy in ("O1,bf16,emulate=true", "O2,fp16,emulate=true"):
        results, kept = [], []
        for compiles in (False, True):
            torch.compiler.reset()
            with seeded(1):
                model, x = Model(chunked), torch.randn(70, 16)
            model.forward = lambda x, target, m=model: m.loss(torch.relu(m.body(x)), m.head, target)
            model = mezzo.prepare(model, policy).model
            run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
            saved = []
            keeping = torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t) or t, lambda t: t)
            with keeping, mezzo.autocast(policy, "cpu"):
                value = run(x, targets(70))
            value.backward()
            results.append([value.detach(), *(param.grad for param in model.parameters())])
            kept.append(max(t.numel() for t in saved))
        torch.testing.assert_close(*results)
        assert kept[1] < 70 * 24


# Torch's own function -------------------------------------------------------------------------------------


@has_torchs
@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("name", ["mean", "sum", "each row", "ignored", "weights"])
def test_torchs_own_function_runs_as_ours_in_a_region(name, policy):
    target, options = CASES[name]
    ours, theirs = (trained(policy, functools.partial(f, **options), target) for f in (chunked, by_torch))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@has_torchs
@pytest.mark.parametrize("policy", POLICIES)
def test_torchs_own_function_without_options_is_the_two_calls(policy):
    def plain(hidden, head, target):
        return TORCHS(hidden, head.weight, target, linear_bias=head.bias)

    ours, theirs = (trained(policy, loss, targets(70)) for loss in (plain, two_calls))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@has_torchs
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["smoothing", "probabilities"])
def test_what_torch_computes_as_a_whole_stays_so_with_its_warning(name, policy):
    target, options = CASES[name]
    with pytest.warns(UserWarning, match="chunked path needs"):
        theirs = trained(policy, functools.partial(by_torch, **options), target)
    ours = trained(policy, functools.partial(two_calls, **options), target)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@has_torchs
def test_torchs_chunks_take_few_arguments_and_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained("O1,bf16,emulate=true", by_torch, targets(70))


@has_torchs
@pytest.mark.parametrize("how", [{}, {"options": OPTIONS and OPTIONS(batch_chunk_size=32, chunking_method=None)}])
def test_a_rule_on_the_parts_holds_inside(how):
    with seeded(1), mezzo.autocast("O1,bf16,emulate=true,fp32=linear", "cpu"):
        hidden, head = torch.randn(70, 16, requires_grad=True), nn.Linear(16, 24)
        loss = TORCHS(hidden, head.weight, targets(70), linear_bias=head.bias, **how)
    torch.testing.assert_close(loss, two_calls(hidden, head, targets(70)), rtol=1e-6, atol=0)


# What explain shows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [chunked, pytest.param(by_torch, marks=has_torchs)])
def test_explain_shows_each_op_of_the_chunks(loss):
    explanation = mezzo.explain(Model(loss), (torch.randn(70, 16), targets(70)), policy="O1,bf16,emulate=true")
    rows = {row.op: row for row in explanation.rows if row.module == ""}
    assert rows["linear"].count == 3
    assert (rows["linear"].computes_in, rows["cross_entropy"].computes_in) == (("bfloat16",), ("float32",))
    assert [finding for finding in explanation.findings if finding.kind == "disagreement"] == []


def test_a_head_below_sixteen_bits_reads_every_chunk_in_its_format():
    model = Model(functools.partial(chunked, rows=40), classes=32)
    policy = "O1,bf16,emulate=true,fp8_param=head.weight"
    explanation = mezzo.explain(model, (torch.randn(160, 16), targets(160)), policy=policy)
    (row,) = [row for row in explanation.rows if row.op == "linear" and row.module == ""]
    assert (row.treatment, row.count) == ("fp8", 3)


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"target": torch.zeros(7, dtype=torch.long)}, "target is (7,)"),
        ({"target": torch.zeros(70, 16)}, "target is (70, 16)"),
        ({"input": torch.zeros(70, 8)}, "input is (70, 8)"),
        ({"linear_weight": torch.zeros(24, 2, 16)}, "linear_weight is (24, 2, 16)"),
        ({"linear_bias": torch.zeros(16)}, "linear_bias is (16,)"),
        ({"input": torch.tensor(1.0)}, "input is ()"),
        ({"reduction": "average"}, "unknown reduction 'average'"),
        ({"rows": 0}, "a chunk has 0 rows"),
        ({"rows": 8.0}, "a chunk has 8.0 rows"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    fits = {"input": torch.zeros(70, 16), "linear_weight": torch.zeros(24, 16), "target": targets(70)}
    with pytest.raises(mezzo.PolicyError) as error:
        mezzo.linear_cross_entropy(**(fits | changes))
    assert words in str(error.value)
    assert "\n  write" in str(error.value)
