"""What apex's calls refuse, with what to write instead, and nothing half-converted."""

import contextlib
import copy
import inspect

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.apex import amp

from .apex import initialized, loss_of, perceptron, scales

pytestmark = pytest.mark.usefixtures("emulating")


def whole():
    model = perceptron()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def refused(error, match, *, says=(), models=None, optimizers=None, **options):
    """``amp.initialize`` raises, and leaves model, optimizer and process as they were."""
    model, optimizer = whole()
    models, optimizers = model if models is None else models, optimizer if optimizers is None else optimizers
    first, names = models[0] if isinstance(models, list) else models, vars(optimizer).keys() | set()
    before = {name: (value.dtype, value.clone()) for name, value in first.state_dict().items()}
    with pytest.raises(error, match=match) as raised:
        amp.initialize(models, optimizers, **options)
    for words in says:
        assert words in str(raised.value), words
    assert {name: value.dtype for name, value in first.state_dict().items()} == {n: d for n, (d, _) in before.items()}
    assert all(torch.equal(first.state_dict()[name], value) for name, (_, value) in before.items())
    assert vars(optimizer).keys() == names
    assert not torch.is_autocast_enabled("cpu")
    assert torch.overrides._get_current_function_mode_stack() == []
    with pytest.raises(mezzo.StateError, match=r"before amp\.initialize"):
        amp.state_dict()


def test_initialize_has_apexs_signature():
    found = [(name, each.default) for name, each in inspect.signature(amp.initialize).parameters.items()]
    empty = inspect.Parameter.empty
    assert found == [
        ("models", empty), ("optimizers", None), ("enabled", True), ("opt_level", "O1"), ("cast_model_type", None),
        ("patch_torch_functions", None), ("keep_batchnorm_fp32", None), ("master_weights", None),
        ("loss_scale", None), ("cast_model_outputs", None), ("num_losses", 1), ("verbosity", 1),
        ("min_loss_scale", None), ("max_loss_scale", 2.0**24),
    ]  # fmt: skip
    found = [(name, each.default) for name, each in inspect.signature(amp.scale_loss).parameters.items()]
    assert found == [
        ("loss", empty), ("optimizers", empty), ("loss_id", 0), ("model", None), ("delay_unscale", False),
        ("delay_overflow_check", False),
    ]  # fmt: skip


def test_options_that_contradict_each_other():
    cases = (
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "without keep_batchnorm_fp32"),
        ({"opt_level": "O1", "master_weights": True}, "without master_weights"),
        ({"opt_level": "O1", "master_weights": False}, "without master_weights"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, 'opt_level="O2", cast_model_type='),
        ({"opt_level": "O0", "cast_model_type": torch.float16}, 'opt_level="O3"'),
        ({"opt_level": "O2", "cast_model_type": torch.float32}, 'opt_level="O0"'),
        ({"opt_level": "O0", "patch_torch_functions": True}, 'opt_level="O1"'),
        ({"opt_level": "O2", "patch_torch_functions": True}, 'opt_level="O1"'),
        ({"opt_level": "O0", "master_weights": True}, 'opt_level="O2"'),
    )
    for options, write in cases:
        refused(mezzo.PolicyError, "contradict each other", says=[write], **options)
    refused(mezzo.PolicyError, "fp16 gradients cannot be unscaled in fp16", opt_level="O3", loss_scale=128.0)
    refused(mezzo.PolicyError, "fp16 gradients cannot be unscaled in fp16", opt_level="O2", master_weights=False)
    both = {"keep_batchnorm_fp32": "True", "master_weights": True}
    refused(mezzo.PolicyError, "2 problems", says=both, opt_level="O1", **both)


def test_unknown_values():
    refused(mezzo.PolicyError, "unknown opt_level 'O4'", says=['"O1,dtype=bfloat16"'], opt_level="O4")
    refused(mezzo.PolicyError, "unknown opt_level 1", opt_level=1)
    refused(mezzo.PolicyError, "keep_batchnorm_fp32 is 'yes'", opt_level="O2", keep_batchnorm_fp32="yes")
    refused(mezzo.PolicyError, "loss_scale is 'much'", says=['"128.0"'], loss_scale="much")
    refused(mezzo.PolicyError, "loss_scale is True", says=['"128.0"'], loss_scale=True)
    refused(mezzo.PolicyError, "patch_torch_functions is 'True'", patch_torch_functions="True")
    refused(mezzo.PolicyError, "enabled is 'False'", enabled="False")
    refused(mezzo.PolicyError, "cast_model_outputs is 'half'", cast_model_outputs="half")
    refused(mezzo.PolicyError, "num_losses is 0", num_losses=0)
    refused(mezzo.PolicyError, "floor", min_loss_scale=-1.0)
    refused(mezzo.PolicyError, "ceiling", min_loss_scale=2.0**10, max_loss_scale=2.0**8)


