"""Programs in the form that apex's documentation teaches, whole: they learn, and go on from what they saved."""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.compat.apex import amp

from .apex import convolutions, digits, initialized, loss_of, perceptron, scales, values

pytestmark = pytest.mark.usefixtures("emulating")

TRACES = Path(__file__).parents[1] / "conformance" / "scale_traces.json"


class Kernels(TorchDispatchMode):
    """Note what each kernel of some names reads and returns."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.dtypes = names, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.names:
            self.dtypes.setdefault(name, []).append(args[0].dtype)
        return out


def train(opt_level, steps=30, **options):
    """The imagenet example's loop."""
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    with initialized(model, optimizer, opt_level=opt_level, **options) as (model, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
        for number in range(steps):
            x, y = digits(number)
            output = model(x)
            loss = functional.cross_entropy(output, y)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        kinds = {name: param.dtype for name, param in model.named_parameters()}
        saved = {value.dtype for value in model.state_dict().values() if value.is_floating_point()}
    return losses, output.dtype, kinds, saved


def test_a_convolution_net_learns_at_every_level():
    expected = {  # what the model returns, its convolution's weight, batch norm's, and what is saved
        "O0": (torch.float32, torch.float32, torch.float32, {torch.float32}),
        "O1": (torch.float32, torch.float32, torch.float32, {torch.float32}),
        "O2": (torch.float32, torch.float16, torch.float32, {torch.float32}),
        "O3": (torch.float32, torch.float16, torch.float16, {torch.float32}),
    }
    first = None
    for level, (returned, conv, norm, saved) in expected.items():
        losses, dtype, kinds, dtypes = train(level)
        assert losses[-1] < 0.3 < 2 < losses[0], level
        first = first or losses
        assert abs(losses[-1] - first[-1]) < 0.05, level
        assert (dtype, kinds["0.weight"], kinds["1.weight"], dtypes) == (returned, conv, norm, saved), level


def test_no_scheduler_is_told_that_the_step_was_replaced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train("O1", steps=2)


class Inside(nn.Module):
    """Calls a function where a model's operations are cast: in its forward pass."""

    def __init__(self):
        super().__init__()
        self.body = convolutions()

    def forward(self, call, *args):
        return call(self.body, *args)


def test_at_o1_each_kernel_has_the_precision_that_apex_gives_it():
    """Counted at the kernels; what the processor emulates runs in FP32 there, and is left out."""
    model = Inside()
    low = ("convolution", "native_batch_norm", "relu", "max_pool2d_with_indices")
    wide = ("_log_softmax", "exp", "std")

    def body(layers, x, y):
        out = layers(x)
        assert out.dtype == torch.float16
        assert torch.exp(out).dtype == out.std().dtype == torch.float32
        return functional.cross_entropy(out, y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with initialized(model, optimizer, opt_level="O1"), Kernels(*low, *wide) as kernels:
        assert model(body, *digits(0)).dtype == torch.float32
    assert [kernels.dtypes[name] for name in wide] == [[torch.float32]] * 3
    assert [kernels.dtypes[name] for name in low[1:]] == [[torch.float16]] * 3


def test_at_o1_casts_hold_in_the_models_and_nowhere_else():
    def dtypes(layers):
        with amp.disable_casts():
            off = layers(digits(0)[0]).dtype
        return layers(digits(0)[0]).dtype, (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, off

    model = Inside()
    with initialized(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1") as (model, _):
        assert model(dtypes) == (torch.float16, torch.float16, torch.float32)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert dtypes(model.body) == (torch.float32,) * 3  # a part of a model by itself, outside
    assert model(dtypes) == (torch.float32,) * 3


def test_everything_is_as_it_was_after_deinitialize():
    for level in ("O0", "O1", "O2", "O3"):
        model = convolutions()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = (dict(vars(optimizer)), list(model._forward_pre_hooks), list(model._state_dict_hooks))
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        plain = [copy.copy(group["params"]) for group in optimizer.param_groups]
        with initialized(model, optimizer, opt_level=level):
            pass
        after = (dict(vars(optimizer)), list(model._forward_pre_hooks), list(model._state_dict_hooks))
        assert after == before, level
        assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes, level
        assert all(a is b for a, b in zip(plain[0], optimizer.param_groups[0]["params"], strict=True))
        assert not torch.is_autocast_enabled("cpu")
        assert torch.overrides._get_current_function_mode_stack() == []
    amp.deinitialize()  # once more changes nothing


# The loss scale -----------------------------------------------------------------------------------------------------


def iterate(model, optimizer, overflows, delay=False):
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, 0), optimizer, delay_overflow_check=delay) as scaled:
        scaled.backward()
        if overflows:
            next(model.parameters()).grad.fill_(float("inf"))
    found = scales()
    optimizer.step()
    return found


def test_the_loss_scale_follows_apexs_trace():
    """The interval is apex's own, 2000 steps: the scale itself is set as it stands before each stretch."""
    for case in json.loads(TRACES.read_text())["traces"]:
        if case["system"] != "torch":  # which apex.amp follows, its kernel with hysteresis apart
            continue
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with initialized(model, optimizer, opt_level="O2"):
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 1996}})
            clean = 1996
            for event, log2 in zip(case["pattern"], case["log2_scale_after_step"], strict=True):
                iterate(model, optimizer, event == "X")
                assert scales() == [2.0**log2], case["pattern"]
                clean = 0 if event == "X" else (clean + 1) % 2000
                state = amp.state_dict()["loss_scaler0"]
                assert state["unskipped"] == clean
                if event == "X" or clean == 0:  # an interval of four steps
                    clean = 1996
                    amp.load_state_dict({"loss_scaler0": {**state, "unskipped": clean}})


