"""``Halves``: a tensor that is FP32 to everybody, and lies in memory as two tensors of 16 bits."""

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

    To everybody it is a ``torch.float32`` tensor: its ``dtype``, what operations read of it, what they write to it,
    and all that comes out of them. Only a cast to ``hi``'s dtype is different: it is ``hi`` itself, copied when
    somebody writes to one of both and not before. So products that cast their weights low cost no cast, whoever casts.

    Args:
        hi: BF16 or FP16: the value, rounded. What a cast returns.
        lo: int16, of the same shape and strides: what makes it whole, as :func:`mezzo.weights.encode` gives it.

    Attributes:
        hi: The high half.
        lo: The low half.
        cell: What it shares with views of it.
        is_part: Whether it is a view of another tensor.
        path: Where it stands in its model, for errors.

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
        """Make one; of a single tensor a plain parameter, as ``type(param)(tensor, requires_grad)`` means it."""
        if not isinstance(lo, Tensor):
            return nn.Parameter(hi, requires_grad if lo is None else lo)
        made = _WRAPPER(
            cls, hi.size(), strides=hi.stride(), storage_offset=hi.storage_offset(), dtype=torch.float32,
            layout=hi.layout, device=hi.device, requires_grad=requires_grad,
        )  # fmt: skip
        _FORBID_ADDRESS(made)  # a kernel that would read memory that is not there raises
        made.hi, made.lo, made.cell, made.is_part, made.path = hi, lo, Cell(hi.storage_offset()), False, ""
        return made

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
        made: Halves = cls(*encode(value.detach(), dtype, name=name))
        get_ready(made.hi)
        made.path = name or ""
        return made

    # Values ---------------------------------------------------------------------------------------------------

    @property
    def decoded(self) -> Tensor | None:
        """The FP32 tensor in which the values lie for now instead; ``None`` as a rule."""
        values, hi = self.cell.decoded, self.hi
        if values is None or (not self.is_part and values.shape == hi.shape and values.stride() == hi.stride()):
            return values
        offset = values.storage_offset() + hi.storage_offset() - self.cell.start
        return values.as_strided(hi.size(), hi.stride(), offset)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return the halves of all the values that it shares memory with, as they lie there: of a view, flat."""
        if not self.is_part:
            return self.hi, self.lo
        start = self.cell.start
        count = self.hi.untyped_storage().nbytes() // self.hi.element_size() - start
        return self.hi.as_strided((count,), (1,), start), self.lo.as_strided((count,), (1,), start)

    def widen(self, *, is_lent: bool = False) -> Tensor:
        """Have the values lie in FP32, for all that shares memory with it alike, and return them."""
        cell = self.cell
        if cell.decoded is None:
            with torch.inference_mode(self.is_inference()):  # memory that outlives the mode it is made in
                cell.decoded, cell.is_lent = decoded(*self.whole()), is_lent
        return self.value()

    def lend(self) -> Tensor:
        """Return the values in memory of their own: what is written there until the next cast or step is not lost.

        While an optimizer steps, which lets its memory go then, it is a copy.
        """
        if self.cell.decoded is None or self.cell.is_lent:
            return self.widen(is_lent=True).detach()
        return self.value().clone()

    def store_lent(self) -> None:
        """Store in halves again what lies in FP32 for a reader of addresses."""
        cell, hi, lo = self.cell, self.hi, self.lo
        if cell.is_lent and (values := cell.decoded) is not None:
            cell.decoded, cell.is_lent = None, False
            size, stride = values.size(), values.stride()
            store_in(values, hi.as_strided(size, stride, cell.start), lo.as_strided(size, stride, cell.start))

    def value(self) -> Tensor:
        """Return the FP32 values, a plain tensor: a new one, or the one in which they lie for now."""
        values = self.decoded
        return decoded(self.hi, self.lo) if values is None else values

    def assign(self, value: Tensor) -> None:
        """Take other FP32 values, of a shape that broadcasts to its own; beyond FP16's range they become infinite."""
        if (values := self.decoded) is not None:
            values.copy_(value)
            return
        value = value.to(self.hi.device, torch.float32)
        store_in(value if value.shape == self.hi.shape else value.expand_as(self.hi), self.hi, self.lo)

    def low(self, dtype: torch.dtype) -> Tensor:
        """Return the values in a dtype, connected for gradients: of the high half's dtype that, as a cast does.

        A gradient of 16 bits then goes to a leaf as it is, where ``grad_dtype`` lets it; that of a cast is widened.
        """
        if self.cell.decoded is None and dtype is self.hi.dtype:
            found: Tensor = _LAZY_CLONE(self)
            return found
        return self.to(dtype)

    def _view(self, hi: Tensor, lo: Any) -> Halves:
        if torch.is_inference_mode_enabled() and not self.is_inference():  # a view is what its base is
            with torch.inference_mode(False):
                return self._part(hi, lo)
        return self._part(hi, lo)

    def _part(self, hi: Tensor, lo: Any) -> Halves:
        made: Halves = type(self)(hi, lo)
        made.cell, made.is_part, made.path = self.cell, True, self.path
        return made

    def _seen(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a view of it: what an operation makes of both halves."""
        hi, lo = func(self.hi, *args, **kwargs), func(self.lo, *args, **kwargs)
        return self._view(hi, lo) if isinstance(hi, Tensor) else type(hi)(map(self._view, hi, lo))

    def _copied(self, hi: Tensor, lo: Tensor) -> Halves:
        """Return a tensor of copies of its halves, which lie elsewhere or in another order."""
        made: Halves = type(self)(hi, lo)
        made.path = self.path
        return made

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
        made: Halves = Halves(inner["hi"], inner["lo"])
        made.cell.decoded, made.path = inner.get("decoded"), name
        return made

    # Python's own ways to read, copy and replace it: what comes out is plain ------------------------------------

    def _plain(self) -> Tensor:
        value = self.detach().clone()
        return nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __format__(self, spec: str) -> str:
        return format(self._plain().detach(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = memo[id(self)] = self._plain().requires_grad_(self.requires_grad)
            if not isinstance(self, nn.Parameter):
                made.__dict__ = copy.deepcopy(_own(self), memo)
        found: Tensor = memo[id(self)]
        return found

    def __copy__(self) -> Tensor:
        made = self.data
        return nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = self._plain()
        vars(made).update(_own(self))
        return made.__reduce_ex__(protocol)

    def numpy(self, **kwargs: Any) -> Any:
        """Return the values as an array of NumPy's: a copy, which therefore cannot be written."""
        found = self.detach().clone().numpy(**kwargs) if not self.requires_grad or kwargs.get("force") else None
        if found is None:
            return torch.empty(0, requires_grad=True).numpy()  # which torch refuses
        found.flags.writeable = False
        return found

    def tolist(self) -> Any:
        """Return the values as numbers."""
        return self.detach().clone().tolist()

    def data_ptr(self) -> int:
        """Return where FP32 values lie: in memory of their own, from here to the next cast or step.

        Some readers of addresses are kernels, which read and write there; to others they are keys.
        """
        return self.widen(is_lent=True).data_ptr()

    def storage(self) -> Any:
        """Return the memory that :meth:`data_ptr` lends, as safetensors asks for it."""
        found: Any = self.widen(is_lent=True)
        return found.storage()

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise no_memory(self.path, "DLPack")

    def share_memory_(self) -> Any:
        """Move both halves to memory that processes share."""
        each: Any
        for each in (self.hi, self.lo, *([] if self.cell.decoded is None else [self.cell.decoded])):
            each.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the halves lie in memory that processes share."""
        high: Any = self.hi
        return bool(high.is_shared())

    @property
    def data(self) -> Any:
        """The same memory without autograd; or other values, as for any tensor, and wherever these lie."""
        return self._seen(_same)

    @data.setter
    def data(self, value: Tensor) -> None:
        alike = value.shape == self.shape and value.stride() == self.stride() and value.device == self.device
        if alike and isinstance(value, Halves) and value.hi.dtype == self.hi.dtype:
            self.hi, self.lo, self.cell, self.is_part = value.hi, value.lo, value.cell, _lies_within(value)
        elif alike and type(value) in (Tensor, nn.Parameter) and value.dtype == torch.float32:
            if not (lies_alone(self.hi) and lies_alone(self.lo)):  # a program keeps what param.data was
                self.hi, self.lo = (torch.empty_like(value, dtype=each.dtype) for each in (self.hi, self.lo))
            # It lies where the other lies.
            self.cell, self.is_part = Cell(self.hi.storage_offset(), value.detach()), False
        else:
            become(self, value.detach())


def _same(half: Tensor) -> Tensor:
    return half.detach()


def _lies_within(tensor: Halves) -> bool:
    """Whether a tensor is not all of what its values are a part of."""
    values = tensor.cell.decoded
    return tensor.is_part and (values is None or values.shape != tensor.shape)


def _own(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that a program has given a tensor."""
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
def _written(func: OpOverload[..., Any]) -> tuple[tuple[int, str], ...]:
    """Return the places and names of the arguments that an operation writes."""
    arguments = enumerate(func._schema.arguments)
    if writes_first(func):
        return ((0, func._schema.arguments[0].name),)
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def _note_read(weight: Halves) -> None:
    if torch.is_grad_enabled():
        weight.cell.uses[1] += 1


def _as_view(func: Any, args: Any, kwargs: Any) -> Any:
    weight = args[0]
    if not isinstance(weight, Halves):
        return _as_any(func, args, kwargs)
    return weight._seen(func, *args[1:], **kwargs)


def _as_retyped(func: Any, args: Any, kwargs: Any) -> Any:
    """Give a view of other bits: the values lie in FP32 from here on, since it may be written."""
    weight = args[0]
    _note_read(weight)
    weight.widen()
    weight.cell.is_lent = False
    return func(weight.value(), *args[1:], **kwargs)


def _as_reshaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse to give a tensor another shape, or another memory, in place.

    Raises:
        UnsupportedError: Always.
    """
    name = next((each.path for each in args if isinstance(each, Halves)), "")
    raise UnsupportedError(
        f"{f'the parameter {name}' if name else 'a parameter'} cannot take another shape in place",
        where=str(func),
        why="it is stored in two halves of 16 bits, which its views share",
        write=f"param.data = …, of any shape; or {both('fp32_param=' + exact(name or '…'))}, which stores it plainly",
    )


def _as_like(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].hi, *args[1:], **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})


def _as_moved(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy elsewhere, or in another order, as halves; or cast."""
    weight, dtype = args[0], kwargs.get("dtype")
    if weight.cell.decoded is None and dtype in (None, torch.float32):
        _note_read(weight)
        others = {name: value for name, value in kwargs.items() if name != "dtype"}
        return weight._copied(func(weight.hi, **others), func(weight.lo, **others))
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
    hi, lo = (each.index_select(0, rows) for each in (weight.hi, weight.lo))
    return decoded(hi, lo).view(*indices.shape, *weight.shape[1:])


def _as_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Write other values, which are not decoded first."""
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
    """Carry out what torch composes of others: in inference mode it comes whole."""
    return func.decompose(*args, **kwargs)


def _as_unknown(func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse an operation that may write what its schema does not say.

    Raises:
        UnsupportedError: Always.
    """
    found = [each for each in tensors((args, kwargs)) if isinstance(each, Halves)]
    raise no_memory(found[0].path if found else "", str(func))


def _as_wide(values: list[Any]) -> list[Any] | None:
    """Return a list with FP32 tensors in the places of halves that lie there; ``None`` where some lie otherwise."""
    wides = [each.cell.decoded if isinstance(each, Halves) else each for each in values]
    halves = [each for each in values if isinstance(each, Halves)]
    return None if any(map(is_, wides, repeat(None))) or any(map(_IS_PART, halves)) else wides


def _in_lists(func: Any, args: Any, kwargs: Any) -> bool:
    """Carry out what an optimizer does to lists of parameters while they lie in FP32; False where that is not so.

    **Cost**: few calls of Python's whatever the length of the lists.
    """
    if torch.is_grad_enabled() or func._schema.returns:
        return False
    lists = {
        place: each for place, each in enumerate(args) if type(each) is list and each and isinstance(each[0], Tensor)
    }
    wides = {place: _as_wide(each) for place, each in lists.items()}
    if None in wides.values() or any(isinstance(each, Halves) for each in (*args, *kwargs.values())):
        return False
    func(*(wides.get(place, each) for place, each in enumerate(args)), **kwargs)
    for place, _ in _written(func):
        if place in lists:
            increment_version(lists[place])  # of plain ones beside halves, too: torch counts nothing below them
    return True


def _as_any(func: Any, args: Any, kwargs: Any, *, may_alias: bool = True) -> Any:
    """Read FP32 values, and write back what was written."""
    if args and type(args[0]) is list:
        if STEP.parts is not None and STEP.parts(func, args, kwargs):
            return None
        if _in_lists(func, args, kwargs):
            return None
    seen: dict[int, tuple[Halves, Tensor]] = {}

    def value(each: Halves) -> Tensor:
        if id(each) not in seen:
            _note_read(each)
            seen[id(each)] = each, each.value()
        return seen[id(each)][1]

    if _NESTED.isdisjoint(map(type, args)) and _NESTED.isdisjoint(map(type, kwargs.values())):
        given = [value(each) if isinstance(each, Halves) else each for each in args]
        named = {name: value(each) if isinstance(each, Halves) else each for name, each in kwargs.items()}
    else:
        given, named = mapped((args, kwargs), value, Halves)
    writes, kind = _written(func), next((each.device.type for each, _ in seen.values()), "cpu")
    if writes and may_alias and len({id(each.cell) for each, _ in seen.values()}) < len(seen):
        return _as_aliases(func, args, kwargs, [each for each, _ in seen.values()])
    dtype = None if writes else autocast_dtype(kind)
    if dtype is None:
        out = func(*given, **named)
    else:  # what torch composes in C++ casts inside, as it does for plain tensors
        with torch.autocast(kind, dtype):
            out = func(*given, **named)
    if not writes:
        return out
    if is_collective(func):
        out = ended(out)
    back: dict[int, Halves] = {}
    for place, name in writes:
        target = args[place] if place < len(args) else kwargs.get(name)
        many = isinstance(target, list | tuple)
        written = list(tensors(target))
        for each in [one for one in written if isinstance(one, Halves)]:
            values = seen[id(each)][1]
            back[id(values)] = each
            if each.cell.decoded is None:
                each.assign(values)
        if many and (counted := [each for each in written if not each.is_inference()]):
            increment_version(counted)
    if isinstance(out, Tensor):
        return back.get(id(out), out)
    return mapped(out, lambda each: back.get(id(each), each)) if back else out


def _as_aliases(func: Any, args: Any, kwargs: Any, weights: list[Halves]) -> Any:
    """Carry out what writes tensors of which some share memory: while it runs, their values lie in FP32."""
    here = {id(each.cell): each for each in weights if each.cell.decoded is None}
    for each in here.values():
        each.widen(is_lent=True)
    try:
        return _as_any(func, args, kwargs, may_alias=False)
    finally:
        for each in here.values():
            each.store_lent()


_CARRY_OUT: Final[Mapping[str, Callable[[Any, Any, Any], Any]]] = {
    "any": _as_any, "view": _as_view, "retyped": _as_retyped, "like": _as_like, "moved": _as_moved,
    "gather": _as_gather, "embedding": _as_embedding, "clone": _as_clone, "copy": _as_copy, "composite": _as_composite,
    "reshaped": _as_reshaped, "unknown": _as_unknown,
}  # fmt: skip


# Identity ---------------------------------------------------------------------------------------------------------


def become(tensor: Any, made: Tensor) -> None:
    """Let a tensor be another one, and stay the object that it is, with its hooks and what programs have noted on it.

    A gradient that a graph of before computes reaches it, too.

    Args:
        tensor: A parameter, or any tensor.
        made: What it becomes; not to be used any more.

    Raises:
        UnsupportedError: Something in C++ refers to the tensor; nothing was changed.
    """
    if isinstance(tensor, nn.Parameter) and not isinstance(made, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    own, gradient = _own(tensor), tensor.grad if tensor.is_leaf else None
    try:
        _SWAP(tensor, made)
    except RuntimeError as error:
        name = getattr(tensor, "path", "") or getattr(made, "path", "")
        raise UnsupportedError(
            f"the parameter {name or '…'} cannot be stored otherwise now",
            where=f"{type(tensor).__name__} → {type(made).__name__}",
            why="something in C++ refers to it, as what torch.profiler has recorded with record_shapes does",
            write="del what was recorded, first",
        ) from error
    tensor.__class__, made.__class__ = type(made), type(tensor)
    tensor.__dict__, made.__dict__ = {**vars(made), **own}, {}
    made.grad = None
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name, None)) is not None:  # an empty one, too: hooks that come later go there
            setattr(tensor, name, hooks)
    if gradient is not None and gradient.shape == tensor.shape:
        tensor.grad = gradient.to(tensor.dtype)
    if made.requires_grad and made.is_leaf:  # graphs of before know the other: it lives as long as they do
        hand_on = functools.partial(_hand_on, weakref.ref(tensor))
        made.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]


