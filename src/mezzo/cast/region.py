"""The autocast region: ``torch.autocast`` plus the policy's differences from it.

``torch.autocast`` does the ordinary casting. Where the policy wants something else on this device (the
portable lists on a CPU, a user's rule, emulated arithmetic), a ``TorchFunctionMode`` handles just those
functions; with no difference there is no mode, and no Python runs per op.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator
from typing import Any, Final, cast

import torch
from torch import Tensor

from mezzo.cast.accumulation import accumulation
from mezzo.cast.device import default_kinds
from mezzo.cast.differences import Differences, Handler, find_differences, open_function
from mezzo.cast.emulate import without_autocast
from mezzo.cast.mode import OPENED_BACKWARD, PolicyMode, acting_modes
from mezzo.cast.recompute import Again, shadowed
from mezzo.cast.weight_casts import WeightCasts
from mezzo.policy import Policy, Treatment
from mezzo.policy.ops import functions

__all__ = [
    "Region", "acting_keys", "autocast", "checkpoint_contexts", "emulates_here", "holds_inside",
]  # fmt: skip

#: As :data:`OPENED_BACKWARD`, for ``torch.autograd.grad``.
_OPENED_GRAD: Final = open_function(cast(types.FunctionType, torch.autograd.grad))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """All that a region is.

    Attributes:
        policy: The policy that is carried out.
        per_device: What it changes on each device that is covered.
        casts: Where weight casts are kept; those of the region around it, or its own for as long as it is entered,
            where there is none.
        on_entry: What is called whenever the region is entered.
        on_error: What is called with an exception that leaves the region; it may raise another one.
        holds_inside: Whether it holds inside prepared models as well, whose boundaries then neither cast nor enter
            regions of their own: the weights are the model's, and what is computed is this region's.
        caches: Whether torch's own autocast keeps casts of weights; as it is set around the region where it is None.
    """

    policy: Policy
    per_device: tuple[Differences, ...]
    casts: WeightCasts | None = None
    on_entry: Callable[[], object] | None = None
    on_error: Callable[[BaseException], object] | None = None
    holds_inside: bool = False
    caches: bool | None = None

    @classmethod
    def inside(
        cls,
        policy: Policy,
        module: str,
        pinned: Mapping[int, Treatment],
        device_types: tuple[str, ...],
        casts: WeightCasts | None = None,
    ) -> Region:
        """Make the region of one module of a prepared model.

        Args:
            policy: The model's policy.
            module: Path of the module, for rules that name one.
            pinned: Treatment of every op that reads a parameter, by the parameter's ``id``.
            device_types: The devices to cover.
            casts: Where weight casts are kept.
        """
        found = tuple([find_differences(policy, kind, module, tuple(pinned.items())) for kind in device_types])
        return cls(policy=policy, per_device=found, casts=casts)

    def with_wide_norm(self) -> Region:
        """Return this region with batch norm's weights widened to the FP32 of its statistics, for the call only."""
        handler = Handler(op="batch_norm", treatment="native", wide_weights=True)
        wide = dict.fromkeys((*functions("batch_norm"), *functions("instance_norm")), handler)
        per_device = tuple(
            dataclasses.replace(each, handlers={**each.handlers, **wide}, key=f"{each.key}, wide norms")
            for each in self.per_device
        )
        return dataclasses.replace(self, per_device=per_device)

    @property
    def device_types(self) -> tuple[str, ...]:
        """The devices that are covered."""
        return tuple(each.device_type for each in self.per_device)

    @property
    def emulated(self) -> bool:
        """Whether GEMMs and convolutions compute in FP32 from rounded operands on any of the devices."""
        return any(each.emulated for each in self.per_device)

    @property
    def keys(self) -> tuple[str, ...]:
        """What :func:`acting_keys` is inside the region."""
        return tuple(each.key for each in self.per_device)

    @property
    def has_differences(self) -> bool:
        """Whether entering the region changes anything but ``torch.autocast``'s own state."""
        return any(each.handlers or each.pinned for each in self.per_device)


