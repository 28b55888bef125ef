"""Drivers of scalers that know optimizers, and no session: a loop as torch's, or Paddle's, documentation has it."""

import contextlib
from dataclasses import replace

import torch

from mezzo.compat import paddle
from mezzo.compat.torch import GradScaler, autocast
from mezzo.errors import StateError

from .drivers import DRIVERS, FiveLines, reached_groups
from .oracle import Contract


class Loose:
    """What a session would answer, of a loop that has none."""

    def __init__(self, model, optimizers, scaler):
        self.model, self.optimizers, self.scaler = model, optimizers, scaler

    @property
    def loss_scale(self):
        return torch.tensor(self.scaler.state_dict()["scale"]).reshape(())

    def zero_grad(self, set_to_none=True):
        for owner in (self.model, *self.optimizers):
            owner.zero_grad(set_to_none)


class Torch(FiveLines):
    """``GradScaler`` and ``autocast``: ``update()`` ends an iteration, which scales all of its losses alike."""

    contract = Contract(waits=True, updates=True, sees_losses=False)
    lacks = FiveLines.lacks | {
        "all at once", "clipping", "grad", "session", "reading anew", "others", "wants gradients", "beside",
    }  # fmt: skip
    levels = ("O0", "O1")

    def __init__(self, model, optimizers, config):
        self.config = config
        super().__init__(model, optimizers, config)

    @classmethod
    def suited(cls, config):
        level = config.level if config.level in cls.levels else cls.levels[-1]
        scale = config.scale if config.scale.startswith("dynamic") else "dynamic(init=256,interval=2)"
        return replace(config, level=level, scale=scale, clip=None, on_overflow="skip", pinned=False)

    def scale(self, config):
        return replace(config.start(), floor=2.0**-126, ceiling=2.0**127)

    def begin(self, model, config, **_):
        scale = self.scale(config)
        self.scaler = GradScaler("cpu", init_scale=scale.now, growth_interval=scale.interval)
        return Loose(model, self.optimizers, self.scaler)

    def region(self):
        if self.config.level == "O0":
            return contextlib.nullcontext()
        return autocast("cpu", dtype=getattr(torch, self.config.dtype))

    def paused(self):
        return contextlib.nullcontext()

    def backward(self, loss, optimizers):
        self.scaler.scale(loss).backward()

    def groups(self, oracle, chosen, reached):
        return reached_groups(oracle, reached)

    def may_add(self, oracle):
        """Not beside gradients of another scale, unscaled ones, or those of the last step."""
        return all(
            group.window.carried is not None and group.window.epoch == oracle.scale.epoch
            if group.window is not None and (group.gradients or group.window.carried is None)
            else not any(gradient.any() for gradient in group.gradients.values())
            for group in oracle.groups
        )

    def unscale_(self, optimizers):
        self.scaler.unscale_(optimizers)

    def step(self, optimizers):
        self.scaler.step(optimizers)
        last_step = self.scaler.last_step
        self.scaler.update()
        return last_step

    def taken(self):
        return id(self.scaler.last_step)

    def update(self):
        with contextlib.suppress(StateError):  # nothing was judged since the last one
            self.scaler.update()

    def updated(self, oracle):
        """What was unscaled counts, and is forgotten, though no step has followed."""
        for group in oracle.groups:
            if group.window is not None and group.window.carried is None:
                oracle.scale.outcomes.append((group.window.found_inf, False))
                group.window = None

    def forget(self, oracle):
        for group in oracle.groups:
            if group.window is not None and group.window.carried is not None:
                group.window = None

    def state_dict(self):
        return self.scaler.state_dict()

    def load_state_dict(self, state):
        self.scaler.load_state_dict(state)


class Paddle(Torch):
    """``decorate``, ``auto_cast`` and ``GradScaler``, with gradients that are summed in FP32."""

    levels = ("O1", "O2")
    lacks = Torch.lacks - {"reading anew"}

    def scale(self, config):
        return replace(config.start(), ceiling=2.0**127)

    def begin(self, model, config, **_):
        scale = self.scale(config)
        paddle.decorate(
            model, self.optimizers, level=config.given, dtype=config.dtype, master_grad=True, save_dtype="float32"
        )
        with paddle.auto_cast(dtype="float16"):
            pass  # or the scaler would disable itself, as it does after a region in bfloat16
        self.scaler = paddle.GradScaler(init_loss_scaling=scale.now, incr_every_n_steps=scale.interval)
        return Loose(model, self.optimizers, self.scaler)

    def region(self):
        return paddle.auto_cast(level=self.config.given, dtype=self.config.dtype)

    def backward(self, loss, optimizers):
        with paddle.auto_cast(dtype="float16"):
            pass
        super().backward(loss, optimizers)


DRIVERS |= {"torch": Torch, "Paddle": Paddle}
