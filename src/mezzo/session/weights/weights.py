"""The models and optimizers of a session: converted as the policy says, named, and put back as they were."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mezzo.cast.model import sharding
from mezzo.cast.model.prepare import Prepared
from mezzo.cast.region import autocast
from mezzo.errors import StateError
from mezzo.optim.keeper import Keeper
from mezzo.optim.masters import MasterWeights
from mezzo.optim.optimizer import as_one_pass, one_pass
from mezzo.optim.state import widened_state
from mezzo.policy import Policy
from mezzo.session.weights.clearing import clear
from mezzo.session.weights.low import LowWeights
from mezzo.session.weights.phases import Handles
from mezzo.session.weights.shards import Shards, halved
from mezzo.session.weights.untrained import Untrained
from mezzo.session.weights.words import Words
from mezzo.session.window.wrappers import Wrappers
from mezzo.step.consensus import Consensus
from mezzo.tensors import LOW

__all__ = ["Weights"]

T = TypeVar("T")


class Removable(Protocol):
    """What can be taken off again."""

    def remove(self) -> None:
        """Take it off."""
        ...


class Weights:
    """What a session ties together.

    Attributes:
        models: The models.
        optimizers: The optimizers over their parameters.
        policy: The policy.
        handles: The handles of those models that were prepared before.
        prepared: The models under the policy, once converted.
        untrained: What was before of those tensors that no optimizer updates.
        masters: The FP32 masters of those optimizers that have any, by ``id`` of the optimizer.
        restored: FP32 parameters that the session's state wrote, until the next step.
        low: What refuses weights that would lose gradients or updates.
        shards: What ``fully_shard`` has sharded of the models; it may be nothing.
        load_hooks: What watches the models while they load and save weights; empty where nothing has to.
        words: What the program writes that the session is behind.
        wrappers: The models' data-parallel wrappers; ``None`` without a process group, where there are none.
    """

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        policy: Policy,
        handles: Handles,
        kind: type[MasterWeights] = MasterWeights,
    ) -> None:
        self.models, self.optimizers, self.policy = models, optimizers, policy
        self.handles, self._kind = handles, kind
        self.prepared: list[Prepared] = []
        self.untrained = Untrained(self.prepared)
        self._num_updated: int | None = None  # parameters whose keepers were handed what there is of them
        self.masters: dict[int, MasterWeights] = {}
        self.restored: set[Tensor] = set()
        self.load_hooks: list[Removable] = []
        self._step_hooks: list[RemovableHandle] = []
        self.low = LowWeights(optimizers, policy, self.name_of)
        self.shards = Shards(models)
        self.wrappers: Wrappers | None = None
        self.words = Words()

    @contextlib.contextmanager
    def converted(self, before_step: Callable[..., None], after_step: Callable[..., None]) -> Iterator[None]:
        """Carry the policy out; if this raises, or what is done inside, everything is as it was.

        Args:
            before_step: Called with an optimizer before each of its steps.
            after_step: Called with it after each, before hooks of the user's.
        """
        before, originals = [_state_of(each) for each in self.optimizers], dict[Tensor, Tensor]()
        try:
            self._watch_steps(self.optimizers, before_step, after_step)
            for model in self.models:
                self.prepared.extend(self.handles.get(model) or [Prepared(model, self.policy)])
            originals = {} if self.policy.master_weights else self.untrained.values_of(self.updated())
            self._adopt(self.optimizers)
            yield
            self.untrained.put_aside()
            self.wrappers = Wrappers.of(self.models, self.policy)
        except BaseException:
            self._keep_originals(originals)
            self.undo()
            for restore in before:
                restore()
            for handle in self._given():
                handle.kept.round()
            raise

    @contextlib.contextmanager
    def joined(
        self, optimizers: list[Optimizer], before_step: Callable[..., None], after_step: Callable[..., None]
    ) -> Iterator[None]:
        """Adopt optimizers that come later; if this raises, or what is done inside, everything is as it was.

        Args:
            optimizers: Over parameters of the models.
            before_step: See :meth:`converted`.
            after_step: See there.
        """
        before = [_state_of(each) for each in optimizers]
        known, known_hooks = list(self.optimizers), list(self._step_hooks)
        params = (param for each in optimizers for group in each.param_groups for param in group["params"])
        originals = self.untrained.values_of(params)
        try:
            self.optimizers += optimizers
            self._watch_steps(optimizers, before_step, after_step)
            self._adopt(optimizers)
            yield
        except BaseException:
            for hook in self._step_hooks[len(known_hooks) :]:
                hook.remove()
            self._step_hooks = known_hooks
            self.optimizers[:] = known
            for keeper in self._keepers_of(optimizers):
                keeper.leave()
            for optimizer, restore in zip(optimizers, before, strict=True):
                self.masters.pop(id(optimizer), None)
                restore()
            self._keep_originals(originals)
            self.untrained.put_aside()
            raise

    def _watch_steps(
        self, optimizers: list[Optimizer], before_step: Callable[..., None], after_step: Callable[..., None]
    ) -> None:
        for optimizer in optimizers:  # before the masters' own hooks, so that nothing is gathered either
            self._step_hooks.append(optimizer.register_step_pre_hook(before_step))
            self._step_hooks.append(optimizer.register_step_post_hook(after_step))
            # Before all others: one that raises is a hook's error, and the step itself is whole.
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(self._step_hooks[-1].id, last=False)

    def _adopt(self, optimizers: list[Optimizer]) -> None:
        self.low.check()
        own = one_pass(optimizers)
        if self.policy.master_weights:
            if self.shards:
                parts = halved(self.models, self.optimizers, self.name_of)
                for prepared in self.prepared:
                    prepared.halve(parts)
            originals = self.untrained.values_of(p for each in optimizers for p in self.updated(each))
            for each in own:
                each.adopt(originals, self.name_of)
            for optimizer in optimizers:
                if optimizer not in own:
                    self.masters[id(optimizer)] = self._kind(
                        optimizer, grad_dtype="param", originals=originals, hooks=False
                    )
        self._release_originals()
        for prepared in self.prepared:
            prepared.join()
        keeps_masters = self.policy.master_weights or self.policy.param_dtype == torch.float32
        for each in own:
            each.join(masters=keeps_masters)

    def _release_originals(self) -> None:
        """Forget the values before conversion of tensors that an optimizer updates: keepers have every bit.

        Without masters there are none, and such weights are what the policy's format holds of them.
        """
        num_updated = sum(1 for _ in self.updated())
        self.untrained.release(self.stored(in_fp32=True) if self.policy.master_weights else {*self.updated()})
        self._num_updated = num_updated

    def _keep_originals(self, originals: Mapping[Tensor, Tensor]) -> None:
        for prepared in self.prepared:
            prepared.kept.keep(originals)

    def take_thawed(self) -> None:
        """Give keepers the values before conversion of parameters whose groups were added since."""
        if not self.untrained or self._num_updated in (None, sum(1 for _ in self.updated())):
            return
        if self.policy.master_weights:
            for own in one_pass(self.optimizers):
                if frozen := self.untrained.values_of(p for p in self.updated(own) if not p.requires_grad):
                    own.take_edits()
                    own.adopt(frozen, self.name_of)
            self.untrained.hand_over(self.stored(in_fp32=True))
        self._release_originals()

    def fp32_values(self) -> Callable[[Tensor], Tensor | None]:
        """Return what gives the FP32 value of a parameter or buffer, where more is kept of it than it holds."""
        self.take_thawed()
        keepers = self.stored(in_fp32=True)

        def value_of(tensor: Tensor) -> Tensor | None:
            keeper = keepers.get(tensor)
            return self.untrained.value_of(tensor) if keeper is None else keeper.master_of(tensor).detach()

        return value_of

    def undo(self) -> None:
        """Give back FP32 weights with the values that were kept, and the optimizers as they were built.

        Called again after an interrupt, it finishes what is left.
        """
        for hook in (*self._step_hooks, *self.load_hooks):
            hook.remove()
        self.load_hooks.clear()
        self.take_thawed()
        # Read before any tensor changes its dtype, while keepers still know what belongs to which weight.
        exact = {param: keeper.master_of(param).detach() for param, keeper in self.stored().items()}
        widen = _widening(each for each in self.optimizers if as_one_pass(each) is None)
        # Backwards, since the first of two models that share a parameter knows what it was before.
        for prepared in reversed(self.prepared):
            prepared.kept.keep(exact)
            prepared.leave()
            prepared.when_removed(widen)
            if prepared not in self._given():
                prepared.remove()
        for keeper in self.keepers():
            keeper.leave()
        if self.wrappers is not None:
            self.wrappers.remove()
        self.shards.average()

    def _given(self) -> list[Prepared]:
        return [handle for handles in self.handles.values() for handle in handles]

    # The models -----------------------------------------------------------------------------------------

    def region(self) -> autocast:
        """Return the region to run the models and their losses in."""
        return self.prepared[0].autocast(*self.prepared[1:])

    def keep_casts(self) -> None:
        """Let the casts of weights that forward passes have made serve the rest of the window."""
        for prepared in self.prepared:
            prepared.casts.keep()

    def forget_casts(self) -> None:
        """Let go of the casts of weights that forward passes have made."""
        for prepared in self.prepared:
            prepared.casts.clear()
            prepared.entrance.forget()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of models and masters."""
        clear(self.optimizers, self.models, self.stored(), set_to_none)
        self.shards.forget_gradients()

    def refuse_replaced(self, leaves: Iterable[Tensor]) -> None:
        """Refuse to go on where ``fully_shard`` gave the models new parameters, once the session had theirs.

        Args:
            leaves: The parameters that the session knows.
        """
        if not any(map(sharding.units, self.models)):
            return
        known = {id(param) for _, param in self.named_params()}
        if lost := [leaf for leaf in leaves if id(leaf) not in known]:
            raise StateError(
                "fully_shard gave the modules new parameters",
                where=f"{len(lost)} of those that the session and its optimizers update are in no model any more",
                why="nothing that is computed depends on the old ones",
                write="fully_shard first, then the optimizer, then MixedPrecision",
            )

    # The weights ----------------------------------------------------------------------------------------

    def updated(self, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
        """Yield the tensors that one optimizer, or all, update: FP32 masters, or the parameters themselves."""
        chosen = [each for each in self.optimizers if optimizer is None or each is optimizer]
        return (param for each in chosen for group in each.param_groups for param in group["params"])

    def keepers(self) -> list[Keeper]:
        """Return what keeps the FP32 values of low-precision parameters."""
        return self._keepers_of(self.optimizers)

    def _keepers_of(self, optimizers: list[Optimizer]) -> list[Keeper]:
        masters = (self.masters.get(id(optimizer)) for optimizer in optimizers)
        return [*one_pass(optimizers), *(each for each in masters if each is not None)]

    def stored(self, *, in_fp32: bool = False) -> dict[Tensor, Keeper]:
        """Return the low-precision parameters, each with the keeper of its FP32 value.

        Args:
            in_fp32: Whether to leave out those of which only a compensation is kept.
        """
        return {param: keeper for keeper in self.keepers() for param in keeper.stored(in_fp32=in_fp32)}

    def take_edits(self) -> None:
        """Let keepers take over parameters that were changed in place."""
        for keeper in self.keepers():
            keeper.take_edits()

    @torch.no_grad()
    def follow_first_rank(self, consensus: Consensus) -> None:
        """Take the FP32 values of the first rank of each wrapper, once.

        It gave the others its rounded weights, whatever each had begun with; what rounding took would differ for ever.
        """
        for group, params in self.wrappers.masters_of_first() if self.wrappers is not None else ():
            self.take_edits()
            for own in one_pass(self.optimizers):
                own.settle_ties()
            for param, keeper in self.stored(in_fp32=True).items():
                if id(param) in params:
                    value = consensus.exchanged(keeper.master_of(param).detach().clone(), None, group, "the masters")
                    if group.rank() > 0:
                        keeper.write(param, value)

    # Their names ----------------------------------------------------------------------------------------

    def named_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all models; a model's number comes first where there are several."""
        return self._named(nn.Module.named_parameters)

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of all models, named as their parameters are."""
        return dict(self._named(nn.Module.named_buffers))

    def named_state(self) -> Iterator[tuple[str, Any]]:
        """Yield what the state dicts of all models hold, tensors themselves, under the names of their parameters."""
        return self._named(lambda model: model.state_dict(keep_vars=True).items())

    def keys_of(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield each name of :meth:`named_state` that is one model's, with its key in that model's state dict."""
        return self._named(lambda each: ((key, key) for key in (each.state_dict() if each is model else ())))

    def _named(self, each: Callable[[nn.Module], Iterable[tuple[str, T]]]) -> Iterator[tuple[str, T]]:
        for number, model in enumerate(self.models):
            parts = sharding.parts_of(sharding.units(model))  # a forward pass leaves the root gathered
            prefix = f"{number}." if len(self.models) > 1 else ""
            for name, tensor in each(model):
                yield prefix + _plain_name(model, name), parts.get(tensor, tensor)  # type: ignore[call-overload]

    def named_masters(self) -> dict[str, nn.Parameter]:
        """Return the FP32 masters by the names of their parameters."""
        held = {param: master for masters in self.masters.values() for param, master in masters.masters().items()}
        return {name: held[param] for name, param in self.named_params() if param in held}

    def names(self) -> dict[int, str]:
        """Return the name of each parameter, and of the master that stands for it, by ``id``."""
        return {id(tensor): name for name, tensor in (*self.named_params(), *self.named_masters().items())}

    def name_of(self, tensor: Tensor) -> str:
        """Name a parameter, or that of which a tensor is the master."""
        return self.names().get(id(tensor), f"a parameter of shape {tuple(tensor.shape)}")


def _state_of(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that puts back an optimizer's state as it is now, with the same tensors."""
    state = {key: dict(value) if isinstance(value, dict) else value for key, value in optimizer.state.items()}

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)

    return restore


def _widening(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Return a function that widens the state of weights that are low now: torch keeps it in their dtype."""
    held = ((each, key) for each in optimizers for key in each.state if isinstance(key, Tensor))  # or words of its own
    low = [(weakref.ref(each), param) for each, param in held if param.dtype in LOW]

    def widen() -> None:
        for reference, param in low:
            state = optimizer.state if (optimizer := reference()) is not None else {}
            if param in state and param.dtype not in LOW:
                state[param] = widened_state(state[param])

    return widen


def _plain_name(model: nn.Module, name: str) -> str:
    """Return a parameter's name as it is without ``torch.compile``'s and data parallelism's wrappers."""
    inner = getattr(model, "_orig_mod", model)
    name = name.replace("_orig_mod.", "")
    wrapped = isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return name.removeprefix("module.") if wrapped else name
