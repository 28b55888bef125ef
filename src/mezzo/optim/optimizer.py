"""The part that all of mezzo's optimizers share: parameter groups, buckets, and where the low halves of weights are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from mezzo.compiling import never_compiled
from mezzo.errors import StateError, UnsupportedError, raise_together, some_of
from mezzo.hooks import loading_hooks, saving_hooks
from mezzo.interrupts import uninterrupted
from mezzo.optim.state import (
    Group,
    Hypers,
    changes_nothing,
    check_arguments,
    check_group,
    check_scales,
    check_state,
    check_unchanged,
    kept_of,
    named,
    ordered,
    restored,
    saved,
    wrong_weights,
)
from mezzo.sharded import is_distributed, local, locals_of, number_of_shard, placed, sharding
from mezzo.step.executors.choose import executor_for, portable, shared
from mezzo.step.gradients import clear_to_zeros, with_gradients
from mezzo.step.moments import is_coded, zeros
from mezzo.step.passes import Bucket, BucketUpdate, NoKernel, Verdict, counted
from mezzo.step.storage import PLAIN, SPLIT
from mezzo.step.update import RULES, UpdateRule, rule
from mezzo.tensors import LOW, described, dtype_name, foreach_copy_
from mezzo.weights.halves import Halves, in_halves
from mezzo.weights.stepping import in_memory

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

#: The high and the low half of a weight.
_Parts: TypeAlias = tuple[Tensor, Tensor]

_KIND: Final = attrgetter("dtype", "shape", "device")
_LAYOUT: Final = attrgetter("layout")
_DENSE: Final = {torch.strided}


@dataclass(slots=True, eq=False)
class _Ready:
    """Parameters that are updated together, what updates this rank's part of them, and whether they are DTensors."""

    params: list[Tensor]
    update: BucketUpdate
    is_sharded: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """The parameters of a group that have gradients, what each of them is, and their rule.

    Attributes:
        rule: The rule.
        params: The parameters.
        kinds: What each of them is.
        memory: The tensors in which their values lie on this rank.
        buckets: Those of them that are updated together, in the same order; ``None`` until they were built.
    """

    rule: UpdateRule
    params: list[Tensor]
    kinds: list[Any]
    memory: list[Tensor]
    buckets: list[_Ready] | None = None

    def is_as(self, other: _Wanted) -> bool:
        """Whether the buckets that were built for another serve this one."""
        alike = self.rule == other.rule and self.kinds == other.kinds and len(self.memory) == len(other.memory)
        return alike and all(map(is_, self.params, other.params)) and all(map(is_, self.memory, other.memory))


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """What a step is about to write, when all that it could refuse has been refused.

    Attributes:
        verdict: Of the gradients; ``None`` where the flags are another library's.
        updates: What updates a bucket, with the gradients, their verdict and the count on its device.
        steps: The counts of updates before this step.
        counts: The counts after it.
        params: All that is updated.
    """

    verdict: Verdict | None
    updates: list[tuple[BucketUpdate, Sequence[Tensor], Verdict, Tensor]] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)


