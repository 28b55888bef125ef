"""The writes of a step: each kind of optimizer does what the verdict says, or skips."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter, ne
from typing import Any, ClassVar, Final, Protocol, cast

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import PolicyError, StateError
from mezzo.hooks import before_every_step, has_hooks_of_every_step, hooks_of_every_step, step_hooks
from mezzo.interrupts import Members
from mezzo.optim.groups import changes_nothing
from mezzo.optim.optimizer import OnePassOptimizer, as_one_pass
from mezzo.session.weights import Weights
from mezzo.sharded import is_distributed
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import dense, multiply
from mezzo.step.verdict import JudgedGradients, Verdict, as_fused
from mezzo.tensors import LOW, tensors, versions
from mezzo.weights.halves import Halves
from mezzo.weights.stepping import in_memory, stored_again

_WAITS: Final = attrgetter("waits")
_IS_PLAIN: Final = attrgetter("is_plain")
_DIVIDES: Final = attrgetter("divides")
#: Where optimizers are that a program has not written.
_OWN: Final = ("torch.optim.", "mezzo.optim.")
_FLOATS: Final = {float, numpy.float64}
#: The classes of parameters whose functions are torch's own.
_OF_TORCH: Final = frozenset({Tensor, torch.nn.Parameter, Halves})


@dataclass(frozen=True, slots=True, eq=False)
class Writer:
    """The writer of an optimizer whose kernels read no verdict: it steps, or does not, as the verdict says.

    The host asks whether to skip, once for all such optimizers of a step; gradients are multiplied in place before it.

    Attributes:
        optimizer: The optimizer.
        exposes_gradients: Whether a program's code sees gradients in its step: a hook, or a class with another step.
        is_plain: Whether the gradients are multiplied in place before the step, and not by the optimizer's kernels.
        waits: Whether the host asks for the verdict before the step.
        has_low: Whether it has parameters in 16 bits, which want gradients of their dtype.
        is_own: Whether its step runs none of a program's code, nor of a class of tensors, but torch's and mezzo's.
        divides: Whether its kernels leave gradients without the scale, where they multiply.
    """

    divides: ClassVar[bool] = False
    optimizer: Optimizer
    exposes_gradients: bool = False
    is_plain: bool = True
    waits: bool = True
    has_low: bool = False
    is_own: bool = False

    def now(self, *, host_decides: bool) -> Writer:
        """Return the writer for a step that is about to be judged: this one, or one that writes in another way.

        Args:
            host_decides: Whether the host decides if the optimizer steps: a call stands in the place of its step.
        """
        return self

    def ready(self, verdict: Verdict) -> None:
        """Raise all that the optimizer could refuse; nothing is written."""

    def before(self, judged: JudgedGradients, step: Callable[..., Any], *, is_new: bool) -> Before:
        """Return a record of state and parameters before a step, which may raise."""
        of_torch = _module_of(step).startswith("torch.optim.")
        is_orderly = of_torch and judged.is_alike and not self.exposes_gradients
        return _Snapshot(self.optimizer, is_orderly=is_orderly, is_new=is_new and not of_torch)

    def write(self, judged: JudgedGradients, step: Callable[..., Any]) -> None:
        """Update, or skip where the verdict says so.

        Args:
            judged: The gradients, with the verdict.
            step: What steps with the optimizer.
        """
        step()


@dataclass(frozen=True, slots=True, eq=False)
class OnePass(Writer):
    """The writer of one of mezzo's optimizers, which take a verdict."""

    optimizer: OnePassOptimizer

    def now(self, *, host_decides: bool) -> Writer:
        """See :meth:`Writer.now`."""
        return replace(self, is_plain=True, waits=True) if host_decides else self

    def ready(self, verdict: Verdict) -> None:
        """See :meth:`Writer.ready`."""
        self.optimizer.make_ready(verdict.applied() if self.is_plain else verdict, keep=not self.is_plain)

    def before(self, judged: JudgedGradients, step: Callable[..., Any], *, is_new: bool) -> Before:
        """See :meth:`Writer.before`."""
        return _Updates(self.optimizer)

    def write(self, judged: JudgedGradients, step: Callable[..., Any]) -> None:
        """See :meth:`Writer.write`."""
        self.optimizer.update(judged.verdict.applied() if self.is_plain else judged.verdict, step)


