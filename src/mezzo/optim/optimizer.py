"""The part that all of mezzo's optimizers share: parameter groups, buckets, and where weights have their other half."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, is_
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from mezzo.errors import StateError, UnsupportedError
from mezzo.optim.checks import Look, check_arguments, check_group, check_unchanged, ordered
from mezzo.optim.halves import Group
from mezzo.optim.hypers import Hypers, changes_nothing
from mezzo.optim.saving import SavedOptimizer
from mezzo.shards import locals_of, number_of_shard, placed, sharding
from mezzo.step.executors.choose import executor_for, portable, shared
from mezzo.step.gradients import clear_to_zeros, with_gradients
from mezzo.step.passes import Bucket, BucketUpdate, NoKernel, Verdict, counted
from mezzo.step.storage import FULL
from mezzo.step.update import UpdateRule
from mezzo.step.whole import Call, Piece, Work
from mezzo.tensors import local

__all__ = ["Group", "OnePassOptimizer", "Params", "as_one_pass", "one_pass"]

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_KIND: Final = attrgetter("dtype", "shape", "device")
_LAYOUT: Final = attrgetter("layout")
_DENSE: Final = {torch.strided}


@dataclass(slots=True, eq=False)
class _Ready:
    """Parameters that are updated together, and what updates this rank's part of them."""

    params: list[Tensor]
    update: BucketUpdate


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """The parameters of a group that have gradients, what each of them is, and their rule.

    Attributes:
        rule: The rule.
        params: The parameters.
        kinds: What each of them is.
        shards: What this rank holds of each, once buckets were built; ``None`` where all are plain tensors.
        buckets: Those of them that are updated together, in the same order; ``None`` until they were built.
    """

    rule: UpdateRule
    params: list[Tensor]
    kinds: list[Any]
    shards: list[Tensor] | None = None
    buckets: list[_Ready] | None = None

    def is_as(self, other: _Wanted) -> bool:
        """Whether the buckets that were built for another serve this one."""
        alike = self.rule == other.rule and self.kinds == other.kinds
        same = alike and all(map(is_, self.params, other.params))
        return same and (other.shards is None or all(map(is_, map(local, self.params), other.shards)))


