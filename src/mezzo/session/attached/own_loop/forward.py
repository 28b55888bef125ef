"""A region around the outermost forward pass of models: what ``with amp.autocast():`` is in a loop that has none."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.cast.nested import cast_floating

__all__ = ["CalledIn"]

#: Returns what gives the FP32 value of a tensor that is stored in another dtype.
Exact: TypeAlias = Callable[[], Callable[[Tensor], Tensor | None]]

#: What is bound on a model.
_BOUND: Final = ("forward", "__deepcopy__")
#: Where modules keep hooks of all kinds.
_HOOKS: Final = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
#: And what else they keep of some of these, by the same keys.
_BESIDE: Final = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class CalledIn:
    """Have models run in a region whenever they are called from outside all of them.

    Their ``forward`` is bound on the instance, so that an exception of any kind leaves the region, and
    ``torch.compile`` finds the region inside what it traces. Copies of the models are plain FP32 models.

    Args:
        models: The models; of one in ``DistributedDataParallel``, what is wrapped.
        region: Returns the region for one call.
        output_dtype: What floating outputs are cast to; ``None`` leaves them.
        exact: Returns what gives the FP32 value of a parameter or buffer that is stored in another dtype, for copies.
    """

    def __init__(
        self,
        models: list[nn.Module],
        region: Callable[[], AbstractContextManager[Any]],
        output_dtype: torch.dtype | None,
        exact: Exact,
    ) -> None:
        self._region, self._output_dtype = region, output_dtype
        self._here = threading.local()
        self._models = list(dict.fromkeys(map(_wrapped, models)))  # one may be listed twice, or with its wrapper
        self._before: list[dict[str, Any]] = []
        for model in self._models:
            names = vars(model)
            self._before.append({name: names[name] for name in _BOUND if name in names})
            names["forward"] = types.MethodType(self._around(model), model)
            names["__deepcopy__"] = _Copying(model, exact)

    def leave(self) -> None:
        """Give the models their own ``forward`` back."""
        for model, before in zip(self._models, self._before, strict=True):
            for name in _BOUND:
                vars(model).pop(name, None)
            vars(model).update(before)
        self._models, self._before = [], []

    def _around(self, model: nn.Module) -> Callable[..., Any]:
        plain, here, region, dtype = model.forward, self._here, self._region, self._output_dtype

        @functools.wraps(getattr(plain, "__func__", plain))
        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                with region():
                    output = plain(*args, **kwargs)
                return output if dtype is None else cast_floating(output, dtype)
            if getattr(here, "inside", False):
                return plain(*args, **kwargs)
            here.inside = True
            try:
                with region():
                    modes, nesting = torch._C._len_torch_function_stack(), _nesting()
                    try:
                        output = plain(*args, **kwargs)
                    except Exception:
                        raise
                    except BaseException:
                        _unwind(modes, nesting)
                        raise
            except Exception:
                raise
            except BaseException:
                _leave_boundaries(self, args)
                raise
            finally:
                here.inside = False
            return output if dtype is None else cast_floating(output, dtype)

        return forward


def _nesting() -> int:
    """Return how many regions of torch's are entered."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _unwind(modes: int, nesting: int) -> None:
    """Leave what modules inside have entered: torch calls no hook of theirs when Ctrl-C ends a forward pass."""
    while torch._C._len_torch_function_stack() > modes:
        torch._C._pop_torch_function_stack()
    while _nesting() > nesting:
        torch.autocast_decrement_nesting()


def _leave_boundaries(model: nn.Module, args: Any) -> None:
    """Call the hooks of ours that leave what a model has entered, in the order in which they would have been called."""
    for key, hook in model._forward_hooks.items():
        if key in model._forward_hooks_always_called and _is_ours(hook):
            hook(model, args, None)


class _Copying:
    """What ``copy.deepcopy`` asks a model for; of an unpickled one it copies what is there.

    Args:
        model: The model.
        exact: See :class:`CalledIn`.
    """

    def __init__(self, model: nn.Module, exact: Exact | None = None) -> None:
        self._model, self._exact = model, exact

    def __reduce__(self) -> Any:
        return _Copying, (self._model,)

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a plain copy."""
        names: dict[str, Any] = vars(self._model)
        ours: dict[str, Any] = {name: names.pop(name) for name in _BOUND if name in names}
        try:
            if self._exact is not None:
                _remember(self._model, memo, self._exact())
            return copy.deepcopy(self._model, memo)
        finally:
            names.update(ours)


def _remember(model: nn.Module, memo: dict[int, Any], exact: Callable[[Tensor], Tensor | None]) -> None:
    """Write into the memo of a copy what stands there for hooks of ours, and for values in low precision."""
    for module in model.modules():
        ours = {key for name in _HOOKS for key, hook in vars(module).get(name, {}).items() if _is_ours(hook)}
        for name in (*_HOOKS, *_BESIDE) if ours else ():
            hooks = vars(module).get(name)
            if hooks:
                kept = OrderedDict((key, hook) for key, hook in hooks.items() if key not in ours)
                memo[id(hooks)] = copy.deepcopy(kept, memo)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or id(tensor) in memo or (value := exact(tensor)) is None:
                continue
            value = value.detach().clone()
            is_param = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_param else value


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # as modules wrap those on loading
    owner = getattr(hook, "__self__", hook)
    return type(owner).__module__.partition(".")[0] == "mezzo"


def _wrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