def _hand_on(to: Callable[[], Tensor | None], before: Tensor) -> None:
    """Give the gradient that a graph of before has computed to the tensor that it was computed for."""
    found, before.grad = before.grad, None
    if (tensor := to()) is not None and found is not None:
        found = found.to(tensor.dtype)
        tensor.grad = found if tensor.grad is None else tensor.grad + found


def in_halves(param: Tensor) -> Halves | None:
    """Return the halves of a parameter, of a DTensor this rank's; ``None`` where it is stored plainly, or for now is.

    Args:
        param: Any tensor.
    """
    here = local(param)
    if not isinstance(here, Halves):
        return None
    if here.cell.is_lent:
        here.store_lent()
    return here if here.cell.decoded is None else None


def halves_among(tensors: list[Tensor]) -> tuple[list[Halves], list[Tensor]]:
    """Tell the tensors of halves from the others, of DTensors this rank's; what is lent is stored again.

    **Cost**: loops of C's, few calls of Python's whatever their number.
    """
    here = locals_of(tensors)
    kinds = [*map(type, here)]
    others = {kind for kind in {*kinds} if not issubclass(kind, Halves)}
    are_others = [*map(others.__contains__, kinds)]
    found: list[Any] = [*compress(here, map(not_, are_others))]
    for each in compress(found, map(_IS_LENT, found)):
        each.store_lent()
    return found, [*compress(here, are_others)]


def _rebuilt(hi: Tensor, lo: Tensor, is_param: bool, requires_grad: bool, name: str) -> Tensor:
    get_ready(hi)
    made: Any = Halves(hi, lo)
    made.path = name
    return nn.Parameter(made, requires_grad) if is_param else made


def _shared(tensor: Any) -> Any:
    """Reduce a tensor for another process, which shares the halves."""
    if tensor.cell.decoded is not None:
        return tensor._plain().__reduce_ex__(2)
    is_param = isinstance(tensor, nn.Parameter)
    return _rebuilt, (tensor.hi, tensor.lo, is_param, tensor.requires_grad, tensor.path)


ForkingPickler.register(Halves, _shared)