class OnePassOptimizer(SavedOptimizer):
    """An optimizer whose step reads and writes everything once, and never asks the host whether to skip.

    :class:`mezzo.MixedPrecision` hands its verdict to :meth:`update`. ``torch.amp.GradScaler`` sets the attributes
    ``found_inf`` and ``grad_scale`` for a step, as for torch's fused optimizers: 0-d tensors, whether to skip, and what
    to divide gradients by. Gradients themselves are never written.

    Attributes:
        updates: How many steps were taken or skipped since the optimizer was made.
    """

    _step_supports_amp_scaling = True

    def __init__(self, params: Params, torch_only: Mapping[str, Any], **defaults: Any) -> None:
        check_arguments(self, torch_only)
        self._start()
        check_group(defaults)
        super().__init__(ordered(params), defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer, here or on another machine."""
        self._start()
        super().__setstate__(state)
        self._edits.see(self._with_masters())

    def _start(self) -> None:
        super()._start()
        self._hypers: dict[tuple[int, torch.device], Hypers] = {}
        self._under_way = Work()
        self._prepared: tuple[Verdict | None, Work] | None = None
        self._verdict: Verdict | None = None  # of the step under way
        self.updates = 0

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; see ``torch.optim.Optimizer.add_param_group``. In a session their state is made at once.

        Raises:
            PolicyError: A hyper-parameter that no update can work with; nothing was added.
            TypeError: A set of parameters, as torch says it.
        """
        params = param_group["params"]
        given = {**param_group, "params": [params] if isinstance(params, Tensor) else list(ordered(params))}
        check_group({**self.defaults, **given})
        own = given.get("master", self.defaults["master"])
        if (joined := self._joined) is not None and not joined.masters:
            if "master" not in given and given.get("rounding", "nearest") == "nearest":
                own = joined.own[0]
            given["master"] = None
        super().add_param_group(given)
        if joined is not None:
            joined.own.append(own)
        self._complete()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients.

        Args:
            set_to_none: Let go of them; otherwise they become zeros, by one kernel for each device and dtype.
        """
        if set_to_none:
            super().zero_grad()
        else:
            clear_to_zeros(param for _, param in self._pairs())

    @_disable_dynamo  # addresses and kernels of its own are nothing to trace: torch.compile breaks the graph here
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, or none, as the verdict or ``found_inf`` says.

        Args:
            closure: Evaluates the loss first, as torch's optimizers take it.

        Returns:
            What the closure returned.

        Raises:
            StateError: A parameter was resized, moved, or cast so that half of its value is lost, since its state
                was made.
            UnsupportedError: A sparse gradient. Whatever is raised, nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_half_way()
        if not self.state and changes_nothing(self.param_groups, self._gradients()):
            # torch.distributed.checkpoint steps so to have state made; counted, it would be a step of the training.
            for number in range(len(self.param_groups)):
                self._wanted(number)
            self._make_state()
            return loss
        prepared, self._prepared = self._prepared, None
        verdict, self._verdict = self._verdict, None
        if prepared is None or prepared[0] is not verdict:
            prepared = verdict, self._work(verdict)
        self._under_way = prepared[1]
        self._under_way.finish()
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
            keep: Whether the session writes to no gradient until then; hooks of other code before the step may.
        """
        self._refuse_half_way()
        prepared = verdict, self._work(verdict)
        hooks = len(self._optimizer_step_pre_hooks) + len(_global_optimizer_pre_hooks)
        if hooks > 1:
            hooks -= sum(isinstance(hook, Look) for hook in _global_optimizer_pre_hooks.values())
        self._prepared = prepared if keep and hooks == 1 else None

    @property
    def is_half_way(self) -> bool:
        """Whether an update was interrupted that could not be finished, and nothing was loaded since."""
        return self._under_way.is_half_way

    def _refuse_half_way(self) -> None:
        if self.is_half_way:
            raise StateError(
                "an update was interrupted half-way",
                where=f"{type(self).__name__}.step()",
                why="some weights and moments are those of the next step, and some are not",
                write="model.load_state_dict(…) and optimizer.load_state_dict(…) of the last checkpoint",
            )

    def _work(self, verdict: Verdict | None) -> Work:
        """Return a step as work of which nothing is done yet; whatever can be refused is refused here.

        Args:
            verdict: Of the gradients. Without one, ``found_inf`` and ``grad_scale`` are those of another library.
        """
        wanted = [self._wanted(number) for number in range(len(self.param_groups))]
        self.take_edits()
        of_groups = [(self._ready_of(number, group), its) for number, (group, its) in enumerate(wanted)]
        ready = [(each, gradients) for buckets, gradients in of_groups for each in buckets]
        work = Work()
        steps: list[Tensor] = []
        counts: list[Tensor] = []
        for device in {each.update.bucket.step.device for each, _ in ready}:
            here = verdict.on(device) if verdict is not None else self._verdict_of_flags(device)
            there = [pair for pair in ready if pair[0].update.bucket.step.device == device]
            before = {id(each.update.bucket.step): each.update.bucket.step for each, _ in there}
            after = shared(counted, (), [here.found_inf, *before.values()])
            steps += before.values()
            counts += after
            next_of = dict(zip(before, after, strict=True))
            for each, gradients in there:
                work.add(*self._pieces(each, gradients, here, next_of[id(each.update.bucket.step)]))
        params = [param for each, _ in ready for param in each.params]
        with_masters = [param for each, _ in ready if each.update.bucket.storage is FULL for param in each.params]
        updates = self.updates + 1

        def count() -> list[Call]:
            # Kernels write past autograd, whose version counters must tell the caches of casts, and graphs that saved
            # a weight, that it has changed.
            increment_version(params)
            self._edits.see(with_masters)
            self._awaiting.clear()
            written = [partial(torch._foreach_copy_, steps, counts)] if steps else []
            return [*written, partial(setattr, self, "updates", updates)]

        work.add(count)
        return work

    def _verdict_of_flags(self, device: torch.device) -> Verdict:
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        return Verdict.of_flags(found_inf, grad_scale, device)

    def _pieces(self, ready: _Ready, gradients: list[Any], verdict: Verdict, step: Tensor) -> list[Piece]:
        """Return a bucket's update, without kernels of its own where these cannot be built any more.

        Args:
            ready: The bucket.
            gradients: Of all of its group.
            verdict: On them.
            step: Its count.
        """
        if len(gradients) > len(ready.params):
            gradients = [param.grad for param in ready.params]
        if ready.update.bucket.weights is not ready.params:  # tensor parallelism leaves some as sums not taken yet
            gradients = [local(placed(each, param)) for each, param in zip(gradients, ready.params, strict=True)]
        try:
            return ready.update.pieces(gradients, verdict, step)
        except NoKernel as error:
            ready.update = portable(error).update_of(ready.update.bucket)
            return ready.update.pieces(gradients, verdict, step)

    def _gradients(self) -> Iterator[Tensor]:
        return (param.grad for _, param in self._pairs() if param.grad is not None)

    def upload(self) -> None:
        """Bring hyper-parameters that changed over to the device, as a step does: for a replay of one. No host sync."""
        for (number, _), hypers in self._hypers.items():
            hypers.upload(self.param_groups[number])

    # What a step needs, kept from one to the next ------------------------------------------------------

    def _wanted(self, number: int) -> tuple[_Wanted, list[Tensor]]:
        """Return what a group's step is about, as an earlier one was if its buckets serve this one, and the gradients.

        What no kernel could update is refused before any group is touched.
        """
        group = self.param_groups[number]
        params, gradients = with_gradients(group["params"])
        if not _DENSE.issuperset(map(_LAYOUT, gradients)):
            sparse = next(gradient for gradient in gradients if gradient.layout != torch.strided)
            raise UnsupportedError(
                f"{type(self).__name__} cannot use a sparse gradient",
                where=f"group {number}, a parameter of shape {tuple(sparse.shape)}",
                why="its kernels read whole tensors",
                write="torch.optim.SGD or SparseAdam for this parameter, or nn.Embedding(…, sparse=False)",
            )
        wanted = _Wanted(self.rule_of(group), params, list(map(_KIND, params)))
        if (known := self._ready.get(number)) is not None and wanted.is_as(known):
            return known, gradients
        for param in params:
            check_unchanged(param, self.state.get(param, {}), wanted.rule.states)
        return wanted, gradients

    def _ready_of(self, number: int, wanted: _Wanted) -> list[_Ready]:
        """Return a group's buckets, built anew when other parameters have gradients."""
        if (buckets := wanted.buckets) is None:
            weights, buckets = locals_of(wanted.params), list(self._built(number, wanted.params, wanted.rule))
            shards = None if weights is wanted.params else weights
            self._ready[number] = replace(wanted, shards=shards, buckets=buckets)
        for device in {each.update.bucket.step.device for each in buckets}:
            self._hypers[number, device].upload(self.param_groups[number], f"{type(self).__name__}, group {number}")
        return buckets

    def _built(self, number: int, params: list[Tensor], update_rule: UpdateRule) -> Iterator[_Ready]:
        group = self.param_groups[number]
        self._give_state(group, params, update_rule)
        alike: dict[tuple[torch.device, torch.dtype, int, Hashable], list[Tensor]] = {}
        is_random = group["state_dtype"] != "float32" or group["rounding"] == "stochastic"
        for param in params:
            seeded = sharding(param) if is_random else None
            kind = param.device, param.dtype, id(self.state[param]["step"]), seeded
            alike.setdefault(kind, []).append(param)
        for (device, *_), members in alike.items():
            self._leave_others_behind(members)
            hypers = self._hypers.setdefault((number, device), Hypers(update_rule.hypers, device))
            form = self._storage(group, members[0])
            kept = [self.state[param] for param in members]
            bucket = Bucket(
                rule=update_rule,
                storage=form,
                hypers=hypers.tensors,
                step=kept[0]["step"],
                weights=locals_of(members),
                extras=[local(state[form.extra]) if form.extra else None for state in kept],
                states=[tuple(local(state[name]) for name in update_rule.states) for state in kept],
                # Copies of a shard are rounded alike at random, and two shards are not.
                seed=number + (number_of_shard(members[0]) << 16),
            )
            try:
                yield _Ready(members, executor_for(device).update_of(bucket))
            except NoKernel as error:
                yield _Ready(members, portable(error).update_of(bucket))

    def _begin_anew(self, halves: Iterable[Tensor]) -> None:
        super()._begin_anew(halves)
        self._under_way.drop()
        self._hypers.clear()

    def _leave_others_behind(self, members: list[Tensor]) -> None:
        """Give parameters that step without others of the same count a count of their own."""
        step = self.state[members[0]]["step"]
        together = {id(param) for param in members}
        others = (param for _, param in self._pairs() if id(param) not in together)
        if any(self.state.get(param, {}).get("step") is step for param in others):
            own = step.clone()
            for param in members:
                self.state[param]["step"] = own


def as_one_pass(optimizer: Optimizer) -> OnePassOptimizer | None:
    """Return an optimizer that takes a verdict and keeps its weights itself; ``None`` for any other."""
    return optimizer if isinstance(optimizer, OnePassOptimizer) else None


def one_pass(optimizers: Iterable[Optimizer]) -> list[OnePassOptimizer]:
    """Return those of some optimizers that take a verdict and keep their weights themselves."""
    return [optimizer for optimizer in optimizers if isinstance(optimizer, OnePassOptimizer)]
