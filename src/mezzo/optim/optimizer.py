"""The part that all of mezzo's optimizers share: parameter groups, buckets, and where the low halves of weights are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, itemgetter
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
    frozen,
    rate_dtype,
    require_ordered,
    with_dtype_name,
    wrong_weights,
)  # fmt: skip
from mezzo.optim.planned import Cohort, Count, PreparedStep, Ready, StepInputs, UpdatePlan
from mezzo.optim.state_dicts import check_state, counts_of, first_count, kept_of, keys_of, put, restored, saved, taken
from mezzo.sharded import is_distributed, local, locals_of, number_of_shard, placed, sharding
from mezzo.step.executors.choose import executor_for, shared
from mezzo.step.executors.whole import WholeUpdate
from mezzo.step.gradients import clear_to_zeros
from mezzo.step.matrix import NATIVE, Products
from mezzo.step.moments import name_of_codes, zeros
from mezzo.step.storage import PLAIN, SPLIT
from mezzo.step.update import RULES, UpdateRule, rule
from mezzo.step.verdict import Bucket, Verdict, numbers_of_step
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
_KNOWN: Final = {*_PLAIN, Halves}
_PARTS: Final = attrgetter("hi", "lo", "cell.decoded")
_IS_LENT: Final = attrgetter("cell.is_lent")
_PARAMS: Final = itemgetter("params")
_NUMBER: Final = attrgetter("count.number")
_RULE: Final = attrgetter("rule")
_GRADIENT: Final = attrgetter("grad")
#: The options of each rule, by its name.
_SWITCHES: Final = {name: tuple(sorted(update_rule.options)) for name, update_rule in RULES.items()}


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
    _has_one_rule: ClassVar[bool] = True  # whether a plan is made anew for its switches alone
    reads_halves: ClassVar[bool] = True
    _step_supports_amp_scaling = True

    def __init__(self, params: Params, torch_only: Mapping[str, Any], **defaults: Any) -> None:
        check_arguments(self, torch_only)
        self._start()
        defaults = with_dtype_name(defaults)
        check_group(defaults)
        super().__init__(require_ordered(params), defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer, here or on another machine; or take another state."""
        if "updates" not in vars(self):
            self._start()
        super().__setstate__(state)

    def _start(self) -> None:
        """Set the attributes of an optimizer that has not planned a step."""
        self._plan: UpdatePlan | None = None
        self._counts: dict[int, Count] = {}  # those of which states have views, by the id of the memory
        self._hypers: dict[tuple[int, torch.device], Hypers] = {}
        self._prepared: PreparedStep | None = None
        self._verdict: Verdict | None = None  # of the step under way
        self.updates = 0
        self.rounds = False

    def rule_of(self, group: Group) -> UpdateRule:
        """Return a group's update rule."""
        name = self.rule_name(group)
        return rule(name, *(option for option in _SWITCHES[name] if group[option]))

    def rule_name(self, group: Mapping[str, Any]) -> str:
        """Return the name of a group's update rule."""
        return self._rule

    def matrices(self) -> Iterator[Tensor]:
        """Yield the parameters whose rule is about whole matrices."""
        return (p for group in self.param_groups if self.rule_of(group).is_whole for p in group["params"])

    def settings_of(self, group: Group) -> tuple[Any, ...]:
        """Return what a plan, and a captured step, has frozen of a group: its rule, and what that reads on the host."""
        update_rule = self.rule_of(group)
        settings = [frozen(group[name]) for name in update_rule.settings]
        return (update_rule, *settings, *([rate_dtype(group)] if update_rule.is_whole else []))

    def products_on(self, device: torch.device) -> Products:
        """Return how a rule of whole matrices multiplies on a device."""
        return NATIVE

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; see ``torch.optim.Optimizer.add_param_group``.

        Raises:
            PolicyError: A hyper-parameter that no update can work with; nothing was added.
            TypeError: A set of parameters, as torch says it.
        """
        params = [given] if isinstance(given := param_group["params"], Tensor) else list(require_ordered(given))
        group = with_dtype_name({**param_group, "params": params})
        check_group({**self.defaults, **group})
        super().add_param_group(group)

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
            self._planned()
            return loss
        prepared, self._prepared = self._prepared, None
        verdict, self._verdict = self._verdict, None
        if prepared is None or prepared.verdict is not verdict:
            prepared = self._prepare(verdict)
        with uninterrupted():
            self._write(prepared)
        return loss

    def update(self, verdict: Verdict, step: Callable[[], Any] | None = None) -> None:
        """Step by a verdict, with all hooks, using what :meth:`make_ready` of the same verdict has kept.

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
        """Raise every error that :meth:`update` could raise, and prepare it; :meth:`update` is the next call.

        Args:
            verdict: What the update will be given.
            keep: Whether nothing writes to a gradient until then, neither the engine nor hooks before the step.
        """
        prepared = self._prepare(verdict)
        self._prepared = prepared if keep else None

    def _prepare(self, verdict: Verdict | None) -> PreparedStep:
        """Return what a step is about to write; whatever can be refused is refused here.

        Args:
            verdict: Of the gradients. Without one, ``found_inf`` and ``grad_scale`` are those of another library.
        """
        plan, gradients = self._planned()
        prepared = PreparedStep(verdict, plan.params)
        for device, cohorts in plan.by_device.items():
            here = verdict.on(device) if verdict is not None else self._verdict_of_flags(device)
            numbers: list[Tensor] = [here.found_inf, *map(_NUMBER, cohorts)]
            for cohort in cohorts:
                cohort.hypers.upload(self.param_groups[cohort.group], self, cohort.group)
                numbers += cohort.hypers.tensors.values()
            results = shared(numbers_of_step, (tuple(map(_RULE, cohorts)),), numbers)
            for cohort, step, scalars in zip(cohorts, results, results[len(cohorts) :], strict=False):
                prepared.counts.append((cohort.count, step))
                for ready in cohort.ready:
                    grads: Sequence[Tensor] = [*map(gradients.__getitem__, ready.indices)]
                    if ready.is_sharded:  # tensor parallelism leaves some as sums not taken yet
                        grads = [local(placed(g, param)) for g, param in zip(grads, ready.params, strict=True)]
                    prepared.updates.append((ready.update, ready.update.ready(grads), here, step, scalars))
        return prepared

    def _write(self, prepared: PreparedStep) -> None:
        """Update, or skip. What comes in the middle ends the step half-way: no signal does."""
        self.updates += 1  # before the first write
        for update, gradients, verdict, step, scalars in prepared.updates:
            update.write(gradients, verdict, step, scalars)
        # Kernels write past autograd, whose version counters must tell the caches of casts, and graphs that saved a
        # weight, that it has changed.
        increment_version(prepared.params)
        for count, number in prepared.counts:
            count.write(number)

    def _verdict_of_flags(self, device: torch.device) -> Verdict:
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        return Verdict.of_flags(found_inf, grad_scale, device)

    def _gradients(self) -> Iterator[Tensor]:
        return (param.grad for param in self._params() if param.grad is not None)

    def _params(self) -> Iterator[Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    def upload(self) -> None:
        """Bring hyper-parameters that changed over to the device, as a step does: for a replay of one. No host sync."""
        for (number, _), hypers in self._hypers.items():
            if number < len(self.param_groups):
                hypers.upload(self.param_groups[number], self, number)

    def is_followed(self) -> bool:
        """Whether the state is what the last step has left, which a replay of that step goes on with."""
        return self._plan is None or self._plan.is_held(self.state)

    # What a step needs, kept from one to the next ------------------------------------------------------

    def _planned(self) -> tuple[UpdatePlan, list[Tensor]]:
        """Return the plan of a step, made anew if an input has changed since the last one, and the gradients.

        Parameters that no kernel could update are refused before anything is made.
        """
        inputs, plan = self._step_inputs(), self._plan
        if plan is None or not plan.serves(inputs, self.state):
            del plan
            plan = self._plan_anew(inputs)
        return plan, inputs.gradients

    def _step_inputs(self) -> StepInputs:
        groups, all_params = self.param_groups, []
        lists = [*map(_PARAMS, groups)]
        for params in lists:
            all_params += params
        gradients: list[Any] = [*map(_GRADIENT, all_params)]
        have, params = [*map(is_not, gradients, repeat(None))], all_params
        if not all(have):
            params, gradients = [*compress(all_params, have)], [*compress(gradients, have)]
        if not _DENSE.issuperset(map(_LAYOUT, gradients)):
            pairs = [(number, param.grad) for number, params in enumerate(lists) for param in params]
            number, sparse = next((n, g) for n, g in pairs if g is not None and g.layout != torch.strided)
            raise UnsupportedError(
                f"{type(self).__name__} cannot use a sparse gradient",
                where=f"group {number}, a parameter of shape {tuple(sparse.shape)}",
                why="its kernels read whole tensors",
                write="torch.optim.SGD or SparseAdam for this parameter, or nn.Embedding(…, sparse=False)",
            )
        switches = _SWITCHES[self._rule] if self._has_one_rule else None
        return StepInputs(
            options=[
                (
                    len(g["params"]),
                    g["state_dtype"],
                    *(self.settings_of(g) if switches is None else map(bool, map(g.__getitem__, switches))),
                )
                for g in groups
            ],
            params=all_params,
            have_gradients=have,
            gradients=gradients,
            forms=[*map(_DTYPE, params), *map(_SHAPE, params), *map(Tensor.get_device, params)],
            memory=_memory_of(params),
        )

    def _plan_anew(self, inputs: StepInputs) -> UpdatePlan:
        """Plan steps, and let the state hold what they read and write."""
        with_gradient = iter(inputs.have_gradients)
        wanted = [
            (number, group, [*compress(group["params"], with_gradient)])
            for number, group in enumerate(self.param_groups)
        ]
        states_by_group = [self._taken(number, group, params) for number, group, params in wanted]
        self._plan = None  # and let go of moments that nothing reads any more
        cohorts: list[Cohort] = []
        for (number, group, params), taken_of_each in zip(wanted, states_by_group, strict=True):
            first = sum(len(earlier) for _, _, earlier in wanted[:number])
            cohorts += self._cohorts(number, group, params, taken_of_each, first)
        read = []
        # The state is written here alone: should memory run out above, nothing was changed.
        for (_, group, params), taken_of_each in zip(wanted, states_by_group, strict=True):
            rule_of_group, dtype = self.rule_of(group), getattr(torch, group["state_dtype"])
            keys = keys_of(rule_of_group, dtype)
            for param, (moments, _) in zip(params, taken_of_each, strict=True):
                if self.state.get(param) is None:
                    self.state[param] = {}
                put(self.state[param], moments, rule_of_group.states)
            read.append((params, keys, set(rule_of_group.states).difference(keys)))  # beside codes programs may put
        self._keep_counts(cohorts)
        self._plan = UpdatePlan(inputs, cohorts, read, self.state)
        return self._plan

    def _taken(self, number: int, group: Group, params: list[Tensor]) -> list[tuple[dict[str, Any], Count | int]]:
        """Return what the state holds of some parameters, as a step takes it, and how often each was updated.

        By the same object where that is the same number.
        """
        raise_together(wrong_weights(params))
        check_group({**group, "params": None}, f"{type(self).__name__}, group {number}")
        if not self.rounds:
            _require_exact(params, f"{type(self).__name__}, group {number}")
        update_rule, dtype = self.rule_of(group), getattr(torch, group["state_dtype"])
        states = [taken(self.state.get(param), param, update_rule, dtype) for param in params]
        counts = self._counts_of([state.get("step", 0) for state in states])
        begun = [count or first_count(state, group) for state, count in zip(states, counts, strict=True)]
        return list(zip(states, begun, strict=True))

    def _counts_of(self, steps: list[Any]) -> list[Count | int]:
        """Return how often parameters were updated; without a look at the device where no program has written to it."""
        previous = [self._counts.get(id(step._base)) if isinstance(step, Tensor) else None for step in steps]
        unchanged = [None if count is None or not count.is_whole() else count for count in previous]
        numbers = iter(counts_of([s for s, count in zip(steps, unchanged, strict=True) if count is None], "edited"))
        return [next(numbers) if count is None else count for count in unchanged]

    def _cohorts(
        self,
        number: int,
        group: Group,
        params: list[Tensor],
        taken_of_each: list[tuple[dict[str, Any], Count | int]],
        first: int,
    ) -> Iterator[Cohort]:
        """Yield what updates a group's parameters: together those with one count, and in a bucket those stored alike.

        Args:
            number: The group's.
            group: The group.
            params: Those of its parameters that have gradients.
            taken_of_each: What :meth:`_taken` returned.
            first: The place of the first one's gradient among all.
        """
        update_rule, dtype = self.rule_of(group), getattr(torch, group["state_dtype"])
        counted_alike: dict[Hashable, dict[Hashable, list[int]]] = {}
        parts = [*map(_halves_of, params)]
        for index, (param, (state, count)) in enumerate(zip(params, taken_of_each, strict=True)):
            for name in update_rule.states:
                if (name if dtype != torch.int8 else name_of_codes(name)) not in state:
                    state |= zeros(name, param, dtype)
            halves = parts[index]
            # As which moments are rounded at random.
            seeded = sharding(param) if update_rule.states and dtype != torch.float32 else None
            which = count if isinstance(count, int) else id(count.counts)
            key = param.dtype, halves and halves[0].dtype, seeded
            counted_alike.setdefault((param.device, which, type(count)), {}).setdefault(key, []).append(index)
        keys = keys_of(update_rule, dtype)
        settings = {name: frozen(group[name]) for name in update_rule.settings}
        for indices_by_kind in counted_alike.values():
            members = [index for indices in indices_by_kind.values() for index in indices]
            device, states = params[members[0]].device, [taken_of_each[index][0] for index in members]
            count = _counted(states, taken_of_each[members[0]][1], device)
            hypers = self._hypers.setdefault((number, device), Hypers(update_rule.hypers, device))
            cohort = Cohort(number, update_rule, hypers, count)
            for indices in indices_by_kind.values():
                together = [params[index] for index in indices]
                halved = [halves_of_param for index in indices if (halves_of_param := parts[index]) is not None]
                bucket = Bucket(
                    rule=update_rule,
                    storage=SPLIT if halved else PLAIN,
                    hypers=hypers.tensors,
                    step=count.number,
                    weights=[high for high, _ in halved] or [_lying(tensor) for tensor in locals_of(together)],
                    extras=[low for _, low in halved] or [None] * len(indices),
                    states=[kept_of(taken_of_each[index][0], keys) for index in indices],
                    # Copies of a shard are rounded alike at random, and two shards are not.
                    seed=number + (number_of_shard(together[0]) << 16),
                    params=together if update_rule.is_whole else (),
                    settings=settings,
                    rate_dtype=rate_dtype(group),
                    products=self.products_on(device) if update_rule.is_whole else NATIVE,
                )
                update_of = WholeUpdate if update_rule.is_whole else executor_for(device).update_of
                update, is_sharded = update_of(bucket), any(map(is_distributed, together))
                cohort.ready.append(Ready(together, [first + index for index in indices], update, is_sharded))
            yield cohort

    def _keep_counts(self, cohorts: list[Cohort]) -> None:
        """Keep the counts of which the state has views."""
        counts = {id(cohort.count.counts): cohort.count for cohort in cohorts}
        step_counts = [state.get("step") for param in self._params() if (state := self.state.get(param))]
        bases = {id(step._base) for step in step_counts if isinstance(step, Tensor)}
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
        state_dict = saved(self.param_groups, self.state)
        for hook in after:
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

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
        loaded: Mapping[str, Any] = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        before, after = loading_hooks(self)
        for hook in before:
            replaced = hook(self, loaded)
            loaded = loaded if replaced is None else replaced
        check_state(loaded, [*map(self.rule_name, self.param_groups)])
        state, groups = restored(loaded, self.param_groups, self.rule_of)
        # torch's own: that of this class would forget what a session has set.
        Optimizer.__setstate__(self, {"state": state, "param_groups": groups})
        self._plan = None  # and let go of what nothing reads any more
        for hook in after:
            hook(self)


def _counted(states: list[dict[str, Any]], count: Count | int, device: torch.device) -> Count:
    """Return a new count for some parameters, of which each one's state gets a view.

    Args:
        states: Of these parameters, which get the views.
        count: How often they were updated.
        device: Theirs.
    """
    if isinstance(count, Count) and len(count.counts) == len(states):
        return count  # others have none of it
    with torch.inference_mode(mode=False):  # where tensors would have no version
        count_of_all = Count.of(count if isinstance(count, int) else count.number, len(states), device)
        for state, step in zip(states, count_of_all.counts.unbind(), strict=True):
            state["step"] = step
    return count_of_all


def _memory_of(params: list[Tensor]) -> list[Any]:
    """Return the tensors in which the values of parameters lie on this rank, where they are not those themselves."""
    kinds = [*map(type, params)]
    if (classes := {*kinds}) <= _PLAIN:
        return []
    if not classes <= _KNOWN:
        return in_memory(params)
    halves: list[Any] = [*compress(params, map(is_, kinds, repeat(Halves)))]
    if any(map(_IS_LENT, halves)):
        return in_memory(params)
    return [*chain.from_iterable(map(_PARTS, halves))]


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
