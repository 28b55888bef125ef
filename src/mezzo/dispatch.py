"""All that mezzo asks of torch's dispatcher: active modes, what ``torch.func`` wraps, the classes of operators.

The one file that takes private names of modes and of functorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mezzo.releases import missing, private, require

if TYPE_CHECKING:
    from torch._C import DisableTorchFunction as DisableTorchFunction
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    DisableTorchFunction = private("torch._C.DisableTorchFunction")
    DisableTorchFunctionSubclass = private("torch._C.DisableTorchFunctionSubclass")
    HigherOrderOperator = private("torch._ops.HigherOrderOperator")
    OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)
    FakeTensorMode = private("torch._subclasses.fake_tensor.FakeTensorMode")
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")

# Modes ---------------------------------------------------------------------------------------------------

#: How many function modes are active in this thread, and the one at a place, from the outermost on.
num_function_modes: Final[Callable[[], int]] = private("torch._C._len_torch_function_stack")
_FUNCTION_MODE_AT: Final = private("torch._C._get_function_stack_at")
#: The function modes and the dispatch modes that are active in this thread, the innermost last.
function_modes: Final[Callable[[], list[Any]]] = private("torch.overrides._get_current_function_mode_stack")
dispatch_modes: Final[Callable[[], list[Any]]] = private(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
#: A context in which no dispatch mode is asked, such as those under which torch traces.
without_dispatch_modes: Final[Callable[[], AbstractContextManager[Any]]] = private(
    "torch.utils._python_dispatch._disable_current_modes"
)
num_dispatch_modes: Final[Callable[[], int]] = private("torch._C._len_torch_dispatch_stack")
_DISPATCH_MODE: Final = private("torch._C._get_dispatch_mode")
_FAKE: Final = private("torch._C._TorchDispatchModeKey.FAKE")


def innermost_function_mode() -> Any:
    """Return the function mode that is asked first; ``None`` where none is active."""
    depth = num_function_modes()
    return _FUNCTION_MODE_AT(depth - 1) if depth else None


def makes_fake() -> bool:
    """Whether tensors that are made now are fake, without values."""
    require("torch._C._get_dispatch_mode", "torch._C._TorchDispatchModeKey.FAKE")
    return _DISPATCH_MODE(_FAKE) is not None


#: The modes of selective checkpoints, in which a body runs first and is recomputed.
_SELECTIVE: Final = (
    "torch.utils.checkpoint._CachingTorchDispatchMode",
    "torch.utils.checkpoint._CachedTorchDispatchMode",
)
_POP: Final = private("torch.utils._python_dispatch._pop_mode")
_PUSH: Final = private("torch.utils._python_dispatch._push_mode")


@contextmanager
def unseen_by_checkpoints() -> Iterator[None]:
    """Hide the operations inside the block from selective checkpoints; other dispatch modes see them.

    Such a checkpoint counts the operations of its body, and those of the recomputation have to be the same ones.

    **Cost**: less than 1 µs where no dispatch mode is active.
    """
    modes = dispatch_modes() if num_dispatch_modes() else []
    selective = tuple(map(private, _SELECTIVE)) if modes else ()
    outermost = next((index for index, mode in enumerate(modes) if isinstance(mode, selective)), len(modes))
    taken = [_POP() for _ in modes[outermost:]]  # the innermost first
    remaining = [mode for mode in reversed(taken) if not isinstance(mode, selective)]
    for mode in remaining:
        _PUSH(mode)
    try:
        yield
    finally:
        for _ in remaining:
            _POP()
        for mode in reversed(taken):
            _PUSH(mode)


_AT_ENTRY: Final = private("torch._C._RestorePythonTLSSnapshot")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return what ``torch.autocast`` cast to where an operation was called that is being dispatched; ``None`` if off.

    Below the dispatcher torch says that it is off everywhere.
    """
    with _AT_ENTRY():
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def casts_by_itself(device_type: str) -> bool:
    """Whether an operation that is being dispatched is a cast of ``torch.autocast``'s own, and none of the program's.

    Where autocast casts it is off, and yet a region is entered.
    """
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1 and autocast_dtype(device_type) is None


# What is inside of tensors ---------------------------------------------------------------------------------

_INTERPRETER: Final = private("torch._C._functorch.peek_interpreter_stack")
_IS_LEGACY: Final = private("torch._C._functorch.is_legacy_batchedtensor")
_UNWRAPPED: Final = private("torch._C._functorch.get_unwrapped")

#: Whether ``torch.vmap`` has made a tensor, and whether ``torch.func`` has.
is_batched: Final[Callable[[Tensor], bool]] = private("torch._C._functorch.is_batchedtensor")
is_wrapped: Final[Callable[[Tensor], bool]] = private("torch._C._functorch.is_functorch_wrapped_tensor")
#: Whether a tensor is of a class whose tensors hold others.
holds_tensors: Final[Callable[[Tensor], bool]] = private("torch.utils._python_dispatch.is_traceable_wrapper_subclass")


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode AD is at work, which see into no autograd function of Python's."""
    try:
        return _INTERPRETER() is not None or forward_ad._current_level >= 0
    except AttributeError:
        raise missing("torch.autograd.forward_ad._current_level") from None


def is_batch_of_gradients(gradient: Tensor) -> bool:
    """Whether a gradient is one of many that one backward pass computes, by ``torch.vmap`` or ``is_grads_batched``."""
    return is_batched(gradient) or bool(_IS_LEGACY(gradient))


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor of torch's own inside of one that ``torch.func`` has made; any other as it is."""
    while is_wrapped(tensor):
        tensor = _UNWRAPPED(tensor)
    return tensor


# Operators -----------------------------------------------------------------------------------------------

_REGISTERED: Final = private("torch._C._dispatch_get_registrations_for_dispatch_key")

#: Functions of torch's that its own Python calls, and no page names.
INNER_FUNCTIONS: Final = private("torch._C._nn")


def registered(key: str) -> list[str]:
    """Return the names of the operators that have a kernel at a dispatch key, such as ``AutocastCPU``."""
    names: list[str] = _REGISTERED(key)
    return names
