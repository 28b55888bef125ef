"""``Halves``: a tensor that is FP32 to every reader, and is stored as two tensors of 16 bits."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from itertools import compress, repeat
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter, is_, not_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mezzo.dispatch import OpOverload, autocast_dtype
from mezzo.errors import UnsupportedError
from mezzo.policy.rules import both, exact
from mezzo.releases import private
from mezzo.sharded import local, locals_of
from mezzo.step.storage import encode
from mezzo.tensors import mapped, tensors
from mezzo.weights.cell import STEP, Cell, lies_alone, no_memory
from mezzo.weights.codec import decoded, get_ready, store_in
from mezzo.weights.collectives import ended, is_collective, writes_first

_ATEN: Final = torch.ops.aten
_TO_COPY: Final = torch.ops.aten._to_copy.default
_LAZILY: Final = torch.ops.aten._lazy_clone.default
_LAZY_CLONE: Final = private("torch._lazy_clone")
_FORBID_ADDRESS: Final = private("torch._C._set_throw_on_mutable_data_ptr")
_SWAP: Final = private("torch._C._swap_tensor_impl")
_WRAPPER: Final = private("torch.Tensor._make_wrapper_subclass")

#: What makes another tensor of one's shape, and reads no values.
_LIKE: Final = frozenset(
    getattr(_ATEN, name).default
    for name in """zeros_like empty_like ones_like full_like rand_like randn_like new_zeros new_empty new_ones
    new_full new_empty_strided""".split()
)
#: What takes elements, or rows of them, as they are.
_GATHERS: Final = frozenset({_ATEN.index_select.default, _ATEN.index.Tensor, _ATEN.gather.default})
#: Views of other bits than the values': what lies in two halves has none.
_RETYPED: Final = frozenset(
    {_ATEN.view.dtype, _ATEN.view_as_complex.default, _ATEN.view_as_real.default, torch.ops.aten._neg_view.default}
)
#: Whose operations do what their schemas say: no other kernel is handed a copy that it may write in secret, but what
#: its author declares fit for torch.compile, which goes by schemas, too (``torch.library.custom_op`` does so).
_KNOWN: Final = frozenset({"aten", "prim", "prims", "mkldnn", "quantized", "torchvision", "torchaudio", "mezzo"})
#: The types of arguments that may hold tensors.
_NESTED: Final = frozenset({list, tuple})
_WIDE: Final = attrgetter("cell.decoded")
_IS_LENT: Final = attrgetter("cell.is_lent")
_IS_PART: Final = attrgetter("is_part")
#: What a tensor has of it, in the dictionary of its attributes.
_ATTRIBUTES: Final = ("hi", "lo", "cell", "is_part", "path", "_is_param", "_low_half")


class Halves(Tensor):
    """An FP32 tensor that is stored in two halves.

    To a program it is a ``torch.float32`` tensor: its ``dtype``, the values that operations read and write, and their
    results. Only a cast to ``hi``'s dtype is different: it is ``hi`` itself, copied when one of the two is written and
    not before. So a product that casts its weight low costs no cast, whether torch, mezzo or the program casts.

    Args:
        hi: BF16 or FP16: the value, rounded. What a cast returns.
        lo: int16, of the same shape and strides: what makes it whole, as :func:`mezzo.weights.encode` gives it.

    Attributes:
        hi: The high half.
        lo: The low half.
        cell: The state that a tensor shares with its views.
        is_part: Whether it is a view of another tensor.
        path: Its parameter's path in the model, for errors.

    **Cost**: 4 bytes an element. A cast takes 5 µs and launches nothing. Any other operation decodes first, 4 bytes
    read and 4 written for an element, and one that writes encodes after it; gathers of rows decode what they gather.

    Example:
        >>> import torch
        >>> weight = Halves.of(torch.tensor([1.0, 0.1]), torch.bfloat16)
        >>> weight.dtype, weight.hi
        (torch.float32, tensor([1.0000, 0.1001], dtype=torch.bfloat16))
        >>> weight + 0
        tensor([1.0000, 0.1000])
        >>> weight.mul_(2) * 1
        tensor([2.0000, 0.2000])
        >>> weight.to(torch.bfloat16)
        tensor([2.0000, 0.2002], dtype=torch.bfloat16)
    """

    hi: Tensor
    lo: Tensor
    cell: Cell
    is_part: bool
    path: str

    @staticmethod
    def __new__(cls, hi: Tensor, lo: Any = None, requires_grad: bool = False) -> Any:
        """Make a tensor of two halves; of a single tensor a plain parameter, for ``type(param)(tensor, True)``."""
        if not isinstance(lo, Tensor):
            return nn.Parameter(hi, requires_grad if lo is None else lo)
        weight = _WRAPPER(
            cls, hi.size(), strides=hi.stride(), storage_offset=hi.storage_offset(), dtype=torch.float32,
            layout=hi.layout, device=hi.device, requires_grad=requires_grad,
        )  # fmt: skip
        _FORBID_ADDRESS(weight)  # a kernel that would read memory that is not there raises
        weight.hi, weight.lo, weight.cell, weight.is_part, weight.path = hi, lo, Cell(hi.storage_offset()), False, ""
        return weight

    # Attributes are torch's own: they cost nothing.
    __torch_function__ = nn.Parameter.__torch_function__

    @classmethod
    def of(cls, value: Tensor, dtype: torch.dtype, *, name: str | None = None) -> Halves:
        """Store FP32 values.

        Args:
            value: FP32, any shape.
            dtype: ``torch.bfloat16`` or ``torch.float16``.
            name: What the error calls it.

        Raises:
            NumericsError: A finite value that ``dtype`` would round to infinity (FP16: beyond 65504).
        """
        weight: Halves = cls(*encode(value.detach(), dtype, name=name))
        get_ready(weight.hi)
        weight.path = name or ""
        return weight

    # Values ---------------------------------------------------------------------------------------------------

    @property
    def decoded(self) -> Tensor | None:
        """The FP32 tensor that holds the values for now, while both halves are stale; usually ``None``."""
        values, hi = self.cell.decoded, self.hi
        if values is None or (not self.is_part and values.shape == hi.shape and values.stride() == hi.stride()):
            return values
        offset = values.storage_offset() + hi.storage_offset() - self.cell.start
        return values.as_strided(hi.size(), hi.stride(), offset)

    def base_halves(self) -> tuple[Tensor, Tensor]:
        """Return the halves of the tensor that this one is a view of, flat; of a tensor that is no view its own."""
        if not self.is_part:
            return self.hi, self.lo
        start = self.cell.start
        count = self.hi.untyped_storage().nbytes() // self.hi.element_size() - start
        return self.hi.as_strided((count,), (1,), start), self.lo.as_strided((count,), (1,), start)

    def widen(self, *, is_lent: bool = False) -> Tensor:
        """Return the values, and hold them in FP32 from now on; where ``is_lent``, until the next cast or step."""
        cell = self.cell
        if cell.decoded is None:
            with torch.inference_mode(self.is_inference()):  # memory that outlives the mode it is made in
                cell.decoded, cell.is_lent = decoded(*self.base_halves()), is_lent
        return self.value()

    def lend(self) -> Tensor:
        """Return the values as FP32 memory that a program may write to until the next cast or step.

        While an optimizer steps it is a copy: the memory of a step is freed at its end.
        """
        if self.cell.decoded is None or self.cell.is_lent:
            return self.widen(is_lent=True).detach()
        return self.value().clone()

    def store_lent(self) -> None:
        """Store in halves again the values that were lent in FP32 to a reader of addresses."""
        cell, hi, lo = self.cell, self.hi, self.lo
        if cell.is_lent and (values := cell.decoded) is not None:
            cell.decoded, cell.is_lent = None, False
            size, stride = values.size(), values.stride()
            store_in(values, hi.as_strided(size, stride, cell.start), lo.as_strided(size, stride, cell.start))

    def value(self) -> Tensor:
        """Return the FP32 values as a plain tensor: a new one, or the one that holds them for now."""
        values = self.decoded
        return decoded(self.hi, self.lo) if values is None else values

    def assign(self, value: Tensor) -> None:
        """Store other FP32 values, whose shape broadcasts to the tensor's; beyond FP16's range they become infinite."""
        if (values := self.decoded) is not None:
            values.copy_(value)
            return
        value = value.to(self.hi.device, torch.float32)
        store_in(value if value.shape == self.hi.shape else value.expand_as(self.hi), self.hi, self.lo)

    def low(self, dtype: torch.dtype) -> Tensor:
        """Return the values in a dtype, differentiably: in the high half's dtype the high half.

        The gradient of the high half reaches a leaf in 16 bits, where ``grad_dtype`` allows that; a cast's is FP32.
        """
        if self.cell.decoded is None and dtype is self.hi.dtype:
            high: Tensor = _LAZY_CLONE(self)
            return high
        return self.to(dtype)

    def _view(self, hi: Tensor, lo: Any) -> Halves:
        if torch.is_inference_mode_enabled() and not self.is_inference():  # a view is what its base is
            with torch.inference_mode(False):
                return self._part(hi, lo)
        return self._part(hi, lo)

    def _part(self, hi: Tensor, lo: Any) -> Halves:
        view: Halves = type(self)(hi, lo)
        view.cell, view.is_part, view.path = self.cell, True, self.path
        return view

    def _seen(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the view, or views, that an operation makes of both halves."""
        hi, lo = func(self.hi, *args, **kwargs), func(self.lo, *args, **kwargs)
        return self._view(hi, lo) if isinstance(hi, Tensor) else type(hi)(map(self._view, hi, lo))

    def _copied(self, hi: Tensor, lo: Tensor) -> Halves:
        """Return a tensor of copied halves, which may be on another device or in another memory order."""
        copied: Halves = type(self)(hi, lo)
        copied.path = self.path
        return copied

    # What torch asks of tensors -------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _TO_COPY or func is _LAZILY:
            weight: Any = args[0]
            hi, cell = weight.hi, weight.cell
            if cell.decoded is not None and type(hi) is Tensor and (cell.is_lent or cell.is_left()):
                cell.is_lent = True
                weight.store_lent()
            is_cast = not kwargs or (len(kwargs) == 1 and kwargs.get("dtype") is hi.dtype)
            if is_cast and cell.decoded is None and type(hi) is Tensor:
                if torch.is_grad_enabled():
                    cell.uses[weight.is_part] += 1
                try:
                    return _LAZY_CLONE(hi)
                except RuntimeError:  # memory of another kind: shared between processes, or mapped from a file
                    return hi.clone()
        return _CARRY_OUT[_kind(func)](func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self.cell.is_lent:
            self.store_lent()
        return ["hi", "lo"] if self.cell.decoded is None else ["hi", "lo", "decoded"], self.path

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], name: str, size: Any, stride: Any) -> Halves:
        weight: Halves = Halves(inner["hi"], inner["lo"])
        weight.cell.decoded, weight.path = inner.get("decoded"), name
        return weight

    # Python's own ways to read, copy and replace a tensor: the results are plain ------------------------------------

    def _plain(self) -> Tensor:
        value = self.detach().clone()
        return nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __format__(self, spec: str) -> str:
        return format(self._plain().detach(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            plain = memo[id(self)] = self._plain().requires_grad_(self.requires_grad)
            if not isinstance(self, nn.Parameter):
                plain.__dict__ = copy.deepcopy(_own(self), memo)
        copied: Tensor = memo[id(self)]
        return copied

    def __copy__(self) -> Tensor:
        view = self.data
        return nn.Parameter(view, self.requires_grad) if isinstance(self, nn.Parameter) else view

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self._plain()
        vars(plain).update(_own(self))
        return plain.__reduce_ex__(protocol)

    def numpy(self, **kwargs: Any) -> Any:
        """Return the values as an array of NumPy's: a copy, which therefore cannot be written."""
        array = self.detach().clone().numpy(**kwargs) if not self.requires_grad or kwargs.get("force") else None
        if array is None:
            return torch.empty(0, requires_grad=True).numpy()  # which torch refuses
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the values as numbers."""
        return self.detach().clone().tolist()

    def data_ptr(self) -> int:
        """Return the address of the FP32 values, which are lent: they have memory until the next cast or step.

        Some readers of addresses are kernels, which read and write there; to others an address is a key.
        """
        return self.widen(is_lent=True).data_ptr()

    def storage(self) -> Any:
        """Return the memory that :meth:`data_ptr` lends, which safetensors reads."""
        values: Any = self.widen(is_lent=True)
        return values.storage()

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise no_memory(self.path, "DLPack")

    def share_memory_(self) -> Any:
        """Move both halves to memory that processes share."""
        tensor: Any
        for tensor in (self.hi, self.lo, *([] if self.cell.decoded is None else [self.cell.decoded])):
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the halves lie in memory that processes share."""
        high: Any = self.hi
        return bool(high.is_shared())

    @property
    def data(self) -> Any:
        """The same memory without autograd. Assigning a tensor replaces the values, layout and device."""
        return self._seen(Tensor.detach)

    @data.setter
    def data(self, value: Tensor) -> None:
        is_same_layout = value.shape == self.shape and value.stride() == self.stride() and value.device == self.device
        if is_same_layout and isinstance(value, Halves) and value.hi.dtype == self.hi.dtype:
            self.hi, self.lo, self.cell, self.is_part = value.hi, value.lo, value.cell, _lies_within(value)
        elif is_same_layout and type(value) in (Tensor, nn.Parameter) and value.dtype == torch.float32:
            if not (lies_alone(self.hi) and lies_alone(self.lo)):  # a program holds the former param.data
                self.hi, self.lo = (torch.empty_like(value, dtype=half.dtype) for half in (self.hi, self.lo))
            # The values are in the memory of the assigned tensor, so that a write to either is seen in both.
            self.cell, self.is_part = Cell(self.hi.storage_offset(), value.detach()), False
        else:
            become(self, value.detach())


def _lies_within(tensor: Halves) -> bool:
    """Whether a tensor is a view of a part of its values, and not of all."""
    values = tensor.cell.decoded
    return tensor.is_part and (values is None or values.shape != tensor.shape)


def _own(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that a program has set on a tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in _ATTRIBUTES}


# How operations are carried out -----------------------------------------------------------------------------------


@functools.cache
def _kind(func: Any) -> str:
    """Return how an operation is carried out: a key of :data:`_CARRY_OUT`."""
    if func in _RETYPED:
        return "retyped"
    if func in _LIKE:
        return "like"
    if func in _GATHERS:
        return "gather"
    if func is _ATEN.embedding.default:
        return "embedding"
    if func is _ATEN.clone.default:
        return "clone"
    if func is _ATEN.copy_.default:
        return "copy"
    if is_collective(func):
        return "any"
    if func.namespace not in _KNOWN and torch.Tag.pt2_compliant_tag not in func.tags:
        return "unknown"
    if func is _TO_COPY:
        return "moved"
    if torch.Tag.inplace_view in func.tags and func is not _ATEN.detach_.default:
        return "reshaped"
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return "composite"
    arguments = func._schema.arguments
    is_view = bool(arguments) and arguments[0].alias_info is not None and not arguments[0].alias_info.is_write
    return "view" if is_view else "any"


@functools.cache
def _written_arguments(func: OpOverload[..., Any]) -> tuple[tuple[int, str], ...]:
    """Return the indices and names of the arguments that an operation writes."""
    arguments = enumerate(func._schema.arguments)
    if writes_first(func):
        return ((0, func._schema.arguments[0].name),)
    return tuple(
        (i, argument.name)
        for i, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _note_read(weight: Halves) -> None:
    if torch.is_grad_enabled():
        weight.cell.uses[1] += 1


def _as_view(func: Any, args: Any, kwargs: Any) -> Any:
    weight = args[0]
    if not isinstance(weight, Halves):
        return _as_any(func, args, kwargs)
    return weight._seen(func, *args[1:], **kwargs)


def _as_retyped(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a view with other bits than the values'; they stay in FP32 from here on, since the view may be written."""
    weight = args[0]
    _note_read(weight)
    weight.widen()
    weight.cell.is_lent = False
    return func(weight.value(), *args[1:], **kwargs)


def _as_reshaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse an operation that changes a tensor's shape, or its memory, in place.

    Raises:
        UnsupportedError: Always.
    """
    name = next((value.path for value in args if isinstance(value, Halves)), "")
    raise UnsupportedError(
        f"{f'the parameter {name}' if name else 'a parameter'} cannot take another shape in place",
        where=str(func),
        why="it is stored in two halves of 16 bits, which its views share",
        write=f"param.data = …, of any shape; or {both('fp32_param=' + exact(name or '…'))}, which stores it plainly",
    )


def _as_like(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].hi, *args[1:], **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})


def _as_moved(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a copy on another device or in another memory order, in halves; or a cast."""
    weight, dtype = args[0], kwargs.get("dtype")
    if weight.cell.decoded is None and dtype in (None, torch.float32):
        _note_read(weight)
        options = {name: value for name, value in kwargs.items() if name != "dtype"}
        return weight._copied(func(weight.hi, **options), func(weight.lo, **options))
    if weight.cell.decoded is None and dtype is weight.hi.dtype:
        _note_read(weight)
        return func(weight.hi, **kwargs)
    return _as_any(func, args, kwargs)


def _as_clone(func: Any, args: Any, kwargs: Any) -> Any:
    weight = args[0]
    if weight.cell.decoded is not None or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return _as_any(func, args, kwargs)
    _note_read(weight)
    return weight.value()


def _as_gather(func: Any, args: Any, kwargs: Any) -> Any:
    weight = args[0]
    if not isinstance(weight, Halves) or weight.cell.decoded is not None:
        return _as_any(func, args, kwargs)
    _note_read(weight)
    return decoded(func(weight.hi, *args[1:], **kwargs), func(weight.lo, *args[1:], **kwargs))


def _as_embedding(func: Any, args: Any, kwargs: Any) -> Any:
    weight, indices = args[:2]
    if not isinstance(weight, Halves) or weight.cell.decoded is not None:
        return _as_any(func, args, kwargs)
    _note_read(weight)
    rows = indices.reshape(-1)
    hi, lo = (half.index_select(0, rows) for half in (weight.hi, weight.lo))
    return decoded(hi, lo).view(*indices.shape, *weight.shape[1:])


def _as_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Write other values; the present ones are not decoded first."""
    to, source = args[:2]
    value = source
    if isinstance(source, Halves):
        _note_read(source)
        value = source.value()
    if not isinstance(to, Halves):
        return func(to, value, *args[2:], **kwargs)
    to.assign(value)
    return to


def _as_composite(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out the parts of an operation that torch composes of others; in inference mode it is dispatched whole."""
    return func.decompose(*args, **kwargs)


def _as_unknown(func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse an operation that may write an argument without its schema saying so.

    Raises:
        UnsupportedError: Always.
    """
    weights = [tensor for tensor in tensors((args, kwargs)) if isinstance(tensor, Halves)]
    raise no_memory(weights[0].path if weights else "", str(func))


def _with_decoded(values: list[Any]) -> list[Any] | None:
    """Return a list with FP32 values for its halves; ``None`` where a half is not decoded, or is a view."""
    plain = [tensor.cell.decoded if isinstance(tensor, Halves) else tensor for tensor in values]
    halves = [tensor for tensor in values if isinstance(tensor, Halves)]
    return None if any(map(is_, plain, repeat(None))) or any(map(_IS_PART, halves)) else plain


def _in_lists(func: Any, args: Any, kwargs: Any) -> bool:
    """Carry out an operation on lists of parameters that are all decoded, as an optimizer's; False where one is not.

    **Cost**: few calls of Python's whatever the length of the lists.
    """
    if torch.is_grad_enabled() or func._schema.returns:
        return False
    lists = {
        index: argument
        for index, argument in enumerate(args)
        if type(argument) is list and argument and isinstance(argument[0], Tensor)
    }
    plain_lists = {index: _with_decoded(argument) for index, argument in lists.items()}
    if None in plain_lists.values() or any(isinstance(argument, Halves) for argument in (*args, *kwargs.values())):
        return False
    func(*(plain_lists.get(index, argument) for index, argument in enumerate(args)), **kwargs)
    for index, _ in _written_arguments(func):
        if index in lists:
            increment_version(lists[index])  # of plain ones beside halves, too: torch counts nothing below them
    return True


def _as_any(func: Any, args: Any, kwargs: Any, *, may_alias: bool = True) -> Any:
    """Carry out an operation on FP32 values, and store in halves those that it has written."""
    if args and type(args[0]) is list:
        if STEP.parts is not None and STEP.parts(func, args, kwargs):
            return None
        if _in_lists(func, args, kwargs):
            return None
    seen: dict[int, tuple[Halves, Tensor]] = {}

    def decode(weight: Halves) -> Tensor:
        if id(weight) not in seen:
            _note_read(weight)
            seen[id(weight)] = weight, weight.value()
        return seen[id(weight)][1]

    if _NESTED.isdisjoint(map(type, args)) and _NESTED.isdisjoint(map(type, kwargs.values())):
        plain_args = [decode(value) if isinstance(value, Halves) else value for value in args]
        plain_kwargs = {name: decode(value) if isinstance(value, Halves) else value for name, value in kwargs.items()}
    else:
        plain_args, plain_kwargs = mapped((args, kwargs), decode, Halves)
    weights = [weight for weight, _ in seen.values()]
    writes, device_type = _written_arguments(func), weights[0].device.type if weights else "cpu"
    if writes and may_alias and len({id(weight.cell) for weight in weights}) < len(weights):
        return _as_aliases(func, args, kwargs, weights)
    dtype = None if writes else autocast_dtype(device_type)
    if dtype is None:
        out = func(*plain_args, **plain_kwargs)
    else:  # what torch composes in C++ casts inside, as it does for plain tensors
        with torch.autocast(device_type, dtype):
            out = func(*plain_args, **plain_kwargs)
    if not writes:
        return out
    if is_collective(func):
        out = ended(out)
    back: dict[int, Halves] = {}
    for index, name in writes:
        target = args[index] if index < len(args) else kwargs.get(name)
        is_list = isinstance(target, list | tuple)
        written = list(tensors(target))
        for weight in [tensor for tensor in written if isinstance(tensor, Halves)]:
            values = seen[id(weight)][1]
            back[id(values)] = weight
            if weight.cell.decoded is None:
                weight.assign(values)
        if is_list and (counted := [tensor for tensor in written if not tensor.is_inference()]):
            increment_version(counted)
    if isinstance(out, Tensor):
        return back.get(id(out), out)
    return mapped(out, lambda tensor: back.get(id(tensor), tensor)) if back else out


def _as_aliases(func: Any, args: Any, kwargs: Any, weights: list[Halves]) -> Any:
    """Carry out an operation that writes tensors of which some share memory; meanwhile they are decoded."""
    undecoded = {id(weight.cell): weight for weight in weights if weight.cell.decoded is None}
    for weight in undecoded.values():
        weight.widen(is_lent=True)
    try:
        return _as_any(func, args, kwargs, may_alias=False)
    finally:
        for weight in undecoded.values():
            weight.store_lent()


_CARRY_OUT: Final[Mapping[str, Callable[[Any, Any, Any], Any]]] = {
    "any": _as_any, "view": _as_view, "retyped": _as_retyped, "like": _as_like, "moved": _as_moved,
    "gather": _as_gather, "embedding": _as_embedding, "clone": _as_clone, "copy": _as_copy, "composite": _as_composite,
    "reshaped": _as_reshaped, "unknown": _as_unknown,
}  # fmt: skip


# Identity ---------------------------------------------------------------------------------------------------------


def become(tensor: Any, successor: Tensor) -> None:
    """Replace a tensor's contents by another's; it stays the same object, with its hooks and a program's attributes.

    A gradient that an earlier graph computes reaches it, too.

    Args:
        tensor: A parameter, or any tensor.
        successor: The tensor whose contents it takes over; not to be used afterwards.

    Raises:
        UnsupportedError: Something in C++ refers to the tensor; nothing was changed.
    """
    if isinstance(tensor, nn.Parameter) and not isinstance(successor, nn.Parameter):
        successor = nn.Parameter(successor, tensor.requires_grad)
    attributes, gradient = _own(tensor), tensor.grad if tensor.is_leaf else None
    try:
        _SWAP(tensor, successor)
    except RuntimeError as error:
        name = getattr(tensor, "path", "") or getattr(successor, "path", "")
        raise UnsupportedError(
            f"the parameter {name or '…'} cannot be stored otherwise now",
            where=f"{type(tensor).__name__} → {type(successor).__name__}",
            why="something in C++ refers to it, as what torch.profiler has recorded with record_shapes does",
            write="del what was recorded, first",
        ) from error
    tensor.__class__, successor.__class__ = type(successor), type(tensor)
    tensor.__dict__, successor.__dict__ = {**vars(successor), **attributes}, {}
    successor.grad = None
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name, None)) is not None:  # an empty one, too: hooks that come later go there
            setattr(tensor, name, hooks)
    if gradient is not None and gradient.shape == tensor.shape:
        tensor.grad = gradient.to(tensor.dtype)
    if successor.requires_grad and successor.is_leaf:  # graphs of before know the other: it lives as long as they do
        hand_on = functools.partial(_hand_on, weakref.ref(tensor))
        successor.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]


def _hand_on(to: Callable[[], Tensor | None], before: Tensor) -> None:
    """Move the gradient that an earlier graph has computed to the tensor that it belongs to now."""
    gradient, before.grad = before.grad, None
    if (tensor := to()) is not None and gradient is not None:
        gradient = gradient.to(tensor.dtype)
        tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


def in_halves(param: Tensor) -> Halves | None:
    """Return the halves of a parameter, of a DTensor this rank's; ``None`` while it is stored plainly or decoded.

    Args:
        param: Any tensor.
    """
    weight = local(param)
    if not isinstance(weight, Halves):
        return None
    if weight.cell.is_lent:
        weight.store_lent()
    return weight if weight.cell.decoded is None else None


def halves_among(tensors: list[Tensor]) -> tuple[list[Halves], list[Tensor]]:
    """Return the tensors in halves, and the plain ones, of DTensors this rank's; lent values are stored again.

    **Cost**: loops in C, few calls of Python's whatever the number of tensors.
    """
    own_tensors = locals_of(tensors)
    classes = [*map(type, own_tensors)]
    plain_classes = {cls for cls in {*classes} if not issubclass(cls, Halves)}
    are_plain = [*map(plain_classes.__contains__, classes)]
    halves: list[Any] = [*compress(own_tensors, map(not_, are_plain))]
    for weight in compress(halves, map(_IS_LENT, halves)):
        weight.store_lent()
    return halves, [*compress(own_tensors, are_plain)]


def _rebuilt(hi: Tensor, lo: Tensor, is_param: bool, requires_grad: bool, name: str) -> Tensor:
    get_ready(hi)
    weight: Any = Halves(hi, lo)
    weight.path = name
    return nn.Parameter(weight, requires_grad) if is_param else weight


def _shared(tensor: Any) -> Any:
    """Reduce a tensor for another process, which shares the halves."""
    if tensor.cell.decoded is not None:
        return tensor._plain().__reduce_ex__(2)
    is_param = isinstance(tensor, nn.Parameter)
    return _rebuilt, (tensor.hi, tensor.lo, is_param, tensor.requires_grad, tensor.path)


ForkingPickler.register(Halves, _shared)
