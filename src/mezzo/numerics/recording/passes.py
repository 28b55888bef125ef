"""Activations and their gradients, counted as the passes of one step make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.hooks import OwnHook
from mezzo.numerics.recording.subject import Subject
from mezzo.numerics.recording.tally import Tally, is_countable
from mezzo.tensors import dtype_name, each_tensor, mark
from mezzo.trace.modes import is_watched

__all__ = ["PassWatch", "Places"]

#: The rows of each tensor, by kind, module and name, with the tensor's dtype.
Places = dict[tuple[str, str, str], tuple[str, list[int]]]

#: Hooks run under the policy's mode, which would look at each operation that counting takes.
_NO_TORCH_FUNCTION: Final = torch._C.DisableTorchFunction


@dataclass(eq=False, slots=True)
class _Output:
    """A tensor that a module returned, and those modules that returned the very tensor after it, as containers do.

    Attributes:
        tensor: The tensor, for as long as it lives.
        mark: What it was when it was counted.
        row: Its counts; ``None`` where activations are not recorded.
        counts: Whether it is known to be part of training. A pass in evaluation mode, or one that checkpointing runs
            once more, is only if gradients come back.
        names: The module and the name of each.
    """

    tensor: weakref.ref[Tensor]
    mark: tuple[int, int]
    row: int | None
    counts: bool
    names: list[tuple[str, str]] = field(default_factory=list)


class PassWatch:
    """Hooks on the modules of a model, for one step.

    Args:
        subject: What is watched.
        kinds: ``activations``, ``activation_gradients`` or both.
        tally: What counts.
        places: What is told of the rows.
        factor: Returns what to multiply gradients with as they arrive; ``None`` for 1.

    Attributes:
        called: The paths of the modules, in the order in which their calls ended.
    """

    def __init__(
        self,
        subject: Subject,
        kinds: Collection[str],
        tally: Tally,
        places: Places,
        factor: Callable[[], Tensor | None],
    ) -> None:
        self.called: dict[str, None] = {}
        self._model, self._kinds = subject.model, kinds
        self._tally, self._places, self._factor = tally, places, factor
        self._outputs: dict[int, _Output] = {}
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(OwnHook(partial(self._returned, path)))
            for module, path in subject.paths.items()
        ]

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs.clear()

    def _returned(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """Count what a module has returned, but in passes that no backward pass can follow."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_watched():
            return
        self.called[path] = None
        with _NO_TORCH_FUNCTION():
            for place, tensor in each_tensor(output):
                if is_countable(tensor) and tensor.numel():
                    self._count(tensor, path, f"output{place}")

    def _count(self, tensor: Tensor, path: str, name: str) -> None:
        known = self._outputs.get(id(tensor))
        if known is None or known.tensor() is not tensor or known.mark != mark(tensor):
            # Evaluation without no_grad, and what checkpointing runs again, get no gradients.
            counts = self._model.training and torch._C._current_graph_task_id() == -1
            if not counts and not tensor.requires_grad:
                return
            row = self._tally.count(tensor) if "activations" in self._kinds else None
            known = _Output(weakref.ref(tensor), mark(tensor), row, counts)
            self._outputs[id(tensor)] = known
            if tensor.requires_grad and ("activation_gradients" in self._kinds or not counts):
                handle: RemovableHandle = tensor.register_hook(OwnHook(partial(self._arrived, known)))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        known.names.append((path, name))
        if known.counts and known.row is not None:
            self._put("activations", path, name, tensor, known.row)

    def _arrived(self, output: _Output, gradient: Tensor) -> None:
        """Count the gradient of an output, which then has been part of training."""
        if not self._handles or gradient is None or is_watched():
            return
        with _NO_TORCH_FUNCTION():
            tensor = output.tensor()
            if not output.counts:
                output.counts = True
                for path, name in output.names if output.row is not None else ():
                    self._put("activations", path, name, gradient if tensor is None else tensor, output.row)
            if "activation_gradients" in self._kinds and is_countable(gradient) and gradient.numel():
                row = self._tally.count(gradient, self._factor())
                for path, name in output.names:
                    self._put("activation_gradients", path, name, gradient, row)

    def _put(self, kind: str, path: str, name: str, tensor: Tensor, row: int | None) -> None:
        if row is not None:
            self._places.setdefault((kind, path, name), (dtype_name(tensor.dtype), []))[1].append(row)
