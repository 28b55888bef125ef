"""What older call styles refuse, with what to write instead: one table. Whatever is raised, nothing was changed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import mezzo
from mezzo import PolicyError, StateError, UnsupportedError
from mezzo.compat import fleet, paddle
from mezzo.compat.apex import amp
from mezzo.compat.paddle.regions import rules
from mezzo.compat.torch import GradScaler, autocast

from ..support.refusals import refused

pytestmark = pytest.mark.usefixtures("emulating")


class Given:
    """A model, its optimizer and a scaler that has scaled a loss."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.other = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.stranger = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.scaler, self.paddles = GradScaler("cpu", init_scale=4.0), paddle.GradScaler(init_loss_scaling=4.0)
        self.backward(self.scaler)

    def loss(self):
        return self.model(torch.ones(3, 4)).square().mean()

    def backward(self, scaler):
        self.optimizer.zero_grad()
        scaler.scale(self.loss()).backward()

    def initialize(self, **options):
        return amp.initialize(self.model, self.optimizer, verbosity=0, **options)

    def decorate(self, **given):
        return paddle.decorate(**{"models": self.model, "optimizers": self.optimizer, "level": "O2"} | given)

    def at_o1(self):
        self.initialize(opt_level="O1")


class After:
    """What is refused, after something that is not."""

    def __init__(self, begin, use):
        self.begin, self.use = begin, use

    def __call__(self, given):
        self.use(given)


def at_o1(use):
    return After(Given.at_o1, use)


def twice(call):
    return lambda g: getattr(g.scaler, call)(g.optimizer) or getattr(g.scaler, call)(g.optimizer)


def never_scaled(call):
    return lambda g: getattr(GradScaler("cpu"), call)(*([] if call == "update" else [g.optimizer]))


def without_gradient(call):
    return lambda g: g.optimizer.zero_grad() or getattr(g.scaler, call)(g.optimizer)


def low(g):
    g.model.half()
    g.scaler.scale(g.model(torch.ones(3, 4).half()).float().mean()).backward()
    g.scaler.step(torch.optim.SGD(g.model.parameters(), lr=0.1))


def loaded(change, of="scaler"):
    return lambda g: getattr(g, of).load_state_dict(change(getattr(g, of).state_dict()))


def scaled_for(*args, **options):
    def use(g):
        with amp.scale_loss(*(arg(g) for arg in args), **options):
            pass

    return use


