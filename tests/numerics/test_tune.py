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
from mezzo.errors import NumericsError, PolicyError, UnsupportedError
from mezzo.numerics import Tuned, tune
from mezzo.policy import Policy

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

    def __init__(self, plant=None, blocks=3):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.plant = plant or nn.Identity()

    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = self.plant(block(x)) if number == 1 else block(x)
        return self.head(x)


def net(function=None, **kwargs):
    torch.manual_seed(0)
    return Net(Plant(function) if function else None, **kwargs)


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


def pins(found):
    return {str(rule).removeprefix("fp32=") for rule in found.policy.rules if rule.treatment == "fp32"}


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
    "a long sum": (lambda x: x + (x.abs()[:, :, None] + torch.ones(6250)).sum((1, 2))[:, None] * 1e-5, {"sum@plant"}),
    "a masked row": (attention, {"softmax@plant"}),
    "exp of large logits": (lambda x: x + (x * 0 + 12.0).exp() * TINY, {"exp@plant"}),
    "exp, and what reads it": (lambda x: x + (x.abs() + 12.0).exp().log(), {"exp@plant", "log@plant"}),
    "squares": (lambda x: x + (400 * x).square() * TINY, {"square@plant"}),
    "a product of no list": (lambda x: x + (400 * x) * (400 * x) * TINY, {"mul@plant"}),
    "a variance": (lambda x: x + (1000 * x).var(-1, keepdim=True) * TINY, {"var@plant"}),
    "two results, one of them read": (
        lambda x: x + torch.var_mean(1000 * x, -1, keepdim=True)[0] * TINY,
        {"var_mean@plant"},
    ),
    "a norm": (lambda x: x + (40000 * x).norm(dim=-1, keepdim=True) * TINY, {"norm@plant"}),
    "a running sum": (
        lambda x: x + (x[:, :, None] ** 2 + torch.ones(70000)).cumsum(-1)[..., -1] * TINY,
        {"cumsum@plant"},
    ),
    "log of tiny numbers": (lambda x: x + (40 * x).softmax(-1).log() * 0.01, {"softmax@plant", "log@plant"}),
    "a tiny epsilon": (lambda x: x + 1 / (x.abs() * 1e-7 + 1e-6) * 1e-8, {"reciprocal@plant"}),
    "a constant beyond": (
        lambda x: x + (x @ x.T / 4).masked_fill(torch.ones(32, dtype=torch.bool), -1e9).softmax(-1) @ x,
        {"masked_fill@plant", "softmax@plant"},
    ),
    "a root mean square": (mean_square, {"pow@plant", "rsqrt@plant"}),
    "what the table refuses": (
        lambda x: x + functional.binary_cross_entropy((12 * x).sigmoid(), torch.full_like(x, 0.5)) * 0.01,
        {"binary_cross_entropy@plant"},
    ),
}
#: What is written by hand in a module's own code, each in both formats: (module's function, FP16's pins, BF16's pins).
HAND_WRITTEN = {
    "one huge activation": (lambda x: (x * 1e6) * 1e-6, {"mul@plant"}, set()),
    "a softmax of large logits": (own_softmax, {"exp@plant", "sum@plant"}, set()),
    "a mean over many": (own_mean, {"sum@plant"}, set()),
    "a division by a small variance": (small_variance, {"square@plant"}, set()),
}
#: Ranges are BF16's strength; it loses small differences of large numbers.
BF16_PLANTS = {
    "a difference": (lambda x: x + ((x + 1000.0) - 1000.0), {"add@plant"}),
    "a deviation": (lambda x: x + (x + 1000).std(-1, keepdim=True), {"add@plant"}),
    "a norm of an offset": (lambda x: functional.layer_norm(x + 3000.0, (WIDTH,)), {"add@plant", "layer_norm@plant"}),
}
QUICK = (
    "a masked row",
    "exp, and what reads it",
    "a product of no list",
    "log of tiny numbers",
    "a constant beyond",
    "two results, one of them read",
)


def check(plants, dtype):
    for name, (function, expected) in plants.items():
        found = tuned(net(function), dtype)
        assert pins(found) == expected, f"{name}: {found}"
        assert not found.evidence.result.is_fault, name
        assert {f"{pin.op}@{path}" for pin in found.evidence.pins for path in pin.modules} == expected, name