def test_options_that_go_together():
    levels = {"O0": torch.float32, "O1": torch.float32, "O2": torch.float16, "O3": torch.float16}
    for level, dtype in levels.items():
        for norms in (None, True, False, "True", "False"):
            for scale in (None, "1.0", 128.0, "dynamic"):
                if (level == "O1" and norms is not None) or (level == "O3" and scale in (128.0, "dynamic")):
                    continue
                model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with initialized(model, optimizer, opt_level=level, keep_batchnorm_fp32=norms, loss_scale=scale):
                    kept = {None: level != "O3", True: True, "True": True, False: False, "False": False}[norms]
                    assert model[0].weight.dtype == dtype
                    assert model[1].weight.dtype == (torch.float32 if kept else dtype), (level, norms)
    for level in ("O2", "O3"):
        model, optimizer = whole()
        with initialized(model, optimizer, opt_level=level, cast_model_type=torch.bfloat16):
            assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    model, optimizer = whole()
    with initialized(model, optimizer, opt_level="O3", master_weights=True, loss_scale="dynamic"):
        assert {master.dtype for master in amp.master_params(optimizer)} == {torch.float32}
    model, optimizer = whole()
    with initialized(model, optimizer, opt_level="O1", patch_torch_functions=False):
        assert model(torch.ones(1, 8)).dtype == torch.float32
        assert scales() == [2.0**16]
    for level in levels:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            model, optimizer = whole()
            with initialized(model, optimizer, opt_level=level, cast_model_outputs=dtype):
                assert model(torch.ones(1, 8)).dtype == dtype, level


def test_a_second_initialize_is_refused_and_the_first_goes_on():
    model, optimizer = whole()
    with initialized(model, optimizer, opt_level="O2"):
        other, second = whole()
        with pytest.raises(mezzo.StateError, match="amp is initialised already") as raised:
            amp.initialize(other, second)
        assert "amp.initialize([model, other], [optimizer, another], …)" in str(raised.value)
        assert next(other.parameters()).dtype == torch.float32
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    with initialized(other, second, opt_level="O1"):
        pass
    with initialized(other, second, enabled=False):
        amp.initialize(other, second, opt_level="O2")  # nothing was there to be undone


def test_half_precision_models():
    for level in ("O0", "O1", "O2", "O3"):
        model = perceptron().half()
        refused(
            mezzo.PolicyError, "half-precision parameters", says=["0.weight (float16)", "without .half()"],
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level,
        )  # fmt: skip


