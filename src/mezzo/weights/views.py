"""How an optimizer sees FP32 while it steps: views in the places of low parameters, by its own hooks."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_not
from types import MethodType
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from mezzo.compiling import never_compiled
from mezzo.errors import MezzoError, StateError, UnsupportedError, raise_together, some_of
from mezzo.hooks import run_innermost
from mezzo.sharded import is_distributed, local, placed
from mezzo.step.gradients import Exchange, alike
from mezzo.tensors import LOW, described, dtype_name, foreach_mul, moved, tensors, versions
from mezzo.weights.halves import Halves, owner_of

#: Elements that are FP32 at a time, where a step goes in parts: on CPUs such as stay in a cache, elsewhere as many as
#: make few launches.
_PART: Final = {"cpu": 1 << 20}
_LARGE_PART: Final = 1 << 24
#: Elements of FP32 in 256 bytes, at multiples of which tensors begin.
_ALIGNED: Final = 64
#: Steps of torch's classes that treat each parameter by itself.
_SEPARABLE: Final = {
    inspect.unwrap(getattr(torch.optim, name).step)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
}  # fmt: skip

_GRADIENT: Final = attrgetter("grad")
_TRAINS: Final = attrgetter("requires_grad")

#: A list of parameters that an optimizer has, what stands in it as a rule, and what does meanwhile.
_Exchanged: TypeAlias = tuple[list[Any], list[Any], list[Any]]


@runtime_checkable
class ReadsHalves(Protocol):
    """An optimizer that reads and writes both halves of a weight itself, as mezzo's do."""

    def adopt(self, halves: Sequence[Halves]) -> None:
        """Find the low halves of its parameters there from now on."""

    def leave(self) -> None:
        """Be as it was built."""


def adopt(optimizer: Optimizer, halves: Sequence[Halves]) -> Callable[[], None]:
    """Let an optimizer update FP32 values of weights that are stored in halves.

    Args:
        optimizer: Any of torch's, or one that :class:`ReadsHalves`.
        halves: Own the values of its parameters, as far as these are low.

    Returns:
        What ends it.

    Raises:
        UnsupportedError: One that cannot see views: see :class:`Views`. Nothing was changed.
        StateError: It was adopted already.
    """
    if isinstance(optimizer, ReadsHalves):
        optimizer.adopt(halves)
        return optimizer.leave
    params = (param for each in halves for param in each if isinstance(param, nn.Parameter))
    if not any(owner_of(param, halves) is not None for param in params):  # O3, or a policy that stores FP32
        return lambda: None
    return Views(optimizer, halves).leave


def views_of(optimizer: Optimizer) -> Views | None:
    """Return what shows FP32 to an optimizer while it steps, if something does."""
    found: Views | None = vars(optimizer).get("_mezzo_views")
    return found


