"""Drivers of a model that is compiled under a plan, and what else may happen to one.

No placement changes a number here, so the oracle is that of any other style. That the graph runs is shown at each call:
once, with as many casts as its plan says, without autocast, and with no line of the model's own ``forward``.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch._dynamo import register_backend
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo

from .drivers import DRIVERS, Attach, FiveLines
from .edits import Edits
from .faults import BoomError, Faults, boom
from .subject import NAMES, Net
from .twins import rule

#: Dynamo leaves a model to Python after eight variants: which layers train, whether inputs do, and in which region.
VARIANTS = 256
LOW = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def many_variants():
    """Raise Dynamo's limit, so that each variant is compiled."""
    with torch._dynamo.config.patch(recompile_limit=VARIANTS, accumulated_recompile_limit=VARIANTS):
        yield
    torch._dynamo.reset()


class Chained(Net):
    """Three layers, and a power, which is FP32, between ops that may be low: all of which leave numbers alone."""

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.calls += 1
        self.seen += 1
        first, second, late = self.first(x), self.second(x), self.late(x)
        wide = -(-torch.cat([first, second, late], 1)).pow(1)
        return dict(zip(NAMES, wide.split([first.shape[1], second.shape[1], late.shape[1]], 1), strict=True))


class Casts(TorchDispatchMode):
    """Count kernels that convert FP32 to a low format, or back."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += torch.float32 in (args[0].dtype, out.dtype) and (args[0].dtype in LOW or out.dtype in LOW)
        return out


class Compiled:
    """What is called in the place of a model.

    Attributes:
        is_whole: Whether it is one graph.
        backend: Which has the plan of each graph.
        ran: The plan of each graph that the last call has run, and how many casts there were.
        breaks: Whether graphs end in an exception.
    """

    #: The one that is called now.
    now = None

    def __init__(self, model, policy, *, is_whole):
        self.model, self.is_whole, self.ran, self.breaks = model, is_whole, [], False
        self.backend = mezzo.compile_backend(policy, inner="mezzo_tests_counted")
        self.compiled = torch.compile(model, backend=self.backend, fullgraph=is_whole)

    @property
    def is_within_reach(self):
        """Whether Dynamo captures all weights: for a gradient of another dtype it gives a model up for good."""
        return all(param.grad is None or param.grad.dtype == param.dtype for param in self.model.parameters())

    def __call__(self, x):
        if not self.is_within_reach:
            return self.model(x)
        calls, self.ran, Compiled.now = self.model.calls, [], self
        outputs = self.compiled(x)
        assert self.model.calls == calls, "a forward pass in Python"
        self.model.calls += 1
        assert len(self.ran) == 1 if self.is_whole else self.ran
        for plan, casts in self.ran:
            assert plan.emulated or casts == plan.totals["plan"].casts, f"{casts} casts, not as planned: {plan.text()}"
        return outputs


@register_backend(name="mezzo_tests_counted")
def counted(module, inputs):
    """Run a graph as it is, and tell the one that is called."""
    plan = Compiled.now.backend.plans[-1]

    def run(*args):
        assert not torch.is_autocast_enabled("cpu")
        if Compiled.now.breaks:
            boom()
        with Casts() as casts:
            outputs = module(*args)
        Compiled.now.ran.append((plan, casts.count))
        return outputs

    return run


class Planned(FiveLines):
    """The five lines around a model that was compiled before its session."""

    net = Chained
    lacks = FiveLines.lacks | {"beside"}
    levels = ("O1", "O2")

    def __init__(self, model, optimizers, config):
        torch._dynamo.reset()
        self.plain, self.policy, self.is_whole = model, self.planned(config), self.fits_one_graph(config)
        self.compiled = Compiled(model, self.policy, is_whole=self.is_whole)
        super().__init__(model, optimizers, config)
        self.turn(compiles=True)

    @classmethod
    def suited(cls, config):
        config = super().suited(config)
        return replace(config, level=config.level if config.level in cls.levels else cls.levels[0], wide=False)

    @staticmethod
    def planned(config):
        """The policy; where FP32 numbers flow, no op that follows may round them."""
        return config.policy + (",fp32=cat+neg" if config.pinned else "")

    def begin(self, model, config, **options):
        return mezzo.MixedPrecision(model, self.optimizers, self.policy, **options)

    @staticmethod
    def fits_one_graph(config):
        """Whether Dynamo breaks nowhere: it does where a region for one module begins."""
        return not config.pinned

    def turn(self, *, compiles, anew=False):
        """Call the model itself from here on, or the compiled one, or one that is compiled now."""
        if anew:
            self.compiled = Compiled(self.plain, self.policy, is_whole=self.is_whole)
        self.model = self.compiled if compiles else self.plain


class PlannedAttach(Planned, Attach):
    """A loop that stays as it is, around the same model."""

    lacks = Planned.lacks | Attach.lacks

    def begin(self, model, config, **options):
        return mezzo.attach(model, self.optimizers, self.policy, **options)

    @staticmethod
    def fits_one_graph(config):
        """Under O2 Dynamo breaks where the model's own call enters its region."""
        return config.level == "O1" and not config.pinned


class Compiles(Edits, Faults):
    """All rules together, of which some are for compiled models."""

    @rule(how=st.sampled_from(["plain", "compiled", "anew"]), widths=st.sampled_from([(1.0, 1.0), (0.5, 2.0)]))
    def compile(self, how, widths):
        """In mid-run, whatever gradients there are: the same weights, as a plan's."""
        self.driver.turn(compiles=how != "plain", anew=how == "anew")
        with self.driver.region():
            self.outputs(widths)

    @rule(trains=st.booleans())
    def exception_in_forward(self, trains):
        """Dynamo guards no hooks: a graph raises."""
        self.driver.turn(compiles=True)
        if not self.driver.model.is_within_reach:
            return
        before, self.driver.model.breaks = self.subject.bits(), True
        with pytest.raises(BoomError), torch.set_grad_enabled(trains), self.driver.region():
            self.driver.model(torch.eye(2))
        self.driver.model.breaks = False
        assert not torch.is_autocast_enabled("cpu")
        assert self.subject.bits() == before


DRIVERS |= {"planned": Planned, "planned attach": PlannedAttach}
