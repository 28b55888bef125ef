"""tune: faults that are planted in a healthy network are pinned, and nothing else is; the model is left as it was."""

import copy
import math
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo.numerics import Tuned, tune
from mezzo.policy import Policy

from ..support.refusals import bits, facts

pytestmark = pytest.mark.usefixtures("emulating")

WIDTH = 16
TINY = 1e-5


class Block(nn.Module):
    """A residual block; ``gain`` multiplies what its first layer makes."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = gain

    def forward(self, x):
        return x + self.out(functional.gelu(self.fc(self.norm(x)) * self.gain))


class Plant(nn.Module):
    """A layer, and a function of what it makes."""

    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.fc(x))


class Net(nn.Module):
    """Alike blocks, and something between them."""

    def __init__(self, plant=None):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.plant = plant or nn.Identity()

    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = self.plant(block(x)) if number == 1 else block(x)
        return self.head(x)


def net(function=None):
    torch.manual_seed(0)
    return Net(Plant(function) if function else None)


def loss_fn(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def batches(count=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(32, WIDTH, generator=generator), torch.randint(4, (32,), generator=generator))
        for _ in range(count)
    ]


def tuned(model, dtype="float16", loss_fn=loss_fn, steps=2, **kwargs):
    return tune(model, loss_fn, batches(), dtype=dtype, steps=steps, **kwargs)


def pins(tuning):
    return {str(rule).removeprefix("fp32=") for rule in tuning.policy.rules if rule.treatment == "fp32"}


def attention(x):
    mask = torch.zeros(len(x), len(x))
    mask[0] = -1e9  # one row is masked wholly
    return (x @ x.T / 4 + mask).softmax(-1) @ x


def own_softmax(x):
    top = (12 + x.tanh()).exp()  # up to e^13, and nothing subtracted
    return x + top / top.sum(-1, keepdim=True)


def own_mean(x):
    wide = x.abs()[:, :, None] + torch.ones(8192)
    return x + wide.sum((1, 2))[:, None] * 2.0**-17


def small_variance(x):
    return x + (x / ((x * 1e-4).square() + 1e-8)) * 1e-9


def mean_square(x):
    x = 500 * x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


PLANTS = {
    "a masked row": (attention, {"softmax@plant"}),
    "exp of large logits": (lambda x: x + (x * 0 + 12.0).exp() * TINY, {"exp@plant"}),
    "exp, and what reads it": (lambda x: x + (x.abs() + 12.0).exp().log(), {"exp@plant", "log@plant"}),
    "a product of no list": (lambda x: x + (400 * x) * (400 * x) * TINY, {"mul@plant"}),
    "two results, one of them read": (
        lambda x: x + torch.var_mean(1000 * x, -1, keepdim=True)[0] * TINY,
        {"var_mean@plant"},
    ),
    "log of tiny numbers": (lambda x: x + (40 * x).softmax(-1).log() * 0.01, {"softmax@plant", "log@plant"}),
    "a constant beyond": (
        lambda x: x + (x @ x.T / 4).masked_fill(torch.ones(32, dtype=torch.bool), -1e9).softmax(-1) @ x,
        {"softmax@plant"},  # masked_fill itself has no low kernel for it
    ),
    "a softmax of large logits": (own_softmax, {"exp@plant", "sum@plant"}),
    "a mean over many": (own_mean, {"sum@plant"}),
    "a division by a small variance": (small_variance, {"square@plant"}),
    "a root mean square": (mean_square, {"pow@plant", "rsqrt@plant"}),
    "what the table refuses": (
        lambda x: x + functional.binary_cross_entropy((12 * x).sigmoid(), torch.full_like(x, 0.5)) * 0.01,
        {"binary_cross_entropy@plant"},
    ),
}


def one_step(model, policy, loss_fn=loss_fn):
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy)
    with amp.autocast():
        loss = loss_fn(model, batches()[0])
    amp.backward(loss)
    return amp.step()


def test_outcomes_are_those_of_a_session():
    tuning = tuned(net(), steps=1)
    reference, model = net(), net()
    loss_fn(reference, batches()[0]).backward()
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-3), tuning.policy)
    with amp.autocast():
        loss = loss_fn(model, batches()[0])
    amp.backward(loss)
    amp.unscale_()
    ratios = {}
    for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
        signal, noise = one.grad.double().square().sum(), (other.grad.double() - one.grad.double()).square().sum()
        ratios[name] = 10 * math.log10(signal / noise)
    worst = min(ratios, key=ratios.get)
    result = tuning.evidence.result
    assert result.tensor == worst
    assert result.sqnr_db == pytest.approx(ratios[worst], abs=1e-6)
    assert result.step == 1


def test_what_fp32_itself_rounds_away_is_not_judged():
    class Shifted(nn.Module):
        """A softmax takes no notice of a bias that all its inputs share."""

        def __init__(self):
            super().__init__()
            self.fc, self.shift = nn.Linear(WIDTH, 4), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.fc(x) + self.shift

    torch.manual_seed(0)
    tuning = tuned(Shifted(), "bfloat16")
    assert tuning.evidence.unjudged == ("shift",)
    assert "nothing is judged by shift: zero, or even in FP32 rounding noise" in str(tuning)
    assert pins(tuning) == set()


#: Ranges are BF16's strength; it loses small differences of large numbers.
BF16_PLANTS = {
    "a difference": (lambda x: x + ((x + 1000.0) - 1000.0), {"add@plant"}),
    "one huge activation": (lambda x: (x * 1e6) * 1e-6, set()),
    "a softmax of large logits": (own_softmax, set()),
    "a mean over many": (own_mean, set()),
    "a division by a small variance": (small_variance, set()),
    "a deviation": (lambda x: x + (x + 1000).std(-1, keepdim=True), {"add@plant", "std@plant"}),
    "a norm of an offset": (lambda x: functional.layer_norm(x + 3000.0, (WIDTH,)), {"add@plant", "layer_norm@plant"}),
}
QUICK = ("a product of no list", "what the table refuses")


def check(plants, dtype):
    for name, (function, expected) in plants.items():
        tuning = tuned(net(function), dtype)
        assert pins(tuning) == expected, f"{name}: {tuning}"
        assert not tuning.evidence.result.is_fault, name
        assert {f"{pin.op}@{path}" for pin in tuning.evidence.pins for path in pin.modules} == expected, name


def test_planted_faults_are_pinned_exactly():
    check({name: PLANTS[name] for name in QUICK}, "float16")
    check({"a difference": BF16_PLANTS["a difference"]}, "bfloat16")


@pytest.mark.slow
def test_every_planted_fault_is_pinned_exactly():
    check(PLANTS, "float16")
    check(BF16_PLANTS, "bfloat16")


def test_a_healthy_network_needs_nothing():
    for dtype in ("float16", torch.bfloat16):
        tuning = tuned(net(), dtype)
        name = "float16" if dtype == "float16" else "bfloat16"
        assert isinstance(tuning, Tuned)
        assert (tuning.policy.level, tuning.policy.dtype) == ("O1", getattr(torch, name))
        assert tuning.evidence.num_trials == 1
        assert [str(rule) for rule in tuning.policy.rules] == ["low=layer_norm", "low=cross_entropy"]
        assert tuning.verdict.startswith(f"{name}: all 9 ops run low, nothing needs FP32")
        saved = tuning.evidence.saved_bytes
        assert list(saved) == ["found", "O1", "low"]
        assert saved["found"] == saved["low"] < saved["O1"]
        assert (tuning.policy.loss_scale.mode == "none") == (name == "bfloat16")
        if name == "float16":  # a loss in it bounds the scale: 65536 itself is no float16
            assert str(tuning.policy.loss_scale) == "dynamic(init=32768,ceiling=32768)"
            assert not one_step(net(), tuning.policy).skipped
            assert one_step(net(), tuning.policy.evolve(loss_scale="dynamic")).skipped


def test_one_of_many_alike_layers_is_pinned_and_named():
    model = net()
    with torch.no_grad():
        model.blocks[2].fc.weight.mul_(1e6)
    model.blocks[2].gain = 1e-6
    tuning = tuned(model, steps=1)
    assert pins(tuning) == {"linear@blocks.2.fc"}
    assert tuning.verdict.startswith("float16: 1 of 10 ops need FP32: linear in blocks.2.fc")
    (rule,) = (rule for rule in tuning.policy.rules if rule.treatment == "fp32")
    assert "beyond float16's 65504; without this rule the loss is not finite in step 1, with it" in rule.reason
    with torch.no_grad():  # now all of them
        for block in model.blocks:
            block.fc.weight.mul_(1e6 if block.gain == 1.0 else 1.0)
            block.gain = 1e-6
    tuning = tuned(model, steps=1)
    assert pins(tuning) == {"linear@blocks.*.fc"}
    assert "linear in blocks.{0..2}.fc ×3" in tuning.verdict
    loss = lambda model, batch: functional.cross_entropy(model(batch[0]) * 1e6, batch[1]) * 1e-5  # noqa: E731
    assert pins(tuned(net(), loss_fn=loss)) == {"cross_entropy", "mul"}  # which are in no module


def added(x):
    """What is written to is FP32, and what is read low: torch refuses."""
    values, places = torch.zeros(32), torch.zeros(32, dtype=torch.long)
    with torch.no_grad():
        torch.kthvalue(3 * x, 1, -1, out=(values, places))
    return x + values[:, None] * 0.1


def test_an_op_that_takes_no_two_dtypes_is_pinned_itself():
    tuning = tuned(net(added))
    assert pins(tuning) == {"kthvalue@plant"}
    (pin,) = tuning.evidence.pins
    assert pin.reason.startswith("it fails in float16; without this rule the forward pass of step 1 fails with Runtime")
    assert list(tuning.evidence.saved_bytes) == ["found"]  # and none are told of policies that fail


@torch.library.custom_op("mezzo_tests::wide_gradient", mutates_args=())
def wide_gradient(x: torch.Tensor) -> torch.Tensor:
    """An op of others', whose backward pass takes no 16 bits."""
    return x.clone()