TORCH = [
    (twice("step"), StateError, ["step() was called already since the last update()\n  where  SGD"]),
    (twice("unscale_"), StateError, ["unscale_() was called already since the last update()"]),
    (lambda g: g.scaler.step(g.optimizer) or g.scaler.unscale_(g.optimizer), StateError, ["unscale_() after step()"]),
    (never_scaled("step"), StateError, ["step() before backward(): gradients", "write  scaler.scale(loss).backward()"]),
    (never_scaled("unscale_"), StateError, ["unscale_() before backward()"]),
    (never_scaled("update"), StateError, ["update() has nothing to go by"]),
    (lambda g: g.scaler.update(), StateError, ["update() has nothing to go by"]),
    (without_gradient("step"), StateError, ["step() before backward()\n  where  SGD"]),
    (without_gradient("step"), AssertionError, ["write  scaler.scale(loss).backward()"]),
    (never_scaled("unscale_"), AssertionError, ["unscale_() before backward()"]),
    (lambda g: g.scaler.update(), AssertionError, ["update() has nothing to go by"]),
    (lambda g: g.scaler.step(g.model), PolicyError, ["must be a torch.optim.Optimizer, not Linear"]),
    (lambda g: g.scaler.unscale_([g.optimizer]), PolicyError, ["not list", "for one after the other"]),
    (lambda g: g.scaler.step(g.model, lambda: pytest.fail("evaluated")), PolicyError, ["not Linear"]),
    (low, UnsupportedError, ["fp16 gradients cannot be unscaled in fp16", "(float16 [2, 4]) and 1 more"]),
    (lambda g: g.scaler.scale("loss"), PolicyError, ["scale() takes tensors, not str"]),
    (lambda g: g.scaler.scale([3.0]), PolicyError, ["scale() takes tensors, not float"]),
    (lambda g: g.scaler.update("2"), PolicyError, ["'2'"]),
    (lambda g: g.scaler.update(0.0), PolicyError, ["0"]),
    (lambda g: g.scaler.update(-1.0), PolicyError, ["-1"]),
    (lambda g: g.scaler.set_growth_factor(0.5), PolicyError, ["growth_factor is 0.5"]),
    (lambda g: g.scaler.set_backoff_factor(2.0), PolicyError, ["backoff_factor is 2.0"]),
    (lambda g: g.scaler.set_growth_interval(0), PolicyError, ["growth_interval is 0"]),
    (loaded(lambda s: {}), StateError, ["  where  it is empty, as a disabled GradScaler's is"]),
    (loaded(lambda s: {"scale": 1.0}), StateError, ["it lacks growth_factor, backoff_factor"]),
    (loaded(lambda s: [1]), StateError, ["this is not the state of a GradScaler"]),
    (loaded(lambda s: s | {"scale": "x"}), StateError, ["scale is 'x', not a positive"]),
    (loaded(lambda s: s | {"growth_factor": 0.1}), PolicyError, ["growth_factor is 0.1"]),
    (lambda g: g.scaler.unscale_(g.optimizer) or copy.copy(g.scaler), StateError, ["in the middle of an iteration"]),
    (lambda g: GradScaler("cpu", growth_factor=1.0), PolicyError, ["growth_factor is 1.0\n  where  GradScaler"]),
    (lambda g: GradScaler("cpu", backoff_factor=1.5), PolicyError, ["backoff_factor is 1.5"]),
    (lambda g: GradScaler("cpu", init_scale=0.0), PolicyError, ["init_scale is 0.0"]),
    (lambda g: GradScaler(2.0**8), PolicyError, ['write  GradScaler("cuda", init_scale=…)']),
    (lambda g: GradScaler("gpu"), PolicyError, ["the device is 'gpu'"]),
    (lambda g: autocast("cpuu"), PolicyError, ["torch has no autocast for device_type 'cpuu'", "did you mean 'cpu'?"]),
    (lambda g: autocast("cpu:0"), PolicyError, ['is one device, not a type\n  write  autocast("cpu", …)']),
    (lambda g: autocast(len), PolicyError, ["a decorator that is not called", '@autocast("cuda")']),
    (lambda g: autocast(torch.float16), PolicyError, ["torch has no autocast for device_type torch.float16"]),
    (lambda g: autocast(None), PolicyError, ["torch has no autocast for device_type None"]),
    (lambda g: autocast("cpu", "float61"), PolicyError, ["dtype is 'float61', not a torch.dtype"]),
]  # fmt: skip


def contradicts(write, **options):
    return lambda g: g.initialize(**options), PolicyError, ["contradict each other", write]


