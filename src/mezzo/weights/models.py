"""Models whose weights are stored in halves: storing and restoring them, and plain state dicts, copies and pickles."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mezzo.errors import MezzoError, NumericsError, StateError, UnsupportedError, message, raise_together, some_of
from mezzo.hooks import is_ours
from mezzo.patches import patch
from mezzo.policy.rules import both, exact
from mezzo.sharded import flags_of_all, held_as, hold_locally, is_distributed, local
from mezzo.step.storage import encode_into, is_beyond
from mezzo.tensors import LOW, dtype_name, tensors
from mezzo.weights.codec import get_ready
from mezzo.weights.halves import Halves, become, in_halves
from mezzo.weights.shards import HeldShard
from mezzo.weights.stepping import watch_steps

_HOOKS: Final = (
    "_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
#: What modules know of hooks by their keys.
_OF_HOOKS: Final = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def of_halves(param: Tensor) -> bool:
    """Whether a parameter, or this rank's shard of it, is stored in halves, even if it is decoded for now."""
    return isinstance(local(param), Halves)


class Form(NamedTuple):
    """How a tensor is stored.

    Attributes:
        dtype: The dtype of its high half, or its own.
        in_halves: Whether it is stored in halves.
    """

    dtype: torch.dtype
    in_halves: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return how a tensor, or this rank's shard of it, is stored now."""
        own_values = local(tensor)
        return cls(own_values.hi.dtype, True) if isinstance(own_values, Halves) else cls(tensor.dtype, False)

    @property
    def is_wide(self) -> bool:
        """Whether it is FP32 to its readers."""
        return self.in_halves or self.dtype == torch.float32

    @property
    def is_exact(self) -> bool:
        """Whether it holds each bit of FP32 values."""
        return self.dtype == torch.float32 or (self.in_halves and self.dtype == torch.bfloat16)


@torch.no_grad()
def store(dtypes: Mapping[nn.Parameter, torch.dtype], names: Mapping[nn.Parameter, str]) -> None:
    """Store parameters in halves; each stays the object that it is.

    Args:
        dtypes: Parameters in FP32 or 16 bits, each with the dtype of its high half.
        names: What errors call them.

    **Cost**: a pass over each. 4 bytes a weight; FP32 memory is freed one by one. Finite values beyond the range of a
    dtype become infinite: the caller has checked the range.
    """
    if dtypes:
        watch_steps()
    for param, dtype in dtypes.items():
        own_values = local(param.detach())
        if isinstance(own_values, Halves):  # of two models that share it
            continue
        weight = _encoded(own_values, dtype, HeldShard if is_distributed(param) else Halves)
        weight.path = names[param]
        try:
            _replace(param, weight)
        except UnsupportedError:
            gc.collect()  # cycles of dead objects may still refer to it
            _replace(param, weight)


def _encoded(values: Tensor, dtype: torch.dtype, cls: type[Halves] = Halves) -> Halves:
    fp32 = values.to(torch.float32)
    high, remainder = torch.empty_like(fp32, dtype=dtype), torch.empty_like(fp32, dtype=torch.int16)
    encode_into(fp32, high, remainder)
    get_ready(high)
    weight: Halves = cls(high, remainder)
    return weight


@torch.no_grad()
def recode(param: Any, dtype: torch.dtype) -> None:
    """Store a parameter in halves of another dtype: other halves of the same tensor, whatever refers to it.

    Args:
        param: A parameter in halves.
        dtype: That of the high half. FP16's rounds what is below 2⁻¹⁶ to a multiple of 2⁻⁴⁰ or so, and values beyond
            its range become infinite: the caller has checked the range.
    """
    weight: Any = local(param.detach())
    weight.store_lent()
    values = weight.decoded
    other = _encoded(weight.value(), dtype, type(weight))
    other.path = weight.path
    if values is not None:  # which hold the values still, over halves that are stale
        other.cell.decoded = values
    if is_distributed(param) or other.hi.stride() != param.stride():
        _replace(param, other)
        return
    param.hi, param.lo, param.cell, param.is_part = other.hi, other.lo, other.cell, False
    increment_version(param)


