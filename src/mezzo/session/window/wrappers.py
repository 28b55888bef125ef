"""The ``DistributedDataParallel`` wrappers around a session's models: found where they run, before or after it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from mezzo.cast.model.hooks import OwnHook
from mezzo.cast.model.sharding import units
from mezzo.errors import message
from mezzo.policy import Policy
from mezzo.session.window.wire import Wire, registered
from mezzo.tensors import LOW

__all__ = ["Reduction", "Wrappers"]

logger = logging.getLogger(__name__)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _HasLeaves(Protocol):
    def with_leaves(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what optimizers update, each with the parameter of the model that it stands for."""


Group = TypeVar("Group", bound=_HasLeaves)


class _Wrapped:
    """One wrapper, for as long as it lives.

    Args:
        ddp: The wrapper.

    Attributes:
        ddp: The wrapper, weakly.
        params: The ids of the parameters whose gradients it reduces.
        wire: What reduces them, where a session has to know of it.
        matters: Whether a session has to do anything around its backward passes.
        is_armed: Whether its last forward passes were such that a backward pass reduces.
        has_masters_of_first: Whether all ranks have the masters of the first, whose weights the wrapper gave them.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ref(ddp)
        named = ((n, p) for n, p in ddp.module.named_parameters() if p.requires_grad)
        params = [param for name, param in named if name not in ddp.parameters_to_ignore]
        self.params = frozenset(map(id, params))
        self.dtypes = {param.dtype for param in params}
        self.wire: Wire | None = None
        self.matters = False
        self.is_armed = False
        self.has_masters_of_first = False
        self.hook = ddp.register_forward_hook(OwnHook(self.ran))

    @_disable_dynamo
    def ran(self, ddp: Any, args: Any, output: Any) -> None:
        """Note whether a backward pass of this forward pass will reduce: a forward hook."""
        if torch.is_grad_enabled():
            self.armed(ddp.require_backward_grad_sync)

    def armed(self, reduces: bool) -> None:
        """Note what a forward pass was for; without a hook of ours nothing tells when a backward pass has reduced."""
        self.is_armed = reduces or (self.is_armed and self.wire is not None)


class _Reach:
    """The gradients of some optimizers that wrappers reduce, in whichever backward pass.

    Args:
        leaves: The parameters of the models that the optimizers update.
        wrapped: Wrappers that matter, of any parameters.

    Attributes:
        wrapped: Those that reduce gradients of these parameters.
        leaves: The parameters whose gradients they reduce.
        others: Those whose gradients they do not.
    """

    def __init__(self, leaves: Iterable[Tensor], wrapped: Iterable[_Wrapped]) -> None:
        known = {id(leaf): leaf for leaf in leaves}
        self.wrapped = [each for each in wrapped if not each.params.isdisjoint(known)]
        covered = frozenset[int]().union(*(each.params for each in self.wrapped))
        self.leaves = [leaf for key, leaf in known.items() if key in covered]
        self.others = [leaf for key, leaf in known.items() if key not in covered]

    def of(self, wrapped: Sequence[_Wrapped]) -> list[Tensor]:
        """Return the parameters whose gradients some of the wrappers reduce."""
        if len(wrapped) == len(self.wrapped):
            return self.leaves
        covered = frozenset[int]().union(*(each.params for each in wrapped))
        return [leaf for leaf in self.leaves if id(leaf) in covered]

    def is_summed(self, summing: Collection[_Wrapped]) -> bool:
        """Whether all gradients are sums over the same number of ranks, if these wrappers sum."""
        ranks = {each.wire.ranks for each in self.wrapped if each.wire is not None and each in summing}
        whole = all(each in summing for each in self.wrapped)
        return whole and len(ranks) == 1 and not any(leaf.requires_grad for leaf in self.others)

    def reduction(self, summing: Collection[_Wrapped]) -> Reduction:
        """Return what a backward pass reduces now.

        Args:
            summing: The wrappers that sum.
        """
        armed = [each for each in self.wrapped if each.is_armed]
        sums = {each.wire.ranks for each in armed if each.wire is not None and each in summing}
        return Reduction(
            near=self.leaves,
            leaves=self.of(armed),
            wrapped=armed,
            ranks=max(sums, default=1),
            is_known=all(each.wire is not None for each in self.wrapped),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """What one backward pass reduces of the gradients of some optimizers.

    Attributes:
        near: The parameters whose gradients wrappers reduce, in this pass or in another.
        leaves: Those of them that it reduces.
        wrapped: What reduces these.
        ranks: How many ranks' gradients are summed and not divided; 1 for averages.
        is_known: Whether the wrappers tell when they have reduced.
    """

    near: list[Tensor]
    leaves: list[Tensor]
    wrapped: Sequence[_Wrapped]
    ranks: int
    is_known: bool

    @property
    def wires(self) -> list[Wire]:
        """The communication hooks that reduce them, where these are known."""
        return [each.wire for each in self.wrapped if each.wire is not None]

    @property
    def has_run(self) -> bool:
        """Whether all of them are reduced."""
        return self.is_known and bool(self.wrapped) and all(wire.is_finished for wire in self.wires)

    @property
    def is_whole(self) -> bool:
        """Whether no wrapper is left to a later pass."""
        return len(self.leaves) == len(self.near)

    def wire_of(self, leaf: Tensor) -> Wire | None:
        """Return what reduces the gradient of one of the leaves."""
        return next(each.wire for each in self.wrapped if id(leaf) in each.params)

    def changes(self, leaf: Tensor) -> bool:
        """Whether what is reduced must not travel again: it would be rounded again, or summed again."""
        wire = self.wire_of(leaf)
        return self.ranks > 1 or leaf.dtype in LOW or (wire is not None and wire.dtype == torch.bfloat16)


class Wrappers:
    """The wrappers of a session's models, which it finds by itself.

    Args:
        models: The models.
        policy: Their policy.

    **Cost**: a Python function for each forward pass of a model. Where no such function runs, as in compiled models,
    the first backward pass looks through all objects, once.
    """

    def __init__(self, models: Sequence[nn.Module], policy: Policy) -> None:
        self._policy = policy
        self._known: list[_Wrapped] = []
        self._has_searched = False
        self._reaches: WeakKeyDictionary[Any, _Reach] = WeakKeyDictionary()
        self._told = set[str]()
        self._pauses, self._paused = 0, ExitStack()
        self._models = list(models)
        self._hooks: list[RemovableHandle] = []
        for model in models:
            for module in model.modules():
                if isinstance(module, DistributedDataParallel):
                    self._take(module)
            inner = getattr(model, "_orig_mod", model)
            inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
            self._hooks.append(inner.register_forward_pre_hook(OwnHook(self.entered)))

    @classmethod
    def of(cls, models: Sequence[nn.Module], policy: Policy) -> Wrappers | None:
        """Return those of a session; ``None`` without a process group, where there can be none."""
        return cls(models, policy) if dist.is_available() and dist.is_initialized() else None

    def remove(self) -> None:
        """Take the hooks off; gradients that travel later are torch's own averages."""
        for hook in (*self._hooks, *(each.hook for each in self._known)):
            hook.remove()
        for each in self._known:
            if each.wire is not None:
                each.wire.dtype = None
            if (ddp := each.ddp()) is not None and not each.dtypes <= {param.dtype for param in ddp.parameters()}:
                each.hook = ddp.register_forward_hook(OwnHook(self._goes_on))
        self._known.clear()

    @_disable_dynamo
    def _goes_on(self, *_: Any) -> None:
        """Warn of a wrapper that is used for training after its parameters have left their dtype."""
        if torch.is_grad_enabled():
            self.tell(
                "DistributedDataParallel reduces no gradient any more",
                where="a forward pass after amp.close()",
                why="it was made for the parameters' low precision, and they are FP32 again",
                write="DistributedDataParallel(model) anew, if training goes on; torch.no_grad() if it does not",
            )

    # Finding them -----------------------------------------------------------------------------------------

    def entered(self, *_: Any) -> None:
        """Look which wrapper a model runs in: a forward pre-hook."""
        if torch.compiler.is_compiling():
            return
        self._has_searched = True
        ddp = DistributedDataParallel._active_ddp_module  # the one that runs now; torch notes it for its compiler
        if ddp is not None and self._take(ddp) and torch.is_grad_enabled():
            self._known[-1].armed(ddp.require_backward_grad_sync)

    def _search(self, *, has_run: bool) -> None:
        """Look for wrappers of models that no hook was called for: they are compiled, or did not run yet."""
        if self._has_searched:
            return
        self._has_searched = True
        own = {id(param) for model in self._models for param in model.parameters()}
        wrappers = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        for ddp in wrappers:
            if not own.isdisjoint(map(id, ddp.parameters())) and self._take(ddp):
                self._known[-1].armed(has_run and ddp.require_forward_param_sync)  # as its last forward pass left it

    def _take(self, ddp: DistributedDataParallel) -> bool:
        """Know of a wrapper from here on; whether it is new."""
        if any(each.ddp() is ddp for each in self._known):
            return False
        found = _Wrapped(ddp)
        reduce, low = self._policy.reduce, not found.dtypes.isdisjoint(LOW)
        if low or (reduce == "bfloat16" and torch.float32 in found.dtypes):
            found.matters, found.wire = True, registered(ddp, _DTYPES.get(reduce))
            if found.wire is None:
                self.tell(
                    "DistributedDataParallel has a communication hook already",
                    logging.INFO if reduce == "param" else logging.WARNING,
                    why="torch takes one, and the user's is kept"
                    + ("" if reduce == "param" else f"; reduce={reduce} has no effect"),
                )
        self._known.append(found)
        self._reaches.clear()
        if self._pauses:
            self._paused.enter_context(ddp.no_sync())
        return True

    def tell(self, what: str, level: int = logging.WARNING, **rest: str) -> None:
        """Log something, once; the other arguments as of :func:`mezzo.errors.message`."""
        if what not in self._told:
            self._told.add(what)
            logger.log(level, "%s", message(what, **rest))

    def ranks(self) -> set[int]:
        """Return the ranks over which the wrappers known by now reduce gradients."""
        there = (ddp.process_group for each in self._known if (ddp := each.ddp()) is not None)
        return {rank for group in there for rank in dist.get_process_group_ranks(group)}

    def masters_of_first(self) -> Iterator[tuple[Any, frozenset[int]]]:
        """Yield, once for each wrapper, its process group, and the ids of its parameters."""
        for each in self._known:
            ddp = each.ddp()
            if ddp is not None and not each.has_masters_of_first and not each.dtypes.isdisjoint(LOW):
                yield ddp.process_group, each.params
                each.has_masters_of_first = True

    # Backward passes --------------------------------------------------------------------------------------

    def reductions(self, groups: Sequence[Group], *, scaled: bool) -> dict[Group, Reduction]:
        """Say what a backward pass is about to reduce, and let it travel so that nothing is lost.

        FP16 gradients that carry a loss scale are summed: a division before the sum would flush the smallest, one
        after it takes a kernel, and what unscales can do it for nothing. All gradients of optimizers whose parameters
        are not wrapped whole, or of several wrappers that sum over other ranks, are averaged as torch does.

        Args:
            groups: The optimizers whose gradients it makes.
            scaled: Whether these carry a loss scale.

        Returns:
            By group, where wrappers reduce any of its gradients, now or in a later backward pass.
        """
        self._search(has_run=True)
        if any(each.ddp() is None for each in self._known):
            self._known = [each for each in self._known if each.ddp() is not None]
            self._reaches.clear()
        if not any(each.matters for each in self._known):
            return {}
        plans = {group: plan for group in groups if (plan := self._reach(group)).wrapped}
        armed = [each for plan in plans.values() for each in plan.wrapped if each.is_armed and each.wire is not None]
        summing = set(armed if scaled and any(torch.float16 in each.dtypes for each in armed) else ())
        while unfit := {w for plan in plans.values() if not plan.is_summed(summing) for w in plan.wrapped} & summing:
            summing -= unfit
        for each in armed:
            if each.wire is not None:
                each.wire.is_sum, each.wire.is_finished = each in summing, False
        return {group: plan.reduction(summing) for group, plan in plans.items()}

    def end(self, reductions: Mapping[Any, Reduction]) -> None:
        """Take note of what a backward pass has reduced, once every group has."""
        for reduction in reductions.values():
            for each in reduction.wrapped:
                if (wire := each.wire) is not None:
                    each.is_armed = each.is_armed and not wire.is_finished
                    wire.is_sum = False
                    wire.added.clear()
                    wire.found.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enter ``no_sync()`` of all wrappers, and what is like it of modules that FSDP2 shards."""
        self._search(has_run=False)
        if not self._pauses:
            for each in self._known:
                if (ddp := each.ddp()) is not None:
                    self._paused.enter_context(ddp.no_sync())
            for module in [unit for model in self._models for unit in units(model)]:
                module.set_requires_gradient_sync(False, recurse=False)
                self._paused.callback(module.set_requires_gradient_sync, True, recurse=False)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._paused.close()

    def _reach(self, group: _HasLeaves) -> _Reach:
        if group not in self._reaches:
            wrapped = [each for each in self._known if each.matters]
            self._reaches[group] = _Reach((leaf for _, leaf in group.with_leaves()), wrapped)
        return self._reaches[group]
