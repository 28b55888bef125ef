"""Passes inside of passes: checkpoints', functions' and hooks'. The oracle is the same program in plain torch.

Under ``O0`` with a scale that is a power of two, what carries it once and loses it once is plain torch's, bit for bit.
"""

import contextlib
import functools
import itertools
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import Function, Variable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import MixedPrecision, StateError
from mezzo.session.grad_scaler import SessionScaler
from mezzo.session.session import engine_of, weights_of

from .loops import assert_same, attached, gradients, network

SCALED = "O0,loss_scale=65536"

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def layers(*sizes, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = [nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*parts)


def data(number=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


# Who runs passes inside of passes -------------------------------------------------------------------------------------


class Fairscale(Function):
    """As fairscale's and Megatron's checkpoints: ``torch.autograd.backward`` inside of a function's backward."""

    @staticmethod
    def forward(ctx, run, dummy, *args):
        ctx.run = run
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return run(*args)

    @staticmethod
    def backward(ctx, gradient):
        args = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.run(*args)
        torch.autograd.backward(output, gradient)
        return None, None, *(arg.grad for arg in args)


class Engines(Fairscale):
    """As older Megatron does: autograd's engine itself."""

    @staticmethod
    def backward(ctx, gradient):
        args = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.run(*args)
        Variable._execution_engine.run_backward(
            (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        return None, None, *(arg.grad for arg in args)


def reentrant(run, x):
    return checkpoint(run, x, use_reentrant=True)


def by(function):
    return lambda run, x: function.apply(run, torch.ones((), requires_grad=True), x)


RUNS = {"checkpoint": reentrant, "fairscale": by(Fairscale), "engine": by(Engines)}


# How programs drive a session -----------------------------------------------------------------------------------------


class Five:
    """Five lines; ``done`` is what gradients are looked at after."""

    def __init__(self, models, optimizers, policy):
        self.amp = MixedPrecision(models, optimizers, policy)
        self.region, self.backward, self.close = self.amp.autocast, self.amp.backward, self.amp.close
        self.done = self.amp.unscale_


class Attached(Five):
    def __init__(self, models, optimizers, policy):
        self.amp = mezzo.attach(models, optimizers, policy)
        self.region, self.close = contextlib.nullcontext, self.amp.detach
        self.backward, self.done = torch.Tensor.backward, lambda: None


class Scaler(Five):
    def __init__(self, models, optimizers, policy):
        super().__init__(models, optimizers, policy)
        scaler = SessionScaler(self.amp)
        self.backward = lambda loss, **options: scaler.scale(loss).backward(**options)
        self.done = lambda: [
            scaler.unscale_(optimizer) for optimizer in weights_of(self.amp).optimizers if has_gradients(optimizer)
        ]


class Plain:
    def __init__(self, *_):
        self.region, self.close = contextlib.nullcontext, lambda: None
        self.backward, self.done = torch.Tensor.backward, lambda: None


def has_gradients(optimizer):
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


STYLES = {"five": Five, "attached": Attached, "scaler": Scaler}


@contextlib.contextmanager
def driven(style, models, policy=SCALED):
    driver = style(models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models], policy)
    try:
        yield driver
    finally:
        driver.close()


def beside(style, run, policy):
    """A model of no session's in a checkpoint beside the session's; passes add up."""
    mine, foreign, x = layers(8, 8), layers(8, 8, seed=1), data().requires_grad_()
    with driven(style, [mine], policy) as driver:
        for _ in range(2):
            with driver.region():
                loss = mine(x).square().mean() + run(foreign, x).square().mean()
            driver.backward(loss)
        driver.done()
        return [x.grad, *gradients(foreign), *gradients(mine)]


def two(style, run, policy):
    """An encoder that a function runs, and a decoder; an optimizer each."""
    encoder, decoder, x = layers(8, 8), layers(8, 3, seed=1), data().requires_grad_()
    with driven(style, [encoder, decoder], policy) as driver:
        for number in range(2):
            with driver.region():
                loss = decoder(run(encoder, x * (number + 1))).square().mean()
            driver.backward(loss)
        driver.done()
        return [x.grad, *gradients(encoder), *gradients(decoder)]


def trained_in_part(style, run, policy):
    """A parameter that no optimizer has, inside of a checkpoint."""
    model, x = layers(8, 8, 8), data().requires_grad_()
    driver = style([model], [torch.optim.SGD(model[1].parameters(), lr=0.1)], policy)
    with driver.region():
        loss = run(model, x).square().mean()
    driver.backward(loss)
    driver.done()
    grads = [x.grad, *gradients(model)]
    driver.close()
    return grads


def nested(style, run, policy):
    """A pass inside of a pass inside of a pass; parameters that are none of the session's in the innermost."""
    outer, inner, foreign, x = layers(8, 8), layers(8, 8, seed=1), layers(8, 8, seed=2), data().requires_grad_()

    def within(h):
        return inner(run(lambda h: foreign(run(inner, h)), outer(h)))

    with driven(style, [outer, inner], policy) as driver:
        with driver.region():
            loss = run(within, x).square().mean() + outer(x).mean()
        driver.backward(loss, retain_graph=True)
        driver.backward(loss)
        driver.done()
        return [x.grad, *gradients(outer), *gradients(inner), *gradients(foreign)]


def cached(style, run, policy, *, regularised=False, first=None):
    """As cached contrastive losses do: a loss that is a leaf, whose hook runs the model's passes."""
    model, foreign, x = layers(8, 8), layers(8, 8, seed=1), data()
    with driven(style, [model], policy) as driver:
        with torch.no_grad(), driver.region():
            reps = model(x)
        reps = reps.float().requires_grad_()
        loss = functional.cross_entropy(reps @ reps.T, torch.arange(4))
        loss.backward()  # of leaves of its own: no scale
        cache, leaf = reps.grad, loss.detach().requires_grad_()

        def again(gradient):
            with torch.enable_grad():
                for part, wanted in zip(x.split(2), cache.split(2), strict=True):
                    with driver.region():
                        again = run(model, part.clone().requires_grad_()) + foreign(part)
                    (torch.dot(again.flatten().float(), wanted.flatten()) * gradient).backward()

        leaf.register_hook(again)
        with driver.region():
            loss = leaf * 1.0 if first is None else leaf * first
            if regularised:
                loss = loss + model[0][0].weight.square().sum()
        driver.backward(loss)
        driver.done()
        return [leaf.grad, *gradients(model), *gradients(foreign)]


def leaf_itself(style, run, policy):
    """The leaf loss itself is what is differentiated, as sentence-transformers' trainer does."""
    model, x = layers(8, 8), data()
    leaf = torch.zeros((), requires_grad=True)
    with driven(style, [model], policy) as driver:

        def again(gradient):
            with torch.enable_grad():
                with driver.region():
                    loss = model(x).square().mean()
                (loss * gradient).backward()

        leaf.register_hook(again)
        driver.backward(leaf)
        driver.done()
        return [leaf.grad, *gradients(model)]


def post_hooks(style, run, policy):
    """What runs once a gradient is accumulated sees it without the scale: others' optimizers step there."""
    mine, foreign, x = layers(8, 8), layers(8, 8, 8, seed=1), data()
    for param in foreign.parameters():
        param.register_post_accumulate_grad_hook(torch.no_grad()(lambda param: [param.sub_(param.grad), None][1]))
    with driven(style, [mine], policy) as driver:
        with driver.region():
            loss = foreign[1](mine(x)).square().mean() + run(foreign[0], x.clone().requires_grad_()).square().mean()
        driver.backward(loss)
        driver.done()
        return [*foreign.parameters(), *gradients(mine)]


class Recomputed(Function):
    """Takes its weight as an input, and asks ``torch.autograd.grad`` for its gradient: which hooks of it see twice."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with torch.no_grad():
            return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x * 1.0) @ weight, (x, weight), gradient)


def asked(style, run, policy):
    mine, weight, x = layers(8, 8), torch.eye(8, requires_grad=True), data().requires_grad_()
    other = nn.Parameter(torch.eye(8))
    with driven(style, [mine], policy) as driver:
        with driver.region():
            loss = mine(Recomputed.apply(x, weight)).square().mean() + Recomputed.apply(x, other).square().mean()
        driver.backward(loss)
        driver.done()
        return [x.grad, weight.grad, other.grad, *gradients(mine)]


def retained(style, run, policy):
    """Gradients inside of graphs stay where a program wants them: twice of one graph, and in a part run again."""
    mine, x = layers(8, 8, 8), data()
    with driven(style, [mine], policy) as driver:
        with driver.region():
            features = mine[0](x)
            again = run(mine[1], features)
            loss = again.square().mean()
        for tensor in (features, again):
            tensor.retain_grad()
        driver.backward(loss, retain_graph=True)
        first = [tensor.grad.clone() for tensor in (features, again)]
        driver.backward(loss)
        driver.done()
        return [*first, features.grad, again.grad, *gradients(mine)]


PROGRAMS = {
    "beside": beside, "two": two, "trained in part": trained_in_part, "nested": nested, "cached": cached,
    "cached and regularised": functools.partial(cached, regularised=True), "leaf itself": leaf_itself,
    "hooks on .grad": post_hooks, "asked": asked, "retained": retained,
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("runs", RUNS)
def test_inside_of_a_pass_all_carries_the_scale_once_and_after_it_nothing_does(program, runs, style):
    if program in ("leaf itself", "asked") and runs != "checkpoint":
        return
    expected = PROGRAMS[program](Plain, RUNS[runs], None)
    assert all(tensor is not None for tensor in expected)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*carry the loss scale")
        for policy in (SCALED, "O0"):
            assert_same(PROGRAMS[program](STYLES[style], RUNS[runs], policy), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("program", ["two", "cached", "cached and regularised"])
def test_in_low_precision_gradients_of_a_small_loss_are_near_those_of_fp32(program, style, level):
    """Times 1e-5 halves flush what is small without a scale; with it once they do not, with it twice they overflow."""
    for runs in (reentrant, by(Fairscale)):

        def small(run, x, runs=runs):
            return runs(run, x) * 1e-2

        options = {} if "cached" not in program else {"first": 1e-5}
        expected = PROGRAMS[program](Plain, small, None, **options)
        actual = PROGRAMS[program](STYLES[style], small, f"{level},fp16,emulate=true", **options)
        one, other = (torch.cat([gradient.flatten().float() for gradient in grads]) for grads in (actual, expected))
        assert torch.linalg.vector_norm(one - other) < 0.02 * torch.linalg.vector_norm(other)
        for mine, true in zip(actual, expected, strict=True):
            assert torch.linalg.vector_norm(mine - true) < 0.1 * torch.linalg.vector_norm(true)


# Which passes are inside ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_a_pass_of_another_thread_is_not_inside_though_this_one_waits_for_it(style):
    def run(style):
        mine, foreign, x = layers(8, 8), layers(8, 8, seed=1), data()

        def elsewhere(gradient):
            thread = threading.Thread(target=lambda: run_other())
            thread.start()
            thread.join()

        def run_other():
            foreign(x).square().mean().backward()
            reentrant(foreign, x.clone().requires_grad_()).square().mean().backward()

        with driven(style, [mine]) as driver:
            with driver.region():
                out = mine(x)
            out.register_hook(elsewhere)
            driver.backward(out.square().mean())
            driver.done()
            return [*gradients(mine), *gradients(foreign)]

    assert_same(run(STYLES[style]), run(Plain))


def test_threads_may_run_passes_of_one_session_over_models_of_their_own():
    def run(style):
        models, errors = [layers(8, 8, seed=seed) for seed in range(4)], []
        foreign = [layers(8, 8, seed=seed) for seed in range(4, 8)]
        with driven(style, models):
            go = threading.Barrier(4)

            def work(model, other):
                try:
                    go.wait()
                    for number in range(20):
                        h = reentrant(other, data(number).requires_grad_())
                        model(h).square().mean().backward()
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=work, args=pair) for pair in zip(models, foreign, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            return [gradient for model in (*models, *foreign) for gradient in gradients(model)]

    assert_same(run(Attached), run(Plain))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("where", ["inside", "after", "caught"])
def test_an_error_in_a_pass_inside_puts_all_back_and_the_next_pass_is_right(style, where):
    engine = Variable._execution_engine

    def run(style):
        mine, foreign, x = layers(8, 8), layers(8, 8, seed=1), data()
        params = [*mine.parameters(), *foreign.parameters()]

        def fail(gradient):
            if fails:
                raise ValueError("planted")

        def within(h):
            h = foreign[0](h)
            if where != "after" and h.requires_grad:
                h.register_hook(fail)
            return h

        def again(gradient):
            with contextlib.suppress(ValueError), torch.enable_grad():
                reentrant(within, x.clone().requires_grad_()).backward(gradient)

        with driven(style, [mine]) as driver:
            for fails in (True, False):
                with driver.region():
                    out = mine(x)
                    out.register_hook({"inside": lambda _: None, "after": fail, "caught": again}[where])
                    loss = out.square().mean()
                    if where != "caught":
                        loss = loss * 2 + reentrant(within, x.clone().requires_grad_()).square().mean()
                ends = fails and where != "caught"
                with pytest.raises(ValueError, match="planted") if ends else contextlib.nullcontext():
                    driver.backward(loss)
                assert style is Attached or Variable._execution_engine is engine
                if ends and style is not Five:  # whose window knows the scale
                    assert all(param.grad is None or param.grad.abs().max() < 10 for param in params)
                if fails:
                    for param in params:
                        param.grad = None
            driver.done()
            return [param.grad for param in params]

    assert_same(run(STYLES[style]), run(Plain))
    assert Variable._execution_engine is engine


@pytest.mark.parametrize("style", STYLES)
def test_inputs_of_a_checkpoint_are_let_go_of_within_the_pass_and_plain_if_they_are_kept(style):
    kept, alive = [], []

    class Keeps(Fairscale):
        @staticmethod
        def backward(ctx, gradient):
            alive.append(sum(reference() is not None for reference in references))
            args = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            references.extend(map(weakref.ref, args))
            if len(references) == 1:
                kept.extend(args)
            with torch.enable_grad():
                output = ctx.run(*args)
            torch.autograd.backward(output, gradient)
            return None, None, *(arg.grad for arg in args)

    def run(style):
        model, h = layers(8, 8, 8, 8, 8), data().requires_grad_()
        with driven(style, [model]) as driver:
            with driver.region():
                for part in model:
                    h = by(Keeps)(part, h)
            driver.backward(h.square().mean())
            return [kept.pop().grad]

    references = []
    expected = run(Plain)
    del references[:], alive[:]
    assert_same(run(STYLES[style]), expected)
    assert alive == [0, 1, 1, 1]


@pytest.mark.parametrize("style", STYLES)
def test_hooks_of_others_see_the_scale_and_are_warned_of(style):
    def run(style):
        seen, mine, x = [], layers(8, 8), data().requires_grad_()
        x.register_hook(lambda gradient: seen.append(gradient.clone()))
        with driven(style, [mine], "O0,loss_scale=1024") as driver:
            with driver.region():
                loss = mine(x).square().mean()
            driver.backward(loss)
        return x.grad, *seen

    true, _ = run(Plain)
    with pytest.warns(UserWarning, match="carry the loss scale"):
        grad, seen = run(STYLES[style])
    assert_same([grad, seen], [true, true * 1024])


# The door -------------------------------------------------------------------------------------------------------------


def test_a_patch_of_torchs_own_that_comes_and_goes_leaves_passes_scaled():
    if not hasattr(torch.compiler, "_patch_engine_backward"):
        pytest.skip("this torch has no _patch_engine_backward")
    model, seen = network(), []
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), "O0,loss_scale=1024") as amp:
        with torch.compiler._patch_engine_backward():
            pass
        out = model(data())
        out.register_hook(seen.append)
        out.sum().backward()
        assert seen[0].unique().tolist() == [1024.0]
        assert {window.now.passes for window in engine_of(amp).windows} == {1}


def test_an_engine_that_others_have_put_back_ends_the_step_before_anything_is_written():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = Variable._execution_engine
    before = [param.detach().clone() for param in model.parameters()]
    with attached(model, optimizer, "O0,loss_scale=1024"):
        ours, Variable._execution_engine = Variable._execution_engine, plain
        try:
            model(data()).sum().backward()
            with pytest.raises(StateError, match=r"(?s)_execution_engine.*attach"):
                optimizer.step()
            assert_same(list(model.parameters()), before)
        finally:
            Variable._execution_engine = ours
        optimizer.zero_grad()
        model(data()).sum().backward()
        optimizer.step()


# Gradients that are returned ------------------------------------------------------------------------------------------


def flat(grads):
    return torch.cat([gradient.flatten().float() for gradient in grads])


@pytest.mark.parametrize("batched", [False, True])
def test_gradients_that_are_asked_for_of_parameters_are_scaled_and_divided(batched):
    """And are plain in ``.grad``, where programs write them: surgery, Jacobian descent."""

    def run(model):
        params = list(model.parameters())
        losses = torch.stack([(model(data(number)).float().square().mean()) * 1e-5 for number in range(2)])
        if batched:
            grads = torch.autograd.grad(losses, params, torch.eye(2), is_grads_batched=True)
            return [grad.sum(0) for grad in grads]
        return [
            one + other
            for one, other in zip(
                torch.autograd.grad(losses[0], params, retain_graph=True),
                torch.autograd.grad(losses, params, torch.tensor([0.0, 1.0])),
                strict=True,
            )
        ]

    true = run(network())
    for level in ("O1", "O2"):
        model = network()
        with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), f"{level},fp16,emulate=true"):
            grads = run(model)
        assert {grad.dtype for grad in grads} == {torch.float32}
        assert torch.linalg.vector_norm(flat(grads) - flat(true)) < 0.01 * torch.linalg.vector_norm(flat(true))
        zeros = [(values == 0).float().mean() for values in (flat(grads), flat(true))]
        assert zeros[0] < zeros[1] + 0.02
    model = network()
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), SCALED):
        assert_same(run(model), true)


def test_gradients_that_are_asked_for_take_what_torch_takes():
    def run(model):
        first, *_, last = model.parameters()
        unused, x = torch.ones(2, requires_grad=True), data().requires_grad_()
        out = model(x)
        loss = out.square().mean()
        edge = torch.autograd.graph.get_gradient_edge
        grads = [
            *torch.autograd.grad(loss, [first, unused], retain_graph=True, allow_unused=True),
            *torch.autograd.grad(loss, [first, unused], retain_graph=True, materialize_grads=True),
            *torch.autograd.grad(edge(loss), [edge(first), x], torch.ones(()), retain_graph=True),
            *torch.autograd.grad([out, loss], last, [torch.ones_like(out), None], retain_graph=True),
        ]
        (slope,) = torch.autograd.grad(loss, last, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), first, retain_graph=True)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss, [first, unused])
        return [*(0 if grad is None else grad for grad in grads), slope.detach(), second]

    model = network()
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), SCALED):
        grads = run(model)
    assert_same(grads, run(network()))


def test_functional_transforms_see_torchs_own_gradients():
    def run(model):
        x, params = data(), {name: param.detach() for name, param in model.named_parameters()}

        def loss(params, x):
            return torch.func.functional_call(model, params, (x,)).square().mean()

        derivatives = [
            *torch.func.grad(loss)(params, x).values(),
            torch.func.vjp(lambda x: loss(params, x), x)[1](torch.ones(()))[0],
        ]
        derivatives.append(torch.autograd.functional.hessian(lambda x: model(x).square().mean(), x))
        derivatives.append(torch.autograd.functional.jacobian(model, x, vectorize=True))
        return derivatives

    model = network()
    with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), SCALED):
        derivatives = run(model)
    assert_same(derivatives, run(network()))
