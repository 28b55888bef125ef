"""Hooks of models, tensors and optimizers: mezzo's own, and the tables in which torch keeps them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import attrgetter
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo.releases import PRIVATE, private, require

_OF_TENSORS: Final = tuple(name for name in PRIVATE["hooks.py"] if name.startswith("torch.Tensor."))
_OF_MODULES: Final = tuple(name for name in PRIVATE["hooks.py"] if name.startswith("torch.nn.Module."))
_OF_OPTIMIZERS: Final = tuple(name for name in PRIVATE["hooks.py"] if ".Optimizer." in name)
_OF_STEPS: Final = tuple(name for name in _OF_OPTIMIZERS if "step_pre" in name)
_HOOKS: Final = attrgetter("_backward_hooks")
_HOOKS_AFTER: Final = attrgetter("_post_accumulate_grad_hooks")
_ADDING: Final = threading.Lock()
_OF_EVERY_STEP: Final = private("torch.optim.optimizer._global_optimizer_pre_hooks")
#: Those of them that only look: see :func:`before_every_step`.
_LOOKS: Final[list[Callable[..., Any]]] = []


class OwnHook:
    """A hook of a module or a tensor; in a copy of these it does nothing.

    Args:
        call: What it calls.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call it, if it is here."""
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> Any:
        return OwnHook, ()


def owner_of(hook: Any) -> Any:
    """Return whose method a hook is; one that is no method belongs to itself."""
    hook = getattr(hook, "hook", hook)  # as modules wrap those on loading
    return getattr(hook, "__self__", hook)


def is_ours(hook: Any) -> bool:
    """Whether this package has put a hook where it is."""
    return type(owner_of(hook)).__module__.partition(".")[0] == __name__.partition(".")[0]


# torch's own tables of hooks, which are in the order in which they run ---------------------------------------


def with_gradient_hooks(leaves: Iterable[Any]) -> list[Any]:
    """Return the leaves that have hooks, which run with the gradient or once it is accumulated."""
    require(*_OF_TENSORS)
    return [leaf for leaf in leaves if leaf._backward_hooks or leaf._post_accumulate_grad_hooks]


def with_tensor_hooks(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves that have hooks which run with the gradient, before it is accumulated: 0.05 µs a leaf."""
    require(*_OF_TENSORS)
    return list(compress(leaves, map(_HOOKS, leaves)))


def with_accumulation_hooks(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves that have hooks which run once a gradient is accumulated, as optimizers in the pass do."""
    require(*_OF_TENSORS)
    return list(compress(leaves, map(_HOOKS_AFTER, leaves)))


def with_backward_hooks(model: nn.Module) -> list[str]:
    """Return the names of a model's modules that have hooks which run with gradients of inputs or outputs."""
    require(*_OF_MODULES)
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]


@contextmanager
def without_accumulation_hooks(leaves: Iterable[Any]) -> Iterator[None]:
    """Silence inside the block the hooks that run once a gradient is accumulated, as optimizers in the pass do."""
    require(*_OF_TENSORS)
    silenced = [(leaf, leaf._post_accumulate_grad_hooks) for leaf in leaves if leaf._post_accumulate_grad_hooks]
    try:
        for leaf, _ in silenced:
            leaf._post_accumulate_grad_hooks = {}  # None would leave the hooks where they run
        yield
    finally:
        for leaf, hooks in silenced:
            leaf._post_accumulate_grad_hooks = hooks


def complete(optimizer: Optimizer) -> None:
    """Add to an optimizer the tables of hooks that it lacks, as torch does for one that it unpickles.

    A class that wraps another optimizer may have called no ``super().__init__``; its steps then run hooks as well.
    """
    require(*_OF_OPTIMIZERS)
    if not all(hasattr(optimizer, name.rpartition(".")[2]) for name in _OF_OPTIMIZERS):
        Optimizer.__setstate__(optimizer, {"defaults": getattr(optimizer, "defaults", {})})


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """Return the hooks that run before an optimizer's step."""
    require(*_OF_STEPS)
    return [*optimizer._optimizer_step_pre_hooks.values()]


def before_every_step(look: Callable[..., Any]) -> None:
    """Call a function with each optimizer that is about to step, from now on; the function may raise.

    It is registered once and never removed: torch iterates over this table while other threads step, and raises where
    it has changed. The function changes no value, and nothing that mezzo's optimizers have made ready.
    """
    with _ADDING:
        if look not in _LOOKS:
            _LOOKS.append(look)
            register_optimizer_step_pre_hook(look)


def has_hooks_of_every_step() -> bool:
    """Whether a program has hooks that run before each step of any optimizer."""
    return not all(map(_LOOKS.__contains__, _OF_EVERY_STEP.values()))


def hooks_of_every_step() -> list[Any]:
    """Return the hooks that run before each step of any optimizer."""
    return [*_OF_EVERY_STEP.values()]


def saving_hooks(optimizer: Optimizer) -> tuple[Iterable[Any], Iterable[Any]]:
    """Return the hooks that run before and after an optimizer's ``state_dict``."""
    require(*_OF_OPTIMIZERS)
    before, after = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    return before.values(), after.values()


def loading_hooks(optimizer: Optimizer) -> tuple[Iterable[Any], Iterable[Any]]:
    """Return the hooks that run before and after an optimizer's ``load_state_dict``."""
    require(*_OF_OPTIMIZERS)
    before, after = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    return before.values(), after.values()
