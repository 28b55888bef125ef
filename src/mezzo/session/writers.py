"""The writes of a step: each kind of optimizer does what the verdict says, or skips."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import ne
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from mezzo.errors import PolicyError, StateError, some_of
from mezzo.hooks import Look, before_every_step, hooks_of_every_step, step_hooks
from mezzo.interrupts import Members, uninterrupted
from mezzo.optim.groups import changes_nothing
from mezzo.optim.optimizer import as_one_pass, one_pass
from mezzo.session.observers import Judged, Watched
from mezzo.session.window import Window, multiply
from mezzo.sharded import is_distributed
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import dense
from mezzo.step.verdict import as_fused
from mezzo.tensors import LOW, tensors, tree_map, versions
from mezzo.weights.stepping import in_memory, stored_again

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mezzo.session.stats import Step
    from mezzo.session.weights import Weights


#: Where optimizers are that a program has not written.
_OWN: Final = ("torch.optim.", "mezzo.optim.")
_FLOATS: Final = {float, numpy.float64}


class Writes:
    """What an engine has of its optimizers, and how it writes with them.

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
        """Whether an optimizer updates no parameter of the models; asked anew where it was given further groups.

        **Cost**: Python for each parameter of both, once.
        """
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if self._strangers.get(optimizer) == sizes:
            return True
        known = {id(param) for model in self.weights.models for param in model.parameters()}
        if any(id(param) in known for group in optimizer.param_groups for param in group["params"]):
            return False
        self._strangers[optimizer] = sizes
        return True

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer is one of these, inside of one as SAM's is, or around one, whose step it calls."""
        known = self.weights.optimizers
        return (
            optimizer in known
            or optimizer in self.steps_by
            or any(each in known for each in inner_optimizers(optimizer))
            or any(optimizer in inner_optimizers(each) for each in known)
        )

    @contextmanager
    def stepping_by(self, optimizer: Optimizer, step: Callable[..., Any]) -> Iterator[list[Any]]:
        """Have an optimizer step by this call meanwhile; yield where what the call returns is noted."""
        returned = list[Any]()

        @functools.wraps(step.func if isinstance(step, functools.partial) else step)  # whose it is, is asked later
        def call(*args: Any) -> Any:
            returned.append(step(*args))
            return returned[-1]

        before, self.steps_by[optimizer] = self.steps_by.get(optimizer), call
        try:
            yield returned
        finally:
            del self.steps_by[optimizer]
            if before is not None:
                self.steps_by[optimizer] = before

    def shows(self, optimizer: Optimizer) -> bool:
        """Whether a program's code looks at gradients in an optimizer's step: a hook, or a class with another step."""
        is_other = not getattr(optimizer.step, "__module__", "").startswith(_OWN)
        is_seen = is_other and _own_class(type(optimizer).__mro__) is not Optimizer
        return is_seen or _has_other_hooks(optimizer, self.num_hooks)

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
        windows: list[Window],
        optimizers: list[Optimizer],
        judged: Judged,
        *,
        by: Callable[..., Any] | None,
    ) -> None:
        """Update, or skip.

        Optimizers whose kernels can do it, mezzo's and torch's fused ones, unscale, clip and skip on the device. For
        all others the host asks whether to skip, one sync for all, and gradients are multiplied in place.

        Args:
            windows: The gradients' windows.
            optimizers: Those that step.
            judged: The gradients, with the verdict.
            by: Called in place of the one optimizer's step, if it is not skipped.
        """
        verdict = judged.verdict
        of_mezzo = one_pass(optimizers)
        on_device = [each for each in optimizers if by is None and takes_flags(each)]
        shared_by = {each for window in windows if len(window.plan.optimizers) > 1 for each in window.plan.optimizers}
        # Another optimizer would read the same gradients, or a program's code; and low weights take no FP32 ones.
        alone = [each for each in on_device if each not in shared_by and each not in judged.shown]
        multiplying = [each for each in alone if each in of_mezzo or not _narrows(each)]
        for own in of_mezzo:  # what one refuses is refused before another has stepped
            does_all = own in multiplying
            own.make_ready(verdict if does_all else verdict.applied(), keep=does_all)
        skips = len(on_device) < len(optimizers) and bool(verdict.found_inf)
        stepping = [each for each in optimizers if not skips or each in on_device]
        others = [each for each in stepping if each not in multiplying]
        if others and not verdict.is_one:
            params = {id(param): param for other in others for param in self.weights.updated(other)}
            multiply(dense(list(params.values()))[1], verdict.multiplier)
            for window in windows:
                if not set(window.plan.optimizers).isdisjoint(others):
                    # Should a hook raise, so that the step is taken again.
                    window.now = window.now._replace(scale=None, found=verdict.found_inf)
        for other in others:
            if other not in of_mezzo:
                _narrow(self.weights.updated(other))
        self._step_all(stepping, judged, multiplying, on_device, by)
        divided = [optimizer for optimizer in multiplying if optimizer not in of_mezzo]
        for window in windows if divided else ():  # torch's fused kernels leave gradients without the scale
            if not set(window.plan.optimizers).isdisjoint(divided):
                window.now = window.now._replace(scale=None)

    def _step_all(
        self,
        stepping: list[Optimizer],
        judged: Judged,
        multiplying: list[Optimizer],
        on_device: list[Optimizer],
        by: Callable[..., Any] | None,
    ) -> None:
        begun: list[_Stood] = []
        self.is_stepping = True
        try:
            for optimizer in stepping:
                step = by or self.steps_by.get(optimizer, optimizer.step)
                begun.append(self._stood(optimizer, step, judged))
                _step(optimizer, step, judged, multiplies=optimizer in multiplying, on_device=optimizer in on_device)
                if begun[-1].is_new and begun[-1].is_counted():
                    self._counted.add(optimizer)
        except BaseException:
            for each in stepping:
                stored_again(each)
            if any(each.was_written() for each in begun):
                self.broken = f"{type(begun[-1].optimizer).__name__}.step()"
            else:
                for stood in begun:
                    stood.restore()
            raise
        finally:
            self.is_stepping = False
            torch.clear_autocast_cache()  # a region may be around the loop: model.fit(x)
            for each in stepping:
                stored_again(each)

    def _stood(self, optimizer: Optimizer, step: Callable[..., Any], judged: Judged) -> _Stood:
        """Note what stands before an optimizer steps."""
        of_torch = getattr(step, "__module__", "").startswith("torch.optim.")
        is_orderly = of_torch and judged.is_alike and optimizer not in judged.shown
        return _Stood(optimizer, is_orderly=is_orderly, is_new=not of_torch and optimizer not in self._counted)


