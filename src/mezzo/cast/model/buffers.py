"""What a program writes in 16 bits without an optimizer: buffers, which become FP32, and frozen weights."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.cast.notes import WATCHERS, during
from mezzo.compiling import compiled_inside, compiled_inside_alone, is_at_work
from mezzo.errors import message, some_of
from mezzo.policy.rules import both
from mezzo.tensors import CASTABLE, LOW, mark, tensors, tree_map_only
from mezzo.weights.halves import Halves

logger = logging.getLogger(__name__)

#: Functions that write what they are called with, and have no name that ends in one underscore.
_WRITES: Final = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__set__"})
#: Functions that write running statistics, wherever among their arguments, where one of these is true.
_NORMS: Final = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
_TRAINING: Final = ("training", "use_input_stats", "train")
#: What sums and averages are made with.
_ARITHMETIC: Final = frozenset(
    "add sub mul div truediv rsub radd rmul lerp addcmul addcdiv where maximum minimum clamp neg".split()
)
#: What gives the same numbers once more.
_SAME: Final = frozenset("to type_as type half bfloat16 float detach clone contiguous".split())


#: How many buffers a cure names.
_MOST: Final = 8
#: After how many regions in a row a frozen weight is taken for a teacher's.
_OFTEN: Final = 3
_VERSION: Final = attrgetter("_version")


class Buffers:
    """The persistent buffers that a model stores low until a forward pass writes them.

    A counter stops at 256 in BF16, and a sum beyond 65504 is infinite in FP16. So a buffer that is written is an FP32
    tensor from then on. While the first pass in training mode runs, each function of torch is looked at: a write in
    place goes to the FP32 tensor already, and of a buffer that is assigned anew the sums and averages that lead to it
    are made in FP32 as well. Later, and in compiled code, a comparison of versions after each pass finds what was first
    written in it; that one update was rounded.

    Args:
        found: Each buffer, the module that has it, and its path there.
        halves: Own their FP32 values.

    Attributes:
        written: The FP32 tensors that stand for some by now, each with the dtype that the buffer had.

    **Cost**: some 5 µs a function of torch in the first pass in training mode; 0.1 µs a buffer in each other.
    """

    def __init__(self, found: Iterable[tuple[Tensor, nn.Module, str]], halves: Halves) -> None:
        self._places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        self._paths: dict[Tensor, str] = {}
        for tensor, module, path in found:
            self._places.setdefault(tensor, []).append((module, path.rpartition(".")[2]))
            self._paths.setdefault(tensor, path)
        self._halves = halves
        self._all_places = {**self._places}
        self._unseen = set(self._places)  # of which no pass in training mode was watched
        self._marks: dict[Tensor, tuple[int, int]] = {}
        self._watch: tuple[_FirstPass, tuple[int, nn.Module]] | None = None
        self._end = ExitStack()
        self._inside = 0
        self.written: dict[Tensor, torch.dtype] = {}
        self.note()

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> Any:
        return Buffers, ((), Halves())

    def owners(self) -> set[nn.Module]:
        """Return the modules that have them."""
        return {module for places in self._places.values() for module, _ in places}

    # A pass -----------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Take what is there as what no pass has written: one begins."""
        if self._watch is None:
            self._marks = {tensor: mark(tensor) for tensor in self._places if self._stands(tensor)}

    @compiled_inside  # where torch.compile is left alone, whether it is at work cannot be asked
    def enter(self, module: nn.Module, _: Any) -> None:
        """Begin to watch a pass, where there is something to find out: a forward pre-hook."""
        if not torch.compiler.is_compiling():
            self._begin(module, is_compiled=is_at_work())

    @compiled_inside_alone
    def _begin(self, module: nn.Module, *, is_compiled: bool) -> None:
        key = threading.get_ident(), module
        if self._watch is not None:
            self._inside += self._watch[1] == key
            return
        self.note()
        # What is compiled from here on would be compiled once more without the mode; and torch.func.functional_call may
        # have put other tensors there.
        if not is_compiled and module.training and self._unseen and len(self._marks) == len(self._places):
            watch = _FirstPass(self._marks, self._widen, self._halves.read)
            self._watch = watch, key
            self._end = ExitStack()
            self._end.enter_context(watch)

    @compiled_inside_alone
    def exit(self, module: nn.Module, _: Any, output: Any) -> None:
        """Keep in FP32 what the pass has written: a forward hook."""
        if torch.compiler.is_compiling():
            return
        watch = None
        if self._watch is not None:
            if self._watch[1] != (threading.get_ident(), module):
                return
            if self._inside:
                self._inside -= 1
                return
            watch, self._watch = self._watch[0], None
            self._end.close()
            inside = set(module.modules())
            self._unseen = {t for t in self._unseen if not any(owner in inside for owner, _ in self._places[t])}
        self.settle(watch)

    def settle(self, watch: _FirstPass | None = None) -> None:
        """Keep in FP32 what was written since :meth:`note`.

        Args:
            watch: What has watched the pass, if it was the first one.
        """
        if self._watch is not None:
            return
        found = [t for t, before in self._marks.items() if mark(t) != before or not self._stands(t)]
        names = list[str]()
        for tensor in found:
            if self._stands(tensor):
                self._widen(tensor)
            elif not self._is_written(tensor) and not self._take(tensor, watch):
                self._halves.forget(tensor)
                continue
            names.append(self._paths[tensor])
        if names:
            text = message(
                "buffers that a forward pass writes are kept in FP32 from here on",
                where=some_of(names),
                why="in 16 bits counters and sums stand still: BF16 counts to 256",
                write=f"{both('fp32_param=' + '+'.join(names[:_MOST]))}: says so beforehand",
            )
            logger.warning("%s", text)
        for tensor in found:
            del self._marks[tensor], self._places[tensor]
            self._unseen.discard(tensor)

    def remove(self) -> None:
        """Store what was written in the dtype that it had before it was stored low."""
        for module, name in (place for places in self._all_places.values() for place in places):
            now = module._buffers.get(name)
            if now in self.written:
                module._buffers[name] = now.to(self.written[now])

    def _stands(self, tensor: Tensor) -> bool:
        return all(module._buffers.get(name) is tensor for module, name in self._places[tensor])

    def _is_written(self, tensor: Tensor) -> bool:
        return any(module._buffers.get(name) in self.written for module, name in self._places[tensor])

    def _widen(self, tensor: Tensor) -> Tensor:
        """Put an FP32 tensor in the place of a buffer: another one, since autograd may have saved the low one."""
        wide = self._halves.read(tensor)
        self._put(tensor, wide)
        return wide

    def _take(self, tensor: Tensor, watch: _FirstPass | None) -> bool:
        """Go over to what a pass has assigned in the place of a buffer, if it was made of that.

        A table that is built anew, of another length for instance, is what the program makes it.
        """
        for module, name in self._places[tensor]:
            now = module._buffers.get(name)
            if now is None or now is tensor or now.dtype not in CASTABLE or now.shape != tensor.shape:
                continue
            if watch is None or watch.descends(now):
                twin = None if watch is None else watch.twins.get(now)
                self._put(tensor, now.detach().float() if twin is None else twin)
                return True
        return False

    def _put(self, tensor: Tensor, wide: Any) -> None:
        for module, name in self._places[tensor]:
            module._buffers[name] = wide
        self.written[wide] = self._halves.dtype_before(tensor)
        self._halves.forget(tensor)


