"""``apex.amp``'s calls: what each option means, what is cast and stored, the loss scale and its state, and the end."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import LossScale, Policy
from mezzo.compat import apex
from mezzo.compat.apex import amp
from mezzo.compat.apex.frontend import policy_of

from .programs import apex_pass, apex_scale, initialized, loss_of, network, weights

pytestmark = pytest.mark.usefixtures("emulating")

FLOAT, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


# Options ----------------------------------------------------------------------------------------------------

DYNAMIC = LossScale.dynamic(2.0**16, interval=2000, refill="clean", floor=2.0**-126, ceiling=2.0**24)
ONE = LossScale.constant(1.0)
#: Options, and of their policy: level, dtype of ops, casts at ops, batch norm in FP32, loss scale, outputs.
OPTIONS = [
    ({"opt_level": "O0"}, ("O0", FLOAT, False, True, ONE, None)),
    ({"opt_level": "O1"}, ("O1", HALF, True, True, DYNAMIC, None)),
    ({"opt_level": "O2"}, ("O2", HALF, True, True, DYNAMIC, FLOAT)),
    ({"opt_level": "O3"}, ("O3", HALF, False, False, ONE, FLOAT)),
    ({"opt_level": "O1", "patch_torch_functions": False}, ("O0", FLOAT, False, True, DYNAMIC, None)),
    ({"opt_level": "O1", "cast_model_type": False}, ("O1", HALF, True, True, DYNAMIC, None)),
    ({"opt_level": "O2", "cast_model_type": BF16}, ("O2", BF16, True, True, DYNAMIC, FLOAT)),
    ({"opt_level": "O2", "cast_model_type": "bf16"}, ("O2", BF16, True, True, DYNAMIC, FLOAT)),
    ({"opt_level": "O2", "keep_batchnorm_fp32": "False"}, ("O2", HALF, True, False, DYNAMIC, FLOAT)),
    ({"opt_level": "O3", "keep_batchnorm_fp32": "True"}, ("O3", HALF, False, True, ONE, FLOAT)),
    ({"opt_level": "O3", "keep_batchnorm_fp32": True}, ("O3", HALF, False, True, ONE, FLOAT)),
    ({"opt_level": "O3", "master_weights": True}, ("O2", HALF, True, False, ONE, FLOAT)),
    ({"opt_level": "O2", "master_weights": False, "loss_scale": 1}, ("O3", HALF, False, True, ONE, FLOAT)),
    ({"opt_level": "O0", "loss_scale": "dynamic"}, ("O0", FLOAT, False, True, DYNAMIC, None)),
    ({"opt_level": "O2", "loss_scale": "128.0"}, ("O2", HALF, True, True, LossScale.constant(128.0), FLOAT)),
    ({"opt_level": "O1", "loss_scale": 4}, ("O1", HALF, True, True, LossScale.constant(4.0), None)),
    ({"opt_level": "O2", "cast_model_outputs": HALF}, ("O2", HALF, True, True, DYNAMIC, HALF)),
    ({"opt_level": "O1", "min_loss_scale": 2**17}, ("O1", HALF, True, True, {"init": 2**17, "floor": 2**17}, None)),
    ({"opt_level": "O2", "max_loss_scale": 256.0}, ("O2", HALF, True, True, {"init": 256.0, "ceiling": 256.0}, FLOAT)),
]  # fmt: skip


def test_each_option_overrides_one_property_of_its_level():
    for options, (level, low, casts, norms, scale, outputs) in OPTIONS:
        policy = policy_of(**options)
        assert (policy.level, policy.dtype, policy.casts) == (level, low, casts), options
        assert (policy.keep_batchnorm_fp32, policy.output_dtype) == (norms, outputs), options
        wanted = LossScale.like("apex", **scale) if isinstance(scale, dict) else scale
        assert policy.loss_scale == wanted, options


def convolutions():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
        )


# Where casts are --------------------------------------------------------------------------------------------


class Inside(nn.Module):
    """Calls a function where a model's operations are cast: in its forward pass."""

    def __init__(self):
        super().__init__()
        self.body = convolutions()

    def forward(self, call):
        return call(self.body)


