"""What counts where modules end: hooks on the modules of a model, for eager mode and for graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

from mezzo.backward import runs_backward
from mezzo.compiling import compiled_inside_alone, guard_hooks, is_imported, leave_hooks
from mezzo.dispatch import DisableTorchFunction
from mezzo.errors import PolicyError
from mezzo.hooks import OwnHook
from mezzo.numerics.subject import Subject
from mezzo.numerics.watches import Returned, Tally, count, is_countable
from mezzo.tensors import each_tensor, foreach_zero_, leaves, mapped
from mezzo.trace.modes import is_watched
from mezzo.trace.observe import COUNTABLE, observe, observe_once

#: What modules return is recorded in graphs up to so many tensors: the one that is returned, or the first of others.
IN_GRAPHS: Final = 5
#: Whether torch.compile traces hooks of tensors as it does in 2.13.
TRACES_HOOKS: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
#: Observations that there can be in graphs: kinds of what modules return, times modules.
MOST: Final = 1 << 12


class _Pair:
    """The rows of one tensor that a module returns, and of the gradient that comes back to it.

    Attributes:
        name: What it is called; ``None`` for one of those that graphs count in, which are called by their place.
        values: The row of its values.
        gradient: That of its gradient.
        flag: Whether anything is counted.
        factor: What graphs multiply the gradient by.
        late: Rows of tensors that turned out to be part of training only when their gradients came.
    """

    def __init__(self, doors: Doors, device: torch.device, name: str | None) -> None:
        self.name = name
        self.values, self.gradient = doors.new_row(device), doors.new_row(device)
        self.flag, self.factor = doors.of_device(device)
        self.late: list[Tensor] = []

    def arrived(self, gradient: Tensor) -> None:
        """Count a gradient in a graph."""
        observe(gradient, self.gradient, self.flag, self.factor)


class _Arrival(Function):
    """Counts a gradient in graphs of torch 2.11, where hooks of tensors lose what is used outside of them too.

    A copy: a tensor that is handed on as it is could not be changed in place.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, row: Tensor, flag: Tensor, factor: Tensor) -> Tensor:
        """Return a copy."""
        ctx.save_for_backward(row, flag, factor)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Count the gradient, and hand it on."""
        observe(gradient, *ctx.saved_tensors)
        return gradient, None, None, None


class Door(OwnHook):
    """A forward hook: counts what a module returns, and the gradients that come back to it.

    torch.compile traces it. But for tensors it reads nothing there that differs between modules which share a graph.

    Args:
        doors: All of them.
        path: Where the module is recorded.
        device: The module's.

    Attributes:
        path: As given.
        pairs: The rows of each tensor that it returns.
        late: Those in graphs of passes that are training only if gradients come back, as evaluation is.
    """

    def __init__(self, doors: Doors, path: str, device: torch.device) -> None:
        super().__init__()
        self.path, self._doors, self._device = path, doors, device
        self.pairs: list[_Pair] = []
        self.late: list[_Pair] = []

    @compiled_inside_alone
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Count, but in passes that no backward pass can follow."""
        if torch.compiler.is_compiling() or self._doors.is_captured:
            return self._traced(output) if torch.is_grad_enabled() else None
        if self._doors.is_open and torch.is_grad_enabled() and not is_watched():
            self._doors.called[self.path] = None
            with DisableTorchFunction():
                for place, tensor in each_tensor(output):
                    if is_countable(tensor) and tensor.numel():
                        self._count(tensor, f"output{place}")
        return None

    def make_ready(self) -> None:
        """Make the rows that a graph counts in, which it cannot make itself."""
        for pairs in (self.pairs, self.late):
            pairs += [_Pair(self._doors, self._device, None) for _ in range(len(pairs), IN_GRAPHS)]

    def named(self) -> Iterator[tuple[str, _Pair, bool]]:
        """Yield the rows of each tensor, its name before them, and whether they count only if gradients came."""
        for pairs in (self.pairs, self.late):
            for number, pair in enumerate(pairs):
                yield pair.name or f"output{f'[{number - 1}]' if number else ''}", pair, pairs is self.late

    def _traced(self, output: Any) -> Any:
        counts = self._doors.model.training and not runs_backward()
        pairs = self.pairs if counts else self.late
        number = 0 if isinstance(output, Tensor) else 1
        through: list[Tensor] = []
        for _, tensor in leaves(output):
            if number < len(pairs) and isinstance(tensor, Tensor) and self._is_plain(tensor):
                pair = pairs[number]
                if self._doors.has_values:
                    (observe_once if counts else observe)(tensor, pair.values, pair.flag)
                if tensor.requires_grad and (self._doors.has_gradients or not counts):
                    if TRACES_HOOKS or self._doors.is_captured:
                        tensor.register_hook(pair.arrived)  # type: ignore[no-untyped-call]
                    else:
                        tensor = _Arrival.apply(tensor, pair.gradient, pair.flag, pair.factor)  # type: ignore[no-untyped-call]
            number += 1
            if isinstance(tensor, Tensor):
                through.append(tensor)
        if TRACES_HOOKS or self._doors.is_captured:
            return None
        following = iter(through)
        return mapped(output, lambda _: next(following))

    def _is_plain(self, tensor: Tensor) -> bool:
        """Whether graphs count a tensor: what :func:`is_countable` asks besides cannot be traced."""
        is_here = tensor.device == self._device and tensor.layout == torch.strided
        is_known = is_here and tensor.dtype in COUNTABLE and not tensor.is_nested
        return is_known and (torch.compiler.is_compiling() or is_countable(tensor))

    def _count(self, tensor: Tensor, name: str) -> None:
        # Evaluation without no_grad, and what checkpointing runs again, get no gradients.
        doors, counts = self._doors, self._doors.model.training and not runs_backward()
        if not counts and not tensor.requires_grad:
            return
        pair, late = self._pair(name, tensor.device), None
        if doors.has_values:
            row = pair.values if counts else doors.new_row(tensor.device)
            late = None if counts else row
            count(tensor, row, pair.flag)
        if tensor.requires_grad and (doors.has_gradients or not counts):
            hook = OwnHook(partial(self._arrived, pair, late, doors.step))
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _pair(self, name: str, device: torch.device) -> _Pair:
        """Return the rows of a tensor by its name: those that graphs count in where there are some."""
        for each, pair, is_late in self.named():
            if each == name and not is_late and pair.values.device == device:
                return pair
        self.pairs.append(_Pair(self._doors, device, name))
        return self.pairs[-1]

    def _arrived(self, pair: _Pair, late: Tensor | None, step: int, gradient: Tensor) -> None:
        """Count the gradient of an output, which then has been part of training."""
        doors = self._doors
        if not doors.is_open or doors.step != step or gradient is None or is_watched():
            return
        with DisableTorchFunction():
            if late is not None and all(late is not each for each in pair.late):
                pair.late.append(late)
            if doors.has_gradients and is_countable(gradient) and gradient.numel():
                count(gradient, pair.gradient, pair.flag, doors.factor())


