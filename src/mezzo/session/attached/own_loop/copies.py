"""Copies and pickles of attached models, which are plain FP32 models that know nothing of mezzo."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.cast.model.hooks import is_ours
from mezzo.session.attached.own_loop.checkpoints import CARRIED
from mezzo.tensors import LOW

__all__ = ["Copies", "Exact"]

#: Returns what gives the FP32 value of a tensor that is stored in another dtype.
Exact: TypeAlias = Callable[[], Callable[[Tensor], Tensor | None]]

#: Where modules keep hooks of all kinds.
_HOOKS: Final = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
#: And what else they keep of some of these, by the same keys.
_BESIDE: Final = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
#: What may stand in front of a module's attribute that was none of its own.
_ABSENT: Final = object()


class Copies:
    """Have ``copy.deepcopy`` and ``pickle`` of models, and of each of their parts, make plain FP32 models.

    Bound on each module, since a part may be copied alone, and since hooks of ours are on parts. A pickle then names
    nothing of mezzo, parameters that were tied are tied in it, and what an optimizer in the same pickle has of the
    model's is what the model has. ``copy.copy`` shares what the model has, as ever.

    Args:
        models: The models.
        exact: Returns what gives the FP32 value of a parameter or buffer that is stored in another dtype.
    """

    def __init__(self, models: Iterable[nn.Module], exact: Exact) -> None:
        self._exact = exact
        self._wide: Any = WeakIdKeyDictionary()  # the tensor that stands for one of the model's in a pickle, weakly
        self._bound: dict[nn.Module, dict[str, tuple[Any, Any]]] = {}  # what is bound, and what was there before
        self._optimizers: list[Optimizer] = []
        for module in {each: None for model in models for each in model.modules()}:
            self.bind(module, "__deepcopy__", partial(self._copy, module))
            self.bind(module, "__reduce_ex__", partial(self._reduce, module))

    def bind(self, module: nn.Module, name: str, value: Any) -> None:
        """Bind a name on a module, which copies and pickles have as it was.

        Args:
            module: One of the models, or of their parts.
            name: The name.
            value: What it is.
        """
        names = vars(module)
        self._bound.setdefault(module, {})[name] = value, names.get(name, _ABSENT)
        names[name] = value

    def share(self, optimizers: Iterable[Optimizer]) -> None:
        """Have copies and pickles of optimizers over low-precision parameters be plain ones over FP32 parameters.

        Those are the parameters of the model that is copied, or pickled, with the optimizer. One over FP32 masters
        needs none of that; one with a way of its own to be pickled is left to it.

        Args:
            optimizers: The optimizers.
        """
        for each in optimizers:
            is_low = any(param.dtype in LOW for group in each.param_groups for param in group["params"])
            if is_low and type(each).__getstate__ is Optimizer.__getstate__:
                vars(each)["__deepcopy__"] = partial(self._copy_optimizer, each)
                vars(each)["__reduce_ex__"] = partial(self._reduce_optimizer, each)
                self._optimizers.append(each)

    def leave(self) -> None:
        """Put back what was there before; what others have bound since stays."""
        for optimizer in self._optimizers:
            for name in ("__deepcopy__", "__reduce_ex__"):
                vars(optimizer).pop(name, None)
        self._optimizers = []
        for module in self._bound:
            self._unbind(module)
        self._bound = {}

    def _unbind(self, module: nn.Module) -> dict[str, Any]:
        """Put back what was there before on one module, and return what was bound."""
        names: dict[str, Any] = vars(module)
        bound = {name: pair for name, pair in self._bound.get(module, {}).items() if names.get(name) is pair[0]}
        for name, (_, before) in bound.items():
            del names[name]
            if before is not _ABSENT:
                names[name] = before
        return {name: ours for name, (ours, _) in bound.items()}

    # Copies -------------------------------------------------------------------------------------------------

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """Return a plain copy: what ``copy.deepcopy`` asks a module for."""
        ours = self._unbind(module)
        try:
            if id(ours.get("__deepcopy__")) not in memo:
                self._remember(module, memo)
            return copy.deepcopy(module, memo)
        finally:
            vars(module).update(ours)

    def _remember(self, model: nn.Module, memo: dict[int, Any]) -> None:
        """Write into the memo of a copy what stands there for hooks of ours, and for values in low precision."""
        exact = self._exact()
        for module in model.modules():
            if (copier := vars(module).get("__deepcopy__")) is not None:
                memo[id(copier)] = copier  # what is inside is known then
            for hooks, kept in _without_ours(module):
                memo[id(hooks)] = copy.deepcopy(kept, memo)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None or id(tensor) in memo or (value := exact(tensor)) is None:
                    continue
                is_master = isinstance(value, nn.Parameter)  # which an optimizer may have that is copied with it
                made = copy.deepcopy(value, memo) if is_master else _like(tensor, value.detach().clone())
                memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)

    def _copy_optimizer(self, optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
        exact = self._exact()

        def wide(param: Tensor) -> Tensor:
            if id(param) not in memo and (value := exact(param)) is not None:
                memo[id(param)] = _like(param, value.detach().clone())
            return copy.deepcopy(param, memo)

        return _plain(optimizer, wide, copy.deepcopy)

    def _reduce_optimizer(self, optimizer: Optimizer, protocol: Any) -> Any:
        exact = self._exact()
        return _plain(optimizer, lambda param: self._in_fp32(param, exact)).__reduce_ex__(protocol)

    # Pickles ------------------------------------------------------------------------------------------------

    def _reduce(self, module: nn.Module, protocol: Any) -> Any:
        """Return what ``pickle`` asks a module for, and ``copy.copy`` as well."""
        before = self._bound.get(module, {}).get("__reduce_ex__", (None, _ABSENT))[1]
        made = type(module).__reduce_ex__(module, protocol) if before is _ABSENT else before(protocol)
        if isinstance(made, str):
            return made
        swapped = self._swapped(module)
        function, args, *rest = made
        if rest and type(rest[0]) is dict:
            rest[0] = _SharedState(rest[0], swapped)
        return (function, swapped(args), *(rest[:1] or [None]), *map(swapped, rest[1:]))

    def _swapped(self, module: nn.Module) -> Callable[[Any], Any]:
        """Return what gives a value of a module's state as a plain module would have it."""
        known = {id(ours): before for ours, before in self._bound.get(module, {}).values()}
        known.update((id(hooks), kept) for hooks, kept in _without_ours(module))
        exact, buffers = self._exact(), set(map(id, module._buffers.values()))

        def swapped(value: Any, around: tuple[int, ...] = ()) -> Any:
            if id(value) in known:
                return known[id(value)]
            if isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and id(value) in buffers):
                return self._in_fp32(value, exact)
            if type(value) not in (dict, OrderedDict, list, tuple) or id(value) in around:
                return value
            around = (*around, id(value))
            if isinstance(value, dict):
                items = [(key, each, swapped(each, around)) for key, each in value.items()]
                if all(old is new for _, old, new in items):
                    return value
                return type(value)((key, new) for key, _, new in items if new is not _ABSENT)
            found = [swapped(each, around) for each in value]
            return value if all(old is new for old, new in zip(value, found, strict=True)) else type(value)(found)

        return swapped

    def _in_fp32(self, tensor: Tensor, exact: Callable[[Tensor], Tensor | None]) -> Tensor:
        """Return what stands for a tensor: the same as before for one that is reached in several ways."""
        if (value := exact(tensor)) is None:
            return tensor
        if isinstance(value, nn.Parameter) and value.requires_grad == tensor.requires_grad:
            wide: Tensor = value  # a master, which the optimizer has
        else:
            held = self._wide.get(tensor, lambda: None)()
            wide = _like(tensor, value.detach()) if held is None or not torch.equal(held, value) else held
            self._wide[tensor] = weakref.ref(wide)
        vars(wide).update(vars(tensor))
        return wide


