"""Whose calls drive a session: the same sequences in each style, against the same oracle."""

import contextlib
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch

import mezzo
from mezzo.compat import apex
from mezzo.compat.apex import frontend
from mezzo.session.grad_scaler import SessionScaler

from .oracle import Contract

#: What a style may lack; a rule that needs it is not drawn.
ABILITIES = {
    "all at once": "A call may name no optimizer, and is for all of them then.",
    "one at a time": "A pass may be for one optimizer, and leave the gradients of others alone.",
    "clipping": "There is a norm to clip to, for the session.",
    "grad": "``amp.grad`` may differentiate what the model returns.",
    "wants gradients": "A call for an optimizer without gradients is refused.",
    "session": "A session refuses what would mix gradients, counts steps, ends and saves weights.",
    "reading anew": "A weight that is written inside of a region is read anew; torch's regions keep its cast.",
    "freezing": "``requires_grad`` may change between two passes.",
    "broken passes": "A backward pass may end in an exception, and the loop goes on.",
    "closing": "A session may end, and another begin over the same model.",
    "swapping": "A weight may lie in memory of another dtype for a while.",
    "nested": "A pass may run others, through the model too.",
    "others": "Leaves that no optimizer of the session has get no scale.",
    "plain passes": "Whatever pass a program runs is the session's.",
    "autograd": "``torch.autograd`` may be called.",
    "made": "What a program writes into ``.grad`` has no scale; a scaler divides it.",
    "outputs": "A pass may reach some of the weights alone.",
    "signals": "Ctrl-C may come at any line.",
    "structure": "Parameters may be replaced and moved, and optimizers' groups written by hand.",
    "steady": "Nobody binds another ``step`` while an optimizer steps.",
    "adding": "An optimizer may be added later.",
    "beside": "Another model of the session may share a weight with the first.",
}


class Driver(Protocol):
    """A loop in one style, as the machine calls it.

    Attributes:
        model: What is called in the place of the model.
        amp: The session, or what answers for it.
        contract: What the style promises otherwise than the five lines do.
        lacks: Of :data:`ABILITIES`.
        net: What makes the model; ``None`` for the one that all others share.
    """

    model: Any
    amp: Any
    contract: ClassVar[Contract]
    lacks: ClassVar[frozenset[str]]
    net: ClassVar[Any]

    # The user's calls
    def region(self): ...  # entered around the model
    def backward(self, loss, optimizers): ...
    def unscale_(self, optimizers): ...
    def step(self, optimizers): ...  # returns a Step
    def train(self, *batch): ...  # a whole step in one call; ``None`` where that is for the loop to write
    def state_dict(self): ...
    def load_state_dict(self, state): ...
    def close(self): ...

    # What is so in this style
    @classmethod
    def suited(cls, config): ...  # the nearest row of the table that it has arguments for
    def scale(self, config): ...  # the loss scale by the book, before the first step
    def shares(self, batch): ...  # what each rank computes of a batch, and which of them this one is
    def groups(self, oracle, chosen, reached): ...  # the groups whose windows a pass opens
    def may_add(self, oracle): ...  # whether a pass may begin, whatever gradients there are
    def updated(self, oracle): ...  # what an update does besides
    def trained(self, oracle): ...  # what a whole step in one call leaves
    def forget(self, oracle): ...  # what clearing all gradients does to windows
    def taken(self): ...  # another after each step


class FiveLines:
    """A session by its own calls; what others do as it does, they inherit."""

    contract = Contract()
    lacks = frozenset({"adding"})
    train = None
    net = None

    def __init__(self, model, optimizers, config):
        self.model, self.optimizers = model, optimizers
        options = {"max_grad_norm": config.clip} if self.has("clipping") else {}
        self.amp = self.begin(model, config, on_overflow=config.on_overflow, **options)

    @classmethod
    def has(cls, ability):
        assert ability in ABILITIES
        return ability not in cls.lacks

    @classmethod
    def suited(cls, config):
        return config if cls.has("clipping") else replace(config, clip=None)

    def begin(self, model, config, **options):
        return mezzo.MixedPrecision([model, *model.beside], self.optimizers, config.policy, **options)

    def close(self):
        self.amp.close()

    def region(self):
        return self.amp.autocast()

    def paused(self):
        """Around a pass whose gradients are not exchanged yet."""
        return self.amp.no_sync()

    def backward(self, loss, optimizers):
        self.amp.backward(loss, optimizers)

    def shares(self, batch):
        return [batch], 0

    def groups(self, oracle, chosen, reached):
        return chosen

    def unscale_(self, optimizers):
        self.amp.unscale_(optimizers)

    def step(self, optimizers):
        return self.amp.step(optimizers)

    def scale(self, config):
        return config.start()

    def taken(self):
        return self.amp.stats().steps

    def may_add(self, oracle):
        return True

    def updated(self, oracle):
        """Nothing."""

    def forget(self, oracle):
        oracle.zero_grad()

    def state_dict(self):
        return self.amp.state_dict()

    def load_state_dict(self, state):
        self.amp.load_state_dict(state)