class Views:
    """Lets one optimizer of torch's see FP32 tensors in the places of low parameters while it steps, and only then.

    Before a step FP32 views of the weights, with FP32 gradients, take the parameters' places in ``param_groups`` and
    ``state``; after it they are stored in halves. Outside of a step both name the model's own parameters, so that
    schedulers, checkpoints and programs see what they see in torch. State is FP32 from the beginning, and stays so when
    it is loaded. Where torch's class treats each parameter by itself, the step goes in parts, so that few views have
    memory at a time. Optimizers that one wraps (SAM, Lookahead) see the same views.

    Args:
        optimizer: The optimizer.
        halves: Own the values of its parameters.

    Attributes:
        optimizer: The optimizer.
        multiplier: What gradients are multiplied by on their way, 0-d; ``None`` for 1. The parameters' own stay.
        found_inf: 0-d bool, for an optimizer whose kernels are told it: whether nothing is to be written.
        keeps_memory: Whether views keep their memory after the step: a captured graph finds them where they were.

    Raises:
        UnsupportedError: ``differentiable=True``, ``ZeroRedundancyOptimizer``, or one that keeps parameters of its own
            beside ``param_groups``, in something else than a list.
        StateError: It was adopted already.

    **Cost**: 14 bytes read or written a parameter before a step and 8 after it. Memory during the step: 8 bytes for
    each parameter of a part of 2²⁰ elements on CPUs and 2²⁴ on others; of optimizers that do not go in parts, of all.
    No host sync.
    """

    def __init__(self, optimizer: Optimizer, halves: Sequence[Halves]) -> None:
        raise_together(_refused(optimizer, halves))
        self.optimizer, self._halves = optimizer, list(halves)
        self.multiplier: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.keeps_memory = False
        self._views: dict[Tensor, nn.Parameter] = {}
        self._planned: tuple[Any, list[_Part]] = (None, [])
        self._open: _Part | None = None
        self._loading: list[_Exchanged] = []
        self._depth = 0
        self._undo: list[Callable[[], None]] = []
        for each in _family(optimizer):
            # Adagrad's is there already. Who reads halves keeps its own tensors, which its kernels write.
            for key, state in () if isinstance(each, ReadsHalves) else each.state.items():
                if isinstance(key, Tensor) and owner_of(key, halves) is not None and isinstance(state, dict):
                    state.update({name: widened(value) for name, value in state.items()})
            self._hook(each)
        vars(optimizer)["_mezzo_views"] = self
        self._undo.append(lambda: vars(optimizer).pop("_mezzo_views", None))

    def _hook(self, optimizer: Optimizer) -> None:
        """Hook one optimizer: this one, or one that it wraps."""
        pre = optimizer.register_step_pre_hook(self._before)
        post = optimizer.register_step_post_hook(self._after)
        loading = optimizer.register_load_state_dict_pre_hook(self._before_loading)
        loaded = optimizer.register_load_state_dict_post_hook(self._end_loading)
        self._undo += [handle.remove for handle in (pre, post, loading, loaded)]
        plain_step, plain_load = optimizer.step, optimizer.load_state_dict

        # torch has no hook for a step, or a load, that raises. Methods: schedulers bind the one of the step anew.
        @functools.wraps(plain_step)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            is_outermost = self._depth == 0
            run_innermost(optimizer, pre, post)  # hooks of programs see the model's parameters, before and after
            try:
                return plain_step(*args, **kwargs)
            finally:
                if is_outermost:
                    self._depth = 0
                    self._close()

        @functools.wraps(plain_load)
        def load_state_dict(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return plain_load(*args, **kwargs)
            finally:
                self._end_loading()

        for name, value in (("step", step), ("load_state_dict", load_state_dict)):
            method, before = MethodType(value, optimizer), vars(optimizer).get(name)  # as a program has bound it
            setattr(optimizer, name, method)

            def put_back(name: str = name, method: MethodType = method, before: Any = before) -> None:
                if vars(optimizer).get(name) is method:
                    delattr(optimizer, name)
                    if before is not None:
                        setattr(optimizer, name, before)

            self._undo.append(put_back)

    def leave(self) -> None:
        """Leave the optimizer as it was built, over the model's parameters, with its state."""
        while self._undo:
            self._undo.pop()()

    @property
    def parts(self) -> list[Any]:
        """What was FP32 one after the other in the last step: whoever holds these holds the views' memory."""
        return self._planned[1]

    @property
    def is_open(self) -> bool:
        """Whether the views stand in the places of parameters now."""
        return self._open is not None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the views to a program's own code, and store what it has written to them."""
        if self._open is not None:
            raise StateError("amp.fp32(optimizer) inside of itself, or of a step", write="one block")
        self._depth += 1
        try:
            (part,) = self._plan(goes_in_parts=False)
            self._take(part)
            yield
        finally:
            self._close()
            self._depth -= 1

    # Around a step ----------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._depth > 1:  # a class whose step calls that of another, or a block of shown()
            return None
        step = inspect.unwrap(type(optimizer).step)
        is_separable = step in _SEPARABLE and len(_family(self.optimizer)) == 1
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure):
            if is_separable:  # which evaluates it once, at its beginning
                with torch.enable_grad():
                    loss = closure()
                closure = _Returns(loss)
            else:
                closure = self._around(closure)
            args, kwargs = (
                ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": closure})
            )
        parts = self._plan(goes_in_parts=is_separable)
        for part in parts[:-1]:
            self._take(part)
            with torch.no_grad():
                step(optimizer)
            self._close()
        self._take(parts[-1])
        return args, kwargs

    def _after(self, *_: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            self._close()

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            self._close()
            loss = closure()
            (part,) = self._plan(goes_in_parts=False)
            self._take(part)
            return loss

        return evaluate

    @never_compiled
    def _take(self, part: _Part) -> None:
        self._open = part
        part.take(self.multiplier, self.found_inf)
        _exchange(part.lists, 2)
        self._rekey(part.pairs)

    @never_compiled
    def _close(self) -> None:
        """Store what the views hold, and put the parameters back."""
        part, self._open = self._open, None
        if part is None:
            return
        _exchange(part.lists, 1)
        self._rekey((view, param) for param, view in part.pairs)
        if not part.store(self.found_inf, keeps_memory=self.keeps_memory):
            self._planned = (None, [])  # or memory is what another step has kept of this one

    def _rekey(self, pairs: Any) -> None:
        states = [each.state for each in _family(self.optimizer)]
        for old, new in pairs:
            for state in states:
                if (kept := state.pop(old, None)) is not None:
                    state[new] = kept

    # What is FP32 together ----------------------------------------------------------------------------------

    def _plan(self, *, goes_in_parts: bool) -> list[_Part]:
        """Return what is to be FP32 one after the other, as in the last step where nothing else has changed."""
        for halves in self._halves:
            halves.settle()
        lists, multiplies = _lists_of(self.optimizer, self._halves), self.multiplier is not None
        params = list({id(each): each for one in lists for each in one if isinstance(each, Tensor)}.values())
        gradients = list(map(_GRADIENT, params))
        kinds = [None if each is None else (each.dtype, each.layout) for each in gradients]
        key = (
            goes_in_parts, multiplies, kinds, list(map(_TRAINS, params)),
            [halves.num_replaced for halves in self._halves], [(id(one), list(map(id, one))) for one in lists],
        )  # fmt: skip
        if self._planned[0] != key:
            _refuse_alone(params, self._halves)
            self._planned = (
                key,
                [
                    _Part(members, lists, self._halves, self._views, multiplies=multiplies, lends=not goes_in_parts)
                    for members in _cut(params, goes_in_parts=goes_in_parts)
                ],
            )
        return self._planned[1]

    # Loading ------------------------------------------------------------------------------------------------

    def _before_loading(self, *_: Any) -> None:
        """Show views without memory: torch casts state to the dtype of what stands in ``param_groups``."""
        if self._loading:
            return
        lists = _lists_of(self.optimizer, self._halves)
        params = {id(each): each for one in lists for each in one if isinstance(each, Tensor)}.values()
        empty = {
            id(param): (param, nn.Parameter(torch.empty(0, device=param.device), param.requires_grad))
            for param in params
            if owner_of(param, self._halves) is not None
        }
        self._loading = [(one, [*one], [empty.get(id(each), (each, each))[1] for each in one]) for one in lists]
        self._loading_pairs = list(empty.values())
        _exchange(self._loading, 2)
        self._rekey(self._loading_pairs)

    def _end_loading(self, *_: Any) -> None:
        if self._loading:
            _exchange(self._loading, 1)
            self._rekey((view, param) for param, view in self._loading_pairs)
            self._loading, self._loading_pairs = [], []


class _Returns:
    """A closure that was evaluated."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __call__(self) -> Any:
        return self._loss


@dataclass(slots=True, eq=False)
class _Together:
    """Low parameters of one device whose views one launch writes.

    Attributes:
        params: The parameters.
        views: Their views.
        values: Where these lie; of DTensors this rank's parts.
        gradients: The views' gradients, each of its view's kind; none where the parameters have none that are dense.
        exchange: Writes values and gradients, and stores values.
        memory: Of them all, with its size in bytes, which it has during a step.
        is_sharded: Whether some of them are DTensors.
    """

    params: list[Tensor]
    views: list[nn.Parameter]
    values: list[Tensor]
    gradients: list[Tensor]
    exchange: Exchange
    memory: tuple[torch.UntypedStorage, int]
    is_sharded: bool

    @classmethod
    def of(
        cls, owned: list[tuple[Tensor, Halves]], views: dict[Tensor, nn.Parameter], *, have_gradients: bool
    ) -> _Together:
        """Make memory and views for parameters."""
        params, shards = [param for param, _ in owned], [local(param) for param, _ in owned]
        made = _tensors_like(shards * (2 if have_gradients else 1))
        values, gradients = made[: len(params)], made[len(params) :]
        exchange = Exchange(shards, [owner.rest_of(param) for param, owner in owned], values, gradients or None)
        for param, value in zip(params, values, strict=True):
            if param not in views or is_distributed(param):
                views[param] = nn.Parameter(_lying_as(value, param), param.requires_grad)
                views[param].__dict__ = vars(param)  # optimizers read notes there, and leave some
            else:
                views[param].grad, views[param].data = None, value
                views[param].requires_grad_(param.requires_grad)
        storage = made[0].untyped_storage()
        return cls(
            params=params,
            views=[views[param] for param in params],
            values=values,
            gradients=[_lying_as(each, param) for each, param in zip(gradients, params, strict=False)],
            exchange=exchange,
            memory=(storage, storage.nbytes()),
            is_sharded=any(map(is_distributed, params)),
        )

    def take(self, multiplier: Tensor | None, found_inf: Tensor | None) -> None:
        """Give the views memory, and write it."""
        storage, size = self.memory
        if storage.nbytes() != size:
            storage.resize_(size)
        raw: list[Any] | None = list(map(_GRADIENT, self.params)) if self.gradients else None
        if raw is not None and self.is_sharded:
            raw = [local(placed(gradient, param)) for gradient, param in zip(raw, self.params, strict=True)]
        self.exchange.widen(raw, multiplier, found_inf)
        deque(map(setattr, self.views, repeat("grad"), self.gradients), 0)

    def store(self, found_inf: Tensor | None, *, lends: bool, keeps_memory: bool) -> bool:
        """Store what the views hold, and let go of their memory.

        Args:
            found_inf: Whether nothing is stored.
            lends: Whether the memory may be of further use to what has seen it: then views leave it, and never return.
            keeps_memory: Whether it stays the views'.

        Returns:
            Whether the next step finds all as it was made for this one.
        """
        shown = list(map(local, self.views)) if self.is_sharded else self.views
        self.exchange.store(shown, found_inf)
        increment_version(self.params)
        if self.gradients and not all(map(is_not, map(_GRADIENT, self.views), repeat(None))):
            for param, view in zip(self.params, self.views, strict=True):
                if view.grad is None:  # SAM clears gradients before it asks its closure again
                    param.grad = None
        is_here = list(map(Tensor.data_ptr, shown)) == list(map(Tensor.data_ptr, self.values))
        if keeps_memory:
            return is_here
        if not lends:
            self.memory[0].resize_(0)
            return is_here
        nothing = torch.empty(0, dtype=torch.float32, device=self.memory[0].device)
        for view in self.views:
            view.grad = None
            if not is_distributed(view):
                view.data = nothing
        return False


class _Part:
    """Parameters that are FP32 at one time.

    Args:
        params: The parameters, FP32 ones among them.
        lists: All lists of parameters that the optimizer has.
        halves: Own the values of the low ones.
        views: The view of each parameter, the same object for life: optimizers key what they know by it.
        multiplies: Whether gradients are multiplied on their way.
        lends: Whether code that nobody knows sees the views, and may keep something of them.

    Attributes:
        pairs: The low parameters, each with its view.
        lists: The lists, what stands in them as a rule, and what does while this part is FP32.
    """

    def __init__(
        self,
        params: list[Tensor],
        lists: list[list[Any]],
        halves: Sequence[Halves],
        views: dict[Tensor, nn.Parameter],
        *,
        multiplies: bool,
        lends: bool,
    ) -> None:
        self._lends = lends
        self._together: list[_Together] = []
        self._given: list[tuple[Tensor, nn.Parameter]] = []  # whose gradients are FP32 already, or sparse
        self._wide = [p for p in params if p.dtype not in LOW and p.grad is not None] if multiplies else []
        kinds: dict[tuple[torch.device, bool], list[tuple[Tensor, Halves]]] = {}
        given: list[Tensor] = []
        for param in params:
            owner, gradient = owner_of(param, halves), param.grad
            if owner is None:
                continue
            is_plain = gradient is None or (gradient.dtype == torch.float32 and not multiplies)
            has_own = not is_plain and gradient is not None and gradient.layout == torch.strided
            kinds.setdefault((param.device, has_own), []).append((param, owner))
            if gradient is not None and not has_own:
                given.append(param)
        for (_, has_own), owned in kinds.items():
            self._together.append(_Together.of(owned, views, have_gradients=has_own))
        self.pairs = [
            (param, view) for each in self._together for param, view in zip(each.params, each.views, strict=True)
        ]
        self._given = [(param, views[param]) for param in given]
        self._params = [param for param, _ in self.pairs]
        self._versions: list[int] = []
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        shown, members = {id(param): view for param, view in self.pairs}, set(map(id, params))
        self.lists: list[_Exchanged] = [
            (one, [*one], [shown.get(id(each), each) for each in one if id(each) in members]) for one in lists
        ]
        for each in self._together:
            each.memory[0].resize_(0)

    @torch.no_grad()
    def take(self, multiplier: Tensor | None, found_inf: Tensor | None) -> None:
        """Write the views, and their gradients."""
        for each in self._together:
            each.take(multiplier, found_inf)
        for param, view in self._given:
            gradient = param.grad
            assert gradient is not None, "a part is made for the gradients that there are"
            view.grad = gradient.to(torch.float32)
            if multiplier is not None:
                view.grad = view.grad * multiplier
        self._before = []
        gradients = list(map(_GRADIENT, self._wide))
        for (device, _), places in alike(gradients).items():
            assert multiplier is not None, "a part is made for whether there is one"
            multiplied = foreach_mul([gradients[place] for place in places], moved(multiplier, device))
            for place, made in zip(places, multiplied, strict=True):
                self._wide[place].grad = made
                self._before.append((self._wide[place], gradients[place], made))
        self._versions = versions(self._params)

    @torch.no_grad()
    def store(self, found_inf: Tensor | None, *, keeps_memory: bool) -> bool:
        """Store what the views hold; false where the next step needs another part.

        Raises:
            StateError: The optimizer has written parameters themselves, which it keeps beside ``param_groups``.
        """
        written = versions(self._params) != self._versions
        for param, view in self._given:
            if view.grad is None:
                param.grad = None
            view.grad = None
        are_here = [each.store(found_inf, lends=self._lends, keeps_memory=keeps_memory) for each in self._together]
        for param, before, multiplied in self._before:
            if param.grad is multiplied:
                param.grad = before
        self._before = []
        if written:
            raise StateError(
                "an optimizer wrote parameters of the model, and not the FP32 tensors in param_groups",
                why="it keeps a list of its own, made when it was built",
                write="an optimizer that reads param_groups in each step, or mezzo.optim",
            )
        return all(are_here)


def _cut(params: list[Tensor], *, goes_in_parts: bool) -> list[list[Tensor]]:
    """Cut parameters into parts of bounded size; all in one where a step does not go in parts."""
    parts, room = [list[Tensor]()], 0
    for param in params if goes_in_parts else ():
        size = local(param).numel()
        if size > room and parts[-1]:
            parts.append([])
        if not parts[-1]:
            room = _PART.get(param.device.type, _LARGE_PART)
        parts[-1].append(param)
        room -= size
    return parts if goes_in_parts else [params]


def _tensors_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make FP32 tensors that lie as some of one device do, in one memory."""
    sizes = [tensor.numel() + -tensor.numel() % _ALIGNED for tensor in tensors]
    flat = torch.empty(max(sum(sizes), 1), dtype=torch.float32, device=tensors[0].device)
    made, start = list[Tensor](), 0
    for tensor, size in zip(tensors, sizes, strict=True):
        strides = torch.empty_like(tensor, device="meta").stride()  # without gaps
        made.append(flat.as_strided(tensor.shape, strides, start))
        start += size
    return made


def _lying_as(shard: Tensor, whole: Any) -> Any:
    """Return a tensor that is sharded over ranks as another one is, in the memory of this rank's shard."""
    if not is_distributed(whole):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


# Optimizers -----------------------------------------------------------------------------------------------


def _refused(optimizer: Optimizer, halves: Sequence[Halves]) -> Iterator[MezzoError]:
    """Yield what stands against showing views to an optimizer."""
    kind, memories = type(optimizer).__name__, set().union(*(each.memories() for each in halves))
    if any(views_of(each) is not None for each in _family(optimizer)):
        yield StateError("the optimizer was adopted already", where=kind, write="session.close() first")
    for each in _family(optimizer):
        name = type(each).__name__
        if any(group.get("differentiable") for group in each.param_groups):
            yield UnsupportedError(
                "differentiable=True over weights that are stored low",
                where=name,
                why="it differentiates through the update, of which FP32 views have no graph",
                write="differentiable=False; or a policy that stores weights in FP32, O1",
            )
        if name == "ZeroRedundancyOptimizer":
            yield UnsupportedError(
                "ZeroRedundancyOptimizer over weights that are stored low",
                why="it sends the model's parameters between ranks by itself, and no FP32 values",
                write="mezzo.fully_shard(model, policy), which shards parameters and states; or O1",
            )
        own = [
            key
            for key, value in vars(each).items()
            if key not in ("param_groups", "state", "defaults")
            for part in tensors(list(value) if isinstance(value, set) else value)
            if (not _is_exchanged(value, halves) if owner_of(part, halves) is not None else _lies_in(part, memories))
        ]
        if own:
            yield UnsupportedError(
                "the optimizer keeps parameters of its own beside param_groups",
                where=f"{name}: {some_of(list(dict.fromkeys(own)))}",
                why="while it steps FP32 tensors stand in param_groups, and it would update low ones",
                write="an optimizer that reads param_groups in each step, or mezzo.optim",
            )


def _refuse_alone(params: Sequence[Tensor], halves: Sequence[Halves]) -> None:
    """Refuse to train low weights of which there is no other half.

    Raises:
        StateError: With them.
    """
    alone = [p for p in params if p.dtype in LOW and p.grad is not None and not any(p in each for each in halves)]
    if alone:
        raise low_alone(alone)


def low_alone(params: Sequence[Tensor]) -> StateError:
    """Build the error of low weights that nothing keeps the FP32 values of."""
    return StateError(
        "low weights without a remainder would be trained",
        where=some_of([described(param) for param in params]),
        why=f"an update below half a unit in the last place of {dtype_name(params[0].dtype)} is lost",
        write="prepared = mezzo.prepare(model.float(), policy), which converts them, then prepared.adopt(optimizer); "
        "or MixedPrecision(model, optimizer, policy)",
    )


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that one has as its attributes, as SAM wraps one."""
    return [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]


def _family(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those that it wraps."""
    found = [optimizer]
    for each in found:
        found += [inner for inner in inner_optimizers(each) if inner not in found]
    return found


def _lists_of(optimizer: Optimizer, halves: Sequence[Halves]) -> list[list[Any]]:
    """Return the lists of parameters that an optimizer has: of its groups, and its own, as LBFGS has one."""
    found: dict[int, list[Any]] = {}
    for each in _family(optimizer):
        own = [value for value in vars(each).values() if _is_exchanged(value, halves)]
        found.update((id(params), params) for params in (*(group["params"] for group in each.param_groups), *own))
    return [*found.values()]


def _lies_in(tensor: Tensor, memories: Set[StorageWeakRef]) -> bool:
    """Whether a tensor has one of these memories, as ``parameter.data`` has that of its parameter."""
    here = local(tensor)
    return here.layout == torch.strided and StorageWeakRef(here.untyped_storage()) in memories  # type: ignore[no-untyped-call]


def _is_exchanged(value: Any, halves: Sequence[Halves]) -> bool:
    """Whether views stand in an optimizer's attribute while it steps: other lists of tensors are its own."""
    return type(value) is list and any(
        isinstance(each, Tensor) and owner_of(each, halves) is not None for each in value
    )


def _exchange(lists: Sequence[_Exchanged], place: int) -> None:
    """Let lists hold what stands in them as a rule (1), or meanwhile (2)."""
    for each in lists:
        each[0][:] = each[place]


def widened(value: Any) -> Any:
    """Return optimizer state in FP32, which is exact; LBFGS has lists of it."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW else value
    return list(map(widened, value)) if type(value) is list else value