def test_planted_faults_are_pinned_exactly():
    check({name: PLANTS[name] for name in QUICK}, "float16")
    check({"a difference": BF16_PLANTS["a difference"]}, "bfloat16")


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_what_a_module_writes_by_hand_is_pinned_where_it_is_lost(name):
    function, fp16, bf16 = HAND_WRITTEN[name]
    check({name: (function, fp16)}, "float16")
    check({name: (function, bf16)}, "bfloat16")


@pytest.mark.slow
def test_every_planted_fault_is_pinned_exactly():
    check(PLANTS, "float16")
    check(BF16_PLANTS, "bfloat16")


def test_a_healthy_network_needs_nothing():
    for dtype in ("float16", "bfloat16"):
        found = tuned(net(), dtype)
        assert pins(found) == set()
        assert found.evidence.num_trials == 1
        assert [str(rule) for rule in found.policy.rules] == ["low=layer_norm", "low=cross_entropy"]
        assert found.verdict.startswith(f"{dtype}: all 9 ops run low, nothing needs FP32")
        saved = found.evidence.saved_bytes
        assert list(saved) == ["found", "O1", "low"]
        assert saved["found"] == saved["low"] < saved["O1"]


def test_one_of_many_alike_layers_is_pinned_and_named():
    model = net(blocks=6)
    with torch.no_grad():
        model.blocks[4].fc.weight.mul_(1e6)
    model.blocks[4].gain = 1e-6
    found = tuned(model)
    assert pins(found) == {"linear@blocks.4.fc"}
    assert found.verdict.startswith("float16: 1 of 10 ops need FP32: linear in blocks.4.fc")
    (rule,) = (rule for rule in found.policy.rules if rule.treatment == "fp32")
    assert "beyond float16's 65504; without this rule the loss is not finite in step 1, with it" in rule.reason
    for block in model.blocks:  # now all of them
        with torch.no_grad():
            block.fc.weight.mul_(1e6)
        block.gain = 1e-6
    with torch.no_grad():
        model.blocks[4].fc.weight.mul_(1e-6)
    found = tuned(model)
    assert pins(found) == {"linear@blocks.*.fc"}
    assert "linear in blocks.{0..5}.fc ×6" in found.verdict


def test_an_op_that_takes_no_two_dtypes_is_pinned_itself():
    def added(x):  # zeros are FP32, and what is added to them low
        index = torch.zeros(WIDTH, dtype=torch.long)
        return x + torch.zeros(32, WIDTH).index_add(1, index, 3 * x) * 0.1

    found = tuned(net(added))
    assert pins(found) == {"index_add@plant"}
    (pin,) = found.evidence.pins
    assert pin.reason.startswith("it fails in float16; without this rule the forward pass of step 1 fails with Runtime")


def test_an_error_that_comes_once_comes_out_of_whichever_pass_it_is_raised_in():
    """Of a model that low precision makes fail: its own failure is expected there, and no other."""

    def added(x):
        return x + torch.zeros(32, WIDTH).index_add(1, torch.zeros(WIDTH, dtype=torch.long), 3 * x) * 0.1

    def run(error, at):
        passes = 0

        def failing(model, batch):
            nonlocal passes
            passes += 1
            if passes == at:
                raise error
            return loss_fn(model, batch)

        tuned(net(added), loss_fn=failing, steps=1)
        return passes

    for at in range(1, 1 + run(None, 0)):
        for error in (RuntimeError("mine"), KeyboardInterrupt()):
            with pytest.raises(type(error)) as told:
                run(error, at)
            assert error in (told.value, told.value.__cause__), at  # beside the model's own, where both came


def test_only_what_loses_by_itself_is_suspected():
    found = tuned(net(PLANTS["a masked row"][0]))
    lost = {each.name for each in found.evidence.candidates if each.local_db < 30}
    assert lost == {"softmax in plant", "add in plant"}  # the loss is one, times a scale that float16 holds


def test_no_bytes_are_told_of_policies_that_fail():
    found = tuned(net(lambda x: x.clamp(-1e9, 1e9)))
    assert pins(found) == {"clamp@plant"}
    assert list(found.evidence.saved_bytes) == ["found"]
    assert "()" not in str(found)


