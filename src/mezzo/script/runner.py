"""``mezzo.script.run``: an unmodified training script under a policy."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mezzo import sharded
from mezzo.cast import prepare
from mezzo.cast.model.checks import preparations_in
from mezzo.compiling import INSIDE, is_scripted
from mezzo.errors import MezzoError, PolicyError, StateError, raise_together
from mezzo.explanation.rows import counted
from mezzo.policy import Policy, Schedule, ScheduleLike
from mezzo.script.program import Enough, Program, Seams, StepRecord, is_script, own_traceback
from mezzo.script.report import NOT_HELD, NOT_STEPPED, REFUSED, ScriptReport, StepLog
from mezzo.session.attach import CARRIED, AttachedPrecision, attach
from mezzo.session.calls import methods_of
from mezzo.session.closures import closure_of
from mezzo.session.engine import Engine
from mezzo.session.refusals import wrong_options
from mezzo.session.session import engine_of
from mezzo.session.state_tree import steps_of
from mezzo.session.stats import Stats
from mezzo.tensors import LOW, tensors

# The optimizers that a script makes, the modules that hold what they update, and one session over all of them.

Attach = Callable[[list[nn.Module], list[Optimizer], Policy], AttachedPrecision]

#: What each session does otherwise, by the names that :func:`mezzo.attach` binds.
_ALWAYS: Final = "calls of models, loss.backward(), optimizer.step(), scheduler.step()"


class Gathering:
    """The optimizers that a script makes, and one session over all that are alive once one of them trains.

    The session starts with the first forward pass that trains a parameter of an optimizer, or an optimizer's first step
    with a closure. A later optimizer over parameters of the session's models joins the session. One over other
    parameters, or parameters that an optimizer gets later, end the session; the next forward pass that trains starts
    another, with the loss scale and the gradients of the one before.

    Args:
        attach: Starts a session over models and optimizers, under a policy.
        schedule: The policies, by steps of all sessions together.
        report: Gets what was intercepted and what was left alone.
        ended: Called with the numbers of each session that ends.
        seams: Replaces names of torch.

    Attributes:
        amp: The session; ``None`` where there is none.
    """

    def __init__(
        self, attach: Attach, schedule: Schedule, report: ScriptReport, ended: Callable[[Stats], None], seams: Seams
    ) -> None:
        self.amp: AttachedPrecision | None = None
        self._attach, self._schedule, self._report, self._ended = attach, schedule, report, ended
        self._policy = schedule.at(0)  # of the next session, or of this one
        self._members: list[Optimizer] = []
        self._params: dict[int, nn.Parameter] = {}  # of the session's models, by id
        self._ended_members: list[weakref.ref[Optimizer]] = []  # optimizers of the session that has ended
        self._waiting: list[weakref.ref[Optimizer]] = []
        self._waiting_params = set[int]()  # ids of the parameters of both
        self._untrained: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules without any of these
        self._reported: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()
        self._step_methods: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._stepping: list[
            bool
        ] = []  # of the steps that run now, the innermost last: whether the session has the optimizer
        self._scale: dict[str, Any] | None = None  # the loss scale of the session that has ended
        self._counts: dict[str, Any] | None = None  # and its counts
        self._checkpoint_scales: list[Mapping[str, Any]] = []  # read from checkpoints, until a session starts
        self._call_seams = seams.enter_context(Seams())  # calls of modules, while optimizers wait for a session
        self._watched_classes = set[type[nn.Module]]()
        self._replace_add_param_group(seams)

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """Return the session's region; an empty context where there is no session."""
        if self._may_start():
            self._start()
        return contextlib.nullcontext() if self.amp is None else self.amp.autocast()

    def has(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps with the session."""
        return any(member is optimizer for member in self._members)

    def is_apart(self) -> bool:
        """Whether an optimizer steps now on its own; not while the session has a closure evaluated."""
        return bool(self._stepping) and (
            not self._stepping[-1] or self.amp is None or engine_of(self.amp).writes.is_stepping
        )

    def resume(self, state: Mapping[str, Any]) -> None:
        """Load the loss scale of a checkpoint: now, or when the session starts.

        A policy whose loss scale does not move keeps its own.

        Args:
            state: The state of a ``GradScaler``, or what a session has an optimizer carry.
        """
        if self._policy.loss_scale.mode == "dynamic" or steps_of(state) is not None:
            self._checkpoint_scales.append(state)
            self._load_scales()

    def _load_scales(self) -> None:
        while self._checkpoint_scales and self.amp is not None:
            try:
                self.amp.load_state_dict(self._checkpoint_scales.pop(0))
            except StateError as error:
                self._report.left_alone["the loss scale of a checkpoint"] = str(error)

    def end(self) -> None:
        """End the session: models and optimizers are the script's own again, and keep their gradients."""
        if (amp := self.amp) is None:
            return
        gradients = [(param, param.grad) for param in self._params.values() if param.grad is not None]
        if self._policy.loss_scale.mode == "dynamic":
            engine_of(amp).update()
            self._scale = engine_of(amp).scaler.state_dict()
        self._counts = engine_of(amp).account.state_dict()
        self._ended(amp.stats())
        self._ended_members = [weakref.ref(optimizer) for optimizer in self._members]
        self.amp, self._members, self._params = None, [], {}
        amp.detach()
        for param, gradient in gradients:
            param.grad = gradient.to(param.dtype)

    def close(self) -> None:
        """End the session for good; optimizers get their own ``step`` back."""
        try:
            self.end()
        finally:
            for optimizer, step in self._step_methods.items():
                if getattr(vars(optimizer).get("step"), "__func__", None) is step:
                    del vars(optimizer)["step"]
            self._waiting.clear()

    # When to start --------------------------------------------------------------------------------------------

    def _replace_add_param_group(self, seams: Seams) -> None:
        gathering, plain = self, Optimizer.add_param_group

        @functools.wraps(plain)
        def add_param_group(self: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            if self not in gathering._step_methods:
                gathering._bind_step(self)
            gathering._wait_for_session(self)

        seams.replace(Optimizer, "add_param_group", add_param_group)

    def _bind_step(self, optimizer: Optimizer) -> None:
        gathering = self

        @functools.wraps(type(optimizer).step)
        def step(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
            if closure_of(args, kwargs) is not None and gathering._is_waiting(self):
                gathering._start()
                if gathering.has(self):
                    return self.step(*args, **kwargs)
            gathering._stepping.append(gathering.has(self))
            try:
                result = type(self).step(self, *args, **kwargs)
            finally:
                gathering._stepping.pop()
            if gathering._is_waiting(self) and not gathering._stepping:
                gathering._start()  # no module was called before, or inside a compiled function only
            return result

        def loaded(_: Optimizer, state: dict[str, Any]) -> None:
            if CARRIED in state and not gathering.has(optimizer):  # the session takes its own
                gathering.resume(state[CARRIED])

        self._report.why_not = self._report.why_not and NOT_STEPPED
        optimizer.register_load_state_dict_pre_hook(loaded)
        vars(optimizer)["step"] = types.MethodType(step, optimizer)
        self._step_methods[optimizer] = step

    def _wait_for_session(self, optimizer: Optimizer) -> None:
        """Watch forward passes until a session has this optimizer with all its parameters."""
        params = list(_updated([optimizer]))
        if self.has(optimizer) or any(id(param) not in self._params for param in params):
            self.end()
        if not (self._is_waiting(optimizer) or any(reference() is optimizer for reference in self._ended_members)):
            self._waiting.append(weakref.ref(optimizer))
        self._waiting_params.update(map(id, _updated(_alive(self._ended_members + self._waiting))))
        self._untrained.clear()
        self._watch_calls()

    def _is_waiting(self, optimizer: Optimizer) -> bool:
        return any(reference() is optimizer for reference in (*self._ended_members, *self._waiting))

    def _watch_calls(self) -> None:
        """Replace the calling methods of every module class, and of those defined since the last time."""
        classes = {*_subclasses(nn.Module)} - self._watched_classes
        for cls in classes:
            for name in ("__call__",) if cls is nn.Module else {*methods_of(cls)} & vars(cls).keys():
                if isinstance(
                    plain := vars(cls)[name], types.FunctionType
                ):  # a scripted module's method is no Python function
                    self._call_seams.replace(cls, name, self._starting_call(plain, name))
        self._watched_classes |= classes

    def _stop_watching(self) -> None:
        self._call_seams.close()
        self._watched_classes.clear()

    def _starting_call(self, plain: types.FunctionType, name: str) -> Any:
        """Return what replaces a method while optimizers wait: a call that trains starts a session."""
        begun, is_compiling = self._starts_with, torch.compiler.is_compiling

        def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and begun(self, plain, name, args, kwargs):
                return getattr(self, name)(*args, **kwargs)
            return plain(self, *args, **kwargs)

        # Names that torch.jit.script finds in its source are those of the method.
        beginning = types.FunctionType(call.__code__, plain.__globals__, call.__name__, None, call.__closure__)
        return functools.update_wrapper(beginning, plain)

    def _starts_with(self, module: nn.Module, plain: Any, name: str, args: Any, kwargs: Any) -> bool:
        """Start a session if this call trains; whether the session has bound another function to the name."""
        if not self._trains(module):
            return False
        is_call = name in ("__call__", "forward")
        if not is_call and all(isinstance(tensor, nn.Parameter) for tensor in tensors((args, kwargs))):
            return False
        is_own = name in vars(module)
        self._start()
        return not is_own and name in vars(module) and getattr(type(module), name) is plain

    def _may_start(self) -> bool:
        """Whether a forward pass may start a session; one inside an optimizer's step may not."""
        waits = bool(self._ended_members or self._waiting) and not self._stepping
        return waits and torch.is_grad_enabled() and not is_scripted()

    def _trains(self, module: nn.Module) -> bool:
        if module in self._untrained or not self._may_start():
            return False
        sharded.reshard(sharded.units(module))  # an evaluation may have left gathered parameters
        if any(id(param) in self._waiting_params for param in module.parameters()):
            return True
        self._untrained.add(module)
        return False

    def _start(self) -> None:
        """Add the waiting optimizers to the session, or start one over all that are alive."""
        self._stop_watching()
        if not self._join():
            self.end()
            if self._ended_members:
                gc.collect()  # optimizers that only reference cycles keep are no longer the script's
            old, new = self._ended_members, self._waiting
            if not self._attach_all(old + new) and new:
                self._attach_all(old)
            if self.amp is not None:
                self._go_on(engine_of(self.amp), is_same=bool(_alive(old)))
                self.amp.carry_out(self._schedule, self._change)
            self._load_scales()
        self._ended_members, self._waiting, self._scale = [], [], None
        self._waiting_params.clear()

    def _go_on(self, engine: Engine, *, is_same: bool) -> None:
        """Load what the session that has ended knew: its steps, and where the same training goes on all of it."""
        if is_same and self._scale is not None:
            engine.scaler.load_state_dict(self._scale)
        if self._counts is not None:
            counts = self._counts if is_same else engine.account.state_dict() | {"steps": self._counts["steps"]}
            engine.account.load_state_dict(counts, float(engine.scaler.state.scale))

    def _change(self, policy: Policy) -> None:
        """Begin a part of the schedule; where it is refused, the script goes on under the part before."""
        assert self.amp is not None
        steps, errors = engine_of(self.amp).account.begun, list[str]()
        for candidate in _alternatives(policy):
            try:
                self.amp.change(candidate)
            except MezzoError as error:
                errors.append(str(error))
                continue
            self._policy = policy
            self._report.changed(steps, candidate)
            if errors:
                self._report.left_alone[f"weights from step {steps + 1} on, stored in FP32"] = errors[0]
            return
        self._report.refused(steps, policy, errors[0])

    def _join(self) -> bool:
        """Add the waiting optimizers to the running session; whether that was possible."""
        optimizers = _alive(self._waiting)
        if self.amp is None:
            return False
        try:
            self.amp.add(optimizers)
        except MezzoError:  # for example, gradients are accumulating
            return False
        self._members += optimizers
        self._report_members([], optimizers)
        return True

    def _attach_all(self, references: list[weakref.ref[Optimizer]]) -> bool:
        optimizers = _alive(references)
        models = models_of(optimizers)
        params = {id(param): param for model in models for param in model.parameters()}
        for optimizer in [
            optimizer for optimizer in optimizers if params.keys().isdisjoint(map(id, _updated([optimizer])))
        ]:
            optimizers.remove(optimizer)
            tensors = counted(sum(1 for _ in _updated([optimizer])), "tensor")
            self._report.left_alone[f"{type(optimizer).__name__} over {tensors}"] = "no module holds what it updates"
            self._report.why_not = self._report.why_not and NOT_HELD
        if not optimizers:
            return False
        gradients = [(param, param.grad) for param in params.values() if param.grad is not None]
        for param, _ in gradients:
            param.grad = None
        self.amp = self._session_over(models, optimizers)
        for param, gradient in gradients:
            _set_gradient(param, gradient)
        if self.amp is None:
            self._report.why_not = self._report.why_not and REFUSED
            return False
        self._report.why_not = ()
        self._report.intercepted[_ALWAYS] = 1
        self._members, self._params = optimizers, params
        self._report_members(models, optimizers)
        return True

    def _report_members(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self._report.models += [name_of(model) for model in models if model not in self._reported]
        self._report.optimizers += [
            type(optimizer).__name__ for optimizer in optimizers if optimizer not in self._reported
        ]
        self._reported.update([*models, *optimizers])

    def _session_over(self, models: list[nn.Module], optimizers: list[Optimizer]) -> AttachedPrecision | None:
        """Start a session, with weights in plain FP32 where they cannot be stored as the policy says.

        Raises:
            PolicyError: They cannot be stored so, and the models were wrapped with such weights already.
        """
        trained = (
            f"{', '.join(type(optimizer).__name__ for optimizer in optimizers)} over {', '.join(map(name_of, models))}"
        )
        policy = self._policy
        try:
            return self._attach(models, optimizers, policy)
        except MezzoError as error:
            why = str(error)
        for in_fp32 in _alternatives(policy)[1:]:
            if any(map(preparations_in, models)):
                raise PolicyError(
                    f"{trained} cannot be trained under {policy}, and was wrapped for it already",
                    why=why,
                    write=f"mezzo run --policy {Policy.O1(policy.dtype)} …, which stores weights in FP32",
                )
            try:
                amp = self._attach(models, optimizers, in_fp32)
            except MezzoError as error:
                why = str(error)
            else:
                self._report.left_alone[f"weights of {', '.join(map(name_of, models))}, stored in FP32"] = why
                return amp
        self._report.left_alone[trained] = why
        return None


def _set_gradient(param: nn.Parameter, gradient: Tensor) -> None:
    """Set an FP32 gradient on a parameter of any dtype."""
    if param.dtype in LOW:
        param.grad_dtype = None
    param.grad = gradient


def _alternatives(policy: Policy) -> list[Policy]:
    """Return a policy, and one with weights in plain FP32 where it stores them otherwise."""
    in_fp32 = Policy.O1(policy.dtype, loss_scale=policy.loss_scale, rules=policy.rules) if _converts(policy) else None
    return [policy] if in_fp32 is None else [policy, in_fp32]


def _converts(policy: Policy) -> bool:
    """Whether a policy stores weights otherwise than in plain FP32."""
    return policy.halves or policy.param_dtype in LOW


def _refuse_on_ranks(schedule: Schedule) -> None:
    """Refuse parts between which weights become other parameters, in a program of several ranks.

    Raises:
        PolicyError: Weights of some parts have 16 bits alone, and those of others not.
    """
    parts = {policy.param_dtype: str(policy) for policy in schedule.policies}
    if len(parts) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PolicyError(
            "weights cannot become, or have been, 16 bits alone in a program of several ranks",
            where="; ".join(parts.values()),
            why="DistributedDataParallel and FSDP know the parameters as they were",
            write="O1 and O2 in place of O3; rules, recipes and dtype may change",
        )


def convert_before_wrapping(policy: Policy, report: ScriptReport, seams: Seams) -> contextlib.ExitStack:
    """Store weights as the policy says before ``DistributedDataParallel`` wraps a model: after is too late.

    Args:
        policy: The policy.
        report: Gets what was intercepted.
        seams: Replaces names of torch.

    Returns:
        What undoes the conversions, once no session has these models.
    """
    undo, plain = contextlib.ExitStack(), DistributedDataParallel.__init__

    @functools.wraps(plain)
    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        try:
            undo.callback(prepare(module, policy).remove)
        except MezzoError as error:
            report.left_alone[f"{name_of(module)} in DistributedDataParallel"] = str(error)
        else:
            report.intercepted["DistributedDataParallel, to convert weights before it wraps"] += 1
        plain(self, module, *args, **kwargs)

    if _converts(policy):
        seams.replace(DistributedDataParallel, "__init__", init)
    return undo


# Which modules hold the parameters of optimizers: found among all objects that are alive -----------------------


def name_of(model: nn.Module) -> str:
    """Return a model's class, without what was wrapped around it."""
    while isinstance(inner := getattr(model, INSIDE, None) or getattr(model, "module", None), nn.Module):
        model = inner
    return type(model).__name__


def models_of(optimizers: Iterable[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules that hold parameters of optimizers, in the order in which these have them.

    A module that is inside of another one is part of that: a model that ``torch.compile`` or a wrapper has, for one.

    **Cost**: a look at all objects, some hundredths of a second for a million.
    """
    module_classes = set(_subclasses(nn.Module))  # by type(): isinstance may run an object's own code
    modules = [value for value in gc.get_objects() if type(value) in module_classes]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in (vars(module).get("_modules") or {}).values():
            parents.setdefault(id(child), []).append(module)
    for module in modules:
        # An evaluation may have left gathered parameters in an outermost module. A copy that failed has no `_modules`.
        if id(module) not in parents and "_modules" in vars(module):
            sharded.reshard(sharded.units(module))
    owners: dict[int, list[nn.Module]] = {}
    for module in modules:
        for param in (vars(module).get("_parameters") or {}).values():
            if param is not None:
                owners.setdefault(id(param), []).append(module)
    outermost: dict[int, nn.Module] = {}
    for owner in [owner for param in _updated(optimizers) for owner in owners.get(id(param), ())]:
        outermost.update({id(module): module for module in _outermost(owner, parents) if id(module) not in outermost})
    return list(outermost.values())


def _subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)


def _outermost(module: nn.Module, parents: dict[int, list[nn.Module]]) -> Iterator[nn.Module]:
    seen, waiting = set[int](), [module]
    while waiting:
        inner = waiting.pop()
        if id(inner) not in seen:
            seen.add(id(inner))
            outer = parents.get(id(inner), [])
            waiting += outer
            if not outer:
                yield inner


def _updated(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    return (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])


def _alive(references: Iterable[weakref.ref[Optimizer]]) -> list[Optimizer]:
    return [optimizer for reference in references if (optimizer := reference()) is not None]


# ``torch.autocast`` and ``GradScaler`` of a script's own: what they mean where a session casts and scales.


def replace_amp(gathering: Gathering, report: ScriptReport, seams: Seams) -> None:
    """Replace autocast, whose regions become the session's, and GradScaler, which scales nothing: the session does.

    With ``enabled=False``, or called by torch or mezzo, both are torch's own.

    Args:
        gathering: Holds the session.
        report: Gets what was intercepted.
        seams: Replaces names of torch.
    """
    for namespace in (torch, torch.amp, torch.cuda.amp, torch.cpu.amp):
        for name, replacement in (("autocast", _autocast), ("GradScaler", _grad_scaler)):
            if name in vars(namespace):
                seams.replace(namespace, name, replacement(vars(namespace)[name], gathering, report))


def _autocast(plain: type[torch.autocast], gathering: Gathering, report: ScriptReport) -> type:
    signature = inspect.signature(plain)

    class ScriptAutocast(contextlib.ContextDecorator):
        """The session's region, where a script enters one of torch's."""

        __doc__ = plain.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            if arguments.get("enabled", True) and is_script():
                return super().__new__(cls)
            return plain(*args, **kwargs)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._entered: list[Any] = []

        def __enter__(self) -> None:
            report.intercepted["torch.autocast"] += 1
            region = gathering.region()
            region.__enter__()
            self._entered.append(region)

        def __exit__(self, *error: Any) -> None:
            self._entered.pop().__exit__(*error)

    return ScriptAutocast


def _grad_scaler(plain: type[torch.amp.GradScaler], gathering: Gathering, report: ScriptReport) -> type:
    class ScriptScaler(plain):  # type: ignore[misc, valid-type]
        """A scaler that scales nothing: the session's backward passes and steps do."""

        __doc__ = plain.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls) if is_script() else plain(*args, **kwargs)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with warnings.catch_warnings(record=True) as caught:
                super().__init__(*args, **kwargs)
            for warning in caught:  # with the script's line in place of this one
                warnings.warn(warning.message, warning.category, stacklevel=2)
            if self.is_enabled():
                report.intercepted["GradScaler"] += 1

        def scale(self, outputs: Any) -> Any:
            return outputs

        def unscale_(self, optimizer: Optimizer) -> None:
            """Do nothing: gradients are FP32 and unscaled when a backward pass has ended."""

        def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return optimizer.step(*args, **kwargs)

        def update(self, new_scale: float | Tensor | None = None) -> None:
            pass

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            if self.is_enabled():
                gathering.resume(state_dict)

        # torch's methods read scale and growth through these two; the scaler itself keeps its initial values.
        def _get_scale_async(self) -> Tensor | None:
            return None if gathering.amp is None else gathering.amp.loss_scale

        def _get_growth_tracker(self) -> int:
            counted: int = super()._get_growth_tracker()
            return counted if gathering.amp is None else gathering.amp.clean_steps()

    return ScriptScaler


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """How a script's run has ended.

    Attributes:
        report: What it came to.
        error: What the script raised, with the traceback that it has by itself; ``None`` where it ran to its end.
    """

    report: ScriptReport
    error: BaseException | None

    @property
    def failure(self) -> BaseException | None:
        """What the script raised, but for an exit that says that all went well."""
        is_well = isinstance(self.error, SystemExit) and self.error.code in (None, 0)
        return None if is_well else self.error


def run(
    program: Program,
    policy: ScheduleLike = "O1",
    *,
    max_grad_norm: float | None = None,
    hold_schedulers: bool = True,
    steps: int | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    around: Callable[[list[nn.Module]], AbstractContextManager[None]] | None = None,
) -> ScriptRun:
    """Run a training script as it is under a policy, with one session over all optimizers that it makes.

    The session begins with the first forward pass that trains a parameter of an optimizer. What cannot be in it, since
    no module holds it or the policy is impossible for it, stays in FP32, and the report says so.

    Args:
        program: The script.
        policy: A policy, its text, or the path of a policy file; or a schedule or its text, which counts the steps of
            all optimizers, those before a checkpoint included. A part that is refused is left alone, and said so.
        max_grad_norm: Clip the 2-norm of all gradients of a step together to this.
        hold_schedulers: Whether schedulers wait where a step was skipped, at one host sync a step.
        steps: After how many steps of sessions the script is ended, in its next backward pass; by itself when omitted.
        on_step: Called with the record of each step, at one transfer from the device.
        around: Returns what is entered once the first session has begun, over these models, and left with the script.

    Returns:
        How it ended; nothing that it raises passes through.

    Raises:
        PolicyError: No policy, or a norm that is none; on several ranks parts with weights of 16 bits beside others.

    **Cost**: that of :func:`mezzo.attach`; some microseconds of Python for each kernel in the first three steps.
    """
    chosen = Schedule.of(policy)
    raise_together(wrong_options(max_grad_norm=max_grad_norm))
    _refuse_on_ranks(chosen)
    report, entered = ScriptReport(program=program.name, policy=str(chosen)), contextlib.ExitStack()

    def begin(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> AttachedPrecision:
        amp = attach(models, optimizers, policy, max_grad_norm=max_grad_norm, hold_schedulers=hold_schedulers)
        log.count()
        engine_of(amp).observers.append(log)
        if around is not None and not report.models:  # models are reported once the session has started
            entered.enter_context(around(models))
        return amp

    error: BaseException | None = None
    with Seams() as seams:
        log = StepLog(report, on_step, steps, lambda: gathering.is_apart())
        gathering = Gathering(begin, chosen, report, log.ended, seams)
        converted = convert_before_wrapping(chosen.at(0), report, seams)
        replace_amp(gathering, report, seams)
        try:
            with entered, contextlib.suppress(Enough):
                program.run()
        except BaseException as raised:  # an exit and an interrupt are the script's own, too
            error = raised.with_traceback(own_traceback(raised))
        with contextlib.suppress(MezzoError) if error else contextlib.nullcontext():
            log.close()
            gathering.close()
            converted.close()
    return ScriptRun(report=report, error=error)