def _wide_alone(_, gradient):
    if gradient.dtype != torch.float32:
        raise RuntimeError(f"a gradient in {gradient.dtype}")
    return gradient


torch.library.register_autograd(wide_gradient, _wide_alone)


def test_what_an_op_reads_that_fails_in_low_precision_is_pinned():
    tuning = tuned(net(lambda x: x + wide_gradient(3 * x) * 0.1))
    assert pins(tuning) == {"linear@plant.fc"}
    (pin,) = tuning.evidence.pins
    assert pin.reason.startswith("what reads its results needs them in FP32; without this rule the ")


def test_ops_without_a_low_kernel_keep_what_the_table_gives_them():
    tuning = tuned(net(lambda x: x + torch.linalg.inv(x.T @ x / 32 + torch.eye(WIDTH)).mean()), steps=1)
    assert tuning.evidence.no_kernel == ("linalg_inv",)
    assert pins(tuning) == set()
    assert tuning.policy.explain("linalg_inv").treatment == "fp32"

    def loss(model, batch):  # with other ops in the second step
        y = model(batch[0])
        square = y.T @ y / 32 + torch.eye(4)
        late = len(batch[0]) == 16
        more = torch.linalg.cholesky(square) if late else torch.linalg.inv(square) + torch.linalg.qr(square)[0]
        return functional.cross_entropy(y, batch[1]) + more.mean()

    (first, second) = batches()
    tuning = tune(net(), loss, [first, tuple(tensor[:16] for tensor in second)], dtype="bfloat16", steps=2)
    assert tuning.evidence.no_kernel == ("linalg_cholesky", "linalg_inv", "linalg_qr")
    assert tuning.evidence.num_trials == 1


