"""A region around the outermost forward pass of models: what ``with amp.autocast():`` is in a loop that has none."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.cast.model.hooks import is_ours
from mezzo.cast.nested import cast_floating
from mezzo.session.attached.own_loop.copies import Copies, Exact

__all__ = ["CalledIn"]


class CalledIn:
    """Have models run in a region whenever they are called from outside all of them.

    Their ``forward`` is bound on the instance, so that an exception of any kind leaves the region, and
    ``torch.compile`` finds the region inside what it traces. Copies and pickles of the models are plain FP32 models.

    Args:
        models: The models; of one in ``DistributedDataParallel``, what is wrapped.
        region: Returns the region for one call.
        output_dtype: What floating outputs are cast to; ``None`` leaves them.
        exact: Returns what gives the FP32 value of a parameter or buffer that is stored in another dtype, for copies.

    Attributes:
        copies: What copies and pickles of the models are.
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
        self.copies = Copies(models, exact)
        for model in dict.fromkeys(map(_wrapped, models)):  # one may be listed twice, or with its wrapper
            self.copies.bind(model, "forward", types.MethodType(self._around(model), model))

    def leave(self) -> None:
        """Give the models their own ``forward`` back."""
        self.copies.leave()

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
        if key in model._forward_hooks_always_called and is_ours(hook):
            hook(model, args, None)


def _wrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
