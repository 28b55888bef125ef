"""Calls of models from outside, each in its policy's region."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.backward import runs_backward
from mezzo.cast import autocast
from mezzo.cast.model.boundaries import Within
from mezzo.cast.model.outputs import GivesOut, given_out
from mezzo.compiling import compiled_inside, forget_compiled, is_exporting, never_compiled
from mezzo.errors import MezzoError
from mezzo.hooks import owner_of
from mezzo.patches import patch
from mezzo.policy import Policy
from mezzo.tensors import tensors

K = TypeVar("K")  # Python 3.11 has no `def f[K]`

#: Where a thread is: in a call of a module, or of a method, in the region; in a method that is no call of the model.
_FORWARD, _METHOD, _APART = "forward", "method", "apart"


class _Thread(threading.local):
    """Where this thread is: one of the words above, or ``None``."""

    inside: str | None = None


class Calls:
    """Run calls of models, and of their parts that are called by themselves, in a region, until :meth:`close`.

    A method other than ``forward`` is a call of the model where gradients are recorded, and one of its arguments is a
    tensor that is none of the models' own: ``model.loss(x)`` is, ``model.project()`` and ``predict(x)`` under
    ``no_grad`` are not, but modules that these call are. A call inside of another call is part of it. The outer call
    returns FP32, or the policy's ``output_dtype``; parameters that a method returns stay as they are. A checkpoint
    recomputes a part after the call around it has ended: then a part enters a region if its last call in a forward pass
    did.

    Args:
        models: The models.
        policy: Their policy.
        region: Returns its region.
        is_apart: Whether calls are none of the models' now: an optimizer's that steps.
        methods: Whether methods other than ``forward`` may be calls of the model.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        policy: Policy,
        region: Callable[[], autocast],
        *,
        is_apart: Callable[[], bool] = lambda: False,
        methods: bool = True,
    ) -> None:
        self._region, self._is_apart = region, is_apart
        self._finds: list[Callable[[], None]] = []  # what the policy's hooks are to each method
        self._set(policy)
        self._here, self._is_over = _Thread(), False
        self._plain = set[Callable[..., Any]]()  # methods whose last call in a forward pass has entered no region
        self._own: list[Mapping[str, Tensor | None]] = []  # parameters and buffers, as the modules have them
        self._unhooked: list[tuple[Within, nn.Module]] = []  # whose hooks, by which modules enter the region, are off
        self._undo = ExitStack()
        self._undo.callback(self._hook_again)
        self._undo.callback(self._forget_compiled)
        for model in models:
            root = model.module if isinstance(model, DistributedDataParallel) else model
            for module in root.modules():
                self._own += module._parameters, module._buffers
                if isinstance(module, nn.ModuleList | nn.ModuleDict):
                    continue  # which is no function
                for name in methods_of(type(module)) if methods else ["forward"]:
                    call = self._replacement(getattr(module, name), module, is_root=module is root, name=name)
                    self._undo.callback(patch(module, name, types.MethodType(call, module)))
        self._forget_compiled()

    def _set(self, policy: Policy) -> None:
        self._gives_out = policy.output_dtype or torch.float32
        self._autocasts = policy.casts

    def change(self, policy: Policy) -> None:
        """Run calls as another policy says, once it is carried out on the models; methods stay bound as they are."""
        self._set(policy)
        self._hook_again()
        for look in self._finds:
            look()

    def _hook_again(self) -> None:
        for region_hook, module in self._unhooked:
            region_hook.hook(module)
        self._unhooked.clear()

    def _forget_compiled(self) -> None:
        if self._unhooked:
            forget_compiled()

    def _replacement(
        self, plain: Callable[..., Any], module: nn.Module, *, is_root: bool, name: str
    ) -> Callable[..., Any]:
        is_call = _always if name == "forward" else self._has_outside_tensor
        region_hook: Within | None = None
        output_hook: GivesOut | None = None
        unhooked: Within | None = None
        here = self._here

        def look() -> None:
            nonlocal region_hook, output_hook, unhooked
            region_hook = _owner(module._forward_pre_hooks, Within)
            output_hook = _owner(module._forward_hooks, GivesOut)
            unhooked = region_hook if name == "forward" and region_hook is not None and not region_hook.is_own else None
            if unhooked is not None:
                unhooked.unhook()  # a call enters the region once, here
                self._unhooked.append((unhooked, module))

        look()
        self._finds.append(look)

        def root(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return self._call(plain, args, kwargs, is_call, None, output_hook, unhooked, module)
            if is_exporting() or not is_call(args, kwargs):
                return plain(*args, **kwargs)
            # Where the graph breaks, Python calls the parts: torch 2.13 does not resume inside a `try`.
            here.inside = _FORWARD
            try:
                with self._region():
                    output = plain(*args, **kwargs)
            finally:
                here.inside = None
            return output if self._gives_out is None else given_out(output, self._gives_out)

        @compiled_inside
        def part(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                if is_exporting() or not self._autocasts:
                    return plain(*args, **kwargs)
                is_on = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
                if is_on and (unhooked is None or unhooked.is_idle()):
                    return plain(*args, **kwargs)
                _leave_graph()  # called from outside, or where the model has autocast switched off: Python knows
            elif here.inside is _FORWARD and plain in self._plain:  # as nearly all calls are
                if unhooked is None:
                    return plain(*args, **kwargs)
                if module._forward_pre_hooks or module._forward_hooks:
                    unhooked.hook(module)  # to run before its other hooks, which a checkpoint recomputes too
                try:
                    return plain(*args, **kwargs)
                except MezzoError as error:
                    unhooked.add_place(error)
                    raise
            return self._call(plain, args, kwargs, is_call, region_hook, output_hook, unhooked, module)

        call = functools.wraps(getattr(plain, "__func__", plain))(root if is_root else part)
        call.is_of_mezzo = True  # type: ignore[attr-defined]
        return call

    @compiled_inside
    def _call(
        self,
        plain: Callable[..., Any],
        args: Any,
        kwargs: Any,
        is_call: Callable[[Any, Any], bool],
        region_hook: Within | None,
        output_hook: GivesOut | None,
        unhooked: Within | None,
        module: nn.Module,
    ) -> Any:
        """Call a method: in the region where it is a call of the model, a part that has rules in its own region."""
        inside, is_forward = self._here.inside, is_call is _always
        if inside is _FORWARD or self._is_over or is_exporting():
            if not runs_backward():
                self._plain.add(plain)
            return plain(*args, **kwargs)
        enters = self._enters(plain, args, kwargs, is_call, inside)
        if not enters and (is_forward or inside is not None):
            return plain(*args, **kwargs) if unhooked is None else unhooked.run(plain, module, args, kwargs)
        self._here.inside = (_FORWARD if is_forward else _METHOD) if enters else _APART
        try:
            if not enters:
                return plain(*args, **kwargs)
            with self._region(), _rules_of(region_hook):
                output = plain(*args, **kwargs)
        except MezzoError as error:
            if unhooked is not None:
                unhooked.add_place(error)
            raise
        finally:
            self._here.inside = inside
        if type(output) is not Tensor and any(isinstance(part, nn.Parameter) for part in tensors(output)):
            return output
        return given_out(output, self._gives_out) if output_hook is None else output_hook.widen(output)

    def _enters(
        self,
        plain: Callable[..., Any],
        args: Any,
        kwargs: Any,
        is_call: Callable[[Any, Any], bool],
        inside: str | None,
    ) -> bool:
        """Whether a call enters the region: it is a call of the model, or recomputes one, and no part of another."""
        if runs_backward():
            return inside is not _METHOD and plain not in self._plain
        # Parts that a method calls without gradients are calls, whose numbers it may return: `self.net(x).numpy()`.
        is_part = inside is not None and (is_call is not _always or (inside is _METHOD and torch.is_grad_enabled()))
        enters = not is_part and not self._is_apart() and is_call(args, kwargs)
        (self._plain.discard if enters else self._plain.add)(plain)
        return enters

    def _has_outside_tensor(self, args: Any, kwargs: Any) -> bool:
        """Whether gradients are recorded, and an argument is a tensor that is none of the models' own, nor a view."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return torch.is_grad_enabled() and any(
                not isinstance(argument, nn.Parameter) for argument in tensors((args, kwargs))
            )
        arguments = [argument if argument._base is None else argument._base for argument in tensors((args, kwargs))]
        ids_of_model = {id(tensor) for table in self._own for tensor in table.values()} if arguments else ()
        return any(id(tensor) not in ids_of_model for tensor in arguments)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run calls inside the block as parts of an outer call that is none of the models'."""
        before, self._here.inside = self._here.inside, _FORWARD
        try:
            yield
        finally:
            self._here.inside = before

    def close(self) -> None:
        """Restore the methods. A wrapper that a program still holds calls the original."""
        self._is_over = True
        self._undo.close()


def _always(_args: Any, _kwargs: Any) -> bool:
    """``forward`` is a call of the model, whatever it is given."""
    return True


def _owner(hooks: Mapping[int, Any], hook_class: type[K]) -> K | None:
    """Return the object of a class that has registered one of these hooks, if there is one."""
    return next((owner for owner in map(owner_of, hooks.values()) if isinstance(owner, hook_class)), None)


def _rules_of(part: Within | None) -> AbstractContextManager[Any]:
    """Return the region of a part that has rules, made for the region around it."""
    return autocast.of(part.region.now()) if part is not None and part.path else nullcontext()


@never_compiled
def _leave_graph() -> None:
    """Break the graph, so that the call that is traced runs in Python."""


def methods_of(cls: type) -> tuple[str, ...]:
    """Return the methods of a module's class by which a model may be called.

    They are the public ones that are none of ``nn.Module``'s, nor without gradients; ``forward`` of a class of torch's.
    """
    if cls.__module__.startswith("torch."):
        return ("forward",)
    methods: dict[str, Any] = {}
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            methods.setdefault(name, value)
    return tuple(
        name
        for name, value in methods.items()
        if isinstance(value, types.FunctionType)
        and not name.startswith("_")
        and (name == "forward" or not hasattr(nn.Module, name))
        and not inspect.isgeneratorfunction(value)
        and not inspect.iscoroutinefunction(value)
        and not (name != "forward" and _is_without_gradients(value))
    )


def _is_without_gradients(function: Any) -> bool:
    """Whether ``torch.no_grad()``, or what else switches gradients off, decorates a function."""
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():  # in which torch keeps the constructor of the context
            with suppress(ValueError):  # an empty cell
                switch = getattr(cell.cell_contents, "__self__", None)
                if isinstance(switch, torch.no_grad) or getattr(switch, "mode", None) is _OFF.get(type(switch), switch):
                    return True
        function = getattr(function, "__wrapped__", None)
    return False


#: The ``mode`` in which torch's other contexts switch gradients off.
_OFF: Final = {torch.inference_mode: True, torch.set_grad_enabled: False}
