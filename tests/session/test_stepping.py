"""The step itself: how often the host waits, and what torch's fused optimizers take over in their own kernel."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo import MixedPrecision, NumericsError

from ..support.tables import thinned

EPS = 2.0**-23
INF, NAN = float("inf"), float("nan")
POLICIES = [
    "O0",
    "O0,loss_scale=dynamic",
    *(f"{level},dtype={dtype},emulate=true" for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")),
    "O1,emulate=true,loss_scale=dynamic(hysteresis=2,skip_rate_limit=0.5,interval=4,patience=1000)",
    "O1,emulate=true,loss_scale=constant(1024,patience=1000)",
]
FUSED = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
}


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def smooth_network(seed=0):
    """Without a batch norm, after which the gradient of a bias is nothing but rounding, and Adam makes it large."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def loss_of(amp, model, step):
    x, y = batch(step)
    with amp.autocast():
        return functional.cross_entropy(model(x).float(), y)


class Watch(TorchDispatchMode):
    """What a GPU would wait for, and which passes are made over more than single numbers."""

    SYNCS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    )

    def __init__(self, *optimizers):
        super().__init__()
        self.syncs = 0
        self.multiplied = 0  # bytes of gradients written by a pass of its own, before the first of the optimizers steps
        self.grad_scales = []  # what fused kernels were told to divide by
        self.stepping = False
        self.hooks = [optimizer.register_step_pre_hook(self.begin) for optimizer in optimizers]

    def begin(self, *_):
        self.stepping = True

    def __exit__(self, *raised):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.syncs += func in self.SYNCS
        name = func._schema.name.removeprefix("aten::")
        if name in ("mul_", "div_", "_foreach_mul_", "_foreach_div_") and not self.stepping:
            written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.multiplied += sum(tensor.nbytes for tensor in written if tensor.dim())
        if name.startswith("_fused_"):
            self.grad_scales.append((kwargs or {}).get("grad_scale"))
        return func(*args, **(kwargs or {}))


# Host syncs -----------------------------------------------------------------------------------------------


# Adagrad makes its state when it is built, which O3 refuses to round; and fused SGD leaves low-precision weights alone.
#: Before torch 2.12 its fused Adagrad takes no flag, and is stepped as optimizers without a predicate are.
FOLDING = [name for name in FUSED if name != "adagrad" or torch.__version__ >= (2, 12)]
LEVELS_OF_FUSED = [
    row
    for row in thinned(POLICIES, FOLDING, every=2)
    if not (row.values[0].startswith("O3") and row.values[1] in ("adagrad", "sgd"))
]


@pytest.mark.parametrize("policy, optimizer", LEVELS_OF_FUSED)
def test_no_sync_in_any_step_of_a_fused_optimizer(policy, optimizer):
    """Clean, overflowing, and with a loss that is not finite; accumulated, with two losses, clipped, unscaled."""
    model = network()
    amp = MixedPrecision(
        model, FUSED[optimizer](model.parameters()), policy, max_grad_norm=1.0, num_losses=2, restore_buffers=True
    )
    skipped = []
    with Watch() as watch:
        for number, event in enumerate("..X.F.u.2.p"):
            loss = loss_of(amp, model, number)
            amp.backward(loss * NAN if event == "F" else loss)
            amp.backward(loss_of(amp, model, number + 50), loss_id=int(event == "2"))
            if event == "X":
                model[3].weight.grad.fill_(INF)
            if event == "u":
                amp.unscale_()
            if event == "p":
                x = batch(0)[0].requires_grad_()
                with amp.autocast():
                    out = model(x).float().sum()
                (slope,) = amp.grad(out, x, create_graph=True)
                amp.backward(slope.square().sum())
            skipped.append(amp.step().skipped)
            amp.zero_grad()
        assert watch.syncs == 0
    assert [bool(each) for each in skipped[2:5]] == [True, False, True] or "O3,dtype=float16" in policy
    assert sum(map(bool, skipped)) >= 2


def test_no_sync_where_fused_optimizers_share_parameters():
    model = network()
    pair = [FUSED[name](model.parameters()) for name in ("adam", "sgd")]
    amp = MixedPrecision(model, pair, "O1,emulate=true", max_grad_norm=1.0)
    with Watch() as watch:
        for number in range(3):
            amp.backward(loss_of(amp, model, number))
            if number == 1:
                model[0].weight.grad[0] = NAN
            amp.step()
            amp.zero_grad()
    assert watch.syncs == 0
    assert amp.stats().skipped == 1