class Attach(FiveLines):
    """A loop of plain PyTorch's calls; ``unscale_`` has nothing to do."""

    contract = Contract(is_plain=True)
    lacks = frozenset({"all at once"})

    def begin(self, model, config, **options):
        return mezzo.attach([model, *model.beside], self.optimizers, config.policy, **options)

    def region(self):
        return contextlib.nullcontext()

    def backward(self, loss, optimizers):
        loss.backward()

    def groups(self, oracle, chosen, reached):
        return reached_groups(oracle, reached)

    def step(self, optimizers):
        optimizers.step()
        return self.amp.last_step


def reached_groups(oracle, names):
    """The groups whose weights a loss depends on."""
    return [group for group in oracle.groups if not names.isdisjoint(group.members)]


class Scaler(FiveLines):
    """What frameworks are handed for a ``GradScaler``, over a session."""

    contract = Contract(waits=True)
    lacks = frozenset({"all at once", "made", "wants gradients", "adding"})

    def begin(self, model, config, **options):
        amp = super().begin(model, config, **options)
        self.scaler = SessionScaler(amp)
        return amp

    def backward(self, loss, optimizers):
        self.scaler.scale(loss).backward()

    def groups(self, oracle, chosen, reached):
        return reached_groups(oracle, reached)

    def unscale_(self, optimizers):
        self.scaler.unscale_(optimizers)

    def step(self, optimizers):
        self.scaler.step(optimizers)
        return self.scaler.last_step

    def update(self):
        self.scaler.update()

    def state_dict(self):
        return self.scaler.state_dict()

    def load_state_dict(self, state):
        self.scaler.load_state_dict(state)


class Apex(Attach):
    """``initialize`` and ``scale_loss``; the session itself is looked at, and never called."""

    lacks = Attach.lacks | {"clipping", "plain passes", "adding", "beside"}

    @classmethod
    def suited(cls, config):
        scale = {"": "dynamic" if config.level in ("O1", "O2") else "none"}.get(config.scale, config.scale)
        if scale.startswith("dynamic(init=256"):
            scale = "dynamic(init=256,ceiling=256)"
        elif scale.startswith("dynamic"):
            scale = "dynamic"
        dtype = "float16" if config.level == "O1" else config.dtype
        if config.level == "O3" and dtype == "float16":
            scale = "none"
        return replace(config, clip=None, on_overflow="skip", pinned=False, dtype=dtype, scale=scale)

    def begin(self, model, config, **_):
        apex.deinitialize()
        options = {
            "loss_scale": "dynamic" if config.scale.startswith("dynamic") else {"none": 1.0, "64": "64"}[config.scale]
        }
        if "ceiling" in config.scale:
            options["max_loss_scale"] = 256.0
        if config.given in ("O2", "O3"):
            options["cast_model_type"] = getattr(torch, config.dtype)
        apex.initialize(model, self.optimizers, opt_level=config.given, verbosity=0, **options)
        return frontend._AMP.session

    def close(self):
        apex.deinitialize()

    def backward(self, loss, optimizers):
        with apex.scale_loss(loss, self.optimizers) as scaled:
            scaled.backward()

    def state_dict(self):
        return dict(apex.state_dict())

    def load_state_dict(self, state):
        apex.load_state_dict(state)


DRIVERS = {"five lines": FiveLines, "attach": Attach, "SessionScaler": Scaler, "apex": Apex}