def test_where_a_loss_scale_is_enough_it_is_the_answer():
    model = net()
    model.plant = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():  # large inputs, small outputs
        model.embed.weight.mul_(2e4)
        model.plant.weight.mul_(1e-4)
    tuning = tuned(model)
    assert pins(tuning) == set()
    scale = tuning.policy.loss_scale
    assert (scale.mode, scale.init) == ("dynamic", tuning.evidence.result.loss_scale)
    assert 1.0 <= scale.init < 2.0**12
    assert f"the loss scale starts at 2^{math.log2(scale.init):.0f}" in tuning.verdict
    for factor in (1e-14, 1e7):  # beyond what sessions use

        def loss(model, batch, factor=factor):  # in float32: one in float16 would be flushed itself
            return model(batch[0]).float().tanh().mean() * factor

        tuning = tuned(net(), loss_fn=loss)
        scale = tuning.policy.loss_scale
        assert pins(tuning) == set()
        assert (scale.init > 2.0**24, scale.init < 1.0) == (factor < 1, factor > 1)
        assert scale.floor <= scale.init <= scale.ceiling
        assert not one_step(net(), tuning.policy, loss).skipped


def test_one_loss_scale_serves_all_steps():
    data = batches()
    for factors in ((1.0, 1e3), (1e3, 1.0), (3e-10, 1e-2), (1e-2, 3e-10)):

        def loss(model, batch):
            return model(batch[0]).float().tanh().mean() * batch[1]

        own = [(x, factor) for (x, _), factor in zip(data, factors, strict=True)]
        tuning = tune(net(), loss, own, steps=2)
        assert pins(tuning) == set()
        assert tuning.evidence.num_trials == 1
        scale = tuning.policy.loss_scale.init
        assert scale == tuning.evidence.result.loss_scale
        assert scale < 2.0**14 if max(factors) > 1.0 else scale > 2.0**16, factors
        for batch in own:
            model = net()
            amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-3), tuning.policy)
            with amp.autocast():
                made = loss(model, batch)
            amp.backward(made)
            amp.unscale_()
            low = [param.grad for param in model.parameters()]
            wide = net()
            loss(wide, batch).backward()
            for one, other in zip(low, wide.parameters(), strict=True):
                assert (one - other.grad).norm() < 0.1 * other.grad.norm(), (factors, scale)


