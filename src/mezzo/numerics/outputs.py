"""What modules return, and the gradients that come back to it: counted by hooks, in eager mode and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

from mezzo.backward import runs_backward
from mezzo.compiling import compiled_inside_alone, constant_in_graphs, guard_hooks, is_imported, leave_hooks
from mezzo.dispatch import DisableTorchFunction
from mezzo.errors import PolicyError
from mezzo.hooks import OwnHook
from mezzo.numerics.subject import Subject
from mezzo.numerics.watches import Tally, count, is_countable
from mezzo.tensors import each_tensor, foreach_zero_, mapped
from mezzo.trace.modes import is_watched
from mezzo.trace.observe import COUNTABLE, move_row, observe, observe_once

#: In graphs the first of the tensors that a module returns are recorded, so many.
IN_GRAPHS: Final = 4
#: Whether torch.compile traces hooks of tensors as it does in 2.13. With torch 2.12 this goes, and :class:`_Arrival`.
TRACES_HOOKS: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
#: Observations that there can be in graphs: kinds of what modules return, times modules.
MOST: Final = 1 << 12


#: What tensors that modules return are called, in the order of the numbers that rows have for it. Of the process: a
#: graph outlives the recorder that it was made for, and may serve the next one.
NAMES: Final[list[str]] = []


@constant_in_graphs
def _number_of(name: str) -> int:
    if name not in NAMES:
        NAMES.append(name)
    return NAMES.index(name)


class OutputCounts:
    """The counts of one tensor that a module returns, and of the gradient that comes back to it.

    Attributes:
        values: The row of its values.
        gradient: That of its gradient.
        flag: Whether anything is counted.
        factor: What graphs multiply the gradient by.
    """

    def __init__(self, watch: OutputWatch, device: torch.device) -> None:
        self.values, self.gradient = watch.new_row(device), watch.new_row(device)
        self.flag, self.factor = watch.of_device(device)

    def arrived(self, name: int, apart: Tensor | None, gradient: Tensor) -> None:
        """Count a gradient in a graph, and the values that its pass has counted apart."""
        if apart is not None:
            move_row(apart, self.values)
        observe(gradient, self.gradient, self.flag, self.factor, name)


class _Arrival(Function):
    """Counts a gradient in graphs of torch 2.11, where hooks of tensors lose what is used outside of them too.

    A copy: a tensor that is handed on as it is could not be changed in place.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: int, gradient: Tensor, flag: Tensor, factor: Tensor, *moved: Tensor
    ) -> Tensor:
        """Return a copy."""
        ctx.name = name
        ctx.save_for_backward(gradient, flag, factor, *moved)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Count the gradient, and hand it on."""
        row, flag, factor, *moved = ctx.saved_tensors
        observe(gradient, row, flag, factor, ctx.name)
        if moved:
            move_row(*moved)
        return gradient, None, None, None, None, *(None for _ in moved)


class OutputHook(OwnHook):
    """A forward hook: counts what a module returns, and the gradients that come back to it.

    Where the pass may be none of training, values are counted apart, in a row of this pass alone: in evaluation mode,
    and where checkpointing runs a part again. They are added to the others when the tensor's gradient comes.

    torch.compile traces it. But for tensors it reads nothing there that differs between modules which share a graph.

    Args:
        watch: All of them.
        path: Where the module is recorded.
        device: The module's.

    Attributes:
        path: As given.
    """

    def __init__(self, watch: OutputWatch, path: str, device: torch.device) -> None:
        super().__init__()
        self.path, self._watch, self._device = path, watch, device
        self._by_name: dict[tuple[int, torch.device], OutputCounts] = {}
        self._in_graphs: list[OutputCounts] = []

    @compiled_inside_alone
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Count what a module returns, except where no backward pass can follow."""
        if not torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling() or self._watch.is_captured:
            return self._traced(output)
        if self._watch.is_counting and not is_watched():
            self._watch.called.add(self.path)
            with DisableTorchFunction():
                for position, tensor in each_tensor(output):
                    if is_countable(tensor) and tensor.numel():
                        self._called(tensor, _number_of(f"output{position}"))
        return None

    def make_ready(self) -> None:
        """Make the rows that a graph counts in, which it cannot make itself."""
        if not self._in_graphs:
            self._in_graphs += [OutputCounts(self._watch, self._device) for _ in range(IN_GRAPHS)]

    def counts(self) -> Iterator[OutputCounts]:
        """Yield the counts of each tensor."""
        yield from self._by_name.values()
        yield from self._in_graphs

    def _traced(self, output: Any) -> Any:
        """Count what a module returns inside a graph."""
        has_hooks = TRACES_HOOKS or self._watch.is_captured
        unused = iter(self._in_graphs)
        through: list[Tensor] = []
        for position, tensor in each_tensor(output):
            if self._is_plain(tensor) and (counts := next(unused, None)) is not None:
                name = _number_of(f"output{position}")
                apart = self._count_values(tensor, counts, name, observe_once)
                if tensor.requires_grad and (self._watch.has_gradients or apart is not None):
                    if has_hooks:
                        tensor.register_hook(partial(counts.arrived, name, apart))  # type: ignore[no-untyped-call]
                    else:
                        moved = () if apart is None else (apart, counts.values)
                        operands = counts.gradient, counts.flag, counts.factor, *moved
                        tensor = _Arrival.apply(tensor, name, *operands)  # type: ignore[no-untyped-call]
            through.append(tensor)
        if has_hooks:
            return None
        following = iter(through)
        return mapped(output, lambda _: next(following))

    def _is_plain(self, tensor: Tensor) -> bool:
        """Whether graphs count a tensor: what :func:`is_countable` asks besides cannot be traced."""
        is_here = tensor.device == self._device and tensor.layout == torch.strided
        is_known = is_here and tensor.dtype in COUNTABLE and not tensor.is_nested
        return is_known and (torch.compiler.is_compiling() or is_countable(tensor))

    def _called(self, tensor: Tensor, name: int) -> None:
        """Count one output in eager mode."""
        key = name, tensor.device
        if (counts := self._by_name.get(key)) is None:
            counts = self._by_name[key] = OutputCounts(self._watch, tensor.device)
        apart = self._count_values(tensor, counts, name, count)
        if tensor.requires_grad and (self._watch.has_gradients or apart is not None):
            hook = OwnHook(partial(self._arrived, counts, name, apart, self._watch.step))
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _count_values(
        self, tensor: Tensor, counts: OutputCounts, name: int, at_once: Callable[..., None]
    ) -> Tensor | None:
        """Count values at once, or return the row in which they are counted apart."""
        watch = self._watch
        if not watch.has_values:
            return None
        if watch.model.training and not runs_backward():
            at_once(tensor, counts.values, counts.flag, None, name)
            return None
        if not tensor.requires_grad:
            return None
        apart = watch.new_row(tensor.device)
        count(tensor, apart, counts.flag, None, name)
        return apart

    def _arrived(self, counts: OutputCounts, name: int, apart: Tensor | None, step: int, gradient: Tensor) -> None:
        """Count the gradient of an output, which then has been part of training."""
        watch = self._watch
        if not watch.is_counting or watch.step != step or gradient is None or is_watched():
            return
        with DisableTorchFunction():
            if apart is not None:
                move_row(apart, counts.values)
            if watch.has_gradients and is_countable(gradient) and gradient.numel():
                count(gradient, counts.gradient, counts.flag, watch.factor(), name)


