"""The models and optimizers of a session: converted as the policy says, named, saved and loaded in FP32, put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mezzo import sharded
from mezzo.cast.casts import cast_floating
from mezzo.cast.device import usual_policy
from mezzo.cast.model.checks import preparations_in
from mezzo.cast.model.prepare import Prepared
from mezzo.cast.products import Memory
from mezzo.cast.region import autocast
from mezzo.compiling import INSIDE, inside
from mezzo.errors import PolicyError, StateError
from mezzo.hooks import complete
from mezzo.optim.optimizer import as_one_pass, one_pass
from mezzo.policy import Policy
from mezzo.session.refusals import Handles
from mezzo.tensors import LOW


def handles_of(subjects: list[nn.Module | Prepared], policy: Any) -> tuple[list[nn.Module], Handles, Policy]:
    """Return the models, the handles of those that were prepared before, and the policy of all.

    Args:
        subjects: Models, or the handles that :func:`mezzo.prepare` returned.
        policy: A policy, or what :meth:`Policy.of` takes; ``None`` for that of prepared models, else
            :func:`usual_policy` of the models' devices.

    Raises:
        PolicyError: A model was prepared with another policy.
        StateError: A model was prepared only in part, as part of a larger one, or was changed since.
    """
    models, handles_by_model = list[nn.Module](), dict[nn.Module, list[Prepared]]()
    for subject in subjects:
        model, handles = (
            (subject.model, [subject]) if isinstance(subject, Prepared) else (subject, preparations_in(subject))
        )
        models.append(model)
        handles_by_model[model] = handles
    all_handles = [handle for handles in handles_by_model.values() for handle in handles]
    if policy is not None:
        policy = Policy.of(policy)
    elif all_handles:
        policy = all_handles[0].given_policy
    else:
        policy = usual_policy({param.device.type for model in models for param in model.parameters()})
    for handle in all_handles:
        if handle.given_policy != policy:
            raise PolicyError(
                "the session's policy is not the one that its model was prepared with",
                where="\n".join(handle.given_policy.differences(policy)),
                why="prepared → session",
                write="MixedPrecision(prepared, optimizer), whose policy is that of prepared",
            )
        handle.prepare_for_session()
    for model, handles in handles_by_model.items():
        covered = {id(param) for handle in handles for param in handle.model.parameters()}
        if handles and covered != {id(param) for param in model.parameters()}:
            raise StateError(
                "the model was prepared only in part, or as part of a larger one",
                where=type(model).__name__,
                write="MixedPrecision([prepared, …], optimizer) with what mezzo.prepare returned",
            )
    return models, handles_by_model, policy


class Weights:
    """The models and optimizers of a session, and the policy that is carried out on them.

    Args:
        models: The models.
        optimizers: The optimizers.
        policy: The policy.
        handles: Those of models that were prepared before.

    Attributes:
        models: The models.
        optimizers: The optimizers, those that join later as well.
        policy: The policy.
        prepared: One handle a model that is converted; of those prepared before theirs.
        units: The modules that ``fully_shard`` has sharded.
        device: Where flags live.
        are_low: Whether optimizers may update parameters in low precision.
    """

    def __init__(self, models: list[nn.Module], optimizers: list[Optimizer], policy: Policy, handles: Handles) -> None:
        self.models, self.optimizers, self.policy, self._handles = models, optimizers, policy, handles
        self.prepared: list[Prepared] = []
        self.units = [unit for model in models for unit in sharded.units(model)]
        self.device = torch.device("cpu")
        self.are_low = policy.param_dtype in LOW
        self._undo = contextlib.ExitStack()

    # Conversion and back ---------------------------------------------------------------------------------

    def convert(self) -> None:
        """Carry the policy out; if this raises, everything is as it was."""
        try:
            for model in self.models:
                self.prepared += self._handles.get(model) or [Prepared(model, self.policy)]
            self.prepare_optimizers(self.optimizers)
            for prepared in self.prepared:
                prepared.join()
        except BaseException:
            self.undo()
            raise

    def prepare_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Prepare optimizers to step: all run hooks, and mezzo's round the low weights of O3."""
        for optimizer in optimizers:
            complete(optimizer)
        for optimizer in one_pass(optimizers):
            optimizer.rounds = self.are_low
            self._undo.callback(setattr, optimizer, "rounds", False)

    def replace_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Replace the optimizers; nothing is converted (a ``GradScaler`` learns of them one by one).

        Args:
            optimizers: Of a loop that knows models by itself.
        """
        for optimizer in optimizers:
            complete(optimizer)
        self.optimizers[:] = optimizers
        self.are_low = any(leaf.dtype in LOW for optimizer in optimizers for leaf in self.leaves(optimizer))

    def undo(self) -> None:
        """Restore FP32 weights, and the optimizers as they were built."""
        self._undo.close()
        handles_of_before = [handle for handles in self._handles.values() for handle in handles]
        for prepared in reversed(self.prepared):
            prepared.leave()
            if prepared not in handles_of_before:
                prepared.remove()
        if self.are_low:
            widen_states(self.optimizers)

    # The models ------------------------------------------------------------------------------------------

    def region(self) -> autocast:
        """Return the region to run the models and their losses in."""
        return self.prepared[0].autocast(*self.prepared[1:])

    def memories(self) -> list[Memory]:
        """Return what products below sixteen bits remember, of each model that has such."""
        return [memory for prepared in self.prepared if (memory := prepared.params.memory) is not None]

    # The weights -----------------------------------------------------------------------------------------

    def leaves(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters that an optimizer updates."""
        params = list[Tensor]()
        for group in optimizer.param_groups:
            params += group["params"]
        return params

    def updated(self, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
        """Yield the parameters that one optimizer, or each, updates."""
        chosen = self.optimizers if optimizer is None else [optimizer]
        return (param for member in chosen for group in member.param_groups for param in group["params"])

    # Names -----------------------------------------------------------------------------------------------

    def named_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all models by the names that they have without wrappers.

        A model's number comes first where there are several.
        """
        yield from self._named({model: model.named_parameters() for model in self.models})

    def named_state(self) -> Iterator[tuple[str, Any]]:
        """Yield what the state dicts of all models hold, tensors themselves, under the names of their parameters."""
        yield from self._named({model: model.state_dict(keep_vars=True).items() for model in self.models})

    def keys_of(self, model: nn.Module) -> dict[str, str]:
        """Return the names of :meth:`named_state` for the keys of one model's own state dict."""
        keys: dict[nn.Module, Iterable[tuple[str, Any]]] = dict.fromkeys(self.models, ())
        keys[model] = ((key, key) for key in model.state_dict(keep_vars=True))
        return {key: name for name, key in self._named(keys)}

    def _named(self, items_of: Mapping[nn.Module, Iterable[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
        for number, model in enumerate(self.models):
            prefix = f"{number}." if len(self.models) > 1 else ""
            parts = sharded.parts_of(sharded.units(model))  # a forward pass leaves the root gathered
            for name, value in items_of[model]:
                tensor = parts.get(value, value) if isinstance(value, Tensor) else value
                yield prefix + _plain_name(model, name), tensor

    def names(self) -> dict[int, str]:
        """Return the name of each parameter, by ``id``."""
        return {id(param): name for name, param in self.named_params()}

    def name_of(self, tensor: Tensor) -> str:
        """Name a parameter."""
        return self.names().get(id(tensor), f"a parameter of shape {tuple(tensor.shape)}")


def widen_states(optimizers: Iterable[Optimizer]) -> None:
    """Make the state of weights FP32 that were low, and are FP32 again; that of mezzo's optimizers has its own."""
    for key, state in (
        item for optimizer in optimizers if as_one_pass(optimizer) is None for item in optimizer.state.items()
    ):
        if isinstance(key, Tensor) and key.dtype not in LOW and isinstance(state, dict):
            state.update(cast_floating(dict(state), torch.float32))  # exact; LBFGS has lists of tensors


def _plain_name(model: nn.Module, name: str) -> str:
    """Return a name as it is without the wrappers of ``torch.compile`` and data parallelism."""
    inner = inside(model)
    name = name.replace(f"{INSIDE}.", "")
    return name.removeprefix("module.") if isinstance(inner, DistributedDataParallel) else name