class autocast(ContextDecorator):  # noqa: N801 - the name torch.autocast has
    """Run ops in the precision that a policy says.

    A context manager and a decorator; re-entrant. A region inside another replaces it until it ends.

    Args:
        policy: A policy, its text, or the path of a policy file.
        device_type: The device to cover; when omitted the current accelerator, and where there is none the CPU. What
            the region does to a model's own devices is known to :func:`mezzo.prepare` and :class:`MixedPrecision`.

    Raises:
        PolicyError: The policy's text or file is wrong.
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

    def __init__(self, policy: Policy | str | os.PathLike[str], device_type: str | None = None) -> None:
        if isinstance(policy, Policy) and torch.compiler.is_compiling():
            # Which Dynamo reads field by field, and so guards: an equal policy compiles nothing. Numbers, which only
            # the loss scale has, would be symbols in a second graph, and no text.
            policy = policy.region_text()
        self.region: Region = _RESOLVED[_resolve(policy, device_type)]
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    @classmethod
    def of(cls, region: Region) -> autocast:
        """Return what enters a region."""
        made = cls.__new__(cls)
        made.region, made._entered = region, []
        return made

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
        """Whether GEMMs and convolutions compute in FP32 from rounded operands on any of the devices."""
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
        with _backward(self.region) as differs:
            if differs:
                OPENED_BACKWARD(tensor, **kwargs)
            else:
                torch.autograd.backward(tensor, **kwargs)

    def run_grad(self, outputs: Tensor, inputs: list[Tensor], **kwargs: Any) -> tuple[Tensor, ...]:
        """Run ``torch.autograd.grad`` as :meth:`run_backward` runs a backward pass.

        Args:
            outputs: What to differentiate.
            inputs: By what.
            **kwargs: As ``torch.autograd.grad`` takes them.
        """
        with _backward(self.region) as differs:
            found: tuple[Tensor, ...] = (_OPENED_GRAD if differs else torch.autograd.grad)(outputs, inputs, **kwargs)
            return found

    def __enter__(self) -> autocast:
        active = _active(self.region)
        active.__enter__()
        self._entered.append(active)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)
        if self.region.on_error is not None and exception[1] is not None:
            self.region.on_error(exception[1])

    def _recreate_cm(self) -> autocast:
        """Give each call of a decorated function a region of its own, so that threads do not share one."""
        return autocast.of(self.region)


@contextlib.contextmanager
def _active(region: Region) -> Iterator[None]:
    """Run what a region is made of; a generator, since torch.compile can follow one across enter and exit."""
    if region.on_entry is not None:
        region.on_entry()
    flags, native = accumulation(region.policy, region.per_device), _native(region.per_device)
    with flags, _caching(region.caches), native, shadowed() as around:
        if not region.has_differences:
            yield
            return
        casts = region.casts
        if casts is None:
            casts = around[-1].casts if around else WeightCasts()
        with casts.region(), PolicyMode(region.per_device, casts, holds_inside=region.holds_inside):
            yield


@contextlib.contextmanager
def _backward(region: Region) -> Iterator[bool]:
    """Run what a backward pass runs in; whether it has a mode, which goes on with the casts of the forward pass."""
    own = region.per_device
    autocasts = [each.device_type for each in own if each.autocast]
    with accumulation(region.policy, own), shadowed(), without_autocast(autocasts):
        if not region.has_differences:
            yield False
            return
        casts = WeightCasts() if region.casts is None else region.casts
        with casts.region(continues=True), PolicyMode(own, casts, recomputing=True):
            yield True


@contextlib.contextmanager
def _caching(caches: bool | None) -> Iterator[None]:
    """Let torch's autocast keep casts of weights, or not; a graph keeps none whatever it is told."""
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

    What ``torch.utils.checkpoint`` runs inside a region is recomputed under the region's differences by itself, with
    reentry and without, whatever starts the backward pass. This is the ``context_fn`` to pass where that cannot be:
    to another library's checkpoints, and to torch's own where a warning in the log says that this version of torch
    keeps them in another way. Reentrant checkpoints of another library take no contexts, and under a bare
    ``loss.backward()`` they are recomputed without the differences, which nothing here can notice; they are served by
    ``MixedPrecision.backward`` and inside the modules of a prepared O2 or O3 model.

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
    return contextlib.nullcontext(), Again(modes[-1])


def acting_keys() -> tuple[str, ...]:
    """Return what names the differences of the innermost active region, the same for regions that do the same."""
    modes = acting_modes()
    return modes[-1].keys if modes else ()


def holds_inside() -> bool:
    """Whether the innermost active region holds inside prepared models too."""
    modes = acting_modes()
    return len(modes) > 0 and modes[-1].holds_inside  # torch 2.11 traces no bool(list)


def emulates_here(device_type: str) -> bool:
    """Whether the innermost active region emulates arithmetic on a device."""
    modes = [mode for mode in acting_modes() if device_type in mode.per_device]
    return len(modes) > 0 and modes[-1].per_device[device_type].emulated


#: A memo of what regions resolve to; torch.compile can guard what it finds in a global, and by a text.
_RESOLVED: Final[dict[str, Region]] = {}


def _resolve(policy: Policy | str | os.PathLike[str], device_type: str | None) -> str:
    value = Policy.of(policy)
    kinds = (device_type,) if device_type else default_kinds()
    found = tuple(find_differences(value, kind) for kind in kinds)
    key = f"{value} {[rule.reason for rule in value.rules]} as {' + '.join(each.key for each in found)}"
    _RESOLVED.setdefault(key, Region(policy=value, per_device=found))
    return key


# What torch._dynamo.assume_constant_result sets, without a second of imports: a region entered inside a compiled
# function is resolved while it is traced.
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]