@torch.no_grad()
def try_plainly(params: Iterable[Tensor]) -> list[Tensor]:
    """Store parameters plainly again, in FP32; each stays the object that it is.

    Returns:
        Those to which C++ code refers: they stay in halves.
    """
    waiting = [param for param in params if of_halves(param)]
    for is_last_try in (False, True):
        refused = list[Tensor]()
        for param in waiting:
            weight = cast(Halves, local(param.detach()))
            try:
                _replace(param, weight.value())
            except UnsupportedError:
                refused.append(param)
        if (waiting := refused) and not is_last_try:
            gc.collect()  # cycles of dead objects may still refer to it
    return waiting


def store_plainly(params: Iterable[Tensor]) -> None:
    """Store parameters plainly again, in FP32; each stays the object that it is.

    A parameter that C++ code refers to stays in halves, still FP32 to every reader, and a warning names it.
    """
    if not (waiting := try_plainly(params)):
        return
    text = message(
        "parameters stay in halves, which are FP32 to everybody still",
        where=some_of([getattr(local(param), "path", "") for param in waiting]),
        why="something in C++ refers to them, as what torch.profiler has recorded with record_shapes does",
        write="copy.deepcopy(model) is a plain model; or del what was recorded, before they are given back",
    )
    warnings.warn(text, stacklevel=3)


def _replace(param: Tensor, value: Tensor) -> None:
    """Replace a parameter's values by another tensor; it stays the same object."""
    if is_distributed(param):
        gradient, param.grad = param.grad, None
        hold_locally(param, value)
        param.grad = gradient
        return
    become(param, nn.Parameter(value, param.requires_grad))
    if isinstance(param, Halves):
        param.is_part = False


def hide_storage(model: nn.Module, *, is_low: bool = False) -> Callable[[], None]:
    """Hide how a model stores its weights: state dicts hold plain FP32 values, copies and pickles are plain models.

    ``load_state_dict(assign=True)`` writes into the present parameters, which an optimizer refers to. ``model.half()``
    and other casts of halves are refused. Until the next cast or step a state dict's tensors are the weights' memory,
    so that a program's writes to them reach the weights, as for plain ones; from then on they are copies.

    Args:
        model: The model.
        is_low: Whether its weights are stored in 16 bits. The programs that torch makes of it are in FP32.

    Returns:
        A function that undoes it.
    """
    undo, hook = ExitStack(), _StateHook(model)
    _PROGRAMS.open()
    undo.callback(weakref.finalize(model, _PROGRAMS.close))  # once, also where a model is dropped
    for module in model.modules():
        undo.callback(module.register_state_dict_post_hook(hook).remove)  # type: ignore[no-untyped-call]
        undo.callback(module.register_load_state_dict_pre_hook(hook.load).remove)  # type: ignore[no-untyped-call]
        methods = {name: types.MethodType(method, module) for name, method in _METHODS.items()}
        if isinstance(module, nn.RNNBase):  # whose weights lie in no common memory, and are asked for their addresses
            methods["flatten_parameters"] = types.MethodType(_flattened, module)
        count = vars(module).setdefault("_mezzo_hidden", [0])
        count[0] += 1
        vars(module).update({"_mezzo_low": True} if is_low else {})
        vars(module).update(methods)
        undo.callback(_unhide, module, count)
    return undo.close


def hides_storage(module: nn.Module) -> bool:
    """Whether a module is part of a model under :func:`hide_storage`."""
    return "_mezzo_hidden" in module.__dict__


def _unhide(module: nn.Module, count: list[int]) -> None:
    count[0] -= 1
    for name in () if count[0] else _BOUND:  # another model that hides its storage may have the module, too
        if name not in ("_mezzo_prepared", "_mezzo_fp32"):
            vars(module).pop(name, None)