def test_the_model_and_the_loss_have_no_path():
    def own(model, batch):
        return functional.cross_entropy(model(batch[0]) * 1e6, batch[1]) * 1e-5

    assert pins(tuned(net(), loss_fn=own)) == {"cross_entropy", "mul"}


# Scales -------------------------------------------------------------------------------------------------


def test_where_a_loss_scale_is_enough_it_is_the_answer():
    model = net()
    model.plant = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():  # large inputs, small outputs
        model.embed.weight.mul_(2e4)
        model.plant.weight.mul_(1e-4)
    found = tuned(model)
    assert pins(found) == set()
    scale = found.policy.loss_scale
    assert (scale.mode, scale.init) == ("dynamic", found.evidence.result.loss_scale)
    assert 1.0 <= scale.init < 2.0**12
    assert f"the loss scale starts at 2^{math.log2(scale.init):.0f}" in found.verdict


def test_scales_beyond_what_sessions_use_are_allowed_by_the_policy():
    for factor, above in (
        (1e-9, True),
        (1e-14, True),
        (1e7, False),
    ):  # in float32, as a loss in float16 would be flushed itself
        found = tuned(net(), loss_fn=lambda model, batch, f=factor: model(batch[0]).float().tanh().mean() * f)
        scale = found.policy.loss_scale
        assert pins(found) == set()
        assert (scale.init > 2.0**24, scale.init < 1.0) == (above, not above)
        assert scale.floor <= scale.init <= scale.ceiling
        step = one_step(net(), found.policy, lambda model, batch, f=factor: model(batch[0]).float().tanh().mean() * f)
        assert not step.skipped


def test_a_float16_loss_bounds_the_scale_for_ever():
    found = tuned(net())
    assert str(found.policy.loss_scale) == "dynamic(init=32768,ceiling=32768)"
    assert not one_step(net(), found.policy).skipped
    wide = found.policy.evolve(loss_scale="dynamic")
    assert one_step(net(), wide).skipped  # 65536 itself is no float16
    assert tuned(net(), "bfloat16").policy.loss_scale.mode == "none"


def one_step(model, policy, loss_fn=loss_fn):
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy)
    with amp.autocast():
        loss = loss_fn(model, batches()[0])
    amp.backward(loss)
    return amp.step()


# What is measured -----------------------------------------------------------------------------------------


def test_outcomes_are_those_of_a_session():
    found = tuned(net(), steps=1)
    reference, model = net(), net()
    loss_fn(reference, batches()[0]).backward()
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-3), found.policy)
    with amp.autocast():
        loss = loss_fn(model, batches()[0])
    amp.backward(loss)
    amp.unscale_()
    names = [name for name, _ in model.named_parameters()]
    pairs = zip(names, reference.parameters(), model.parameters(), strict=True)
    ratios = {}
    for name, one, other in pairs:
        signal, noise = one.grad.double().square().sum(), (other.grad.double() - one.grad.double()).square().sum()
        ratios[name] = 10 * math.log10(signal / noise)
    worst = min(ratios, key=ratios.get)
    result = found.evidence.result
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
    found = tuned(Shifted(), "bfloat16")
    assert found.evidence.unjudged == ("shift",)
    assert "nothing is judged by shift: zero, or even in FP32 rounding noise" in str(found)
    assert pins(found) == set()


def test_a_fault_in_the_second_batch_is_found():
    function = lambda x: x + (x.amax() > 1e3) * (x * 0 + 12.0).exp() * TINY  # noqa: E731
    data = batches()
    assert pins(tune(net(function), loss_fn, data, steps=2)) == {"exp@plant"}  # a product with zero is NaN all the same
    scaled = net(lambda x: x + (x.abs() * 4).exp() * 1e-9)
    large = (data[1][0] * 20, data[1][1])
    first = tune(scaled, loss_fn, data[:1], steps=1)
    both = tune(scaled, loss_fn, [data[0], large], steps=2)
    assert pins(first) == set()
    assert "exp@plant" in pins(both)
    assert both.evidence.start.step == 2


