"""A model whose weights are stored in halves: how it comes to that and back, how it is saved, loaded and copied."""

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
from typing import Any, Final

import torch
from torch import Tensor, nn

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
    """Whether a parameter, or this rank's shard of it, is a tensor of halves, wherever its value lies for now."""
    return isinstance(local(param), Halves)


@torch.no_grad()
def store(dtypes: Mapping[nn.Parameter, torch.dtype], names: Mapping[nn.Parameter, str]) -> None:
    """Store parameters in halves; each stays the object that it is.

    Args:
        dtypes: Parameters in FP32 or 16 bits, each with the dtype of its high half.
        names: What errors call them.

    **Cost**: a pass over each. 4 bytes a weight; FP32 memory is let go one by one. Finite values beyond the range of a
    dtype become infinite: whoever decides what is stored has looked.
    """
    if dtypes:
        watch_steps()
    for param, dtype in dtypes.items():
        here = local(param.detach())
        if isinstance(here, Halves):  # of two models that share it
            continue
        made = _encoded(here, dtype, HeldShard if is_distributed(param) else Halves)
        made.path = names[param]
        try:
            _replace(param, made)
        except UnsupportedError:
            gc.collect()  # what is only part of a cycle refers to nothing
            _replace(param, made)


def _encoded(values: Tensor, dtype: torch.dtype, kind: type[Halves] = Halves) -> Halves:
    wide = values.to(torch.float32)
    high, low = torch.empty_like(wide, dtype=dtype), torch.empty_like(wide, dtype=torch.int16)
    encode_into(wide, high, low)
    get_ready(high)
    made: Halves = kind(high, low)
    return made


@torch.no_grad()
def restore(params: Iterable[Tensor]) -> None:
    """Store parameters plainly again, in FP32; each stays the object that it is.

    What something in C++ refers to stays in halves, FP32 to everybody still, and a warning names it.
    """
    waiting = [param for param in params if of_halves(param)]
    for ends in (False, True):
        refused = list[Tensor]()
        for param in waiting:
            here: Any = local(param.detach())
            try:
                _replace(param, here.value())
            except UnsupportedError:
                refused.append(param)
        if not (waiting := refused):
            return
        if not ends:
            gc.collect()  # what is only part of a cycle refers to nothing
    text = message(
        "parameters stay in halves, which are FP32 to everybody still",
        where=some_of([getattr(local(param), "path", "") for param in waiting]),
        why="something in C++ refers to them, as what torch.profiler has recorded with record_shapes does",
        write="copy.deepcopy(model) is a plain model; or del what was recorded, before they are given back",
    )
    warnings.warn(text, stacklevel=3)


def _replace(param: Tensor, value: Tensor) -> None:
    """Let a parameter hold another tensor, and stay the object that it is."""
    if is_distributed(param):
        gradient, param.grad = param.grad, None
        hold_locally(param, value)
        param.grad = gradient
        return
    become(param, nn.Parameter(value, param.requires_grad))
    if isinstance(param, Halves):
        param.is_part = False


def hide_storage(model: nn.Module, *, is_low: bool = False) -> Callable[[], None]:
    """Have a model's state dicts hold plain FP32 values, and its copies and pickles be plain models.

    ``load_state_dict(assign=True)`` writes into the parameters that are there, which an optimizer knows.
    ``model.half()`` and other casts of what is stored in halves are refused. The weights lie in a state dict's tensors
    until the next cast of them or the next step, so that what a program writes there, it writes to them, as for plain
    ones; from then on the state dict holds what they were.

    Args:
        model: The model.
        is_low: Whether its weights are stored in 16 bits. The programs that torch makes of it are in FP32.

    Returns:
        What ends it.
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
    """Whether a module is part of a model that :func:`hide_storage` was given, and has not ended."""
    return "_mezzo_hidden" in module.__dict__


def _unhide(module: nn.Module, count: list[int]) -> None:
    count[0] -= 1
    for name in () if count[0] else _BOUND:  # another model may have the module, too
        if name != "_mezzo_prepared":
            vars(module).pop(name, None)


def named_in(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters by the keys that they have in a state dict."""
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield prefix + name, tensor