class OnePassOptimizer(Optimizer):
    """An optimizer whose step reads and writes everything once, and never asks the host whether to skip.

    Of parameters that are stored in halves it reads and writes both, in the same pass as everything else, and keeps
    nothing of them itself.

    A session hands its verdict to :meth:`update`. ``torch.amp.GradScaler`` sets the attributes ``found_inf`` and
    ``grad_scale`` for a step, as for torch's fused optimizers: 0-d tensors, whether to skip, and what to divide
    gradients by. Gradients themselves are never written.

    Attributes:
        updates: How many steps have begun to write, or have skipped, since the optimizer was made.
        reads_halves: That its kernels read and write halves by themselves.
        rounds: Whether low parameters without a low half (O3) are rounded to their dtype after each update, as a
            session says; else they are refused.
    """

    _rule: ClassVar[str]
    reads_halves: ClassVar[bool] = True
    _step_supports_amp_scaling = True

    def __init__(self, params: Params, torch_only: Mapping[str, Any], **defaults: Any) -> None:
        check_arguments(self, torch_only)
        self._start()
        defaults = named(defaults)
        check_group(defaults)
        super().__init__(ordered(params), defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer, here or on another machine."""
        self._start()
        super().__setstate__(state)

    def _start(self) -> None:
        """Know nothing yet of what the state is for."""
        self._ready: dict[int, _Wanted] = {}  # what was prepared for the state as it is, by the group's number
        self._hypers: dict[tuple[int, torch.device], Hypers] = {}
        self._prepared: _Prepared | None = None
        self._verdict: Verdict | None = None  # of the step under way
        self.updates = 0
        self.rounds = False

    def rule_of(self, group: Group) -> UpdateRule:
        """Return a group's update rule."""
        return rule(self._rule, *(option for option in sorted(RULES[self._rule].options) if group[option]))

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; see ``torch.optim.Optimizer.add_param_group``.

        Raises:
            PolicyError: A hyper-parameter that no update can work with; nothing was added.
            TypeError: A set of parameters, as torch says it.
        """
        params = param_group["params"]
        given = named({**param_group, "params": [params] if isinstance(params, Tensor) else list(ordered(params))})
        check_group({**self.defaults, **given})
        super().add_param_group(given)

    @never_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients.

        Args:
            set_to_none: Let go of them; otherwise they become zeros, by one kernel for each device and dtype.
        """
        if set_to_none:
            super().zero_grad()
        else:
            clear_to_zeros(self._params())

    @never_compiled  # addresses and kernels of its own are nothing to trace: torch.compile breaks the graph here
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, or none, as the verdict or ``found_inf`` says.

        Args:
            closure: Evaluates the loss first, as torch's optimizers take it.

        Returns:
            What the closure returned.

        Raises:
            StateError: A low parameter outside a session; or one that was resized, or moved, since its state was
                made.
            PolicyError: A hyper-parameter that no update can work with, or a parameter in float64.
            UnsupportedError: A sparse gradient. Whatever is raised, nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.state and changes_nothing(self.param_groups, self._gradients()):
            # torch.distributed.checkpoint steps so to have state made; counted, it would be a step of the training.
            for (wanted, _), group in zip(self._wanted(), self.param_groups, strict=True):
                self._give_state(group, wanted.params, wanted.rule)
            return loss
        prepared, self._prepared = self._prepared, None
        verdict, self._verdict = self._verdict, None
        if prepared is None or prepared.verdict is not verdict:
            prepared = self._prepare(verdict)
        with uninterrupted():
            self._write(prepared)
        return loss

    def update(self, verdict: Verdict, step: Callable[[], Any] | None = None) -> None:
        """Take a step, hooks and all, as a verdict says; what :meth:`make_ready` of the same verdict kept is used.

        Args:
            verdict: Of these gradients, as :func:`mezzo.step.passes.judge` returns it.
            step: What :meth:`step` was, where a session has taken it over on this instance.
        """
        self._verdict = verdict
        try:
            (step or self.step)()
        finally:
            self._verdict = self._prepared = None

    @torch.no_grad()
    def make_ready(self, verdict: Verdict, *, keep: bool) -> None:
        """Raise all that :meth:`update` could refuse, and make ready what it needs; it is to be the next call.

        Args:
            verdict: What the update will be given.
            keep: Whether nothing writes to a gradient until then, neither the engine nor hooks before the step.
        """
        prepared = self._prepare(verdict)
        self._prepared = prepared if keep else None

    def _prepare(self, verdict: Verdict | None) -> _Prepared:
        """Return what a step is about to write; whatever can be refused is refused here.

        Args:
            verdict: Of the gradients. Without one, ``found_inf`` and ``grad_scale`` are those of another library.
        """
        wanted = self._wanted()
        of_groups = [(self._ready_of(number, group), its) for number, (group, its) in enumerate(wanted)]
        ready = [(each, gradients) for buckets, gradients in of_groups for each in buckets]
        prepared = _Prepared(verdict)
        for device in {each.update.bucket.step.device for each, _ in ready}:
            here = verdict.on(device) if verdict is not None else self._verdict_of_flags(device)
            there = [pair for pair in ready if pair[0].update.bucket.step.device == device]
            before = {id(each.update.bucket.step): each.update.bucket.step for each, _ in there}
            after = shared(counted, (), [here.found_inf, *before.values()])
            prepared.steps.extend(before.values())
            prepared.counts.extend(after)
            next_of = dict(zip(before, after, strict=True))
            for each, gradients in there:
                step = next_of[id(each.update.bucket.step)]
                readable = self._readable(each, gradients)
                prepared.updates.append((each.update, readable, here, step))
                prepared.params.extend(each.params)
        return prepared

    def _write(self, prepared: _Prepared) -> None:
        """Update, or skip. What comes in the middle ends the step half-way: no signal does."""
        self.updates += 1  # before the first write
        for update, gradients, verdict, step in prepared.updates:
            update.write(gradients, verdict, step)
        # Kernels write past autograd, whose version counters must tell the caches of casts, and graphs that saved a
        # weight, that it has changed.
        increment_version(prepared.params)
        if prepared.steps:
            foreach_copy_(prepared.steps, prepared.counts)

    def _verdict_of_flags(self, device: torch.device) -> Verdict:
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        return Verdict.of_flags(found_inf, grad_scale, device)

    def _readable(self, ready: _Ready, gradients: list[Any]) -> Sequence[Tensor]:
        """Return gradients as a bucket's update reads them; where its kernels cannot be built any more, without them.

        Args:
            ready: The bucket.
            gradients: Of all of its group.
        """
        if len(gradients) > len(ready.params):
            gradients = [param.grad for param in ready.params]
        if ready.is_sharded:  # tensor parallelism leaves some as sums not taken yet
            gradients = [local(placed(each, param)) for each, param in zip(gradients, ready.params, strict=True)]
        try:
            return ready.update.ready(gradients)
        except NoKernel as error:
            ready.update = portable(error).update_of(ready.update.bucket)
            return ready.update.ready(gradients)

    def _gradients(self) -> Iterator[Tensor]:
        return (param.grad for param in self._params() if param.grad is not None)

    def _params(self) -> Iterator[Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    def upload(self) -> None:
        """Bring hyper-parameters that changed over to the device, as a step does: for a replay of one. No host sync."""
        for (number, _), hypers in self._hypers.items():
            hypers.upload(self.param_groups[number])

    # What a step needs, kept from one to the next ------------------------------------------------------

    def _wanted(self) -> list[tuple[_Wanted, list[Tensor]]]:
        """Return what a step is about in each group, as an earlier one was if its buckets serve it, and the gradients.

        What no kernel could update is refused before any group is touched.
        """
        return [self._wanted_of(number, group) for number, group in enumerate(self.param_groups)]

    def _wanted_of(self, number: int, group: Group) -> tuple[_Wanted, list[Tensor]]:
        params, gradients = with_gradients(group["params"])
        if not _DENSE.issuperset(map(_LAYOUT, gradients)):
            sparse = next(gradient for gradient in gradients if gradient.layout != torch.strided)
            raise UnsupportedError(
                f"{type(self).__name__} cannot use a sparse gradient",
                where=f"group {number}, a parameter of shape {tuple(sparse.shape)}",
                why="its kernels read whole tensors",
                write="torch.optim.SGD or SparseAdam for this parameter, or nn.Embedding(…, sparse=False)",
            )
        wanted = _Wanted(self.rule_of(group), params, list(map(_KIND, params)), in_memory(params))
        if (known := self._ready.get(number)) is not None and wanted.is_as(known):
            return known, gradients
        raise_together(wrong_weights(params))
        if not self.rounds:
            _require_exact(params, f"{type(self).__name__}, group {number}")
        for param in params:
            state = self.state.get(param, {})
            check_unchanged(param, {name: state[name] for name in wanted.rule.states if name in state})
            check_scales(param, state, wanted.rule.states)
        return wanted, gradients

    def _ready_of(self, number: int, wanted: _Wanted) -> list[_Ready]:
        """Return a group's buckets, built anew when other parameters have gradients."""
        if (buckets := wanted.buckets) is None:
            buckets = list(self._built(number, wanted.params, wanted.rule))
            self._ready[number] = replace(wanted, buckets=buckets)
        for device in {each.update.bucket.step.device for each in buckets}:
            self._hypers[number, device].upload(self.param_groups[number], f"{type(self).__name__}, group {number}")
        return buckets

    def _built(self, number: int, params: list[Tensor], update_rule: UpdateRule) -> Iterator[_Ready]:
        group = self.param_groups[number]
        self._give_state(group, params, update_rule)
        alike: dict[Hashable, list[tuple[Tensor, _Parts | None]]] = {}
        for param in params:
            parts = _halves_of(param)
            is_rounded = any(self.state[param][name].dtype != torch.float32 for name in update_rule.states)
            seeded = sharding(param) if is_rounded else None  # as which moments are rounded
            kind = param.device, param.dtype, parts and parts[0].dtype, id(self.state[param]["step"]), seeded
            alike.setdefault(kind, []).append((param, parts))
        for together in alike.values():
            members, halves = [param for param, _ in together], [parts for _, parts in together if parts is not None]
            device = members[0].device
            self._leave_others_behind(members)
            hypers = self._hypers.setdefault((number, device), Hypers(update_rule.hypers, device))
            kept = [self.state[param] for param in members]
            bucket = Bucket(
                rule=update_rule,
                storage=SPLIT if halves else PLAIN,
                hypers=hypers.tensors,
                step=kept[0]["step"],
                weights=[high for high, _ in halves] or [_lying(each) for each in locals_of(members)],
                extras=[low for _, low in halves] or [None] * len(members),
                states=[kept_of(state, update_rule.states) for state in kept],
                # Copies of a shard are rounded alike at random, and two shards are not.
                seed=number + (number_of_shard(members[0]) << 16),
            )
            is_sharded = any(map(is_distributed, members))
            try:
                yield _Ready(members, executor_for(device).update_of(bucket), is_sharded)
            except NoKernel as error:
                yield _Ready(members, portable(error).update_of(bucket), is_sharded)

    def _give_state(self, group: Group, params: list[Tensor], update_rule: UpdateRule) -> None:
        """Make what parameters lack: a count that all new ones share, and zeros."""
        fresh: dict[torch.device, Tensor] = {}
        for param in params:
            state = self.state[param]
            missing = [name for name in update_rule.states if name not in state]
            # Momentum that is turned on in mid-run begins as the gradient itself, as torch's does: at a count of one.
            if "step" not in state or (missing and update_rule.name == "sgd"):
                state["step"] = fresh.setdefault(param.device, torch.zeros((), dtype=torch.int64, device=param.device))
            # One that is turned on in mid-run is kept as the others of its weight are.
            known = next((state[name].dtype for name in update_rule.states if name in state), None)
            if known is None:
                check_group({**group, "params": None})
            dtype = getattr(torch, group["state_dtype"]) if known is None else known
            for name in missing:
                state.update(zeros(name, param, torch.int8 if is_coded(dtype) else dtype))

    def _leave_others_behind(self, members: list[Tensor]) -> None:
        """Give parameters that step without others of the same count a count of their own."""
        step = self.state[members[0]]["step"]
        together = {id(param) for param in members}
        others = (param for param in self._params() if id(param) not in together)
        if any(self.state.get(param, {}).get("step") is step for param in others):
            own = step.clone()
            for param in members:
                self.state[param]["step"] = own

    # State dicts -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return what torch's optimizer of this name returns; FP32 values of weights are the model's to save.

        ``step`` is a float64 tensor for each parameter, since float32 counts no further than 2^24; torch's optimizers
        load it. Moments share memory with the optimizer's, as torch's do. Entries of ``optimizer.state`` that belong
        to no parameter are saved as they are. NumPy's numbers among the options become Python's, which
        ``torch.load(weights_only=True)`` reads.
        """
        before, after = saving_hooks(self)
        for hook in before:
            hook(self)
        found = saved(self.param_groups, self.state)
        for hook in after:
            replaced = hook(self, found)
            found = found if replaced is None else replaced
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this optimizer's state, or that of torch's optimizer of this name.

        ``Optimizer.load_state_dict`` would cast it to the parameters' dtypes. Here moments and counts keep their own;
        ``state_dtype`` stays what this optimizer was made with, and moments of another one are rounded to it, to
        nearest. Codes with scales are taken as they are where weights lie as they did. torch's own optimizers would
        take codes for moments: they load what an optimizer with ``state_dtype="float32"`` returns once it has loaded
        them. A parameter that the state says nothing of begins anew. Hooks run as in ``torch.optim.Optimizer``: those
        before see a shallow copy of the whole state, and what they return is loaded instead.

        Raises:
            StateError: State of another shape or rule; nothing was loaded.
            ValueError: Other parameter groups, as torch says it.
        """
        # Hooks may delete from what they get; what is no mapping at all is refused after them.
        given: Mapping[str, Any] = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        before, after = loading_hooks(self)
        for hook in before:
            replaced = hook(self, given)
            given = given if replaced is None else replaced
        check_state(given, self._rule)
        state, groups = restored(given, self.param_groups, self.rule_of)
        # torch's own: that of this class would forget what a session has set.
        Optimizer.__setstate__(self, {"state": state, "param_groups": groups})
        self._ready.clear()
        self._hypers.clear()
        for hook in after:
            hook(self)


def _lying(here: Tensor) -> Tensor:
    """Return the tensor in which the values of a parameter lie that is not stored in halves, or not for now."""
    return here.value() if isinstance(here, Halves) else here


def _halves_of(param: Tensor) -> _Parts | None:
    """Return the two halves in which a parameter is stored, of a DTensor this rank's."""
    halves = in_halves(param)
    return None if halves is None else (halves.hi, halves.lo)


def _require_exact(params: list[Tensor], where: str) -> None:
    """Refuse low parameters, whose updates would be rounded."""
    if alone := [param for param in params if param.dtype in LOW]:
        dtype = dtype_name(alone[0].dtype)
        raise StateError(
            f"{dtype} weights without a remainder",
            where=f"{where}: {some_of(list(map(described, alone)))}",
            why=f"an update below half a unit in the last place of {dtype} is lost",
            write="mezzo.prepare(model.float(), policy), or mezzo.MixedPrecision(model.float(), optimizer, policy), "
            "with O2: weights are FP32, stored in two halves",
        )


def as_one_pass(optimizer: Optimizer) -> OnePassOptimizer | None:
    """Return an optimizer that takes a verdict and keeps its weights itself; ``None`` for any other."""
    return optimizer if isinstance(optimizer, OnePassOptimizer) else None


def one_pass(optimizers: Iterable[Optimizer]) -> list[OnePassOptimizer]:
    """Return those of some optimizers that take a verdict and keep their weights themselves."""
    return [optimizer for optimizer in optimizers if isinstance(optimizer, OnePassOptimizer)]
