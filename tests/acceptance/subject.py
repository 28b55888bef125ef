"""The session under test, built and read through what users call, and nothing else."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import mezzo
from mezzo.session.attach import attached_now
from mezzo.step.moments import decode

from .drivers import DRIVERS
from .oracle import Group, Oracle, Scale, Weight
from .rules import BETA1, BETA2, DECAY, EPS, LR, MOMENTUM

LOW = ("float16", "bfloat16")
NAMES = ("first.weight", "second.weight", "late.weight")
#: What mezzo's optimizers take to be worth kernels in C++ on a CPU, and a little more.
WIDE = 1 + (1 << 15)
STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
STATES["Lion"] = ("exp_avg",)


#: What torch's passes go through.
DOOR = torch.autograd._engine_run_backward
#: Turns rows by some angle; no number here has a short binary fraction.
TURN = [[0.8, 0.6], [-0.6, 0.8]]
#: How many calls a model has counted when it is made: beyond what 16 bits count.
BEFORE = 2.0**12 + 1


class Net(nn.Module):
    """Three layers side by side; the last is trained only once an optimizer is given it.

    A call may give out one output instead, and another that depends on it.
    """

    #: Other models of its session.
    beside = ()

    def __init__(self, shapes):
        super().__init__()
        for name, (rows, columns) in shapes.items():
            self.add_module(name.partition(".")[0], nn.Linear(columns, rows, bias=False))
        self.calls = 0
        self.register_buffer("seen", torch.tensor(BEFORE))

    def forward(self, x, *, chained=False):
        self.calls += 1
        self.seen += 1  # which no 16-bit format counts on from there
        if chained:
            hidden = self.first(x)
            return hidden, hidden * 1.0
        return {name: self.get_submodule(name.partition(".")[0])(x) for name in NAMES}

    def features(self, x):
        """What a call computes, by another name."""
        return Net.forward(self, x)

    @torch.no_grad()
    def predict(self, x):
        """What ends in numpy, as an agent's action does."""
        return {name: self.get_submodule(name.partition(".")[0])(x).numpy() for name in NAMES}

    @torch.no_grad()
    def project(self, name):
        """Write a weight that is made of itself: a product that keeps lengths."""
        weight = self.get_parameter(name)
        weight.copy_(weight @ torch.tensor(TURN, dtype=weight.dtype))

    def fuse(self, *inputs):
        """Assign a weight that is computed from others."""
        turn = inputs[0] if inputs else torch.tensor(TURN, dtype=self.first.weight.dtype)
        self.first.weight = nn.Parameter(self.first.weight @ turn, requires_grad=self.first.weight.requires_grad)


class Other(nn.Module):
    """A model that reads a weight of another one, in a module of the same name; no rule is for one model alone."""

    def __init__(self, net):
        super().__init__()
        for name in NAMES:
            self.add_module(name.partition(".")[0], nn.Linear(2, 1, bias=False))
        self.second.weight = net.second.weight

    def forward(self, x):
        return self.second(x)


class BoomError(Exception):
    """Not one of mezzo's."""


class Fails:
    """An optimizer whose step raises when it is told to: before it writes, with a state begun, or half-way."""

    fails = None

    def step(self, closure=None):
        how, self.fails = self.fails, None
        if how is None:
            return super().step(closure)
        param = next(param for group in self.param_groups for param in group["params"] if param.grad is not None)
        if how == "half-way":
            with torch.no_grad():
                param.mul_(0.5)
        if how == "with a state":
            self.state[param].setdefault(STATES[type(self).__name__.removeprefix("Own")][0], torch.zeros_like(param))
        raise BoomError


class OwnAdamW(Fails, torch.optim.AdamW):
    """AdamW that fails."""


class OwnSGD(Fails, torch.optim.SGD):
    """SGD that fails."""