class _SharedState(dict[str, Any]):
    """A module's state as it is, for a copy that shares it; copies and pickles of it are those of a plain module's.

    Args:
        state: The state.
        swapped: Gives it as a plain module would have it.
    """

    def __init__(self, state: dict[str, Any], swapped: Callable[[Any], Any]) -> None:
        super().__init__(state)
        self._swapped = swapped

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self._swapped(dict(self)),)


def _without_ours(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each dict of a module's in which hooks of ours are, with one that has all but these."""
    names = vars(module)
    ours = {key for name in _HOOKS for key, hook in (names.get(name) or {}).items() if is_ours(hook)}
    for name in (*_HOOKS, *_BESIDE) if ours else ():
        if hooks := names.get(name):
            yield hooks, OrderedDict((key, hook) for key, hook in hooks.items() if key not in ours)


def _plain(
    optimizer: Optimizer, wide: Callable[[Tensor], Tensor], own: Callable[[Any], Any] = lambda state: state
) -> Optimizer:
    """Return an optimizer as a pickle is read, over other parameters, with the state that a state dict has."""
    groups = [{**group, "params": list(map(wide, group["params"]))} for group in optimizer.param_groups]
    plain: Any = type(optimizer).__new__(type(optimizer))
    plain.__setstate__({"defaults": {**optimizer.defaults}, "state": defaultdict(dict), "param_groups": groups})
    plain.load_state_dict(own({key: each for key, each in optimizer.state_dict().items() if key != CARRIED}))
    made: Optimizer = plain
    return made


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