def test_batches_and_steps():
    data = batches()
    squared = net(lambda x: x + (40 * x).square() * TINY)
    large = (data[1][0] * 20, data[1][1])
    both = tune(squared, loss_fn, [data[0], large], steps=2)
    assert pins(both) == {"square@plant"}
    assert both.evidence.start.step == 2
    assert tune(net(), loss_fn, batches(1), steps=3).evidence.steps == 3  # in turn, where there are fewer
    stream, made = iter(batches(5)), []

    def adam(params):
        made.append(torch.optim.AdamW(params, lr=1e-3))
        return made[-1]

    tuning = tune(net(), loss_fn, stream, steps=2, optimizer=adam)
    assert len(list(stream)) == 3
    assert len(made) == 2  # FP32 and low
    assert 10.0 < tuning.evidence.result.updates_db < 70.0
    assert both.evidence.result.updates_db is None


def test_what_is_switched_on_or_ran_before_makes_no_difference():
    plain = tuned(net(), steps=1)
    torch.rand(7)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert tuned(net(), steps=1) == plain
    with mezzo.autocast("O1,dtype=bfloat16"):  # whose casts of weights serve all trials
        assert tuned(net(), steps=1).policy == plain.policy
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert tuned(net(), steps=1) == plain
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def everything(model):
    random_states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    return (
        facts(model),
        [m.training for m in model.modules()],
        [p._version for p in model.parameters()],
        *map(str, random_states),
    )