APEX = [
    contradicts("without keep_batchnorm_fp32", opt_level="O1", keep_batchnorm_fp32=True),
    contradicts("without master_weights", opt_level="O1", master_weights=True),
    contradicts("without master_weights", opt_level="O1", master_weights=False),
    contradicts('opt_level="O2", cast_model_type=', opt_level="O1", cast_model_type=torch.float16),
    contradicts('opt_level="O3"', opt_level="O0", cast_model_type=torch.float16),
    contradicts('opt_level="O0"', opt_level="O2", cast_model_type=torch.float32),
    contradicts('opt_level="O1"', opt_level="O0", patch_torch_functions=True),
    contradicts('opt_level="O1"', opt_level="O2", patch_torch_functions=True),
    contradicts('opt_level="O2"', opt_level="O0", master_weights=True),
    (lambda g: g.initialize(keep_batchnorm_fp32="True", master_weights=True), PolicyError, ["2 problems"]),
    (lambda g: g.initialize(opt_level="O2", master_weights="no"), PolicyError, ["master_weights is 'no'"]),
    (lambda g: g.initialize(opt_level="O2", master_weights=False), PolicyError,
     ["fp16 gradients cannot be unscaled in fp16", "the text O2,dtype=float16", "the text loss_scale=1"]),
    (lambda g: g.initialize(opt_level="O4"), PolicyError, ["unknown opt_level 'O4'", '"O1,dtype=bfloat16"']),
    (lambda g: g.initialize(opt_level=1), PolicyError, ["unknown opt_level 1"]),
    (lambda g: g.initialize(opt_level="O2", keep_batchnorm_fp32="yes"), PolicyError, ["keep_batchnorm_fp32 is 'yes'"]),
    (lambda g: g.initialize(loss_scale="much"), PolicyError, ["loss_scale is 'much'", '"128.0"']),
    (lambda g: g.initialize(loss_scale=True), PolicyError, ["loss_scale is True"]),
    (lambda g: g.initialize(patch_torch_functions="True"), PolicyError, ["patch_torch_functions is 'True'"]),
    (lambda g: g.initialize(enabled="False"), PolicyError, ["enabled is 'False'"]),
    (lambda g: g.initialize(cast_model_outputs="int4"), PolicyError, ["cast_model_outputs is 'int4'"]),
    (lambda g: g.initialize(min_loss_scale=-1.0), PolicyError, ["floor"]),
    (lambda g: g.initialize(min_loss_scale=2.0**10, max_loss_scale=2.0**8), PolicyError, ["ceiling"]),
    (at_o1(lambda g: amp.initialize(g.other, g.stranger)), StateError,
     ["amp is initialised already", "amp.initialize([model, other], [optimizer, another], …)"]),
    (lambda g: amp.initialize([g.model, "model"], g.optimizer), PolicyError, ["takes Modules", "'model'"]),
    (lambda g: amp.initialize(g.model, [g.optimizer, g.model]), PolicyError, ["takes Optimizers"]),
    (lambda g: amp.initialize(None), PolicyError, ["takes Modules"]),
    (lambda g: amp.initialize(g.model, g.stranger), PolicyError, ["parameters that are not the models'"]),
    (scaled_for(Given.loss, lambda g: g.optimizer), StateError, ["amp.scale_loss before amp.initialize"]),
    (lambda g: amp.state_dict(), StateError, ["amp.state_dict before amp.initialize"]),
    (lambda g: amp.load_state_dict({}), StateError, ["amp.load_state_dict before amp.initialize"]),
    (at_o1(scaled_for(Given.loss, lambda g: g.stranger)), PolicyError, ["that amp.initialize was not"]),
    (at_o1(scaled_for(Given.loss, lambda g: None)), PolicyError, ["where  NoneType"]),
    (at_o1(lambda g: amp.load_state_dict({"scale": 1.0})), StateError, ["no state of amp", "keys are 'scale'"]),
    (at_o1(lambda g: amp.load_state_dict([1])), StateError, ["this is no state of amp"]),
    (at_o1(lambda g: amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0}})), StateError,
     ["loss_scaler0 has a loss_scale and a count, unskipped"]),
    (lambda g: amp.register_half_function(torch, "softmaxx"), PolicyError, ["no function 'softmaxx'", "'softmax'"]),
    (at_o1(lambda g: amp.register_float_function(torch, "softmax")), StateError,
     ["amp.register_float_function after amp.initialize"]),
]  # fmt: skip


def damaged(**changed):
    return loaded(lambda s: s | changed, "paddles")


def in_fp16(g):
    g.model.half()
    g.optimizer.zero_grad()
    g.paddles.scale(g.model(torch.ones(3, 4).half()).float().sum()).backward()


