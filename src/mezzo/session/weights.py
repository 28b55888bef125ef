"""The models and optimizers of a session: converted as the policy says, named, saved and loaded in FP32, put back."""

from __future__ import annotations
from typing import Any

import contextlib
import copy
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mezzo.cast.model import sharding
from mezzo.hooks import is_ours
from mezzo.cast.model.originals import do_not_fit, preparations_in
from mezzo.cast.model.prepare import Prepared
from mezzo.cast.region import autocast
from mezzo.errors import PolicyError, StateError, UnsupportedError, some_of
Keeper: Any = ()
MasterWeights: Any = ()
masters_of: Any = ()
from mezzo.optim.optimizer import as_one_pass, one_pass
widened_state: Any = ()
from mezzo.policy import Policy
from mezzo.session.refusals import Handles, check_converted
from mezzo.shards import placed
from mezzo.tensors import CASTABLE, LOW, local, overflows, versions

__all__ = ["Weights", "handles_of"]


def handles_of(given: list[nn.Module | Prepared], policy: Any) -> tuple[list[nn.Module], Handles, Policy]:
    """Return the models, the handles of those that were prepared before, and the policy of all.

    Args:
        given: Models, and what :func:`mezzo.prepare` returned of some.
        policy: A policy, or what :meth:`Policy.of` takes; ``None`` for that of prepared models, else ``"O1"``.

    Raises:
        PolicyError: A model was prepared with another policy.
        StateError: One was prepared only in part, as part of a larger one, or is not what it was prepared to be.
    """
    models = [each.model if isinstance(each, Prepared) else each for each in given]
    found = {
        model: [each] if isinstance(each, Prepared) else preparations_in(model)
        for model, each in zip(models, given, strict=True)
    }
    every = [handle for handles in found.values() for handle in handles]
    asked = Policy.of(policy) if policy is not None else every[0].asked if every else Policy.of("O1")
    for handle in every:
        if handle.asked != asked:
            raise PolicyError(
                "the session's policy is not the one that its model was prepared with",
                where="\n".join(handle.asked.differences(asked)),
                why="prepared → session",
                write="MixedPrecision(prepared, optimizer), whose policy is that of prepared",
            )
        handle.require_whole()
    for model, handles in found.items():
        covered = {id(param) for handle in handles for param in handle.model.parameters()}
        if handles and covered != {id(param) for param in model.parameters()}:
            raise StateError(
                "the model was prepared only in part, or as part of a larger one",
                where=type(model).__name__,
                write="MixedPrecision([prepared, …], optimizer) with what mezzo.prepare returned",
            )
    return models, found, asked