def test_the_scale_moves_with_the_step_and_once():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with initialized(model, optimizer, opt_level="O1"):
        for delays, before in ((False, 2.0**16), (True, 2.0**15)):
            assert iterate(model, optimizer, True, delay=delays) == [before]
            assert scales() == [before / 2]
        optimizer.zero_grad()
        for _ in range(3):
            with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
                scaled.backward()
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**14, "unskipped": 0}
        optimizer.step()
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**14, "unskipped": 1}


def test_bounds_of_the_scale():
    for level in ("O1", "O2"):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with initialized(model, optimizer, opt_level=level, min_loss_scale=2.0**14, max_loss_scale=2.0**15):
            assert scales() == [2.0**15]
            for _ in range(3):
                iterate(model, optimizer, True)
                assert scales() == [2.0**14]
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 1999}})
            iterate(model, optimizer, False)
            assert scales() == [2.0**15]


def test_scales_as_numbers_and_text():
    for given, scale in ((128.0, 128.0), ("128.0", 128.0), (4, 4.0), ("dynamic", 2.0**16)):
        for level in ("O0", "O1", "O2"):
            model = perceptron()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with initialized(model, optimizer, opt_level=level, loss_scale=given):
                loss = loss_of(model, 0)
                with amp.scale_loss(loss, optimizer) as scaled:
                    assert scaled.item() == loss.item() * scale
                    scaled.backward()
                before = values(amp.master_params(optimizer))
                optimizer.step()
                assert not all(map(torch.equal, before, values(amp.master_params(optimizer))))


def test_a_constant_scale_skips_too():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with initialized(model, optimizer, opt_level="O2", loss_scale=128.0):
        before = values(amp.master_params(optimizer))
        iterate(model, optimizer, True)
        assert all(map(torch.equal, before, values(amp.master_params(optimizer))))
        assert scales() == [128.0]


# Checkpoints --------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_bit_for_bit_from_its_three_state_dicts():
    def run(model, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, number), optimizer) as scaled:
                scaled.backward()
            if number == 2:
                next(model.parameters()).grad.fill_(float("inf"))
            optimizer.step()

    for level in ("O0", "O1", "O2"):
        for make in (lambda p: torch.optim.AdamW(p, lr=1e-2), lambda p: mezzo.optim.AdamW(p, lr=1e-2)):
            model = perceptron()
            optimizer = make(model.parameters())
            with initialized(model, optimizer, opt_level=level):
                run(model, optimizer, range(4))
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
                assert {value.dtype for value in saved[0].values()} == {torch.float32}
                run(model, optimizer, range(4, 8))
                straight, scale = values(model.state_dict().values()), amp.state_dict()
            model = perceptron(seed=1)
            optimizer = make(model.parameters())
            with initialized(model, optimizer, opt_level=level):
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                amp.load_state_dict(saved[2])
                run(model, optimizer, range(4, 8))
                assert all(map(torch.equal, straight, model.state_dict().values())), level
                assert amp.state_dict() == scale