@dataclass(frozen=True, slots=True)
class Bytes:
    """How many bytes the parameters of a model take, by where they lie; buffers are not counted.

    Attributes:
        high: High halves.
        low: Low halves.
        plain: Parameters that are stored plainly.
        count: How many parameters, in elements, are stored in halves.
        total_count: How many there are.
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
    """Tell how many bytes of a model's parameters lie where.

    Args:
        model: Any; of what is sharded, this rank's shards count.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Linear(8, 4)
        >>> handle = mezzo.prepare(model, "O2,dtype=bfloat16")
        >>> print(halves(model))
        32 of 36 elements in halves: 64 + 64 bytes, and 16 bytes plain
    """
    high = low = plain = count = total = 0
    for param in model.parameters():
        here = local(param)
        total += here.numel()
        if isinstance(here, Halves) and (here.cell.decoded is None or here.cell.is_lent):
            high, low, count = high + 2 * here.numel(), low + 2 * here.numel(), count + here.numel()
        else:
            plain += here.numel() * here.element_size()
    return Bytes(high, low, plain, count, total)


# State dicts ----------------------------------------------------------------------------------------------


class _StateHook:
    """The hooks of a model's modules on saving and loading; in a copy they do nothing."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self._root = None if root is None else weakref.ref(root)

    def __reduce__(self) -> Any:
        return _StateHook, ()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Put plain values in the places of halves; ``keep_vars=True`` shows parameters."""
        if self._root is None:
            return
        for key, tensor in named_in(module, prefix):
            here = local(tensor)
            if isinstance(here, Halves) and state.get(key, tensor) is not tensor:
                state[key] = held_as(here.lend(), tensor)

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        """Refuse what FP16 halves do not hold; write what is to be assigned into the parameters that are there.

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
    """Yield what stands against loading a state dict into a model, with all its parts."""
    values = dict[str, tuple[Tensor, Tensor]]()
    for path, each in module.named_modules():
        for key, tensor in named_in(each, f"{prefix}{path}." if path else prefix):
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
    found = flags_of_all(flags, params).tolist()  # of a sharded one every rank knows its own part
    large = [key for key, is_large in zip(values, found, strict=True) if is_large]
    if large:
        yield NumericsError(
            "the state dict has weights beyond the range of the model's halves",
            where=some_of([f"{key} → float16" for key in large]),
            write=f"{both('dtype=bfloat16')}, whose range is FP32's; or {both(f'fp32_param={exact(large[0])}')}",
        )


# Programs that torch makes of a model -----------------------------------------------------------------------


#: What makes them: the public functions, and what these and ``torch.onnx.export`` call in their turn.
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
    """Functions of torch's that make a program of a model: while models are followed, they get plain copies of these.

    A program that is saved or handed on can do nothing with hooks and halves. A region that is around it acts on both.
    """

    def __init__(self) -> None:
        self._lock, self._count, self._undo = threading.RLock(), 0, ExitStack()

    def open(self) -> None:
        """Begin, for one model more."""
        with self._lock:
            self._count += 1
            for path in _MAKERS if self._count == 1 else ():
                place, _, name = path.rpartition(".")
                self._bind(importlib.import_module(place), name)

    def _bind(self, place: Any, name: str) -> None:
        plain = getattr(place, name, None)
        if plain is not None:  # a release may have another way
            self._undo.callback(patch(place, name, functools.wraps(plain)(partial(_of_copies, plain))))

    def close(self) -> None:
        """End, for one model."""
        with self._lock:
            self._count -= 1
            if not self._count:
                self._undo.close()


_PROGRAMS: Final = _Programs()