PADDLE = [
    (lambda g: paddle.GradScaler(incr_ratio=1.0), PolicyError, ["incr_ratio is 1.0"]),
    (lambda g: paddle.GradScaler(decr_ratio=1.0), PolicyError, ["decr_ratio is 1.0", "decr_ratio=0.5"]),
    (lambda g: paddle.GradScaler(init_loss_scaling=0), PolicyError, ["init_loss_scaling is 0"]),
    (lambda g: paddle.GradScaler(init_loss_scaling=0.5), PolicyError, ["lets no scale go below 1"]),
    (lambda g: paddle.GradScaler(init_loss_scaling="big"), PolicyError, ["init_loss_scaling is 'big'"]),
    (lambda g: paddle.GradScaler(incr_every_n_steps=0), PolicyError, ["incr_every_n_steps is 0"]),
    (lambda g: paddle.GradScaler(decr_every_n_nan_or_inf=1.5), PolicyError, ["decr_every_n_nan_or_inf is 1.5"]),
    (lambda g: paddle.GradScaler(enable=1), PolicyError, ["enable is 1"]),
    (lambda g: paddle.GradScaler(use_dynamic_loss_scaling="yes"), PolicyError, ["use_dynamic_loss_scaling is 'yes'"]),
    (lambda g: paddle.GradScaler(None, incr_ratio=0, decr_ratio=3), PolicyError, ["3 problems"]),
    (loaded(lambda s: {}, "paddles"), StateError, ["it is empty, as a disabled GradScaler's is"]),
    (loaded(lambda s: [1], "paddles"), StateError, ["it lacks scale, incr_ratio"]),
    (loaded(lambda s: {"scale": 1.0}, "paddles"), StateError, ["it lacks incr_ratio"]),
    (damaged(scale=np.float32([0.0])), StateError, ["init_loss_scaling is 0"]),
    (damaged(scale=np.float32([1.0, 2.0])), StateError, ["init_loss_scaling is [1.0, 2.0]"]),
    (damaged(incr_ratio=0.5), StateError, ["incr_ratio is 0.5"]),
    (damaged(incr_count=-1), StateError, ["incr_count and decr_count are [-1, 0]"]),
    (damaged(decr_count="x"), StateError, ["are [0, 'x']"]),
    (damaged(use_dynamic_loss_scaling=1), StateError, ["use_dynamic_loss_scaling is 1"]),
    (lambda g: g.paddles.minimize(g.optimizer), StateError, ["step() before backward()"]),
    (After(lambda g: g.backward(g.paddles), lambda g: g.paddles.minimize(g.loss())), PolicyError,
     ["an optimizer must be a torch.optim.Optimizer, not Tensor"]),
    *(
        (After(in_fp16, lambda g, call=call: getattr(g.paddles, call)(g.optimizer)), UnsupportedError,
         ["cannot be unscaled", "write  decorate(models=model, optimizers="])
        for call in ("unscale_", "step", "minimize")
    ),
    (lambda g: g.decorate(level="O0"), PolicyError, ["unknown level 'O0'", "valid: O1, O2"]),
    (lambda g: g.decorate(dtype="float32"), PolicyError, ["unknown dtype 'float32'"]),
    (lambda g: g.decorate(master_weight=1), PolicyError, ["master_weight is 1", "True or False"]),
    (lambda g: g.decorate(master_weight=False), PolicyError, ["without FP32 values are not built", "Policy.O3("]),
    (lambda g: g.decorate(master_grad=None), PolicyError, ["master_grad is None"]),
    (lambda g: g.decorate(save_dtype="float61"), PolicyError, ["unknown save_dtype 'float61'", "valid: float16, "]),
    (lambda g: g.decorate(save_dtype=3), PolicyError, ["unknown save_dtype 3"]),
    (lambda g: g.decorate(excluded_layers=["conv"]), PolicyError, ["excluded_layers has 'conv'", "a module of the"]),
    (lambda g: g.decorate(excluded_layers=int), PolicyError, ["excluded_layers has <class 'int'>"]),
    (lambda g: g.decorate(excluded_layers=nn.Linear(2, 2)), PolicyError, ["a Linear that is in none of the models"]),
    (lambda g: g.decorate(models=None), PolicyError, ["models has to be a torch.nn.Module", "not NoneType"]),
    (lambda g: g.decorate(optimizers=3), PolicyError, ["optimizers has to be a torch.optim.Optimizer", "not int"]),
    (lambda g: g.decorate(models=[g.model, 3], level="x", dtype="y", save_dtype="z"), PolicyError, ["4 problems"]),
    (After(Given.decorate, lambda g: paddle.decorate(g.model, level="O2")), StateError, ["prepared already"]),
    (lambda g: paddle.auto_cast(level="O4"), PolicyError, ["unknown level 'O4'", "O1, O2, OD, O0", 'level="O1"']),
    (lambda g: paddle.auto_cast(level=1), PolicyError, ["unknown level 1"]),
    (lambda g: paddle.auto_cast(dtype="float61"), PolicyError, ["unknown dtype 'float61'", "did you mean 'float16'"]),
    (lambda g: paddle.auto_cast(dtype=torch.float32), PolicyError, ["unknown dtype torch.float32"]),
    (lambda g: paddle.auto_cast(dtype=None), PolicyError, ["unknown dtype None"]),
    (lambda g: paddle.auto_cast(enable="yes"), PolicyError, ["enable is 'yes'", "True or False"]),
    (lambda g: paddle.auto_cast(use_promote=None), PolicyError, ["use_promote is None"]),
    (lambda g: paddle.auto_cast(custom_white_list="softmax"), PolicyError, ["'softmax', not a list of names"]),
    (lambda g: paddle.auto_cast(custom_black_list=["sofmax"]), PolicyError, ["'sofmax'", "did you mean 'softmax'"]),
    (lambda g: paddle.auto_cast(level="O4", dtype="x", custom_white_list=3, enable=1), PolicyError, ["4 problems"]),
]  # fmt: skip


def listed(words, white=None, black=None):
    def use(_):
        rules(["conv2d"], ["exp"], "promote", custom_white_list=white, custom_black_list=black)

    return use, PolicyError, words


