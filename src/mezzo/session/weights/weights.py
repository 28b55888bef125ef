"""The models and optimizers of a session: converted as the policy says, named, and put back as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mezzo.cast.model.prepare import Prepared
from mezzo.cast.region import autocast
from mezzo.optim.masters import MasterWeights
from mezzo.optim.optimizer import OnePassOptimizer
from mezzo.policy import Policy
from mezzo.session.state.load_hooks import ExactLoading
from mezzo.session.weights.low import LowWeights

__all__ = ["Parts", "plain_name"]


class Parts:
    """What a session ties together.

    Attributes:
        models: The models.
        optimizers: The optimizers over their parameters.
        policy: The policy.
        prepared: The models under the policy, once :meth:`convert` ran.
        masters: The FP32 masters of those optimizers that have any, by ``id`` of the optimizer.
        exact: What keeps all bits when a model loads weights.
    """

    def __init__(self, models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> None:
        self.models, self.optimizers, self.policy = models, optimizers, policy
        self.prepared: list[Prepared] = []
        self.masters: dict[int, MasterWeights] = {}
        self.exact = ExactLoading(self)
        self._hooks: list[RemovableHandle] = []
        self._low: LowWeights | None = None

    @contextlib.contextmanager
    def converted(self, before_step: Callable[..., None], after_step: Callable[..., None]) -> Iterator[None]:
        """Carry the policy out; if this raises, or what is done inside, everything is as it was.

        Args:
            before_step: Called with an optimizer before each of its steps.
            after_step: Called with it after each, before hooks of the user's.
        """
        before = [{key: _shallow(value) for key, value in each.state.items()} for each in self.optimizers]
        try:
            self._convert(before_step, after_step)
            yield
            for prepared in self.prepared:
                prepared.release_originals()
        except BaseException:
            self.undo()
            for optimizer, state in zip(self.optimizers, before, strict=True):
                optimizer.state.clear()
                optimizer.state.update(state)
            raise

    def _convert(self, before_step: Callable[..., None], after_step: Callable[..., None]) -> None:
        for optimizer in self.optimizers:  # before the masters' own hooks, so that nothing is gathered either
            self._hooks.append(optimizer.register_step_pre_hook(before_step))
            self._hooks.append(optimizer.register_step_post_hook(after_step))
            # Before all others: one that raises is a hook's error, and the step itself is whole.
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(self._hooks[-1].id, last=False)
        for model in self.models:
            self.prepared.append(Prepared(model, self.policy))
        self._low = LowWeights(self.optimizers, self.policy, self.name_of)
        if self.policy.master_weights:
            originals = {t: data for prepared in self.prepared for t, data in prepared.converted.items()}
            for optimizer in self.optimizers:
                if isinstance(optimizer, OnePassOptimizer):
                    optimizer.adopt(originals, self.name_of)
                else:
                    self.masters[id(optimizer)] = MasterWeights(
                        optimizer, grad_dtype="param", originals=originals, hooks=False
                    )
        halves = self.stored(in_fp32=True)  # these keep every bit, also for undo()
        for prepared in self.prepared:
            prepared.release_originals(halves)
            prepared.casts.spans_regions = True
        keeps_masters = self.policy.master_weights or self.policy.param_dtype == torch.float32
        for optimizer in self._own():
            optimizer.join(masters=keeps_masters)
        if self.policy.master_weights:
            self.exact.watch(self.models)

    def refuse_lost_bits(self) -> None:
        """Refuse low-precision weights that were added or thawed since, and would lose gradients or updates.

        Raises:
            UnsupportedError: There are such weights.
        """
        if self._low is not None:
            self._low.check()

    def refuse_low_gradients(self, dtypes: Set[torch.dtype]) -> None:
        """Refuse weights that were cast to low precision since, and would lose gradients or updates.

        Args:
            dtypes: Of all gradients that a step is about to use.

        Raises:
            UnsupportedError: There are such weights.
        """
        if self._low is not None:
            self._low.check_gradients(dtypes)

    def undo(self) -> None:
        """Give back FP32 weights with the masters' values, and the optimizers as they were built.

        Called again after an interrupt, it finishes what is left.
        """
        for hook in self._hooks:
            hook.remove()
        self.exact.remove()
        exact = {param: optimizer.master_of(param) for param, optimizer in self.stored().items()}
        exact |= {param: master.data for each in self.masters.values() for param, master in each.masters().items()}
        # Backwards, since the first of two models that share a parameter knows what it was before.
        for prepared in reversed(self.prepared):
            prepared.keep_originals(exact)
            prepared.remove()
        for optimizer in self._own():
            optimizer.leave()
        for masters in self.masters.values():
            masters.remove()

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
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        for model in self.models:
            model.zero_grad(set_to_none)

    # The weights ----------------------------------------------------------------------------------------

    def master_params(self, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
        """Yield the tensors that one optimizer, or all, update: FP32 masters, or the parameters themselves."""
        for each in self.optimizers:
            if optimizer is None or each is optimizer:
                for group in each.param_groups:
                    yield from group["params"]

    def take_edits(self) -> None:
        """Let masters take over parameters that were changed in place."""
        for masters in self.masters.values():
            masters.take_edits()
        for optimizer in self._own():
            optimizer.take_edits()

    def named_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all models; a model's number comes first where there are several."""
        for number, model in enumerate(self.models):
            prefix = f"{number}." if len(self.models) > 1 else ""
            for name, param in model.named_parameters():
                yield prefix + plain_name(model, name), param

    def named_masters(self) -> dict[str, nn.Parameter]:
        """Return the FP32 masters by the names of their parameters."""
        held = {param: master for masters in self.masters.values() for param, master in masters.masters().items()}
        return {name: held[param] for name, param in self.named_params() if param in held}

    def stored(self, *, in_fp32: bool = False) -> dict[Tensor, OnePassOptimizer]:
        """Return the parameters whose other half an optimizer of mezzo's keeps, with the optimizer.

        Args:
            in_fp32: Whether to leave out those whose two halves are no FP32 value.
        """
        return {param: optimizer for optimizer in self._own() for param in optimizer.stored(in_fp32=in_fp32)}

    def _own(self) -> Iterator[OnePassOptimizer]:
        return (optimizer for optimizer in self.optimizers if isinstance(optimizer, OnePassOptimizer))

    def name_of(self, tensor: Tensor) -> str:
        """Name a parameter, or that of which a tensor is the master."""
        named: dict[int, Any] = {id(param): name for name, param in self.named_params()}
        named |= {id(master): name for name, master in self.named_masters().items()}
        return str(named.get(id(tensor), f"a parameter of shape {tuple(tensor.shape)}"))


def _shallow(state: Any) -> Any:
    return dict(state) if isinstance(state, dict) else state


def plain_name(model: nn.Module, name: str) -> str:
    """Return a parameter's name as it is without ``torch.compile``'s and data parallelism's wrappers."""
    inner = getattr(model, "_orig_mod", model)
    name = name.replace("_orig_mod.", "")
    wrapped = isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return name.removeprefix("module.") if wrapped else name