def _of_copies(plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return plain(*map(_as_plain, args), **{name: _as_plain(value) for name, value in kwargs.items()})


def _as_plain(value: Any) -> Any:
    """Return a plain FP32 copy of a model that has followed parts; anything else as it is."""
    if not isinstance(value, nn.Module) or not any(map(hides_storage, value.modules())):
        return value
    # Of what a forward pass has left in a module no deep copy is made.
    left = [each for module in value.modules() for each in tensors(vars(module)) if each.grad_fn is not None]
    made = copy.deepcopy(value, {id(each): each.detach() for each in left})
    if any("_mezzo_low" in vars(module) for module in value.modules()):
        for tensor in (each for each in (*made.parameters(), *made.buffers()) if each.dtype in LOW):
            tensor.data = tensor.data.float()
    return made


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
    """Return a plain module: the copy of one that is under a policy."""
    with _without_ours(module.modules()):
        made: nn.Module = getattr(module, "__deepcopy__", partial(copy.deepcopy, module))(*args, **kwargs)
    for each in made.modules():
        ours = _ours(vars(each))
        for name in (*_HOOKS, *_OF_HOOKS):
            table = vars(each)[name]
            for key in ours & table.keys():
                del table[key]
    return made


def _pickled(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Reduce a module to a plain one, whose parameters are those of an optimizer that is pickled beside it."""
    with _without_ours([module]):
        made = module.__reduce_ex__(*args, **kwargs)
        if isinstance(made, tuple) and len(made) > 2 and isinstance(made[2], dict):
            state, ours = {**made[2]}, _ours(made[2])
            for name in state.keys() & {*_HOOKS, *_OF_HOOKS}:
                state[name] = OrderedDict((key, each) for key, each in state[name].items() if key not in ours)
            made = (*made[:2], state, *made[3:])
    return made


@contextmanager
def _without_ours(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Take off modules, for now, the attributes that they have under a policy."""
    taken: dict[nn.Module, dict[str, Any]] = {}
    for each in modules:
        names = vars(each)
        bound = [name for name, value in names.items() if name in _BOUND or getattr(value, "is_of_mezzo", False)]
        taken[each] = {name: names.pop(name) for name in bound}
    try:
        yield
    finally:
        for each, names in taken.items():
            vars(each).update(names)


def _ours(names: Mapping[str, Any]) -> set[int]:
    """Return the keys of mezzo's hooks among those of a module."""
    return {key for name in _HOOKS for key, hook in names.get(name, {}).items() if is_ours(hook)}


def _applied(module: nn.Module, /, *args: Any, **kwargs: Any) -> nn.Module:
    """Move a module, as its class's ``_apply`` does, and refuse to cast what a policy has stored.

    Args:
        module: The module.
        *args: What its class takes: first what changes a tensor, which is called ``fn``.
        **kwargs: By name.

    Raises:
        StateError: It would.
    """
    change: Callable[[Tensor], Tensor] = args[0] if args else kwargs["fn"]
    stored: dict[torch.dtype, str] = {}  # one of each dtype, of the parts too: they are changed before it
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
    here = {name: param for name, param in module._parameters.items() if param is not None and of_halves(param)}
    every = module._parameters
    plain = {name: param for name, param in every.items() if name not in here or is_distributed(here[name])}
    vars(module)["_parameters"] = plain
    try:
        moved: nn.Module = type(module)._apply(module, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        vars(module)["_parameters"] = every
    every.update(plain)
    for name, param in here.items():
        if name not in plain:
            _move(param, change)
    return moved


@torch.no_grad()
def _move(param: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Let a parameter go where a change takes its halves, and its gradient with it."""
    there = change(param.detach())
    gradient = None if param.grad is None else change(param.grad)
    if not isinstance(there, Halves):  # of to_empty(), say
        there = _encoded(there, param.hi.dtype, type(param))
        there.path = param.path
    if there.device != param.device or there.stride() != param.stride() or there.cell is not param.cell:
        dtype, param.grad = param.grad_dtype, None
        _replace(param, there)
        param.grad_dtype = dtype  # which may be none, where the gradient has 16 bits
        param.grad = gradient


def _flattened(*args: Any, **kwargs: Any) -> None:
    """Do nothing: halves are handed to kernels one by one."""


#: What a followed module has of its own, in the places of its class's.
_METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    "__deepcopy__": _copied, "__reduce_ex__": _pickled, "_apply": _applied, "_slow_forward": _traced,
}  # fmt: skip
#: What no copy has of it.
_BOUND: Final = ("_mezzo_hidden", "_mezzo_low", "_mezzo_prepared", "flatten_parameters", *_METHODS)
