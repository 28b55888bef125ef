"""The part that all of mezzo's optimizers share: parameter groups, buckets, and where the low halves of weights are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from mezzo.compiling import never_compiled
from mezzo.errors import StateError, UnsupportedError, raise_together, some_of
from mezzo.hooks import loading_hooks, saving_hooks
from mezzo.interrupts import uninterrupted
from mezzo.optim.groups import (
    Group,
    Hypers,
    changes_nothing,
    check_arguments,
    check_group,
    named,
    ordered,
    wrong_weights,
)
from mezzo.optim.state_dicts import check_state, counts_of, has_begun, kept_of, keys_of, put, restored, saved, taken
from mezzo.sharded import is_distributed, local, locals_of, number_of_shard, placed, sharding
from mezzo.step.executors.choose import executor_for, shared
from mezzo.step.gradients import clear_to_zeros, with_gradients
from mezzo.step.moments import name_of_codes, zeros
from mezzo.step.storage import PLAIN, SPLIT
from mezzo.step.update import RULES, UpdateRule, rule
from mezzo.step.verdict import Bucket, BucketUpdate, Verdict, counted
from mezzo.tensors import LOW, described, dtype_name
from mezzo.weights.halves import Halves, in_halves
from mezzo.weights.stepping import in_memory

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

#: The high and the low half of a weight.
_Parts: TypeAlias = tuple[Tensor, Tensor]

_DTYPE: Final = attrgetter("dtype")
_SHAPE: Final = attrgetter("shape")
_LAYOUT: Final = attrgetter("layout")
_DENSE: Final = {torch.strided}
#: Parameters that are the memory of their values.
_PLAIN: Final = {torch.nn.Parameter, Tensor}


@dataclass(slots=True, eq=False)
class _Count:
    """How many updates the parameters of a bucket have had: one number, of which the state of each has a view.

    Attributes:
        each: (parameters,) int64.
        version: Of that memory, as the last step has left it: another one tells that a program has written there.
    """

    each: Tensor
    version: int

    @classmethod
    def of(cls, number: Tensor | int, size: int, device: torch.device) -> _Count:
        """Count on from a number."""
        each = torch.empty(size, dtype=torch.int64, device=device)
        each.copy_(number) if isinstance(number, Tensor) else each.fill_(number)
        return cls(each, each._version)

    def is_whole(self) -> bool:
        """Whether it is one number still."""
        return self.each._version == self.version

    def write(self, number: Tensor) -> None:
        """Let all of them be another number."""
        self.each.copy_(number)
        self.version = self.each._version


@dataclass(slots=True, eq=False)
class _Ready:
    """Parameters that are updated together, what updates this rank's part of them, and whether they are DTensors."""

    params: list[Tensor]
    update: BucketUpdate
    count: _Count
    is_sharded: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """The parameters of a group that have gradients, what each of them is, and their rule.

    Attributes:
        rule: The rule.
        state_dtype: Of their moments.
        params: The parameters.
        kinds: What they are.
        memory: The tensors in which their values lie on this rank, where they are not those themselves.
        found: What their state holds, as a step takes it, and how often each was updated: by the same object where that
            is the same number. Only where buckets are to be built of it.
    """

    rule: UpdateRule
    state_dtype: str
    params: list[Tensor]
    kinds: list[Any]
    memory: list[Tensor]
    found: list[tuple[dict[str, Any], _Count | int]] = field(default_factory=list)

    def is_as(self, other: _Wanted) -> bool:
        """Whether the buckets that were built for another serve this one."""
        alike = self.rule == other.rule and self.state_dtype == other.state_dtype and self.kinds == other.kinds
        alike = alike and len(self.memory) == len(other.memory)
        return alike and all(map(is_, self.params, other.params)) and all(map(is_, self.memory, other.memory))