def named_in(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters by the keys that they have in a state dict."""
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield prefix + name, tensor


@dataclass(frozen=True, slots=True)
class Bytes:
    """How many bytes the parameters of a model take, by how they are stored; buffers are not counted.

    Attributes:
        high: High halves.
        low: Low halves.
        plain: Parameters that are stored plainly.
        count: How many parameters, in elements, are stored in halves.
        total_count: How many elements all parameters have.
    """

    high: int
    low: int
    plain: int
    count: int
    total_count: int

    def __str__(self) -> str:
        share = f"{self.count:,} of {self.total_count:,} elements in halves"
        return f"{share}: {self.high:,} + {self.low:,} bytes, and {self.plain:,} bytes plain"


def halves(model: nn.Module) -> Bytes:
    """Return how many bytes a model's parameters take: high halves, low halves and plain ones.

    Args:
        model: Any; of a sharded one, this rank's shards count.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Linear(8, 4)
        >>> handle = mezzo.prepare(model, "O2,dtype=bfloat16")
        >>> print(halves(model))
        32 of 36 elements in halves: 64 + 64 bytes, and 16 bytes plain
    """
    high_bytes = remainder_bytes = plain_bytes = count = total = 0
    for param in model.parameters():
        own_tensor = local(param)
        total += own_tensor.numel()
        if isinstance(own_tensor, Halves) and (own_tensor.cell.decoded is None or own_tensor.cell.is_lent):
            high_bytes, remainder_bytes, count = (
                high_bytes + 2 * own_tensor.numel(),
                remainder_bytes + 2 * own_tensor.numel(),
                count + own_tensor.numel(),
            )
        else:
            plain_bytes += own_tensor.numel() * own_tensor.element_size()
    return Bytes(high_bytes, remainder_bytes, plain_bytes, count, total)


# State dicts ----------------------------------------------------------------------------------------------


class _StateHook:
    """The hooks of a model's modules on saving and loading; in a copy they do nothing."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self._root = None if root is None else weakref.ref(root)

    def __reduce__(self) -> Any:
        return _StateHook, ()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace the halves in a state dict by plain values; with ``keep_vars=True`` they stay parameters."""
        if self._root is None:
            return
        for key, tensor in named_in(module, prefix):
            here = local(tensor)
            if isinstance(here, Halves) and state.get(key, tensor) is not tensor:
                state[key] = held_as(here.lend(), tensor)

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        """Refuse values that FP16 halves cannot hold; write values to be assigned into the present parameters.

        Raises:
            NumericsError: Values beyond the range of the high half's dtype. Nothing was loaded.
        """
        if self._root is None:
            return
        if not prefix or module is self._root():
            raise_together(_unfit(module, state, prefix))
        if not metadata.get("assign_to_params_buffers"):
            return
        for key, tensor in named_in(module, prefix):
            value = state.get(key)
            if isinstance(value, Tensor) and value is not tensor and value.shape == tensor.shape:
                with torch.no_grad():
                    if not tensor.is_meta:
                        tensor.copy_(value)
                    elif isinstance(tensor, Halves):
                        _replace(tensor, _encoded(value, tensor.hi.dtype, type(tensor)))
                    else:
                        become(tensor, value.detach().clone())
                state[key] = tensor


def _unfit(module: nn.Module, state: Mapping[str, Any], prefix: str) -> Iterator[MezzoError]:
    """Yield an error if a state dict has values that a model's halves, or those of its parts, cannot hold."""
    values = dict[str, tuple[Tensor, Tensor]]()
    for path, part in module.named_modules():
        for key, tensor in named_in(part, f"{prefix}{path}." if path else prefix):
            value, halves = state.get(key), in_halves(tensor)
            if halves is None or halves.hi.dtype != torch.float16 or not isinstance(value, Tensor):
                continue
            if value.is_floating_point():
                values[key] = tensor, local(value)
    if not values:
        return
    params = [param for param, _ in values.values()]
    device = next((param.device for param in params if not param.is_meta), torch.device("cpu"))
    flags = torch.tensor([is_beyond(value, torch.float16) for _, value in values.values()], device=device)
    are_large = flags_of_all(flags, params).tolist()  # of a sharded parameter each rank has checked its shard
    large = [key for key, is_large in zip(values, are_large, strict=True) if is_large]
    if large:
        yield NumericsError(
            "the state dict has weights beyond the range of the model's halves",
            where=some_of([f"{key} → float16" for key in large]),
            write=f"{both('dtype=bfloat16')}, whose range is FP32's; or {both(f'fp32_param={exact(large[0])}')}",
        )


# Programs that torch makes of a model -----------------------------------------------------------------------


#: The functions that make them: the public ones, and those that these and ``torch.onnx.export`` call.
_MAKERS: Final = (
    "torch.jit.trace_module",
    "torch.jit._trace.trace_module",
    "torch.jit._script.call_prepare_scriptable_func",
    "torch.jit._get_trace_graph",
    "torch.jit._unique_state_dict",
    "torch.export.export",
    "torch.export.draft_export",
)


class _Programs:
    """Patches of torch's functions that make a program of a model: they get plain copies of models that hide storage.

    A saved program cannot use hooks and halves. A region around the program's call acts on it as on the model.
    """

    def __init__(self) -> None:
        self._lock, self._count, self._undo = threading.RLock(), 0, ExitStack()

    def open(self) -> None:
        """Patch the functions, if this is the first model."""
        with self._lock:
            self._count += 1
            for path in _MAKERS if self._count == 1 else ():
                module_name, _, name = path.rpartition(".")
                self._bind(importlib.import_module(module_name), name)

    def _bind(self, module: Any, name: str) -> None:
        maker = getattr(module, name, None)
        if maker is not None:  # a private function, which a release of torch may not have
            self._undo.callback(patch(module, name, functools.wraps(maker)(partial(_of_copies, maker))))

    def close(self) -> None:
        """Undo the patches, if no other model needs them."""
        with self._lock:
            self._count -= 1
            if not self._count:
                self._undo.close()


_PROGRAMS: Final = _Programs()


def _of_copies(maker: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return maker(*map(_as_plain, args), **{name: _as_plain(value) for name, value in kwargs.items()})


def _as_plain(value: Any) -> Any:
    """Return a plain FP32 copy of a model that hides its storage, or has such a part; any other value as it is."""
    if not isinstance(value, nn.Module) or not any(map(hides_storage, value.modules())):
        return value
    # Tensors with a graph, which a forward pass may have left in a module, cannot be copied deeply.
    outputs = [tensor for module in value.modules() for tensor in tensors(vars(module)) if tensor.grad_fn is not None]
    copied = copy.deepcopy(value, {id(tensor): tensor.detach() for tensor in outputs})
    if any("_mezzo_low" in vars(module) for module in value.modules()):
        for tensor in (*copied.parameters(), *copied.buffers()):
            if tensor.dtype in LOW:
                tensor.data = tensor.data.float()
    return copied


def _traced(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a module in a function that ``torch.jit`` traces, and warn of what its files would hold."""
    if any(param is not None and of_halves(param) for param in module._parameters.values()):
        text = message(
            "a function is traced that calls a model whose weights are stored in halves",
            where="torch.jit",
            why="torch.jit.save would write zeros for them",
            write="torch.jit.trace(model, …), which traces a plain copy; "
            f"or {both('fp32_param=*')}, which stores all plainly",
        )
        warnings.warn(text, stacklevel=2)
    return type(module)._slow_forward(module, *args, **kwargs)  # type: ignore[no-untyped-call]


# Copies, pickles and casts --------------------------------------------------------------------------------


def _copied(module: nn.Module, /, *args: Any, **kwargs: Any) -> nn.Module:
    """Return a plain copy of a module under a policy."""
    with _without_ours(module.modules()):
        copied: nn.Module = getattr(module, "__deepcopy__", partial(copy.deepcopy, module))(*args, **kwargs)
    for part in copied.modules():
        ours = _ours(vars(part))
        for name in (*_HOOKS, *_OF_HOOKS):
            table = vars(part)[name]
            for key in ours & table.keys():
                del table[key]
    return copied


def _pickled(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Reduce a module to a plain one, whose parameters are those of an optimizer that is pickled beside it."""
    with _without_ours([module]):
        reduced = module.__reduce_ex__(*args, **kwargs)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            state, ours = {**reduced[2]}, _ours(reduced[2])
            for name in state.keys() & {*_HOOKS, *_OF_HOOKS}:
                state[name] = OrderedDict((key, hook) for key, hook in state[name].items() if key not in ours)
            reduced = (*reduced[:2], state, *reduced[3:])
    return reduced


@contextmanager
def _without_ours(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Remove from modules, inside the block, the attributes that they have under a policy."""
    taken: dict[nn.Module, dict[str, Any]] = {}
    for module in modules:
        attributes = vars(module)
        bound = [name for name, value in attributes.items() if name in _BOUND or getattr(value, "is_of_mezzo", False)]
        taken[module] = {name: attributes.pop(name) for name in bound}
    try:
        yield
    finally:
        for module, attributes in taken.items():
            vars(module).update(attributes)


def _ours(names: Mapping[str, Any]) -> set[int]:
    """Return the keys of mezzo's hooks among those of a module."""
    return {key for name in _HOOKS for key, hook in names.get(name, {}).items() if is_ours(hook)}


def _applied(module: nn.Module, /, *args: Any, **kwargs: Any) -> nn.Module:
    """Move a module, as its class's ``_apply`` does, and refuse to cast parameters that a policy has stored.

    Args:
        module: The module.
        *args: Those of its class's ``_apply``, the first of which, ``fn``, changes a tensor.
        **kwargs: The same, by name.

    Raises:
        StateError: The function casts.
    """
    change: Callable[[Tensor], Tensor] = args[0] if args else kwargs["fn"]
    stored: dict[torch.dtype, str] = {}  # one name a dtype, also of submodules, which are changed before the module
    for name, param in module.named_parameters():
        if of_halves(param) or param.dtype in LOW:
            stored.setdefault(param.dtype, name)
    for dtype, name in stored.items():
        if (to := change(torch.empty(0, dtype=dtype)).dtype) != dtype:
            raise StateError(
                "a converted model is cast",
                where=f"{name} of {type(module).__name__}: {dtype_name(dtype)} → {dtype_name(to)}",
                why="its policy says how parameters are stored",
                write="amp.close() (or prepared.remove()), which gives FP32 weights; copy.deepcopy(model) is a plain "
                f"model; {both('fp32_param=' + exact(name))} stores it plainly; .to(device) alone may be called",
            )
    halved = {name: param for name, param in module._parameters.items() if param is not None and of_halves(param)}
    params = module._parameters
    plain = {name: param for name, param in params.items() if name not in halved or is_distributed(halved[name])}
    vars(module)["_parameters"] = plain
    try:
        moved: nn.Module = type(module)._apply(module, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        vars(module)["_parameters"] = params
    params.update(plain)
    for name, param in halved.items():
        if name not in plain:
            _move(param, change)
    return moved


@torch.no_grad()
def _move(param: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Apply a change, such as ``.to(device)``, to a parameter's halves and to its gradient."""
    moved = change(param.detach())
    gradient = None if param.grad is None else change(param.grad)
    if not isinstance(moved, Halves):  # of to_empty(), say
        moved = _encoded(moved, param.hi.dtype, type(param))
        moved.path = param.path
    if moved.device != param.device or moved.stride() != param.stride() or moved.cell is not param.cell:
        dtype, param.grad = param.grad_dtype, None
        _replace(param, moved)
        param.grad_dtype = dtype  # which may be none, where the gradient has 16 bits
        param.grad = gradient


def _flattened(*args: Any, **kwargs: Any) -> None:
    """Do nothing: kernels get the weights in halves one by one, and not as one flat memory."""


#: The methods that a module which hides its storage has in place of its class's.
_METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    "__deepcopy__": _copied, "__reduce_ex__": _pickled, "_apply": _applied, "_slow_forward": _traced,
}  # fmt: skip
#: The attributes of such a module that no copy of it gets.
_BOUND: Final = ("_mezzo_hidden", "_mezzo_low", "_mezzo_fp32", "_mezzo_prepared", "flatten_parameters", *_METHODS)