class Kernels(TorchDispatchMode):
    """Note what each kernel of some names reads."""

    def __init__(self, *names):
        super().__init__()
        self.dtypes = {name: [] for name in names}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) in self.dtypes:
            self.dtypes[name].append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_at_o1_casts_hold_in_the_models_and_nowhere_else():
    """Counted at kernels too; products, which this processor emulates, run in FP32 there."""
    x, labels = torch.randn(4, 1, 8, 8), torch.arange(4)

    def dtypes(layers):
        with amp.disable_casts():
            off = layers(x).dtype
        return layers(x).dtype, (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, off

    def body(layers):
        out = layers(x)
        return torch.exp(out).sum() + out.std() + functional.cross_entropy(out, labels)

    model = Inside()
    with initialized(model, sgd(model), opt_level="O1") as (model, _):
        assert model(dtypes) == (HALF, HALF, FLOAT)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FLOAT
        assert dtypes(model.body) == (FLOAT,) * 3  # a part of a model by itself, outside
        with Kernels("native_batch_norm", "relu", "_log_softmax", "exp", "std") as kernels:
            assert model(body).dtype == FLOAT
        assert [*kernels.dtypes.values()] == [[HALF], [HALF], [FLOAT], [FLOAT], [FLOAT]]
    assert model(dtypes) == (FLOAT,) * 3


def test_everything_is_as_it_was_after_deinitialize():
    for level in ("O0", "O1", "O2", "O3"):
        model = convolutions()
        optimizer = sgd(model)

        def state(model=model, optimizer=optimizer):
            kept = (
                dict(vars(optimizer)),
                *map(list, (model._forward_pre_hooks, model._state_dict_hooks)),
                dict(vars(model)),
            )
            return kept, {name: tensor.dtype for name, tensor in model.state_dict().items()}

        before, params = state(), list(optimizer.param_groups[0]["params"])
        with initialized(model, optimizer, opt_level=level):
            stored = model[0].weight.dtype, model[1].weight.dtype
            assert stored == ((HALF, HALF) if level == "O3" else (FLOAT, FLOAT))
        assert state() == before, level
        assert list(map(id, params)) == list(map(id, optimizer.param_groups[0]["params"]))
        assert not torch.is_autocast_enabled("cpu")
        assert torch.overrides._get_current_function_mode_stack() == []
    amp.deinitialize()  # once more changes nothing


# The loss scale ---------------------------------------------------------------------------------------------


def advance(model, optimizer, overflows=False, **options):
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, 0), optimizer, **options) as scaled:
        scaled.backward()
        if overflows:
            next(model.parameters()).grad.fill_(torch.inf)
    optimizer.step()


def test_the_scale_moves_with_the_step_and_once():
    model = network()
    optimizer = sgd(model, lr=0.01)
    with initialized(model, optimizer, opt_level="O1"):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
        for delays, after in ((False, 2.0**15), (True, 2.0**14)):
            advance(model, optimizer, True, delay_overflow_check=delays)
            assert apex_scale() == after
        optimizer.zero_grad()
        for delays in (True, False, True):
            apex_pass(loss_of(model, 0), optimizer, delay_unscale=delays)
        assert dict(amp.state_dict()) == {"loss_scaler0": {"loss_scale": 2.0**14, "unskipped": 0}}
        optimizer.step()
        scheduler.step()  # without a warning
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**14, "unskipped": 1}
        mine = {}
        assert amp.state_dict(mine) is mine
        assert mine == dict(amp.state_dict())