@dataclass(frozen=True, slots=True, eq=False)
class Fused(Writer):
    """The writer of a fused optimizer of torch's, whose kernels read the scale and a flag to skip."""

    divides: ClassVar[bool] = True

    def now(self, *, host_decides: bool) -> Writer:
        """See :meth:`Writer.now`."""
        if host_decides or not _may_skip_on_device(self.optimizer):
            return Writer(
                self.optimizer, exposes_gradients=self.exposes_gradients, has_low=self.has_low, is_own=self.is_own
            )
        return replace(self, is_plain=True) if self.has_low and _narrows(self.optimizer) else self

    def write(self, judged: JudgedGradients, step: Callable[..., Any]) -> None:
        """See :meth:`Writer.write`. Gradients are left without the scale."""
        verdict, fused = judged.verdict, cast(Any, self.optimizer)
        numbers = [verdict.found_inf, *([verdict.multiplier] if judged.is_clipped else [])]
        found_inf, *divisor = verdict.as_fused or shared(as_fused, (), numbers)
        # Without clipping the scale itself, since 1/(1/scale) differs from a scale that is no power of two.
        grad_scale = None if self.is_plain else divisor[0] if divisor else judged.scale
        # A scale that the user has set counts besides, as in torch.
        if (users_scale := getattr(fused, "grad_scale", None)) is not None:
            grad_scale = users_scale if grad_scale is None else grad_scale * users_scale
        fused.found_inf, fused.grad_scale = found_inf, grad_scale
        try:
            step()
        finally:
            del fused.found_inf, fused.grad_scale


