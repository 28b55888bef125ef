"""Drivers of frameworks, of which one may be missing, and whose import takes seconds: what their users write."""

from .drivers import DRIVERS, Attach
from .oracle import Contract


class Accelerate(Attach):
    """``accelerator.backward`` and prepared optimizers, whose ``step`` moves the scale as well."""

    contract = Contract(is_plain=True, waits=True, updates=True)
    lacks = Attach.lacks | {"clipping", "plain passes", "adding", "beside", "steady"}

    def begin(self, model, config, **options):
        from accelerate import Accelerator

        from mezzo.integrations import accelerate

        self.accelerator = Accelerator(cpu=True)
        amp = accelerate.attach(self.accelerator, model, self.optimizers, config.policy, **options)
        self.model, *self.prepared = self.accelerator.prepare(model, *self.optimizers)
        return amp

    def backward(self, loss, optimizers):
        self.accelerator.backward(loss)

    def step(self, optimizers):
        self.prepared[self.optimizers.index(optimizers)].step()
        return self.amp.last_step

    def update(self):
        self.accelerator.scaler.update()

    def state_dict(self):
        return self.accelerator.scaler.state_dict()

    def load_state_dict(self, state):
        self.accelerator.scaler.load_state_dict(state)


class Lightning(Attach):
    """Fabric with the plug-in: what its model returns may be differentiated by ``fabric.backward`` alone."""

    lacks = Attach.lacks | {"clipping", "grad", "autograd", "adding", "beside"}

    def begin(self, model, config, **options):
        from lightning.fabric import Fabric

        from mezzo.integrations import lightning

        self.plugin = lightning.MezzoPrecision(config.policy, **options)
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=self.plugin)
        self.model, *self.prepared = self.fabric.setup(model, *self.optimizers)
        return self.plugin.session

    def close(self):
        self.plugin.teardown()

    def backward(self, loss, optimizers):
        self.fabric.backward(loss)

    def step(self, optimizers):
        self.prepared[self.optimizers.index(optimizers)].step()
        return self.amp.last_step

    def state_dict(self):
        return self.plugin.state_dict()

    def load_state_dict(self, state):
        self.plugin.load_state_dict(state)


DRIVERS |= {"Accelerate": Accelerate, "Lightning": Lightning}
