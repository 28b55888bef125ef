"""Whose calls drive a session: the same sequences in each style, against the same oracle.

A style that cannot do something says so: a rule that it has no call for is not drawn, and :meth:`FiveLines.suited`
makes a row of the table one that it has arguments for. What it promises otherwise is its :class:`Contract`.
"""

import contextlib
from dataclasses import replace

import torch

import mezzo
from mezzo.compat import apex
from mezzo.compat.apex import frontend
from mezzo.session.attach import attached_now
from mezzo.session.scaler import SessionScaler

from .oracle import Contract


class FiveLines:
    """A session by its own calls.

    Attributes:
        model: What is called in the place of the model.
        amp: The session.
    """

    contract = Contract()
    #: Whether a call may name no optimizer, and is for all of them then.
    names_none = True
    #: Whether there is a norm to clip to, for the session.
    clips = True
    #: Whether ``amp.grad`` may differentiate what the model returns.
    differentiates = True
    #: Whether a step moves a scale that waits for ``update()``.
    updates_by_itself = False
    #: Whether there is a session, which refuses what would mix gradients, counts steps, ends and saves weights.
    is_session = True
    #: Whether a weight that is written inside of a region is read anew; torch's regions keep its cast until their end.
    reads_anew = True

    def __init__(self, model, optimizers, config):
        if (other := attached_now()) is not None:
            other.detach()  # of an earlier sequence, or of one that goes on in another session
        self.model, self.optimizers = model, optimizers
        options = {"max_grad_norm": config.clip} if self.clips else {}
        self.amp = self.begin(model, config, on_overflow=config.on_overflow, **options)

    @classmethod
    def suited(cls, config):
        """The nearest row of the table that this style has arguments for."""
        return config if cls.clips else replace(config, clip=None)

    def begin(self, model, config, **options):
        return mezzo.MixedPrecision(model, self.optimizers, config.policy, **options)

    def close(self):
        self.amp.close()

    def region(self):
        """What the user enters around the model."""
        return self.amp.autocast()

    def backward(self, loss, optimizers):
        self.amp.backward(loss, optimizers)

    def groups(self, oracle, chosen, reached):
        """The groups whose windows a pass opens."""
        return chosen

    def unscale_(self, optimizers):
        self.amp.unscale_(optimizers)

    def step(self, optimizers):
        return self.amp.step(optimizers)

    def scale(self, config):
        """The loss scale by the book, before the first step."""
        return config.start()

    def taken(self):
        """What is another after each step."""
        return self.amp.stats().steps

    def may_add(self, oracle):
        """Whether a pass may begin, by the rules of the style, whatever gradients there are."""
        return True

    def updated(self, oracle):
        """What an update does besides."""

    def forget(self, oracle):
        """What the user's ``zero_grad`` of everything does to windows."""
        oracle.zero_grad()

    def master_params(self):
        return self.amp.master_params()

    def state_dict(self):
        return self.amp.state_dict()

    def load_state_dict(self, state):
        self.amp.load_state_dict(state)


class Attach(FiveLines):
    """A loop of plain PyTorch's calls; ``unscale_`` has nothing to do."""

    contract = Contract(is_plain=True)
    names_none = False

    def begin(self, model, config, **options):
        return mezzo.attach(model, self.optimizers, config.policy, **options)

    def region(self):
        return contextlib.nullcontext()

    def backward(self, loss, optimizers):
        loss.backward()

    def groups(self, oracle, chosen, reached):
        return _reached(oracle, reached)

    def step(self, optimizers):
        optimizers.step()
        return self.amp.last_step


def _reached(oracle, names):
    """The groups whose weights a loss depends on."""
    return [group for group in oracle.groups if not names.isdisjoint(group.members)]


class Scaler(FiveLines):
    """What frameworks are handed for a ``GradScaler``, over a session."""

    contract = Contract(waits=True)
    names_none = False

    def begin(self, model, config, **options):
        amp = super().begin(model, config, **options)
        self.scaler = SessionScaler(amp)
        return amp

    def backward(self, loss, optimizers):
        self.scaler.scale(loss).backward()

    def groups(self, oracle, chosen, reached):
        return _reached(oracle, reached)

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
    """``initialize``, ``scale_loss`` and ``master_params``; the session itself is looked at, and never called."""

    clips = False

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
        if config.level in ("O2", "O3"):
            options["cast_model_type"] = getattr(torch, config.dtype)
        apex.initialize(model, self.optimizers, opt_level=config.level, verbosity=0, **options)
        return frontend._AMP.session

    def close(self):
        apex.deinitialize()

    def backward(self, loss, optimizers):
        with apex.scale_loss(loss, self.optimizers) as scaled:
            scaled.backward()

    def master_params(self):
        return [param for optimizer in self.optimizers for param in apex.master_params(optimizer)]

    def state_dict(self):
        return dict(apex.state_dict())

    def load_state_dict(self, state):
        apex.load_state_dict(state)


DRIVERS = {"five lines": FiveLines, "attach": Attach, "SessionScaler": Scaler, "apex": Apex}