def writer_of(optimizer: Optimizer, *, is_shared: bool, num_hooks: int) -> Writer:
    """Return what updates the parameters of an optimizer.

    It holds as long as :func:`deciding` returns the same of the optimizer, and its parameters have these dtypes.

    Args:
        optimizer: The optimizer.
        is_shared: Whether another one updates parameters of it, and reads the same gradients.
        num_hooks: How many hooks before its step are a session's, which raise and write nothing there.
    """
    is_own = _module_of(optimizer.step).startswith(_OWN)
    exposes_gradients = not is_own and _own_class(type(optimizer).__mro__) is not Optimizer
    exposes_gradients = exposes_gradients or len(step_hooks(optimizer)) > num_hooks or has_hooks_of_every_step()
    is_plain, one_pass_optimizer = is_shared or exposes_gradients, as_one_pass(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_own = is_own and not exposes_gradients and _OF_TORCH.issuperset(map(type, params))
    if one_pass_optimizer is not None:
        return OnePass(
            one_pass_optimizer, exposes_gradients=exposes_gradients, is_plain=is_plain, waits=False, is_own=is_own
        )
    has_low = any(param.dtype in LOW for param in params)
    if _reads_skip_flag(optimizer):
        return Fused(
            optimizer,
            exposes_gradients=exposes_gradients,
            is_plain=is_plain,
            waits=False,
            has_low=has_low,
            is_own=is_own,
        )
    return Writer(optimizer, exposes_gradients=exposes_gradients, has_low=has_low, is_own=is_own)


def _module_of(step: Callable[..., Any]) -> str:
    """Return where what steps is written: of a partial call of a function that is the function's."""
    return getattr(step.func if isinstance(step, functools.partial) else step, "__module__", None) or ""


def deciding(optimizers: Iterable[Optimizer]) -> list[Any]:
    """Return the facts of optimizers that decide about their writers and change without a call that would show it.

    Hooks before steps, a ``step`` that was replaced, groups that are no longer fused.

    **Cost**: 1 µs an optimizer.
    """
    decisive: list[Any] = hooks_of_every_step()
    for optimizer in optimizers:
        decisive += optimizer.step, *step_hooks(optimizer)
        for group in optimizer.param_groups:
            decisive.append(group.get("fused"))
    return decisive


def takes_flags(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels are told on the device to skip; a loaded state may have turned that off.

    Those of torch's fused SGD are once there are momentum buffers: what a skipped first step leaves was never written.
    """
    return _reads_skip_flag(optimizer) and _may_skip_on_device(optimizer)


def _reads_skip_flag(optimizer: Optimizer) -> bool:
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or _asks_for_scaler(type(optimizer).step):
        return False
    return all(group.get("fused", True) for group in optimizer.param_groups)


@functools.cache
def _asks_for_scaler(step: Callable[..., Any]) -> bool:
    """Whether an optimizer's step follows torch's older contract: it takes a scaler, and reads no flags."""
    return "grad_scaler" in inspect.signature(step).parameters


def _may_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer's first step may be skipped on the device: SGD leaves momentum there that it never wrote."""
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    return all(
        optimizer.state.get(param, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for param in group["params"]
        if group["momentum"] and param.grad is not None
    )


def _narrows(optimizer: Optimizer) -> bool:
    """Whether there are FP32 gradients of low weights, of which a policy keeps no FP32 values."""
    low_params = (param for group in optimizer.param_groups for param in group["params"] if param.dtype in LOW)
    return any(param.grad is not None and param.grad.dtype not in LOW for param in low_params)


def _narrow(params: Any) -> None:
    """Cast the gradients of low weights to the weights' dtype, as torch's optimizers want them."""
    for param in params:
        if param.dtype in LOW and param.grad is not None and param.grad.dtype not in LOW:
            wide, param.grad, param.grad_dtype = param.grad, None, param.dtype
            param.grad = wide.to(param.dtype)


class ScaleHolder(Protocol):
    """What knows which scale the gradients of some optimizers carry: a window."""

    def lost_scale(self, optimizers: Collection[Optimizer], found_inf: Tensor | None = None) -> None:
        """Record that the gradients of some optimizers carry no scale any more, and whether they were finite."""


# The writes of an engine --------------------------------------------------------------------------------------


class Writes:
    """The writes of an engine: the calls that step with each optimizer, and whether an update was ended half-way.

    Args:
        weights: The models and optimizers.

    Attributes:
        weights: The models and optimizers.
        steps_by: What steps with an optimizer whose ``step`` is taken over.
        is_stepping: Whether optimizers step on the engine's behalf now.
        broken: The optimizer that has raised in the middle of an update; empty where none has.
        num_hooks: How many hooks before an optimizer's step are the engine's, which raise and write nothing there.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.steps_by: dict[Optimizer, Callable[..., Any]] = {}
        self.is_stepping, self.broken, self.num_hooks = False, "", 0
        self._strangers: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self._counted: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def shares_nothing(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer updates no parameter of the models; computed anew where it has got further groups.

        **Cost**: Python for each parameter of both, once.
        """
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if self._strangers.get(optimizer) == sizes:
            return True
        param_ids = {id(param) for model in self.weights.models for param in model.parameters()}
        if any(id(param) in param_ids for group in optimizer.param_groups for param in group["params"]):
            return False
        self._strangers[optimizer] = sizes
        return True

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer is the session's, inside of one of its optimizers as SAM's is, or around one."""
        optimizers = self.weights.optimizers
        return (
            optimizer in optimizers
            or optimizer in self.steps_by
            or any(inner in optimizers for inner in inner_optimizers(optimizer))
            or any(optimizer in inner_optimizers(outer) for outer in optimizers)
        )

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return what steps with an optimizer."""
        return self.steps_by.get(optimizer) or optimizer.step

    @contextmanager
    def stepping_by(self, optimizer: Optimizer, step: Callable[..., Any]) -> Iterator[list[Any]]:
        """Replace the step of an optimizer by this call in the block; yield the list of what the call returns."""
        returned = list[Any]()

        def call(*args: Any) -> Any:
            returned.append(step(*args))
            return returned[-1]

        call.__module__ = _module_of(step)
        before, self.steps_by[optimizer] = self.steps_by.get(optimizer), call
        try:
            yield returned
        finally:
            del self.steps_by[optimizer]
            if before is not None:
                self.steps_by[optimizer] = before

    @contextmanager
    def stepping(self, is_stepping: bool = True) -> Iterator[None]:
        """Mark steps in the block as the engine's, or as the program's where a closure runs in the block."""
        before, self.is_stepping = self.is_stepping, is_stepping
        try:
            yield
        finally:
            self.is_stepping = before
            torch.clear_autocast_cache()  # a region may be around the loop: model.fit(x)

    def require_whole(self) -> None:
        """Refuse to go on from an update that an optimizer has ended in its middle.

        Raises:
            StateError: With the optimizer, and what to write.
        """
        if self.broken:
            raise StateError(
                "an update was ended half-way",
                where=self.broken,
                why="some weights and moments are those of the next step, and some are not",
                write="load_state_dict(…) of model, optimizer and session, from the last checkpoint",
            )

    def write(
        self,
        writers: Sequence[Writer],
        windows: Sequence[ScaleHolder],
        judged: JudgedGradients,
        step_call: Callable[..., Any] | None,
    ) -> None:
        """Update, or skip.

        Args:
            writers: Of the optimizers that step: what :meth:`Writer.now` has returned.
            windows: The gradients' windows.
            judged: The gradients, with the verdict.
            step_call: Called in place of the one optimizer's step, if it is not skipped.
        """
        verdict = judged.verdict
        for writer in writers:  # all refusals come before the first optimizer has stepped
            writer.ready(verdict)
        num_writers = len(writers)
        if any(map(_WAITS, writers)) and bool(verdict.found_inf):
            writers = [writer for writer in writers if not writer.waits]
        if any(map(_IS_PLAIN, writers)):
            plain = [writer for writer in writers if writer.is_plain]
            self._multiply(plain, windows, judged, are_all=len(plain) == num_writers)
        self._step_all(writers, judged, step_call)
        if any(map(_DIVIDES, writers)):
            divided = [writer.optimizer for writer in writers if writer.divides and not writer.is_plain]
            for window in windows if divided else ():
                window.lost_scale(divided)

    def _multiply(
        self, writers: list[Writer], windows: Sequence[ScaleHolder], judged: JudgedGradients, *, are_all: bool
    ) -> None:
        """Make the gradients plain that optimizers read as they are: of those of a step all, or those of some."""
        optimizers, verdict = [writer.optimizer for writer in writers], judged.verdict
        if not verdict.is_one:
            gradients = judged.gradients
            if not are_all:
                params = {id(param): param for optimizer in optimizers for param in self.weights.updated(optimizer)}
                gradients = dense(list(params.values()))[1]
            multiply(gradients, verdict.multiplier)
            for window in windows:
                window.lost_scale(optimizers, verdict.found_inf)  # should a hook raise, so that the step is taken again
        for writer in writers:
            if writer.has_low:
                _narrow(self.weights.updated(writer.optimizer))

    def _step_all(
        self, writers: Sequence[Writer], judged: JudgedGradients, step_call: Callable[..., Any] | None
    ) -> None:
        records: list[tuple[Writer, Before]] = []
        self.is_stepping = True
        try:
            for writer in writers:
                optimizer, step = writer.optimizer, step_call or self.step_of(writer.optimizer)
                is_new = optimizer not in self._counted
                before = writer.before(judged, step, is_new=is_new)
                records.append((writer, before))
                writer.write(judged, step)
                if is_new and before.is_counted():
                    self._counted.add(optimizer)
        except BaseException:
            for writer in writers:
                stored_again(writer.optimizer)
            if any(before.was_written() for _, before in records):
                self.broken = f"{type(records[-1][0].optimizer).__name__}.step()"
            else:
                for _, before in records:
                    before.restore()
            raise
        finally:
            self.is_stepping = False
            torch.clear_autocast_cache()  # a region may be around the loop: model.fit(x)


# What a step that raises has done -----------------------------------------------------------------------------

#: By the bytes of an element: the whole numbers of its bits, and what they are added up in.
_WHOLE: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED: Final = {1: torch.int32, 2: torch.int32, 4: torch.int32, 8: torch.int64}


class Before(Protocol):
    """A record made before a step of an optimizer: if the step raises, it tells whether the step has written."""

    def is_counted(self) -> bool:
        """Whether the step, which has not raised, has shown that torch counts the optimizer's writes."""

    def was_written(self) -> bool:
        """Whether the step has written parameters or state."""

    def restore(self) -> None:
        """Remove the state that the step has made, and restore the numbers of before."""


class _Updates:
    """The number of updates of one of mezzo's optimizers, which refuse before they write, and count updates."""

    def __init__(self, optimizer: OnePassOptimizer) -> None:
        self._optimizer, self._updates = optimizer, optimizer.updates

    def is_counted(self) -> bool:
        """See :class:`Before`."""
        return True

    def was_written(self) -> bool:
        """See :class:`Before`."""
        return self._optimizer.updates != self._updates

    def restore(self) -> None:
        """See :class:`Before`; no state was made before the refusal."""


class _Snapshot:
    """A snapshot of an optimizer that is not mezzo's, before its step.

    A step that raises before it has written is undone: state that it has made is removed, and numbers that it has
    counted in state or groups are restored. torch counts the writes to each tensor, but for those through
    ``param.data``: so the bits of parameters are summed until a step has shown that its writes are counted.

    Args:
        optimizer: The optimizer.
        is_orderly: Whether it is known to write parameters and state alone, and those of a group in their order, or all
            at once, as torch's do: then the first one tells.
        is_new: Whether no step of it has shown yet that its writes are counted.

    **Cost**: 5 µs a group where it is orderly, else 1 µs a parameter; of a new one a pass over its parameters.
    """

    def __init__(self, optimizer: Optimizer, *, is_orderly: bool, is_new: bool) -> None:
        self.is_new = is_new
        if is_orderly:
            self._params, state = _firsts(optimizer), optimizer.state
            inner = [state[param] for param in self._params if param in state]
            outer = [state]
        else:
            family = [optimizer, *inner_optimizers(optimizer)]
            groups = [group for member in family for group in member.param_groups]
            self._params = [param for group in groups for param in group["params"]]
            inner = [
                *groups,
                *(entry for member in family for entry in member.state.values() if isinstance(entry, dict)),
            ]
            outer = [member.state for member in family]
        self._held: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
            (mapping, dict(mapping)) for mapping in (*outer, *inner)
        ]
        values = [value for mapping in inner for name, value in mapping.items() if name != "params"]
        not_tensors = [value for value in values if not isinstance(value, Tensor)]
        self._tensors = [*self._params, *values]
        if not_tensors:
            self._tensors = [
                *self._params,
                *(value for value in values if isinstance(value, Tensor)),
                *tensors(not_tensors),
            ]
        self._versions = versions(self._tensors)
        self._bit_sums = _bit_sums(self._params) if self.is_new else []

    def is_counted(self) -> bool:
        """See :class:`Before`."""
        return self.is_new and any(map(ne, versions(self._params), self._versions))

    def was_written(self) -> bool:
        """See :class:`Before`."""
        if versions(self._tensors) != self._versions or any(map(is_distributed, self._params)):
            return True  # of shards torch counts nothing, and other ranks may have written
        now = _bit_sums(self._params) if self.is_new else []
        return len(now) != len(self._bit_sums) or not all(map(torch.equal, self._bit_sums, now))

    def restore(self) -> None:
        """See :class:`Before`."""
        for mapping, contents in self._held:
            mapping.clear()
            mapping.update(contents)


def _firsts(optimizer: Optimizer) -> list[Tensor]:
    """Return the first parameter of each group that has a gradient."""
    firsts = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                firsts.append(param)
                break
    return firsts


def _bit_sums(params: list[Tensor]) -> list[Tensor]:
    """Return a sum of the bits of each parameter: any write to a parameter changes its sum."""
    strided = [param.detach() for param in in_memory(params) if param.layout == torch.strided]
    real_params = [torch.view_as_real(param) if param.is_complex() else param for param in strided]
    # Sums of 32 bits wrap around, and cost no copy of 64 bits.
    return [
        numbers.view(_WHOLE[numbers.element_size()]).sum(dtype=_SUMMED[numbers.element_size()])
        for numbers in real_params
    ]


# Optimizers that the session does not know --------------------------------------------------------------------

#: What each session that lives writes with.
_LIVE_WRITES: Final[Members[weakref.ref[Writes]]] = Members()


def refuse_unknown_steps(writes: Writes) -> Callable[[], None]:
    """Refuse steps of unknown optimizers over a session's parameters; return the call that ends this."""
    reference = weakref.ref(writes, _LIVE_WRITES.remove)
    _LIVE_WRITES.add(reference)
    before_every_step(_refuse_unknown_optimizer)  # once for the process: without live writes it refuses nothing
    return functools.partial(_LIVE_WRITES.remove, reference)


def _refuse_unknown_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step that a session should have been told of: a hook before each step of any optimizer.

    Raises:
        StateError: It would update parameters of a session's models, which are checked for others.
    """
    for reference in _LIVE_WRITES.now:
        if (
            (writes := reference()) is None
            or writes.is_stepping
            or writes.shares_nothing(optimizer)
            or writes.knows(optimizer)
        ):
            continue
        param_ids = {id(param) for model in writes.weights.models for param in model.parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        if not any(id(param) in param_ids for param in params) or changes_nothing(
            optimizer.param_groups, [param.grad for param in params if param.grad is not None]
        ):
            continue
        taken_over = "amp.add(optimizer), where it is made; or amp.detach(), and mezzo.attach("
        begin = taken_over if writes.steps_by else "MixedPrecision("
        raise StateError(
            "an optimizer that the session does not know updates parameters of its models",
            where=f"{type(optimizer).__name__}.step()",
            why="their gradients were not checked for it, and may carry the loss scale",
            write=f"{begin}model, [optimizer, other], policy)",
        )


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in the attributes of a wrapper such as SAM, and those in theirs."""
    optimizers = [optimizer]
    for wrapper in optimizers:  # those that are found meanwhile, too
        optimizers += [
            inner for inner in vars(wrapper).values() if isinstance(inner, Optimizer) and inner not in optimizers
        ]
    return optimizers[1:]


def check_numbers(optimizer: Optimizer) -> None:
    """Refuse hyper-parameters of torch's and mezzo's own that are not finite; tensors are not looked at.

    What other classes keep in their groups is their business: to some, infinity means no limit.

    Raises:
        PolicyError: With the optimizer, the group and the name.
    """
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if type(value) not in _FLOATS or value - value == 0:
                continue
            if name in inspect.signature(_own_class(type(optimizer).__mro__)).parameters:
                raise PolicyError(
                    f"{name} is {value}",
                    where=f"{type(optimizer).__name__}, group {number}",
                    why="every weight would be NaN after this step",
                    write=f'optimizer.param_groups[{number}]["{name}"] = …, a finite number',
                )


@functools.cache
def _own_class(kinds: tuple[type, ...]) -> type:
    """Return the first of an optimizer's classes that is torch's or mezzo's: ``Optimizer`` of most libraries'."""
    return next(cls for cls in kinds if cls.__module__.startswith(_OWN))
