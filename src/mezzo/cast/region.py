"""The autocast region: ``torch.autocast`` plus the policy's differences from it.

``torch.autocast`` does the ordinary casting. Where the policy wants something else on this device (the
portable lists on a CPU, a user's rule, emulated arithmetic), a ``TorchFunctionMode`` handles just those
functions; with no difference there is no mode, and no Python runs per op.
How CUDA's products accumulate is set for a region, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from typing import Any, Final, Literal, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from mezzo.cast.casts import WeightCasts
from mezzo.cast.device import FAMILIES, KNOWN_DEVICE_TYPES, default_device_types
from mezzo.cast.differences import Differences, ParamFacts, find_differences, open_function
from mezzo.cast.emulate import without_autocast
from mezzo.cast.mode import (
    OPENED_BACKWARD,
    ModeTable,
    PolicyMode,
    acting,
    acting_modes,
    casts_inside,
    shadowed,
    silence,
    unsilence,
)
from mezzo.compiling import begin_plainly, compiled_inside_alone, constant_in_graphs, end_plainly, is_exporting
from mezzo.dispatch import function_modes, num_function_modes
from mezzo.errors import MezzoError, PolicyError, UnsupportedError, some_of
from mezzo.policy import Policy, PolicyLike
from mezzo.policy.ops import OPS
from mezzo.policy.rules import both
from mezzo.tensors import LOW, dtype_name

# The precision in which CUDA's GEMMs accumulate: flags of torch's, set for a region and put back after it.


@contextlib.contextmanager
def accumulation(policy: Policy, per_device: tuple[Differences, ...]) -> Iterator[None]:
    """Forbid reduced-precision accumulation inside CUDA's GEMMs, but for a policy of torch's own lists.

    ``lists=device`` is torch's own behaviour on each device, with what its flags say. These are process-wide; they are
    put back on exit, with what the user said of split-k.

    Args:
        policy: What is asked for.
        per_device: Of the devices that are covered: without CUDA among them nothing is touched.

    Raises:
        UnsupportedError: Entered inside a compiled function, which cannot set them, while they allow it.
    """
    if not _sets_reductions(policy, per_device):
        yield
        return
    if torch.compiler.is_compiling():
        _require_off(str(policy))
        yield
        return
    before = reductions()
    set_reductions([(False, split_k) for _, split_k in before])
    try:
        yield
    finally:
        set_reductions(before)


def _sets_reductions(policy: Policy, per_device: tuple[Differences, ...]) -> bool:
    covered = any(differences.device_type == "cuda" for differences in per_device)
    return covered and policy.lists != "device" and torch.cuda.is_available()


@constant_in_graphs
def _require_off(policy: str) -> bool:
    """Refuse to be compiled where GEMMs may accumulate in reduced precision; Dynamo itself guards that it stays so."""
    dtypes = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    allowed = dict(zip(dtypes, reductions(), strict=True))
    dtype = Policy.parse(policy).dtype
    if dtype in allowed and allowed[dtype][0]:
        flag = f"torch.backends.cuda.matmul.allow_{dtypes[dtype]}_reduced_precision_reduction"
        raise UnsupportedError(
            "a compiled region cannot keep CUDA's products from summing in low precision",
            where=f"{flag} is True",
            why="compiled code would set it to False only when all its GEMMs have run",
            write=f"{flag} = False  # before the function is called\n"
            "or the region around the compiled function, where it sets that itself\n"
            f"or torch's own lists, which leave it to torch: {both('lists=device')}",
        )
    return True


def reductions() -> list[tuple[bool, bool]]:
    """Return for FP16 and BF16 whether GEMMs may accumulate in reduced precision, and whether they may split k."""
    flags: Any = torch.backends.cuda.matmul
    return [
        (flags.allow_fp16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction_split_k),
        (flags.allow_bf16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction_split_k),
    ]


def set_reductions(pairs: list[tuple[bool, bool]]) -> None:
    """Set what :func:`reductions` returns."""
    flags: Any = torch.backends.cuda.matmul
    flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction = pairs


#: As :data:`OPENED_BACKWARD`, for ``torch.autograd.grad``.
_OPENED_GRAD: Final = open_function(cast(types.FunctionType, torch.autograd.grad))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """All that a region is.

    Attributes:
        policy: The policy that is carried out.
        per_device: What it changes on each device that is covered.
        caches: Whether torch's own autocast keeps casts of weights; as it is set around the region where it is None.
    """

    policy: Policy
    per_device: tuple[Differences, ...]
    caches: bool | None = None

    @classmethod
    def inside(cls, policy: Policy, module: str, facts: ParamFacts, device_types: tuple[str, ...]) -> Region:
        """Make the region of one module of a prepared model.

        Args:
            policy: The model's policy.
            module: Path of the module, for rules that name one.
            facts: What is known of the model's parameters.
            device_types: The devices to cover.
        """
        per_device = tuple([find_differences(policy, device_type, module, facts) for device_type in device_types])
        return cls(policy=policy, per_device=per_device)

    @property
    def device_types(self) -> tuple[str, ...]:
        """The devices that are covered."""
        return tuple(differences.device_type for differences in self.per_device)

    @property
    def emulated(self) -> bool:
        """Whether any family of products computes in FP32 from rounded operands on any of the devices."""
        return any(differences.emulated for differences in self.per_device)

    @property
    def keys(self) -> tuple[str, ...]:
        """What :func:`acting_keys` is inside the region."""
        return tuple(differences.key for differences in self.per_device)

    @property
    def has_differences(self) -> bool:
        """Whether entering the region changes anything but ``torch.autocast``'s own state."""
        return any(differences.has_any for differences in self.per_device)

    @functools.cached_property
    def states(self) -> list[tuple[str, bool, torch.dtype | None]]:
        """What torch makes of its own autocast for each device: whether it is on, and its dtype, ``None`` if off."""
        states = []
        for differences in self.per_device:
            with differences.native():
                is_on = torch.is_autocast_enabled(differences.device_type)
                states.append(
                    (
                        differences.device_type,
                        is_on,
                        torch.get_autocast_dtype(differences.device_type) if is_on else None,
                    )
                )
        return states

    @functools.cached_property
    def table(self) -> ModeTable | None:
        """What its mode looks functions up in; ``None`` where it has none."""
        return ModeTable.of(self.per_device) if self.has_differences else None

    @functools.cached_property
    def sets_reductions(self) -> bool:
        """Whether it sets how CUDA's products accumulate."""
        return _sets_reductions(self.policy, self.per_device)


Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")


