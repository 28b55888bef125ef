"""What a prepared model's modules do when they are called: cast what they take in, run in their policy's region."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from mezzo.backward import runs_backward
from mezzo.cast.casts import any_off, cast_floating
from mezzo.cast.mode import acting_modes, acts_here
from mezzo.cast.model.places import Devices, RuledParams
from mezzo.cast.region import Region, autocast
from mezzo.compiling import compiled_inside_alone, constant_in_graphs, is_exporting, never_compiled
from mezzo.dispatch import DisableTorchFunction, num_function_modes
from mezzo.errors import MezzoError
from mezzo.policy import Policy
from mezzo.tensors import CASTABLE
from mezzo.weights.models import hides_storage


class TakesIn:
    """Cast the floating inputs of a module to the dtype of its weights: a forward pre-hook.

    Args:
        dtype: That dtype.

    **Cost**: where the inputs have it a comparison for each, less than 1 µs.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._others = frozenset(CASTABLE) - {dtype}

    @compiled_inside_alone
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments, cast, or ``None`` where nothing has to be."""
        inputs = (*args, *kwargs.values()) if kwargs else args
        if torch.compiler.is_compiling() or not num_function_modes():
            is_off = any_off(inputs, self._others)
        else:
            with DisableTorchFunction():  # a region's mode is asked for each dtype that is read, too
                is_off = any_off(inputs, self._others)
        return cast_floating((args, kwargs), self.dtype) if is_off else None


class HeldRegion:
    """The region of some prepared models, or of one module: resolved once, and again when what it depends on changed.

    It depends on the devices of the models' tensors, and on the ruled tensors, which ``torch.func.functional_call``
    replaces for one call. Both are compared at each entry: a device for each device type, and the ruled tensors by
    identity.

    Args:
        policy: The models' policy.
        path: The path of the module whose region it is.
        params: The parameters of each model that rules speak about.
        devices: The devices of each model.
    """

    def __init__(self, policy: Policy, path: str, params: Sequence[RuledParams], devices: Sequence[Devices]) -> None:
        self.policy, self.path, self._params, self._devices = policy, path, params, devices
        self._ruled = [ruled for ruled in params if ruled.has_any]
        self._found: tuple[Region, list[torch.device], list[Tensor | None]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_found": None}  # a region is resolved where it is entered, in a copy too

    def now(self) -> Region:
        """Return the region."""
        devices = [device for model in self._devices for device in model.now()]
        standing = [tensor for model in self._ruled for tensor in model.standing()]
        if self._found is not None:
            region, on, ruled = self._found
            if devices == on and len(standing) == len(ruled) and all(map(is_, standing, ruled)):
                return region
        region = self.resolved()
        self._found = region, devices, standing
        return region

    def resolved(self) -> Region:
        """Resolve the region anew."""
        device_types = tuple(dict.fromkeys(device_type for model in self._devices for device_type in model.kinds()))
        return Region.inside(self.policy, self.path, RuledParams.facts_of(self._params), device_types)

    @constant_in_graphs
    def kinds(self) -> tuple[str, ...]:
        """Return the types of devices that the region covers."""
        return self.now().device_types

    @constant_in_graphs
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the region's differences, by which a mode is known to be that of an equal region."""
        return self.now().keys


