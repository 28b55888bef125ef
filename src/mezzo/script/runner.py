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
from mezzo.policy import Policy
from mezzo.script.program import Enough, Program, Seams, StepRecord, is_script, own_traceback
from mezzo.script.report import NOT_HELD, NOT_STEPPED, REFUSED, ScriptReport, StepLog
from mezzo.session.attach import CARRIED, AttachedPrecision, attach
from mezzo.session.calls import methods_of
from mezzo.session.closures import closure_of
from mezzo.session.refusals import wrong_options
from mezzo.session.session import engine_of
from mezzo.session.stats import Stats
from mezzo.tensors import LOW, tensors

# The optimizers that a script makes, the modules that hold what they update, and one session over all of them.

Attach = Callable[[list[nn.Module], list[Optimizer], Policy], AttachedPrecision]

#: What each session does otherwise, by the names that :func:`mezzo.attach` binds.
_ALWAYS: Final = "calls of models, loss.backward(), optimizer.step(), scheduler.step()"


class Gathering:
    """Take note of each optimizer that is made, and begin a session over all that are alive once one trains.

    That is with the first forward pass that trains a parameter of an optimizer, or its first step with a closure. A
    later optimizer over parameters that the session's models hold joins the session. Another one, or parameters that
    an optimizer gets later, end the session; the next forward pass that trains begins another, which has the loss scale
    and the gradients of the one before.

    Args:
        attach: Begins a session over models and optimizers, under a policy.
        policy: The policy.
        report: What is written down.
        ended: Is told of each session that ends.
        seams: Replaces names of torch.

    Attributes:
        amp: The session; ``None`` where there is none.
    """

    def __init__(
        self, attach: Attach, policy: Policy, report: ScriptReport, ended: Callable[[Stats], None], seams: Seams
    ) -> None:
        self.amp: AttachedPrecision | None = None
        self._attach, self._policy, self._report, self._ended = attach, policy, report, ended
        self._session: list[Optimizer] = []
        self._held: dict[int, nn.Parameter] = {}  # the parameters of the session's models
        self._old: list[weakref.ref[Optimizer]] = []  # optimizers of the session that has ended
        self._new: list[weakref.ref[Optimizer]] = []
        self._awaited = set[int]()  # parameters of both, by id
        self._known_not: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules without one of these
        self._told: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()
        self._bound: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._stepping: list[bool] = []  # steps that run now, one inside of another: whether they are the session's
        self._scale: dict[str, Any] | None = None  # of the session that has ended
        self._loaded: list[Mapping[str, Any]] = []  # what the script has of a checkpoint, until a session begins
        self._watching = seams.enter_context(Seams())  # calls of modules, while optimizers wait for a session
        self._watched = set[type[nn.Module]]()
        self._replace(seams)

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """Return the region of the session; nothing's where there is none."""
        if self._may_begin():
            self._begin()
        return contextlib.nullcontext() if self.amp is None else self.amp.autocast()

    def has(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps with the session."""
        return any(each is optimizer for each in self._session)

    def is_apart(self) -> bool:
        """Whether an optimizer steps now, and does not evaluate a closure for the session."""
        return bool(self._stepping) and (
            not self._stepping[-1] or self.amp is None or engine_of(self.amp).writes.is_stepping
        )

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with the loss scale of a checkpoint: now, or when the session begins.

        Where the policy has none that moves, its own counts.

        Args:
            state: The state of a ``GradScaler``, or what a session has an optimizer carry.
        """
        if self._policy.loss_scale.mode == "dynamic":
            self._loaded.append(state)
            self._go_on()

    def _go_on(self) -> None:
        while self._loaded and self.amp is not None:
            try:
                self.amp.load_state_dict(self._loaded.pop(0))
            except StateError as error:
                self._report.left_alone["the loss scale of a checkpoint"] = str(error)

    def end(self) -> None:
        """End the session: models and optimizers are the script's own again, with the gradients that they have."""
        if (amp := self.amp) is None:
            return
        gradients = [(param, param.grad) for param in self._held.values() if param.grad is not None]
        if self._policy.loss_scale.mode == "dynamic":
            engine_of(amp).update()
            self._scale = engine_of(amp).scaler.state_dict()
        self._ended(amp.stats())
        self._old = [weakref.ref(each) for each in self._session]
        self.amp, self._session, self._held = None, [], {}
        amp.detach()
        for param, gradient in gradients:
            param.grad = gradient.to(param.dtype)

    def close(self) -> None:
        """End the session, and take note of no more."""
        try:
            self.end()
        finally:
            for optimizer, step in self._bound.items():
                if getattr(vars(optimizer).get("step"), "__func__", None) is step:
                    del vars(optimizer)["step"]
            self._new.clear()

    # When to begin --------------------------------------------------------------------------------------------

    def _replace(self, seams: Seams) -> None:
        gathering, plain = self, Optimizer.add_param_group

        @functools.wraps(plain)
        def add_param_group(self: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            if self not in gathering._bound:
                gathering._learn(self)
            gathering._expect(self)

        seams.replace(Optimizer, "add_param_group", add_param_group)

    def _learn(self, optimizer: Optimizer) -> None:
        gathering = self

        @functools.wraps(type(optimizer).step)
        def step(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
            if closure_of(args, kwargs) is not None and gathering._awaits(self):
                gathering._begin()
                if gathering.has(self):
                    return self.step(*args, **kwargs)
            gathering._stepping.append(gathering.has(self))
            try:
                result = type(self).step(self, *args, **kwargs)
            finally:
                gathering._stepping.pop()
            if gathering._awaits(self) and not gathering._stepping:
                gathering._begin()  # forward passes were none of modules', or inside a compiled function
            return result

        def loaded(_: Optimizer, state: dict[str, Any]) -> None:
            if CARRIED in state and not gathering.has(optimizer):  # the session takes its own
                gathering.resume(state[CARRIED])

        self._report.why_not = self._report.why_not and NOT_STEPPED
        optimizer.register_load_state_dict_pre_hook(loaded)
        vars(optimizer)["step"] = types.MethodType(step, optimizer)
        self._bound[optimizer] = step

    def _expect(self, optimizer: Optimizer) -> None:
        """Look at forward passes until a session has this optimizer, with all of its parameters."""
        params = list(_updated([optimizer]))
        if self.has(optimizer) or any(id(param) not in self._held for param in params):
            self.end()
        if not (self._awaits(optimizer) or any(each() is optimizer for each in self._old)):
            self._new.append(weakref.ref(optimizer))
        self._awaited.update(map(id, _updated(_alive(self._old + self._new))))
        self._known_not.clear()
        self._watch()

    def _awaits(self, optimizer: Optimizer) -> bool:
        return any(each() is optimizer for each in (*self._old, *self._new))

    def _watch(self) -> None:
        """Look at calls of modules, of classes too that were defined since optimizers wait."""
        kinds = {*_kinds(nn.Module)} - self._watched
        for kind in kinds:
            for name in ("__call__",) if kind is nn.Module else {*methods_of(kind)} & vars(kind).keys():
                if isinstance(plain := vars(kind)[name], types.FunctionType):  # and none of a scripted module's
                    self._watching.replace(kind, name, self._beginning(plain, name))
        self._watched |= kinds

    def _watch_no_more(self) -> None:
        self._watching.close()
        self._watched.clear()

    def _beginning(self, plain: types.FunctionType, name: str) -> Any:
        """Return what a method is while optimizers wait for a session: it may begin one, which then has bound it."""
        begun, is_compiling = self._begun, torch.compiler.is_compiling

        def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and begun(self, plain, name, args, kwargs):
                return getattr(self, name)(*args, **kwargs)
            return plain(self, *args, **kwargs)

        # Names that torch.jit.script finds in its source are those of the method.
        made = types.FunctionType(call.__code__, plain.__globals__, call.__name__, None, call.__closure__)
        return functools.update_wrapper(made, plain)

    def _begun(self, module: nn.Module, plain: Any, name: str, args: Any, kwargs: Any) -> bool:
        """Begin a session where a call trains; whether another function is to be called for it from now on."""
        if not self._trains(module):
            return False
        is_call = name in ("__call__", "forward")
        if not is_call and all(isinstance(each, nn.Parameter) for each in tensors((args, kwargs))):
            return False
        is_own = name in vars(module)
        self._begin()
        return not is_own and name in vars(module) and getattr(type(module), name) is plain

    def _may_begin(self) -> bool:
        """Whether a forward pass may begin a session; not one that an optimizer asks for in its step."""
        waits = bool(self._old or self._new) and not self._stepping
        return waits and torch.is_grad_enabled() and not is_scripted()

    def _trains(self, module: nn.Module) -> bool:
        if module in self._known_not or not self._may_begin():
            return False
        sharded.reshard(sharded.units(module))  # an evaluation may have left whole parameters in their places
        if any(id(param) in self._awaited for param in module.parameters()):
            return True
        self._known_not.add(module)
        return False

    def _begin(self) -> None:
        """Let the optimizers that wait join the session, or begin one over all that are alive."""
        self._watch_no_more()
        if not self._joined():
            self.end()
            if self._old:
                gc.collect()  # what only circles of references keep is no more the script's
            old, new = self._old, self._new
            if not self._attached(old + new) and new:
                self._attached(old)
            if self.amp is not None and self._scale is not None and _alive(old):  # the same training goes on
                engine_of(self.amp).scaler.load_state_dict(self._scale)
            self._go_on()
        self._old, self._new, self._scale = [], [], None
        self._awaited.clear()

    def _joined(self) -> bool:
        """Let later optimizers into the session that there is."""
        optimizers = _alive(self._new)
        if self.amp is None:
            return False
        try:
            self.amp.add(optimizers)
        except MezzoError:  # gradients accumulate, for one
            return False
        self._session += optimizers
        self._tell([], optimizers)
        return True

    def _attached(self, references: list[weakref.ref[Optimizer]]) -> bool:
        optimizers = _alive(references)
        models = models_of(optimizers)
        held = {id(param): param for model in models for param in model.parameters()}
        for optimizer in [each for each in optimizers if held.keys().isdisjoint(map(id, _updated([each])))]:
            optimizers.remove(optimizer)
            tensors = counted(sum(1 for _ in _updated([optimizer])), "tensor")
            self._report.left_alone[f"{type(optimizer).__name__} over {tensors}"] = "no module holds what it updates"
            self._report.why_not = self._report.why_not and NOT_HELD
        if not optimizers:
            return False
        gradients = [(param, param.grad) for param in held.values() if param.grad is not None]
        for param, _ in gradients:
            param.grad = None
        self.amp = self._session_over(models, optimizers)
        for param, gradient in gradients:
            _give(param, gradient)
        if self.amp is None:
            self._report.why_not = self._report.why_not and REFUSED
            return False
        self._report.why_not = ()
        self._report.intercepted[_ALWAYS] = 1
        self._session, self._held = optimizers, held
        self._tell(models, optimizers)
        return True

    def _tell(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self._report.models += [name_of(each) for each in models if each not in self._told]
        self._report.optimizers += [type(each).__name__ for each in optimizers if each not in self._told]
        self._told.update([*models, *optimizers])

    def _session_over(self, models: list[nn.Module], optimizers: list[Optimizer]) -> AttachedPrecision | None:
        """Begin a session, with weights in plain FP32 where they cannot be stored otherwise.

        Raises:
            PolicyError: They cannot be, and are: the models were wrapped like that already.
        """
        what = f"{', '.join(type(each).__name__ for each in optimizers)} over {', '.join(map(name_of, models))}"
        policy = self._policy
        try:
            return self._attach(models, optimizers, policy)
        except MezzoError as error:
            why = str(error)
        if _converts(policy):
            in_fp32 = Policy.O1(policy.dtype, loss_scale=policy.loss_scale, rules=policy.rules)
            if any(map(preparations_in, models)):
                raise PolicyError(
                    f"{what} cannot be trained under {policy}, and was wrapped for it already",
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
        self._report.left_alone[what] = why
        return None


def _give(param: nn.Parameter, gradient: Tensor) -> None:
    """Have a parameter, whatever its dtype, go on from an FP32 gradient."""
    if param.dtype in LOW:
        param.grad_dtype = None
    param.grad = gradient


def _converts(policy: Policy) -> bool:
    """Whether a policy stores weights otherwise than in plain FP32."""
    return policy.halves or policy.param_dtype in LOW


def convert_before_wrapping(policy: Policy, report: ScriptReport, seams: Seams) -> contextlib.ExitStack:
    """Store weights as the policy says before ``DistributedDataParallel`` wraps a model: after is too late.

    Args:
        policy: The policy.
        report: What is written down.
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
    kinds = set(_kinds(nn.Module))  # by type(): what isinstance asks of an object may run code of its own
    modules = [each for each in gc.get_objects() if type(each) in kinds]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in (vars(module).get("_modules") or {}).values():
            parents.setdefault(id(child), []).append(module)
    for module in modules:
        # An outermost one, in which an evaluation may have left whole parameters; half of a copy that failed has none.
        if id(module) not in parents and "_modules" in vars(module):
            sharded.reshard(sharded.units(module))
    owners: dict[int, list[nn.Module]] = {}
    for module in modules:
        for param in (vars(module).get("_parameters") or {}).values():
            if param is not None:
                owners.setdefault(id(param), []).append(module)
    found: dict[int, nn.Module] = {}
    for owner in [owner for param in _updated(optimizers) for owner in owners.get(id(param), ())]:
        found.update({id(each): each for each in _outermost(owner, parents) if id(each) not in found})
    return list(found.values())


def _kinds(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _outermost(module: nn.Module, parents: dict[int, list[nn.Module]]) -> Iterator[nn.Module]:
    seen, waiting = set[int](), [module]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            around = parents.get(id(each), [])
            waiting += around
            if not around:
                yield each


def _updated(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    return (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])


def _alive(references: Iterable[weakref.ref[Optimizer]]) -> list[Optimizer]:
    return [each for reference in references if (each := reference()) is not None]


# ``torch.autocast`` and ``GradScaler`` of a script's own: what they mean where a session casts and scales.


def replace_amp(gathering: Gathering, report: ScriptReport, seams: Seams) -> None:
    """Let a script's regions be the session's, and its scalers scale nothing, since the session does.

    What is switched off by ``enabled=False``, or asked for by torch and mezzo, is torch's own.

    Args:
        gathering: Has the session.
        report: What is written down.
        seams: Replaces names of torch.
    """
    for place in (torch, torch.amp, torch.cuda.amp, torch.cpu.amp):
        for name, made in (("autocast", _autocast), ("GradScaler", _grad_scaler)):
            if name in vars(place):
                seams.replace(place, name, made(vars(place)[name], gathering, report))


def _autocast(plain: type[torch.autocast], gathering: Gathering, report: ScriptReport) -> type:
    signature = inspect.signature(plain)

    class ScriptAutocast(contextlib.ContextDecorator):
        """The session's region, wherever a script enters its own."""

        __doc__ = plain.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if given.get("enabled", True) and is_script():
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
            for each in caught:  # of the script's line, and not of this one
                warnings.warn(each.message, each.category, stacklevel=2)
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

        # What torch's own methods ask for; of its own it has what it begins with.
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
    policy: Policy | str | os.PathLike[str] = "O1",
    *,
    max_grad_norm: float | None = None,
    hold_schedulers: bool = True,
    steps: int | None = None,
    told: Callable[[StepRecord], None] | None = None,
    around: Callable[[list[nn.Module]], AbstractContextManager[None]] | None = None,
) -> ScriptRun:
    """Run a training script as it is under a policy, with one session over all optimizers that it makes.

    The session begins with the first forward pass that trains a parameter of an optimizer. What cannot be in it, since
    no module holds it or the policy is impossible for it, stays in FP32, and the report says so.

    Args:
        program: The script.
        policy: A policy, its text, or the path of a policy file.
        max_grad_norm: Clip the 2-norm of all gradients of a step together to this.
        hold_schedulers: Whether schedulers wait where a step was skipped, at one host sync a step.
        steps: After how many steps of sessions the script is ended, in its next backward pass; by itself when omitted.
        told: Is told of each step, at one transfer from the device.
        around: Returns what is entered once the first session has begun, over these models, and left with the script.

    Returns:
        How it ended; nothing that it raises passes through.

    Raises:
        PolicyError: No policy, or a norm that is none.

    **Cost**: that of :func:`mezzo.attach`; some microseconds of Python for each kernel in the first three steps.
    """
    chosen = Policy.of(policy)
    raise_together(wrong_options(max_grad_norm=max_grad_norm))
    report, entered = ScriptReport(program=program.name, policy=str(chosen)), contextlib.ExitStack()

    def begin(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> AttachedPrecision:
        amp = attach(models, optimizers, policy, max_grad_norm=max_grad_norm, hold_schedulers=hold_schedulers)
        log.count()
        engine_of(amp).observers.append(log)
        if around is not None and not report.models:  # written down once it has begun
            entered.enter_context(around(models))
        return amp

    error: BaseException | None = None
    with Seams() as seams:
        log = StepLog(report, told, steps, lambda: gathering.is_apart())
        gathering = Gathering(begin, chosen, report, log.ended, seams)
        converted = convert_before_wrapping(chosen, report, seams)
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