def test_wrapped_models(alone):
    model = perceptron()
    wrapped = nn.DataParallel(model)
    given = {"models": wrapped, "optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}
    refused(mezzo.StateError, "wrapped in DataParallel already", says=["one process for each device"], **given)
    says = ["then DataParallel(model)"]
    refused(mezzo.StateError, "wrapped in DataParallel already", says=says, opt_level="O2", **given)
    wrapped = nn.parallel.DistributedDataParallel(model)
    given["models"] = wrapped
    says = ["then DistributedDataParallel(model)"]
    for level in ("O2", "O3"):
        refused(mezzo.StateError, "wrapped in DistributedDataParallel", says=says, opt_level=level, **given)
    with initialized(wrapped, given["optimizers"], opt_level="O1") as (wrapped, optimizer):
        with amp.scale_loss(wrapped(torch.ones(2, 8)).float().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def test_what_is_no_model_or_optimizer():
    model, optimizer = whole()
    refused(mezzo.PolicyError, "takes Modules", models=[model, "model"])
    refused(mezzo.PolicyError, "takes Optimizers", optimizers=[optimizer, model])
    half = perceptron().half()
    masters = amp.FP16_Optimizer(torch.optim.SGD(half.parameters(), lr=0.1))
    refused(mezzo.PolicyError, "takes Optimizers", says=["as torch or mezzo made it"], optimizers=masters)
    masters.close()
    with pytest.raises(mezzo.PolicyError, match="takes Modules"):
        amp.initialize(None)


def test_scale_loss_in_the_wrong_place():
    model, optimizer = whole()
    stranger = whole()[1]
    before = pytest.raises(mezzo.StateError, match=r"amp\.scale_loss before amp\.initialize")
    with before, amp.scale_loss(torch.ones(()), optimizer):
        pass
    with initialized(model, optimizer, opt_level="O1"):
        cases = (
            (
                mezzo.PolicyError,
                r"not an optimizer(.|\n)*were given to amp\.initialize",
                (torch.ones(()), stranger),
                {},
            ),
            (mezzo.PolicyError, r"not an optimizer of this session\n  where  str", (torch.ones(()), "SGD"), {}),
            (mezzo.PolicyError, r"not an optimizer of this session\n  where  NoneType", (torch.ones(()), None), {}),
            (
                mezzo.PolicyError,
                r"there is no loss 1(.|\n)*write  amp\.initialize\(…, num_losses=2\)",
                (torch.ones(()), optimizer),
                {"loss_id": 1},
            ),
            (mezzo.PolicyError, "the loss is a float", (1.0, optimizer), {}),
            (mezzo.PolicyError, "the loss is torch.int64", (torch.ones((), dtype=torch.int64), optimizer), {}),
        )
        for error, words, args, options in cases:
            with pytest.raises(error, match=words), amp.scale_loss(*args, **options):
                pass
        with amp.scale_loss(loss_of(model, 0), optimizer):
            pass  # without a backward pass nothing is unscaled
        assert scales() == [2.0**16]


def test_scale_loss_without_with():
    model, optimizer = whole()
    with initialized(model, optimizer, opt_level="O1"):
        block = amp.scale_loss(loss_of(model, 0), optimizer)
        for use in (lambda: block.backward(), lambda: block.item(), lambda: block / 2):
            with pytest.raises((mezzo.StateError, TypeError)) as raised:
                use()
        with pytest.raises(mezzo.StateError) as raised:
            block.backward()
        assert str(raised.value).splitlines() == [
            "amp.scale_loss is called without with",
            "  where  .backward",
            "  write  with amp.scale_loss(loss, optimizer) as scaled_loss:",
            "             scaled_loss.backward()",
        ]
        assert not hasattr(block, "no_attribute")
        with block as scaled:  # it is as good as ever
            scaled.backward()
        optimizer.step()


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, mezzo.optim.SGD])
def test_a_copy_of_a_model_whose_weights_have_masters(optimizer_of, caplog):
    model = perceptron()
    optimizer, averaged = optimizer_of(model.parameters(), lr=0.1), torch.optim.swa_utils.AveragedModel(model)
    with initialized(model, optimizer, opt_level="O2"):
        copied = copy.deepcopy(model)
        advice = caplog.messages[-1].partition("averaged.update_parameters(")[2].removesuffix(")")
        assert "write  AveragedModel(model) before amp.initialize(model, …), and after each step" in caplog.text
        averaged.update_parameters(eval(advice, {"nn": nn, "amp": amp, "optimizer": optimizer}))
    assert all(map(torch.equal, averaged.module.parameters(), model.parameters()))
    assert {param.dtype for param in copied.parameters()} == {torch.float16}
    refused(mezzo.PolicyError, "half-precision parameters", says=["model.float() first"], models=copied)


def test_backward_outside_scale_loss():
    for level in ("O0", "O1", "O2"):
        model, optimizer = whole()
        with initialized(model, optimizer, opt_level=level):
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.step()  # without gradients: nothing, as ever
            loss_of(model, 0).backward()
            with pytest.raises(mezzo.StateError, match="whose loss was not scaled") as raised:
                optimizer.step()
            assert "with amp.scale_loss(loss, optimizer) as scaled_loss:" in str(raised.value)
            assert all(map(torch.equal, before, model.parameters()))
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            if level != "O2":  # where the step has used the gradients up, and there are none
                with pytest.raises(mezzo.StateError, match="whose loss was not scaled"):
                    optimizer.step()


def test_an_optimizer_whose_loss_was_scaled_for_others_only():
    models = [perceptron(), perceptron()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with initialized(models, optimizers, opt_level="O1"):
        x = torch.randn(4, 8)
        with amp.scale_loss((models[0](x) + models[1](x)).float().mean(), optimizers[0]) as scaled:
            scaled.backward()
        optimizers[0].step()
        with pytest.raises(mezzo.StateError, match="for which no loss was scaled") as raised:
            optimizers[1].step()
        assert "with all optimizers whose parameters the loss trains" in str(raised.value)


def test_an_error_inside_the_block_is_the_users_own():
    model, optimizer = whole()
    with initialized(model, optimizer, opt_level="O1"):
        with contextlib.suppress(ZeroDivisionError), amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
            raise ZeroDivisionError
        assert torch.is_autocast_enabled("cpu")
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert scales() == [2.0**16]