@dataclass(frozen=True)
class Config:
    """One row of the table: policy × optimizer × options.

    Attributes:
        level, dtype: Of the policy.
        library, rule: ``torch``, ``fused``, ``own`` (a class of the program's over torch's) or ``mezzo``, and the
            optimizer's name.
        state_dtype: Of mezzo's optimizers.
        apart: Whether two optimizers share the layers out.
        pinned: Whether the second layer is kept in FP32.
        scale: The loss scale's text; empty for the level's own.
        clip: ``max_grad_norm``.
        on_overflow: As the session takes it.
        wide: Whether the second layer is large enough for other kernels.
        beside: Whether the session has another model, which shares the second layer's weight.
        products: Of the layers' products. These layers are too small for them, and stay low to the bit; what is
            remembered for them is made, moved, saved and loaded all the same.
        style: Whose calls drive it, of :mod:`.drivers`.
        is_twin: Whether O1 stands in for O2: of :mod:`.twins`.
    """

    level: str = "O2"
    dtype: str = "bfloat16"
    library: str = "mezzo"
    rule: str = "AdamW"
    state_dtype: str = "float32"
    apart: bool = False
    pinned: bool = False
    scale: str = ""
    clip: float | None = None
    on_overflow: str = "skip"
    wide: bool = False
    beside: bool = False
    products: str = ""
    style: str = "five lines"
    is_twin: bool = False

    @property
    def given(self):
        """The level that a session is given."""
        return "O1" if self.is_twin and self.level == "O2" else self.level

    @property
    def shapes(self):
        return {"first.weight": (2, 2), "second.weight": (WIDE if self.wide else 3, 2), "late.weight": (1, 2)}

    @property
    def policy(self):
        if self.level == "O0":
            return "O0" + (f",loss_scale={self.scale}" if self.scale else "")
        text = f"{self.given},dtype={self.dtype}" + (f",loss_scale={self.scale}" if self.scale else "")
        return text + (",fp32_module=second" if self.pinned else "") + self.products

    @property
    def is_promised(self):
        """Whether mezzo takes this combination; tests of what it refuses are elsewhere."""
        half = self.level == "O3" and self.dtype == "float16"
        return not (half and self.scale not in ("", "none", "1"))

    def stored(self, name):
        """The dtype of a parameter, how it is updated, and the dtype of its high half, if it has one."""
        if self.given in ("O0", "O1") or (self.pinned and name == "second.weight"):
            return "float32", "plain", ""
        if self.given == "O2":  # in halves where two dimensions are longer than one
            return "float32", "plain", self.dtype if min(self.shapes[name]) > 1 else ""
        return self.dtype, "plain" if self.library == "mezzo" else "torch", ""

    def computes(self, name):
        """The dtype of a layer's arithmetic."""
        return "float32" if self.level == "O0" or (self.pinned and name == "second.weight") else self.dtype

    def start(self):
        """The loss scale before the first step."""
        scale = self.scale or ("dynamic" if self.dtype == "float16" and self.level in ("O1", "O2") else "none")
        if scale == "none":
            return Scale()
        if not scale.startswith("dynamic"):
            return Scale("constant", float(scale))
        options = dict(pair.split("=") for pair in scale.removeprefix("dynamic").strip("()").split(",") if pair)
        ceiling = float(options.get("ceiling", 2.0**24))
        return Scale("dynamic", float(options.get("init", 2.0**16)), int(options.get("interval", 2000)), ceiling)

    def optimizer(self, params):
        adam = {"betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
        options = {"Lion": {"betas": (BETA1, BETA2), "weight_decay": DECAY}, "AdamW": adam, "Adam": adam}
        options = options.get(self.rule, {"momentum": MOMENTUM, "weight_decay": DECAY})
        if self.library == "mezzo":
            return getattr(mezzo.optim, self.rule)(params, lr=LR, **options, state_dtype=self.state_dtype)
        if (self.library, self.rule) == ("fused", "SGD"):  # fails in a group where only some have momentum already
            params = [{"params": [param]} for param in params]
        library = {"AdamW": OwnAdamW, "SGD": OwnSGD} if self.library == "own" else vars(torch.optim)
        return library[self.rule](params, lr=LR, **options, fused=self.library == "fused" or None)


class Subject:
    """A model, its optimizers, and their session."""

    def __init__(self, config, weights, *, late=None):
        self.config = config
        self.model = (DRIVERS[config.style].net or Net)(config.shapes)
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(torch.from_numpy(weights[name]))
        params = dict(self.model.named_parameters())
        names = [["first.weight", "second.weight"]]
        if config.apart:
            names = [["first.weight"], ["second.weight"]]
        if config.beside:
            self.model.beside = (Other(self.model),)
        self.members = names
        self.optimizers = [config.optimizer([params[name] for name in members]) for members in names]
        self.amp = None
        self.begin(config)
        if late is not None:
            self.add_late(late)

    def begin(self, config):
        if (other := attached_now()) is not None:
            other.detach()  # of an earlier sequence, or of one that goes on in another session
        self.config, self.plain = config, self.marks()
        self.driver = DRIVERS[config.style](self.model, self.optimizers, config)
        self.amp = self.driver.amp

    def marks(self):
        """What a session may bind or hang on: names, classes, hooks, and torch's own door to a pass."""
        facts = {where.__name__: where._engine_run_backward is DOOR for where in (torch.autograd, torch.autograd.graph)}
        holders = [*self.model.named_modules(), *((f"optimizer {n}", o) for n, o in enumerate(self.optimizers))]
        for name, holder in holders:
            kept = vars(holder)
            hooks = {key: len(value) for key, value in kept.items() if "_hooks" in key and value}
            bound = {key for key, value in kept.items() if hasattr(type(holder), key) and is_mezzos(value)}
            facts[name] = type(holder), hooks, bound
        for name, param in self.names.items():
            facts[f"{name} hooks"] = len(param._backward_hooks or ()), len(param._post_accumulate_grad_hooks or ())
        return facts

    def oracle(self):
        """What the promises say of a session just begun, over weights just read."""
        weights = {}
        for name, param in self.model.named_parameters():
            weights[name] = Weight(*self.config.stored(name), self.exact(name), trains=param.requires_grad)
        groups = [Group(list(members), self.config.rule, dict.fromkeys(members, LR)) for members in self.members]
        return Oracle(weights, groups, self.driver.scale(self.config), self.config.clip, self.driver.contract)

    @property
    def names(self):
        return dict(self.model.named_parameters())

    def modules_of(self, name):
        """The modules that have a parameter."""
        name = name.partition(".")[0]
        shared = self.model.beside if name == "second" else ()
        return [getattr(model, name) for model in (self.model, *shared)]

    def layout(self):
        """The names of the parameters in each group of each optimizer."""
        names = {id(param): name for name, param in self.names.items()}
        return [[[names[id(p)] for p in group["params"]] for group in o.param_groups] for o in self.optimizers]

    def add_late(self, number):
        self.optimizers[number].add_param_group({"params": [self.model.late.weight]})
        self.members[number].append("late.weight")

    def param(self, name):
        return dict(self.model.named_parameters())[name]

    # Reading -------------------------------------------------------------------------------------------------

    def owner(self, name):
        return next((o for o, members in zip(self.optimizers, self.members, strict=True) if name in members), None)

    def exact(self, name):
        """The FP32 value, as the model's own state dict has it."""
        return array(self.model.get_submodule(name.partition(".")[0]).state_dict()["weight"])

    def states(self, name):
        """The moments there are, and the count of updates, None where nobody counts."""
        if (optimizer := self.owner(name)) is None:
            return {}, None
        state = optimizer.state.get(self.param(name), {})
        moments = {
            key: array(state[key] if in_codes is None else decode(in_codes, state[f"{key}_scale"]))
            for key in STATES[self.config.rule]
            for in_codes in [state.get(f"{key}_codes")]
            if state.get(key) is not None or in_codes is not None
        }
        return moments, int(state["step"]) if "step" in state else None

    def bits(self):
        """All that a refused call must leave, to the bit: not what a forward pass counts. Looking changes nothing."""
        seen, saved = [], self.model.state_dict()
        for name, param in self.model.named_parameters():
            tensors = [param, param.grad, saved[name]]
            if (optimizer := self.owner(name)) is not None:
                tensors += dict(optimizer.state.get(param, {})).values()
            seen.append([param.requires_grad, *map(raw, tensors)])
        groups = [
            {k: v for k, v in group.items() if k != "params"} for o in self.optimizers for group in o.param_groups
        ]
        return seen, repr(groups), raw(self.amp.loss_scale), repr(self.driver.taken())

    # Saving ----------------------------------------------------------------------------------------------------

    def save(self):
        states = {"model": self.model.state_dict(), "session": self.driver.state_dict()}
        states["calls"] = self.model.calls
        states |= {str(number): optimizer.state_dict() for number, optimizer in enumerate(self.optimizers)}
        file = io.BytesIO()
        torch.save(states, file)
        return file.getvalue()

    def read(self, saved):
        return torch.load(io.BytesIO(saved), weights_only=True)

    def load(self, saved, order):
        states = self.read(saved)
        parts = [("model", self.model), ("session", self.driver)]
        parts += [(str(number), optimizer) for number, optimizer in enumerate(self.optimizers)]
        for name, part in (parts[number] for number in order if number < len(parts)):
            part.load_state_dict(states[name])
        self.model.calls = states["calls"]


def is_mezzos(call):
    """Whether what is called is code of mezzo's, by whatever name."""
    code = getattr(getattr(call, "__func__", getattr(call, "func", call)), "__code__", None)
    return code is not None and code.co_filename.startswith(str(Path(mezzo.__file__).parent))


def array(tensor):
    return tensor.detach().to(torch.float64, copy=True).numpy()


def raw(tensor):
    """A tensor down to its bits; anything else as it prints."""
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.detach().clone().contiguous().flatten().view(torch.uint8).numpy().tobytes(),
    )


def fresh_weights(config, seed):
    generator = np.random.default_rng(seed)
    return {name: generator.uniform(-2, 2, shape).astype(np.float32) for name, shape in config.shapes.items()}
