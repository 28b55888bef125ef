"""The optimizers that a script makes, and the session over them."""

from __future__ import annotations

import contextlib
import functools
import gc
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast.model import sharding
from mezzo.cast.model.originals import preparations_in
from mezzo.errors import MezzoError, PolicyError, StateError
from mezzo.explanation.words import counted
from mezzo.policy import Policy
from mezzo.scale.words import TORCHS_RULES
from mezzo.script.inner import InnerCalls
from mezzo.script.measuring import Measuring
from mezzo.script.owners import models_of, name_of, updated
from mezzo.script.report import Ledger
from mezzo.script.seams import Seams
from mezzo.session.attached.own_loop import CARRIED, AttachedPrecision
from mezzo.tensors import LOW

__all__ = ["Attach", "Gathering"]

Attach = Callable[[list[nn.Module], list[Optimizer], Policy], AttachedPrecision]

#: What each session does otherwise, by the names that :func:`mezzo.attach` binds.
_ALWAYS: Final = "calls of models, loss.backward(), optimizer.step(), scheduler.step(), clip_grad_norm_ and the like"


class Gathering:
    """Take note of each optimizer that is made, and begin a session over all that are alive once one trains.

    That is with the first forward pass which trains a parameter of a new optimizer, or its first step with a closure.
    A later new optimizer, or parameters that one gets later, end the session and begin another: with the next forward
    pass of any of their models, or of the session's, for what that returns may be what the new ones are given.

    Args:
        attach: Begins a session over models and optimizers, under a policy.
        policy: The policy.
        ledger: What is written down.
        seams: Replaces names of torch.
        measuring: Counts the products of the first steps.
    """

    def __init__(self, attach: Attach, policy: Policy, ledger: Ledger, seams: Seams, measuring: Measuring) -> None:
        self.amp: AttachedPrecision | None = None
        self._attach, self._policy, self._ledger, self._measuring = attach, policy, ledger, measuring
        self._session: list[Optimizer] = []
        self._models: list[nn.Module] = []
        self._held = set[int]()  # the parameters of these models, by id
        self._new: list[weakref.ref[Optimizer]] = []
        self._added = set[int]()  # parameters of new ones, by id, where a session may have put masters since
        self._firsts: list[tuple[weakref.ref[Optimizer], Any]] = []
        self._watching = seams.enter_context(Seams())  # calls of modules, until a session begins
        self._known_not: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules without a parameter of a new one
        self._told: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()
        self._inner: InnerCalls | None = None
        self._loaded = list[Mapping[str, Any]]()  # what the script has of a checkpoint, until a session begins
        self._replace(seams)

    def region(self) -> AbstractContextManager[Any]:
        """Return the region of the session; nothing's where there is none."""
        if self._may_begin():
            self._begin()
        return contextlib.nullcontext() if self.amp is None else self.amp.autocast()

    def has(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps with the session."""
        return any(each is optimizer for each in self._session)

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
            state = self._loaded.pop(0)
            try:
                (self.amp.resume if "version" in state else self.amp.load_state_dict)(state)
            except StateError as error:
                self._ledger.left_alone["the loss scale of a checkpoint"] = str(error)

    def end(self) -> list[Tensor]:
        """End the session: models and optimizers are the script's own again, with the gradients that they have.

        Returns:
            The parameters that have gradients.
        """
        if (amp := self.amp) is None:
            return []
        gradients = _gradients(amp, self._models)
        self.amp, self._session, self._models, self._held = None, [], [], set()
        if self._inner is not None:
            self._inner.leave()
            self._inner = None  # it keeps the session, and so optimizers that the script has no more
        self._ledger.stats.append(amp.stats())
        amp.detach()
        for param, gradient in gradients:
            param.grad = gradient.to(param.dtype)  # of weights that were low, which are FP32 again
        return [param for param, _ in gradients]

    def close(self) -> None:
        """End the session, and take note of no more."""
        try:
            self.end()
        finally:
            for reference, first in self._firsts:
                optimizer = reference()
                if optimizer is not None and getattr(vars(optimizer).get("step"), "__func__", None) is first:
                    del vars(optimizer)["step"]
            self._firsts.clear()
            self._new.clear()

    def _replace(self, seams: Seams) -> None:
        gathering, plain_init, plain_add = self, Optimizer.__init__, Optimizer.add_param_group

        @functools.wraps(plain_init)
        def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain_init(self, *args, **kwargs)
            gathering._learn(self)

        @functools.wraps(plain_add)
        def add_param_group(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain_add(self, *args, **kwargs)
            if gathering.has(self):
                gathering._expect(self)

        seams.replace(Optimizer, "__init__", init)
        seams.replace(Optimizer, "add_param_group", add_param_group)

    # When to begin --------------------------------------------------------------------------------------------

    def _learn(self, optimizer: Optimizer) -> None:
        gathering = self

        @functools.wraps(type(optimizer).step)
        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if closure is not None and gathering._is_new(self):
                gathering._begin()
                return self.step(closure)  # the session's, where there is one now
            plain = type(self).step
            result = plain(self) if closure is None else plain(self, closure)
            if gathering._is_new(self) and not gathering.has(
                self
            ):  # forward passes were none of modules', or inside a compiled function
                gathering._begin()
            return result

        def loaded(_: Optimizer, state: dict[str, Any]) -> None:
            if CARRIED in state and not gathering.has(optimizer):  # the session takes its own
                gathering.resume(state[CARRIED])

        optimizer.register_load_state_dict_pre_hook(loaded)
        vars(optimizer)["step"] = types.MethodType(step, optimizer)
        self._firsts.append((weakref.ref(optimizer), step))
        self._expect(optimizer)

    def _expect(self, optimizer: Optimizer) -> None:
        """Look at forward passes until a session over this optimizer begins."""
        if not self._new:
            self._watch()
        self._new.append(weakref.ref(optimizer))
        self._added.update(map(id, updated([optimizer])))
        self._known_not.clear()

    def _is_new(self, optimizer: Optimizer) -> bool:
        return any(each() is optimizer for each in self._new)

    def _watch(self) -> None:
        gathering, plain = self, vars(nn.Module)["__call__"]

        @functools.wraps(plain)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and gathering._trains(self):
                gathering._begin()
            return plain(self, *args, **kwargs)

        self._watching.replace(nn.Module, "__call__", call)

    def _may_begin(self) -> bool:
        """Whether a forward pass may end the session and begin another; not one that LBFGS asks for in its step."""
        is_evaluating = self.amp is not None and self.amp.is_evaluating
        return bool(self._new) and torch.is_grad_enabled() and not is_evaluating

    def _trains(self, module: nn.Module) -> bool:
        """Whether a module's forward pass trains a parameter of a new optimizer, or of the session that has to end."""
        if module in self._known_not or not self._may_begin():
            return False
        sharding.reshard(sharding.units(module))  # an evaluation may have left whole parameters in their places
        new = self._held.union(self._added, map(id, updated(_alive(self._new))))
        if any(id(param) in new for param in module.parameters()):
            return True
        self._known_not.add(module)
        return False

    def _begin(self) -> None:
        """End the session, and begin one over all optimizers that are alive."""
        old = [weakref.ref(each) for each in self._session]
        new = [each for each in self._new if each not in old]
        self._new.clear()
        self._added.clear()
        self._watching.close()
        accumulated = list[Tensor]()
        if self.amp is not None:
            scale = self._scale_now(self.amp)
            accumulated = self.end()
            gc.collect()  # what only circles of references keep is no more the script's
            if _alive(old):  # the same training goes on
                self._loaded += scale
        if accumulated and self._policy.param_dtype in LOW:
            what, why = (
                "gradients of an accumulation window",
                "weights were stored low inside of it, for a new optimizer",
            )
            self._ledger.left_alone[what] = f"{why}, and these are dropped"
            for param in accumulated:
                param.grad = None
        if not self._attached(old + new) and old:
            self._attached(old)

    def _scale_now(self, amp: AttachedPrecision) -> list[Mapping[str, Any]]:
        """Return the loss scale as a GradScaler saves it; nothing where the policy has none that moves."""
        config = self._policy.loss_scale
        if config.mode != "dynamic":
            return []
        rules = {theirs: getattr(config, ours) for theirs, ours in TORCHS_RULES.items()}
        return [{"scale": amp.stats().scale, **rules, "_growth_tracker": amp.clean_steps()}]

    def _attached(self, references: list[weakref.ref[Optimizer]]) -> bool:
        optimizers = _alive(references)
        models = models_of(optimizers)
        held = {id(param) for model in models for param in model.parameters()}
        for optimizer in [each for each in optimizers if held.isdisjoint(map(id, updated([each])))]:
            optimizers.remove(optimizer)
            tensors = counted(sum(1 for _ in updated([optimizer])), "tensor")
            self._ledger.left_alone[f"{type(optimizer).__name__} over {tensors}"] = "no module holds what it updates"
        if not optimizers:
            return False
        self._measuring.begin()
        self.amp = self._session_over(models, optimizers)
        if self.amp is None:
            return False
        self._ledger.intercepted[_ALWAYS] = 1
        self._inner = InnerCalls(models, self.amp.autocast)
        self._session, self._models = optimizers, models
        self._held = {id(param) for model in models for param in model.parameters()}
        self._go_on()
        self._ledger.models += [name_of(each) for each in models if each not in self._told]
        self._ledger.optimizers += [type(each).__name__ for each in optimizers if each not in self._told]
        self._told.update([*models, *optimizers])
        return True

    def _session_over(self, models: list[nn.Module], optimizers: list[Optimizer]) -> AttachedPrecision | None:
        """Begin a session, with weights in FP32 where they cannot be stored low.

        Raises:
            PolicyError: They cannot be, and are: the models were wrapped or sharded like that already.
        """
        what = f"{', '.join(type(each).__name__ for each in optimizers)} over {', '.join(map(name_of, models))}"
        policy, told = self._policy, ""
        if policy.param_dtype in LOW:
            told = _writes_by_itself(optimizers)
            if not told:
                try:
                    return self._attach(models, optimizers, policy)
                except MezzoError as error:
                    told = str(error)
            if any(map(_is_low_for_good, models)):
                raise PolicyError(
                    f"{what} cannot be trained under {policy}, and was wrapped or sharded for it already",
                    why=told,
                    write=f"mezzo run --policy {Policy.O1(policy.dtype)} …, which stores weights in FP32",
                )
            self._ledger.left_alone[f"weights of {', '.join(map(name_of, models))}, stored in FP32"] = told
            policy = Policy.O1(policy.dtype, loss_scale=policy.loss_scale, rules=policy.rules)
        try:
            return self._attach(models, optimizers, policy)
        except MezzoError as error:
            self._ledger.left_alone[what] = str(error)
            return None


def _is_low_for_good(model: nn.Module) -> bool:
    """Whether a wrapper relies on low weights by now: one of DistributedDataParallel, or torch's fully_shard."""
    return bool(preparations_in(model)) or any(part.gathered in LOW for part in sharding.shards(model))


def _gradients(amp: AttachedPrecision, models: list[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Return the gradients of an unfinished accumulation window, without the scale."""
    try:
        amp.unscale_()
    except StateError:  # there is none
        return []
    params = [param for model in models for param in model.parameters()]
    return [(param, param.grad) for param in params if param.grad is not None]


def _writes_by_itself(optimizers: list[Optimizer]) -> str:
    """Say which optimizers may write weights outside of a step, which a session with masters would not see."""
    for kind in {type(each): None for each in optimizers}:
        if kind.__module__.partition(".")[0] in ("torch", "mezzo"):
            continue
        names = [name for name in dir(kind) if not name.startswith("_") and name not in dir(Optimizer)]
        if methods := [name for name in names if callable(getattr(kind, name))]:
            return f"{kind.__name__} may write weights in {', '.join(methods)}, and not in step() alone"
    return ""


def _alive(references: list[weakref.ref[Optimizer]]) -> list[Optimizer]:
    return [each for reference in references if (each := reference()) is not None]