def test_the_result_prints_the_answer_first_goes_to_files_and_back_and_the_model_is_left_as_it_was(tmp_path):
    model = net(PLANTS["a masked row"][0])
    model.plant.register_forward_hook(lambda module, args, out: None)
    model.head.weight.requires_grad_(False)
    model.blocks[0].eval()
    loss_fn(model, batches()[0]).backward()
    before = everything(model)
    tuning = tuned(model)
    assert everything(model) == before
    lines = str(tuning).splitlines()
    assert lines[0].startswith("float16: 1 of 14 ops need FP32: softmax in plant; the loss scale starts at 2^15")
    assert [line[2:10].strip() for line in lines[1:] if line[2] != " "] == "pinned worst bytes trials write".split()
    assert max(map(len, lines[:-1])) <= 120
    tuning.save(tmp_path / "my.policy")
    loaded = Policy.load(tmp_path / "my.policy")
    assert loaded == tuning.policy == Policy.parse(str(tuning.policy))
    assert [rule.reason for rule in loaded.rules] == [rule.reason for rule in tuning.policy.rules]
    assert all(rule.reason for rule in loaded.rules)
    (pin,) = tuning.evidence.pins
    assert (pin.name, pin.without_db, pin.with_db) == ("softmax in plant", -math.inf, tuning.evidence.result.sqnr_db)
    assert pin.num_bytes == 2 * 2 * (2 * 32 * 32)  # two steps, read and written
    others = [candidate for candidate in tuning.evidence.candidates if not candidate.kept]
    assert {candidate.without_db for candidate in others} == {tuning.evidence.result.sqnr_db}
    lost = {candidate.name for candidate in tuning.evidence.candidates if candidate.local_db < 30}
    assert lost == {"softmax in plant", "add in plant"}  # the loss is one, times a scale that float16 holds


def test_an_error_that_comes_once_comes_out_of_whichever_pass_it_is_raised_in():
    """Of a model that low precision makes fail: its own failure is expected there, and no other."""
    model = net(added)
    model.plant.norm = nn.BatchNorm1d(WIDTH)
    model.plant.function = lambda x: added(model.plant.norm(x))
    before = everything(model)

    def run(error, at):
        passes = 0

        def failing(model, batch):
            nonlocal passes
            passes += 1
            torch.rand(3)
            if passes == at:
                raise error
            return loss_fn(model, batch)

        tuned(model, loss_fn=failing, steps=1)
        return passes

    passes = run(None, 0)
    for at in {1, 2, 3, 6, passes}:
        error = KeyboardInterrupt() if at % 2 else RuntimeError("mine")
        with pytest.raises(type(error)) as raised:
            run(error, at)
        assert error in (raised.value, raised.value.__cause__), at  # beside the model's own, where both came
        assert everything(model) == before, at


def test_what_else_a_loss_is_made_of_and_batches_are_left_as_they_were():
    torch.manual_seed(0)
    other, seen = nn.Linear(4, 4), []
    other.weight.grad = kept = torch.ones(4, 4)
    other.bias.register_post_accumulate_grad_hook(seen.append)

    def greedy(model, batch):
        loss = functional.cross_entropy(other(model(batch[0].clone())), batch[1])
        batch[0].mul_(0.0)
        return loss

    data = batches()
    before = copy.deepcopy(data)
    tuning = tune(net(), greedy, data, steps=2)
    modest = tune(net(), lambda m, b: functional.cross_entropy(other(m(b[0])), b[1]), data, steps=2)
    assert tuning.evidence.result == modest.evidence.result
    assert bits(data) == bits(before)
    assert other.weight.grad is kept
    assert torch.equal(kept, torch.ones(4, 4))
    assert (other.bias.grad, seen) == (None, [])