def test_steps_are_those_of_the_given_optimizer():
    made = []

    def adam(params):
        made.append(torch.optim.AdamW(params, lr=1e-3))
        return made[-1]

    found = tuned(net(), optimizer=adam)
    assert len(made) == 2  # FP32 and low
    assert 10.0 < found.evidence.result.updates_db < 70.0
    assert tuned(net()).evidence.result.updates_db is None


def test_answers_do_not_depend_on_what_ran_before():
    function, expected = PLANTS["log of tiny numbers"]
    first = tuned(net(function))
    torch.rand(7)
    tuned(net())
    again = tuned(net(function))
    assert first == again
    assert pins(first) == expected


def test_what_is_switched_on_around_it_makes_no_difference():
    plain = tuned(net(), steps=1)
    for context in (torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        with context:
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


def test_fewer_batches_than_steps_are_used_in_turn_and_no_more_are_taken():
    assert tune(net(), loss_fn, batches(1), steps=3).evidence.steps == 3
    stream = iter(batches(5))
    tune(net(), loss_fn, stream, steps=2)
    assert len(list(stream)) == 3


def test_dropout_is_the_same_in_every_trial():
    model = net()
    model.plant = nn.Dropout(0.5)
    found = tuned(model)
    assert pins(found) == set()
    assert found.evidence.result.sqnr_db > 40


def test_ops_without_a_low_kernel_keep_what_the_table_gives_them():
    found = tuned(net(lambda x: x + torch.linalg.inv(x.T @ x / 32 + torch.eye(WIDTH)).mean()))
    assert found.evidence.no_kernel == ("linalg_inv",)
    assert pins(found) == set()
    assert found.policy.explain("linalg_inv").treatment == "fp32"


def test_a_pin_costs_what_its_operands_and_results_take_more():
    (softmax,) = tuned(net(PLANTS["a masked row"][0])).evidence.pins
    assert softmax.num_bytes == 2 * 2 * (2 * 32 * 32)  # two steps, read and written


def test_trials_say_nothing_of_rules_that_do_not_reach_inside(caplog):
    model = net()
    model.plant = nn.GRUCell(WIDTH, WIDTH)
    assert pins(tuned(model)) == set()
    assert caplog.text == ""


# What comes out ---------------------------------------------------------------------------------------------


def test_the_result_prints_the_answer_first_and_goes_to_files_and_back(tmp_path):
    found = tuned(net(PLANTS["a masked row"][0]))
    text = str(found)
    lines = text.splitlines()
    assert lines[0].startswith("float16: 1 of 14 ops need FP32: softmax in plant; the loss scale starts at 2^15")
    assert [line[2:10].strip() for line in lines[1:] if line[2] != " "] == "pinned worst bytes trials write".split()
    assert max(map(len, lines[:-1])) <= 120
    found.save(tmp_path / "my.policy")
    loaded = Policy.load(tmp_path / "my.policy")
    assert loaded == found.policy
    assert [rule.reason for rule in loaded.rules] == [rule.reason for rule in found.policy.rules]
    assert all(rule.reason for rule in loaded.rules)
    (pin,) = found.evidence.pins
    assert (pin.name, pin.without_db, pin.with_db) == ("softmax in plant", -math.inf, found.evidence.result.sqnr_db)
    others = [each for each in found.evidence.candidates if not each.kept]
    assert {each.without_db for each in others} == {found.evidence.result.sqnr_db}
    with pytest.raises(AttributeError):
        found.policy = None


def test_where_no_pin_is_worth_it_the_verdict_says_so():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(32, WIDTH, generator=generator)

    class Noisy(torch.autograd.Function):
        """A gradient that is mostly noise wherever it arrives in 16 bits."""

        @staticmethod
        def forward(ctx, x):
            ctx.dtype = x.dtype
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient if ctx.dtype == torch.float32 else gradient * (1 + 0.3 * noise.to(gradient.dtype))

    found = tuned(net(lambda x: Noisy.apply(x)), "bfloat16")
    assert pins(found) == {"linear@plant.fc"}  # what hands it FP32


# The model is left as it was --------------------------------------------------------------------------------


def everything(model):
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "modes": [m.training for m in model.modules()],
        "needs": [p.requires_grad for p in model.parameters()],
        "versions": [p._version for p in model.parameters()],
        "random": (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()),
        "modules": list(model.modules()),
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


def with_all_kinds():
    model = net(PLANTS["a masked row"][0])
    model.norm = model.plant.norm = nn.BatchNorm1d(WIDTH)
    model.plant.function = lambda x: attention(model.norm(x))
    model.plant.register_forward_hook(lambda module, args, out: None)
    model.head.weight.requires_grad_(False)
    model.blocks[0].eval()
    loss_fn(model, batches()[0]).backward()
    return model


def test_the_model_is_left_as_it_was():
    model = with_all_kinds()
    before = everything(model)
    assert pins(tuned(model)) >= {"softmax@plant"}
    assert same(everything(model), before)


def test_the_model_is_left_as_it_was_after_an_exception_and_an_interrupt():
    for error in (ValueError("mine"), KeyboardInterrupt()):
        for calls in (1, 3, 5, 10):
            model, left = with_all_kinds(), calls
            before = everything(model)

            def failing(model, batch, error=error):
                nonlocal left
                left -= 1
                torch.rand(3)
                if not left:
                    raise error
                return loss_fn(model, batch)

            with pytest.raises(type(error)) as told:  # in low precision too: a second time it does not fail
                tuned(model, loss_fn=failing)
            assert told.value is error
            assert same(everything(model), before), (error, calls)


def test_a_loss_that_runs_another_model_changes_nothing_of_it():
    model = net()
    before = everything(model)
    with pytest.raises(PolicyError) as refused:
        tune(model, lambda _, batch: loss_fn(model, batch), batches())
    assert "loss_fn runs another model than it is given" in str(refused.value)
    assert same(everything(model), before)


def test_what_else_a_loss_is_made_of_keeps_its_gradients():
    torch.manual_seed(0)
    other, seen = nn.Linear(4, 4), []
    other.weight.grad = kept = torch.ones(4, 4)
    other.bias.register_post_accumulate_grad_hook(seen.append)
    found = tuned(net(), loss_fn=lambda model, batch: functional.cross_entropy(other(model(batch[0])), batch[1]))
    assert pins(found) == set()
    assert other.weight.grad is kept
    assert torch.equal(kept, torch.ones(4, 4))
    assert (other.bias.grad, seen) == (None, [])


def test_what_a_loss_function_writes_into_a_batch_is_gone_in_the_next_trial():
    def greedy(model, batch):
        loss = loss_fn(model, (batch[0].clone(), batch[1]))
        batch[0].mul_(0.0)
        return loss

    data = batches()
    kept = copy.deepcopy(data)
    assert tune(net(), greedy, data, steps=2).evidence.result == tune(net(), loss_fn, data, steps=2).evidence.result
    assert same(data, kept)


@pytest.mark.parametrize("name", ["bf16", "BFloat16", torch.bfloat16])
def test_a_dtype_goes_by_any_of_its_names(name):
    assert tuned(net(), name, steps=1).policy.dtype == torch.bfloat16


# Refusals -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_used_is_refused_by_name():
    model, data = net(), batches()
    closed = net()
    closed.lock = open(__file__)  # noqa: SIM115 - what cannot be copied
    still = net().requires_grad_(False)
    cases = [
        (PolicyError, "a model must be an nn.Module, not str", ("model", loss_fn, data), {}),
        (PolicyError, "loss_fn is a NoneType, no function", (model, None, data), {}),
        (
            PolicyError,
            "weights that train are stored low already\n  where  embed.weight",
            (net().bfloat16(), low, data),
            {},
        ),
        (PolicyError, "nothing can be tuned in 'float8'", (model, loss_fn, data), {"dtype": "float8"}),
        (PolicyError, "nothing can be tuned in 'float8_e5m2'", (model, loss_fn, data), {"dtype": "e5m2"}),
        (PolicyError, "nothing can be tuned in 7", (model, loss_fn, data), {"dtype": 7}),
        (PolicyError, "what low precision is compared with", (model, loss_fn, data), {"dtype": torch.float32}),
        (PolicyError, "what low precision is compared with", (model, loss_fn, data), {"dtype": "float32"}),
        (PolicyError, "steps must be a positive integer, not 0", (model, loss_fn, data), {"steps": 0}),
        (PolicyError, "steps must be a positive integer, not True", (model, loss_fn, data), {"steps": True}),
        (PolicyError, "optimizer= is a SGD, no function", (model, loss_fn, data), {"optimizer": sgd(model)}),
        (PolicyError, "optimizer= returned 7, no optimizer", (model, loss_fn, data), {"optimizer": lambda params: 7}),
        (
            PolicyError,
            "other parameters than those it was given",
            (model, loss_fn, data),
            {"optimizer": lambda _: sgd(model)},
        ),
        (
            PolicyError,
            "LBFGS takes no step without a closure",
            (model, loss_fn, data),
            {"optimizer": torch.optim.LBFGS},
        ),
        (PolicyError, "there is no batch to tune on", (model, loss_fn, []), {}),
        (PolicyError, "batches is 7, nothing to iterate over", (model, loss_fn, 7), {}),
        (PolicyError, "the model has no parameter that trains", (still, loss_fn, data), {}),
        (PolicyError, "it returned (32, 4) torch.float32", (model, lambda m, b: m(b[0]), data), {}),
        (PolicyError, "it returned NoneType", (model, lambda m, b: None, data), {}),
        (PolicyError, "without a gradient", (model, lambda m, b: loss_fn(m, b).detach(), data), {}),
        (UnsupportedError, "the model cannot be copied", (closed, loss_fn, data), {}),
        (UnsupportedError, "scripted modules cannot be tuned", (scripted(), loss_fn, data), {}),
    ]
    before = everything(model)
    for kind, words, args, kwargs in cases:
        with pytest.raises(kind) as refused:
            tune(*args, **kwargs)
        assert words in str(refused.value), words
        assert "\n  write" in str(refused.value), words
    assert same(everything(model), before)
    closed.lock.close()
    with pytest.raises(PolicyError, match="2 problems"):
        tune(model, loss_fn, data, steps=0, dtype="float8")


def low(model, batch):
    return loss_fn(model, (batch[0].bfloat16(), batch[1]))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def scripted():
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        return nn.Sequential(torch.jit.script(nn.Linear(WIDTH, 4)))


def test_what_is_not_ready_for_a_policy_is_refused():
    with pytest.raises(UnsupportedError):
        tuned(net().double(), loss_fn=lambda model, batch: loss_fn(model, (batch[0].double(), batch[1])))


def test_a_model_that_is_not_finite_in_fp32_is_not_tuned():
    model = net(lambda x: x + (x.abs() + 100.0).exp())
    with pytest.raises(NumericsError) as refused:
        tuned(model)
    text = str(refused.value)
    assert text.startswith("the model is not finite in FP32, in step 1 of 2")
    assert "the first non-finite tensor: output, in the forward pass of plant exp" in text


def test_a_weight_or_a_batch_that_is_not_finite_is_named():
    model, data = net(), batches()
    with torch.no_grad():
        model.blocks[1].fc.weight[0, 0] = math.nan
    with pytest.raises(NumericsError) as refused:
        tuned(model)
    assert "blocks.1.fc" in str(refused.value)
    assert "weight" in str(refused.value)
    data[1][0][0, 0] = math.inf
    with pytest.raises(NumericsError) as refused:
        tune(net(), loss_fn, data, steps=2)
    assert "in step 2 of 2" in str(refused.value)
    assert "copy" not in str(refused.value)
    assert "embed linear" in str(refused.value)


def test_steps_that_lead_out_of_fp32_are_told():
    with pytest.raises(NumericsError, match="not finite in FP32, in step 2 of 2"):
        tuned(net(), optimizer=lambda params: torch.optim.SGD(params, lr=1e30))


def test_an_error_that_no_rule_reaches_is_told():
    class Own(torch.autograd.Function):
        """What asks about autocast by itself."""

        @staticmethod
        def forward(ctx, x):
            return x * (math.inf if torch.is_autocast_enabled("cpu") else 1.0)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    with pytest.raises(NumericsError) as refused:
        tuned(net(lambda x: x + Own.apply(x)))
    assert "no rule brings the gradients of float16 near those of FP32" in str(refused.value)
    assert "the loss is not finite" in str(refused.value)


def test_a_tuned_policy_is_a_value():
    found = tuned(net())
    assert isinstance(found, Tuned)
    assert found.policy.level == "O1"
    assert Policy.parse(str(found.policy)) == found.policy