class Within:
    """A pair of hooks by which a module runs in its policy's region, whatever calls it.

    Where torch recomputes a part of the model for a backward pass, and where a part is called by itself, no region is
    active; then one is entered for the call. An active region stays, unless rules treat the module otherwise than the
    module around it, or treat a module around it so and the part is called by itself.

    A copy and a pickle of a prepared model have no region: it is resolved where one is entered.

    Args:
        policy: The model's policy.
        name: The path of the module itself, for errors.
        path: The path of the module whose region it is.
        params: The parameters that rules speak about.
        devices: The devices that its regions cover.
        is_own: Whether rules treat the module otherwise than what is around it, or it is the model, and rules speak
            about parameters.
        inputs: What floating inputs are cast to where the region is entered.
    """

    _inside = threading.local()  # the regions of modules with rules that this thread is in

    def __init__(
        self,
        policy: Policy,
        name: str,
        path: str,
        params: RuledParams,
        devices: Devices,
        *,
        is_own: bool,
        inputs: torch.dtype | None = None,
    ) -> None:
        self.policy, self.name, self.path, self.params = policy, name, path, params
        self.region = HeldRegion(policy, path, [params], [devices])
        self.is_own, self.inputs = is_own, inputs
        self._place = id(params), path
        # One stack for each thread, since threads may run one model at the same time.
        self._entered: defaultdict[int, list[autocast | None]] = defaultdict(list)
        self._handles: tuple[RemovableHandle, ...] = ()
        self._has_ended = False

    def hook(self, module: nn.Module) -> None:
        """Enter and leave the region with each call of a module, by hooks before its others; never again once ended."""
        if self._has_ended or self._handles:
            return
        before = module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        self._handles = before, module.register_forward_hook(self.exit, always_call=True)

    def begin(self, module: nn.Module) -> None:
        """Hook a module, also once ended."""
        self._has_ended = False
        self.hook(module)

    def unhook(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def end(self) -> None:
        """Remove the hooks for good."""
        self._has_ended = True
        self.unhook()

    def run(self, function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module's own function as with hooks around it."""
        args, kwargs = self.enter(module, args, kwargs) or (args, kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            self.exit(module, args, None)

    @property
    def is_needed(self) -> bool:
        """Whether the region would do anything that is not done without it."""
        rule, outer_rule = (self.policy.module_rule(path) for path in (self.path, self.path.rpartition(".")[0]))
        # Functions in a low part of a module in FP32 are not to be cast to FP32 by the region of that module.
        parts = (
            rule is not None and outer_rule is not None and (rule.treatment, outer_rule.treatment) == ("low", "fp32")
        )
        return self.region.now().has_differences or (self.path != "" and (self.policy.casts or parts))

    @compiled_inside_alone
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Enter the region if it is not there: a forward pre-hook."""
        if not self.is_own and not self._entered and not torch.compiler.is_compiling() and self._is_there():
            return None  # as it is in nearly all calls
        if self.is_idle():
            if self._entered and not torch.compiler.is_compiling():
                self._skip()
            return None
        self._enter_region()
        return None if self.inputs is None else cast_floating((args, kwargs), self.inputs)

    def _is_there(self) -> bool:
        """Whether the region of the module around this one is active."""
        return self._place in getattr(self._inside, "places", ()) if self.path else acts_here()

    def is_idle(self) -> bool:
        """Whether a call of the module enters no region: one is active already, or the program is exported."""
        if is_exporting():
            return True
        modes = acting_modes()
        is_own = self.is_own or (self.path != "" and not torch.compiler.is_compiling() and not self._is_there())
        if not is_own and len(modes) > 0:  # torch 2.11 traces no bool(list)
            return not modes[-1].recomputing or modes[-1].keys == self.region.keys()
        device_types = self.region.kinds()
        if self.policy.casts and not any(torch.is_autocast_enabled(device_type) for device_type in device_types):
            # Outside any region FP32 weights compute in FP32. But in a part that is kept in FP32 autocast is off, too.
            return not is_own or not (getattr(self._inside, "places", ()) or runs_backward())
        # A region with ruled parameters is entered anew: it must know the tensors that replace them in this call.
        return len(modes) > 0 and len(self.params) == 0 and modes[-1].keys == self.region.keys()

    # A region cannot be entered in one compiled frame and left in another: these calls stay in Python.
    # (torch.compiler.disable is the public name, and costs a second of imports where it is only mentioned.)
    @never_compiled
    def _enter_region(self) -> None:
        region = autocast.of(self.region.now())
        region.__enter__()
        self._entered[threading.get_ident()].append(region)
        if self.is_own or self.path:
            self._inside.places = [*getattr(self._inside, "places", ()), self._place]

    def _skip(self) -> None:
        """Record that a call, inside of one that has entered the region, has not entered it."""
        if stack := self._entered.get(threading.get_ident()):
            stack.append(None)

    @compiled_inside_alone
    def exit(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the region, after an exception too: a forward hook."""
        if self._entered:  # not in a graph
            self._leave_region()
        if output is None and not torch.compiler.is_compiling():
            self.add_place(sys.exception())

    def add_place(self, error: BaseException | None) -> None:
        """Add the module's path to an error that was raised in it, if the error has none yet."""
        if isinstance(error, MezzoError) and error.awaits_place:
            error.happened_in(f"module {self.name}" if self.name else "the model's own forward")

    @never_compiled
    def _leave_region(self) -> None:
        thread = threading.get_ident()
        if not (stack := self._entered.get(thread)):
            return
        region = stack.pop()
        if not stack:
            del self._entered[thread]
        if region is not None:
            region.__exit__(None, None, None)
            if self.is_own or self.path:
                self._inside.places.pop()


#: The owners whose dtypes are kept, until they are freed or end it; and the hooks of torch's that serve all of them.
_KEEPING: Final[list[weakref.ref[Any]]] = []
_HOOKS: Final[list[RemovableHandle]] = []
_BEGINNING: Final = threading.Lock()


def keep_dtypes(of: object) -> Callable[[], None]:
    """Keep the dtypes of parameters and buffers that code in a region replaces by new ones.

    ``self.mean = hidden.mean(0)`` and ``layer.weight = nn.Parameter(a @ b)`` are FP32 in a plain program; in a region
    the right-hand side may have 16 bits. Outside of regions the program decides the dtype.

    Torch has these hooks for all modules, and torch.compile guards on them: so there is one pair, which is removed
    with the last owner, and never during a trace.

    Args:
        of: The owner: when it is freed, its dtypes are kept no longer.

    Returns:
        A function that ends it.
    """
    here = weakref.ref(of, _KEEPING.remove)

    def end() -> None:
        with _BEGINNING:
            if here in _KEEPING:
                _KEEPING.remove(here)
            while _HOOKS and not _KEEPING:
                _HOOKS.pop().remove()

    with _BEGINNING:
        _KEEPING.append(here)
        if not _HOOKS:
            _HOOKS.append(register_module_buffer_registration_hook(_keep_buffer))  # type: ignore[arg-type]
            _HOOKS.append(register_module_parameter_registration_hook(_keep_param))
    return end


def _keep_buffer(module: nn.Module, name: str, new: Tensor | None) -> Tensor | None:
    before = module._buffers.get(name)
    return new.to(before.dtype) if _is_other(module, before, new) else None  # type: ignore[union-attr]


def _keep_param(module: nn.Module, name: str, new: nn.Parameter | None) -> None:
    before = module._parameters.get(name)
    if _is_other(module, before, new):
        new.data = new.data.to(before.dtype)  # type: ignore[union-attr]  # in place: the program has it, too


def _is_other(module: nn.Module, before: Tensor | None, new: Tensor | None) -> bool:
    """Whether code of a region puts a tensor of another floating dtype in the place of one of a prepared model's."""
    if before is None or new is None or before.dtype == new.dtype or not {before.dtype, new.dtype} <= {*CASTABLE}:
        return False
    return torch.is_autocast_enabled(new.device.type) and hides_storage(module)