SYNCING = {
    "scheduler": (("adamw",), {}, {"scheduler": True}),
    "raise": (("adamw",), {"on_overflow": "raise"}, {}),
    "explain": (("adamw",), {"on_overflow": "explain"}, {}),
    "no predicate": (("rprop",), {}, {}),
    "several without": (("rprop", "foreach"), {}, {}),
    "with and without": (("adamw", "rprop"), {}, {}),
    "all together": (("rprop", "foreach", "adamw"), {"on_overflow": "raise"}, {"scheduler": True}),
}
OTHERS = {
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("case", SYNCING)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_documented_sync_costs_exactly_one_and_together_one(policy, case):
    names, options, calls = SYNCING[case]
    model = network()
    parts = [list(model.parameters())[i :: len(names)] for i in range(len(names))]
    built = [{**FUSED, **OTHERS}[name](part) for name, part in zip(names, parts, strict=True)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(built[0], 0.5)
    amp = MixedPrecision(model, built, policy, max_grad_norm=1.0, **options)
    for number in range(3):
        amp.backward(loss_of(amp, model, number))
        with Watch() as watch:
            amp.step(scheduler=scheduler if "scheduler" in calls else None)
            amp.zero_grad()
        assert watch.syncs == 1


def test_an_overflow_costs_no_more_where_it_is_only_skipped():
    for case in ("scheduler", "no predicate", "several without"):
        names, options, calls = SYNCING[case]
        model = network()
        parts = [list(model.parameters())[i :: len(names)] for i in range(len(names))]
        built = [{**FUSED, **OTHERS}[name](part) for name, part in zip(names, parts, strict=True)]
        amp = MixedPrecision(model, built, "O1,emulate=true", **options)
        amp.backward(loss_of(amp, model, 0))
        model[0].bias.grad[0] = INF
        with Watch() as watch:
            amp.step(scheduler=(lambda: pytest.fail("the weights did not move")) if "scheduler" in calls else None)
        assert watch.syncs == 1


def test_fused_sgd_waits_once_to_make_its_momentum():
    """torch's kernel cannot skip its first step: it would leave the buffer as it was allocated."""
    model = network()
    amp = MixedPrecision(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True), "O1,emulate=true"
    )
    waits = []
    for number in range(4):
        amp.backward(loss_of(amp, model, number))
        if number == 0:
            model[0].bias.grad[0] = INF
        with Watch() as watch:
            amp.step()
            amp.zero_grad()
        waits.append(watch.syncs)
    assert waits == [1, 1, 0, 0]


# Scale and clipping inside the kernel -------------------------------------------------------------------------


def train(policy, build, clip, steps=6, struck=(2,), plain=False):
    """Return the weights after a few steps, and what was seen in the last one."""
    model = smooth_network()
    optimizer = build(model.parameters())
    amp = None if plain else MixedPrecision(model, optimizer, policy, max_grad_norm=clip)
    for number in range(steps):
        if amp is None:
            x, y = batch(number)
            functional.cross_entropy(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if number not in struck:
                optimizer.step()
            optimizer.zero_grad()
            continue
        amp.backward(loss_of(amp, model, number))
        if number in struck:
            model[2].bias.grad[1] = NAN
        with Watch(optimizer) as watch:
            assert bool(amp.step().skipped) == (number in struck)
            amp.zero_grad()
    weights = [p.detach().clone() for p in (model.parameters() if amp is None else amp.master_params())]
    return weights, None if amp is None else watch


@pytest.mark.parametrize("clip", [None, 0.1, 100.0])
@pytest.mark.parametrize("optimizer", FOLDING)
@pytest.mark.parametrize("policy", ["O0,loss_scale=dynamic(init=1024,interval=2)", "O0,loss_scale=1000"])
def test_fused_optimizers_unscale_and_clip_in_their_own_kernel(policy, optimizer, clip):
    """Against the plain FP32 loop: 1/scale, clip coefficient, their product and the division round once each."""
    weights, watch = train(policy, FUSED[optimizer], clip)
    exact, _ = train(policy, FUSED[optimizer], clip, plain=True)
    assert watch.multiplied == 0
    assert [scale is None for scale in watch.grad_scales] == [False]
    for mine, theirs in zip(weights, exact, strict=True):
        if clip is None and "dynamic" in policy:
            assert torch.equal(mine, theirs)  # a power of two rounds nothing
        # Six updates of 0.1 at most, each off by 8 units in its last place: 4 of its own, 4 from the weights before.
        torch.testing.assert_close(mine, theirs, rtol=6 * EPS / 2, atol=6 * 8 * EPS * 0.1)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("policy", ["O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_folded_and_unfolded_paths_agree(name, policy, clip):
    """The same optimizer, fused and not. SGD is linear in the gradient, so that its error is that of the gradient."""
    kind = getattr(torch.optim, name)
    paths = [
        train(policy, lambda params, fused=fused: kind(params, lr=1e-2, fused=fused), clip) for fused in (True, False)
    ]
    (folded, watch), (unfolded, other) = paths
    if "bfloat16" in policy and clip is None:
        assert watch.grad_scales == [None]  # nothing to divide by
        assert other.multiplied == 0
    else:
        assert watch.grad_scales[0] is not None
        assert other.multiplied == sum(weight.nbytes for weight in unfolded)
    assert watch.multiplied == 0
    for mine, theirs in zip(folded, unfolded, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=6 * EPS / 2, atol=6 * 8 * EPS * 1e-2)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_gradients_that_two_fused_optimizers_share_are_multiplied_once_before(clip):
    """Each kernel would otherwise divide what the first one has divided already."""
    policy = "O0,loss_scale=dynamic(init=1024)"
    model, plain = smooth_network(), smooth_network()
    pair, theirs = ([FUSED[name](net.parameters()) for name in ("sgd", "adamw")] for net in (model, plain))
    amp = MixedPrecision(model, pair, policy, max_grad_norm=clip)
    for number in range(4):
        amp.backward(loss_of(amp, model, number))
        with Watch(*pair) as watch:
            amp.step()
            amp.zero_grad()
        assert watch.grad_scales == [None, None]
        assert watch.multiplied == sum(p.nbytes for p in model.parameters())
        x, y = batch(number)
        functional.cross_entropy(plain(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        for optimizer in theirs:
            optimizer.step()
            if optimizer is theirs[-1]:
                optimizer.zero_grad()
    for mine, exact in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, exact, rtol=4 * EPS / 2, atol=4 * 8 * EPS * 0.1)


def test_only_gradients_of_other_optimizers_are_multiplied_beside_a_fused_one():
    model = smooth_network()
    first, rest = list(model.parameters())[:1], list(model.parameters())[1:]
    pair = [OTHERS["foreach"](first), FUSED["adam"](rest)]
    amp = MixedPrecision(model, pair, "O1,emulate=true")
    for number in range(2):
        amp.backward(loss_of(amp, model, number))
        with Watch(*pair) as watch:
            amp.step()
            amp.zero_grad()
        assert watch.multiplied == first[0].nbytes
        assert watch.grad_scales[0].item() == 65536.0


@pytest.mark.parametrize(
    "policy, passes", [("O0", 0), ("O0,loss_scale=dynamic", 1), ("O1,dtype=bfloat16,emulate=true", 0)]
)
def test_a_multiply_pass_only_where_there_is_something_to_multiply(policy, passes):
    model = smooth_network()
    optimizer = torch.optim.Rprop(model.parameters())
    amp = MixedPrecision(model, optimizer, policy)
    amp.backward(loss_of(amp, model, 0))
    with Watch(optimizer) as watch:
        amp.step()
    assert watch.multiplied == passes * sum(p.nbytes for p in model.parameters())


def test_a_failing_optimizer_leaves_no_flags_behind():
    """The scale and the flag that torch's fused kernels read live on the optimizer only for the call."""
    model = smooth_network()
    optimizer = FUSED["adam"](model.parameters())
    amp = MixedPrecision(model, optimizer, "O1,emulate=true", on_overflow="raise")
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    amp.backward(loss_of(amp, model, 0))
    with pytest.raises(ZeroDivisionError):
        amp.step()
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")
    hook.remove()
    amp.zero_grad()
    amp.backward(loss_of(amp, model, 1))
    model[0].bias.grad[0] = INF
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NumericsError, match=r"1 of 4: 0\.bias"):
        amp.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state or all(state["step"].item() == 0 for state in optimizer.state.values())


@pytest.mark.parametrize("names", list(itertools.permutations(["adam", "rprop"])))
def test_two_optimizers_step_in_the_order_of_the_session(names):
    model, called = smooth_network(), []
    parts = [list(model.parameters())[i::2] for i in range(2)]
    built = [{**FUSED, **OTHERS}[name](part) for name, part in zip(names, parts, strict=True)]
    amp = MixedPrecision(model, built, "O1,emulate=true")
    for name, optimizer in zip(names, built, strict=True):
        optimizer.register_step_post_hook(lambda *_, name=name: called.append(name))
    amp.backward(loss_of(amp, model, 0))
    amp.step(list(reversed(built)))
    assert called == list(names)