class Weights:
    """What a session ties together.

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
        masters: The FP32 masters of torch's optimizers, by ``id``; mezzo's own keep halves by themselves.
        restored: FP32 parameters that a session's state wrote: until the next step a low state dict of the model leaves
            those values of them that round to its own.
        units: The modules that ``fully_shard`` has sharded.
        device: Where flags live.
        are_low: Whether optimizers may update parameters in low precision.
    """

    def __init__(self, models: list[nn.Module], optimizers: list[Optimizer], policy: Policy, handles: Handles) -> None:
        self.models, self.optimizers, self.policy, self._handles = models, optimizers, policy, handles
        self.prepared: list[Prepared] = []
        self.masters: dict[int, MasterWeights] = {}
        self.restored: set[Tensor] = set()
        self.units = [unit for model in models for unit in sharding.units(model)]
        self.device = torch.device("cpu")
        self.are_low = policy.param_dtype in LOW
        self._undo = contextlib.ExitStack()
        self._rounded: dict[MasterWeights, list[int]] = {}  # their versions when they were rounded last
        self._num_updated = sum(1 for _ in self.updated())

    # Conversion and back ---------------------------------------------------------------------------------

    def convert(self) -> None:
        """Carry the policy out; if this raises, everything is as it was."""
        try:
            for model in self.models:
                self.prepared += self._handles.get(model) or [Prepared(model, self.policy)]
            check_converted(self.models, self.optimizers, self.policy)  # before FP32 values are given up
            if self.policy.master_weights and self.units:
                for prepared in self.prepared:
                    prepared.halve(_halved(self))
            self.adopt(self.optimizers)
            self._rounded = {each: _versions(each) for each in self.masters.values()}
            for prepared in self.prepared:
                prepared.join()
            for module in self._modules():
                hook = _LoadHook(self)
                self._undo.callback(module.register_load_state_dict_pre_hook(hook).remove)  # type: ignore[no-untyped-call]
                self._undo.callback(module.register_load_state_dict_post_hook(hook.settle).remove)  # type: ignore[no-untyped-call]
                self._undo.callback(module.register_state_dict_pre_hook(hook.settle).remove)  # type: ignore[no-untyped-call]
        except BaseException:
            self.undo()
            raise

    def adopt(self, optimizers: list[Optimizer]) -> None:
        """Hand the FP32 values before conversion to those who keep them from now on."""
        originals = {t: value for prepared in self.prepared for t, value in prepared.originals().items()}
        for optimizer in optimizers:
            own = as_one_pass(optimizer)
            if own is not None:
                if self.policy.master_weights:
                    own.adopt(originals, self.name_of)
                own.join(masters=self.policy.master_weights or self.policy.param_dtype == torch.float32)
            elif self.policy.master_weights:
                self.masters[id(optimizer)] = MasterWeights(
                    optimizer, grad_dtype="param", originals=originals, hooks=False
                )
        kept = (
            set(self.stored()) if self.policy.master_weights else {p for o in self.optimizers for p in self.leaves(o)}
        )
        for prepared in self.prepared:
            prepared.release_originals(kept)
            prepared.kept.put_aside()
        self._num_updated = sum(1 for _ in self.updated())

    def know(self, optimizers: list[Optimizer]) -> None:
        """Go on with these optimizers alone, of which nothing was converted here, and with the masters that they have.

        Args:
            optimizers: Of a loop that knows models by itself.
        """
        self.optimizers[:] = optimizers
        self.masters = {id(each): held for each in optimizers if (held := masters_of(each)) is not None}
        self.are_low = any(leaf.dtype in LOW for each in optimizers for leaf in self.leaves(each))

    @torch.no_grad()
    def take_added(self) -> bool:
        """Give keepers the values before conversion of parameters whose groups were added since, if there are any.

        Returns:
            Whether there were.
        """
        num_updated = sum([len(group["params"]) for each in self.optimizers for group in each.param_groups])
        if num_updated == self._num_updated:
            return False
        self._num_updated = num_updated
        for own in one_pass(self.optimizers) if self.policy.master_weights else ():
            frozen = {param: value for param in self.updated(own) if (value := self._before(param)) is not None}
            own.take_edits()
            own.adopt({param: value for param, value in frozen.items() if not param.requires_grad}, self.name_of)
        stored = self.stored()
        for param, keeper in stored.items():
            for prepared in self.prepared:
                if (value := prepared.kept.value_of(param)) is not None:
                    now = keeper.master_of(param).detach()
                    keeper.write(param, torch.where(now == param, value, now), refines=True)
        self._release()
        return True

    def _release(self) -> None:
        """Forget values before conversion that keepers have by now, or that a policy without masters gives up."""
        leaves = (leaf for each in self.optimizers for leaf in self.leaves(each))
        kept = set(self.stored()) if self.policy.master_weights else set(leaves)
        for prepared in self.prepared:
            prepared.release_originals(kept)

    def wide(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor that is stored low in the dtype that it had, as exactly as it is kept."""
        if (value := self.value_of(tensor)) is not None:
            return value
        dtypes = (prepared.kept.dtypes.get(tensor) for prepared in self.prepared)
        dtype = next((each for each in dtypes if each is not None), tensor.dtype)
        return None if dtype == tensor.dtype else tensor.detach().to(dtype)

    def _before(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor before conversion, where no keeper has taken it."""
        values = (prepared.kept.value_of(tensor) for prepared in self.prepared)
        return next((value for value in values if value is not None), None)

    def undo(self) -> None:
        """Give back FP32 weights with the values that were kept, and the optimizers as they were built."""
        self._undo.close()
        self.settle()
        exact = {param: keeper.master_of(param).detach() for param, keeper in self.stored().items()}
        given = [handle for handles in self._handles.values() for handle in handles]
        held = [
            (optimizer, key)
            for optimizer in self.optimizers
            if as_one_pass(optimizer) is None
            for key in optimizer.state
            if isinstance(key, Tensor) and key.dtype in LOW
        ]
        for prepared in reversed(self.prepared):  # the first of two models that share a tensor knows what it was
            prepared.kept.keep(exact)
            prepared.leave()
            if prepared not in given:
                prepared.remove()
        for optimizer, key in held:
            if key.dtype not in LOW:
                optimizer.state[key] = widened_state(optimizer.state[key])
        for keeper in self.keepers():
            keeper.leave()
        self.masters.clear()

    def _modules(self) -> list[nn.Module]:
        return list({module: None for model in self.models for module in model.modules()})

    # The models ------------------------------------------------------------------------------------------

    def region(self) -> autocast:
        """Return the region to run the models and their losses in."""
        return self.prepared[0].autocast(*self.prepared[1:])

    def forget_casts(self) -> None:
        """Let go of the casts of weights that forward passes have made."""
        for prepared in self.prepared:
            prepared.casts.clear()
            prepared.entrance.forget()

    # The weights -----------------------------------------------------------------------------------------

    def leaves(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the models' parameters that an optimizer updates, be it through masters."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not (masters := self.masters_of(optimizer)):
            return params
        of = {id(master): param for param, master in masters.items()}
        return [of.get(id(param), param) for param in params]

    def masters_of(self, optimizer: Optimizer) -> dict[Tensor, nn.Parameter]:
        """Return the FP32 masters that an optimizer of torch's updates in the place of parameters, by parameter."""
        masters = self.masters.get(id(optimizer))
        return {} if masters is None else masters.masters()

    def updated(self, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
        """Yield what one optimizer, or each, updates: FP32 masters, or the parameters themselves."""
        chosen = self.optimizers if optimizer is None else [optimizer]
        return (param for each in chosen for group in each.param_groups for param in group["params"])

    def keepers(self) -> list[Keeper]:
        """Return what keeps the FP32 values of low-precision parameters."""
        return [*one_pass(self.optimizers), *self.masters.values()]

    def stored(self) -> dict[Tensor, Keeper]:
        """Return the parameters whose FP32 values are kept, each with its keeper."""
        return {param: keeper for keeper in self.keepers() for param in keeper.stored(in_fp32=True)}

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return the FP32 value of a parameter or buffer, where more is kept of it than it holds."""
        self.take_added()
        keeper = self.stored().get(tensor)
        return self._before(tensor) if keeper is None else keeper.master_of(tensor).detach()

    @torch.no_grad()
    def write(self, param: Tensor, value: Tensor) -> None:
        """Give a parameter an FP32 value, and its keeper."""
        if (keeper := self.stored().get(param)) is not None:
            keeper.write(param, value.to(param.device))
        else:
            param.copy_(placed(value.to(param.device), param))
            self.restored.add(param)

    def settle(self) -> None:
        """Bring what programs edit of masters, as SAM does, over to the parameters, and the other way round.

        **Cost**: a list of numbers for each master; nothing where there is none.
        """
        self.take_added()
        for masters in self.masters.values():
            masters.take_edits()
            if _versions(masters) != self._rounded.get(masters):
                self.round(masters)

    def round(self, masters: MasterWeights) -> None:
        """Write the masters of an optimizer, rounded, into the parameters."""
        masters.round_to_params()
        self._rounded[masters] = _versions(masters)

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
        """Return the names of :meth:`named_state` that are one model's by the keys of that model's own state dict."""
        keys = {each: ((key, key) for key in each.state_dict()) if each is model else () for each in self.models}
        return {key: name for name, key in self._named(keys)}

    def _named(self, each: Mapping[nn.Module, Iterable[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
        for number, model in enumerate(self.models):
            prefix = f"{number}." if len(self.models) > 1 else ""
            parts = sharding.parts_of(sharding.units(model))  # a forward pass leaves the root gathered
            for name, value in each[model]:
                here = parts.get(value, value) if isinstance(value, Tensor) else value
                yield prefix + _plain_name(model, name), here

    def names(self) -> dict[int, str]:
        """Return the name of each parameter, and of the master that stands for it, by ``id``."""
        found = {id(param): name for name, param in self.named_params()}
        held = ((id(master), found[id(p)]) for each in self.masters.values() for p, master in each.masters().items())
        return found | dict(held)

    def name_of(self, tensor: Tensor) -> str:
        """Name a parameter, or that of which a tensor is the master."""
        return self.names().get(id(tensor), f"a parameter of shape {tuple(tensor.shape)}")

    # For loops that save, copy and average models by themselves -------------------------------------------

    def show_fp32(self) -> None:
        """Have ``state_dict()`` of the models, their deep copies and pickles hold FP32 values, until the end."""
        for module in self._modules():
            hook = _SaveHook(self)
            self._undo.callback(module.register_state_dict_post_hook(hook).remove)  # type: ignore[no-untyped-call]
            names = {
                "__deepcopy__": types.MethodType(_copied, module),
                "__reduce_ex__": types.MethodType(_pickled, module),
                "_mezzo_weights": weakref.ref(self),
            }
            vars(module).update(names)
            for name in names:
                self._undo.callback(vars(module).pop, name, None)

    def in_fp32(self, model: nn.Module) -> Any:
        """Return what has a model's parameters and buffers in FP32, for averages that read them."""
        return _InFP32(self, model)


def _versions(masters: MasterWeights) -> list[int]:
    return versions(list(masters.masters().values()))


def _plain_name(model: nn.Module, name: str) -> str:
    """Return a name as it is without the wrappers of ``torch.compile`` and data parallelism."""
    inner = getattr(model, "_orig_mod", model)
    name = name.replace("_orig_mod.", "")
    return name.removeprefix("module.") if isinstance(inner, DistributedDataParallel) else name


def _halved(weights: Weights) -> set[Tensor]:
    """Return the parts of sharded parameters that are stored as they are gathered: mezzo.optim keeps the other half.

    Raises:
        UnsupportedError: Parameters that are gathered together would be kept in two ways.
    """
    halving, whole = set[Tensor](), set[Tensor]()
    for optimizer in weights.optimizers:
        for group in optimizer.param_groups:
            splits = as_one_pass(optimizer) is not None and group["master"] != "full"
            (halving if splits else whole).update(group["params"])
    units: dict[Any, list[Any]] = {}
    for part in (part for model in weights.models for part in sharding.shards(model)):
        units.setdefault(part.unit, []).append(part.param)
    found = set[Tensor]()
    for params in units.values():
        low, wide = [param for param in params if param in halving], [param for param in params if param in whole]
        if low and any(param.requires_grad for param in wide):
            raise UnsupportedError(
                "parameters that are gathered together are kept in two ways",
                where=some_of([weights.name_of(low[0]), weights.name_of(wide[0])]),
                why="mezzo.optim splits them, and another optimizer needs FP32",
                write="one kind of optimizer for each module that is sharded by itself",
            )
        if low or not wide:
            found.update(param for param in params if param not in whole)
    return found


# Hooks, copies and pickles --------------------------------------------------------------------------------


class _Hook:
    """Watches modules while they load and save. It keeps no session alive; in a copied module it does nothing."""

    def __init__(self, weights: Weights | None = None) -> None:
        self._weights = (lambda: None) if weights is None else weakref.ref(weights)

    def __reduce__(self) -> Any:
        return type(self), ()


class _LoadHook(_Hook):
    """Gives FP32 weights that a model loads to their keepers whole; low ones leave each FP32 value that rounds to them.

    So the states of model and session load in either order.
    """

    def settle(self, module: nn.Module, *_: Any) -> None:
        """Have masters and the parameters agree that are about to be saved, or that were just loaded."""
        weights = self._weights()
        for masters in () if weights is None else weights.masters.values():
            masters.take_edits([param for param in module._parameters.values() if param is not None])

    @torch.no_grad()
    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        """Take what is about to be loaded."""
        if (weights := self._weights()) is None:
            return
        if metadata.get("assign_to_params_buffers") and weights.policy.master_weights:
            raise StateError(
                "load_state_dict(…, assign=True) puts other parameters in the place of a session's",
                where=type(module).__name__,
                why="the optimizer has those that are there, and would train the new ones no more",
                write="load_state_dict(…) without assign; or with it before the session",
            )
        stored = weights.stored()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            incoming = state.get(prefix + name)
            if tensor is None or not isinstance(incoming, Tensor) or incoming.shape != tensor.shape:
                continue
            keeper = stored.get(tensor)
            if keeper is None and tensor not in weights.restored:
                for prepared in weights.prepared:
                    prepared.kept.take(tensor, incoming, prefix + name)
            elif incoming.is_floating_point():
                state[prefix + name] = _taken(tensor, placed(incoming.to(tensor.device), tensor), keeper, prefix + name)


def _taken(tensor: Tensor, incoming: Tensor, keeper: Keeper | None, name: str) -> Tensor:
    """Write a weight that is loaded into a parameter and its keeper, and return what the parameter holds then."""
    if keeper is None or incoming.dtype != tensor.dtype:
        exact = tensor if keeper is None else keeper.master_of(tensor)
        if incoming.element_size() < exact.element_size():
            incoming = torch.where(exact.to(incoming.dtype) == incoming, exact, incoming.to(exact.dtype))
        if overflows(local(incoming), tensor.dtype):
            raise do_not_fit([name], tensor.dtype)
    if keeper is None:
        tensor.copy_(incoming)
    else:
        keeper.take_edits([tensor])
        keeper.write(tensor, incoming)
    return tensor.detach().clone()


class _SaveHook(_Hook):
    """Has ``state_dict()`` hold FP32 values, with ``keep_vars=True`` the tensors themselves."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Put FP32 values in the places of low ones."""
        if (weights := self._weights()) is None:
            return
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            saved = state.get(prefix + name)
            if tensor is not None and isinstance(saved, Tensor) and saved is not tensor and saved.dtype in CASTABLE:
                exact = weights.value_of(tensor)
                state[prefix + name] = (saved if exact is None else exact).float()


#: What a session binds on modules; a driver of the user's own calls adds methods of theirs.
_BOUND: Final = ("__deepcopy__", "__reduce_ex__", "_mezzo_weights")
_HOOKS: Final = (
    "_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a plain FP32 module: the copy of one whose weights may be stored low."""
    weights: Weights | None = vars(module)["_mezzo_weights"]()
    taken: dict[nn.Module, dict[str, Any]] = {}
    for each in module.modules():
        names = vars(each)
        bound = [name for name, value in names.items() if name in _BOUND or getattr(value, "is_of_mezzo", False)]
        taken[each] = {name: names.pop(name) for name in bound}
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            value = None if tensor is None or weights is None or id(tensor) in memo else weights.wide(tensor)
            if tensor is not None and value is not None:
                wide = value.detach().clone()
                is_param = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(wide, tensor.requires_grad) if is_param else wide
    try:
        made = copy.deepcopy(module, memo)
    finally:
        for each, names in taken.items():
            vars(each).update(names)
    for each in made.modules():
        for name in _HOOKS:
            hooks = getattr(each, name)
            for key in [key for key, hook in hooks.items() if is_ours(hook)]:
                del hooks[key]
    return made


def _pickled(module: nn.Module, protocol: Any) -> Any:
    return copy.deepcopy(module).__reduce_ex__(protocol)


class _InFP32:
    """A model whose parameters and buffers are read in FP32."""

    def __init__(self, weights: Weights, model: nn.Module) -> None:
        weights.settle()
        self._model, self._wide = model, weights.wide

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters' FP32 values."""
        return map(self._read, self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers' FP32 values."""
        return map(self._read, self._model.buffers())

    def _read(self, tensor: Tensor) -> Tensor:
        value = self._wide(tensor) if tensor.dtype in LOW else None
        return tensor if value is None else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