def configured(words, *args, **configs):
    return lambda g: fleet.policy(*args or (configs,)), PolicyError, words


def unnamed(g):
    mezzo.MixedPrecision(g.model, g.optimizer, fleet.policy({"custom_black_varnames": ["linear_0.w_0"]}))


FLEET = [
    configured(["unknown key 'init_loss_scale' in amp_configs", "'init_loss_scaling'?"], init_loss_scale=1),
    configured(["unknown key 'level'", '"use_pure_fp16": True is Fleet\'s O2'], level="O2"),
    configured(["unknown key 'dtype'", '"use_pure_bf16": True'], dtype="bfloat16"),
    configured(["unknown key 3"], {3: 1}),
    configured(["init_loss_scaling is 0"], init_loss_scaling=0),
    configured(["init_loss_scaling is '1024'"], init_loss_scaling="1024"),
    configured(["incr_every_n_steps is 1.5", "incr_every_n_steps=2000"], incr_every_n_steps=1.5),
    configured(["incr_ratio is 0.5"], incr_ratio=0.5),
    configured(["decr_ratio is 2", "decr_ratio=0.5"], decr_ratio=2),
    configured(["decr_every_n_nan_or_inf is 0"], decr_every_n_nan_or_inf=0),
    configured(["use_dynamic_loss_scaling is 'yes'", "True or False"], use_dynamic_loss_scaling="yes"),
    configured(["custom_white_list: unknown op 'gleu'", "did you mean 'glu'? neither"], custom_white_list=["gleu"]),
    configured(["'exp' is in both lists"], custom_white_list=["exp"], custom_black_list=["exp"]),
    configured(["custom_black_varnames=['head']"], custom_black_varnames="head"),
    configured(["must match something"], custom_black_varnames=[""]),
    configured(["both True"], use_pure_fp16=True, use_pure_bf16=True),
    configured(["use_fp16_guard has no meaning here", "amp.autocast()"], use_pure_fp16=True, use_fp16_guard=True),
    configured(["use_optimizer_fp16 has no meaning here", 'state_dtype="bfloat16"'], use_optimizer_fp16=True),
    configured(["3 problems"], decr_ratio=2, incr_ratio=0, levl=1),
    configured(["not a mapping"], [("init_loss_scaling", 1)]),
    configured(["amp_configs is 'O1', not a mapping"], "O1"),
    (unnamed, PolicyError, ["linear_0.w_0"]),
    listed(
        [
            "'gelu' is in both lists",
            'policy.low("gelu"), the text low=gelu; or policy.fp32("gelu"), the text fp32=gelu',
        ],
        ["gelu", "exp"],
        ["gelu"],
    ),
    listed(["'fc' in custom_black_list is the same op of torch's, linear"], ["mul"], ["fc"]),
    listed(["3 problems", "unknown op 'c1'"], ["a1", "b1"], ["c1"]),
]  # fmt: skip


def refuse(use, error, words, given, *, parts):
    """Do what is refused; say which row it was if it is not, or is otherwise."""
    if isinstance(use, After):
        use.begin(given)
    try:
        with refused(error, *words, parts=parts):
            use(given)
    except (AssertionError, pytest.fail.Exception) as wrong:
        raise AssertionError(f"{error.__name__} {words}: {wrong}") from wrong


def test_a_scaler_that_refuses_goes_on():
    for use, error, words in TORCH:
        given = Given()
        before = given.scaler.state_dict()
        refuse(use, error, words, given, parts=())
        assert given.scaler.state_dict() == before, words
        given.scaler.load_state_dict(before)  # another iteration
        given.model.float()
        given.backward(given.scaler)
        given.scaler.step(given.optimizer)
        given.scaler.update()
        assert not given.scaler.last_step.skipped, words
        assert given.scaler.state_dict() == before | {"_growth_tracker": 1}, words


@pytest.mark.parametrize("table", ["APEX", "PADDLE", "FLEET"])
def test_what_is_refused_changes_nothing(table):
    for use, error, words in globals()[table]:
        given = Given()
        given.optimizer.zero_grad()
        states = given.scaler.state_dict(), given.paddles.state_dict()
        refuse(use, error, words, given, parts=(given.model, given.optimizer, given.other, given.stranger))
        amp.deinitialize()
        assert (given.scaler.state_dict(), given.paddles.state_dict()) == states, words
        assert not torch.is_autocast_enabled("cpu")
        assert torch.overrides._get_current_function_mode_stack() == []