# What a step that raises has done -----------------------------------------------------------------------------

#: By the bytes of an element: the whole numbers of its bits, and what they are added up in.
_WHOLE: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED: Final = {1: torch.int32, 2: torch.int32, 4: torch.int32, 8: torch.int64}


class _Stood:
    """What stood before a step of an optimizer: should the step raise, whether it has written that.

    Where it has not, the step is taken back: state that it has made goes again, and numbers that it has counted there
    or in groups are put back. torch counts the writes to each tensor, but for those through ``param.data``: the bits of
    parameters are added up until a step of the optimizer has shown that its writes are counted.

    Args:
        optimizer: The optimizer.
        is_orderly: Whether it is known to write parameters and state alone, and those of a group in their order, or all
            at once, as torch's do: then the first one tells.
        is_new: Whether no step of it has shown yet that its writes are counted.

    **Cost**: 5 µs a group where it is orderly, else 1 µs a parameter; of a new one a pass over its parameters. mezzo's
    tell it by themselves.
    """

    def __init__(self, optimizer: Optimizer, *, is_orderly: bool, is_new: bool) -> None:
        self.optimizer, self._own = optimizer, as_one_pass(optimizer)
        self.is_new = is_new and self._own is None
        self._held: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # mappings, each with what it holds
        if self._own is not None:
            self._updates = self._own.updates
            return
        if is_orderly:
            self._params, state = _firsts(optimizer), optimizer.state
            inner = [state[param] for param in self._params if param in state]
            outer = [state]
        else:
            family = [optimizer, *inner_optimizers(optimizer)]
            groups = [group for each in family for group in each.param_groups]
            self._params = [param for group in groups for param in group["params"]]
            inner = [*groups, *(kept for each in family for kept in each.state.values() if isinstance(kept, dict))]
            outer = [each.state for each in family]
        self._held = [(each, dict(each)) for each in (*outer, *inner)]
        values = [value for each in inner for name, value in each.items() if name != "params"]
        others = [value for value in values if not isinstance(value, Tensor)]
        self._tensors = [*self._params, *values]
        if others:
            self._tensors = [*self._params, *(value for value in values if isinstance(value, Tensor)), *tensors(others)]
        self._versions = versions(self._tensors)
        self._bits = _bits(self._params) if self.is_new else []

    def is_counted(self) -> bool:
        """Whether torch has counted a write to a parameter."""
        return any(map(ne, versions(self._params), self._versions))

    def was_written(self) -> bool:
        """Whether the step has written what stood before it."""
        if self._own is not None:
            return self._own.updates != self._updates
        if versions(self._tensors) != self._versions or any(map(is_distributed, self._params)):
            return True  # of shards torch counts nothing, and other ranks may have written
        now = _bits(self._params) if self.is_new else []
        return len(now) != len(self._bits) or not all(map(torch.equal, self._bits, now))

    def restore(self) -> None:
        """Take away what the step has made, and put numbers back."""
        for mapping, held in self._held:
            mapping.clear()
            mapping.update(held)