class _Built:
    """The buckets of a group, and what of ``optimizer.state`` they were built from.

    Args:
        wanted: What they are about.
        buckets: The buckets, in the order of the parameters.
        state: The optimizer's.
    """

    def __init__(self, wanted: _Wanted, buckets: list[_Ready], state: Mapping[Any, Any]) -> None:
        self.wanted, self.buckets = wanted, buckets
        keys = keys_of(wanted.rule, getattr(torch, wanted.state_dtype))
        # Of several names, so that it returns a tuple.
        self._read = itemgetter(*keys, *(() if len(keys) > 1 else keys))
        self._others = set(wanted.rule.states).difference(keys)  # which programs may put beside codes
        self.look_up(state)
        self._held = [*chain.from_iterable(map(self._read, self._entries))]

    def look_up(self, state: Mapping[Any, Any]) -> None:
        """Find the entries of the parameters in a state."""
        self._entries: list[Any] = [*map(state.get, self.wanted.params)]

    def is_held(self) -> bool:
        """Whether the state holds what the buckets read and write: a program may put other things there.

        **Cost**: loops of C's, 0.2 µs a parameter.
        """
        try:
            if not all(map(is_, chain.from_iterable(map(self._read, self._entries)), self._held)):
                return False
        except (KeyError, TypeError):  # no mapping, or nothing of this name
            return False
        if any(any(map(contains, self._entries, repeat(name))) for name in self._others):
            return False
        return all(each.count.is_whole() for each in self.buckets)


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """What a step is about to write, when all that it could refuse has been refused.

    Attributes:
        verdict: Of the gradients; ``None`` where the flags are another library's.
        updates: What updates a bucket, with the gradients, their verdict and the count on its device.
        counts: The counts of updates before this step, and the numbers after it.
        params: All that is updated.
    """

    verdict: Verdict | None
    updates: list[tuple[BucketUpdate, Sequence[Tensor], Verdict, Tensor]] = field(default_factory=list)
    counts: list[tuple[_Count, Tensor]] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)