class Frozen:
    """Frozen weights that are stored low: one that is written before each pass is a teacher's, and stands still.

    Its updates are smaller than half a spacing, most of them, and round away. That is said once.

    Args:
        named: The weights, by their paths.

    **Cost**: 0.03 µs a weight in each region.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._paths, self._weights = [*named], [*named.values()]
        self._versions = [*map(_VERSION, self._weights)]
        self._in_a_row = 0

    def look(self) -> None:
        """Compare with the last time."""
        now = [*map(_VERSION, self._weights)]
        if now == self._versions:
            self._in_a_row = 0
            return
        written = [path for path, a, b in zip(self._paths, self._versions, now, strict=True) if a != b]
        self._versions, self._in_a_row = now, self._in_a_row + 1
        if self._in_a_row == _OFTEN:
            owners = [path.split(".")[:-1] for path in written]
            same = itertools.takewhile(lambda names: len({*names}) == 1, zip(*owners, strict=False))
            part = ".".join(names[0] for names in same)
            text = message(
                "frozen weights are written in 16 bits again and again",
                where=some_of(written),
                why="an average of other weights moves by less than half a spacing, and stands still",
                write=f"{both(f'fp32_module={part}')}: the part that they are of" if part else "",
            )
            logger.warning("%s", text)
            self._weights = self._versions = []


class _FirstPass(TorchFunctionMode):
    """Look at each function of a pass that writes a low buffer, or reads one to assign it anew.

    What is written goes to an FP32 tensor, and rounded into the low memory as well, for what a program holds of that.

    Args:
        buffers: The low ones.
        widen: Puts an FP32 tensor in the place of one, and returns it.
        value: Returns the FP32 value of one.

    Attributes:
        twins: By what arithmetic has made of low buffers: the same made of their FP32 values.
    """

    def __init__(
        self, buffers: Iterable[Tensor], widen: Callable[[Tensor], Tensor], value: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self._low = {_memory(tensor): tensor for tensor in buffers}
        self._wide: dict[int, Tensor] = {}  # what stands there now, by the memory of the low one
        self._low_of: dict[int, int] = {}  # the memory of the low one, by its
        self._widen, self._value = widen, value
        self._shapes = {tensor.shape for tensor in self._low.values()}
        self._descends: Any = WeakTensorKeyDictionary()  # what was made of a low buffer, whatever made it
        self.twins: Any = WeakTensorKeyDictionary()

    @compiled_inside_alone
    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        targets = args[:1] if is_write else (args, kwargs) if _trains(name, args, kwargs) else kwargs.get("out")
        found = {_memory(each) for each in tensors(targets)}
        written = (self._low.keys() & found) | {self._low_of[memory] for memory in self._low_of.keys() & found}
        for memory in written - self._wide.keys():
            self._wide[memory] = _noted(func, self._widen, self._low[memory])
            self._low_of[_memory(self._wide[memory])] = memory
        if written:
            args, kwargs = tree_map_only(Tensor, self._as_wide, (args, kwargs))
        out = func(*args, **kwargs)
        for memory in written:
            _noted(func, self._low[memory].data.copy_, self._wide[memory])
        if not is_write:
            _noted(func, self._follow, func, name.strip("_"), args, kwargs, out)
        return out

    def descends(self, tensor: Tensor) -> bool:
        """Whether a tensor was made of a low buffer."""
        return tensor in self._descends

    def _as_wide(self, each: Tensor) -> Tensor:
        """Return an operand of a write in FP32; a program may have cast it to what the buffer was."""
        memory = _memory(each)
        if memory in self._wide and each.dtype in LOW:
            wide, low = self._wide[memory], self._low[memory]
            if each.shape == low.shape and each.stride() == low.stride():
                return wide
            return wide.as_strided(each.shape, each.stride(), each.storage_offset() - low.storage_offset())
        twin: Tensor = self.twins.get(each, each)
        return twin.float() if twin.dtype in LOW else twin

    @torch.no_grad()
    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Note what is made of a low buffer, and make the twin of what arithmetic makes of one."""
        given = [*tensors((args, kwargs))]
        if not any(each in self._descends or _memory(each) in self._low for each in given):
            return
        for each in tensors(out):
            self._descends[each] = True
        if not isinstance(out, Tensor) or out.dtype not in CASTABLE or out.shape not in self._shapes:
            return
        known = {id(each): twin for each in given if (twin := self._twin(each)) is not None}
        if not known:
            return
        if name in _SAME:
            self.twins[out] = next(iter(known.values()))
        elif name in _ARITHMETIC:

            def wide(each: Tensor) -> Tensor:
                return known[id(each)] if id(each) in known else each.float() if each.dtype in LOW else each

            args, kwargs = tree_map_only(Tensor, wide, (args, kwargs))
            self.twins[out] = func(*args, **kwargs)

    def _twin(self, each: Tensor) -> Tensor | None:
        memory = _memory(each)
        if memory in self._low and self._low[memory].shape == each.shape and each.dtype in LOW:
            return self._wide[memory] if memory in self._wide else self._value(self._low[memory])
        twin: Tensor | None = self.twins.get(each)
        return twin


def _noted(about: Any, run: Callable[..., Any], *args: Any) -> Any:
    """Run what is done beside the program's own call, under a note."""
    return during("buffer", about, run, *args) if WATCHERS else run(*args)


def _trains(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call normalises with the statistics of its input, and writes running ones."""
    return name in _NORMS and (any(each is True for each in args) or any(kwargs.get(word) for word in _TRAINING))


def _memory(tensor: Tensor) -> int:
    """Name a tensor's memory; 0 for what has none of its own, as what ``torch.func`` wraps."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # torch says NotImplementedError, which is one
        return 0