def test_a_constant_scale_stays_what_initialize_was_told_whatever_is_loaded():
    state = {"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 7}}
    for scale, after in ((None, 2.0**10), ("dynamic", 2.0**10), (128.0, 128.0)):
        model = network()
        optimizer = sgd(model)
        with initialized(model, optimizer, opt_level="O2", loss_scale=scale):
            amp.load_state_dict(state)
            assert apex_scale() == after
            loss = loss_of(model, 0)
            with amp.scale_loss(loss, optimizer) as scaled:
                assert scaled.item() == loss.item() * after


@pytest.mark.parametrize("first", ["initialize", "load_state_dict", "scale_loss"])
def test_several_losses_share_one_scale_and_it_is_said_once(first):
    model = network()
    optimizer = sgd(model)
    apexs = {f"loss_scaler{number}": {"loss_scale": 2.0**number, "unskipped": number} for number in range(3)}
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        with initialized(model, optimizer, **{"num_losses": 3} if first == "initialize" else {}):
            if first == "load_state_dict":
                amp.load_state_dict(apexs)
                assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
            else:
                amp.load_state_dict({"loss_scaler0": apexs["loss_scaler0"]})
                assert len(messages) == (first == "initialize")
            for number in range(3):
                apex_pass(loss_of(model, number), optimizer, loss_id=number)
            optimizer.step()
            optimizer.zero_grad()
    (warned,) = messages
    assert warned.category is UserWarning
    assert "all losses share one loss scale\n  where  num_losses, loss_id" in str(warned.message)


# Other shapes of programs -----------------------------------------------------------------------------------


def same(one, other):
    """Whether nested lists hold the same objects."""
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one is other


def test_models_and_optimizers_come_back_as_they_were_given():
    one, two = network(), network()
    first, second = sgd(one), sgd(two)
    cases = (
        ((one,), one),
        (([one],), [one]),
        ((one, first), (one, first)),
        ((one, [first]), (one, [first])),
        (([one, two], [first, second]), ([one, two], [first, second])),
        (([one], first), ([one], first)),
        (((one, two), (first, second)), ((one, two), (first, second))),
    )
    for given, expected in cases:
        for level, enabled in (("O1", True), ("O2", True), ("O2", False)):
            with initialized(*given, opt_level=level, enabled=enabled) as got:
                assert same(got, expected)


def test_inference_needs_no_optimizer():
    for level in ("O0", "O1", "O2", "O3"):
        model, x = network(), torch.randn(4, 4)
        plain, part = model(x), model[0](x)
        with initialized(model, opt_level=level) as got:
            assert got is model
            assert model(x).dtype == FLOAT
            assert torch.equal(model(x), plain) == torch.equal(model[0](x), part) == (level == "O0")
            assert next(model.parameters()).dtype == (HALF if level == "O3" else FLOAT)
            without = pytest.raises(mezzo.StateError, match=r"amp\.scale_loss without an optimizer")
            with without, amp.scale_loss(torch.ones(()), sgd(model)):
                pass
        assert torch.equal(model(x), plain) == (level != "O3")  # whose weights were rounded


def test_without_being_enabled_nothing_happens():
    model, twin = network(), network()
    optimizer, plain = sgd(model), sgd(twin)
    amp.register_half_function(torch.nn.functional, "gelu")
    with initialized(model, optimizer, enabled=False, opt_level="O2"):
        before = dict(vars(optimizer))
        for number in range(2):
            loss = loss_of(model, number)
            with amp.scale_loss(loss, optimizer) as scaled:
                assert scaled is loss
                scaled.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            loss_of(twin, number).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            plain.step()
            plain.zero_grad()
        assert vars(optimizer) == before
        assert amp.state_dict() == {}
        amp.load_state_dict({"anything": 1})
        with amp.disable_casts():
            assert amp.float_function(lambda x: x)(torch.ones(1).half()).dtype == HALF
    assert all(map(torch.equal, weights(model), weights(twin)))


def test_it_can_be_imported_as_apex_was():
    assert apex.amp is apex is amp
    assert copy.copy(sorted(apex.__all__)) == sorted(name for name in apex.__all__ if hasattr(apex, name))
    assert Policy.parse(str(policy_of("O1"))) == policy_of("O1")


class LARC:
    """As ``apex.parallel.LARC``: no optimizer of torch's, with one in it whose gradients it scales layer by layer."""

    def __init__(self, optimizer, trust_coefficient=0.02, clip=True, eps=1e-8):
        self.optim, self.trust_coefficient, self.clip, self.eps = optimizer, trust_coefficient, clip, eps

    @property
    def state(self):
        return self.optim.state

    @property
    def param_groups(self):
        return self.optim.param_groups

    def state_dict(self):
        return self.optim.state_dict()

    def zero_grad(self, *args, **kwargs):
        self.optim.zero_grad(*args, **kwargs)

    def step(self):
        with torch.no_grad():
            decays = []
            for group in self.optim.param_groups:
                decays.append(group["weight_decay"])
                group["weight_decay"] = 0
                for p in group["params"]:
                    if p.grad is not None:
                        param_norm, grad_norm = torch.norm(p.data), torch.norm(p.grad.data)
                        if param_norm != 0 and grad_norm != 0:
                            rate = self.trust_coefficient * param_norm
                            rate /= grad_norm + param_norm * decays[-1] + self.eps
                            if self.clip:
                                rate = min(rate / group["lr"], 1)
                            p.grad.data += decays[-1] * p.data
                            p.grad.data *= rate
        self.optim.step()
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = decay


@pytest.mark.parametrize("options", [
    {"opt_level": "O0"}, {"opt_level": "O1"}, {"opt_level": "O2"}, {"opt_level": "O1", "loss_scale": 2.0**12},
    {"opt_level": "O2", "cast_model_type": BF16, "loss_scale": 128.0},
])  # fmt: skip
def test_an_optimizer_in_larc_trains_as_in_fp32(options):
    """Layer by layer by norms of gradients without the scale; a step that overflows writes nothing."""

    def wrapped(model):
        return LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05))

    plain, model = network(), network()
    theirs, ours = wrapped(plain), wrapped(model)
    for number in range(6):
        loss_of(plain, number).backward()
        theirs.step()
        theirs.zero_grad()
    with initialized(model, ours, **options):
        for number in range(6):
            if number == 3 and options["opt_level"] != "O0":
                before = weights(model)
                apex_pass(loss_of(model, number) * float("inf"), ours)
                ours.step()
                ours.zero_grad()
                torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
            apex_pass(loss_of(model, number), ours)
            assert all(p is q for p, q in zip(amp.master_params(ours), model.parameters(), strict=True))
            ours.step()
            ours.zero_grad()
        exact = options["opt_level"] == "O0"
        torch.testing.assert_close(weights(model), weights(plain), rtol=0 if exact else 0.02, atol=0 if exact else 0.01)
    assert ours.param_groups[0]["weight_decay"] == 0.05
