"""Keeping what a training step is computed from: which models were called with what, and the gradients that came back.

Everything is kept by reference, with the version that it had: nothing is copied but random states.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from mezzo.tensors import dtype_name, each_tensor, mark
from mezzo.trace.frames import user_line
from mezzo.trace.measure import shape_text
from mezzo.trace.modes import is_watched
from mezzo.trace.names import named_inputs
from mezzo.trace.sandbox import RandomStates, devices_of

__all__ = ["CallKeeper", "Event", "Kept", "KeptCall"]


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor by reference, with what tells whether it has been written to since."""

    name: str
    tensor: Tensor
    mark: tuple[int, int]

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> Kept:
        """Keep a tensor as it is now."""
        return cls(name, tensor, mark(tensor))

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place, or given other storage.

        Writes through ``.data``, and to tensors that were made in inference mode, are not seen: they count no version.
        """
        return mark(self.tensor) != self.mark

    def __str__(self) -> str:
        return f"{self.name} ({dtype_name(self.tensor.dtype)}, {shape_text(self.tensor.shape)})"


class _Graph:
    """Lives as long as the autograd graph of a call's outputs, whose hooks hold it."""


@dataclass(eq=False, slots=True)
class KeptCall:
    """One call of a model.

    Attributes:
        module: The model.
        args: Its positional arguments; containers are copied, tensors are not.
        kwargs: Its keyword arguments.
        inputs: The tensors among them.
        states: The random states before it.
        line: The user's line that made it.
        arrivals: The gradients that arrived at its outputs, by backward pass and by output.
        graph: A reference that is dead once no backward pass can reach the call any more.
        handles: Hooks on outputs that outlive their graph.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Kept]
    states: RandomStates
    line: str | None
    arrivals: dict[int, dict[int, Kept]] = field(default_factory=dict)
    graph: weakref.ref[_Graph] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)

    @property
    def is_pending(self) -> bool:
        """Whether its backward pass may still come."""
        return not self.arrivals and self.graph is not None and self.graph() is not None


class Event(NamedTuple):
    """A forward pass, or a backward pass by its number, in the order in which they happened."""

    call: KeptCall
    task: int | None


class CallKeeper:
    """Hooks on models that keep each call with gradients, until it is forgotten.

    A copied or pickled model takes an empty keeper with it, which keeps nothing.

    Args:
        models: The models. Of one that calls another only the outer call is kept.
    """

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self.events: list[Event] = []
        self._models = list(models)
        self._devices = devices_of(models)
        self._open: defaultdict[int, list[KeptCall | None]] = defaultdict(list)  # by thread
        self._hooks = [
            handle
            for model in self._models
            for handle in (
                # Before the hooks that cast, and after those that cast back.
                model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
                model.register_forward_hook(self._after, always_call=True),
            )
        ]

    def __reduce__(self) -> Any:
        return CallKeeper, ()

    def clear(self) -> None:
        """Forget every call whose backward pass has been, or cannot come any more."""
        done = {event.call for event in self.events if not event.call.is_pending}
        self.events = [event for event in self.events if event.call not in done]
        for call in done:
            call.arrivals.clear()
            for handle in call.handles:
                handle.remove()

    def remove(self) -> None:
        """Take the hooks off and forget everything."""
        for hook in self._hooks:
            hook.remove()
        self.clear()
        self.events.clear()

    # Hooks --------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._models:
            return
        opened = self._open[threading.get_ident()]
        if opened or not torch.is_grad_enabled() or is_watched():
            opened.append(None)
            return
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        inputs = [Kept.of(tensor, name) for name, tensor in named_inputs(args, kwargs)]
        opened.append(KeptCall(module, args, kwargs, inputs, RandomStates.now(self._devices), user_line()))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._models:
            return
        opened = self._open[threading.get_ident()]
        call = opened.pop() if opened else None
        outputs = [tensor for _, tensor in each_tensor(output) if tensor.requires_grad]
        if call is None or not outputs:
            return
        graph = _Graph()
        call.graph = weakref.ref(graph)
        for number, tensor in enumerate(outputs):
            hook = partial(self._arrive, call, graph, number)
            handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:
                call.handles.append(handle)
        # Passes of which no backward pass will come, as in an evaluation without no_grad, would pile up.
        self.events = [event for event in self.events if event.call.arrivals or event.call.is_pending]
        self.events.append(Event(call, None))

    def _arrive(self, call: KeptCall, graph: _Graph, number: int, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if not any(event.call is call for event in self.events):
            self.events.append(Event(call, None))  # forgotten meanwhile, and used again
        if task not in call.arrivals:
            call.arrivals[task] = {}
            self.events.append(Event(call, task))
        call.arrivals[task][number] = Kept.of(gradient, f"gradient of output {number}")