class RegionArgumentError(PolicyError, TypeError):
    """A region was given an argument that it does not take, or decorates an object that is no function."""


class autocast(ContextDecorator):  # noqa: N801 - the name torch.autocast has
    """Run ops in the precision that a policy says.

    A context manager and a decorator; re-entrant. A region inside another replaces it until it ends.

    Args:
        policy: A policy, its text, a dtype (O1 in it), or the path of a policy file.
        device_type: The device to cover; when omitted the current accelerator, and where there is none the CPU. The
            regions of :func:`mezzo.prepare` and :class:`MixedPrecision` cover the devices of their models.
        **torch_arguments: None. Those of ``torch.autocast`` are refused, with the call to write instead.

    Raises:
        PolicyError: The policy's text or file is wrong. As a TypeError, too: the arguments are ``torch.autocast``'s.
        UnsupportedError: The device cannot honour the policy; the error says what to write instead. On entering a
            region for CUDA inside a compiled function: torch's flag lets GEMMs of the policy's dtype accumulate
            in reduced precision (it does so until told otherwise), and the policy's lists are not torch's own.

    **Cost**: that of ``torch.autocast`` where the policy equals torch's own lists on this device; otherwise a
    function mode, and so Python for each torch function called (``benchmarks/engine.py`` measures it).

    Example:
        >>> import mezzo, torch
        >>> with mezzo.autocast("O1,dtype=bfloat16,emulate=true"):
        ...     y = torch.randn(4, 4) @ torch.randn(4, 4)
        >>> y.dtype
        torch.bfloat16
    """

    @compiled_inside_alone
    def __init__(self, policy: PolicyLike = "", device_type: str | None = None, **torch_arguments: NoReturn) -> None:
        if torch_arguments or (isinstance(policy, str) and policy.partition(":")[0] in KNOWN_DEVICE_TYPES):
            raise _torchs_signature(policy, device_type, torch_arguments)
        if isinstance(policy, Policy) and torch.compiler.is_compiling():
            # Which Dynamo reads field by field, and so guards: an equal policy compiles nothing. Numbers, which only
            # the loss scale has, would be symbols in a second graph, and no text.
            policy = policy.region_text()
        self.region: Region = _RESOLVED[_resolve(policy, device_type)]
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    @classmethod
    def of(cls, region: Region) -> autocast:
        """Return a context manager that enters a region."""
        context = cls.__new__(cls)
        context.region, context._entered = region, []
        return context

    @property
    def policy(self) -> Policy:
        """The policy that is carried out."""
        return self.region.policy

    @property
    def device_types(self) -> tuple[str, ...]:
        """The devices that are covered."""
        return self.region.device_types

    @property
    def emulated(self) -> bool:
        """Whether any family of products computes in FP32 from rounded operands on any of the devices."""
        return self.region.emulated

    @property
    def has_differences(self) -> bool:
        """Whether entering the region changes anything but ``torch.autocast``'s own state."""
        return self.region.has_differences

    def run_backward(self, tensor: Tensor, **kwargs: Any) -> None:
        """Run a backward pass whose activation checkpoints are recomputed under this region's differences.

        ``torch.utils.checkpoint`` restores torch's autocast by itself, but knows nothing of a function mode. One is
        therefore kept active inside ``torch.autograd.backward``. Where the policy autocasts it acts only while
        autocast is on, so in recomputation and not in the backward functions themselves.

        Args:
            tensor: What to differentiate.
            **kwargs: As ``torch.autograd.backward`` takes them.
        """
        self.differentiate(OPENED_BACKWARD, torch.autograd.backward, tensor, **kwargs)

    def run_grad(self, outputs: Tensor, inputs: list[Tensor], **kwargs: Any) -> tuple[Tensor, ...]:
        """Run ``torch.autograd.grad`` as :meth:`run_backward` runs a backward pass.

        Args:
            outputs: What to differentiate.
            inputs: By what.
            **kwargs: As ``torch.autograd.grad`` takes them.
        """
        return self.differentiate(_OPENED_GRAD, torch.autograd.grad, outputs, inputs, **kwargs)

    def differentiate(self, opened: Callable[..., T], plain: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return the result of a function that runs a backward pass, in what the pass runs in.

        Args:
            opened: Called where a mode is active: the function without torch's own check for modes.
            plain: Called otherwise.
            *args: For the function.
            **kwargs: For the function.
        """
        if _is_traced():
            with _backward(self.region) as differs:
                return (opened if differs else plain)(*args, **kwargs)
        inside = _BackwardIn(self.region)
        try:
            with inside as differs:
                return (opened if differs else plain)(*args, **kwargs)
        finally:
            if not inside.is_over:  # a signal came in `__enter__` or in `__exit__`, or before its first line
                inside.__exit__(None, None, None)

    def __call__(self, function: Function) -> Function:
        """Decorate a function: each call of it runs in the region.

        Raises:
            PolicyError: It cannot be called, and is a TypeError, as torch's is.
        """
        if not callable(function):
            raise RegionArgumentError(
                f"a {type(function).__name__} is no function, and a region decorates one",
                where="autocast(…)(…)",
                why="it cannot be called, so that nothing of it would ever run in the region",
                write="with autocast(…): y = model(x)",
            )
        return super().__call__(function)

    @compiled_inside_alone
    def __enter__(self) -> autocast:
        active = _active(self.region) if _is_traced() else _Inside(self.region)
        active.__enter__()
        self._entered.append(active)
        return self

    @compiled_inside_alone
    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)
        if isinstance(exception[1], RuntimeError) and not isinstance(exception[1], MezzoError):
            _say_what_torch_decided(exception[1], self.region)

    def _recreate_cm(self) -> autocast:
        """Return a region of its own for each call of a decorated function, so that threads do not share one."""
        return autocast.of(self.region)


def _torchs_signature(policy: Any, device_type: Any, keywords: dict[str, Any]) -> RegionArgumentError:
    """Return the error of arguments that are ``torch.autocast``'s, or no region's at all."""
    device = next((value for value in (policy, device_type) if isinstance(value, str) and value), "cuda")
    dtype = keywords.get("dtype", device_type)
    dtype = dtype if dtype in LOW else torch.bfloat16
    if foreign := [name for name in keywords if name not in ("dtype", "enabled", "cache_enabled")]:
        return RegionArgumentError(
            f"a region takes no {some_of(foreign)}",
            where="mezzo.autocast(…)",
            why="its arguments are a policy and a device type",
            write=f'mezzo.autocast("{dtype_name(dtype)}")',
        )
    return RegionArgumentError(
        "these are the arguments of torch.autocast",
        where="mezzo.autocast(…)",
        why="mezzo.autocast takes a policy first, and then a device type",
        write=f'mezzo.autocast("{dtype_name(dtype)}", "{device}");\n'
        f'or mezzo.compat.torch.autocast("{device}", dtype={dtype})',
    )


def _say_what_torch_decided(error: RuntimeError, region: Region) -> None:
    """Add to an error of torch's which op a rule would have cast, where a region without a mode left it to torch."""
    if region.has_differences or not region.policy.casts or region.policy.lists == "device":
        return
    for word in re.findall(r"[a-z]\w*", str(error).lower().replace("index put", "index_put"))[:8]:
        row = OPS.get(word.removesuffix("_"))
        if row is not None and row.portable != "native":
            covered = " and ".join(region.device_types)
            error.add_note(
                f"On {covered} {row.name} is left to torch, as in torch.amp; a rule decides: "
                f"{both(f'{row.portable}={row.name}')}"
            )
            return


def _is_traced() -> bool:
    """Whether torch writes down what runs now: then a region is entered in ways that it can follow."""
    if torch.compiler.is_compiling() or is_exporting():
        return True
    return num_function_modes() > 0 and not all(isinstance(mode, PolicyMode) for mode in function_modes())


class _Inside(contextlib.AbstractContextManager[None]):
    """What a region is made of, entered at once: what :func:`_active` does step by step."""

    __slots__ = ("_caches", "_mode", "_outer", "_plainly", "_reductions", "_region", "_states")

    def __init__(self, region: Region) -> None:
        self._region = region

    def __enter__(self) -> None:
        region = self._region
        states, table = region.states, region.table  # which may find that the device lacks something: first
        self._reductions = reductions() if region.sets_reductions else None
        if self._reductions is not None:
            set_reductions([(False, split_k) for _, split_k in self._reductions])
        self._caches = torch.is_autocast_cache_enabled()
        if region.caches is not None:
            torch.set_autocast_cache_enabled(region.caches)
        self._plainly = begin_plainly() if table is not None and table.autocasts else None
        self._states = []
        for device_type, is_on, dtype in states:
            self._states.append(
                (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            )
            torch.set_autocast_enabled(device_type, is_on)
            if dtype is not None:
                torch.set_autocast_dtype(device_type, dtype)
        torch.autocast_increment_nesting()
        self._outer: list[tuple[PolicyMode, int]] = []
        silence(self._outer)
        self._mode = None
        if table is not None:
            self._mode = PolicyMode(table, casts_inside(self._outer))
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*exception)  # type: ignore[no-untyped-call]
        unsilence(self._outer)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        for device_type, is_on, dtype in self._states:
            torch.set_autocast_enabled(device_type, is_on)
            torch.set_autocast_dtype(device_type, dtype)
        if self._plainly is not None:
            end_plainly(self._plainly)
        torch.set_autocast_cache_enabled(self._caches)
        if self._reductions is not None:
            set_reductions(self._reductions)


class _BackwardIn(contextlib.AbstractContextManager[bool]):
    """What a backward pass runs in, entered at once: what :func:`_backward` does step by step.

    ``__exit__`` may be called again, after a signal that came in it or in ``__enter__``: it undoes what is left.

    Attributes:
        is_over: Whether all is undone.
    """

    __slots__ = ("_mode", "_off", "_outer", "_reductions", "_region", "is_over")

    def __init__(self, region: Region) -> None:
        self._region, self.is_over = region, False
        self._mode: PolicyMode | None = None
        self._off: list[str] = []
        self._outer: list[tuple[PolicyMode, int]] = []
        self._reductions: Any = None

    def __enter__(self) -> bool:
        region = self._region
        self._reductions = reductions() if region.sets_reductions else None
        if self._reductions is not None:
            set_reductions([(False, split_k) for _, split_k in self._reductions])
        silence(self._outer)
        covered = [differences.device_type for differences in region.per_device if differences.autocast]
        self._off = [device_type for device_type in covered if torch.is_autocast_enabled(device_type)]
        for device_type in self._off:
            torch.set_autocast_enabled(device_type, False)
        if region.table is None:
            return False
        self._mode = PolicyMode(region.table, WeightCasts(keeps=False), recomputing=True)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return True

    def __exit__(self, *exception: Any) -> None:
        if self._mode is not None and self._mode in function_modes():
            self._mode.__exit__(*exception)  # type: ignore[no-untyped-call]
        for device_type in self._off:
            torch.set_autocast_enabled(device_type, True)
        unsilence(self._outer)
        if self._reductions is not None:
            set_reductions(self._reductions)
        self.is_over = True


@contextlib.contextmanager
def _active(region: Region) -> Iterator[None]:
    """Run what a region is made of; a generator, since torch.compile can follow one across enter and exit."""
    flags, native = accumulation(region.policy, region.per_device), _native(region.per_device)
    # Without differences the regions around are silenced all the same.
    mode = acting(region.per_device) if region.has_differences else shadowed()
    with flags, _caching(region.caches), native, mode:
        yield


@contextlib.contextmanager
def _backward(region: Region) -> Iterator[bool]:
    """Run what a backward pass runs in; whether it has a mode, which keeps no casts: the pass may be long."""
    per_device = region.per_device
    autocasts = [differences.device_type for differences in per_device if differences.autocast]
    with accumulation(region.policy, per_device), shadowed(), without_autocast(autocasts):
        if region.has_differences:
            with PolicyMode(ModeTable.of(per_device), WeightCasts(keeps=False), recomputing=True):
                yield True
        else:
            yield False


@contextlib.contextmanager
def _caching(caches: bool | None) -> Iterator[None]:
    """Switch torch's cache of weight casts on or off; a graph keeps none either way."""
    if caches is None or torch.compiler.is_compiling():
        yield
        return
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(caches)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _native(per_device: tuple[Differences, ...]) -> Iterator[None]:
    """Enter torch's own autocast for each device."""
    with per_device[0].native():
        if len(per_device) == 1:
            yield
        else:
            with _native(per_device[1:]):
                yield


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Return the contexts in which an activation checkpoint runs first and is recomputed.

    ``torch.utils.checkpoint`` restores torch's autocast around what it runs again, and knows nothing of a policy's
    differences. What modules of a prepared model run is recomputed under them by itself, with reentry and without;
    functions outside any module are under :meth:`MixedPrecision.backward`. This is the ``context_fn`` for such a
    function's checkpoint where a bare ``loss.backward()`` starts the pass. Without it a checkpoint without reentry
    recomputes other dtypes, which torch refuses, or the same dtypes in torch's own precision, which nothing can
    notice; one with reentry takes no contexts.

    Returns:
        A context that does nothing, for the first run, and one that brings the current region's differences back, as
        often as it is entered.

    Example:
        >>> import mezzo, torch
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> with mezzo.autocast("O1,dtype=bfloat16,emulate=true"):
        ...     y = checkpoint(torch.exp, x, use_reentrant=False, context_fn=mezzo.checkpoint_contexts)
        >>> y.sum().backward()
        >>> x.grad.dtype
        torch.float32
    """
    modes = acting_modes()
    if not modes:
        return contextlib.nullcontext(), contextlib.nullcontext()
    return contextlib.nullcontext(), _Again(list(modes[-1].per_device.values()))


class _Again(contextlib.AbstractContextManager[None]):
    """The differences of a region, in the place of those that are active; may be entered often."""

    def __init__(self, per_device: list[Differences]) -> None:
        self._per_device = per_device
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        active = acting(self._per_device)
        active.__enter__()
        self._entered.append(active)

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


def emulates_here(device_type: str) -> Literal["auto"] | bool:
    """Return the ``emulate`` with which a policy emulates what the innermost active region does on a device."""
    modes = [mode for mode in acting_modes() if device_type in mode.per_device]
    families = modes[-1].per_device[device_type].emulated if modes else frozenset()
    # Some of them and not all is what the device's own answer comes to.
    return "auto" if 0 < len(families) < len(FAMILIES) else len(families) > 0


#: A memo of what regions resolve to; torch.compile can guard what it finds in a global, and by a text.
_RESOLVED: Final[dict[str, Region]] = {}


@constant_in_graphs  # a region entered inside a compiled function is resolved while that is traced
def _resolve(policy: PolicyLike, device_type: str | None) -> str:
    value = Policy.of(policy)
    device_types = (device_type,) if device_type else default_device_types()
    per_device = tuple(find_differences(value, name) for name in device_types)
    keys = " + ".join(differences.key for differences in per_device)
    key = f"{value} {[rule.reason for rule in value.rules]} as {keys}"
    _RESOLVED.setdefault(key, Region(policy=value, per_device=per_device))
    return key