def test_restoring_at_another_level():
    states = {}
    for level in ("O0", "O1", "O2", "O3"):
        model = perceptron()
        with initialized(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level):
            if level in ("O1", "O2"):
                amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 7}})
            states[level] = (model.state_dict(), amp.state_dict())
    for level, (weights, state) in states.items():
        for other in states:
            model = perceptron(seed=1)
            with initialized(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=other):
                model.load_state_dict(weights)
                amp.load_state_dict(state)
                taken = state["loss_scaler0"]["loss_scale"] if other in ("O1", "O2") else 1.0
                assert scales() == [taken], (level, other)
                tolerance = 0 if "O3" not in (level, other) else 1e-3
                for name, value in perceptron().state_dict().items():
                    found = model.state_dict()[name].float()
                    torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)


def test_several_losses_share_one_scale_and_it_is_said_once():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begins = {"initialize": {"num_losses": 3}, "scale_loss": {}, "load_state_dict": {}}
    apexs = {f"loss_scaler{number}": {"loss_scale": 2.0**number, "unskipped": number} for number in range(3)}
    for first, options in begins.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with initialized(model, optimizer, **options):
                if first != "scale_loss":
                    amp.load_state_dict(apexs)
                    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
                for number in range(3):
                    with amp.scale_loss(loss_of(model, number), optimizer, loss_id=number) as scaled:
                        scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
        (warned,) = told
        assert warned.category is UserWarning
        assert "all losses share one loss scale\n  where  num_losses, loss_id" in str(warned.message)


# Other shapes of programs -------------------------------------------------------------------------------------------


def same(one, other):
    """Whether nested lists hold the same objects."""
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one is other


def test_models_and_optimizers_come_back_as_they_were_given():
    one, two = perceptron(), perceptron()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two))
    cases = (
        ((one,), one),
        (([one],), [one]),
        ((one, first), (one, first)),
        ((one, [first]), (one, [first])),
        (([one, two], [first, second]), ([one, two], [first, second])),
        (([one], first), ([one], first)),
        (((one, two), (first, second)), ((one, two), (first, second))),
    )
    for level in ("O0", "O1", "O2"):
        for given, expected in cases:
            for enabled in (True, False):
                with initialized(*given, opt_level=level, enabled=enabled) as got:
                    assert same(got, expected if enabled else given[0] if len(given) == 1 else given)


def test_inference_needs_no_optimizer():
    for level in ("O0", "O1", "O2", "O3"):
        model, x = perceptron(), torch.randn(4, 8)
        plain, part = model(x), model[0](x)
        with initialized(model, opt_level=level) as got:
            assert got is model
            assert model(x).dtype == torch.float32
            assert torch.equal(model(x), plain) == torch.equal(model[0](x), part) == (level == "O0")
            assert next(model.parameters()).dtype == (torch.float16 if level in ("O2", "O3") else torch.float32)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            without = pytest.raises(mezzo.StateError, match=r"amp\.scale_loss without an optimizer")
            with without, amp.scale_loss(torch.ones(()), optimizer):
                pass
        assert torch.equal(model(x), plain)


def test_without_being_enabled_nothing_happens():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = perceptron()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    amp.register_half_function(torch.nn.functional, "gelu")
    with initialized(model, optimizer, enabled=False, opt_level="O2"):
        before = dict(vars(optimizer))
        for number in range(3):
            loss = loss_of(model, number)
            with amp.scale_loss(loss, optimizer) as scaled:
                assert scaled is loss
                scaled.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss_of(twin, number).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            plain.step()
            plain.zero_grad()
        assert vars(optimizer) == before
        assert amp.state_dict() == {}
        amp.load_state_dict({"anything": 1})
        with amp.disable_casts():
            assert amp.float_function(lambda x: x)(torch.ones(1).half()).dtype == torch.float16
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_it_can_be_imported_as_apex_was():
    from mezzo.compat import apex

    assert apex.amp is apex is amp


def test_casts_see_weights_that_are_written_between_two_calls():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with initialized(model, optimizer, opt_level="O1"):
        x = torch.ones(1, 8)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                first = model(x).float()
                for param in model.parameters():
                    param.data.mul_(2)  # which leaves no trace on the tensor
                second = model(x).float()
                for param in model.parameters():
                    param.data.mul_(0.5)
                assert torch.equal(model(x).float(), first)
                assert not torch.equal(first, second)


def test_what_was_entered_since_survives_the_end():
    model = perceptron()
    with initialized(model, opt_level="O1"):
        device = torch.device("meta")
        device.__enter__()
        try:
            amp.deinitialize()
            assert torch.ones(1).device.type == "meta"
        finally:
            device.__exit__(None, None, None)
    assert torch.ones(1).device.type == "cpu"
    assert torch.overrides._get_current_function_mode_stack() == []