class Doors:
    """Counts where modules end, in recorded steps: hooks on the modules of a model.

    Once graphs of torch.compile count, hooks stay between these steps too: graphs are made for them, and would else be
    made anew. There a flag in the device's memory turns counting on and off.

    Args:
        subject: What is watched.
        kinds: ``activations``, ``activation_gradients`` or both.
        width: Numbers of a row.
        factor: Returns what to multiply gradients with as they arrive; ``None`` for 1.

    Attributes:
        model: What trains.
        is_open: Whether a step is recorded.
        step: How many were.
        called: The paths of modules that Python called in it, in the order in which their calls ended.
        has_values: Whether activations are counted.
        has_gradients: Whether their gradients are.
        stays: Whether hooks stay on between recorded steps.
        gradients: The rows of parameters' gradients in graphs.
        is_captured: Whether what runs now is captured, or will be: then it counts as graphs of torch.compile do.
        factor: As given.
    """

    def __init__(
        self, subject: Subject, kinds: Collection[str], width: int, factor: Callable[[], Tensor | None]
    ) -> None:
        self.model, self.factor = subject.model, factor
        self.has_values, self.has_gradients = (kind in kinds for kind in ("activations", "activation_gradients"))
        self.is_open, self.step, self.called = False, 0, dict[str, None]()
        self.stays, self.is_captured, self._width = False, False, width
        self.gradients: dict[Tensor, Tensor] = {}
        self._shared: dict[torch.device, tuple[Tensor, Tensor]] = {}
        first = next(subject.model.parameters()).device
        self._doors = {
            module: Door(self, path, next((param.device for param in module.parameters()), first))
            for module, path in subject.paths.items()
        }
        self._handles: list[RemovableHandle] = []
        self._guards = False  # whether graphs are made for the hooks that modules have

    def new_row(self, device: torch.device) -> Tensor:
        """Return zeros to count in, in a storage of their own: a graph is made for tensors, not for places in one."""
        return torch.zeros(self._width, dtype=torch.int64, device=device)

    def of_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a device's flag, and its factor of gradients in graphs."""
        if device not in self._shared:
            flag = torch.full((1,), int(self.is_open), dtype=torch.int32, device=device)
            self._shared[device] = flag, torch.ones((), device=device)
        return self._shared[device]

    def stay(self) -> None:
        """Leave the hooks on between recorded steps, for graphs.

        Raises:
            PolicyError: They would be too many.
        """
        number = len(self._doors) * (self.has_values + self.has_gradients)
        if number > MOST:
            raise PolicyError(
                f"{number} observations are too many for graphs of torch.compile",
                where=f"{len(self._doors)} modules of {type(self.model).__name__}",
                why=f"{MOST} at most: the memory of each is made before the model is compiled, and stays",
                write='Recorder(…, modules=["layers.0", "layers.31"]), or fewer kinds=',
            )
        self.stays = True

    def open(self) -> None:
        """Count from here on, anew."""
        self.is_open, self.step = True, self.step + 1
        self.called.clear()
        if is_imported() and not self._guards and (self.has_values or self.has_gradients):
            guard_hooks()
            self._guards = True
        if self.stays or is_imported():
            for door in self._doors.values():
                door.make_ready()
        for row in self.gradients.values():
            row.zero_()
        pairs = [pair for door in self._doors.values() for _, pair, _ in door.named()]
        if pairs:
            foreach_zero_([row for pair in pairs for row in (pair.values, pair.gradient)])
        for pair in pairs:
            pair.late.clear()
        for flag, _ in self._shared.values():
            flag.fill_(1)
        self.scaled()
        self._put_on()

    def _put_on(self) -> None:
        if not self._handles and (self.has_values or self.has_gradients):
            self._handles = [module.register_forward_hook(door) for module, door in self._doors.items()]

    def close(self) -> None:
        """Count no more."""
        self.is_open = False
        for flag, _ in self._shared.values():
            flag.zero_()
        if not self.stays:
            self._take_off()

    def end(self) -> None:
        """Take all hooks off for good."""
        self._take_off()
        if self._guards:
            leave_hooks()
        self._guards = False

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def scaled(self) -> None:
        """Let graphs know by what to multiply the gradients that come now. No host sync."""
        for _, known in self._shared.values() if self.is_captured or (self.is_open and is_imported()) else ():
            factor = self.factor()
            memory = known.data  # a graph has it from the forward pass, and torch would refuse what was written since
            memory.fill_(1.0) if factor is None else memory.copy_(factor, non_blocking=known.device.type != "cpu")

    def capture(self) -> None:
        """Count in what runs from here on as in a graph, with hooks, rows and flags that stay."""
        if not self.stays:
            self.stay()
            for door in self._doors.values():
                door.make_ready()
            self._put_on()
        self.is_captured = True

    def count_gradient(self, param: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
        """Count the gradient of a parameter in a graph."""
        row = self.gradients.get(param)
        if row is None:
            row = self.gradients[param] = self.new_row(gradient.device)
        count(gradient, row, self.of_device(gradient.device)[0], factor)

    def found(self, tally: Tally) -> list[Returned]:
        """Hand on all rows."""
        made: list[Returned] = []
        for door in self._doors.values():
            for name, pair, is_late in door.named():
                gradient = tally.take(pair.gradient)
                if self.has_gradients:
                    made.append((("activation_gradients", door.path, name), gradient, None))
                if self.has_values:
                    values = (tally.take(row) for row in (pair.values, *pair.late))
                    made += [(("activations", door.path, name), row, gradient if is_late else None) for row in values]
        return made
