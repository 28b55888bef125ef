"""The driver of a captured step: whole steps are one call, and the five lines come in between."""

import contextlib
from dataclasses import replace
from unittest.mock import patch

from mezzo.optim import optimizer as one_pass
from mezzo.session.capture import Captured
from mezzo.step import gradients
from mezzo.weights import codec
from mezzo.weights.stepping import in_memory

from ..session.capture.host_graph import HostGraph, Predicated
from .drivers import DRIVERS, FiveLines
from .loop import total


@contextlib.contextmanager
def predicated():
    """Executors that skip without a look at the flag, as a graph needs them."""
    with (
        patch.object(one_pass, "executor_for", lambda device: Predicated()),
        patch.object(gradients, "executor_for", lambda device: Predicated()),
        patch.object(codec, "update_of", Predicated().update_of),
    ):
        yield


class CapturedStep(FiveLines):
    """``mezzo.capture`` over a stand-in for a CUDA graph: three real steps, one that is recorded, and replays."""

    lacks = FiveLines.lacks | {"beside"}

    def __init__(self, model, optimizers, config):
        super().__init__(model, optimizers, config)
        self.capture()

    @classmethod
    def suited(cls, config):
        return replace(config, library="mezzo", on_overflow="skip", wide=False)

    def capture(self):
        """Begin anew, as a program does once the graph holds what has moved."""
        self.graph = HostGraph()
        self.captured, self.recorded_facts = Captured(self.iteration, self.amp, self.graph), None

    def iteration(self, x, factors, added):
        with self.amp.autocast():
            outputs = self.model(x)
            loss = total(outputs, factors, added)
        self.amp.backward(loss)
        step = self.amp.step()
        self.amp.zero_grad()
        return outputs, step

    def holds(self):
        """Return the addresses that a graph reads, and the settings that are parts of it."""
        groups = [[list(map(id, group["params"])) for group in optimizer.param_groups] for optimizer in self.optimizers]
        facts = [self.amp.max_grad_norm, groups]
        states = {param: state for optimizer in self.optimizers for param, state in optimizer.state.items()}
        for param in self.model.parameters():
            state = [value.data_ptr() for value in states.get(param, {}).values() if hasattr(value, "data_ptr")]
            facts.append(([part.data_ptr() for part in in_memory([param])], param.requires_grad, state))
        return facts

    def is_stale(self):
        """Whether what was recorded has moved."""
        return self.recorded_facts is not None and self.recorded_facts != self.holds()

    def train(self, share):
        calls = self.model.calls
        self.outputs, step = self.captured(share.x, share.factors, share.added)
        self.model.calls = calls + 1  # which a replay cannot count
        self.recorded_facts = self.holds() if self.graph.replays else None
        return step

    def trained(self, oracle):
        """What has been computed by a graph has moved the scale as well, which waits for the next loss elsewhere."""
        self.forget(oracle)
        if self.graph.replays:
            oracle.commit()


DRIVERS |= {"captured step": CapturedStep}