class OnePassOptimizer(Optimizer):
    """An optimizer whose step reads and writes everything once, and never asks the host whether to skip.

    Of parameters that are stored in halves it reads and writes both, in the same pass as everything else, and keeps
    nothing of them itself.

    A session hands its verdict to :meth:`update`. ``torch.amp.GradScaler`` sets the attributes ``found_inf`` and
    ``grad_scale`` for a step, as for torch's fused optimizers: 0-d tensors, whether to skip, and what to divide
    gradients by. Gradients themselves are never written.

    ``state`` holds what steps use. Between two of them it is the user's, as that of torch's optimizers: the next step
    goes on from whatever is put, assigned or written there, or begins anew where it finds nothing. What is assigned in
    another dtype, or with gaps, is copied; what no step can use is refused before anything is written.

    **Cost**: a look at the state in each step, 0.2 µs a parameter. After an edit, tables are built anew; no host sync,
    but where a count was edited.

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
        """Restore a copied or unpickled optimizer, here or on another machine; or take another state."""
        if "updates" not in vars(self):
            self._start()
        super().__setstate__(state)

    def _start(self) -> None:
        """Know nothing yet of what the state is for."""
        self._built: dict[int, _Built] = {}  # by the group's number
        self._seen: tuple[list[Any], list[Any]] = [], []  # keys and values of the state, in which entries were found
        self._counts: dict[int, _Count] = {}  # those of which states have views, by the id of the memory
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
            StateError: A low parameter outside a session; one that was resized, or moved, since its state was made; or
                a state that a program has edited so that no step can use it.
            PolicyError: A hyper-parameter that no update can work with, or a parameter in float64.
            UnsupportedError: A sparse gradient. Whatever is raised, nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.state and changes_nothing(self.param_groups, self._gradients()):
            # torch.distributed.checkpoint steps so to have state made; counted, it would be a step of the training.
            for number, (wanted, _) in enumerate(self._wanted()):
                self._ready_of(number, wanted)
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
            verdict: Of these gradients, as :func:`mezzo.step.verdict.judge` returns it.
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
            after = shared(counted, (), [here.found_inf, *(each.update.bucket.step for each, _ in there)])
            for (each, gradients), step in zip(there, after, strict=True):
                prepared.counts.append((each.count, step))
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
        for count, number in prepared.counts:
            count.write(number)

    def _verdict_of_flags(self, device: torch.device) -> Verdict:
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        return Verdict.of_flags(found_inf, grad_scale, device)

    def _readable(self, ready: _Ready, gradients: list[Any]) -> Sequence[Tensor]:
        """Return gradients as a bucket's update reads them.

        Args:
            ready: The bucket.
            gradients: Of all of its group.
        """
        if len(gradients) > len(ready.params):
            gradients = [param.grad for param in ready.params]
        if ready.is_sharded:  # tensor parallelism leaves some as sums not taken yet
            gradients = [local(placed(each, param)) for each, param in zip(gradients, ready.params, strict=True)]
        return ready.update.ready(gradients)

    def _gradients(self) -> Iterator[Tensor]:
        return (param.grad for param in self._params() if param.grad is not None)

    def _params(self) -> Iterator[Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    def upload(self) -> None:
        """Bring hyper-parameters that changed over to the device, as a step does: for a replay of one. No host sync."""
        for (number, _), hypers in self._hypers.items():
            if number < len(self.param_groups):
                hypers.upload(self.param_groups[number])

    def is_followed(self) -> bool:
        """Whether the state is what the last step has left, which a replay of that step goes on with."""
        self._look_up()
        return all(each.is_held() for each in self._built.values())

    # What a step needs, kept from one to the next ------------------------------------------------------

    def _wanted(self) -> list[tuple[_Wanted, list[Tensor]]]:
        """Return what a step is about in each group, as an earlier one was if its buckets serve it, and the gradients.

        What no kernel could update is refused before any group is touched.
        """
        self._look_up()
        return [self._wanted_of(number, group) for number, group in enumerate(self.param_groups)]

    def _look_up(self) -> None:
        """Find the entries of parameters in the state again, where that is not the mapping that it was."""
        state, (keys, values) = self.state, self._seen
        if len(state) == len(keys) and all(map(is_, state, keys)) and all(map(is_, state.values(), values)):
            return
        self._seen = [*state], [*state.values()]
        self._built = {n: each for n, each in self._built.items() if n < len(self.param_groups)}
        for each in self._built.values():
            each.look_up(state)

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
        kinds = [*map(_DTYPE, params), *map(_SHAPE, params), *map(Tensor.get_device, params)]
        memory = [] if {*map(type, params)} <= _PLAIN else in_memory(params)
        wanted = _Wanted(self.rule_of(group), group["state_dtype"], params, kinds, memory)
        known = self._built.get(number)
        if known is not None and wanted.is_as(known.wanted) and known.is_held():
            return known.wanted, gradients
        raise_together(wrong_weights(params))
        check_group({**group, "params": None}, f"{type(self).__name__}, group {number}")
        if not self.rounds:
            _require_exact(params, f"{type(self).__name__}, group {number}")
        dtype = getattr(torch, wanted.state_dtype)
        found = [taken(self.state.get(param), param, wanted.rule, dtype) for param in params]
        counts = self._counts_of([each.get("step", 0) for each in found])
        begun = [count or has_begun(each, group) for each, count in zip(found, counts, strict=True)]
        wanted.found.extend(zip(found, begun, strict=True))
        return wanted, gradients

    def _counts_of(self, steps: list[Any]) -> list[_Count | int]:
        """Return how often parameters were updated; without a look at the device where no program has written to it."""
        known = [self._counts.get(id(step._base)) if isinstance(step, Tensor) else None for step in steps]
        kept = [None if count is None or not count.is_whole() else count for count in known]
        numbers = iter(counts_of([s for s, count in zip(steps, kept, strict=True) if count is None], "edited"))
        return [next(numbers) if count is None else count for count in kept]

    def _ready_of(self, number: int, wanted: _Wanted) -> list[_Ready]:
        """Return a group's buckets, built anew when other parameters have gradients, or another state."""
        built = self._built.get(number)
        if built is None or built.wanted is not wanted:
            del built  # and let go of moments that nothing reads any more
            self._built.pop(number, None)
            buckets = list(self._buckets(number, wanted))
            self._put(wanted, buckets)  # all at once: memory may run out before
            built = self._built[number] = _Built(wanted, buckets, self.state)
            self._seen = [*self.state], [*self.state.values()]
            wanted.found.clear()
        for device in {each.update.bucket.step.device for each in built.buckets}:
            self._hypers[number, device].upload(self.param_groups[number], f"{type(self).__name__}, group {number}")
        return built.buckets

    def _buckets(self, number: int, wanted: _Wanted) -> Iterator[_Ready]:
        update_rule, dtype = wanted.rule, getattr(torch, wanted.state_dtype)
        alike: dict[Hashable, list[tuple[Tensor, _Parts | None, dict[str, Any]]]] = {}
        counts: dict[Hashable, _Count | int] = {}
        for param, (found, count) in zip(wanted.params, wanted.found, strict=True):
            parts = _halves_of(param)
            for name in update_rule.states:
                if (name if dtype != torch.int8 else name_of_codes(name)) not in found:
                    found |= zeros(name, param, dtype)
            # As which moments are rounded at random.
            seeded = sharding(param) if update_rule.states and dtype != torch.float32 else None
            which = count if isinstance(count, int) else id(count.each)
            kind = param.device, param.dtype, parts and parts[0].dtype, which, type(count), seeded
            alike.setdefault(kind, []).append((param, parts, found))
            counts[kind] = count
        for place, together in alike.items():
            members, parts_of_each, states = map(list, zip(*together, strict=True))
            halves, device = [parts for parts in parts_of_each if parts is not None], members[0].device
            count = _counted(states, counts[place], device)
            hypers = self._hypers.setdefault((number, device), Hypers(update_rule.hypers, device))
            keys = keys_of(update_rule, dtype)
            bucket = Bucket(
                rule=update_rule,
                storage=SPLIT if halves else PLAIN,
                hypers=hypers.tensors,
                step=count.each[0],
                weights=[high for high, _ in halves] or [_lying(each) for each in locals_of(members)],
                extras=[low for _, low in halves] or [None] * len(members),
                states=[kept_of(state, keys) for state in states],
                # Copies of a shard are rounded alike at random, and two shards are not.
                seed=number + (number_of_shard(members[0]) << 16),
            )
            is_sharded = any(map(is_distributed, members))
            yield _Ready(members, executor_for(device).update_of(bucket), count, is_sharded)

    def _put(self, wanted: _Wanted, buckets: list[_Ready]) -> None:
        """Let the state hold what buckets read and write."""
        for param, (found, _) in zip(wanted.params, wanted.found, strict=True):
            if (state := self.state.get(param)) is None:
                state = self.state[param] = {}
            put(state, found, wanted.rule.states)
        counts = {id(each.count.each): each.count for each in buckets}
        there = [state.get("step") for param in self._params() if (state := self.state.get(param))]
        bases = {id(step._base) for step in there if isinstance(step, Tensor)}
        self._counts = {key: count for key, count in (self._counts | counts).items() if key in bases}

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
        nearest. Codes with scales are taken as they are where weights lie as they did. torch's own optimizers do not
        know them, and raise before they step: they load what an optimizer with ``state_dtype="float32"`` returns once
        it has loaded them. A parameter that the state says nothing of begins anew. Hooks run as in
        ``torch.optim.Optimizer``: those before see a shallow copy of the whole state, and what they return is loaded
        instead.

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
        self._built.clear()  # and let go of what nothing reads any more
        for hook in after:
            hook(self)


def _counted(states: list[dict[str, Any]], count: _Count | int, device: torch.device) -> _Count:
    """Return a count that some parameters have for themselves, each with a view of it in its state.

    Args:
        states: Of these parameters, which get the views.
        count: How often they were updated.
        device: Theirs.
    """
    if isinstance(count, _Count) and len(count.each) == len(states):
        return count  # others have none of it
    with torch.inference_mode(mode=False):  # where tensors would have no version
        made = _Count.of(count if isinstance(count, int) else count.each[0], len(states), device)
        for state, step in zip(states, made.each.unbind(), strict=True):
            state["step"] = step
    return made


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