class OutputWatch:
    """Counts what modules return in recorded steps, and the gradients of it.

    Once graphs of torch.compile count, hooks stay between these steps too: graphs are made for them, and would else be
    made anew. There a flag in the device's memory turns counting on and off.

    Args:
        subject: What is watched.
        kinds: ``activations``, ``activation_gradients`` or both.
        width: Numbers of a row.
        factor: Returns what to multiply gradients with as they arrive; ``None`` for 1.

    Attributes:
        model: The model that trains.
        factor: As given.
        has_values: Whether activations are counted.
        has_gradients: Whether their gradients are.
        is_counting: Whether a step is recorded.
        step: How many were.
        called: The paths of the modules that Python has called in it.
        keeps_hooks: Whether hooks stay on between recorded steps.
        is_captured: Whether what runs now is captured, or will be: then it counts as graphs of torch.compile do.
        params: The rows of parameters' gradients in graphs.
    """

    def __init__(
        self, subject: Subject, kinds: Collection[str], width: int, factor: Callable[[], Tensor | None]
    ) -> None:
        self.model, self.factor = subject.model, factor
        self.has_values, self.has_gradients = (
            tensor_kind in kinds for tensor_kind in ("activations", "activation_gradients")
        )
        self.is_counting, self.step, self.called = False, 0, set[str]()
        self.keeps_hooks, self.is_captured, self._width = False, False, width
        self.params: dict[Tensor, Tensor] = {}
        self._shared: dict[torch.device, tuple[Tensor, Tensor]] = {}
        first = next(subject.model.parameters()).device
        self._hooks = {
            module: OutputHook(self, path, next((param.device for param in module.parameters()), first))
            for module, path in (subject.paths.items() if kinds else ())
        }
        self._handles: list[RemovableHandle] = []
        self._guards = False  # whether graphs are made for the hooks that modules have
        if subject.is_compiled:
            self.keep_hooks()

    def new_row(self, device: torch.device) -> Tensor:
        """Return zeros to count in, in a storage of their own: a graph is made for tensors, not for places in one."""
        return torch.zeros(self._width, dtype=torch.int64, device=device)

    def of_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a device's flag, and its factor of gradients in graphs."""
        if device not in self._shared:
            flag = torch.full((1,), int(self.is_counting), dtype=torch.int32, device=device)
            self._shared[device] = flag, torch.ones((), device=device)
        return self._shared[device]

    def keep_hooks(self) -> None:
        """Leave the hooks on between recorded steps, for graphs.

        Raises:
            PolicyError: They would be too many.
        """
        number = len(self._hooks) * (self.has_values + self.has_gradients)
        if number > MOST:
            raise PolicyError(
                f"{number} observations are too many for graphs of torch.compile",
                where=f"{len(self._hooks)} modules of {type(self.model).__name__}",
                why=f"{MOST} at most: the memory of each is made before the model is compiled, and stays",
                write='Recorder(…, modules=["layers.0", "layers.31"]), or fewer kinds=',
            )
        self.keeps_hooks = True

    def start(self) -> None:
        """Start counting a step, from zero."""
        self.is_counting, self.step = True, self.step + 1
        self.called.clear()
        if self._hooks and is_imported() and not self._guards:
            guard_hooks()
            self._guards = True
        if self.keeps_hooks or is_imported():
            self._make_ready()
        rows = [
            row for hook in self._hooks.values() for counts in hook.counts() for row in (counts.values, counts.gradient)
        ]
        if rows := [*rows, *self.params.values()]:
            foreach_zero_(rows)
        for flag, _ in self._shared.values():
            flag.fill_(1)
        self.update_factors()
        self._add_hooks()

    def _make_ready(self) -> None:
        for hook in self._hooks.values():
            hook.make_ready()

    def _add_hooks(self) -> None:
        if not self._handles:
            self._handles = [module.register_forward_hook(hook) for module, hook in self._hooks.items()]

    def stop(self) -> None:
        """Stop counting."""
        self.is_counting = False
        for flag, _ in self._shared.values():
            flag.zero_()
        if not self.keeps_hooks:
            self._remove_hooks()

    def remove(self) -> None:
        """Remove all hooks for good."""
        self._remove_hooks()
        if self._guards:
            leave_hooks()
        self._guards = False

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def update_factors(self) -> None:
        """Write into the memory of graphs by what they multiply the gradients that come now. No host sync."""
        for _, shared in self._shared.values() if self.is_captured or (self.is_counting and is_imported()) else ():
            factor = self.factor()
            memory = shared.data  # a graph has it from the forward pass, and torch would refuse what was written since
            memory.fill_(1.0) if factor is None else memory.copy_(factor, non_blocking=shared.device.type != "cpu")

    def capture(self) -> None:
        """Count in what runs from here on as in a graph, with hooks, rows and flags that stay."""
        if not self.keeps_hooks:
            self.keep_hooks()
            self._make_ready()
            self._add_hooks()
        self.is_captured = True

    def count_gradient(self, param: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
        """Count the gradient of a parameter in a graph."""
        row = self.params.get(param)
        if row is None:
            row = self.params[param] = self.new_row(gradient.device)
        count(gradient, row, self.of_device(gradient.device)[0], factor)

    def add_rows(self, tally: Tally) -> list[tuple[str, str, int]]:
        """Add all rows to a tally, and return each one's kind, module path and number."""
        rows: list[tuple[str, str, int]] = []
        for hook in self._hooks.values():
            for counts in hook.counts():
                if self.has_values:
                    rows.append(("activations", hook.path, tally.append(counts.values)))
                if self.has_gradients:
                    rows.append(("activation_gradients", hook.path, tally.append(counts.gradient)))
        return rows

    def keep_hooks_of_graphs(self, paths: Iterable[str]) -> None:
        """Keep the hooks on from now on if graphs ran modules that Python did not call."""
        if not self.called.issuperset(paths):
            self.keep_hooks()