def _firsts(optimizer: Optimizer) -> list[Tensor]:
    """Return the first parameter of each group that has a gradient."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                found.append(param)
                break
    return found


def _bits(params: list[Tensor]) -> list[Tensor]:
    """Return sums of the bits of parameters, wherever they lie: whatever writes one of them changes its sum."""
    lying = [each.detach() for each in in_memory(params) if each.layout == torch.strided]
    whole = [torch.view_as_real(each) if each.is_complex() else each for each in lying]
    # Sums of 32 bits wrap around, and cost no copy of 64 bits.
    return [each.view(_WHOLE[each.element_size()]).sum(dtype=_SUMMED[each.element_size()]) for each in whole]


# Optimizers that nobody has told of ---------------------------------------------------------------------------

#: What each session that lives writes with.
_LIVE: Final[Members[weakref.ref[Writes]]] = Members()


def guarded(writes: Writes) -> Callable[[], None]:
    """Refuse steps of optimizers over the models' parameters that a session does not know; return what ends it."""
    here = weakref.ref(writes, _LIVE.remove)
    _LIVE.add(here)
    before_every_step(_LOOK)
    return functools.partial(_LIVE.remove, here)


def _refuse_unknown(optimizer: Optimizer) -> None:
    """Refuse a step that a session should have been told of: a hook before each step of any optimizer.

    Raises:
        StateError: It would update parameters of a session's models, which are checked for others.
    """
    for here in _LIVE.now:
        if (
            (writes := here()) is None
            or writes.is_stepping
            or writes.shares_nothing(optimizer)
            or writes.knows(optimizer)
        ):
            continue
        known = {id(param) for model in writes.weights.models for param in model.parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        if not any(id(param) in known for param in params) or changes_nothing(
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


_LOOK: Final = Look(_refuse_unknown)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that one has as its attributes, as SAM wraps one, and those that these have."""
    found = [optimizer]
    for each in found:  # those that are found meanwhile, too
        found += [inner for inner in vars(each).values() if isinstance(inner, Optimizer) and inner not in found]
    return found[1:]


def _has_other_hooks(optimizer: Optimizer, own: int) -> bool:
    """Whether hooks run before an optimizer's step, besides so many of the session's."""
    return len(step_hooks(optimizer)) > own or not {*map(type, hooks_of_every_step())} <= {Look}


def _step(optimizer: Optimizer, step: Callable[..., Any], judged: Judged, *, multiplies: bool, on_device: bool) -> None:
    verdict = judged.verdict
    if (own := as_one_pass(optimizer)) is not None:
        own.update(verdict if multiplies else verdict.applied(), step)
    elif not on_device:
        step()
    else:
        numbers = [verdict.found_inf, *([verdict.multiplier] if judged.is_clipped else [])]
        found_inf, *divisor = verdict.as_fused or shared(as_fused, (), numbers)
        # Unclipped, the scale itself: the inverse of its inverse is another number, unless it is a power of two.
        grad_scale = (divisor[0] if divisor else judged.scale) if multiplies else None
        told: Any = optimizer
        if (own_scale := getattr(told, "grad_scale", None)) is not None:  # a user's counts besides, as in torch
            grad_scale = own_scale if grad_scale is None else grad_scale * own_scale
        told.found_inf, told.grad_scale = found_inf, grad_scale
        try:
            step()
        finally:
            del told.found_inf, told.grad_scale


def takes_flags(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels are told on the device to skip; a loaded state may have turned that off.

    Those of torch's fused SGD are once there are momentum buffers: what a skipped first step leaves was never written.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or _asks_for_scaler(type(optimizer).step):
        return False
    if not all(group.get("fused", True) for group in optimizer.param_groups):
        return False
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    return all(
        optimizer.state.get(param, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for param in group["params"]
        if group["momentum"] and param.grad is not None
    )


@functools.cache
def _asks_for_scaler(step: Callable[..., Any]) -> bool:
    """Whether an optimizer's step is of the older contract: it is given a scaler, and reads no flags."""
    return "grad_scaler" in inspect.signature(step).parameters


def _narrows(optimizer: Optimizer) -> bool:
    """Whether there are FP32 gradients of low weights, of which a policy keeps no FP32 values."""
    low = (param for group in optimizer.param_groups for param in group["params"] if param.dtype in LOW)
    return any(param.grad is not None and param.grad.dtype not in LOW for param in low)


def _narrow(params: Any) -> None:
    """Give low weights gradients of their own dtype, as torch's optimizers want them."""
    for param in params:
        if param.dtype in LOW and param.grad is not None and param.grad.dtype not in LOW:
            wide, param.grad, param.grad_dtype = param.grad, None, param.dtype
            param.grad = wide.to(param.dtype)


def check_numbers(optimizers: Collection[Optimizer]) -> None:
    """Refuse hyper-parameters of torch's and mezzo's own that are not finite; tensors are not looked at.

    What other classes keep in their groups is their business: to some, infinity means no limit.

    Raises:
        PolicyError: With the optimizer, the group and the name.
    """
    for optimizer in optimizers:
        own = _own_class(type(optimizer).__mro__)
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if type(value) in _FLOATS and value - value != 0 and name in inspect.signature(own).parameters:
                    raise PolicyError(
                        f"{name} is {value}",
                        where=f"{type(optimizer).__name__}, group {number}",
                        why="every weight would be NaN after this step",
                        write=f'optimizer.param_groups[{number}]["{name}"] = …, a finite number',
                    )


@functools.cache
def _own_class(kinds: tuple[type, ...]) -> type:
    """Return the first of an optimizer's classes that is torch's or mezzo's: ``Optimizer`` of most others."""
    return next(each for each in kinds if each.__module__.startswith(_OWN))


# Optimizers that evaluate the loss inside their step: each time it is checked, and all is undone if one overflows.


class Judges(Watched, Protocol):
    """What judges evaluations and takes the step that they end in: an engine.

    Attributes:
        steps_by: What steps with an optimizer whose ``step`` is taken over.
        is_stepping: Whether optimizers step on the engine's behalf now.
    """

    steps_by: dict[Optimizer, Callable[..., Any]]
    is_stepping: bool

    def require_whole(self) -> None:
        """Refuse to go on from an update that was ended half-way."""

    def told_to_ranks(self) -> AbstractContextManager[None]:
        """Have an error of this rank end the step of all."""

    def warn_of_edits(self, windows: list[Window]) -> None:
        """Warn of gradients that were edited while they carry the scale."""

    def judge(self, windows: list[Window], optimizers: Collection[Optimizer]) -> tuple[Judged, Tensor | None]:
        """Judge the gradients of some optimizers."""

    def finish(self, windows: list[Window], judged: Judged, absent: Tensor | None) -> Step:
        """End a step whose writes are done."""


def evaluated(engine: Judges, optimizers: Collection[Optimizer], closure: Callable[[], Any]) -> Step:
    """Let one optimizer evaluate the loss by itself, as LBFGS and SAM do.

    Gradients that there are before the first evaluation count as one: SAM begins with them. If an evaluation overflows,
    or anything raises, weights and the optimizer's state are put back.

    Args:
        engine: The engine.
        optimizers: The one.
        closure: Clears the gradients, computes the loss, and runs its backward pass.

    Raises:
        PolicyError: Several optimizers, each of which would move its weights between evaluations.
        StateError: The closure computed no gradient, or was not evaluated.

    **Cost**: a copy of weights and state; one host sync for each evaluation.
    """
    if len(optimizers) != 1:
        raise PolicyError(
            "a closure is for one optimizer",
            where=f"amp.step(closure=…) for {some_of([type(each).__name__ for each in optimizers])}",
            why="each optimizer moves its weights between two evaluations of the loss",
            write="amp.step(optimizers=optimizer, closure=closure), for one after the other",
        )
    engine.require_whole()
    check_numbers(optimizers)
    with engine.told_to_ranks():
        return _Evaluations(engine, next(iter(optimizers)), closure).run()


class _Evaluations:
    """The evaluations of one step."""

    def __init__(self, engine: Judges, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        self._engine, self._optimizer, self._closure = engine, optimizer, closure
        (self._window,) = (window for window in engine.windows if optimizer in window.plan.optimizers)
        self._last: tuple[Judged, Tensor | None, Tensor | None] | None = None

    def run(self) -> Step:
        engine, weights = self._engine, self._engine.weights
        before = [(param, param.detach().clone()) for param in weights.updated(self._optimizer)]
        restores = [_remembering(each) for each in (self._optimizer, *inner_optimizers(self._optimizer))]
        engine.is_stepping = True
        try:
            if self._window.now.passes and self._window.has_gradients():
                self._judge()  # SAM begins with these
            engine.steps_by.get(self._optimizer, self._optimizer.step)(self._evaluate)
            if self._last is None:
                raise StateError(
                    f"{type(self._optimizer).__name__}.step() did not evaluate the closure",
                    write="amp.backward(loss), then amp.step() without closure=",
                )
        except BaseException as error:
            with uninterrupted():
                for each in (self._optimizer, *inner_optimizers(self._optimizer)):
                    stored_again(each)
                with torch.no_grad():
                    for param, value in before:
                        param.copy_(value)
                for restore in restores:
                    restore()
                self._window.close()
            if not isinstance(error, Overflowed):
                raise
        finally:
            engine.is_stepping = False
            torch.clear_autocast_cache()
        assert self._last is not None, "an optimizer that was not asked raises"
        with uninterrupted():
            judged, absent, made_with = self._last
            self._window.now = self._window.now._replace(made_with=made_with)
            return engine.finish([self._window], judged, absent)

    def _evaluate(self) -> Any:
        self._engine.is_stepping = False
        torch.clear_autocast_cache()  # of weights that the optimizer has moved since
        try:
            with torch.enable_grad():  # as torch's own optimizers do, and others may not
                loss = self._closure()
        finally:
            self._engine.is_stepping = True
        if not self._window.has_gradients():
            raise StateError("the closure computed no gradient", write="amp.backward(loss) in the closure")
        self._judge()
        return loss

    @torch.no_grad()
    def _judge(self) -> None:
        """Judge an evaluation's gradients, and show the optimizer plain ones."""
        window = self._window
        self._engine.warn_of_edits([window])
        judged, absent = self._engine.judge([window], [self._optimizer])
        self._last = judged, absent, window.now.made_with
        if bool(judged.verdict.found_inf):
            raise Overflowed
        if not judged.verdict.is_one:
            multiply(judged.gradients, judged.verdict.multiplier)
        window.close()


class Overflowed(Exception):  # noqa: N818 - it never leaves the engine
    """An evaluation's gradients are not finite."""


def closure_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among what a step is given, first of all or by name: an optimizer may take more."""
    first = args[0] if args else None
    is_first = callable(first) and not isinstance(first, nn.Module)
    return first if is_first else kwargs.get("closure")


def handing_on(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return a step that hands on what it was given: called with a closure it has that one in the place of its own."""

    @functools.wraps(step)
    def call(*closure: Any) -> Any:
        if not closure:
            return step(*args, **kwargs)
        if "closure" in kwargs:
            return step(*args, **kwargs | {"closure": closure[0]})
        return step(*closure, *args[1:], **kwargs)

    return call


def evaluates_once(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to evaluate a closure once, before it updates anything."""
    of_torch = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)
    return of_torch or as_one_pass(optimizer) is not None


def _remembering(optimizer: Optimizer) -> Callable[[], None]:
    """Return what puts an optimizer's state and options back, tensors of its state in the same memory."""
    # By parameter, and what users note down beside them.
    state = {key: dict(kept) if isinstance(kept, dict) else kept for key, kept in optimizer.state.items()}
    values = {key: _copied(kept) for key, kept in state.items()}
    options = [_copied({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]

    def restore() -> None:
        optimizer.state.clear()
        for key, kept in values.items():
            if isinstance(there := state[key], dict):  # an optimizer may know the addresses of its tensors
                kept = {n: there[n].copy_(value) if isinstance(value, Tensor) else value for n, value in kept.items()}
            optimizer.state[key] = kept
        for group, before in zip(optimizer.param_groups, options, strict=True):
            params = group["params"]
            group.clear()
            group.update(params=params, **before)

    return restore


def _copied(value: Any) -> Any:
    """Copy a tensor, any plain value, and whatever containers hold them."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), value)
