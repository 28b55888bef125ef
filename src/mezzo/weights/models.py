"""What a converted model shows: FP32 values in its state dicts, both ways, and in its copies and pickles."""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn

from mezzo.errors import MezzoError, NumericsError, StateError, raise_together, some_of
from mezzo.hooks import is_ours
from mezzo.policy.rules import both
from mezzo.sharded import local
from mezzo.step.storage import is_beyond
from mezzo.tensors import dtype_name
from mezzo.weights.halves import Halves

_HOOKS: Final = (
    "_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


def show_fp32(model: nn.Module, halves: Halves) -> Callable[[], None]:
    """Have a model's state dicts hold FP32 values, both ways, and its copies and pickles be plain FP32 models.

    ``load_state_dict`` keeps FP32 values whole, low ones too, and with ``assign=True`` the parameters stay the
    optimizer's. ``model.float()`` and ``.to(dtype)`` are refused.

    Args:
        model: The model.
        halves: Owns its FP32 values.

    Returns:
        What ends it.
    """
    undo, hook = ExitStack(), _StateHook(halves, model)
    for module in model.modules():
        if halves in halves_in(module):  # as part of another model that has the same halves
            continue
        undo.callback(module.register_state_dict_post_hook(hook).remove)  # type: ignore[no-untyped-call]
        undo.callback(module.register_load_state_dict_pre_hook(hook.load).remove)  # type: ignore[no-untyped-call]
        owners = vars(module).setdefault("_mezzo_halves", [])
        owners.append(halves)
        vars(module).update({name: types.MethodType(method, module) for name, method in _METHODS.items()})
        undo.callback(_end_showing, module, owners, halves)
    return undo.close


def _end_showing(module: nn.Module, owners: list[Halves], mine: Halves) -> None:
    if mine in owners:
        owners.remove(mine)
    for name in () if owners else ("_mezzo_halves", *_METHODS):  # another model may have the module, too
        vars(module).pop(name, None)


def halves_in(module: nn.Module) -> list[Halves]:
    """Return what owns FP32 values of a module's parameters: of several models that share it several."""
    found: list[Halves] = vars(module).get("_mezzo_halves", [])
    return found


def named_in(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and buffers by the keys that they have in a state dict."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield prefix + name, tensor


# State dicts ----------------------------------------------------------------------------------------------


class _StateHook:
    """The hooks of a model's modules on saving and loading; in a copy they do nothing."""

    def __init__(self, halves: Halves | None = None, root: nn.Module | None = None) -> None:
        self._halves, self._root = halves, root
        self._shown: tuple[Callable[[], Any], dict[Tensor, Tensor]] = lambda: None, {}

    def __reduce__(self) -> Any:
        return _StateHook, ()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Put FP32 values in the places of low ones, one tensor for tied ones; ``keep_vars=True`` shows tensors."""
        if (halves := self._halves) is None:
            return
        if self._shown[0]() is not state:
            self._shown = (weakref.ref(state) if isinstance(state, OrderedDict) else lambda: None), {}
        shown = self._shown[1]
        for key, tensor in named_in(module, prefix):
            if tensor in halves and state.get(key, tensor) is not tensor:
                if tensor not in shown:
                    shown[tensor] = halves.read(tensor)
                state[key] = shown[tensor]

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        """Write what is about to be loaded, and give torch the tensors themselves to load.

        Raises:
            StateError: Values of another shape.
            NumericsError: Values beyond the range of the low dtype. Nothing was loaded.
        """
        if (halves := self._halves) is None:
            return
        if not prefix or module is self._root:
            raise_together(_unfit(module, halves, state, prefix))
        assigns = bool(metadata.get("assign_to_params_buffers"))
        for key, tensor in named_in(module, prefix):
            if tensor in halves and isinstance(value := state.get(key), Tensor) and value is not tensor:
                halves.write(tensor, value, copies=not assigns)
                state[key] = tensor if assigns else tensor.detach()


def _unfit(module: nn.Module, halves: Halves, state: Mapping[str, Any], prefix: str) -> Iterator[MezzoError]:
    """Yield what stands against loading a state dict into a model, with all its parts."""
    shapes, large = list[str](), list[str]()
    for path, each in module.named_modules():
        for key, tensor in named_in(each, f"{prefix}{path}." if path else prefix):
            value = state.get(key)
            if tensor not in halves or not isinstance(value, Tensor):
                continue
            if value.shape != tensor.shape:
                shapes.append(f"{key}: {list(value.shape)} → {list(tensor.shape)}")
            elif value.is_floating_point() and is_beyond(local(value), tensor.dtype):
                large.append(f"{key} → {dtype_name(tensor.dtype)}")
    if shapes:
        yield StateError("the state dict is that of another model", where=some_of(shapes), write="the same model")
    if large:
        kept = both(f"fp32_param={large[0].partition(' ')[0]}")
        yield NumericsError(
            "the state dict has weights beyond the range of the model's dtype",
            where=some_of(large),
            write=f"{both('dtype=bfloat16')}, whose range is FP32's; or {kept}",
        )


class InFP32:
    """A model whose parameters and buffers are read in FP32, for averages that read them one by one.

    Args:
        model: The model, or one around it.
        halves: Own its FP32 values.
    """

    def __init__(self, model: nn.Module, halves: Sequence[Halves]) -> None:
        self._model, self._halves = model, halves

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters' FP32 values."""
        return map(self._read, self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers' FP32 values."""
        return map(self._read, self._model.buffers())

    def _read(self, tensor: Tensor) -> Tensor:
        return next((halves.read(tensor) for halves in self._halves if tensor in halves), tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


# Copies, pickles and casts --------------------------------------------------------------------------------


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a plain FP32 module: the copy of one whose weights may be stored low."""
    taken: dict[nn.Module, dict[str, Any]] = {}
    for each in module.modules():
        names = vars(each)
        owners = halves_in(each)
        bound = [name for name, value in names.items() if name in _BOUND or getattr(value, "is_of_mezzo", False)]
        taken[each] = {name: names.pop(name) for name in bound}
        for _, tensor in named_in(each):
            owner = next((halves for halves in owners if tensor in halves), None)
            if owner is not None and id(tensor) not in memo:
                wide = owner.read(tensor)
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


def _applied(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Move a module, as ``nn.Module._apply`` does, and refuse to cast it.

    Raises:
        StateError: It would cast low weights, whose other halves would stand beside other numbers.
    """
    owners = halves_in(module)
    for dtype in {t.dtype for _, t in named_in(module) if any(t in halves for halves in owners)}:
        if (to := change(torch.empty(0, dtype=dtype)).dtype) != dtype:
            raise StateError(
                "a converted model is cast",
                where=f"{type(module).__name__}: {dtype_name(dtype)} → {dtype_name(to)}",
                why="its weights are stored in two halves, and FP32 values follow from both",
                write="amp.close() (or prepared.remove()), which gives FP32 weights; copy.deepcopy(model) is a plain "
                "FP32 model; .to(device) alone may be called",
            )
    before = dict(module._buffers)
    moved: nn.Module = type(module)._apply(module, change, recurse)  # type: ignore[no-untyped-call]
    for name, buffer in before.items():  # which stay the objects that they are, as parameters do
        now = module._buffers[name]
        if buffer is not None and now is not None and now is not buffer and any(buffer in each for each in owners):
            buffer.data = now
            module._buffers[name] = buffer
    for _, tensor in named_in(module):
        for halves in owners:
            if halves.has_rest(tensor):
                halves.rest_of(tensor)  # which moves with it
    return moved


#: What a converted module has of its own, in the places of its class's.
_METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    "__deepcopy__": _copied, "__reduce_ex__": _pickled, "_apply": _applied,
}  # fmt: skip
#: What no copy has of it.
_BOUND: Final = ("_mezzo_halves", "_mezzo_prepared", *_METHODS)
